"""Serve decode steps of MLA: metadata, CUDA graphs, keys into the cache, attention.

    eager     init_forward_metadata(batch)            page table of the step's requests, from the pool of metadata
              forward_decode(q, k, v, layer, batch)   for every layer
    captured  init_cuda_graph_state(max_bs, ..)       buffers of one address, once
              init_forward_metadata_capture_cuda_graph(bs, ..), then a capture of all layers
              init_forward_metadata_replay_cuda_graph(bs, ..), then a replay: buffers are refreshed before it, eagerly

Names and life cycle are those of SGLang's attention back ends, so that an engine's calls fit. A captured step reads
lengths and page table from the buffers alone. Rows past the batch have the length 1 and any page that exists, so a
padded row reads one token; nothing divides by a length.

``DSV4_TRACE=1`` prints a line a launch on stderr: shapes, splits, workspace and, on a GPU, which it then waits for, the
time between two events.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.layers.mla.batch import ForwardBatch, ForwardMode, Route, route
from dsv4lib.layers.mla.config import MLAConfig
from dsv4lib.layers.mla.extend import RowsOfDecode
from dsv4lib.layers.mla.metadata import MetadataPool, MLADecodeMetadata, make, width_of
from dsv4lib.layers.mla.pool import MLAPool
from dsv4lib.ops.common import launching
from dsv4lib.ops.mla_decode.op import ARCHS, E4M3, mla_decode
from dsv4lib.ops.mla_decode.sm90 import launch as hopper
from dsv4lib.ops.mla_decode.splits import current_sm_count, num_kv_splits_by_clusters
from dsv4lib.ops.mla_page_table.op import mla_page_table

SEQ_LEN_FILL = 1  # length of a padded row of a captured step
PAGE_FILL = 1  # of its page table: any page that exists


def timed(launch: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, str]:
    """Launch; return the result and its time in words: none on a CPU, emulated or while a graph is captured."""
    if device.type != "cuda" or backends.emulated_arch() is not None or torch.cuda.is_current_stream_capturing():
        return launch(), ""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    out = launch()
    end.record()
    end.synchronize()
    return out, f" time {1000 * start.elapsed_time(end):.1f} us"


class MLABackend:
    """Attention back end of a rank.

    Args:
        config: of the attention. pool: its caches. req_to_token: int32 [R, W], slots of each request's tokens.
        backend: of the kernels. delegate: serves prefill and speculation; None: `RowsOfDecode`.
        check: look in every step whether tokens are where attention looks for them, and wait for the answer.

    Attributes:
        forward_metadata: of the step under way; None: it has no requests.

    Raises:
        ConfigError: a pool of another configuration.
    """

    def __init__(
        self,
        config: MLAConfig,
        pool: MLAPool,
        req_to_token: Tensor,
        backend: str = "auto",
        delegate: Any = None,
        check: bool = False,
    ) -> None:
        if pool.config != config:
            raise ConfigError("pool", pool, "a pool of the same configuration")
        self.config, self.pool, self.req_to_token = config, pool, req_to_token
        self.backend, self.check = backend, check
        self.delegate = RowsOfDecode(self) if delegate is None else delegate
        self.metadata_pool = MetadataPool(config, req_to_token.device)
        self.forward_metadata: MLADecodeMetadata | None = None
        self.graph_metadata: MLADecodeMetadata | None = None

    # ---------------------------------------------------------------- eager steps

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Make page table and lengths of a step."""
        if forward_batch.route is Route.OTHER:
            self.delegate.init_forward_metadata(forward_batch)
        else:
            ids, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
            self.fill_metadata(ids, lengths, forward_batch.most_tokens())

    def fill_metadata(self, ids: Tensor, lengths: Tensor, most: int) -> None:
        """Take metadata from the pool and fill it; ``ids``, ``lengths``: int [B], ``most``: the longest length."""
        self.forward_metadata = None
        if len(ids):
            found = self.metadata_pool.take(len(ids), most)
            self._refresh(found, ids, lengths)
            self.forward_metadata = found

    def _refresh(self, metadata: MLADecodeMetadata, ids: Tensor, lengths: Tensor) -> None:
        """Write lengths and page table of the first requests in place."""
        count = len(ids)
        metadata.seq_lens[:count].copy_(lengths)
        given = self.req_to_token, ids.int(), metadata.seq_lens[:count], self.config.page_size
        table = metadata.block_kv_indices[:count]
        mla_page_table(*given, out=table, check=self.check, backend=self.backend)

    # ---------------------------------------------------------------- captured steps

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length that padded rows of a captured step have."""
        return SEQ_LEN_FILL

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int | None = None, block_kv_indices: Tensor | None = None
    ) -> None:
        """Allocate what captured steps read, for batches up to ``max_bs`` and the longest context.

        A delegate that has this method gets ``max_bs`` and ``max_num_tokens`` too, for the steps that it serves.

        Args:
            max_bs: requests. max_num_tokens: tokens of a step, at least one a request; decode has no more.
            block_kv_indices: int32 [max_bs or more, N] to use as page table, filled with 1; None: a new one.

        Raises:
            ArgumentError: a table that does not hold the longest context, or not in whole tiles.
        """
        if max_bs < 1 or (max_num_tokens or max_bs) < max_bs:
            raise ArgumentError("max_bs, max_num_tokens", (max_bs, max_num_tokens), "at least 1, and a token a request")
        if self.pool.pages <= PAGE_FILL:
            raise ArgumentError("pool", self.pool, f"at least {PAGE_FILL + 1} pages: padded rows read page {PAGE_FILL}")
        width, pack = width_of(self.config, self.config.max_context_len), self.config.pack
        if (table := block_kv_indices) is not None:
            fits = table.dtype == torch.int32 and table.dim() == 2 and len(table) >= max_bs
            if not fits or table.shape[1] < width or table.shape[1] % pack:
                allowed = f"int32 [{max_bs} or more, a multiple of {pack} that is at least {width}]"
                raise ArgumentError("block_kv_indices", f"{table.dtype}{list(table.shape)}", allowed)
            width, table = table.shape[1], table[:max_bs]
        if (prepare := getattr(self.delegate, "init_cuda_graph_state", None)) is not None:
            prepare(max_bs, max_num_tokens or max_bs)
        self.graph_metadata = make(self.config, max_bs, width, self.req_to_token.device, PAGE_FILL, table)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        forward_mode: ForwardMode = ForwardMode.DECODE,
        spec_info: Any = None,
    ) -> None:
        """Fill the buffers for a capture of ``bs`` requests, and make them the step's metadata."""
        if route(forward_mode, spec_info) is Route.OTHER:
            given = bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
            self.delegate.init_forward_metadata_capture_cuda_graph(*given)
            return
        self._refresh_graph(bs, req_pool_indices, seq_lens)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        seq_lens_sum: int | None = None,
        encoder_lens: Tensor | None = None,
        forward_mode: ForwardMode = ForwardMode.DECODE,
        spec_info: Any = None,
        seq_lens_cpu: Tensor | None = None,
    ) -> None:
        """Refresh the buffers in place before a replay of ``bs`` rows.

        Args:
            bs: rows of the captured step. req_pool_indices, seq_lens: int, of at most ``bs`` requests; rows after
                theirs are padding.
            seq_lens_sum, encoder_lens, seq_lens_cpu: that other back ends want. forward_mode, spec_info: of the step.
        """
        if route(forward_mode, spec_info) is Route.OTHER:
            given = bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, forward_mode, spec_info, seq_lens_cpu
            self.delegate.init_forward_metadata_replay_cuda_graph(*given)
            return
        self._refresh_graph(bs, req_pool_indices, seq_lens)

    def _refresh_graph(self, bs: int, ids: Tensor, lengths: Tensor) -> None:
        """Refresh the first ``bs`` rows of the buffers; those after the given ones become padding."""
        if self.graph_metadata is None:
            raise ArgumentError("bs", bs, "a call of init_cuda_graph_state before")
        if not 1 <= bs <= self.graph_metadata.batch or len(ids) > bs or len(ids) != len(lengths):
            allowed = f"at most max_bs={self.graph_metadata.batch} rows, and as many lengths as requests, at most bs"
            raise ArgumentError("bs", (bs, len(ids), len(lengths)), allowed)
        found = self.graph_metadata.rows(bs)
        found.seq_lens[len(ids) :].fill_(SEQ_LEN_FILL)
        found.block_kv_indices[len(ids) :, :1].fill_(PAGE_FILL)
        if len(ids):
            self._refresh(found, ids, lengths)
        self.forward_metadata = found

    # ---------------------------------------------------------------- attention

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
    ) -> Tensor:
        """Attend, or let the delegate do it; arguments as of `forward_decode`."""
        ours = forward_batch.route is Route.OURS
        serve = self.forward_decode if ours else self.delegate.forward_extend
        return serve(q, k, v, layer, forward_batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
    ) -> Tensor:
        """Store this step's keys and attend to the cache, one token a request.

        Args:
            q: [B, H * 576] or [B, H, 576], absorbed queries and their rotated dims; with ``q_rope`` [B, H, 512] alone.
            k: [B, 1, 576] with ``v``, or [B, 1, 512] with ``k_rope`` [B, 1, 64]; None: nothing to store.
            v: not stored, the latent is the value. layer: see `config.Layer`. forward_batch: of the metadata.
            save_kv_cache: False: keys are in the cache already. q_rope: [B, H, 64]. k_rope: see k.

        Returns:
            [B, H * 512] of the model's type; of a step without requests [0, H * 512], and nothing is launched.

        Raises:
            ArgumentError: rows that do not fit the metadata; see also `mla_decode` and `MLAPool`.
        """
        if forward_batch.batch_size == 0 or forward_batch.forward_mode is ForwardMode.IDLE:
            return torch.empty(0, layer.tp_q_head_num * layer.v_head_dim, dtype=self._out_dtype(), device=q.device)
        return self.attend(q, k, v, layer, forward_batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope)

    def attend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
    ) -> Tensor:
        """Do what `forward_decode` does, with the metadata's rows as they are."""
        metadata = self.forward_metadata
        if metadata is None:
            raise ArgumentError("forward_batch", forward_batch.forward_mode, "init_forward_metadata of it before")
        if k is not None and save_kv_cache:
            if k_rope is not None:
                self.pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
            else:
                self.pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        q_nope, q_pe = self._queries(q, q_rope, layer)
        if len(q_nope) != metadata.batch:
            raise ArgumentError("q", tuple(q.shape), f"{metadata.batch} rows, as the step's metadata has")
        options = {"sm_scale": layer.scaling, "num_kv_splits": self.config.num_kv_splits, "backend": self.backend}
        options |= {"q_scale": self.config.q_scale, "kv_scale": self.config.kv_scale}
        cache, table = self.pool.cache(layer.layer_id), metadata.block_kv_indices
        given = q_nope, q_pe, cache, metadata.seq_lens, table

        def launch() -> Tensor:
            return mla_decode(*given, workspace=metadata.workspace, **options).out.flatten(1)

        if os.environ.get("DSV4_TRACE") != "1":
            return launch()
        out, time = timed(launch, q.device)
        print(self.describe(metadata, layer) + time, file=sys.stderr)
        return out

    def _queries(self, q: Tensor, q_rope: Tensor | None, layer: Any) -> tuple[Tensor, Tensor]:
        """Split queries if they come as one, and cast them to the model's type."""
        heads, latent = layer.tp_q_head_num, layer.v_head_dim
        if q_rope is None:
            whole = q.view(-1, heads, layer.head_dim)
            q, q_rope = whole[..., :latent], whole[..., latent:]
        else:
            q, q_rope = q.view(-1, heads, latent), q_rope.view(-1, heads, layer.head_dim - latent)
        return self._cast(q), self._cast(q_rope)

    def _cast(self, q: Tensor) -> Tensor:
        """Cast queries; those that become FP8 are divided by their scale before."""
        if self.config.dtype == E4M3 and q.dtype != E4M3:
            q = (q.float() / self.config.q_scale).clamp(-448, 448)
        return q.to(self.config.dtype)

    def _out_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.config.dtype == E4M3 else self.config.dtype

    def describe(self, metadata: MLADecodeMetadata, layer: Any) -> str:
        """Say in a line what a launch is given: shapes, splits, workspace."""
        batch, width = metadata.block_kv_indices.shape
        tokens = width * self.config.page_size
        sms, splits, heads = current_sm_count(), self.config.num_kv_splits, layer.tp_q_head_num
        if splits < 1 and launching.arch(self.backend, ARCHS) in hopper.ARCHS:
            splits = hopper.choose_splits(batch, heads, tokens, sms)
            splits = hopper.held_splits(splits, metadata.workspace, batch, heads)
        elif splits < 1:
            splits = num_kv_splits_by_clusters(tokens, batch, sms, heads=heads)
        space = 0 if metadata.workspace is None else metadata.workspace.nbytes
        sizes = f"B {batch} H {heads} tokens <= {tokens} page {self.config.page_size}"
        types = f"q {self.config.dtype} kv {self.config.cache_dtype}"
        return f"mla_decode layer {layer.layer_id}: {sizes} {types} splits {splits} workspace {space}"
