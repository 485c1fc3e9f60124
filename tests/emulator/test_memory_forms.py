"""Loads, stores and atomics with every qualifier: what they move does not depend on hints, semantics and scopes."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

from dsv4lib.emulator.errors import UnsupportedInstruction
from tests.emulator.launching import aligned, copy, entry, launch
from tests.emulator.test_memory import FLOATS, INTEGER, RNG, WIDE, atomic_kernel, move_kernel, random_bytes, serial

PLAIN = ("v2.", "b32", 32)
PRIORITIES = ".L1::evict_last.L2::evict_first"


def moved(text: str, nbytes: int) -> None:
    """The kernel copies its input."""
    a, b = random_bytes(nbytes), aligned(nbytes, np.uint8)
    launch(text, a, b)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", WIDE, ids=lambda f: f[0] + f[1])
@pytest.mark.parametrize("kind", ["", ".weak", ".relaxed.gpu", ".acquire.sys", ".nc"])
def test_wide_loads_with_priorities(form, kind):
    moved(move_kernel("global", form, kind + PRIORITIES + ".L2::128B"), 1024)


@pytest.mark.parametrize("form", WIDE, ids=lambda f: f[0] + f[1])
@pytest.mark.parametrize("kind", ["", ".weak", ".relaxed.cta", ".release.gpu"])
def test_wide_stores_with_priorities(form, kind):
    moved(move_kernel("global", form).replace("st.global.", f"st.global{kind}{PRIORITIES}."), 1024)


@pytest.mark.parametrize("load", ["ld.global.ca.nc", "ld.global.cg.nc.L2::256B", "ldu.global", "ldu"])
def test_read_only_loads(load):
    moved(move_kernel("global", PLAIN).replace("ld.global.", f"{load}."), 256)


@pytest.mark.parametrize("store", ["st.global.wb", "st.weak.global.cg", "st.cs", "st.global.wt"])
def test_stores_with_cache_operators(store):
    moved(move_kernel("global", PLAIN).replace("st.global.", f"{store}."), 256)


@pytest.mark.parametrize("space", ["local", "shared"])
def test_volatile_accesses(space):
    text = move_kernel(space, PLAIN).replace(f"ld.{space}.", f"ld.volatile.{space}.")
    text = text.replace(f"st.{space}.", f"st.volatile.{space}.")
    a, b = random_bytes(256), aligned(256, np.uint8)
    launch(text, a, b)
    swap = np.arange(32) ^ (space == "shared")  # each lane reads its neighbour's
    np.testing.assert_array_equal(b.reshape(32, 8), a.reshape(32, 8)[swap])


@pytest.mark.parametrize("opcode", ["ld", "st"])
def test_generic_accesses_of_mixed_spaces(opcode):
    """Lanes of one instruction in global, shared and local memory."""
    body = f"""
    ld.param.b64 %rd1, [a]; ld.param.b64 %rd2, [b]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 8;
    add.s64 %rd1, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3; ld.global.b64 %rd9, [%rd1];
    mov.b64 %rd4, s; cvta.shared.u64 %rd4, %rd4; add.s64 %rd4, %rd4, %rd3; mov.b64 %rd5, own; cvta.local.u64 %rd5, %rd5;
    rem.u32 %r2, %r1, 3; setp.eq.u32 %p1, %r2, 1; setp.eq.u32 %p2, %r2, 2;
    selp.b64 %rd6, %rd4, %rd2, %p1; selp.b64 %rd6, %rd5, %rd6, %p2;
    {"st.b64 [%rd6], %rd9;" if opcode == "st" else "st.shared.b64 [s+0], 0; st.local.b64 [own], %rd9;"}
    {"mul.wide.u32 %rd7, %r1, 8; cvt.u32.u64 %r4, %rd7; mov.u32 %r5, s; add.u32 %r4, %r4, %r5;"}
    {"" if opcode == "st" else "st.shared.b64 [%r4], %rd9; st.global.b64 [%rd2], %rd9;"}
    ld.b64 %rd8, [%rd6]; st.global.b64 [%rd2], %rd8;
    """
    a, b = random_bytes(256), aligned(256, np.uint8)
    shared = ".shared .align 8 .b8 s[256]; .local .align 8 .b8 own[8];"
    launch(entry("u64 a, u64 b", body, shared=shared), a, b)
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("form", [("", "b8", 8), ("", "f32", 32), ("", "s64", 64)], ids=lambda f: f[1])
def test_memory_mapped_accesses(form):
    text = move_kernel("global", form).replace("ld.global.", "ld.mmio.relaxed.sys.global.")
    moved(text.replace("st.global.", "st.mmio.relaxed.sys.global."), 4 * form[2])
    with pytest.raises(UnsupportedInstruction):
        launch(text.replace("mmio.relaxed.sys", "mmio.relaxed.gpu"), random_bytes(256), random_bytes(256))


def reduction_kernel(opcode: str, space: str, bits: int) -> str:
    """`atomic_kernel` without a result."""
    text = atomic_kernel(opcode, space, bits).replace(f"{opcode} %o, ", f"{opcode} ")
    return re.sub(r"st\.global\.b\d+ \[%rd3\], %o;", "", text)


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("op", [op for op in INTEGER if not op.startswith("exch")])
def test_integer_reductions(op, space):
    dtype, function = INTEGER[op]
    values = RNG.integers(0, 8 if op[:3] in ("inc", "dec") else 1 << 31, 36).astype(dtype)
    x, v = copy(values[:4]), copy(values[4:])
    with np.errstate(over="ignore"):
        want, _ = serial(x, v, function)
    where = "" if space == "generic" else f".{space}"
    launch(reduction_kernel(f"red.release.gpu{where}.{op}", space, 8 * x.itemsize), x, v, aligned(32, dtype))
    np.testing.assert_array_equal(x, want)


@pytest.mark.parametrize("space", ["global", "shared", "generic"])
@pytest.mark.parametrize("op", FLOATS)
def test_float_reductions(op, space):
    dtype = np.dtype(FLOATS[op])
    n = 2 if op.endswith("x2") else 1
    x, v = copy(RNG.normal(size=(4, n)).astype(dtype)), copy(RNG.normal(size=(32, n)).astype(dtype))
    wide = np.float64 if dtype == np.float64 else np.float32
    want, _ = serial(x, v, lambda a, b: (a.astype(wide) + b.astype(wide)).astype(dtype))
    where = "" if space == "generic" else f".{space}"
    launch(
        reduction_kernel(f"red{where}.relaxed.cta.{op}", space, dtype.itemsize * 8 * n), x, v, aligned((32, n), dtype)
    )
    np.testing.assert_array_equal(x, want)


VECTORS = [
    *(("f32", np.float32, n, "add") for n in (2, 4)),
    *(("f16", np.float16, n, op) for n, op in ((2, "add"), (4, "min"), (8, "max"))),
    *(("bf16x2", ml_dtypes.bfloat16, n, op) for n, op in ((2, "add"), (4, "max"))),
]


@pytest.mark.parametrize("base", ["atom", "red"])
@pytest.mark.parametrize(("ptx", "dtype", "n", "op"), VECTORS)
def test_vector_atomics(ptx, dtype, n, op, base):
    """Each element is combined by itself; atom returns the vector that was there."""
    packed = 2 if ptx.endswith("x2") else 1
    dtype = np.dtype(dtype)
    size, bits = n * packed * dtype.itemsize, 8 * packed * dtype.itemsize
    x, v = copy(RNG.normal(size=n * packed).astype(dtype)), copy(RNG.normal(size=(32, n * packed)).astype(dtype))
    old = aligned((32, n * packed), dtype)
    names, results = ("{" + ", ".join(f"%{c}{i}" for i in range(n)) + "}" for c in "vo")
    step = bits // 8
    loads = "".join(f"ld.global.b{bits} %v{i}, [%rd2+{i * step}];" for i in range(n))
    stores = "".join(f"st.global.b{bits} [%rd4+{i * step}], %o{i};" for i in range(n)) if base == "atom" else ""
    noftz = "" if ptx == "f32" else ".noftz"
    body = f"""
    ld.param.b64 %rd1, [x]; ld.param.b64 %rd2, [v]; ld.param.b64 %rd4, [old];
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, {size}; add.s64 %rd2, %rd2, %rd3; add.s64 %rd4, %rd4, %rd3; {loads}
    {base}.relaxed.gpu.global.{op}{noftz}.v{n}.{ptx} {results + ", " if base == "atom" else ""}[%rd1], {names}; {stores}
    """
    want, before = x.copy(), []
    for row in v:
        before.append(want)
        both = want.astype(np.float32), row.astype(np.float32)
        want = {"add": np.add, "min": np.minimum, "max": np.maximum}[op](*both).astype(dtype)
    launch(entry("u64 x, u64 v, u64 old", body, f".reg .b{bits} %v<{n}>, %o<{n}>;"), x, v, old)
    np.testing.assert_array_equal(x, want)
    if base == "atom":
        np.testing.assert_array_equal(old, np.stack(before))
