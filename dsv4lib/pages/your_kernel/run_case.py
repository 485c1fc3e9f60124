"""Run a reader's kernel in the emulator: CuTeDSL, PTX text, or CUDA C++ where NVRTC is. For notebook and stage."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib import emulator, nvrtc
from dsv4lib.emulator.checks import Hazard, errors
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.microscope.columns import decode
from dsv4lib.emulator.microscope.stream import stream
from dsv4lib.emulator.sanitize.findings import Finding, group
from dsv4lib.emulator.trace.trace import Trace
from dsv4lib.errors import BackendUnavailable

THREADS = 128

# y = 2 x for 512 bytes: one thread starts a bulk copy to shared memory, all wait on its mbarrier.
TWICE = """
.version 8.6
.target sm_90
.address_size 64
.visible .entry twice(.param .u64 x, .param .u64 y) .reqntid 128
{
  .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .f32 %f<4>; .reg .pred %p<4>;
  .shared .align 128 .b8 tile[512];
  .shared .align 8 .b64 full;
  ld.param.u64 %rd1, [x];
  ld.param.u64 %rd2, [y];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, tile;
  mov.u32 %r3, full;
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra READY;
  mbarrier.init.shared::cta.b64 [%r3], 1;
  fence.proxy.async.shared::cta;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r3], 512;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 512, [%r3];
READY:
  bar.sync 0;
AGAIN:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
  @!%p2 bra AGAIN;
  shl.b32 %r4, %r1, 2;
  add.s32 %r5, %r2, %r4;
  ld.shared.f32 %f1, [%r5];
  add.f32 %f2, %f1, %f1;
  cvt.u64.u32 %rd3, %r4;
  add.s64 %rd4, %rd2, %rd3;
  st.global.f32 [%rd4], %f2;
  ret;
}
"""
WAIT = """AGAIN:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
  @!%p2 bra AGAIN;
"""

# The same reversal as the notebook's CuTeDSL kernel, in CUDA C++.
REVERSE_CU = """
extern "C" __global__ void reverse(const float *x, float *y) {
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[127 - threadIdx.x];
}
"""


@dataclass
class Ran:
    """What came of one launch.

    Attributes:
        hazards: what the checks reported. stopped: what ended the launch early, or None.
        trace: of the launch.
    """

    hazards: list[Hazard] = field(default_factory=list)
    stopped: EmulatorError | None = None
    trace: Trace | None = None

    @property
    def findings(self) -> list[Finding]:
        """Group the reports by cause."""
        return group(self.hazards, self.stopped)

    @property
    def bad(self) -> int:
        """Count the hazards that are errors, and the stop."""
        return len(errors(self.hazards)) + (self.stopped is not None)

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (kind, source line or instruction, fix) of each finding."""
        return [(one.kind, (one.place.text or one.place.ptx) if one.place else "", one.fix) for one in self.findings]


def _watched(gpu: Any, call: Callable[[], Any]) -> Ran:
    """Call, and keep what the device has seen."""
    try:
        call()
    except EmulatorError as error:
        return Ran(list(error.hazards), error, gpu.trace)
    return Ran(list(gpu.hazards), None, gpu.trace)


def run_cute(host: Callable[..., Any], *arrays: Any, arch: str = "sm_90a", **settings: Any) -> Ran:
    """Call a ``@cute.jit`` host function with arrays, under the race detector and with a trace."""
    from cutlass.cute.runtime import from_dlpack

    with emulator.device(arch, checks="race", trace=True, default_device="cpu", **settings) as gpu:
        return _watched(gpu, lambda: host(*map(from_dlpack, arrays)))


def run_ptx(ptx: str, *arrays: np.ndarray, block: int = THREADS, **settings: Any) -> Ran:
    """Launch the only kernel of a PTX text on arrays, one CTA, under the race detector and with a trace."""
    module = emulator.gpu.load(ptx, checks="race", trace=True, **settings)
    return _watched(module.device, lambda: module.kernel().launch(1, block, list(arrays)))


def cuda_to_ptx(source: str, arch: str = "sm_90a") -> tuple[str, str]:
    """Compile CUDA C++; returns (PTX, ""), or ("", why it cannot be compiled here)."""
    with tempfile.TemporaryDirectory(prefix="dsv4-cuda-") as folder:
        path = Path(folder) / "kernel.cu"
        path.write_text(source)
        try:
            return nvrtc.compile_file(path, arch), ""
        except BackendUnavailable as missing:
            return "", str(missing)


def operands(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Make x, normals, and y, NaN; fp32[128]."""
    x = np.random.default_rng(seed).standard_normal(THREADS).astype(np.float32)
    return x, np.full(THREADS, np.nan, np.float32)


def wrong(found: np.ndarray, want: np.ndarray) -> int:
    """Count elements that are not the expected bits."""
    return int((found.view(np.uint32) != want.view(np.uint32)).sum())


def moments_wrong(ran: Ran, trace: Trace | None = None, lines: int = 0) -> int:
    """Count findings whose place on the page is not the hazard's: instruction, source text, warp's clock.

    A finding that no hazard has is wrong, too, unless it says what stopped the launch.

    Args:
        trace: in place of the launch's own. lines: of PTX by which the page's hazards are moved.
    """
    shown = trace if trace is not None else ran.trace
    made = stream(shown, [_moved(one, lines) for one in ran.hazards], ran.stopped)
    texts = dict(zip(decode(made["ptx"]["line"]), made["ptx"]["text"], strict=True))
    first = {(one.kind, one.place and one.place.ptx_line): one for one in reversed(ran.hazards)}
    stops = {one.kind for one in group((), ran.stopped)}
    out = 0
    for finding in made["findings"]:
        at = finding["place"] and finding["place"]["ptx_line"]
        hazard = first.get((finding["kind"], at))
        if hazard is None or hazard.place is None:
            out += hazard is None and finding["kind"] not in stops
            continue
        states = shown.states[shown.states["warp"] == (hazard.place.warp or 0)]
        alive = ((states["time"] <= finding["time"]) & (finding["time"] <= states["end"])).any()
        same = texts.get(hazard.place.ptx_line, "").partition(" ")[0] == hazard.place.ptx.partition(" ")[0]
        out += not (alive and same and finding["time"] < shown.time)
    return out


def _moved(hazard: Hazard, lines: int) -> Hazard:
    """Move a hazard by lines of PTX."""
    if hazard.place is None or not lines:
        return hazard
    return replace(hazard, place=replace(hazard.place, ptx_line=hazard.place.ptx_line + lines))
