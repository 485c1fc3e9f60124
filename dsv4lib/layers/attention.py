"""Attention of one layer of DeepSeek-V4, of any kind, on ops alone.

    qr, kv   = wq_a x, wkv x                                  one GEMM
    q        = rope(rmsnorm(wq_b rmsnorm(qr)));  kv entry = fp8(rope(rmsnorm(kv)))            qnorm_rope_kv
    entries += compress(wkv_c x, wgate_c x)                   CSA, HCA: compressor
    picks    = topk(scores of the indexer)                    CSA: indexer_q, compressor, indexer_logits, topk
    o        = fmha(q, {entries} u {window}, sink)
    y        = wo_b (wo_a inv_rope(o))                        inv_rope_quant, output_proj

Where ranks divide the heads (`layers.communicator`), each has the heads of its groups, of the projections rows of wq_b
and wo_a and columns of wo_b, whose addends are summed. In a model of one group they divide its heads: columns of wo_a,
whose addends are summed, and rows of wo_b. What all heads share (KV, compressors, indexer, caches) every rank has.

The indexer's wq_b is joined to the attention's, and all projections that stay bf16 (compressors, weights of index
heads) are one GEMM with fp32 output. FP8 projections read what mHC, and the norm of qr, have quantised. The oracle is
`dsv4lib.reference.model.Attention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.formats import indexer_key, kv_entry
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.layers.communicator import ALONE, Communicator
from dsv4lib.layers.dense import FP8_MODES, Activations, Dense, GroupedDense, normed, rows_of, target
from dsv4lib.layers.step import PAGE, Layout, Step
from dsv4lib.ops.compressor.op import Batch, Pages, Ring, Running, Weights, compressor
from dsv4lib.ops.fmha.op import Fp8Pages, Selected, fmha
from dsv4lib.ops.indexer_logits.op import KeyPages, Visible, indexer_logits
from dsv4lib.ops.indexer_q.op import indexer_q
from dsv4lib.ops.inv_rope_quant.op import inv_rope_quant
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.qnorm_rope_kv.op import qnorm_rope_kv
from dsv4lib.ops.topk.op import Paged, topk

MOST_DRAFTS = 7  # rows of CSA that a step stores, less one
KEYS = {"fp4": indexer_key.FP4_LAYOUT, "fp8": indexer_key.FP8_LAYOUT}


class Pool(NamedTuple):
    """Pages of a layer: data uint8 [P, page bytes], pages any distance apart.

    Also entries of a page, and part of its group.
    """

    data: Tensor
    page: int = PAGE
    part: int = 0


class State(NamedTuple):
    """Hold open windows of a compressor, a row of `Ring` or `Running` a request.

    Attributes:
        kept: the windows. part: of its group.
        data: uint8 [P, bytes], in a pool: the windows lie in it. rows: of a ring there; 0: `Running`.
    """

    kept: Ring | Running
    part: int = 0
    data: Tensor | None = None
    rows: int = 0

    @classmethod
    def of(cls, data: Tensor, part: int, rows: int) -> State:
        """View bytes of pages as windows."""
        return cls(_windows(data.view(torch.float32), rows), part, data, rows)

    def windows(self) -> Ring | Running:
        """Return `kept`, or in a graph under compilation the bytes of it.

        PyTorch's AOTAutograd takes mutated inputs that share memory only if all are of one type, and mistakes a view of
        another type that an op mutates for one of the first.
        """
        return _windows(self.data, self.rows) if self.data is not None and torch.compiler.is_compiling() else self.kept


def _windows(data: Tensor, rows: int) -> Ring | Running:
    """View [P, n] as rows of k, then of z; or, without ``rows``, as the three parts of a running softmax."""
    if not rows:
        return Running(data.unflatten(1, (3, -1)))
    return Ring(*(part.unflatten(1, (rows, -1)) for part in data.split(data.shape[1] // 2, 1)))


class Caches(NamedTuple):
    """Hold what a layer keeps of all requests.

    The fields that a kind does not have are None.

    Attributes:
        window: 584-byte rows of tokens. entries: 584-byte entries. keys: indexer keys.
        state, key_state: of the compressors of entries and keys.
        group: name of the window's group.
    """

    window: Pool
    entries: Pool | None = None
    state: State | None = None
    keys: Pool | None = None
    key_state: State | None = None
    group: str = "window"

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        pools = [pool.data for pool in (self.window, self.entries, self.keys) if pool is not None]
        states = [x for state in (self.state, self.key_state) if state is not None for x in state.kept]
        return sum(t.numel() * t.element_size() for t in (*pools, *states))


def new_caches(
    config: ModelConfig, kind: LayerKind, layout: Layout, keys: str = "fp4", device: str | torch.device = "cpu"
) -> Caches:
    """Allocate a layer's caches at places of their own.

    Nothing in them needs to be cleared between requests.

    Tokens are not taken back here: a compressor's ring has the rows that its next entry reads and no more.
    """

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def ring(rows: int, width: int) -> State:
        return State(Ring(*(zeros(layout.places, rows, width, dtype=torch.float32) for _ in range(2))))

    window = Pool(zeros(layout.places * layout.pages(1), kv_entry.LAYOUT.page_bytes(PAGE)))
    if kind is LayerKind.SWA:
        return Caches(window)
    rate, dim = config.rate(kind), config.head_dim
    pages = layout.places * layout.pages(rate)
    entries = Pool(zeros(pages, kv_entry.LAYOUT.page_bytes(PAGE)))
    if kind is LayerKind.HCA:
        return Caches(window, entries, State(Running(zeros(layout.places, 3, dim, dtype=torch.float32))))
    key_pages = Pool(zeros(pages, KEYS[keys].page_bytes(PAGE)))
    return Caches(window, entries, ring(2 * rate, 2 * dim), key_pages, ring(2 * rate, 2 * config.index_dim))


class Attention(torch.nn.Module):
    """Attention of one layer. All tensors are buffers.

    Args:
        config: dimensions, of the heads and groups that this rank has. kind: of the layer.
        tensors: weights by their name after ``layers.N.attn.``: tensors, or `FP8Tensor` of linear layers.
        precision: of linear layers stored in FP8, see `Dense`.
        keys: format of indexer keys and queries, "fp4" or "fp8".
        backend: of every op. arch: whose operands it has; None: that of the back end.
        batch_invariant: keys are not split: in how many parts they are depends on the number of tokens.
        group: ranks that divide the heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        tensors: Mapping[str, Tensor | FP8Tensor],
        *,
        precision: str = "fp8",
        keys: str = "fp4",
        backend: str = "auto",
        arch: str | None = None,
        batch_invariant: bool = False,
        group: Communicator = ALONE,
    ) -> None:
        super().__init__()
        given = {"backend": backend, "arch": target(arch, backend)}
        self.splits = 1 if batch_invariant else None
        self.config, self.kind, self.keys, self.backend, self.group = config, kind, keys, backend, group
        indexed = kind is LayerKind.CSA
        self.inputs = Dense([tensors["wq_a.weight"], tensors["wkv.weight"]], precision, **given)
        queries = [tensors["wq_b.weight"], *([tensors["indexer.wq_b.weight"]] if indexed else [])]
        self.queries = Dense(queries, precision, **given)
        # of one group ranks divide the heads: then the columns of wo_a, else those of wo_b, are divided
        self.inside = group.size > 1 and rows_of(tensors["wo_b.weight"]) < config.hidden
        outs = ("fp32", "bf16") if self.inside else ("bf16", "fp32" if group.size > 1 else "bf16")
        self.wo_a = GroupedDense(tensors["wo_a.weight"], config.o_groups, precision, out=outs[0], **given)
        self.wo_b = Dense([tensors["wo_b.weight"]], precision, out=outs[1], **given)
        self.register_buffer("q_norm", tensors["q_norm.weight"].float())
        self.register_buffer("kv_norm", tensors["kv_norm.weight"].float())
        self.register_buffer("sink", tensors["attn_sink"].float())
        exact = []
        for stem in ("compressor", "indexer.compressor"):
            if f"{stem}.ape" in tensors:
                exact += [tensors[f"{stem}.wkv.weight"], tensors[f"{stem}.wgate.weight"]]
                name = stem.replace(".", "_")
                self.register_buffer(f"{name}_ape", tensors[f"{stem}.ape"].float().contiguous())
                self.register_buffer(f"{name}_norm", tensors[f"{stem}.norm.weight"].float())
        if indexed:
            exact.append(tensors["indexer.weights_proj.weight"])
        self.exact = Dense(exact, out="fp32", **given) if exact else None

    @property
    def recipe(self) -> str | None:
        """FP8 recipe of the input that it reads; None: it reads bf16 alone."""
        return "fp8" if self.inputs.mode in FP8_MODES else None

    @property
    def swizzled(self) -> bool:
        """Tell whether scales of that input are an image of `formats.scale_swizzle`. Else they are row-major."""
        return self.inputs.mode == "mxfp8"

    @property
    def reads_bf16(self) -> bool:
        """Tell whether it reads its input in bf16."""
        return self.exact is not None or self.recipe is None

    def forward(self, x: Activations, step: Step, caches: Caches) -> Tensor:
        """Attend to window and entries, and store what the tokens add.

        x [T, d], normed -> bf16 [T, d]; window, entries and states of ``caches`` move on.
        """
        c, angles, common = self.config, step.angles[self.kind], {"backend": self.backend}
        pool, own = caches.window, step.windows[caches.group][caches.window.part]
        qr, kv = self.inputs(x.bf16 if x.fp8 is None else x.fp8)
        q, *index_q = self.queries(normed(qr, self.q_norm, c.rms_eps, self.queries))
        q = qnorm_rope_kv(
            q.unflatten(1, (c.n_heads, c.head_dim)),
            kv,
            None,
            angles.rows,
            pool.data,
            pool.page,
            own.slots,
            kv_norm=self.kv_norm,
            eps=c.rms_eps,
            out=torch.empty(len(kv), c.n_heads, c.head_dim, dtype=kv.dtype, device=kv.device),
            **common,
        )
        entries = self.attended(x.bf16, index_q, step, caches)
        window = Selected(Fp8Pages(pool.data, pool.page), own.rows, step.window_count)
        return self.output(q, entries, window, angles.rows)

    def output(self, q: Tensor, entries: Selected | None, window: Selected, rows: Tensor) -> Tensor:
        """Attend, rotate back, project."""
        given = {"sink": self.sink, "scale": self.config.head_dim**-0.5, "backend": self.backend}
        given["splits"] = self.splits
        if self.wo_a.mode in FP8_MODES:
            o, _ = fmha(q, entries, window, **given)
            swizzled = {"layout": "swizzled", "groups": self.config.o_groups}
            groups = swizzled if self.wo_a.mode == "mxfp8" else {"layout": "rowmajor"}
            heads = Operand(*inv_rope_quant(o, None, rows, **groups, backend=self.backend))
        else:
            half = rows.shape[1] // 2
            rope = rows[:, :half].contiguous(), rows[:, half:].contiguous()
            heads = Operand(fmha(q, entries, window, rope=rope, **given)[0])
        u = self.wo_a(heads)
        if self.inside:
            return self.group.columns(self.wo_b(self.group.sum(u).bfloat16())[0], self.config.hidden)
        return self.group.sum(self.wo_b(u)[0]).bfloat16()

    def attended(self, x: Tensor | None, index_q: list[Tensor], step: Step, caches: Caches) -> Selected | None:
        """Add the entries that this step closes; return those that its tokens attend to."""
        if self.kind is LayerKind.SWA:
            return None
        exact, name = self.exact(x), str(self.kind).lower()
        pool, seen = caches.entries, step.visible[self.kind]
        self.compress("compressor", exact[0], exact[1], name, (caches.state, pool, "kv"), step)
        own = step.entries[name][pool.part]
        pages = Fp8Pages(pool.data, pool.page)
        if self.kind is LayerKind.HCA:
            return Selected(pages, own.rows, seen)
        keys = caches.keys
        self.compress("indexer_compressor", exact[2], exact[3], "keys", (caches.key_state, keys, self.keys), step)
        c, common = self.config, {"backend": self.backend}
        heads = index_q[0].unflatten(1, (c.index_heads, c.index_dim))
        coded = indexer_q(heads, exact[4], None, step.angles[self.kind].rows, variant=self.keys, **common)
        table = step.entries["keys"][keys.part].table
        scores = indexer_logits(coded, KeyPages(keys.data, keys.page), Visible(table, step.request_ids, seen), **common)
        paged = Paged(own.table, step.request_ids, pool.page)
        return Selected(pages, topk(scores, c.index_topk, seen, pages=paged, **common), step.selected)

    def compress(
        self, name: str, kv: Tensor, gate: Tensor, group: str, cache: tuple[State, Pool, str], step: Step
    ) -> None:
        """Run one compressor: of which group, into its (state, pool, format of entries)."""
        angles, (state, pool, form) = step.angles[self.kind], cache
        weights = Weights(getattr(self, f"{name}_ape"), getattr(self, f"{name}_norm"), angles.cos, angles.sin)
        batch = Batch(step.requests[f"{group}_state"][state.part], step.entries[group][pool.part].slots, step.single)
        pages = Pages(pool.data, pool.page, form)
        compressor(kv, gate, weights, batch, state.windows(), pages, eps=self.config.rms_eps, backend=self.backend)
