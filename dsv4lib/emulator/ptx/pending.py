"""Find registers that an asynchronous tensor-memory load may not have filled yet.

The analysis is static.

``tcgen05.ld`` returns before its data is there. Strictly by the PTX ISA only ``tcgen05.wait::ld`` of the same warp
makes the destination registers usable. Practice differs: NVVM moves ``mov.b64 %rd, {%r, %r}`` of the destinations in
front of the wait, and shipped kernels (NVIDIA's FMHA and MLA examples) use them with no wait at all; ptxas makes each
use wait for its register. So an early use is no error, but a load with one must not be completed later than that use:
`eager_loads` are completed at issue, which is one of their legal times.

A forward data-flow analysis over the control-flow graph: the state at an instruction is the set of loads that may still
be pending, and those that the value of a packed register may wait for, as bits of an integer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dsv4lib.emulator.ptx.ir import Instr, Kernel, Memory, Operand, Pair, Reg, Symbol, Vector

LOAD, WAIT = "tcgen05.ld", "tcgen05.wait::ld"


@dataclass(frozen=True)
class EarlyUse:
    """Hold a use of a register before its load must have completed.

    Instruction ``use`` touches ``register`` while the load at instruction ``load`` may be pending.
    """

    load: int
    use: int
    register: int


def registers_of(operand: Operand) -> Iterator[int]:
    """List the indices of all registers in an operand, addresses included."""
    if isinstance(operand, Reg):
        yield operand.index
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_of(item)
    elif isinstance(operand, Pair):
        yield from registers_of(operand.first)
        yield from registers_of(operand.second)
    elif isinstance(operand, Memory):
        yield from registers_of(operand.base)
        for item in operand.rest:
            yield from registers_of(item)


def _touched(instr: Instr) -> Iterator[int]:
    if instr.guard is not None:
        yield instr.guard.index
    for operand in instr.operands:
        yield from registers_of(operand)


class BasicBlock(NamedTuple):
    """Hold instructions [start, end) that run in order, and their successors.

    These are numbers of blocks.
    """

    start: int
    end: int
    after: list[int]


def blocks(kernel: Kernel) -> list[BasicBlock]:
    """Split a kernel into basic blocks, in the order of its code."""
    code = kernel.instructions
    starts = {0, *kernel.labels.values()}
    for instr in code:
        if _ends(instr):
            starts.add(instr.index + 1)
    order = sorted(s for s in starts if s < len(code))
    number = {start: i for i, start in enumerate(order)}
    out = []
    for i, start in enumerate(order):
        end = order[i + 1] if i + 1 < len(order) else len(code)
        last = code[end - 1]
        after = []
        if last.opcode.startswith("bra") and isinstance(last.operands[0], Symbol):
            target = kernel.labels[last.operands[0].name]
            after = [number[target]] if target in number else []
        elif last.opcode.startswith("brx") and isinstance(last.operands[1], Symbol):
            targets = {kernel.labels[label] for label in kernel.tables[last.operands[1].name]}
            after = [number[target] for target in sorted(targets) if target in number]
        if (not _ends(last) or last.guard is not None) and end in number:
            after.append(number[end])
        out.append(BasicBlock(start, end, after))
    return out


def _ends(instr: Instr) -> bool:
    return instr.opcode.partition(".")[0] in ("bra", "brx", "ret", "exit", "trap")


def eager_loads(kernel: Kernel) -> frozenset[int]:
    """List the loads whose registers are used, on some path, before a wait.

    Empty where a wait stands under a guard: such code is not followed.
    """
    if any(i.guard is not None and i.opcode.startswith(WAIT) for i in kernel.instructions):
        return frozenset()
    return frozenset(use.load for use in early_uses(kernel))


def packed(instr: Instr) -> Vector | None:
    """Return the parts of a ``mov`` that packs several registers to one, else None."""
    parts = instr.operands[1] if instr.opcode.startswith("mov.b") and len(instr.operands) == 2 else None
    return parts if isinstance(parts, Vector) and isinstance(instr.operands[0], Reg) else None


def early_uses(kernel: Kernel, through_packs: bool = False) -> list[EarlyUse]:
    """Find every use of a register that may still be pending, by instruction.

    ``through_packs``: packing registers (`packed`) is no use of them. What is packed while a part is pending is
    pending, too, until a wait or another write of it.
    """
    loads = [instr.index for instr in kernel.instructions if instr.opcode.startswith(LOAD)]
    if not loads:
        return []
    flow = _Flow(kernel, loads, through_packs)
    graph = blocks(kernel)
    entry = _solve(kernel, graph, flow)
    found = []
    for (start, end, _), state in zip(graph, entry, strict=True):
        for instr in kernel.instructions[start:end]:
            if state and instr.index not in flow.packs:
                for register in dict.fromkeys(_touched(instr)):
                    early = flow.pending(register, state, instr)
                    found += [EarlyUse(load, instr.index, register) for load in loads if early & flow.bit[load]]
            state = flow.after(instr, state)
    return found


class _Flow:
    """How instructions change the state: bits of the loads that may be pending, then as many for each packed register.

    Attributes:
        bit: of each load. packs: the parts that an instruction packs, if that is followed.
    """

    def __init__(self, kernel: Kernel, loads: list[int], through_packs: bool):
        self.bit = {index: 1 << i for i, index in enumerate(loads)}
        self.packs = {i.index: parts for i in kernel.instructions if (parts := packed(i))} if through_packs else {}
        self._all = (1 << len(loads)) - 1
        self._fillers: dict[int, int] = {}  # register -> the loads that fill it
        for index in loads:
            for register in registers_of(kernel.instructions[index].operands[0]):
                self._fillers[register] = self._fillers.get(register, 0) | self.bit[index]
        wholes = dict.fromkeys(kernel.instructions[index].operands[0].index for index in self.packs)
        self._field = {whole: len(loads) * (i + 1) for i, whole in enumerate(wholes)}  # first bit

    def pending(self, register: int, state: int, user: Instr | None = None) -> int:
        """Loads that a register may wait for. ``user``: none of what was packed where that only writes it."""
        found = state & self._fillers.get(register, 0)
        if register in self._field and (user is None or register not in _only_written(user)):
            found |= state >> self._field[register] & self._all
        return found

    def after(self, instr: Instr, state: int) -> int:
        """The state after an instruction. What stands under a guard may not happen."""
        if instr.opcode.startswith(WAIT) and instr.guard is None:
            return 0
        state |= self.bit.get(instr.index, 0)
        if not state or not self._field:
            return state
        parts, new = self.packs.get(instr.index), 0
        written = _only_written(instr) if parts is None else (instr.operands[0].index,)
        for register in () if parts is None else registers_of(parts):
            new |= self.pending(register, state)
        for register in written:
            if register in self._field:
                field = self._field[register]
                if instr.guard is None:
                    state &= ~(self._all << field)
                state |= new << field
        return state


_FIRST_IS_READ = ("bar", "barrier", "brx", "call", "nanosleep", "setmaxnreg", "stackrestore", "wgmma")


def _only_written(instr: Instr) -> frozenset[int]:
    """Registers of the first operand that an instruction sets without reading them."""
    first = instr.operands[0] if instr.operands else None
    if not isinstance(first, Reg | Vector | Pair) or instr.opcode.partition(".")[0] in _FIRST_IS_READ:
        return frozenset()
    if instr.opcode.startswith("tcgen05.") and not instr.opcode.startswith(LOAD):
        return frozenset()
    read = set() if instr.guard is None else {instr.guard.index}
    for operand in instr.operands[1:]:
        read.update(registers_of(operand))
    return frozenset(registers_of(first)) - read


def _solve(kernel: Kernel, graph: list[BasicBlock], flow: _Flow) -> list[int]:
    """Find the state at the entry of each block."""
    entry = [0] * len(graph)
    work = list(range(len(graph)))
    while work:
        i = work.pop()
        start, end, after = graph[i]
        state = entry[i]
        for instr in kernel.instructions[start:end]:
            state = flow.after(instr, state)
        for j in after:
            if state | entry[j] != entry[j]:
                entry[j] |= state
                work.append(j)
    return entry
