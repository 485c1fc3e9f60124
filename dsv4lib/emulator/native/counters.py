"""Count global sectors and shared-memory bank conflicts; off by default.

A global access touches 32-byte sectors; neighbouring lanes share them. Shared memory has 32 banks of 4 bytes: a warp's
access takes as many wavefronts as the busiest bank has different words. Accesses of 8 bytes a lane are served in two
halves of the warp, of 16 bytes in four quarters. Counted are the wavefronts beyond one per part.
Source: CUDA programming guide, "Shared Memory" and "Device Memory Accesses".
"""

from __future__ import annotations

from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.driver_ir import fill
from dsv4lib.emulator.native.irtools import HELPERS, Emitter, Value

_SECTORS = """
define internal void @count_sectors(ptr %ctx, ptr %addresses, i32 %mask, i64 %bytes) nounwind {
entry:
  br label %loop
loop:
  %i = phi i32 [ 0, %entry ], [ %i.next, %skip ]
  %seen = phi i64 [ 0, %entry ], [ %seen.next, %skip ]
  %last = phi i64 [ -1, %entry ], [ %last.next, %skip ]
  %end = icmp eq i32 %i, 32
  br i1 %end, label %done, label %lane
lane:
  %shifted = lshr i32 %mask, %i
  %bit = and i32 %shifted, 1
  %on = icmp ne i32 %bit, 0
  br i1 %on, label %active, label %skip
active:
  %p = getelementptr i64, ptr %addresses, i32 %i
  %a = load i64, ptr %p, align 8
  %first = lshr i64 %a, 5
  %over = add i64 %a, %bytes
  %over1 = sub i64 %over, 1
  %final = lshr i64 %over1, 5
  %span = sub i64 %final, %first
  %count = add i64 %span, 1
  %same = icmp eq i64 %first, %last
  %dup = zext i1 %same to i64
  %new = sub i64 %count, %dup
  %total = add i64 %seen, %new
  br label %skip
skip:
  %seen.next = phi i64 [ %seen, %lane ], [ %total, %active ]
  %last.next = phi i64 [ %last, %lane ], [ %final, %active ]
  %i.next = add i32 %i, 1
  br label %loop
done:
  %ps = getelementptr i8, ptr %ctx, i64 $C_sectors
  %old = load i64, ptr %ps, align 8
  %sum = add i64 %old, %seen
  store i64 %sum, ptr %ps, align 8
  ret void
}
"""

# Lanes first .. first + lanes - 1 are one part. %words keeps the different words seen, %banks how many each bank has.
_PART = """
define internal i64 @bank_part(ptr %addresses, i32 %mask, i64 %bytes, i32 %first, i32 %lanes) nounwind {
entry:
  %words = alloca [32 x i64], align 8
  %banks = alloca [32 x i32], align 64
  store <32 x i32> zeroinitializer, ptr %banks, align 64
  %last = add i32 %first, %lanes
  %quads = lshr i64 %bytes, 2
  %single = icmp eq i64 %quads, 0
  %per = select i1 %single, i64 1, i64 %quads
  br label %lane
lane:
  %i = phi i32 [ %first, %entry ], [ %i.next, %lane.end ]
  %n = phi i32 [ 0, %entry ], [ %n.end, %lane.end ]
  %most = phi i32 [ 0, %entry ], [ %most.end, %lane.end ]
  %end = icmp eq i32 %i, %last
  br i1 %end, label %done, label %test
test:
  %shifted = lshr i32 %mask, %i
  %bit = and i32 %shifted, 1
  %on = icmp ne i32 %bit, 0
  br i1 %on, label %start, label %lane.end
start:
  %p = getelementptr i64, ptr %addresses, i32 %i
  %a = load i64, ptr %p, align 8
  %base = lshr i64 %a, 2
  br label %word
word:
  %w = phi i64 [ 0, %start ], [ %w.next, %word.end ]
  %wn = phi i32 [ %n, %start ], [ %wn.end, %word.end ]
  %wm = phi i32 [ %most, %start ], [ %wm.end, %word.end ]
  %wdone = icmp eq i64 %w, %per
  br i1 %wdone, label %lane.end, label %look
look:
  %id = add i64 %base, %w
  br label %search
search:
  %s = phi i32 [ 0, %look ], [ %s.next, %compare ]
  %unknown = icmp eq i32 %s, %wn
  br i1 %unknown, label %new, label %compare
compare:
  %q = getelementptr i64, ptr %words, i32 %s
  %old = load i64, ptr %q, align 8
  %same = icmp eq i64 %old, %id
  %s.next = add i32 %s, 1
  br i1 %same, label %word.end, label %search
new:
  %r = getelementptr i64, ptr %words, i32 %wn
  store i64 %id, ptr %r, align 8
  %bank = and i64 %id, 31
  %pb = getelementptr i32, ptr %banks, i64 %bank
  %b0 = load i32, ptr %pb, align 4
  %b1 = add i32 %b0, 1
  store i32 %b1, ptr %pb, align 4
  %larger = icmp sgt i32 %b1, %wm
  %max = select i1 %larger, i32 %b1, i32 %wm
  %grown = add i32 %wn, 1
  br label %word.end
word.end:
  %wn.end = phi i32 [ %wn, %compare ], [ %grown, %new ]
  %wm.end = phi i32 [ %wm, %compare ], [ %max, %new ]
  %w.next = add i64 %w, 1
  br label %word
lane.end:
  %n.end = phi i32 [ %n, %test ], [ %wn, %word ]
  %most.end = phi i32 [ %most, %test ], [ %wm, %word ]
  %i.next = add i32 %i, 1
  br label %lane
done:
  %busy = icmp sgt i32 %most, 0
  %less = sub i32 %most, 1
  %extra = select i1 %busy, i32 %less, i32 0
  %extra64 = zext i32 %extra to i64
  ret i64 %extra64
}
define internal void @count_banks(ptr %ctx, ptr %addresses, i32 %mask, i64 %bytes) nounwind {
entry:
  %wide = icmp ugt i64 %bytes, 8
  %double = icmp eq i64 %bytes, 8
  %some = select i1 %double, i32 16, i32 32
  %lanes = select i1 %wide, i32 8, i32 %some
  br label %part
part:
  %first = phi i32 [ 0, %entry ], [ %next, %more ]
  %sum = phi i64 [ 0, %entry ], [ %total, %more ]
  %end = icmp eq i32 %first, 32
  br i1 %end, label %done, label %more
more:
  %extra = call i64 @bank_part(ptr %addresses, i32 %mask, i64 %bytes, i32 %first, i32 %lanes)
  %total = add i64 %sum, %extra
  %next = add i32 %first, %lanes
  br label %part
done:
  %pc = getelementptr i8, ptr %ctx, i64 $C_conflicts
  %old = load i64, ptr %pc, align 8
  %new = add i64 %old, %sum
  store i64 %new, ptr %pc, align 8
  ret void
}
"""

HELPERS["count_sectors"] = fill(_SECTORS)
HELPERS["count_banks"] = fill(_PART)
_COUNTER = {"global": "count_sectors", "shared": "count_banks"}


def count(e: Emitter, space: str, slot: Value, nbytes: int, mask: Value) -> None:
    """Count an access of ``nbytes`` a lane, if counters are switched on.

    Addresses are spilled.
    """
    if space not in _COUNTER:
        return
    on = e.context("checks") & abi.CHECK_COUNTERS
    with e.when(e.icmp("ne", on, 0)):
        name = _COUNTER[space]
        e.helpers.add(name)
        e.raw(f"call void @{name}(ptr %ctx, ptr {slot.ref}, {mask.typed}, i64 {nbytes})")
