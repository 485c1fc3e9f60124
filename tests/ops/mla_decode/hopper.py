"""Run Hopper's MLA decode in the emulator, or on a GPU, and compare with fp64."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.ops.mla_decode.inputs import Case
from dsv4lib.ops.mla_decode.op import E4M3, SM_SCALE
from dsv4lib.ops.mla_decode.sm90.arguments import fake_args, launch_args
from dsv4lib.ops.mla_decode.sm90.kernel import MlaDecode
from dsv4lib.ops.mla_decode.sm90.launch import settings_of
from dsv4lib.reference import mla_decode as oracle
from tests.budget import built

ARCH = "sm_90a"
BF16 = torch.bfloat16
GUARD = 7.0  # what rows hold that nothing writes


class Outcome(NamedTuple):
    """What a run was found to do; errors are relative norms, of the kernel and of torch's attention in the dtype."""

    kernel: Any
    compiled: Any
    out: torch.Tensor
    lse: torch.Tensor
    error: float
    peer: float
    lse_error: float
    hazards: list
    stopped: Exception | None
    instructions: int

    @property
    def right(self) -> bool:
        """Within twice the error of torch, LSE to fp32."""
        return self.stopped is None and self.error <= 2 * self.peer and self.lse_error < 1e-4

    @property
    def clean(self) -> bool:
        return self.right and not self.hazards

    def findings(self) -> str:
        kinds = sorted({hazard.kind for hazard in self.hazards})
        return f"error {self.error:.3g} of {self.peer:.3g}, LSE {self.lse_error:.3g}, {kinds}, {self.stopped}"


def scales_of(one: Case) -> tuple[float, float]:
    """Return scales that FP8 queries and FP8 entries are tried with; 1 of others."""
    return 0.5 if one.q_nope.dtype == E4M3 else 1.0, 2.0 if one.kv_cache.dtype == E4M3 else 1.0


def errors(one: Case, out: torch.Tensor, lse: torch.Tensor, scale: float) -> tuple[float, float, float]:
    """Return errors of O, of torch's attention in the same dtype, and of the LSE; inf for a NaN or padded rows."""
    out, lse, one = out.cpu(), lse.cpu(), one.to("cpu")
    q_scale, kv_scale = scales_of(one)
    want = oracle.mla_decode(*one, scale, q_scale, kv_scale)
    there = one.seq_lens > 0
    if bool(out[~there].any()) or not bool((lse[~there] == -torch.inf).all()):
        return float("inf"), 0.0, float("inf")
    if not bool(there.any()):
        return 0.0, 0.0, 0.0
    peers = []
    for b in there.nonzero().flatten().tolist():
        kv = oracle.entries(one.kv_cache, one.page_table[b], int(one.seq_lens[b])).to(out.dtype)
        q = torch.cat((one.q_nope[b], one.q_pe[b]), -1).to(out.dtype)
        peers.append((q @ kv.T).mul(scale * q_scale * kv_scale).softmax(-1) @ kv[:, :512] * kv_scale)
    size = want.out[there].norm()
    wrong = [(x.double() - want.out[there]).norm() / size for x in (out[there], torch.stack(peers))]
    of_lse = (lse[there].double() - want.lse[there]).abs() / want.lse[there].abs().clamp(min=1.0)
    return tuple(float(x.nan_to_num(float("inf"))) for x in (*wrong, of_lse.max()))


def run(
    one: Case,
    kind: type = MlaDecode,
    splits: int | None = None,
    scale: float = SM_SCALE,
    native: bool = False,
    **device: Any,
) -> Outcome:
    """Run the kernel, of ``splits`` what they add up to."""
    dtype = BF16 if one.q_nope.dtype == E4M3 else one.q_nope.dtype
    q_scale, kv_scale = scales_of(one)
    call = SimpleNamespace(
        **one.to("cuda" if native else "cpu")._asdict(),
        out=torch.empty(0, dtype=dtype),
        page_size=one.kv_cache.shape[1],
        sm_scale=scale,
        q_scale=q_scale,
        kv_scale=kv_scale,
    )
    options = settings_of(call) | {"partial": splits is not None}
    if kind is MlaDecode:
        kernel, code = built(kind, fake_args, ARCH, **options)
    else:
        kernel = kind(**options)
        code = compile_for(kernel, fake_args(kernel), ARCH)
    batch, heads, _ = one.q_nope.shape
    lead = () if splits is None else (splits,)
    place = {"device": "cuda" if native else "cpu"}
    out = torch.full((*lead, batch + 1, heads, 512), GUARD, dtype=torch.float32, **place)
    if splits is None:
        out = out.to(dtype)
    lse = torch.full((*lead, batch + 1, heads), GUARD, **place)
    written = [x[..., :batch, :, :] if x is out else x[..., :batch, :] for x in (out, lse)]
    args = launch_args(kernel, call, *written, splits or 1)
    hazards, stopped, instructions = [], None, 0
    if native:
        backends.launch("native", code.function, *args)
        torch.cuda.synchronize()
    else:
        gpu = make(ARCH, **{"checks": "race", **device})
        try:
            launch(code, *args, gpu=gpu)
        except EmulatorError as caught:
            stopped = caught
        if gpu.launches:
            hazards, instructions = gpu.launches[-1].result.hazards, gpu.launches[-1].result.instructions
    assert bool((out[..., batch, :, :] == GUARD).all()) and bool((lse[..., batch, :] == GUARD).all())
    found = written
    if splits is not None:
        whole = oracle.combine(*written)
        found = whole.out.to(dtype), whole.lse.float()
    return Outcome(kernel, code, *found, *errors(one, *found, scale), hazards, stopped, instructions)
