"""Run single asynchronous instructions on a small stand-in for the machine: registers are plain numpy arrays."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError, Place
from dsv4lib.emulator.isa import implementations
from dsv4lib.emulator.machine.async_units import AsyncUnits
from dsv4lib.emulator.machine.cta import Cluster, Cta
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.ptx.ir import Imm, Instr, Memory, Reg, Sink, Vector

implementations.load()
LANES = 32
_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Machine:
    """What asynchronous units and barriers need of a machine. Hazards are collected, or raised if ``fatal``."""

    def __init__(self) -> None:
        self.gmem, self.units, self.stats = GlobalMemory(), AsyncUnits(self), Counter()
        self.trace, self.race, self.time, self.fatal = None, None, 0, False
        self.marks = None
        self.hazards: list[str] = []
        self.waiting: list[tuple[int, int, int]] = []
        self.progress = 0

    def report(self, kind: str, message: str, place: Place | None, **facts: Any) -> None:
        self.hazards.append(kind)
        if self.fatal:
            raise HazardError(f"{kind}: {message}", place)

    def changed(self, lasting: bool = True) -> None:
        self.progress += 1

    def cancel_cluster(self) -> tuple[int, int, int] | None:
        return self.waiting.pop(0) if self.waiting else None

    def device_order(self, count: int) -> range:
        return range(count)


class Warp:
    """One warp: ``registers[i]`` are 32 values (bool: predicate, uint64[2, 32]: 128 bits)."""

    def __init__(self, cta: Cta, warp_id: int, agent: int):
        self.cta, self.warp_id, self.agent = cta, warp_id, agent
        self.registers: dict[int, np.ndarray] = {}
        self.active = np.arange(LANES)
        self.pending: Any = None
        self.parked: list[Any] = []
        self.resume: dict[int, Any] = {}
        self.exited = False
        self.program = SimpleNamespace(bits=_Bits(self.registers))

    def __repr__(self) -> str:
        return f"warp {self.warp_id} of {self.cta}"

    def lanes(self) -> np.ndarray:
        return self.active

    def mask(self) -> int:
        return sum(1 << int(lane) for lane in self.active)

    def place(self, instr: Instr | None = None) -> Place:
        return Place("test", 1, instr.text if instr else "", cta=self.cta.ctaid, warp=self.warp_id, lanes=self.mask())

    def read(self, operand: Any, dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        if isinstance(operand, Imm):
            bits = operand.bits & ((1 << 8 * dtype.itemsize) - 1)
            return np.full(LANES, bits, _WIDTH[dtype.itemsize]).view(dtype)
        value = self.registers[operand.index]
        if value.ndim == 2 or dtype.kind == "b":
            return value
        if value.dtype.itemsize == dtype.itemsize:
            return value.view(dtype)
        return value.view(_WIDTH[value.dtype.itemsize]).astype(_WIDTH[dtype.itemsize]).view(dtype)

    def write(self, operand: Any, values: Any) -> None:
        if not isinstance(operand, Sink):
            self.registers[operand.index] = np.broadcast_to(values, LANES).copy()

    def decide(self, operand: Any, lanes: int) -> None:
        self.write(operand, np.array([lanes >> lane & 1 for lane in range(LANES)], bool))

    def agreed(self, operand: Any, width: int) -> int | None:
        values = set(self.read(operand, _WIDTH[width])[self.active].tolist())
        return values.pop() if len(values) == 1 else None

    def agreed_address(self, memory: Memory) -> int | None:
        values = set(self.address(memory)[self.active].tolist())
        return values.pop() if len(values) == 1 else None

    def uniform(self, operand: Any, dtype: Any) -> Any:
        values = self.read(operand, dtype)[self.active]
        if (values != values[0]).any():
            raise EmulatorError("not uniform", self.place())
        return values[0].item()

    def address(self, memory: Memory) -> np.ndarray:
        return self.read(memory.base, np.uint64) + np.uint64(memory.offset)


class _Bits:
    def __init__(self, registers: dict[int, np.ndarray]):
        self.registers = registers

    def __getitem__(self, index: int) -> int:
        value = self.registers[index]
        return 1 if value.dtype == bool else 128 if value.ndim == 2 else 8 * value.dtype.itemsize


class Bench:
    """A machine with one cluster of ``ctas`` CTAs of two warps."""

    def __init__(self, ctas: int = 1, smem: int = 64 * 1024):
        self.machine = Machine()
        self.cluster = Cluster(self.machine, 0, (0, 0, 0), (ctas, 1, 1))
        for rank in range(ctas):
            cta = Cta(self.cluster, rank, (rank, 0, 0), smem)
            cta.warps = [Warp(cta, i, 2 * rank + i) for i in range(2)]
            self.cluster.ctas.append(cta)
        self.cta = self.cluster.ctas[0]
        self.warp = self.cta.warps[0]
        self.units, self.gmem = self.machine.units, self.machine.gmem

    def array(self, values: np.ndarray, label: str = "array") -> np.ndarray:
        """A registered copy of ``values`` at a 256-byte aligned address."""
        raw = np.zeros(values.nbytes + 256, np.uint8)
        start = -raw.ctypes.data % 256
        out = raw[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        out[...] = values
        self.gmem.register_array(out, label)
        return out

    def register(self, values: Any, dtype: Any = np.uint32, warp: Warp | None = None) -> Reg:
        """A register holding 32 values (or one for all lanes)."""
        warp = warp or self.warp
        index = len(warp.registers)
        warp.registers[index] = np.broadcast_to(np.asarray(values, dtype), LANES).copy()
        return Reg(index)

    def run(self, opcode: str, *operands: Any, warp: Warp | None = None, lanes: Any = None) -> Any:
        """Execute once; returns the Block of a waiting instruction, else None."""
        warp = warp or self.warp
        entry, form = isa.lookup(opcode)
        listed = tuple(operand(o) for o in operands)
        instr = Instr(0, opcode, listed, None, 1, opcode)
        before = warp.active
        if lanes is not None:
            warp.active = np.atleast_1d(lanes)
        try:
            return entry.implementation(warp, instr, form)
        finally:
            warp.active = before

    def barrier(self, offset: int = 1024, count: int = 1, tx: int = 0, rank: int = 0) -> Any:
        """Initialise a barrier, with transaction bytes expected in its first phase."""
        cta = self.cluster.ctas[rank]
        self.run("mbarrier.init.shared.b64", at(rank << 24 | offset), count, warp=cta.warps[0], lanes=0)
        if tx:
            cta.mbarriers[offset].expect_tx(tx, cta.warps[0].place)
        return cta.mbarriers[offset]

    def write_smem(self, offset: int, data: np.ndarray, rank: int = 0) -> None:
        """Put bytes into shared memory as if fenced."""
        raw = np.ascontiguousarray(data).view(np.uint8).ravel()
        smem = self.cluster.ctas[rank].smem
        smem.data[offset : offset + len(raw)] = raw
        smem.init[offset : offset + len(raw)] = 1


def operand(value: Any) -> Any:
    """ints become immediates, everything else stays."""
    return Imm(int(value)) if isinstance(value, (int, np.integer)) else value


def at(base: Any, *rest: Any) -> Memory:
    """``[base]`` or ``[base, {...}]``."""
    return Memory(operand(base), 0, tuple(vector(*r) if isinstance(r, (list, tuple)) else r for r in rest))


def vector(*items: Any) -> Vector:
    """``{a, b, ...}``."""
    return Vector(tuple(operand(i) for i in items))


SINK = Sink()
