"""Implement clusterlaunchcontrol. A running cluster takes over the work of one that has not been launched.

The 16-byte response is opaque; here it is x, y, z of the cancelled cluster's first CTA and a word that is 1 on success.

The first CTA of a failed request is undefined. CuTeDSL's `clc_response` takes it out of every response, right after
is_canceled, and leaves it unused: that is no error. It reads as `POISON` here, so that use shows, and a warp that reads
it and never tests whether the request failed is reported.

Source: PTX ISA, ``clusterlaunchcontrol.try_cancel`` and ``clusterlaunchcontrol.query_cancel``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.async_units import AsyncOp
from dsv4lib.emulator.machine.cta import CTA_EXITED
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, shared_address
from dsv4lib.emulator.ptx.ir import Instr, Vector
from dsv4lib.emulator.units import mbarrier, shared
from dsv4lib.emulator.units.tcgen05_ldst import POISON

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cta

NBYTES = 16


def check_exit(cta: Cta) -> None:
    """Report warps that read a failed response's CTA without testing for failure.

    They took the first CTA out of it.
    """
    for number, place in cta.clc_reads.items():
        if place is not None:
            text = f"warp {number} of {cta} uses the first CTA of a request that failed"
            cta.machine.report("clc_failed_response", text, place)


CTA_EXITED.append(check_exit)


@isa.service(
    "clusterlaunchcontrol.try_cancel.async[.<space:shared::cta>].mbarrier::complete_tx::bytes"
    "[.<multicast:multicast::cluster::all>].b128"
)
def try_cancel(warp: Warp, instr: Instr, form: Form) -> None:
    """``[addr], [mbar]``: the response arrives in this CTA, or at the same offset in every CTA of the cluster."""
    to = shared.shared_addresses(warp, instr.operands[0], form)
    signal = shared.shared_addresses(warp, instr.operands[1], form)
    cluster, machine = warp.cta.cluster, warp.cta.machine
    for lane in warp.lanes():
        target, bar = int(to[lane]), int(signal[lane])
        ranks = range(len(cluster.ctas)) if form.has("multicast") else [warp.cta.rank]
        response: list[np.ndarray] = []  # decided by the part that completes first
        for rank in ranks:
            cta, offset = shared.locate(
                cluster, shared_address(rank, target & OFFSET_MASK), NBYTES, warp.place, align=NBYTES
            )
            at = shared_address(rank, bar & OFFSET_MASK)
            mbarrier.find(cluster, at, warp.place)
            _queue(warp, instr, cta, offset, at, response)
        machine.stats["clc_requests"] += 1


def _queue(warp: Warp, instr: Instr, cta: object, offset: int, bar: int, response: list[np.ndarray]) -> None:
    machine = warp.cta.machine

    def complete() -> None:
        if not response:
            taken = machine.cancel_cluster()
            words = np.array([0, 0, 0, 0] if taken is None else [*taken, 1], np.uint32)
            response.append(words.view(np.uint8))
        shared.write(cta, offset, response[0])
        mbarrier.find(warp.cta.cluster, bar, pending.where).complete_tx(NBYTES, pending.where)

    label = f"try_cancel -> {cta} shared {offset:#x}, mbarrier {bar:#x}"
    pending = AsyncOp("clc", complete, label, warp, instr, writes=cta)
    pending.signals = mbarrier.find(warp.cta.cluster, bar, warp.place)
    machine.units.issue(pending)


@isa.service(
    "clusterlaunchcontrol.query_cancel.<what:is_canceled>.pred.b128",
    "clusterlaunchcontrol.query_cancel.<what:get_first_ctaid>.v4.b32.b128",
    "clusterlaunchcontrol.query_cancel.<what:get_first_ctaid::x|get_first_ctaid::y|get_first_ctaid::z>.b32.b128",
)
def query_cancel(warp: Warp, instr: Instr, form: Form) -> None:
    """Take a response apart."""
    target, handle = instr.operands
    low, high = warp.read(handle, np.uint64)
    words = [low & np.uint64(0xFFFFFFFF), low >> np.uint64(32), high & np.uint64(0xFFFFFFFF), high >> np.uint64(32)]
    x, y, z, succeeded = (w.astype(np.uint32) for w in words)
    what = form.get("what")
    failed = succeeded != 1
    some_failed = bool(failed[warp.lanes()].any())
    if what == "is_canceled":
        if some_failed:
            warp.cta.clc_reads[warp.warp_id] = None
        warp.write(target, ~failed)
        return
    if some_failed:
        warp.cta.clc_reads.setdefault(warp.warp_id, warp.place())
        x, y, z = (np.where(failed, np.uint32(POISON), part) for part in (x, y, z))
    if isinstance(target, Vector):
        for register, value in zip(target.items, (x, y, z, succeeded), strict=True):
            warp.write(register, value)
        return
    warp.write(target, {"x": x, "y": y, "z": z}[what[-1]])
