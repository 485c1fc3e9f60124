"""Fix the contract between Python and native code. It is register file, instruction record and warp context.

A kernel runs as *threaded code*: an array of fixed-size records, each holding the address of a small native handler
and the register-file offsets of its operands. Handlers are generated as LLVM IR once per instruction variant, compiled
by llvmlite and cached on disk, so preparing a kernel costs a parse, not a compile. What is rare or asynchronous
(barriers, TMA, tensor cores) is a *service*: the driver loop returns to Python with the record's index.

Register file (one per warp, 64-byte aligned): every register holds all 32 lanes contiguously.

| class | bytes | layout |
| --- | --- | --- |
| pred | 4 | one bit per lane, lane 0 = bit 0 |
| b8, b16, b32, b64 | 32, 64, 128, 256 | lane-major array of that width |
| b128 | 512 | 32 low halves, then 32 high halves |

Immediates and special registers (%tid.x, %laneid, ...) are read-only registers after the program's own, filled when
the warp is created, so a handler sees only offsets.
"""

from __future__ import annotations

import numpy as np

LANES = 32
FULL_MASK = 0xFFFFFFFF
MAX_OPERANDS = 18  # tcgen05 and wgmma take more, but those are services and read Python operands

# One instruction. `guard` is the byte offset of its predicate register, -1 for none; `operand` holds byte offsets into
# the register file, destination first, vectors flattened; `imm` is an address offset or a small constant of the form.
RECORD = np.dtype(
    [
        ("handler", "<u8"),
        ("guard", "<i4"),
        ("guard_negated", "<i4"),
        ("target", "<i4"),  # branch target: record index; with FLAG_MEMBERS byte offset of the member mask
        ("flags", "<i4"),
        ("imm", "<i8"),
        ("operand", "<i4", MAX_OPERANDS),
        ("index", "<i4"),  # of the instruction in Kernel.instructions
        ("pad", "<i4"),
    ]
)

MAX_CLUSTER = 16
MAX_GROUPS = 32

# One warp. A divergent warp is a set of groups (pc, lane mask); the driver always runs the group with the lowest pc and
# merges groups with the same pc, which reconverges structured code where it joins.
CONTEXT = np.dtype(
    [
        ("regs", "<u8"),  # address of the register file
        ("mask", "<u4"),  # lanes that execute the current instruction: group & guard
        ("group", "<u4"),  # lanes of the running group
        ("pc", "<i4"),  # record index of the running group
        ("live", "<u4"),  # lanes that have not exited
        ("groups", "<i4"),  # number of waiting groups
        ("sticky", "<i4"),  # 1: stay with the running group for this slice even if its pc is not the lowest
        ("group_pc", "<i4", MAX_GROUPS),
        ("group_mask", "<u4", MAX_GROUPS),
        ("executed", "<u8"),  # warp-instructions executed
        ("clock", "<u8"),  # logical time, set by the scheduler before each slice
        ("smem", "<u8", MAX_CLUSTER),  # address of the shared memory of each CTA of the cluster
        ("smem_bytes", "<u4"),
        ("rank", "<u4"),  # of this CTA in the cluster
        ("local", "<u8"),  # address of local memory: 32 lanes x local_bytes
        ("local_bytes", "<u4"),
        ("param_bytes", "<u4"),
        ("param", "<u8"),  # address of the parameter block
        ("alloc", "<u8"),  # address of the sorted [start, end) table of global allocations, u8 pairs
        ("alloc_count", "<u4"),
        ("alloc_last", "<u4"),  # index of the allocation hit last
        ("smem_init", "<u8", MAX_CLUSTER),  # per CTA: one byte per shared byte, 1 = written
        ("smem_dirty", "<u8", MAX_CLUSTER),  # per CTA: u2 per 16 bytes, generic-proxy writer (warp + 1) not yet fenced
        ("race", "<u8"),  # address of the race detector's state, 0 = off
        ("agent", "<u4"),  # this warp's index in vector clocks
        ("fault", "<i4"),  # Fault code set by a handler that returned FAULT
        ("fault_lane", "<i4"),
        ("fault_bytes", "<i4"),
        ("fault_address", "<u8"),
        ("checks", "<u4"),  # CHECK_* bits that are on
        ("warp", "<u4"),  # warp index in its CTA
        ("conflicts", "<u8"),  # extra shared-memory wavefronts caused by bank conflicts
        ("sectors", "<u8"),  # 32-byte global sectors touched
        ("watch", "<i4"),  # lowest pc of a waiting group: reaching it means merging or changing groups
        ("parked", "<u4"),  # lanes of this warp that wait in a service, outside the driver's groups
        ("carry", "<u4"),  # condition code of add.cc and friends, one bit per lane
        ("pad", "<u4"),
        ("padding", "<u8"),  # blocks to which allocators round, for loads past the end; 0 = such loads are faults
        ("marks", "<u8"),  # address of where the marks of each allocation are (memory/marks.py), 0 = off
        ("past_end", "u1", 48),  # what such a load reads, from the first multiple of 16 on
    ]
)

# RECORD.flags. CONVERGE marks .aligned and .sync instructions: a divergent group defers them until the other lanes
# arrive, exit, or stand at such an instruction themselves. MEMBERS: only the lanes of a member mask have to be there,
# a register at offset `target`.
FLAG_CONVERGE, FLAG_MEMBERS = 1, 2
READ_ONLY = 1 << 63  # set in the end of an allocation table entry that stores must not touch
PADDED = 1 << 62  # set in the end of an entry that came from an allocator that rounds up

# PEDANTIC: what shipped kernels leave out; REPORT: something is checked, if only in Python.
CHECK_INIT, CHECK_PROXY, CHECK_RACE, CHECK_COUNTERS, CHECK_PEDANTIC, CHECK_REPORT = 1, 2, 4, 8, 16, 32
CHECK_CODE, CHECK_LANES = 64, 128  # registers, by the code; lanes of one warp
CHECK_MARK = 256  # accesses to global memory are marked; no check, and never in a device's settings

# What the driver loop returns. STALLED: the running group must converge with parked lanes first.
DONE, SERVICE, EXITED, FAULT, STALLED = 0, 1, 2, 3, 4
# What a handler returns: CONTINUE moves to the next record, JUMPED means the handler set the pc itself; BRANCH and EXIT
# leave lanes in `mask` to the driver (to `target`, or out of the kernel).
CONTINUE, JUMPED, STOP_SERVICE, STOP_EXITED, STOP_FAULT, BRANCH, EXIT = 0, 1, 2, 3, 4, 5, 6

FAULT_DIVERGED = 9  # a .sync or .aligned instruction was executed without lanes that have to take part
FAULT_OUTSIDE = 10  # lanes execute a .sync instruction whose member mask does not name them
FAULT_NONE, FAULT_GLOBAL, FAULT_SHARED, FAULT_LOCAL, FAULT_PARAM, FAULT_ALIGN, FAULT_UNINIT, FAULT_RACE = range(8)
FAULT_PAST_END = 8

# Generic addresses outside the global space. %shared_window and %local_window as real GPUs have them; the low 32 bits
# are the shared address (cluster rank << 24 | offset) or the local offset.
SHARED_WINDOW, LOCAL_WINDOW, WINDOW_MASK = 0x7E << 56, 0x7D << 56, 0xFF << 56


def register_bytes(bits: int) -> int:
    """Count the bytes of a register of ``bits`` in the register file. 1 bit means a predicate."""
    return 4 if bits == 1 else LANES * max(bits, 8) // 8


def aligned(size: int, boundary: int = 64) -> int:
    """Round ``size`` up to ``boundary``."""
    return -(-size // boundary) * boundary
