"""Write native handlers. One small LLVM-IR function per PTX instruction variant, over vectors of 32 lanes.

A handler has the type ``i32 (ptr context, ptr record)`` (see ``abi.py``). The Emitter hides the addressing: it loads
operand ``i`` as a vector, lets ordinary Python operators build the arithmetic, and stores with the lane mask applied,
so that lanes that do not execute keep their old bits. IR is written as text: every intrinsic and every constrained
floating-point operation of LLVM is then at hand, and the text is the cache key of the compiled code.

An opcode alone does not fix the operands: ``mov.b64 {a, b}, c`` and ``mov.b64 c, {a, b}`` share it. The *shape* does:
one item per PTX operand, separated by spaces:

    32        a register of 32 bits (8, 16, 32, 64, 128; 1 = predicate)
    !1        a negated predicate
    i         an immediate, special register or symbol: it has no width of its own
    _         the sink, a result that is not used
    {32,32}   a vector; 32|1 a pair of destinations; [64] a memory operand (its base)

Operands are numbered after flattening. By loading and storing them the emitter also *declares* their widths, which is
how the program lays out its constants: ``Handler.widths``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import llvmlite.binding as llvm

from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.ptx.ir import Memory, Operand, Pair, Reg, Sink, Vector

LLVM_NAME = {"f16": "half", "bf16": "bfloat", "f32": "float", "f64": "double"}
BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "i128": 128, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}
# Helper functions shared by handlers, by name: LLVM IR text with "internal" linkage.
HELPERS: dict[str, str] = {}


def is_float(kind: str) -> bool:
    """Tell whether ``kind`` is f16, bf16, f32 or f64."""
    return kind in LLVM_NAME


def type_name(kind: str, n: int) -> str:
    """Name the LLVM type of ``n`` lanes of ``kind``; n = 0 is a scalar."""
    scalar = LLVM_NAME.get(kind, kind)
    return f"<{n} x {scalar}>" if n else scalar


class Value:
    """An SSA value: ``n`` lanes of ``kind`` (n = 0: a scalar). Operators emit instructions; Python numbers splat."""

    __slots__ = ("e", "ref", "kind", "n")

    def __init__(self, e: Emitter, ref: str, kind: str, n: int):
        self.e, self.ref, self.kind, self.n = e, ref, kind, n

    @property
    def type(self) -> str:
        """Get the LLVM type."""
        return type_name(self.kind, self.n)

    @property
    def typed(self) -> str:
        """Write type and reference, as an operand is written."""
        return f"{self.type} {self.ref}"

    def _arith(self, name: str, other: Number, swap: bool = False) -> Value:
        a, b = self, self.like(other)
        if swap:
            a, b = b, a
        return self.e.binary(("f" if is_float(self.kind) else "") + name, a, b)

    def like(self, other: Number) -> Value:
        """Convert ``other`` to a value of this type; Python numbers become constants."""
        if isinstance(other, Value):
            return other
        return self.e.const(other, self.kind, self.n)

    def __add__(self, other: Number) -> Value:
        return self._arith("add", other)

    def __radd__(self, other: Number) -> Value:
        return self._arith("add", other, swap=True)

    def __sub__(self, other: Number) -> Value:
        return self._arith("sub", other)

    def __rsub__(self, other: Number) -> Value:
        return self._arith("sub", other, swap=True)

    def __mul__(self, other: Number) -> Value:
        return self._arith("mul", other)

    def __rmul__(self, other: Number) -> Value:
        return self._arith("mul", other, swap=True)

    def __truediv__(self, other: Number) -> Value:
        return self.e.binary("fdiv", self, self.like(other))

    def __and__(self, other: Number) -> Value:
        return self.e.binary("and", self, self.like(other))

    def __or__(self, other: Number) -> Value:
        return self.e.binary("or", self, self.like(other))

    def __xor__(self, other: Number) -> Value:
        return self.e.binary("xor", self, self.like(other))

    def __lshift__(self, other: Number) -> Value:
        return self.e.binary("shl", self, self.like(other))

    def __rshift__(self, other: Number) -> Value:
        return self.e.binary("lshr", self, self.like(other))

    def sar(self, other: Number) -> Value:
        """Shift right arithmetically."""
        return self.e.binary("ashr", self, self.like(other))

    def __invert__(self) -> Value:
        return self ^ -1

    def __neg__(self) -> Value:
        if is_float(self.kind):
            return self.e.line(f"fneg {self.typed}", self.kind, self.n)
        return 0 - self


Number = Value | int | float


@dataclass(frozen=True)
class Handler:
    """The IR of one instruction variant with one shape, before compilation.

    Attributes:
        text: function definition with ``@NAME`` for the name.
        widths: bits of every flattened operand as the handler accesses it; 0 = not accessed.
        stores: which flattened operands are written.
        declarations: LLVM declarations it needs.
        helpers: names in ``HELPERS`` it calls.
    """

    text: str
    widths: tuple[int, ...]
    stores: frozenset[int]
    declarations: frozenset[str] = frozenset()
    helpers: frozenset[str] = frozenset()


def shape_of(operands: Sequence[Operand], bits: Callable[[Reg], int]) -> str:
    """Make the shape string of parsed operands. ``bits`` gives the width of a register.

    >>> shape_of((Reg(0), Imm(1)), lambda r: 32)
    '32 i'
    """

    def item(operand: Operand) -> str:
        if isinstance(operand, Reg):
            return ("!" if operand.negated else "") + str(bits(operand))
        if isinstance(operand, Sink):
            return "_"
        if isinstance(operand, Vector):
            return "{" + ",".join(map(item, operand.items)) + "}"
        if isinstance(operand, Pair):
            return f"{item(operand.first)}|{item(operand.second)}"
        if isinstance(operand, Memory):
            return "[" + ",".join(map(item, (operand.base, *operand.rest))) + "]"
        return "i"

    return " ".join(map(item, operands))


def leaves_of(shape: str) -> list[list[str]]:
    """List the leaves of every PTX operand of a shape string."""
    table = str.maketrans("|{}[]", ",    ")
    return [[leaf.strip() for leaf in item.translate(table).split(",")] for item in shape.split(" ") if item]


def context_offset(name: str) -> int:
    """Get the byte offset of a field of the warp context."""
    return abi.CONTEXT.fields[name][1]


def record_offset(name: str) -> int:
    """Get the byte offset of a field of an instruction record."""
    return abi.RECORD.fields[name][1]


@dataclass
class Emitter:
    """Builds the handler of ``form`` for operands of ``shape``."""

    form: Form
    shape: str
    lines: list[str] = field(default_factory=list)
    declarations: set[str] = field(default_factory=set)
    helpers: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=lambda: {"nounwind"})

    def __post_init__(self) -> None:
        groups = leaves_of(self.shape)
        self.leaves: list[str] = [leaf for group in groups for leaf in group]
        self.groups: list[range] = []  # flattened indices of every PTX operand
        start = 0
        for group in groups:
            self.groups.append(range(start, start + len(group)))
            start += len(group)
        self.widths = [0] * len(self.leaves)
        self.stores: set[int] = set()
        self._counter = 0
        self.block = "entry"
        self._pointers: dict[int, Value] = {}
        self._mask: Value | None = None
        self._lane_mask: Value | None = None
        self._done = False
        self.regs = self.load_from("%ctx", context_offset("regs"), "i64")
        self.regs = self.line(f"inttoptr {self.regs.typed} to ptr", "ptr", 0)

    # --- plain emission -------------------------------------------------------------------------------------------

    def fresh(self, stem: str = "t") -> str:
        """Make a new local name."""
        self._counter += 1
        return f"%{stem}{self._counter}"

    def raw(self, text: str) -> None:
        """Append an instruction without a result."""
        self.lines.append("  " + text)

    def line(self, text: str, kind: str, n: int = abi.LANES) -> Value:
        """Append an instruction and return its result."""
        name = self.fresh()
        self.lines.append(f"  {name} = {text}")
        return Value(self, name, kind, n)

    def const(self, value: int | float, kind: str, n: int = abi.LANES) -> Value:
        """Emit a constant in every lane. Ints wrap to the width, for float kinds they are converted."""
        if is_float(kind):
            if kind == "f32":
                value = struct.unpack("<f", struct.pack("<f", value))[0]
            elif kind != "f64":
                raise ValueError(f"no {kind} constants: bitcast an integer")
            text = f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
        else:
            bits = BITS[kind]
            value = int(value) & ((1 << bits) - 1)
            text = str(value - (1 << bits) if bits > 1 and value >> (bits - 1) else value)
            text = {"0": "false", "1": "true"}[text] if bits == 1 else text
        return Value(self, f"splat ({type_name(kind, 0)} {text})" if n else text, kind, n)

    def binary(self, op: str, a: Value, b: Value) -> Value:
        """Emit ``op a, b`` on values of one type."""
        if a.type != b.type:
            raise TypeError(f"{op} of {a.type} and {b.type}")
        return self.line(f"{op} {a.type} {a.ref}, {b.ref}", a.kind, a.n)

    def icmp(self, condition: str, a: Value, b: Number) -> Value:
        """Compare integers; a mask of i1 lanes."""
        return self.line(f"icmp {condition} {a.type} {a.ref}, {a.like(b).ref}", "i1", a.n)

    def fcmp(self, condition: str, a: Value, b: Number) -> Value:
        """Compare floats (oeq, olt, uno, ...); a mask of i1 lanes."""
        return self.line(f"fcmp {condition} {a.type} {a.ref}, {a.like(b).ref}", "i1", a.n)

    def select(self, condition: Value, a: Value, b: Number) -> Value:
        """Emit lane-wise ``condition ? a : b``."""
        return self.line(f"select {condition.typed}, {a.typed}, {a.like(b).typed}", a.kind, a.n)

    def cast(self, op: str, a: Value, kind: str) -> Value:
        """Cast to ``kind`` (trunc, zext, sext, fptrunc, fpext, sitofp, ...). The same kind is no cast."""
        if kind == a.kind and op in ("trunc", "zext", "sext", "fptrunc", "fpext"):
            return a
        return self.line(f"{op} {a.typed} to {type_name(kind, a.n)}", kind, a.n)

    def resize(self, a: Value, kind: str, signed: bool = False) -> Value:
        """Resize an integer to any other width: truncated, or sign/zero extended."""
        op = "trunc" if BITS[kind] < BITS[a.kind] else "sext" if signed else "zext"
        return self.cast(op, a, kind)

    def bitcast(self, a: Value, kind: str, n: int | None = None) -> Value:
        """Reinterpret the bits as lanes of ``kind``. Their number follows from the total size."""
        if n is None:
            n = BITS[a.kind] * a.n // BITS[kind]
        if (kind, n) == (a.kind, a.n):
            return a
        return self.line(f"bitcast {a.typed} to {type_name(kind, n)}", kind, n)

    def intrinsic(self, name: str, *args: Value, kind: str = "", n: int = -1, mangle: bool = True) -> Value:
        """Call LLVM intrinsic ``name``. The result has the type of the first argument unless given.

        Overloaded intrinsics (all we use but the target ones) are mangled with the first argument's type. Scalars of
        type i1 are the immediate flags of ctlz, cttz and abs.
        """
        kind, n = kind or args[0].kind, args[0].n if n < 0 else n
        suffix = ""
        if mangle:
            suffix = "." + (f"v{args[0].n}" if args[0].n else "") + args[0].kind
        types = ", ".join(a.type for a in args)
        result = type_name(kind, n)
        self.declarations.add(f"declare {result} @{name}{suffix}({types})")
        return self.line(f"call {result} @{name}{suffix}({', '.join(a.typed for a in args)})", kind, n)

    def call(self, helper: str, kind: str, n: int, *args: Value) -> Value:
        """Call a helper of ``HELPERS``."""
        self.helpers.add(helper)
        return self.line(f"call {type_name(kind, n)} @{helper}({', '.join(a.typed for a in args)})", kind, n)

    def rounded(self, op: str, mode: str, *args: Value, kind: str = "") -> Value:
        """Compute in rounding mode rn, rz, rm or rp, exact to the bit.

        ``op``: fadd, fsub, fmul, fdiv, fma, sqrt, or with ``kind`` a conversion: fptrunc, sitofp, uitofp. LLVM knows
        rounding modes only as processor state, so the mode is switched around a constrained operation.
        """
        kind, n = kind or args[0].kind, args[0].n
        if mode in ("", "rn"):
            if kind != args[0].kind:
                return self.cast(op, args[0], kind)
            return self.intrinsic(f"llvm.{op}", *args) if op in ("fma", "sqrt") else self.binary(op, *args)
        result = type_name(kind, n)
        suffix = f".v{n}{kind}" + (f".v{n}{args[0].kind}" if kind != args[0].kind else "")
        name = f"llvm.experimental.constrained.{op}{suffix}"
        extra = ', metadata !"round.dynamic", metadata !"fpexcept.ignore"'
        self.declarations.add(f"declare {result} @{name}({', '.join(a.type for a in args)}, metadata, metadata)")
        previous = self._set_rounding(mode)
        value = self.line(f"call {result} @{name}({', '.join(a.typed for a in args)}{extra}) strictfp", kind, n)
        self._restore_rounding(previous)
        self.attributes.add("strictfp")
        return value

    def _set_rounding(self, mode: str) -> str:
        """Switch the processor's rounding mode; returns what ``_restore_rounding`` wants."""
        if not llvm.get_default_triple().startswith("x86_64"):
            self.declarations.add("declare void @llvm.set.rounding(i32)")
            self.raw(f"call void @llvm.set.rounding(i32 {('rz', 'rn', 'rp', 'rm').index(mode)})")
            return ""
        self.declarations |= {f"declare void @llvm.x86.sse.{x}mxcsr(ptr)" for x in ("ld", "st")}
        old, new = self.fresh("csr"), self.fresh("csr")
        self.raw(f"{old} = alloca i32, align 4")
        self.raw(f"{new} = alloca i32, align 4")
        self.raw(f"call void @llvm.x86.sse.stmxcsr(ptr {old})")
        word = self.line(f"load i32, ptr {old}, align 4", "i32", 0)
        changed = (word & ~0x6000) | (("rn", "rm", "rp", "rz").index(mode) << 13)
        self.raw(f"store {changed.typed}, ptr {new}, align 4")
        self.raw(f"call void @llvm.x86.sse.ldmxcsr(ptr {new})")
        return old

    def _restore_rounding(self, previous: str) -> None:
        if previous:
            self.raw(f"call void @llvm.x86.sse.ldmxcsr(ptr {previous})")
        else:
            self.raw("call void @llvm.set.rounding(i32 1)")

    def flag(self, value: bool) -> Value:
        """Emit a scalar i1 constant, as intrinsics take for "zero is poison" and the like."""
        return self.const(int(value), "i1", 0)

    # --- vectors ----------------------------------------------------------------------------------------------------

    def splat(self, scalar: Value, n: int = abi.LANES) -> Value:
        """Repeat a scalar in every lane."""
        one = self.line(f"insertelement {type_name(scalar.kind, n)} poison, {scalar.typed}, i32 0", scalar.kind, n)
        return self.shuffle(one, [0] * n)

    def shuffle(self, a: Value, indices: Sequence[int], b: Value | None = None) -> Value:
        """Pick lanes ``indices`` of a (and, counting on, of b)."""
        picks = ", ".join(f"i32 {i}" for i in indices)
        second = f"{a.type} poison" if b is None else b.typed
        return self.line(f"shufflevector {a.typed}, {second}, <{len(indices)} x i32> <{picks}>", a.kind, len(indices))

    def unpack(self, a: Value, kind: str, parts: int) -> list[Value]:
        """Split every lane into ``parts`` values of ``kind``, the lowest bits first."""
        wide = self.bitcast(a, kind)
        return [self.shuffle(wide, range(k, wide.n, parts)) for k in range(parts)]

    def pack(self, parts: Sequence[Value], kind: str) -> Value:
        """Pack parts, the inverse of ``unpack``. Part 0 is the lowest bits of each lane of ``kind``."""
        total = list(parts)
        while len(total) > 1:  # interleave halves: neighbours in the tree are neighbours in the lane
            half = len(total) // 2
            total = [self._interleave(total[i], total[i + half]) for i in range(half)]
        return self.bitcast(total[0], kind)

    def _interleave(self, a: Value, b: Value) -> Value:
        return self.shuffle(a, [i // 2 + (i % 2) * a.n for i in range(2 * a.n)], b)

    def extract(self, a: Value, lane: Value | int) -> Value:
        """Extract one lane as a scalar."""
        index = lane.typed if isinstance(lane, Value) else f"i32 {lane}"
        return self.line(f"extractelement {a.typed}, {index}", a.kind, 0)

    def lane_ids(self, kind: str = "i32") -> Value:
        """Emit 0, 1, ..., 31."""
        items = ", ".join(f"{kind} {i}" for i in range(abi.LANES))
        return Value(self, f"<{items}>", kind, abi.LANES)

    def lanes(self, mask: Value) -> Value:
        """Unpack a 32-bit lane mask to 32 lanes of i1."""
        return self.bitcast(mask, "i1", abi.LANES)

    def bits(self, flags: Value) -> Value:
        """Pack 32 lanes of i1 to a 32-bit lane mask."""
        return self.bitcast(flags, "i32", 0)

    # --- memory -----------------------------------------------------------------------------------------------------

    def pointer(self, base: Value | str, offset: Value | int) -> Value:
        """Emit ``base + offset`` bytes; ``base`` may be the parameter name %ctx or %rec."""
        ref = base.ref if isinstance(base, Value) else base
        at = offset.typed if isinstance(offset, Value) else f"i64 {offset}"
        return self.line(f"getelementptr i8, ptr {ref}, {at}", "ptr", 0)

    def load_from(self, base: Value | str, offset: Value | int, kind: str, n: int = 0, align: int = 4) -> Value:
        """Load from ``base + offset``."""
        at = self.pointer(base, offset)
        return self.line(f"load {type_name(kind, n)}, ptr {at.ref}, align {align}", kind, n)

    def store_to(self, base: Value | str, offset: Value | int, value: Value, align: int = 4) -> None:
        """Store to ``base + offset``."""
        at = self.pointer(base, offset)
        self.raw(f"store {value.typed}, ptr {at.ref}, align {align}")

    def context(self, name: str, kind: str = "i32") -> Value:
        """Load a scalar field of the warp context."""
        return self.load_from("%ctx", context_offset(name), kind)

    def set_context(self, name: str, value: Value) -> None:
        """Store a scalar field of the warp context."""
        self.store_to("%ctx", context_offset(name), value)

    def imm(self) -> Value:
        """Load the record's immediate, i64."""
        return self.load_from("%rec", record_offset("imm"), "i64")

    # --- operands ---------------------------------------------------------------------------------------------------

    def mask(self) -> Value:
        """Get the lanes that execute, as a scalar i32."""
        if self._mask is None:
            self._mask = self.context("mask")
        return self._mask

    def active(self) -> Value:
        """Get the lanes that execute, as 32 lanes of i1."""
        if self._lane_mask is None:
            self._lane_mask = self.lanes(self.mask())
        return self._lane_mask

    @contextmanager
    def executing(self, mask: Value) -> Iterator[None]:
        """Emit a block with other executing lanes, a scalar i32. It may be code that does not always run."""
        kept = self._mask, self._lane_mask, self._pointers
        self._mask, self._lane_mask, self._pointers = mask, None, dict(self._pointers)
        yield
        self._mask, self._lane_mask, self._pointers = kept

    def register_bits(self, i: int, default: int) -> int:
        """Get the width of the register at operand ``i``. ``default`` for immediates and sinks."""
        leaf = self.leaves[i].lstrip("!")
        return int(leaf) if leaf.isdigit() else default

    def _use(self, i: int, bits: int) -> Value:
        """Note the width of operand ``i`` and return its address."""
        if i >= len(self.leaves):
            raise EmulatorError(f"{self.form.opcode} takes more operands than the {len(self.leaves)} given")
        width = self.register_bits(i, bits)
        if width != bits:
            text = f"operand {i + 1} of {self.form.opcode} is a {width}-bit register, the instruction wants {bits} bits"
            raise EmulatorError(text)
        if self.widths[i] not in (0, bits):
            raise AssertionError(f"{self.form.opcode}: operand {i} used with {self.widths[i]} and {bits} bits")
        self.widths[i] = bits
        return self.address(i)

    def address(self, i: int) -> Value:
        """Get the address of operand ``i`` in the register file."""
        if i not in self._pointers:
            offset = self.load_from("%rec", record_offset("operand") + 4 * i, "i32")
            wide = self.line(f"sext {offset.typed} to i64", "i64", 0)
            self._pointers[i] = self.pointer(self.regs, wide)
        return self._pointers[i]

    def load(self, i: int, kind: str) -> Value:
        """Load all 32 lanes of operand ``i`` as ``kind``. I128 is <64 x i64>, the low halves first."""
        at = self._use(i, BITS[kind])
        if kind == "i128":
            return self.line(f"load <64 x i64>, ptr {at.ref}, align 4", "i64", 64)
        return self.line(f"load {type_name(kind, abi.LANES)}, ptr {at.ref}, align 4", kind)

    def store(self, i: int, value: Value) -> None:
        """Write operand ``i`` in the active lanes. ``value`` has 32 lanes (or <64 x i64> for 128 bits)."""
        wide = value.n == 2 * abi.LANES
        if value.n not in (abi.LANES, 2 * abi.LANES) or (wide and value.kind != "i64"):
            raise TypeError(f"cannot store {value.type} in a register")
        at = self._use(i, 128 if wide else BITS[value.kind])
        self.stores.add(i)
        if self.leaves[i] == "_":
            return
        active = self.active()
        if wide:
            active = self.shuffle(active, [*range(abi.LANES)] * 2)
        old = self.line(f"load {value.type}, ptr {at.ref}, align 4", value.kind, value.n)
        self.raw(f"store {self.select(active, value, old).typed}, ptr {at.ref}, align 4")

    def pred(self, i: int) -> Value:
        """Load predicate operand ``i`` as a scalar i32 lane mask, negation applied."""
        at = self._use(i, 1)
        value = self.line(f"load i32, ptr {at.ref}, align 4", "i32", 0)
        return ~value if self.leaves[i].startswith("!") else value

    def store_pred(self, i: int, value: Value) -> None:
        """Write predicate operand ``i`` in active lanes from an i32 mask or 32 i1 lanes."""
        if value.n:
            value = self.bits(value)
        at = self._use(i, 1)
        self.stores.add(i)
        if self.leaves[i] == "_":
            return
        old = self.line(f"load i32, ptr {at.ref}, align 4", "i32", 0)
        merged = (value & self.mask()) | (old & ~self.mask())
        self.raw(f"store {merged.typed}, ptr {at.ref}, align 4")

    # --- control ----------------------------------------------------------------------------------------------------

    def label(self, name: str) -> None:
        """Start a block; ``name`` without the percent sign."""
        self.lines.append(f"{name}:")
        self.block = name

    def ret(self, code: int | Value = abi.CONTINUE) -> None:
        """Return to the driver."""
        self.raw(f"ret {code.typed}" if isinstance(code, Value) else f"ret i32 {code}")
        self._done = True

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Emit the body for a scalar i1 condition; it may end with ``ret``."""
        self._counter += 1
        then, after = f"then{self._counter}", f"after{self._counter}"
        self.raw(f"br i1 {condition.ref}, label %{then}, label %{after}")
        self.label(then)
        self._done = False
        yield
        if not self._done:
            self.raw(f"br label %{after}")
        self._done = False
        self.label(after)

    @contextmanager
    def each_lane(self, mask: Value | None = None) -> Iterator[Value]:
        """Loop over the set bits of ``mask`` (default: the active lanes), lowest first. Yields the lane, i32."""
        mask = self.mask() if mask is None else mask
        self._counter += 1
        tag = self._counter
        before, rest, left = self.block, f"%rest{tag}", f"%left{tag}"
        self.raw(f"br label %head{tag}")
        self.label(f"head{tag}")
        self.raw(f"{rest} = phi i32 [ {mask.ref}, %{before} ], [ {left}, %next{tag} ]")
        more = self.icmp("ne", Value(self, rest, "i32", 0), 0)
        self.raw(f"br i1 {more.ref}, label %body{tag}, label %end{tag}")
        self.label(f"body{tag}")
        yield self.intrinsic("llvm.cttz", Value(self, rest, "i32", 0), self.flag(True))
        self.raw(f"br label %next{tag}")
        self.label(f"next{tag}")
        down = Value(self, rest, "i32", 0) - 1
        self.raw(f"{left} = and i32 {rest}, {down.ref}")
        self.raw(f"br label %head{tag}")
        self.label(f"end{tag}")

    def finish(self) -> Handler:
        """Finish the function."""
        if not self._done:
            self.ret()
        head = f"define i32 @NAME(ptr %ctx, ptr %rec) {' '.join(sorted(self.attributes))} {{\nentry:\n"
        text = head + "\n".join(self.lines) + "\n}\n"
        declared = frozenset(self.declarations)
        return Handler(text, tuple(self.widths), frozenset(self.stores), declared, frozenset(self.helpers))
