"""Accept modifiers in another order than the PTX ISA's: ptxas takes most of them.

The assembler reads an instruction's name, ``cp.async.bulk.tensor`` or ``add``, and then a bag of modifiers. Order
matters only among those of one kind: types (``cvt.f32.s32``), state spaces (``.global.shared::cta``), cache priorities
(``createpolicy``), matrix layouts (``.row.col``). That is what ptxas 13.4 does, found by assembling every pattern of
`isa` with its modifiers shuffled; a test repeats it where a ptxas is installed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Names of more than one word; every other name is the word before the first dot. The longest alternative stands first.
_NAME = re.compile(
    r"(?:bar|barrier)(?:\.cta|\.cluster|\.warp)?\.(?:sync|arrive|red|wait)"
    r"|cp\.async\.(?:mbarrier\.arrive|commit_group|wait_group|wait_all)"
    r"|cp\.async\.bulk\.(?:prefetch\.tensor|prefetch|tensor|commit_group|wait_group)"
    r"|cp\.(?:reduce\.)?async(?:\.bulk(?:\.tensor)?)?"
    r"|mbarrier\.(?:arrive|arrive_drop)\.expect_tx|mbarrier\.(?:test|try)_wait\.parity|fence\.proxy\.[\w:]+"
    r"|tcgen05\.(?:ld\.red|mma\.sp|mma\.ws\.sp|mma\.ws|[\w:]+)|clusterlaunchcontrol\.\w+(?:\.async)?"
    r"|(?:mad|madc|mad24|mul|mul24|dp2a)\.(?:lo|hi|wide)|shf\.[lr]|setmaxnreg\.(?:inc|dec)|div\.full|cvta\.to"
    r"|(?:red|st)\.async|st\.bulk|cvt\.pack|(?:createpolicy|griddepcontrol|mbarrier|tensormap|wgmma|membar|multimem|match)\.\w+"
    r"|\w+"
)
_TYPE = re.compile(r"(?:pred|[subf]\d+(?:x\d+)?|bf16(?:x2)?|tf32|u?e\dm\d(?:x\d)?|s2f6(?:x2)?|b\dx16\w*|b8x16)\Z")
_SPACE = re.compile(r"(?:global|const|local|shared(?:::\w+)?|param(?:::\w+)?)\Z")


def kind(word: str) -> str:
    """Classify ``word``: the kind in which its order matters, "" if it does not."""
    for name, pattern in (("type", _TYPE), ("space", _SPACE)):
        if pattern.match(word):
            return name
    for name, words in (("layout", ("row", "col")), ("reduction", ("and", "or", "xor", "popc"))):
        if word in words:
            return name
    return "priority" if word.startswith("L2::evict") else ""


@dataclass(frozen=True)
class Slot:
    """One modifier of a pattern."""

    regex: re.Pattern[str]


@dataclass(frozen=True)
class Optional:
    """Modifiers of a pattern that are there together or not at all."""

    slots: tuple[Slot | Optional, ...]


@functools.cache
def slots(pattern: str) -> tuple[Slot | Optional, ...]:
    """Split a pattern of `isa` at its dots."""
    out: list[Slot | Optional] = []
    text, i = "", 0
    while i <= len(pattern):
        c = pattern[i : i + 1]
        if c in (".", "[", "") and text:
            out.append(Slot(re.compile(text)))
            text = ""
        if c == "[":
            end = closing(pattern, i)
            out.append(Optional(slots(pattern[i + 1 : end])))
            i = end
        elif c == "<":
            end = pattern.index(">", i)
            options = pattern[i + 1 : end].partition(":")[2].split("|")
            text += f"(?:{'|'.join(map(re.escape, options))})"
            i = end
        elif c not in (".", ""):
            text += re.escape(c)
        i += 1
    return tuple(out)


def closing(pattern: str, start: int) -> int:
    """Find the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(pattern)):
        depth += {"[": 1, "]": -1}.get(pattern[i], 0)
        if not depth:
            return i
    raise AssertionError(f"unbalanced pattern {pattern}")


def name(opcode: str) -> str:
    """Read from an opcode the words whose place is fixed."""
    match = _NAME.match(opcode)
    return match.group() if match else opcode


def reorder(opcode: str, pattern: str) -> set[str]:
    """List the opcodes in ``pattern``'s order with the modifiers of ``opcode``. Normally there is none or one."""
    head = name(opcode)
    words = tuple(opcode.split("."))
    found = {".".join(order) for order, rest in _place(slots(pattern), words) if not rest}
    return {variant for variant in found if name(variant) == head}


def _place(todo: tuple[Slot | Optional, ...], words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], tuple]]:
    """Every way to fill the slots in order with some of ``words``: (words in order, words left over)."""
    if not todo:
        yield (), words
        return
    slot, rest = todo[0], todo[1:]
    if isinstance(slot, Optional):
        yield from _place((*slot.slots, *rest), words)
        yield from _place(rest, words)
        return
    seen: set[str] = set()
    for i, word in enumerate(words):
        of = kind(word)
        if of and of in seen:
            continue
        seen.add(of)
        if slot.regex.fullmatch(word):
            for order, left in _place(rest, words[:i] + words[i + 1 :]):
                yield (word, *order), left
