"""Lead links from page to page and give headings anchors.

All of it works on HTML that has passed the report's allow-list, so attributes stand in double quotes and nothing runs.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markupsafe import Markup, escape

from dsv4lib.lab.report.cells import Block
from dsv4lib.lab.report.tables import plain

LINK = re.compile(r'<a((?:\s+[\w-]+="[^"]*")*)\s*>(.*?)</a>', re.S)
HREF = re.compile(r'\s+href="([^"]*)"')
HEADING = re.compile(r"<h([2-6])(?:\s[^>]*)?>(.*?)</h\1>", re.S)


@dataclass(frozen=True)
class Heading:
    """A heading of a page: its level (2 to 6), its anchor and its words."""

    level: int
    anchor: str
    text: str


@dataclass
class Links:
    """Rewrites links of all pages, and collects those that lead nowhere.

    Attributes:
        root: the workspace.
        pages: names of pages by path in the workspace.
        anchors: anchors of each page, filled as pages are made.
        wanted: (source, link, page, anchor) of each link to an anchor.
        broken: (source, link) of links to files that do not exist.
    """

    root: Path
    pages: Mapping[str, str]
    anchors: dict[str, set[str]] = field(default_factory=dict)
    wanted: list[tuple[str, str, str, str]] = field(default_factory=list)
    broken: list[tuple[str, str]] = field(default_factory=list)

    def rewrite(self, text: str, source: str) -> Markup:
        """Return ``text`` of the document ``source`` with links to pages.

        Links to pages lead to them; those to other files of the workspace become text that names the file.
        """
        return Markup(LINK.sub(lambda found: self._link(found, source), text))

    def unresolved(self) -> list[tuple[str, str]]:
        """List (source, link) of what leads nowhere, once all pages are made."""
        lost = [(source, link) for source, link, page, anchor in self.wanted if anchor not in self.anchors[page]]
        return sorted(set(self.broken + lost))

    def _link(self, found: re.Match[str], source: str) -> str:
        address = HREF.search(found[1])
        if address is None:
            return found[0]
        link = html.unescape(address[1])
        try:
            parts = urlsplit(link)
        except ValueError:  # "http://[x"
            parts = urlsplit("http://unreadable")
            link = ""
        if parts.scheme or parts.netloc:
            return found[0] if parts.scheme in ("http", "https", "mailto") and link else found[2]
        path = (
            posixpath.normpath(posixpath.join(posixpath.dirname(source), unquote(parts.path))) if parts.path else source
        )
        if path in self.pages:
            target = self.pages[path]
            if parts.fragment:
                # Jupyter's anchors keep capital letters, GitHub's and those of the site do not.
                anchor = parts.fragment.lower() if path.endswith(".ipynb") else parts.fragment
                self.wanted.append((source, link, target, unquote(anchor)))
                target += f"#{anchor}"
            return f'<a href="{escape(target)}">{found[2]}</a>'
        if not self._exists(path):
            self.broken.append((source, link))
        return f'<span class="file" title="{escape(path)} of the repository">{found[2]}</span>'

    def _exists(self, path: str) -> bool:
        try:
            inside = (self.root / path).resolve()
            return inside.is_relative_to(self.root.resolve()) and inside.exists()
        except (OSError, ValueError):  # no name of a file
            return False


def connect(blocks: Iterable[Block], links: Links, source: str, file: str) -> list[Heading]:
    """Give the headings of page ``file`` of ``source`` anchors, lead its links to pages, and return the headings."""
    headings: list[Heading] = []
    taken = links.anchors[file] = set()
    for block in blocks:
        if block.kind in ("prose", "table"):
            block.html = links.rewrite(block.html, source)
        if block.kind == "prose":
            block.html, found = with_anchors(block.html, taken)
            headings += found
    return headings


def with_anchors(text: str, taken: set[str]) -> tuple[Markup, list[Heading]]:
    """Return ``text`` with an anchor on each heading, as GitHub names them, and the headings.

    Args:
        text: safe HTML.
        taken: anchors that the page has already; new ones are added.
    """
    headings: list[Heading] = []

    def name(found: re.Match[str]) -> str:
        words = plain(found[2])
        base = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-") or "section"
        anchor, number = base, 0
        while anchor in taken:
            number += 1
            anchor = f"{base}-{number}"
        taken.add(anchor)
        headings.append(Heading(int(found[1]), anchor, words))
        return f'<h{found[1]} id="{escape(anchor)}">{found[2]}</h{found[1]}>'

    return Markup(HEADING.sub(name, text)), headings


def take_title(text: str) -> tuple[Markup | None, Markup]:
    """Split the heading that ``text`` begins with from the rest; None if it begins with something else."""
    found = re.match(r"\s*<h2(?:\s[^>]*)?>(.*?)</h2>", text, re.S)
    return (Markup(found[1]), Markup(text[found.end() :])) if found else (None, Markup(text))
