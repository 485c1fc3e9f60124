"""Make the search index of the site: a script that sets one variable, since a page at file:// may fetch nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dsv4lib.lab.report.cells import Block
from dsv4lib.lab.report.links import HEADING
from dsv4lib.lab.report.tables import plain

FILE = "search-index.js"
SECTION_CHARACTERS = 6_000  # of one section
OUTPUT_CHARACTERS = 800  # of one output: mostly numbers


class Section(NamedTuple):
    """A heading and the words under it. ``anchor`` is empty for what stands before the first heading."""

    anchor: str
    heading: str
    text: str


def sections(blocks: Iterable[Block]) -> list[Section]:
    """Split a page, whose headings have anchors, at its headings."""
    anchor, heading, words = "", "", [""]
    found: list[Section] = []

    def close() -> None:
        text = " ".join(" ".join(words).split())[:SECTION_CHARACTERS]
        if text or heading:
            found.append(Section(anchor, heading, text))

    for block in blocks:
        if block.kind != "prose":
            words.append(plain(block.html)[: None if block.kind in ("code", "pending") else OUTPUT_CHARACTERS])
            continue
        end = 0
        for match in HEADING.finditer(block.html):
            words.append(plain(block.html[end : match.start()]))
            close()
            named = re.search(r'id="([^"]*)"', match[0])
            anchor, heading, words, end = named[1] if named else "", plain(match[2]), [""], match.end()
        words.append(plain(block.html[end:]))
    close()
    return found


def script(pages: Sequence[tuple[str, str, Sequence[Section]]]) -> str:
    """Return the index as a script, of (file, title, sections) of each page."""
    listed = {
        "pages": [[file, title] for file, title, _ in pages],
        "sections": [[number, *section] for number, (_, _, some) in enumerate(pages) for section in some],
    }
    return f"window.DSV4_SEARCH = {json.dumps(listed, separators=(',', ':'))};\n"  # ASCII: no U+2028, no charset
