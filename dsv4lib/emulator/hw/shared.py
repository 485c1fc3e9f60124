"""Access of services and asynchronous units to shared memory: address checks, written bytes, proxy state.

Every writer of shared memory keeps three arrays right (cta.Smem): the data, which bytes have been written, and which
16-byte chunks hold generic-proxy writes that no proxy fence has made visible to the asynchronous proxy yet.
Asynchronous writes clear that mark: they are made visible by their completion (PTX ISA, "Async Proxy").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.errors import MemoryFault, Place
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, RANK_SHIFT, is_shared, shared_address, to_shared

# Where a report points to, evaluated only when there is one: `Warp.place` or `AsyncOp.place`.
Where = Callable[[], Place | None]

if TYPE_CHECKING:
    from dsv4lib.emulator.cta import Cluster, Cta
    from dsv4lib.emulator.isa import Form
    from dsv4lib.emulator.ptx.ir import Memory
    from dsv4lib.emulator.warp import Warp


def shared_addresses(warp: Warp, memory: Memory, form: Form, space: str = "space") -> np.ndarray:
    """uint32[32] shared addresses of a memory operand.

    ``form.get(space)`` is the state space of the spelling; without one the address is generic and must lie in the
    shared window. ``shared`` and ``shared::cta`` must name the executing CTA's own memory.

    Raises:
        MemoryFault: the wrong space.
    """
    addresses = warp.address(memory)
    lanes = warp.lanes()
    where = form.get(space)
    if not where and not is_shared(addresses[lanes]).all():
        raise MemoryFault("generic address outside the shared window", warp.place())
    shared = to_shared(addresses)
    if where in ("shared", "shared::cta"):
        foreign = shared[lanes] >> np.uint32(RANK_SHIFT) != warp.cta.rank
        if foreign.any():
            bad = int(shared[lanes][foreign][0])
            raise MemoryFault(
                f".{where} address {bad:#x} lies in CTA {bad >> RANK_SHIFT} of the cluster, not in this CTA "
                f"{warp.cta.rank}",
                warp.place(),
            )
    return shared


def locate(cluster: Cluster, address: int, nbytes: int, where: Where, align: int = 1) -> tuple[Cta, int]:
    """CTA and byte offset of a shared address.

    Raises:
        MemoryFault: no such CTA, outside its shared memory, or misaligned.
    """
    rank, offset = address >> RANK_SHIFT, address & OFFSET_MASK
    if rank >= len(cluster.ctas):
        raise MemoryFault(f"shared address {address:#x}: the cluster has {len(cluster.ctas)} CTAs", where())
    cta = cluster.ctas[rank]
    if offset + nbytes > cta.smem.nbytes:
        raise MemoryFault(
            f"{nbytes} bytes at shared address {address:#x} run over the end of shared memory ({cta.smem.nbytes:#x})",
            where(),
        )
    if offset % align:
        raise MemoryFault(f"shared address {address:#x} is not a multiple of {align}", where())
    return cta, offset


def lane_groups(lanes: np.ndarray, *values: np.ndarray) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """(lanes, their values) for every distinct tuple of values among the active lanes, in lane order.

    A bulk operation that a whole warp issues with the same operands is one operation.
    """
    if not len(lanes):
        return []
    first = tuple(int(v[lanes[0]]) for v in values)
    if len(lanes) == 1 or all((v[lanes] == w).all() for v, w in zip(values, first, strict=True)):
        return [(lanes, first)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for lane in lanes:
        groups.setdefault(tuple(int(v[lane]) for v in values), []).append(int(lane))
    return [(np.array(members), key) for key, members in groups.items()]


def write(cta: Cta, offset: int, data: np.ndarray) -> None:
    """Asynchronous-proxy write of uint8[n] at a byte offset."""
    end = offset + len(data)
    smem = cta.smem
    smem.data[offset:end] = data
    smem.init[offset:end] = 1
    smem.dirty[offset >> 4 : end + 15 >> 4] = 0


def check_read(cta: Cta, offset: int, nbytes: int, what: str, where: Where) -> None:
    """Report what is wrong with an asynchronous-proxy read of [offset, offset + nbytes)."""
    end = offset + nbytes
    smem, machine = cta.smem, cta.machine
    written = smem.init[offset:end]
    if not written.all():
        first = offset + int(np.argmin(written))
        machine.report(
            "uninitialised_smem",
            f"{what} reads shared memory that nobody has written, first at {shared_address(cta.rank, first):#x}",
            where(),
            address=first,
        )
    dirty = smem.dirty[offset >> 4 : end + 15 >> 4]
    if dirty.any():
        first = (offset & ~15) + 16 * int(np.argmax(dirty != 0))
        writers = sorted({int(w) - 1 for w in dirty[dirty != 0]})
        machine.report(
            "missing_proxy_fence",
            f"{what} reads shared memory at {shared_address(cta.rank, first):#x} that warps {writers} wrote through "
            "the generic proxy without fence.proxy.async",
            where(),
            address=first,
            writers=writers,
        )
