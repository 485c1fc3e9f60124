"""How tcgen05 and wgmma instructions reach their asynchronous units.

mma, cp, shift and commit go to the tensor pipe of the CTA (cta_group::1) or of the CTA pair (cta_group::2), which
completes them in issue order. Loads and stores between tensor memory and registers go to a unit of the warp and
complete in any order until ``tcgen05.wait``.

The PTX ISA ("Pipelined tcgen05 Instructions") promises that order pair by pair: cp, shift or mma before mma (between
mma for one accumulator and shape), mma before shift, shift before cp.4x256b, each before commit. It does not name mma
before cp, which overwrites what the mma reads. No check reports that pair (`checks.clauses.SILENT` says why). How the
hardware keeps the order is not published; here it is the order of the pipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.machine.async_units import AsyncOp
from dsv4lib.emulator.native.abi import LANES
from dsv4lib.emulator.ptx.ir import Memory, Reg

if TYPE_CHECKING:
    from dsv4lib.emulator.isa import Form
    from dsv4lib.emulator.machine.cta import Cta
    from dsv4lib.emulator.machine.warp import Warp
    from dsv4lib.emulator.ptx.ir import Instr, Operand


def group_of(form: Form) -> int:
    """1 or 2 of ``.cta_group::``."""
    return int(form.get("group")[-1])


def group_ctas(warp: Warp, group: int) -> list[Cta]:
    """The executing CTA, or both CTAs of its pair, even rank first.

    Raises:
        EmulatorError: cta_group::2 in a cluster where the CTA has no peer.
    """
    if group == 1:
        return [warp.cta]
    ctas, first = warp.cta.cluster.ctas, warp.cta.rank & ~1
    if first + 1 >= len(ctas):
        raise EmulatorError(f"cta_group::2 needs a peer CTA; the cluster has {len(ctas)}")
    return ctas[first : first + 2]


def tensor_unit(warp: Warp, group: int) -> str:
    """Name of the tensor pipe."""
    cluster, rank = warp.cta.cluster.index, warp.cta.rank
    return f"tensor:{cluster}.{rank & ~1}+" if group == 2 else f"tensor:{cluster}.{rank}"


def warp_unit(warp: Warp) -> str:
    """Name of the unit for tensor-memory loads and stores of a warp."""
    return f"ldst:{warp.agent}"


def issue(warp: Warp, instr: Instr, unit: str, label: object, complete: Callable[[], None]) -> AsyncOp:
    """Queue an operation; ``label`` is anything printable."""
    return warp.cta.machine.units.issue(AsyncOp(unit, complete, label, warp, instr))


def each_lane(warp: Warp) -> Iterator[int]:
    """List active lanes. tcgen05.mma, cp, shift and commit have the semantics of single threads."""
    return iter(warp.lanes().tolist())


def lane_value(warp: Warp, operand: Operand, dtype: type, lane: int) -> int:
    """One lane's value of an operand, as a Python number."""
    return warp.lane_value(operand, np.dtype(dtype).itemsize, lane)


def tmem_address(warp: Warp, operand: Memory, lane: int) -> int:
    """Tensor-memory address that one lane gives as ``[taddr]``."""
    if type(operand.base) is Reg:
        return (warp.lane_value(operand.base, 4, lane) + operand.offset) & 0xFFFFFFFF
    return int(warp.address(operand)[lane]) & 0xFFFFFFFF


def uniform_tmem_address(warp: Warp, operand: Memory) -> tuple[int, bool]:
    """Tensor-memory address of a collective access, and whether all lanes agree on it.

    The ISA wants the same address in all lanes. A shipped kernel (NVIDIA's mixed_input_fmha_prefill_d512) adds the lane
    number to the lane field; the first lane's address is what counts.

    Raises:
        EmulatorError: lanes name different columns.
    """
    if type(operand.base) is Reg:
        values = warp.read(operand.base, np.uint32)
        raw = values.tobytes()
        if raw != raw[:4] * LANES:
            if ((values ^ values[0]) & np.uint32(0xFFFF)).any():
                raise EmulatorError("lanes name different tensor-memory columns")
            return tmem_address(warp, operand, 0), False
    return tmem_address(warp, operand, 0), True
