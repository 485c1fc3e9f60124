"""gemm_tile as it is, under every schedule: no report and the same bits. Then with one step wrong: each is caught."""

import re

import pytest
import torch

pytest.importorskip("cutlass.cute")
from dsv4lib.emulator.checks import errors
from dsv4lib.emulator.errors import Deadlock, EmulatorError, HazardError
from dsv4lib.emulator.machine.policies import POLICIES
from tests.emulator.checks.gemm import run, sub

WAIT = r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r\d+\], %?\w+, 10000000;"
PASS = "setp.eq.u32 P1, 0, 0;"
FULL, EMPTY, DONE = (
    r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r216\], %r293, 10000000;",
    r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r254\], %r291, 10000000;",
    r"mbarrier\.try_wait\.parity\.shared\.b64 P1, \[%r4\], 0, 10000000;",
)
EXPECT = r"(mbarrier\.arrive\.expect_tx\.shared\.b64 %rd46, \[%r9\+131072\], )%r257;"


def every_wait(text: str) -> str:
    text, count = re.subn(WAIT, PASS, text)
    assert count == 8
    return text


@pytest.fixture(scope="module")
def reference() -> torch.Tensor:
    return run(checks="default")[0]


@pytest.mark.parametrize(
    ("schedule", "seed"),
    [(name, 0) for name in POLICIES] + [(n, s) for n in ("random", "adversarial") for s in (1, 2, 3)],
)
def test_the_kernel_as_it_is(reference, schedule, seed):
    c, result = run(schedule=schedule, seed=seed, checks="race,counters")
    assert result.hazards == []
    assert torch.equal(c, reference)


def test_schedules_differ():
    assert len({run(schedule=name)[1].schedule_hash for name in POLICIES}) == len(POLICIES)


# name: (edit, kinds that must be reported, text of the PTX line of the first of them)
REPORTED = {
    "no dealloc": (sub(r"tcgen05\.dealloc[^;]*;", ""), {"tmem_leak"}, "ret"),
    "too few bytes expected": (
        sub(EXPECT, r"shr.u32 %r257, %r257, 1; \1%r257;"),
        {"race_shared", "mbarrier_tx_unexpected"},
        "tcgen05.mma",
    ),
    "no wait waits": (every_wait, {"race_shared", "mbarrier_over_arrival", "tmem_after_free"}, "tcgen05.mma"),
    "accumulation on at the first MMA": (
        sub(r"mov\.pred\s+%p86, 0;", "mov.pred %p86, 1;"),
        {"uninitialised_tmem"},
        "tcgen05.mma",
    ),
    "wrong phase of the accumulator": (
        sub(DONE, "mbarrier.try_wait.parity.shared.b64 P1, [%r4], 1, 10000000;"),
        {"uninitialised_tmem", "race_tensor"},
        "tcgen05.ld",
    ),
    "accumulator not waited for": (sub(DONE, PASS), {"uninitialised_tmem", "race_tensor"}, "tcgen05.ld"),
    "operands not waited for": (sub(FULL, PASS), {"race_shared"}, "tcgen05.mma"),
    "freed while others read": (sub(r"bar\.sync\s+2, 128;", ""), {"race_tensor", "tmem_after_free"}, "tcgen05.ld"),
    "address read before it is there": (
        sub(r"bar\.sync\s+1, 160;", "", 2),
        {"race_shared", "race_tensor"},
        "ld.shared.b32",
    ),
    "barriers used before they are there": (
        sub(r"bar\.sync\s+0;", ""),
        {"mbarrier_init_unordered"},
        "mbarrier.try_wait",
    ),
}


@pytest.mark.parametrize("name", REPORTED)
def test_a_trap_is_reported(name):
    edit, kinds, text = REPORTED[name]
    _, result = run(edit)
    found = {hazard.kind: hazard for hazard in reversed(result.hazards)}
    assert kinds <= set(found), result.hazards
    first = next(hazard for hazard in result.hazards if hazard.kind in kinds and text in hazard.place.ptx)
    assert re.search(r"gemm_tile/sm100\.py:\d+$", first.place.python)
    assert first.place.cta is not None and first.place.warp is not None
    if first.kind.startswith("race"):
        assert first.owner.ptx_line != first.place.ptx_line and "sm100.py:" in first.owner.python


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (sub(r"tcgen05\.commit[^;]*\[%r4\];", ""), Deadlock, r"parity 0 of mbarrier 0x20440.*0 of 1 arrived"),
        (sub(r"tcgen05\.commit[^;]*\+131104\];", ""), Deadlock, r"warp 5.*mbarrier 0x20420"),
        (sub(EXPECT, r"add.s32 %r257, %r257, 64; \1%r257;"), Deadlock, r"64 bytes outstanding"),
        (sub(r"cp\.async\.bulk\.tensor[^;]*\[%r10\],[^;]*;", ""), Deadlock, r"16384 bytes outstanding"),
        (sub(r"bar\.sync\s+2, 128;", "bar.sync 2, 160;"), Deadlock, r"128 of 160 threads arrived"),
        (sub(r"bar\.sync\s+2, 128;", "bar.sync 2, 100;"), HazardError, r"not a positive multiple of 32"),
        (sub(r"(tcgen05\.alloc[^;]*), %r53;", r"\1, 96;"), EmulatorError, r"power of two"),
    ],
    ids=["commit", "release", "expect", "copy", "count", "odd count", "columns"],
)
def test_a_trap_stops_the_launch(edit, kind, message):
    with pytest.raises(kind, match=message) as caught:
        run(edit)
    assert "sm100.py:" in str(caught.value)


def test_what_was_reported_before_a_deadlock_is_told_with_it():
    with pytest.raises(Deadlock) as caught:
        run(sub(EMPTY, PASS))
    assert "mbarrier_over_arrival" in {h.kind for h in errors(caught.value.hazards)}
    assert "mbarrier_over_arrival" in caught.value.__notes__[0]


@pytest.mark.parametrize("edit", [sub(FULL, PASS), sub(DONE, PASS)], ids=["operands", "accumulator"])
def test_an_injected_race_changes_bits_under_some_schedule(reference, edit):
    same = {name: torch.equal(run(edit, schedule=name)[0], reference) for name in POLICIES}
    assert not all(same.values()), same


def test_the_race_is_found_even_when_the_bits_are_right(reference):
    c, result = run(sub(FULL, PASS), schedule="round_robin")
    assert torch.equal(c, reference)
    assert "race_shared" in {h.kind for h in result.hazards}
