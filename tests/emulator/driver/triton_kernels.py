"""Kernels in Triton for test_triton; Triton reads their source from this file."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["TensorDescriptor", "ask", "copy_box", "every_type", "histogram", "scale", "tuned", "wide_sum"]


@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr):
    """out = factor x."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def every_type(out, small, whole, large, unsigned, half, brain, double, pair, nothing, flag):
    """Write each argument to out as fp64."""
    tl.store(out + 0, small.to(tl.float64))
    tl.store(out + 1, whole.to(tl.float64))
    tl.store(out + 2, large.to(tl.float64))
    tl.store(out + 3, unsigned.to(tl.float64))
    tl.store(out + 4, half.to(tl.float64))
    tl.store(out + 5, brain.to(tl.float64))
    tl.store(out + 6, double.to(tl.float64))
    tl.store(out + 7, tl.load(pair[0]).to(tl.float64))
    tl.store(out + 8, pair[1].to(tl.float64))
    if nothing is None:
        tl.store(out + 9, 1.0)
    tl.store(out + 10, flag.to(tl.float64))


@triton.jit
def copy_box(source, target, M: tl.constexpr, N: tl.constexpr):
    """Copy tiles by descriptors that the host made."""
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    target.store([row, column], source.load([row, column]) * 2)


@triton.jit
def wide_sum(x, out, n, BLOCK: tl.constexpr):
    """Sum of x, by one program of several CTAs."""
    i = tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0), 0))


@triton.autotune(
    [triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128}, num_warps=4)],
    key=["n"],
    restore_value=["x"],
)
@triton.jit
def tuned(x, n, BLOCK: tl.constexpr):
    """x = x + 1: a run too much shows."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


@triton.jit
def histogram(x, out, n, BLOCK: tl.constexpr):
    """Count x modulo 8, without atomics: programs race."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = out + tl.load(x + i, mask=i < n, other=0) % 8
    tl.store(place, tl.load(place, mask=i < n) + 1, mask=i < n)


@triton.jit
def ask(flag, out, wanted):
    """Program 0 waits until another has raised the flag to ``wanted``, by atomics: a loop with barriers."""
    if tl.program_id(0) == 0:
        while tl.atomic_add(flag, 0) != wanted:
            pass
        tl.store(out, 7)
    else:
        tl.atomic_xchg(flag, 2)
