"""List tests and stages that are known to fail now and then. It is `tests/flaky.toml`, dated, with an issue each.

Nothing is retried. What stands here may be red without making a whole command red, is shown as known to be flaky, and
only until its entry expires, 30 days after it was made at most: a test fails on an expired, undated or unknown entry.

    [[flaky]]
    what = "stage fmha_a"                      # or a test: "tests/lab/test_runner.py::test_x"
    issue = "16"
    since = 2026-11-23
    expires = 2026-12-20
    reason = "one sentence"
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from dsv4lib.errors import DSV4Error

FILE = "tests/flaky.toml"
LONGEST = timedelta(days=30)
FIELDS = {"what": str, "issue": str, "since": date, "expires": date, "reason": str}


@dataclass(frozen=True)
class Entry:
    """What is flaky (a test or ``stage <name>``), and why. Also where it is followed up, from when to when."""

    what: str
    issue: str
    since: date
    expires: date
    reason: str


def read(root: Path) -> list[Entry]:
    """Read all entries of the workspace's ledger, expired ones too. None where there is no file.

    Raises:
        DSV4Error: an entry lacks a field, a date or an issue, or has one of another kind.
    """
    path = root / FILE
    if not path.is_file():
        return []
    try:
        entries = tomllib.loads(path.read_text()).get("flaky", [])
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DSV4Error(f"{FILE} cannot be read: {error}") from None
    return [_entry(entry) for entry in entries]


def living(root: Path, today: date | None = None) -> dict[str, Entry]:
    """Return the entries that count today, by what they are about."""
    return {e.what: e for e in read(root) if e.since <= (today or date.today()) <= e.expires}


def problems(root: Path, today: date, stages: Collection[str]) -> list[str]:
    """List what is wrong with the ledger. Expired or too long entries, unknown stages, tests of files that are gone."""
    found = []
    for entry in read(root):
        if entry.expires < today:
            found.append(f"{entry.what}: expired on {entry.expires}; issue {entry.issue}")
        if entry.since > today or not timedelta(0) <= entry.expires - entry.since <= LONGEST:
            span = f"from {entry.since} to {entry.expires}"
            found.append(f"{entry.what}: {span}, where it may be {LONGEST.days} days from a day that has come")
        kind, _, name = entry.what.partition(" ")
        if kind == "stage" and name not in stages:
            found.append(f"{entry.what}: there is no such stage")
        if kind != "stage" and ("::" not in entry.what or not (root / entry.what.partition("::")[0]).is_file()):
            found.append(f"{entry.what}: neither a stage nor a test of a file that is there")
    return found


def _entry(raw: Any) -> Entry:
    name = raw.get("what", "an entry") if isinstance(raw, dict) else "an entry"
    if not isinstance(raw, dict) or set(raw) != set(FIELDS):
        raise DSV4Error(f"{FILE}: {name} needs exactly the fields {', '.join(FIELDS)}")
    for field, kind in FIELDS.items():
        if type(raw[field]) is not kind or not raw[field]:
            raise DSV4Error(
                f"{FILE}: {name}: {field} must be a {'date' if kind is date else 'text that says something'}"
            )
    return Entry(**raw)
