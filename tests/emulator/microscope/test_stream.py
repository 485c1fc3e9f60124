"""An event stream against the trace that it is made of: every column, what is cut, the moments of findings."""

from __future__ import annotations

import json
import linecache
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dsv4lib.emulator import gpu
from dsv4lib.emulator.checks import errors
from dsv4lib.emulator.microscope import code
from dsv4lib.emulator.microscope.collect import LAUNCHES, Collector, shares
from dsv4lib.emulator.microscope.columns import decode, encode, encode_words
from dsv4lib.emulator.microscope.stream import LIMIT, TABLES, stream
from dsv4lib.emulator.sanitize.findings import group, source_lines
from dsv4lib.emulator.trace.trace import Trace, unpack_lanes
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.gemm_tile import faults
from dsv4lib.pages.common.run_gemm import run_gemm
from tests.emulator.sanitize.kernels import racy

COLUMNS = [
    ([], "all"),
    ([7] * 50, "all"),
    (list(range(1000, 1900, 3)), "steps"),
    ([5] * 300 + [1] * 200, "runs"),
    ([3, 900000, 3, 12, 900000, 4, 5], "values"),
    ([True, False, False, True], "values"),
]


@pytest.mark.parametrize(("values", "way"), COLUMNS)
def test_columns_come_back(values, way):
    coded = json.loads(json.dumps(encode(np.array(values, np.int64))))
    assert way in coded and decode(coded) == [int(value) for value in values]


def test_words_come_back_and_others_are_refused():
    words = ["tma", "mma", "tma", "<b>", "mma"]
    assert decode(json.loads(json.dumps(encode_words(words)))) == words
    with pytest.raises(ArgumentError, match="values"):
        encode(np.array([0.5]))
    with pytest.raises(ArgumentError, match="column"):
        decode({"other": []})


@pytest.fixture(scope="module")
def gemm():
    """A GEMM of several CTAs that hands its stages back too early."""
    return run_gemm(faults.FAULTS["early_release"], (200, 136, 456), ("bf16", "fp32", 128, 2))


def spread(runs: list[int]) -> list[int]:
    return [n for first, count in zip(runs[::2], runs[1::2], strict=True) for n in range(first, first + count)]


def test_every_column_is_the_trace_s(gemm):
    trace = gemm.trace
    made = json.loads(json.dumps(stream(trace, gemm.hazards, arch="sm_100a")))
    assert made["cut"]["kept"] == made["cut"]["events"] == sum(len(getattr(trace, name)) for name in TABLES)
    assert made["cut"]["part"] is None and made["cut"]["shown"] == [0, 1, 2, 3] and made["arch"] == "sm_100a"
    compared = Counter()
    for name, table in made["tables"].items():
        array = getattr(trace, name)
        assert table["rows"] == len(array)
        for column, coded in table["columns"].items():
            if column in array.dtype.names and column != "lanes":
                assert decode(coded) == array[column].tolist(), (name, column)
                compared[name] += 1
    assert min(compared[name] for name in TABLES) >= 4, compared
    columns = {name: table["columns"] for name, table in made["tables"].items()}
    for row, number in enumerate(decode(columns["smem"]["chunks"])):
        assert spread(made["chunks"][number]) == np.unique(trace.chunks[row]).tolist()
    for row, number in enumerate(decode(columns["tmem"]["lanes"])):
        assert spread(made["lanes"][number]) == np.nonzero(unpack_lanes(trace.tmem["lanes"][row]))[0].tolist()
    assert decode(columns["ops"]["label"]) == trace.labels
    assert decode(columns["boxes"]["box"])[0].startswith("(0, 0) of a tensor (456, 200), box (64, 128)")


def test_lines_of_ptx_and_source(gemm):
    trace, made = gemm.trace, stream(gemm.trace, gemm.hazards)
    ptx = made["ptx"]
    assert decode(ptx["line"]) == trace.lines.tolist() and len(ptx["text"]) == len(trace.texts)
    for text, whole in zip(ptx["text"], trace.texts, strict=True):
        assert text == whole.replace(f"{trace.kernel}_param_", "param_") or len(text) == 240
    assert decode(ptx["executed"]) == trace.executed.tolist()
    files = {one["name"]: dict(zip(decode(one["line"]), one["text"], strict=True)) for one in made["files"]}
    assert {name.rpartition("/")[2] for name in files} == {"sm100.py", "faults.py"}
    for source, name, number in zip(trace.sources, decode(ptx["file"]), decode(ptx["number"]), strict=True):
        if source:
            path, _, line = source.rpartition(":")
            assert path.endswith(name) and int(line) == number
            assert files[name][number] == open(path).read().splitlines()[number - 1]


def test_long_ptx_is_listed_where_something_happens(gemm, monkeypatch):
    monkeypatch.setattr(code, "MAX_PTX", 1000)
    made = stream(gemm.trace, gemm.hazards)
    listed = decode(made["ptx"]["line"])
    assert len(listed) < made["ptx"]["total"] == len(gemm.trace.lines)
    assert {line for line in gemm.trace.marks["line"].tolist() if line > 0} <= set(listed)


def test_findings_have_the_moment_of_their_first_report(gemm):
    made = stream(gemm.trace, gemm.hazards)
    assert [(one["kind"], one["count"]) for one in made["findings"]] == [
        (one.kind, one.count) for one in group(gemm.hazards)
    ]
    finding, first = made["findings"][0], gemm.trace.hazards[0]
    assert [finding[name] for name in ("event", "time", "cta", "warp")] == [
        int(first[name]) for name in ("event", "time", "cta", "warp")
    ]
    hazard = gemm.hazards[0]
    assert (finding["place"]["ptx_line"], finding["against"]["ptx_line"]) == (
        hazard.place.ptx_line,
        hazard.owner.ptx_line,
    )
    written = gemm.trace.smem[(gemm.trace.smem["event"] >= first["event"]) & (gemm.trace.smem["cta"] == 0)][0]
    assert written["write"] and written["line"] == first["line"]  # the copy that overwrites the stage is completing


@pytest.mark.parametrize("limit", [100, 300, 600, 1500])
def test_a_cut_keeps_its_limit_and_what_still_shows(gemm, limit):
    trace = gemm.trace
    made = stream(trace, gemm.hazards, limit=limit)
    cut = made["cut"]
    assert cut["kept"] == sum(table["rows"] for table in made["tables"].values()) <= limit < cut["events"]
    assert 0.7 * limit <= cut["kept"] or cut["part"] is None
    if cut["part"] is None:
        for name, table in made["tables"].items():
            assert table["rows"] == np.isin(getattr(trace, name)["cta"], cut["shown"]).sum()
        return
    assert made["findings"][0]["time"] >= cut["part"]["first"]


def test_what_still_shows_is_kept(gemm):
    """A span late in the launch: barriers, cells and bytes are those of the whole trace when it begins."""
    late = gemm.trace.hazards[-1:].copy()
    late["time"] = 1200  # MMAs have written, copies are in flight
    trace = replace(gemm.trace, hazards=late)
    made = stream(trace, gemm.hazards, limit=150)
    begin = made["cut"]["part"]["first"]
    mine = trace.mbarriers[(trace.mbarriers["cta"] == 0) & (trace.mbarriers["time"] < begin)]
    event = int(mine["event"][-1])
    columns = {name: table["columns"] for name, table in made["tables"].items()}
    rows = list(zip(*(decode(columns["mbarriers"][n]) for n in ("event", "offset", "phase", "pending")), strict=True))
    shown = {offset: (phase, pending) for e, offset, phase, pending in rows if e <= event}
    assert shown == {o: (int(r["phase"]), int(r["pending"])) for o, r in trace.mbarriers_at(event).items()} != {}
    for name, last in (("tmem", trace.tmem_at(event)), ("smem", trace.smem_at(event))):
        needed = set(getattr(trace, name)["event"][np.unique(last[last >= 0])].tolist())
        assert needed and needed <= set(decode(columns[name]["event"])), name
    flying = trace.ops[(trace.ops["cta"] == 0) & (trace.ops["time"] < begin) & (trace.ops["done_time"] > begin)]
    assert len(flying) and set(flying["event"].tolist()) <= set(decode(columns["ops"]["event"]))
    stands = {w: trace.marks[(trace.marks["cta"] == 0) & (trace.marks["warp"] == w)] for w in range(6)}
    before = {(w, int(m["time"][m["time"] < begin][-1])) for w, m in stands.items()}
    assert before <= set(zip(decode(columns["marks"]["warp"]), decode(columns["marks"]["time"]), strict=True))


def test_of_more_than_fits_that_still_shows_the_newest_stay(gemm):
    """Every byte of shared memory was last written by an access of its own."""
    late = gemm.trace.hazards[-1:].copy()
    late["cta"], late["time"] = 0, gemm.trace.time
    written = np.repeat(gemm.trace.smem[:1], 400)
    written["cta"], written["time"], written["first"] = 0, np.arange(400) % 50, np.arange(400)
    chunks = np.repeat(gemm.trace.chunks[:1], 400, 0)
    made = stream(replace(gemm.trace, hazards=late, smem=written, chunks=chunks), limit=100)
    cut, smem = made["cut"], made["tables"]["smem"]
    assert cut["kept"] == 100 and cut["part"]["lost"] >= 300 and smem["rows"] < 100
    times = decode(smem["columns"]["time"])
    assert not times or min(times) >= 40
    assert stream(gemm.trace, gemm.hazards, limit=300)["cut"]["part"]["lost"] == 0


def test_a_limit_of_nothing_is_refused(gemm):
    with pytest.raises(ArgumentError, match="limit"):
        stream(gemm.trace, limit=99)


def launched(folder, barrier, times):
    module = gpu.load(racy(folder, barrier), checks="race")
    collector = Collector(module.device)
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    for _ in range(times):
        module.kernel().launch(1, 64, [x, out])
    return collector


def test_a_collector_keeps_the_first_launches_and_those_with_errors(tmp_path):
    collector = launched(tmp_path, True, LAUNCHES + 3)
    assert [one.number for one in collector.kept] == list(range(1, LAUNCHES + 1))
    bad = launched(tmp_path, False, 1).kept[0]
    assert bad.matters and errors(bad.hazards)
    collector._keep(bad)
    assert len(collector.kept) == LAUNCHES and collector.kept[-1] is bad
    made = collector.streams()
    assert [one["left_out"] for one in made] == [3] * LAUNCHES and made[0]["block"] == [64, 1, 1]
    assert made[-1]["findings"][0]["place"]["file"].endswith("sum.cu") and not made[0]["findings"]


def test_the_listings_of_all_launches_are_within_one_limit(tmp_path, monkeypatch):
    collector = launched(tmp_path, True, 3)
    most = sum(map(len, collector.kept[0].trace.texts))
    calls = []
    monkeypatch.setattr(code, "MAX_PTX", 3 * most)
    assert all(one["ptx"]["total"] == len(one["ptx"]["text"]) for one in collector.streams())
    monkeypatch.setattr(code, "listing", lambda trace, lines, places, most: calls.append(most) or {})
    collector.streams()
    collector.streams(LIMIT // 2)
    assert calls == [most] * 3 + [most // 2] * 3


def test_limits_are_divided():
    assert shares([10, 500, 700], 610) == [10, 300, 300] and shares([], 5) == []
    assert shares([100, 100], 1000) == [100, 100]


def test_paths_tell_of_no_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert code.shown(str(tmp_path / "a" / "k.py")) == "a/k.py"
    assert code.shown("/" + "home/someone/work/kernels/k.py") == "kernels/k.py"


def test_a_notebook_s_cell_is_a_source_and_a_file_of_that_folder_is_none(tmp_path, monkeypatch):
    folder = tmp_path / "ipykernel_7"
    folder.mkdir()
    cell, other = str(folder / "1234567.py"), folder / "secret.py"
    other.write_text("secret")
    monkeypatch.setitem(linecache.cache, cell, (9, None, ["a = 1\n", "b = 2\n"], cell))
    assert source_lines(cell) == ("a = 1", "b = 2") and source_lines(str(other)) == ()
    assert code.shown(cell) == "notebook cell 1234"


def test_traces_name_services_in_order(gemm):
    trace: Trace = gemm.trace
    marks = trace.marks[(trace.marks["cta"] == 0) & (trace.marks["warp"] == 5)]
    assert (np.diff(marks["time"]) >= 0).all() and (np.diff(marks["line"]) != 0).all()
    names = dict(zip(trace.lines.tolist(), trace.opcodes.tolist(), strict=True))
    assert sum(names[line].startswith("cp.async.bulk.tensor") for line in marks["line"].tolist()) == 16
