"""The table of notebook 05: findings that changed a result, each reproduced, each repaired."""

import pytest

from dsv4lib.emulator.sanitize import catalogue
from dsv4lib.pages.emulator import found


@pytest.fixture(scope="module")
def known():
    return catalogue.reproductions()


@pytest.mark.parametrize(
    ("name", "words", "kind"),
    [
        ("row_max_exchange", "64 wrong", "race_shared"),
        ("tail_waits_for_a_phase_twice", "deadlock", "deadlock"),
        ("freed_by_every_warp", "stopped", "stopped"),
        ("rows_never_written", "right, reported", "uninitialised_smem_unused"),
    ],
)
def test_a_reproduction_and_its_twin(known, name, words, kind):
    result = found.reproduce(known[name])
    assert str(result) == words and kind in result.kinds
    assert str(found.reproduce(known[name], repaired=True)) == "right, silent"


def test_the_table_holds_what_changed_a_result(monkeypatch):
    ran = []

    def reproduce(one, repaired=False):
        ran.append((one.name, repaired))
        return found.Result((), 0, "")

    monkeypatch.setattr(found, "reproduce", reproduce)
    rows = found.rows()
    assert {len(row) for row in rows} == {len(found.HEADER)} and len(ran) == 2 * len(rows) >= 20
    seen = [row for row in catalogue.findings() if row.consequence.startswith(found.SEEN) and row.reproduction]
    assert [row[2] for row in rows] == [row.consequence.partition(":")[0] for row in seen]
    ran.clear()
    found.rows(repair=False)
    assert ran and not any(repaired for _, repaired in ran)
