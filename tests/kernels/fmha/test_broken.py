"""Every planted mistake is found by the means that the notebooks name, and the kernel without it by none."""

import pytest

from dsv4lib.kernels.fmha.broken import BROKEN, CAUGHT_BY
from dsv4lib.kernels.fmha.combine import Combine
from dsv4lib.kernels.fmha.inputs import case, prefill_case
from dsv4lib.kernels.fmha.ladder import STAGES, Ladder
from dsv4lib.kernels.fmha.sm100 import Fmha
from dsv4lib.lab.fmha_trial import fmha_trial, ladder_trial, split_trial

SHAPE = (130, 333)  # more than two KV tiles, ragged on both sides


FMHA_RUNS = {  # settings, case
    "SumOverMaximum": ((512, "bf16", "index"), case(64, [150], [33])),
    "SwappedHalves": ((512, "bf16", "index"), case(64, [150], [33])),
    "NoHeadGuard": ((512, "bf16", "index"), case(37, [70], [3])),
    "PadLse": ((512, "bf16", "index"), case(37, [70, 9], [3, 3])),
    "SharedSelection": ((512, "bf16", "index"), case(64, [70, 70], [3, 3])),
    "EveryKeyCounts": ((512, "bf16", "none"), case(64, [0], [50])),
    "OneLimit": ((512, "bf16", "range"), prefill_case(64, [254], 2)),
    "SinkInLse": ((512, "bf16", "index", True, True, True), case(64, [70], [33])),
    "SwappedTables": ((512, "bf16", "index", True, True, True), case(64, [70], [33])),
}


def late_start():
    """The first part has no keys: 64 indices of -1."""
    one = case(64, [200], [30])
    one.index[0, :64] = -1
    return one


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_found(name):
    stage, kind = CAUGHT_BY[name]
    if stage in STAGES:
        found = ladder_trial(BROKEN[name], (stage, 128, "bf16"), *SHAPE, trace=True).findings()
    elif issubclass(BROKEN[name], Combine):
        found = split_trial(late_start(), "index", True, 5, BROKEN[name]).findings()
    else:
        found = fmha_trial(BROKEN[name], *FMHA_RUNS[name]).findings()
    assert kind in {f[0] for f in found}
    if kind not in ("wrong numbers", "boxes never loaded", "pad rows leaked"):
        assert any(f[0] == kind and ".py:" in f[1] for f in found)  # with the Python line


@pytest.mark.parametrize("stage", ["a", "b", "c"])
def test_nothing_is_found_in_the_right_kernel(stage):
    trial = ladder_trial(Ladder, (stage, 128, "bf16"), *SHAPE, trace=True)
    assert trial.clean and not trial.findings()


@pytest.mark.parametrize("name", FMHA_RUNS)
def test_nothing_is_found_without_the_mistake(name):
    trial = fmha_trial(Fmha, *FMHA_RUNS[name])
    assert trial.clean and not trial.findings()


def test_an_empty_first_part_is_no_mistake():
    trial = split_trial(late_start(), "index", True, 5)
    assert trial.clean and not trial.findings()
