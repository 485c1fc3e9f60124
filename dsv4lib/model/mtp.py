"""Predict several tokens by a block on ops. From the streams at position t and token t + 1 to logits of token t + 2.

    X'_i = h_proj rmsnorm(X_i; hnorm) + e_proj rmsnorm(embed(token t + 1); enorm)       each of the four streams
    X''  = one SWA layer with a window of its own;   logits = head(collapse(X''))

X are the streams after the last layer, before they are collapsed. A second draft takes X'' and the first draft.
The oracle is `dsv4lib.reference.model.ReferenceModel.mtp_logits`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.config import ModelConfig
from dsv4lib.formats.fp8_block import FP8Tensor
from dsv4lib.layers.attention import Caches
from dsv4lib.layers.decoder_layer import DecoderLayer, MhcSite, Pending
from dsv4lib.layers.dense import Dense, normed
from dsv4lib.layers.step import Step
from dsv4lib.ops.mhc.op import mhc_head


class MtpBlock(torch.nn.Module):
    """One draft block.

    Args:
        layer: its decoder layer. collapse: mHC site of its head.
        tensors: e_proj, h_proj, enorm and hnorm by their name after ``mtp.0.``.
        config: dimensions. precision: of FP8 weights, see `Dense`. backend: of every op. arch: see `Dense`.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        collapse: MhcSite,
        tensors: Mapping[str, Tensor | FP8Tensor],
        config: ModelConfig,
        precision: str = "fp8",
        backend: str = "auto",
        arch: str | None = None,
    ) -> None:
        super().__init__()
        self.config, self.layer, self.collapse, self.backend = config, layer, collapse, backend
        self.e_proj = Dense([tensors["e_proj.weight"]], precision, backend=backend, arch=arch)
        self.h_proj = Dense([tensors["h_proj.weight"]], precision, backend=backend, arch=arch)
        self.register_buffer("enorm", tensors["enorm.weight"].float())
        self.register_buffer("hnorm", tensors["hnorm.weight"].float())

    def forward(self, streams: Tensor, embedded: Tensor, step: Step, caches: Caches) -> tuple[Tensor, Tensor]:
        """Run the block.

        Args:
            streams: bf16 [T, 4, d] at each position. embedded: bf16 [T, d] of the token after it.
            step: whose tokens are those after each position. caches: of the block.

        Returns:
            (hidden bf16 [T, d], what the head reads; streams bf16 [T, 4, d], for the next draft).
        """
        eps = self.config.rms_eps
        h = self.h_proj(normed(streams.flatten(0, 1), self.hnorm, eps, self.h_proj))[0]
        e = self.e_proj(normed(embedded, self.enorm, eps, self.e_proj))[0]
        x = h.unflatten(0, (-1, self.config.hc_mult)) + e[:, None]
        pending = self.layer(Pending(x), step, caches)
        given = {"f": pending.f, "post": pending.post, "comb": pending.comb, "eps": self.collapse.eps}
        given |= {"batch_invariant": self.collapse.batch_invariant, "backend": self.backend}
        out = torch.empty_like(x), torch.empty_like(embedded)
        hidden = mhc_head(pending.streams, self.collapse.site, **given, out=out)
        return hidden, out[0]
