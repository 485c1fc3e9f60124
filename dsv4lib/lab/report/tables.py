"""Give tables of a page a box that scrolls and columns that words fit in, and read the words of HTML.

All of it works on HTML that has passed the allow-list, so attributes stand in double quotes and nothing runs.
"""

from __future__ import annotations

import html
import re

from markupsafe import Markup

CELL = re.compile(r"<td((?:\s[^>]*)?)>(.*?)</td>", re.S)
VALUE = re.compile(r"(?=.*\d)[-+<>=~.,/%x\d e]+")  # a number, perhaps with a comparison
POWER = re.compile(r"(<[^>]*>)|(\d[\d.]*e-\d+)")  # a tag, which stays, or what could break after its "e-"
LONG = {"text": 50, "words": 18}  # class of a cell by its letters
TAG = re.compile(r"<[^>]*>")
INLINE = re.compile(r"</?(?:a|b|code|em|i|kbd|mark|s|small|span|strong|sub|sup|u|var)\b[^>]*>")  # inside of words
ALT = re.compile(r'<img\b[^>]*?\balt="([^"]*)"[^>]*>')


def with_scrolling_tables(text: str) -> Markup:
    """Return ``text`` with each table in a box that scrolls, so that the page itself never does sideways."""
    opened = re.sub(r"<table\b", '<div class="wide" tabindex="0"><table', with_wide_cells(text))
    return Markup(opened.replace("</table>", "</table></div>"))


def with_wide_cells(text: str) -> Markup:
    """Return ``text`` with a class on cells of several words, so that no column becomes a word or a letter wide."""
    return Markup(CELL.sub(_with_width, text))


def _with_width(found: re.Match[str]) -> str:
    words = plain(found[2])
    kind = next((name for name, least in LONG.items() if len(words) >= least), "value" * bool(VALUE.fullmatch(words)))
    if "class=" in found[1]:
        return found[0]
    inside = (
        found[2] if kind == "value" else POWER.sub(lambda it: it[1] or f'<span class="value">{it[2]}</span>', found[2])
    )
    named = f' class="{kind}"' if kind else ""
    return f"<td{named}{found[1]}>{inside}</td>"


def plain(text: str) -> str:
    """Return the words of HTML, with the descriptions of pictures and formulas, on one line."""
    return " ".join(html.unescape(TAG.sub(" ", INLINE.sub("", ALT.sub(r" \1 ", str(text))))).split())
