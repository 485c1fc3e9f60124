"""Run DeepSeek-V4 whole, on ops: embedding, layers, head. One path for prefill in chunks, decode and mixtures of both.

    model = transformer(Listed.of(Checkpoint(folder)), places=4, capacity=2048)       # dsv4lib.loader.model
    logits = model([[1, 2, 3], [7]], places=[0, 2], starts=[0, 40])              # fp32 [2, vocab], of the last tokens

A call runs a step at places: page tables that are a request's own, no manager, no tokens to take back. It is what the
pool of the manager is compared with; requests are served on that pool (`model.scheduler`, `model.paged`), which makes
the same arrays of a step for the same layers.

Which kernels run is the choice of the back end alone: native, emulator and reference go through the same lines. Every
product, norm and choice is an op of this lab, from the embedding to the head. PyTorch adds the two inputs of the draft
block and makes the arrays of a step. The oracle is `dsv4lib.reference.model`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4lib.config import LayerKind, ModelConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.layers.attention import Caches, new_caches
from dsv4lib.layers.communicator import SINGLE, Groups
from dsv4lib.layers.decoder_layer import DecoderLayer, MhcSite, Pending
from dsv4lib.layers.dense import Columns
from dsv4lib.layers.step import Layout, Step, make_step
from dsv4lib.model.mtp import MtpBlock
from dsv4lib.ops.embedding.op import embedding
from dsv4lib.ops.mhc.op import mhc_head


class Transformer(torch.nn.Module):
    """A model and the caches of its requests.

    Args:
        config: dimensions. layers: of the backbone. embed: bf16 [V, d]. head: [V, d].
        collapse: mHC site of the head. angles: cosines and sines fp32 [P, 32] by kind of layer.
        layout: of the caches: requests at a time, tokens of each. keys: format of indexer keys.
        mtp: block that drafts; None: `draft` is refused.
        backend: of every op. arch: whose operands the head has; None: that of the back end.
        groups: ranks that divide the model; ``embed`` and ``head`` have this rank's part of the vocabulary.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[DecoderLayer],
        embed: Tensor,
        head: Tensor,
        collapse: MhcSite,
        angles: dict[LayerKind, tuple[Tensor, Tensor]],
        layout: Layout,
        keys: str = "fp4",
        mtp: MtpBlock | None = None,
        backend: str = "auto",
        arch: str | None = None,
        groups: Groups = SINGLE,
    ) -> None:
        super().__init__()
        if layout.capacity > config.max_positions:
            raise ArgumentError("capacity", layout.capacity, f"at most the model's {config.max_positions} positions")
        self.config, self.layout, self.keys, self.backend, self.groups = config, layout, keys, backend, groups
        self.layers = torch.nn.ModuleList(layers)
        self.register_buffer("embed", embed.bfloat16())
        self.head = Columns([head], groups.tensor, config.vocab, out="fp32", backend=backend, arch=arch)
        self.collapse, self.mtp = collapse, mtp
        for kind, (cos, sin) in angles.items():
            self.register_buffer(f"cos_{kind}", cos.contiguous())
            self.register_buffer(f"sin_{kind}", sin.contiguous())
        self.caches: list[Caches] = []

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.device

    def allocate(self) -> None:
        """Allocate the caches where the weights are; `forward` does so at its first call."""
        kinds = [*self.config.layer_kinds, *([self.config.mtp_kind] if self.mtp is not None else [])]
        given = self.layout, self.keys, self.device
        self.caches = [new_caches(self.config, kind, *given) for kind in kinds]

    @property
    def cache_bytes(self) -> int:
        """Bytes of all caches."""
        return sum(caches.nbytes for caches in self.caches)

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        places: Sequence[int],
        starts: Sequence[int],
        rows: int | None = None,
    ) -> Step:
        """Make the arrays of a step, see `make_step`.

        Raises:
            ArgumentError: no token, a token that the vocabulary does not have, or what `make_step` refuses.
        """
        flat = [t for one in tokens for t in one]
        if not flat:
            raise ArgumentError("tokens", list(tokens), "at least one token")
        if min(flat) < 0 or max(flat) >= self.config.vocab:
            raise ArgumentError("tokens", [min(flat), max(flat)], f"ids 0..{self.config.vocab - 1}")
        tables = {k: (getattr(self, f"cos_{k}"), getattr(self, f"sin_{k}")) for k in LayerKind}
        return make_step(self.config, self.layout, tables, tokens, places, starts, rows, self.device)

    @torch.no_grad()
    def forward(
        self,
        tokens: Sequence[Sequence[int]],
        places: Sequence[int],
        starts: Sequence[int],
        *,
        rows: int | None = None,
        all_logits: bool = False,
    ) -> Tensor:
        """Run a step.

        Args:
            tokens: of each request: a prompt, a chunk of it, or the last token; none: the request is padding.
            places: where its caches are. starts: position of its first token here.
            rows: pad the step to so many tokens.
            all_logits: of every token of the step instead of the last of each request.

        Returns:
            fp32 [B, vocab], of requests without tokens 0; or [T, vocab].
        """
        hidden, _ = self.hidden(self.step(tokens, places, starts, rows))
        if all_logits:
            return self.head(hidden)[0]
        counts = torch.tensor([len(one) for one in tokens])
        last = (counts.cumsum(0) - 1).clamp(min=0).to(hidden.device)
        logits = self.head(hidden[last].contiguous())[0]
        return logits.masked_fill((counts == 0).to(hidden.device)[:, None], 0.0)

    @torch.no_grad()
    def hidden(self, step: Step, keep_streams: bool = False) -> tuple[Tensor, Tensor | None]:
        """Run all layers on a step.

        Returns:
            (bf16 [T, d], what the head reads; streams bf16 [T, 4, d] if wanted, what a draft block reads).
        """
        if not self.caches:
            self.allocate()
        copies = self.config.hc_mult
        pending = Pending(self.embedded(step.tokens, copies))
        for layer, caches in zip(self.layers, self.caches, strict=False):
            pending = layer(pending, step, caches)
        streams = torch.empty_like(pending.streams) if keep_streams else None
        given = {"f": pending.f, "post": pending.post, "comb": pending.comb, "eps": self.collapse.eps}
        out = streams, pending.streams.new_empty(len(step.tokens), self.config.hidden)
        given |= {"batch_invariant": self.collapse.batch_invariant, "backend": self.backend}
        return mhc_head(pending.streams, self.collapse.site, **given, out=out), streams

    @torch.no_grad()
    def draft(self, streams: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Run the draft block.

        Args:
            streams: bf16 [T, 4, d] at each position. step: whose tokens are those after each position.

        Returns:
            (hidden bf16 [T, d] for the head, streams for the next draft).
        """
        if self.mtp is None:
            raise ArgumentError("mtp", None, "a model that was loaded with its draft block")
        return self.mtp(streams, self.embedded(step.tokens, 0), step, self.caches[-1])

    def embedded(self, tokens: Tensor, copies: int) -> Tensor:
        """Look up tokens: streams bf16 [T, copies, d]; without copies rows bf16 [T, d]."""
        group, options = self.groups.tensor, {"backend": self.backend}
        if group.size == 1:
            found = embedding(tokens, self.embed, copies=copies, keep=not copies, **options)
            return found.streams if copies else found.rows
        owner = group.owner(tokens, self.config.vocab)
        local = torch.where(owner == group.rank, tokens - group.own(self.config.vocab).start, -1)
        rows = group.pick(embedding(local, self.embed, copies=0, keep=True, **options).rows, owner)
        return rows[:, None].expand(-1, copies, -1).contiguous() if copies else rows
