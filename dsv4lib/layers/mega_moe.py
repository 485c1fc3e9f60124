"""Hold a rank's routed experts for the fused MoE, with the calls that serving engines make of such a layer.

    layer = MegaMoeExperts(layout, rank, make_buffer=..)     weights are loaded into w13, w13_scale, w2, w2_scale
    layer.finalize_weights()                                 once: into the order that the kernel reads
    y = layer(hidden_states, topk_weights, topk_ids)         bf16 [T, H]; every rank calls, in lockstep

Names and life cycle are those of vLLM's layer around DeepGEMM's kernel. The layout's mode says what checkpoints have:
MXFP4 ("w4a8", tokens are quantised to MXFP8) or NVFP4 ("nvfp4", tokens to NVFP4); neither is converted to the other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.mega_moe import Layout, SymmetricBuffer, mega_moe
from dsv4lib.ops.mega_moe.kernel import WEIGHTED
from dsv4lib.ops.mega_moe.layout import QUANTISED
from dsv4lib.ops.moe_gemm.operands import Operand
from dsv4lib.ops.quantize.op import quantize

RUN = 8  # rows of gate, then of up
RAW = ("w13", "w13_scale", "w2", "w2_scale")
FINAL = ("l1_codes", "l1_scales", "l2_codes", "l2_scales")
FACTORS = ("l1_alphas", "l2_alphas", "l2_act_scales", "x_scale")  # of NVFP4
GLOBAL = ("w13_scale_2", "w2_scale_2", "input_scales")


class MegaMoeExperts(torch.nn.Module):
    """Routed experts of one rank.

    Args:
        layout: sizes of the group. rank: of this process.
        make_buffer: makes this rank's memory of a layout, when it is first needed; None: ordinary memory, of one rank.
        limit: of the SwiGLU clamp. weighted: as of `mega_moe`. backend: of every op. device: of the weights.

    Attributes:
        w13: uint8 [E / W, 2 I, H / 2], packed E2M1, rows of gate, then of up. w13_scale: uint8 [E / W, 2 I, H / group],
            E8M0 per 32, or E4M3 per 16. w2: uint8 [E / W, H, I / 2]. w2_scale: uint8 [E / W, H, I / group].
        w13_scale_2: fp32 [E / W, 2], global scales of NVFP4 gate and up. w2_scale_2: fp32 [E / W]. input_scales: fp32
            [E / W, 2], calibrated scales of tokens, and of h. Tokens have one scale on all ranks: the first column is
            the largest of all experts, as `loader.moe` reads it. All that is loaded is None once weights are final.
        l1_codes, l1_scales, l2_codes, l2_scales: what the kernel reads, then. None until weights are final.
        l1_alphas, l2_alphas, l2_act_scales: fp32, as of `mega_moe`. x_scale: fp32 [1]. Of NVFP4, else None.

    Raises:
        ArgumentError: several ranks without ``make_buffer``, a rank that is none of them.
    """

    @typed
    def __init__(
        self,
        layout: Layout,
        rank: int = 0,
        *,
        make_buffer: Callable[[Layout], SymmetricBuffer] | None = None,
        limit: float = 10.0,
        weighted: str = "l1",
        backend: str = "auto",
        device: str = "cpu",
    ) -> None:
        super().__init__()
        if not 0 <= rank < layout.world:
            raise ArgumentError("rank", rank, f"0 to {layout.world - 1}")
        if make_buffer is None and layout.world > 1:
            raise ArgumentError("make_buffer", None, f"what makes symmetric memory of {layout.world} ranks")
        if weighted not in WEIGHTED:
            raise ArgumentError("weighted", weighted, "one of " + ", ".join(WEIGHTED))
        self.layout, self.rank, self.limit, self.weighted, self.backend = layout, rank, limit, weighted, backend
        self._make_buffer = make_buffer or (lambda one: SymmetricBuffer.alone(one, self.device))
        self._buffer: SymmetricBuffer | None = None
        for name in (*FINAL, *FACTORS):
            self.register_buffer(name, None)
        for name, (dtype, shape) in self._loaded().items():
            self.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device))

    def _loaded(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """List types and shapes of what is loaded."""
        one, u8 = self.layout, torch.uint8
        found = {}
        for name, rows, k in (("w13", 2 * one.intermediate, one.hidden), ("w2", one.hidden, one.intermediate)):
            found[name] = u8, (one.local, rows, k // 2)
            found[f"{name}_scale"] = u8, (one.local, rows, one.scales(k))
        if one.mode == "nvfp4":
            shapes = (one.local, 2), (one.local,), (one.local, 2)
            found |= {name: (torch.float32, shape) for name, shape in zip(GLOBAL, shapes, strict=True)}
        return found

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return next(self.buffers()).device

    @property
    def l1(self) -> Operand | None:
        """Return gate and up as the kernel reads them, None until they are final."""
        return None if self.l1_codes is None else Operand(self.l1_codes, self.l1_scales)

    @property
    def l2(self) -> Operand | None:
        """Return down as the kernel reads it, None until it is final."""
        return None if self.l2_codes is None else Operand(self.l2_codes, self.l2_scales)

    def finalize_weights(self) -> None:
        """Order weights as the kernel reads them, and drop those that were loaded; again: nothing.

        Raises:
            ArgumentError: a weight of another type or shape than `__init__` made; a global scale that is not positive
                and finite; two scales of tokens.
        """
        if self.l1 is not None:
            return
        for name, (dtype, shape) in self._loaded().items():
            x = getattr(self, name)
            if x.dtype != dtype or tuple(x.shape) != shape:
                raise ArgumentError(name, f"{x.dtype}{list(x.shape)}", f"{dtype}{list(shape)}")
            if dtype == torch.float32 and x.device.type != "meta" and not bool((x.isfinite() & (x > 0)).all()):
                raise ArgumentError(name, x.tolist(), "positive and finite")
        if self.layout.mode == "nvfp4":
            self._finalize_factors()
        self.l1_codes = _alternating(self.w13)
        self.l1_scales = scale_swizzle.swizzle(_alternating(self.w13_scale))
        self.l2_codes, self.l2_scales = self.w2, scale_swizzle.swizzle(self.w2_scale)
        for name in (*RAW, *GLOBAL):
            self.register_buffer(name, None)

    def _finalize_factors(self) -> None:
        x_scales, h_scales = self.input_scales.unbind(1)
        if x_scales.device.type != "meta" and bool((x_scales != x_scales[0]).any()):
            raise ArgumentError("input_scales", x_scales.tolist(), "one scale of tokens: the largest of all experts")
        self.x_scale, self.l2_act_scales = x_scales[:1].clone(), h_scales.contiguous()
        self.l1_alphas, self.l2_alphas = self.w13_scale_2 * self.x_scale, self.w2_scale_2 * self.l2_act_scales

    def get_symm_buffer(self) -> SymmetricBuffer:
        """Return this rank's memory, made by the hook on the first call.

        Raises:
            ArgumentError: the hook's is of another layout or rank, or on another device than the weights.
        """
        if self._buffer is not None and self._buffer.x.device != self.device:
            self._buffer = None  # the layer has moved
        if self._buffer is None:
            found = self._make_buffer(self.layout)
            if (found.layout, found.rank) != (self.layout, self.rank):
                raise ArgumentError("make_buffer", (found.layout, found.rank), f"{self.layout}, rank {self.rank}")
            if found.x.device != self.device:
                raise ArgumentError("make_buffer", str(found.x.device), f"memory on {self.device}, as the weights")
            self._buffer = found
        return self._buffer

    @typed
    def forward(self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Send this rank's tokens through the experts of all ranks.

        Args:
            hidden_states: bf16 [T, H]. topk_weights: fp32 [T, k]. topk_ids: int [T, k]; see `mega_moe`.

        Raises:
            ArgumentError: weights that are not final; see also `mega_moe`.
        """
        if self.l1 is None or self.l2 is None:
            raise ArgumentError("weights", "as they were loaded", "a call of finalize_weights before")
        if hidden_states.dtype != torch.bfloat16 or hidden_states.dim() != 2:
            found = f"{hidden_states.dtype}{list(hidden_states.shape)}"
            raise ArgumentError("hidden_states", found, f"torch.bfloat16[T, {self.layout.hidden}]")
        buffer, count = self.get_symm_buffer(), len(hidden_states)
        if count > self.layout.max_tokens:
            raise ArgumentError("hidden_states", tuple(hidden_states.shape), f"at most {self.layout.max_tokens} tokens")
        codes, scales = buffer.x[:count], buffer.x_scales[:count]
        there = (codes, scales, None) if scales.is_contiguous() else None  # where peers read them: no copy
        form = {"out": there, "backend": self.backend}
        q = quantize(hidden_states, QUANTISED[self.layout.mode], global_scale=self.x_scale, **form)
        given = q.codes, q.scales, topk_ids, topk_weights
        factors = {name: getattr(self, name) for name in FACTORS if name != "x_scale"}
        how = {"weighted": self.weighted, "clamp": self.limit, "backend": self.backend}
        return mega_moe(*given, self.l1, self.l2, buffer, **factors, **how)


def _alternating(joined: Tensor) -> Tensor:
    """Order rows of gate, then of up, as runs of 8 of each."""
    return torch.stack([part.unflatten(1, (-1, RUN)) for part in joined.chunk(2, 1)], 2).flatten(1, 3)
