"""Parse operands and the names they use. Registers, variables and labels in scopes, immediates, memory.

PTX ISA, chapters "Identifiers", "Constants" and "Instruction Operands". A `{ }` block opens a scope; inline assembly
declares the same names in every one of its blocks, so a name of an inner scope gets the scope's number appended
(`P1@7`). Registers come into being at their first use: `.reg .b32 %r<5000>` costs nothing for those that are not used.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from dsv4lib.emulator.ptx.ir import Imm, Memory, Operand, Pair, Reg, Register, Sink, Special, Symbol, Vector
from dsv4lib.emulator.ptx.lexer import split

TYPE_BITS = {
    **{"pred": 1},
    **dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
    "b128": 128,
}

_XYZ = ("x", "y", "z")
SPECIALS = frozenset(
    [f"{name}.{c}" for name in ("tid", "ntid", "ctaid", "nctaid") for c in _XYZ]
    + [f"{name}.{c}" for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for c in _XYZ]
    + ["laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid", "cluster_ctarank", "cluster_nctarank"]
    + ["is_explicit_cluster", "clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"]
    + [f"lanemask_{c}" for c in ("eq", "le", "lt", "ge", "gt")]
    + ["total_smem_size", "aggr_smem_size", "dynamic_smem_size", "current_graph_exec"]
    + ["reserved_smem_offset_begin", "reserved_smem_offset_end", "reserved_smem_offset_cap"]
    + ["reserved_smem_offset_0", "reserved_smem_offset_1"]
    + [f"envreg{i}" for i in range(32)]
    + [f"pm{i}{suffix}" for i in range(8) for suffix in ("", "_64")]
)

_MASK64 = (1 << 64) - 1
_NAME = re.compile(r"[%$_A-Za-z][\w$]*(?:\.[xyzwrgba])?")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?")
_FLOAT_BITS = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_DECIMAL = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?")
_BASE = re.compile(r"(?P<base>[%$_A-Za-z][\w$]*(?:\.[xyzwrgba])?)\s*(?P<terms>(?:[-+]\s*-?\s*\w+\s*)*)")
_TERM = re.compile(r"([-+])\s*(-?)\s*(\w+)")
_COMPONENTS = {"r": "x", "g": "y", "b": "z", "a": "w"}


class OperandError(Exception):
    """An operand that cannot be read; the parser adds the line."""


@dataclass
class Scope:
    """Names declared between one pair of braces."""

    number: int
    parent: Scope | None
    registers: dict[str, Reg | Vector] = field(default_factory=dict)
    ranges: dict[str, tuple[int, int]] = field(default_factory=dict)  # prefix -> (count, bits) of `%r<100>`
    declared: dict[str, int] = field(default_factory=dict)  # name -> bits, no register yet
    symbols: dict[str, str] = field(default_factory=dict)  # variable or parameter -> its unique name
    labels: dict[str, str] = field(default_factory=dict)
    cache: dict[str, Operand] = field(default_factory=dict)

    def unique(self, name: str) -> str:
        """``name`` made unique in the kernel."""
        return name if self.parent is None else f"{name}@{self.number}"


def integer(text: str) -> int:
    """Read a PTX integer: decimal, hexadecimal, octal or binary, with sign and ``U``."""
    if not _INTEGER.fullmatch(text):
        raise OperandError(f"{text!r} is not an integer")
    digits = text.rstrip("U").lstrip("-")
    octal = len(digits) > 1 and digits[0] == "0" and digits[1].isdigit()
    try:
        value = int(digits, 8 if octal else 0)
    except ValueError:
        raise OperandError(f"{text!r} is not an octal integer") from None
    if value > _MASK64:
        raise OperandError(f"{text!r} does not fit in 64 bits")
    return -value if text[0] == "-" else value


def immediate(text: str, opcode: str) -> Imm | None:
    """Read a constant as raw bits, or None if ``text`` is not a constant.

    A floating-point constant takes the precision of the instruction's operands, however it is written; bit-size types
    take those of their own size as they are.

    Raises:
        OperandError: a floating-point constant that is too large or that the instruction's type does not have.
    """
    if _INTEGER.fullmatch(text):
        return Imm(integer(text) & _MASK64)
    bits = _FLOAT_BITS.fullmatch(text)
    if bits is None and not _DECIMAL.fullmatch(text):
        return Imm(32) if text == "WARP_SZ" else None
    types = [t for t in opcode.split(".") if t in ("f32", "f64", "b32", "b64")]
    kind = types[0 if opcode.startswith("slct") else -1] if types else ""
    if bits is not None and (kind == "b64" or kind[1:] == ("32" if bits[1] else "64")):  # a b64 may be two b32
        return Imm(int(bits[1] or bits[2], 16))
    if kind in ("", "b32"):
        raise OperandError(f"{text} is no constant of the type of {opcode}")
    if bits is None:
        value = float(text)
    else:
        value = struct.unpack(">f" if bits[1] else ">d", bytes.fromhex(bits[1] or bits[2]))[0]
    if bits is None and math.isinf(value):
        raise OperandError(f"{text} does not fit in double precision")
    if kind == "f32":
        with np.errstate(over="ignore"):
            return Imm(int(np.float32(value).view(np.uint32)))
    return Imm(struct.unpack("<Q", struct.pack("<d", value))[0])


class Names:
    """Scopes of one kernel, and its operands.

    Args:
        module_symbols: variables of the module, by name.
        functions: addresses of functions, by name.
    """

    def __init__(self, module_symbols: dict[str, str], functions: Mapping[str, int] = MappingProxyType({})):
        self.functions = functions
        self.registers: list[Register] = []
        self.scope = Scope(0, None, symbols=dict(module_symbols))
        self._count = 0

    def push(self) -> None:
        """Enter a block."""
        self._count += 1
        self.scope = Scope(self._count, self.scope)

    def pop(self) -> None:
        """Leave a block."""
        assert self.scope.parent is not None
        self.scope = self.scope.parent

    def declare_registers(self, text: str) -> None:
        """Declare the registers of ``%r<100>, a;`` in ``.reg .b32 %r<100>, a;``."""
        match = re.fullmatch(r"\s*(?:\.(v[24])\s+)?\.(\w+)\s+(.*)", text, re.S)
        if match is None or match[2] not in TYPE_BITS:
            raise OperandError(f"register declaration {text.strip()!r}")
        lanes, bits, scope = match[1], TYPE_BITS[match[2]], self.scope
        scope.cache.clear()  # an equal name of an outer scope is hidden from here on
        for item in split(match[3]) or [""]:
            found = re.fullmatch(r"([%$_A-Za-z][\w$]*)(?:\s*<\s*(\d+)\s*>)?", item)
            if found is None:
                raise OperandError(f"register name {item!r}")
            name, count = found[1], found[2]
            if name in (scope.declared if count is None else scope.ranges):  # `a<2>`, a0 and a1, leaves `a` free
                raise OperandError(f"register {name} is declared twice")
            if count is not None and lanes is None:
                scope.ranges[name] = (int(count), bits)
                continue
            for single in [name] if count is None else [f"{name}{i}" for i in range(int(count))]:
                scope.declared[single] = bits
                if lanes is not None:
                    parts = [f"{single}.{c}" for c in "xyzw"[: int(lanes[1])]]
                    scope.declared |= dict.fromkeys(parts, bits)
                    scope.registers[single] = Vector(tuple(self._create(scope, part, bits) for part in parts))

    def declare_symbol(self, name: str) -> str:
        """Declare a variable of the current scope; return its unique name."""
        if name in self.scope.symbols:
            raise OperandError(f"variable {name} is declared twice")
        self.scope.cache.clear()
        self.scope.symbols[name] = unique = self.scope.unique(name)
        return unique

    def declare_label(self, name: str) -> str:
        """Declare a label of the current scope; return its unique name."""
        if name in self.scope.labels:
            raise OperandError(f"label {name} is declared twice")
        self.scope.labels[name] = unique = self.scope.unique(name)
        return unique

    def _create(self, scope: Scope, name: str, bits: int) -> Reg:
        register = Register(len(self.registers), scope.unique(name), bits)
        self.registers.append(register)
        scope.registers[name] = operand = Reg(register.index)
        return operand

    def lookup(self, name: str) -> Operand | None:
        """Look up the register or variable that ``name`` means here, or None."""
        if name[-2:-1] == "." and name[-1] in _COMPONENTS:
            name = name[:-1] + _COMPONENTS[name[-1]]
        scope: Scope | None = self.scope
        while scope is not None:
            if (register := scope.registers.get(name)) is not None:
                return register
            if (bits := scope.declared.get(name)) is not None:
                return self._create(scope, name, bits)
            if (bits := _in_range(scope.ranges, name)) is not None:
                return self._create(scope, name, bits)
            if (symbol := scope.symbols.get(name)) is not None:
                return Symbol(symbol)
            scope = scope.parent
        if name[0] == "%" and name[1:] in SPECIALS:
            return Special(name[1:])
        return None

    def operands(self, text: str, opcode: str) -> tuple[Operand, ...]:
        """Read the operand list of an instruction."""
        items = split(text)
        if items is None:
            raise OperandError(f"operands {text.strip()!r} are not a balanced list")
        cache = self.scope.cache
        out = []
        for item in items:
            operand = cache.get(item)
            if operand is None:
                operand = self.operand(item, opcode)
                # The bits of floats depend on the opcode, everything else on the scope alone.
                if not _DECIMAL.search(item) and not _FLOAT_BITS.search(item):
                    cache[item] = operand
            out.append(operand)
        return tuple(out)

    def operand(self, text: str, opcode: str) -> Operand:
        """Read one operand.

        Raises:
            OperandError: it is none of the forms, or a name is not declared.
        """
        first = text[:1]
        if first == "[":
            return self._memory(text, opcode)
        if first in "{(":
            inner = text[1:-1].strip()
            return Vector(self.operands(inner, opcode) if inner else ())
        if "|" in text:
            head, _, tail = text.partition("|")
            return Pair(self.operand(head.strip(), opcode), self.operand(tail.strip(), opcode))
        if text == "_":
            return Sink()
        if first == "!":
            register = self.operand(text[1:].strip(), opcode)
            if not isinstance(register, Reg) or self.registers[register.index].bits != 1:
                raise OperandError(f"{text!r}: only a predicate can be negated")
            return Reg(register.index, True)
        if (constant := immediate(text, opcode)) is not None:
            return constant
        if _NAME.fullmatch(text) and (found := self.lookup(text)) is not None:
            return found
        if text in self.functions:
            return Imm(self.functions[text])
        if (match := _BASE.fullmatch(text)) and match["terms"]:
            found = self.lookup(match["base"])
            if isinstance(found, Symbol):  # an address expression: `mov.b64 %rd1, table+16`
                return Symbol(found.name, _sum(match["terms"]))
        raise OperandError(f"{text!r} is not declared" if _NAME.fullmatch(text) else f"operand {text!r}")

    def _memory(self, text: str, opcode: str) -> Memory:
        """``[base+offset]`` or ``[base, {coordinates}, ...]``."""
        items = split(text[1:-1])
        if not items or text[-1] != "]":
            raise OperandError(f"address {text!r}")
        rest = tuple(self.operand(item, opcode) for item in items[1:])
        if _INTEGER.fullmatch(items[0]):
            return Memory(Imm(integer(items[0]) & _MASK64), 0, rest)
        match = _BASE.fullmatch(items[0])
        if match is None:
            raise OperandError(f"address {text!r}")
        base = self.lookup(match["base"])
        if base is None:
            raise OperandError(f"{match['base']!r} is not declared")
        if isinstance(base, Vector):
            raise OperandError(f"address {text!r} is a vector")
        return Memory(base, _sum(match["terms"]), rest)


def _sum(terms: str) -> int:
    """``+8``, ``+-8``, ``+4+16``."""
    total = 0
    for sign, minus, digits in _TERM.findall(terms):
        value = integer(digits)
        total += -value if (sign == "-") != (minus == "-") else value
    return total


def _in_range(ranges: dict[str, tuple[int, int]], name: str) -> int | None:
    """Bits of ``%r12`` if ``%r<13>`` or more is declared. The prefix may itself end in digits."""
    end = len(name)
    while end > 1 and name[end - 1].isdigit():
        end -= 1
        declared = ranges.get(name[:end])
        if declared is not None and int(name[end:]) < declared[0] and (name[end] != "0" or end == len(name) - 1):
            return declared[1]
    return None
