"""Traces of a whole kernel: counts that follow from the tile, and what finds each faulty kernel."""

import functools
import json
import linecache

import numpy as np
import pytest

from dsv4lib.emulator.trace.perfetto import chrome_trace, lanes_of, save
from dsv4lib.emulator.trace.trace import TMEM_KINDS, unpack_lanes
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.gemm_tile.faults import FAULTS
from dsv4lib.ops.gemm_tile.sm100 import GemmTile
from dsv4lib.pages.common import run_gemm as run_gemm_module
from dsv4lib.pages.common.run_gemm import run_gemm
from dsv4lib.pages.emulator import figures as emulator_figures
from dsv4lib.viz.style import alt_text, to_png

SHAPE, SETTINGS = (200, 136, 456), ("bf16", "fp32", 128, 2)
CTAS, STEPS = 4, 8


@functools.cache
def clean():
    return run_gemm(GemmTile, SHAPE, SETTINGS, seed=3)


def test_tracing_changes_nothing():
    traced, plain = clean(), run_gemm(GemmTile, SHAPE, SETTINGS, seed=3, trace=False)
    assert traced.clean and plain.right and plain.trace is None
    assert np.array_equal(traced.output.numpy(), plain.output.numpy())
    for name in ("schedule_hash", "instructions", "reordered", "stats"):
        assert getattr(traced.result, name) == getattr(plain.result, name), name


def test_counts_follow_from_the_tile():
    trace = clean().trace
    assert len(trace.boxes) == CTAS * STEPS * 2 and len(trace.mmas) == CTAS * STEPS * 4
    assert trace.boxes["nbytes"].sum() == trace.moved()["tma_load_bytes"] == CTAS * STEPS * 2 * 128 * 128
    assert trace.mmas["flops"].sum() == trace.moved()["mma_flops"] == CTAS * STEPS * 2 * 128 * 128 * 64
    assert (~trace.mmas["accumulate"]).sum() == CTAS, "the first MMA of each CTA overwrites"
    counts = trace.counts()
    executed = {n: sum(v for k, v in counts.items() if k.startswith(n)) for n in ("tcgen05.mma", "tcgen05.commit")}
    assert executed == {"tcgen05.mma": CTAS * STEPS * 4, "tcgen05.commit": CTAS * (STEPS + 1)}
    assert sum(v for k, v in counts.items() if k.startswith("cp.async.bulk.tensor")) == len(trace.boxes)
    assert sum(counts.values()) <= clean().result.instructions == trace.time
    assert trace.unread_bytes() == 0


def test_operations_complete_after_they_are_issued_and_events_are_unique():
    trace = clean().trace
    assert (trace.ops["done_event"] > trace.ops["event"]).all() and (trace.ops["done_time"] >= trace.ops["time"]).all()
    tables = (trace.boxes, trace.mmas, trace.tmem, trace.smem, trace.mbarriers, trace.named, trace.fences, trace.ops)
    events = np.concatenate([t["event"] for t in tables] + [trace.ops["done_event"]])
    assert np.array_equal(np.sort(events), np.arange(trace.events))
    for table in tables[:-1]:
        assert (np.diff(table["event"]) > 0).all() and (np.diff(table["time"]) >= 0).all()


def test_every_box_is_loaded_once_by_the_cta_that_needs_it():
    outcome = clean()
    for number, tensor in enumerate(outcome.trace.tensors):
        rows = outcome.operands["ab".index("a" if tensor.address == outcome.operands[0].data_ptr() else "b")].shape[0]
        assert rows == tensor.dims[1]
        for cta in range(CTAS):
            first = 128 * (cta % 2 if rows == SHAPE[0] else cta // 2)
            assert outcome.trace.loads(number, cta).tolist() == [[64 * step, first] for step in range(STEPS)]
    with pytest.raises(ArgumentError, match=r"tensor.*0\.\.1"):
        outcome.trace.loads(2)


def test_tensor_memory_at_any_moment():
    trace = clean().trace
    first = int(trace.mmas["event"][trace.mmas["cta"] == 0][0])
    assert (trace.tmem_at(first) == -1).all(), "the access is an event of its own, after the MMA's"
    kinds, times = trace.tmem_state(trace.events - 1)
    assert (kinds[:, :128] == TMEM_KINDS.index("ld")).all() and (kinds[:, 128:] == -1).all()
    assert (times[:, 128:] == -1).all() and times[:, :128].min() > 0
    written = trace.tmem_at(trace.events - 1)[:, :128]
    assert (trace.tmem["event"][written] == trace.tmem["event"][written[0, 0]]).all(), "the last MMA wrote every cell"
    for row in trace.tmem[trace.tmem["what"] == "ld"]:
        lanes = np.nonzero(unpack_lanes(row["lanes"]))[0]
        assert lanes.tolist() == list(range(32 * row["warp"], 32 * row["warp"] + 32))


def test_shared_memory_and_barriers():
    outcome, kernel = clean(), GemmTile(*SETTINGS)
    trace, names = outcome.trace, emulator_figures.barrier_names(kernel)
    state = trace.mbarriers_at(trace.events - 1)
    phases = {names[o]: int(row["phase"]) + int(row["done"]) for o, row in state.items()}
    assert phases == {"full 0": 4, "full 1": 4, "empty 0": 4, "empty 1": 4, "acc full": 1}
    codes, kinds = trace.smem_history(np.arange(trace.events))
    for name, first, end in emulator_figures.regions(kernel):
        assert kinds[codes[first // 16, -1]] == f"mma {name[0]}"
        assert len(set(codes[first // 16 : end // 16, -1].tolist())) == 1
    assert (codes[:, 0] == -1).all()
    assert np.array_equal(codes[:, -1] >= 0, trace.smem_at(trace.events - 1) >= 0)


def test_the_time_of_an_event_is_that_of_the_last_record_before_it():
    trace = clean().trace
    tables = (trace.ops, trace.boxes, trace.tmem, trace.smem, trace.mbarriers)
    events = trace.events_of(1)[::13]
    wanted = [max(int(t["time"][t["event"] <= event].max(initial=0)) for t in tables) for event in events]
    assert trace.times_of(events).tolist() == wanted and trace.time_of(int(events[3])) == wanted[3]
    assert len(set(wanted)) > 3


def test_the_life_of_a_warp_has_no_gaps():
    trace = clean().trace
    for cta in range(CTAS):
        for warp in range(6):
            mine = trace.states[(trace.states["cta"] == cta) & (trace.states["warp"] == warp)]
            assert np.array_equal(mine["time"][1:], mine["end"][:-1]) and (mine["end"] >= mine["time"]).all()
            assert mine["state"][0] == "run" and (mine["state"][1:] != mine["state"][:-1]).all()
    waits = trace.states[(trace.states["warp"] == 4) & (trace.states["reason"] == "mbarrier")]
    assert (waits["barrier"] >= 0).all()


def test_perfetto_file(tmp_path):
    trace = clean().trace
    loaded = json.loads(save(trace, tmp_path / "t.json").read_text())
    slices = [e for e in loaded["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(trace.states) + len(trace.ops)
    lines = dict(zip(trace.lines.tolist(), zip(trace.texts, trace.sources, strict=True), strict=True))
    for e in slices:
        text, source = lines.get(e["args"]["ptx_line"], ("", ""))
        assert (e["args"].get("ptx", ""), e["args"].get("source", "")) == (text, source)
    assert sum("sm100.py:" in e["args"].get("source", "") for e in slices) > len(slices) // 2
    by_thread: dict = {}
    for e in slices:
        if e["tid"] >= 1000:
            by_thread.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert by_thread
    assert lanes_of(np.array([0, 1, 2, 5]), np.array([3, 2, 9, 6])).tolist() == [0, 1, 1, 0]


def test_perfetto_shows_what_the_checks_report():
    trace = run_gemm(FAULTS["early_release"], SHAPE, SETTINGS, seed=3).trace
    instants = [e for e in chrome_trace(trace)["traceEvents"] if e["ph"] == "i"]
    assert len(instants) == len(trace.hazards) > 0
    for e, row in zip(instants, trace.hazards, strict=True):
        assert (e["name"], e["ts"], e["args"]["ptx_line"]) == (str(row["kind"]), int(row["time"]), int(row["line"]))
        assert "cute." in linecache.getline(*located(e["args"]["source"]))


def located(source: str) -> tuple[str, int]:
    file, _, line = source.rpartition(":")
    return file, int(line)


FOUND_BY = {
    "pinned_tile": ("boxes never loaded", "tAgA[None, 0]"),
    "first_accumulates": ("uninitialised_tmem", "cute.gemm"),
    "shifted_columns": ("uninitialised_tmem", "cute.copy(t2r"),
    "short_allocation": ("tmem_outside_allocation", "cute.gemm"),
    "early_release": ("race_shared", "cute.copy(tma_"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FOUND_BY)
def test_a_broken_kernel_is_found_where_it_is_broken(name):
    import inspect
    import sys

    kind, text = FOUND_BY[name]
    outcome = run_gemm(FAULTS[name], SHAPE, SETTINGS, seed=3)
    where = {at.split(",")[0] for found, at, _ in outcome.findings() if found == kind}
    lines = set()
    for at in where:
        file, _, line = at.partition(":")
        module = "faults" if file == "faults.py" else "sm100"
        source = inspect.getsource(sys.modules[f"dsv4lib.ops.gemm_tile.{module}"]).splitlines()
        lines.add(source[int(line) - 1].strip())
    assert any(text in line for line in lines), (where, lines)
    assert not outcome.clean


def test_half_of_each_k_step_is_found_as_bytes_that_are_not_read():
    def halve(kernel):
        kernel.tile_k //= 2

    outcome = run_gemm(GemmTile, SHAPE, SETTINGS, seed=3, change=halve)
    assert not outcome.right and not outcome.hazards
    assert outcome.trace.unread_bytes() == CTAS * STEPS * 2 * 128 * 64


def test_a_race_has_other_bits_under_other_schedules_and_the_right_kernel_has_not():
    def bits(kernel):
        runs = [run_gemm(kernel, SHAPE, SETTINGS, schedule=s, trace=False) for s in ("oldest_first", "adversarial")]
        return {run.output.numpy().tobytes() for run in runs}

    assert len(bits(GemmTile)) == 1 and len(bits(FAULTS["early_release"])) == 2


def test_a_launch_that_fails_leaves_its_trace():
    def deaf(kernel):
        kernel.a_stage_bytes += 16  # more bytes are announced than ever come

    outcome = run_gemm(GemmTile, SHAPE, SETTINGS, change=deaf)
    assert type(outcome.error).__name__ == "Deadlock" and outcome.record is None
    assert outcome.trace.boxes.size and (outcome.trace.states["state"] == "wait").any()
    assert outcome.findings()[0][0] == "Deadlock" or any(f[0] == "Deadlock" for f in outcome.findings())


def test_figures_of_the_notebook():
    outcome, kernel = clean(), GemmTile(*SETTINGS)
    trace, names = outcome.trace, emulator_figures.barrier_names(kernel)
    figures = [
        emulator_figures.warp_timeline(trace),
        emulator_figures.barrier_chart(trace, names),
        emulator_figures.tmem_panels(trace),
        emulator_figures.smem_map(trace, kernel),
        emulator_figures.box_iterations(trace, outcome.operands[0], "A"),
        emulator_figures.swizzle(trace),
        emulator_figures.moment(trace, names, trace.events // 8)[0],
    ]
    for figure in figures:
        assert len(alt_text(figure)) > 60 and len(to_png(figure)) < 250_000
    assert "8 boxes loaded, 0 of them again; 0 of 8 boxes never loaded" in alt_text(figures[4])


def test_lines_of_notebook_cells_are_told_by_their_number():
    assert run_gemm_module._where("/tmp/ipykernel_77/2998427574.py:7", 527) == "notebook cell, line 7, PTX line 527"
    assert run_gemm_module._where("/home/somebody/kernel.py:7", 527) == "kernel.py:7, PTX line 527"
    assert run_gemm_module._where("", 527) == "PTX line 527"


def test_many_copies_at_once_are_one_track():
    """The spans in which at least one copy is in flight; intervals in any order, nested, touching and apart."""
    starts, ends = np.array([5, 0, 1, 20, 8]), np.array([8, 3, 2, 21, 9])
    first, last = emulator_figures._union(starts, ends)
    assert first.tolist() == [0, 5, 20] and last.tolist() == [3, 9, 21]
