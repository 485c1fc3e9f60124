"""Hold a CTA, its shared memory, and the cluster it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dsv4lib.emulator.machine.interfaces import MachineView, WarpView

ALIGNMENT = 1024
# Called with every CTA when it is created and when its last warp has exited: tensor memory, leak checks.
CTA_CREATED: list[Callable[[Cta], None]] = []
CTA_EXITED: list[Callable[[Cta], None]] = []


def aligned_zeros(nbytes: int, alignment: int = ALIGNMENT) -> np.ndarray:
    """Allocate uint8[nbytes] of zeros at an aligned host address."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


_FOUR = np.arange(4)


class Smem:
    """Shared memory of one CTA, addressed by the offset part of shared addresses.

    Attributes:
        data: uint8[bytes].
        init: uint8[bytes], 1 where the byte has been written.
        dirty: uint16[bytes / 16], generic-proxy writer (warp + 1) of each 16-byte chunk that no proxy fence has made
            visible to the asynchronous proxy yet; 0 = clean.
        written: sets of 16-byte chunks that are known to be written, by first chunk and identity (units/operand.py);
            to be cleared when bytes become unwritten.
        operands: matrix operands in this memory, by descriptor and shape (units/operand.py).
    """

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.data = aligned_zeros(nbytes)
        self.init = np.zeros(nbytes, np.uint8)
        chunks = -(-nbytes // 16)
        self._dirty_fours = np.zeros(-(-chunks // 4), np.uint64)
        self.dirty = self._dirty_fours.view(np.uint16)[:chunks]
        self.written: dict[tuple[int, int, int], np.ndarray] = {}
        self.operands: dict[Any, Any] = {}

    def marked(self) -> np.ndarray:
        """List the 16-byte chunks with an entry in `dirty`, ascending."""
        fours = (self._dirty_fours != 0).nonzero()[0]  # nonzero is quickest on bool
        if not len(fours):
            return fours
        chunks = (4 * fours[:, None] + _FOUR).ravel()
        return chunks[self._dirty_fours.view(np.uint16)[chunks] != 0]


class Cta:
    """One CTA.

    Attributes:
        rank: in the cluster (x fastest); ctaid: in the grid; machine: that it runs on.
        smem: shared memory; tmem: tensor memory, None before SM100 or before the first use.
        warps: all warps, also those that have exited.
        mbarriers: by offset in this CTA's shared memory.
        barriers: named barriers by number, bar.warp.sync by (warp, member mask) (barriers.py).
        clc_reads: by warp, where it took the CTA out of a failed cancel response; None once the warp tests is_canceled.
        threads: of the CTA; storage: arrays that native code addresses.
    """

    def __init__(self, cluster: Cluster, rank: int, ctaid: tuple[int, int, int], smem_bytes: int):
        self.cluster, self.rank, self.ctaid = cluster, rank, ctaid
        self.machine: MachineView = cluster.machine
        self.smem = Smem(smem_bytes)
        self.tmem: Any = None
        self.warps: list[WarpView] = []
        self.mbarriers: dict[int, Any] = {}
        self.barriers: dict[Any, Any] = {}
        self.clc_reads: dict[int, Any] = {}
        self.threads = 0
        self.storage: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        return f"CTA {self.ctaid}"


class Cluster:
    """CTAs that see each other's shared memory. A launch without clusters has clusters of one CTA."""

    def __init__(self, machine: MachineView, index: int, clusterid: tuple[int, int, int], shape: tuple[int, int, int]):
        self.machine, self.index, self.clusterid, self.shape = machine, index, clusterid, shape
        self.ctas: list[Cta] = []
        self.barrier: Any = None
        self.race: Any = None  # state of the race detector

    def __repr__(self) -> str:
        return f"cluster {self.clusterid}"
