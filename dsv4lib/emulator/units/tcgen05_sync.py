"""Implement tcgen05.commit, tcgen05.fence and tcgen05.wait.

A commit is an operation of the tensor pipe: it arrives on its mbarrier when everything before it in the pipe has
happened. Waits complete the executing warp's own loads or stores, which depend on nothing else.

Source: PTX ISA, "tcgen05.commit", "tcgen05.fence", "tcgen05.wait".
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, Place
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.async_units import AsyncOp
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, shared_address
from dsv4lib.emulator.ptx.ir import Instr
from dsv4lib.emulator.units import mbarrier
from dsv4lib.emulator.units.shared import shared_addresses
from dsv4lib.emulator.units.tcgen05_issue import (
    each_lane,
    group_ctas,
    group_of,
    issue,
    lane_value,
    tensor_unit,
    warp_unit,
)


@isa.service(
    "tcgen05.commit.<group:cta_group::1|cta_group::2>.mbarrier::arrive::one[.<space:shared::cluster>]"
    "[.<multicast:multicast::cluster>].b64"
)
def commit(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.commit [mbar]{, cta-mask}``."""
    group = group_of(form)
    group_ctas(warp, group)
    cluster = warp.cta.cluster
    addresses = shared_addresses(warp, instr.operands[0], form)
    for lane in each_lane(warp):
        targets = [int(addresses[lane])]
        if form.has("multicast"):
            mask = lane_value(warp, instr.operands[1], np.uint16, lane)
            if mask >> len(cluster.ctas):
                raise EmulatorError(f"tcgen05.commit to CTA mask {mask:#x}; the cluster has {len(cluster.ctas)} CTAs")
            targets = [
                shared_address(rank, targets[0] & OFFSET_MASK) for rank in range(len(cluster.ctas)) if mask >> rank & 1
            ]
        op: list[AsyncOp] = []

        def place(op: list[AsyncOp] = op) -> Place | None:
            return op[0].place

        def complete(targets: list[int] = targets, place: mbarrier.Where = place) -> None:
            for target in targets:
                mbarrier.find(cluster, target, place).arrive(1, place)

        label = "commit -> mbarrier " + ", ".join(f"{t:#x}" for t in targets)
        op.append(issue(warp, instr, tensor_unit(warp, group), label, complete))


@isa.service("tcgen05.fence::<when:before_thread_sync|after_thread_sync>")
def fence(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.fence``: orders tcgen05 operations around thread synchronisation. A mark for the checks."""
    trace, race = warp.cta.machine.trace, warp.cta.machine.race
    if trace is not None:
        trace.tcgen05_fence(warp, instr, form.get("when"))
    if race is not None and form.get("when").startswith("after"):
        race.tensor_fenced(warp)


@isa.service("tcgen05.wait::<what:ld|st>.sync.aligned")
def wait(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.wait``: complete this warp's pending tcgen05.ld or tcgen05.st."""
    units, kind = warp.cta.machine.units, form.get("what")
    for op in units.pending(warp_unit(warp)):
        if op.label.startswith(kind):  # "ld" or "st" and the shape
            units.complete(op)
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.waited_tensor(warp, kind)
