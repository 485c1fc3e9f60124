"""Implement tcgen05.alloc, dealloc and relinquish_alloc_permit.

With cta_group::2 one warp of each CTA of the pair allocates; both get the same columns, so the request waits until it
is made in both CTAs and the columns are free in both.

Source: PTX ISA, "Tensor Memory Allocation and Management Instructions".
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.cta import CTA_EXITED
from dsv4lib.emulator.machine.warp import Block, Warp
from dsv4lib.emulator.ptx.ir import Instr
from dsv4lib.emulator.units.shared import locate, shared_addresses
from dsv4lib.emulator.units.tcgen05_issue import group_ctas, group_of
from dsv4lib.emulator.units.tmem import COLUMNS, GRANULE, PairRequest, Tmem, check_columns, report_leak, tmem_of

_GROUP = "<group:cta_group::1|cta_group::2>"

CTA_EXITED.append(report_leak)


@isa.service(f"tcgen05.alloc.{_GROUP}.sync.aligned[.<space:shared::cta>].b32")
def alloc(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """``tcgen05.alloc [dst], columns``: blocks until the columns are free, writes the address to shared memory."""
    columns = warp.uniform(instr.operands[1], np.uint32)
    check_columns(columns)
    tmem = tmem_of(warp.cta)
    if tmem.relinquished:
        raise HazardError(f"tcgen05.alloc in {warp.cta} after tcgen05.relinquish_alloc_permit")
    if group_of(form) == 1:
        column = tmem.find(columns)
        if column is None:
            return Block("tcgen05.alloc", lambda: tmem.find(columns) is not None, lambda: _detail(columns, tmem))
        tmem.take(column, columns)
    else:
        block = _pair_alloc(warp, columns)
        if block is not None:
            return block
        column = warp.pending.granted
    address = int(shared_addresses(warp, instr.operands[0], form)[warp.lanes()[0]])
    cta, offset = locate(warp.cta.cluster, address, 4, warp.place, align=4)
    cta.smem.data[offset : offset + 4].view(np.uint32)[0] = column
    cta.smem.init[offset : offset + 4] = 1
    if cta.machine.race is not None:
        cta.machine.race.shared_bytes(cta, offset, 4, True)
        if group_of(form) == 1:  # a pair allocates together, which orders its CTAs
            cta.machine.race.tensor_columns(warp.cta, column, columns)
    warp.cta.machine.stats["tmem_alloc"] += 1
    return None


def _detail(columns: int, *tmems: Tmem) -> str:
    held = " and ".join(str(dict(sorted(t.allocations.items()))) for t in tmems)
    return f"{columns} columns wanted, allocated (column: size): {held}"


def _pair_alloc(warp: Warp, columns: int) -> Block | None:
    """Request columns in both CTAs of the pair; None once ``warp.pending`` is granted."""
    tmems = [tmem_of(cta) for cta in group_ctas(warp, 2)]
    mine = tmems[warp.cta.rank & 1]
    if warp.pending is None:
        warp.pending = PairRequest(columns)
        mine.requests.append(warp.pending)
    request: PairRequest = warp.pending
    if request.granted < 0 and (column := _common(tmems)) is not None:
        pair = [t.requests.pop(0) for t in tmems]
        if pair[0].columns != pair[1].columns:
            raise EmulatorError(f"the CTAs of a pair allocate {pair[0].columns} and {pair[1].columns} columns together")
        for tmem, granted in zip(tmems, pair, strict=True):
            tmem.take(column, columns)
            granted.granted = column
        warp.cta.machine.changed()
    if request.granted >= 0:
        return None
    return Block(
        "tcgen05.alloc cta_group::2",
        lambda: request.granted >= 0 or _common(tmems) is not None,
        lambda: _detail(columns, *tmems) + ("" if all(t.requests for t in tmems) else "; no request of the peer CTA"),
    )


def _common(tmems: list[Tmem]) -> int | None:
    """Columns free in both CTAs for the oldest request of each, None if one has no request or there is no space."""
    if not all(t.requests for t in tmems):
        return None
    columns = tmems[0].requests[0].columns
    starts = range(0, COLUMNS - columns + 1, GRANULE)
    return next((c for c in starts if all(t.free_at(c, columns) for t in tmems)), None)


@isa.service(f"tcgen05.dealloc.{_GROUP}.sync.aligned.b32")
def dealloc(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.dealloc taddr, columns``; each CTA of a pair frees its own half."""
    address, columns = (warp.uniform(operand, np.uint32) for operand in instr.operands)
    check_columns(columns)
    group_ctas(warp, group_of(form))
    tmem_of(warp.cta).release(address, columns)
    tmem_of(warp.cta).freed = warp.place(instr)
    if warp.cta.machine.race is not None:
        warp.cta.machine.race.tensor_columns(warp.cta, address, columns)
    warp.cta.machine.changed()


@isa.service(f"tcgen05.relinquish_alloc_permit.{_GROUP}.sync.aligned")
def relinquish(warp: Warp, instr: Instr, form: Form) -> None:
    """``tcgen05.relinquish_alloc_permit``: this CTA will not allocate again."""
    tmem_of(warp.cta).relinquished = True
