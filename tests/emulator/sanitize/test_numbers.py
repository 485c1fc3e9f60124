"""Number formats, fills and comparisons of launch descriptions, against torch and exhaustive tables."""

import numpy as np
import pytest

from dsv4lib.emulator.sanitize import numbers
from dsv4lib.emulator.sanitize.numbers import (
    DTYPES,
    FILLS,
    FLOATS,
    Fill,
    compare,
    decode,
    encode,
    make,
    read_npy,
    summary,
)
from dsv4lib.errors import ArgumentError

TORCH = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


@pytest.mark.parametrize("dtype", TORCH)
def test_encoding_is_that_of_torch(dtype):
    """Normals, ties between neighbours, subnormals, zeros of both signs, infinities of the types that have them."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch, TORCH[dtype])
    codes = torch.arange(256, dtype=torch.uint8).view(kind) if dtype[0] == "e" else torch.randn(4096).to(kind)
    known = codes.double().numpy()
    known = np.sort(known[np.isfinite(known)])
    rng = np.random.default_rng(0)
    values = np.concatenate([known, (known[1:] + known[:-1]) / 2, rng.standard_normal(4096) * 10, [0.0, -0.0, 1e-30]])
    values = values[np.abs(values) <= np.abs(known).max()].astype(np.float32).astype(np.float64)
    want = torch.tensor(values).float().to(kind)
    got = decode(encode(values, dtype), dtype).astype(np.float64)
    assert np.array_equal(got, want.double().numpy())
    assert np.array_equal(np.signbit(got), np.signbit(want.double().numpy()))


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_fp8_saturates_and_keeps_nan(dtype):
    most = {"e4m3": 448.0, "e5m2": 57344.0}[dtype]
    got = decode(encode(np.array([1e9, -np.inf, np.nan]), dtype), dtype)
    assert got[0] == most and got[1] == -most and np.isnan(got[2])


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in FLOATS])
def test_integers_round_and_saturate(dtype):
    limits = np.iinfo(DTYPES[dtype][1])
    got = decode(encode(np.array([1e30, -1e30, 2.5, 3.5, -1.0]), dtype), dtype)
    assert got.tolist() == [limits.max, limits.min, 2, 4, max(-1, limits.min)]


@pytest.mark.parametrize("kind", FILLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_fill_of_every_type(kind, dtype, monkeypatch):
    fill = Fill(kind, value=3.0, low=-2, high=5, seed=7)
    whole = make((5, 7), dtype, fill)
    assert whole.dtype == numbers.bits_of(dtype) and whole.shape == (5, 7)
    assert np.array_equal(whole, make((5, 7), dtype, fill))
    values = decode(whole.reshape(-1), dtype)
    if kind == "nan":
        assert np.isnan(values).all() if dtype in FLOATS else (whole == np.iinfo(whole.dtype).max).all()
    if kind == "integers" and dtype != "e5m2":
        assert set(np.unique(values).tolist()) <= set(range(0 if dtype[0] == "u" else -2, 6))
    if kind in ("normal", "uniform", "integers", "bits"):
        assert len(np.unique(whole)) > 1 and not np.array_equal(whole, make((5, 7), dtype, Fill(kind, low=-2, high=5)))
    if kind == "arange":
        monkeypatch.setattr(numbers, "CHUNK", 4)
        assert np.array_equal(whole, make((5, 7), dtype, fill))  # chunks join


def test_a_summary_counts_nan_apart():
    raw = encode(np.array([1.0, np.nan, -3.0]), "bf16")
    facts = summary(raw, "bf16")
    assert (facts["min"], facts["max"], facts["mean"], facts["nan"]) == (-3.0, 1.0, -1.0, 1)
    assert summary(np.zeros(0, np.uint32), "f32")["min"] is None
    assert summary(encode(np.array([np.nan]), "f32"), "f32")["max"] is None


@pytest.mark.parametrize(
    ("got", "want", "rtol", "atol", "wrong"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0, 0),
        ([1.0, 2.0], [1.0, 2.5], 0, 0, 1),
        ([1.0, 2.0], [1.0, 2.5], 0.2, 0, 0),
        ([1.0, 2.0], [1.5, 2.4], 0, 0.45, 1),
        ([np.nan, 1.0], [np.nan, 1.0], 0, 0, 0),
        ([np.nan, 1.0], [0.0, 1.0], 9, 9, 1),
        ([0.0, 1.0], [np.nan, 1.0], 9, 9, 1),
        ([np.inf, -np.inf], [np.inf, np.inf], 9, 9, 1),
        ([1.0], [np.inf], 9, 9, 1),
    ],
)
def test_comparison(got, want, rtol, atol, wrong):
    found = compare(np.array(got), np.array(want), rtol, atol)
    assert (0 if found is None else found.wrong) == wrong


def test_comparison_of_integers_is_exact_past_the_precision_of_floats():
    got, want = np.array([2**63 + 1], np.uint64), np.array([2**63], np.uint64)
    assert compare(got, want, 0, 0).wrong == 1 and compare(got, got, 0, 0) is None


def test_files_of_numpy(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.asfortranarray(np.arange(6, dtype=">f4").reshape(2, 3)))
    raw, dtype = read_npy(path, "x", 100)
    assert dtype == "f32" and np.array_equal(decode(raw, dtype), np.arange(6).reshape(2, 3))
    with pytest.raises(ArgumentError, match="at most 10 bytes"):
        read_npy(path, "x", 10)
    np.save(path, np.array([{}, 1], object), allow_pickle=True)
    for raw in (path.read_bytes(), b"", b"\x93NUMPY", b"no numbers", (tmp_path / "x.npy").read_bytes()[:70]):
        path.write_bytes(raw)
        with pytest.raises(ArgumentError, match="npy"):
            read_npy(path, "x", 100)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    for wrong in (path, tmp_path / "none.npy", tmp_path):
        with pytest.raises(ArgumentError, match="npy"):
            read_npy(wrong, "x", 1 << 50)
