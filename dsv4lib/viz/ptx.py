"""Read PTX as a kernel author does. Which hardware units are used, how often, by which role, from which Python line.

Everything here takes PTX text alone (compiled with line info for the Python lines), so it works on any kernel of any
compiler. Counts are static: instructions in the text, not executions.
"""

from __future__ import annotations

import ast
import html
import inspect
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from matplotlib.figure import Figure

from dsv4lib.errors import ArgumentError
from dsv4lib.viz import kinds, style
from dsv4lib.viz.panels import styled

THREAD, WARP, CTA = "one thread", "a whole warp", "every thread"
QUARTER = "a whole warp, on its 32 lanes"
WIDTH = 84  # characters of an instruction in an excerpt


@dataclass(frozen=True)
class Family:
    """A group of opcodes that one hardware unit runs.

    Attributes:
        name: as shown in tables and figures.
        unit: the unit that runs it; families of one unit share a colour.
        pattern: regular expression at the start of the opcode.
        what: what the instruction does, one line.
        issuer: what issues it.
    """

    name: str
    unit: str
    pattern: str
    what: str
    issuer: str


@dataclass(frozen=True)
class Instruction:
    """One PTX instruction: opcode with modifiers, its line in the PTX (from 1). Also the Python file name and line."""

    opcode: str
    ptx_line: int
    file: str
    line: int


@dataclass(frozen=True)
class FamilyCount:
    """A family, and how many instructions of it a kernel holds.

    Also the instruction variants seen, with their counts.
    """

    family: Family
    count: int
    opcodes: tuple[tuple[str, int], ...]


# First match wins, so a special case comes before its family. (name, opcode pattern, issuer, what it does)
_TABLE = {
    "tensor core": (
        ("tcgen05.mma", r"tcgen05\.mma", THREAD, "multiply SMEM by SMEM, add into TMEM, asynchronously"),
        ("tcgen05.commit", r"tcgen05\.commit", THREAD, "arrive on an mbarrier once all earlier MMAs are done"),
        ("tcgen05.cp", r"tcgen05\.(cp|shift)", THREAD, "copy SMEM to TMEM (scale factors) in order with the MMAs"),
        ("wgmma", r"wgmma\.", "four warps together", "Hopper's MMA: SMEM by SMEM or registers into registers"),
        ("mma.sync", r"mma\.|ldmatrix|stmatrix", WARP, "warp-level MMA and its register loads"),
    ),
    "TMEM": (
        ("tcgen05.alloc", r"tcgen05\.(alloc|dealloc|relinquish)", WARP, "take and return TMEM columns"),
        ("tcgen05.ld", r"tcgen05\.(ld|wait::ld)", QUARTER, "TMEM to registers, valid after wait::ld"),
        ("tcgen05.st", r"tcgen05\.(st|wait::st)", QUARTER, "registers to TMEM, visible after wait::st"),
        ("tcgen05.fence", r"tcgen05\.fence", CTA, "order TMEM work across a thread barrier"),
    ),
    "TMA": (
        (
            "TMA tensor copy",
            r"cp\.(reduce\.)?async\.bulk\.(prefetch\.)?tensor",
            THREAD,
            "move a box GMEM <-> SMEM; zeros outside the tensor",
        ),
        ("TMA bulk copy", r"cp\.(reduce\.)?async\.bulk", THREAD, "move a run of bytes, or group and await such moves"),
        ("TMA descriptor", r"prefetch\.tensormap|tensormap\.", THREAD, "fetch or edit the descriptor of a tensor"),
    ),
    "barriers": (
        ("mbarrier.init", r"mbarrier\.(init|inval)", THREAD, "set how many arrivals end a phase"),
        ("mbarrier wait", r"mbarrier\.(try_wait|test_wait)", CTA, "is this phase over? (in a loop)"),
        ("mbarrier.arrive", r"mbarrier\.", THREAD, "arrive, and announce bytes that TMA will deliver"),
        ("thread barrier", r"bar\.|barrier\.", CTA, "meet: CTA, named group, warp or cluster"),
        ("fence", r"fence\.|membar", CTA, "make writes visible to another proxy or scope"),
        ("launch control", r"griddepcontrol|clusterlaunchcontrol", THREAD, "overlap kernels, fetch more work"),
    ),
    "warp": (
        ("elect.sync", r"elect\.sync", WARP, "choose the one thread that issues"),
        ("shuffle, vote", r"shfl|vote|redux|match|activemask", WARP, "exchange values in a warp"),
    ),
    "memory": (
        ("global memory", r"(ld|st|red|atom)(\.\w+)*\.global|cp\.async", CTA, "load and store GMEM from registers"),
        ("shared memory", r"(ld|st|red|atom)(\.\w+)*\.shared|mapa", CTA, "load and store SMEM from registers"),
        ("kernel parameters", r"ld\.param|cvta|ld\.const", CTA, "read launch arguments, convert addresses"),
        ("local memory", r"(ld|st)\.local", CTA, "spills and local arrays: should be absent"),
    ),
    "scalar": (
        ("branch, predicate", r"bra|ret|exit|setp|selp|call|(not|and|or|mov)\.pred", CTA, "control flow"),
        ("move, convert", r"mov|cvt|prmt|pack", CTA, "registers to registers, change of type"),
        ("floating point", r"\w+(\.\w+)*\.(f16|bf16|f32|f64)(x2)?$", CTA, "arithmetic on the CUDA cores"),
        ("integer", r"", CTA, "addresses and counters"),
    ),
}
FAMILIES = tuple(
    Family(name, unit, pattern, what, issuer) for unit, rows in _TABLE.items() for name, pattern, issuer, what in rows
)
UNITS = tuple(_TABLE)

_STATEMENT = re.compile(r"^(?:@!?%?\w+\s+)?([a-z][\w]*(?:\.[\w:]+)*)(?=[\s;])")
_LOC = re.compile(r"^\.loc\s+(\d+)\s+(\d+)\s+\d+")
_FILE = re.compile(r'^\.file\s+(\d+)\s+"([^"]*)"')


def instructions(ptx: str) -> Iterator[Instruction]:
    """Yield every instruction of ``ptx`` in order.

    Inside inline assembly the compiler counts `.loc` lines up by itself; those are ignored, so an instruction there
    belongs to the Python line that emitted the block. Without line info ``file`` is empty and ``line`` is 0.

    Raises:
        ArgumentError: ``ptx`` is not PTX text (it has no ``.target``).
    """
    if not isinstance(ptx, str) or not re.search(r"^\.target\s", ptx, re.M):
        raise ArgumentError("ptx", ptx, "PTX text (with a .target line)")
    lines = ptx.splitlines()
    files = {m[1]: PurePath(m[2]).name for m in map(_FILE.match, map(str.strip, lines)) if m}
    where, inline, body = ("", 0), False, False
    for number, line in enumerate(map(str.strip, lines), 1):
        if line.startswith("//"):
            inline = "begin inline asm" in line or (inline and "end inline asm" not in line)
        elif location := _LOC.match(line):
            where = where if inline else (files.get(location[1], ""), int(location[2]))
        elif not body:
            body = line == "{"  # declarations end where the first body opens
        else:
            for statement in line.strip("{} ").split(";")[:-1]:
                if found := _STATEMENT.match(statement.strip() + ";"):
                    yield Instruction(found[1], number, *where)


def family_of(opcode: str) -> Family:
    """Return the family of an opcode. Every opcode has one (the last, `integer`, takes what is left)."""
    return next(family for family in FAMILIES if re.match(family.pattern, opcode))


def instruction_table(ptx: str) -> list[FamilyCount]:
    """Return the families present in ``ptx`` with counts and instruction variants. The order is that of `FAMILIES`."""
    seen: dict[Family, Counter[str]] = {}
    for instruction in instructions(ptx):
        seen.setdefault(family_of(instruction.opcode), Counter())[instruction.opcode] += 1
    return [
        FamilyCount(family, seen[family].total(), tuple(seen[family].most_common()))
        for family in FAMILIES
        if family in seen
    ]


def count(ptx: str, prefix: str) -> int:
    """Count instructions of ``ptx`` whose opcode starts with ``prefix``. For example ``tcgen05.mma``."""
    return sum(instruction.opcode.startswith(prefix) for instruction in instructions(ptx))


@styled
def instruction_bars(ptx: str, title: str = "Instructions in the PTX") -> Figure:
    """Draw the bars of `instruction_table`. One a family, one colour a hardware unit, the count at its end."""
    rows = instruction_table(ptx)
    fig = style.new_figure(height=0.9 + 0.24 * len(rows))
    ax = fig.subplots()
    colour = {unit: kinds.colour(unit) for unit in UNITS}
    positions = range(len(rows))
    for unit in UNITS:
        of_unit = [(y, row.count) for y, row in zip(positions, rows, strict=True) if row.family.unit == unit]
        if of_unit:
            ax.barh(*zip(*of_unit, strict=True), color=colour[unit], height=0.72, label=unit)
    longest = max(row.count for row in rows)
    for y, row in zip(positions, rows, strict=True):
        ax.text(row.count + 0.01 * longest, y, str(row.count), va="center", fontsize=8)
        ax.text(longest * 1.14, y, row.family.what, va="center", fontsize=8, color=style.MUTED)
    ax.set_yticks(positions, [row.family.name for row in rows])
    ax.tick_params(axis="y", length=0, labelcolor=style.INK)
    ax.set(xlim=(0, longest * 2.25), ylim=(len(rows) - 0.4, -0.6), title=title)
    ax.set_xticks([])
    ax.spines[:].set_visible(False)
    ax.legend(ncols=len(UNITS), loc="upper left", bbox_to_anchor=(-0.01, 0), fontsize=8, handlelength=1, frameon=False)
    parts = ", ".join(f"{row.family.name} {row.count}" for row in rows)
    return style.set_alt(fig, f"Bar chart of static PTX instruction counts by family: {parts}.")


def function_body(function: Callable[..., Any]) -> str:
    """Return a Python function's statements with their comments, to show beside PTX.

    Without signature and docstring.
    """
    lines = textwrap.dedent(inspect.getsource(function)).splitlines()
    definition = ast.parse("\n".join(lines)).body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise ArgumentError("function", function, "a function written with def")
    first = definition.body[0]
    start = first.end_lineno if ast.get_docstring(definition) is not None else first.lineno - 1
    return textwrap.dedent("\n".join(lines[start : definition.end_lineno]))


def ptx_excerpt(ptx: str, pattern: str, context: int = 2, source: str | None = None, limit: int = 1) -> str:
    """Return the places where ``pattern`` matches an opcode. They are PTX lines with the Python line each came from.

    Args:
        ptx: PTX text with line info.
        pattern: regular expression at the start of the opcode.
        context: instructions shown before and after.
        source: text of the Python file; if given, the Python line is printed above its instructions.
        limit: how many places at most.

    Raises:
        ArgumentError: no PTX, or nothing matches.
    """
    found = list(instructions(ptx))
    hits = [i for i, instruction in enumerate(found) if re.match(pattern, instruction.opcode)]
    if not hits:
        raise ArgumentError("pattern", pattern, "one that matches an opcode of this PTX")
    lines, python = ptx.splitlines(), (source or "").splitlines()
    blocks = []
    for hit in hits[:limit]:
        out, last = [], None
        around = {i.ptx_line: i for i in found[max(0, hit - context) : hit + context + 1]}  # a line may hold several
        for instruction in around.values():
            place = f"{instruction.file}:{instruction.line}" if instruction.line else "no line info"
            if place != last:
                said = python[instruction.line - 1].strip() if 0 < instruction.line <= len(python) else ""
                out.append(f"# {place}  {said}".rstrip())
                last = place
            mark = ">" if instruction.ptx_line == found[hit].ptx_line else " "
            text = " ".join(lines[instruction.ptx_line - 1].split())
            out.append(f"{mark}{instruction.ptx_line:5d}  {text if len(text) <= WIDTH else text[: WIDTH - 3] + '...'}")
        blocks.append("\n".join(out))
    return "\n\n".join(blocks)


def passage(ptx: str, pattern: str, length: int) -> list[str]:
    """Return ``length`` instructions as text, from the first on whose opcode matches ``pattern`` at its start.

    Raises:
        ArgumentError: no PTX, or nothing matches.
    """
    found, lines = list(instructions(ptx)), ptx.splitlines()
    start = next((i for i, one in enumerate(found) if re.match(pattern, one.opcode)), None)
    if start is None:
        raise ArgumentError("pattern", pattern, "one that matches an opcode of this PTX")
    places = dict.fromkeys(one.ptx_line for one in found[start : start + length])  # a line may hold several
    return [" ".join(lines[place - 1].split()).strip("{} ") for place in places]


def global_widths(ptx: str) -> Counter[int]:
    """Count the loads and stores of global memory from registers, by the bytes that a thread moves."""
    found: Counter[int] = Counter()
    for instruction in instructions(ptx):
        match = re.match(r"(?:ld|st)(?:\.\w+)*\.global(?:\.\w+)*?(?:\.v(\d))?\.[a-z]+(\d+)$", instruction.opcode)
        if match:
            found[int(match[1] or 1) * int(match[2]) // 8] += 1
    return found


def show_beside(passages: Mapping[str, Sequence[str]]) -> None:
    """Display texts side by side in a notebook, by their titles."""
    from IPython.display import display

    cells = "".join(
        f'<td style="vertical-align:top;padding-right:24px"><div style="color:{style.MUTED}">{html.escape(title)}</div>'
        f'<pre style="line-height:1.35;color:{style.INK}">{html.escape(chr(10).join(lines))}</pre></td>'
        for title, lines in passages.items()
    )
    width = max(len(line) for lines in passages.values() for line in lines) + 3
    rows = itertools.zip_longest(*passages.values(), fillvalue="")
    text = ["".join(f"{one:{width}}" for one in row).rstrip() for row in (tuple(passages), *rows)]
    page = f'<table style="border-collapse:collapse;text-align:left"><tr>{cells}</tr></table>'
    display({"text/html": page, "text/plain": chr(10).join(text)}, raw=True)
