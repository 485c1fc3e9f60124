"""Every planted mistake is found by the means that the notebooks name, and the kernel without it by none."""

import pytest

from dsv4lib.kernels.fmha.broken import BROKEN, CAUGHT_BY
from dsv4lib.kernels.fmha.inputs import case
from dsv4lib.kernels.fmha.ladder import STAGES, Ladder
from dsv4lib.lab.fmha_trial import fmha_trial, ladder_trial

SHAPE = (130, 333)  # more than two KV tiles, ragged on both sides


@pytest.mark.parametrize("name", CAUGHT_BY)
def test_found(name):
    stage, kind = CAUGHT_BY[name]
    if stage in STAGES:
        found = ladder_trial(BROKEN[name], (stage, 128, "bf16"), *SHAPE, trace=True).findings()
    else:
        found = fmha_trial(BROKEN[name], (512, "bf16", "index"), case(64, [150], [33])).findings()
    assert kind in {f[0] for f in found}
    if kind not in ("wrong numbers", "boxes never loaded"):
        assert any(f[0] == kind and ".py:" in f[1] for f in found)  # with the Python line


@pytest.mark.parametrize("stage", ["a", "b", "c"])
def test_nothing_is_found_in_the_right_kernel(stage):
    trial = ladder_trial(Ladder, (stage, 128, "bf16"), *SHAPE, trace=True)
    assert trial.clean and not trial.findings()
