"""Change tensor maps on the device. ``tensormap.replace`` and ``tensormap.cp_fenceproxy``.

Source: PTX ISA, sections of these names.
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError, MemoryFault
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, is_shared
from dsv4lib.emulator.ptx.ir import Instr
from dsv4lib.emulator.units import shared, tensormap
from dsv4lib.emulator.units.fences import CHANGED, RELEASED

_SPACES = "[.<space:global|shared::cta>]"
_ALIGN = 64


def _check_aligned(warp: Warp, address: int) -> None:
    if address % _ALIGN:
        raise MemoryFault(f"tensor map at {address:#x}: it must be aligned to {_ALIGN} bytes", warp.place())


@isa.service(
    f"tensormap.replace.tile.<field:global_address>{_SPACES}.b1024.<type:b64>",
    f"tensormap.replace.tile.<field:rank|elemtype|interleave_layout|swizzle_mode|swizzle_atomicity|fill_mode>{_SPACES}"
    ".b1024.<type:b32>",
    f"tensormap.replace.tile.<field:global_stride>{_SPACES}.b1024.<type:b64>",
    f"tensormap.replace.tile.<field:box_dim|global_dim|element_stride>{_SPACES}.b1024.<type:b32>",
    note="the 96-byte swizzle is refused",
)
def replace(warp: Warp, instr: Instr, form: Form) -> None:
    """``[addr], new_val`` or ``[addr], ord, new_val``. Lanes that do the same do it once."""
    memory, *rest = instr.operands
    field = form.get("field")
    ordinal = 0
    if field in ("box_dim", "global_dim", "global_stride", "element_stride"):
        ordinal = warp.uniform(rest.pop(0), np.uint32)
    if len(rest) != 1:
        raise EmulatorError(f"tensormap.replace.{field}: wrong number of operands", warp.place())
    values = warp.read(rest[0], np.uint64 if form.get("type") == "b64" else np.uint32)
    space = form.get("space")
    addresses = warp.address(memory) if space in ("", "global") else shared.addresses_in(warp, memory, space)
    in_shared = space.startswith("shared") | is_shared(addresses)
    for members, (address, value) in shared.lane_groups(warp.mask(), addresses, values):
        _check_aligned(warp, address)
        if in_shared[members[0]] if isinstance(in_shared, np.ndarray) else in_shared:
            cta, offset = shared.locate(warp.cta.cluster, address & 0xFFFFFFFF, tensormap.NBYTES, warp.place)
            target = cta.smem.data[offset : offset + tensormap.NBYTES]
            cta.smem.init[offset : offset + tensormap.USED] = 1
            if cta.machine.race is not None:
                cta.machine.race.shared_bytes(cta, offset, tensormap.USED, True)
            cta.smem.dirty[offset >> 4 : offset + tensormap.NBYTES >> 4] = warp.warp_id + 1
        else:
            target = warp.cta.machine.gmem.view(address, tensormap.NBYTES, write=True)
            warp.cta.machine.units.descriptors[address] = CHANGED
        new = tensormap.replace(target.tobytes(), field, value, ordinal, warp.place)
        target[:] = np.frombuffer(new, np.uint8)


@isa.service(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.<scope:cta|cluster|gpu|sys>.sync.aligned"
)
def copy_fence(warp: Warp, instr: Instr, form: Form) -> None:
    """``[dst], [src], 128``: copy a tensor map from shared to global memory and release it."""
    destination, source, size = instr.operands
    if warp.uniform(size, np.uint32) != tensormap.NBYTES:
        raise HazardError(f"tensormap.cp_fenceproxy: the size must be {tensormap.NBYTES}", warp.place())
    machine, smem = warp.cta.machine, warp.cta.smem
    to, start = warp.address(destination), shared.addresses_in(warp, source, "shared::cta")
    for _, (address, at) in shared.lane_groups(warp.mask(), to, start):
        _check_aligned(warp, address)
        shared.locate(warp.cta.cluster, at, tensormap.NBYTES, warp.place, align=_ALIGN)
        offset = at & OFFSET_MASK
        machine.gmem.view(address, tensormap.NBYTES, write=True)[:] = smem.data[offset : offset + tensormap.NBYTES]
        machine.units.descriptors[address] = RELEASED
