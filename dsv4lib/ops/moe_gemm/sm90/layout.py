"""Tile MXFP4 weights for the Hopper kernel, once at load time, and back.

    codes [E, N, K / 2], scales [E, N, K / 32]  ->  uint8 [E, N / 64, K / step, bytes]       step: 512, 256 or 128

A tile of 64 rows x step K is what the kernel copies into a stage: codes in the order in which threads read them, then
the scales [64 rows][step / 32], then (mode "w4a16") 16 bytes of zeros, which only that mode has.

Codes of a tile: [K / 128][row half h][warp w][g][t][block b] words of 32 bits, 16 bytes a thread and 128 K. The word
has 8 weights of row 16 w + 8 h + g and block b of 32 K: just those that the thread 4 g + t has in the A fragments of a
wgmma (`dsl.wgmma`), so activations keep their order. Its bits are placed so that few masks and shifts make operands:

    mode     weight          K in its block         sign         magnitude     becomes
    w4a8     c = 0..3        4 t + c                8 c + 7      8 c + 4..2    byte c of word 0: E4M3, value x 2^-6
             4 + c           16 + 4 t + c           8 c + 5      8 c + 6,1,0   byte c of word 1
    w4a16    2 q + h, h = 0, 1: half-word h; q:
             q = 0           2 t + h                15           8..6          half h of word q: bf16, value x 2^-126
             q = 1           8 + 2 t + h            12           5..3
             q = 2           16 + 2 t + h           9            2..0
             q = 3           24 + 2 t + h           14           13,11,10

    w4a8_row c = 0..3        4 t + c                8 c + 3      4 c + 2..0    byte c of word 0: E4M3, value x 2^s
             4 + c           16 + 4 t + c           8 c + 7      16 + 4 c + 2..0   byte c of word 1

Scales are stored as exponents that make up for that factor: E8M0 byte + 6, or + 106 with 2^20 left for the sums.

Mode "w4a8_row" has the largest byte of each row after the scales, of all its K: 64 bytes a tile, the same in all of a
row's tiles. A magnitude's nibble selects a byte of a table of eight, which holds the block's scale beside that of the
row (`SPAN`): E4M3 in which all of a row's K can be added up. A block of zeros may get another scale than it came with.

Source: OCP Microscaling Formats 1.0 (E2M1, E8M0); PTX ISA for the fragments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError

TILE_M = 64  # rows of a tile: M of a wgmma
CHUNK_K = 128  # K of the 16 bytes that a thread reads of a row
BLOCK = 32  # K of a scale
STEPS_K = (512, 256, 128)
SPAN = 11  # powers of two that scales of a row may differ by in mode "w4a8_row": 0.5 x 2^-5 to 6 x 2^6 in E4M3
PAD = 16  # bytes after the scales of mode "w4a16"


class Form(NamedTuple):
    """How a mode stores weights.

    Attributes:
        fields: of a 32-bit word, for each of 8 weights the bits (sign, magnitude 2, 1, 0).
        order: of the block's K: extents, and the axis of t among them.
        bias: what is added to an E8M0 byte. bytes: smallest and largest E8M0 byte.
        sums_factor: what the sums of the MMAs must be multiplied by.
        pad: bytes after the scales.
    """

    fields: tuple[tuple[int, int, int, int], ...]
    order: tuple[tuple[int, ...], int]
    bias: int
    bytes: tuple[int, int]
    sums_factor: float
    pad: int


def _e4m3_fields() -> tuple:
    low = [(8 * c + 7, 8 * c + 4, 8 * c + 3, 8 * c + 2) for c in range(4)]
    return (*low, *((8 * c + 5, 8 * c + 6, 8 * c + 1, 8 * c) for c in range(4)))


def _bf16_fields() -> tuple:
    places = (15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10)
    return tuple(tuple(16 * half + bit for bit in four) for four in places for half in range(2))


def _nibble_fields() -> tuple:
    low = [(8 * c + 3, 4 * c + 2, 4 * c + 1, 4 * c) for c in range(4)]
    return (*low, *((8 * c + 7, 16 + 4 * c + 2, 16 + 4 * c + 1, 16 + 4 * c) for c in range(4)))


FORMS = {
    "w4a8_row": Form(_nibble_fields(), ((2, 4, 4), 1), 0, (7, 254), 1.0, TILE_M),
    "w4a8": Form(_e4m3_fields(), ((2, 4, 4), 1), 6, (0, 248), 1.0, 0),
    "w4a16": Form(_bf16_fields(), ((4, 4, 2), 1), 106, (24, 148), 2.0**20, PAD),
}


LARGEST_BF16 = FORMS["w4a16"].bytes[1]  # E8M0 byte of a scale that a weight in bf16 can have


def tile_bytes(mode: str, step_k: int) -> int:
    """Return the bytes of a tile of 64 rows x ``step_k``: codes, scales, padding."""
    return TILE_M * step_k // 2 + TILE_M * step_k // BLOCK + FORMS[mode].pad


def step_of(k: int) -> int:
    """Choose the K of a tile: the largest of `STEPS_K` that divides ``k``.

    Raises:
        ArgumentError: none does.
    """
    for step in STEPS_K:
        if k > 0 and k % step == 0:
            return step
    raise ArgumentError("K", k, f"a multiple of {STEPS_K[-1]}")


def tiled_shape(shape: tuple[int, ...], mode: str) -> tuple[int, int, int]:
    """Read (N, K, step) from the shape of a tiled operand.

    Raises:
        ArgumentError: it is none of this mode.
    """
    if len(shape) == 4:
        for step in STEPS_K:
            if shape[3] == tile_bytes(mode, step):
                return shape[1] * TILE_M, shape[2] * step, step
    sizes = " or ".join(str(tile_bytes(mode, step)) for step in STEPS_K)
    raise ArgumentError("w", shape, f"[E, N / {TILE_M}, steps, {sizes}]: what `tile_weights` makes for mode {mode}")


def tile_weights(codes: Tensor, scales: Tensor, mode: str = "w4a8") -> Tensor:
    """Tile weights of a checkpoint.

    Args:
        codes: [E, N, K / 2] of one byte, the even k in the low nibble; N a multiple of 64, K of 128. For a first GEMM
            rows are gate and up, 8 of each alternating.
        scales: E8M0 bytes [E, N, K / 32]; mode "w4a8" takes 0 to 248 (2^-127 to 2^121), "w4a16" 24 to 148,
            "w4a8_row" 7 to 254, those of a row at most 2^11 apart where they are not of zeros.
        mode: "w4a8" or "w4a16": of the activations that come with them. "w4a8" goes with bf16 ones, too, where no scale
            is above `LARGEST_BF16`; larger ones give no finite numbers there. "w4a8_row": MXFP8 ones, or for many
            tokens E4M3 with a scale for 128 of K.

    Returns:
        uint8 [E, N / 64, K / step, `tile_bytes`].

    Raises:
        ArgumentError: an argument of another type, shape or value.
    """
    form = _form(mode)
    for name, x in (("codes", codes), ("scales", scales)):
        if x.dim() != 3 or x.dtype.itemsize != 1 or x.dtype == torch.bool:
            raise ArgumentError(name, f"{x.dtype}{list(x.shape)}", "bytes [E, N, ..]")
    experts, rows, k = codes.shape[0], codes.shape[1], 2 * codes.shape[2]
    if not rows or rows % TILE_M:
        raise ArgumentError("codes.shape", tuple(codes.shape), f"N a multiple of {TILE_M}")
    step = step_of(k)
    if tuple(scales.shape) != (experts, rows, k // BLOCK):
        raise ArgumentError("scales.shape", tuple(scales.shape), str((experts, rows, k // BLOCK)))
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
    low, high = form.bytes
    if scales.numel() and not low <= int(scales.min()) <= int(scales.max()) <= high:
        found = f"{int(scales.min())} to {int(scales.max())}"
        raise ArgumentError("scales", found, f"E8M0 bytes {low} to {high} in mode {mode}")
    out = codes.new_zeros(experts, rows // TILE_M, k // step, tile_bytes(mode, step))
    bases = None
    if mode == "w4a8_row":
        scales, bases = _with_bases(codes, scales)
    for e in range(experts):  # one at a time: 8 bytes of scratch a weight
        nibbles = torch.stack((codes[e] & 15, codes[e] >> 4), -1).flatten(1).to(torch.int32)
        parts = nibbles.view(*_outer(rows, k, step), *form.order[0])
        parts = parts.permute(_order(form)).flatten(-2)
        words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
        for i, (sign, *magnitude) in enumerate(form.fields):
            for bit, place in zip((3, 2, 1, 0), (sign, *magnitude), strict=True):
                words |= (parts[..., i] >> bit & 1) << place
        tile = out[e]
        size = TILE_M * step // 2
        tile[..., :size] = words.flatten(2).contiguous().view(torch.uint8)
        own = scales[e].view(rows // TILE_M, TILE_M, k // step, step // BLOCK).transpose(1, 2) + form.bias
        tile[..., size : size + TILE_M * step // BLOCK] = own.flatten(2)
        if bases is not None:
            tile[..., -TILE_M:] = bases[e].view(rows // TILE_M, 1, TILE_M)
    return out


def _with_bases(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales [E, N, K / 32] that lie within `SPAN` of the largest of their row, and that one [E, N].

    Raises:
        ArgumentError: those of blocks with a number other than 0 do not.
    """
    zero = ((codes & 0x77) == 0).unflatten(-1, (-1, BLOCK // 2)).all(-1)
    least, most = (scales.masked_fill(zero, fill).to(torch.int16) for fill in (255, 0))
    base = most.amax(-1).clamp(min=FORMS["w4a8_row"].bytes[0])
    span = int((base - least.amin(-1)).max()) if scales.numel() else 0
    if span > SPAN:
        raise ArgumentError("scales", f"2^{span} apart in a row", f"2^{SPAN} or less in mode w4a8_row")
    kept = scales.to(torch.int16).clamp(min=base[..., None] - SPAN, max=base[..., None])
    return kept.to(torch.uint8), base.to(torch.uint8)


def largest_scale(tiled: Tensor, mode: str = "w4a8") -> int:
    """Find the largest E8M0 byte of tiled weights; 0 of none.

    Raises:
        ArgumentError: a tensor that `tile_weights` did not make for this mode.
    """
    _, _, step = tiled_shape(tuple(tiled.shape), mode)
    size = TILE_M * step // 2
    own = tiled[..., size : size + TILE_M * step // BLOCK]
    return int(own.max()) - _form(mode).bias if own.numel() else 0


def untile_weights(tiled: Tensor, mode: str = "w4a8") -> tuple[Tensor, Tensor]:
    """Undo `tile_weights`: (codes [E, N, K / 2], scales [E, N, K / 32]), uint8.

    Raises:
        ArgumentError: a tensor that it did not make for this mode.
    """
    form = _form(mode)
    if tiled.dtype != torch.uint8:
        raise ArgumentError("tiled", tiled.dtype, "torch.uint8")
    rows, k, step = tiled_shape(tuple(tiled.shape), mode)
    experts, size = len(tiled), TILE_M * step // 2
    codes = tiled.new_empty(experts, rows, k // 2)
    for e in range(experts):
        words = tiled[e][..., :size].contiguous().view(torch.int32)
        parts = torch.stack([_nibble(words, field) for field in form.fields], -1)
        order = _order(form)
        shape = [(*_outer(rows, k, step), *form.order[0])[axis] for axis in order]
        back = sorted(range(len(order)), key=order.__getitem__)
        nibbles = parts.view(shape).permute(back).reshape(rows, k // 2, 2)
        codes[e] = (nibbles[..., 0] | nibbles[..., 1] << 4).to(torch.uint8)
    own = tiled[..., size : size + TILE_M * step // BLOCK].unflatten(-1, (TILE_M, -1)).transpose(2, 3)
    return codes, own.reshape(experts, rows, k // BLOCK) - form.bias


def _form(mode: str) -> Form:
    if mode not in FORMS:
        raise ArgumentError("mode", mode, "one of " + ", ".join(FORMS))
    return FORMS[mode]


def _nibble(words: Tensor, field: tuple[int, int, int, int]) -> Tensor:
    """Return the E2M1 codes that have these bits of words."""
    sign, *magnitude = field
    value = (words >> sign & 1) << 3
    for bit, place in zip((2, 1, 0), magnitude, strict=True):
        value = value | (words >> place & 1) << bit
    return value


def _outer(rows: int, k: int, step: int) -> tuple[int, ...]:
    """Extents of [tile, w, h, g, step, chunk, block], before those of a block's K."""
    return rows // TILE_M, 4, 2, 8, k // step, step // CHUNK_K, CHUNK_K // BLOCK


def _order(form: Form) -> list[int]:
    """Axes in the order [tile, step, chunk, h, w, g, t, block, weights of a word]."""
    inner = list(range(7, 7 + len(form.order[0])))
    t = inner.pop(form.order[1])
    return [0, 4, 5, 2, 1, 3, t, 6, *inner]
