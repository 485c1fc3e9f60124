"""Words to avoid are found where they stand, and quotations are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsv4lib.lab import cli
from dsv4lib.lab.upkeep import lint, words


def found(text):
    return [(hit.line, hit.word) for hit in words.in_text(Path("a.py"), text)]


def test_words_are_found_with_their_line():
    assert found("a planted fault\n\nNobody counts; it is told twice") == [
        (1, "planted"),
        (3, "Nobody"),
        (3, "is told"),
    ]
    assert found("the inboxes and spellings") == [(1, "inboxes"), (1, "spellings")]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("two meetings a row", "meetings"),
        ("an inbox for each CTA", "inbox"),
        ("a mailbox a warp", "mailbox"),
        ("a letter to another CTA, letters from peers", "letters from peers"),
        ("checks by the letter", "by the letter"),
        ("what one mma warp does: it tells the tensor core", "tells the tensor core"),
        ("a CTA asks the scheduler", "asks the scheduler"),
        ("the warps who wait", "warps who"),
        ("read by whoever waits", "whoever"),
        ("rows behind the end", "behind"),
        ("CTAs stay on an SM", "CTAs stay"),
        ("the dims that RoPE turned", "RoPE turned"),
        ("keys turned by RoPE", "turned by RoPE"),
        ("gpus.together.run()", ".together"),
        ("class Together:", "class Together"),
        ('reds = "wrong"', "reds"),
        ("from dsv4lib.ops.topk import simt", "simt"),
        ("no one waits", "no one"),
        ("one spelling", "spelling"),
        ("values were asked for", "were asked"),
    ],
)
def test_each_word_is_seen(text, word):
    assert word in [name for _, name in found(text)]


@pytest.mark.parametrize(
    "text",
    [
        "Your turn: it turns red; together they fill a word; Together with this",
        "the last letter of a name, capital letters; a SIMT machine; REDS = patterns; reds == 3",
        "a reader who asks the compiler; it tells the user; the person behind_waits",
        "together = len(lanes); tell a from b; they meet",
    ],
)
def test_other_meanings_are_not(text):
    assert found(text) == []


def test_parts_of_words_and_quotations_are_not():
    assert found("implanted, transplanted_x, retold, this told") == []
    assert found("the word `planted`, but planted") == [(1, "planted")]
    assert found("``planted`` and `behind` the word planted") == [(1, "planted")]


def test_hits_name_what_to_write():
    (hit,) = words.in_text(Path("a.md"), "x\nplanted")
    assert str(hit) == "a.md:2: 'planted': write injected"


def test_reports_count_what_was_checked(tmp_path):
    (tmp_path / "stages").mkdir()
    (tmp_path / "good.py").write_text('"""Nobody."""\n')
    *ruff, stages, gates, wordy = lint.reports(tmp_path)
    assert [one.problems for one in ruff] == [0, 0] and "1 file" in ruff[1].summary
    assert stages.summary == "stages: 0 contracts and their notebooks, 0 problems"
    assert wordy.summary == "words: 1 files, 1 warning" and wordy.problems == 0
    (tmp_path / "bad.py").write_text("import os\nx  = 1\n")
    check, form, *_ = lint.reports(tmp_path)
    assert check.problems and any("F401" in line for line in check.lines)
    assert form.problems and any("bad.py" in line for line in form.lines)


def test_problems_decide_the_exit_code_and_warnings_do_not(monkeypatch):
    for problems, code in ((0, 0), (2, 1)):
        monkeypatch.setattr(lint, "reports", lambda problems=problems: [lint.Report(["a line"], "checked", problems)])
        done = CliRunner().invoke(cli.app, ["lint"])
        assert done.exit_code == code and done.stdout == "a line\nchecked\n"
