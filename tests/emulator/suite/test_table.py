"""The table of results is of the kernels that are here, in all three languages."""

from __future__ import annotations

import csv
from collections import Counter

import pytest

pytest.importorskip("cutlass.cute")

from tests.emulator.suite import cuda, table
from tests.emulator.suite.cutedsl import common
from tests.emulator.suite.test_suite import CASES


def read():
    with table.PATH.open() as file:
        return list(csv.DictReader(file))


def test_the_table_of_results_is_of_these_kernels():
    """Its rows are what the tests of the suite find; ``python -m tests.emulator.suite.table`` writes it."""
    rows = read()
    assert tuple(rows[0]) == table.COLUMNS
    listed = {"PTX": CASES, "CUDA C++": cuda.cases(), "CuTeDSL": common.LISTED}
    assert {(row["language"], f"{row['table']}: {row['variant']}"): row["kind"] for row in rows} == {
        (language, name): case.kind.replace("|", " or ")
        for language, cases in listed.items()
        for name, case in cases.items()
    }


def test_every_fault_is_caught_in_place_and_every_twin_silent():
    rows = read()
    assert all(count >= 60 for count in Counter(row["language"] for row in rows).values())
    for fact in ("caught", "line right", "twin silent"):
        assert {row[fact] for row in rows} == {"yes"}


def test_kinds_of_the_ptx_are_in_the_languages_that_can_say_them():
    kinds = {language: set() for language in ("PTX", "CUDA C++", "CuTeDSL")}
    for row in read():
        kinds[row["language"]] |= set(row["kind"].split(" or "))
    assert kinds["PTX"] == kinds["CUDA C++"] | kinds["CuTeDSL"]
    assert kinds["PTX"] - kinds["CUDA C++"] == set()
    assert kinds["PTX"] - kinds["CuTeDSL"] == {
        "clc_failed_response", "mbarrier_count_overflow", "mbarrier_inval_in_use", "mbarrier_no_complete",
        "mbarrier_tx_unexpected", "missing_tensormap_fence", "race_through_completion", "uninitialised_register",
    }  # fmt: skip
