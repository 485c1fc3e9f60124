"""Move copies of accumulators from before ``wgmma.wait_group`` to after it.

Strictly by the PTX ISA no other instruction may access the registers of a ``wgmma.mma_async`` before the wait.
CUTLASS and DeepGEMM pin accumulators with an empty ``asm volatile("" : "+f"(d))`` after ``commit_group``, and where
the value is wanted as bits later, NVVM puts the ``mov.b32 %r, %f`` right there, in front of the wait. ptxas takes a
plain ``mov`` as another name of the same value (DeepGEMM's sm90_tf32_hc_prenorm_gemm: its SASS has no such copies and
stores the accumulators themselves after the wait), so this is what these programs mean. `after_waits` moves such
copies to where the value exists.

A copy stays where it is, and is an early access, if it has a guard, if its destination is used before the wait, or if
its source changes or a path joins that has not executed it while the destination is still wanted. (In a loop that
waits for all groups but the last it is not wanted: the copy of the next iteration overwrites it.)
"""

from __future__ import annotations

from dataclasses import replace

from dsv4lib.emulator.ptx.ir import Imm, Instr, Kernel, Pair, Reg, Vector
from dsv4lib.emulator.ptx.pending import BasicBlock, blocks, registers_of
from dsv4lib.emulator.ptx.wgmma_registers import AGES, COMMIT, MMA, WAIT

_READ_FIRST = ("bar", "barrier", "call", "nanosleep", "wgmma")  # their first operand is not, or not only, written

# What is under way at a point: wgmmas as (instruction, groups committed since), and copies that have been put off.
_State = tuple[frozenset[tuple[int, int]], tuple[int, ...]]


def after_waits(kernel: Kernel) -> Kernel:
    """Move copies of pending accumulators to after the waits. Return the same kernel if there are none."""
    if not any(instr.opcode.startswith(MMA) for instr in kernel.instructions):
        return kernel
    plan = _Plan(kernel)
    while not plan.solve():
        pass
    return plan.rewritten()


def _is_copy(instr: Instr) -> bool:
    """A ``mov`` of registers that always happens."""
    if instr.guard is not None or instr.opcode.partition(".")[0] != "mov":
        return False
    leaves = [x for operand in instr.operands for x in (operand.items if isinstance(operand, Vector) else (operand,))]
    return all(isinstance(leaf, Reg) for leaf in leaves)


def _copies(code: list[Instr], names: frozenset[int]) -> dict[int, tuple[frozenset[int], frozenset[int]]]:
    """Destination and source of the copies of ``names`` and of copies of them, by instruction."""
    every = {
        i.index: (frozenset(registers_of(i.operands[0])), frozenset(registers_of(i.operands[1])))
        for i in code
        if _is_copy(i)
    }
    known = -1
    while len(names) != known:
        known = len(names)
        names = names.union(*(to for to, source in every.values() if source & names))
    return {index: (to, source) for index, (to, source) in every.items() if source & names}


def _directions(instr: Instr) -> tuple[frozenset[int], frozenset[int]]:
    """Registers that an instruction may read, and those that it certainly overwrites."""
    first = instr.operands[0] if instr.operands else None
    written: frozenset[int] = frozenset()
    if isinstance(first, (Reg, Vector, Pair)) and instr.opcode.partition(".")[0] not in _READ_FIRST:
        written = frozenset(registers_of(first))
    others = instr.operands[1:] if written else instr.operands
    read = frozenset(register for operand in others for register in registers_of(operand))
    return (read, written) if instr.guard is None else (read | {instr.guard.index}, frozenset())


def _live(kernel: Kernel, graph: list[BasicBlock], of: frozenset[int]) -> list[frozenset[int]]:
    """Which of the registers may be read later, in front of each instruction and at the end."""
    live: list[frozenset[int]] = [frozenset()] * (len(kernel.instructions) + 1)
    both = [_directions(instr) for instr in kernel.instructions]
    directions = [(read & of, written & of) for read, written in both]
    changed = True
    while changed:
        changed = False
        for start, end, after in reversed(graph):
            here = frozenset().union(*(live[graph[j][0]] for j in after))
            for i in reversed(range(start, end)):
                read, written = directions[i]
                if read or written:
                    here = here - written | read
                changed |= here != live[i]
                live[i] = here
    return live


class _Plan:
    """Which copies move, and after which instructions. ``kept``: copies that cannot be put off."""

    def __init__(self, kernel: Kernel):
        self.kernel, self.graph = kernel, blocks(kernel)
        code = kernel.instructions
        self.writes = {i.index: frozenset(registers_of(i.operands[0])) for i in code if i.opcode.startswith(MMA)}
        self.copies = _copies(code, frozenset().union(*self.writes.values()))
        targets = frozenset().union(*(to for to, source in self.copies.values()))
        self.live = _live(kernel, self.graph, targets)
        self.kept: set[int] = set()
        self.moved: set[int] = set()
        self.following: dict[int, tuple[int, ...]] = {}

    def solve(self) -> bool:
        """Follow all paths; False if a copy turned out to be one that stays, so that it has to be done again."""
        self.moved, self.following = set(), {}
        entry: list[_State | None] = [None] * len(self.graph)
        entry[0] = frozenset(), ()
        work, before = [0], len(self.kept)
        while work and len(self.kept) == before:
            i = work.pop()
            start, end, after = self.graph[i]
            state = entry[i]
            for instr in self.kernel.instructions[start:end]:
                state = self._after(instr, state)
            for j in after:
                joined = state if entry[j] is None else self._join(self.graph[j][0], entry[j], state)
                if joined != entry[j]:
                    entry[j] = joined
                    work.append(j)
        return len(self.kept) == before

    def _join(self, index: int, a: _State, b: _State) -> _State:
        """What holds in front of an instruction on two paths."""
        both = tuple(copy for copy in a[1] if copy in b[1])
        wanted = self.live[index].union(*(self.copies[copy][1] for copy in both))
        self.kept |= {copy for copy in {*a[1], *b[1]} - {*both} if self.copies[copy][0] & wanted}
        return a[0] | b[0], both

    def _after(self, instr: Instr, state: _State) -> _State:
        pending, waiting = state
        opcode, index = instr.opcode, instr.index
        if opcode.startswith(COMMIT):
            return frozenset((mma, min(age + 1, AGES)) for mma, age in pending), waiting
        if opcode.startswith(WAIT) and instr.guard is None and isinstance(instr.operands[0], Imm):
            left = frozenset((mma, age) for mma, age in pending if age <= instr.operands[0].bits)
            return left, self._materialise(index, left, waiting)
        if index in self.copies and index not in self.kept and self._unready(index, pending, waiting):
            self.moved.add(index)
            return pending, (*self._left(index, self.copies[index][0], waiting), index)
        touched = frozenset(register for operand in instr.operands for register in registers_of(operand))
        if instr.guard is not None:
            touched |= {instr.guard.index}
        waiting = self._left(index, touched, waiting)
        if index in self.writes:
            pending |= {(index, 0)}
        return pending, waiting

    def _unready(self, index: int, pending: frozenset[tuple[int, int]], waiting: tuple[int, ...]) -> bool:
        """Does a copy read what is not there yet?"""
        sources = self.copies[index][1]
        return any(sources & self.writes[mma] for mma, _ in pending) or any(
            sources & self.copies[other][0] for other in waiting
        )

    def _left(self, index: int, touched: frozenset[int], waiting: tuple[int, ...]) -> tuple[int, ...]:
        """The copies that are still put off after an instruction that may change what it touches.

        One that comes too late then is given up: it stays in its place, unless its value is not wanted any more.
        """
        left = tuple(c for c in waiting if c != index and not touched & (self.copies[c][0] | self.copies[c][1]))
        wanted = (self.live[index + 1] - touched).union(*(self.copies[copy][1] for copy in left))
        for copy in {*waiting} - {*left, index}:
            to = self.copies[copy][0]
            if to & (wanted | touched & self.live[index]):
                self.kept.add(copy)
        return left

    def _materialise(self, index: int, left: frozenset[tuple[int, int]], waiting: tuple[int, ...]) -> tuple[int, ...]:
        """The copies still put off after a wait; the others happen there."""
        late: list[int] = []
        for copy in waiting:
            if self._unready(copy, left, tuple(late)):
                late.append(copy)
        self.following[index] = tuple(copy for copy in waiting if copy not in late)
        return tuple(late)

    def rewritten(self) -> Kernel:
        """The kernel with its instructions and labels in their new places."""
        if not self.moved:
            return self.kernel
        code, position = [], {}
        for instr in self.kernel.instructions:
            position[instr.index] = len(code)
            if instr.index not in self.moved:
                code.append(replace(instr, index=len(code)))
            for copy in self.following.get(instr.index, ()):
                code.append(replace(self.kernel.instructions[copy], index=len(code)))
        position[len(self.kernel.instructions)] = len(code)
        labels = {name: position[index] for name, index in self.kernel.labels.items()}
        return replace(self.kernel, instructions=code, labels=labels)
