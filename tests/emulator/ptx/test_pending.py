"""Uses of tcgen05.ld destinations before the wait, on every path."""

import pytest

from dsv4lib.emulator.ptx.parse import parse
from dsv4lib.emulator.ptx.pending import EarlyUse, blocks, eager_loads, early_uses

LOAD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r9];"
WAIT = "tcgen05.wait::ld.sync.aligned;"


def kernel(body):
    head = ".version 9.0\n.target sm_100a\n.address_size 64\n"
    return parse(f"{head}.entry k() {{ .reg .pred %p<4>; .reg .b32 %r<20>;\n{body}\n}}\n").kernels["k"]


def uses(body):
    k = kernel(body)
    return [(u.load, u.use, k.registers[u.register].name) for u in early_uses(k)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{LOAD} {WAIT} add.s32 %r3, %r1, %r2;", []),
        (f"{LOAD} add.s32 %r3, %r1, %r4; {WAIT}", [(0, 1, "%r1")]),
        (f"{LOAD} add.s32 %r3, %r4, %r5; {WAIT}", []),
        (f"{LOAD} st.shared.b32 [%r2], %r4; {WAIT}", [(0, 1, "%r2")]),  # as an address
        (f"{LOAD} mov.b32 %r1, 0; {WAIT}", [(0, 1, "%r1")]),  # overwritten while it may still arrive
        (f"{LOAD} {LOAD} {WAIT}", [(0, 1, "%r1"), (0, 1, "%r2")]),
        (f"{LOAD} @%p1 {WAIT} mov.b32 %r3, %r1; {WAIT}", [(0, 2, "%r1")]),  # a guarded wait may not happen
        (f"{LOAD} @%p1 bra SKIP; {WAIT} SKIP: mov.b32 %r3, %r1;", [(0, 3, "%r1")]),
        (f"{LOAD} @%p1 bra SKIP; {WAIT} mov.b32 %r3, %r1; SKIP: ret;", []),
        (f"LOOP: mov.b32 %r3, %r1; {LOAD} @%p1 bra LOOP; {WAIT}", [(1, 0, "%r1"), (1, 1, "%r1"), (1, 1, "%r2")]),
        (f"{LOAD} bra.uni END; mov.b32 %r3, %r1; END: {WAIT}", []),  # not reachable
        (f"{LOAD} {WAIT} tcgen05.wait::st.sync.aligned; mov.b32 %r3, %r1;", []),
        (f"{LOAD} tcgen05.wait::st.sync.aligned; mov.b32 %r3, %r1; {WAIT}", [(0, 2, "%r1")]),
    ],
)
def test_early_uses(body, expected):
    assert uses(body) == expected


PACK = "mov.b64 %rd1, {%r1, %r2};"
USE = "add.u64 %rd2, %rd2, %rd1;"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{LOAD} {PACK} {WAIT} {USE}", []),
        (f"{LOAD} {PACK} {USE} {WAIT}", [(0, 2, "%rd1")]),
        (f"{LOAD} {WAIT} {PACK} {LOAD} {USE} {WAIT}", []),  # what was packed is not of the second load
        (f"mov.b64 %rd1, {{%r11, %r12}}; L: {LOAD} {USE} {WAIT} {PACK} @%p1 bra L;", []),  # pipelined
        (f"mov.b64 %rd1, {{%r11, %r12}}; L: {LOAD} {USE} {PACK} {WAIT} @%p1 bra L;", []),
        (f"{PACK} L: {USE} {LOAD} {PACK} @%p1 bra L; {WAIT}", [(2, 1, "%rd1"), (2, 2, "%r1"), (2, 2, "%r2")]),
        (f"{LOAD} {PACK} mov.b64 %rd1, 0; {USE} {WAIT}", []),  # another value
        (f"{LOAD} {PACK} @%p1 mov.b64 %rd1, 0; {USE} {WAIT}", [(0, 3, "%rd1")]),  # perhaps
        (f"{LOAD} {PACK} mov.b64 %rd1, {{%r11, %r12}}; {USE} {WAIT}", []),
        (f"{LOAD} {PACK} @%p1 mov.b64 %rd1, {{%r11, %r12}}; {USE} {WAIT}", [(0, 3, "%rd1")]),
        (f"{LOAD} {PACK} @%p1 bra B; mov.b64 %rd1, 0; B: {USE} {WAIT}", [(0, 4, "%rd1")]),
        (f"{LOAD} {PACK} mov.b128 %q1, {{%rd1, %rd3}}; mov.b128 {{%rd4, %rd5}}, %q1; {WAIT}", [(0, 3, "%q1")]),
        (f"{LOAD} {PACK} add.u64 %rd1, %rd1, 1; {WAIT}", [(0, 2, "%rd1")]),
        (f"{LOAD} {PACK} st.shared.b64 [%r9], %rd1; {WAIT}", [(0, 2, "%rd1")]),
        (f"{LOAD} {PACK} @%p1 {WAIT} {USE} {WAIT}", [(0, 3, "%rd1")]),
    ],
)
def test_packed_registers(body, expected):
    k = kernel(".reg .b64 %rd<9>; .reg .b128 %q<3>;" + body)
    assert [(u.load, u.use, k.registers[u.register].name) for u in early_uses(k, through_packs=True)] == expected


def test_without_loads_there_is_nothing_to_do():
    assert early_uses(kernel("mov.b32 %r1, 0; ret;")) == []


def test_blocks():
    k = kernel("mov.b32 %r1, 0; A: @%p1 bra B; mov.b32 %r2, 0; bra A; B: ret;")
    assert blocks(k) == [(0, 1, [1]), (1, 2, [3, 2]), (2, 4, [1]), (4, 5, [])]


def test_eager_loads():
    assert eager_loads(kernel(f"{LOAD} mov.b32 %r3, %r1; {WAIT}")) == {0}
    assert eager_loads(kernel(f"{LOAD} {WAIT} mov.b32 %r3, %r1;")) == frozenset()
    assert eager_loads(kernel(f"{LOAD} @%p1 {WAIT} mov.b32 %r3, %r1;")) == frozenset()


def test_uses_name_the_load():
    assert early_uses(kernel(f"{LOAD} mov.b32 %r3, %r2; {WAIT}"))[0] == EarlyUse(0, 1, 1)


def test_early_uses_in_compiled_code_are_moves():
    """The compiler packs the loaded registers in front of the wait; without the wait their other uses appear."""
    pytest.importorskip("cutlass.cute")
    from dsv4lib.ops.gemm_tile.sm100 import GemmTile
    from tests.budget import built

    text = built(GemmTile, GemmTile.fake_args, "sm_100a")[1].ptx
    (good,) = parse(text).kernels.values()
    loads = [i.index for i in good.instructions if i.opcode.startswith("tcgen05.ld")]
    assert loads and eager_loads(good) <= set(loads)
    assert {good.instructions[u.use].opcode for u in early_uses(good)} == {"mov.b64"}
    (bad,) = parse(text.replace("tcgen05.wait::ld.sync.aligned;", "")).kernels.values()
    assert len(early_uses(bad)) > len(early_uses(good))
