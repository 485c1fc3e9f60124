"""The coverage page is what the registry says, and nothing tested is left out of it."""

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import coverage


def test_page_is_up_to_date():
    table = coverage.rows(coverage.read_tested())
    text = coverage.PAGE.read_text(encoding="utf-8")
    assert text == coverage.page(table), "run python -m dsv4lib.emulator.isa.coverage"


def test_every_pattern_has_a_row():
    table = coverage.rows([])
    own = [e for e in isa.entries() if e.implementation.__module__.startswith(coverage.PACKAGE)]
    assert {(r.pattern, r.kind) for r in table} == {(e.pattern, e.kind) for e in own}
    assert len(table) > 400 and not any(row.tested for row in table)


def test_instructions_of_tests_are_left_out():
    isa.service("coverageprobe.<type:b32>")(lambda warp, instr, form: None)
    assert "coverageprobe" not in {row.base for row in coverage.rows([])}


def test_tested_variants_are_counted_with_their_pattern():
    rows = {row.pattern: row.tested for row in coverage.rows(["mbarrier.inval.shared.b64", "no.such.opcode"])}
    assert sum(rows.values()) == 1
    assert rows["mbarrier.inval[.<space:shared|shared::cta>].b64"] == 1


def test_notes_of_a_test_run():
    notes = coverage.Notebook()
    find = notes.watch(isa.find)

    class Report:
        when, passed = "call", True

    assert find("add.s32") is not None and find("no.such.opcode") is None
    failed = Report()
    failed.passed = False
    notes.pytest_runtest_logreport(failed)
    assert notes.tested == set(), "a failing test proves nothing"
    find("add.s32")
    notes.pytest_runtest_logreport(Report())
    assert notes.tested == {"add.s32"}
