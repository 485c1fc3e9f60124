"""Call the fused MoE by the names and arguments of FlashInfer's NVFP4 mega MoE.

    buffer = get_symm_buffer_for_mega_moe(E, M, k, H, 2 I, rank, world, fc1_alpha=.., make_buffer=..)
    l1, l2 = operands_of(transformed_l1, transformed_l2)      once: from the order of FlashInfer's kernel to ours
    buffer.x[:n].copy_(codes); ...                            tokens, their scales, experts and weights
    nvfp4_mega_moe(y, l1, l2, buffer, num_tokens=n)           every rank, in lockstep

What is the same: NVFP4 on both sides, gate clamped from above and up on both sides, factors by expert, -1 is no expert,
slots are added in order in fp32. What differs, beside the order of weights:

    apply_topk_in_fc1=False    a result is weighted before it is rounded to bf16, not after
    fc1_norm_const             becomes a scale, its inverse in fp32: exact for powers of two
    fast_math=False            has an effect (`mega_moe`)
    sizes                      H and I are multiples of 256, k is 16 at most: others are refused

Source: FlashInfer 0.7.2, ``moe_ep/kernel_src/sm100/cutedsl_megamoe``, names and meaning of arguments alone. Options
that the kernel does not have are refused by name: other activations, results in MXFP8 or NVFP4, sums of bf16 by
atomics, results that are not summed, tuning.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.mega_moe import Layout, SymmetricBuffer, mega_moe
from dsv4lib.ops.moe_gemm.operands import Operand

MODE = "nvfp4"
THEIR_RUN, OUR_RUN = 16, 8  # rows of gate, then of up
LEAST = 2.0**-126  # of a factor: it and its inverse are normal numbers of fp32
RANGE = "numbers from 2^-126 to 2^126"
# Options of FlashInfer's -> values that mean what the kernel does.
PLAIN = {
    "activation": ("swiglu",),
    "swiglu_alpha": (None, 1.0),
    "swiglu_beta": (None, 0.0),
    "situ_beta": (None,),
    "situ_linear_beta": (None,),
    "enable_in_kernel_fc2_reduce": (False,),
    "defer_topk_reduce": (False,),
    "combine_dtype": ("bf16",),
    "knobs": (None,),
}
FLAT = "a view [E, K / 2, N] whose K is contiguous, as FlashInfer's preprocessing makes it"


class MegaMoESymmBuffer:
    """A rank's memory with FlashInfer's attributes. Made by `get_symm_buffer_for_mega_moe`.

    Attributes:
        num_total_experts, num_max_tokens, num_topk, hidden, intermediate, rank, world_size: sizes, intermediate 2 I.
        fc1_alpha, fc2_alpha, fc1_norm_const: fp32 [E / W], read by every call.
        apply_topk_in_fc1, gate_up_clamp: see there.
        memory: `SymmetricBuffer`, None once it is destroyed.
    """

    def __init__(
        self,
        memory: SymmetricBuffer,
        factors: dict[str, Tensor],
        apply_topk_in_fc1: bool,
        gate_up_clamp: float | None,
        backend: str,
    ) -> None:
        one = memory.layout
        self.num_total_experts, self.num_max_tokens, self.num_topk = one.experts, one.max_tokens, one.topk
        self.hidden, self.intermediate, self.rank, self.world_size = (
            one.hidden,
            2 * one.intermediate,
            memory.rank,
            one.world,
        )
        self.fc1_alpha, self.fc2_alpha, self.fc1_norm_const = factors.values()
        self.apply_topk_in_fc1, self.gate_up_clamp, self.backend = apply_topk_in_fc1, gate_up_clamp, backend
        self.memory: SymmetricBuffer | None = memory

    @property
    def num_experts_per_rank(self) -> int:
        """Return the experts of this rank."""
        return self.num_total_experts // self.world_size

    @property
    def x(self) -> Tensor:
        """View the codes of this rank's tokens, float4_e2m1fn_x2 [M, H / 2]."""
        return self._there().x.view(torch.float4_e2m1fn_x2)

    @property
    def x_sf(self) -> Tensor:
        """View their scales, float8_e4m3fn [M, H / 16], row after row."""
        return self._there().x_scales.view(torch.float8_e4m3fn)

    @property
    def topk_idx(self) -> Tensor:
        """View the experts of tokens, int64 [M, k]."""
        return self._there().topk_idx

    @property
    def topk_weights(self) -> Tensor:
        """View the weights of tokens' experts, fp32 [M, k]."""
        return self._there().topk_weights

    def factors(self) -> dict[str, Tensor]:
        """Make the factors as `mega_moe` takes them, of what they are now."""
        both = torch.stack([self.fc1_alpha] * 2, 1)
        return {"l1_alphas": both, "l2_alphas": self.fc2_alpha, "l2_act_scales": 1.0 / self.fc1_norm_const}

    def destroy(self) -> None:
        """Let the memory go."""
        self.memory = None

    def _there(self) -> SymmetricBuffer:
        if self.memory is None:
            raise ArgumentError("symm_buffer", "destroyed", "one that is not")
        return self.memory


@typed
def get_symm_buffer_for_mega_moe(
    num_total_experts: int,
    num_max_tokens: int,
    num_topk: int,
    hidden: int,
    intermediate: int,
    rank: int,
    world_size: int,
    *,
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
    gate_up_clamp: float | None = None,
    activation_clamp: float | None = None,
    activation: str = "swiglu",
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    apply_topk_in_fc1: bool = True,
    enable_in_kernel_fc2_reduce: bool = False,
    defer_topk_reduce: bool = False,
    combine_dtype: str = "bf16",
    fc1_alpha: Tensor | float | None = None,
    fc2_alpha: Tensor | float | None = None,
    fc1_norm_const: Tensor | float | None = None,
    knobs: dict | None = None,
    make_buffer: Callable[[Layout], SymmetricBuffer] | None = None,
    backend: str = "auto",
    device: str = "cpu",
) -> MegaMoESymmBuffer:
    """Make a rank's memory.

    Args:
        num_total_experts: E of all ranks. num_max_tokens: M. num_topk: k. hidden: H.
        intermediate: 2 I, rows of gate and up together.
        rank, world_size: of this process and of the group.
        gate_up_clamp: of the SwiGLU; None: none. activation_clamp: its older name.
        apply_topk_in_fc1: routing weights multiply h before it is quantised; False: results.
        fc1_alpha, fc2_alpha: factors of the sums, fp32 [E / W], or one for all; None: 1.
        fc1_norm_const: what h is multiplied by before its scales are chosen, likewise.
        swiglu_alpha, swiglu_beta, activation, situ_beta, situ_linear_beta, enable_in_kernel_fc2_reduce,
            defer_topk_reduce, combine_dtype, knobs: as in `PLAIN`.
        make_buffer: ours alone: makes symmetric memory of a layout; None: ordinary memory, of one rank.
        backend, device: ours alone, of `mega_moe` and of the memory.

    Raises:
        ArgumentError: an option or back end that there is not, factors of another type, shape or value, two clamps,
            memory of another layout, several ranks without ``make_buffer``. ConfigError: sizes that it does not have.
    """
    _refuse_others(
        activation=activation,
        swiglu_alpha=swiglu_alpha,
        swiglu_beta=swiglu_beta,
        situ_beta=situ_beta,
        situ_linear_beta=situ_linear_beta,
        enable_in_kernel_fc2_reduce=enable_in_kernel_fc2_reduce,
        defer_topk_reduce=defer_topk_reduce,
        combine_dtype=combine_dtype,
        knobs=knobs,
    )
    backends.check_name(backend)
    clamp = _clamp(gate_up_clamp, activation_clamp)
    if intermediate % 2:
        raise ArgumentError("intermediate", intermediate, "even: rows of gate and up together")
    layout = Layout(world_size, num_total_experts, num_max_tokens, num_topk, hidden, intermediate // 2, MODE)
    if not 0 <= rank < world_size:
        raise ArgumentError("rank", rank, f"0 to {world_size - 1}")
    if make_buffer is None and world_size > 1:
        raise ArgumentError("make_buffer", None, f"what makes symmetric memory of {world_size} ranks")
    memory = SymmetricBuffer.alone(layout, device) if make_buffer is None else make_buffer(layout)
    if (memory.layout, memory.rank) != (layout, rank):
        raise ArgumentError("make_buffer", (memory.layout, memory.rank), f"{layout}, rank {rank}")
    given = {"fc1_alpha": fc1_alpha, "fc2_alpha": fc2_alpha, "fc1_norm_const": fc1_norm_const}
    factors = {name: _by_expert(name, value, layout.local, memory.x.device) for name, value in given.items()}
    return MegaMoESymmBuffer(memory, factors, apply_topk_in_fc1, clamp, backend)


@typed
def nvfp4_mega_moe(
    y: Tensor | None,
    transformed_l1: Operand,
    transformed_l2: Operand,
    symm_buffer: MegaMoESymmBuffer,
    *,
    num_tokens: int | None = None,
    swiglu_alpha: float | None = None,
    swiglu_beta: float | None = None,
    gate_up_clamp: float | None = None,
    activation_clamp: float | None = None,
    fast_math: bool = True,
    sync: bool = False,
) -> Tensor | None:
    """Send the tokens that are in ``symm_buffer`` through the experts of all ranks.

    Args:
        y: bf16 [n, H], written; None: a new one is returned.
        transformed_l1, transformed_l2: what `operands_of` made.
        symm_buffer: its first n tokens are this rank's.
        num_tokens: n; None: all that there is room for, of which those with experts -1 count nothing.
        gate_up_clamp: from this call on; None: as it was. activation_clamp: its older name. fast_math: of `mega_moe`.
        swiglu_alpha, swiglu_beta: as in `PLAIN`. sync: wait for a GPU's stream.

    Returns:
        None, or where y is None the new tensor.

    Raises:
        ArgumentError: an option that the kernel does not have, a tensor of another type or shape, memory that is
            destroyed; see also `mega_moe`.
    """
    memory = symm_buffer._there()
    count = symm_buffer.num_max_tokens if num_tokens is None else num_tokens
    if not 0 <= count <= symm_buffer.num_max_tokens:
        raise ArgumentError("num_tokens", count, f"0 to {symm_buffer.num_max_tokens}")
    _refuse_others(swiglu_alpha=swiglu_alpha, swiglu_beta=swiglu_beta)
    out = torch.empty(count, symm_buffer.hidden, dtype=torch.bfloat16, device=memory.x.device) if y is None else y
    if y is not None and (y.dtype != torch.bfloat16 or tuple(y.shape) != (count, symm_buffer.hidden)):
        raise ArgumentError("y", f"{y.dtype}{list(y.shape)}", f"torch.bfloat16[{count}, {symm_buffer.hidden}]")
    clamp = _clamp(gate_up_clamp, activation_clamp)
    if clamp is not None:
        symm_buffer.gate_up_clamp = clamp
    limit = float("inf") if symm_buffer.gate_up_clamp is None else symm_buffer.gate_up_clamp
    tokens = (x[:count] for x in (memory.x, memory.x_scales, memory.topk_idx, memory.topk_weights))
    weighted = "l1" if symm_buffer.apply_topk_in_fc1 else "l2"
    how = {"weighted": weighted, "clamp": limit, "fast_math": fast_math, "backend": symm_buffer.backend}
    mega_moe(*tokens, transformed_l1, transformed_l2, memory, **symm_buffer.factors(), **how, out=out)
    if sync and out.is_cuda:
        torch.cuda.synchronize(out.device)
    return out if y is None else None


@typed
def operands_of(
    transformed_l1: tuple[Tensor, Tensor], transformed_l2: tuple[Tensor, Tensor]
) -> tuple[Operand, Operand]:
    """Order weights as our kernel reads them, from the order of FlashInfer's.

    Args:
        transformed_l1: float4_e2m1fn_x2 or uint8 [E, H / 2, 2 I], K contiguous, runs of 16 rows of gate and of up;
            their scales, E4M3 bytes [E, bytes], swizzled, of the same rows.
        transformed_l2: [E, I / 2, H] and scales.

    Returns:
        the same with runs of 8 rows, [E, 2 I, H / 2], and [E, H, I / 2]; the second is not copied.

    Raises:
        ArgumentError: tensors of another type, shape or order.
    """
    codes1, scales1 = _rows("transformed_l1", *transformed_l1)
    codes2, scales2 = _rows("transformed_l2", *transformed_l2)
    if codes1.shape[1] % (2 * THEIR_RUN):
        raise ArgumentError("transformed_l1[0].shape", tuple(transformed_l1[0].shape), "N a multiple of 32")
    if (codes2.shape[1], codes2.shape[2] * 4) != (codes1.shape[2] * 2, codes1.shape[1]):
        allowed = f"[E, I / 2, H] of {tuple(transformed_l1[0].shape)}, [E, H / 2, 2 I]"
        raise ArgumentError("transformed_l2[0].shape", tuple(transformed_l2[0].shape), allowed)
    by_row = scale_swizzle.unswizzle(scales1, codes1.shape[1], codes1.shape[2] // 8)
    return Operand(_in_runs(codes1), scale_swizzle.swizzle(_in_runs(by_row))), Operand(codes2, scales2)


def _in_runs(rows: Tensor) -> Tensor:
    """Order [E, 2 I, X] in runs of 8 rows instead of 16."""
    halves = THEIR_RUN // OUR_RUN
    return rows.unflatten(1, (-1, 2, halves, OUR_RUN)).transpose(2, 3).flatten(1, 4)


def _rows(name: str, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Check a layer; returns bytes [E, N, K / 2] and [E, bytes]."""
    if codes.dtype not in (torch.uint8, torch.float4_e2m1fn_x2) or codes.dim() != 3 or codes.stride(1) != 1:
        raise ArgumentError(f"{name}[0]", f"{codes.dtype}{list(codes.shape)}, strides {codes.stride()}", FLAT)
    if scales.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ArgumentError(f"{name}[1].dtype", scales.dtype, "torch.uint8 or torch.float8_e4m3fn")
    raw = codes.transpose(1, 2).view(torch.uint8)
    wanted = raw.shape[0], scale_swizzle.swizzled_bytes(raw.shape[1], raw.shape[2] // 8)
    if tuple(scales.shape) != wanted:
        raise ArgumentError(f"{name}[1].shape", tuple(scales.shape), str(wanted))
    return raw, scales.view(torch.uint8)


def _refuse_others(**given: object) -> None:
    """Refuse options that mean anything but what the kernel does."""
    for name, value in given.items():
        if value not in PLAIN[name]:
            raise ArgumentError(name, value, " or ".join(map(repr, PLAIN[name])))


def _clamp(gate_up_clamp: float | None, activation_clamp: float | None) -> float | None:
    """Choose between a clamp and its older name."""
    given = [x for x in (gate_up_clamp, activation_clamp) if x is not None]
    if len(set(given)) > 1:
        raise ArgumentError("activation_clamp", activation_clamp, f"gate_up_clamp, {gate_up_clamp}, or None")
    if given and not given[0] > 0:
        raise ArgumentError("gate_up_clamp", given[0], "a positive number")
    return given[0] if given else None


def _by_expert(name: str, given: Tensor | float | None, count: int, device: torch.device) -> Tensor:
    """Make fp32 [E / W] of a tensor, of one number for all, or of None, 1."""
    if not isinstance(given, Tensor):
        number = 1.0 if given is None else given
        if not LEAST <= number <= 1 / LEAST:
            raise ArgumentError(name, number, RANGE)
        given = torch.full((count,), float(number), device=device)
    if given.dtype != torch.float32 or tuple(given.shape) != (count,) or given.device != device:
        found = f"{given.dtype}{list(given.shape)} on {given.device}"
        raise ArgumentError(name, found, f"torch.float32[{count}] on {device}, or a number")
    if device.type == "cpu" and not bool(((given >= LEAST) & (given <= 1 / LEAST)).all()):
        raise ArgumentError(name, given.tolist(), RANGE)
    return given.contiguous()
