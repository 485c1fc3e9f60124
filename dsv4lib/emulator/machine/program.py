"""Lower a parsed kernel to what the machine runs. Register file, constants, instruction records, services.

``lower`` gives every instruction one record (native/abi.py) at the same index, resolves branch targets, places shared
and local variables, and looks every opcode up in `isa`: an instruction without an implementation is refused here,
with its place, before anything runs.

Register file: slots for the kernel's registers (shared, ptx/liveness.py), then predicates, then the *pool*: read-only
operands that native handlers see as registers. What is in the pool:

* constants, at the width the handler reads them with (``template`` has their bits);
* special registers (``special``; filled when a warp is created);
* addresses of variables and parameters (``symbols``; filled when a warp is created, because a shared address carries
  the CTA's rank and a parameter's address is that of the launch's parameter block);
* a scratch slot for results that are not used (``_``).

Three conventions for implementations:

* ``add.cc``, ``addc`` and their relatives get the carry flag as one more, last operand: a predicate register.
* `RECORD.imm` holds the offset of a memory operand, else the last immediate of the instruction (``lop3``'s table).
* A special register that changes while the warp runs (`VOLATILE`) is read by a service of this module.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, LaunchError, Place, UnsupportedInstruction
from dsv4lib.emulator.isa import calls
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.irtools import shape_of
from dsv4lib.emulator.ptx.ir import (
    Imm,
    Instr,
    Kernel,
    Memory,
    Module,
    Operand,
    Pair,
    Reg,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from dsv4lib.emulator.ptx.liveness import share
from dsv4lib.emulator.ptx.pending import eager_loads
from dsv4lib.emulator.ptx.wgmma_copies import after_waits

SMEM_START = 1024  # shared memory below is reserved for the system (CUDA programming guide, compute capability 9.0+)
SMEM_ALIGN = 16  # of the dynamic part, unless its declaration names more (CuTeDSL's names 1024)
SINK_BYTES = abi.register_bytes(128)

VOLATILE = frozenset(("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi"))
# Constant or known when a warp is created; every other special register is refused.
SPECIAL_BITS = {
    **dict.fromkeys([f"{n}.{c}" for n in ("tid", "ntid", "ctaid", "nctaid") for c in "xyz"], 32),
    **dict.fromkeys([f"{n}.{c}" for n in ("clusterid", "nclusterid", "cluster_ctaid") for c in "xyz"], 32),
    **dict.fromkeys([f"cluster_nctaid.{c}" for c in "xyz"], 32),
    **dict.fromkeys(("laneid", "warpid", "nwarpid", "smid", "nsmid"), 32),
    **dict.fromkeys(("cluster_ctarank", "cluster_nctarank"), 32),
    **dict.fromkeys([f"lanemask_{c}" for c in ("eq", "le", "lt", "ge", "gt")], 32),
    **dict.fromkeys(("total_smem_size", "aggr_smem_size", "dynamic_smem_size"), 32),
    **dict.fromkeys([f"reserved_smem_offset_{which}" for which in ("begin", "end", "cap", "0", "1")], 32),
    "gridid": 64,
    "is_explicit_cluster": 1,
}

_CARRY = frozenset(("addc", "subc", "madc"))

# Bases whose every form needs the warp's lanes together; other opcodes say `.sync` or `.aligned`. Those whose last
# operand is a member mask need only the lanes it names.
_WARP_WIDE = frozenset(("bar", "elect", "shfl", "vote", "match", "redux"))
_MEMBER_MASK = frozenset(("elect", "shfl", "vote", "match", "redux"))


@dataclass(frozen=True)
class PoolEntry:
    """A pool slot that is filled when a warp is created. ``name`` (plus ``addend``) as ``bits`` at ``offset``."""

    name: str
    offset: int
    bits: int
    addend: int = 0


@dataclass
class Program:
    """A kernel ready to run.

    Attributes:
        kernel, module: where it comes from.
        instructions: the kernel's, and one exit after the last.
        records: RECORD array, one per instruction; ``handler`` is 0 where a service runs.
        services: function and `isa.Form` by instruction index.
        offset, bits: of every register, by register index; registers that are never live together may share a slot.
        register_bytes: size of the register file, a multiple of 64.
        template: uint8[register_bytes] with the constants filled in.
        special: (offset, bits) of the special registers the kernel uses, by name.
        specials, symbols: every pool slot to fill when a warp is created (a special register may be there twice, at
            two widths).
        smem_static: bytes of shared memory between SMEM_START and the dynamic part; dynamic memory follows.
        local_bytes: local memory a thread.
        stores: by instruction index, the flattened operands a native handler writes.
        eager_loads: tcgen05.ld instructions that must complete at issue (ptx/pending.py).
        kept: what the machine works out about the program once, by name.
    """

    kernel: Kernel
    module: Module
    instructions: list[Instr]
    records: np.ndarray
    services: dict[int, tuple[Callable[..., Any], isa.Form]]
    offset: list[int]
    bits: list[int]
    register_bytes: int
    template: np.ndarray
    special: dict[str, tuple[int, int]]
    specials: list[PoolEntry]
    symbols: list[PoolEntry]
    smem_static: int
    local_bytes: int
    stores: dict[int, frozenset[int]] = field(default_factory=dict)
    _variables: dict[str, tuple[str, int]] = field(default_factory=dict)
    eager_loads: frozenset[int] = frozenset()
    kept: dict[str, Any] = field(default_factory=dict)

    def instruction(self, index: int) -> Instr:
        """Get the instruction at a pc."""
        return self.instructions[index]

    def uses(self, opcode: str) -> bool:
        """Tell whether any instruction has an opcode that starts with this one."""
        key = f"uses {opcode}"
        if key not in self.kept:
            self.kept[key] = any(instr.opcode.startswith(opcode) for instr in self.instructions)
        return self.kept[key]

    def symbol(self, name: str) -> tuple[str, int]:
        """Find state space and offset of a variable or parameter. 0 for ``global`` and ``const``.

        Shared offsets count from the start of the CTA's shared window (the reserved bytes included), parameter offsets
        from the start of the parameter block, local offsets from the start of the lane's local memory.
        """
        return self._variables[name]

    def python_line(self, instr: Instr) -> str:
        """Find ``file:line`` of the Python source, "" without line info."""
        if instr.location is None:
            return ""
        location = instr.location.outermost()
        return f"{location.file}:{location.line}"

    def place(self, index: int) -> Place:
        """Make the place of instruction ``index``, without CTA and warp."""
        instr = self.instructions[index]
        return Place(self.kernel.name, instr.line, instr.text, self.python_line(instr))

    def register(self, index: int) -> Register:
        """Find a register by index, for its name in messages."""
        return self.kernel.registers[index]

    def fill(self, regs: np.ndarray, special: Callable[[str], Any], symbol: Callable[[str], int]) -> None:
        """Initialise a warp's register file.

        Args:
            regs: uint8[register_bytes].
            special: value of a special register: one number or 32 of them.
            symbol: address of a variable or parameter (`Warp.symbol`).
        """
        regs[:] = self.template
        for entry in self.specials:
            write_slot(regs, entry.offset, entry.bits, special(entry.name))
        for entry in self.symbols:
            write_slot(regs, entry.offset, entry.bits, symbol(entry.name) + entry.addend)


@functools.cache
def converges(opcode: str) -> bool:
    """Tell whether the instruction needs the lanes of its warp converged."""
    base, *modifiers = opcode.split(".")
    return base in _WARP_WIDE or "aligned" in modifiers or (base != "barrier" and "sync" in modifiers)


def write_slot(regs: np.ndarray, offset: int, bits: int, value: Any) -> None:
    """Store a value (or one per lane) at a pool slot, cut to ``bits``."""
    lanes = np.asarray(value)
    if lanes.ndim == 0:
        lanes = np.full(abi.LANES, int(value) & (1 << 64) - 1, np.uint64)
    if bits == 1:
        regs[offset : offset + 4] = np.packbits(lanes.astype(bool), bitorder="little")
    elif bits == 128:
        halves = regs[offset : offset + SINK_BYTES].view("<u8")
        halves[: abi.LANES], halves[abi.LANES :] = lanes.astype(np.uint64), 0
    else:
        regs[offset : offset + abi.LANES * bits // 8].view(f"<u{bits // 8}")[:] = lanes.astype(f"<u{bits // 8}")


def leaves(operands: Iterable[Operand]) -> list[Operand]:
    """Flatten operands in PTX order: vectors, pairs. A memory operand is its base, then the rest."""
    found: list[Operand] = []
    for operand in operands:
        if isinstance(operand, Reg):  # most are
            found.append(operand)
        elif isinstance(operand, Vector):
            found += leaves(operand.items)
        elif isinstance(operand, Pair):
            found += leaves((operand.first, operand.second))
        elif isinstance(operand, Memory):
            found += leaves((operand.base, *operand.rest))
        else:
            found.append(operand)
    return found


def read_clock(warp: Any, instr: Instr, form: isa.Form) -> None:
    """Read a clock. Logical time in warp-instructions, never the time of real hardware."""
    target, source = instr.operands
    now = int(warp.ctx["clock"]) + int(warp.ctx["executed"])
    assert isinstance(source, Special)
    value = now >> 32 if source.name.endswith("_hi") else now
    bits = warp.program.bits[target.index] if isinstance(target, Reg) else 64
    warp.write(target, np.full(abi.LANES, value, np.uint64).astype(np.uint32 if bits == 32 else np.uint64))


_CALL_VARIABLE = re.compile(r"(ld|st)\.param(?:::func)?(?=\.)")


def in_order(kernel: Kernel) -> Kernel:
    """Put modifiers of every implemented instruction in the order of its pattern.

    Accesses to variables of the ``.param`` space that a call passes become those of local memory, where they lie.
    """
    passed = {v.name for v in kernel.variables if v.space == "param"}
    opcodes = []
    for instr in kernel.instructions:
        opcode = instr.opcode
        if passed and any(
            isinstance(o, Memory) and isinstance(o.base, Symbol) and o.base.name in passed for o in instr.operands
        ):
            opcode = _CALL_VARIABLE.sub(r"\1.local", opcode)
        found = isa.find(opcode)
        opcodes.append(opcode if found is None else found[1].opcode)
    if all(instr.opcode == opcode for instr, opcode in zip(kernel.instructions, opcodes, strict=True)):
        return kernel
    renamed = [replace(instr, opcode=o) for instr, o in zip(kernel.instructions, opcodes, strict=True)]
    return replace(kernel, instructions=renamed)


def lower(kernel: Kernel, module: Module, library: Any = None) -> Program:
    """Prepare a kernel.

    Args:
        kernel, module: from `ptx.parse`.
        library: `native.library.Library`; default the library of the process.

    Raises:
        UnsupportedInstruction: an opcode, modifier or special register without an implementation.
        LaunchError: a variable that cannot be placed.
    """
    if library is None:
        from dsv4lib.emulator.isa import implementations
        from dsv4lib.emulator.native import library as native

        implementations.load()
        library = native.default()
    return _Lowering(kernel, module, library).run()


class _Lowering:
    """State of one `lower`."""

    def __init__(self, kernel: Kernel, module: Module, library: Any):
        kernel = after_waits(in_order(kernel))
        if any(instr.opcode.startswith(("alloca.", "stack")) for instr in kernel.instructions):
            kernel = replace(kernel, variables=[*kernel.variables, calls.STACK])
        self.kernel, self.module, self.library = kernel, module, library
        end = len(kernel.instructions)
        last = kernel.instructions[-1].line if end else 0
        self.instructions = [*kernel.instructions, Instr(end, "exit", (), None, last, "(end of the kernel)")]
        self.registers = list(kernel.registers)
        self.carry: Reg | None = None
        self.operands = [self._operands(instr) for instr in self.instructions]
        self.constants: dict[tuple[int, int], int] = {}
        self.special: dict[str, tuple[int, int]] = {}
        self.special_slots: dict[tuple[str, int], PoolEntry] = {}
        self.symbol_slots: dict[tuple[str, int, int], PoolEntry] = {}
        self.variables: dict[str, tuple[str, int]] = {}
        self.eager = eager_loads(kernel)

    def place(self, instr: Instr) -> Place:
        where = "" if instr.location is None else instr.location.outermost()
        return Place(self.kernel.name, instr.line, instr.text, f"{where.file}:{where.line}" if where else "")

    def _operands(self, instr: Instr) -> tuple[Operand, ...]:
        """The operands as implementations see them: with the carry flag."""
        base, *modifiers = instr.opcode.split(".")
        if base not in _CARRY and "cc" not in modifiers:
            return instr.operands
        if self.carry is None:
            self.carry = Reg(len(self.registers))
            self.registers.append(Register(self.carry.index, "CC.CF", 1))
        return (*instr.operands, self.carry)

    def run(self) -> Program:
        smem_static, local_bytes = self._lay_out_variables()
        native, services = self._look_up()
        handlers = self.library.handlers(set(native.values()))
        self._lay_out_registers({i: handlers[key].stores for i, key in native.items()})
        records = np.zeros(len(self.instructions), abi.RECORD)
        records["index"] = np.arange(len(self.instructions))
        records["guard"] = -1
        stores = {}
        rows = np.zeros((len(self.instructions), abi.MAX_OPERANDS), np.int32)
        for i, instr in enumerate(self.instructions):
            if instr.guard is not None:
                records["guard"][i] = self.offset[instr.guard.index]
                records["guard_negated"][i] = instr.guard.negated
            if i in native:
                handler = handlers[native[i]]
                records["handler"][i] = handler.address
                row = self._slots(instr, self.operands[i], handler.widths)
                rows[i, : len(row)] = row
                stores[i] = handler.stores
            else:
                row = []
                self._service_slots(instr)
            records["imm"][i] = _signed(_record_imm(self.operands[i]))
            if instr.opcode.startswith("bra"):
                records["target"][i] = self.kernel.labels[instr.operands[0].name]
            elif converges(instr.opcode):
                records["flags"][i] = abi.FLAG_CONVERGE
                if (members := self._member_mask(instr, row)) is not None:
                    records["flags"][i] |= abi.FLAG_MEMBERS
                    records["target"][i] = members
        records["operand"] = rows
        return Program(
            self.kernel,
            self.module,
            self.instructions,
            records,
            services,
            self.offset,
            [r.bits for r in self.registers],
            *self._template(),
            self.special,
            list(self.special_slots.values()),
            list(self.symbol_slots.values()),
            smem_static,
            local_bytes,
            stores,
            self.variables,
            self.eager,
        )

    def _lay_out_registers(self, stores: dict[int, frozenset[int]]) -> None:
        """Wide registers 64-byte aligned, then predicates, then the scratch slot; what can share a slot does.

        ``stores``: which flattened operands each native instruction writes.
        """
        code = len(self.kernel.instructions)
        uses: list[set[int]] = [set() for _ in range(code)]
        defs: list[set[int]] = [set() for _ in range(code)]
        pinned = set() if self.carry is None else {self.carry.index}
        for i, instr in enumerate(self.kernel.instructions):
            written = stores.get(i)
            if written is None and i in self.eager:
                written = range(len(leaves(instr.operands[:1])))
            # A service may touch its registers later; tcgen05.st and eager tcgen05.ld are done with them at issue.
            later = written is None and not instr.opcode.startswith("tcgen05.st.")
            for k, leaf in enumerate(leaves(self.operands[i])):
                if isinstance(leaf, Reg):
                    (defs if k in (written or ()) and instr.guard is None else uses)[i].add(leaf.index)
                    if later:
                        pinned.add(leaf.index)
            if instr.guard is not None:
                uses[i].add(instr.guard.index)
        bits = [register.bits for register in self.registers]
        slots = share(self.kernel, uses, defs, bits, pinned)
        place: dict[int, int] = {}
        self.size = 0
        for wanted in (False, True):
            for register, slot in enumerate(slots):
                if (bits[register] == 1) == wanted and slot not in place:
                    place[slot] = self._take(bits[register])
        self.offset = [place[slot] for slot in slots]
        self.size = abi.aligned(self.size)
        self.sink = self._take(128)

    def _take(self, bits: int) -> int:
        """Space for one more register."""
        if bits > 1:
            self.size = abi.aligned(self.size)
        start = self.size
        self.size += abi.register_bytes(bits)
        return start

    def _lay_out_variables(self) -> tuple[int, int]:
        """Place every variable; returns (static shared bytes with padding up to the dynamic part, local bytes)."""
        for param in self.kernel.params:
            self.variables[param.name] = ("param", param.offset)
        used = {leaf.name for ops in self.operands for leaf in leaves(ops) if isinstance(leaf, Symbol)}
        shared, dynamic, local = SMEM_START, [], 0
        for variable in (*self.module.variables, *self.kernel.variables):
            if variable.space in ("global", "const"):
                self.variables[variable.name] = (variable.space, 0)
            elif variable.space == "shared" and variable.extern:
                dynamic.append(variable)
            elif variable.space == "shared" and (variable.name in used or variable in self.kernel.variables):
                shared = abi.aligned(shared, variable.align)
                self.variables[variable.name] = ("shared", shared)
                shared += variable.size
            elif variable.space in ("local", "param"):
                local = abi.aligned(local, variable.align)
                self.variables[variable.name] = ("local", local)
                local += variable.size
        # All extern arrays are the same memory.
        start = abi.aligned(shared, max([SMEM_ALIGN, *(v.align for v in dynamic)]))
        for variable in dynamic:
            self.variables[variable.name] = ("shared", start)
        self._check_sizes(dynamic)
        return start - SMEM_START, abi.aligned(local, 16)

    def _check_sizes(self, dynamic: list[Variable]) -> None:
        for variable in dynamic:
            if variable.size:
                raise LaunchError(f"extern shared variable {variable.name} with a size is another module's")

    def _look_up(self) -> tuple[dict[int, tuple[str, str]], dict[int, tuple[Callable[..., Any], isa.Form]]]:
        """The implementation of every instruction: (opcode, shape) of native ones, function and form of services."""
        native: dict[int, tuple[str, str]] = {}
        services: dict[int, tuple[Callable[..., Any], isa.Form]] = {}
        checked: set[tuple[str, str]] = set()
        bits = [str(r.bits) for r in self.registers]
        for i, instr in enumerate(self.instructions):
            own = self._own_service(instr)
            if own is not None:
                services[i] = own, isa.Form(instr.opcode, instr.opcode)
                continue
            entry, form = isa.find(instr.opcode) or isa.lookup(instr.opcode, self.place(instr))
            if entry.kind == "service":
                services[i] = (entry.implementation, form)
                continue
            key = native[i] = (instr.opcode, shape_of(self.operands[i], lambda reg: bits[reg.index]))
            if key not in checked:
                checked.add(key)
                self._check(key, instr)
        return native, services

    def _own_service(self, instr: Instr) -> Callable[..., Any] | None:
        """Find services that the opcode alone does not determine: clocks and calls."""
        if instr.opcode.startswith("call"):
            symbols = [leaf.name for leaf in leaves(instr.operands) if isinstance(leaf, Symbol)]
            called = [name for name in symbols if name not in self.variables]
            if len(called) != 1 or called[0] not in calls.BUILTINS:
                names = ", ".join(called) or "a function whose address is in a register"
                why = "recursion is not supported" if names in self.module.functions else "its code is not in this file"
                raise UnsupportedInstruction(f"call of {names}: {why}", self.place(instr))
            if not calls.fits(instr, called[0]):
                raise UnsupportedInstruction(
                    f"call of {called[0]} with other operands than it takes", self.place(instr)
                )
            return calls.BUILTINS[called[0]][0]
        return read_clock if self._volatile(instr) else None

    def _check(self, key: tuple[str, str], instr: Instr) -> None:
        """Emit the handler once, so that what it refuses is reported with the instruction's place."""
        from dsv4lib.emulator.native.library import emit

        try:
            emit(*key)
        except EmulatorError as error:
            if error.place is not None:
                raise
            raise type(error)(str(error), self.place(instr)) from error

    def _volatile(self, instr: Instr) -> bool:
        names = [leaf.name for leaf in leaves(instr.operands) if isinstance(leaf, Special)]
        if not any(name in VOLATILE for name in names):
            return False
        if instr.opcode not in ("mov.u32", "mov.b32", "mov.s32", "mov.u64", "mov.b64", "mov.s64"):
            raise UnsupportedInstruction(f"{instr.opcode} of %{names[0]}: only mov reads a clock", self.place(instr))
        return True

    def _slots(self, instr: Instr, operands: tuple[Operand, ...], widths: tuple[int, ...]) -> list[int]:
        """Register-file offsets of a native instruction's operands."""
        row = []
        for leaf, bits in zip(leaves(operands), widths, strict=True):
            if isinstance(leaf, Reg):
                row.append(self.offset[leaf.index])
            elif isinstance(leaf, Sink) or bits == 0:
                row.append(self.sink)
            elif isinstance(leaf, Imm):
                row.append(self._constant(leaf.bits, bits))
            elif isinstance(leaf, Special):
                row.append(self._special(leaf.name, bits, instr))
            else:
                row.append(self._symbol(leaf, bits, instr))
        if len(row) > abi.MAX_OPERANDS:
            raise AssertionError(f"{instr.opcode}: {len(row)} operands do not fit in a record")
        return row

    def _service_slots(self, instr: Instr) -> None:
        """Services read special registers by name: make sure that they are there."""
        if instr.opcode.startswith("brx"):
            return  # its table is no variable
        for leaf in leaves(instr.operands):
            if isinstance(leaf, Special) and leaf.name not in VOLATILE:
                self._special(leaf.name, 0, instr)
            elif isinstance(leaf, Symbol) and leaf.name not in (*self.variables, *calls.BUILTINS):
                raise UnsupportedInstruction(f"{leaf.name} is not a variable or parameter", self.place(instr))

    def _member_mask(self, instr: Instr, row: list[int]) -> int | None:
        """Register-file offset of the member mask; None for instructions that need all live lanes."""
        if instr.opcode.partition(".")[0] in _MEMBER_MASK:
            return row[-1]
        if instr.opcode != "bar.warp.sync":
            return None
        mask = instr.operands[0] if len(instr.operands) == 1 else None
        if not isinstance(mask, Reg | Imm | Special):
            raise UnsupportedInstruction(f"{instr.opcode} takes one member mask", self.place(instr))
        if isinstance(mask, Reg):
            return self.offset[mask.index]
        return self._constant(mask.bits, 32) if isinstance(mask, Imm) else self._special(mask.name, 32, instr)

    def _constant(self, value: int, bits: int) -> int:
        key = (value & ((1 << bits) - 1) if bits > 1 else int(value != 0), bits)
        if key not in self.constants:
            self.constants[key] = self._take(bits)
        return self.constants[key]

    def _special(self, name: str, bits: int, instr: Instr) -> int:
        natural = 32 if name.startswith("envreg") else SPECIAL_BITS.get(name)
        if natural is None:
            raise UnsupportedInstruction(f"special register %{name} is not implemented", self.place(instr))
        for width in {natural, bits or natural}:
            if (name, width) not in self.special_slots:
                self.special_slots[name, width] = PoolEntry(name, self._take(width), width)
        self.special[name] = (self.special_slots[name, natural].offset, natural)
        return self.special_slots[name, bits or natural].offset

    def _symbol(self, symbol: Symbol, bits: int, instr: Instr) -> int:
        if symbol.name not in self.variables:
            raise UnsupportedInstruction(f"{symbol.name} is not a variable or parameter", self.place(instr))
        if bits < 32:
            raise UnsupportedInstruction(f"address of {symbol.name} in {bits} bits", self.place(instr))
        key = (symbol.name, symbol.offset, bits)
        if key not in self.symbol_slots:
            self.symbol_slots[key] = PoolEntry(symbol.name, self._take(bits), bits, symbol.offset)
        return self.symbol_slots[key].offset

    def _template(self) -> tuple[int, np.ndarray]:
        """Size of the register file, and its constants."""
        size = abi.aligned(self.size)
        template = np.zeros(size, np.uint8)
        for (value, bits), offset in self.constants.items():
            write_slot(template, offset, bits, value)
        return size, template


def _record_imm(operands: tuple[Operand, ...]) -> int:
    """What `RECORD.imm` holds: the offset of the first memory operand, else the last immediate."""
    for operand in operands:
        if isinstance(operand, Memory):
            return operand.offset
    for operand in reversed(operands):
        if isinstance(operand, Imm):
            return operand.bits
    return 0


def _signed(value: int) -> int:
    """64 bits as a signed number."""
    return struct.unpack("<q", struct.pack("<Q", value & (1 << 64) - 1))[0]
