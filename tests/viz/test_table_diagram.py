"""Tables and box diagrams: everything shown, escaped, described."""

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import diagram, style, table

HEADER, ROWS = ("what", "how many"), [("a <b> & c", 12345), ("yes?", True), ("fraction", 0.123456)]


def test_html_is_escaped_and_numbers_are_grouped():
    page = table.html_table(HEADER, ROWS)
    assert "a &lt;b&gt; &amp; c" in page and "<b>" not in page
    assert ">12,345<" in page and ">yes<" in page and ">0.123<" in page
    assert page.count("<tr>") == 4
    assert page.count("text-align:right") == 2


def test_numbers_of_thousands_have_no_exponent():
    assert [table.text_table(("x",), [(value,)]).split()[1] for value in (5448.2, -1000.0, 999.4, 2.5e9)] == [
        "5,448", "-1,000", "999", "2.5e+09",
    ]  # fmt: skip


def test_text_twin():
    assert table.text_table(HEADER, ROWS).splitlines() == [
        "what       how many",
        "a <b> & c  12,345",
        "yes?       yes",
        "fraction   0.123",
    ]


def test_rows_must_fit_the_header():
    with pytest.raises(ArgumentError, match="2 cells a row"):
        table.html_table(HEADER, [(1, 2, 3)])


def test_pipeline_draws_every_step_and_says_so():
    lanes = {"first": [("load", "TMA to SMEM", "#0072B2"), ("mma", "", "#E69F00")], "second": [("store", "x", "#eee")]}
    figure = diagram.pipeline(lanes, "a title")
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert {"load", "mma", "store", "first", "second", "TMA to SMEM"} <= set(shown)
    assert len(figure.axes[0].patches) == 3
    assert "load (TMA to SMEM), then mma" in style.alt_text(figure)


@pytest.mark.parametrize("lanes", [{}, {"a": []}, {"a": [("x", "y", "#fff")] * 10}])
def test_pipeline_of_nothing_or_too_much(lanes):
    with pytest.raises(ArgumentError) as caught:
        diagram.pipeline(lanes)
    assert caught.value.name == "lanes"
