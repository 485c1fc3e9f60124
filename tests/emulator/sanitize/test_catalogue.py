"""Reproductions of the findings: each is reported at its lines under its schedule, each repaired twin is silent."""

from __future__ import annotations

import json
import re

import pytest

from dsv4lib.emulator.checks import KINDS
from dsv4lib.emulator.machine import directed
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.sanitize import catalogue, command
from dsv4lib.emulator.sanitize.command import Wish
from tests.cases import cases

ROWS, KNOWN = catalogue.findings(), catalogue.reproductions()
SCHEDULES = [*((name, 0) for name in POLICIES), ("random", 1), ("adversarial", 1)]
PAGE = catalogue.PAGE.read_text()
SCRIPT = catalogue.FOLDER / "row_max_exchange.py"
SUM = catalogue.FOLDER / "sum_over_unread_maximum.py"


def sanitized(tmp_path, name, schedule, seed, repaired=False):
    """Exit code and report of a reproduction or of its twin."""
    output = tmp_path / "report.json"
    target = str(KNOWN[name].description(repaired))
    settings = {"checks": "race", "schedule": schedule, "seed": seed, "time_limit": 60.0}
    code = command.run(Wish("dsv4 sanitize", target, [], "auto", settings, form="json", output=output))
    return code, json.loads(output.read_text())


def lines(report):
    """PTX lines of all findings, by kind."""
    found: dict[str, set[int]] = {}
    for one in report["findings"]:
        found.setdefault(one["kind"], set()).update(line for pair in one["instructions"] for line in pair if line)
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_it_is_reported_at_the_lines_that_it_marks(tmp_path, name):
    one = KNOWN[name]
    code, report = sanitized(tmp_path, name, one.schedule, one.seed)
    assert lines(report) == one.marked() and set(one.marked()) == set(one.kinds)
    stops = [kind for kind in one.kinds if kind not in KINDS]
    errors = [kind for kind in one.kinds if kind in KINDS and KINDS[kind].severity == "error"]
    assert code == (91 if stops else 90 if errors else 0)


@pytest.mark.parametrize("name", [name for name, one in KNOWN.items() if one.changes])
def test_it_changes_what_it_says_under_its_schedule(tmp_path, name):
    one = KNOWN[name]
    code, report = sanitized(tmp_path, name, one.changed_by, one.changed_seed)
    if one.changes == "numbers":
        assert code == 90 and set(report["wrong"]) == {"out"}
    else:
        assert code == 91 and report["findings"][0]["kind"] == {"hang": "deadlock", "stops": "stopped"}[one.changes]


def twins():
    """Each repaired twin under the schedules of its defect; under all others too in the full set."""
    for one in KNOWN.values():
        own = dict.fromkeys([(one.schedule, one.seed), (one.changed_by or "round_robin", one.changed_seed)])
        yield from ((one.name, *item) for item in own)


OWN = list(twins())
REST = [(name, *item) for name in KNOWN for item in SCHEDULES if (name, *item) not in OWN]


@pytest.mark.parametrize(("name", "schedule", "seed"), cases(*OWN, full=REST))
def test_its_repaired_twin_is_silent_and_right(tmp_path, name, schedule, seed):
    code, report = sanitized(tmp_path, name, schedule, seed, repaired=True)
    assert (code, report["findings"], report["wrong"], report["refusal"]) == (0, [], {}, "")
    assert len(report["launches"]) == 1


@pytest.mark.parametrize(
    ("name", "schedule", "seed"),
    cases(full=[(name, *item) for name, one in KNOWN.items() if not one.changes for item in SCHEDULES]),
)
def test_nothing_changes_the_result_where_nothing_is_said_to(tmp_path, name, schedule, seed):
    code, report = sanitized(tmp_path, name, schedule, seed)
    assert code in (0, 90) and report["wrong"] == {}


@pytest.mark.parametrize("repaired", [False, True])
def test_the_script_in_the_cute_dsl_and_its_twin(tmp_path, capfd, repaired):
    """The same cause in the language of its package: both source lines, and the fix by its name there."""
    pytest.importorskip("cutlass.cute")
    marked = {i for i, line in enumerate(SCRIPT.read_text().splitlines(), 1) if "# reported" in line}
    output, held = tmp_path / "report.json", f"hold:{SCRIPT.name}:{max(marked)}@0"
    given = ["repaired"] if repaired else []
    settings = {"checks": "race", "schedule": held, "time_limit": 60.0}
    code = command.run(Wish("dsv4 sanitize", str(SCRIPT), given, "sm_100a", settings, form="json", output=output))
    said, report = capfd.readouterr().out, json.loads(output.read_text())
    wrong = int(re.search(r"(\d+) of 64 sums are wrong", said)[1])
    if repaired:
        assert (code, wrong, report["findings"]) == (0, 0, [])
        return
    (one,) = report["findings"]
    assert (code, one["kind"]) == (90, "race_shared") and wrong > 0
    assert {one["place"]["line"], one["against"]["line"]} == marked and len(marked) == 2
    assert one["fix"].endswith("(here: cute.arch.sync_threads())")


@pytest.mark.parametrize("repaired", [False, True])
def test_the_script_of_many_ctas_and_its_twin(tmp_path, capfd, repaired):
    pytest.importorskip("cutlass.cute")
    marked = {i for i, line in enumerate(SUM.read_text().splitlines(), 1) if "# reported" in line}
    output, given = tmp_path / "report.json", (["repaired"] if repaired else []) + ["3"]
    settings = {"checks": "race", "time_limit": 60.0}
    code = command.run(Wish("dsv4 sanitize", str(SUM), given, "sm_90a", settings, form="json", output=output))
    wrong, findings = re.search(r"(\d+) of 384 maxima", capfd.readouterr().out)[1], json.loads(output.read_text())
    if repaired:
        assert (code, wrong, findings["findings"]) == (0, "0", [])
        return
    assert code == 90 and wrong == "96"  # a warp of four, the last to load
    (one,) = findings["findings"]
    assert {one["place"]["line"], one["against"]["line"]} == marked and len(marked) == 2


# --- files ---------------------------------------------------------------------------------------------------------


def test_every_reproduction_has_its_files_and_a_finding():
    files = {path.name for path in catalogue.FOLDER.iterdir()}
    wanted = {f"{name}{end}" for name in KNOWN for end in (".ptx", ".toml", "_repaired.toml")}
    assert files == wanted | {"reproductions.csv", SCRIPT.name, SUM.name}
    assert {row.reproduction for row in ROWS} - {""} == set(KNOWN)


def test_a_twin_differs_by_its_repair_alone():
    for one in KNOWN.values():
        broken, repaired = (one.description(twin).read_text() for twin in (False, True))
        assert broken != repaired and re.sub(r", 0\]$", ", 1]", broken, flags=re.M) == repaired, one.name
        assert re.search(r"// .*\brepair\b", one.source.read_text().partition("{")[2]), one.name


def test_the_columns_hold_what_they_may():
    for row in ROWS:
        assert row.finding and row.package and row.version and row.case and row.place, row
        assert row.kind in KINDS or row.kind in ("", "stopped"), row
        assert row.consequence.startswith(catalogue.CONSEQUENCES), row
        assert bool(row.reproduction) != bool(row.without) and row.upstream, row
        assert f"\n## {row.section}\n" in PAGE, row
        if row.reproduction:
            in_vain = f"{row.kind}_unused"  # a read whose value matters in the package's kernel alone
            assert {row.kind, in_vain} & set(KNOWN[row.reproduction].kinds), row
    for one in KNOWN.values():
        assert one.changes in catalogue.CHANGES and bool(one.changed_by) == bool(one.changes)
        assert directed.check(one.schedule) and (not one.changes or directed.check(one.changed_by))


def test_what_changes_results_in_a_package_says_under_which_schedule():
    for row in ROWS:
        if row.consequence.startswith(("wrong numbers", "hang", "stops")):
            assert row.schedule, row
            assert not row.reproduction or KNOWN[row.reproduction].changes, row


def test_an_option_of_the_table_can_be_given():
    given = [(row, one) for row in ROWS for one in re.findall(r"`(hold:[^`]+)`", row.schedule)]
    assert len(given) >= 5
    for row, one in given:
        assert all(hold.file.endswith(".py") for hold in directed.parse(one)), row
        section = PAGE.partition(f"\n## {row.section}\n")[2].partition("\n## ")[0]
        assert one.split(",")[0].removesuffix("@0").removeprefix("hold:").rpartition(":")[2].split("@")[0] in section


def test_every_line_of_the_table_is_in_its_section():
    """A file and line of the table is one that the argument names."""
    for row in ROWS:
        section = PAGE.partition(f"\n## {row.section}\n")[2].partition("\n## ")[0]
        for file in re.findall(r"[\w/]+\.(?:py|cuh)", row.place):
            stem = file.rpartition("/")[2].removesuffix(".py").removesuffix(".cuh")
            assert stem in section + row.section or stem.rpartition("_d")[2] in section, (row.place, stem)
        for number in re.findall(r"\b\d{2,4}\b(?!\.)", row.place):
            assert number in section, (row.place, number)


def test_the_page_is_up_to_date():
    assert catalogue.updated(PAGE) == PAGE, "python -m dsv4lib.emulator.sanitize.catalogue"
    with pytest.raises(ValueError, match="table"):
        catalogue.updated("# no markers")


def test_every_command_of_a_reproduction_is_one_that_runs():
    assert KNOWN["o_over_unread_s"].command.startswith("./dsv4 sanitize --schedule hold:")
    assert KNOWN["parts_not_waited_for"].command.count("--seed 4") == 1
    for one in KNOWN.values():
        assert one.command.endswith(f"data/emulator/findings/{one.name}.toml")
