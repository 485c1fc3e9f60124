"""Link the words of the tour to their meanings: the glossary of the first notebook, and links between notebooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

PAGE = "00_start_here.ipynb"
HEADING = "Glossary"
LINK = f"{PAGE}#{HEADING}"
_ROW = re.compile(r"^\| (.*?) \| (.*?) \|$", re.MULTILINE)
_WORDS = re.compile(r"\*\*(.+?)\*\*|`(.+?)`")
_LINK = re.compile(r"\[[^\]\n]+\]\(([^)\s]+)\)")
_BARE = re.compile(r"(?<!\[)`(\d\d_[a-z]\w*)`")
_CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def meanings(folder: Path) -> dict[str, str]:
    """Read the glossary of the tour in ``folder``: word -> meaning, in its order. Empty if there is none."""
    page = folder / PAGE
    if not page.is_file():
        return {}
    return _meanings(page, page.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _meanings(page: Path, _changed: int) -> dict[str, str]:
    found = {}
    for source in prose(page):
        if source.startswith(f"## {HEADING}"):
            for left, meaning in _ROW.findall(source):
                named = ", ".join(bold or code for bold, code in _WORDS.findall(left))
                found |= {word: re.sub(r"[*`]", "", meaning) for word in named.split(", ") if word}
    return found


def used(notebook: Path) -> dict[str, str]:
    """Find the glossary's words in a notebook's prose: word -> meaning, in the glossary's order."""
    text = "\n".join(prose(notebook)).replace("**References.**", "")
    return {word: meaning for word, meaning in meanings(notebook.parent).items() if _occurs(word, text)}


def _occurs(word: str, text: str) -> bool:
    """Words of capitals as they are, others with a capital or a plural, too."""
    flags = re.IGNORECASE if word.islower() else 0
    return re.search(rf"(?<![\w-]){re.escape(word)}s?(?![\w-])", text, flags) is not None


def problems(notebook: Path) -> Iterator[str]:
    """Say which links of a notebook lead nowhere, and which notebooks it names without a link."""
    for number, source in _numbered(notebook):
        text = _CODE.sub("", source)
        for target in _LINK.findall(text):
            if not re.match(r"\w+:", target) and (why := _broken(notebook, target)):
                yield f"cell {number}: {target}: {why}"
        for name in _BARE.findall(text):
            if (notebook.parent / f"{name}.ipynb").is_file():
                yield f"cell {number} names `{name}` without a link"


def links(notebook: Path, after: str) -> list[str]:
    """List the targets in the paragraph of a notebook's prose that starts with the bold words ``after``."""
    text = "\n\n".join(prose(notebook))
    found = re.search(rf"\*\*{re.escape(after)}\*\*(.*?)(?:\n\n|\Z)", text, re.DOTALL)
    return _LINK.findall(found.group(1)) if found else []


def _broken(notebook: Path, target: str) -> str:
    """Why a link leads nowhere, "" if it does not."""
    name, _, heading = target.partition("#")
    page = notebook.parent / name if name else notebook
    if not page.exists():
        return "there is no such file"
    if heading and page.suffix == ".ipynb" and heading not in headings(page):
        return "there is no such heading"
    return ""


def headings(notebook: Path) -> set[str]:
    """List a notebook's headings as links name them: blanks are dashes."""
    found = re.findall(r"^#+ (.+?)\s*$", "\n".join(prose(notebook)), re.MULTILINE)
    return {heading.replace(" ", "-") for heading in found}


def prose(notebook: Path) -> list[str]:
    """Return the source of each markdown cell."""
    return [source for _, source in _numbered(notebook)]


def _numbered(notebook: Path) -> list[tuple[int, str]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [(n, "".join(cell["source"])) for n, cell in enumerate(cells, 1) if cell["cell_type"] == "markdown"]
