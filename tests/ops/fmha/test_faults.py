"""Every injected fault is found by the means that the notebooks name, and the kernel without it by none."""

import pytest

from dsv4lib.dsl.compile import CompileError
from dsv4lib.ops.fmha.combine import Combine
from dsv4lib.ops.fmha.faults import CAUGHT_BY, FAULTS, REFUSED
from dsv4lib.ops.fmha.inputs import case, decode_case, paged, prefill_case
from dsv4lib.ops.fmha.ladder import STAGES, Ladder
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.wasteful import EveryTile, FetchedTwice, UnrolledTiles, UnrolledTwice
from dsv4lib.pages.fmha.run_case import compiled, run_fmha, run_ladder, run_split

FP8_PAIR = (512, "bf16", "index", False, False, False, False, True, False, 2)
FP8 = (512, "bf16", "index", True, False, False, False, True, True)
SHAPE = (130, 333)  # more than two KV tiles, ragged on both sides
PAIR = (512, "bf16", "index", True, True, False, False, False, False, 2)  # cluster
SHARED = (512, "bf16", "range", True, True, False, False, False, False, 1, True)  # groups

STAYING = ("FreedQ", "OneSpeaksForAll")  # found where a CTA takes a second token
FMHA_RUNS = {  # settings, case
    "SumOverMaximum": ((512, "bf16", "index"), case(64, [150], [33])),
    "SwappedHalves": ((512, "bf16", "index"), case(64, [150], [33])),
    "NoHeadGuard": ((512, "bf16", "index"), case(37, [70], [3])),
    "PadLse": ((512, "bf16", "index"), case(37, [70, 9], [3, 3])),
    "SharedSelection": ((512, "bf16", "index"), case(64, [70, 70], [3, 3])),
    "EveryKeyCounts": ((512, "bf16", "none"), case(64, [0], [50])),
    "NoKeysNoLse": ((512, "bf16", "none"), decode_case(64, [-1, 5])),
    "OneLimit": ((512, "bf16", "range"), prefill_case(64, [254], 2)),
    "SinkInLse": ((512, "bf16", "index", True, True, True), case(64, [70], [33])),
    "HalfOfTheWarps": (FP8_PAIR, paged(case(100, [300], [0]), 48)),
    **{name: (FP8, paged(case(64, [150], [33]), 48)) for name in ("NoProxyFence", "NextScale", "ScalesBehindEntry")},
    "SwappedTables": ((512, "bf16", "index", True, True, True), case(64, [70], [33])),
    "OwnStageOnly": (PAIR, case(128, [500], [70])),  # more tiles than stages
    **{name: (PAIR, case(128, [70], [33])) for name in ("HalfOfTheBytes", "EvenAndOdd", "HastyQ", "HastyLoad")},
    **{name: ((512, "bf16", "index"), case(64, [70, 9], [33, 0])) for name in STAYING},
    "GroupSeesAll": (SHARED, prefill_case(20, [127], 5)),
}


def sms(name):
    return 1 if name in STAYING else None


def late_start():
    """The first part has no keys: 64 indices of -1."""
    one = case(64, [200], [30])
    one.index[0, :64] = -1
    return one


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CAUGHT_BY)
def test_found(name):
    stage, kind = CAUGHT_BY[name]
    if stage in STAGES:
        found = run_ladder(FAULTS[name], (stage, 128, "bf16"), *SHAPE, trace=True).findings()
    elif issubclass(FAULTS[name], Combine):
        found = run_split(late_start(), "index", True, 5, FAULTS[name]).findings()
    else:
        found = run_fmha(FAULTS[name], *FMHA_RUNS[name], sms=sms(name)).findings()
    assert kind in {f[0] for f in found}
    if kind not in ("wrong numbers", "pad rows leaked", "Deadlock"):  # the last is in many places
        assert any(f[0] == kind and ".py:" in f[1] for f in found)  # with the Python line


@pytest.mark.one_in(4)
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, head_dim):
    """The compiler says what is wrong and names the line; the kernel without the fault compiles (`test_found`)."""
    stage, words = REFUSED[name]
    with pytest.raises(CompileError, match=rf"{words}.*\(faults\.py:\d+\)"):
        compiled(FAULTS[name], (stage, head_dim, "bf16"))


@pytest.mark.full
def test_unrolled_code_grows_with_the_tiles():
    """A loop of the device is as long for any number of tiles; one of Python adds its body for each."""
    looped, three, six = (
        len(compiled(kind, ("b", 128, "bf16"))[1].ptx.splitlines()) for kind in (Ladder, UnrolledTiles, UnrolledTwice)
    )
    assert run_ladder(UnrolledTiles, ("b", 128, "bf16"), *SHAPE, trace=True).clean, "right for its three tiles"
    assert looped < three and six - three > 3 * 150


@pytest.mark.full
def test_wasteful_kernels_are_right_and_cost_more():
    """Lazy correction saves instructions, one fetch for K and V half of the bytes; comparisons see neither."""
    settings, one = (512, "bf16", "index", False), case(64, [300], [0])
    right, textbook, twice = (run_fmha(kind, settings, one) for kind in (Fmha, EveryTile, FetchedTwice))
    assert right.clean and textbook.clean and twice.right
    instructions = [outcome.result.instructions for outcome in (right, textbook)]
    assert instructions[1] > 1.2 * instructions[0]
    read = [outcome.result.stats["tma_read_bytes"] - 64 * 1024 for outcome in (right, twice)]  # without Q
    assert read[1] == 2 * read[0]


@pytest.mark.parametrize("stage", ["a", "b", "c"])
def test_nothing_is_found_in_the_right_kernel(stage):
    outcome = run_ladder(Ladder, (stage, 128, "bf16"), *SHAPE, trace=True)
    assert outcome.clean and not outcome.findings()


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", FMHA_RUNS)
def test_nothing_is_found_without_the_fault(name):
    outcome = run_fmha(Fmha, *FMHA_RUNS[name], sms=sms(name))
    assert outcome.clean and not outcome.findings()


def test_an_empty_first_part_is_no_fault():
    outcome = run_split(late_start(), "index", True, 5)
    assert outcome.clean and not outcome.findings()
