"""Count the work of launches as time, so that autotuners have something to choose by.

It is no prediction of a GPU: no cache, no latency of memory, nothing that waits. What it keeps is order: of two
configurations of a kernel, the one that executes fewer instructions, moves fewer bytes or fills more SMs takes less.
A launch takes the sum of its parts, as if nothing overlapped, in cycles of a clock of 1 GHz:

* issue: warp-instructions, four a cycle and SM;
* chain: warp-instructions of one warp, one in four cycles, as often as the grid fills the device anew;
* memory: bytes of global memory, 32 a cycle and SM;
* tensor cores: operations of wgmma and tcgen05.mma, 8192 a cycle and SM; mma.sync are instructions.

To each a launch adds 2 us and an event 1 us: no time is zero. The same launch always takes the same time under the same
schedule and seed.
"""

from __future__ import annotations

import math
import warnings

from dsv4lib.emulator.machine.request import LaunchResult

LAUNCH_MS, EVENT_MS, MS_PER_CYCLE = 2e-3, 1e-3, 1e-6
ISSUE, LATENCY, BYTES, FLOPS = 4, 4, 32, 8192  # LATENCY: cycles; the others a cycle and SM
SECTOR = 32
_MOVED = ("tma_read_bytes", "tma_store_bytes", "bulk_load_bytes", "bulk_store_bytes", "cp_async_bytes")
_SAID: list[bool] = []


def milliseconds(result: LaunchResult, sms: int, resident: int = 1) -> float:
    """Count the work of a launch on a device with so many SMs, ``resident`` CTAs on each at a time.

    >>> from collections import Counter
    >>> some, more = (LaunchResult(n, 0.0, 0, 0, Counter(ctas=4, warps=16), []) for n in (1000, 2000))
    >>> LAUNCH_MS < milliseconds(some, 4) < milliseconds(more, 4)
    True
    """
    stats = result.stats
    ctas, warps = max(stats["ctas"], 1), max(stats["warps"], 1)
    used, rounds = min(ctas, sms), math.ceil(ctas / (sms * max(resident, 1)))
    moved = SECTOR * stats["global_sectors"] + sum(stats[name] for name in _MOVED)
    cycles = sum(
        (
            result.instructions / (ISSUE * used),
            LATENCY * rounds * result.instructions / warps,
            moved / (BYTES * used),
            stats["mma_flops"] / (FLOPS * used),
        )
    )
    return LAUNCH_MS + MS_PER_CYCLE * cycles


def say() -> None:
    """Warn, once in a process, that times here are no GPU's."""
    if not _SAID:
        _SAID.append(True)
        warnings.warn(
            "times of the emulator count work and are no GPU's: compare, but do not report them", stacklevel=3
        )
