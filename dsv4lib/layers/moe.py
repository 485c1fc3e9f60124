"""The MoE layer: router, dispatch, experts in one of the precision modes, combine.

    experts, weights = router(x)                    top-k of sqrt(softplus(gate x)) + bias, or by a table of tokens
    rows             = tokens by expert, each expert's rows from a multiple of 128
    h                = silu(min(g, limit)) * clip(u, -limit, limit) [* weight]      first GEMM, quantised as it leaves
    y                = sum over a token's experts of [weight *] W2 h  + shared expert

Six launches, three more for the shared expert; nothing waits for the device. The routing weight goes into ``h`` as in
the released code, except in mode ``nvfp4``, where it would take range from the calibrated scale of the second
quantisation: there it is applied in the sum.

Source: DSV4's released code; the modes are those of `dsv4lib.formats.weight_modes`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.linear import linear
from dsv4lib.ops.moe_combine import moe_combine
from dsv4lib.ops.moe_dispatch import moe_dispatch
from dsv4lib.ops.moe_gemm import Operand, moe_gemm
from dsv4lib.ops.quantize import quantize
from dsv4lib.ops.router import Hashed, router

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
        alphas: fp32 [E, 2] (gate, up) or [E, 1].
    """

    planes: tuple[tuple[Tensor, Tensor | None], ...]
    alphas: Tensor

    def operand(self) -> Operand:
        """One operand; several planes one behind the other along K."""
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
        first: gate and up, rows by turns of 8, [E, 2 I, d]. second: [E, d, I].
        input_scales: fp32 [2], of what enters the two GEMMs; for mode ``nvfp4``, whose alphas must not contain them.
    """

    first: Weights
    second: Weights
    input_scales: Tensor | None = None


class Moe(torch.nn.Module):
    """Routed and shared experts.

    Args:
        gate: bf16 [E, d]. bias: fp32 [E], for the selection; None in a layer whose ``table`` selects.
        experts: of the router. shared: a single one, or None.
        precision: key of `FORMS`.
        table: int64 [V, k], experts of each token id (the first layers); their weights still come from the gate.
        k, factor, limit: experts a token, the sum of their weights, the clamp of the SwiGLU.
        backend: of every op.

    Raises:
        ArgumentError: an unknown mode, input scales missing for it, planes that do not join; not one of bias and table.
    """

    def __init__(
        self,
        gate: Tensor,
        bias: Tensor | None,
        experts: Experts,
        precision: str,
        *,
        shared: Experts | None = None,
        table: Tensor | None = None,
        k: int = 6,
        factor: float = 1.0,
        limit: float = 10.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if precision not in FORMS:
            raise ArgumentError("precision", precision, "one of " + ", ".join(FORMS))
        if (bias is None) == (table is None):
            raise ArgumentError("bias", None if bias is None else "given", "either a bias or a table")
        self.precision, (self.product, self.recipe) = precision, FORMS[precision]
        for name, one in (("experts", experts), ("shared", shared)):
            if one is not None and self.recipe == "nvfp4" and one.input_scales is None:
                raise ArgumentError(f"{name}.input_scales", None, "fp32 [2] in mode nvfp4")
        self.table = table
        self.gate, self.bias, self.k, self.factor, self.limit, self.backend = gate, bias, k, factor, limit, backend
        self.copies = len(experts.first.planes)
        self.experts, self.shared = _prepare(experts), None if shared is None else _prepare(shared)

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """x bf16 [T, d] -> bf16 [T, d]; ``tokens``: their ids, int64 [T], where a table selects."""
        if (tokens is None) != (self.table is None):
            raise ArgumentError("tokens", None if tokens is None else "given", "given where a table selects")
        hashed = None if tokens is None else Hashed(self.table, tokens)
        settings = {"k": self.k, "factor": self.factor, "bias": self.bias, "hashed": hashed, "backend": self.backend}
        experts, weights = router(x, self.gate, **settings)
        routed = moe_dispatch(experts, weights, count=len(self.gate), backend=self.backend)
        late = weights if self.recipe == "nvfp4" else None
        early = routed.row_weight if late is None else None
        y = self.run(self.experts, x, routed.rows, (routed.offsets[:-1], routed.counts), early)
        common = None if self.shared is None else self.run(self.shared, x)
        return moe_combine(y, routed.row_of, late, common, backend=self.backend)

    def run(
        self,
        experts: Experts,
        x: Tensor,
        rows: Tensor | None = None,
        groups: tuple[Tensor, Tensor] | None = None,
        routing: Tensor | None = None,
    ) -> Tensor:
        """Both GEMMs: bf16 [R, d].

        Args:
            rows: tokens sorted by expert. groups: offsets and counts of them; None: one expert has all.
            routing: weights of the rows.
        """

        def product(x: Operand, w: Weights, **options: Any) -> Operand:
            codes, scales = w.planes[0]
            common = {"mode": self.product, "backend": self.backend, **options}
            if groups is None:
                return linear(x, Operand(codes[0], None if scales is None else scales[0]), **common)
            return moe_gemm(x, Operand(codes, scales), *groups, expected=expected, **common)

        expected = -(-len(x) * self.k // len(experts.first.alphas))
        scales = (None, None) if self.recipe != "nvfp4" else experts.input_scales
        first, second = (w.alphas if s is None else w.alphas * s for w, s in zip(experts[:2], scales, strict=True))
        calibrated = None if scales[1] is None else scales[1].expand(len(first)).contiguous()
        weighted = {} if groups is None else {"routing": routing}
        h = product(
            self.activations(x, rows, scales[0]),
            experts.first,
            alpha=first[:, 0].contiguous(),
            alpha_up=first[:, 1].contiguous(),
            swiglu=True,
            out_format=self.recipe,
            out_global=calibrated,
            limit=self.limit,
            **weighted,
        )
        return product(self.repeated(h), experts.second, alpha=second[:, 0].contiguous()).codes

    def activations(self, x: Tensor, rows: Tensor | None, scale: Tensor | None) -> Operand:
        """Tokens in the order of ``rows``, in the format of the mode."""
        if self.recipe == "bf16":
            return Operand(x if rows is None else x[rows.clamp(min=0).long()])
        q = quantize(x, self.recipe, global_scale=scale, rows=rows, swizzled=True, backend=self.backend)
        return self.repeated(Operand(q.codes, q.scales))

    def repeated(self, x: Operand) -> Operand:
        """The same numbers once for each plane of the weights, along K."""
        if self.copies == 1:
            return x
        return Operand(x.codes.repeat(1, self.copies), _along_k([x.scales] * self.copies, len(x.codes)))


def _prepare(experts: Experts) -> Experts:
    """Planes joined, once and for all."""
    first, second = (Weights((tuple(w.operand()),), w.alphas) for w in experts[:2])
    return Experts(first, second, experts.input_scales)


def _bytes(codes: Tensor) -> Tensor:
    return codes if codes.dtype == torch.bfloat16 else codes.view(torch.uint8)


def _along_k(images: list[Tensor], rows: int) -> Tensor:
    """Swizzled scales of matrices that follow one another along K: blocks run along K first, each K fills its last."""
    blocks = [image.unflatten(-1, (-(-rows // 128), -1)) for image in images]
    return torch.cat(blocks, -1).flatten(-2)
