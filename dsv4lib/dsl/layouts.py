"""CuTe layouts as numpy arrays, taken from the compiler itself and without a GPU.

A figure of a layout is worth nothing if it was typed by hand. Everything here traces a few lines of CuTeDSL for
``sm_100a`` (nothing is launched), asks the compiler's own helpers for the layout they would give a kernel, and
evaluates it. `layout_check.independent` computes the same grid a second time with a library that shares no code with
the compiler, so a drawing can be checked element by element.

Two rules make the evaluation fast and are tested against a full element-by-element evaluation by the compiler:
a layout is additive over its modes, ``L(i, j) = L(i, 0) + L(0, j)``, so the compiler evaluates one row and one column;
and a swizzle is one XOR.

**The swizzle of a shared-memory layout acts on byte addresses.** The compiler prints ``S<3,4,3> o 0 o (8,64):(64,1)``
for a bf16 tile: shape and stride count elements, ``S<3,4,3>`` counts bytes. Calling that object with a coordinate
applies the XOR to the *element* index, which is not what the hardware does for anything but 8-bit data. `smem_operand`
applies it to bytes: 16-byte chunk index ^= row mod 8 in a 128-byte swizzle.

Sources: CuTe layout algebra (shape:stride, composition, swizzle), PTX ISA "Tensor Memory" and "tcgen05.ld" sections.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import cutlass
import numpy as np
from cutlass import cute
from cutlass._mlir.ir import MLIRError
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.utils import blackwell_helpers

from dsv4lib.dsl.layout_text import MAX_ELEMENTS, parse_layout, size_of
from dsv4lib.errors import ArgumentError

ARCH = "sm_100a"
TMEM_LANES, TMEM_COLUMNS = 128, 512
SMEM_BYTES = 232_448  # 227 KiB a CTA may use on SM90 and SM100

DTYPES: dict[str, Any] = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "tf32": cutlass.TFloat32,
    "e4m3": cutlass.Float8E4M3FN,
    "e2m1": cutlass.Float4E2M1FN,
}
SWIZZLES = ("none", "32B", "64B", "128B")
_KIND = {"none": "INTER", "32B": "SW32", "64B": "SW64", "128B": "SW128", "128B/32B": "SW128_32B"}
_RUN_BYTES = {"none": 16, "32B": 32, "64B": 64, "128B": 128, "128B/32B": 128}
TMEM_ATOMS = ("32x32b", "16x64b", "16x128b", "16x256b")
_MAX_REPEAT = {"32x32b": 128, "16x64b": 128, "16x128b": 64, "16x256b": 32}
_ATOM_COLUMNS = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8}


@dataclass(frozen=True)
class LayoutGrid:
    """A layout evaluated at every coordinate of its two-dimensional tile.

    Attributes:
        offsets: int64 [rows, columns], read-only. Element offsets; for TMEM, addresses ``lane << 16 | column``.
        text: the layout's own string, as the compiler prints it.
        element_bits: bits of one element.
        title: what it is, in words.
        shape, stride: the part without swizzle, regrouped as (row modes, column modes); nested tuples, in elements.
        swizzle: (bits, base, shift), or None.
        swizzle_bits: bits of the unit the swizzle counts in (8: byte addresses; ``element_bits``: element offsets).
        shift: constant added before the swizzle (the middle term of a composed layout), in elements.
    """

    offsets: np.ndarray
    text: str
    element_bits: int
    title: str
    shape: Any
    stride: Any
    swizzle: tuple[int, int, int] | None = None
    swizzle_bits: int = 8
    shift: int = 0

    @property
    def byte_addresses(self) -> np.ndarray:
        """Return the byte each element starts in, int64 [rows, columns]. Two 4-bit elements share one."""
        return self.offsets * self.element_bits // 8


@dataclass(frozen=True)
class ThreadValueMap:
    """Map registers of threads to the tile elements they hold.

    After a TMEM load, or before a TMEM store.

    Attributes:
        rows, columns: int64 [threads, values], read-only: element coordinates in the accumulator tile.
        text: the compiler's layout from (thread, value) to the index in the copy's tile.
        tv: (shape, stride) of that layout as nested integer tuples.
        tiler: for rows and for columns, (shape, stride) of the layout from tile index to tile element.
        tile: (rows, columns) of the accumulator.
        title: what it is, in words.
    """

    rows: np.ndarray
    columns: np.ndarray
    text: str
    tv: tuple[Any, Any]
    tiler: tuple[tuple[Any, Any], tuple[Any, Any]]
    tile: tuple[int, int]
    title: str


@dataclass(frozen=True)
class TmaTiles:
    """The boxes a tile loop loads from a [rows, k] row-major tensor.

    Attributes:
        shape: (rows, k) of the tensor in elements.
        box: (rows, k) of one TMA box in elements.
        coords: int64 [row tiles, k tiles, boxes per tile, 2], read-only: first (row, k) of every box.
        element_bits: bits of one element.
        text: the compiler's layout of the partitioned coordinate tensor.
    """

    shape: tuple[int, int]
    box: tuple[int, int]
    coords: np.ndarray
    element_bits: int
    text: str


# ---- argument checks -------------------------------------------------------------------------------------------------


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ArgumentError unless ``value`` is one of ``allowed``, type included. ``True`` is not 1."""
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise ArgumentError(name, value, "one of " + ", ".join(map(repr, allowed)))


def check_integer(name: str, value: Any, low: int, high: int, multiple: int = 1) -> None:
    """Refuse a ``value`` that is no integer in [low, high].

    ArgumentError also unless it is a multiple of ``multiple``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high or value % multiple:
        step = f", a multiple of {multiple}" if multiple > 1 else ""
        raise ArgumentError(name, value, f"an integer from {low} to {high}{step}")


# ---- evaluation ------------------------------------------------------------------------------------------------------


def _trace(build: Callable[[], Any]) -> Any:
    """Run ``build`` inside a CuTeDSL trace for sm_100a and hand back what it returns (plain Python values only)."""
    box: list[Any] = []

    @cute.jit
    def traced():
        box.append(build())

    cute.compile(traced, options=f"--gpu-arch {ARCH}")
    return box[0]


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


def apply_swizzle(offsets: np.ndarray, bits: int, base: int, shift: int) -> np.ndarray:
    """Apply ``S<bits, base, shift>`` to an integer array. XOR bits [base+shift, ...) into bits [base, ...).

    Args:
        offsets: non-negative int64, any shape.
        bits, base, shift: as CuTe prints them; a negative shift moves the lower field up.
    """
    offsets = np.asarray(offsets, dtype=np.int64)
    mask = ((1 << bits) - 1) << base
    if shift >= 0:
        return offsets ^ ((offsets >> shift) & mask)
    return offsets ^ ((offsets & mask) << -shift)


def _swizzled(
    linear: np.ndarray, swizzle: tuple[int, int, int] | None, unit_bits: int, element_bits: int
) -> np.ndarray:
    """Element offsets after a swizzle over units of ``unit_bits``; exact for elements narrower than a unit."""
    if swizzle is None:
        return linear
    bits = linear * element_bits
    units, rest = np.divmod(bits, unit_bits)
    return (apply_swizzle(units, *swizzle) * unit_bits + rest) // element_bits


def _swizzle_of(layout: Any) -> tuple[int, int, int] | None:
    """(bits, base, shift) of a composed layout inside a trace, or None for a plain layout or an identity swizzle."""
    if not isinstance(layout, cute.ComposedLayout):
        return None
    found = re.fullmatch(r"S<(\d+),(\d+),(-?\d+)>", str(layout.inner))
    if found is None:
        raise ArgumentError("layout", str(layout), "a layout whose outermost part is a swizzle S<bits,base,shift>")
    bits, base, shift = map(int, found.groups())
    return (bits, base, shift) if bits else None


def _ints(value: Any) -> Any:
    """Nested CuTe integer tuples as plain Python ones."""
    return tuple(map(_ints, value)) if isinstance(value, tuple) else int(value)


def _by_axis(modes: Any) -> Any:
    """((mma rows, mma columns), rest rows, rest columns) regrouped as ((mma rows, rest), (mma columns, rest))."""
    (row, column), row_rest, column_rest = _ints(modes)
    return (row, row_rest), (column, column_rest)


def _outer(layout: Any) -> Any:
    return layout.outer if isinstance(layout, cute.ComposedLayout) else layout


def _additive(layout: Any, rows: list[Any], columns: list[Any]) -> np.ndarray:
    """Return the unswizzled ``layout`` at every (row, column): one column and one row from the compiler, summed.

    Args:
        layout: a plain CuTe layout inside a trace.
        rows, columns: coordinates of ``layout`` with the other direction at 0; entry 0 is the origin.
    """
    down = np.array([int(layout(c)) for c in rows], dtype=np.int64)
    across = np.array([int(layout(c)) for c in columns], dtype=np.int64)
    return down[:, None] + across[None, :]


# ---- shared memory ---------------------------------------------------------------------------------------------------


def _tiled_mma(dtype: Any, m: int, n: int, major: Any, cta_group: int = 1) -> Any:
    """Return a UMMA of shape (m, n) with both operands in shared memory, fp32 accumulator."""
    group = tcgen05.CtaGroup.TWO if cta_group == 2 else tcgen05.CtaGroup.ONE
    if dtype is cutlass.Float4E2M1FN:
        return blackwell_helpers.make_blockscaled_trivial_tiled_mma(
            dtype, dtype, major, major, cutlass.Float8E8M0FNU, 32, group, (m, n)
        )
    return blackwell_helpers.make_trivial_tiled_mma(dtype, dtype, major, major, cutlass.Float32, group, (m, n))


def _instruction_m(rows: int) -> int:
    """M of the MMA that a tile of ``rows`` rows is cut into."""
    return 128 if rows % 128 == 0 else 64


def allowed_swizzles(rows: int, k: int, dtype: str = "bf16", major: str = "K") -> tuple[str, ...]:
    """Return the swizzles a [rows, k] operand tile can have. The contiguous direction must hold whole swizzle rows."""
    check_choice("dtype", dtype, tuple(DTYPES))
    check_choice("major", major, ("K", "MN"))
    run = (k if major == "K" else rows) * DTYPES[dtype].width // 8
    return tuple(s for s in SWIZZLES if run % _RUN_BYTES[s] == 0)


@lru_cache(maxsize=256, typed=True)
def smem_operand(rows: int, k: int, dtype: str = "bf16", major: str = "K", swizzle: str | None = None) -> LayoutGrid:
    """Evaluate one stage of a UMMA operand A in shared memory. It gives the element offset of (row, k).

    Args:
        rows: a multiple of 64 up to 256 (the M extent of the tile in one CTA); ``e2m1`` needs 128 or 256.
        k: K extent in elements, a multiple of the instruction's K (32 bytes).
        dtype: a key of `DTYPES`.
        major: "K" (row-major, K contiguous) or "MN" (column-major); ``e2m1`` is K-major only.
        swizzle: one of `SWIZZLES`, "128B/32B" (32-bit MN-major data), or None for what the compiler's heuristic picks.
    """
    check_choice("dtype", dtype, tuple(DTYPES))
    check_choice("major", major, ("K",) if dtype == "e2m1" else ("K", "MN"))
    check_integer("rows", rows, 64, 256, 128 if dtype == "e2m1" else 64)
    kind = DTYPES[dtype]
    check_integer("k", k, 256 // kind.width, MAX_ELEMENTS // rows, 256 // kind.width)
    if rows * k * kind.width // 8 > SMEM_BYTES:
        raise ArgumentError("k", k, f"a tile of at most {SMEM_BYTES} bytes, not {rows * k * kind.width // 8}")
    if swizzle is not None:
        wide = ("128B/32B",) if major == "MN" and dtype == "tf32" else ()
        if wide and rows * 4 % 128 == 0:
            check_choice("swizzle", swizzle, (*allowed_swizzles(rows, k, dtype, major), *wide))
        else:
            check_choice("swizzle", swizzle, allowed_swizzles(rows, k, dtype, major))

    def build() -> tuple[Any, ...]:
        mode = OperandMajorMode.K if major == "K" else OperandMajorMode.MN
        m = _instruction_m(rows)
        mma = _tiled_mma(kind, m, 64, mode)
        if swizzle is None:
            staged = blackwell_helpers.make_smem_layout_a(mma, (rows, 64, k), kind, 1)
        else:
            atom = tcgen05.make_smem_layout_atom(getattr(tcgen05.SmemLayoutAtomKind, f"{major}_{_KIND[swizzle]}"), kind)
            shape = cute.append(mma.partition_shape_A((rows, k)), 1)
            staged = tcgen05.tile_to_mma_shape(atom, shape, order=(1, 2, 3) if major == "K" else (2, 1, 3))
        layout = cute.slice_(staged, (None, None, None, 0))
        outer, (mma_m, mma_k) = _outer(layout), (m, 256 // kind.width)
        linear = _additive(
            outer,
            [((i % mma_m, 0), i // mma_m, 0) for i in range(rows)],
            [((0, j % mma_k), 0, j // mma_k) for j in range(k)],
        )
        return linear, cute.pretty_str(layout), _by_axis(outer.shape), _by_axis(outer.stride), _swizzle_of(layout)

    linear, text, shape, stride, sw = _trace(build)
    offsets = _frozen(_swizzled(linear, sw, 8, kind.width))
    title = f"A operand, {rows} x {k} {dtype}, {major}-major, {_swizzle_name(sw)}"
    return LayoutGrid(offsets, text, kind.width, title, shape, stride, sw)


def _swizzle_name(sw: tuple[int, int, int] | None) -> str:
    names = {
        None: "no",
        (1, 4, 3): "32-byte",
        (2, 4, 3): "64-byte",
        (3, 4, 3): "128-byte",
        (2, 5, 2): "128-byte (32-byte atom)",
    }
    return f"{names[sw]} swizzle"


# ---- tensor memory ---------------------------------------------------------------------------------------------------


def _accumulator(m: int, n: int, cta_group: int, instruction_n: int) -> Any:
    """Inside a trace: the fp32 accumulator fragment of one CTA."""
    mma = _tiled_mma(cutlass.BFloat16, m, instruction_n, OperandMajorMode.K, cta_group)
    return mma.make_fragment_C(mma.partition_shape_C((m, n)))


def _check_accumulator(m: int, n: int, cta_group: int, instruction_n: int | None) -> int:
    check_choice("cta_group", cta_group, (1, 2))
    check_choice("m", m, (64, 128) if cta_group == 1 else (128, 256))
    step = {(64, 1): 8, (128, 1): 16, (128, 2): 32, (256, 2): 32}[(m, cta_group)]
    check_integer("n", n, step, TMEM_COLUMNS, step)
    # M 64 in one CTA fills lanes 0-15 and 16-31 of a quarter in turn: one MMA, or an even number of them
    fits = [
        d for d in range(step, 257, step) if n % d == 0 and (n == d or (m, cta_group) != (64, 1) or n // d % 2 == 0)
    ]
    if not fits:
        raise ArgumentError("n", n, "at most 256, or an even number of equal MMAs (M 64 in one CTA)")
    if instruction_n is None:
        return fits[-1]
    check_choice("instruction_n", instruction_n, tuple(fits))
    return instruction_n


@lru_cache(maxsize=256, typed=True)
def tmem_accumulator(m: int, n: int, cta_group: int = 1, instruction_n: int | None = None) -> LayoutGrid:
    """Compute the TMEM address of every element of an fp32 accumulator.

    ``lane << 16 | column``, as one CTA sees it.

    Args:
        m: rows of the MMA: 64 or 128; for a CTA pair 128 or 256 (the grid then has the m / 2 rows of one CTA).
        n: columns of the tile, up to 512.
        cta_group: 1, or 2 for a CTA pair.
        instruction_n: N of one MMA; the tile is a row of such MMAs (M 64 in one CTA: one, or an even number).
            Default: the largest that fits.
    """
    instruction_n = _check_accumulator(m, n, cta_group, instruction_n)

    def build() -> tuple[Any, ...]:
        layout = _accumulator(m, n, cta_group, instruction_n).layout
        rows = m // cta_group
        linear = _additive(
            layout,
            [((i, 0), 0, 0) for i in range(rows)],
            [((0, j % instruction_n), 0, j // instruction_n) for j in range(n)],
        )
        return linear, cute.pretty_str(layout), _by_axis(layout.shape), _by_axis(layout.stride)

    linear, text, shape, stride = _trace(build)
    pair = "CTA pair, one CTA's half" if cta_group == 2 else "one CTA"
    title = f"TMEM accumulator, MMA M {m}, N {n} (instruction N {instruction_n}), {pair}"
    return LayoutGrid(_frozen(linear), text, 32, title, shape, stride)


@lru_cache(maxsize=256, typed=True)
def t2r_map(
    m: int, n: int, atom: str = "32x32b", repeat: int | None = None, cta_group: int = 1, store: bool = False
) -> ThreadValueMap:
    """Return element coordinates of every register of a 4-warp TMEM load. ``store=True``: of a TMEM store.

    The compiler partitions a coordinate tensor with the very copy a kernel would use (`tcgen05.make_tmem_copy`).

    Args:
        m, n, cta_group: the accumulator, as in `tmem_accumulator`, one MMA wide (n up to 256).
        atom: one of `TMEM_ATOMS`: lanes x bits of ``tcgen05.ld``. 32x32b reads all 32 lanes of a warp's quarter, so it
            needs an accumulator that fills them (m per CTA of 128, or a pair with m 128); the others read 16 lanes.
        repeat: how often the atom repeats along columns, a power of two; default the most that fits.
        store: the map of ``tcgen05.st`` instead of ``tcgen05.ld``.
    """
    if _check_accumulator(m, n, cta_group, None) != n:
        raise ArgumentError("n", n, "at most 256: one MMA")
    full = not (m == 64 and cta_group == 1)
    check_choice("atom", atom, TMEM_ATOMS if full else TMEM_ATOMS[1:])
    covered = n // 2 if (m, cta_group) == (128, 2) else n  # TMEM columns
    repeats = tuple(
        1 << p for p in range(8) if 1 << p <= _MAX_REPEAT[atom] and covered % (_ATOM_COLUMNS[atom] << p) == 0
    )
    if not repeats:
        raise ArgumentError("n", n, f"a multiple of {_ATOM_COLUMNS[atom]} TMEM columns for atom {atom}")
    if repeat is None:
        repeat = repeats[-1]
    check_choice("repeat", repeat, repeats)

    def build() -> tuple[Any, ...]:
        op = getattr(tcgen05, f"{'St' if store else 'Ld'}{atom}Op")(getattr(tcgen05.Repetition, f"x{repeat}"))
        tmem = _accumulator(m, n, cta_group, n)[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(op, cutlass.Float32), tmem)
        identity = cute.make_identity_tensor((m // cta_group, n))

        def registers(thread: int) -> Any:
            part = copy.get_slice(thread)
            return part.partition_S(identity) if store else part.partition_D(identity)

        first = registers(0)
        values = [_ints(first[v]) for v in range(cute.size(first))]
        threads = [_ints(registers(t)[0]) for t in range(128)]
        tv = copy.layout_src_tv_tiled if store else copy.layout_dst_tv_tiled
        text = f"{cute.pretty_str(tv)} in tile {cute.pretty_str(copy.tiler_mn)}"
        modes = [(_ints(t.shape), _ints(t.stride)) for t in (tv, *copy.tiler_mn)]
        return np.array(threads, dtype=np.int64), np.array(values, dtype=np.int64), text, modes

    threads, values, text, (tv, *tiler) = _trace(build)
    coords = threads[:, None, :] + values[None, :, :]  # additive: thread 0, value 0 is element (0, 0)
    verb = "store" if store else "load"
    title = f"TMEM {verb} {atom}.x{repeat} of a {m // cta_group} x {n} accumulator (MMA M {m}, cta_group {cta_group})"
    rows, columns = (_frozen(coords[..., axis].copy()) for axis in (0, 1))
    return ThreadValueMap(rows, columns, text, tv, tuple(tiler), (m // cta_group, n), title)


# ---- TMA -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64, typed=True)
def tma_tiles(rows: int, k: int, tile_m: int, tile_k: int, dtype: str = "bf16") -> TmaTiles:
    """Return the boxes that a loop over (row tile, k tile) loads.

    From a row-major [rows, k] tensor, ragged edges included.

    Args:
        rows, k: extents of the tensor; a row must be a multiple of 16 bytes (a TMA rule).
        tile_m, tile_k, dtype: the operand tile, as in `smem_operand` (K-major, default swizzle).
    """
    operand = smem_operand(tile_m, tile_k, dtype)  # checks tile and dtype
    kind = DTYPES[dtype]
    check_integer("rows", rows, 1, 1 << 20)
    check_integer("k", k, 128 // kind.width, 1 << 20, 128 // kind.width)
    tiles = (-(-rows // tile_m), -(-k // tile_k))
    if tiles[0] * tiles[1] > 4096:
        raise ArgumentError("rows, k", (rows, k), "at most 4096 tiles")

    def build() -> tuple[Any, ...]:
        pointer = cute.make_ptr(kind, 4096, cute.AddressSpace.gmem, assumed_align=16)
        tensor = cute.make_tensor(pointer, cute.make_layout((rows, k, 1), stride=(k, 1, rows * k)))
        mma = _tiled_mma(kind, _instruction_m(tile_m), 64, OperandMajorMode.K)
        staged = blackwell_helpers.make_smem_layout_a(mma, (tile_m, 64, tile_k), kind, 1)
        stage = cute.slice_(staged, (None, None, None, 0))
        load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
        atom, coords = cute.nvgpu.make_tiled_tma_atom_A(load, tensor, stage, (tile_m, 64, tile_k), mma, (1, 1, 1, 1))
        partition = mma.get_slice(0).partition_A(cute.local_tile(coords, (tile_m, tile_k), (None, None, None)))
        smem = cute.make_ptr(kind, 0, cute.AddressSpace.smem, assumed_align=1024)
        _, boxes = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(cute.make_tensor(smem, staged.outer), 0, 3),
            cute.group_modes(partition, 0, 3),
        )
        (box_k, box_m), count = boxes.layout.shape[0]
        starts = [
            [[_ints(boxes[((0, b), i, j, 0)])[:2] for b in range(cute.size(count))] for j in range(tiles[1])]
            for i in range(tiles[0])
        ]
        return np.array(starts, dtype=np.int64), (cute.size(box_m), cute.size(box_k)), cute.pretty_str(boxes.layout)

    starts, box, text = _trace(build)
    return TmaTiles((rows, k), box, _frozen(starts[..., ::-1].copy()), operand.element_bits, text)


# ---- free layouts ----------------------------------------------------------------------------------------------------


def _two_modes(value: Any) -> Any:
    """Modes grouped as (rows, columns): the first mode, and the rest; a single mode is one row."""
    if not isinstance(value, tuple):
        return 1, value
    if len(value) == 1:
        return 1, value[0]
    return value if len(value) == 2 else (value[0], value[1:])


def _mode_offsets(shape: Any, stride: Any) -> np.ndarray:
    """Offsets of one mode in CuTe's order, the leftmost sub-mode fastest."""
    if not isinstance(shape, tuple):
        return np.arange(shape, dtype=np.int64) * stride
    offsets = np.zeros(1, dtype=np.int64)
    for sub_shape, sub_stride in zip(shape, stride, strict=True):
        offsets = (_mode_offsets(sub_shape, sub_stride)[:, None] + offsets[None, :]).ravel()
    return offsets


def _measured(layout: Any) -> tuple[Any, ...]:
    """Inside a trace: (linear offsets, text, shape, stride, swizzle) of a plain or swizzled layout."""
    outer = _outer(layout)
    modes = _ints(outer.shape)
    shape, stride = _two_modes(modes), _two_modes(_ints(outer.stride))
    rows, columns = map(size_of, shape)
    if not isinstance(modes, tuple) or len(modes) == 1:
        linear, stride = _additive(outer, [0], list(range(columns))), (0, stride[1])
    else:
        linear = _additive(outer, list(range(rows)), [rows * j for j in range(columns)])
    return linear, cute.pretty_str(layout), shape, stride, _swizzle_of(layout)


def _grid(measured: tuple[Any, ...], element_bits: int, swizzle_bits: int, title: str, shift: int) -> LayoutGrid:
    linear, text, shape, stride, sw = measured
    offsets = _frozen(_swizzled(linear + shift, sw, swizzle_bits, element_bits))
    return LayoutGrid(offsets, text, element_bits, title, shape, stride, sw, swizzle_bits, shift)


def _cute(parsed: tuple[Any, Any, tuple[int, int, int] | None, int]) -> Any:
    """Inside a trace: the CuTe layout of a parsed text."""
    shape, stride, swizzle, shift = parsed
    layout = cute.make_layout(shape, stride=stride)
    return (
        layout
        if swizzle is None and not shift
        else cute.make_composed_layout(cute.make_swizzle(*(swizzle or (0, 4, 3))), shift, layout)
    )


def evaluate(text: str, element_bits: int = 8, byte_swizzle: bool = False) -> LayoutGrid:
    """Evaluate a layout typed by a reader. The first mode goes down, the others across; a single mode is one row.

    Args:
        text: ``shape:stride``, e.g. "(4,(2,2)):(2,(1,8))", or "S<bits,base,shift> o offset o shape:stride". Strict:
            non-negative integers only, stride nested as the shape is, at most `MAX_ELEMENTS` elements.
        element_bits: bits of one element, for byte addresses (4, 8, 16, 32 or 64).
        byte_swizzle: the swizzle acts on byte addresses, as in shared memory; default is the pure algebra, where it
            acts on the offset itself. The same for 8-bit elements.
    """
    return evaluate_all((text,), element_bits, byte_swizzle)[0]


def evaluate_all(texts: Sequence[str], element_bits: int = 8, byte_swizzle: bool = False) -> list[LayoutGrid]:
    """Evaluate many layouts in one trace, as `evaluate` does one.

    Several times faster than one trace each.
    """
    parsed = tuple(parse_layout("text", text) for text in texts)
    check_choice("element_bits", element_bits, (4, 8, 16, 32, 64))
    return list(_free(parsed, element_bits, 8 if byte_swizzle else element_bits))


@lru_cache(maxsize=512)
def _free(parsed: tuple[Any, ...], element_bits: int, swizzle_bits: int) -> tuple[LayoutGrid, ...]:
    measured = _trace(lambda: [_measured(_cute(p)) for p in parsed])
    return tuple(_grid(m, element_bits, swizzle_bits, "layout", p[3]) for m, p in zip(measured, parsed, strict=True))


@lru_cache(maxsize=64, typed=True)
def swizzle(bits: int, base: int, shift: int) -> LayoutGrid:
    """Evaluate a period of ``S<bits, base, shift>``. It has 2^bits rows of 2^(base + shift) consecutive addresses."""
    check_integer("bits", bits, 0, 5)
    check_integer("base", base, 0, 8)
    check_integer("shift", shift, bits, 8)
    rows, pitch = 1 << bits, 1 << (base + shift)
    return evaluate(f"S<{bits},{base},{shift}> o 0 o ({rows},{pitch}):({pitch},1)")


def _plain(name: str, text: str) -> Any:
    parsed = parse_layout(name, text)
    if parsed[2] is not None or parsed[3]:
        raise ArgumentError(name, text, "a layout without swizzle")
    return parsed


def compose(a: str, b: str, element_bits: int = 8) -> LayoutGrid:
    """Compose ``a o b``: ``(a o b)(i) = a(b(i))``, as the compiler simplifies it.

    Raises:
        ArgumentError: a text that is not a plain layout, or two layouts whose composition is not a layout.
    """
    left, right = _plain("a", a), _plain("b", b)
    check_choice("element_bits", element_bits, (4, 8, 16, 32, 64))
    try:
        measured = _trace(lambda: _measured(cute.composition(_cute(left), _cute(right))))
    except MLIRError as error:
        raise ArgumentError("b", b, f"a layout whose offsets divide evenly through {a}") from error
    return _grid(measured, element_bits, element_bits, f"{a}  o  {b}", 0)


def without_swizzle(grid: LayoutGrid) -> LayoutGrid:
    """Return the same layout with its swizzle taken off."""
    linear = grid.shift + _mode_offsets(grid.shape[0], grid.stride[0])[:, None]
    linear = linear + _mode_offsets(grid.shape[1], grid.stride[1])[None, :]
    text = grid.text.rsplit(" o ", 1)[-1]
    title = f"{grid.title}, taken off"
    return replace(grid, offsets=_frozen(linear), text=text, title=title, swizzle=None)
