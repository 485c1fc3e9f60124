"""turbo4, a 4-bit KV cache: rotate, one fp16 norm a vector, 16 Lloyd-Max centroids of the normal distribution.

    y     = H (s * x) / sqrt(d)            random signs s, Hadamard matrix H: coordinates of y look like N(0, |x|^2 / d)
    code  = the nearest of norm c_0 .. norm c_15, c_i the Lloyd-Max centroids of N(0, 1/d)
    value = norm c_code, rotated back

The rotation is the method: it spreads channels that are much larger than others over all dimensions. Queries are
rotated too (q.k does not change), and the output of attention is rotated back once.

    record (AoS, for interchange)   d / 2 bytes, code of dim 2 k in the low nibble of byte k, 2 k + 1 in the high one;
                                    then the norm, fp16 little endian: 66 bytes for d 128, 226 for 448, 258 for 512
    page (SoA, for kernels)         n * d / 2 bytes of nibbles, then n * 2 bytes of norms, padded to 16 bytes

A record's stride of 66 bytes aligns nothing but its fp16; in a page, rows of nibbles are whole 16-byte vectors.

Entries of DSV4 (448 nope dims, 64 rope dims, K and V at once): `Latent.MIXED` has 448 dims of 4 bits, 64 of bf16 and
the norm, 354 bytes; `Latent.ROTATED` rotates all 512 after RoPE, 258 bytes.

A norm above 65504 or a NaN is refused. Norms below 2^-25 become 0 and the vector with them.
Source: TurboQuant (arXiv 2504.19874), the variant without QJL, as llama.cpp's and vLLM's turbo4 have it.
"""

from __future__ import annotations

import enum
import functools
import math
from typing import NamedTuple

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import _checks, hadamard
from dsv4lib.formats.paged import PageLayout

LEVELS = 16
HALF = LEVELS // 2
NORM_BYTES = 2
MAX_NORM = 65504.0  # of fp16
MAX_DIM = 4096
ALIGN = 16  # bytes that a page is a multiple of
NOPE, ROPE = 448, 64  # of DSV4's entry
WORD = 32  # dims that share a word of signs
E4M3_GAIN = 1.085  # of `e4m3_centroids`, where E4M3 has numbers near all 16


class Encoded(NamedTuple):
    """Codes and norms.

    Attributes:
        packed: uint8 [..., d / 2], two codes a byte.
        norms: fp16 [...].
    """

    packed: torch.Tensor
    norms: torch.Tensor


class Latent(enum.Enum):
    """How an entry of DSV4 is stored."""

    MIXED = "mixed"
    ROTATED = "rotated"


def _check_dim(name: str, dim: int) -> int:
    """Return ``dim`` if there is a rotation of that order."""
    odd = dim // (dim & -dim) if isinstance(dim, int) and dim > 0 else 0
    if odd not in (1, 7) or not 2 <= dim <= MAX_DIM or (odd == 7 and dim % 28):
        raise ArgumentError(name, dim, f"a power of two or 28 times one, 2 to {MAX_DIM}")
    return dim


# ------------------------------------------------------------------------------------------------------ codebook


@functools.cache
def levels(bits: int = 4) -> tuple[float, ...]:
    """Lloyd-Max centroids of N(0, 1) above 0, ascending, 2^(bits - 1) of them; those below are their negatives.

    A centroid is the mean of the normal distribution between the midpoints to its neighbours: iterated from quantiles
    until nothing moves by more than 1e-14.

    Args:
        bits: 1 to 6.
    """
    if not isinstance(bits, int) or not 1 <= bits <= 6:
        raise ArgumentError("bits", bits, "1 to 6")
    count = 1 << (bits - 1)
    found = [0.8 * (i + 0.5) * math.sqrt(bits) / count * 2 for i in range(count)]
    while True:
        edges = [0.0, *((a + b) / 2 for a, b in zip(found, found[1:], strict=False)), math.inf]
        density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in edges]
        tail = [math.erfc(x / math.sqrt(2)) / 2 for x in edges]
        pairs = zip(density, density[1:], tail, tail[1:], strict=False)
        after = [(a - b) / (p - q) for a, b, p, q in pairs]
        if max(abs(a - b) for a, b in zip(after, found, strict=True)) < 1e-14:
            return tuple(after)
        found = after


def centroids(dim: int, bits: int = 4) -> torch.Tensor:
    """Centroids of N(0, 1 / dim), dim 1 or more, fp64 [2^bits], ascending: code 0 is the most negative."""
    if not isinstance(dim, int) or dim < 1:
        raise ArgumentError("dim", dim, "an integer of at least 1")
    above = torch.tensor(levels(bits), dtype=torch.float64) * dim**-0.5
    return torch.cat([-above.flip(0), above])


def e4m3_centroids(dim: int) -> torch.Tensor:
    """Centroids near `centroids` that are E4M3 numbers times dim^-0.5 / 1.085, fp64 [16]: tables of 16 bytes."""
    above = torch.tensor([9 / 64, 13 / 32, 11 / 16, 1, 11 / 8, 7 / 4, 9 / 4, 3], dtype=torch.float64)
    return torch.cat([-above.flip(0), above]) * dim**-0.5 / E4M3_GAIN


def boundaries(dim: int, bits: int = 4) -> torch.Tensor:
    """Midpoints of neighbouring `centroids`, fp64 [2^bits - 1]; a value on one takes the upper code."""
    table = centroids(dim, bits)
    return (table[1:] + table[:-1]) / 2


# ------------------------------------------------------------------------------------------------------ rotation


def sign_word(seed: int, word: int) -> int:
    """32 random bits, those of the signs of dims 32 ``word`` and up: MurmurHash3's finaliser of 32-bit counters."""
    x = (seed + 0x9E3779B9 * (word + 1)) & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ x >> 16


@functools.cache
def _signs(dim: int, seed: int) -> tuple[float, ...]:
    words = [sign_word(seed, i) for i in range(-(-dim // WORD))]
    return tuple(-1.0 if words[i // WORD] >> i % WORD & 1 else 1.0 for i in range(dim))


def signs(dim: int, seed: int = 0) -> torch.Tensor:
    """Random signs of a rotation, fp64 [dim] of 1 and -1: bit i % 32 of word i / 32 is set where -1."""
    _check_dim("dim", dim)
    if not isinstance(seed, int) or not 0 <= seed < 1 << 31:
        raise ArgumentError("seed", seed, "an integer from 0 to 2^31 - 1")
    return torch.tensor(_signs(dim, seed), dtype=torch.float64)


@functools.cache
def paley(prime: int = 13) -> torch.Tensor:
    """Return a symmetric Hadamard matrix of order 2 (prime + 1), fp64 of 1 and -1: Paley's second construction.

    448 is 28 x 16: no power of two, but a product of orders that have a Hadamard matrix.

    Args:
        prime: one with remainder 1 by 4.
    """
    squares = {i * i % prime for i in range(1, prime)}
    jacobi = [[0 if i == j else 1 if (i - j) % prime in squares else -1 for j in range(prime)] for i in range(prime)]
    bordered = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    bordered[0, 0], bordered[1:, 1:] = 0.0, torch.tensor(jacobi, dtype=torch.float64)
    one = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    diagonal = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(bordered, one) + torch.kron(torch.eye(prime + 1, dtype=torch.float64), diagonal)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """X times the orthonormal symmetric Hadamard matrix of its last dimension: 2^k or 28 * 2^k."""
    dim = x.shape[-1]
    if dim & (dim - 1) == 0:
        return hadamard.transform(x)
    outer = paley().to(x) * 28**-0.5
    inner = hadamard.transform(x.unflatten(-1, (28, dim // 28)))
    return torch.einsum("ij,...jk->...ik", outer, inner).flatten(-2)


def rotate(x: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Flip random signs, then multiply by the orthonormal Hadamard matrix: [..., d], in fp32 (fp64 for fp64)."""
    work = _checks.working_copy("x", x)
    _check_dim("x.shape[-1]", _checks.last_dim("x", work))
    return _hadamard(work * signs(work.shape[-1], seed).to(work))


def unrotate(y: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Invert `rotate`: the matrix is symmetric and orthogonal, signs come last."""
    work = _checks.working_copy("y", y)
    _check_dim("y.shape[-1]", _checks.last_dim("y", work))
    return _hadamard(work) * signs(work.shape[-1], seed).to(work)


# --------------------------------------------------------------------------------------------------------- codec


def _length(y: torch.Tensor) -> torch.Tensor:
    """Length of [..., d]: neighbours are added first, then neighbouring sums, as lanes of a warp do."""
    total = y * y
    while total.shape[-1] > 1:
        if total.shape[-1] % 2:
            total = torch.nn.functional.pad(total, (0, 1))
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0].sqrt()


def quantize_rotated(y: torch.Tensor) -> Encoded:
    """Quantise what is rotated already, and let NaN and large norms pass: NaN and Inf in the norm.

    The boundaries above 0 are multiplied by the fp16 norm in the dtype of ``y``. A code is 8 and one more for each that
    |y| has reached, or, where y < 0, 7 and one less for each that |y| is above.

    Args:
        y: fp32 or fp64 [..., d].
    """
    norms = _length(y).to(torch.float16)
    reached, passed = (torch.zeros(y.shape, dtype=torch.uint8, device=y.device) for _ in range(2))
    for bound in boundaries(y.shape[-1])[HALF:].to(y):
        here = (bound * norms.to(y.dtype))[..., None]
        reached += (y.abs() >= here).to(torch.uint8)
        passed += (y.abs() > here).to(torch.uint8)
    return Encoded(pack(torch.where(y < 0, HALF - 1 - passed, HALF + reached)), norms)


def encode(x: torch.Tensor, seed: int = 0, rotated: bool = True) -> Encoded:
    """Quantise vectors.

    Args:
        x: bf16, fp16, fp32 or fp64 [..., d], d even, a power of two or 28 times one. seed: of the signs.
        rotated: False leaves the rotation out, to show what it is good for.

    Raises:
        ArgumentError: a wrong dtype or size, a NaN, Inf or norm above 65504.
    """
    work = _checks.working_copy("x", x)
    _check_dim("x.shape[-1]", _checks.last_dim("x", work))
    made = quantize_rotated(rotate(work, seed) if rotated else work)
    wrong = ~made.norms.isfinite()
    if bool(wrong.any()):
        raise ArgumentError("x", made.norms[wrong].tolist()[:4], f"finite vectors with norms up to {MAX_NORM}")
    return made


def decode_rotated(
    given: Encoded, dtype: torch.dtype = torch.float32, table: torch.Tensor | None = None
) -> torch.Tensor:
    """Norm times centroid, not rotated back: [..., d], the product formed in fp64.

    Args:
        given: codes and norms. dtype: bf16, fp32 or fp64.
        table: other centroids of N(0, 1 / d), [16], as `e4m3_centroids`; None: `centroids`.
    """
    codes = unpack(given.packed)
    if given.norms.dtype != torch.float16:
        raise ArgumentError("norms.dtype", given.norms.dtype, "float16")
    _checks.shape("norms", given.norms, tuple(codes.shape[:-1]))
    _check_dim("packed.shape[-1] * 2", codes.shape[-1])
    table = centroids(codes.shape[-1]) if table is None else table.double()
    _checks.shape("table", table, (LEVELS,))
    table = table.to(codes.device)
    return (table[codes.long()] * given.norms.double()[..., None]).to(_checks.output_dtype(dtype))


def decode(given: Encoded, seed: int = 0, dtype: torch.dtype = torch.float32, rotated: bool = True) -> torch.Tensor:
    """Invert `encode` up to its rounding: [..., d] in bf16, fp32 or fp64, formed in fp64."""
    values = decode_rotated(given, torch.float64)
    return (unrotate(values, seed) if rotated else values).to(_checks.output_dtype(dtype))


def fake_quantize(x: torch.Tensor, seed: int = 0, rotated: bool = True) -> torch.Tensor:
    """What the cache makes of x [..., d], in its dtype (bf16, fp32 or fp64)."""
    return decode(encode(x, seed, rotated), seed, x.dtype, rotated)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Put codes uint8 [..., d] from 0 to 15 into uint8 [..., d / 2], the even dim in the low nibble."""
    codes = _checks.as_bytes("codes", codes)
    _checks.last_dim("codes", codes, multiple_of=2)
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Invert `pack`: uint8 [..., d]."""
    packed = _checks.as_bytes("packed", packed)
    _checks.last_dim("packed", packed)
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


# --------------------------------------------------------------------------------------------- records and pages


def record_bytes(dim: int) -> int:
    """Bytes of a record: d / 2 of codes and an fp16."""
    return _check_dim("dim", dim) // 2 + NORM_BYTES


def to_records(given: Encoded) -> torch.Tensor:
    """Return records uint8 [..., d / 2 + 2]: nibbles, then the norm."""
    _checks.shape("norms", given.norms, tuple(given.packed.shape[:-1]))
    return torch.cat((given.packed, given.norms[..., None].contiguous().view(torch.uint8)), -1)


def from_records(records: torch.Tensor) -> Encoded:
    """Invert `to_records`; copies, for an fp16 of someone's bytes may be unaligned."""
    records = _checks.as_bytes("records", records)
    _check_dim("2 * (records.shape[-1] - 2)", 2 * (_checks.last_dim("records", records) - NORM_BYTES))
    norms = records[..., -NORM_BYTES:].clone(memory_format=torch.contiguous_format)
    return Encoded(records[..., :-NORM_BYTES].contiguous(), norms.view(torch.float16)[..., 0])


def layout(dim: int) -> PageLayout:
    """Return how records of ``dim`` lie in a page: nibbles of all, then norms of all, 16-byte multiples."""
    return PageLayout(_check_dim("dim", dim) // 2, NORM_BYTES, ALIGN)


LATENT_LAYOUTS = {
    Latent.MIXED: PageLayout(NOPE // 2 + 2 * ROPE, NORM_BYTES, ALIGN),  # nibbles and bf16, then norms
    Latent.ROTATED: layout(NOPE + ROPE),
}


def pages_of_records(records: torch.Tensor, page_size: int) -> torch.Tensor:
    """Move records uint8 [T, d / 2 + 2] into pages uint8 [P, bytes]; the rest of the last page is 0."""
    if records.dim() != 2:
        raise ArgumentError("records.shape", tuple(records.shape), "[T, d / 2 + 2]")
    given = from_records(records)
    where = layout(2 * given.packed.shape[1])
    pages = where.allocate(-(-len(records) // page_size), page_size).to(records.device)
    at = torch.arange(len(records), device=records.device)
    where.write(pages, page_size, at, given.packed, given.norms[:, None].view(torch.uint8))
    return pages


def records_of_pages(pages: torch.Tensor, dim: int, page_size: int) -> torch.Tensor:
    """Invert `pages_of_records`: uint8 [P * page_size, d / 2 + 2], also of what nothing was written to."""
    data, norms = layout(dim).views(pages, page_size)
    return torch.cat((data, norms), -1).flatten(0, 1)


# --------------------------------------------------------------------------------------------- entries of DSV4


def encode_latent(kv: torch.Tensor, kind: Latent = Latent.MIXED, seed: int = 0) -> torch.Tensor:
    """Quantise entries of DSV4, RoPE applied already.

    Args:
        kv: bf16, fp16, fp32 or fp64 [..., 512].

    Returns:
        records uint8 [..., 354] (224 of nibbles, 128 of bf16, the norm) or [..., 258].
    """
    work = _checks.working_copy("kv", kv)
    _checks.last_dim("kv", work, equal_to=NOPE + ROPE)
    if kind is Latent.ROTATED:
        return to_records(encode(work, seed))
    packed, norms = encode(work[..., :NOPE], seed)
    rope = work[..., NOPE:].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat((packed, rope, norms[..., None].contiguous().view(torch.uint8)), -1)


def decode_latent(
    records: torch.Tensor, kind: Latent = Latent.MIXED, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Invert `encode_latent` up to its rounding: [..., 512]."""
    records = _checks.as_bytes("records", records)
    if kind is Latent.ROTATED:
        _checks.last_dim("records", records, equal_to=record_bytes(NOPE + ROPE))
        return decode(from_records(records), seed, dtype)
    _checks.last_dim("records", records, equal_to=LATENT_LAYOUTS[kind].entry_bytes)
    nibbles, rope, norm = records.split((NOPE // 2, 2 * ROPE, NORM_BYTES), -1)
    nope = decode(from_records(torch.cat((nibbles, norm), -1)), seed, dtype)
    return torch.cat((nope, rope.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).to(dtype)), -1)
