"""Convert weights and size buffers for DeepGEMM's fused MoE kernel.

The kernel is "mega MoE"; names are its own.

    w13 [E, 2I, H/2], w2 [E, H, I/2]    packed E2M1; gate rows first, then up rows
    s13, s2                              E4M3 per 16 (NVFP4), row-major

What the transform does: the mode's conversion; gate and up interleaved by 8, weights and scales alike; four scale bytes
in an int32; rows transposed 4 x 32 inside each 128, as the UTCCP copy to tensor memory reads them; N contiguous.

Source: DeepGEMM (``deep_gemm/mega``, layout of the symmetric buffer), whose released transform takes MXFP4 scales that
are packed already; `transform_nvfp4_weights_for_mega_moe` is the name of forks that start from NVFP4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks, nvfp4, weight_modes
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.loader.operands import interleave, plane_bytes

UTCCP_ROWS = 128
TMA_BYTES = 16
BLOCK_M = (8, 16, 32, 64, 96, 128, 192)  # tokens of a tile, the candidates of the kernel; their LCM is 384
POLICIES = ("nvfp4-only", "any")


@dataclass(frozen=True)
class MegaMoeWeights:
    """Operands of both layers. Iterates as ``l1, l2``, what DeepGEMM's transform returns.

    Attributes:
        l1, l2: (weights, scales) of each plane, one after the other: two tensors, four for ``e4m3_split``, the weights
            alone for ``bf16``. Weights int8 [E, N, K/2] or E4M3 or bf16 [E, N, K]; scales int32 [E, N, K / (4 group)].
        l1_alphas: float32 [E, 2], gate and up. l2_alphas: float32 [E].
    """

    l1: tuple[torch.Tensor, ...]
    l2: tuple[torch.Tensor, ...]
    l1_alphas: torch.Tensor
    l2_alphas: torch.Tensor

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return iter((self.l1, self.l2))


def pack_sf(scales: torch.Tensor) -> torch.Tensor:
    """Scale bytes [..., N, C] -> int32 [..., N, C/4], byte c in bits 8 (c mod 4) up. C a multiple of 4.

    Widened before shifting: torch has no shift of unsigned words.
    """
    raw = _checks.as_bytes("scales", scales, torch.float8_e4m3fn, torch.float8_e8m0fnu)
    _checks.last_dim("scales", raw, multiple_of=4)
    words = raw.to(torch.int64).unflatten(-1, (-1, 4)) << torch.tensor([0, 8, 16, 24], device=raw.device)
    return words.sum(-1).to(torch.int32)  # wraps: the top byte is the sign


def unpack_sf(packed: torch.Tensor) -> torch.Tensor:
    """Invert `pack_sf`: int32 [..., N, C/4] -> uint8 [..., N, C]."""
    if packed.dtype != torch.int32:
        raise ArgumentError("packed.dtype", packed.dtype, "int32")
    shifted = packed[..., None] >> torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=packed.device)
    return (shifted & 0xFF).to(torch.uint8).flatten(-2)


def utccp_row(row: int) -> int:
    """Find the where a row's scales go: 128 rows as 4 x 32, transposed."""
    return (row & ~127) + (row & 31) * 4 + ((row >> 5) & 3)


def to_utccp_layout(packed: torch.Tensor) -> torch.Tensor:
    """Reorder rows of packed scales [..., N, C] as UTCCP reads them.

    Row r comes to `utccp_row` (r). N a multiple of 128.
    """
    _whole_blocks(packed)
    return packed.unflatten(-2, (-1, 4, 32)).transpose(-3, -2).flatten(-4, -2)


def from_utccp_layout(packed: torch.Tensor) -> torch.Tensor:
    """Invert `to_utccp_layout`."""
    _whole_blocks(packed)
    return packed.unflatten(-2, (-1, 32, 4)).transpose(-3, -2).flatten(-4, -2)


def _whole_blocks(packed: torch.Tensor) -> None:
    if packed.dim() < 2 or packed.shape[-2] % UTCCP_ROWS:
        raise ArgumentError("packed.shape", tuple(packed.shape), f"[..., N, C], N a multiple of {UTCCP_ROWS}")


def mn_major(packed: torch.Tensor) -> torch.Tensor:
    """Copy int32 [..., N, C] with N contiguous, as a TMA box wants it.

    Columns are a multiple of 16 bytes apart.
    """
    *lead, rows, cols = packed.shape
    step = TMA_BYTES // packed.element_size()
    stored = packed.new_zeros(*lead, cols, -(-rows // step) * step)
    stored[..., :rows] = packed.transpose(-2, -1)
    return stored[..., :rows].transpose(-2, -1)


def transform_weights_for_mega_moe(
    l1_weights: tuple[torch.Tensor, torch.Tensor], l2_weights: tuple[torch.Tensor, torch.Tensor]
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Apply DeepGEMM's own transform. Returns (weights [E, N, X], packed scales int32 [E, N, C]) of both layers.

    The first layer is interleaved by 8, the scales of both go to the UTCCP layout.
    """
    (w13, s13), (w2, s2) = l1_weights, l2_weights
    s13, s2 = to_utccp_layout(_interleaved(s13)), to_utccp_layout(s2)
    return (_interleaved(w13), mn_major(s13)), (w2, mn_major(s2))


def transform_nvfp4_weights_for_mega_moe(
    l1_weights: tuple[torch.Tensor, torch.Tensor],
    l2_weights: tuple[torch.Tensor, torch.Tensor],
    *,
    l1_weight_scale_2: torch.Tensor,
    l2_weight_scale_2: torch.Tensor,
    precision: str = "nvfp4",
    weight_policy: str = "nvfp4-only",
) -> MegaMoeWeights:
    """Convert NVFP4 experts to the fused kernel's operands.

    Args:
        l1_weights: w13 uint8 or int8 [E, 2I, H/2], gate rows first; s13 E4M3 [E, 2I, H/16].
        l2_weights: w2 [E, H, I/2]; s2 [E, H, I/16].
        l1_weight_scale_2: float32 [E] (shared by gate and up) or [E, 2].
        l2_weight_scale_2: float32 [E].
        precision: key of `weight_modes.MODES`.
        weight_policy: "nvfp4-only" takes no mode that changes a weight; "any" takes all.

    Raises:
        ArgumentError: a mode that the policy forbids; wrong dtypes or shapes; I or H no multiple of 128.
    """
    if weight_policy not in POLICIES:
        raise ArgumentError("weight_policy", weight_policy, "one of " + ", ".join(POLICIES))
    if weight_policy == "nvfp4-only" and not weight_modes.mode_named(precision).exact:
        allowed = ", ".join(m.name for m in weight_modes.MODES.values() if m.exact)
        raise ArgumentError("precision", precision, f'one that changes no weight ({allowed}), or weight_policy="any"')
    experts, width2, hidden = _shape("l1_weights", *l1_weights)
    shape2 = _shape("l2_weights", *l2_weights)
    if shape2 != (experts, hidden, width2 // 2):
        raise ArgumentError("l2_weights", shape2, f"[E, H, I] = {(experts, hidden, width2 // 2)}, from l1_weights")
    alphas1 = _alphas("l1_weight_scale_2", l1_weight_scale_2, experts, 2)
    alphas2 = _alphas("l2_weight_scale_2", l2_weight_scale_2, experts, 1)
    half = width2 // 2
    halves = ((l1_weights[0][:, :half], l1_weights[1][:, :half]), (l1_weights[0][:, half:], l1_weights[1][:, half:]))
    gate, up = (_converted(w, s, alphas1[:, i], precision) for i, (w, s) in enumerate(halves))
    down = _converted(*l2_weights, alphas2[:, 0], precision)
    l1: list[torch.Tensor] = []
    for (g, gs), (u, us) in zip(gate, up, strict=True):
        l1 += _finished(interleave(g, u), None if gs is None else interleave(gs, us))
    l2 = [t for codes, scales in down for t in _finished(codes, scales)]
    if precision == "ue8m0_naive":  # it has folded the global scales
        alphas1, alphas2 = torch.ones_like(alphas1), torch.ones_like(alphas2)
    return MegaMoeWeights(tuple(l1), tuple(l2), alphas1, alphas2[:, 0])


def _interleaved(joined: torch.Tensor) -> torch.Tensor:
    return interleave(*joined.chunk(2, dim=-2))


def _shape(name: str, weight: torch.Tensor, scales: torch.Tensor) -> tuple[int, int, int]:
    """(E, N, K) of a packed weight, checked against its scales."""
    raw = _checks.as_bytes(f"{name}[0]", weight, torch.int8)
    _checks.as_bytes(f"{name}[1]", scales, torch.float8_e4m3fn)
    if raw.dim() != 3 or raw.shape[1] % (2 * UTCCP_ROWS if name[1] == "1" else UTCCP_ROWS) or raw.shape[2] % 64:
        raise ArgumentError(f"{name}[0].shape", tuple(raw.shape), "[E, N, K/2], hidden and width multiples of 128")
    _checks.shape(f"{name}[1]", scales, (*raw.shape[:2], raw.shape[2] * 2 // nvfp4.BLOCK))
    return raw.shape[0], raw.shape[1], raw.shape[2] * 2


def _alphas(name: str, scale: torch.Tensor, experts: int, outputs: int) -> torch.Tensor:
    """float32 [E, outputs] from [E] or [E, outputs]."""
    allowed = f"float32 [{experts}]" + (f" or [{experts}, {outputs}]" if outputs > 1 else "") + ", positive and finite"
    if scale.dtype != torch.float32 or tuple(scale.shape) not in ((experts,), (experts, outputs)):
        raise ArgumentError(name, (scale.dtype, tuple(scale.shape)), allowed)
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ArgumentError(name, scale.tolist(), allowed)
    return (scale if scale.dim() == 2 else scale[:, None].expand(experts, outputs)).contiguous()


def _converted(
    weight: torch.Tensor, scales: torch.Tensor, alphas: torch.Tensor, precision: str
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """(codes, row-major scale bytes) of every plane, all experts stacked."""
    planes: list[list[tuple[torch.Tensor, torch.Tensor | None]]] = []
    for w, s, alpha in zip(weight.view(torch.uint8), scales.view(torch.uint8), alphas, strict=True):
        converted = weight_modes.convert(NVFP4Tensor(w, s, alpha), precision).planes
        planes.append([plane_bytes(plane)[:2] for plane in converted])
    stacked = []
    for parts in zip(*planes, strict=True):
        codes = torch.stack([codes for codes, _ in parts])
        stacked.append((codes, None if parts[0][1] is None else torch.stack([scales for _, scales in parts])))
    return stacked


def _finished(codes: torch.Tensor, scales: torch.Tensor | None) -> list[torch.Tensor]:
    codes = codes.view(torch.int8) if codes.dtype == torch.uint8 else codes  # DeepGEMM's type of packed FP4
    return [codes] if scales is None else [codes, mn_major(to_utccp_layout(pack_sf(scales)))]


def token_alignment(block_m: tuple[int, ...] = BLOCK_M) -> int:
    """Compute the multiple that token counts must be. It is the least common multiple of the tile heights."""
    return math.lcm(*block_m)


def ring_limit(ranks: int, experts: int, tokens_per_rank: int, topk: int, block_m: tuple[int, ...] = BLOCK_M) -> int:
    """Count tokens of a ring that holds everything at once.

    All routed tokens, and the padding of each expert's last tile.
    """
    local = experts // ranks
    worst = ranks * tokens_per_rank * min(topk, local) + local * (max(block_m) - 1)
    return -(-worst // token_alignment(block_m)) * token_alignment(block_m)


def get_symm_buffer_size_for_mega_moe(
    *,
    ranks: int,
    experts: int,
    tokens_per_rank: int,
    topk: int,
    hidden: int,
    width: int,
    activations: str = "mxfp8",
    ring_tokens: int | None = None,
    block_m: tuple[int, ...] = BLOCK_M,
) -> dict[str, int]:
    """Count the bytes of every data buffer of a rank.

    In the order of the symmetric buffer.

    The signals in front of them (counters, masks, source indices) are the kernel's own and differ between versions.

    Args:
        ranks, experts: of the group; experts a multiple of ranks.
        tokens_per_rank: most tokens a rank brings; rounded up to `token_alignment`.
        topk: experts a token.
        hidden, width: H and I, multiples of 128 (256 for ``nvfp4``).
        activations: ``mxfp8`` (E4M3, E8M0 per 32), ``nvfp4`` (E2M1, E4M3 per 16) or ``bf16``.
        ring_tokens: of the ring between the two GEMMs; None: `ring_limit`. Rounded up likewise.
        block_m: candidates for the tile's height; a ring of scales is padded to 128 rows a tile for the worst of them.
    """
    bits, group, multiple = {"mxfp8": (8, 32, 128), "nvfp4": (4, 16, 256), "bf16": (16, 0, 128)}.get(
        activations, (0, 0, 1)
    )
    if not bits:
        raise ArgumentError("activations", activations, "mxfp8, nvfp4 or bf16")
    sizes = {"ranks": ranks, "experts": experts, "tokens_per_rank": tokens_per_rank, "topk": topk}
    for name, value in sizes.items():
        if value <= 0:
            raise ArgumentError(name, value, "at least 1")
    if experts % ranks:
        raise ArgumentError("experts", experts, f"a multiple of ranks={ranks}")
    for name, value in (("hidden", hidden), ("width", width)):
        if value <= 0 or value % multiple:
            raise ArgumentError(name, value, f"a positive multiple of {multiple} with {activations} activations")
    align = token_alignment(block_m)
    tokens = -(-tokens_per_rank // align) * align
    ring = (
        ring_limit(ranks, experts, tokens, topk, block_m) if ring_tokens is None else -(-ring_tokens // align) * align
    )
    sf_ring = max(ring // m * (-(-m // UTCCP_ROWS) * UTCCP_ROWS) for m in block_m) if group else 0

    def sf(cols: int) -> int:
        return cols // group if group else 0

    return {
        "x": tokens * hidden * bits // 8,
        "x_sf": tokens * sf(hidden),
        "topk_idx": tokens * topk * 8,
        "topk_weights": tokens * topk * 4,
        "l1_acts": ring * hidden * bits // 8,
        "l1_acts_sf": sf_ring * sf(hidden),
        "l1_topk_weights": 0 if activations == "nvfp4" else ring * 4,  # NVFP4 weighs after the second GEMM
        "l2_acts": ring * width * bits // 8,
        "l2_acts_sf": sf_ring * sf(width),
        "combine": topk * tokens * hidden * 2,
    }
