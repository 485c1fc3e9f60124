"""Counters of the GPU for the bench of ops: how a report of Nsight Compute is read, kept and shown."""

import csv
import io
from dataclasses import replace

import pytest
import torch

from dsv4lib.bench.ops import counters, harness
from dsv4lib.bench.ops.counters import INSTRUCTIONS, ISSUE, L2, METRICS, STALL, TIME, CounterError
from dsv4lib.errors import DSV4Error
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.pages.hopper import ops_table

PUSHED = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
WORDS = ("==WARNING== Note: Running with unmodified GPU clocks.", "==PROF== Disconnected from process 1868")


def report(*kernels, drop=""):
    """What ncu 2025.3 prints with --csv --page raw --nvtx: words, names, units, a line a kernel.

    ``kernels``: (range, counters that are not 1).
    """
    names = ["ID", PUSHED, "Kernel Name", *(name for name in METRICS if name != drop)]
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(names)
    writer.writerow(["", "", "", *["ns"] * (len(names) - 3)])
    for i, (name, values) in enumerate(kernels):
        pushed = f'1673  "<default domain>:{name}:none:none:none:none:none:none" ' if name else ""
        writer.writerow([i, pushed, "kernel_x", *(values.get(metric, "1") for metric in names[3:])])
    return "\n".join((*WORDS, text.getvalue()))


def test_kernels_of_a_call_are_added_and_means_are_weighted_by_time():
    one = {TIME: "1,000", INSTRUCTIONS: "30", ISSUE: "10.0", L2: "7", "dram__bytes_read.sum": "1,600"}
    two = {TIME: "3,000", INSTRUCTIONS: "12", ISSUE: "50.0", L2: "3", STALL.format("long_scoreboard"): "9"}
    text = report(("dsv4|mhc|Flash T 8|ours, other", one), ("dsv4|mhc|Flash T 8|ours, other", two))
    (found,) = counters.parsed(text, "now")
    assert (found.op, found.shape, found.provider, found.run) == ("mhc", "Flash T 8", "ours, other", "now")
    assert (found.kernels, found.us, found.instructions) == (2, 4.0, 42)
    assert (found.hbm_read, found.hbm_write, found.l2) == (1601, 2, 10 * 32)
    assert found.issue == 40.0
    others = len(counters.REASONS) - 1
    assert (found.stall, found.stalled) == ("long scoreboard", round(100 * 7 / (7 + others), 1))


def test_providers_of_a_row_stay_apart():
    names = "ours", "vLLM post + pre + norm", "TileKernels post, vLLM pre, norm"
    found = counters.parsed(report(*((f"dsv4|mhc|Pro T 1|{name}", {}) for name in names)))
    assert [one.provider for one in found] == list(names)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("==ERROR== The user does not have permission", "reports no kernel: ==ERROR== The user does not"),
        ("", "reports no kernel"),
        (report(("dsv4|mhc|Pro T 1|ours", {}), drop=ISSUE), ISSUE),
        (report(("", {})), "a kernel without a range: kernel_x"),
    ],
)
def test_another_report_is_refused(text, said):
    with pytest.raises(CounterError, match=said):
        counters.parsed(text)


def test_the_profiler_is_asked_for_every_counter_and_for_our_ranges_alone(tmp_path):
    words = counters.command(tmp_path / "r.csv", ["--only", "mhc"])
    assert words[words.index("--metrics") + 1].split(",") == list(METRICS)
    assert words[words.index("--profile-from-start") + 1] == "off"
    assert words[-4:] == ["dsv4lib.bench.ops.counters", "--inner", "--only", "mhc"]


def test_what_is_recorded_is_read_again(tmp_path):
    found = counters.parsed(report(("dsv4|mhc|Pro T 1|ours", {}), ("dsv4|topk|Pro T 1|ours", {TIME: "1500"})), "now")
    assert counters.load(tmp_path) == {}
    counters.record(found, tmp_path)
    later = replace(found[0], us=7.5, run="later")
    counters.record([later], tmp_path)
    read = counters.load(tmp_path)
    assert list(read.values()) == [later, found[1]]
    (tmp_path / counters.FILE).write_text("op,shape\n")
    with pytest.raises(DSV4Error, match="other columns"):
        counters.load(tmp_path)


def test_the_first_row_of_every_op_is_counted_before_a_second_one():
    rows = [harness.chosen([op], "")[0][i] for op, i in (("router", 0), ("router", 1), ("rmsnorm", 0), ("rmsnorm", 1))]
    assert [row.op for row in counters.in_turn(rows)] == ["router", "rmsnorm", "router", "rmsnorm"]


def test_rows_that_find_no_time_are_named(capsys):
    rows = [harness.chosen(["router"], "")[0][0]]
    counters.calls(rows, ["ours"], seconds=-1)
    assert capsys.readouterr().out == f"{harness.NO_TIME}router {rows[0].shape}\n"


def test_counters_that_the_driver_keeps_to_itself_are_absent_and_no_failure(monkeypatch, capsys):
    said = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"
    monkeypatch.setattr(counters.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(counters.shutil, "which", lambda name: name)
    for text, code in ((said, counters.NO_PROFILER), ("==ERROR== other", 1)):
        done = counters.subprocess.CompletedProcess([], 1, stdout=text, stderr="")
        monkeypatch.setattr(counters.subprocess, "run", lambda *a, done=done, **k: done)
        assert counters.main(["--only=router"]) == code and text in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="this is what happens without a GPU")
def test_without_a_gpu_nothing_is_counted(capsys):
    assert counters.main([]) == harness.NOTHING_TIMED
    assert "no GPU" in capsys.readouterr().out


def test_the_committed_counters_are_the_ones_shown():
    assert peer_pages.written(ops_table.PAGE, ops_table.COUNTERS) == ops_table.counted()


def test_counted_rows_are_rows_of_the_bench():
    from dsv4lib.bench.ops import results

    rows = {(row.op, row.shape, one.provider) for row in results.load() for one in row.found}
    assert set(counters.load()) <= rows
