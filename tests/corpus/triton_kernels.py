"""Kernels in Triton, for cases_triton: what its compiler makes of them is others' code, too."""

import triton
import triton.language as tl


@triton.jit
def softmax(x, y, columns, BLOCK: tl.constexpr):
    """y = softmax(x) of one row a program."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + i, mask=i < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * columns + i, e / tl.sum(e, 0), mask=i < columns)


@triton.jit
def matmul(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c (m, n) = a (m, k) b (k, n), row-major, ragged at the edges."""
    rows, columns = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        inner = start + tl.arange(0, K)
        left = tl.load(a + rows[:, None] * k + inner, mask=(rows[:, None] < m) & (inner[None] < k), other=0.0)
        right = tl.load(b + inner[:, None] * n + columns, mask=(inner[:, None] < k) & (columns[None] < n), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * n + columns, total, mask=(rows[:, None] < m) & (columns[None] < n))


@triton.jit
def matmul_tma(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """The same by tensor maps that the kernel makes itself; B is (n, k)."""
    left = tl.make_tensor_descriptor(a, [m, k], [k, 1], [M, K])
    right = tl.make_tensor_descriptor(b, [n, k], [k, 1], [N, K])
    out = tl.make_tensor_descriptor(c, [m, n], [n, 1], [M, N])
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        total = tl.dot(left.load([row, start]), right.load([column, start]).T, total)
    out.store([row, column], total.to(tl.bfloat16))


@triton.jit
def attention(q, k, v, o, keys, scale, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """softmax(q k^T scale) v of M queries; k, v are (keys, D)."""
    rows, d = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, D)
    query = tl.load(q + rows[:, None] * D + d)
    top, norm = tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32)
    total = tl.zeros((M, D), tl.float32)
    for start in range(0, keys, N):
        at = start + tl.arange(0, N)
        scores = tl.dot(query, tl.load(k + at[None] * D + d[:, None])) * scale
        highest = tl.maximum(top, tl.max(scores, 1))
        p, factor = tl.exp(scores - highest[:, None]), tl.exp(top - highest)
        norm, top = norm * factor + tl.sum(p, 1), highest
        total = tl.dot(p.to(tl.bfloat16), tl.load(v + at[:, None] * D + d), total * factor[:, None])
    tl.store(o + rows[:, None] * D + d, (total / norm[:, None]).to(tl.bfloat16))
