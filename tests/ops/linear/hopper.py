"""Run the Hopper kernel of linears in the emulator, or on a GPU, and compare with fp64 of its operands."""

from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4lib import backends
from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.formats import fp8_block
from dsv4lib.ops.linear.sm90.arguments import fake_args, launch_args
from dsv4lib.ops.linear.sm90.kernel import HopperLinear
from dsv4lib.ops.linear.sm90.op import Grouped
from dsv4lib.reference.linear import linear, linear_fp8
from tests.budget import built

BOUND = 2.0**-12  # RMS of a token beside its size: 13 bits below the largest product, of some hundred
BF16 = 2.0**-8
SENTINEL = 7.0
SPARE = 3  # rows of the output after the tokens, columns after the features


@dataclass
class Case:
    """Operands with a dimension of groups, and what they stand for."""

    x: fp8_block.FP8Tensor
    w: fp8_block.FP8Tensor

    def truth(self) -> torch.Tensor:
        return linear_fp8(self.x, self.w)


def case(groups, tokens, features, k, seed=0, scales="e8m0") -> Case:
    """Normals; tokens and 128 x 128 tiles of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(groups, tokens, k, generator=generator)
    x *= torch.logspace(-1, 1, tokens)[torch.randperm(tokens, generator=generator), None]
    w = torch.randn(groups, features, k, generator=generator)
    tiles = torch.randint(-4, 5, (groups, -(-features // 128), -(-k // 128)), generator=generator).float().exp2()
    w *= fp8_block.spread_scales(tiles, (128, 128), features, k)
    x *= fp8_block.spread_scales(tiles[:, :1].flip(2), (tokens, 128), tokens, k)
    if scales == "fp32":
        return Case(fp8_block.quantize(x, (1, 128), "fp32"), fp8_block.quantize(w, scale_format="fp32"))
    return Case(fp8_block.quantize_activation(x), fp8_block.quantize(w))


@dataclass
class Plain:
    """bf16 operands with a dimension of groups."""

    x: torch.Tensor
    w: torch.Tensor

    def truth(self) -> torch.Tensor:
        return linear(self.x.double(), self.w.double())


def plain(groups, tokens, features, k, seed=0) -> Plain:
    """Normals in bf16; tokens, features and columns of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(groups, rows, k, generator=generator) for rows in (tokens, features))
    sizes = torch.logspace(-2, 2, k)[torch.randperm(k, generator=generator)]
    x *= sizes * torch.logspace(-1, 1, tokens)[torch.randperm(tokens, generator=generator), None]
    w *= torch.logspace(-1, 1, features)[torch.randperm(features, generator=generator), None] / sizes
    return Plain(x.bfloat16(), w.bfloat16())


@dataclass
class Outcome:
    """What a run says: the worst token's error, stray elements, reports, what stopped it."""

    out: torch.Tensor
    compiled: Any = None
    error: float = float("inf")
    bound: float = BOUND
    stray: int = 0
    hazards: list = field(default_factory=list)
    stopped: EmulatorError | None = None
    result: Any = None

    def findings(self) -> set[str]:
        """Kinds of all that is wrong."""
        found = {one.kind for one in self.hazards} | ({"stray bytes"} if self.stray else set())
        if self.stopped is not None:
            return found | {"stopped"}
        return found if self.error <= self.bound else found | {"wrong numbers"}


def run(options, made, kind=HopperLinear, grid=2, native=False, **device) -> Outcome:
    """Run the kernel or a variant of it; the output lies in a larger tensor of `SENTINEL`."""
    if kind is HopperLinear:
        kernel, code = built(kind, fake_args, "sm_90a", **options)
    else:
        kernel = kind(**options)
        code = compile_for(kernel, fake_args(kernel), "sm_90a")
    x, w = ((t.codes, t.scales) if kernel.scaled else (t, None) for t in (made.x, made.w))
    (groups, tokens, _), features = x[0].shape, w[0].shape[1]
    dtype = torch.float32 if kernel.out == "fp32" else torch.bfloat16
    room = torch.full((groups, tokens + SPARE, features + SPARE), SENTINEL, dtype=dtype)
    found = Outcome(room[:, :tokens, :features], code, bound=BOUND + (BF16 if kernel.out == "bf16" else 0))
    given = [*x, *w, room]
    if native:
        given = [None if t is None else t.cuda() for t in given]
    call = Grouped(*given[:4], given[4][:, :tokens, :features]).bytes()
    if native:
        backends.launch("native", code, *launch_args(kernel, call, grid))
        room.copy_(given[4])
    else:
        gpu = make("sm_90a", **{"checks": "race", **device})
        try:
            launch(code, *launch_args(kernel, call, grid), gpu=gpu)
        except EmulatorError as error:
            found.stopped = error
            return found
        found.hazards, found.result = gpu.hazards, gpu.launches[-1].result
    found.stray = int((room[:, tokens:] != SENTINEL).sum() + (room[:, :, features:] != SENTINEL).sum())
    truth = made.truth()
    size = truth.square().mean(-1).sqrt().clamp(min=1e-30)
    off = (found.out.double() - truth).square().mean(-1).sqrt() / size
    found.error = float(off.nan_to_num(float("inf")).max())
    return found
