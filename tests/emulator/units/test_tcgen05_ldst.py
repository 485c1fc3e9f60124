"""tcgen05.ld and st, shape by shape, against CuTe's layouts of the same copies written out bit by bit."""

import itertools

import numpy as np
import pytest
from tc_bench import Bench

from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.units.tcgen05_ldst import POISON
from dsv4lib.emulator.units.tmem import tmem_of

PER_NUM = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
COLUMNS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}
# CuTe: thread and register of the first repetition -> bit offset in a (bits, lanes) tile, bits fastest. Each mode is
# (shape, stride in bits); rows are `width` bits apart. Threads first, then registers.
TILE = {
    "32x32b": (32, [(32, 32)], []),
    "16x64b": (64, [(2, 512), (2, 32), (8, 64)], []),
    "16x128b": (128, [(4, 32), (8, 128)], [(2, 1024)]),
    "16x256b": (256, [(4, 64), (8, 256)], [(2, 32), (2, 2048)]),
}


def mixed(index, modes):
    total = 0
    for shape, stride in modes:
        total += index % shape * stride
        index //= shape
    return total


def cell(shape, thread, register, split=0):
    """(lane, column) of a register, relative to the address."""
    if shape == "16x32bx2":
        return thread % 16, register + (split if thread >= 16 else 0)
    width, threads, registers = TILE[shape]
    repeat, first = divmod(register, PER_NUM[shape])
    bit = mixed(thread, threads) + mixed(first, registers)
    return bit // width, bit % width // 32 + repeat * COLUMNS[shape]


NUMS = {s: [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n * PER_NUM[s] <= 128] for s in PER_NUM}
CASES = [(s, n) for s, ns in NUMS.items() for n in ns]


def text(kind, shape, num, pack=False):
    registers = ", ".join(f"%r{10 + i}" for i in range(num * PER_NUM[shape]))
    split = ", 48" if shape == "16x32bx2" else ""
    if kind == "ld":
        return (
            f"tcgen05.ld.sync.aligned.{shape}.x{num}{'.pack::16b' if pack else ''}.b32 {{{registers}}}, [%r1]{split};"
        )
    return f"tcgen05.st.sync.aligned.{shape}.x{num}{'.unpack::16b' if pack else ''}.b32 [%r1]{split}, {{{registers}}};"


def start(ptx, **kwargs):
    bench = Bench(ptx, **kwargs)
    tmem = tmem_of(bench.cta)
    tmem.take(0, 512)
    rng = np.random.default_rng(1)
    tmem.data[:] = rng.integers(0, 2**32, (128, 512), np.uint64).astype(np.uint32)
    tmem.init[:] = True
    return bench, tmem


@pytest.mark.parametrize(("shape", "num"), CASES)
@pytest.mark.parametrize("warp", [0, 3])
def test_load(shape, num, warp):
    bench, tmem = start(text("ld", shape, num) + "\ntcgen05.wait::ld.sync.aligned;")
    low = 16 if shape != "32x32b" else 0
    column = 5
    if column + num * COLUMNS.get(shape, 1) > 512:
        column = 0
    bench.set(warp, r1=(32 * warp + low) << 16 | column)
    bench.serve(0, warp)
    assert (bench.reg("%r10", warp) == POISON).all()
    bench.serve(1, warp)
    assert bench.hazards == []
    assert bench.machine.stats == {"tcgen05_ld_bytes": 128 * num * PER_NUM[shape]}
    for i, t in itertools.product(range(num * PER_NUM[shape]), range(32)):
        lane, c = cell(shape, t, i, 48)
        assert bench.reg(f"%r{10 + i}", warp)[t] == tmem.data[32 * warp + low + lane, column + c], (i, t)


@pytest.mark.parametrize(("shape", "num"), CASES)
def test_store(shape, num):
    bench, tmem = start(text("st", shape, num) + "\ntcgen05.wait::st.sync.aligned;")
    tmem.init[:] = False
    before = tmem.data.copy()
    rng = np.random.default_rng(2)
    values = rng.integers(0, 2**32, (num * PER_NUM[shape], 32), np.uint64).astype(np.uint32)
    for i, row in enumerate(values):
        bench.reg(f"%r{10 + i}", 1)[:] = row
    bench.set(1, r1=32 << 16)
    bench.serve(0, 1)
    assert (tmem.data == before).all()
    for i in range(len(values)):  # registers may be reused at once
        bench.reg(f"%r{10 + i}", 1)[:] = 0
    bench.serve(1, 1)
    assert bench.machine.stats == {"tcgen05_st_bytes": 128 * num * PER_NUM[shape]}
    expected, init = before.copy(), np.zeros((128, 512), bool)
    for i, t in itertools.product(range(len(values)), range(32)):
        lane, c = cell(shape, t, i, 48)
        expected[32 + lane, c], init[32 + lane, c] = values[i, t], True
    np.testing.assert_array_equal(tmem.data, expected)
    np.testing.assert_array_equal(tmem.init, init)


@pytest.mark.parametrize(
    ("shape", "num"), [("32x32b", 4), ("16x64b", 8), ("16x128b", 2), ("16x256b", 4), ("16x32bx2", 4)]
)
def test_pack_and_unpack(shape, num):
    bench, tmem = start(text("ld", shape, num, True) + "\n" + text("st", shape, num, True))
    bench.set(2, r1=64 << 16 | 3)
    bench.run(0, 2)
    original = tmem.data.copy()
    values = {}
    for i, t in itertools.product(range(num * PER_NUM[shape]), range(32)):
        lane, c = cell(shape, t, i)
        c = 2 * c + (48 if shape == "16x32bx2" and t >= 16 else 0)
        low, high = (int(original[64 + lane, 3 + c + h]) & 0xFFFF for h in (0, 1))
        values[64 + lane, 3 + c], values[64 + lane, 4 + c] = low, high
        assert bench.reg(f"%r{10 + i}", 2)[t] == low | high << 16
    tmem.data[:] = 0xABCD0000
    bench.run(1, 2)
    expected = np.full((128, 512), 0xABCD0000, np.uint32)
    for where, value in values.items():
        expected[where] |= np.uint32(value)
    np.testing.assert_array_equal(tmem.data, expected)


@pytest.mark.parametrize(
    ("between", "waits"),
    [
        ("", True),
        ("mov.b32 %r40, %r41;\n", True),
        ("mov.b32 %r40, %r10;\n", False),
        ("mov.b32 %r11, 0;\n", False),
        ("@%p1 bra AWAY;\n", False),
    ],
)
def test_a_load_that_nothing_waits_for_completes_at_issue(between, waits):
    load = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r10, %r11}, [%r1];\n"
    bench, tmem = start(load + between + "tcgen05.wait::ld.sync.aligned;\nAWAY:\nret;")
    bench.set(0, r1=3)
    bench.serve(0)
    assert (len(bench.machine.units) == 1) == waits
    expected = np.full(32, POISON) if waits else tmem.data[:32, 3]
    np.testing.assert_array_equal(bench.reg("%r10"), expected)


def test_registers_scattered_over_the_file():
    bench, tmem = start(
        "tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r10, _, %r30, %r20}, [%r1];\n"
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r30, %r10}, [%r1];"
    )
    bench.set(0, r1=7)
    bench.run(0)
    for i, name in ((0, "%r10"), (2, "%r30"), (3, "%r20")):
        np.testing.assert_array_equal(bench.reg(name), tmem.data[:32, 7 + i])
    bench.run(1)
    for i, name in enumerate(("%r30", "%r10")):
        np.testing.assert_array_equal(bench.reg(name), tmem.data[:32, 7 + i])


def test_loads_and_stores_wait_for_their_own_kind_and_warp():
    ptx = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r1];\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r1], {%r11};\n"
    bench, _ = start(ptx + "tcgen05.wait::ld.sync.aligned;\ntcgen05.wait::st.sync.aligned;")
    units = bench.machine.units
    for warp in (0, 1):
        bench.set(warp, r1=32 * warp << 16, r11=0)
        bench.serve(0, warp)
        bench.serve(1, warp)
    bench.serve(2, 0)
    assert sorted(op.label[:2] for op in units.pending("ldst:0")) == ["st"]
    assert len(units.pending("ldst:1")) == 2
    bench.serve(3, 0)
    assert units.pending("ldst:0") == []


def test_a_load_without_a_wait_follows_its_warps_stores():
    """And no other's: a store of warp 1 stays pending. With a wait in the code the policy chooses."""
    st, ld = text("st", "32x32b", 1), "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r1];"
    for wait in ("", "\ntcgen05.wait::ld.sync.aligned;"):
        bench, tmem = start(f"{st}\n{st.replace('%r10', '%r11')}\n{ld}{wait}")
        for warp in (0, 1):
            bench.set(warp, r1=32 * warp << 16, r10=5 + warp, r11=7 + warp)
        bench.serve(0, 1)
        for index in range(3):
            bench.serve(index, 0)
        assert len(bench.machine.units.pending("ldst:1")) == 1
        assert len(bench.machine.units.pending("ldst:0")) == (3 if wait else 0)
        assert (bench.reg("%r20") == (POISON if wait else 7)).all()
        assert (tmem.data[:32, 0] == 7).all() == (not wait)


def test_four_shapes_transpose_a_tile_without_a_wait():
    """16 lanes of 32 columns become 32 lanes of 16: only the fragments of the ISA and their order give that.

    Each round permutes registers between a load of one shape and a store of another. Between them stands no wait, as in
    FlashInfer's NVFP4 mega kernel.
    """
    even = [r % 8 // 2 * 2 + r % 2 * 8 + r // 8 for r in range(16)]
    pairs = [r - r % 8 + r % 2 + r % 4 // 2 * 4 + r % 8 // 4 * 2 for r in range(16)]

    def ld(shape, num, first, count, low=0):
        registers = ", ".join(f"%r{first + i}" for i in range(count))
        return f"tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {{{registers}}}, [%r{2 if low else 1}];"

    def st(shape, num, order):
        registers = ", ".join(f"%r{10 + i}" for i in order)
        return f"tcgen05.st.sync.aligned.{shape}.x{num}.b32 [%r1], {{{registers}}};"

    code = [ld("16x64b", 16, 10, 16), st("16x128b", 8, even), ld("16x64b", 16, 10, 16), st("32x32b", 16, range(16))]
    code += [ld("16x256b", 2, 10, 8), ld("16x256b", 2, 18, 8, 16), st("32x32b", 16, pairs)]
    code += [ld("16x128b", 4, 10, 8), ld("16x128b", 4, 18, 8, 16)]
    bench, tmem = start("\n".join(code))
    before = tmem.data[32:48, 64:96].copy()
    bench.set(1, r1=32 << 16 | 64, r2=48 << 16 | 64)
    for index in range(len(code)):
        bench.serve(index, 1)
    after = np.stack([bench.reg(f"%r{10 + i}", 1) for i in even], 1)
    np.testing.assert_array_equal(after, before.T)


def test_lane_quarter_comes_from_the_warp():
    bench, tmem = start(text("ld", "32x32b", 1))
    bench.set(2, r1=0)
    bench.run(0, 2)
    assert bench.kinds() == ["tmem_lane_quarter"]
    np.testing.assert_array_equal(bench.reg("%r10", 2), tmem.data[64:96, 0])
    bench, _ = start(text("ld", "32x32b", 1), warps=8)
    bench.set(6, r1=64 << 16)
    bench.run(0, 6)
    assert bench.hazards == []


def test_addresses_that_differ_between_lanes():
    bench, tmem = start(text("ld", "32x32b", 1))
    bench.set(1, r1=(32 + np.arange(32)) << 16 | 7)
    bench.run(0, 1)
    assert bench.kinds() == ["tmem_lane_quarter"]
    np.testing.assert_array_equal(bench.reg("%r10", 1), tmem.data[32:64, 7])
    bench.set(1, r1=32 << 16 | np.arange(32))
    with pytest.raises(EmulatorError, match="different tensor-memory columns"):
        bench.run(0, 1)


@pytest.mark.parametrize(
    ("setup", "kind"),
    [("init", "uninitialised_tmem"), ("free", "tmem_after_free"), ("never", "tmem_outside_allocation")],
)
def test_hazards(setup, kind):
    bench, tmem = start(text("ld", "32x32b", 4))
    if setup == "init":
        tmem.init[17, 34] = False
    elif setup == "free":
        tmem.release(0, 512)
    else:
        tmem.owner[:] = 0
        tmem.allocations.clear()
    bench.set(0, r1=32)
    bench.run(0)
    assert bench.kinds() == [kind]


def test_store_outside_the_allocation():
    bench, tmem = start(text("st", "32x32b", 4))
    tmem.release(0, 512)
    tmem.take(0, 32)
    bench.set(0, r1=30, **{f"r{10 + i}": i for i in range(4)})
    bench.run(0)
    assert bench.kinds() == ["tmem_after_free"]


@pytest.mark.parametrize(
    ("ptx", "address", "message"),
    [
        (text("ld", "32x32b", 2), 16 << 16, "must be a multiple of 32"),
        (text("ld", "16x64b", 2), 8 << 16, "must be a multiple of 16"),
        (text("ld", "32x32b", 2), 511, "reads columns 511 to 512"),
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r10}, [%r1];", 0, "is not implemented"),
        ("tcgen05.ld.sync.aligned.16x128b.x1.b32 {%r10}, [%r1];", 0, "1 registers given"),
        ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r10}, [%r1];", 0, "needs a half-split"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r1], 4;", 0, "takes no half-split"),
    ],
)
def test_refusals(ptx, address, message):
    bench, _ = start(ptx)
    bench.set(0, r1=address)
    with pytest.raises(EmulatorError, match=message):
        bench.run(0)


def test_all_lanes_are_needed():
    bench, _ = start(text("ld", "32x32b", 1))
    bench.set(0, r1=0)
    bench.mask(0xFFFF)
    with pytest.raises(EmulatorError, match="needs all 32 lanes"):
        bench.run(0)


@pytest.mark.parametrize("shape", ["32x32b", "16x32bx2"])
@pytest.mark.parametrize(
    ("op", "kind", "reduce"),
    [
        ("min", "u32", lambda v: v.min(0)),
        ("max", "s32", lambda v: v.view(np.int32).max(0).view(np.uint32)),
        ("max", "f32", lambda v: np.nanmax(v.view(np.float32), 0).view(np.uint32)),
        ("min.abs", "f32", lambda v: np.nanmin(np.abs(v.view(np.float32)), 0).view(np.uint32)),
        (
            "max.NaN",
            "f32",
            lambda v: np.where(
                np.isnan(v.view(np.float32)).any(0), np.uint32(0x7FFFFFFF), v.view(np.float32).max(0).view(np.uint32)
            ),
        ),
    ],
)
def test_load_with_reduction(shape, op, kind, reduce):
    split = ", 8" if shape == "16x32bx2" else ""
    ptx = f"tcgen05.ld.red.sync.aligned.{shape}.x4.{op}.{kind} {{%r10, %r11, %r12, %r13}}, %r2, [%r1]{split};"
    bench, tmem = start(ptx, arch="sm_103a")
    if kind == "f32":
        tmem.data[:] = np.random.default_rng(3).standard_normal((128, 512)).astype(np.float32).view(np.uint32)
        tmem.data[3, 1] = 0x7FC00000
    bench.set(0, r1=0)
    bench.run(0)
    values = np.stack([bench.reg(f"%r{10 + i}") for i in range(4)])
    np.testing.assert_array_equal(values[:, 1], tmem.data[1, :4])
    np.testing.assert_array_equal(bench.reg("%r2"), reduce(values))


def test_load_with_reduction_needs_its_target():
    bench, _ = start("tcgen05.ld.red.sync.aligned.32x32b.x2.min.u32 {%r10, %r11}, %r2, [%r1];")
    bench.set(0, r1=0)
    with pytest.raises(EmulatorError, match="sm_100a has no"):
        bench.run(0)
