"""Micro-kernels of day ones against the emulator: what GPUs gave for them, data/emulator/<gpu>/probes.csv.

`./dsv4 day-one` makes the archive on a GPU, `./dsv4 day-one --read ARCHIVE --record` the recording.
"""

from __future__ import annotations

import statistics

import pytest

from dsv4lib.bench.ops import harness, results
from dsv4lib.lab import stage
from dsv4lib.lab.day_one import forms, plan, reading

FOLDERS = reading.recordings()
STAGES = [(folder, name) for folder in FOLDERS for name in {one.stage: 0 for one in reading.metrics_recorded(folder)}]
LINES = [(folder, line) for folder in FOLDERS for line in reading.recorded(folder)]
PROBES = {probe.name: probe for probe in forms.probes()} if LINES else {}


@pytest.mark.skipif(not LINES, reason="no GPU's day one has been recorded yet")
@pytest.mark.parametrize(("folder", "line"), LINES, ids=[f"{f.name}-{line.probe}" for f, line in LINES])
def test_the_emulator_gives_the_bits_of_a_gpu(folder, line):
    assert line.probe in PROBES, "the recording names a micro-kernel that there is no more: record it again"
    assert reading.replay(line, folder, PROBES[line.probe]) == ""


@pytest.mark.parametrize(("folder", "name"), STAGES, ids=[f"{folder.name}-{name}" for folder, name in STAGES])
def test_gates_hold_for_what_a_gpu_gave(folder, name):
    """A gate that is new or tighter than when a GPU ran the stage natively asks for another run there."""
    found = {one.metric: one.value for one in reading.metrics_recorded(folder) if one.stage == name}
    spec = stage.load(name)
    assert {gate.metric for gate in spec.gates} <= set(found)
    assert [gate.metric for gate in spec.gates if not gate.passes(found[gate.metric])] == []


def test_an_h200_ran_every_stage_of_its_set_natively():
    names = {step.name.removeprefix("stage.") for step in plan.steps("sm_90a", ["stage.*"]) if not step.skipped}
    assert names == {name for folder, name in STAGES if folder.name == "h200"}


def test_times_of_an_h200_are_of_rows_of_the_bench_above_their_floors_and_near_the_recorded_ones():
    (folder,) = (one for one in FOLDERS if one.name == "h200")
    times = reading.times_recorded(folder)
    rows = {(row.op, row.shape) for row in harness.chosen(sorted({one.op for one in times}), "")[0]}
    assert len(times) > 200 and {(one.op, one.shape) for one in times} <= rows
    assert all(one.us > one.floor_us for one in times)
    before = {(one.op, one.shape): one.named(results.OURS) for one in results.load(results.FOLDER)}
    ratio = [one.us / before[one.op, one.shape].us for one in times if (one.op, one.shape) in before]
    assert len(ratio) > 200 and 0.9 < statistics.median(ratio) < 1.1
