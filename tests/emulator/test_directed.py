"""Directed schedules: what stands at a named line happens last, nothing else changes, and a launch still ends."""

from __future__ import annotations

import re

import numpy as np
import pytest

from dsv4lib.emulator.machine.directed import Hold, idle, parse
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.errors import ArgumentError
from tests.emulator.launching import aligned, entry, launch, prepare
from tests.emulator.test_scheduler import LOG

# Each warp takes a ticket at "ticket" and stores it in its place; "again" takes a second one.
ORDER = """
mov.u32 %r0, %tid.x; shr.u32 %r3, %r0, 5; ld.param.u64 %rd1, [out]; and.b32 %r4, %r0, 31;
setp.ne.u32 %p1, %r4, 0; @%p1 bra END;
mul.wide.u32 %rd2, %r3, 8; add.s64 %rd2, %rd2, %rd1;
atom.global.add.u32 %r5, [%rd1+64], 1; // ticket
st.global.b32 [%rd2], %r5;
atom.global.add.u32 %r5, [%rd1+64], 1; // again
st.global.b32 [%rd2+4], %r5;
END:
"""


def line_of(text: str, what: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if what in line)


def tickets(schedule: str, body: str = ORDER, warps: int = 3) -> np.ndarray:
    text = entry("u64 out", body)
    out = aligned(32, np.uint32)
    for name in re.findall(r"<(\w+)>", schedule):
        schedule = schedule.replace(f"<{name}>", str(line_of(text, f"// {name}")))
    launch(text, out, block=32 * warps, settings=Settings(schedule=schedule))
    return out[: 2 * warps].reshape(warps, 2)


def test_a_held_warp_gets_there_last():
    for warp in range(3):
        got = tickets(f"hold:<ticket>@{warp}")
        assert sorted(got[warp]) == [4, 5] and sorted(got.reshape(-1)) == list(range(6))


def test_a_line_held_for_all_warps_is_passed_after_everything_before_it():
    got = tickets("hold:<again>")
    assert sorted(got[:, 0]) == [0, 1, 2] and sorted(got[:, 1]) == [3, 4, 5]


def test_two_holds_go_one_by_one_the_lowest_warp_first():
    got = tickets("hold:<ticket>@2,<ticket>@0")
    assert list(got[1]) == [0, 1] and list(got[0]) == [2, 3] and list(got[2]) == [4, 5]


def test_a_warp_that_spins_does_not_hold_a_launch_up():
    """Warp 1 spins until warp 0, which is held, has raised a flag."""
    body = """
    mov.u32 %r0, %tid.x; ld.param.u64 %rd1, [out]; shr.u32 %r3, %r0, 5; setp.eq.u32 %p1, %r3, 1;
    @%p1 bra SPIN; st.release.gpu.global.b32 [%rd1], 7; // flag
    bra END; SPIN: ld.acquire.gpu.global.b32 %r5, [%rd1]; setp.ne.u32 %p2, %r5, 7; @%p2 bra SPIN; END:
    """
    assert tickets("hold:<flag>", body, warps=2)[0, 0] == 7


def test_operations_issued_at_a_held_line_complete_last():
    LOG.clear()
    lines = "\n".join(f"testissue.u32 {i};" for i in range(4))
    text = entry("", lines + "\ntestwait.u32 4;")
    launch(text, settings=Settings(schedule=f"hold:{line_of(text, 'testissue.u32 1;')}"))
    assert LOG == [0, 2, 3, 1]


def test_what_is_not_held_is_as_under_any_schedule():
    assert sorted(tickets("hold:99999").reshape(-1)) == list(range(6))


def test_source_lines():
    text = entry("u64 out", ".loc 1 7 1\nst.shared.b32 [0], 1;\n.loc 1 8 1\nret;").replace(
        ".address_size 64\n", '.address_size 64\n.file 1 "/some/where/kernel.py"\n'
    )
    program = prepare(text, aligned(4, np.uint32)).program
    seven = next(i for i in program.instructions if "st.shared" in i.text)
    for name, warp, covered in (
        ("kernel.py:7", 0, True), ("where/kernel.py:7", 3, True), ("nel.py:7", 0, False), ("kernel.py:8", 0, False),
        ("kernel.py:7@1", 1, True), ("kernel.py:7@1", 0, False),
        (str(seven.line), 2, True), (f"{seven.line}@1", 2, False),
    ):  # fmt: skip
        assert parse(f"hold:{name}")[0].covers(program, seven, warp) is covered, name
    assert parse("hold:a b.py:3@2, 4") == (Hold(3, "a b.py", 2), Hold(4))
    with pytest.raises(ArgumentError, match="hold:LINE"):
        parse("hold:kernel.py")


def test_a_hold_that_no_warp_comes_to_is_told():
    text = entry("u64 out", ORDER)
    line, last = line_of(text, "// ticket"), line_of(text, "END:")
    schedule = f"hold:{line}@1,{line}@7,{last + 50},k.py:3@0"
    stats = launch(text, aligned(32, np.uint32), block=96, settings=Settings(schedule=schedule)).stats
    assert idle(schedule, [stats]) == [f"{line}@7", str(last + 50), "k.py:3@0"]
    assert idle(schedule, [stats, {f"hold:{line}@7": 1}]) == [str(last + 50), "k.py:3@0"]
    assert idle("random", [stats]) == []
