"""Find arrivals of some lanes of a warp that other lanes have not synchronised with.

"All lanes read the buffer, lane 0 gives it back" needs bar.warp.sync in between: the arrival orders only what its lanes
have done, or know of. What the others have done to shared memory since the warp synchronised last is therefore moved
past the arrival. Its accesses get the epoch that begins with it, so a warp that knows of the arrival alone conflicts
with them (race.py). The reports are of the kind missing_warp_sync.

In doubt this is silent: any instruction for the whole warp, whatever lanes it names, on the way from the access to the
arrival, by its place in the code, counts as synchronisation, as does everything that publishes for the warp; a loop
that turns in between, and more accesses than are kept, too. Other memories and flags are not looked at.

Source: PTX ISA, "bar.warp.sync", "Memory Consistency Model": program order is that of one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks.shadow import ALL_BYTES, Actor, Words
from dsv4lib.emulator.machine.warp import LIVE, PC
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, RANK_SHIFT
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access_log import BYTES, GENERIC, GLOBAL, STRONG, WRITE

if TYPE_CHECKING:
    from dsv4lib.emulator.checks.clocks import Clocks
    from dsv4lib.emulator.machine.cta import Cta
    from dsv4lib.emulator.machine.warp import Warp

THIN = 1 << 7  # bit of an access, beside its bytes, that lies after an arrival of other lanes
_KEPT = 64  # entries of the log since the last synchronisation
_LANES = np.arange(abi.LANES, dtype=np.uint32)


class ThinArrivals:
    """What the lanes of each warp have done since they synchronised, for one launch."""

    def __init__(self, machine: Any):
        opcodes = [instr.opcode for instr in machine.program.instructions]
        self._wide = np.cumsum([0, *(".sync" in opcode for opcode in opcodes)])
        self._recent: dict[int, list[np.void]] = {}
        self._epochs: dict[int, int] = {}

    def logged(self, warp: Warp, clocks: Clocks, log: np.ndarray) -> None:
        """Keep the accesses of a log."""
        epoch = clocks.epochs[warp.agent - clocks.first_agent]
        if self._epochs.get(warp.agent) != epoch:
            self._epochs[warp.agent], self._recent[warp.agent] = epoch, []
        recent = self._recent[warp.agent]
        if len(recent) + len(log) <= _KEPT:
            near = log["code"] & (GLOBAL | STRONG) == 0
            recent += list(log[near].copy())
        else:
            self._epochs[warp.agent] = -1  # begins anew with the next log

    def synchronised(self, warp: Warp) -> None:
        """Forget what the lanes of a warp did before bar.warp.sync."""
        self._recent.pop(warp.agent, None)
        self._epochs.pop(warp.agent, None)

    def arrives(self, warp: Warp) -> list[tuple[int, int, bool, np.ndarray, int]]:
        """List what an arrival leaves out: instruction, lanes, does it write, addresses, bytes.

        It is that of the warp's active lanes.
        """
        others = warp.words[LIVE] & ~warp.mask()
        recent = self._recent.pop(warp.agent, []) if others else []
        self._epochs.pop(warp.agent, None)
        here, left = int(warp.words[PC]), []
        for entry in recent:
            pc, code, lanes = int(entry["pc"]), int(entry["code"]), int(entry["mask"]) & others
            if not lanes or pc > here or self._wide[here] > self._wide[pc]:
                continue
            addresses = entry["addresses"][lanes >> _LANES & 1 != 0]
            if code & GENERIC:
                addresses = addresses[addresses >> np.uint64(56) == abi.SHARED_WINDOW >> 56]
            if len(addresses):
                low = addresses & np.uint64(0xFFFFFFFF)
                left.append((pc, lanes, bool(code & WRITE), low.astype(np.int64), code & BYTES))
        return left

    def exited(self, cta: Cta) -> None:
        """Forget the warps of a CTA."""
        for warp in cta.warps:
            self.synchronised(warp)

    def move(self, warp: Warp, left: list[tuple[int, int, bool, np.ndarray, int]]) -> None:
        """Let accesses count as made after the arrival; its epoch has ended."""
        state = warp.cta.cluster.race
        clocks, table = state.clocks, state.accesses
        me = warp.agent - clocks.first_agent
        actor = Actor(me, int(clocks.epoch[me]), clocks.of(warp))
        for pc, lanes, writes, addresses, nbytes in left:
            words = ((addresses & OFFSET_MASK)[:, None] + np.arange(0, max(nbytes, 4), 4)) >> 2
            ranks = np.broadcast_to((addresses >> RANK_SHIFT)[:, None], words.shape)
            bits = ((1 << nbytes) - 1) << (addresses & 3) if nbytes < 4 else np.full(len(addresses), ALL_BYTES)
            bits = np.broadcast_to(bits[:, None], words.shape)
            for rank in np.unique(ranks).tolist():
                here = ranks == rank
                shadow, (cells, which) = state.shared[rank], np.unique(words[here], return_inverse=True)
                known = shadow.writer if writes else shadow.readers.get(me)
                if known is None:
                    continue
                used = np.zeros(len(cells), np.int64)  # bytes of each word
                np.bitwise_or.at(used, which, bits[here])
                numbers = known[cells]
                latest = (table.entry[numbers] == me) & (table.pc[numbers] == pc)  # nothing has come after it
                for mask in np.unique(used[latest]).tolist():
                    some = cells[latest & (used == mask)]
                    number = table.add(me, actor.epoch, pc, mask | THIN, lanes)
                    if writes:
                        shadow.writer[some] = number
                    else:
                        shadow.read(Words(some), actor, number, mask)
