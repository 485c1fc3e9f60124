"""Record what a launch does, for `trace.Trace`. The machine and its units call a method per event.

Nothing here is called when tracing is off. Rows are tuples in lists, made into arrays once at the end: that is several
times cheaper than writing into structured arrays one row at a time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.machine.warp import PC
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.trace import trace as tables
from dsv4lib.emulator.trace.trace import Trace, pack_lanes

if TYPE_CHECKING:
    from dsv4lib.emulator.checks.report import Hazard
    from dsv4lib.emulator.machine.async_units import AsyncOp
    from dsv4lib.emulator.machine.cta import Cta
    from dsv4lib.emulator.machine.interfaces import MachineView
    from dsv4lib.emulator.machine.warp import Block, Warp
    from dsv4lib.emulator.ptx.ir import Instr
    from dsv4lib.emulator.units.mbarrier import MBarrier
    from dsv4lib.emulator.units.operand import Operand

_EXECUTED = abi.CONTEXT.fields["executed"][1] // 8
_TABLES = (
    *("boxes", "mmas", "tmem", "smem", "mbarriers", "named", "states", "fences", "peers", "steps", "marks"),
    "hazards",
)
_ROW_BYTES = 300  # of a record's tuple and its numbers
_CLOCK = abi.CONTEXT.fields["clock"][1] // 8


class Recorder:
    """One launch's events.

    Attributes:
        machine: whose launch; events: how many records so far.
        until: time of the first record that there was no more room for, -1 while there is; dropped: how many came then.
    """

    def __init__(self, machine: MachineView, most: int = 0):
        """Begin; records take up to about ``most`` bytes, 0 = any number. Hazards are recorded in any case."""
        self.machine = machine
        self.events = 0
        self.until, self.dropped = -1, 0
        self._room = most or math.inf
        self._records: np.ndarray | None = None
        self._running: Warp | None = None  # in a slice now
        self._ahead = 0  # of the latest slice
        self._op = -1  # row of the operation that is completing
        self._rows: dict[tuple[str, int], int] = {}
        self._ops: list[list[Any]] = []
        self._labels: list[Any] = []
        self._chunks: list[np.ndarray] = []
        self._tensors: dict[Any, int] = {}
        self._tables: dict[str, list[tuple]] = {name: [] for name in _TABLES}
        self._stretch: dict[int, tuple[Any, ...]] = {}  # by agent: start of the running stretch
        self._lost: dict[int, str] = {}  # by agent: state of the running stretch, if there was no more room for it
        self._dirty: dict[int, np.ndarray] = {}  # by CTA: unfenced writers at the last look
        self._stands: dict[int, int] = {}  # by agent: PTX line of the latest mark

    def counting_records(self) -> np.ndarray:
        """Copy the program's records. Their ``pad`` field counts executions (native/driver_ir.py)."""
        self._records = self.machine.program.records.copy()
        self._records["pad"] = 0
        return self._records

    # --- clocks and names -------------------------------------------------------------------------------------------

    def _when(self) -> tuple[int, int]:
        event = self.events
        self.events += self.until < 0
        return event, self._now()

    def _add(self, table: str, row: tuple, nbytes: int = 0) -> bool:
        """Add a record that keeps further bytes, if there is room."""
        if not self._has_room(nbytes):
            return False
        self._tables[table].append(row)
        return True

    def _has_room(self, nbytes: int = 0) -> bool:
        """Take the room of a record. Once there is none, nothing later is recorded: what there is has no holes."""
        if self.until < 0 and self._room < nbytes + _ROW_BYTES:
            self.until = self._now()
        if self.until >= 0:
            self.dropped += 1
            return False
        self._room -= nbytes + _ROW_BYTES
        return True

    def _now(self) -> int:
        warp = self._running
        return self.machine.time if warp is None else warp.longs[_CLOCK] + warp.longs[_EXECUTED]

    def _cta(self, cta: Cta) -> int:
        (x, y, z), (gx, gy, _) = cta.ctaid, self.machine.grid
        return x + gx * (y + gy * z)

    def _origin(self, warp: Warp | None, instr: Instr | None) -> tuple[int, int, int]:
        if warp is None:
            return -1, -1, -1
        return self._cta(warp.cta), warp.warp_id, -1 if instr is None else instr.line

    # --- warps ------------------------------------------------------------------------------------------------------

    def slice_begins(self, warp: Warp) -> None:
        """Record the start of a warp's slice, perhaps after a wait."""
        self._running = warp
        if self.machine.ahead != self._ahead:
            self._ahead = self.machine.ahead
            self._add("steps", (self.machine.time, self.machine.time + self._ahead))
        known = self._stretch.get(warp.agent)
        if known is None or known[3] == "wait":
            self._end_stretch(warp)
            self._begin_stretch(warp, "run", "", -1)
        self._mark(warp, self._place(warp))

    def serves(self, warp: Warp, instr: Instr) -> None:
        """Record that a warp comes to a service."""
        self.stores(warp)
        self._mark(warp, self._origin(warp, instr))

    def _mark(self, warp: Warp, place: tuple[int, int, int]) -> None:
        if self._stands.get(warp.agent) != place[2]:
            self._stands[warp.agent] = place[2]
            self._add("marks", (*place, self._now()))

    def slice_ends(self, warp: Warp) -> None:
        """Record the end of a warp's slice."""
        self.stores(warp)
        self._running = None

    def stores(self, warp: Warp) -> None:
        """Look for what a warp stored in its CTA's shared memory since the last look."""
        cta = warp.cta
        dirty = cta.smem.dirty
        before = self._dirty.get(self._cta(cta))
        if before is None:
            before = self._dirty[self._cta(cta)] = np.zeros_like(dirty)
        changed = dirty != before
        if changed.any():
            new = np.nonzero(changed & (dirty == warp.warp_id + 1))[0]
            if len(new):
                self._smem(cta, (self._cta(cta), warp.warp_id, -1), "threads", True, new, op=-1)
            before[:] = dirty

    def warp_waits(self, warp: Warp, block: Block) -> None:
        """Record that a warp cannot go on."""
        self._end_stretch(warp)
        barrier = getattr(block, "barrier", -1)
        self._begin_stretch(warp, "wait", block.reason, barrier)

    def warp_exits(self, warp: Warp) -> None:
        """Record that a warp has exited."""
        self._end_stretch(warp)

    def _place(self, warp: Warp) -> tuple[int, int, int]:
        return self._origin(warp, warp.program.instruction(warp.words[PC]) if not warp.exited else None)

    def _begin_stretch(self, warp: Warp, state: str, reason: str, barrier: int) -> None:
        if self._lost.get(warp.agent) == state:  # it goes on
            return
        if self._has_room():
            self._stretch[warp.agent] = (*self._place(warp), state, reason, barrier, self._now())
        else:
            self._lost[warp.agent] = state

    def _end_stretch(self, warp: Warp) -> None:
        known = self._stretch.pop(warp.agent, None)
        if known is not None:
            self._tables["states"].append((*known, self._now()))

    # --- asynchronous operations ------------------------------------------------------------------------------------

    def issued(self, op: AsyncOp) -> None:
        """Record an operation that is queued. The second half of one keeps the row of the first."""
        key = op.unit, op.order
        if key not in self._rows and self._has_room():
            self._rows[key] = len(self._ops)
            origin = self._origin(op.warp, op.instr)
            self._ops.append([op.unit.partition(":")[0], *origin, *self._when(), -1, -1])
            self._labels.append(op.label)

    def completing(self, op: AsyncOp) -> None:
        """Record that an operation is about to happen: what follows belongs to it."""
        self._op = self._rows.get((op.unit, op.order), -1)
        if self._op >= 0:
            self._ops[self._op][6:8] = self._when()

    def completed(self) -> None:
        """Record that an operation has happened."""
        self._op = -1

    # --- data -------------------------------------------------------------------------------------------------------

    def _smem(
        self, cta: Cta, origin: tuple[int, int, int], what: str, write: bool, chunks: np.ndarray, op: int | None = None
    ) -> None:
        chunks = chunks.ravel()
        first, end = 16 * int(chunks.min()), 16 * int(chunks.max()) + 16
        number = self._op if op is None else op
        row = (*self._when(), number, self._cta(cta), *origin[1:], what, write, first, end)
        if self._add("smem", row, chunks.nbytes):
            self._chunks.append(chunks)

    def tma(self, copy: Any) -> None:
        """Record a completed tensor copy (`units.tma.TensorCopy`)."""
        tensor = self._tensors.setdefault(copy.tensor, len(self._tensors))
        coords = (*copy.coords, *(0,) * (5 - len(copy.coords)))
        place, barrier = copy.placement, -1 if copy.barrier is None else copy.barrier
        self._add(
            "boxes",
            (*self._when(), self._op, self._cta(copy.cta), copy.kind, copy.mode, tensor, coords)
            + (place.first, place.end, copy.nbytes, barrier),
        )
        chunks = np.arange(place.first >> 4, place.end + 15 >> 4) if place.index is None else place.index
        origin = self._origin(copy.op.warp, copy.op.instr)
        self._smem(copy.cta, origin, "tma" if copy.kind == "load" else "tma store", copy.kind == "load", chunks)

    def bulk(self, kind: str, address: int, cta: Cta, offset: int, size: int, op: AsyncOp) -> None:
        """Record a completed bulk copy; ``address`` is global."""
        chunks = np.arange(offset >> 4, offset + size + 15 >> 4)
        origin = self._origin(op.warp, op.instr)
        self._smem(cta, origin, f"bulk {kind}", kind == "load", chunks)
        self._peer(origin, f"bulk {kind}", address, size)

    def far(self, warp: Warp, instr: Instr, what: str, addresses: np.ndarray, nbytes: int) -> None:
        """Record an access of a warp's lanes to global memory, ``nbytes`` a lane."""
        first, last = int(addresses.min()), int(addresses.max())
        one = self.machine.gmem.find(first)
        if one is None or last < one.end:
            self._peer(self._origin(warp, instr), what, first, nbytes * len(addresses))
            return
        inside = addresses < one.end
        for part in (inside, ~inside):
            self.far(warp, instr, what, addresses[part], nbytes)

    def _peer(self, origin: tuple[int, int, int], what: str, address: int, nbytes: int) -> None:
        holder = self.machine.gmem.find(address)
        if holder is not None and holder.device not in (None, self.machine.device):
            self._add("peers", (*self._when(), *origin, what, holder.device, address, nbytes))

    def cp_async(self, warp: Warp, instr: Instr, to: np.ndarray, start: np.ndarray, size: int) -> None:
        """Record a warp's completed cp.async: offsets, global addresses, bytes a lane."""
        self._smem(warp.cta, self._origin(warp, instr), "cp.async", True, np.unique(to >> 4))

    def smem_operand(self, cta: Cta, warp: Warp, instr: Instr, what: str, operand: Operand) -> None:
        """Record that a tensor core reads a matrix from shared memory."""
        self._smem(cta, self._origin(warp, instr), what, False, operand.first + operand.chunks)

    def tmem_access(
        self, what: str, cta: Cta, warp: Warp, instr: Instr, lanes: np.ndarray, span: tuple[int, int]
    ) -> None:
        """Record tcgen05.ld, st or cp, or a part of an MMA. "mma" writes D, "A" reads it; columns [first, end)."""
        origin = self._origin(warp, instr)
        row = (*self._when(), self._op, self._cta(cta), *origin[1:], what, what not in ("ld", "A"), *span)
        self._add("tmem", (*row, pack_lanes(lanes)))

    def mma(self, mma: Any) -> None:
        """Record a completed tcgen05.mma (`tcgen05_core.Mma`) or wgmma (`units.wgmma`)."""
        origin = self._origin(mma.warp, mma.instr)
        when = self._when()
        shape = getattr(mma, "shape", None)
        if shape is None:  # wgmma: the accumulator is in registers; a warp's part has 16 rows
            self._add(
                "mmas",
                (*when, self._op, *origin, f"wgmma {mma.a_format}", 16, mma.n, mma.k, -1, -1, 0, mma.accumulate)
                + (2 * 16 * mma.n * mma.k,),
            )
            return
        column, lane = mma.d & 0xFFFF, mma.d >> 16
        width = mma.width
        self._add(
            "mmas",
            (*when, self._op, *origin, shape.kind, shape.m, shape.n, shape.k, column, lane, width, mma.accumulate)
            + (2 * shape.m * shape.n * shape.k,),
        )
        numbers = np.broadcast_to(np.arange(128)[:, None], (128, 512))
        for region in mma.regions:
            lanes = np.unique(region.view(numbers, lane, column, 1))
            self.tmem_access("mma", mma.ctas[region.cta], mma.warp, mma.instr, lanes, (column, column + width))

    # --- synchronisation --------------------------------------------------------------------------------------------

    def mbarrier(self, barrier: MBarrier) -> None:
        """Record a change of an mbarrier."""
        b = barrier
        done = b.pending == 0 and b.tx == 0
        self._add("mbarriers", (*self._when(), self._cta(b.cta), b.offset, b.phase, b.pending, b.expected, b.tx, done))

    def barrier(self, warp: Warp, kind: str, number: int, arrived: int, expected: int) -> None:
        """Record a warp's arrival at a named barrier or at its cluster's."""
        instr = warp.program.instruction(warp.words[PC])
        self._add("named", (*self._when(), *self._origin(warp, instr), kind, number, arrived, expected))

    def tcgen05_fence(self, warp: Warp, instr: Instr, when: str) -> None:
        """Record a tcgen05.fence."""
        self._add("fences", (*self._when(), *self._origin(warp, instr), when))

    # --- checks -----------------------------------------------------------------------------------------------------

    def hazard(self, hazard: Hazard) -> None:
        """Record that a check reports a hazard for the first time."""
        place, owner = hazard.place, 0 if hazard.owner is None else hazard.owner.ptx_line
        cta = warp = -1
        if place is not None and place.cta is not None:
            (x, y, z), (gx, gy, _) = place.cta, self.machine.grid
            cta = x + gx * (y + gy * z)
        if place is not None and place.warp is not None:
            warp = place.warp
        line = 0 if place is None else place.ptx_line
        self._tables["hazards"].append((self.events, self._now(), cta, warp, line, owner, hazard.kind))

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> Trace:
        """Convert everything so far to arrays; also after a launch that failed."""
        machine = self.machine
        for start in list(self._stretch.values()):
            self._tables["states"].append((*start, machine.time + 1))  # it has not exited
        self._stretch.clear()
        program = machine.program
        count = len(program.instructions)
        executed = np.zeros(count, np.int64)
        if self._records is not None:
            executed[:] = np.ascontiguousarray(self._records["pad"]).view(np.uint32)[:count]
        arrays = {name: np.array(rows, getattr(tables, name.upper())) for name, rows in self._tables.items()}
        return Trace(
            kernel=program.kernel.name,
            grid=machine.grid,
            smem_bytes=machine.smem_bytes,
            events=self.events,
            time=machine.time if self.until < 0 else self.until,
            dropped=self.dropped,
            ops=np.array([tuple(row) for row in self._ops], tables.OPS),
            labels=[str(label) for label in self._labels],
            chunks=self._chunks,
            tensors=list(self._tensors),
            lines=np.array([i.line for i in program.instructions], np.int32),
            opcodes=np.array([i.opcode for i in program.instructions]),
            executed=executed,
            texts=[i.text for i in program.instructions],
            sources=[program.python_line(i) for i in program.instructions],
            stats=machine.stats,
            **arrays,
        )
