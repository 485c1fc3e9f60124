"""What a command leaves for machines: exit codes, summary.json, junit.xml; kernels that have to run on a GPU."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from dsv4lib.errors import ArgumentError
from dsv4lib.lab.commands import command, outcome
from dsv4lib.lab.ledger import Entry
from dsv4lib.lab.records import Record
from dsv4lib.lab.report import junit, summary
from dsv4lib.lab.run import manifest, plan, runner
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import LOOKS, GateResult, Verdict, exit_code

START = datetime(2026, 1, 1, tzinfo=UTC)
GATE = GateResult("wrong", "==", 0.0, 0.0, "nothing may be wrong", 3.0, "failed")


def record(job: str = "one-00", verdict: Verdict = Verdict.PASSED, **changes: Any) -> Record:
    made = Record(
        run_id="r", job=job, attempt=0, stage=job.rpartition("-")[0], title="t", set="nightly", kind="run",
        negative="", expect_fail="", overrides={}, parameters={"backend": "auto"}, backend="reference", arch="",
        fingerprint="f", stage_fingerprint="s", versions={}, machine={}, verdict=verdict, reason="a reason",
        started=START, seconds=2.0, time_limit_s=9.0, cpu_s=1.5,
    )  # fmt: skip
    return replace(made, **changes)


def told(tmp_path: Path, records: list[Record], **changes: Any) -> summary.Told:
    facts = {"commit": "ab" * 20, "dirty": False, "label": "rack 2", "machine": {"gpu": "none"}, "versions": {}}
    made = manifest.new(tmp_path / "runs", "nightly", "f00", True, [], **facts).save(state="complete")
    return summary.Told(**{"manifest": made, "records": records, "interrupted": False, "exit_code": 0, **changes})


def ended(tmp_path: Path, records: list[Record], **changes: Any) -> outcome.Outcome:
    made = manifest.new(tmp_path / "runs", "nightly", "f00", True, [])
    result = runner.Result(made, records, changes.pop("interrupted", False))
    return outcome.Outcome(result, planned=changes.pop("planned", [r.job for r in records]), **changes)


def test_every_field_of_the_summary_is_documented_and_there(tmp_path: Path) -> None:
    documented = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", summary.__doc__ or "", re.M))))
    documented -= {"jobs[].gates"}
    made = summary.build(told(tmp_path, [record(gates=[GATE])]))
    assert documented == set(made)
    rows = (summary.__doc__ or "").split("| `jobs` | one object a job: ")[1].split("| `jobs[]")[0]
    assert set(re.findall(r"[a-z_]+", rows)) == set(made["jobs"][0])
    gates = (summary.__doc__ or "").split("| `jobs[].gates` | ")[1]
    assert set(made["jobs"][0]["gates"][0]) <= set(re.findall(r"[a-z_]+", gates))


def test_a_summary_counts_times_and_classes(tmp_path: Path) -> None:
    later = record("two-00", Verdict.SKIPPED, started=START + timedelta(seconds=60), label="b")
    made = summary.build(told(tmp_path, [record(), later], not_started=["three-00"], exit_code=25))
    assert (made["wall_s"], made["work_s"], made["cpu_s"]) == (62.0, 4.0, 3.0)
    assert (made["started"], made["ended"]) == ("2026-01-01T00:00:00.000+00:00", "2026-01-01T00:01:02.000+00:00")
    assert made["counts"] == {"passed": 1, "skipped": 1} and made["planned"] == 3
    assert (made["state"], made["exit_class"], made["machines"]) == ("interrupted", "unfinished", ["", "b"])
    empty = summary.build(told(tmp_path, [], interrupted=True, exit_code=130))
    assert (empty["started"], empty["wall_s"], empty["state"]) == (None, 0.0, "interrupted")


def test_a_summary_is_strict_json_without_private_detail(tmp_path: Path) -> None:
    metrics = {"wrong": float("nan"), "much": float("-inf")}
    text = summary.write(told(tmp_path, [record(metrics=metrics, reason="in /home/alice/x")]), tmp_path, tmp_path)
    assert "alice" not in text.read_text()
    made = json.loads(text.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert made["jobs"][0]["metrics"] == {"wrong": "nan", "much": "-inf"}


@pytest.mark.parametrize("verdict", list(Verdict))
def test_junit_has_a_case_for_each_class(tmp_path: Path, verdict: Verdict) -> None:
    tree = junit.build(told(tmp_path, [record(verdict=verdict, gates=[GATE])]))
    (case,) = tree.iter("testcase")
    assert (case.get("classname"), case.get("name"), case.get("time")) == ("dsv4.one", "one-00", "2.000")
    wrong = verdict in (Verdict.GATE_FAILED, Verdict.ASSERTION, Verdict.STAYED_GREEN)
    expected = {Verdict.PASSED: [], Verdict.SKIPPED: ["skipped"]}.get(verdict, ["failure" if wrong else "error"])
    assert [child.tag for child in case] == expected
    for child in case:
        assert child.get("message") == f"{LOOKS[verdict].label}: a reason"
        assert child.text == "wrong = 3.0 (== 0): failed"


def test_junit_counts_what_it_lists(tmp_path: Path) -> None:
    red = record("red-00", Verdict.GATE_FAILED)
    known = {"flaky-00": Entry("stage flaky", "16", START.date(), START.date(), "a race")}
    jobs = [record(), red, record("dead-00", Verdict.CRASH), record("flaky-00", Verdict.ERROR)]
    made = told(
        tmp_path, jobs, known=known, missing=['["gone", "run", "", {}]'], not_started=["late-00"],
        not_native=["one-00"],
    )  # fmt: skip
    path = junit.write(made, tmp_path, tmp_path)
    suites = ElementTree.parse(path).getroot()
    for element in (suites, suites[0]):
        counts = {name: int(element.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
        assert counts == {"tests": 7, "failures": 3, "errors": 1, "skipped": 2}
    messages = {case.get("name"): child.get("message") for case in suites.iter("testcase") for child in case}
    assert "issue 16" in messages["flaky-00"] and messages["late-00"] == "not started"
    properties = {p.get("name"): p.get("value") for p in suites.iter("property")}
    assert properties["commit"] == "ab" * 20 and properties["machine.gpu"] == "none"


def test_junit_survives_characters_that_xml_lacks(tmp_path: Path) -> None:
    evil = "\x00\x1b[31m<b>&\ud800\ufffe\U0001f600 /home/alice/x"
    path = junit.write(told(tmp_path, [record(verdict=Verdict.ERROR, reason=evil)]), tmp_path, tmp_path)
    (error,) = ElementTree.parse(path).getroot().iter("error")
    said = error.get("message") or ""
    assert "<b>&" in said and "\U0001f600" in said and "alice" not in said


def test_the_exit_code_names_the_worst(tmp_path: Path) -> None:
    good, red, skipped = record(), record("red-00", Verdict.GATE_FAILED), record("no-00", Verdict.SKIPPED)
    known = {"red-00": Entry("stage red", "16", START.date(), START.date(), "a race")}
    kernel = record("k-00", arch="sm_100a", backend="emulator")
    for records, changes, code in (
        ([good], {}, 0),
        ([good, red], {}, 10),
        ([good, red], {"known": known}, 0),
        ([good, skipped], {}, 0),
        ([skipped], {}, 20),
        ([good], {"missing": ["x"]}, 19),
        ([good], {"planned": ["one-00", "two-00"], "missing": ["x"]}, 25),
        ([good, kernel], {}, 0),
        ([good, kernel], {"required": "native", "planned": ["one-00", "k-00", "z-00"]}, 24),
        ([good, kernel, red], {"required": "native"}, 10),
        ([good, red], {"interrupted": True}, 130),
    ):
        assert ended(tmp_path, records, **changes).code == code, (code, changes)
    assert exit_code([Verdict.PASSED], not_native=True, unfinished=True) == 24


@pytest.mark.parametrize(
    ("changes", "native"),
    [
        ({"backend": "native"}, True),
        ({"backend": "native", "verdict": Verdict.SKIPPED}, False),
        ({"backend": "native", "verdict": Verdict.GATE_FAILED}, True),  # red, but it ran there
        ({"backend": "emulator"}, False),
        ({"backend": "", "verdict": Verdict.SKIPPED}, False),
        ({"backend": "emulator", "parameters": {}}, False),
        ({"backend": "emulator", "parameters": {"backend": "emulator"}}, True),  # chosen
        ({"backend": "emulator", "arch": ""}, True),  # no kernel
        ({"backend": "emulator", "set": "b200"}, False),
        ({"backend": "emulator", "set": "b200", "arch": "sm_90a"}, True),  # no B200 runs it
        ({"backend": "emulator", "set": "hopper", "arch": "sm_90a"}, False),
        ({"backend": "emulator", "set": "hopper"}, True),
        ({"backend": "native", "set": "hopper", "arch": "sm_90a"}, True),
        ({"backend": "native", "set": "b200", "arch": "sm_103a"}, True),
        ({"backend": "native", "set": "hopper", "archs": ["sm_90a"]}, False),  # as SM100
        ({"backend": "native", "set": "b200", "arch": "sm_90a", "archs": ["sm_100a"]}, False),
        ({"backend": "emulator", "set": "hopper", "archs": ["sm_90a"]}, False),  # as SM100, in the emulator
    ],
)
def test_which_jobs_had_to_run_natively(tmp_path: Path, changes: dict[str, Any], native: bool) -> None:
    one = record(**{"arch": "sm_100a", **changes})
    assert ended(tmp_path, [one], required="native").not_native == ([] if native else ["one-00"])
    assert ended(tmp_path, [one]).not_native == []


@pytest.mark.parametrize("gpu", ["sm_100a", "sm_90a"])
def test_a_second_architecture_counts_where_the_set_names_its_gpu(
    gpu: str, make: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No set that names none, and no negative, runs on a Hopper as SM90 what it runs elsewhere as SM100."""

    def status(name: str, arch: str = "sm_100a") -> plan.backends.Status:
        return plan.backends.Status(name, name != "native" or arch == gpu, "as this test says")

    monkeypatch.setattr(plan.backends, "status", status)
    one = {"time_limit_s": 9, "runs": [{}]}
    stage = make(
        "one", kernel=True, also=["sm_90a"], sets={name: one for name in ("quick", "nightly", "b200", "hopper")}
    )
    blackwell = gpu == "sm_100a"
    for name in ("quick", "nightly", "b200", "hopper"):
        (job,) = plan.make([stage], name)
        native = blackwell != (name == "hopper")
        assert job.backend == ("native" if native else "emulator"), name
        assert plan.resolve_here(replace(job, backend=""), stage).backend == job.backend
        assert runner._arch(job, stage) == (gpu if native else "sm_100a")
        (chosen,) = plan.make([stage], name, backend="native")
        assert (chosen.backend, bool(chosen.unavailable)) == (("native", False) if native else ("", True))
        for negative in plan.make([stage], name, negatives=True):
            assert negative.backend == ("native" if blackwell else "emulator")
            assert runner._archs(negative, stage) == ("sm_100a",)
    (negative, *_) = plan.make([stage], "hopper", negatives=True)
    command.want_gpu([negative], [stage], command.Wish(set_name="hopper"))  # none that a Hopper has to run
    if blackwell:
        with pytest.raises(command.MissingGpu, match="hopper needs a GPU for one:"):
            command.want_gpu(plan.make([stage], "hopper"), [stage], command.Wish(set_name="hopper"))


def run(root: Path, **wish: Any) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=400)
    code = command.run(command.Wish(**wish), console, root)
    return code, console.file.getvalue()  # type: ignore[attr-defined]


def left(root: Path) -> dict[str, Any]:
    (*_, newest) = sorted(root.glob("data/runs/*/report/summary.json"))
    assert (newest.parent / "junit.xml").is_file()
    return json.loads(newest.read_text())


def test_a_skipped_native_stage_fails_a_run_that_requires_it(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make("plain")
    make("one", kernel=True)
    assert run(tmp_path)[0] == 0
    code, said = run(tmp_path, require="native")
    assert code == 24 and "not native, which was required: one-00" in said
    made = left(tmp_path)
    assert (made["exit_class"], made["required"], made["not_native"]) == ("not native", "native", ["one-00"])
    monkeypatch.setattr(plan.backends, "resolve", lambda name, arch, kernel: "native" if kernel else "reference")
    assert run(tmp_path, require="native")[0] == 0
    without_kernels["one"] = {"metrics": {}, "skipped": {"wrong": "the GPU is busy"}}
    assert run(tmp_path, set_name="b200")[0] == 24  # its default
    assert run(tmp_path, set_name="b200", without_gpu=True)[0] == 0
    with pytest.raises(ArgumentError, match="native or none"):
        run(tmp_path, require="natively")


def test_the_set_hopper_has_the_stages_that_name_it(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = {"time_limit_s": 9, "runs": [{}]}
    needed = {name: one for name in ("quick", "nightly", "b200")}
    make("plain")
    with pytest.raises(command.DSV4Error, match="no stage has a set hopper"):
        run(tmp_path, set_name="hopper")
    make("hop", kernel=True, arch="sm_90a", sets={**needed, "hopper": one})
    make("both", kernel=True)
    make("either", kernel=True, also=["sm_90a"], sets={**needed, "hopper": one})
    with pytest.raises(command.MissingGpu, match="hopper needs a GPU for either, hop:"):
        run(tmp_path, set_name="hopper")
    native = {"sm_90a": "native", "sm_100a": "emulator"}

    def resolve(name: str, archs: tuple[str, ...], kernel: bool) -> str:
        return ("native" if "native" in {native[arch] for arch in archs} else "emulator") if kernel else "reference"

    monkeypatch.setattr(plan.backends, "resolve", resolve)
    monkeypatch.setattr(plan.backends, "runs", lambda name, archs: next(arch for arch in archs if native[arch] == name))
    assert run(tmp_path, set_name="hopper")[0] == 0
    made = left(tmp_path)
    assert [job["job"] for job in made["jobs"]] == ["either-00", "hop-00"]
    assert {job["arch"] for job in made["jobs"]} == {"sm_90a"}
    with pytest.raises(command.MissingGpu, match="b200 needs a GPU for both:"):
        run(tmp_path, set_name="b200", stages=["both", "hop"])  # `hop`, which no B200 runs, does not matter
    native.update(sm_90a="emulator", sm_100a="native")
    assert run(tmp_path, set_name="b200")[0] == 0


def test_a_known_flaky_stage_is_in_the_summary(
    make: Callable[..., Stage], tmp_path: Path, without_kernels: dict[str, Any]
) -> None:
    make("one")
    make("two")
    without_kernels["one"] = {"verdict": Verdict.CRASH}
    today = datetime.now(UTC).date()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "flaky.toml").write_text(
        f'[[flaky]]\nwhat = "stage one"\nissue = "16"\nsince = {today}\nexpires = {today}\nreason = "a race"\n'
    )
    assert run(tmp_path)[0] == 0
    made = left(tmp_path)
    assert made["known_flaky"] == [{"job": "one-00", "issue": "16", "expires": str(today)}]
    assert made["counts"] == {"crash": 1, "passed": 1}


def test_told_has_the_fields_of_an_outcome() -> None:
    own = {"manifest", "records", "interrupted", "exit_code", "not_started", "not_native"}
    assert {f.name for f in fields(summary.Told)} - own <= {f.name for f in fields(outcome.Outcome)}
