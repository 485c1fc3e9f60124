"""Run the fused MoE on emulated devices: all ranks together, compared with fp64, with all that speaks against it.

For notebooks, exercises and tests. A kernel that stops with an error is a result, not an exception: the error is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from dsv4lib import emulator
from dsv4lib.check import compare
from dsv4lib.dsl.compile import Compiled
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.mega_moe.arguments import fake_args, launch_args
from dsv4lib.ops.mega_moe.buffer import SymmetricBuffer
from dsv4lib.ops.mega_moe.inputs import CLAMP, Case, Matrices
from dsv4lib.ops.mega_moe.kernel import MegaMoe
from dsv4lib.ops.mega_moe.layout import Layout
from dsv4lib.ops.mega_moe.op import Call
from dsv4lib.reference import mega_moe as oracle
from dsv4lib.reference import moe_gemm as gemm_oracle

SENTINEL = 119  # of every byte of an output, and of results in `combine` that no rank sends


@dataclass
class Outcome:
    """What one run says.

    Attributes:
        kernel, compiled: the kernel object, and what the compiler said.
        outs: of every rank, bf16 [T, H], of the last call. wants: fp32, of the oracle.
        hazards: of all devices. error: what stopped the run, or None.
        stray: bytes of `combine` that changed although no route goes there, of all ranks.
        traces, results: of every device's last launch.
        buffers: memory of every rank.
    """

    kernel: MegaMoe
    compiled: Compiled
    outs: list[Tensor]
    wants: list[Tensor]
    hazards: list[Any]
    error: EmulatorError | None
    stray: int
    traces: list[Any] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    buffers: list[SymmetricBuffer] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether every rank's numbers pass the comparator."""
        if self.error is not None:
            return False
        pairs = [(o, w) for o, w in zip(self.outs, self.wants, strict=True) if len(o)]
        return all(compare(o, w.to(o.dtype)).passed for o, w in pairs)

    @property
    def clean(self) -> bool:
        """Whether nothing speaks against it."""
        return self.right and not self.hazards and not self.stray

    def findings(self) -> list[str]:
        """List what speaks against it: kinds of hazards, an error's type, "stray bytes", "wrong numbers"."""
        found = sorted({hazard.kind for hazard in self.hazards})
        if self.error is not None:
            return [*found, type(self.error).__name__]
        return [*found, *["stray bytes"] * bool(self.stray), *["wrong numbers"] * (not self.right)]


def settings_of(made: Case, tile_n: int = 64, weighted: str = "l1", fast_math: bool = True) -> dict[str, Any]:
    """Make options of the kernel for a case."""
    return {**asdict(made.layout), "tile_n": tile_n, "weighted": weighted, "fast_math": fast_math}


def run_mega_moe(
    made: Case | list[Case],
    kernel_type: type = MegaMoe,
    grid: int = 2,
    tile_n: int = 64,
    order: list[int] | None = None,
    launches: int = 1,
    weighted: str = "l1",
    fast_math: bool = True,
    **device: Any,
) -> Outcome:
    """Run `MegaMoe` (or a variant) on a case, a device a rank.

    Args:
        made: from `ops.mega_moe.inputs.case`; several of one layout are calls one after the other.
        kernel_type: the class. grid: CTAs of a device. tile_n: of the kernel. order: of the ranks' launches.
        weighted: layer whose results take the routing weights. fast_math: of the SwiGLU.
        launches: of every call, queued one after the other: a fast rank may begin the next before a slow one has ended.
        device: options of `emulator.devices` (schedule, seed, checks, trace, ...).
    """
    cases = made if isinstance(made, list) else [made]
    one = cases[0].layout
    settings = settings_of(cases[0], tile_n, weighted, fast_math)
    kernel, code = compile_cache.default().get(kernel_type, settings, fake_args, "sm_100a")
    outs: list[Tensor] = []
    error, stray = None, 0
    with _group(one.world, **{"checks": "race", **device}) as group:
        buffers = group.buffers(one)
        try:
            for now in cases:
                outs = []
                for buffer, tokens in zip(buffers, now.ranks, strict=True):
                    poison(buffer)
                    buffer.stage(*tokens[:4])
                    outs.append(torch.full((max(1, len(tokens.x)), one.hidden), float("nan")).bfloat16())
                for rank in order or range(one.world):
                    args = launch_args(kernel, call_of(now, buffers[rank], rank, outs[rank]), grid)
                    for _ in range(launches):
                        group.launch(rank, code, args)
                group.synchronize()
                stray += sum(map(stray_bytes, buffers, now.ranks))
        except EmulatorError as caught:
            error = caught
        hazards = [hazard for gpu in group.gpus for hazard in gpu.hazards]
        traces = [gpu.trace for gpu in group.gpus]
        results = [gpu.launches[-1].result if gpu.launches else None for gpu in group.gpus]
    outs = [out[: len(tokens.x)] for out, tokens in zip(outs, cases[-1].ranks, strict=True)]
    return Outcome(kernel, code, outs, expected(cases[-1], weighted), hazards, error, stray, traces, results, buffers)


class _Group:
    """Devices of a run. One device alone is no group: its launches run at once, its races are known word by word."""

    def __init__(self, gpus: list[Any], devices: Any):
        self.gpus, self._devices = gpus, devices

    def buffers(self, layout: Layout) -> list[SymmetricBuffer]:
        """Make every rank's memory."""
        if self._devices is None:
            return [SymmetricBuffer.alone(layout)]
        parts = self._devices.symmetric(layout.bytes, torch.uint8, "buffer")
        storages = [parts.tensor(rank) for rank in range(layout.world)]
        addresses = [x.data_ptr() for x in storages]
        return [SymmetricBuffer.over(layout, rank, storages[rank], addresses) for rank in range(layout.world)]

    def launch(self, rank: int, code: Compiled, args: tuple[Any, ...]) -> None:
        """Launch on a rank's device, or queue it there."""
        if self._devices is None:
            emulator.launch(code, *args, gpu=self.gpus[0])
            return
        with self._devices.on(rank) as gpu:
            emulator.launch(code, *args, gpu=gpu)

    def synchronize(self) -> None:
        """Run what is queued."""
        if self._devices is not None:
            self._devices.synchronize()


@contextmanager
def _group(world: int, **settings: Any) -> Iterator[_Group]:
    """Make the devices of ``world`` ranks."""
    if world == 1:
        yield _Group([make("sm_100a", **settings)], None)
        return
    with emulator.devices(world, shims=False, **settings) as gpus:
        yield _Group(list(gpus), gpus)
        gpus.queues.discard()


def expected(made: Case, weighted: str = "l1") -> list[Tensor]:
    """Ask the oracle for every rank."""
    ranks = [(one.numbers, one.topk_idx, one.topk_weights.double()) for one in made.ranks]
    return oracle.mega_moe(ranks, made.w1, made.w2, made.w3, CLAMP, oracle.Rounding(made.h_scales, weighted))


def unrounded(made: Case, weights_of: Matrices | None = None) -> list[Tensor]:
    """Compute every rank's output of tokens before they were quantised, fp64; by default of such weights, too."""
    w1, w2, w3 = (list(x.double()) for x in weights_of or made.raw)
    outs = []
    for one in made.ranks:
        there = (one.topk_idx >= 0) & (one.topk_idx < made.layout.experts)
        weights = one.topk_weights.double() * there
        outs.append(gemm_oracle.moe_gemm(one.raw.double(), one.topk_idx * there, weights, w1, w2, w3, CLAMP))
    return outs


def call_of(made: Case, buffer: SymmetricBuffer, rank: int, out: Tensor) -> Call:
    """Make the record of a rank's call, its tokens being staged."""
    sizes = asdict(made.layout)
    sizes["formats"] = sizes.pop("mode")
    memory = {name: getattr(buffer, name) for name in ("storage", "peers", "state", "workspace")}
    numbers = {
        "rank": rank,
        "tokens": len(made.ranks[rank].x),
        "clamp": CLAMP,
        "fast_math": True,
        "expected": 0,
        "backend": "emulator",
    }
    weights = {"l1": made.l1[rank], "l2": made.l2[rank], **made.factors[rank]._asdict()}
    return Call(**memory, **weights, out=out, **sizes, weighted="l1", **numbers)


def poison(buffer: SymmetricBuffer) -> None:
    """Fill what a call must write before it reads it, and tokens that the rank does not have."""
    buffer.x.fill_(0x7F)  # NaN of E4M3; of E2M1 -6 and 6, which their scale makes NaN
    buffer.x_scales.fill_(0xFF)
    buffer.topk_weights.fill_(float("nan"))
    buffer.topk_idx.fill_(1 << 40)
    buffer.combine.view(torch.uint8).fill_(SENTINEL)
    for rows in buffer.workspace:
        rows.view(torch.uint8).fill_(0xFF)


def stray_bytes(buffer: SymmetricBuffer, tokens: Any) -> int:
    """Count bytes of a rank's `combine` that changed although no route goes there."""
    layout = buffer.layout
    free = torch.ones(layout.topk, layout.max_tokens, dtype=torch.bool)
    free[:, : len(tokens.x)] = ((tokens.topk_idx < 0) | (tokens.topk_idx >= layout.experts)).T
    return int((buffer.combine.view(torch.uint8)[free] != SENTINEL).sum())
