"""Implement proxy fences: when writes through one proxy become visible to another.

``Smem.dirty`` names, for every 16-byte chunk, the warp that wrote it through the generic proxy and has not fenced it.
An asynchronous-proxy fence clears the marks of the warp that executes it, and of the warps that it is ordered after:
the memory model lets a thread fence on behalf of writers that it has synchronised with (checks/order.py). With all
checks off that order is not kept, and a fence clears its own warp's marks alone.

A tensor map that the device changes in global memory must be released by its writer and acquired by its user. Copies
through a changed map without an acquire are reported (tma.py).

Source: PTX ISA, ``fence.proxy`` and ``membar.proxy``, "Async Proxy". Plain fences are in barriers.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import HazardError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.ptx.ir import Instr
from dsv4lib.emulator.units import tensormap
from dsv4lib.emulator.units.shared import CP_ASYNC

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cta

CHANGED, RELEASED = "changed", "changed and released"


def _clear(cta: Cta, warp: Warp) -> None:
    dirty = cta.smem.dirty
    dirty[(dirty & np.uint16(CP_ASYNC - 1)) == warp.warp_id + 1] = 0


@isa.service(
    "fence.proxy.async[.<space:global|shared::cta|shared::cluster>]",
    "membar.proxy.async",
    "fence.proxy.async::generic.<sem:release>.sync_restrict::<space:shared::cta>.cluster",
)
def async_proxy(warp: Warp, instr: Instr, form: Form) -> None:
    """Publish this warp's generic writes, in one space or all, to the async proxy."""
    space, race = form.get("space"), warp.cta.machine.race
    if race is not None and space in ("", "global"):
        race.fenced_global(warp)
    if space == "global":
        return
    for cta in [warp.cta] if space == "shared::cta" else warp.cta.cluster.ctas:
        if cta.machine.race is not None:
            cta.machine.race.fenced(cta, warp)
        else:
            _clear(cta, warp)


@isa.service(
    "fence.proxy.alias[.<sem:acquire|release>.sys]",
    "membar.proxy.alias",
    note="accesses are performed in program order: a fence matters to the race detector only",
)
def alias_proxy(warp: Warp, instr: Instr, form: Form) -> None:
    """Order accesses to the same memory by different addresses."""
    race = warp.cta.machine.race
    if race is not None:
        race.fenced_global(warp, alias=True)


@isa.service(
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
    note="accesses are performed in program order: nothing to order here",
)
def no_effect(warp: Warp, instr: Instr, form: Form) -> None:
    """Do nothing: every execution of the emulator has the effect of this fence anyway."""


@isa.service("fence.proxy.tensormap::generic.release.<scope:cta|cluster|gpu|sys>")
def release_tensormaps(warp: Warp, instr: Instr, form: Form) -> None:
    """Release changes of tensor maps so far."""
    descriptors = warp.cta.machine.units.descriptors
    for address in descriptors:
        descriptors[address] = RELEASED


@isa.service("fence.proxy.tensormap::generic.acquire.<scope:cta|cluster|gpu|sys>")
def acquire_tensormap(warp: Warp, instr: Instr, form: Form) -> None:
    """Acquire (``[addr], size``): copies of this thread see the tensor map as its writer released it."""
    memory, size = instr.operands
    if warp.uniform(size, np.uint32) != tensormap.NBYTES:
        raise HazardError(f"fence.proxy.tensormap acquire: the size must be {tensormap.NBYTES}", warp.place())
    machine = warp.cta.machine
    for address in {int(a) for a in warp.address(memory)[warp.lanes()]}:
        machine.gmem.view(address, tensormap.NBYTES)
        if machine.units.descriptors.get(address) == RELEASED:
            del machine.units.descriptors[address]
