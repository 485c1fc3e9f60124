"""Log native accesses to shared and global memory.

Only while the race detector (checks/race.py) is on.

Each access of a warp is one entry: instruction, lanes, what it was, and 32 addresses. The detector empties the log
whenever the driver loop returns, so it never holds more entries than a slice has instructions.
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.driver_ir import fill
from dsv4lib.emulator.native.irtools import HELPERS, Emitter, Value

LOG = np.dtype([("pc", "<i4"), ("mask", "<u4"), ("code", "<u8"), ("addresses", "<u8", abi.LANES)])
CAPACITY = 4096  # more than a policy's quantum
# Bits of ``code``; the low ones are the bytes of a lane's access.
# COUNTS: an atomic of floating-point type; it synchronises nothing. SAME: a store to shared memory changed no byte.
BYTES, READ, WRITE, STRONG, GENERIC, GLOBAL, COUNTS, SAME = 0xFF, *(1 << bit for bit in range(8, 15))

_APPEND = """
define internal void @log_access(ptr %ctx, ptr %addresses, i32 %mask, i64 %code) nounwind {
entry:
  %pr = getelementptr i8, ptr %ctx, i64 $C_race
  %log = load ptr, ptr %pr, align 8
  %none = icmp eq ptr %log, null
  br i1 %none, label %done, label %look
look:
  %n = load i64, ptr %log, align 8
  %room = icmp ult i64 %n, CAPACITY
  br i1 %room, label %append, label %done
append:
  %more = add i64 %n, 1
  store i64 %more, ptr %log, align 8
  %at = mul i64 %n, ITEM
  %from = add i64 %at, 8
  %e = getelementptr i8, ptr %log, i64 %from
  %ppc = getelementptr i8, ptr %ctx, i64 $C_pc
  %pc = load i32, ptr %ppc, align 4
  store i32 %pc, ptr %e, align 8
  %pm = getelementptr i8, ptr %e, i64 4
  store i32 %mask, ptr %pm, align 4
  %pk = getelementptr i8, ptr %e, i64 8
  store i64 %code, ptr %pk, align 8
  %pa = getelementptr i8, ptr %e, i64 16
  %values = load <32 x i64>, ptr %addresses, align 64
  store <32 x i64> %values, ptr %pa, align 8
  br label %done
done:
  ret void
}
"""

# SAME if shared memory holds what the lanes are about to store, else 0; impossible addresses are reported elsewhere.
_SAME = """
define internal i64 @log_same(ptr %ctx, ptr %addresses, ptr %staging, i64 %bytes, i32 %mask, i64 %window) nounwind {
entry:
  %pz = getelementptr i8, ptr %ctx, i64 $C_smem_bytes
  %n = load i32, ptr %pz, align 4
  %size = zext i32 %n to i64
  br label %lane
lane:
  %i = phi i64 [ 0, %entry ], [ %i1, %next ]
  %i1 = add i64 %i, 1
  %out = icmp uge i64 %i, 32
  br i1 %out, label %same, label %look
look:
  %i32 = trunc i64 %i to i32
  %shifted = lshr i32 %mask, %i32
  %on = trunc i32 %shifted to i1
  br i1 %on, label %active, label %next
active:
  %pa = getelementptr i64, ptr %addresses, i64 %i
  %address = load i64, ptr %pa, align 8
  %top = lshr i64 %address, 56
  %rank = lshr i64 %address, 24
  %r = and i64 %rank, 255
  %offset = and i64 %address, 16777215
  %end = add i64 %offset, %bytes
  %w = icmp ne i64 %top, %window
  %far = icmp uge i64 %r, RANKS
  %over = icmp ugt i64 %end, %size
  %b1 = or i1 %w, %far
  %b2 = or i1 %b1, %over
  br i1 %b2, label %other, label %memory
memory:
  %pt = getelementptr i8, ptr %ctx, i64 $C_smem
  %pd = getelementptr i64, ptr %pt, i64 %r
  %base = load i64, ptr %pd, align 8
  %none = icmp eq i64 %base, 0
  br i1 %none, label %other, label %compare
compare:
  %at = add i64 %base, %offset
  %p = inttoptr i64 %at to ptr
  %skip = mul i64 %i, %bytes
  %q = getelementptr i8, ptr %staging, i64 %skip
  br label %byte
byte:
  %j = phi i64 [ 0, %compare ], [ %j1, %equal ]
  %done = icmp uge i64 %j, %bytes
  br i1 %done, label %next, label %test
test:
  %p1 = getelementptr i8, ptr %p, i64 %j
  %q1 = getelementptr i8, ptr %q, i64 %j
  %x = load i8, ptr %p1, align 1
  %y = load i8, ptr %q1, align 1
  %differs = icmp ne i8 %x, %y
  br i1 %differs, label %other, label %equal
equal:
  %j1 = add i64 %j, 1
  br label %byte
next:
  br label %lane
same:
  ret i64 SAMEBIT
other:
  ret i64 0
}
"""

# One mark for each word of global memory that the lanes access (memory/marks.py): 1 read, 2 written.
_MARK = """
define internal void @mark_access(ptr %ctx, ptr %addresses, i32 %mask, i64 %code) nounwind noinline {
entry:
  %pm = getelementptr i8, ptr %ctx, i64 $C_marks
  %marks = load ptr, ptr %pm, align 8
  %off = icmp eq ptr %marks, null
  br i1 %off, label %done, label %begin
begin:
  %bytes = and i64 %code, 255
  %writing = and i64 %code, WRITEBIT
  %writes = icmp ne i64 %writing, 0
  %bit = select i1 %writes, i8 2, i8 1
  %pt = getelementptr i8, ptr %ctx, i64 $C_alloc
  %table = load ptr, ptr %pt, align 8
  %pn = getelementptr i8, ptr %ctx, i64 $C_alloc_count
  %n = load i32, ptr %pn, align 4
  %count = zext i32 %n to i64
  %empty = icmp eq i64 %count, 0
  br i1 %empty, label %done, label %lane
lane:
  %i = phi i64 [ 0, %begin ], [ %i1, %next ]
  %i1 = add i64 %i, 1
  %out = icmp uge i64 %i, 32
  br i1 %out, label %done, label %look
look:
  %i32 = trunc i64 %i to i32
  %shifted = lshr i32 %mask, %i32
  %on = trunc i32 %shifted to i1
  br i1 %on, label %active, label %next
active:
  %pa = getelementptr i64, ptr %addresses, i64 %i
  %address = load i64, ptr %pa, align 8
  %top = lshr i64 %address, 56
  %window = icmp ne i64 %top, 0
  br i1 %window, label %next, label %search
search:
  %lo = phi i64 [ 0, %active ], [ %lo.next, %halve ]
  %hi = phi i64 [ %count, %active ], [ %hi.next, %halve ]
  %gap = sub i64 %hi, %lo
  %narrow = icmp sle i64 %gap, 1
  br i1 %narrow, label %found, label %halve
halve:
  %sum = add i64 %lo, %hi
  %mid = lshr i64 %sum, 1
  %mat = shl i64 %mid, 4
  %mrow = getelementptr i8, ptr %table, i64 %mat
  %mstart = load i64, ptr %mrow, align 8
  %right = icmp uge i64 %address, %mstart
  %lo.next = select i1 %right, i64 %mid, i64 %lo
  %hi.next = select i1 %right, i64 %hi, i64 %mid
  br label %search
found:
  %at = shl i64 %lo, 4
  %row = getelementptr i8, ptr %table, i64 %at
  %start = load i64, ptr %row, align 8
  %pe = getelementptr i8, ptr %row, i64 8
  %raw = load i64, ptr %pe, align 8
  %stop = and i64 %raw, $END
  %above = icmp uge i64 %address, %start
  %below = icmp ult i64 %address, %stop
  %inside = and i1 %above, %below
  br i1 %inside, label %cover, label %next
cover:
  %far = add i64 %address, %bytes
  %past = icmp ugt i64 %far, %stop
  %end = select i1 %past, i64 %stop, i64 %far
  %first = lshr i64 %address, 2
  %up = add i64 %end, 3
  %last = lshr i64 %up, 2
  %pb = getelementptr i64, ptr %marks, i64 %lo
  %base = load i64, ptr %pb, align 8
  br label %word
word:
  %w = phi i64 [ %first, %cover ], [ %w1, %word ]
  %where = add i64 %base, %w
  %p = inttoptr i64 %where to ptr
  %old = load i8, ptr %p, align 1
  %new = or i8 %old, %bit
  store i8 %new, ptr %p, align 1
  %w1 = add i64 %w, 1
  %more = icmp ult i64 %w1, %last
  br i1 %more, label %word, label %next
next:
  br label %lane
done:
  ret void
}
"""

HELPERS["mark_access"] = fill(_MARK.replace("WRITEBIT", str(WRITE)).replace("$END", str(abi.PADDED - 1)))
HELPERS["log_same"] = fill(_SAME.replace("SAMEBIT", str(SAME)).replace("RANKS", str(abi.MAX_CLUSTER)))
HELPERS["log_access"] = fill(_APPEND.replace("CAPACITY", str(CAPACITY)).replace("ITEM", str(LOG.itemsize)))


def unchanged(e: Emitter, space: str, slot: Value, staging: Value, nbytes: int, mask: Value) -> Value | None:
    """Emit SAME if a store about to happen leaves shared memory as it is, else 0."""
    if space not in ("shared", "generic"):
        return None
    answer = e.line("alloca i64, align 8", "ptr", 0)
    e.raw(f"store i64 0, ptr {answer.ref}, align 8")
    with e.when(_on(e)):
        e.helpers.add("log_same")
        window = abi.SHARED_WINDOW >> 56 if space == "generic" else 0
        args = f"ptr %ctx, ptr {slot.ref}, ptr {staging.ref}, i64 {nbytes}, {mask.typed}, i64 {window}"
        found = e.line(f"call i64 @log_same({args})", "i64", 0)
        e.raw(f"store {found.typed}, ptr {answer.ref}, align 8")
    return answer


def log(e: Emitter, space: str, slot: Value, nbytes: int, mask: Value, kind: int, same: Value | None = None) -> None:
    """Log an access at the spilled addresses if the race detector is on; mark it if the launch is split.

    ``nbytes`` a lane; READ, WRITE, STRONG.

    ``same``: of `unchanged`.
    """
    if space not in ("shared", "generic", "global"):
        return
    code = str(kind | nbytes | {"generic": GENERIC, "global": GLOBAL, "shared": 0}[space])
    with e.when(_on(e, 0 if space == "shared" else abi.CHECK_MARK)):
        e.helpers.add("log_access")
        if same is not None:
            bit = e.line(f"load i64, ptr {same.ref}, align 8", "i64", 0)
            code = e.line(f"or i64 {bit.ref}, {code}", "i64", 0).ref
        args = f"ptr %ctx, ptr {slot.ref}, {mask.typed}, i64 {code}"
        e.raw(f"call void @log_access({args})")
        if space != "shared":
            e.helpers.add("mark_access")
            e.raw(f"call void @mark_access({args})")


def _on(e: Emitter, more: int = 0) -> Value:
    return e.icmp("ne", e.context("checks") & (abi.CHECK_RACE | more), 0)
