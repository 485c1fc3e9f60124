"""Hold what launches that run at the same time, on one device or several, know of each other.

Every launch is judged by its own detector. What they share is here: the table of accesses, the shadow of each
allocation, the words by which clusters synchronise, and the clusters themselves, numbered across launches. A device on
its own has one launch at a time and tables of its own.

Scopes count between devices. A release, an acquire or a fence whose scope is narrower than ``.sys`` orders nothing for
a thread of another device, so a word keeps what was left by accesses of ``.sys`` scope apart from the rest.

Source: PTX ISA, "Memory Consistency Model": scope, moral strength, release and acquire patterns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, Clocks
from dsv4lib.emulator.checks.shadow import Accesses
from dsv4lib.emulator.machine.warp import name_of_warp

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cluster
    from dsv4lib.emulator.machine.request import Dim3

Rows = dict[int, np.ndarray]  # clocks by the number of the cluster that they are of


@functools.lru_cache(1 << 12)
def reaches_devices(opcode: str) -> bool:
    """Tell whether an access or a fence has a scope that includes threads of other devices."""
    parts = opcode.split(".")
    return "sys" in parts or "volatile" in parts or "mmio" in parts


def merge(rows: Rows, number: int, row: np.ndarray) -> None:
    """Note a cluster's clock; arrays in ``rows`` are shared and never changed."""
    old = rows.get(number)
    if old is None:
        rows[number] = row
    elif old is not row and (row > old).any():
        rows[number] = np.maximum(old, row)


@dataclass
class Word:
    """Clocks left at a word, by the device that left them.

    Attributes:
        near: for threads of the same device. far: by accesses of ``.sys`` scope, for all others.
        version: changes with every release.
    """

    near: dict[int | None, Rows] = field(default_factory=dict)
    far: dict[int | None, Rows] = field(default_factory=dict)
    version: int = 0


@dataclass
class Known:
    """What a launch knows when it begins: launches before it on its stream, or before an event that this waits for.

    Attributes:
        whole: numbers of clusters that have ended. partial: clocks of others.
    """

    whole: set[int] = field(default_factory=set)
    partial: Rows = field(default_factory=dict)

    def add(self, other: Known) -> None:
        """Take over what another stream knew."""
        self.whole |= other.whole
        for number, row in other.partial.items():
            merge(self.partial, number, row)

    def copy(self) -> Known:
        """Copy it; the arrays never change."""
        return Known(set(self.whole), dict(self.partial))


class Member:
    """What is known about one cluster.

    Attributes:
        base: its entries have the agent numbers from here on.
        learned: clocks of other clusters, by cluster, for every number of `Clocks.OUTSIDE`.
        seen: version of each word at its last acquisition by a clock (its address), by whether others' devices count.
        kinds, agent_names: as those of `Clocks`, which lives as long as its cluster; ctas: ctaid of each.
        program: the lowered kernel; device: number of its device, None if that is alone.
        clocks: until the launch has ended.
    """

    def __init__(self, base: int, cluster: Cluster, clocks: Clocks, machine: Any, partial: Rows):
        self.base = base
        self.kinds, self.agent_names = clocks.kinds, clocks.agent_names
        self.ctas = [cta.ctaid for cta in cluster.ctas]
        self.program, self.device = machine.program, machine.device
        self.clocks: Clocks | None = clocks
        self._warps = len(clocks.all_warps)  # of all CTAs
        self.learned: list[Rows] = [partial]
        self.seen: dict[tuple[int, int, bool], int] = {}

    def description(self, agents: int) -> dict[str, Any]:
        """Describe it for another process; ``agents``: how many entries it has."""
        names = {"kinds": self.kinds, "names": self.agent_names, "ctas": self.ctas, "warps": self._warps}
        return {**names, "agents": agents}

    @classmethod
    def described(cls, base: int, machine: Any, kinds: Any, names: Any, ctas: list[Dim3], warps: int) -> Member:
        """Make one of a description: a cluster that has ended, and knew nothing of others."""
        self = cls.__new__(cls)
        self.base, self.kinds, self.agent_names, self.ctas, self._warps = base, kinds, names, ctas, warps
        self.program, self.device, self.clocks = machine.program, machine.device, None
        self.learned, self.seen = [{}], {}
        return self

    def ended(self) -> Rows:
        """End it: what its warps knew of other clusters at last."""
        latest = int(self.clocks.warps[:, CARRIED, Clocks.OUTSIDE].max())
        self.clocks = None
        return self.learned[latest]

    def warp(self, entry: int) -> tuple[Dim3, int | None]:
        """CTA and number of the warp of an entry; of another agent's, the first CTA."""
        if entry >= self._warps:
            return self.ctas[0], None
        rank, warp = divmod(entry, self._warps // len(self.ctas))
        return self.ctas[rank], warp

    def name(self, entry: int) -> str:
        """Of an entry."""
        if entry >= self._warps:
            return self.agent_names[entry - self._warps]
        ctaid, warp = self.warp(entry)
        return name_of_warp(warp, ctaid)


class Launches:
    """Tables that launches share.

    Attributes:
        accesses: to global memory, of all of them. regions: shadows by the allocation's address.
        words: by address / 4. fenced: by cluster, generic writes that some proxy fence has covered; aliased: writes
            through a multicast address that fence.proxy.alias, or a release or fence of .sys scope, has covered.
        members: clusters so far; bases: their first agents' numbers; count: of agents so far.
    """

    def __init__(self) -> None:
        self.accesses = Accesses()
        self.regions: dict[int, Any] = {}
        self.words: dict[int, Word] = {}
        self.fenced: Rows = {}
        self.aliased: Rows = {}
        self.members: list[Member] = []
        self.bases: list[int] = []
        self.count = 0

    def add(self, member: Member, agents: int) -> int:
        """Number a cluster that begins."""
        self.count += agents
        self.bases.append(member.base)
        self.members.append(member)
        return len(self.members) - 1
