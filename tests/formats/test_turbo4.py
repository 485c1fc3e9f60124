"""turbo4: pinned centroids, rotations, bytes spelled out, error with and without rotation, pages, refusals."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import turbo4
from dsv4lib.formats.turbo4 import Encoded, Latent

PINNED = (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896)
PINNED_3_BITS = (0.2450942, 0.7560053, 1.3439093, 2.1519457)
DIMS = (2, 16, 28, 64, 112, 128, 256, 448, 512)


def normals(rows, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=generator, dtype=torch.float64)


def relative_mse(x, **options):
    return float((turbo4.fake_quantize(x, **options) - x).square().sum() / x.square().sum())


def decibels(x, **options):
    return -10 * math.log10(relative_mse(x, **options))


def test_centroids_are_pinned():
    assert turbo4.levels() == pytest.approx(PINNED, abs=1e-7)
    assert turbo4.levels(3) == pytest.approx(PINNED_3_BITS, abs=1e-7)
    assert turbo4.levels(1) == pytest.approx((math.sqrt(2 / math.pi),), abs=1e-13)
    for dim, outer in ((128, 0.241529), (448, 0.129103), (512, 0.120765)):
        table = turbo4.centroids(dim)
        assert table.shape == (16,) and bool((table.diff() > 0).all())
        assert float(table[15]) == pytest.approx(outer, abs=1e-6) and torch.equal(table, -table.flip(0))


def distortion(table, bounds):
    """Integrate the squared error of a codebook over N(0, 1) by the midpoint rule."""
    step = 1 / 4096
    x = torch.arange(-8 + step / 2, 8, step, dtype=torch.float64)
    value = table[torch.searchsorted(bounds, x)]
    return float(((x - value).square() * torch.exp(-x * x / 2)).sum() * step / math.sqrt(2 * math.pi))


def test_distortion_of_the_codebooks():
    assert distortion(turbo4.centroids(1), turbo4.boundaries(1)) == pytest.approx(0.00950101, abs=2e-7)
    assert distortion(turbo4.centroids(1, 3), turbo4.boundaries(1, 3)) == pytest.approx(0.034548, abs=1e-6)
    e4m3 = turbo4.e4m3_centroids(1)
    assert distortion(e4m3, (e4m3[1:] + e4m3[:-1]) / 2) == pytest.approx(0.009569, abs=2e-6)
    assert torch.equal((e4m3 * turbo4.E4M3_GAIN).to(torch.float8_e4m3fn).double(), e4m3 * turbo4.E4M3_GAIN)


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthogonal(dim):
    """Lengths and dot products stay, rows of the matrix have one size, the inverse inverts."""
    rows = turbo4.rotate(torch.eye(dim, dtype=torch.float64), 5)
    assert torch.allclose(rows @ rows.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(rows.abs(), torch.full_like(rows, dim**-0.5), atol=1e-12)
    x = normals(3, dim)
    assert torch.allclose(turbo4.unrotate(turbo4.rotate(x, 5), 5), x, atol=1e-12)
    q, k = turbo4.rotate(x, 5)[:2]
    assert float(q @ k - x[0] @ x[1]) == pytest.approx(0, abs=1e-6)


def test_signs():
    """Balanced, different by seed, and the ones that they have always been."""
    assert [turbo4.sign_word(0, 0), turbo4.sign_word(7, 3)] == [0x92CA2F0E, 0x8D65294E]
    signs = [turbo4.signs(512, seed) for seed in range(4)]
    for i, one in enumerate(signs):
        assert set(one.tolist()) == {1.0, -1.0} and abs(float(one.mean())) < 0.15
        assert all(abs(float((one * other).mean())) < 0.15 for other in signs[:i])
    assert turbo4.signs(32)[1] == -1 and turbo4.signs(32)[0] == 1  # the last digit is 0xE


@pytest.mark.parametrize("dim", [2, 28, 64, 128, 448])
def test_bytes_of_a_record_spelled_out(dim):
    """An oracle of its own: the matrix from popcounts or `paley`, codes by the nearest centroid, fp16 by struct."""
    x = normals(4, dim, dim) * torch.tensor([[1e-3], [1.0], [300.0], [7.0]])
    size = dim if dim & (dim - 1) == 0 else dim // 28
    inner = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]).double()
    matrix = inner if size == dim else torch.kron(turbo4.paley(), inner)
    y = (x * turbo4.signs(dim, 3)) @ (matrix / math.sqrt(dim))
    records = turbo4.to_records(turbo4.encode(x, 3))
    assert records.shape == (4, dim // 2 + 2) and turbo4.record_bytes(dim) == dim // 2 + 2
    for row, record in zip(y, records.tolist(), strict=True):
        norm = float(row.square().sum().sqrt().half())
        table = [norm * c / math.sqrt(dim) for c in (*(-c for c in reversed(turbo4.levels())), *turbo4.levels())]
        codes = [min(range(16), key=lambda i, v=v, table=table: abs(v - table[i])) for v in row.tolist()]
        assert record == [codes[2 * k] + 16 * codes[2 * k + 1] for k in range(dim // 2)] + list(struct.pack("<e", norm))


def test_golden_record():
    """The low nibble is the even dim: alternating 1 and 0, not rotated."""
    record = turbo4.to_records(turbo4.encode(torch.tensor([[3.0, 0.0, 0.0, -4.0]]), rotated=False))
    assert record.tolist() == [[0x8C, 0x28, 0x00, 0x45]]  # 5 = 0x4500; 1.2, 0, 0, -1.6 of sigma: codes 12, 8, 8, 2
    assert [turbo4.record_bytes(d) for d in (128, 448, 512)] == [66, 226, 258]


def test_error_of_normals():
    """Bounds are 2 % around what neighbours report: 0.0093, and 20.2 to 20.4 dB."""
    assert relative_mse(normals(4096, 128)) == pytest.approx(0.00928, rel=0.02)
    for dim, wanted in ((64, 0.00913), (448, 0.009448), (512, 0.009454)):
        assert relative_mse(normals(1024, dim, 1)) == pytest.approx(wanted, rel=0.02)


def test_rotation_saves_outlier_channels():
    """Two channels 20 times as large: 20.9 dB with the rotation, 3.9 dB without."""
    x = normals(2048, 128, 2)
    x[:, [3, 77]] *= 20
    assert decibels(x) == pytest.approx(20.9, abs=0.3)
    assert decibels(x, rotated=False) == pytest.approx(3.9, abs=0.3)
    one = torch.zeros(1, 128)
    one[0, 9] = 1.0  # all of the vector in one channel: rotated, all coordinates have one size
    assert decibels(one) > 12 and decibels(one, rotated=False) < 3


def test_other_seeds_and_dtypes():
    x = normals(8, 128, 3)
    first, second = (turbo4.encode(x, seed).packed for seed in (0, 1))
    assert not torch.equal(first, second)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert float((turbo4.decode(turbo4.encode(x.to(dtype))) - x).square().mean()) < 0.01
    assert turbo4.fake_quantize(x.bfloat16()).dtype == torch.bfloat16
    other = turbo4.decode_rotated(turbo4.encode(x), table=turbo4.e4m3_centroids(128))
    assert not torch.equal(other, turbo4.decode_rotated(turbo4.encode(x)))


def test_zeros_subnormal_norms_and_ties():
    zeros = turbo4.encode(torch.zeros(2, 64))
    assert not zeros.norms.any() and not turbo4.decode(zeros).any()
    assert not turbo4.decode(turbo4.encode(torch.full((1, 64), 1e-9))).any()
    tiny = normals(64, 64, 4) * 2e-5 / 8  # norms in fp16's subnormals: 2^-24 apart
    assert relative_mse(tiny) < 0.011
    bounds = turbo4.boundaries(4).float() * 2  # the norm is 2: a value on a bound takes the upper code
    y = torch.tensor([[0.0, float(bounds[10]), float(bounds[3]), 0.0]])
    y[0, 3] = (4 - y.square().sum()).sqrt()
    assert turbo4.unpack(turbo4.encode(y, rotated=False).packed)[0, :3].tolist() == [8, 11, 4]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e6])
def test_nan_and_large_norms_are_refused(value):
    x = normals(3, 64).float()
    x[1, 5] = value
    with pytest.raises(ArgumentError, match="65504"):
        turbo4.encode(x)
    norms = turbo4.quantize_rotated(turbo4.rotate(x)).norms
    assert norms.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize(("dim", "page_size", "count"), [(128, 16, 37), (64, 5, 5), (448, 3, 7)])
def test_records_and_pages(dim, page_size, count):
    """Nibbles of all entries come first, then norms, at the bytes that they must have; records come back."""
    records = turbo4.to_records(turbo4.encode(normals(count, dim, 5)))
    pages = turbo4.pages_of_records(records, page_size)
    used, full = page_size * (dim // 2 + 2), turbo4.layout(dim).page_bytes(page_size)
    assert pages.shape == (-(-count // page_size), full) and full % 16 == 0 and full - used < 16
    for i in (0, 1, count - 1):
        page, slot = pages[i // page_size].tolist(), i % page_size
        norm = page_size * dim // 2 + 2 * slot
        assert page[slot * dim // 2 : (slot + 1) * dim // 2] + page[norm : norm + 2] == records[i].tolist()
    assert torch.equal(turbo4.records_of_pages(pages, dim, page_size)[:count], records)
    assert not turbo4.records_of_pages(pages, dim, page_size)[count:].any() and not pages[:, used:].any()
    odd = torch.zeros(records.numel() + 1).byte()
    odd[1:] = records.flatten()  # an fp16 at an odd address
    again = turbo4.from_records(odd[1:].unflatten(0, records.shape))
    assert torch.equal(turbo4.to_records(again), records)


@pytest.mark.parametrize(("kind", "size", "wanted"), [(Latent.MIXED, 354, 20.2), (Latent.ROTATED, 258, 20.2)])
def test_entries_of_dsv4(kind, size, wanted):
    kv = normals(300, 512, 6)
    records = turbo4.encode_latent(kv, kind, 9)
    assert records.shape == (300, size) and turbo4.LATENT_LAYOUTS[kind].entry_bytes == size
    back = turbo4.decode_latent(records, kind, 9, torch.float64)
    error = (back - kv)[:, :448].square().sum() / kv[:, :448].square().sum()
    assert -10 * math.log10(float(error)) == pytest.approx(wanted, abs=0.15)
    if kind is Latent.MIXED:
        assert torch.equal(back[:, 448:], kv[:, 448:].bfloat16().double())
        assert torch.equal(records[:, 224:352].contiguous().view(torch.bfloat16), kv[:, 448:].bfloat16())
        own = turbo4.from_records(torch.cat((records[:, :224], records[:, 352:]), 1))
        assert torch.equal(turbo4.decode(own, 9, torch.float64), back[:, :448])


def test_bad_arguments_are_named():
    x = torch.zeros(2, 64)
    good = turbo4.encode(x)
    for name, call in (
        ("x.shape[-1]", lambda: turbo4.encode(x[:, :63])),
        ("x.shape[-1]", lambda: turbo4.encode(torch.zeros(2, 96))),
        ("x.shape[-1]", lambda: turbo4.rotate(torch.zeros(2, 14))),
        ("x.dtype", lambda: turbo4.encode(x.int())),
        ("seed", lambda: turbo4.encode(x, -1)),
        ("bits", lambda: turbo4.levels(7)),
        ("dim", lambda: turbo4.record_bytes(100)),
        ("dim", lambda: turbo4.centroids(0)),
        ("norms.shape", lambda: turbo4.decode(Encoded(good.packed, good.norms[:1]))),
        ("norms.dtype", lambda: turbo4.decode(Encoded(good.packed, good.norms.float()))),
        ("table.shape", lambda: turbo4.decode_rotated(good, table=torch.zeros(15))),
        ("packed.dtype", lambda: turbo4.unpack(x)),
        ("codes.shape", lambda: turbo4.pack(torch.zeros(3).byte())),
        ("records.shape", lambda: turbo4.decode_latent(torch.zeros(2, 350).byte())),
        ("records.shape", lambda: turbo4.pages_of_records(torch.zeros(66).byte(), 16)),
        ("kv.shape", lambda: turbo4.encode_latent(x)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.name == name
