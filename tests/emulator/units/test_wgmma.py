"""wgmma.mma_async against float64; operands by tc_layouts.py, fragments by the ISA's formulas."""

import numpy as np
import pytest
import tc_formats
import tc_layouts
from tc_bench import Bench
from test_mma_sync import fragment_a, pack

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.units.tcgen05_ldst import POISON

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "b1": 1}
CHAIN = (
    "wgmma.fence.sync.aligned;\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    "wgmma.wait_group.sync.aligned 1;\n"
)
FENCE, COMMIT, WAIT0, WAIT1, FIRST = range(5)


def cell(warp, lane, i):
    """(row, column) of accumulator element i of a thread."""
    block, inner = divmod(i, 4)
    return 16 * (warp % 4) + lane // 4 + 8 * (inner // 2), 8 * block + 2 * (lane % 4) + inner % 2


def opcode(n, a, b, d, tail=""):
    return f"wgmma.mma_async.sync.aligned.m64n{n}k{256 // BITS[a]}.{d}.{a}.{b}{tail}"


class Case:
    """One warpgroup with A and B in shared memory (or A in registers) and an accumulator from %r100 on."""

    def __init__(
        self,
        n,
        a,
        b,
        d,
        *,
        major=("K", "K"),
        swizzle=("128B", "128B"),
        rs=False,
        imm=None,
        tail="",
        warps=4,
        arch="sm_90a",
        p=True,
    ):
        rng = np.random.default_rng(n)
        self.n, self.a, self.b, self.d, self.k, self.warps = n, a, b, d, 256 // BITS[a], range(warps - 4, warps)
        if imm is None:
            floats = [1, 1] if d != "s32" else []
            trans = [int(m == "MN") for m in (major[1:] if rs else major)] if a in ("f16", "bf16") else []
            imm = floats + trans
        self.count = n // 4 if d == "f16" else n // 2
        self.d_registers = [f"%r{100 + i}" for i in range(self.count)]
        source = "{%r10, %r11, %r12, %r13}" if rs else "%rd1"
        immediates = "".join(f", {v}" for v in imm)
        text = f"{opcode(n, a, b, d, tail)} {{{', '.join(self.d_registers)}}}, {source}, %rd2, %p1{immediates};\n"
        self.bench = Bench(CHAIN + 2 * text, warps=warps, arch=arch)
        shape = (64, self.k), (n, self.k)
        self.codes = [
            rng.integers(0, 2, s) if a == "b1" else tc_formats.random_codes(rng, t, s)
            for t, s in zip((a, b), shape, strict=True)
        ]
        sets = {"p1": p}
        for i, start in enumerate((2048, 40960)):
            if rs and i == 0:
                continue
            codes, element = self.codes[i], BITS[a] / 8
            if a == "b1":
                codes, element = np.packbits(codes.astype(np.uint8), axis=1, bitorder="little"), 1
            lbo, sbo, nbytes = tc_layouts.strides(major[i], swizzle[i], element, *codes.shape)
            tc_layouts.place(self.bench.cta.smem.data, start, codes, major[i], swizzle[i], element, lbo, sbo)
            self.bench.cta.smem.init[start : start + -(-nbytes // 1024) * 1024] = 1
            sets[f"rd{i + 1}"] = tc_layouts.descriptor(start, lbo, sbo, swizzle[i], sm90=True)
        self.before = rng.integers(-30, 30, (64, n)).astype(np.float64)
        for warp in self.warps:
            self.bench.set(warp, **sets)
            self.write(warp)
            if rs:
                for lane in range(32):
                    mine = []
                    for j in range(128 // BITS[a]):
                        r, c = fragment_a(lane, j, 32 // BITS[a], 16)
                        mine.append(self.codes[0][16 * (warp % 4) + r, c])
                    for r, word in enumerate(pack(mine, BITS[a])):
                        self.bench.reg(f"%r{10 + r}", warp)[lane] = word

    def write(self, warp):
        for lane in range(32):
            values = [self.before[cell(warp, lane, i)] for i in range(self.n // 2)]
            if self.d == "f16":
                words = pack([int(np.float16(v).view(np.uint16)) for v in values], 16)
            else:
                kind = np.float32 if self.d == "f32" else np.int32
                words = [int(kind(v).view(np.uint32)) for v in values]
            for name, word in zip(self.d_registers, words, strict=True):
                self.bench.reg(name, warp)[lane] = word

    def read(self):
        out = np.zeros((64, self.n))
        for warp in self.warps:
            for lane in range(32):
                for i in range(self.n // 2):
                    if self.d == "f16":
                        word = int(self.bench.reg(self.d_registers[i // 2], warp)[lane]) >> 16 * (i % 2) & 0xFFFF
                        value = np.uint16(word).view(np.float16)
                    else:
                        value = self.bench.reg(self.d_registers[i], warp)[lane].view(
                            np.float32 if self.d == "f32" else np.int32
                        )
                    out[cell(warp, lane, i)] = value
        return out

    def each(self, *lines):
        for line in lines:
            for warp in self.warps:
                assert self.bench.serve(line, warp) is None

    def product(self):
        values = (
            self.codes
            if self.a == "b1"
            else [tc_formats.values(c, t) for c, t in zip(self.codes, (self.a, self.b), strict=True)]
        )
        return values[0].astype(np.float64) @ values[1].astype(np.float64).T


TYPES = [
    ("f16", "f16", "f32"),
    ("f16", "f16", "f16"),
    ("bf16", "bf16", "f32"),
    ("tf32", "tf32", "f32"),
    ("e4m3", "e5m2", "f32"),
    ("e5m2", "e4m3", "f16"),
    ("s8", "u8", "s32"),
    ("u8", "u8", "s32"),
    ("b1", "b1", "s32"),
]


@pytest.mark.parametrize(("a", "b", "d"), TYPES)
@pytest.mark.parametrize("rs", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_types(a, b, d, rs, accumulate):
    case = Case(24, a, b, d, rs=rs, p=accumulate, tail=".and.popc" if a == "b1" else "")
    case.each(FENCE, FIRST, COMMIT, WAIT0)
    expected = case.product() + (case.before if accumulate else 0)
    assert case.bench.hazards == []
    np.testing.assert_array_equal(case.read(), expected.astype(np.float16) if d == "f16" else expected)


@pytest.mark.parametrize("n", [8, 40, 136, 256])
def test_widths(n):
    case = Case(n, "bf16", "bf16", "f32")
    case.each(FENCE, FIRST, COMMIT, WAIT0)
    np.testing.assert_array_equal(case.read(), case.product() + case.before)


@pytest.mark.parametrize("major", ["K", "MN"])
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("side", [0, 1])
def test_layouts(major, swizzle, side):
    majors, swizzles = ["K", "K"], ["128B", "128B"]
    majors[side], swizzles[side] = major, swizzle
    case = Case(64, "f16", "f16", "f32", major=tuple(majors), swizzle=tuple(swizzles))
    case.each(FENCE, FIRST, COMMIT, WAIT0)
    assert case.bench.hazards == []
    np.testing.assert_array_equal(case.read(), case.product() + case.before)


def test_transposed_b_with_a_in_registers():
    case = Case(64, "bf16", "bf16", "f32", major=("K", "MN"), rs=True)
    case.each(FENCE, FIRST, COMMIT, WAIT0)
    np.testing.assert_array_equal(case.read(), case.product() + case.before)


@pytest.mark.parametrize(("imm", "sign"), [([-1, 1, 0, 0], -1), ([1, -1, 0, 0], -1), ([-1, -1, 0, 0], 1)])
def test_signs(imm, sign):
    case = Case(16, "f16", "f16", "f32", imm=imm)
    case.each(FENCE, FIRST, COMMIT, WAIT0)
    np.testing.assert_array_equal(case.read(), sign * case.product() + case.before)


def test_second_warpgroup():
    case = Case(16, "f16", "f16", "f32", warps=8)
    case.each(FENCE, FIRST, COMMIT, WAIT0)
    np.testing.assert_array_equal(case.read(), case.product() + case.before)


def test_nothing_is_there_before_the_wait():
    case = Case(16, "f16", "f16", "f32")
    case.each(FENCE, FIRST, COMMIT)
    assert (case.bench.reg("%r100", 2) == POISON).all()
    case.each(WAIT1)
    assert (case.bench.reg("%r100", 2) == POISON).all()
    case.each(WAIT0)
    np.testing.assert_array_equal(case.read(), case.product() + case.before)


def test_operations_on_one_accumulator_chain():
    case = Case(16, "f16", "f16", "f32")
    case.each(FENCE, FIRST, FIRST + 1, COMMIT, FIRST, COMMIT, WAIT1)
    units = case.bench.machine.units
    assert len(units) == 4
    assert len(units.candidates()) == 4
    case.each(WAIT0)
    np.testing.assert_array_equal(case.read(), 3 * case.product() + case.before)


def test_the_scheduler_may_complete_before_the_wait():
    case = Case(16, "f16", "f16", "f32")
    case.each(FENCE, FIRST, FIRST, COMMIT)
    units = case.bench.machine.units
    assert len(units) == 8
    assert len(units.candidates()) == 4  # the older one of each warp
    units.drain(lambda candidates: candidates[-1])
    case.each(WAIT0)
    np.testing.assert_array_equal(case.read(), 2 * case.product() + case.before)


def test_operands_are_read_at_completion():
    case = Case(16, "f16", "f16", "f32", rs=True)
    case.each(FENCE, FIRST, COMMIT)
    for warp in case.warps:
        case.bench.set(warp, r10=0, r11=0, r12=0, r13=0)
    case.each(WAIT0)
    np.testing.assert_array_equal(case.read(), case.before)


@pytest.mark.parametrize("where", ["A", "B"])
def test_hazards(where):
    at = {"A": 2048, "B": 40960}[where]
    for kind in ("uninitialised_smem", "missing_proxy_fence"):
        case = Case(16, "f16", "f16", "f32")
        if kind == "uninitialised_smem":
            case.bench.cta.smem.init[at + 1] = 0
        else:
            case.bench.cta.smem.dirty[at // 16] = 2
        case.each(FENCE, FIRST, COMMIT, WAIT0)
        assert case.bench.kinds() == [kind]
        assert f"for {where}" in case.bench.hazards[0][1]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"imm": [1, 1]}, "2 scale and transpose immediates, must be 4"),
        ({"imm": [2, 1, 0, 0]}, "must be 1 or -1"),
        ({"imm": [1, 1, 0, 2]}, "transposes"),
        ({"arch": "sm_100a"}, "sm_100a has no wgmma"),
    ],
)
def test_refusals(kwargs, message):
    case = Case(16, "f16", "f16", "f32", **kwargs)
    with pytest.raises(EmulatorError, match=message):
        case.each(FIRST)


@pytest.mark.parametrize(
    "variant",
    [
        opcode(12, "f16", "f16", "f32"),
        opcode(40, "s8", "s8", "s32"),
        opcode(16, "bf16", "bf16", "f16"),
        opcode(16, "f16", "bf16", "f32"),
    ],
)
def test_what_is_not_there_is_refused(variant):
    assert isa.find(variant) is None


@pytest.mark.parametrize("tail", ["", ".satfinite"])
def test_integer_overflow(tail):
    case = Case(8, "u8", "u8", "s32", tail=tail)
    case.before[:] = 2**31 - 3
    for warp in case.warps:
        case.write(warp)
    case.each(FENCE, FIRST, COMMIT, WAIT0)
    total = case.product() + case.before
    wrapped = (total + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(case.read(), np.minimum(total, 2**31 - 1) if tail else wrapped)
