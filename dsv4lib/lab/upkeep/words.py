"""Find words that readers of CUDA code would have to look up. `./dsv4 lint` warns and names the field's term.

Only words with one meaning are listed, so that a hit needs no judgement: a word with several is listed with the words
around it that fix its meaning. Text in backquotes, single or double, is a quotation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_AGENT = r"(?:CTA|warp|thread|lane|kernel|barrier|tensor core|scheduler|hardware|SM|GPU|MMA)"  # no person

AVOID = {
    r"planted": "injected",
    r"spellings?": "variant of the instruction",
    r"nobody|no one": "the thread, warp or CTA that does it",
    r"(?:is|are|was|were|be) (?:told|asked)": "what the code reads or receives",
    rf"(?:tell|ask)s? (?:an?|the|each|every|its|one) {_AGENT}s?": "signal, issue or query",
    rf"{_AGENT}s?,? whom?|whoever": "which, or the caller, warp or CTA that does it",
    r"behind": "after (in time), past the end of (addresses), with or of",
    r"(?:inbox|mailbox)(?:es)?": "workspace slot",
    r"letters? (?:between|from|of|to) (?:the |a |other )?(?:CTA|peer|rank|warp)s?": "flag-in-data protocol",
    r"by the letter": "pedantic",
    r"meetings?": "cross-CTA reduction",
    r"CTAs? stays?": "persistent CTA",
    r"RoPE turn(?:s|ed)|turn(?:s|ed) by RoPE": "rotate",
    r"\.together|(?-i:class Together)": "multi_device, or what it holds",
    r"(?-i:reds)(?= *= )": "expect_fail",
    r"(?-i:simt)": "kernel",
}
"""Regular expression -> what to write instead."""

PROSE = ("*.md", "*.py", "*.ipynb", "*.toml")
SKIP = {".git", ".venv", "runs", "__pycache__", "node_modules", ".ruff_cache", "corpus-site"}
_PATTERN = re.compile("|".join(rf"(?P<w{i}>\b(?:{word})\b)" for i, word in enumerate(AVOID)), re.IGNORECASE)
_QUOTED = re.compile(r"(`+)[^`]+\1")


class Hit(NamedTuple):
    """One word: its file, its line from 1, the word, and what to write instead."""

    path: Path
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: write {self.instead}"


def in_text(path: Path, text: str) -> Iterator[Hit]:
    """Find the words in one file's text."""
    instead = list(AVOID.values())
    for number, line in enumerate(text.splitlines(), 1):
        for match in _PATTERN.finditer(_QUOTED.sub(lambda quote: " " * len(quote[0]), line)):
            yield Hit(path, number, match[0], instead[int(match.lastgroup[1:])])


def files(root: Path) -> Iterator[Path]:
    """Yield every file with prose under a folder, in order. This list itself is left out."""
    for path in sorted(found for pattern in PROSE for found in root.rglob(pattern)):
        if not SKIP & set(path.relative_to(root).parts) and path.name not in ("words.py", "test_words.py"):
            yield path


def in_tree(root: Path, paths: Iterable[Path] | None = None) -> list[Hit]:
    """Find the words in a tree, paths relative to ``root``."""
    return [
        hit
        for path in (files(root) if paths is None else paths)
        for hit in in_text(path.relative_to(root), path.read_text(encoding="utf-8", errors="replace"))
    ]
