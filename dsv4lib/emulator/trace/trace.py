"""Hold the trace of a launch. Arrays of what the asynchronous units and warps did, in order, and queries of them.

Every record has two clocks. ``event`` numbers all records of a launch from 0, so any two can be ordered; ``time`` is
logical: warp-instructions executed by all warps so far. Neither is a duration on hardware.

Limits, by design: tensor memory is traced cell by cell. Shared memory is traced for everything asynchronous (TMA, bulk
copies, cp.async, tensor cores) exactly; stores of threads are seen as 16-byte chunks when their warp reaches its next
service or the end of its slice, and only the first store to a chunk between two proxy fences; stores into another CTA
and loads of threads are not traced. Threads' stores need the default checks (or more) to be on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dsv4lib.emulator.units.tmem import COLUMNS, LANES
from dsv4lib.errors import ArgumentError

_WHEN = [("event", "<i8"), ("time", "<i8")]
_WHO = [("cta", "<i4"), ("warp", "<i4"), ("line", "<i4")]

# One asynchronous operation. line: PTX line of the issuing instruction. done_*: -1 if it never completed.
OPS = np.dtype([("unit", "U12"), *_WHO, ("event", "<i8"), ("time", "<i8"), ("done_event", "<i8"), ("done_time", "<i8")])
# One TMA box, when it completed. op: row of `ops`; cta: whose shared memory; tensor: index of `Trace.tensors`; coords:
# dimension 0 first; first, end: bytes of shared memory; barrier: shared address or -1.
BOXES = np.dtype(
    [*_WHEN, ("op", "<i4"), ("cta", "<i4"), ("kind", "U12"), ("mode", "U16"), ("tensor", "<i4"), ("coords", "<i4", 5)]
    + [("first", "<i4"), ("end", "<i4"), ("nbytes", "<i8"), ("barrier", "<i8")]
)
# One MMA, when it completed. column, lane, columns: of D, -1 for register accumulators.
MMAS = np.dtype(
    [*_WHEN, ("op", "<i4"), *_WHO, ("kind", "U24"), ("m", "<i4"), ("n", "<i4"), ("k", "<i4"), ("column", "<i4")]
    + [("lane", "<i4"), ("columns", "<i4"), ("accumulate", "?"), ("flops", "<i8")]
)
# One access to tensor memory: columns [column, end) of the lanes whose bit is set. what: mma, ld, st, cp.
TMEM = np.dtype(
    [*_WHEN, ("op", "<i4"), *_WHO, ("what", "U4"), ("write", "?"), ("column", "<i4"), ("end", "<i4")]
    + [("lanes", "u1", LANES // 8)]
)
# One access to shared memory: 16-byte chunks `Trace.chunks[i]`, all inside [first, end).
SMEM = np.dtype([*_WHEN, ("op", "<i4"), *_WHO, ("what", "U12"), ("write", "?"), ("first", "<i4"), ("end", "<i4")])
# One change of an mbarrier: its state after an arrival or a change of its bytes; done: this ended the phase.
MBARRIERS = np.dtype(
    [*_WHEN, ("cta", "<i4"), ("offset", "<i4"), ("phase", "<i4"), ("pending", "<i4"), ("expected", "<i4")]
    + [("tx", "<i8"), ("done", "?")]
)
# One arrival at a named barrier ("named") or a cluster's ("cluster").
NAMED = np.dtype([*_WHEN, *_WHO, ("kind", "U8"), ("number", "<i4"), ("arrived", "<i4"), ("expected", "<i4")])
# One stretch of a warp's life. state: run or wait; reason: on what; barrier: shared address of the mbarrier, or -1;
# line: PTX line where the stretch began.
STATES = np.dtype([*_WHO, ("state", "U4"), ("reason", "U24"), ("barrier", "<i8"), ("time", "<i8"), ("end", "<i8")])
# One access to another device's part of symmetric memory: of a bulk copy (what: bulk load, bulk store) or of threads
# (load, store, atomic; needs the race detector). device: whose memory it is.
PEERS = np.dtype([*_WHEN, *_WHO, ("what", "U12"), ("device", "<i4"), ("address", "<i8"), ("nbytes", "<i8")])
# Where the launches of other devices have run in between: the time of this one, and the time common to all.
STEPS = np.dtype([("time", "<i8"), ("common", "<i8")])
TMEM_KINDS = ("mma", "ld", "st", "cp", "A")  # what `TMEM.what` can be
FENCES = np.dtype([*_WHEN, *_WHO, ("what", "U24")])
# Where a warp stood: at the start of a slice, and at each service that is not the one before. No event of its own.
MARKS = np.dtype([*_WHO, ("time", "<i8")])
# The first report of a hazard, in the order of the launch's result. event: the next one when it was reported; line,
# owner: PTX lines of the access and of what it conflicts with, 0 where there is none.
HAZARDS = np.dtype([*_WHEN, *_WHO, ("owner", "<i4"), ("kind", "U40")])


def pack_lanes(lanes: Iterable[int]) -> np.ndarray:
    """Pack lanes to uint8[16]: one bit a lane, lane 0 first."""
    bits = np.zeros(LANES, bool)
    bits[lanes] = True
    return np.packbits(bits, bitorder="little")


def unpack_lanes(packed: np.ndarray) -> np.ndarray:
    """Unpack lanes to bool[..., 128]."""
    return np.unpackbits(packed, axis=-1, bitorder="little").astype(bool)


@dataclass
class Trace:
    """One launch.

    Attributes:
        kernel, grid, smem_bytes: of the launch; a CTA's number is x + grid_x (y + grid_y z).
        events, time: how many records; logical time at the end, or when there was no more room for records.
        dropped: records that there was no room for: all after ``time``.
        ops, boxes, mmas, tmem, smem, mbarriers, named, states, fences, peers, steps, marks, hazards: arrays of the
            dtypes above.
        labels: text of each row of ``ops``; chunks: chunk numbers of each row of ``smem``.
        tensors: tensor maps that boxes refer to, in order of appearance.
        lines, opcodes, executed: PTX line, opcode and number of executions of each instruction, not counting those that
            no lane took part in; sources: its Python line, ``file:line``, or ""; texts: of the PTX.
        stats: counts by name, as in the launch's result.
    """

    kernel: str
    grid: tuple[int, int, int]
    smem_bytes: int
    events: int
    time: int
    ops: np.ndarray
    boxes: np.ndarray
    mmas: np.ndarray
    tmem: np.ndarray
    smem: np.ndarray
    mbarriers: np.ndarray
    named: np.ndarray
    states: np.ndarray
    fences: np.ndarray
    peers: np.ndarray
    steps: np.ndarray
    labels: list[str] = field(repr=False)
    chunks: list[np.ndarray] = field(repr=False)
    tensors: list[Any]
    lines: np.ndarray
    opcodes: np.ndarray
    executed: np.ndarray
    sources: list[str] = field(repr=False)
    stats: Counter[str]
    texts: list[str] = field(default_factory=list, repr=False)
    marks: np.ndarray = field(default_factory=lambda: np.empty(0, MARKS), repr=False)
    hazards: np.ndarray = field(default_factory=lambda: np.empty(0, HAZARDS), repr=False)
    dropped: int = 0

    def common(self, times: Any) -> np.ndarray:
        """Convert times of this launch to a clock that all devices of a group share.

        It counts the warp-instructions that all of them have executed.
        """
        times = np.asarray(times, np.int64)
        if not len(self.steps):
            return times
        at = np.maximum(np.searchsorted(self.steps["time"], times, side="right") - 1, 0)
        return self.steps["common"][at] + times - self.steps["time"][at]

    def tmem_at(self, event: int, cta: int = 0, write: bool = True) -> np.ndarray:
        """Find the last access to each cell of tensor memory, up to ``event`` inclusive.

        Returns:
            int64 [128, 512]: row of ``tmem`` of the last write (or read), -1 where there was none.
        """
        last = np.full((LANES, COLUMNS), -1, np.int64)
        rows = self.tmem
        chosen = (rows["cta"] == cta) & (rows["write"] == write) & (rows["event"] <= event)
        for row in np.nonzero(chosen)[0]:
            last[unpack_lanes(rows["lanes"][row]), rows["column"][row] : rows["end"][row]] = row
        return last

    def smem_at(self, event: int, cta: int = 0, write: bool = True) -> np.ndarray:
        """Find the last access to each 16-byte chunk of shared memory.

        Up to ``event`` inclusive.

        Returns:
            int64 [chunks]: row of ``smem`` of the last write (or read), -1 where there was none.
        """
        last = np.full(-(-self.smem_bytes // 16), -1, np.int64)
        rows = self.smem
        for row in np.nonzero((rows["cta"] == cta) & (rows["write"] == write) & (rows["event"] <= event))[0]:
            last[self.chunks[row]] = row
        return last

    def tmem_state(self, event: int, cta: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Show tensor memory at a moment: kind and time of the last access to each cell.

        Returns:
            (int64 [128, 512], index into `TMEM_KINDS` or -1; int64 [128, 512], its time or -1).
        """
        last = np.maximum(self.tmem_at(event, cta), self.tmem_at(event, cta, write=False))
        kinds = np.array([*(TMEM_KINDS.index(what) for what in self.tmem["what"]), -1], np.int64)
        return kinds[last], np.append(self.tmem["time"], -1)[last]

    def smem_history(self, points: np.ndarray, cta: int = 0) -> tuple[np.ndarray, list[str]]:
        """Show shared memory at several events: the last access to each 16-byte chunk.

        Args:
            points: int [n], ascending event numbers.

        Returns:
            (int64 [chunks, n], index into the names or -1; names of the kinds).
        """
        names = sorted(set(self.smem["what"].tolist()))
        state = np.full(-(-self.smem_bytes // 16), -1, np.int64)
        out = np.empty((len(points), len(state)), np.int64)
        rows = np.nonzero(self.smem["cta"] == cta)[0]
        done = 0
        for i, point in enumerate(points):
            while done < len(rows) and self.smem["event"][rows[done]] <= point:
                state[self.chunks[rows[done]]] = names.index(self.smem["what"][rows[done]])
                done += 1
            out[i] = state
        return out.T, names

    def source(self, line: int) -> str:
        """Find the Python line (``file:line``) of a PTX line, "" if there is none."""
        found = np.nonzero(self.lines == line)[0]
        return self.sources[found[0]] if len(found) else ""

    def life(self, cta: int = 0) -> tuple[int, int]:
        """Find the logical times of a CTA's first start and last end of a warp."""
        mine = self.states[self.states["cta"] == cta]
        return int(mine["time"].min(initial=self.time)), int(mine["end"].max(initial=0))

    def events_of(self, cta: int = 0) -> np.ndarray:
        """List the events of one CTA, int64, ascending."""
        tables = (self.ops, self.boxes, self.tmem, self.smem, self.mbarriers, self.named)
        return np.unique(np.concatenate([t["event"][t["cta"] == cta] for t in tables]))

    def time_of(self, event: int) -> int:
        """Find the logical time of the last record up to ``event``."""
        return int(self.times_of(np.array([event]))[0])

    def times_of(self, events: np.ndarray) -> np.ndarray:
        """Find for each of ``events`` the logical time of the last record up to it, int64."""
        out = np.zeros(len(events), np.int64)
        for table in (self.ops, self.boxes, self.tmem, self.smem, self.mbarriers):
            order = np.argsort(table["event"], kind="stable")
            latest = np.maximum.accumulate(np.append(0, table["time"][order].astype(np.int64)))
            out = np.maximum(out, latest[np.searchsorted(table["event"][order], events, side="right")])
        return out

    def mbarriers_at(self, event: int, cta: int = 0) -> dict[int, np.void]:
        """Find the last state of each mbarrier by offset, up to and including ``event``."""
        rows = self.mbarriers[(self.mbarriers["cta"] == cta) & (self.mbarriers["event"] <= event)]
        return {int(row["offset"]): row for row in rows}

    def loads(self, tensor: int, cta: int | None = 0) -> np.ndarray:
        """List the boxes that one CTA (None: all) loads from a tensor, in order of issue.

        Returns:
            int64 [boxes, rank], dimension 0 first.

        Raises:
            ArgumentError: there is no such tensor.
        """
        if not 0 <= tensor < len(self.tensors):
            raise ArgumentError("tensor", tensor, f"0..{len(self.tensors) - 1}")
        rows = self.boxes[(self.boxes["tensor"] == tensor) & (self.boxes["kind"] == "load")]
        if cta is not None:
            rows = rows[rows["cta"] == cta]
        issued = self.ops["event"][rows["op"]]
        rank = len(self.tensors[tensor].dims)
        return rows["coords"][np.argsort(issued, kind="stable"), :rank].astype(np.int64)

    def unread_bytes(self) -> int:
        """Count bytes brought by TMA that nothing asynchronous read before overwriting.

        Meaningful for kernels whose operands only the tensor cores read (reads of threads are not traced).
        """
        unread = 0
        for cta in np.unique(self.smem["cta"]):
            waiting = np.zeros(-(-self.smem_bytes // 16), bool)
            for row in np.nonzero(self.smem["cta"] == cta)[0]:
                chunks = self.chunks[row]
                if self.smem["write"][row]:
                    unread += int(waiting[chunks].sum())
                    waiting[chunks] = self.smem["what"][row] == "tma"
                else:
                    waiting[chunks] = False
            unread += int(waiting.sum())
        return 16 * unread

    def counts(self) -> dict[str, int]:
        """Count executed warp-instructions by opcode, most frequent first."""
        names, inverse = np.unique(self.opcodes, return_inverse=True)
        total = np.bincount(inverse, weights=self.executed, minlength=len(names)).astype(np.int64)
        return {str(names[i]): int(total[i]) for i in np.argsort(-total, kind="stable") if total[i]}

    def moved(self) -> dict[str, int]:
        """Sum bytes and floating-point operations by kind, from the launch's statistics."""
        return {name: n for name, n in sorted(self.stats.items()) if name.endswith(("_bytes", "_flops"))}

    def to_perfetto(self) -> dict[str, Any]:
        """Convert to a Chrome trace (JSON object), for ui.perfetto.dev; see perfetto.py."""
        from dsv4lib.emulator.trace.perfetto import chrome_trace

        return chrome_trace(self)
