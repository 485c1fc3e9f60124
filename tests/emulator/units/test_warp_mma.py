"""Test mma.sync in native code: bits of each sum, on any numbers, and registers that it may not overwrite too soon."""

import numpy as np
import pytest
from tc_bench import Bench
from test_mma_sync import names, vector

from dsv4lib.emulator.native import warp_mma
from dsv4lib.emulator.units import mma_sync

FORMS = [(kind, k) for kind in ("f16", "bf16") for k in (8, 16)] + [("tf32", 4), ("tf32", 8)]


def opcode_of(kind, k):
    return f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32"


def numbers_of(rng, kind, how, count):
    """Registers of random numbers, uint32[count, 32]."""
    if how == "any bits":
        return rng.integers(0, 1 << 32, (count, 32), np.uint32)
    if how == "cancelling":  # a float64 sum in another order has other bits
        far = 14 if kind == "f16" else 30
        values = rng.choice([1.0, -1.0, 1.25, -1.25], (count, 32, 2)) * 2.0 ** rng.choice([-far, far], (count, 32, 2))
        return packed(values.astype("f4"), kind)
    exponents = rng.integers(*((-14, 15) if kind == "f16" else (-60, 60)), (count, 32, 2))
    values = (rng.standard_normal((count, 32, 2)) * 2.0**exponents * (rng.random((count, 32, 2)) < 0.9)).astype("f4")
    return packed(values, kind)


def packed(values, kind):
    """Registers of float32[count, 32, 2]: both numbers, or for tf32 the first."""
    if kind == "f16":
        with np.errstate(over="ignore"):
            return values.astype("f2").view(np.uint32)[..., 0]
    if kind == "bf16":
        return np.ascontiguousarray(values.view(np.uint16)[..., 1::2]).view(np.uint32)[..., 0]
    return values[..., 0].view(np.uint32)  # tf32: the low bits are there and do not count


def serve(kind, k, registers, first_d=40):
    """Registers of D, uint32[4, 32]; ``registers`` of A, B and C go to %r10, %r20 and %r30."""
    parts = [names("r", len(x), first) for x, first in zip(registers, (10, 20, 30), strict=True)]
    d = names("r", 4, first_d)
    bench = Bench(f"{opcode_of(kind, k)} {vector(d)}, {', '.join(map(vector, parts))};", arch="sm_100a")
    for part, values in zip(parts, registers, strict=True):
        for name, row in zip(part, values, strict=True):
            bench.reg(name)[:] = row
    assert bench.serve() is None
    assert bench.machine.stats["mma_sync"] == 1
    return np.stack([bench.reg(name) for name in d])


def inputs(kind, k, how, seed=0):
    rng, blocks = np.random.default_rng(seed), k * (4 if kind == "tf32" else 2) // 16
    c = rng.standard_normal((4, 32)) * 2.0 ** rng.integers(-40, 40, (4, 32)) * (how != "cancelling")
    return [numbers_of(rng, kind, how, n) for n in (2 * blocks, blocks)] + [c.astype(np.float32).view(np.uint32)]


@pytest.mark.parametrize("how", ["any bits", "numbers"])
def test_halves_without_the_processors_help(how, monkeypatch):
    given = inputs("f16", 16, how)
    expected = serve("f16", 16, given).view(np.float32)
    monkeypatch.setattr(warp_mma, "converts_halves", lambda: not warp_mma.binding.get_host_cpu_features()["f16c"])
    plain = warp_mma.multiply.__wrapped__
    monkeypatch.setattr(warp_mma, "multiply", plain)
    assert np.array_equal(serve("f16", 16, given).view(np.float32), expected, equal_nan=True)


def in_numpy(monkeypatch, *arguments, **more):
    """The same by numpy's sums."""
    with monkeypatch.context() as patch:
        patch.setattr(mma_sync, "_multiplied", lambda *_: False)
        return serve(*arguments, **more)


@pytest.mark.parametrize("how", ["wide", "cancelling", "any bits"])
@pytest.mark.parametrize(("kind", "k"), FORMS)
def test_native_code_gives_the_bits_of_the_order_it_documents(kind, k, how, monkeypatch):
    """Compare with float64 sums in that order, element by element; the rest of the way is the service in numpy."""

    def sums(a, b, c, dtype):
        halves = [np.zeros((16, 8)), np.zeros((16, 8))]
        a, b = a.astype(np.float64), b.astype(np.float64)
        for base in range(0, k, 8):
            for i in range(min(base + 8, k) - 1, base - 1, -1):
                halves[i % 2] = a[:, i, None] * b[None, :, i] + halves[i % 2]
        return (halves[0] + halves[1] + c).astype(dtype)

    monkeypatch.setattr(mma_sync, "_sums", sums)
    for seed in range(20):
        registers = inputs(kind, k, how, seed)
        with np.errstate(all="ignore"):
            expected = in_numpy(monkeypatch, kind, k, registers).view(np.float32)
        got = serve(kind, k, registers).view(np.float32)
        numbers = ~np.isnan(expected)
        assert np.array_equal(numbers, ~np.isnan(got))
        assert np.array_equal(got[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize("first_d", [8, 12, 18, 20, 29, 30, 32])
def test_registers_of_d_may_be_those_of_the_operands(first_d):
    registers = inputs("bf16", 16, "wide")
    assert np.array_equal(serve("bf16", 16, registers, first_d), serve("bf16", 16, registers))


def test_only_what_native_code_is_for_is_multiplied_there(monkeypatch):
    used = []
    original = warp_mma.multiply
    monkeypatch.setattr(warp_mma, "multiply", lambda kind, k: used.append((kind, k)) or original(kind, k))
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        for d, c in ((40, "{%r30, %r31, %r32, %r33}"), (40, "{%r30, %r31, %r32, 0}")):
            text = f"{{%r{d}, %r{d + 1}, %r{d + 2}, %r{d + 3}}}, {{%r10, %r11}}, {{%r20}}, {c};"
            assert Bench(f"{opcode_of('f16', 8)} {text}", arch=arch).serve() is None
    assert used == [("f16", 8)] * 2  # not on sm_90, whose sums are others, nor with a constant
