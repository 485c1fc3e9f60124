"""Micro-kernels of day ones against the emulator: what GPUs gave for them, data/emulator/<gpu>/probes.csv.

`./dsv4 day-one` makes the archive on a GPU, `./dsv4 day-one --read ARCHIVE --record` the recording.
"""

from __future__ import annotations

import pytest

from dsv4lib.lab.day_one import forms, reading

FOLDERS = reading.recordings()
LINES = [(folder, line) for folder in FOLDERS for line in reading.recorded(folder)]
PROBES = {probe.name: probe for probe in forms.probes()} if LINES else {}


@pytest.mark.skipif(not LINES, reason="no GPU's day one has been recorded yet")
@pytest.mark.parametrize(("folder", "line"), LINES, ids=[f"{f.name}-{line.probe}" for f, line in LINES])
def test_the_emulator_gives_the_bits_of_a_gpu(folder, line):
    assert line.probe in PROBES, "the recording names a micro-kernel that there is no more: record it again"
    assert reading.replay(line, folder, PROBES[line.probe]) == ""
