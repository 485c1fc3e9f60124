"""Replay: the schedule that changes a result is found, printed as options, and repeats the result."""

from __future__ import annotations

import io
import json
import re
import shlex

import pytest

from dsv4lib.emulator.checks import Hazard
from dsv4lib.emulator.errors import LaunchError, LimitExceeded, Place
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.sanitize import catalogue, command, launching, replay
from dsv4lib.emulator.sanitize.command import Wish
from dsv4lib.emulator.sanitize.report import Report
from dsv4lib.errors import ArgumentError
from tests.emulator.sanitize.kernels import DESCRIPTION, write

KNOWN = catalogue.reproductions()
BUILT_IN = len(POLICIES) + 2 * 2  # random and adversarial with three seeds each


def run(tmp_path, target, **options):
    settings = {"checks": "race", "time_limit": 60.0, **options.pop("settings", {})}
    options = {"replay": True, "form": "json", "output": tmp_path / "report", **options}
    code = command.run(Wish("dsv4 sanitize", str(target), [], "auto", settings, **options))
    return code, json.loads((tmp_path / "report").read_text())


def test_a_directed_schedule_is_found_and_repeats_the_result(tmp_path):
    """Under round robin S is read in time; held back, the softmax warp reads O."""
    one = KNOWN["o_over_unread_s"]
    code, report = run(tmp_path, one.description())
    assert code == 90 and report["wrong"] == {}
    found = {trial["schedule"]: trial for trial in report["replay"]}
    held = [name for name, trial in found.items() if name.startswith("hold:") and trial["wrong"]]
    line = min(one.marked()["race_tensor"] - {int(re.search(r"hold:(\d+)", held[0])[1])})
    assert held and "tcgen05.mma" in one.source.read_text().splitlines()[line - 1]
    assert not found["round_robin"]["wrong"] and found["newest_first"]["wrong"]
    code, again = run(tmp_path, one.description(), replay=False, settings={"schedule": held[0]})
    assert code == 90 and again["wrong"] == found[held[0]]["wrong"] and "replay" not in again
    facts = again["wrong"]["out"]
    assert (facts["got"], facts["want"], facts["wrong"]) == (32.0, 16.0, 32)


def test_text_prints_the_options_to_repeat_it(tmp_path, capfd):
    target = str(KNOWN["o_over_unread_s"].description())
    command.run(Wish("dsv4 sanitize", target, [], "auto", {"checks": "race"}, replay=True))
    said = capfd.readouterr().err
    options = re.search(r"  again   dsv4 sanitize (--schedule hold:\S+) --checks race \S*o_over_unread_s.toml\n", said)
    assert options and f"  {options[1]} " in said and "32.0 instead of 16.0" in said
    assert re.search(r"replay: \d+ of \d+ schedules change the result or are wrong\n", said)


def test_a_hang_is_found_under_another_schedule(tmp_path):
    code, report = run(tmp_path, KNOWN["tail_waits_for_a_phase_twice"].description())
    assert code == 90 and report["replay"][0]["stopped"] == ""
    assert [one["schedule"] for one in report["replay"] if one["stopped"].startswith("deadlock")]


def test_a_repaired_kernel_is_the_same_under_all(tmp_path, capfd):
    target = KNOWN["o_over_unread_s"].description(repaired=True)
    code, report = run(tmp_path, target)
    assert code == 0 and len(report["replay"]) == BUILT_IN
    assert not any(one["stopped"] or one["wrong"] or one["changed"] for one in report["replay"])
    command.run(Wish("dsv4 sanitize", str(target), [], "auto", {"checks": "race"}, replay=True))
    assert f"the results are the same under {BUILT_IN} schedules" in capfd.readouterr().err


def test_without_an_expectation_what_differs_from_the_first_run_is_named(tmp_path):
    write(tmp_path, text=DESCRIPTION.replace('fill = "nan"', 'fill = "zeros"'))
    code, report = run(tmp_path, tmp_path / "sum.toml")
    assert code == 90 and any(one["changed"] == ["out"] for one in report["replay"])
    assert report["replay"][0]["changed"] == []


def test_a_schedule_that_gives_what_is_expected_is_not_listed_where_the_first_is_wrong(tmp_path):
    code, report = run(tmp_path, KNOWN["next_chunk_too_early"].description())
    found = {trial["schedule"]: trial for trial in report["replay"]}
    store = min(KNOWN["next_chunk_too_early"].marked()["race_shared"])
    right = found[f"hold:{store}@1"]
    assert (
        code == 90 and found["round_robin"]["wrong"] and right == {**right, "wrong": {}, "changed": [], "stopped": ""}
    )


def test_a_clean_run_that_is_wrong_under_another_schedule_is_no_success(tmp_path):
    """Without the race detector nothing is reported; the result under another schedule is not as expected."""
    one = KNOWN["flag_before_the_data"]
    code, report = run(tmp_path, one.description(), settings={"checks": "default"})
    assert report["findings"] == [] and code == command.WRONG
    code, report = run(tmp_path, KNOWN["tail_waits_for_a_phase_twice"].description(), settings={"checks": "off"})
    assert report["findings"] == [] and code == 91


def test_both_instructions_are_held_errors_first_and_not_too_many():
    first, second = Place("k", 3, "ld", warp=1), Place("k", 4, "st")
    lint = Hazard("race_shared_same_value", "", place=Place("k", 9, "st", warp=0))
    assert replay.directed([lint, Hazard("race_shared", "", place=first, owner=second)]) == [
        "hold:3@1", "hold:4", "hold:9@0",
    ]  # fmt: skip
    many = [Hazard("race_shared", "", place=Place("k", n, "ld", warp=0)) for n in range(1, 99)]
    assert len(replay.directed(many)) == replay.MOST_DIRECTED
    assert replay.directed([Hazard("race_shared", "", place=None)]) == []


def test_a_script_is_not_replayed(tmp_path):
    (tmp_path / "some.py").write_text("")
    with pytest.raises(ArgumentError, match="replay"):
        command.run(Wish("dsv4 sanitize", str(tmp_path / "some.py"), [], "auto", {"checks": "race"}, replay=True))


def test_text_of_the_target_cannot_steer_a_terminal():
    out = io.StringIO()
    Report("a\x1b[2J.toml", [], 0, replay=[replay.Trial("random", 3, "deadlock")]).print(out, "dsv4 sanitize")
    assert "\x1b" not in out.getvalue() and "--schedule random --seed 3 'a?[2J.toml'" in out.getvalue()


def _first(tmp_path):
    """A description whose first run has a race, and what its run gives."""
    write(tmp_path)
    return tmp_path / "sum.toml"


def test_a_trial_that_cannot_be_run_loses_no_finding(tmp_path, monkeypatch):
    ran = launching.run

    def refused(*args, **settings):
        if settings.get("schedule", "round_robin") == "newest_first":
            raise LaunchError("no such\nlaunch")
        return ran(*args, **settings)

    monkeypatch.setattr(launching, "run", refused)
    code, report = run(tmp_path, _first(tmp_path))
    assert code == 90 and report["findings"] and report["refusal"] == ""
    (one,) = [trial for trial in report["replay"] if trial["schedule"] == "newest_first"]
    assert one["unfinished"] == "LaunchError: no such" and one["stopped"] == ""


def test_a_limit_of_a_trial_is_no_other_result(tmp_path, monkeypatch, capfd):
    ran = launching.run

    def limited(*args, **settings):
        outcome = ran(*args, **settings)
        if settings.get("schedule", "round_robin") == "newest_first":
            outcome.stopped = LimitExceeded("too many instructions")
        return outcome

    target = KNOWN["o_over_unread_s"].description(repaired=True)
    monkeypatch.setattr(launching, "run", limited)
    code, report = run(tmp_path, target)
    found = {trial["schedule"]: trial for trial in report["replay"]}
    assert code == 0 and found["newest_first"]["stopped"] == ""
    assert found["newest_first"]["unfinished"] == "not finished within the limit: too many instructions"
    command.run(Wish("dsv4 sanitize", str(target), [], "auto", {"checks": "race"}, replay=True))
    said = capfd.readouterr().err
    assert f"replay: the results are the same under {BUILT_IN - 1} schedules" in said
    assert re.search(r"--schedule newest_first +not finished within the limit: too many instructions\n", said)


def test_the_line_to_repeat_it_has_the_options_of_the_first_run(tmp_path, capfd):
    one = KNOWN["o_over_unread_s"]
    ptx = tmp_path / "my kernel.ptx"
    ptx.write_text(one.source.read_text())
    settings = {"checks": "sanitize", "time_limit": 60.0, "instruction_limit": 10**6, "memory_limit": None}
    wish = Wish("dsv4 sanitize", str(ptx), [], "sm_100a", settings, launch=one.description(), replay=True)
    assert command.run(wish) == 90
    again = shlex.split(re.search(r"  again   (.*)", capfd.readouterr().err)[1])
    assert again[:3] == ["dsv4", "sanitize", "--schedule"] and again[3].startswith("hold:")
    options = ["--arch", "sm_100a", "--launch", str(one.description()), "--time-limit", "60.0"]
    assert again[4:] == [*options, "--instruction-limit", "1000000", str(ptx)]


def test_a_tensor_that_only_differs_is_said_and_changes_no_exit_code(tmp_path):
    """Nothing is expected of it: which of the results is right is not known."""
    write(tmp_path, text=DESCRIPTION.replace('fill = "nan"', 'fill = "zeros"'))
    code, report = run(tmp_path, tmp_path / "sum.toml", settings={"checks": "off"})
    assert code == 0 and any(trial["changed"] == ["out"] for trial in report["replay"])
