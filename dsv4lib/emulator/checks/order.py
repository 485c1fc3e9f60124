"""Order accesses by the clocks of the warps, which barriers carry.

This much is on in every launch that checks proxy fences, because a fence covers the writes of every thread that it is
ordered after. The race detector (race.py) is the same with accesses and asynchronous operations on top.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, Clocks, SyncPoint, rows
from dsv4lib.emulator.errors import Place

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.async_units import AsyncOp
    from dsv4lib.emulator.machine.cta import Cluster, Cta
    from dsv4lib.emulator.machine.warp import Warp

MARK = 0x7FFF  # of a `Smem.dirty` entry: the writing warp + 1; the top bit says cp.async


class OrderState:
    """Clocks of one cluster. ``fenced``: epoch of each warp when its marks were last cleared, by (rank, warp)."""

    def __init__(self, cluster: Cluster, warps_only: bool = True):
        self.clocks = Clocks(cluster, warps_only)
        self.fenced: dict[tuple[int, int], int] = {}


class Order:
    """Happens-before between the warps of one launch.

    Attributes:
        warp: the warp whose service runs; op: the asynchronous operation that completes, None outside.
        full: races are looked for too; pedantic: also what only the PTX ISA requires (pedantic.py).
        address: of the access log, 0 = none.
        pending: number of accesses in the log.
    """

    full = pedantic = False
    address = 0

    def __init__(self, machine: Any):
        self.machine = machine
        self.warp: Warp | None = None
        self.op: AsyncOp | None = None
        self.pending = memoryview(bytearray(8)).cast("Q")

    def started(self, cluster: Cluster) -> None:
        """Begin a cluster."""
        cluster.race = OrderState(cluster)

    def _state(self, warp: Warp) -> Any:
        return warp.cta.cluster.race

    def arrived(self, point: Any, relaxed: int | None = None) -> None:
        """Arrive at ``point`` for the completing operation, or else for the running warp.

        ``relaxed``: the arrival releases only what a fence that reaches so far (flags.py) has released before it.
        """
        if self.op is not None:
            self._left(point)
        else:
            self._publish(self.warp, point, relaxed)

    def _publish(self, warp: Warp, point: Any, relaxed: int | None = None) -> None:
        """Leave the clock of a warp."""
        clocks = self._state(warp).clocks
        if point.sync is None:
            point.sync = SyncPoint(clocks.size)
        known = clocks.of(warp) if relaxed is None else self._released(warp, relaxed)
        np.maximum(point.sync.gathering, known, out=point.sync.gathering)
        clocks.tick(warp)

    def _released(self, warp: Warp, reach: int) -> np.ndarray:
        """What a relaxed arrival releases. Fences are kept by the race detector only."""
        return self._state(warp).clocks.of(warp)

    def _left(self, point: Any) -> None:
        """What an operation leaves: nothing of the warps' clocks, but for cp.async, whose writes are its warp's."""
        if self.op.unit.startswith("cp.async:"):
            self._publish(self.op.warp, point)

    def acquired(self, warp: Warp, point: Any, relaxed: bool = False) -> None:
        """Acquire what a completed phase of ``point`` gathered; after a ``relaxed`` wait at the next fence only."""
        if point.sync is not None:
            clock = self._state(warp).clocks.of(warp)
            np.maximum(clock, point.sync.done, out=clock)

    def cluster_arrived(self, warp: Warp, barrier: Any, phase: int, relaxed: bool = False) -> None:
        """Record the arrival of a warp at a phase of the cluster barrier."""
        self._arrive_in_cluster(warp, barrier, phase, self._state(warp).clocks.of(warp))

    def _arrive_in_cluster(self, warp: Warp, barrier: Any, phase: int, known: np.ndarray) -> None:
        """Leave what a warp knows, or as much of it as it releases."""
        clocks = self._state(warp).clocks
        left = barrier.left.setdefault(phase, rows(clocks.size))
        np.maximum(left, known, out=left)
        clocks.tick(warp)

    def cluster_passed(self, warp: Warp, barrier: Any, phase: int) -> None:
        """Record that the warp has waited for that phase."""
        clock = self._state(warp).clocks.of(warp)
        np.maximum(clock, barrier.left[phase], out=clock)

    def fenced(self, cta: Cta, warp: Warp) -> None:
        """Cover by a proxy fence all writes that are ordered before it.

        Marks carry no epoch. A warp's marks are cleared if the fence comes after anything the warp has left at a
        barrier since they were cleared last; marks it has made after that are cleared with them.
        """
        chunks = cta.smem.marked()
        if not len(chunks):
            return
        state = self._state(warp)
        clocks, dirty = state.clocks, cta.smem.dirty
        clock = clocks.of(warp)[CARRIED]
        marks = dirty[chunks] & MARK
        for mark in sorted(set(marks.tolist())):
            writer = cta.warps[mark - 1]
            me = writer.agent - clocks.first_agent
            if writer is warp or clock[me] >= state.fenced.get((cta.rank, mark), 1):
                state.fenced[cta.rank, mark] = int(clocks.epoch[me])
                dirty[chunks[marks == mark]] = 0

    # --- what only the race detector does ---------------------------------------------------------------------------

    def executed(self, warp: Warp, instr: Any) -> None:
        """Record that the warp executes a wgmma or a tcgen05.ld."""

    def tensor_fenced(self, warp: Warp) -> None:
        """Record a tcgen05.fence::after_thread_sync."""

    def overwrites(self, cta: Cta, chunks: np.ndarray) -> None:
        """Check a copy that overwrites 16-byte chunks that threads wrote without a fence."""

    def grid_dependency(self, warp: Warp, waits: bool) -> None:
        """Record griddepcontrol.wait, or else .launch_dependents."""

    def looked(self, warp: Warp, barrier: Any) -> None:
        """Record that the warp has seen the latest phase of an mbarrier complete."""

    def committed(self, warp: Warp, kind: str) -> None:
        """Close a group of asynchronous operations."""

    def waited(self, warp: Warp, kind: str, pending: int = 0, of: Warp | None = None) -> None:
        """Record that groups are complete."""

    def waited_tensor(self, warp: Warp, kind: str) -> None:
        """Record that tensor-memory loads or stores are complete."""

    def initialised(self, barrier: Any) -> None:
        """Record that an mbarrier is initialised."""

    def init_fenced(self, warp: Warp) -> None:
        """Record fence.mbarrier_init."""

    def used(self, barrier: Any, where: Callable[[], Place | None]) -> None:
        """Record that an mbarrier is used."""

    def copied(self, warp: Warp, written: Any, lanes: int) -> None:
        """Record that lanes of a warp have waited for their copies."""

    def warp_synchronised(self, warp: Warp, members: int) -> None:
        """Record that lanes of a warp have synchronised."""

    def exited(self, cta: Cta, last: Warp) -> None:
        """Record that a CTA has exited."""

    def issued(self, op: AsyncOp) -> None:
        """Begin an operation."""

    def delivered(self, barrier: Any) -> None:
        """Count bytes on an mbarrier."""

    @property
    def follows(self) -> bool:
        """Tell whether accesses of asynchronous units to global memory are to be recorded."""
        return self.full or self.machine.marks is not None

    def global_ranges(self, starts: Any, nbytes: int, write: bool, reduces: bool = False) -> None:
        """Record an access to global memory."""
        if self.machine.marks is not None:
            self.machine.marks.ranges(starts, nbytes, write)

    def global_release(self, warp: Warp, addresses: np.ndarray) -> None:
        """Release of words of global memory."""

    def memory_fenced(self, warp: Warp, opcode: str) -> None:
        """Record a fence of the warp between generic accesses."""

    def fenced_global(self, warp: Warp, alias: bool = False) -> None:
        """Record a proxy fence of global memory; ``alias``: between addresses of the same memory."""

    def shared(self, cta: Cta, cells: Any, write: bool) -> None:
        """Record an access to shared memory."""

    def shared_bytes(self, cta: Cta, offset: int, nbytes: int, write: bool) -> None:
        """Record an access to shared memory."""

    def shared_chunks(self, cta: Cta, index: np.ndarray, write: bool) -> None:
        """Record an access to shared memory."""

    def shared_words(self, cta: Cta, offsets: np.ndarray, nbytes: int, write: bool) -> None:
        """Record an access to shared memory."""

    def tensor(self, cta: Cta, cells: Any, write: bool, repeats: bool = False) -> None:
        """Record an access to tensor memory."""

    def tensor_columns(self, cta: Cta, column: int, columns: int) -> None:
        """Record that columns are allocated or freed."""

    def writer_of(self, cta: Cta, chunks: np.ndarray) -> Place | None:
        """Find the writer of the first chunk that no proxy fence covers, or None."""

    def writer_at(self, cta: Cta, word: int, count: int) -> Place | None:
        """Find the last writer of some words of shared memory, or None."""

    def drain(self, warp: Warp) -> None:
        """Read the access log."""
