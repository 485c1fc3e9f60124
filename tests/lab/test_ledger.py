"""The ledger of flaky tests and stages: entries expire, name an issue, and excuse nothing silently."""

from __future__ import annotations

import io
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.lab import ledger
from dsv4lib.lab.commands import command
from dsv4lib.lab.run import runner
from dsv4lib.lab.stage import Stage, names
from dsv4lib.lab.verdicts import Verdict

TODAY = date(2026, 5, 20)
GOOD = {
    "what": '"stage one"', "issue": '"16"', "since": "2026-05-10", "expires": "2026-06-01", "reason": '"a race"',
}  # fmt: skip


def write(root: Path, **changes: str | None) -> Path:
    entry = {name: text for name, text in {**GOOD, **changes}.items() if text is not None}
    (root / "tests").mkdir(exist_ok=True)
    (root / ledger.FILE).write_text("[[flaky]]\n" + "\n".join(f"{k} = {v}" for k, v in entry.items()))
    return root


def test_the_ledger_of_this_workspace_is_in_order() -> None:
    assert ledger.problems(env.root(), datetime.now(UTC).date(), names()) == []


@pytest.mark.parametrize(
    "changes",
    [{"expires": None}, {"since": None}, {"issue": None}, {"issue": '""'}, {"reason": '""'}, {"expires": '"soon"'},
     {"expires": "2026-05-20T10:00:00"}, {"more": "1"}],
    ids=str,
)  # fmt: skip
def test_an_entry_without_a_date_or_an_issue_is_refused(tmp_path: Path, changes: dict[str, str | None]) -> None:
    with pytest.raises(DSV4Error, match="flaky.toml: "):
        ledger.problems(write(tmp_path, **changes), TODAY, ["one"])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"expires": "2026-05-19"}, "expired on 2026-05-19; issue 16"),
        ({"expires": "2026-06-10"}, "30 days"),
        ({"since": "2026-05-21"}, "that has come"),
        ({"what": '"stage two"'}, "no such stage"),
        ({"what": '"tests/gone.py::test_x"'}, "neither a stage nor a test"),
        ({"what": '"one"'}, "neither a stage nor a test"),
    ],
)
def test_an_entry_that_is_over_or_about_nothing_is_a_problem(tmp_path: Path, changes: Any, says: str) -> None:
    (problem,) = ledger.problems(write(tmp_path, **changes), TODAY, ["one"])
    assert says in problem


def test_an_entry_lives_from_its_day_to_its_last(tmp_path: Path) -> None:
    assert ledger.living(tmp_path) == {}
    write(tmp_path)
    assert ledger.problems(tmp_path, TODAY, ["one"]) == []
    days = [date(2026, 5, day) for day in (9, 10, 31)] + [date(2026, 6, day) for day in (1, 2)]
    assert [bool(ledger.living(tmp_path, day)) for day in days] == [False, True, True, True, False]


@pytest.mark.parametrize(("age", "code"), [(0, 0), (40, 14)])
def test_a_known_flake_is_named_and_counts_only_once_it_has_expired(
    make: Callable[..., Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: int, code: int
) -> None:
    def run(self: runner.Supervisor, jobs: list[Any]) -> None:
        for job in jobs:
            kind = Verdict.CRASH if job.stage == "one" else Verdict.SKIPPED
            self._record(job, runner.load(job.stage, self.root), 0, kind, "made so", datetime.now(UTC), 1.0)

    make("one")
    since = datetime.now(UTC).date() - timedelta(days=age)
    write(tmp_path, since=str(since), expires=str(since + timedelta(days=20)))
    monkeypatch.setattr(runner.Supervisor, "run", run)
    console = Console(file=io.StringIO(), width=200)
    found = command.run(command.Wish(), console, tmp_path)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert found == (code or 20)  # nothing else passed
    assert ("known to be flaky: one-00 (crash)" in said) == (age == 0) and "crash" in said


def test_a_known_flaky_test_may_fail_until_it_expires(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """By its name or by its function's; the mark says why, and nothing else is marked."""
    hook = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "known_flaky"))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").touch()
    today = datetime.now(UTC).date()
    for what, name, marked in (
        ("tests/a.py::test_x", "tests/a.py::test_x[1]", True),
        ("tests/a.py::test_x[1]", "tests/a.py::test_x[1]", True),
        ("tests/a.py::test_x[2]", "tests/a.py::test_x[1]", False),
        ("tests/a.py::test_y", "tests/a.py::test_x", False),
    ):
        write(tmp_path, what=f'"{what}"', since=str(today), expires=str(today))
        assert ledger.problems(tmp_path, today, []) == []
        marks: list[Any] = []
        item = SimpleNamespace(nodeid=name, config=SimpleNamespace(rootpath=tmp_path), add_marker=marks.append)
        hook.flaky.cache_clear()
        hook.pytest_itemcollected(item)
        assert [m.mark.name for m in marks] == ["xfail"] * marked
        assert not marks or "issue 16: a race" in marks[0].mark.kwargs["reason"]
    hook.flaky.cache_clear()
