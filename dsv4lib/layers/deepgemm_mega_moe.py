"""Call the fused MoE by the names and arguments of DeepGEMM's FP8 x FP4 mega MoE.

    buffer = get_symm_buffer_for_mega_moe(group, E, M, k, H, I, make_buffer=..)
    l1, l2 = operands_of(*transform_weights_for_mega_moe(..))      once: scales in the order of our kernel
    buffer.x[:n].copy_(codes); buffer.x_sf[:n].copy_(scales); ..   E4M3, and four UE8M0 a word
    fp8_fp4_mega_moe(y, l1, l2, buffer)                            every rank, in lockstep; y has n rows

Rows of gate and up alternate by 8 in both, so codes are not copied. Of scales, both have the word of row r of 128 at
place (r mod 32) 4 + r div 32; DeepGEMM has the words of a column together, ours those of a block of 128 rows.

What differs: M is not rounded up to 384; received routes are counted in the buffer's own ``recv_stats``, which every
call adds to; views of the rows between the GEMMs are not given. NVFP4 has FlashInfer's names alone
(`layers.flashinfer_mega_moe`). Source: DeepGEMM (``deep_gemm/mega``), names and meaning of arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.mega_moe import Layout, SymmetricBuffer, mega_moe
from dsv4lib.ops.moe_gemm.operands import Operand

MMA_TYPE, RECIPE, ACTIVATION = "fp8xfp4", (1, 1, 32), "swiglu"
ROWS = scale_swizzle.ROWS


class Group(Protocol):
    """Methods of a process group that are called."""

    def size(self) -> int:
        """Return the number of ranks."""

    def rank(self) -> int:
        """Return that of this process."""


class SymmBuffer:
    """A rank's memory with DeepGEMM's attributes. Made by `get_symm_buffer_for_mega_moe`.

    Attributes:
        num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden: sizes.
        memory: `SymmetricBuffer`, None once it is destroyed.
    """

    def __init__(self, memory: SymmetricBuffer, backend: str) -> None:
        one = memory.layout
        self.num_experts, self.num_max_tokens_per_rank, self.num_topk = one.experts, one.max_tokens, one.topk
        self.hidden, self.intermediate_hidden, self.backend = one.hidden, one.intermediate, backend
        self.memory: SymmetricBuffer | None = memory

    @property
    def x(self) -> Tensor:
        """View the codes of this rank's tokens, float8_e4m3fn [M, H]."""
        return self.there().x.view(torch.float8_e4m3fn)

    @property
    def x_sf(self) -> Tensor:
        """View their scales, four UE8M0 a word, int32 [M, H / 128]."""
        return self.there().x_scales.view(torch.int32)

    @property
    def topk_idx(self) -> Tensor:
        """View the experts of tokens, int64 [M, k]."""
        return self.there().topk_idx

    @property
    def topk_weights(self) -> Tensor:
        """View the weights of tokens' experts, fp32 [M, k]."""
        return self.there().topk_weights

    @property
    def recv_stats(self) -> Tensor:
        """View the routes that this rank's experts got, int32 [E / W], over all calls."""
        return self.there().received

    def destroy(self) -> None:
        """Let the memory go."""
        self.memory = None

    def there(self) -> SymmetricBuffer:
        """Return the memory.

        Raises:
            ArgumentError: it is destroyed.
        """
        if self.memory is None:
            raise ArgumentError("sym_buffer", "destroyed", "one that is not")
        return self.memory


@typed
def get_symm_buffer_for_mega_moe(
    group: Group,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = MMA_TYPE,
    activation: str = ACTIVATION,
    *,
    make_buffer: Callable[[Layout], SymmetricBuffer] | None = None,
    backend: str = "auto",
    device: str = "cpu",
) -> SymmBuffer:
    """Make a rank's memory.

    Args:
        group: of the ranks. num_experts: E of all. num_max_tokens_per_rank: M. num_topk: k. hidden: H.
        intermediate_hidden: I. use_fp8_dispatch: None or True. mma_type: "fp8xfp4". activation: "swiglu".
        make_buffer: ours alone: makes symmetric memory of a layout; None: ordinary memory, of one rank.
        backend, device: ours alone, of `mega_moe` and of the memory.

    Raises:
        ArgumentError: no group, no such back end, formats or an activation that this kernel does not have, memory of
            another layout, several ranks without ``make_buffer``. ConfigError: sizes that it does not have.
    """
    if not all(callable(getattr(group, name, None)) for name in ("size", "rank")):
        raise ArgumentError("group", type(group).__name__, "a process group, with size() and rank()")
    backends.check_name(backend)
    _same("mma_type", mma_type, MMA_TYPE)
    _same("activation", activation, ACTIVATION)
    if use_fp8_dispatch is False:
        raise ArgumentError("use_fp8_dispatch", False, "None or True: tokens travel in FP8")
    layout = Layout(group.size(), num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    if make_buffer is None and layout.world > 1:
        raise ArgumentError("make_buffer", None, f"what makes symmetric memory of {layout.world} ranks")
    memory = SymmetricBuffer.alone(layout, device) if make_buffer is None else make_buffer(layout)
    if (memory.layout, memory.rank) != (layout, group.rank()):
        raise ArgumentError("make_buffer", (memory.layout, memory.rank), f"{layout}, rank {group.rank()}")
    return SymmBuffer(memory, backend)


@typed
def fp8_fp4_mega_moe(
    y: Tensor,
    l1_weights: Operand,
    l2_weights: Operand,
    sym_buffer: SymmBuffer,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: str = ACTIVATION,
    activation_clamp: float | None = None,
    fast_math: bool = True,
) -> None:
    """Send the tokens that are in ``sym_buffer`` through the experts of all ranks.

    Args:
        y: bf16 [n, H], written: the first n tokens of the memory are this rank's.
        l1_weights, l2_weights: what `operands_of` made.
        sym_buffer: see there.
        cumulative_local_expert_recv_stats: None, or ``sym_buffer.recv_stats``.
        recipe: (1, 1, 32). activation: "swiglu". activation_clamp: None: none. fast_math: of `mega_moe`.

    Raises:
        ArgumentError: a tensor of another type or shape, counts elsewhere, a recipe or activation that this kernel does
            not have, memory that is destroyed; see also `mega_moe`.
    """
    memory = sym_buffer.there()
    _same("recipe", tuple(recipe), RECIPE)
    _same("activation", activation, ACTIVATION)
    stats = cumulative_local_expert_recv_stats
    if stats is not None and stats.data_ptr() != memory.received.data_ptr():
        allowed = "None or sym_buffer.recv_stats, to which every call adds"
        raise ArgumentError("cumulative_local_expert_recv_stats", "another tensor", allowed)
    if y.dtype != torch.bfloat16 or y.dim() != 2 or y.shape[1] != sym_buffer.hidden:
        raise ArgumentError("y", f"{y.dtype}{list(y.shape)}", f"torch.bfloat16[n, {sym_buffer.hidden}]")
    if len(y) > sym_buffer.num_max_tokens_per_rank:
        raise ArgumentError("y", tuple(y.shape), f"at most {sym_buffer.num_max_tokens_per_rank} tokens")
    clamp = float("inf") if activation_clamp is None else activation_clamp
    tokens = (x[: len(y)] for x in (memory.x, memory.x_scales, memory.topk_idx, memory.topk_weights))
    how = {"clamp": clamp, "fast_math": fast_math, "backend": sym_buffer.backend}
    mega_moe(*tokens, l1_weights, l2_weights, memory, **how, out=y)


@typed
def operands_of(l1_weights: tuple[Tensor, Tensor], l2_weights: tuple[Tensor, Tensor]) -> tuple[Operand, Operand]:
    """Order scales as our kernel reads them; codes are not copied.

    Args:
        l1_weights: int8 [E, 2 I, H / 2], gate and up alternating by 8 rows, and their scales, four UE8M0 a word, int32
            [E, 2 I, H / 128], rows in the order of UTCCP, as DeepGEMM's transform makes both.
        l2_weights: [E, H, I / 2] and scales, likewise.

    Raises:
        ArgumentError: tensors of another type or shape.
    """
    first, second = (_operand(*given) for given in (("l1_weights", *l1_weights), ("l2_weights", *l2_weights)))
    (experts, rows, columns), found = first.codes.shape, tuple(second.codes.shape)
    if found != (experts, columns * 2, rows // 4):
        allowed = f"[E, H, I / 2] of l1_weights, {(experts, columns * 2, rows // 4)}"
        raise ArgumentError("l2_weights[0].shape", found, allowed)
    return first, second


def _operand(name: str, codes: Tensor, scales: Tensor) -> Operand:
    """Check a layer and order its scales."""
    if codes.dtype not in (torch.int8, torch.uint8) or codes.dim() != 3 or codes.shape[1] % ROWS or codes.shape[2] % 64:
        raise ArgumentError(f"{name}[0]", f"{codes.dtype}{list(codes.shape)}", "torch.int8[E, N, K / 2], N, K in 128s")
    experts, rows, columns = codes.shape
    wanted = experts, rows, columns // 64
    if scales.dtype != torch.int32 or tuple(scales.shape) != wanted:
        raise ArgumentError(f"{name}[1]", f"{scales.dtype}{list(scales.shape)}", f"torch.int32{list(wanted)}")
    blocks = scales.unflatten(1, (-1, ROWS)).transpose(2, 3).contiguous()  # [E, blocks of rows, columns, 128]
    return Operand(codes.view(torch.uint8), blocks.flatten(1).view(torch.uint8))


def _same(name: str, given: object, only: object) -> None:
    """Refuse anything but the one value that the kernel has."""
    if given != only:
        raise ArgumentError(name, given, repr(only))
