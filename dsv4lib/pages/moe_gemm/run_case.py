"""Try an expert GEMM. Compile, run in the emulator, compare with fp64, collect all that speaks for or against it.

For notebooks, exercises and tests. A kernel that stops with an error is a result, not an exception: the error is kept.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from dsv4lib import backends
from dsv4lib.dsl.compile import Compiled, compile_for
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.formats import e2m1, e4m3, fp8_block, nvfp4, scale_swizzle, ue8m0, weight_modes
from dsv4lib.layers.experts import FORMS, Weights
from dsv4lib.loader.operands import plane_bytes
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.moe_gemm.arguments import BLOCK_ROWS, Call, fake_args, launch_args
from dsv4lib.ops.moe_gemm.inputs import SENTINEL, Case, outputs
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm
from dsv4lib.pages.common.run_gemm import reported, where
from dsv4lib.pages.fmha.run_case import Native
from dsv4lib.reference.moe_gemm import swiglu

FACTOR = 2.0  # error of the kernel beside that of an fp32 product in the same K order
TIES = 1e-3  # share of codes that may differ from those of the fp64 result


@dataclass
class Outcome:
    """What one run says.

    Attributes:
        kernel: the kernel object; compiled: what the compiler said about it.
        error_over_fp32: RMS error against fp64, over that of the same steps in fp32, both rounded to the output's type;
            inf if the kernel stopped or NaN/Inf are out of place; 0 where output is quantised.
        wrong_codes: share of codes and scales that differ from those of the fp64 result; 0 where it is not.
        stray: bytes written where no token is.
        hazards: what the checks reported; error: what stopped it. trace, result: of the launch.
    """

    kernel: MoeGemm
    compiled: Compiled
    error_over_fp32: float
    wrong_codes: float
    stray: int
    hazards: list[Any]
    error: EmulatorError | None
    trace: Any
    result: Any

    @property
    def right(self) -> bool:
        """Tell whether the numbers are as they should be, whatever the checks say."""
        return self.error is None and self.error_over_fp32 <= FACTOR and self.wrong_codes <= TIES

    @property
    def clean(self) -> bool:
        """Tell whether it is right, without hazard. Nothing is written where no token is."""
        return self.right and not self.hazards and not self.stray

    def findings(self) -> list[tuple[str, str, str]]:
        """Return (kind, Python line or "", what) of everything that was found. The most specific comes first."""
        out = reported(self.hazards)
        if self.error is not None:
            out.append((type(self.error).__name__, where(self.error.place), str(self.error).splitlines()[0]))
        if self.stray:
            out.append(("stray bytes", "", f"{self.stray} bytes written where no token is"))
        if self.error is None and not self.right:
            text = f"error {self.error_over_fp32:.3g} x fp32's"
            if self.kernel.quantised:
                text = f"{self.wrong_codes:.2%} of codes and scales wrong"
            out.append(("wrong numbers", "", text))
        return out


def expected(kernel: MoeGemm, made: Case, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Compute what a kernel gives before it rounds, [R, F], in ``dtype``. Rows without a token are 0."""
    call = made.call
    out = torch.zeros(len(made.x), made.w.shape[1], dtype=dtype)
    for e, (first, count) in enumerate(zip(call.offsets.tolist(), call.counts.tolist(), strict=True)):
        own = slice(first, first + count)
        out[own] = in_steps(made.x[own], made.w[e], dtype, made.step)
        if kernel.alpha and kernel.swiglu:
            out[own].unflatten(1, (-1, 2, 8)).mul_(torch.stack([call.alpha[e], call.alpha_up[e]]).to(dtype)[:, None])
        elif kernel.alpha:
            out[own] *= call.alpha[e].to(dtype)
    if kernel.swiglu:
        gate, up = out.unflatten(1, (-1, 2, 8)).unbind(2)
        out = swiglu(gate, up, call.limit).flatten(1)
    return out * call.routing.to(dtype)[:, None] if kernel.routed else out


def in_steps(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, step: int) -> torch.Tensor:
    """Sum x w^T over steps of K in their order, in ``dtype``. It is what MMAs that round after each would give."""
    out = torch.zeros(len(x), len(w), dtype=dtype)
    for k in range(0, x.shape[1], step):
        out += x[:, k : k + step].to(dtype) @ w[:, k : k + step].to(dtype).T
    return out


def compiled(kernel_type: type, settings: dict[str, Any]) -> tuple[Any, Compiled]:
    """Compile a kernel for sm_100a, or take it from the compile cache. Returns (kernel object, its code).

    A class whose arguments have no names (``**settings``) has no place there: it is compiled once in a process.
    """
    parameters = inspect.signature(kernel_type).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return _here(kernel_type, tuple(sorted(settings.items())))
    return compile_cache.default().get(kernel_type, settings, fake_args)


@lru_cache(maxsize=8)
def _here(kernel_type: type, settings: tuple) -> tuple[Any, Compiled]:
    kernel = kernel_type(**dict(settings))
    return kernel, compile_for(kernel, fake_args(kernel), "sm_100a")


def run_moe_gemm(
    kernel_type: type, settings: dict[str, Any], made: Case, grid: int = 2, backend: str = "emulator", **device: Any
) -> Outcome:
    """Run a `MoeGemm` (or a variant) on a case.

    Args:
        kernel_type: the class; settings: its arguments by name.
        made: from `ops.moe_gemm.inputs.case` or `mode_case`; its outputs are written anew.
        grid: clusters of the launch. backend: "emulator" or "native".
        device: options of `emulator.device` (schedule, checks, trace, ...).
    """
    kernel, code = compiled(kernel_type, settings)
    outputs(kernel, made.call, len(made.x), made.w.shape[1])
    if backend == "native":
        gpu, error = _native(kernel, code, made, grid), None
    else:
        gpu, error = make("sm_100a", **{"checks": "race", **device}), None
        try:
            launch(code, *launch_args(kernel, made.call, grid), gpu=gpu)
        except EmulatorError as caught:
            error = caught
    over, wrong = judge(kernel, made) if error is None else (float("inf"), 1.0)
    result = gpu.launches[-1].result if gpu.launches else None
    return Outcome(kernel, code, over, wrong, stray_bytes(made), gpu.hazards, error, gpu.trace, result)


def _native(kernel: MoeGemm, code: Compiled, made: Case, grid: int) -> Native:
    """Launch on a GPU; the outputs come back into the case."""
    place = backends.device("native")
    tensors = {name: x.to(place) for name, x in vars(made.call).items() if isinstance(x, torch.Tensor)}
    there = replace(made.call, **tensors)
    backends.launch("native", code.function, *launch_args(kernel, there, grid))
    made.call.out = there.out.cpu()
    made.call.out_scales = None if there.out_scales is None else there.out_scales.cpu()
    return Native()


def mode_case(mode: str, counts: list[int], features: int, k: int, seed: int = 0) -> tuple[dict, Case, torch.Tensor]:
    """Groups of tokens times NVFP4 weights that a precision mode has converted. X and weights are the same in each.

    Args:
        mode: key of `layers.experts.FORMS`. counts: tokens of each expert. features, k: N and K, a multiple of 128.

    Returns:
        (settings of the kernel, with fp32 output; the case; fp64 [R, N] of bf16 activations and the NVFP4 weights).
    """
    product, recipe = FORMS[mode]
    settings = {"mode": product, "out": "fp32"}
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *(-(-n // BLOCK_ROWS) * BLOCK_ROWS for n in counts)]).cumsum(0)
    rows = int(offsets[-1])
    x = torch.randn(rows, k, generator=generator) * torch.exp2(torch.rand(rows, 1, generator=generator) * 4 - 2)
    w = torch.randn(len(counts), features, k, generator=generator)
    w = w * torch.exp2(torch.rand(features, 1, generator=generator) * 4 - 2)
    stored = [nvfp4.quantize(one) for one in w]
    converted = [weight_modes.convert(one, mode) for one in stored]
    planes = []
    for number in range(len(converted[0].planes)):
        codes, scales, _ = zip(*(plane_bytes(one.planes[number]) for one in converted), strict=True)
        image = None if scales[0] is None else scale_swizzle.swizzle(torch.stack(scales))
        planes.append((torch.stack(codes), image))
    operand = Weights(tuple(planes), torch.stack([one.alpha for one in converted])).operand()
    x_codes, x_scales, numbers, factor = _activations(x, recipe)
    copies = len(planes)
    groups = {"offsets": offsets[:-1].int(), "counts": torch.tensor(counts).int()}
    call = Call(x_codes.repeat(1, copies), operand.codes, x, **groups)
    call.alpha = torch.stack([one.alpha for one in converted]) * factor
    if x_scales is not None:
        call.x_scales, call.w_scales = scale_swizzle.swizzle(x_scales.repeat(1, copies)), operand.scales
    values = [torch.cat([weight_modes.plane_values(p).double() for p in one.planes], -1) for one in converted]
    kernel = MoeGemm(**settings)
    made = Case(call, numbers.repeat(1, copies), torch.stack(values), kernel.mode.k)
    exact = torch.zeros(rows, features, dtype=torch.float64)
    for e, (first, count) in enumerate(zip(offsets.tolist(), counts, strict=False)):
        own = slice(first, first + count)
        exact[own] = x[own].bfloat16().double() @ nvfp4.dequantize(stored[e], torch.float64).T
    return settings, made, exact


def _activations(x: torch.Tensor, recipe: str) -> tuple[torch.Tensor, Any, torch.Tensor, float]:
    """(codes, scales or None, the numbers they stand for in fp64, a factor that these do not contain)."""
    if recipe == "bf16":
        return x.bfloat16(), None, x.bfloat16().double(), 1.0
    if recipe == "mxfp8":
        q = fp8_block.quantize_activation(x, weight_modes.MX_GROUP)
        scales = ue8m0.decode(q.scales, torch.float64).repeat_interleave(weight_modes.MX_GROUP, -1)
        return q.codes.view(torch.uint8), q.scales, e4m3.decode(q.codes, torch.float64) * scales, 1.0
    q = nvfp4.quantize(x)
    scales = e4m3.decode(q.scales, torch.float64).repeat_interleave(nvfp4.BLOCK, -1)
    return q.packed, q.scales, e2m1.decode(e2m1.unpack(q.packed), torch.float64) * scales, float(q.global_scale)


def judge(kernel: MoeGemm, made: Case) -> tuple[float, float]:
    """Judge the output that is in ``made.call``. Returns (`Outcome.error_over_fp32`, `Outcome.wrong_codes`)."""
    rows = made.rows()
    truth = expected(kernel, made)[rows]
    if kernel.quantised:
        return 0.0, wrong_codes(kernel, made, truth, rows)
    out, peer = (
        made.call.out[rows].double(),
        expected(kernel, made, torch.float32)[rows].to(made.call.out.dtype).double(),
    )
    if not bool(out.isfinite().all()):
        return float("inf"), 0.0
    # relative to each row's size: a small row that is wrong must not vanish beside a large one
    size = truth.square().mean(1, keepdim=True).sqrt()
    own, others = (float(((values - truth) / size).square().mean().sqrt()) for values in (out, peer))
    if others == 0:  # every sum is exact in fp32, as sums of few E2M1 products are
        return (0.0 if own == 0 else float("inf")), 0.0
    return own / others, 0.0


def wrong_codes(kernel: MoeGemm, made: Case, truth: torch.Tensor, rows: torch.Tensor) -> float:
    """Return the share of codes and scales that differ. What `formats` makes of the fp64 result is right."""
    call, block = made.call, 16 if kernel.out == "nvfp4" else 32
    scales = scale_swizzle.unswizzle(call.out_scales, len(made.x), truth.shape[1] // block)[rows]
    codes = call.out[rows]
    if kernel.out == "mxfp8":
        q = fp8_block.quantize_activation(truth, block)
        pairs = [(codes, q.codes), (scales, q.scales)]
    else:
        pairs, done = [], 0
        for e, n in enumerate(call.counts.tolist()):
            own = slice(done, done + n)
            q = nvfp4.quantize(truth[own], call.out_global[e])
            both = codes[own], q.packed
            pairs += [tuple(c & 15 for c in both), tuple(c >> 4 for c in both), (scales[own], q.scales)]
            done += n
    return sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def stray_bytes(made: Case) -> int:
    """Return the bytes of the output that changed in rows without a token."""
    free = torch.ones(len(made.x), dtype=torch.bool)
    free[made.rows()] = False
    return int((made.call.out.view(torch.uint8)[free] != SENTINEL).sum())
