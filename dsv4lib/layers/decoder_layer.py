"""Run one layer of DeepSeek-V4. Attention and MoE stand between mHC sites, which read and write the residual streams.

    y, post, comb = mhc_pre(streams, attn_site);            f = attention(y)
    streams, y, post, comb = mhc_post_pre(streams, f, post, comb, ffn_site);   f = moe(y)

The write-back after the MoE belongs to the launch of the site that follows: the next layer's, or the head's. y leaves a
site as its sublayer reads it, in FP8 or bf16 or both:

| sublayer  | FP8                                  | bf16                                        |
|-----------|--------------------------------------|---------------------------------------------|
| attention | wq_a and wkv, 1 x 128                | compressors, weights of index heads         |
| MoE       | shared expert, 1 x 32 (Hopper: 128)  | router; routed experts, which gather rows   |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.config import ModelConfig
from dsv4lib.layers.attention import Attention, Caches
from dsv4lib.layers.dense import Activations
from dsv4lib.layers.moe import Moe
from dsv4lib.layers.step import Step
from dsv4lib.ops.mhc.op import Eps, Site, mhc_post_pre, mhc_pre, new_fp8
from dsv4lib.ops.moe_gemm.op import Operand


class Pending(NamedTuple):
    """Streams whose last write-back is still to be done. Tensors bf16 [T, 4, d], f bf16 [T, d], post, comb.

    ``f`` is None before the first layer: there is nothing to write back.
    """

    streams: Tensor
    f: Tensor | None = None
    post: Tensor | None = None
    comb: Tensor | None = None


class MhcSite(torch.nn.Module):
    """Parameters of one mHC site as buffers.

    Args:
        tensors: fn, scale, base and the weight of the norm that follows. config: dimensions. backend: of the op.
        recipe: y is wanted as FP8, see `ops.mhc.op.Fp8`; None: it is not. keep: y is wanted in bf16.
        swizzled: its scales are an image of `formats.scale_swizzle`; else they are row-major.
        batch_invariant: see `ops.mhc.op`.
    """

    def __init__(
        self,
        tensors: Site,
        config: ModelConfig,
        backend: str = "auto",
        recipe: str | None = None,
        keep: bool = True,
        swizzled: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        self.recipe, self.keep, self.swizzled = recipe, keep, swizzled
        for name, tensor in tensors._asdict().items():
            self.register_buffer(name, tensor.float().contiguous())
        self.iters, self.eps, self.backend = config.sinkhorn_iters, Eps(config.hc_eps, config.rms_eps), backend

    @property
    def site(self) -> Site:
        """The tensors as the op takes them."""
        return Site(self.fn, self.scale, self.base, self.weight)

    def forward(self, pending: Pending) -> tuple[Tensor, Activations, Tensor, Tensor]:
        """Write back what is pending, then read: (streams, y, post, comb)."""
        fp8 = None if self.recipe is None else new_fp8(pending.streams, self.recipe, self.swizzled)
        options = {"iters": self.iters, "eps": self.eps, "fp8": fp8, "keep": self.keep, "backend": self.backend}
        options["batch_invariant"] = self.batch_invariant
        if pending.f is None:
            streams, after = pending.streams, mhc_pre(pending.streams, self.site, **options)
        else:
            before = pending.f, pending.post, pending.comb
            streams, *after = mhc_post_pre(pending.streams, *before, self.site, **options)
        y, post, comb = after
        return streams, Activations(y, None if fp8 is None else Operand(fp8.codes, fp8.scales)), post, comb


class DecoderLayer(torch.nn.Module):
    """Attention and MoE between mHC sites.

    Args:
        attention, moe: of the layer. tensors: mHC and norms by their name after ``layers.N.``.
        config: dimensions. backend: of the mHC ops. batch_invariant: of the same; ``attention`` has its own.
    """

    def __init__(
        self,
        attention: Attention,
        moe: Moe,
        tensors: Mapping[str, Tensor],
        config: ModelConfig,
        backend: str = "auto",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.attn, self.ffn = attention, moe
        reads = {
            "attn": (attention.recipe, attention.reads_bf16, attention.swizzled),
            "ffn": (moe.recipe, True, moe.swizzled),
        }
        for site, wanted in reads.items():
            parts = (tensors[f"hc_{site}_{name}"] for name in ("fn", "scale", "base"))
            found = Site(*parts, tensors[f"{site}_norm.weight"])
            setattr(self, f"{site}_site", MhcSite(found, config, backend, *wanted, batch_invariant))

    def forward(self, pending: Pending, step: Step, caches: Caches) -> Pending:
        """Run the layer on the tokens of a step; its caches move on."""
        streams, y, post, comb = self.attn_site(pending)
        f = self.attn(y, step, caches)
        streams, y, post, comb = self.ffn_site(Pending(streams, f, post, comb))
        tokens = None if self.ffn.table is None else step.tokens
        return Pending(streams, self.ffn(y.bf16, tokens, y.fp8), post, comb)
