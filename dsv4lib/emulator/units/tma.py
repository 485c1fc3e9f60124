"""Implement tensor copies (TMA). Loads, stores, reductions and prefetches through a tensor map.

A load reads global memory and writes shared memory when it completes, then signals its mbarrier; with multicast every
destination CTA gets its data in an operation of its own, at a time of its own. A store reads shared memory in one step
(what ``wait_group.read`` waits for) and writes global memory in a later one. The descriptor is read at issue; if it has
changed when the copy completes, that is reported.

Lanes: every active lane of a load or reduction issues a copy of its own, as hardware does; a store that several lanes
issue with the same operands is done and counted once.

Source: PTX ISA, ``cp.async.bulk.tensor``, ``cp.reduce.async.bulk.tensor``, ``cp.async.bulk.prefetch.tensor``. Modifiers
are accepted in the orders that the ISA's syntax and examples, CUTLASS and CuTeDSL use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError, MemoryFault, UnsupportedInstruction
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.async_units import AsyncOp
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.memory.addressing import OFFSET_MASK, RANK_SHIFT, shared_address
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.ptx.ir import Instr, Memory, Operand, Vector
from dsv4lib.emulator.units import groups, mbarrier, shared, tensormap, tma_box
from dsv4lib.emulator.units.reduction import check_type
from dsv4lib.emulator.units.shared import Where
from dsv4lib.emulator.units.tensormap import TensorMap

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.cta import Cta

# Dimensions with the modes that they have.
_LOADS = (
    ("<dim:1d|2d|3d|4d|5d>", "[.<mode:tile>]"),
    ("<dim:2d>", ".<mode:tile::gather4>"),
    ("<dim:3d|4d|5d>", ".<mode:im2col>"),
)
_STORES = (
    ("<dim:1d|2d|3d|4d|5d>", "[.<mode:tile>]"),
    ("<dim:2d>", ".<mode:tile::scatter4>"),
    ("<dim:3d|4d|5d>", ".<mode:im2col_no_offs>"),
)
_REDUCTIONS = _STORES[::2]
_TX = "mbarrier::complete_tx::bytes"
_PAIR = "[.<group:cta_group::1|cta_group::2>]"
_HINT = "[.<hint:L2::cache_hint>]"
_REFUSED = "im2col::w and im2col::w::128 are refused: where halo pixels go is documented in figures only"


@dataclass(frozen=True)
class TensorCopy:
    """One tensor copy as traces see it.

    Attributes:
        kind: "load", "store", or the reduction; tensor, address: the descriptor and where it lies.
        coords: as given in the instruction; mode: "tile", "tile::gather4", ...
        cta: whose shared memory; placement: where in it; nbytes: counted at the barrier or stored.
        barrier: shared address of the mbarrier, None for stores.
        op: the asynchronous operation (issue order, issuing warp and instruction).
    """

    kind: str
    tensor: TensorMap
    address: int
    coords: tuple[int, ...]
    mode: str
    cta: Cta
    placement: tma_box.Placement
    nbytes: int
    barrier: int | None
    op: AsyncOp


def descriptor(warp: Warp, address: int) -> tuple[TensorMap, bytes]:
    """Decode the tensor map at a generic address; also its bytes.

    Raises:
        MemoryFault: it lies in shared or local memory, or is misaligned. HazardError: it cannot be decoded.
    """
    machine = warp.cta.machine
    if address >> 56:  # a window
        raise MemoryFault(f"tensor map at {address:#x}: it must lie in param, const or global memory", warp.place())
    if address % tensormap.USED:
        raise MemoryFault(f"tensor map at {address:#x}: it must be aligned to {tensormap.USED} bytes", warp.place())
    if address in machine.units.descriptors:
        machine.report(
            "missing_tensormap_fence",
            f"the tensor map at {address:#x} was {machine.units.descriptors[address]} without a tensormap proxy fence",
            warp.place(),
        )
    if machine.marks is not None:
        machine.marks.ranges([address], tensormap.USED, False)
    raw = machine.gmem.view(address, tensormap.USED).tobytes()
    try:
        return tensormap.decode(raw), raw
    except ValueError as error:
        raise HazardError(f"tensor map at {address:#x}: {error} ({raw.hex()})", warp.place()) from None


def _check_unchanged(warp: Warp, address: int, raw: bytes, where: Where) -> None:
    if warp.cta.machine.gmem.view(address, tensormap.USED).tobytes() != raw:
        warp.cta.machine.report(
            "descriptor_modified", f"the tensor map at {address:#x} changed while a copy was in flight", where()
        )


def _box(
    tensor: TensorMap, mode: str, rank: int, coords: Sequence[int], offsets: Sequence[int], where: Where
) -> tma_box.Box:
    """The rows that an instruction of dimension ``rank`` moves.

    Raises:
        HazardError: instruction and descriptor do not fit.
    """
    if tensor.flaw:
        raise HazardError(f"tensor map {tensor}: {tensor.flaw}", where())
    if tensor.rank != rank:
        raise HazardError(f"{rank}-dimensional copy with a descriptor of rank {tensor.rank}", where())
    if tensor.im2col != mode.startswith("im2col"):
        raise HazardError(f"{mode} copy with {'an im2col' if tensor.im2col else 'a tiled'} descriptor", where())
    if mode.endswith("4"):
        return tma_box.rows4(tensor, coords, where)
    if mode.startswith("im2col"):
        return tma_box.im2col(tensor, coords, offsets, where)
    return tma_box.tiled(tensor, coords, where)


def _coordinates(warp: Warp, memory: Memory, mode: str, rank: int) -> list[np.ndarray]:
    """int32[32] per coordinate of ``[tensorMap, {...}]``."""
    if len(memory.rest) != 1 or not isinstance(memory.rest[0], Vector):
        raise EmulatorError("a tensor copy needs [tensorMap, {coordinates}]", warp.place())
    items = memory.rest[0].items
    expected = 5 if mode.endswith("4") else rank
    if len(items) != expected or (expected == 5 and mode.endswith("4") and rank != 2):
        raise EmulatorError(f"{mode} of dimension {rank} takes {expected} coordinates, got {len(items)}", warp.place())
    return [warp.read(item, np.int32) for item in items]


# --- loads ------------------------------------------------------------------------------------------------------------


@isa.service(
    *(f"cp.async.bulk.tensor.{dim}.<dst:shared::cta>.global{mode}.{_TX}{_PAIR}{_HINT}" for dim, mode in _LOADS),
    *(
        f"cp.async.bulk.tensor.{dim}.<dst:shared::cluster>.global{mode}.{_TX}"
        f"[.<multicast:multicast::cluster>]{_PAIR}{_HINT}"
        for dim, mode in _LOADS
    ),
    note=_REFUSED,
)
def load(warp: Warp, instr: Instr, form: Form) -> None:
    """Issue a tensor load.

    ``[dstMem], [tensorMap, coords], [mbar] {, im2colOffsets} {, ctaMask} {, cache_policy}``.
    """
    mode, pair = form.get("mode", "tile"), form.get("group") == "cta_group::2"
    destination, source, barrier, *rest = instr.operands
    rank = int(form.get("dim")[0])
    offsets, mask = _load_extras(warp, form, mode, rank, rest)
    to = shared.addresses_in(warp, destination, form.get("dst"))
    # With a pair the barrier may be the peer's, also where the opcode says .shared::cta (of the destination).
    signal = shared.addresses_in(warp, barrier, "shared::cluster" if pair else form.get("dst"))
    maps = warp.address(source)
    coords = _coordinates(warp, source, mode, rank)
    for lane in shared.lane_list(warp.mask()):
        at = tuple([c[lane].item() for c in coords])
        tensor, raw = descriptor(warp, int(maps[lane]))
        box = _box(tensor, mode, rank, at, [int(o[lane]) for o in offsets], warp.place)
        request = _Load(warp, instr, mode, int(maps[lane]), raw, tensor, box, at)
        targets = _targets(warp, int(to[lane]), int(signal[lane]), None if mask is None else int(mask[lane]), pair)
        stats = warp.cta.machine.stats
        stats["tma_loads"] += 1
        stats["tma_read_bytes"] += box.tx_bytes  # once, however many CTAs a multicast goes to
        stats["tma_load_bytes"] += box.tx_bytes * len(targets)
        for target, bar in targets:
            request.issue(target, bar)


def _load_extras(
    warp: Warp, form: Form, mode: str, rank: int, rest: list[Operand]
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """im2col offsets (uint16[32] each) and multicast mask from the trailing operands."""
    offsets: list[np.ndarray] = []
    mask = None
    if mode == "im2col":
        vector = rest.pop(0) if rest else None
        if not isinstance(vector, Vector) or len(vector.items) != rank - 2:
            raise EmulatorError(f"im2col of dimension {rank} takes {max(rank - 2, 1)} offsets", warp.place())
        offsets = [warp.read(item, np.uint16) for item in vector.items]
    if form.has("multicast"):
        mask = warp.read(rest.pop(0), np.uint16)
    if len(rest) != int(form.has("hint")):
        raise EmulatorError(f"{form.opcode}: operands do not match the modifiers", warp.place())
    return offsets, mask


def _targets(warp: Warp, to: int, signal: int, mask: int | None, pair: bool) -> list[tuple[int, int]]:
    """(destination address, barrier address) per destination CTA.

    Raises:
        HazardError: a barrier where the instruction cannot signal, or a mask that names no CTA of the cluster.
    """
    if mask is None:
        to_rank, bar_rank = to >> RANK_SHIFT, signal >> RANK_SHIFT
        if to_rank != bar_rank and not (pair and to_rank == bar_rank ^ 1):
            allowed = "that CTA or its peer" if pair else "that CTA"
            raise HazardError(
                f"copy into CTA {to_rank} with an mbarrier in CTA {bar_rank}: it must be in {allowed}", warp.place()
            )
        return [(to, signal)]
    size = len(warp.cta.cluster.ctas)
    if mask == 0 or mask >> size:
        raise HazardError(f"multicast mask {mask:#06x} for a cluster of {size} CTAs", warp.place())
    out = []
    for rank in range(size):
        if mask >> rank & 1:
            bar_rank = rank & ~1 | signal >> RANK_SHIFT & 1 if pair else rank
            out.append((shared_address(rank, to & OFFSET_MASK), shared_address(bar_rank, signal & OFFSET_MASK)))
    return out


@dataclass(slots=True)
class _Load:
    """What the operations of one load have in common."""

    warp: Warp
    instr: Instr
    mode: str
    address: int
    raw: bytes
    tensor: TensorMap
    box: tma_box.Box
    coords: tuple[int, ...]

    def __str__(self) -> str:
        return f"tma {self.mode} load at {self.coords} of {self.tensor}"

    def issue(self, target: int, bar: int) -> None:
        """Queue the copy into one CTA."""
        warp, box = self.warp, self.box
        cluster = warp.cta.cluster
        cta, offset = shared.locate(cluster, target, 1, warp.place)
        place = tma_box.place(box, offset, warp.place)
        shared.locate(cluster, target, place.end - offset, warp.place)
        barrier = mbarrier.find(cluster, bar, warp.place)
        op = AsyncOp("tma", lambda: self.complete(op, cta, place, bar), self, warp, self.instr, writes=cta)
        op.signals = barrier
        cluster.machine.units.issue(op)

    def complete(self, op: AsyncOp, cta: Cta, place: tma_box.Placement, bar: int) -> None:
        """Copy and signal."""
        box, machine = self.box, cta.machine
        _check_unchanged(self.warp, self.address, self.raw, op.where)
        data = tma_box.read(box, machine.gmem)
        if machine.race is not None and machine.race.follows:
            machine.race.global_ranges(*tma_box.ranges(box), False)
        if self.tensor.element.chunk is not None:
            index = np.arange(place.first >> 4, place.end >> 4) if place.index is None else place.index
            data = tma_box.pad(box, data, shared.read_chunks(cta, index))
        if place.index is None:
            shared.write(cta, place.first, data)
        else:
            shared.write_chunks(cta, place.index, data, (place.first, place.end) if place.full else None)
        if machine.trace is not None:
            copy = TensorCopy(
                "load", self.tensor, self.address, self.coords, self.mode, cta, place, box.tx_bytes, bar, op
            )
            machine.trace.tma(copy)
        mbarrier.find(cta.cluster, bar, op.where).complete_tx(box.tx_bytes, op.where)


# --- stores and reductions --------------------------------------------------------------------------------------------


@isa.service(
    *(f"cp.async.bulk.tensor.{dim}.global.shared::cta{mode}.bulk_group{_HINT}" for dim, mode in _STORES),
    note="a store of several lanes with the same operands is done once",
)
def store(warp: Warp, instr: Instr, form: Form) -> None:
    """``[tensorMap, coords], [srcMem] {, cache_policy}``."""
    _store(warp, instr, form, "")


@isa.service(
    *(
        f"cp.reduce.async.bulk.tensor.{dim}.global.shared::cta.<op:add|min|max|inc|dec|and|or|xor>{mode}.bulk_group{_HINT}"
        for dim, mode in _REDUCTIONS
    ),
)
def reduce(warp: Warp, instr: Instr, form: Form) -> None:
    """``[tensorMap, coords], [srcMem] {, cache_policy}``; every lane reduces."""
    _store(warp, instr, form, form.get("op"))


def _store(warp: Warp, instr: Instr, form: Form, op: str) -> None:
    mode = form.get("mode", "tile")
    target, source, *policy = instr.operands
    if len(policy) != int(form.has("hint")):
        raise EmulatorError(f"{form.opcode}: operands do not match the modifiers", warp.place())
    rank = int(form.get("dim")[0])
    at = shared.addresses_in(warp, source, "shared::cta")
    coords = _coordinates(warp, target, mode, rank)
    maps = warp.address(target)
    for members, values in shared.lane_groups(warp.mask(), maps, at, *coords):
        for lanes in [members] if not op else [members[i : i + 1] for i in range(len(members))]:
            _Store.issue(warp, instr, mode, rank, op, lanes, values)


def _check_store(tensor: TensorMap, mode: str, op: str, coords: Sequence[int], where: Where) -> None:
    """Restrictions of the shared-to-global direction.

    Raises:
        HazardError: negative coordinates, corners or a type that this direction does not have.
    """
    if tensor.element.chunk is not None:
        if tensor.element.bits == 6:
            raise UnsupportedInstruction("tensor stores of 6-bit types", where())
        raise HazardError(f"tensor store of the padded type {tensor.element.name}", where())
    if any(c < 0 for c in (coords[:1] if mode == "tile::scatter4" else coords)):
        raise HazardError(f"tensor store at negative coordinates {tuple(coords)}", where())
    if any(low < 0 for low in tensor.lower) or any(up > 0 for up in tensor.upper):
        raise HazardError("im2col store with a bounding box outside the tensor", where())
    if op:
        check_type(op, tensor.element.name, where)


@dataclass(slots=True)
class _Store:
    """A store or reduction in flight."""

    warp: Warp
    instr: Instr
    mode: str
    op: str
    address: int
    raw: bytes
    tensor: TensorMap
    box: tma_box.Box
    coords: tuple[int, ...]
    place: tma_box.Placement
    tracked: groups.Tracked

    def __str__(self) -> str:
        return f"tma {self.op or 'store'} {self.mode} at {self.coords} of {self.tensor}"

    @staticmethod
    def issue(
        warp: Warp, instr: Instr, mode: str, rank: int, op: str, lanes: np.ndarray, values: tuple[int, ...]
    ) -> None:
        """Queue the reading half for the lanes that share it."""
        address, at, *coords = values
        tensor, raw = descriptor(warp, address)
        _check_store(tensor, mode, op, coords, warp.place)
        offsets = [0] * (rank - 2) if mode.startswith("im2col") else []
        box = _box(tensor, mode, rank, coords, offsets, warp.place)
        place = tma_box.place(box, at & OFFSET_MASK, warp.place)
        shared.locate(warp.cta.cluster, at, place.end - place.first, warp.place)
        tracked = groups.Tracked()
        self = _Store(warp, instr, mode, op, address, raw, tensor, box, tuple(coords), place, tracked)
        tracked.label = self
        groups.add(warp, "bulk", lanes, tracked)
        stats = warp.cta.machine.stats
        stats["tma_reductions" if op else "tma_stores"] += 1
        stats["tma_store_bytes"] += box.tx_bytes
        unit = f"bulk:{warp.agent}"
        reading = AsyncOp(unit, lambda: self.read(reading), self, warp, instr, reads=warp.cta)
        warp.cta.machine.units.issue(reading)

    def read(self, reading: AsyncOp) -> None:
        """Take the data out of shared memory; the write comes later."""
        cta, place = self.warp.cta, self.place
        _check_unchanged(self.warp, self.address, self.raw, reading.where)
        what = f"a TMA {self.op or 'store'}"
        if place.index is None or place.full:
            shared.check_read(cta, place.first, place.end - place.first, what, reading.where)
        else:
            shared.check_chunks(cta, place.index, what, reading.where)
        if place.index is None:
            data = cta.smem.data[place.first : place.end].copy()
        else:
            data = shared.read_chunks(cta, place.index)
        self.tracked.read = True
        writing = AsyncOp(
            reading.unit,
            lambda: self.write(writing, data),
            reading.label,
            self.warp,
            self.instr,
            order=reading.order,
            lanes=reading.lanes,
        )
        cta.machine.units.issue(writing)

    def boxes(self, gmem: GlobalMemory) -> list[tma_box.Box]:
        """The box; through a multicast address, the box on every device.

        Raises:
            UnsupportedInstruction: a reduction through a multicast address.
        """
        start = self.tensor.address
        targets = gmem.multicast(start)
        if targets and self.op:
            raise UnsupportedInstruction(f"tensor reduction {self.op} through a multicast address", self.warp.place())
        return [replace(self.box, tensor=replace(self.tensor, address=to)) for to in targets] or [self.box]

    def write(self, writing: AsyncOp, data: np.ndarray) -> None:
        """Write or reduce into global memory."""
        machine = self.warp.cta.machine
        over = max(tma_box.write(box, machine.gmem, data, self.op) for box in self.boxes(machine.gmem))
        if machine.race is not None and machine.race.follows:
            for box in self.boxes(machine.gmem):
                machine.race.global_ranges(*tma_box.ranges(box), True, bool(self.op))
        if over:
            machine.report(
                "tma_store_padding",
                f"{over} bytes past the rows of {self.tensor} were overwritten: stores clip at multiples of 16 bytes",
                writing.place,
            )
        self.tracked.done = True
        if machine.trace is not None:
            copy = TensorCopy(
                self.op or "store",
                self.tensor,
                self.address,
                self.coords,
                self.mode,
                self.warp.cta,
                self.place,
                self.box.tx_bytes,
                None,
                writing,
            )
            machine.trace.tma(copy)


# --- prefetch ---------------------------------------------------------------------------------------------------------


@isa.service(
    *(f"cp.async.bulk.prefetch.tensor.{dim}.L2.global{mode}{_HINT}" for dim, mode in _LOADS),
    note="checked, no effect",
)
def prefetch(warp: Warp, instr: Instr, form: Form) -> None:
    """``[tensorMap, coords] {, im2colOffsets} {, cache_policy}``."""
    mode = form.get("mode", "tile")
    rank = int(form.get("dim")[0])
    source, *rest = instr.operands
    offsets, _ = _load_extras(warp, form, mode, rank, list(rest))
    coords, maps = _coordinates(warp, source, mode, rank), warp.address(source)
    for lane in shared.lane_list(warp.mask()):
        tensor, _ = descriptor(warp, int(maps[lane]))
        _box(tensor, mode, rank, [int(c[lane]) for c in coords], [int(o[lane]) for o in offsets], warp.place)
        warp.cta.machine.stats["tma_prefetches"] += 1
