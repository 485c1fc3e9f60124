"""Kernels in numba-cuda, for cases_simt."""

import _numba_cuda_redirector  # noqa: F401  `numba.cuda` is numba-cuda's; a .pth file does it where pip put one
from numba import cuda, float32

TILE = 8


@cuda.jit
def matmul(a, b, c):
    """c = a b by tiles in shared memory, ragged at the edges."""
    left = cuda.shared.array((TILE, TILE), dtype=float32)
    right = cuda.shared.array((TILE, TILE), dtype=float32)
    column, row = cuda.grid(2)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for start in range(0, a.shape[1], TILE):
        left[y, x] = a[row, start + x] if row < a.shape[0] and start + x < a.shape[1] else float32(0)
        right[y, x] = b[start + y, column] if start + y < b.shape[0] and column < b.shape[1] else float32(0)
        cuda.syncthreads()
        for i in range(TILE):
            total += left[y, i] * right[i, x]
        cuda.syncthreads()
    if row < c.shape[0] and column < c.shape[1]:
        c[row, column] = total


@cuda.jit
def histogram(values, out):
    """Count values by atomics."""
    i = cuda.grid(1)
    if i < values.size:
        cuda.atomic.add(out, values[i], 1)


@cuda.reduce
def total(a, b):
    """Sum of an array, by numba's own reduction."""
    return a + b
