"""Follow a warp around a loop and tell whether what leads it there again can change.

What decides where a warp goes is a slice of its code: registers that branches, guards, addresses and units depend on,
and the words of memory that are loaded into them. A counter of turns, in a register or in memory, is no part of it. If
the slice comes back to values that it had, and no word that it loads is changed by any loop, the warp goes round for
ever, whatever else it writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.checks.code import directions
from dsv4lib.emulator.errors import MemoryFault
from dsv4lib.emulator.machine.warp import GROUP, GROUP_MASK, GROUP_PC, GROUPS, PC, Warp
from dsv4lib.emulator.memory.addressing import is_local, is_shared, offsets, ranks
from dsv4lib.emulator.ptx.ir import Instr, Memory
from dsv4lib.emulator.ptx.pending import registers_of

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.program import Program

SLEEPS = "nanosleep"  # reason of a wait that ends by itself
BARRIERS = ("barrier", "bar.")  # how reasons begin of waits for other warps that go around, too
_LONGEST = 20_000  # instructions of a loop
_TURNS = 64  # of a loop until the slice comes back
# Loops of these and of instructions without a memory operand leave memory as it is; `WRITES` are compared.
_HARMLESS = ("ld", "ldu", "mbarrier", "multimem", "prefetch")
_HARMLESS_WITH = {"mbarrier": ("test_wait", "try_wait"), "multimem": ("ld_reduce",)}
WRITES = ("st", "atom", "red")
_WIDTH = re.compile(r"\.(?:[busf])(8|16|32|64|128)\b(?!.*\.[busf]\d)")
Word = tuple[int, int]  # 0 or the identity of a CTA's memory, and address / 4


@dataclass
class Loop:
    """A loop that a warp has come around, in its last turns.

    Attributes:
        instructions: in the order of the code. polls: those that load the slice; reads: words that they load; changed:
            words with a new value.
    """

    instructions: list[Instr]
    polls: list[Instr] = field(default_factory=list)
    reads: set[Word] = field(default_factory=set)
    changed: set[Word] = field(default_factory=set)


def endless(loops: Iterable[Loop]) -> bool:
    """Tell whether loops that run side by side change nothing that any of them depends on."""
    loops = list(loops)
    changed = set().union(*(loop.changed for loop in loops))
    return not any(loop.reads & changed for loop in loops)


def groups_of(warp: Warp) -> tuple[tuple[int, int], ...]:
    """List program counter and lanes of a warp's groups."""
    words = warp.words
    n = words[GROUPS]
    pcs, masks = words[GROUP_PC : GROUP_PC + n].tolist(), words[GROUP_MASK : GROUP_MASK + n].tolist()
    return tuple(sorted(zip((words[PC], *pcs), (words[GROUP], *masks), strict=True)))


def follow(warp: Warp, slices: Slices) -> Loop | None:
    """Run a warp until its slice comes back to what it was.

    ``slices``: those of its program. None if it waits, exits or does on the way what is not judged, or takes too long.
    """
    start, program = groups_of(warp), warp.program
    pcs: set[int] = set()
    turns: list[Loop] = [Loop([])]
    loaded: dict[int, set[Word]] = {}
    states: dict[int, int] = {}
    known: frozenset[int] = frozenset()
    for _ in range(_LONGEST):
        pc = warp.words[PC]
        pcs.add(pc)
        if not step(warp, program.instruction(pc), turns[-1].changed, loaded.setdefault(pc, set())):
            return None
        if groups_of(warp) != start:
            continue
        registers, loads = slices.of(frozenset(pcs))
        if registers != known:
            states, known = {}, registers
        state = state_of(warp, registers)
        if state in states:
            reads = set().union(*(loaded.get(pc, set()) for pc in loads))
            changed = set().union(*(turn.changed for turn in turns[states[state] :]))
            code, polls = ([program.instruction(i) for i in sorted(some)] for some in (pcs, loads))
            return Loop(code, polls, reads, changed)
        states[state] = len(turns)
        turns.append(Loop([]))
        if len(turns) > _TURNS:
            return None
    return None


def step(warp: Warp, instr: Instr, changed: set[Word], loaded: set[Word], waits: bool = False) -> bool:
    """Run an instruction and note the words that it loads, and those that it changes. False: it cannot be judged.

    ``waits``: the warp may come to wait at a barrier of its warp, its CTA or its cluster.
    """
    base, *modifiers = instr.opcode.split(".")
    memory = next((operand for operand in instr.operands if isinstance(operand, Memory)), None)
    writes = memory is not None and base in WRITES
    if memory is not None and not writes:
        wanted = _HARMLESS_WITH.get(base, ())
        if base not in _HARMLESS or wanted and not any(m in modifiers for m in wanted):
            return False
    if writes and "async" in modifiers:
        return False
    here = {} if memory is None or ".param" in instr.opcode else _words(warp, instr, memory)
    warp.cta.machine.scheduler.single_step(warp)
    if here:
        loaded.update(here)
    if writes:
        changed |= {word for word, (view, old) in here.items() if int(view[0]) != old}
    if warp.exited:
        return False
    if warp.block is not None:
        blocks = [parked.block for parked in warp.parked] or [warp.block]  # of the lane groups
        if waits and all(block.reason.startswith(BARRIERS) for block in blocks):
            return True
        if all(block.reason != SLEEPS for block in blocks):
            return False
        warp.cta.machine.scheduler.wake()  # a sleep in a loop ends, whatever happens
    return True


def _words(warp: Warp, instr: Instr, memory: Memory) -> dict[Word, tuple[np.ndarray, int]]:
    """Find the words that the instruction at a warp's pc accesses, each with a view of it and its value."""
    lanes = np.flatnonzero(warp.words[GROUP] >> np.arange(32) & 1)
    addresses = warp.address(memory)[lanes]
    width = _WIDTH.search(instr.opcode)
    vector = next((int(part[1:]) for part in instr.opcode.split(".") if re.fullmatch(r"v[248]", part)), 1)
    count = max(1, (int(width[1]) if width else 128) * vector // 32)
    shared = ".shared" in instr.opcode
    out: dict[Word, tuple[np.ndarray, int]] = {}
    for address in np.unique(addresses).tolist():
        one = np.array([address], np.uint64)
        if ".local" in instr.opcode or not shared and is_local(one)[0]:
            continue
        inside = shared or bool(is_shared(one)[0])
        for i in range(count):
            if inside:
                rank = int(ranks(one)[0])
                at = (int(offsets(one)[0]) >> 2) + i
                cta = warp.cta.cluster.ctas[rank]
                view, word = cta.smem.data.view(np.uint32)[at : at + 1], (id(cta), at)
            else:
                at = (address >> 2) + i
                try:
                    view = warp.cta.machine.gmem.view(4 * at, 4).view(np.uint32)
                except MemoryFault:
                    continue
                word = (0, at)
            if len(view):
                out[word] = view, int(view[0])
    return out


def state_of(warp: Warp, registers: frozenset[int]) -> int:
    """Hash the registers of a slice, and local memory."""
    files, local, *_ = warp.cta.storage
    file, program = files[warp.warp_id].reshape(-1).view(np.uint8), warp.program
    mine = np.array_split(local, len(warp.cta.warps))[warp.warp_id] if program.local_bytes else local[:0]
    values = []
    for register in sorted(registers):
        bits, at = program.bits[register], program.offset[register]
        values.append(file[at : at + (4 if bits == 1 else 4 * bits)].tobytes())
    return hash((tuple(values), mine.tobytes()))


class Slices:
    """Registers that decide where loops of a program go, and the loads that fill them."""

    def __init__(self, program: Program):
        self._program = program
        self._uses, self._defs = directions(program)
        self._known: dict[tuple[frozenset[int], frozenset[int]], tuple[frozenset[int], tuple[int, ...]]] = {}

    def of(self, pcs: frozenset[int], stores: frozenset[int] = frozenset()) -> tuple[frozenset[int], tuple[int, ...]]:
        """Find both for the loop of these instructions. ``stores``: those of them whose words a slice loads."""
        key = pcs, stores & pcs
        if key not in self._known:
            self._known[key] = self._slice([self._program.instruction(pc) for pc in pcs], stores)
        return self._known[key]

    def _slice(self, code: list[Instr], stores: frozenset[int]) -> tuple[frozenset[int], tuple[int, ...]]:
        wanted: set[int] = set()
        for instr in code:
            if instr.index in stores:
                wanted |= set().union(*(registers_of(operand) for operand in instr.operands))
            if instr.guard is not None:
                wanted.add(instr.guard.index)
            for operand in instr.operands:
                if isinstance(operand, Memory) or instr.index in self._program.services or instr.opcode[:2] == "br":
                    wanted |= set(registers_of(operand))
        before = -1
        while len(wanted) > before:
            before = len(wanted)
            for instr in code:
                if self._defs[instr.index] & wanted:
                    wanted |= self._uses[instr.index]
        filled = (instr for instr in code if self._defs[instr.index] & wanted)
        loads = (i.index for i in filled if any(isinstance(operand, Memory) for operand in i.operands))
        known = len(self._program.kernel.registers)
        return frozenset(r for r in wanted if r < known), tuple(loads)
