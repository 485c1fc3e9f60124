"""Parse declarations of variables and kernel parameters, with their initialisers.

PTX ISA, chapter "State Spaces, Types, and Variables".
"""

from __future__ import annotations

import math
import re

from dsv4lib.emulator.ptx.ir import Param, Pointer, Variable
from dsv4lib.emulator.ptx.lexer import split
from dsv4lib.emulator.ptx.operands import TYPE_BITS, OperandError, immediate, integer

SPACES = ("global", "const", "shared", "local", "param")
_DECLARATION = re.compile(
    r"\s*\.(?P<space>global|const|shared(?:::cta)?|local|param)\b(?P<attributes>(?:\s*\.(?:align\s+\d+|attribute\s*\([^)]*\)))*)"
    r"\s*(?:\.v(?P<lanes>[248])\b)?\s*\.(?P<type>\w+)\s*(?P<ptr>\.ptr(?:\s*\.(?:global|shared|const|local|param)\b)?"
    r"(?:\s*\.align\s+\d+)?)?(?P<declarators>.*)",
    re.S,
)
_DECLARATOR = re.compile(r"(?P<name>[%$_A-Za-z][\w$]*)\s*(?P<dims>(?:\[\s*\d*\s*\]\s*)*)(?:=\s*(?P<value>.*))?", re.S)
_ADDRESS = re.compile(  # a mask of one byte, the address of a name as it is or generic, an offset
    r"(?:(?P<mask>0[xX][fF]{2}(?:00)*)\s*\(\s*)?(?:generic\s*\(\s*)?(?P<name>[%$_A-Za-z][\w$]*)\s*\)?"
    r"\s*(?:(?P<sign>[+-])\s*(?P<addend>\w+)\s*)?\)?"
)
_ALIGN = re.compile(r"\.align\s+(\d+)")


def variables(text: str, extern: bool = False) -> list[Variable]:
    """Read a declaration such as ``.shared .align 16 .b8 a[64], b;``, no semicolon.

    Raises:
        OperandError: a form or type that is not known.
    """
    match = _DECLARATION.fullmatch(text)
    if match is None or match["type"] not in TYPE_BITS or match["type"] == "pred":
        raise OperandError(f"declaration {' '.join(text.split())[:120]!r}")
    space = match["space"].partition("::")[0]
    element = TYPE_BITS[match["type"]] // 8 * int(match["lanes"] or 1)
    alignment = _ALIGN.search(match["attributes"])
    align = int(alignment[1]) if alignment else element
    if align & (align - 1) or align == 0:
        raise OperandError(f".align {align} is not a power of two")
    out = []
    for item in _declarators(match["declarators"]):
        found = _DECLARATOR.fullmatch(item)
        if found is None:
            raise OperandError(f"declarator {item!r}")
        dims = re.findall(r"\[\s*(\d*)\s*\]", found["dims"])
        data, pointers = (None, ()) if found["value"] is None else _data(found["value"], match["type"])
        if "" in dims:
            if dims[1:].count("") or (dims[0] == "" and not extern and data is None):
                raise OperandError(f"{found['name']} has no size")
            inner = element * math.prod(map(int, dims[1:]))
            size = 0 if data is None else -(-len(data) // inner) * inner
        else:
            size = element * math.prod(map(int, dims))
        if data is not None:
            if len(data) > size:
                raise OperandError(f"{found['name']} has {size} bytes, its initialiser {len(data)}")
            data = data.ljust(size, b"\0")
        out.append(Variable(found["name"], space, size, align, extern, data, pointers))
    return out


def parameters(text: str) -> list[Param]:
    """Read the parameter list of an entry, laid out in its parameter block."""
    out: list[Param] = []
    offset = 0
    if not text.strip():
        return out
    for item in split(text) or [""]:
        (variable,) = variables(item)
        declared = _DECLARATION.fullmatch(item)
        assert declared is not None  # or `variables` had refused it
        offset = -(-offset // variable.align) * variable.align
        kind, pointer = declared["type"], declared["ptr"] is not None
        out.append(Param(variable.name, offset, variable.size, variable.align, kind, pointer))
        offset += variable.size
    return out


def _declarators(text: str) -> list[str]:
    """`a[4], b = {1, 2}`: split at the commas outside braces, of which there may be several levels."""
    depth, start, out = 0, 0, []
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    return [*out, text[start:].strip()]


def _data(text: str, kind: str) -> tuple[bytes, tuple[Pointer, ...]]:
    """An initialiser as bytes, and what of it are addresses."""
    size = TYPE_BITS[kind] // 8
    out, pointers = bytearray(), []
    for item in re.sub(r"[{}]", " ", text).split(","):
        item = item.strip()
        if not item:
            continue
        constant = immediate(item, f".{kind}")
        if constant is None:
            pointers.append(_pointer(item, len(out), size))
        bits = 0 if constant is None else constant.bits
        out += (bits & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return bytes(out), tuple(pointers)


def _pointer(item: str, offset: int, size: int) -> Pointer:
    """``generic(table)+8``, ``function`` or ``0xFF00(table)``; global and generic addresses are the same here."""
    match = _ADDRESS.fullmatch(item)
    if match is None or item.count("(") != item.count(")") or (match["mask"] and size != 1):
        raise OperandError(f"initialiser {item!r}")
    addend = integer(match["addend"]) if match["addend"] else 0
    shift = 4 * len(match["mask"][4:]) if match["mask"] else 0
    return Pointer(offset, size, match["name"], -addend if match["sign"] == "-" else addend, shift)
