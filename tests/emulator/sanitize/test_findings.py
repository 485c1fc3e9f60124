"""Reports: one finding for a cause, both accesses with their source, the fix; text, JSON and SARIF."""

import io
import json
import re

import numpy as np
import pytest

from dsv4lib.emulator import gpu
from dsv4lib.emulator.checks import KINDS, Hazard
from dsv4lib.emulator.errors import Deadlock, HazardError, LimitExceeded, MemoryFault, Place
from dsv4lib.emulator.gpu.names import demangled, shortened
from dsv4lib.emulator.sanitize import findings
from dsv4lib.emulator.sanitize.findings import group, source_line
from dsv4lib.emulator.sanitize.report import Report
from tests.emulator.sanitize.kernels import SOURCE, racy


@pytest.fixture
def hazards(tmp_path):
    """The races of `kernels.racy`: both loads of line 4 read what line 3 stores, before or after."""
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    found = gpu.load(racy(tmp_path)).kernel().launch(1, 64, [x, out], checks="race").hazards
    assert len(found) > 1 and {h.kind for h in found} == {"race_shared"}
    return found


def printed(report):
    out = io.StringIO()
    report.print(out, "dsv4 sanitize")
    return out.getvalue()


def test_one_finding_for_a_pair_of_source_lines(hazards, tmp_path):
    (one,) = group(hazards)
    assert one.count == sum(h.count for h in hazards) and len(one.instructions) == len(hazards)
    assert one.title in ("sum(float const*, float*)", "_Z3sumPKfPf") and one.severity == "error"
    assert one.fix == KINDS["race_shared"].fix + " (here: __syncthreads())"
    lines = SOURCE.splitlines()
    assert {(one.place.line, one.place.text), (one.against.line, one.against.text)} == {
        (3, lines[2].strip()),
        (4, lines[3].strip()),
    }
    assert set(one.verbs) == {"reads", "writes"}
    verb, text = (one.verbs[0], one.place.text) if "reads" in one.verbs[0] else (one.verbs[1], one.against.text)
    assert verb == "reads" and "s[threadIdx.x ^ 32]" in text


def test_without_line_info_the_ptx_line_tells_them_apart(hazards, tmp_path):
    text = re.sub(r"\.loc .*|\.file .*", "", racy(tmp_path))
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    found = group(gpu.load(text).kernel().launch(1, 64, [x, out], checks="race").hazards)
    assert len(found) == 2 and all(one.place.where.startswith("PTX line") for one in found)


def test_text_has_both_accesses_and_the_fix_and_no_colour_in_a_file(hazards):
    text = printed(Report("sum.ptx", group(hazards), 90))
    for part in (
        "ERROR race_shared: ",
        "sum.cu:3",
        "sum.cu:4",
        "st.shared.f32",
        "ld.shared.f32",
        "CTA (0, 0, 0), warp",
    ):
        assert part in text
    assert f"  fix     {KINDS['race_shared'].fix} (here: __syncthreads())\n" in text and "1 error, 0 lints" in text
    assert "\x1b" not in text and "  reads   " in text and "  writes  " in text


def test_text_is_coloured_on_a_terminal(hazards, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    Report("sum.ptx", group(hazards), 90).print(out, "dsv4 sanitize")
    assert "\x1b[" in out.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    Report("sum.ptx", group(hazards), 90).print(out, "dsv4 sanitize")
    assert "\x1b[3" not in out.getvalue() and "[31m" not in out.getvalue()


@pytest.mark.parametrize("kind", [Deadlock, HazardError, LimitExceeded, MemoryFault])
def test_what_stops_a_launch_comes_first(hazards, kind):
    place = Place("k", 7, "ld.global.f32 %f1, [%rd1]", cta=(1, 0, 0), warp=2, lanes=4)
    first, *rest = group(hazards, kind("all is lost", place))
    assert len(rest) == 1 and first.severity == "error" and first.fix and first.message == "all is lost"
    assert first.place.threads == "CTA (1, 0, 0), warp 2, lane 2"
    fatal = group([], HazardError("race_shared: two writes", place))
    assert fatal[0].kind == "race_shared" and fatal[0].message == "two writes"


def test_errors_come_before_lints_and_unknown_kinds_are_errors():
    order = [one.kind for one in group([Hazard("tmem_lane_quarter", "a", None), Hazard("new_kind", "b", None)])]
    assert order == ["new_kind", "tmem_lane_quarter"]


def test_hazards_without_place_are_told_apart_by_their_message():
    assert (
        len(group([Hazard("tmem_leak", "a", None), Hazard("tmem_leak", "b", None), Hazard("tmem_leak", "a", None)]))
        == 2
    )


def test_names_and_texts_of_hostile_files_cannot_steer_a_terminal(tmp_path):
    (tmp_path / "a.cu").write_text("\x1b[31mred\x07\n")
    place = Place("k\x1b[2J", 1, "nop\x1b]0;title\x07", f"{tmp_path}/a.cu:1")
    text = printed(Report("x", group([Hazard("race_shared", "\x1b[H", place)]), 90))
    assert "\x1b" not in text and "\x07" not in text and "[31mred" in text


def test_only_sources_are_read(tmp_path):
    """PTX names the files whose lines are shown: it must not make a report quote anything else."""
    for name in ("secret", "secret.txt", "id_rsa"):
        (tmp_path / name).write_text("hidden\n")
        assert source_line(str(tmp_path / name), 1) == ""
    (tmp_path / "k.cu").write_text("seen\n")
    assert source_line(str(tmp_path / "k.cu"), 1) == "seen" and source_line(str(tmp_path / "k.cu"), 2) == ""
    assert source_line("a\0b.cu", 1) == "" and source_line(str(tmp_path), 1) == ""


def test_demangled_names():
    assert demangled("_Z3sumPKfPf") in ("sum(float const*, float*)", "_Z3sumPKfPf")  # the latter without libstdc++
    assert demangled("_Zx") == "_Zx" and demangled("k") == "k"
    assert shortened("kernel_cutlass_scale_tensorptrf32gmemo321_tensor2_0") == "scale"
    assert len(shortened("_Z" + "9" * 200)) == 100


# --- SARIF ------------------------------------------------------------------------------------------------------------


def check_sarif(log):
    """What the specification requires of the objects that are used (chapter 3, properties marked SHALL)."""
    assert log["version"] == "2.1.0" and log["$schema"].endswith("sarif-schema-2.1.0.json")
    for run in log["runs"]:
        driver = run["tool"]["driver"]
        assert driver["name"]
        ids = [rule["id"] for rule in driver["rules"]]
        assert len(set(ids)) == len(ids)
        for rule in driver["rules"]:
            assert rule["shortDescription"]["text"] and rule["help"]["text"]
            assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
        for invocation in run["invocations"]:
            assert isinstance(invocation["executionSuccessful"], bool)
        for result in run["results"]:
            assert result["message"]["text"] and result["level"] in ("none", "note", "warning", "error")
            assert "ruleIndex" not in result or ids[result["ruleIndex"]] == result["ruleId"]
            assert result.get("occurrenceCount", 1) >= 1
            for place in (*result["locations"], *result.get("relatedLocations", ())):
                assert "physicalLocation" in place or place["logicalLocations"]
                if "physicalLocation" in place:
                    assert re.fullmatch(r"[!-~]+", place["physicalLocation"]["artifactLocation"]["uri"])
                    assert place["physicalLocation"]["region"]["startLine"] >= 1
    json.dumps(log, allow_nan=False)


def test_sarif_has_what_the_standard_requires(hazards, tmp_path):
    lint = Hazard("tmem_lane_quarter", "a lint", Place("k", 3, "nop"))
    found = group([*hazards, lint, Hazard("tmem_leak", "no place", None)], Deadlock("stuck"))
    wrong = {"out": {"wrong": 2, "index": (0,), "got": float("nan"), "want": 1.0, "largest": float("inf")}}
    log = Report("sum.ptx", found, 91, ptx="a b.ptx", wrong=wrong).as_sarif()
    check_sarif(log)
    levels = [result["level"] for result in log["runs"][0]["results"]]
    assert levels == ["error", "error", "error", "note", "error"]
    race = next(r for r in log["runs"][0]["results"] if r["ruleId"] == "race_shared")
    uris = {p["physicalLocation"]["artifactLocation"]["uri"] for p in race["locations"] + race["relatedLocations"]}
    assert uris == {(tmp_path / "sum.cu").as_uri()} and "Fix: " in race["message"]["text"]
    without = next(r for r in log["runs"][0]["results"] if r["ruleId"] == "tmem_lane_quarter")
    assert without["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b.ptx"


def test_a_clean_sarif_log_has_no_results():
    log = Report("sum.ptx", [], 0).as_sarif()
    check_sarif(log)
    assert log["runs"][0]["results"] == []


def test_fingerprints_survive_other_line_numbers(hazards, tmp_path):
    (before,) = Report("x", group(hazards), 90).as_sarif()["runs"][0]["results"]
    findings.source_lines.cache_clear()
    text = racy(tmp_path).replace(".loc 1 3", ".loc 1 4").replace(".loc 1 4 1\n  xor", ".loc 1 5 1\n  xor")
    (tmp_path / "sum.cu").write_text("// moved\n" + SOURCE)
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    moved = gpu.load(text).kernel().launch(1, 64, [x, out], checks="race").hazards
    (after,) = Report("x", group(moved), 90).as_sarif()["runs"][0]["results"]
    assert after["partialFingerprints"] == before["partialFingerprints"]
    assert after["locations"] != before["locations"]


def test_json_is_json_also_with_numbers_that_it_lacks(tmp_path):
    path = tmp_path / "report.json"
    tensors = {"x": {"first": [float("nan"), float("-inf")]}}
    Report("x", [], 0, tensors=tensors).write("json", path, "dsv4 sanitize")
    assert json.loads(path.read_text())["tensors"]["x"]["first"] == ["nan", "-inf"]
