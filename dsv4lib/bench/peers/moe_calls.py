"""Call the same block-scaled GEMM by other people's kernels. One set of quantised operands, as each kernel takes it.

A problem is `rows` (activations, sorted by expert) times the weights of each expert, both quantised by `formats` and
kept in standard form: packed codes, row-major scales with their 128x4 image, one global scale an operand, offsets of
the experts' rows. ``dense``: one expert and full tiles. ``few``: 8 rows, as in decoding. ``grouped``: three experts,
one without rows, the others with less than a tile. ``swiglu``: grouped, the weights are gate rows, then up rows, and
the result is silu(gate) * up.

What differs, because a kernel takes nothing else:
* padding: scales of an expert start at a multiple of 128 rows, in some kernels its activations too (128 or 256);
* order of the weights' rows for SwiGLU: up and gate alternate in blocks of 64 (FlashInfer) or 32 (cuDNN), or gate and
  up row by row (quack);
* FlashInfer's second GEMM adds each row, times a routing weight (here 1), to its token's output with atomics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e2m1, e4m3, fp8_block, mxfp4, nvfp4, scale_swizzle, ue8m0

LENGTHS = 2048, 4096  # K of DSV4-Flash's experts: their width, and the model's
# Rows of each expert, and N.
SHAPES = {"dense": ((256,), 512), "few": ((8,), 512), "grouped": ((100, 0, 77), 256), "swiglu": ((100, 0, 77), 256)}
SWIGLU_LIMIT = 10.0  # DSV4's clamp, which none of the numbers here reaches: others have no clamp, or another one
FORMS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}  # values that share a scale
BF16, FP4, E4M3, E8M0 = torch.bfloat16, torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e8m0fnu


@dataclass(frozen=True)
class Matrix:
    """Quantised rows.

    Attributes:
        form: one of `FORMS`.
        codes: uint8 [..., R, K/2], two E2M1 a byte, even k low; mxfp8: E4M3 bytes [..., R, K].
        scales: uint8 [..., R, K/block], row-major: E4M3 bytes for nvfp4, else E8M0.
        global_scale: of all values; 1 but for nvfp4.
    """

    form: str
    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: float = 1.0

    @property
    def typed(self) -> torch.Tensor:
        """Return the codes in torch's type."""
        return self.codes.view(E4M3 if self.form == "mxfp8" else FP4)

    @property
    def scale_type(self) -> torch.dtype:
        """Return the type of the scales, in torch."""
        return E4M3 if self.form == "nvfp4" else E8M0

    @property
    def image(self) -> torch.Tensor:
        """Return the scales in 128x4 blocks (`scale_swizzle`). Typed [..., ceil(R/128), ceil(K/block/4), 32, 4, 4]."""
        blocks = -(-self.scales.shape[-2] // 128), -(-self.scales.shape[-1] // 4), 32, 4, 4
        return scale_swizzle.swizzle(self.scales).reshape(*self.scales.shape[:-2], *blocks).view(self.scale_type)

    def values(self) -> torch.Tensor:
        """Return what the numbers are, fp64 [..., R, K]."""
        if self.form == "mxfp8":
            values = e4m3.decode(self.codes, torch.float64)
        else:
            values = e2m1.decode(e2m1.unpack(self.codes), torch.float64)
        decode = e4m3.decode if self.form == "nvfp4" else ue8m0.decode
        return values * decode(self.scales, torch.float64).repeat_interleave(FORMS[self.form], -1) * self.global_scale

    def rows(self, index: torch.Tensor) -> Matrix:
        """Return these rows; zeros where the index is negative."""
        there = (index >= 0)[:, None]
        chosen = index.clamp(min=0).long()
        codes, scales = (torch.where(there, x[..., chosen, :], 0) for x in (self.codes, self.scales))
        return replace(self, codes=codes, scales=scales)


def quantize(x: torch.Tensor, form: str) -> Matrix:
    """Quantise the rows of ``x`` [..., R, K] to one of `FORMS`."""
    if form == "nvfp4":
        q = nvfp4.quantize(x)
        return Matrix(form, q.packed, q.scales, float(q.global_scale))
    if form == "mxfp4":
        q = mxfp4.quantize(x)
        return Matrix(form, q.packed, q.scales)
    if form == "mxfp8":
        q = fp8_block.quantize(x, (1, FORMS[form]))
        return Matrix(form, q.codes, q.scales)
    raise ArgumentError("form", form, "one of " + ", ".join(FORMS))


@dataclass(frozen=True)
class Problem:
    """rows [T, K], sorted by expert. Weights [E, N, K]; offsets int32 [E + 1], of the experts' first rows."""

    case: str
    rows: Matrix
    weights: Matrix
    offsets: torch.Tensor

    @property
    def counts(self) -> list[int]:
        """Return the rows of each expert."""
        return self.offsets.diff().tolist()

    @property
    def alpha(self) -> torch.Tensor:
        """Return the product of the global scales, fp32 [E]."""
        return torch.full((len(self.counts),), self.rows.global_scale * self.weights.global_scale)

    def products(self) -> torch.Tensor:
        """Multiply every row by its expert's weights, fp64 [T, N]."""
        a, b = self.rows.values(), self.weights.values()
        parts = zip(a.split(self.counts), b, strict=True)
        return torch.cat([part @ weight.T for part, weight in parts])

    def truth(self) -> torch.Tensor:
        """Return the result in fp64: `products`, or silu(gate) * up of them [T, N/2]."""
        found = self.products()
        if self.case != "swiglu":
            return found
        if float(found.abs().max()) >= SWIGLU_LIMIT:
            raise ArgumentError("products", float(found.abs().max()), f"less than the clamp, {SWIGLU_LIMIT}")
        gate, up = found.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def place(self, multiple: int) -> torch.Tensor:
        """Return int32 [P]: the row at each place, -1: padding. Experts start at multiples of ``multiple``."""
        starts, out = self.offsets.tolist(), []
        for first, count in zip(starts, self.counts, strict=False):
            out += [*range(first, first + count), *[-1] * (-count % multiple)]
        return torch.tensor(out, dtype=torch.int32)

    def alternating(self, block: int, first: str) -> Matrix:
        """Return the weights with alternating blocks of gate and up rows. Those of ``first`` come first."""
        half = self.weights.codes.shape[-2] // 2
        index = torch.arange(2 * half).reshape(2, -1, block)
        index = (index if first == "gate" else index.flip(0)).transpose(0, 1).flatten()
        return self.weights.rows(index)


def problem(case: str, forms: tuple[str, str], k: int, seed: int = 0) -> Problem:
    """Return normals with row scales of 1/2 .. 2, no two alike, whose products have about those as standard deviations.

    Args:
        case: a name of `SHAPES`. forms: of the rows and of the weights, see `FORMS`. k: length of the product.

    Raises:
        ArgumentError: an unknown case or form, or K no multiple of 128.
    """
    if case not in SHAPES or k <= 0 or k % 128:
        raise ArgumentError("case, k", (case, k), f"one of {', '.join(SHAPES)}; a positive multiple of 128")
    generator = torch.Generator().manual_seed(seed)
    counts, columns = SHAPES[case]
    total = sum(counts)
    scale = torch.logspace(-1, 1, total, base=2.0)[torch.randperm(total, generator=generator)]
    rows = torch.randn(total, k, generator=generator) * scale[:, None]
    weights = torch.randn(len(counts), columns, k, generator=generator) / math.sqrt(k)
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    return Problem(case, quantize(rows, forms[0]), quantize(weights, forms[1]), offsets)


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
        name: of the row; package: PyPI name, "" for ours; module: what is imported.
        case: a name of `SHAPES`; forms: of rows and weights.
        out: form of the result as it is stored.
        call: from a `Problem` to [T, N] ([T, N/2] for SwiGLU), dequantised, on the active device; None: not called.
        refused: why it does not run, "" if it does.
    """

    name: str
    package: str
    module: str
    case: str
    forms: tuple[str, str]
    out: str
    call: Callable[[Problem], torch.Tensor] | None
    refused: str = ""


def _ours(given: Problem, tile_n: int, ctas: int = 1, out_form: str = "") -> torch.Tensor:
    """Ours, as `dsv4lib.ops.moe_gemm` and, of a single expert, `.linear` launch it, with tiles of so many rows.

    Args:
        ctas: that share a tile. out_form: of the result, "" for bf16.
    """
    from dsv4lib import backends
    from dsv4lib.dsl.compile import compile_for
    from dsv4lib.ops.linear.sm100 import Linear
    from dsv4lib.ops.moe_gemm import arguments
    from dsv4lib.ops.moe_gemm.op import new_output
    from dsv4lib.ops.moe_gemm.sm100 import MoeGemm

    a, single, swiglu = given.rows, len(given.counts) == 1, given.case == "swiglu"
    b = given.alternating(8, "gate") if swiglu else given.weights
    place = given.place(1 if single else 128)
    a = a.rows(place)
    codes, images = (a.codes[None], b.codes) if single else (a.codes, b.codes), (a.image, b.image)
    images = [image.view(torch.uint8).reshape(*(len(b.codes),) * (i or single), -1) for i, image in enumerate(images)]
    out = new_output(codes[0], b.codes.shape[-2] // (2 if swiglu else 1), out_form or "bf16")
    alpha = given.alpha if a.form == "nvfp4" else None
    call = arguments.Call(*codes, out.codes, x_scales=images[0], w_scales=images[1], alpha=alpha, limit=SWIGLU_LIMIT)
    call.alpha_up, call.out_scales = alpha if swiglu else None, out.scales
    if not single:
        ends = (given.offsets.diff() + 127).div(128, rounding_mode="floor").cumsum(0) * 128
        call.offsets = torch.cat([torch.zeros(1), ends[:-1]]).int()
        call.counts = given.offsets.diff().int()
    if out_form == "nvfp4":
        scale = nvfp4.shared_global_scale(given.truth()).float()
        call.out_global = scale.expand(len(b.codes)).contiguous()
    mode = {"nvfp4": "nvfp4", "mxfp4": "w4a8", "mxfp8": "mxfp8"}[b.form]
    kind = Linear if single else MoeGemm
    kernel = kind(mode=mode, tile_n=tile_n, ctas=ctas, swiglu=swiglu, out=out_form or "bf16", alpha=alpha is not None)
    tiles = sum(-(-n // tile_n) for n in given.counts) * (b.codes.shape[-2] // kernel.pair_m)
    code = compile_for(kernel, arguments.fake_args(kernel))
    backends.enqueue("emulator", code, *arguments.launch_args(kernel, call, tiles))
    y = out.codes[0] if single else out.codes
    if out_form:
        found = scale_swizzle.unswizzle(out.scales, len(place), b.codes.shape[-2] // 2 // FORMS[out_form])
        y = Matrix(out_form, y, found, float(call.out_global[0]) if out_form == "nvfp4" else 1.0).values()
    return y[place >= 0]


def _quack_operand(matrix: Matrix, image: torch.Tensor) -> Any:
    from quack.blockscaled.operand import BlockScaledOperand

    name = "mxfp8_e4m3" if matrix.form == "mxfp8" else matrix.form
    scale = torch.tensor(matrix.global_scale) if matrix.form == "nvfp4" else None
    return BlockScaledOperand.from_parts(matrix.typed, image, name, per_tensor_scale=scale)


def _quack(given: Problem) -> torch.Tensor:
    from quack.gemm_interface import gemm

    a, b = given.rows, given.weights.rows(torch.arange(given.weights.codes.shape[-2]))
    if len(given.counts) == 1:
        left = _quack_operand(a, a.image)
        right = _quack_operand(replace(b, codes=b.codes[0], scales=b.scales[0]), b.image[0])
        return gemm(left, right.mT, tuned=False, out_dtype=BF16)
    # Scales of expert e start at row (offset // 128 + e) * 128.
    index = torch.full(((-(-len(a.codes) // 128) + len(given.counts) - 1) * 128,), -1, dtype=torch.int32)
    for e, (first, count) in enumerate(zip(given.offsets.tolist(), given.counts, strict=False)):
        at = (first // 128 + e) * 128
        index[at : at + count] = torch.arange(first, first + count)
    left = _quack_operand(a, a.rows(index).image[None])
    if given.case == "swiglu":
        from quack.gemm_interface import gemm_act

        b = given.alternating(1, "gate")
        right = _quack_operand(b, b.image).mT
        return gemm_act(
            left,
            right,
            activation="swiglu",
            cu_seqlens_m=given.offsets,
            store_preact=False,
            out_dtype=BF16,
            tuned=False,
        )[1]
    return gemm(left, _quack_operand(b, b.image).mT, cu_seqlens_m=given.offsets, tuned=False, out_dtype=BF16)


def _flashinfer(given: Problem, backend: str = "cute-dsl") -> torch.Tensor:
    import flashinfer.gemm as fi

    a, b = given.rows, given.weights
    if a.form == "mxfp8":
        images = (m.image.view(torch.uint8).flatten() for m in (a, b))
        return fi.mm_mxfp8(a.typed, b.typed[0].T, *images, backend=backend)
    images = [m.image.view(torch.uint8).reshape(-1, m.scales.shape[-1]) for m in (a, b)]
    return fi.mm_fp4(
        a.codes,
        b.codes[0].T,
        images[0],
        images[1].T,
        given.alpha,
        BF16,
        block_size=FORMS[a.form],
        use_nvfp4=a.form == "nvfp4",
        backend=backend,
    )


def _masked(given: Problem) -> torch.Tensor:
    """Each expert's rows in a buffer of its own, as long as the largest, in tiles of 128."""
    from flashinfer.gemm import grouped_gemm_nt_masked

    b, experts = given.weights, len(given.counts)
    tall = -(-max(given.counts) // 128) * 128
    index = torch.full((experts, tall), -1, dtype=torch.int32)
    for e, (first, count) in enumerate(zip(given.offsets.tolist(), given.counts, strict=False)):
        index[e, :count] = torch.arange(first, first + count)
    a = given.rows.rows(index.flatten())
    a = replace(a, codes=a.codes.reshape(experts, tall, -1), scales=a.scales.reshape(experts, tall, -1))
    out = torch.zeros(experts, tall, b.codes.shape[1], dtype=BF16)
    operands = [(m.codes.permute(1, 2, 0), m.image.permute(3, 4, 1, 5, 2, 0)) for m in (a, b)]
    kinds = {"ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16}
    counts = torch.tensor(given.counts, dtype=torch.int32)
    scale = {"alpha": given.alpha.reshape(1, 1, -1), "alpha_dtype": "float32"}
    grouped_gemm_nt_masked(*operands, out.permute(1, 2, 0), counts, **kinds, **scale)
    return torch.cat([out[e, :count] for e, count in enumerate(given.counts)])


_FLASHINFER = {"nvfp4": "float4_e2m1fn", "mxfp4": "float4_e2m1fn", "mxfp8": "float8_e4m3fn"}


def _flashinfer_types(given: Problem) -> dict[str, Any]:
    return {
        "a_dtype": _FLASHINFER[given.rows.form],
        "b_dtype": _FLASHINFER[given.weights.form],
        "sf_dtype": "float8_e4m3fn" if given.rows.form == "nvfp4" else "float8_e8m0fnu",
        "sf_vec_size": FORMS[given.rows.form],
    }


def _tiles(given: Problem, tile: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each tile of rows its expert, the end of its expert's rows, and how many tiles there are."""
    experts, ends, start = [], [], 0
    for e, count in enumerate(given.counts):
        tiles = -(-count // tile)
        experts += [e] * tiles
        ends += [min(start + (i + 1) * tile, start + count) for i in range(tiles)]
        start += tiles * tile
    return tuple(torch.tensor(x, dtype=torch.int32) for x in (experts, ends, [len(experts)]))


def _packed(matrix: Matrix) -> torch.Tensor:
    return matrix.typed if matrix.form == "mxfp8" else matrix.codes


def _gathering(given: Problem, out_form: str = "", tile: int = 256) -> torch.Tensor:
    """FlashInfer's first GEMM: rows fetched by token, SwiGLU in the epilogue; ``out_form``: quantised there, too."""
    from flashinfer.fused_moe.cute_dsl import blockscaled_contiguous_gather_grouped_gemm_act_fusion as module

    a, b = given.rows, given.alternating(64, "up")
    experts, ends, tiles = _tiles(given, tile)
    place = given.place(tile)
    quantised: dict[str, Any] = {}
    if out_form:
        quantised = {"quantize_output": True, "c_dtype": _FLASHINFER[out_form]}
    if out_form == "nvfp4":  # the reciprocal of the result's global scale
        scale = float(nvfp4.shared_global_scale(given.truth()))
        quantised["global_scale"] = torch.tensor([1 / scale])
    out, scales = module.blockscaled_contiguous_gather_grouped_gemm_act_fusion(
        _packed(a),
        _packed(b),
        a.scales,
        b.image.view(torch.uint8),
        given.alpha,
        experts,
        ends,
        place,
        tiles,
        topk=1,
        mma_tiler_mn=(tile, 128),
        cluster_shape_mn=(tile // 128, 1),
        **_flashinfer_types(given),
        **quantised,
    )
    if out_form:
        columns = b.codes.shape[-2] // 2 // FORMS[out_form]
        found = scale_swizzle.unswizzle(scales.flatten(), len(place), columns)
        out = Matrix(out_form, out.view(torch.uint8), found, scale if out_form == "nvfp4" else 1.0).values()
    return out[place >= 0]


def _finalizing(given: Problem, tile: int = 256) -> torch.Tensor:
    """FlashInfer's second GEMM: each row is added to its token's output, times a routing weight."""
    from flashinfer.fused_moe.cute_dsl import blockscaled_contiguous_grouped_gemm_finalize_fusion as module

    experts, ends, tiles = _tiles(given, tile)
    place = given.place(tile)
    a, b = given.rows.rows(place), given.weights
    return module.blockscaled_contiguous_grouped_gemm_finalize_fusion(
        _packed(a),
        _packed(b),
        a.image.view(torch.uint8),
        b.image.view(torch.uint8),
        given.alpha,
        experts,
        tiles,
        ends,
        place,
        torch.ones(sum(given.counts), 1),
        mma_tiler_mn=(tile, 128),
        cluster_shape_mn=(tile // 128, 1),
        **_flashinfer_types(given),
    )


def _cudnn_dense(given: Problem) -> torch.Tensor:
    from cudnn.gemm.cutedsl.dense.amax.api import gemm_amax_wrapper_sm100

    sides = [
        (m.typed.reshape(-1, m.codes.shape[-1]), m.image.reshape(-1, *m.image.shape[-4:]))
        for m in (given.rows, given.weights)
    ]
    (a, sa), (b, sb) = ((x[..., None], s[None].permute(3, 4, 1, 5, 2, 0)) for x, s in sides)
    out = gemm_amax_wrapper_sm100(a, b, sa, sb, c_dtype=torch.float32, sf_vec_size=FORMS[given.rows.form])
    return out["c_tensor"][..., 0].double() * given.alpha[0]


def _cudnn_grouped(given: Problem, align: int = 256) -> torch.Tensor:
    place = given.place(align)
    a = given.rows.rows(place)
    ends = torch.tensor([-(-n // align) * align for n in given.counts]).cumsum(0).int()
    shared = {"alpha_tensor": given.alpha, "sf_vec_size": FORMS[a.form], "d_dtype": BF16}
    if given.case == "swiglu":
        from cudnn.gemm.cutedsl.grouped.glu.api import grouped_gemm_glu_wrapper_sm100

        if a.form == "mxfp8":  # it then wants to quantise the result, too
            shared |= {"d_dtype": E4M3, "norm_const_tensor": torch.ones(1)}
        b = given.alternating(32, "gate")
        out = grouped_gemm_glu_wrapper_sm100(
            a.typed, a.image, ends, b_tensor=b.typed, sfb_tensor=b.image, act_func="swiglu", **shared
        )
        if a.form == "mxfp8":
            codes, image = out["d_tensor"].view(torch.uint8), out["sfd_row_tensor"].view(torch.uint8)
            scales = scale_swizzle.unswizzle(image.flatten(), len(place), codes.shape[-1] // FORMS["mxfp8"])
            return Matrix("mxfp8", codes, scales).values()[place >= 0]
    else:
        from cudnn.gemm.cutedsl.grouped.quant.api import grouped_gemm_quant_wrapper_sm100

        b = given.weights
        out = grouped_gemm_quant_wrapper_sm100(a.typed, a.image, ends, b_tensor=b.typed, sfb_tensor=b.image, **shared)
    return out["d_tensor"][place >= 0]


_NV, _MX4, _MX8, _MIXED = ("nvfp4",) * 2, ("mxfp4",) * 2, ("mxfp8",) * 2, ("mxfp8", "mxfp4")
_QUACK, _FI, _CUDNN = (
    ("quack-kernels", "quack"),
    ("flashinfer-python", "flashinfer.cute_dsl"),
    ("nvidia-cudnn-frontend", "cudnn"),
)
_LINEAR, _MOE = ("", "dsv4lib.ops.linear"), ("", "dsv4lib.ops.moe_gemm")


def _row(
    name: str,
    package: tuple[str, str],
    case: str,
    forms: tuple[str, str],
    call: Callable[..., torch.Tensor] | None,
    *given: Any,
    out: str = "bf16",
    refused: str = "",
) -> Kernel:
    """A row of the table; ``given``: further arguments of ``call``, after the problem."""
    return Kernel(name, *package, case, forms, out, call and (lambda problem: call(problem, *given)), refused)


# A tile holds an expert's rows, in one CTA; the 256 of `dense` a pair shares.
OURS = (
    _row("ours", _LINEAR, "dense", _NV, _ours, 256, 2),
    _row("ours, mxfp8 x mxfp4", _LINEAR, "dense", _MIXED, _ours, 256, 2),
    _row("ours, mxfp8", _LINEAR, "dense", _MX8, _ours, 256, 2),
    _row("ours, 8 rows", _LINEAR, "few", _NV, _ours, 64),
    _row("ours, groups", _MOE, "grouped", _NV, _ours, 128),
    _row("ours, groups, mxfp8 x mxfp4", _MOE, "grouped", _MIXED, _ours, 128),
    _row("ours, GEMM 1", _MOE, "swiglu", _NV, _ours, 128),
    _row("ours, GEMM 1, to nvfp4", _MOE, "swiglu", _NV, _ours, 128, 1, "nvfp4", out="nvfp4"),
    _row("ours, GEMM 1, mxfp8 x mxfp4", _MOE, "swiglu", _MIXED, _ours, 128, 1, "mxfp8", out="mxfp8"),
    _row("ours, GEMM 1, mxfp8", _MOE, "swiglu", _MX8, _ours, 128, 1, "mxfp8", out="mxfp8"),
)
_FREED = "stopped by the emulator: all four epilogue warps free the CTA's tensor memory, three of them after it is gone"
_ONE_TYPE = "refused by its check: both operands must have one type"
_NO_GROUPS = "refused by its check: no groups with block-scaled operands and an activation"
_NVCC = "CUDA C++, built by nvcc on first use"
_CUTLASS = f"{_NVCC}: the emulator takes the PTX of CuTeDSL"
_CLOSED = "a closed library (libcudnn) with SASS only"
_CUBINS = "cubins that are downloaded on first use: SASS only"
_OTHER_GPU = "CUDA C++ for compute capability 12.x only"
_MEGA = "not tried: one kernel for both GEMMs and the exchange between GPUs, to be compared with mega_moe"
OTHERS = (
    _row("quack", _QUACK, "dense", _NV, _quack),
    _row("FlashInfer mm_fp4", _FI, "dense", _NV, _flashinfer),
    _row("cuDNN grouped", _CUDNN, "dense", _NV, _cudnn_grouped),
    _row("quack, mxfp4", _QUACK, "dense", _MX4, _quack),
    _row("quack, mxfp8 x mxfp4", _QUACK, "dense", _MIXED, _quack),
    _row("quack, mxfp8", _QUACK, "dense", _MX8, _quack),
    _row("FlashInfer mm_mxfp8", _FI, "dense", _MX8, _flashinfer),
    _row("quack, 8 rows", _QUACK, "few", _NV, _quack),
    _row("FlashInfer mm_fp4, 8 rows", _FI, "few", _NV, _flashinfer),
    _row("FlashInfer low latency, 8 rows", _FI, "few", _NV, _flashinfer, "cutedsl_low_latency"),
    _row("quack, groups", _QUACK, "grouped", _NV, _quack),
    _row("FlashInfer masked", _FI, "grouped", _NV, _masked),
    _row("FlashInfer GEMM 2", _FI, "grouped", _NV, _finalizing),
    _row("cuDNN groups", _CUDNN, "grouped", _NV, _cudnn_grouped),
    _row("quack, groups, mxfp8 x mxfp4", _QUACK, "grouped", _MIXED, _quack),
    _row("FlashInfer GEMM 2, mxfp8 x mxfp4", _FI, "grouped", _MIXED, _finalizing),
    _row("FlashInfer GEMM 1", _FI, "swiglu", _NV, _gathering),
    _row("FlashInfer GEMM 1, to nvfp4", _FI, "swiglu", _NV, _gathering, "nvfp4", out="nvfp4"),
    _row("cuDNN SwiGLU", _CUDNN, "swiglu", _NV, _cudnn_grouped),
    _row("FlashInfer GEMM 1, mxfp8 x mxfp4", _FI, "swiglu", _MIXED, _gathering, "mxfp8", out="mxfp8"),
    _row("cuDNN SwiGLU, mxfp8", _CUDNN, "swiglu", _MX8, _cudnn_grouped, out="mxfp8"),
    _row("cuDNN GEMM + amax", _CUDNN, "dense", _NV, _cudnn_dense, out="fp32", refused=_FREED),
    _row("cuDNN groups, mxfp8 x mxfp4", _CUDNN, "grouped", _MIXED, _cudnn_grouped, refused=_ONE_TYPE),
    _row("quack, SwiGLU", _QUACK, "swiglu", _NV, _quack, refused=_NO_GROUPS),
    _row("FlashInfer mm_fp4, CUTLASS", _FI, "dense", _NV, None, refused=_CUTLASS),
    _row("FlashInfer mm_fp4, cuDNN", _FI, "dense", _NV, None, refused=_CLOSED),
    _row("FlashInfer mm_fp4 and MoE, TensorRT-LLM", _FI, "swiglu", _NV, None, refused=_CUBINS),
    _row("FlashInfer group_gemm_nvfp4", _FI, "grouped", _NV, None, refused=_OTHER_GPU),
    _row("FlashInfer group_gemm_mxfp8_mxfp4", _FI, "grouped", _MIXED, None, refused=_NVCC),
    _row("FlashInfer mega MoE", _FI, "swiglu", _NV, None, refused=_MEGA),
)
KERNELS = (*OURS, *OTHERS)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
