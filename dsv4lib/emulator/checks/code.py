"""Find hazards that the code shows without running. They are registers used too early, or never set.

What is found is reported when a warp executes the instruction that begins it (the load, the wgmma), so that code that
never runs is never reported; registers that nothing sets are reported when the launch begins.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4lib.emulator.ptx import pending, wgmma_registers
from dsv4lib.emulator.ptx.definitions import undefined_uses
from dsv4lib.emulator.ptx.ir import Memory, Reg, Vector

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.program import Program
    from dsv4lib.emulator.machine.warp import Warp
    from dsv4lib.emulator.ptx.ir import Instr


@dataclass(frozen=True)
class Finding:
    """One hazard: its kind and text.

    Also the instruction to blame and the one it conflicts with (indices, -1 = none).
    """

    kind: str
    text: str
    at: int
    against: int = -1


@dataclass
class CodeFindings:
    """Findings of a kernel by the instruction whose execution reports them. ``undefined``: registers nothing sets."""

    by_instruction: dict[int, list[Finding]] = field(default_factory=dict)
    undefined: list[Finding] = field(default_factory=list)


_known: dict[tuple[int, bool, bool], tuple[weakref.ref, CodeFindings]] = {}


def findings_of(program: Program, pedantic: bool, code: bool) -> CodeFindings:
    """Find a program's findings, once; ``pedantic``: of fences too; ``code``: of other registers too."""
    key = id(program), pedantic, code
    known = _known.get(key)
    if known is None or known[0]() is not program:
        forget = functools.partial(_known.pop, key, None)
        known = _known[key] = weakref.ref(program, lambda _: forget()), _analyse(program, pedantic, code)
    return known[1]


def _analyse(program: Program, pedantic: bool, code: bool) -> CodeFindings:
    out = CodeFindings()
    kernel = program.kernel

    def name(register: int) -> str:
        return program.register(register).name

    for found in wgmma_registers.findings(kernel):
        if found.waited and not pedantic:
            continue
        where = out.by_instruction.setdefault(found.mma, [])
        if not found.waited:
            text = f"{name(found.register)} is accessed while a wgmma.mma_async may still be using it"
            where.append(Finding("missing_wgmma_wait", text, found.other, found.mma))
        elif found.other < 0:
            where.append(Finding("missing_wgmma_fence", "no wgmma.fence before the first wgmma.mma_async", found.mma))
        else:
            text = f"{name(found.register)} was accessed since the last wgmma.fence"
            where.append(Finding("missing_wgmma_fence", text, found.mma, found.other))
    if not code:
        return out
    first: dict[int, pending.EarlyUse] = {}
    for use in pending.early_uses(kernel, through_packs=True):
        first.setdefault(use.load, use)
    for use in first.values():
        text = f"{name(use.register)} is used while the tcgen05.ld that fills it may be pending"
        out.by_instruction.setdefault(use.load, []).append(Finding("tcgen05_ld_used_early", text, use.use, use.load))
    uses, defs = directions(program)
    flow = Flow(program, uses, defs)
    for index, register in undefined_uses(kernel, uses, defs):
        sink = flow.reaches(index, register)
        if sink >= 0:
            text = f"nothing has set {name(register)}, and PTX line {program.instruction(sink).line} depends on it"
            out.undefined.append(Finding("uninitialised_register", text, index))
    return out


class Flow:
    """Where values go: from register to register, in any order of the code."""

    def __init__(self, program: Program, uses: list[set[int]], defs: list[set[int]]):
        self._program = program
        self._readers: dict[int, list[int]] = {}
        self._defs = defs
        for instr in program.kernel.instructions:
            for register in uses[instr.index] | self.mentioned(instr) - defs[instr.index]:
                self._readers.setdefault(register, []).append(instr.index)

    @staticmethod
    def mentioned(instr: Instr) -> set[int]:
        """List the registers of the operands of an instruction."""
        return {register for operand in instr.operands for register in pending.registers_of(operand)}

    def reaches(self, index: int, register: int) -> int:
        """Find the first instruction that matters and depends on what instruction ``index`` reads; -1: none."""
        if self._matters(index, register):
            return index
        seen, work = set(), [(one, self._part(index, register, one)) for one in self._defs[index]]
        while work:
            one, part = work.pop()
            if (one, part) in seen:
                continue
            seen.add((one, part))
            for reader in self._readers.get(one, ()):
                if part is not None and (items := self._unpacked(reader, part[1])):
                    item = items[part[0]]
                    work += [(item.index, None)] if isinstance(item, Reg) else []
                elif self._matters(reader, one):
                    return reader
                else:
                    work += [(made, self._part(reader, one, made)) for made in self._defs[reader]]
        return -1

    def _part(self, index: int, register: int, whole: int) -> tuple[int, int] | None:
        """Tell which of how many parts of ``whole`` a register becomes; None if that is no packing of it."""
        instr = self._program.instruction(index)
        parts = pending.packed(instr)
        if parts is None or instr.operands[0].index != whole:
            return None
        at = [i for i, item in enumerate(parts.items) if isinstance(item, Reg) and item.index == register]
        return (at[0], len(parts.items)) if len(at) == 1 else None

    def _unpacked(self, index: int, count: int) -> tuple | None:
        """Return what an instruction unpacks a register of ``count`` parts to, or None."""
        instr = self._program.instruction(index)
        first = instr.operands[0] if instr.opcode.startswith("mov.b") else None
        return tuple(first.items) if isinstance(first, Vector) and len(first.items) == count else None

    def sinks(self, index: int) -> tuple[set[int], set[int]]:
        """Find what depends on the value that an instruction makes: instructions that matter, and those between."""
        matter: set[int] = set()
        passed: set[int] = set()
        seen, work = set(), list(self._defs[index])
        while work:
            one = work.pop()
            if one in seen:
                continue
            seen.add(one)
            for reader in self._readers.get(one, ()):
                (matter if self._matters(reader, one) else passed).add(reader)
                work += self._defs[reader] if reader in passed else ()
        return matter, passed

    def _matters(self, index: int, register: int) -> bool:
        """Does a store, a branch, an address or an instruction of a unit depend on a register?"""
        instr = self._program.instruction(index)
        if index in self._program.services or instr.opcode.partition(".")[0] in _SINKS:
            return True
        addresses = (operand for operand in instr.operands if isinstance(operand, Memory))
        return any(register in pending.registers_of(address) for address in addresses)


_SINKS = ("st", "stmatrix", "red", "atom", "bra", "brx", "ret", "exit", "call", "trap")


def directions(program: Program) -> tuple[list[set[int]], list[set[int]]]:
    """List registers that each instruction certainly reads, and those it may write."""
    count = len(program.kernel.registers)
    uses: list[set[int]] = []
    defs: list[set[int]] = []
    for instr in program.kernel.instructions:
        read: set[int] = set() if instr.guard is None else {instr.guard.index}
        written: set[int] = set()
        stores = program.stores.get(instr.index)
        for k, leaf in enumerate(program_leaves(instr)):
            if isinstance(leaf, Reg):
                if stores is None or k in stores:
                    written.add(leaf.index)
                else:
                    read.add(leaf.index)
        if stores is None:  # a service: only addresses are certainly read
            for operand in instr.operands:
                if isinstance(operand, Memory):
                    addresses = set(pending.registers_of(operand))
                    read |= addresses
                    written -= addresses
        uses.append({r for r in read if r < count})
        defs.append({r for r in written if r < count})
    return uses, defs


def program_leaves(instr: Instr) -> Any:
    """List operands as native handlers count them."""
    from dsv4lib.emulator.machine.program import leaves

    return leaves(instr.operands)


class CodeChecks:
    """Reports of one launch."""

    def __init__(self, machine: Any, pedantic: bool, code: bool):
        self.machine = machine
        self.found = findings_of(machine.program, pedantic, code)
        self._said: set[int] = set()
        self._read: set[int] | None = None  # registers that some instruction reads

    def discarded(self, one: int, other: int, word: int) -> bool:
        """Tell whether one of two accesses to a word is a part of a vector load that nothing reads.

        Compilers widen loads over words that they do not need (``.pragma "used_bytes_mask"``).
        """
        return word >= 0 and any(self._unread(self.machine.program.instruction(pc), word) for pc in (one, other))

    def _unread(self, instr: Instr, word: int) -> bool:
        if not instr.opcode.startswith("ld.") or not isinstance(instr.operands[0], Vector):
            return False
        if self._read is None:
            uses, defs = directions(self.machine.program)
            mentioned = (Flow.mentioned(i) - defs[i.index] for i in self.machine.program.kernel.instructions)
            self._read = set().union(*uses, *mentioned)
        items = instr.operands[0].items
        width = int(instr.opcode[-2:]) // 32  # vectors are aligned to their size
        if not width:
            return False
        read = [not isinstance(item, Reg) or item.index in self._read for item in items]
        return any(read) and not read[word % (len(items) * width) // width]

    def begin(self) -> None:
        """Begin a launch: report registers that nothing sets."""
        for found in self.found.undefined:
            self.machine.report(found.kind, found.text, self.machine.program.place(found.at))

    def executed(self, warp: Warp, instr: Instr) -> None:
        """Report the findings of an instruction that a warp executes."""
        if instr.index in self._said or instr.index not in self.found.by_instruction:
            return
        self._said.add(instr.index)
        program = self.machine.program
        for found in self.found.by_instruction[instr.index]:
            place = warp.place(program.instruction(found.at))
            owner = None if found.against < 0 else warp.place(program.instruction(found.against))
            self.machine.report(found.kind, found.text, place, owner=owner)
