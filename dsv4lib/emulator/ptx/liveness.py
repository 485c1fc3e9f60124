"""Share register-file slots between registers that are never live together.

PTX has a fresh register for nearly every value: NVIDIA's FMHA has 4,900, which as 32 lanes each would take 700 KB a
warp and gigabytes for a full grid. Liveness by the textbook (backward data flow over basic blocks), then a linear scan
over live intervals. Lanes need no special care: each lane runs its own path, and writes are masked by lane.

Registers of services keep a slot of their own (``pinned``): an asynchronous operation may touch them later.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from dsv4lib.emulator.ptx.ir import Kernel
from dsv4lib.emulator.ptx.pending import blocks


def bits_of(mask: int) -> list[int]:
    """List the indices of the set bits."""
    raw = np.frombuffer(mask.to_bytes(mask.bit_length() // 8 + 1, "little"), np.uint8)
    return np.nonzero(np.unpackbits(raw, bitorder="little"))[0].tolist()


class LiveBlock(NamedTuple):
    """Hold a basic block [start, end) and its live registers.

    Bit masks of those live on entry and on leaving.
    """

    start: int
    end: int
    entry: int
    leave: int


def live_sets(kernel: Kernel, uses: Sequence[Set[int]], defs: Sequence[Set[int]]) -> list[LiveBlock]:
    """Find the registers that are live on entry and on leaving of each basic block.

    Args:
        uses: registers each instruction reads.
        defs: registers each instruction overwrites in all lanes that execute it; one that is written under a guard
            keeps its old value in other lanes and belongs in ``uses``.
    """
    graph = blocks(kernel)
    exposed, killed = [], []
    for start, end, _ in graph:
        needed = defined = 0
        for i in range(start, end):
            for register in uses[i]:
                if not defined >> register & 1:
                    needed |= 1 << register
            for register in defs[i]:
                defined |= 1 << register
        exposed.append(needed)
        killed.append(defined)
    before: list[list[int]] = [[] for _ in graph]
    for i, (_, _, after) in enumerate(graph):
        for j in after:
            before[j].append(i)
    entry, leave = list(exposed), [0] * len(graph)
    work = list(range(len(graph)))
    while work:
        j = work.pop()
        for i in before[j]:
            if entry[j] | leave[i] != leave[i]:
                leave[i] |= entry[j]
                entry[i] = exposed[i] | (leave[i] & ~killed[i])
                work.append(i)
    return [LiveBlock(start, end, entry[i], leave[i]) for i, (start, end, _) in enumerate(graph)]


def intervals(kernel: Kernel, uses: Sequence[Set[int]], defs: Sequence[Set[int]]) -> dict[int, tuple[int, int]]:
    """Find the first and last instruction at which each register is live."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, (used, defined) in enumerate(zip(uses, defs, strict=True)):
        for register in used:
            first.setdefault(register, i)
            last[register] = i
        for register in defined:
            first.setdefault(register, i)
            last[register] = i
    for start, end, entry, leave in live_sets(kernel, uses, defs):
        for register in bits_of(entry):
            if first[register] > start:
                first[register] = start
        for register in bits_of(leave):
            if last[register] < end - 1:
                last[register] = end - 1
    return {register: (first[register], last[register]) for register in first}


def share(
    kernel: Kernel, uses: Sequence[Set[int]], defs: Sequence[Set[int]], bits: Sequence[int], pinned: Set[int]
) -> list[int]:
    """Assign a slot to every register. Those that share one have one width and are never live at once.

    A result never shares the slot of an operand of its own instruction, so handlers may store before they have loaded
    everything.
    """
    slot = [-1] * len(bits)
    free: dict[int, list[int]] = {}
    busy: list[tuple[int, int, int]] = []  # (last use, slot, width)
    count = 0
    spans = intervals(kernel, uses, defs)
    for register, (start, end) in sorted(spans.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < start:
            _, done, width = heapq.heappop(busy)
            free.setdefault(width, []).append(done)
        width = bits[register]
        if register not in pinned and free.get(width):
            slot[register] = free[width].pop()
        else:
            slot[register] = count
            count += 1
        if register not in pinned:
            heapq.heappush(busy, (end, slot[register], width))
    for register, found in enumerate(slot):
        if found < 0:  # never touched
            slot[register] = count
            count += 1
    return slot
