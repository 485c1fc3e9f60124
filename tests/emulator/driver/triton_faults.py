"""Faulty kernels in Triton, each with a twin; ``#!`` marks the lines of a report. x: 1024 words, x[n] a flag."""

import triton
import triton.language as tl


@triton.jit
def overlap(x, out, n, BLOCK: tl.constexpr, fixed: tl.constexpr):
    """Write tiles that overlap by a word."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if fixed:
        tl.store(out + pid * BLOCK + i, tl.load(x + i) + pid)
    else:
        tl.store(out + pid * (BLOCK - 1) + i, tl.load(x + i) + pid)  #!


@triton.jit
def shift_in_place(x, out, n, BLOCK: tl.constexpr, fixed: tl.constexpr):
    """Write over what other programs, and warps, still read."""
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i + 1)  #!
    if fixed:
        tl.store(out + i, v)
    else:
        tl.store(x + i, v)  #!


@triton.jit
def scratch_without_barrier(x, out, n, BLOCK: tl.constexpr, fixed: tl.constexpr):
    """Reverse a tile through global memory: its threads exchange words."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(out + pid * BLOCK + i, tl.load(x + i))  #!
    if fixed:
        tl.debug_barrier()
    v = tl.load(out + pid * BLOCK + BLOCK - 1 - i)  #!
    tl.store(out + 512 + pid * BLOCK + i, v)


@triton.jit
def split_k(x, out, n, BLOCK: tl.constexpr, sem: tl.constexpr):
    """Hand a tile to another program by a flag."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    if pid == 0:
        tl.store(out + i, tl.load(x + i))  #!
        tl.atomic_add(x + n, 1, sem=sem)
    else:
        while tl.atomic_add(x + n, 0, sem="acquire") != 1:
            pass
        tl.store(out + 512 + i, tl.load(out + BLOCK - 1 - i))  #!


@triton.jit
def last_program(x, out, n, BLOCK: tl.constexpr, sem: tl.constexpr):
    """Let the program that comes last sum what all wrote."""
    pid = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    tl.store(out + pid, tl.sum(tl.load(x + pid * BLOCK + i)))  #!
    if tl.atomic_add(x + n, 1, sem=sem) == tl.num_programs(0) - 1:
        j = tl.arange(0, 2)
        tl.store(out + 512, tl.sum(tl.load(out + j)))  #!


# By name: what the fault and what the twin is compiled with.
FAULTS = {
    "overlap": ({"fixed": False}, {"fixed": True}),
    "shift_in_place": ({"fixed": False}, {"fixed": True}),
    "scratch_without_barrier": ({"fixed": False}, {"fixed": True}),
    "split_k": ({"sem": "relaxed"}, {"sem": "release"}),
    "last_program": ({"sem": "relaxed"}, {"sem": "acq_rel"}),
}
