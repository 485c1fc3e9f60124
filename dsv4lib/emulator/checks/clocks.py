"""Keep the vector clocks of one cluster. They say what each warp and asynchronous agent is known to have finished.

A clock has one entry per warp, one per tensor pipe, per warp one each for its bulk stores, its cp.async copies, its
tcgen05 loads, its tcgen05 stores and its wgmma operations, and one per mbarrier for the copies that signal it (all
copies of one phase become visible together, so the phase is their epoch). Epochs start at 1; 0 means nothing.

A warp that arrives somewhere leaves its clock there; one that has waited takes over what was left. An asynchronous
operation sees what its issuer knew at issue, and its completion leaves nothing but its own entry: a commit of the
tensor pipe does not publish what the warp that issued it has written. Shipped kernels rely on more, so every clock has
a row STRICT by that rule, and a row CARRIED, where a completion leaves everything that its issuer knew.

Relaxed arrivals and waits show no memory, but what comes after the wait is still executed after what came before the
arrival. A third row, EXECUTED, knows that order: it decides which phase an arrival belongs to, and who has exited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cluster

ALWAYS = 0xFFFFFFFF  # an epoch later than all
STRICT, CARRIED, EXECUTED = ROWS = range(3)
UNKNOWN = -1  # an entry without an owner: accesses under it are not recorded
_BARRIERS = 128  # mbarriers per CTA that get an entry
_GROUPS = 16  # groups of wgmma operations of a warp whose issue is remembered


def rows(size: int) -> np.ndarray:
    """Make a clock that knows nothing."""
    return np.zeros((len(ROWS), size), np.uint32)


class SyncPoint:
    """The clocks left at one barrier.

    Attributes:
        gathering: of the current phase and all before; done: of all completed phases.
        arrivals: epoch of each entry that has arrived at the current phase; before: those of the phase before, as
            (entry, epoch).
        looked: epoch and instruction of the warps that have seen the phase before complete.
        blind: an arrival came from a thread without a clock.
        completing: called when a phase is over; None: not needed.
    """

    __slots__ = ("arrivals", "before", "blind", "completing", "done", "gathering", "looked")

    def __init__(self, size: int):
        self.gathering = rows(size)
        self.done = rows(size)
        self.arrivals: dict[int, int] = {}
        self.before: list[tuple[int, int]] = []
        self.looked: dict[int, tuple[int, int]] = {}
        self.blind = False
        self.completing: Callable[[], None] | None = None

    def complete(self) -> None:
        """End the phase: its waiters acquire what it gathered."""
        if self.completing is not None:
            self.completing()
        self.done[:] = self.gathering


class Clocks:
    """All clocks of a cluster.

    Attributes:
        warps: uint32[warps, rows, entries]; epoch: uint32[entries], the current epoch of each agent.
        address: of `warps`; row: bytes of one warp's clock; epochs: `epoch`, quicker for single values.
        kinds: of the entries: "warp", "tensor", "bulk", "cp.async", "ld", "st", "wgmma", "tma".
        index: entries of the asynchronous agents by key (`entry`); agent_names: theirs, in order.
        owners: of the entries: the warps themselves, or those that wait for the agent; None where any warp may.
    """

    OUTSIDE = -1  # the last entry: how much of other clusters is known (global_memory.py)

    def __init__(self, cluster: Cluster, warps_only: bool = False):
        all_warps = [warp for cta in cluster.ctas for warp in cta.warps]
        self.first_agent = all_warps[0].agent
        agents = 0 if warps_only else len(all_warps) * 5 + len(cluster.ctas) * (2 + _BARRIERS)
        self.size = len(all_warps) + agents + 1
        self.warps = np.zeros((len(all_warps), len(ROWS), self.size), np.uint32)
        self.address, self.row = address_of(self.warps), 4 * len(ROWS) * self.size
        self.epoch = np.zeros(self.size, np.uint32)
        self.epoch[: len(all_warps)] = 1
        self.epochs = memoryview(self.epoch)
        self._flat = memoryview(self.warps.reshape(-1))
        for me in range(len(all_warps)):
            self.warps[me, :, me] = 1
        self.kinds = ["warp"] * len(all_warps)
        self.agent_names: list[str] = []
        self.all_warps = all_warps
        self.owners: list[Any] = list(all_warps)
        self.index: dict[Any, int] = {}
        self._agents = np.zeros(0, np.int64)
        self._issued: dict[int, dict[int, np.ndarray]] = {}

    def of(self, warp: Any) -> np.ndarray:
        """Get a warp's clock, uint32[rows, entries]."""
        return self.warps[warp.agent - self.first_agent]

    def name(self, entry: int) -> str:
        """Name an entry, for reports."""
        first = len(self.all_warps)
        return str(self.all_warps[entry]) if entry < first else self.agent_names[entry - first]

    def entry(self, key: Any, kind: str, name: str, owner: Any = None) -> int:
        """Get an asynchronous agent's entry, made at first use. UNKNOWN if there are too many.

        ``owner``: the warp that waits for it.
        """
        found = self.index.get(key)
        if found is None:
            found = len(self.kinds) if len(self.kinds) < self.size - 1 else UNKNOWN
            self.index[key] = found
            if found != UNKNOWN:
                self.agent_names.append(name)
                self.kinds.append(kind)
                self.owners.append(owner)
                self.epoch[found] = 1
        return found

    def agents(self) -> np.ndarray:
        """List the warp that owns each entry so far, int64[entries]; -1 for none."""
        if len(self._agents) != len(self.owners):
            self._agents = np.array([-1 if owner is None else owner.agent for owner in self.owners])
        return self._agents

    def waited_for(self, entry: int, epoch: int) -> bool:
        """Tell whether the warp that owns the agent has waited for this epoch."""
        owner = self.owners[entry]
        return owner is None or bool(self.of(owner)[STRICT, entry] >= epoch)

    def tick(self, warp: Any) -> None:
        """Advance a warp's epoch after its clock was left somewhere."""
        me = warp.agent - self.first_agent
        place, size, flat = (len(ROWS) * self.size + 1) * me, self.size, self._flat
        self.epochs[me] = now = self.epochs[me] + 1
        flat[place] = flat[place + size] = flat[place + 2 * size] = now

    def learn(self, warp: Any, entry: int, epoch: int) -> None:
        """Record that the warp knows of an epoch that an agent has finished."""
        place = len(ROWS) * self.size * (warp.agent - self.first_agent) + entry
        for row in (place, place + self.size, place + 2 * self.size):
            if self._flat[row] < epoch:
                self._flat[row] = epoch

    def issued(self, entry: int, clock: np.ndarray) -> None:
        """Begin an operation under ``clock``. Kept for wgmma, with the current group of its agent."""
        if self.kinds[entry] != "wgmma":
            return
        groups = self._issued.setdefault(entry, {})
        groups[self.epochs[entry]] = clock
        if len(groups) > _GROUPS:
            del groups[min(groups)]

    def learn_group(self, warp: Any, entry: int, group: int) -> None:
        """`learn`, of groups of wgmma; in the rows after STRICT also what the issuer knew.

        The operation is one of the warpgroup, so all four warps have issued their parts when any of them has waited.
        """
        self.learn(warp, entry, group)
        groups = self._issued.get(entry, {})
        latest = max((number for number in groups if number <= group), default=None)
        if latest is not None:
            mine = self.of(warp)[CARRIED:]
            known = mine[:, entry].copy()
            np.maximum(mine, groups[latest][CARRIED:], out=mine)
            mine[:, entry] = known  # the operation itself knows all of its own agent


def address_of(array: np.ndarray) -> int:
    """Get the address of an array's first element."""
    return array.__array_interface__["data"][0]
