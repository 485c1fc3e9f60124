"""Hold what the race detector knows about one cluster: clocks, accesses, shadows, words that synchronise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.checks.clocks import address_of
from dsv4lib.emulator.checks.flags import Flags
from dsv4lib.emulator.checks.order import OrderState
from dsv4lib.emulator.checks.shadow import Accesses, Fields, Shadow
from dsv4lib.emulator.native.race_log import Group

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cluster


class ClusterState(OrderState):
    """Clocks and shadows of one cluster.

    Attributes:
        accesses: to its memories; shared, tensor: shadows by rank; flags: words of memory that order its warps.
        block: the same for native code (`race_log.Group`).
    """

    def __init__(self, cluster: Cluster):
        super().__init__(cluster, warps_only=False)
        self.accesses = Accesses()
        size = self.clocks.size
        self.shared = [Shadow((4 * len(cta.smem.dirty),), self.accesses, size) for cta in cluster.ctas]
        self.tensor: dict[int, Shadow] = {}
        self.flags = Flags(self.clocks)
        self._blocks = np.array([shadow.block.address for shadow in self.shared], np.int64)
        self.block = Fields(Group)
        clocks, blocks = self.clocks, address_of(self._blocks)
        accesses, epochs = self.accesses.block.address, address_of(clocks.epoch)
        self.block.set(clocks.address, epochs, size, accesses, blocks, len(self._blocks))

    @property
    def base(self) -> int:
        """Number of its first agent in global memory."""
        return self.block.values[Group.BASE]

    @base.setter
    def base(self, base: int) -> None:
        self.block.values[Group.BASE] = base
