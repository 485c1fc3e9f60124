"""Detect races. They are accesses to shared and tensor memory that no synchronisation orders.

Native loads and stores append to a log (native/access_log.py) that is read before anything else happens; services and
asynchronous operations call the methods here. Everything is judged by happens-before, never by the order in which the
schedule happened to perform it, so a race is found although the numbers came out right.

What orders: named barriers, cluster barriers, mbarriers (arrivals, completed bytes, commits), group waits,
tcgen05.wait, and accesses to the same word that release and acquire (flags.py). Lanes of one warp: lanes.py.

Source: PTX ISA, "Memory Consistency Model"; C. Flanagan, S. Freund, "FastTrack", PLDI 2009, for the shadow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import ALWAYS, CARRIED, EXECUTED, STRICT, UNKNOWN, Clocks, address_of
from dsv4lib.emulator.checks.cluster_state import ClusterState
from dsv4lib.emulator.checks.code import CodeChecks
from dsv4lib.emulator.checks.dependent import Dependence
from dsv4lib.emulator.checks.flags import CLUSTER, hidden_reads, reach_of, segments, trace_far
from dsv4lib.emulator.checks.global_memory import GlobalRaces
from dsv4lib.emulator.checks.lanes import LaneChecks
from dsv4lib.emulator.checks.pedantic import TensorFences
from dsv4lib.emulator.checks.peers import Peers, reads_own
from dsv4lib.emulator.checks.phases import Phases
from dsv4lib.emulator.checks.products import Products
from dsv4lib.emulator.checks.proxies import Proxies
from dsv4lib.emulator.checks.shadow import (
    ALL_BYTES,
    Actor,
    Cells,
    Chunks,
    Conflict,
    Fields,
    Shadow,
    Words,
    by_instruction,
    columns_of,
    kind_of,
)
from dsv4lib.emulator.checks.thin_arrivals import THIN, ThinArrivals
from dsv4lib.emulator.errors import Place
from dsv4lib.emulator.machine.warp import PC
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, RANK_SHIFT
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access_log import BYTES, CAPACITY, COUNTS, GENERIC, GLOBAL, LOG, READ, SAME, STRONG, WRITE
from dsv4lib.emulator.native.code import LEFT
from dsv4lib.emulator.native.race_log import DONE, KEYS, SYNC, Box, Launch, judge, sweep

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.async_units import AsyncOp
    from dsv4lib.emulator.machine.cta import Cluster, Cta
    from dsv4lib.emulator.machine.warp import Warp

_NAMES = {"ld": "tcgen05.ld", "st": "tcgen05.st", "bulk": "a bulk store", "bulk write": "a bulk store"}
_PUBLISHING = ("tcgen05.commit", "cp.async.mbarrier.arrive")
_LANES = np.arange(abi.LANES, dtype=np.uint32)
_EVERY_LANE = np.tile(np.arange(abi.LANES), CAPACITY)


class Detector(Proxies):
    """Detector of one launch."""

    full = True

    def __init__(self, machine: Any):
        super().__init__(machine)
        self._buffer = np.zeros(8 + CAPACITY * LOG.itemsize + 64, np.uint8)
        self._buffer = self._buffer[-self._buffer.ctypes.data % 64 :][: 8 + CAPACITY * LOG.itemsize]
        self.address = self._buffer.ctypes.data
        self.pending = memoryview(self._buffer[:8]).cast("Q")
        self._log = self._buffer[8:].view(LOG)
        self._found: dict[tuple[str, int, int], Any] = {}
        self._phases = Phases(machine)
        self.far = GlobalRaces(machine, machine.launches, machine.known)
        self.dependence = Dependence(machine, machine.before)
        self._stamps = np.zeros(KEYS * len(machine.program.instructions), np.int64)
        self._block = Fields(Launch)
        self._block.set(self.address + 8, self._stamps.ctypes.data, 0, self.far.accesses.block.address)
        self._judge, self._sweep, self._box = judge(), sweep(), Fields(Box)
        self.pedantic = bool(machine.settings.native_checks & abi.CHECK_PEDANTIC)
        self._code = CodeChecks(machine, self.pedantic, bool(machine.settings.native_checks & abi.CHECK_CODE))
        lanes = machine.settings.native_checks & abi.CHECK_LANES
        self._lanes, self._thin = (LaneChecks(machine), ThinArrivals(machine)) if lanes else (None, None)
        self._peers, self._products = Peers(machine), Products(machine)
        self._fences = TensorFences(machine) if self.pedantic else None
        self._code.begin()

    # --- clocks -----------------------------------------------------------------------------------------------------

    def started(self, cluster: Cluster) -> None:
        """Begin a cluster."""
        cluster.race = ClusterState(cluster)
        self.far.started(cluster, cluster.race.clocks)
        if self._lanes is not None:
            self._lanes.started(cluster)

    def arrived(self, point: Any, relaxed: int | None = None) -> None:
        """Arrive at a barrier for the completing operation, or else for the running warp."""
        op, clocks = self.op, self._state(self.warp if self.op is None else self.op.warp).clocks
        if op is None:
            me = self.warp.agent - clocks.first_agent
            self._phases.arrives(point, clocks, me, clocks.epochs[me], clocks.of(self.warp), self.warp.place)
        elif op.entry != UNKNOWN:
            self._phases.arrives(point, clocks, op.entry, op.epoch, op.clock, op.where)
        left = self._thin.arrives(self.warp) if self._thin is not None and op is None else None
        super().arrived(point, relaxed)
        if left:
            self._thin.move(self.warp, left)

    def _released(self, warp: Warp, reach: int) -> np.ndarray:
        """What a relaxed arrival releases: what was fenced, and initialisations of mbarriers that were."""
        state = self._state(warp)
        return self._peers.relaxed(warp, state.clocks, state.flags.released(warp, reach))

    def looked(self, warp: Warp, barrier: Any) -> None:
        """Record that the warp has seen the latest phase of an mbarrier complete."""
        self._phases.looked(barrier, self._state(warp).clocks, warp)

    def acquired(self, warp: Warp, point: Any, relaxed: bool = False) -> None:
        """Acquire what a completed phase of ``point`` gathered, after a relaxed wait at a fence to come."""
        if not relaxed:
            super().acquired(warp, point)
        elif point.sync is not None:
            self._state(warp).flags.waited(warp, point.sync.done)
        if self._fences is not None:
            self._fences.passed(warp)

    def cluster_passed(self, warp: Warp, barrier: Any, phase: int) -> None:
        """Record that the warp has waited for that phase of the cluster barrier."""
        super().cluster_passed(warp, barrier, phase)
        if self._fences is not None:
            self._fences.passed(warp)

    def tensor_fenced(self, warp: Warp) -> None:
        """Record a tcgen05.fence::after_thread_sync."""
        if self._fences is not None:
            self._fences.fenced(warp)

    def executed(self, warp: Warp, instr: Any) -> None:
        """Report what the code shows about a wgmma or a tcgen05.ld that the warp executes."""
        self._code.executed(warp, instr)

    def _left(self, point: Any) -> None:
        """What an operation leaves: its own entry; in the rows after STRICT also what its issuer knew."""
        op = self.op
        sync = self._phases.point(point, self._state(op.warp).clocks)
        if op.entry == UNKNOWN:
            sync.blind = True
            return
        gathering = sync.gathering
        left = op.clock[CARRIED:].copy()
        left[:, op.entry] = op.epoch
        gathering[STRICT, op.entry] = max(gathering[STRICT, op.entry], op.epoch)
        np.maximum(gathering[CARRIED:], left, out=gathering[CARRIED:])

    def initialised(self, barrier: Any) -> None:
        """Record that the running warp has initialised an mbarrier."""
        self._peers.initialised(self.warp, self._state(self.warp).clocks, barrier)

    def init_fenced(self, warp: Warp) -> None:
        """Record fence.mbarrier_init."""
        self._peers.fenced(warp, self._state(warp).clocks)

    def used(self, barrier: Any, where: Callable[[], Place | None]) -> None:
        """Record that the running warp uses an mbarrier."""
        if self.op is None and self.warp is not None:
            self._peers.used(self.warp, self._state(self.warp).clocks, barrier, where)

    def exited(self, cta: Cta, last: Warp) -> None:
        """Record that a CTA has exited with its last warp."""
        self._peers.exited(cta, last)
        self._products.exited(cta)
        if self._thin is not None:
            self._thin.exited(cta)

    def warp_synchronised(self, warp: Warp, members: int) -> None:
        """Record that lanes of a warp have synchronised."""
        if self._lanes is not None:
            self._lanes.synchronised(warp, members)
            self._thin.synchronised(warp)

    def copied(self, warp: Warp, written: Any, lanes: int) -> None:
        """Record that lanes of a warp have waited for their copies: to other lanes these are stores."""
        if self._lanes is not None:
            self._lanes.copied(warp, self._state(warp).clocks, written, lanes)

    def cluster_arrived(self, warp: Warp, barrier: Any, phase: int, relaxed: bool = False) -> None:
        """Record the arrival of a warp at a phase of the cluster barrier; a relaxed one releases what was fenced."""
        known = self._state(warp).clocks.of(warp)
        if relaxed:
            known = self._released(warp, CLUSTER)
            known[EXECUTED] = known[CARRIED]  # an arrival at an mbarrier of a peer may be on its way yet
        self._arrive_in_cluster(warp, barrier, phase, known)

    def grid_dependency(self, warp: Warp, waits: bool) -> None:
        """Record griddepcontrol.wait, or else .launch_dependents."""
        (self.dependence.waited if waits else self.dependence.triggered)(self._state(warp).clocks, warp)

    def unfinished(self) -> tuple[GlobalRaces, ...]:
        """List the global memory of launches that may still run when the next begins. Once."""
        earlier, self.dependence.earlier, self.machine.before = self.dependence.earlier, (), ()
        return (self.far, *earlier[:1]) if self.dependence.hasty else (self.far,)

    def committed(self, warp: Warp, kind: str) -> None:
        """Close a group of the warp's operations of this kind since the last commit."""
        entry = self._agent(warp, kind)
        if entry != UNKNOWN:
            self._state(warp).clocks.epochs[entry] += 1

    def waited(self, warp: Warp, kind: str, pending: int = 0, of: Warp | None = None) -> None:
        """Complete all but ``pending`` groups of the warp, and of warp ``of`` as many."""
        clocks = self._state(warp).clocks
        entry, own = self._agent(of or warp, kind), self._agent(warp, kind)
        if entry != UNKNOWN and kind == "bulk write":  # its groups are counted as those of the reading halves
            clocks.epochs[entry] = clocks.epochs[self._agent(warp, "bulk")]
        if UNKNOWN not in (entry, own):
            clocks.learn_group(warp, entry, max(clocks.epochs[own] - 1 - pending, 0))

    def waited_tensor(self, warp: Warp, kind: str) -> None:
        """Record tcgen05.wait::ld or ::st: the warp's loads or stores so far are complete."""
        clocks, entry = self._state(warp).clocks, self._agent(warp, kind)
        if entry != UNKNOWN:
            done = clocks.epochs[entry]
            clocks.epochs[entry] = done + 1
            clocks.learn(warp, entry, done)

    def _agent(self, warp: Warp, kind: str) -> int:
        """The entry of a warp's operations of one kind."""
        clocks = self._state(warp).clocks
        found = clocks.index.get((kind, warp.agent))
        if found is None:
            found = clocks.entry((kind, warp.agent), kind, f"{_NAMES.get(kind, kind)} of {warp}", warp)
        return found

    # --- asynchronous operations ------------------------------------------------------------------------------------

    def issued(self, op: AsyncOp) -> None:
        """Begin an operation with what its issuer or the continued operation knew."""
        if self.op is not None:
            op.clock, op.clock_address = self.op.clock, self.op.clock_address
            op.entry, op.epoch = self.op.entry, self.op.epoch
            return
        warp = op.warp
        if warp is None:
            return
        clocks = self._state(warp).clocks
        op.entry = entry = self._entry(op, clocks)
        if entry == UNKNOWN:
            return
        if self._fences is not None:
            self._fences.issued(op)
        op.clock = clock = clocks.of(warp).copy()
        clocks.tick(warp)  # what the issuer does next is not before the operation
        clock[:, entry] = ALWAYS
        if op.signals is not None:
            op.epoch = op.signals.phase + 1
            return
        op.epoch = clocks.epochs[entry]
        clocks.issued(entry, clock)
        if op.instr.opcode.startswith(_PUBLISHING):
            clocks.epochs[entry] += 1

    def _entry(self, op: AsyncOp, clocks: Clocks) -> int:
        """The entry of the agent that an operation is one of."""
        barrier, (unit, _, _) = op.signals, op.unit.partition(":")
        if barrier is not None:
            found = clocks.index.get(("tma", barrier))
            if found is None:
                found = clocks.entry(("tma", barrier), "tma", f"a copy that signals {barrier.name}")
            return found
        if unit == "tensor":
            found = clocks.index.get(op.unit)
            if found is None:
                found = clocks.entry(op.unit, "tensor", f"the tensor pipe of CTA {op.warp.cta.ctaid}")
            return found
        if unit == "ldst":
            return self._agent(op.warp, op.instr.opcode.split(".", 2)[1])
        return self._agent(op.warp, unit) if unit in ("bulk", "cp.async", "wgmma") else UNKNOWN

    def delivered(self, barrier: Any) -> None:
        """Record that bytes of an operation have been counted on the barrier."""
        if self.op is not None:
            self._left(barrier)

    # --- accesses ---------------------------------------------------------------------------------------------------

    def global_ranges(self, starts: Any, nbytes: int, write: bool, reduces: bool = False) -> None:
        """Record that the completing operation accesses ``nbytes`` at each global address."""
        super().global_ranges(starts, nbytes, write)
        if (op := self.op) is None or op.entry == UNKNOWN:
            return
        entry = op.entry
        if write:  # the writing half of a bulk store is complete later than the reading half
            entry = self._agent(op.warp, "bulk write")
        actor, starts = Actor(entry, op.epoch, op.clock), np.asarray(starts, np.int64)
        self.dependence.ranges(self._state(op.warp).clocks, op, starts, nbytes, write)
        self.far.ranges(op, actor, starts, nbytes, write, reduces)

    def global_release(self, warp: Warp, addresses: np.ndarray, opcode: str) -> None:
        """Record the issue of a global release store or reduction (st.async, red.async, multimem)."""
        state, cluster = self._state(warp), warp.cta.cluster
        for word in {int(a) >> 2 for a in addresses}:
            state.flags.release(cluster, warp, opcode, word, self.far)
        state.clocks.tick(warp)

    def global_lanes(self, warp: Warp, addresses: np.ndarray, nbytes: int, write: bool, strong: bool) -> None:
        """Record an access of the running warp's active lanes that is not in the log."""
        clocks, lanes, pc = self._state(warp).clocks, warp.lanes(), warp.words[PC]
        me = warp.agent - clocks.first_agent
        if strong and not write:
            opcode = warp.program.instruction(pc).opcode
            for word in {int(a) >> 2 for a in addresses}:
                self._state(warp).flags.acquire(warp.cta.cluster, warp, opcode, word, self.far)
        actor = Actor(me, int(clocks.epoch[me]), clocks.of(warp))
        self.far.lanes(warp, actor, addresses, np.full(len(lanes), pc), lanes, nbytes, write, strong, alias=True)

    def memory_fenced(self, warp: Warp, opcode: str) -> None:
        """Record a fence of the warp between generic accesses."""
        self._state(warp).flags.fenced(warp, reach_of(opcode))

    def fenced_global(self, warp: Warp, alias: bool = False) -> None:
        """Record a proxy fence of the warp that covers global memory, for the async proxy or for other addresses."""
        self.far.fence(warp.cta.cluster, warp, alias)

    def shared(self, cta: Cta, cells: Cells, write: bool) -> None:
        """Record an access to words of shared memory. It is the completing operation's, or the running warp's."""
        self._access(cta, cta.cluster.race.shared[cta.rank], cells, write, "shared memory")

    def shared_bytes(self, cta: Cta, offset: int, nbytes: int, write: bool) -> None:
        """Record an access to a byte range, as `shared`."""
        self.shared(cta, Words(slice(offset // 4, -(-(offset + nbytes) // 4))), write)

    def shared_chunks(self, cta: Cta, index: np.ndarray, write: bool) -> None:
        """Record an access to 16-byte chunks, as `shared`."""
        self.shared(cta, Chunks(index), write)

    def shared_words(self, cta: Cta, offsets: np.ndarray, nbytes: int, write: bool) -> None:
        """Record an access to ``nbytes`` at each byte offset, as `shared`. Part of a word counts as one."""
        words = (offsets[:, None] + np.arange(0, max(nbytes, 4), 4) >> 2).reshape(-1)
        self.shared(cta, Words(words), write)

    def tensor_columns(self, cta: Cta, column: int, columns: int) -> None:
        """Allocate or free columns. It counts as a write, which every other use must be ordered with."""
        self.tensor(cta, columns_of(column, columns), True)

    def tensor(self, cta: Cta, cells: Cells, write: bool, repeats: bool = False) -> None:
        """Record a tensor-memory access of the completing operation or running warp.

        ``repeats``: the operation makes the same access many times; again, without another in between, it changes
        nothing.
        """
        if write and not repeats:
            self._products.overwritten(cta, cells)
        elif not write:
            self._products.read(cta, cells, self.warp.place if self.op is None else self.op.where)
        state = cta.cluster.race
        shadow = state.tensor.get(cta.rank)
        if shadow is None:
            shadow = state.tensor[cta.rank] = Shadow((128, 512), state.accesses, state.clocks.size)
        if repeats and self.op is not None:
            access = cells, write, self.op.entry, self.op.epoch
            if shadow.last == access:
                return
            shadow.last = access
        else:
            shadow.last = None
        self._access(cta, shadow, cells, write, "tensor memory")

    def product(self, cta: Cta, cells: Cells, column: int, width: int, accumulates: bool) -> None:
        """Record that the completing tcgen05.mma writes columns of its accumulator."""
        if self.op is not None:
            self._products.writes(cta, cells, column, width, accumulates, self.op.where)

    def _access(self, cta: Cta, shadow: Shadow, cells: Cells, write: bool, memory: str) -> None:
        op, warp = self.op, self.warp
        if op is not None:
            entry, epoch, pc, lanes = op.entry, op.epoch, op.instr.index, op.lanes
            if entry == UNKNOWN:
                return
            clock = op.clock_address
            if not clock:
                clock = op.clock_address = address_of(op.clock)
        elif warp is not None:
            clocks = warp.cta.cluster.race.clocks
            entry = warp.agent - clocks.first_agent
            epoch, pc, lanes = clocks.epochs[entry], warp.words[PC], warp.mask()
            clock = clocks.address + clocks.row * entry
        else:
            return
        if self._fences is not None and memory.startswith("tensor"):
            actor = self._actor(entry, epoch)
            self._look_for_fence(cta, shadow, cells, write, actor, pc)
        access = shadow.address, clock, entry | epoch << 32, pc | lanes << 32, write, cells.box(self._box)
        if self._sweep(*access) == DONE or shadow.prepare(entry, write) and self._sweep(*access) == DONE:
            return
        actor = self._actor(entry, epoch)
        number = shadow.accesses.add(entry, epoch, pc, lanes=lanes)
        conflict = (shadow.write if write else shadow.read)(cells, actor, number)
        if conflict is not None:
            self._report(cta, actor, pc, op.warp if op is not None else warp, conflict, memory, cells, op)

    def _actor(self, entry: int, epoch: int) -> Actor:
        """The completing operation, or else the running warp."""
        clock = self.op.clock if self.op is not None else self._state(self.warp).clocks.of(self.warp)
        return Actor(entry, epoch, clock)

    def _look_for_fence(self, cta: Cta, shadow: Shadow, cells: Cells, write: bool, actor: Actor, pc: int) -> None:
        """Report tensor memory that is used after a barrier without tcgen05.fence."""
        op, clocks, table = self.op, cta.cluster.race.clocks, shadow.accesses
        warp = op.warp if op is not None else self.warp
        number = self._fences.look(shadow, cells, write, actor, op, warp, clocks)
        if number is None:
            return
        entry = int(table.entry[number])
        owner = self._owner(cta, clocks, entry, int(table.pc[number]), int(table.lanes[number]))
        place = op.where() if op is not None else warp.place(warp.program.instruction(pc))
        text = f"{warp} uses tensor memory that {clocks.name(entry)} used, after a barrier without tcgen05.fence"
        self.machine.report("missing_tcgen05_fence", text, place, owner=owner)

    def drain(self, warp: Warp) -> None:
        """Judge what the warp's native code has logged since the last call."""
        (n, self.pending[0]), state = (self.pending[0], 0), self._state(warp)
        self.dependence.logged(state.clocks, warp, self._log[:n])
        self.machine.taint.logged(warp, self._log[:n])
        if self._lanes is not None:
            self._lanes.logged(warp, state.clocks, self._log[:n])
            self._thin.logged(warp, state.clocks, self._log[:n])
        known = self._known(state, warp, n, False)
        if known == DONE:
            return
        entries = self._log[:n]
        if self.machine.trace is not None and self.machine.device is not None:
            trace_far(warp, entries)
        code = entries["code"]
        strong = code & (STRONG | COUNTS) == STRONG
        apart = self.machine.device is not None  # between devices the order of data and flags is that of the program
        for part in segments(strong) if apart else (slice(None),):
            some, orders = entries[part], strong[part]
            ordering = orders.any()
            if ordering:
                reads = some[orders & (code[part] & READ != 0)]
                state.flags.access(warp.cta.cluster, warp, reads, self.far, acquire=True)
            if apart or known == LEFT or self._known(state, warp, n, True) == LEFT:
                self._plain(state, warp, some)
            if len(hidden := hidden_reads(code[part])):
                self._plain(state, warp, some[hidden])
            if ordering:
                writes = some[orders & (code[part] & WRITE != 0)]
                state.flags.access(warp.cta.cluster, warp, writes, self.far, acquire=False)

    def _known(self, state: ClusterState, warp: Warp, n: int, ordered: bool) -> int:
        """Let native code note ``n`` accesses in the log if nothing speaks against any of them (race_log.py)."""
        far, near = self.far, state.accesses
        for table in (near, far.accesses):
            table.reserve(16 * n)
        fields = self._block.values
        if not far.current() or fields[Launch.COUNT] != len(far.listed):
            fields[Launch.REGIONS], fields[Launch.COUNT] = far.listed.ctypes.data, len(far.listed)
        me = warp.agent - state.clocks.first_agent
        access = self._block.address, state.block.address, me, n, ordered
        result = self._judge(*access)
        if result == LEFT and state.shared[warp.cta.rank].prepare(me, write=False):
            result = self._judge(*access)
        return result

    def _plain(self, state: ClusterState, warp: Warp, entries: np.ndarray) -> None:
        clocks = state.clocks
        me = warp.agent - clocks.first_agent
        actor = Actor(me, int(clocks.epoch[me]), clocks.of(warp))
        codes = entries["code"]
        groups = [codes[0]] if (codes == codes[0]).all() else sorted(np.unique(codes), key=lambda c: (c & WRITE, c))
        for code in map(int, groups):
            some = entries if len(groups) == 1 else entries[codes == code]
            if (some["mask"] == abi.FULL_MASK).all():
                addresses, pcs = some["addresses"].reshape(-1), np.repeat(some["pc"], abi.LANES)
                lanes = _EVERY_LANE[: len(pcs)]
            else:
                rows, lanes = (some["mask"][:, None] >> _LANES & 1).nonzero()
                addresses, pcs = some["addresses"][rows, lanes], some["pc"][rows]
            if code & GENERIC:
                window = addresses >> np.uint64(56)
                far = window == 0
                if far.any():
                    self._far(warp, actor, addresses[far], pcs[far], lanes[far], code)
                inside = window == abi.SHARED_WINDOW >> 56
                addresses, pcs, lanes = addresses[inside], pcs[inside], lanes[inside]
            if not len(addresses):
                continue
            if code & GLOBAL:
                self._far(warp, actor, addresses, pcs, lanes, code)
            else:
                self._batch(warp, actor, addresses.astype(np.uint32), pcs, lanes, code)

    def _far(
        self, warp: Warp, actor: Actor, addresses: np.ndarray, pcs: np.ndarray, lanes: np.ndarray, code: int
    ) -> None:
        """Accesses to global memory."""
        self.far.lanes(warp, actor, addresses, pcs, lanes, code & BYTES, bool(code & WRITE), bool(code & STRONG))

    def _batch(
        self, warp: Warp, actor: Actor, addresses: np.ndarray, pcs: np.ndarray, lanes: np.ndarray, code: int
    ) -> None:
        """Accesses of one width and direction; split by CTA and, below 4 bytes, by the bytes of the word."""
        nbytes, write = code & BYTES, bool(code & WRITE)
        ranks = addresses >> np.uint32(RANK_SHIFT)
        offsets = (addresses & np.uint32(OFFSET_MASK)).astype(np.int64)
        low = offsets & 3 if nbytes < 4 else None
        cluster, state = warp.cta.cluster, warp.cta.cluster.race
        for rank in [int(ranks[0])] if (ranks == ranks[0]).all() else np.unique(ranks).tolist():
            for start in [0] if low is None else np.unique(low).tolist():
                chosen = ranks == rank
                if low is not None:
                    chosen &= low == start
                words, at, active_lanes = offsets[chosen] >> 2, pcs[chosen], lanes[chosen]
                if not len(words):
                    continue
                mask = (ALL_BYTES if low is None else ((1 << nbytes) - 1) << start) | (SYNC if code & STRONG else 0)
                if nbytes > 4:
                    words = (words[:, None] + np.arange(nbytes // 4)).reshape(-1)
                    at, active_lanes = np.repeat(at, nbytes // 4), np.repeat(active_lanes, nbytes // 4)
                distinct, which, active = by_instruction(at, active_lanes)
                number = state.accesses.add(actor.entry, actor.epoch, distinct, mask, active)
                ids = number if len(distinct) == 1 else number + which
                shadow, cells = state.shared[rank], Words(words)
                conflict = (shadow.write if write else shadow.read)(cells, actor, ids, mask)
                if conflict is not None:
                    pc, lane = int(at[conflict.position]), int(active_lanes[conflict.position])
                    where, same = cluster.ctas[rank], bool(code & SAME)
                    self._report(where, actor, pc, warp, conflict, "shared memory", cells, None, lane, same)

    # --- reports ----------------------------------------------------------------------------------------------------

    def _report(
        self,
        cta: Cta,
        actor: Actor,
        pc: int,
        warp: Warp,
        conflict: Conflict,
        memory: str,
        cells: Cells,
        op: AsyncOp | None,
        lane: int | None = None,
        same: bool = False,
    ) -> None:
        clocks, table = cta.cluster.race.clocks, cta.cluster.race.accesses
        other, epoch, at = (int(column[conflict.earlier]) for column in (table.entry, table.epoch, table.pc))
        if reads_own(clocks, other, op, warp, cta) or self._code.discarded(pc, at, cells.word(conflict.position)):
            return
        # What the issuer of a pending operation does unordered, it has done without waiting for the operation.
        mine = op is not None and warp is clocks.owners[other]
        kind = kind_of(conflict, memory, clocks, actor.entry if mine else None, (other, epoch), same)
        # It is for want of bar.warp.sync only where the arrival that it was moved past is known.
        known = actor.clock[STRICT if conflict.carried else CARRIED, other]
        if int(table.mask[conflict.earlier]) & THIN and known >= epoch - 1:
            kind = "missing_warp_sync"
        key = kind, pc, at
        if key in self._found:
            self._found[key].count += 1
            return
        place = op.where() if op is not None else warp.place(warp.program.instruction(pc))
        if lane is not None:
            place = dataclasses.replace(place, lanes=1 << lane)
        owner = self._owner(cta, clocks, other, key[2], int(table.lanes[conflict.earlier]))
        where = cells.first(conflict.position)
        message = (
            f"{conflict.what} in {memory} of {cta}{f' at {where}' if where else ''}: {clocks.name(actor.entry)} is not "
            f"ordered after {clocks.name(other)}"
        )
        found = self.machine.report(kind, message, place, owner=owner, cta=cta.ctaid, order=conflict.what)
        if found is not None:
            self._found[key] = found
