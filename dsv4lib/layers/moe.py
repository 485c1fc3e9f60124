"""The MoE layer: router, dispatch, experts in one of the precision modes, combine.

    experts, weights = router(x)                    top-k of sqrt(softplus(gate x)) + bias, or by a table of tokens
    rows             = tokens by expert, each expert's rows from a multiple of 128
    h                = silu(min(g, limit)) * clip(u, -limit, limit) [* weight]      first GEMM, quantised as it leaves
    y                = sum over a token's experts of [weight *] W2 h  + shared expert

Six launches, three more for the shared expert, two where its input comes quantised; nothing waits for the device.
Routed and shared experts have a precision each. The routing weight goes into ``h`` as in the released code, except
where the routed experts are in mode ``nvfp4``: there it would take range from the calibrated scale of the second
quantisation, and is applied in the sum.

Calibrated scales of NVFP4 activations. ``x`` is quantised once for all experts, with the largest ``input_scale`` of
their first projections, as serving engines do: nothing that one expert's calibration has room for saturates. ``h`` is
quantised expert by expert, each with its own scale. The epilogues multiply by just these scales, once.

Source: DSV4's released code; the modes are those of `dsv4lib.formats.weight_modes`. `dsv4lib.loader.moe.moe_layer`
makes the layer from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.linear.op import linear
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.moe_dispatch.op import moe_dispatch
from dsv4lib.ops.moe_gemm.op import Operand, moe_gemm
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.ops.router.op import Hashed, router

# mode -> (mode of the GEMM, format of its activations)
FORMS = {
    "nvfp4": ("nvfp4", "nvfp4"),
    "mxfp4": ("w4a8", "mxfp8"),
    "e4m3_expand": ("mxfp8", "mxfp8"),
    "e4m3_split": ("mxfp8", "mxfp8"),
    "bf16": ("bf16", "bf16"),
    "ue8m0_naive": ("w4a8", "mxfp8"),
}
PLANE_K = 128  # scales of 4 blocks of 32 fill a 128x4 block: the next plane's begin a new one


class Weights(NamedTuple):
    """Weights of one GEMM of E experts.

    Attributes:
        planes: (codes [E, N, K..], swizzled scales [E, bytes] or None), one or several that are added.
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
        first: gate and up, alternating in runs of 8 rows, [E, 2 I, d]. second: [E, d, I].
        input_scales: fp32 [E, 2], calibrated scale of what enters each expert's first and second GEMM; for mode
            ``nvfp4`` only.
    """

    first: Weights
    second: Weights
    input_scales: Tensor | None = None


class ExpertStack(torch.nn.Module):
    """Experts of one width in one precision: their operands and factors as buffers.

    Args:
        name: of the argument ``experts``, in errors: "experts" or "shared". precision: key of `FORMS`. hidden: d.

    Attributes:
        first_codes, first_scales, second_codes, second_scales: operands of the GEMMs; scales are None for bf16.
        alpha_gate, alpha_up, alpha_down: fp32 [E], what the epilogues multiply by: global scales of weights and of
            calibrated activations.
        x_scale: fp32 [1], h_scales: fp32 [E], of NVFP4 activations; else None.

    Raises:
        ArgumentError: see `Moe`.
    """

    def __init__(self, name: str, experts: Experts, precision: str, hidden: int) -> None:
        super().__init__()
        if precision not in FORMS:
            argument = "precision" if name == "experts" else "shared_precision"
            raise ArgumentError(argument, precision, "one of " + ", ".join(FORMS))
        self.precision, (self.product, self.recipe) = precision, FORMS[precision]
        count, width = _check_experts(name, experts, self.product, hidden)
        self.count, self.width, self.copies = count, width, len(experts.first.planes)
        x_scale = h_scales = None
        first, second = experts.first.alphas, experts.second.alphas[:, 0]
        if self.recipe == "nvfp4":
            x_scale, h_scales = experts.input_scales[:, 0].amax().reshape(1), experts.input_scales[:, 1].contiguous()
            first, second = first * x_scale, second * h_scales
        for part, weights in (("first", experts.first), ("second", experts.second)):
            codes, scales = weights.operand()
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
        k: int = 1,
        limit: float = 10.0,
        backend: str = "auto",
    ) -> Tensor:
        """Both GEMMs: bf16 [R, d].

        Args:
            rows: tokens sorted by expert. groups: offsets and counts of them; None: one expert has all.
            routing: weights of the rows. quantised: x in the format of the mode, in the order of ``rows``; None: x is
            quantised here. k: experts a token. limit, backend: as of `Moe`.
        """

        expected = -(-len(x) * k // self.count)

        def product(given: Operand, w: Operand, **options: Any) -> Operand:
            common = {"mode": self.product, "backend": backend, **options}
            if groups is None:
                return linear(given, Operand(w.codes[0], None if w.scales is None else w.scales[0]), **common)
            return moe_gemm(given, w, *groups, expected=expected, **common)

        h = product(
            self.activations(x, rows, backend) if quantised is None else self.repeated(quantised),
            Operand(self.first_codes, self.first_scales),
            alpha=self.alpha_gate,
            alpha_up=self.alpha_up,
            swiglu=True,
            out_format=self.recipe,
            out_global=self.h_scales,
            limit=limit,
            **({} if groups is None else {"routing": routing}),
        )
        return product(self.repeated(h), Operand(self.second_codes, self.second_scales), alpha=self.alpha_down).codes

    def activations(self, x: Tensor, rows: Tensor | None, backend: str) -> Operand:
        """Tokens in the order of ``rows``, in the format of the mode."""
        if self.recipe == "bf16":
            return Operand(x if rows is None else x[rows.clamp(min=0).long()])
        q = quantize(x, self.recipe, global_scale=self.x_scale, rows=rows, swizzled=True, backend=backend)
        return self.repeated(Operand(q.codes, q.scales))

    def repeated(self, x: Operand) -> Operand:
        """The same numbers once for each plane of the weights, along K."""
        if self.copies == 1:
            return x
        return Operand(x.codes.repeat(1, self.copies), _along_k([x.scales] * self.copies, len(x.codes)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        return super()._apply(_keeps_types(fn), recurse)


class Moe(torch.nn.Module):
    """Routed and shared experts. All tensors are buffers: ``.to``, ``state_dict`` and ``load_state_dict`` see them.

    Args:
        gate: bf16 [E, d]. bias: fp32 [E], for the selection; None in a layer whose ``table`` selects.
        experts: of the router. shared: a single one, or None.
        precision: key of `FORMS`, of the routed experts. shared_precision: of the shared one; None: the same.
        table: int64 [V, k], experts of each token id (the first layers); their weights still come from the gate.
        k, factor, limit: experts a token, the sum of their weights, the clamp of the SwiGLU.
        backend: of every op.

    Raises:
        ArgumentError: an unknown mode; operands of another type or shape than their mode has; input scales missing or
            not positive and finite; planes of different shapes; not one of bias and table; tensors on several devices;
            numbers out of range. On another device than the CPU the last look costs a wait.
    """

    @typed
    def __init__(
        self,
        gate: Tensor,
        bias: Tensor | None,
        experts: Experts,
        precision: str,
        *,
        shared: Experts | None = None,
        shared_precision: str | None = None,
        table: Tensor | None = None,
        k: int = 6,
        factor: float = 1.0,
        limit: float = 10.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if (bias is None) == (table is None):
            raise ArgumentError("bias", None if bias is None else "given", "either a bias or a table")
        if backend not in backends.NAMES:
            raise ArgumentError("backend", backend, "one of " + ", ".join(backends.NAMES))
        if gate.dtype != torch.bfloat16 or gate.dim() != 2 or 0 in gate.shape:
            raise ArgumentError("gate", f"{gate.dtype}{list(gate.shape)}", "torch.bfloat16[E, d]")
        count, hidden = gate.shape
        if not 1 <= k <= count:
            raise ArgumentError("k", k, f"1 to {count}, the number of experts")
        for name, value in (("factor", factor), ("limit", limit)):
            if not 0 < value < float("inf"):
                raise ArgumentError(name, value, "a finite number above 0")
        for name, x, dtype, shape in (
            ("bias", bias, torch.float32, (count,)),
            ("table", table, torch.int64, (None, k)),
        ):
            _check(name, x, dtype, shape, gate)
        _in_range("gate", gate, gate.isfinite(), "finite numbers")
        if bias is not None:
            _in_range("bias", bias, ~bias.isnan(), "numbers")
        if table is not None:
            _in_range("table", table, (table >= 0) & (table < count), f"0 to {count - 1}")
        self.k, self.factor, self.limit, self.backend = k, factor, limit, backend
        self.register_buffer("gate", gate.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("table", table)
        self.experts = ExpertStack("experts", experts, precision, hidden)
        if self.experts.count != count:
            raise ArgumentError("experts", f"{self.experts.count} experts", f"{count}, the rows of gate")
        self.shared = None
        if shared is not None:
            self.shared = ExpertStack(
                "shared", shared, precision if shared_precision is None else shared_precision, hidden
            )
            if self.shared.count != 1:
                raise ArgumentError("shared", f"{self.shared.count} experts", "1")
        elif shared_precision is not None:
            raise ArgumentError("shared_precision", shared_precision, "None without a shared expert")
        for name, x in self.named_buffers():
            if x.device != gate.device:
                raise ArgumentError(f"{name}.device", str(x.device), f"that of gate, {gate.device}")

    @property
    def recipe(self) -> str | None:
        """FP8 recipe in which the shared expert reads the layer's input; None: it reads another format."""
        return "mxfp8" if self.shared is not None and self.shared.recipe == "mxfp8" else None

    @typed
    def forward(self, x: Tensor, tokens: Tensor | None = None, fp8: Operand | None = None) -> Tensor:
        """Apply the layer.

        Args:
            x: bf16 [T, d]. tokens: their ids, int64 [T], where a table selects.
            fp8: x quantised by `recipe`, for the shared expert; None: it is quantised here.

        Returns:
            bf16 [T, d].
        """
        if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] != self.gate.shape[1]:
            raise ArgumentError("x", f"{x.dtype}{list(x.shape)}", f"torch.bfloat16[T, {self.gate.shape[1]}]")
        if (tokens is None) != (self.table is None):
            raise ArgumentError("tokens", None if tokens is None else "given", "given where a table selects")
        hashed = None if tokens is None else Hashed(self.table, tokens)
        settings = {"k": self.k, "factor": self.factor, "bias": self.bias, "hashed": hashed, "backend": self.backend}
        experts, weights = router(x, self.gate, **settings)
        routed = moe_dispatch(experts, weights, count=len(self.gate), backend=self.backend)
        late = weights if self.experts.recipe == "nvfp4" else None
        early = routed.row_weight if late is None else None
        common = {"limit": self.limit, "backend": self.backend}
        y = self.experts(x, routed.rows, (routed.offsets[:-1], routed.counts), early, k=self.k, **common)
        if fp8 is not None and self.recipe is None:
            raise ArgumentError("fp8", "given", "None: no shared expert reads MXFP8")
        shared = None if self.shared is None else self.shared(x, quantised=fp8, **common)
        return moe_combine(y, routed.row_of, late, shared, backend=self.backend)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        return super()._apply(_keeps_types(fn), recurse)


def _keeps_types(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of `Module._apply`, refused where it would change a type: the kernels read these and no others."""

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
            _check(f"{place}[0]", _bytes(codes), dtype, (count, rows, k // packed), codes)
            if (scales is None) != (block == 0):
                allowed = f"swizzled scales in mode {product}" if block else "None for bf16"
                raise ArgumentError(f"{place}[1]", None if scales is None else "given", allowed)
            if scales is not None:
                size = -(-rows // 128) * -(-k // (4 * block)) * 512
                _check(f"{place}[1]", scales, torch.uint8, (count, size), codes)
        _check(f"{where}.alphas", weights.alphas, torch.float32, (count, alphas), weights.planes[0][0])
        _in_range(f"{where}.alphas", weights.alphas, _positive(weights.alphas), "positive and finite")
    if product == "nvfp4":
        if experts.input_scales is None:
            raise ArgumentError(f"{name}.input_scales", None, f"fp32 [{count}, 2] in mode nvfp4, of its activations")
        _check(f"{name}.input_scales", experts.input_scales, torch.float32, (count, 2), experts.first.alphas)
        _in_range(f"{name}.input_scales", experts.input_scales, _positive(experts.input_scales), "positive and finite")
    return count, width


def _check(name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple, like: Tensor) -> None:
    """Raise ArgumentError unless ``x`` is None or of this type and shape, beside ``like``; None is any extent."""
    if x is None:
        return
    same = x.dim() == len(shape) and all(want in (None, have) for have, want in zip(x.shape, shape, strict=True))
    if x.dtype != dtype or not same:
        raise ArgumentError(name, f"{x.dtype}{list(x.shape)}", f"{dtype}{list(shape)}".replace("None", "any"))
    if x.device != like.device:
        raise ArgumentError(f"{name}.device", str(x.device), f"{like.device}, that of the others")


def _positive(x: Tensor) -> Tensor:
    return x.isfinite() & (x > 0)


def _in_range(name: str, x: Tensor, good: Tensor, allowed: str) -> None:
    """Raise ArgumentError with the first place where ``good`` is False; tensors without values pass."""
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
