"""Access shared memory from services and asynchronous units. Address checks, written bytes, proxy state.

Every writer of shared memory keeps three arrays right (cta.Smem): the data, which bytes have been written, and which
16-byte chunks hold generic-proxy writes that no proxy fence has made visible to the asynchronous proxy yet.
Asynchronous writes clear that mark: they are made visible by their completion (PTX ISA, "Async Proxy").
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.errors import MemoryFault, Place
from dsv4lib.emulator.memory.addressing import LOW_32, OFFSET_MASK, RANK_SHIFT, shared_address
from dsv4lib.emulator.native.abi import FULL_MASK, LANES, SHARED_WINDOW

# Where a report points to, evaluated only when there is one: `Warp.place` or `AsyncOp.where`.
Where = Callable[[], Place | None]

# Any 16-byte type: numpy moves such a chunk in one go.
CHUNK_TYPE = np.dtype(np.complex128)
CP_ASYNC = 0x8000  # bit of a `Smem.dirty` entry: the writer used cp.async; the other bits are its warp + 1
_WRITTEN = np.ones(16, np.uint8).view(CHUNK_TYPE)[0]

if TYPE_CHECKING:
    from dsv4lib.emulator.isa import Form
    from dsv4lib.emulator.machine.cta import Cluster, Cta
    from dsv4lib.emulator.machine.warp import Warp
    from dsv4lib.emulator.ptx.ir import Memory


def shared_addresses(warp: Warp, memory: Memory, form: Form) -> np.ndarray:
    """`addresses_in` the state space that the opcode captures as ``space``."""
    return addresses_in(warp, memory, form.get("space"))


def addresses_in(warp: Warp, memory: Memory, space: str) -> np.ndarray:
    """uint32[32] shared addresses of a memory operand.

    ``space`` is that of the opcode; "" means a generic address, which must lie in the shared window. The others take
    no generic address; ``shared`` and ``shared::cta`` must name the executing CTA's own memory.

    Raises:
        MemoryFault: the wrong space.
    """
    addresses = warp.address(memory)
    shared = addresses.astype(np.uint32)  # drops the window
    mask = warp.mask()
    if not space:
        inside = addresses >> np.uint64(56) == np.uint64(SHARED_WINDOW >> 56)
        if not _all(inside, mask):
            raise MemoryFault("generic address outside the shared window", warp.place())
        return shared
    if not _all(addresses == shared, mask):
        bad = next(int(addresses[lane]) for lane in lane_list(mask) if addresses[lane] != shared[lane])
        raise MemoryFault(f".{space} address {bad:#x} is not in shared memory: is it a generic one?", warp.place())
    if space != "shared::cluster":
        own = shared >> np.uint32(RANK_SHIFT) == warp.cta.rank
        if not _all(own, mask):
            bad = next(int(shared[lane]) for lane in lane_list(mask) if not own[lane])
            raise MemoryFault(
                f".{space} address {bad:#x} lies in CTA {bad >> RANK_SHIFT} of the cluster, not in this CTA "
                f"{warp.cta.rank}",
                warp.place(),
            )
    return shared


def agreed_address(warp: Warp, memory: Memory, form: Form) -> int | None:
    """Find the shared address that all active lanes agree on. None if they do not or it is refused."""
    address, space = warp.agreed_address(memory), form.get("space")
    if address is None:
        return None
    if not space:
        return address & LOW_32 if address >> 56 == SHARED_WINDOW >> 56 else None
    if address > LOW_32:
        return None
    return address if space == "shared::cluster" or address >> RANK_SHIFT == warp.cta.rank else None


@functools.lru_cache(4096)
def lane_list(mask: int) -> tuple[int, ...]:
    """List the active lanes of a mask, ascending."""
    return tuple(lane for lane in range(LANES) if mask >> lane & 1)


@functools.lru_cache(4096)
def lane_array(mask: int) -> np.ndarray:
    """List lanes as int64[n], as `lane_list`, for indexing."""
    lanes = np.array(lane_list(mask), np.int64)
    lanes.setflags(write=False)
    return lanes


def _all(good: np.ndarray, mask: int) -> bool:
    """Is bool[32] true in all active lanes?"""
    if mask & (mask - 1) == 0:
        return not mask or bool(good[mask.bit_length() - 1])
    return bool(good.all() if mask == FULL_MASK else good[lane_array(mask)].all())


def locate(cluster: Cluster, address: int, nbytes: int, where: Where, align: int = 1) -> tuple[Cta, int]:
    """Find CTA and byte offset of a shared address.

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


def lane_groups(mask: int, *values: np.ndarray) -> list[tuple[np.ndarray, tuple[int, ...]]]:
    """Group active lanes by their tuple of values: (lanes, values), in lane order.

    A bulk operation that a whole warp issues with the same operands is one operation.
    """
    if not mask:
        return []
    lanes = lane_array(mask)
    first = tuple(v[lanes[0]].item() for v in values)
    if mask & (mask - 1) == 0:
        return [(lanes, first)]
    if all(_all(v == w, mask) for v, w in zip(values, first, strict=True)):
        return [(lanes, first)]
    groups: dict[tuple[int, ...], list[int]] = {}
    for lane in lanes:
        groups.setdefault(tuple(v[lane].item() for v in values), []).append(int(lane))
    return [(np.array(members), key) for key, members in groups.items()]


def write(cta: Cta, offset: int, data: np.ndarray) -> None:
    """Write uint8[n] at a byte offset through the async proxy."""
    end = offset + len(data)
    smem, race = cta.smem, cta.machine.race
    if race is not None and race.pedantic:
        _overwrite(cta, np.arange(offset >> 4, end + 15 >> 4))
    smem.data[offset:end] = data
    smem.init[offset:end] = 1
    smem.dirty[offset >> 4 : end + 15 >> 4] = 0
    if race is not None:
        race.shared_bytes(cta, offset, len(data), True)


def _overwrite(cta: Cta, index: np.ndarray) -> None:
    """Report to the race detector stores without a proxy fence that an asynchronous write hits."""
    marked = index[cta.smem.dirty[index] != 0]
    if len(marked):
        cta.machine.race.overwrites(cta, marked)


def write_chunks(cta: Cta, index: np.ndarray, data: np.ndarray, span: tuple[int, int] | None = None) -> None:
    """Write uint8[16 n] to 16-byte chunks through the async proxy. ``span`` if they fill a byte range."""
    smem, race = cta.smem, cta.machine.race
    if race is not None and race.pedantic:
        _overwrite(cta, index)
    whole = len(smem.data) & ~15
    smem.data[:whole].view(CHUNK_TYPE)[index] = data.view(CHUNK_TYPE)
    if span is not None:
        first, end = span
        smem.init[first:end] = 1
        smem.dirty[first >> 4 : end >> 4] = 0
    else:
        smem.init[:whole].view(CHUNK_TYPE)[index] = _WRITTEN
        smem.dirty[index] = 0
    if race is not None:
        race.shared_chunks(cta, index, True)


def read_chunks(cta: Cta, index: np.ndarray) -> np.ndarray:
    """Copy the 16-byte chunks ``index``, uint8[16 n]."""
    data = cta.smem.data
    return data[: len(data) & ~15].view(CHUNK_TYPE)[index].view(np.uint8)


def check_read(cta: Cta, offset: int, nbytes: int, what: str, where: Where, generic: bool = False) -> None:
    """Check the byte range [offset, offset + nbytes) as `check_chunks`. ``generic``: needs no proxy fence."""
    if cta.machine.race is not None:
        cta.machine.race.shared_bytes(cta, offset, nbytes, False)
    end = offset + nbytes
    smem = cta.smem
    chunks = np.arange(0) if generic else np.arange(offset >> 4, end + 15 >> 4)
    if smem.init[offset:end].all() and not smem.dirty[chunks].any():
        return
    _report(cta, np.arange(offset, end), chunks, what, where)


def check_chunks(cta: Cta, index: np.ndarray, what: str, where: Where) -> None:
    """Report what is wrong with an asynchronous-proxy read of 16-byte chunks. Not written, or not fenced."""
    if cta.machine.race is not None:
        cta.machine.race.shared_chunks(cta, index, False)
    offsets = (16 * index[:, None] + np.arange(16)).ravel()
    if not cta.smem.init[offsets].all() or cta.smem.dirty[index].any():
        _report(cta, offsets, index, what, where)


def unfenced(marks: np.ndarray) -> tuple[str, str, list[int]]:
    """Explain entries of `Smem.dirty`, none of them 0. Hazard kind, text, and writing warps."""
    writers = sorted({(int(w) & CP_ASYNC - 1) - 1 for w in np.unique(marks)})
    copied = bool((marks & CP_ASYNC).all())
    kind = "missing_proxy_fence_cp_async" if copied else "missing_proxy_fence"
    how = "with cp.async" if copied else "through the generic proxy"
    return kind, f"warps {writers} wrote {how} without fence.proxy.async", writers


def writer_of(cta: Cta, chunks: np.ndarray) -> Place | None:
    """Find the writer of the first of these chunks that no proxy fence covers. None if the race detector is off."""
    race = cta.machine.race
    return None if race is None else race.writer_of(cta, chunks)


def _report(cta: Cta, offsets: np.ndarray, chunks: np.ndarray, what: str, where: Where) -> None:
    smem, machine = cta.smem, cta.machine
    unwritten = offsets[smem.init[offsets] == 0]
    if len(unwritten):
        first = shared_address(cta.rank, int(unwritten.min()))
        machine.report(
            "uninitialised_smem",
            f"{what} reads {len(unwritten)} bytes of shared memory that no access has written, first at {first:#x}",
            where(),
            address=first,
        )
    dirty = chunks[smem.dirty[chunks] != 0]
    if len(dirty):
        first = shared_address(cta.rank, 16 * int(dirty.min()))
        kind, how, writers = unfenced(smem.dirty[dirty])
        machine.report(
            kind,
            f"{what} reads shared memory at {first:#x} that {how}",
            where(),
            address=first,
            writers=writers,
            owner=writer_of(cta, dirty),
        )
