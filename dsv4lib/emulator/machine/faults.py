"""Turn what a native handler found wrong into an error or a report with its place."""

from __future__ import annotations

from dsv4lib.emulator.errors import EmulatorError, MemoryFault
from dsv4lib.emulator.machine.warp import PC, Warp
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, RANK_SHIFT
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.ptx.ir import Instr, Memory
from dsv4lib.emulator.ptx.pending import registers_of


def raise_fault(warp: Warp) -> None:
    """Handle the fault in a warp's context.

    An uninitialised shared-memory read, a load past the end of an allocation but within its padding, or an instruction
    without all of its lanes has already been carried out: it is reported and the warp steps on.

    Raises:
        MemoryFault: the access is impossible.
        HazardError: the report is fatal under the machine's settings.
    """
    ctx = warp.ctx
    code = int(ctx["fault"])
    lane, nbytes, address = int(ctx["fault_lane"]), int(ctx["fault_bytes"]), int(ctx["fault_address"])
    ctx["fault"] = abi.FAULT_NONE
    instr = warp.program.instruction(warp.words[PC])
    place = warp.place(instr)
    if code == abi.FAULT_PAST_END:
        message = f"lane {lane}: {warp.cta.machine.gmem.explain(address, nbytes)}"
        _in_vain(warp, "global_read_past_end", message, instr, address=address, nbytes=nbytes, lane=lane)
        warp.words[PC] += 1
        return
    if code == abi.FAULT_DIVERGED:
        report_diverged(warp, instr, address)
        warp.words[PC] += 1
        return
    if code == abi.FAULT_OUTSIDE:
        message = f"{instr.opcode} is executed by lanes {address:#010x}, which its member mask does not name"
        warp.cta.machine.report("lane_outside_mask", message, place, lanes=address)
        warp.words[PC] += 1
        return
    if code == abi.FAULT_UNINIT:
        message = f"lane {lane} reads {_shared(address)}, {nbytes} bytes not all of which have been written"
        _in_vain(warp, "uninitialised_smem", message, instr, address=address, nbytes=nbytes, lane=lane)
        warp.words[PC] += 1
        return
    raise MemoryFault(_explain(warp, code, lane, nbytes, address), place)


def _in_vain(warp: Warp, kind: str, message: str, instr: Instr, **facts: int) -> None:
    """Report a read that only matters if its value does."""
    lanes = _reading(warp, instr, facts["nbytes"])
    warp.cta.machine.taint.read(kind, message, warp.place(instr), warp, instr.index, lanes, **facts)


def _reading(warp: Warp, instr: Instr, nbytes: int) -> int:
    """Find the lanes that have read what is not there; all, if the load has overwritten its address."""
    memory = next((operand for operand in instr.operands if isinstance(operand, Memory)), None)
    own = set(registers_of(instr.operands[0]))
    if memory is None or own & set(registers_of(memory)) or not instr.opcode.startswith("ld"):
        return warp.mask()
    machine, addresses = warp.cta.machine, warp.address(memory)
    inside = ".shared" in instr.opcode
    lanes = 0
    for lane in warp.lanes().tolist():
        at = int(addresses[lane])
        if inside or at >> 56:
            at &= 0xFFFFFFFF
            init = warp.cta.cluster.ctas[at >> RANK_SHIFT].smem.init[at & OFFSET_MASK :][:nbytes]
            missing = not init.all()
        else:
            missing = machine.gmem.find(at, nbytes) is None
        lanes |= missing << lane
    return lanes or warp.mask()


def report_diverged(warp: Warp, instr: Instr, missing: int) -> None:
    """Report an instruction for converged lanes that ran without those of ``missing``."""
    message = f"{instr.opcode} is executed without lanes {missing:#010x}, which it needs: they are on another path"
    warp.cta.machine.report("diverged_sync", message, warp.place(instr), missing=missing)


def _shared(address: int) -> str:
    """A shared address in words."""
    low = address & 0xFFFFFFFF
    return f"shared address {low & OFFSET_MASK:#x} of CTA rank {low >> RANK_SHIFT}"


def _explain(warp: Warp, code: int, lane: int, nbytes: int, address: int) -> str:
    machine = warp.cta.machine
    write = not warp.program.instruction(warp.words[PC]).opcode.startswith(("ld", "ldmatrix"))
    if code == abi.FAULT_ALIGN:
        return f"lane {lane}: address {address:#x} is not a multiple of {nbytes}"
    if code == abi.FAULT_GLOBAL:
        return f"lane {lane}: {machine.gmem.explain(address, nbytes, write)}"
    if code == abi.FAULT_SHARED:
        ranks = len(warp.cta.cluster.ctas)
        bounds = f"a CTA has {machine.smem_bytes:,} bytes, the cluster {ranks} CTAs"
        return f"lane {lane}: {_shared(address)}, {nbytes} bytes, is outside shared memory: {bounds}"
    if code == abi.FAULT_LOCAL:
        return f"lane {lane}: local offset {address:#x}, {nbytes} bytes, is outside {warp.program.local_bytes} bytes"
    if code == abi.FAULT_PARAM:
        start = machine.param_address
        return (
            f"lane {lane}: parameter offset {address - start}, {nbytes} bytes, is outside {machine.param_bytes} bytes"
        )
    raise EmulatorError(f"native code stopped with fault {code}", warp.place())
