"""Hold one warp. Its register file and context, and what a service may do with its operands.

The register file is plain bytes shared with native code (layout in native/abi.py). Services see it through numpy views,
so reading a register copies nothing. Reads and writes follow the lanes of the *current* instruction: ``mask`` is the
running group's lanes that pass the guard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.errors import EmulatorError, Place
from dsv4lib.emulator.memory.addressing import shared_address
from dsv4lib.emulator.native.abi import CONTEXT, FULL_MASK, LANES
from dsv4lib.emulator.ptx.ir import Imm, Instr, Memory, Operand, Pair, Reg, Sink, Special, Symbol

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cta
    from dsv4lib.emulator.machine.program import Program

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LANES = np.arange(LANES)


def _word(name: str) -> int:
    """Index of a 4-byte CONTEXT field when the record is seen as 32-bit words."""
    return CONTEXT.fields[name][1] // 4


MASK, GROUP, PC, LIVE = _word("mask"), _word("group"), _word("pc"), _word("live")
GROUPS, STICKY = _word("groups"), _word("sticky")
GROUP_PC, GROUP_MASK = _word("group_pc"), _word("group_mask")


@functools.lru_cache(maxsize=4096)
def lanes_of(mask: int) -> np.ndarray:
    """Unpack a lane mask to bool[32], lane 0 = bit 0; read-only."""
    lanes = (np.uint32(mask) >> _LANES.astype(np.uint32) & np.uint32(1)).astype(bool)
    lanes.flags.writeable = False
    return lanes


@functools.lru_cache(maxsize=4096)
def _indices(mask: int) -> np.ndarray:
    """Numbers of the set bits, ascending; read-only."""
    indices = np.nonzero(lanes_of(mask))[0]
    indices.flags.writeable = False
    return indices


def mask_of(lanes: np.ndarray) -> int:
    """Pack bool[32] to a lane mask."""
    return int(np.packbits(lanes, bitorder="little").view("<u4")[0])


@dataclass(frozen=True)
class Block:
    """Why a warp cannot go on.

    The service that returned it is called again from the start once ``ready()`` is true.

    Attributes:
        reason: short kind, such as "mbarrier" or "bar.sync 1"; groups the deadlock report.
        ready: cheap test without side effects; evaluated again only after some event changed the machine.
        detail: what is expected and what has arrived, for the deadlock report.
    """

    reason: str
    ready: Callable[[], bool]
    detail: Callable[[], str] = field(default=lambda: "")


@dataclass
class Parked:
    """Lanes of a divergent warp that wait while the other lanes run on."""

    pc: int
    mask: int
    block: Block
    pending: Any


def name_of_warp(warp_id: int, ctaid: tuple[int, int, int]) -> str:
    """Name a warp, for messages."""
    return f"warp {warp_id} of CTA {ctaid}"


class Warp:
    """One warp of 32 lanes.

    Attributes:
        ctx: CONTEXT record, shared with native code.
        regs: uint8 register file, 64-byte aligned.
        cta, warp_id, program: where it belongs and what it runs.
        agent: number of this warp among all warps resident with it (vector clocks).
        block: why it waits, None if it can run.
        pending: state of a service between calls while it blocks; None at the first call.
        parked: blocked lane groups of a divergent warp; resume: their service states by pc once they go on.
        stalled: it waits to converge with parked lanes.
        spins: slices it used up while divergent.
        words: CONTEXT as 32-bit words; indices are MASK, PC, ... of this module. longs: as 64-bit words.
        kept: what services keep from one execution of an instruction to the next, by its index.
        wgmma: state of the unit of that name, None before its first instruction.
        memory: the register file as bytes; predicates: as 32-bit words. Both are quicker than numpy for single values.
    """

    def __init__(self, cta: Cta, warp_id: int, program: Program, agent: int, context: np.ndarray, regs: np.ndarray):
        self.cta, self.warp_id, self.program, self.agent = cta, warp_id, program, agent
        self.regs = regs
        self.ctx = context[0]
        self.words = memoryview(context.view(np.uint32))
        self.longs = memoryview(context.view(np.uint8)).cast("Q")
        self.context_address = context.ctypes.data
        self.block: Block | None = None
        self.pending: Any = None
        self.parked: list[Parked] = []
        self.resume: dict[int, Any] = {}
        self.stalled = False
        self.exited = False
        self.spins = 0
        self.kept: dict[int, Any] = {}
        self.wgmma: Any = None
        self.memory = memoryview(regs)
        self.predicates = self.memory.cast("I")
        self._views: dict[tuple[int, str], np.ndarray] = {}

    def __repr__(self) -> str:
        return name_of_warp(self.warp_id, self.cta.ctaid)

    def mask(self) -> int:
        """Get the mask of lanes that execute the current instruction."""
        return self.words[MASK]

    def lanes(self) -> np.ndarray:
        """List the active lanes, ascending."""
        return _indices(self.words[MASK])

    def read(self, operand: Operand, dtype: Any) -> np.ndarray:
        """Read all 32 lanes of an operand.

        A register of the dtype's width is a view (do not write to it); of another width it is truncated or
        zero-extended. Immediates are broadcast. ``bool`` reads a predicate (honours ``!p``). 128-bit registers come
        back as uint64[2, 32]: low halves, high halves.

        Raises:
            EmulatorError: the operand has no value (a sink, an address).
        """
        kind = type(operand)
        dtype = np.dtype(dtype)
        if kind is Reg:
            if dtype.kind == "b":
                value = lanes_of(int(self._view(self.program.offset[operand.index], 1, "<u4")[0]))
                return ~value if operand.negated else value
            return self._register(operand.index, dtype)
        if kind is Imm:
            if dtype.kind == "b":
                return np.full(LANES, operand.bits & 1, bool)
            bits = operand.bits & ((1 << 8 * dtype.itemsize) - 1)
            return np.full(LANES, bits, _UNSIGNED[dtype.itemsize]).view(dtype)
        if kind is Special:
            return self._special(operand.name, dtype)
        if kind is Symbol:
            address = self.symbol(operand.name) + operand.offset
            return np.full(LANES, address, np.uint64).astype(_UNSIGNED[dtype.itemsize]).view(dtype)
        raise EmulatorError(f"operand {operand} has no value")

    def write(self, operand: Operand, values: Any) -> None:
        """Store 32 values (or one for all lanes) in the active lanes of a register. ``_`` is ignored.

        Values are converted to the register's width (bits kept or zero-extended). uint64[2, 32] writes a 128-bit
        register, bool a predicate.
        """
        if type(operand) is Sink:
            return
        if type(operand) is not Reg:
            raise EmulatorError(f"{operand} is not a destination")
        offset, bits = self.program.offset[operand.index], self.program.bits[operand.index]
        mask = self.words[MASK]
        values = np.asarray(values)
        if bits == 1:
            self.decide(operand, mask_of(np.broadcast_to(values, LANES).astype(bool)))
            return
        if bits == 128:
            target = self._view(offset, 2 * LANES, "<u8").reshape(2, LANES)
            if values.shape not in ((2, LANES), (2, 1)):
                raise EmulatorError(f"a 128-bit register takes uint64[2, 32], not {values.shape}")
            target[:, lanes_of(mask)] = np.broadcast_to(values, (2, LANES))[:, lanes_of(mask)]
            return
        width = bits // 8
        if values.dtype == bool or values.dtype.itemsize != width:
            raw = values if values.dtype.kind in "bui" else values.view(_UNSIGNED[values.dtype.itemsize])
            values = raw.astype(_UNSIGNED[width])
        else:
            values = values.view(_UNSIGNED[width])
        target = self._view(offset, LANES, f"<u{width}")
        if mask == FULL_MASK:
            target[:] = values
        else:
            active = lanes_of(mask)
            target[active] = values if values.ndim == 0 else np.broadcast_to(values, LANES)[active]

    def decide(self, operand: Operand, lanes: int) -> None:
        """Write a predicate register: bit i of ``lanes`` in lane i, if that is active. ``_`` is ignored."""
        if type(operand) is Sink:
            return
        at, mask = self.program.offset[operand.index] >> 2, self.words[MASK]
        self.predicates[at] = self.predicates[at] & ~mask | lanes & mask

    def test(self, operand: Operand, lane: int) -> bool:
        """Read one lane of a predicate operand."""
        if type(operand) is Reg:
            bit = self.predicates[self.program.offset[operand.index] >> 2] >> lane & 1
            return bool(bit) != operand.negated
        return bool(self.read(operand, bool)[lane])

    def lane_value(self, operand: Operand, width: int, lane: int) -> int:
        """Read one lane of an operand, as an unsigned number of ``width`` bytes."""
        if type(operand) is Reg:
            bits = self.program.bits[operand.index]
            if 8 <= bits <= 64:
                own = bits >> 3
                at = self.program.offset[operand.index] + own * lane
                return int.from_bytes(self.memory[at : at + min(own, width)], "little")
        if type(operand) is Imm:
            return operand.bits & (1 << 8 * width) - 1
        return int(self.read(operand, _UNSIGNED[width])[lane])

    def agreed(self, operand: Operand, width: int) -> int | None:
        """Find the value that all active lanes agree on, or None.

        Values as `lane_value` gives them.
        """
        mask = self.words[MASK]
        if not mask & (mask - 1):
            return self.lane_value(operand, width, mask.bit_length() - 1) if mask else None
        if type(operand) is Imm:
            return operand.bits & (1 << 8 * width) - 1
        if type(operand) is Reg and 8 <= (bits := self.program.bits[operand.index]) <= 64:
            own, at = bits >> 3, self.program.offset[operand.index]
            raw = self.memory[at : at + own * LANES].tobytes()
            if raw == raw[:own] * LANES:
                return int.from_bytes(raw[: min(own, width)], "little")
            if mask == FULL_MASK and own <= width:
                return None
        values = self.read(operand, _UNSIGNED[width])[lanes_of(mask)]
        return int(values[0]) if (values == values[0]).all() else None

    def agreed_address(self, memory: Memory) -> int | None:
        """Find `address` as one number, if all active lanes agree on it."""
        base = memory.base
        narrow = type(base) is Reg and self.program.bits[base.index] == 32
        value = self.agreed(base, 4 if narrow else 8)
        return None if value is None else value + memory.offset & (0xFFFFFFFF if narrow else 0xFFFFFFFFFFFFFFFF)

    def uniform(self, operand: Operand, dtype: Any) -> Any:
        """Read the value that all active lanes must agree on, as a Python number.

        Raises:
            EmulatorError: they differ, or no lane is active.
        """
        kind = np.dtype(dtype)
        if type(operand) is Imm and kind.kind == "u":
            return operand.bits & ((1 << 8 * kind.itemsize) - 1)
        values = self.read(operand, kind)
        mask = self.words[MASK]
        if mask == FULL_MASK and kind.kind != "f":
            raw = values.tobytes()
            if raw == raw[: kind.itemsize] * LANES:
                return values[0].item()
        values = values[lanes_of(mask)]
        if not len(values) or (values != values[0]).any():
            raise EmulatorError(f"{operand} must be the same in all active lanes, got {values.tolist()}", self.place())
        return values[0].item()

    def address(self, memory: Memory) -> np.ndarray:
        """Compute base + offset in all lanes, uint64[32].

        Shared addresses carry the CTA's rank (memory/addressing.py), parameters are addresses of the parameter block,
        local variables byte offsets in the lane's local memory. A 32-bit base wraps at 32 bits.
        """
        base = memory.base
        if type(base) is Reg and self.program.bits[base.index] == 32:
            return (self.read(base, np.uint32) + np.uint32(memory.offset & 0xFFFFFFFF)).astype(np.uint64)
        return self.read(base, np.uint64) + np.uint64(memory.offset & 0xFFFFFFFFFFFFFFFF)

    def symbol(self, name: str) -> int:
        """Get the address of a variable or parameter, as ``address`` gives it."""
        space, offset = self.program.symbol(name)
        if space == "shared":
            return shared_address(self.cta.rank, offset)
        if space == "param":
            return self.cta.cluster.machine.param_address + offset
        if space in ("global", "const"):
            return self.cta.cluster.machine.variable_address(name)
        return offset

    def place(self, instr: Instr | None = None) -> Place:
        """Make the place of the given instruction, or of the one at the warp's pc."""
        if instr is None:
            instr = self.program.instruction(self.words[PC])
        return Place(
            kernel=self.program.kernel.name,
            ptx_line=instr.line,
            ptx=instr.text,
            python=self.program.python_line(instr),
            cta=self.cta.ctaid,
            warp=self.warp_id,
            lanes=self.words[MASK],
            device=self.cta.machine.device,
        )

    def push(self, pc: int, mask: int) -> None:
        """Add a waiting lane group, joining one at the same pc."""
        words = self.words
        n = words[GROUPS]
        for i in range(n):
            if words[GROUP_PC + i] == pc:
                words[GROUP_MASK + i] |= mask
                return
        words[GROUP_PC + n], words[GROUP_MASK + n] = pc, mask
        words[GROUPS] = n + 1

    def rotate(self) -> None:
        """Let the longest-waiting group run: the running one goes to the end of the list."""
        words = self.words
        n = words[GROUPS]
        pc, mask = words[GROUP_PC], words[GROUP_MASK]
        for i in range(n - 1):
            words[GROUP_PC + i], words[GROUP_MASK + i] = words[GROUP_PC + i + 1], words[GROUP_MASK + i + 1]
        words[GROUP_PC + n - 1], words[GROUP_MASK + n - 1] = words[PC], words[GROUP]
        words[PC], words[GROUP] = pc, mask

    def _register(self, index: int, dtype: np.dtype) -> np.ndarray:
        offset, bits = self.program.offset[index], self.program.bits[index]
        if bits == 128:
            return self._view(offset, 2 * LANES, "<u8").reshape(2, LANES)
        if bits == 1:
            return lanes_of(int(self._view(offset, 1, "<u4")[0])).astype(dtype)
        if bits // 8 == dtype.itemsize:
            return self._view(offset, LANES, dtype.str)
        raw = self._view(offset, LANES, f"<u{bits // 8}")
        return raw.astype(_UNSIGNED[dtype.itemsize]).view(dtype)

    def _special(self, name: str, dtype: np.dtype) -> np.ndarray:
        offset, bits = self.program.special[name]
        raw = self._view(offset, LANES, f"<u{bits // 8}")
        return raw.astype(_UNSIGNED[dtype.itemsize]).view(dtype)

    def _view(self, offset: int, count: int, dtype: str) -> np.ndarray:
        key = (offset, dtype)
        view = self._views.get(key)
        if view is None:
            nbytes = count * int(dtype[-1])
            view = self._views[key] = self.regs[offset : offset + nbytes].view(dtype)
        return view


def operands_of(operand: Pair | Operand) -> tuple[Operand, Operand | None]:
    """Split ``d|p`` into its parts; a plain operand has no second part."""
    if isinstance(operand, Pair):
        return operand.first, operand.second
    return operand, None
