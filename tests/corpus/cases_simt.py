"""numba-cuda and Warp: kernels in Python of one thread's work, by compilers of their own (NVVM, NVRTC).

What they exercise: the driver library (`driver/libcuda.py`), shared memory and barriers, atomics, warp shuffles of a
reduction, device functions that are called, fp32 arithmetic by tiles. Results are copied back within the case.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from corpus import Case, Check, exact

NUMBA, WARP = "numba_cuda", "warp"


def sums(name: str, got: np.ndarray, want: np.ndarray, terms: int) -> Check:
    """Sums of ``terms`` fp32 products of standard normal numbers; ``want`` is fp64."""
    u = 2.0**-24
    found = torch.from_numpy(np.ascontiguousarray(got))
    most = float(np.abs(want).max())
    reason = "fp32 sums in another order"
    return Check(name, found, torch.from_numpy(want).float(), terms * u, 0.0, 4 * math.sqrt(terms) * u * most, reason)


def settle() -> None:
    """Free what numba has not freed yet: the next case has a device of its own."""
    from numba import cuda

    cuda.current_context().deallocations.clear()


def numba_matmul(m: int = 20, n: int = 12, k: int = 30) -> list[Check]:
    import numba_kernels as kernels

    a, b = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((m, k), (k, n)))
    c = np.zeros((m, n), np.float32)
    kernels.matmul[(-(-n // 8), -(-m // 8)), (8, 8)](a, b, c)
    settle()
    return [sums("c", c, a.astype(np.float64) @ b, k)]


def numba_histogram(count: int = 500) -> list[Check]:
    import numba_kernels as kernels

    values, out = np.random.default_rng(2).integers(0, 7, count).astype(np.int32), np.zeros(7, np.int32)
    kernels.histogram[-(-count // 128), 128](values, out)
    settle()
    return [exact("out", torch.from_numpy(out), torch.from_numpy(np.bincount(values, minlength=7)))]


def numba_reduce(count: int = 700) -> list[Check]:
    import numba_kernels as kernels

    values = np.random.default_rng(3).integers(-50, 50, count).astype(np.int64)
    got = kernels.total(values)
    settle()
    return [exact("total", torch.tensor([float(got)]), torch.tensor([float(values.sum())]))]


def warp_vectors(count: int = 300) -> list[Check]:
    import warp as wp
    import warp_kernels as kernels

    points = np.random.default_rng(4).standard_normal((count, 3)).astype(np.float32)
    there = wp.array(points, dtype=wp.vec3, device="cuda:0")
    out, energy = wp.zeros_like(there), wp.zeros(1, dtype=float, device="cuda:0")
    angle = 0.7
    turn = wp.quat(0.0, 0.0, math.sin(angle / 2), math.cos(angle / 2))
    wp.launch(kernels.rotate, dim=count, inputs=[there, turn, out], device="cuda:0")
    wp.launch(kernels.potential, dim=40, inputs=[there[:40], energy], device="cuda:0")
    matrix = np.array([[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0], [0, 0, 1]])
    near = points[:40].astype(np.float64)
    distances = np.square(near[:, None] - near[None]).sum()
    return [
        sums("rotated", out.numpy(), points.astype(np.float64) @ matrix.T, 12),
        sums("energy", energy.numpy(), np.array([distances]), 4800),
    ]


def warp_tiles(rows: int = 5, columns: int = 200) -> list[Check]:
    import warp as wp
    import warp_kernels as kernels

    a = np.random.default_rng(5).standard_normal((rows, columns)).astype(np.float32)
    there, out = wp.array(a, dtype=float, device="cuda:0"), wp.zeros(rows, dtype=float, device="cuda:0")
    wp.launch_tiled(kernels.row_sums, dim=rows, inputs=[there, out], block_dim=64, device="cuda:0")
    return [sums("sums", out.numpy(), a.astype(np.float64).sum(1), columns)]


CASES = [
    Case("numba_matmul", NUMBA, numba_matmul),
    Case("numba_matmul_sm90", NUMBA, numba_matmul, arch="sm_90a"),
    Case("numba_histogram", NUMBA, numba_histogram),
    Case("numba_reduce", NUMBA, numba_reduce),
    Case("warp_vectors", WARP, warp_vectors, arch="sm_90a", unstable="bits"),
    Case("warp_tiles", WARP, warp_tiles, arch="sm_90a"),
]
