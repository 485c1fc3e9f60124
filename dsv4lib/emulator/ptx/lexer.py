"""Split PTX text to statements. Comments and line info taken out, operand lists split at their commas.

PTX ISA, chapter "Syntax". A statement runs up to its semicolon and may span lines; `.loc` may stand between the lines
of one statement (compilers put it inside inline assembly), so line info is lifted out before statements are cut. Text
keeps its length and its newlines throughout: an offset always gives the line.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field

from dsv4lib.emulator.errors import Place, PtxSyntaxError
from dsv4lib.emulator.ptx.ir import Location

_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_NOT_NEWLINE = re.compile(r"[^\n]")
_FILE = re.compile(r'^[ \t]*\.file[ \t]+(\d+)[ \t]+"([^"\n]*)"[^\n]*', re.M)
_LOC = re.compile(r"^[ \t]*\.loc\b([^\n]*)", re.M)
_POSITION = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)")
_INLINED = re.compile(r"inlined_at\s+(\d+)\s+(\d+)\s+(\d+)")
_INLINE = re.compile(r"^[ \t]*// begin inline asm\b.*?^[ \t]*// end inline asm\b", re.M | re.S)
_ITEM = re.compile(r"(?:\{[^{}]*\}|\[[^\[\]{}]*(?:\{[^{}]*\}[^\[\]{}]*)*\]|\([^()]*\)|[^,{}\[\]()])+")


def syntax_error(message: str, line: int, text: str = "", kernel: str = "") -> PtxSyntaxError:
    """Make a `PtxSyntaxError` that names the line."""
    return PtxSyntaxError(message, Place(kernel, line, " ".join(text.split())[:200]))


def _blank(match: re.Match[str]) -> str:
    """Spaces in place of a comment; strings stay."""
    text = match.group()
    return text if text[0] == '"' else _NOT_NEWLINE.sub(" ", text)


@dataclass
class Source:
    """PTX text ready to be cut into statements.

    Attributes:
        text: the text without comments, `.loc` and `.file`, every offset unchanged.
        newlines: offsets of the newlines.
        locations: (offset, position) of every `.loc`, by offset.
    """

    text: str
    newlines: list[int]
    locations: list[tuple[int, Location]] = field(default_factory=list)

    def line(self, offset: int) -> int:
        """Find the 1-based line of ``offset``."""
        return bisect.bisect_left(self.newlines, offset) + 1

    def error(self, message: str, offset: int, text: str = "", kernel: str = "") -> PtxSyntaxError:
        """Make a syntax error at ``offset``."""
        return syntax_error(message, self.line(offset), text, kernel)


def read(ptx: str) -> Source:
    """Prepare PTX text.

    Raises:
        PtxSyntaxError: a `.loc` that cannot be read or names an unknown file.
    """
    text = _COMMENT.sub(_blank, ptx)
    source = Source(text, [i.start() for i in re.finditer("\n", text)])
    # `.file` may follow the code that refers to it.
    files = {match[1]: match[2] for match in _FILE.finditer(text)}
    text = _FILE.sub(lambda m: _NOT_NEWLINE.sub(" ", m.group()), text)
    known: dict[tuple[str, ...], Location] = {}
    read_before: dict[str, _Loc] = {}
    inline = [offset for match in _INLINE.finditer(ptx) for offset in match.span()]
    for match in _LOC.finditer(text):
        if bisect.bisect_right(inline, match.start()) & 1:
            continue  # it counts the lines of the inline assembly on from the statement's own
        loc = read_before.get(match[1])
        if loc is None:
            loc = read_before[match[1]] = _read_loc(source, match, files)
        source.locations.append((match.start(), loc.location(known)))
    source.text = _LOC.sub(lambda m: " " * len(m.group()), text)
    return source


@dataclass
class _Loc:
    """The text of a `.loc`: its position, that of its caller, and the locations that it has stood for."""

    position: tuple[str, ...]
    file: str
    line: int
    caller: tuple[str, ...] | None = None
    without_chain: Location | None = None  # of the caller, if no earlier `.loc` is at its position
    made: dict[int, Location] = field(default_factory=dict)

    def location(self, known: dict[tuple[str, ...], Location]) -> Location:
        """Link it to its chain of callers. ``known`` maps positions to the latest location there.

        The same text has another chain where a function in between, such as one of a header, was inlined elsewhere.
        """
        caller = None if self.caller is None else known.get(self.caller) or self.without_chain
        location = self.made.get(id(caller))
        if location is None:  # which keeps `caller` alive, so that no other takes its id
            location = self.made[id(caller)] = Location(self.file, self.line, caller)
        known[self.position] = location
        return location


def _read_loc(source: Source, match: re.Match[str], files: dict[str, str]) -> _Loc:
    position = _POSITION.match(match[1])
    if position is None:
        raise source.error("a .loc without file, line and column", match.start(), match.group())
    inlined = _INLINED.search(match[1])
    for number in (position[1], *(inlined.groups()[:1] if inlined else ())):
        if number not in files:
            raise source.error(f".loc names file {number}, which no .file declares", match.start(), match.group())
    loc = _Loc(position.groups(), files[position[1]], int(position[2]))
    if inlined is not None:
        loc.caller, loc.without_chain = inlined.groups(), Location(files[inlined[1]], int(inlined[2]))
    return loc


def split(text: str) -> list[str] | None:
    """Split a comma-separated list, braces and brackets kept whole. None if unbalanced."""
    if "{" not in text and "[" not in text and "(" not in text:
        items = text.split(",")
    else:
        items = _ITEM.findall(text)
        if sum(map(len, items)) + len(items) - 1 != len(text):
            return None
    items = [item.strip() for item in items]
    return None if "" in items else items
