"""Gluon, helion and CuPy: kernels of ours in their languages, compiled and launched by their own code.

What they exercise: barriers and rings of TMA loads written by hand, specialized warps, MMAs of a pair of CTAs,
clusterlaunchcontrol; kernels that helion writes in Triton; NVRTC's cubins, launched through the runtime inside CuPy.
"""

from __future__ import annotations

import torch
from corpus import Case, Check, exact, integers

TRITON, HELION, CUPY = "triton", "helion", "cupy"
SAME = frozenset({"race_shared_same_value"})  # warps that Triton lets store the same values


def matmul(name: str, tile: tuple[int, int, int], m: int, n: int, k: int, *rest: int, **options: int) -> list[Check]:
    """A matmul c = a b^T of `gluon_kernels` on a ragged shape."""
    import gluon_kernels as kernels

    tile_m, tile_n, tile_k = tile
    halves = {"cga_layout": [(1, 0)]} if options.get("num_ctas") == 2 else {}
    a, b, c = integers(m, k).cuda(), integers(n, k).cuda(), torch.empty(m, n, device="cuda")
    boxes = ((a, [tile_m, tile_k]), (b, [tile_n, tile_k]), (c, [tile_m, tile_n]))
    maps = [kernels.describe(tensor, box, **halves) for tensor, box in boxes]
    getattr(kernels, name)[-(-m // tile_m), -(-n // tile_n)](*maps, *rest, **options)
    return [exact("c", c, a.float() @ b.float().t())]


def clc_rows(rows: int = 9, columns: int = 100) -> list[Check]:
    """Rows that programs take over from each other; integers, so that every step is exact."""
    import gluon_kernels as kernels

    x, y = integers(rows, columns, dtype=torch.float32), torch.empty(rows, columns)
    kernels.clc_rows[(rows,)](x, y, columns, BLOCK=128)
    return [exact("y", y, x + torch.arange(rows)[:, None])]


def helion_softmax(rows: int = 37, columns: int = 100) -> list[Check]:
    """Softmax of rows, with a configuration that helion chooses without measuring."""
    import helion_kernels as kernels

    x = torch.randn(rows, columns)
    return [Check("y", kernels.softmax(x), torch.softmax(x, 1), 1e-6, 2e-6, 0.0, "fp32 with approximated exp")]


def helion_matmul(m: int = 70, n: int = 50, k: int = 90) -> list[Check]:
    """A matmul in tiles along m, n and k."""
    import helion_kernels as kernels

    x, y = integers(m, k), integers(k, n)
    return [exact("out", kernels.matmul(x, y), x.float() @ y.float())]


def cupy_sums(rows: int = 11, columns: int = 70) -> list[Check]:
    """CuPy's own kernels: an expression of two arrays, sums of rows and of columns."""
    import cupy

    x = integers(rows, columns, dtype=torch.float32)
    there = cupy.asarray(x.numpy())
    found = [cupy.asnumpy((2 * there + 1).sum(axis=axis)) for axis in (0, 1)]
    return [exact(f"axis {axis}", torch.from_numpy(found[axis]), (2 * x + 1).sum(axis)) for axis in (0, 1)]


def cupy_raw(count: int = 1000, bins: int = 7) -> list[Check]:
    """A histogram by atomics in shared and global memory."""
    import cupy
    import numpy as np

    source = r"""
    extern "C" __global__ void histogram(const int* x, int* out, int n, int bins) {
      extern __shared__ int mine[];
      for (int i = threadIdx.x; i < bins; i += blockDim.x) mine[i] = 0;
      __syncthreads();
      for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(mine + x[i], 1);
      __syncthreads();
      for (int i = threadIdx.x; i < bins; i += blockDim.x) atomicAdd(out + i, mine[i]);
    }"""
    x, out = torch.randint(0, bins, (count,), dtype=torch.int32), cupy.zeros(bins, np.int32)
    kernel = cupy.RawKernel(source, "histogram")
    kernel((3,), (64,), (cupy.asarray(x.numpy()), out, np.int32(count), np.int32(bins)), shared_mem=4 * bins)
    return [exact("out", torch.from_numpy(cupy.asnumpy(out)), torch.bincount(x, minlength=bins))]


CASES = [
    Case("gluon_matmul_sm90", TRITON, lambda: matmul("matmul_sm90", (64, 64, 64), 200, 136, 328, 3), arch="sm_90a"),
    Case("gluon_matmul", TRITON, lambda: matmul("matmul_sm100", (128, 64, 64), 200, 136, 328, 3), lints=SAME),
    Case("gluon_matmul_2cta", TRITON, lambda: matmul("matmul_two_ctas", (256, 128, 64), 300, 136, 200, num_ctas=2)),
    Case("gluon_clc", TRITON, clc_rows),
    Case("helion_softmax", HELION, helion_softmax),
    Case("helion_matmul", HELION, helion_matmul, lints=SAME),
    Case("helion_matmul_sm90", HELION, helion_matmul, arch="sm_90a", lints=SAME),
    Case("cupy_sums", CUPY, cupy_sums),
    Case("cupy_raw_sm90", CUPY, cupy_raw, arch="sm_90a"),
]
