"""Find registers that a wgmma may still use.

Also those changed without wgmma.fence. The analysis is static.

``wgmma.mma_async`` works on its accumulator and A registers until a ``wgmma.wait_group`` has waited for its group; any
other access to them before is undefined. ``wgmma.fence`` must come before the first wgmma, and between an access to
registers by other instructions and the next wgmma that uses them; accumulators handed from one wgmma to the next need
none. A forward data-flow analysis over the control-flow graph, in which an operation carries the number of groups that
have been committed since: whatever may happen on some path counts.

Source: PTX ISA, "wgmma.mma_async", "wgmma.fence", "wgmma.wait_group".
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.emulator.ptx.ir import Imm, Instr, Kernel, Vector
from dsv4lib.emulator.ptx.pending import blocks, registers_of

MMA, _FENCE = "wgmma.mma_async", "wgmma.fence"
COMMIT, WAIT = "wgmma.commit_group", "wgmma.wait_group"
AGES = 9  # groups committed since an operation; more count as this many


@dataclass(frozen=True)
class Finding:
    """The wgmma at instruction ``mma`` and what is wrong.

    Attributes:
        mma: index of the wgmma; other: of the instruction that touches ``register`` too early (``waited`` False), or
            that touched it since the last fence (-1: no fence on the way from the kernel's beginning).
        register: index of the register.
        waited: False: the wait is missing; True: the fence is.
    """

    mma: int
    other: int
    register: int
    waited: bool


@dataclass(frozen=True)
class _State:
    """At one point of the program.

    Attributes:
        pending: operations that may be pending, as bits, by the number of groups committed since.
        touched: registers (of any wgmma) that may have been accessed since the last fence: register -> instruction.
    """

    pending: tuple[int, ...]
    touched: frozenset[tuple[int, int]]


def findings(kernel: Kernel) -> list[Finding]:
    """Find missing waits and fences; one finding for each pair of instructions."""
    code = kernel.instructions
    operations = [i.index for i in code if i.opcode.startswith(MMA)]
    if not operations:
        return []
    analysis = _Analysis(kernel, operations)
    graph = blocks(kernel)
    entry: list[_State | None] = [None] * len(graph)
    entry[0] = _State((0,) * (AGES + 1), frozenset({(-1, -1)}))
    work = [0]
    while work:
        i = work.pop()
        start, end, after = graph[i]
        state = entry[i]
        for instr in code[start:end]:
            state = analysis.after(instr, state)
        for j in after:
            joined = state if entry[j] is None else _join(entry[j], state)
            if joined != entry[j]:
                entry[j] = joined
                work.append(j)
    for (start, end, _), state in zip(graph, entry, strict=True):
        if state is None:  # never reached
            continue
        for instr in code[start:end]:
            analysis.look(instr, state)
            state = analysis.after(instr, state)
    return list(analysis.found.values())


def _join(a: _State, b: _State) -> _State:
    return _State(tuple(x | y for x, y in zip(a.pending, b.pending, strict=True)), a.touched | b.touched)


class _Analysis:
    """Transfer function and findings."""

    def __init__(self, kernel: Kernel, operations: list[int]):
        code = kernel.instructions
        self.bit = {index: 1 << i for i, index in enumerate(operations)}
        self.operations = operations
        self.accumulators, self.inputs = {}, {}
        for index in operations:
            d, a, *_ = code[index].operands
            self.accumulators[index] = frozenset(registers_of(d))
            self.inputs[index] = frozenset(registers_of(a)) if isinstance(a, Vector) else frozenset()
        self.watched = frozenset().union(*self.accumulators.values(), *self.inputs.values())
        self.touches = {i.index: self.watched.intersection(_registers(i)) for i in code}
        self.found: dict[tuple[int, int, bool], Finding] = {}

    def after(self, instr: Instr, state: _State) -> _State:
        """Compute the state after an instruction, which may not happen under a guard."""
        pending, touched = state.pending, state.touched
        if instr.index in self.bit:
            return _State((pending[0] | self.bit[instr.index], *pending[1:]), touched)
        if instr.opcode.startswith(COMMIT):
            pending = (0, *pending[: AGES - 1], pending[AGES - 1] | pending[AGES])
        elif instr.opcode.startswith(WAIT) and isinstance(instr.operands[0], Imm) and instr.guard is None:
            kept = instr.operands[0].bits
            pending = tuple(mask if age <= kept else 0 for age, mask in enumerate(pending))
        elif instr.opcode.startswith(_FENCE) and instr.guard is None:
            touched = frozenset()
        elif self.touches[instr.index]:
            touched |= {(register, instr.index) for register in self.touches[instr.index]}
        return _State(pending, touched)

    def look(self, instr: Instr, state: _State) -> None:
        """Note what is wrong with an instruction in a state."""
        if instr.index in self.bit:
            mine = self.accumulators[instr.index] | self.inputs[instr.index]
            for register, other in sorted(state.touched):
                if register in mine or other < 0:
                    self._note(instr.index, other, register, True)
            return
        used = self.touches[instr.index]
        if not used:
            return
        running = 0
        for mask in state.pending:
            running |= mask
        for index in self.operations:
            if running & self.bit[index]:
                for register in sorted(used & (self.accumulators[index] | self.inputs[index])):
                    self._note(index, instr.index, register, False)

    def _note(self, mma: int, other: int, register: int, waited: bool) -> None:
        self.found.setdefault((mma, other, waited), Finding(mma, other, register, waited))


def _registers(instr: Instr) -> set[int]:
    return {r for operand in instr.operands for r in registers_of(operand)}
