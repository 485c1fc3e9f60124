"""Register the PTX instruction variants that the emulator implements. One strict pattern per implementation.

A pattern is an opcode with its modifiers in the order the PTX ISA gives them. ``[...]`` is optional, ``<name:a|b>`` is
one of the alternatives and is handed to the implementation under that name:

    mbarrier.try_wait[.<parity:parity>][.<sem:acquire|relaxed>][.<scope:cta|cluster>][.<space:shared|shared::cta>].b64

An opcode that no pattern matches *entirely* is refused with the nearest pattern, so an unknown modifier can never be
ignored. Modifiers in another order than the pattern's are accepted where the assembler accepts them (variants.py); the
`Form` then has the pattern's order. The registered patterns are also the coverage page.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dsv4lib.emulator.errors import Place, UnsupportedInstruction
from dsv4lib.emulator.isa import variants


@dataclass(frozen=True)
class Form:
    """One instruction variant, taken apart.

    Attributes:
        opcode: all of it, such as ``add.s32``, in the pattern's order.
        pattern: the pattern that matched.
        parts: captured alternatives by name; an absent optional part is missing from the dict.
    """

    opcode: str
    pattern: str
    parts: dict[str, str] = field(default_factory=dict)

    def get(self, name: str, default: str = "") -> str:
        """Get the captured alternative ``name``, or ``default`` where there is none."""
        return self.parts.get(name, default)

    def has(self, name: str) -> bool:
        """Tell whether the optional part ``name`` is there."""
        return name in self.parts


@dataclass(frozen=True)
class Entry:
    """A registered implementation. ``kind`` is "native" (emits LLVM IR) or "service" (runs in Python)."""

    kind: str
    pattern: str
    implementation: Callable[..., Any]
    note: str

    @functools.cached_property
    def regex(self) -> re.Pattern[str]:
        """Compile the pattern when its opcode is first asked for: a launch needs a tenth of the patterns."""
        return compile_pattern(self.pattern)


_ENTRIES: dict[str, list[Entry]] = {}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Turn a pattern into a regular expression for the whole opcode."""
    out, i = [], 0
    while i < len(pattern):
        c = pattern[i]
        if c == "[":
            out.append("(?:")
        elif c == "]":
            out.append(")?")
        elif c == "<":
            end = pattern.index(">", i)
            name, _, alternatives = pattern[i + 1 : end].partition(":")
            # Longest first: "shared::cta" before "shared", whatever the order in the pattern.
            options = sorted(alternatives.split("|"), key=len, reverse=True)
            out.append(f"(?P<{name}>{'|'.join(map(re.escape, options))})")
            i = end
        else:
            out.append(re.escape(c))
        i += 1
    return re.compile("".join(out) + r"\Z")


def register(kind: str, *patterns: str, note: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the implementation of all variants of ``patterns``. ``note`` (limits, source): for the coverage page."""

    def add(implementation: Callable[..., Any]) -> Callable[..., Any]:
        for pattern in patterns:
            base = re.split(r"[.\[<]", pattern, maxsplit=1)[0]
            _ENTRIES.setdefault(base, []).append(Entry(kind, pattern, implementation, note))
        return implementation

    return add


native = functools.partial(register, "native")
service = functools.partial(register, "service")


@functools.cache
def find(opcode: str) -> tuple[Entry, Form] | None:
    """Find the implementation of an opcode, or None. Two patterns that both match are a defect of ours."""
    base = opcode.split(".", 1)[0]
    matches = [(e, m) for e in _ENTRIES.get(base, ()) if (m := e.regex.match(opcode))]
    if len(matches) > 1:
        raise AssertionError(f"{opcode} matches {[e.pattern for e, _ in matches]}")
    if not matches:
        others = {other for e in _ENTRIES.get(base, ()) for other in variants.reorder(opcode, e.pattern)}
        return find(others.pop()) if len(others) == 1 else None
    entry, match = matches[0]
    parts = {k: v for k, v in match.groupdict().items() if v is not None}
    return entry, Form(opcode, entry.pattern, parts)


def lookup(opcode: str, place: Place | None = None) -> tuple[Entry, Form]:
    """Find the implementation of an opcode, or raise.

    Raises:
        UnsupportedInstruction: none matches; the message names the closest patterns.
    """
    found = find(opcode)
    if found is not None:
        return found
    base = opcode.split(".", 1)[0]
    known = [e.pattern for e in _ENTRIES.get(base, ())]
    near = difflib.get_close_matches(opcode, known, n=3, cutoff=0.0) if known else []
    hint = f"; implemented of {base}: " + ", ".join(near) if near else f"; nothing of {base} is implemented"
    raise UnsupportedInstruction(f"{opcode} is not implemented{hint}", place)


def entries() -> Iterator[Entry]:
    """List every registered implementation, by opcode."""
    for base in sorted(_ENTRIES):
        yield from _ENTRIES[base]
