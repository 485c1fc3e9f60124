"""Run the Hopper GEMM in the emulator, or on a GPU, and compare with fp64 of its operands."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from dsv4lib import backends
from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.formats import e4m3, fp8_block, scale_swizzle, ue8m0
from dsv4lib.ops.moe_gemm.inputs import SENTINEL, Case, outputs
from dsv4lib.ops.moe_gemm.sm90.arguments import fake_args, launch_args
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from dsv4lib.ops.moe_gemm.sm90.wide.e4m3 import WideE4m3MoeGemm
from dsv4lib.ops.moe_gemm.sm90.wide.kernel import WideMoeGemm
from dsv4lib.reference.moe_gemm import swiglu
from tests.budget import built

# Largest RMS error of a row beside its size: Hopper's E4M3 MMAs keep 13 fraction bits below the largest addend; sums of
# bf16 products are fp32's; an output in bf16 is rounded.
BOUND = {"w4a8": 2.0**-13, "w4a16": 2.0**-19}
BF16 = 2.0**-8
SCALES = 0.01  # share of MXFP8 scales that such errors may double or halve
SLACK = 2.0**-11  # of a row's size: what they come to after SwiGLU


@dataclass
class Outcome:
    """What a run says: worst row's error, shares of wrong codes and scales, stray bytes, reports, what stopped it."""

    kernel: TiledMoeGemm
    compiled: Any
    error: float = float("inf")
    codes: float = 1.0
    scales: float = 1.0
    stray: int = 0
    hazards: tuple = ()
    stopped: EmulatorError | None = None
    result: Any = None

    @property
    def right(self) -> bool:
        if self.kernel.quantised:
            return self.codes == 0 and self.scales <= SCALES
        form = "w4a8" if self.kernel.scaled else "w4a16"
        return self.error <= BOUND[form] + (BF16 if self.kernel.out == "bf16" else 0)

    def findings(self) -> set[str]:
        """Kinds of all that is wrong."""
        found = {one.kind for one in self.hazards} | ({"stray bytes"} if self.stray else set())
        if self.stopped is not None:
            return found | {"stopped"}
        return found if self.right else found | {"wrong numbers"}


def run(options: dict, made: Case, kind: type = TiledMoeGemm, grid: int = 2, native: bool = False, **device) -> Outcome:
    """Run a kernel (or a variant) on a case, whose outputs are written anew."""
    if kind in (TiledMoeGemm, WideMoeGemm, WideE4m3MoeGemm):
        kernel, code = built(kind, fake_args, "sm_90a", **options)
    else:
        kernel = kind(**options)
        code = compile_for(kernel, fake_args(kernel), "sm_90a")
    call = made.call
    outputs(kernel, call, len(made.x), made.w.shape[1])
    found = Outcome(kernel, code)
    if native:
        there = dataclasses.replace(call, **{n: x.cuda() for n, x in vars(call).items() if isinstance(x, torch.Tensor)})
        backends.launch("native", code, *launch_args(kernel, there, grid))
        call.out, call.out_scales = there.out.cpu(), None if there.out_scales is None else there.out_scales.cpu()
    else:
        gpu = make("sm_90a", **{"checks": "race", **device})
        try:
            launch(code, *launch_args(kernel, call, grid), gpu=gpu)
        except EmulatorError as error:
            found.stopped = error
            return found
        found.hazards, found.result = gpu.hazards, gpu.launches[-1].result
    rows, free = made.rows(), torch.ones(len(made.x), dtype=torch.bool)
    free[rows] = False
    found.stray = int((call.out.view(torch.uint8)[free] != SENTINEL).sum())
    truth = expected(kernel, made)
    if kernel.quantised:
        found.codes, found.scales = wrong_codes(made, truth, 128 if isinstance(kernel, WideE4m3MoeGemm) else 32)
    else:
        size = truth.square().mean(1).sqrt().clamp(min=1e-30)
        off = (call.out[rows].double() - truth).square().mean(1).sqrt() / size
        found.error = float(off.nan_to_num(float("inf")).max()) if len(rows) else 0.0
    return found


def expected(kernel: TiledMoeGemm, made: Case) -> torch.Tensor:
    """fp64 results of the rows that hold tokens."""
    call, found = made.call, []
    for e, (first, count) in enumerate(zip(call.offsets.tolist(), call.counts.tolist(), strict=True)):
        own = slice(first, first + count)
        y = made.x[own] @ made.w[e].T
        if kernel.swiglu:
            gate, up = y.unflatten(1, (-1, 2, 8)).unbind(2)
            if kernel.alpha:
                gate, up = gate * call.alpha[e].double(), up * call.alpha_up[e].double()
            y = swiglu(gate, up, call.limit).flatten(1)
        elif kernel.alpha:
            y = y * call.alpha[e].double()
        found.append(y * call.routing[own, None].double() if kernel.routed else y)
    return torch.cat(found)


def wrong_codes(made: Case, truth: torch.Tensor, block: int) -> tuple[float, float]:
    """Shares of codes that are off by more than rounding, and of scales that are not those of the fp64 result."""
    rows, columns = made.rows(), truth.shape[1] // 32
    scales = scale_swizzle.unswizzle(made.call.out_scales, len(made.x), columns)[rows]
    factors = ue8m0.decode(scales, torch.float64).repeat_interleave(32, -1)
    off = (e4m3.decode(made.call.out[rows], torch.float64) * factors - truth).abs()
    size = truth.square().mean(1, keepdim=True).sqrt()
    allowed = 2.0**-4 * truth.abs() + 2.0**-10 * factors + SLACK * size  # half a step of E4M3, or of its subnormals
    wanted = fp8_block.quantize_activation(truth, block).scales.repeat_interleave(block // 32, -1)[:, :columns]
    return float((~(off <= allowed)).double().mean()), float((scales != wanted).double().mean())
