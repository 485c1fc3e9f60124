"""Give a second opinion on every layout. The same numbers come from a library that shares no code with the compiler.

Source: tensor-layouts (PyPI), a pure Python implementation of CuTe's layout algebra with a bank-conflict analysis.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import tensor_layouts as tl
from tensor_layouts.analysis import bank_conflicts as _analysis

from dsv4lib.dsl.layouts import LayoutGrid, ThreadValueMap, check_choice, check_integer
from dsv4lib.errors import ArgumentError


def independent(grid: LayoutGrid, step: int = 1) -> np.ndarray:
    """Compute ``grid.offsets[::step, ::step]`` again by tensor-layouts.

    One element at a time.

    Works in bits, so that a swizzle over bytes needs no case distinction by element width.

    Args:
        grid: any layout of `layouts`.
        step: compute only every step-th row and column.
    """
    unit = grid.element_bits
    layout: Any = tl.Layout(grid.shape, _scaled(grid.stride, unit))
    if grid.swizzle is not None or grid.shift:
        bits, base, shift = grid.swizzle or (0, 0, 0)
        scale = grid.swizzle_bits.bit_length() - 1  # swizzle_bits is a power of two
        layout = tl.ComposedLayout(tl.Swizzle(bits, base + scale, shift), layout, offset=grid.shift * unit)
    rows, columns = grid.offsets.shape
    values = [[layout(i, j) // unit for j in range(0, columns, step)] for i in range(0, rows, step)]
    return np.array(values, dtype=np.int64)


def _scaled(stride: Any, factor: int) -> Any:
    return tuple(_scaled(s, factor) for s in stride) if isinstance(stride, tuple) else stride * factor


def mismatches(drawn: np.ndarray, grid: LayoutGrid) -> int:
    """Count elements of ``drawn`` that differ from `independent`.

    With the wrong shape, all of the larger rectangle.
    """
    expected = independent(grid)
    if drawn.shape != expected.shape:
        return int(np.prod(np.maximum(drawn.shape, expected.shape)))
    return int((drawn != expected).sum())


def mismatches_tv(tv: ThreadValueMap) -> int:
    """Registers whose element differs from `independent_tv`."""
    rows, columns = independent_tv(tv)
    return int(((rows != tv.rows) | (columns != tv.columns)).sum())


def random_texts(seed: int, count: int) -> list[str]:
    """Make layouts as a reader might type them. Nested shapes, any strides, half of them swizzled.

    Args:
        seed: of numpy's default generator.
        count: how many.
    """
    rng = np.random.default_rng(seed)

    def mode(depth: int) -> tuple[str, str]:
        if depth == 0 or rng.random() < 0.5:
            return str(rng.integers(1, 7)), str(rng.integers(0, 40))
        parts = [mode(depth - 1) for _ in range(rng.integers(1, 4))]
        return f"({','.join(p[0] for p in parts)})", f"({','.join(p[1] for p in parts)})"

    texts: list[str] = []
    while len(texts) < count:
        modes = [mode(2) for _ in range(rng.integers(1, 4))]
        text = f"({','.join(m[0] for m in modes)}):({','.join(m[1] for m in modes)})"
        if math.prod(int(n) for n in re.findall(r"\d+", text.split(":")[0])) > 1024:
            continue
        bits = int(rng.integers(0, 4))
        if rng.random() < 0.5:
            text = f"S<{bits},{rng.integers(0, 5)},{rng.integers(max(bits, 1), 5)}> o {rng.integers(0, 64)} o {text}"
        texts.append(text)
    return texts


def independent_tv(tv: ThreadValueMap) -> tuple[np.ndarray, np.ndarray]:
    """Compute ``(tv.rows, tv.columns)`` again by tensor-layouts.

    From the copy's thread-value layout and tiler.
    """
    layout = tl.Layout(*tv.tv)
    tilers = [tl.Layout(*t) for t in tv.tiler]
    rests = [tl.complement(t, extent) for t, extent in zip(tilers, tv.tile, strict=True)]
    tile_rows, tile_values = tl.size(tilers[0]), tl.size(tl.mode(layout, 1))
    rest_rows = tl.size(rests[0])
    out = np.empty((2, *tv.rows.shape), dtype=np.int64)
    for v in range(tv.rows.shape[1]):
        repeat, value = divmod(v, tile_values)
        row_base, column_base = rests[0](repeat % rest_rows), rests[1](repeat // rest_rows)
        for t in range(tv.rows.shape[0]):
            index = layout(t, value)
            out[0, t, v] = tilers[0](index % tile_rows) + row_base
            out[1, t, v] = tilers[1](index // tile_rows) + column_base
    return out[0], out[1]


def bank_conflicts(grid: LayoutGrid, lanes: int = 8, chunk_bytes: int = 16) -> int:
    """Count the passes the banks need for one chunk of each of ``lanes`` threads.

    They read from consecutive lines of the tile.

    A line is a row of a K-major tile and a column of an MN-major one: the direction in which a swizzle must help.
    Counted by tensor-layouts' own analysis (32 banks of 4 bytes; equal words are one broadcast).

    Args:
        grid: a shared-memory layout; its lines start at whole bytes.
        lanes: threads served together. 8 lanes x 16 bytes is one phase of a 128-bit load or of ``ldmatrix``.
        chunk_bytes: consecutive bytes each thread reads.
    """
    check_integer("lanes", lanes, 1, 32)
    check_choice("chunk_bytes", chunk_bytes, (4, 8, 16))
    across = 0 if _is_row_major(grid) else 1
    if lanes > grid.offsets.shape[across]:
        raise ArgumentError("lanes", lanes, f"at most the {grid.offsets.shape[across]} lines of the tile")
    lines = tl.compose(tl.Layout(grid.shape[across], grid.stride[across]), tl.Layout(lanes, 1))
    lines = tl.Layout(lines.shape, _in_bytes(lines.stride, grid.element_bits))
    access: Any = tl.Layout((lines.shape, chunk_bytes), (lines.stride, 1))
    if grid.swizzle is not None or grid.shift:
        bits, base, shift = grid.swizzle or (0, 0, 0)
        base += grid.swizzle_bits.bit_length() - 4  # from its own unit to bytes
        access = tl.ComposedLayout(
            tl.Swizzle(bits, base, shift), access, offset=_in_bytes(grid.shift, grid.element_bits)
        )
    return int(_analysis(access, element_bytes=1)["max_ways"])


def _in_bytes(stride: Any, element_bits: int) -> Any:
    if isinstance(stride, tuple):
        return tuple(_in_bytes(s, element_bits) for s in stride)
    if stride * element_bits % 8:
        raise ArgumentError("grid", stride, "a layout whose lines start at whole bytes")
    return stride * element_bits // 8


def _is_row_major(grid: LayoutGrid) -> bool:
    """True when neighbours along a row are neighbours in memory."""
    return grid.offsets.shape[1] > 1 and abs(int(grid.offsets[0, 1] - grid.offsets[0, 0])) == 1


def chunk_accesses(grid: LayoutGrid, lanes: int = 8, chunk_bytes: int = 16, chunk: int = 0) -> np.ndarray:
    """Byte address of every chunk in the access that `bank_conflicts` counts.

    Args:
        grid, lanes, chunk_bytes: as in `bank_conflicts`.
        chunk: which chunk of the line all threads read.

    Returns:
        int64 [lanes]: first byte of each thread's chunk.
    """
    addresses = grid.byte_addresses if _is_row_major(grid) else grid.byte_addresses.T
    step = chunk_bytes * 8 // grid.element_bits
    check_integer("lanes", lanes, 1, addresses.shape[0])
    check_integer("chunk", chunk, 0, addresses.shape[1] // step - 1)
    return addresses[:lanes, chunk * step]
