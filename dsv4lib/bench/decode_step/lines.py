"""List what a decode step of DSV4-Flash does. Lines have a class, how often a step, and the rows that time them.

One row of each kind of layer is timed and counted as often as the model has such layers (2 SWA, 21 CSA, 20 HCA). A
line's floor is the bytes it must move at the data sheet's bandwidth, or its MMAs at the data sheet's peak if longer.

Ours and others do not cut the step alike. Where ours does two lines' work in one launch, its time is in the first one:

| line                   | ours                                         | others, and the floor               |
|------------------------|----------------------------------------------|-------------------------------------|
| mHC post, pre, norm    | writes FP8, too (`mhc_fp8`)                  | without a cast                      |
| activation cast to FP8 | input of wo_b only, once a layer             | three a layer, of d                 |
| q_norm, kv_norm        | q_norm with its cast; kv_norm is below       | time: as ours; floor: both, no cast |
| qnorm_rope_kv          | with kv_norm                                 | without                             |
| routed MoE             | with its casts                               |                                     |
| shared expert          | with SwiGLU and its cast (`swiglu_quant`)    | its two GEMMs                       |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from dsv4lib.bench.decode_step import rows
from dsv4lib.bench.ops import modules
from dsv4lib.bench.ops.case import Row
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.errors import ArgumentError

BANDWIDTH = 4.8e12  # bytes/s of an H200, data sheet
BF16, FP8 = 990e12, 1979e12  # FLOP/s
BATCHES = (1, 8, 32, 128)
CONTEXTS = (4096, 32768, 131072)
MOE, GEMMS, ATTENTION, INDEXER, MHC, SMALL, HEAD = CLASSES = (
    "routed MoE, MXFP4",
    "FP8 and bf16 GEMMs of few tokens",
    "sparse attention",
    "indexer logits + top-k",
    "mHC",
    "norm, RoPE, casts, compressor, router",
    "LM head bf16",
)
KEYS = dict(zip(("moe", "gemms", "attention", "indexer", "mhc", "small", "head"), CLASSES, strict=True))
OPS = ("compressor", "indexer_q", "inv_rope_quant", "linear", "mhc", "mhc_fp8", "qnorm_rope_kv", "rmsnorm_quant")
OPS += ("router", "topk")  # with rows of their own


class Line(NamedTuple):
    """One line of the step.

    Attributes:
        group: one of `CLASSES`. name: of the line. count: launches of it a step, others'.
        others: rows whose best other provider it takes, added up; () where none is known.
        ours: rows of our time; ours_count: how often a step.
        bytes, flops: of the work, once. peak: FLOP/s of its MMAs.
    """

    group: str
    name: str
    count: int
    others: tuple[Row, ...]
    ours: tuple[Row, ...]
    ours_count: int
    bytes: int
    flops: int = 0
    peak: float = BF16

    @property
    def floor_us(self) -> float:
        """Return the least time of one."""
        return max(self.bytes / BANDWIDTH, self.flops / self.peak) * 1e6

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return the rows that it needs, each once."""
        return tuple({key_of(row): row for row in (*self.others, *self.ours)}.values())


def key_of(row: Row) -> tuple[str, str]:
    """Return what names a row in results."""
    return row.op, row.shape


def known_rows() -> dict[tuple[str, str], Row]:
    """Return the rows of the ops' bench modules that a step needs, by op and shape.

    Raises:
        ArgumentError: a module cannot be imported.
    """
    found, broken = modules.modules(OPS)
    if broken:
        raise ArgumentError("ops", broken, "modules that can be imported")
    return {key_of(row): row for make in found.values() for row in make()}


def lines(tokens: int, context: int, known: dict[tuple[str, str], Row], groups: Iterable[str] = CLASSES) -> list[Line]:
    """List a step of ``tokens`` requests with ``context`` tokens each.

    Args:
        tokens: one of `BATCHES`. context: one of `CONTEXTS`. known: `known_rows`. groups: of `CLASSES`.

    Raises:
        ArgumentError: another batch or context.
    """
    for name, value, allowed in (("batch", tokens, BATCHES), ("context", context, CONTEXTS)):
        if value not in allowed:
            raise ArgumentError(name, value, "one of " + ", ".join(map(str, allowed)))
    wanted = set(groups)
    return [line for line in _lines(tokens, context, known) if line.group in wanted]


def _lines(tokens: int, context: int, known: dict[tuple[str, str], Row]) -> list[Line]:
    c, t = FLASH, f"T {tokens}"
    csa, hca = (len(c.layers_of(kind)) for kind in (LayerKind.CSA, LayerKind.HCA))
    layers = c.n_layers

    def line(group: str, name: str, count: int, row: Row, **change: object) -> Line:
        """A line whose others, ours and bytes are those of one row, but for ``change``."""
        base = Line(group, name, count, (row,), (row,), count, row.bytes, row.flops)
        return base._replace(**change)

    def fp8(name: str, count: int) -> Line:
        return line(GEMMS, f"{name} fp8", count, known["linear", f"Flash {name} {t}"], peak=FP8)

    def bf16(name: str, count: int, n: int, group: str = GEMMS) -> Line:
        return line(group, name, count, rows.linear_bf16(name, n, c.hidden, tokens))

    def attend(kind: LayerKind) -> Line:
        row = rows.attention(kind, context, tokens)
        return line(ATTENTION, f"attention {kind}", len(c.layers_of(kind)), row)

    def small(name: str, count: int, op: str, shape: str, **change: object) -> Line:
        return line(SMALL, name, count, known[op, shape], **change)

    index = 2 * 2 * c.index_dim + c.index_heads  # both projections of keys of two windows, and weights of heads
    mhc, shared = known["mhc", f"Flash {t}"], rows.shared_expert(tokens)
    parts = tuple(known["linear", f"Flash shared {part} {t}"] for part in ("w1+w3", "w2"))
    return [
        line(MOE, "routed MoE MXFP4", layers, rows.routed_moe(tokens), peak=FP8),
        fp8("wq_a+wkv", layers),
        fp8("wq_b", layers),
        bf16("CSA compressor GEMM", csa, 4 * c.head_dim),
        bf16("HCA compressor GEMM", hca, 2 * c.head_dim),
        fp8("indexer wq_b", csa),
        bf16("indexer compressor+weights GEMM", csa, index),
        fp8("wo_a", layers),
        fp8("wo_b", layers),
        line(GEMMS, "shared expert fp8", layers, shared, others=parts, peak=FP8),
        *map(attend, (LayerKind.SWA, LayerKind.CSA, LayerKind.HCA)),
        line(INDEXER, "indexer logits fp8", csa, rows.logits(context, tokens), peak=FP8),
        line(INDEXER, "top-k", csa, known["topk", f"Flash k {c.index_topk} L {context // c.csa_rate} {t}"]),
        line(MHC, "mHC post, pre, norm", 2 * layers, mhc, ours=(known["mhc_fp8", f"Flash {t}"],)),
        line(
            SMALL,
            "activation cast to FP8",
            3 * layers,
            rows.cast(c.hidden, tokens),
            ours=(rows.cast(c.o_groups * c.o_lora_rank, tokens),),
            ours_count=layers,
        ),
        small(
            "q_norm, kv_norm",
            layers,
            "rmsnorm_quant",
            f"Flash fp8 {t}",
            bytes=4 * tokens * (c.q_lora_rank + c.head_dim),
        ),
        small("qnorm_rope_kv", layers, "qnorm_rope_kv", f"Flash {t}"),
        small("CSA compressor", csa, "compressor", f"Flash and Pro, CSA decode {t}"),
        small("HCA compressor", hca, "compressor", f"Flash and Pro, HCA decode {t}"),
        small("indexer_q", csa, "indexer_q", f"fp8 {t}"),
        small("indexer key compressor", csa, "compressor", f"Flash and Pro, indexer FP4 decode {t}"),
        small("inv_rope_quant", layers, "inv_rope_quant", f"Flash {t}"),
        small("router", layers, "router", f"Flash {t}"),
        bf16("LM head", 1, c.vocab, HEAD),
    ]
