"""Registers that the warps of a CTA give back and take: setmaxnreg.

A launch gives every warp the registers a thread that its code was compiled for. These are the CTA's pool: there is no
more, even where the SM has registers left. 384 threads that may fill an SM get 168 each, not 170.7; then 24 + 240 + 240
can be had, and 32 + 240 + 240 never ends. Source: PTX ISA, setmaxnreg; counts as ptxas 13.0 chooses them; a kernel that
hung on an H200.
"""

from __future__ import annotations

from math import prod

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import HazardError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.warp import Block, Warp
from dsv4lib.emulator.native.abi import LANES
from dsv4lib.emulator.ptx.ir import Instr, Kernel

OF_A_QUARTER = 16_384  # of an SM; a warp's registers lie in one
MOST = 256  # a thread
UNIT = 8


def registers_at_entry(kernel: Kernel) -> int | None:
    """Registers a thread at the start, None where the code does not say: ptxas ignores setmaxnreg then.

    No more than its directives allow, nor than the largest count that it asks for.
    """
    threads, limits = kernel.reqntid or kernel.maxntid, []
    if kernel.max_registers is not None:
        limits.append(-(-kernel.max_registers // UNIT) * UNIT)
    if kernel.min_ctas is not None and threads is not None:
        warps = kernel.min_ctas * -(-prod(threads) // LANES)
        limits.append(OF_A_QUARTER // (-(-warps // 4) * LANES) // UNIT * UNIT)
    if not limits:
        return None
    wanted = [i.operands[0].bits for i in kernel.instructions if i.opcode.startswith("setmaxnreg.inc")]
    return min(MOST, *limits, max(wanted, default=MOST))


class RegisterPool:
    """Registers a thread that each warp has, and how many are free; a warp that exits keeps its own."""

    def __init__(self, entry: int, warps: int):
        self.entry, self.total, self.free = entry, entry * warps, 0
        self.held = [entry] * warps

    def __str__(self) -> str:
        held = ", ".join(f"{count} x {self.held.count(count)} warps" for count in sorted(set(self.held)))
        return f"the launch gave {self.entry} a thread to {len(self.held)} warps; {self.free} are free, held: {held}"


@isa.service(
    "setmaxnreg.<direction:inc|dec>.sync.aligned.u32",
    note="inc waits for the CTA's pool; no effect where the kernel has neither .maxnreg nor .minnctapersm, as in ptxas",
)
def setmaxnreg(warp: Warp, instr: Instr, form: Form) -> Block | None:
    """Give registers back to the CTA's pool, or wait until it has those that are wanted."""
    count, direction = warp.uniform(instr.operands[0], np.uint32), form.get("direction")
    if not 24 <= count <= 256 or count % 8:
        raise HazardError(f"setmaxnreg {count}: a multiple of 8 from 24 to 256 is needed", warp.place(instr))
    cta = warp.cta
    if cta.registers is None and (entry := registers_at_entry(warp.program.kernel)) is not None:
        cta.registers = RegisterPool(entry, len(cta.warps))
    pool = cta.registers
    if pool is not None:
        more = count - pool.held[warp.warp_id]
        if direction == "inc":
            more = max(0, more)
        elif more > 0:
            text = f"setmaxnreg.dec {count}: the warp has {pool.held[warp.warp_id]} registers a thread"
            raise HazardError(text, warp.place(instr))
        if more > pool.free:
            return Block(f"setmaxnreg.inc {count}", lambda: more <= pool.free, lambda: f"{more} more wanted; {pool}")
        pool.held[warp.warp_id] += more
        pool.free -= more
        cta.machine.changed()
    cta.machine.stats[f"setmaxnreg.{direction}"] += 1
    return None
