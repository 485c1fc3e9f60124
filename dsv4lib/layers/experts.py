"""Hold experts of one width: operands, and both GEMMs of those that tokens go to.

| mode        | weights              | activations | on           | GEMMs                                        |
|-------------|----------------------|-------------|--------------|----------------------------------------------|
| see `FORMS` | see `weight_modes`   | MXFP8, ..   | Blackwell    | `moe_gemm`, or `linear` of a single expert   |
| `mxfp4`     | MXFP4, tiled         | MXFP8       | Hopper       | `moe_gemm`                                   |
| mxfp4_mixed | MXFP4, tiled         | see below   | Hopper       | `moe_gemm`                                   |
| `w4a16`     | MXFP4, tiled         | bf16        | Hopper       | `moe_gemm`                                   |
| `fp8_block` | FP8 128 x 128        | FP8 1 x 128 | Hopper       | `linear`, of a single expert (`Fp8Expert`)   |

In mode `mxfp4_mixed` activations are MXFP8 as in `mxfp4`, but bf16 in a call that gives an expert more than 20 tokens
on average: prefill is faster (`ops.moe_gemm.sm90.op.many`). A token's numbers then depend on how many there are beside
it: chunks, batches and prefix hits change logits. In mode `w4a16` they change last bits.

Source: DSV4's released code; the modes of Blackwell are those of `dsv4lib.formats.weight_modes`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.layers.dense import HOPPER, TILE, Dense
from dsv4lib.ops.linear.op import linear
from dsv4lib.ops.moe_gemm.arguments import BLOCK_ROWS
from dsv4lib.ops.moe_gemm.op import Operand, moe_gemm
from dsv4lib.ops.moe_gemm.sm90.config import ROW_STEP
from dsv4lib.ops.moe_gemm.sm90.layout import LARGEST_BF16, largest_scale, tiled_shape
from dsv4lib.ops.moe_gemm.sm90.op import gathers, many
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.ops.swiglu_quant.op import swiglu_quant

# mode -> (mode of the GEMM, format of its activations)
FORMS = {
    "nvfp4": ("nvfp4", "nvfp4"),
    "mxfp4": ("w4a8", "mxfp8"),
    "e4m3_expand": ("mxfp8", "mxfp8"),
    "e4m3_split": ("mxfp8", "mxfp8"),
    "bf16": ("bf16", "bf16"),
    "ue8m0_naive": ("w4a8", "mxfp8"),
}
MIXED = "mxfp4_mixed"
HOPPER_FORMS = {"mxfp4": ("w4a8", "mxfp8"), MIXED: ("w4a8", "mxfp8"), "w4a16": ("w4a16", "bf16")}  # of routed experts
FP8_BLOCK = "fp8_block"  # of a Hopper's shared expert
FP8_RECIPES = "fp8", "mxfp8"  # that a launch before the layer can quantise its input by
PLANE_K = 128  # scales of 4 blocks of 32 fill a 128x4 block: the next plane's begin a new one


class Weights(NamedTuple):
    """Weights of one GEMM of E experts.

    Attributes:
        planes: (codes [E, N, K..], swizzled scales [E, bytes] or None), one or several that are added. On a Hopper one,
            of routed experts (what `tile_weights` makes, None).
        alphas: fp32 [E, 2] (gate, up) or [E, 1]: global scales of the weights alone.
    """

    planes: tuple[tuple[Tensor, Tensor | None], ...]
    alphas: Tensor

    def operand(self) -> Operand:
        """One operand; several planes one after the other along K."""
        if len(self.planes) == 1:
            codes, scales = self.planes[0]
            return Operand(_bytes(codes), scales)
        if self.planes[0][0].shape[-1] % PLANE_K:
            raise ArgumentError("planes", tuple(self.planes[0][0].shape), f"K a multiple of {PLANE_K}")
        codes = torch.cat([_bytes(codes) for codes, _ in self.planes], -1)
        return Operand(codes, _along_k([s for _, s in self.planes if s is not None], codes.shape[-2]))


class Experts(NamedTuple):
    """Experts of one width: the layer's routed ones, or its shared one.

    Attributes:
        first: gate and up, alternating in runs of 8 rows, [E, 2 I, d]. second: [E, d, I]. In mode ``fp8_block`` gate,
            then up, with scales as they are stored: [1, 2 I / 128, d / 128], [1, d / 128, I / 128].
        input_scales: fp32 [E, 2], calibrated scale of what enters each expert's first and second GEMM; for mode
            ``nvfp4`` only.
    """

    first: Weights
    second: Weights
    input_scales: Tensor | None = None


class ExpertStack(torch.nn.Module):
    """Experts of one width in one precision: their operands and factors as buffers.

    Args:
        name: of the argument ``experts``, in errors: "experts" or "shared".
        precision: key of `FORMS`, on a Hopper of `HOPPER_FORMS`. hidden: d. arch: whose operands they are.

    Attributes:
        align: what the first rows of ``groups`` are multiples of.
        first_codes, first_scales, second_codes, second_scales: operands of the GEMMs; scales are None for bf16.
        alpha_gate, alpha_up, alpha_down: fp32 [E], what the epilogues multiply by: global scales of weights and of
            calibrated activations.
        x_scale: fp32 [1], h_scales: fp32 [E], of NVFP4 activations; else None.

    Raises:
        ArgumentError: see `Moe`.
    """

    def __init__(self, name: str, experts: Experts, precision: str, hidden: int, arch: str = "sm_100a") -> None:
        super().__init__()
        forms = HOPPER_FORMS if arch == HOPPER else FORMS
        if precision not in forms:
            argument = "precision" if name == "experts" else "shared_precision"
            raise ArgumentError(argument, precision, f"one of {', '.join(forms)} on {arch}")
        self.precision, (self.product, self.recipe) = precision, forms[precision]
        self.mixed = precision == MIXED
        self.tiled = arch == HOPPER
        self.align = ROW_STEP if self.tiled else BLOCK_ROWS
        check_these = _check_tiled if arch == HOPPER else _check_experts
        count, width = check_these(name, experts, self.product, hidden)
        self.count, self.width, self.copies = count, width, len(experts.first.planes)
        x_scale = h_scales = None
        first, second = experts.first.alphas, experts.second.alphas[:, 0]
        if self.recipe == "nvfp4":
            x_scale, h_scales = experts.input_scales[:, 0].amax().reshape(1), experts.input_scales[:, 1].contiguous()
            first, second = first * x_scale, second * h_scales
        for part, weights in (("first", experts.first), ("second", experts.second)):
            codes, scales = weights.operand()
            if self.mixed and (byte := largest_scale(codes, self.product)) > LARGEST_BF16:
                allowed = f"scales up to the E8M0 byte {LARGEST_BF16} in mode {MIXED}: bf16 holds no larger ones"
                raise ArgumentError(f"{name}.{part}.planes[0][0]", f"a scale of byte {byte}", allowed)
            self.register_buffer(f"{part}_codes", codes)
            self.register_buffer(f"{part}_scales", scales)
        self.register_buffer("alpha_gate", first[:, 0].contiguous())
        self.register_buffer("alpha_up", first[:, 1].contiguous())
        self.register_buffer("alpha_down", second.contiguous())
        self.register_buffer("x_scale", x_scale)
        self.register_buffer("h_scales", h_scales)

    def forward(
        self,
        x: Tensor,
        rows: Tensor | None = None,
        groups: tuple[Tensor, Tensor] | None = None,
        routing: Tensor | None = None,
        *,
        quantised: Operand | None = None,
        count: int | None = None,
        limit: float = 10.0,
        out: str = "bf16",
        backend: str = "auto",
    ) -> Tensor:
        """Both GEMMs: [R, d].

        Args:
            rows: tokens sorted by expert. groups: offsets and counts of them; None: one expert has all.
            routing: weights of the rows. quantised: x in the format of the mode, in the order of ``rows``; None: x is
            quantised here. count: routes to these experts, as far as the host knows; None: one a token.
            out: "bf16" or "fp32". limit, backend: as of `Moe`.
        """

        expected = -(-(len(x) if count is None else count) // self.count)
        bf16 = self.mixed and quantised is None and many(expected)
        recipe = "bf16" if bf16 else self.recipe

        def product(given: Operand, w: Operand, **options: Any) -> Operand:
            common = {"mode": self.product, "backend": backend, **options}
            if groups is None:
                return linear(given, Operand(w.codes[0], None if w.scales is None else w.scales[0]), **common)
            return moe_gemm(given, w, *groups, expected=expected, **common)

        first = {} if groups is None else {"routing": routing, "groups_ready": quantised is None}
        if self.tiled and groups is not None and rows is not None and quantised is None:
            if gathers(expected, self.product, recipe == "bf16"):
                # without a cast the launch before is the one that makes the groups
                first |= {"rows": rows, "groups_ready": recipe != "bf16"}
                rows = None
        h = product(
            self.activations(x, rows, recipe, backend) if quantised is None else self.repeated(quantised),
            Operand(self.first_codes, self.first_scales),
            alpha=self.alpha_gate,
            alpha_up=self.alpha_up,
            swiglu=True,
            out_format=recipe,
            out_global=self.h_scales,
            limit=limit,
            **first,
        )
        ready = {} if groups is None else {"groups_ready": True}  # the launch before, the first GEMM, read them
        w = Operand(self.second_codes, self.second_scales)
        return product(self.repeated(h), w, alpha=self.alpha_down, out_format=out, **ready).codes

    def activations(self, x: Tensor, rows: Tensor | None, recipe: str, backend: str) -> Operand:
        """Tokens in the order of ``rows``, in a format of `quantize` or bf16."""
        if recipe == "bf16":
            return Operand(x if rows is None else x[rows.clamp(min=0).long()])
        q = quantize(x, recipe, global_scale=self.x_scale, rows=rows, swizzled=True, backend=backend)
        return self.repeated(Operand(q.codes, q.scales))

    def repeated(self, x: Operand) -> Operand:
        """The same numbers once for each plane of the weights, along K."""
        if self.copies == 1:
            return x
        return Operand(x.codes.repeat(1, self.copies), _along_k([x.scales] * self.copies, len(x.codes)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        return super()._apply(keeps_types(fn), recurse)


class Fp8Expert(torch.nn.Module):
    """The shared expert on a Hopper. Two launches of `linear` in mode "fp8_block", FP8 weights as they are stored.

    `swiglu_quant` is between them.

    Args:
        name: of the argument, in errors. experts: a single one. hidden: d. backend: of every op.
        out: "bf16" or "fp32".

    Attributes:
        first, second: the layers. recipe: of the activations, "fp8".

    Raises:
        ArgumentError: sizes that are no multiples of 128, operands of another type or shape, several experts.
    """

    precision, product, recipe, count = FP8_BLOCK, FP8_BLOCK, "fp8", 1

    def __init__(self, name: str, experts: Experts, hidden: int, backend: str = "auto", out: str = "bf16") -> None:
        super().__init__()
        self.width = _check_fp8(name, experts, hidden)
        options = {"backend": backend, "arch": HOPPER}
        first, second = (
            FP8Tensor(codes[0], scales[0], (TILE, TILE)) for ((codes, scales),) in (w.planes for w in experts[:2])
        )
        self.first, self.second = Dense([first], out="fp32", **options), Dense([second], out=out, **options)

    def forward(
        self,
        x: Tensor,
        *,
        quantised: Operand | None = None,
        limit: float = 10.0,
        out: str = "bf16",
        backend: str = "auto",
    ) -> Tensor:
        """Apply the expert: [T, d].

        Args:
            x: bf16 [T, d]. quantised: x in FP8, row-major scales; None: x is quantised here.
            limit: of the clamp. out: the type that it was made with. backend: that of the layer.
        """
        if out != self.second.out:
            raise ArgumentError("out", out, self.second.out)
        both = self.first(x if quantised is None else quantised)[0]
        return self.second(swiglu_quant(both, limit=limit, backend=backend))[0]


def keeps_types(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return ``fn`` of `Module._apply`, refused where it would change a type. The kernels read these and no others."""

    def moved(x: Tensor) -> Tensor:
        found = fn(x)
        if found.dtype != x.dtype:
            raise ArgumentError("dtype", found.dtype, f"{x.dtype} kept: the layer moves between devices, not types")
        return found

    return moved


def _check_experts(name: str, experts: Experts, product: str, hidden: int) -> tuple[int, int]:
    """(E, I) of experts whose operands are those of the GEMM's mode ``product``."""
    packed = 2 if product in ("nvfp4", "w4a8") else 1
    dtype = torch.bfloat16 if product == "bf16" else torch.uint8
    block = {"nvfp4": 16, "bf16": 0}.get(product, 32)
    codes = experts.first.planes[0][0] if experts.first.planes else None
    if not isinstance(codes, Tensor) or codes.dim() != 3 or 0 in codes.shape or codes.shape[1] % 64:
        found = tuple(codes.shape) if isinstance(codes, Tensor) else codes
        raise ArgumentError(f"{name}.first.planes", found, "codes [E, 2 I, d], 2 I a multiple of 64")
    count, width = codes.shape[0], codes.shape[1] // 2
    for part, weights, rows, k, alphas in (
        ("first", experts.first, 2 * width, hidden, 2),
        ("second", experts.second, hidden, width, 1),
    ):
        where = f"{name}.{part}"
        if len(weights.planes) != len(experts.first.planes):
            raise ArgumentError(f"{where}.planes", len(weights.planes), f"{len(experts.first.planes)}, as first has")
        for i, plane in enumerate(weights.planes):
            place = f"{where}.planes[{i}]"
            if len(plane) != 2 or not all(isinstance(one, Tensor | None) for one in plane) or plane[0] is None:
                raise ArgumentError(place, [type(one).__name__ for one in plane], "(codes, scales or None)")
            codes, scales = plane
            check(f"{place}[0]", _bytes(codes), dtype, (count, rows, k // packed), codes)
            if (scales is None) != (block == 0):
                allowed = f"swizzled scales in mode {product}" if block else "None for bf16"
                raise ArgumentError(f"{place}[1]", None if scales is None else "given", allowed)
            if scales is not None:
                size = -(-rows // 128) * -(-k // (4 * block)) * 512
                check(f"{place}[1]", scales, torch.uint8, (count, size), codes)
        check(f"{where}.alphas", weights.alphas, torch.float32, (count, alphas), weights.planes[0][0])
        in_range(f"{where}.alphas", weights.alphas, _positive(weights.alphas), "positive and finite")
    if product == "nvfp4":
        if experts.input_scales is None:
            raise ArgumentError(f"{name}.input_scales", None, f"fp32 [{count}, 2] in mode nvfp4, of its activations")
        check(f"{name}.input_scales", experts.input_scales, torch.float32, (count, 2), experts.first.alphas)
        in_range(f"{name}.input_scales", experts.input_scales, _positive(experts.input_scales), "positive and finite")
    return count, width


def _check_tiled(name: str, experts: Experts, product: str, hidden: int) -> tuple[int, int]:
    """(E, I) of experts whose operands are tiled for mode ``product``."""
    first = experts.first.planes[0][0] if len(experts.first.planes) == 1 else None
    if not isinstance(first, Tensor) or first.dim() != 4 or first.dtype != torch.uint8:
        found = f"{first.dtype}{list(first.shape)}" if isinstance(first, Tensor) else first
        raise ArgumentError(f"{name}.first.planes", found, f"one, of what `tile_weights` makes for mode {product}")
    count, width = len(first), first.shape[1] * 32
    wanted = {"first": (experts.first, (2 * width, hidden), 2), "second": (experts.second, (hidden, width), 1)}
    for part, (weights, shape, alphas) in wanted.items():
        where = f"{name}.{part}"
        if len(weights.planes) != 1 or len(weights.planes[0]) != 2 or weights.planes[0][1] is not None:
            raise ArgumentError(f"{where}.planes", len(weights.planes), "one, (tiled weights, None)")
        codes = weights.planes[0][0]
        try:
            found = tiled_shape(tuple(codes.shape), product)[:2]
        except ArgumentError as error:
            raise ArgumentError(f"{where}.planes[0][0]", error.value, error.allowed) from None
        if found != shape or len(codes) != count:
            raise ArgumentError(f"{where}.planes[0][0]", (len(codes), *found), f"{count} experts of {shape}")
        check(f"{where}.planes[0][0]", codes, torch.uint8, tuple(codes.shape), first)
        check(f"{where}.alphas", weights.alphas, torch.float32, (count, alphas), first)
        in_range(f"{where}.alphas", weights.alphas, _positive(weights.alphas), "positive and finite")
    return count, width


def _check_fp8(name: str, experts: Experts, hidden: int) -> int:
    """I of a single expert in mode ``fp8_block``."""
    if len(experts.first.planes) != 1 or len(experts.second.planes) != 1:
        raise ArgumentError(f"{name}.first.planes", len(experts.first.planes), f"one in mode {FP8_BLOCK}")
    codes = experts.first.planes[0][0]
    rows = codes.shape[1] if codes.dim() == 3 else 0
    if not rows or rows % (2 * TILE) or hidden % TILE:
        allowed = f"[1, 2 I, d], I and d multiples of {TILE} in mode {FP8_BLOCK}"
        raise ArgumentError(f"{name}.first.planes[0][0]", tuple(codes.shape), allowed)
    for part, weights, shape in (
        ("first", experts.first, (rows, hidden)),
        ("second", experts.second, (hidden, rows // 2)),
    ):
        found, scales = weights.planes[0]
        check(f"{name}.{part}.planes[0][0]", _bytes(found), torch.uint8, (1, *shape), codes)
        if scales is None or scales.dtype not in (torch.uint8, torch.float32):
            raise ArgumentError(f"{name}.{part}.planes[0][1]", getattr(scales, "dtype", None), "uint8 or float32")
        check(f"{name}.{part}.planes[0][1]", scales, scales.dtype, (1, *(n // TILE for n in shape)), codes)
    return rows // 2


def check(name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple, like: Tensor) -> None:
    """Raise ArgumentError unless ``x`` is None or of this type and shape.

    It is on the device of ``like``; None is any extent.
    """
    if x is None:
        return
    same = x.dim() == len(shape) and all(want in (None, have) for have, want in zip(x.shape, shape, strict=True))
    if x.dtype != dtype or not same:
        raise ArgumentError(name, f"{x.dtype}{list(x.shape)}", f"{dtype}{list(shape)}".replace("None", "any"))
    if x.device != like.device:
        raise ArgumentError(f"{name}.device", str(x.device), f"{like.device}, that of the others")


def _positive(x: Tensor) -> Tensor:
    return x.isfinite() & (x > 0)


def in_range(name: str, x: Tensor, good: Tensor, allowed: str) -> None:
    """Raise ArgumentError with the first place where ``good`` is False. Tensors without values pass."""
    if x.is_meta or bool(good.all()):
        return
    at = (~good).nonzero()[0].tolist()
    raise ArgumentError(f"{name}[{', '.join(map(str, at))}]", x[tuple(at)].item(), allowed)


def _bytes(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.dtype.itemsize == 1 else codes


def _along_k(images: list[Tensor], rows: int) -> Tensor:
    """Swizzled scales of matrices that follow one another along K: blocks run along K first, each K fills its last."""
    blocks = [image.unflatten(-1, (-(-rows // 128), -1)) for image in images]
    return torch.cat(blocks, -1).flatten(-2)
