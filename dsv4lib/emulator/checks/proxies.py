"""Find who wrote what the asynchronous proxy touches, and let a proxy fence cover what is ordered before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.checks.clocks import CARRIED, Clocks
from dsv4lib.emulator.checks.order import MARK, Order
from dsv4lib.emulator.checks.report import place_at
from dsv4lib.emulator.checks.shadow import Chunks
from dsv4lib.emulator.errors import Place

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cta
    from dsv4lib.emulator.machine.warp import Warp


class Proxies(Order):
    """What the race detector knows of marks: writes through the generic proxy that no fence has covered."""

    def overwrites(self, cta: Cta, chunks: np.ndarray) -> None:
        """Check a copy that overwrites 16-byte chunks that threads wrote without a fence."""
        if self.op is not None:
            text = f"{self.op.label} overwrites shared memory of {cta} that threads wrote without fence.proxy.async"
            owner = self.writer_of(cta, chunks)
            self.machine.report("missing_proxy_fence_overwrite", text, self.op.where(), owner=owner)

    def fenced(self, cta: Cta, warp: Warp) -> None:
        """Cover by the warp's proxy fence every write that is ordered before it.

        A chunk carries the mark of one warp; its words by others are those warps' own affair.
        """
        dirty = cta.smem.dirty
        chunks = cta.smem.marked()
        if not len(chunks):
            return
        state = self._state(warp)
        writers = Chunks(chunks).get(state.shared[cta.rank].writer)
        table, clock = state.accesses, state.clocks.of(warp)[CARRIED]
        entries = table.entry[writers]
        owners = state.clocks.agents()[entries]
        marked = (dirty[chunks] & MARK).astype(np.int64) - 1 + cta.warps[0].agent
        late = (table.epoch[writers] > clock[entries]) & (owners == np.repeat(marked, 4))
        dirty[chunks[~late.reshape(-1, 4).any(1)]] = 0

    def writer_of(self, cta: Cta, chunks: np.ndarray) -> Place | None:
        """Find the writer of the first chunk that no proxy fence covers, or None."""
        flat = chunks.reshape(-1)
        chunk = flat[(cta.smem.dirty[flat] != 0).argmax()]
        return self.writer_at(cta, 4 * int(chunk), 4)

    def writer_at(self, cta: Cta, word: int, count: int) -> Place | None:
        """Find the last writer of some words of shared memory, or None."""
        state = cta.cluster.race
        number = int(state.shared[cta.rank].writer[word : word + count].max())
        table = state.accesses
        if not number:
            return None
        return self._owner(cta, state.clocks, int(table.entry[number]), int(table.pc[number]), int(table.lanes[number]))

    def _owner(self, cta: Cta, clocks: Clocks, entry: int, pc: int, lanes: int) -> Place:
        """The place of the earlier access."""
        warp = clocks.all_warps[entry] if entry < len(clocks.all_warps) else None
        at = (cta.ctaid, None) if warp is None else (warp.cta.ctaid, warp.warp_id)
        return place_at(self.machine.program, pc, *at, lanes)
