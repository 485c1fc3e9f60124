"""A log of native accesses to shared and global memory, written only while the race detector (hazards/race.py) is on.

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
# COUNTS: an atomic of floating-point type; nobody synchronises by one.
BYTES, READ, WRITE, STRONG, GENERIC, GLOBAL, COUNTS = 0xFF, *(1 << bit for bit in range(8, 14))

_APPEND = """
define internal void @log_access(ptr %ctx, ptr %addresses, i32 %mask, i64 %code) nounwind {
entry:
  %pr = getelementptr i8, ptr %ctx, i64 $C_race
  %log = load ptr, ptr %pr, align 8
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

HELPERS["log_access"] = fill(_APPEND.replace("CAPACITY", str(CAPACITY)).replace("ITEM", str(LOG.itemsize)))


def log(e: Emitter, space: str, slot: Value, nbytes: int, mask: Value, kind: int) -> None:
    """Log an access of ``nbytes`` a lane at the spilled addresses if the race detector is on; READ, WRITE, STRONG."""
    if space not in ("shared", "generic", "global"):
        return
    code = kind | nbytes | {"generic": GENERIC, "global": GLOBAL, "shared": 0}[space]
    on = e.context("checks") & abi.CHECK_RACE
    with e.when(e.icmp("ne", on, 0)):
        e.helpers.add("log_access")
        e.raw(f"call void @log_access(ptr %ctx, ptr {slot.ref}, {mask.typed}, i64 {code})")
