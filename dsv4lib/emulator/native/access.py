"""Convert a lane's address to a checked host pointer. These are run-time helpers of memory handlers, in LLVM IR.

Each helper has the type ``ptr (ctx, i64 address, i64 bytes, i32 lane)``. It checks bounds and alignment, and returns
null after noting a fault in the context. Loads from shared memory check initialisation (a read of unwritten bytes is
noted, but carried out); loads from global memory that end in an allocator's padding are noted and read 0xFF; stores to
shared memory mark their bytes as written and, for the asynchronous proxy, dirty.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.emulator.memory.addressing import RANK_SHIFT
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.driver_ir import fill
from dsv4lib.emulator.native.irtools import HELPERS, Emitter, Value, context_offset

_SHARED_TOP, _LOCAL_TOP = abi.SHARED_WINDOW >> 56, abi.LOCAL_WINDOW >> 56

# What several helpers share, put in place of its name by `_ready`.
# <aligned ...>: the address, or the offset in a CTA, is a multiple of the size; null after a fault. Ends in %aligned.
# <init by size>: %q points at the marks of the shared bytes; goes on at %b1, %b2, %b4 or %wide.
_ALIGNED = """\
  %low = sub i64 %bytes, 1
  %mis = and i64 %WHAT, %low
  %skew = icmp ne i64 %mis, 0
  br i1 %skew, label %misaligned, label %aligned
misaligned:
  %f1 = call ptr @mem_fault(ptr %ctx, i32 $ALIGN, i64 %address, i64 %bytes, i32 %lane)
  ret ptr null
aligned:
"""
_PARTS = {
    "<aligned address>\n": _ALIGNED.replace("WHAT", "address"),
    "<aligned offset>\n": _ALIGNED.replace("WHAT", "offset"),
    "<init by size>\n": """\
  %rank = lshr i64 %address, 24
  %offset = and i64 %address, 16777215
  %pt = getelementptr i8, ptr %ctx, i64 $C_smem_init
  %pb = getelementptr ptr, ptr %pt, i64 %rank
  %init = load ptr, ptr %pb, align 8
  %q = getelementptr i8, ptr %init, i64 %offset
  switch i64 %bytes, label %wide [ i64 1, label %b1
                                   i64 2, label %b2
                                   i64 4, label %b4 ]
""",
}

_FAULT = """
define internal ptr @mem_fault(ptr %ctx, i32 %code, i64 %address, i64 %bytes, i32 %lane) nounwind cold noinline {
  %pf = getelementptr i8, ptr %ctx, i64 $C_fault
  store i32 %code, ptr %pf, align 4
  %pl = getelementptr i8, ptr %ctx, i64 $C_fault_lane
  store i32 %lane, ptr %pl, align 4
  %pb = getelementptr i8, ptr %ctx, i64 $C_fault_bytes
  %b = trunc i64 %bytes to i32
  store i32 %b, ptr %pb, align 4
  %pa = getelementptr i8, ptr %ctx, i64 $C_fault_address
  store i64 %address, ptr %pa, align 8
  ret ptr null
}
"""

# A load that goes past the end of the allocation `alloc_last`, but in the padding that its allocator put there: noted,
# and given the bytes that exist, then 0xFF (NaN in every floating-point format). Null if it goes further.
_PAST_END = """
define internal ptr @mem_past_end(ptr %ctx, i64 %address, i64 %bytes, i32 %lane) nounwind cold noinline {
entry:
  %pt = getelementptr i8, ptr %ctx, i64 $C_alloc
  %table = load ptr, ptr %pt, align 8
  %plast = getelementptr i8, ptr %ctx, i64 $C_alloc_last
  %last = load i32, ptr %plast, align 4
  %last64 = zext i32 %last to i64
  %at = shl i64 %last64, 4
  %row = getelementptr i8, ptr %table, i64 %at
  %start = load i64, ptr %row, align 8
  %pe = getelementptr i8, ptr %row, i64 8
  %raw = load i64, ptr %pe, align 8
  %stop = and i64 %raw, $END
  %flag = and i64 %raw, $PADDED
  %marked = icmp ne i64 %flag, 0
  %pp = getelementptr i8, ptr %ctx, i64 $C_padding
  %padding = load i64, ptr %pp, align 8
  %size = sub i64 %stop, %start
  %less = sub i64 %padding, 1
  %more = add i64 %size, %less
  %keep = sub i64 0, %padding
  %rounded = and i64 %more, %keep
  %limit = add i64 %start, %rounded
  %room = sub i64 %limit, %bytes
  %from = icmp uge i64 %address, %start
  %to = icmp ule i64 %address, %room
  %inside = and i1 %from, %to
  %ok = and i1 %inside, %marked
  br i1 %ok, label %good, label %far
far:
  ret ptr null
good:
  %pf = getelementptr i8, ptr %ctx, i64 $C_fault
  %old = load i32, ptr %pf, align 4
  %first = icmp eq i32 %old, 0
  br i1 %first, label %note, label %serve
note:
  %f = call ptr @mem_fault(ptr %ctx, i32 $PAST_END, i64 %address, i64 %bytes, i32 %lane)
  br label %serve
serve:
  %field = getelementptr i8, ptr %ctx, i64 $C_past_end
  %up = getelementptr i8, ptr %field, i64 15
  %up64 = ptrtoint ptr %up to i64
  %even = and i64 %up64, -16
  %out = inttoptr i64 %even to ptr
  br label %head
head:
  %i = phi i64 [ 0, %serve ], [ %next, %put ]
  %done = icmp uge i64 %i, %bytes
  br i1 %done, label %full, label %byte
byte:
  %q = add i64 %address, %i
  %exists = icmp ult i64 %q, %stop
  br i1 %exists, label %take, label %put
take:
  %p = inttoptr i64 %q to ptr
  %v = load i8, ptr %p, align 1
  br label %put
put:
  %b = phi i8 [ -1, %byte ], [ %v, %take ]
  %o = getelementptr i8, ptr %out, i64 %i
  store i8 %b, ptr %o, align 1
  %next = add i64 %i, 1
  br label %head
full:
  ret ptr %out
}
"""

# Finds the allocation of [address, address + bytes); %store: it must be writable. The table is sorted.
_GLOBAL = """
define internal ptr @mem_global(ptr %ctx, i64 %address, i64 %bytes, i32 %lane, i32 %store) nounwind {
entry:
<aligned address>
  %pt = getelementptr i8, ptr %ctx, i64 $C_alloc
  %table = load ptr, ptr %pt, align 8
  %plast = getelementptr i8, ptr %ctx, i64 $C_alloc_last
  %last = load i32, ptr %plast, align 4
  %pn = getelementptr i8, ptr %ctx, i64 $C_alloc_count
  %n = load i32, ptr %pn, align 4
  %end = add i64 %address, %bytes
  %empty = icmp eq i32 %n, 0
  %wraps = icmp ult i64 %end, %address
  %none = or i1 %empty, %wraps
  br i1 %none, label %outside, label %again
again:
  %i = phi i32 [ %last, %aligned ], [ %found, %searched ]
  %tried = phi i1 [ false, %aligned ], [ true, %searched ]
  %i64 = zext i32 %i to i64
  %at = shl i64 %i64, 4
  %row = getelementptr i8, ptr %table, i64 %at
  %start = load i64, ptr %row, align 8
  %pe = getelementptr i8, ptr %row, i64 8
  %stop.raw = load i64, ptr %pe, align 8
  %stop = and i64 %stop.raw, $END
  %readonly = icmp slt i64 %stop.raw, 0
  %writing = icmp ne i32 %store, 0
  %denied = and i1 %readonly, %writing
  %above = icmp uge i64 %address, %start
  %below = icmp ule i64 %end, %stop
  %inside = and i1 %above, %below
  %allowed = xor i1 %denied, true
  %ok = and i1 %inside, %allowed
  br i1 %ok, label %good, label %miss
good:
  %p = inttoptr i64 %address to ptr
  ret ptr %p
miss:
  br i1 %tried, label %outside, label %search
search:
  %lo = phi i32 [ 0, %miss ], [ %lo.next, %halve ]
  %hi = phi i32 [ %n, %miss ], [ %hi.next, %halve ]
  %gap = sub i32 %hi, %lo
  %narrow = icmp sle i32 %gap, 1
  br i1 %narrow, label %searched, label %halve
halve:
  %sum = add i32 %lo, %hi
  %mid = lshr i32 %sum, 1
  %mid64 = zext i32 %mid to i64
  %mat = shl i64 %mid64, 4
  %mrow = getelementptr i8, ptr %table, i64 %mat
  %mstart = load i64, ptr %mrow, align 8
  %right = icmp uge i64 %address, %mstart
  %lo.next = select i1 %right, i32 %mid, i32 %lo
  %hi.next = select i1 %right, i32 %hi, i32 %mid
  br label %search
searched:
  %found = add i32 %lo, 0
  store i32 %found, ptr %plast, align 4
  br label %again
outside:
  %pp = getelementptr i8, ptr %ctx, i64 $C_padding
  %padding = load i64, ptr %pp, align 8
  %loading = icmp eq i32 %store, 0
  %pads = icmp ne i64 %padding, 0
  %soft = and i1 %loading, %pads
  %some = xor i1 %none, true
  %perhaps = and i1 %soft, %some
  br i1 %perhaps, label %past_end, label %refuse
past_end:
  %past = call ptr @mem_past_end(ptr %ctx, i64 %address, i64 %bytes, i32 %lane)
  %deep = icmp eq ptr %past, null
  br i1 %deep, label %refuse, label %noted
noted:
  ret ptr %past
refuse:
  %f2 = call ptr @mem_fault(ptr %ctx, i32 $GLOBAL, i64 %address, i64 %bytes, i32 %lane)
  ret ptr null
}
define internal ptr @mem_global_ld(ptr %ctx, i64 %address, i64 %bytes, i32 %lane) nounwind {
  %p = call ptr @mem_global(ptr %ctx, i64 %address, i64 %bytes, i32 %lane, i32 0)
  ret ptr %p
}
define internal ptr @mem_global_st(ptr %ctx, i64 %address, i64 %bytes, i32 %lane) nounwind {
  %p = call ptr @mem_global(ptr %ctx, i64 %address, i64 %bytes, i32 %lane, i32 1)
  ret ptr %p
}
"""

# Checks a shared address (rank << 24 | offset); null after a fault. `init` and `dirty` tables: *_at.
_SHARED = """
define internal ptr @mem_shared(ptr %ctx, i64 %address, i64 %bytes, i32 %lane) nounwind {
entry:
  %rank = lshr i64 %address, 24
  %offset = and i64 %address, 16777215
<aligned offset>
  %pn = getelementptr i8, ptr %ctx, i64 $C_smem_bytes
  %n = load i32, ptr %pn, align 4
  %size = zext i32 %n to i64
  %end = add i64 %offset, %bytes
  %over = icmp ugt i64 %end, %size
  %far = icmp uge i64 %rank, $RANKS
  %bad = or i1 %over, %far
  br i1 %bad, label %outside, label %inside
inside:
  %pt = getelementptr i8, ptr %ctx, i64 $C_smem
  %pb = getelementptr ptr, ptr %pt, i64 %rank
  %base = load ptr, ptr %pb, align 8
  %absent = icmp eq ptr %base, null
  br i1 %absent, label %outside, label %good
good:
  %p = getelementptr i8, ptr %base, i64 %offset
  ret ptr %p
outside:
  %f2 = call ptr @mem_fault(ptr %ctx, i32 $SHARED, i64 %address, i64 %bytes, i32 %lane)
  ret ptr null
}
define internal ptr @mem_shared_ld(ptr %ctx, i64 %address, i64 %bytes, i32 %lane) nounwind {
entry:
  %p = call ptr @mem_shared(ptr %ctx, i64 %address, i64 %bytes, i32 %lane)
  %bad = icmp eq ptr %p, null
  br i1 %bad, label %done, label %good
good:
  %pc = getelementptr i8, ptr %ctx, i64 $C_checks
  %checks = load i32, ptr %pc, align 4
  %bit = and i32 %checks, $CHECK_INIT
  %off = icmp eq i32 %bit, 0
  br i1 %off, label %done, label %check
check:
<init by size>
b1:
  %v1 = load i8, ptr %q, align 1
  %o1 = icmp eq i8 %v1, 1
  br i1 %o1, label %done, label %unwritten
b2:
  %v2 = load i16, ptr %q, align 2
  %o2 = icmp eq i16 %v2, 257
  br i1 %o2, label %done, label %unwritten
b4:
  %v4 = load i32, ptr %q, align 4
  %o4 = icmp eq i32 %v4, 16843009
  br i1 %o4, label %done, label %unwritten
wide:
  %i = phi i64 [ 0, %check ], [ %next, %step ]
  %end = icmp uge i64 %i, %bytes
  br i1 %end, label %done, label %step
step:
  %q8 = getelementptr i8, ptr %q, i64 %i
  %v8 = load i64, ptr %q8, align 8
  %o8 = icmp eq i64 %v8, 72340172838076673
  %next = add i64 %i, 8
  br i1 %o8, label %wide, label %unwritten
unwritten:
  %pf = getelementptr i8, ptr %ctx, i64 $C_fault
  %old = load i32, ptr %pf, align 4
  %first = icmp eq i32 %old, 0
  br i1 %first, label %note, label %done
note:
  %f = call ptr @mem_fault(ptr %ctx, i32 $UNINIT, i64 %address, i64 %bytes, i32 %lane)
  br label %done
done:
  ret ptr %p
}
define internal ptr @mem_shared_st(ptr %ctx, i64 %address, i64 %bytes, i32 %lane) nounwind {
entry:
  %p = call ptr @mem_shared(ptr %ctx, i64 %address, i64 %bytes, i32 %lane)
  %bad = icmp eq ptr %p, null
  br i1 %bad, label %done, label %mark
mark:
<init by size>
b1:
  store i8 1, ptr %q, align 1
  br label %proxy
b2:
  store i16 257, ptr %q, align 2
  br label %proxy
b4:
  store i32 16843009, ptr %q, align 4
  br label %proxy
wide:
  %i = phi i64 [ 0, %mark ], [ %next, %step ]
  %end = icmp uge i64 %i, %bytes
  br i1 %end, label %proxy, label %step
step:
  %q8 = getelementptr i8, ptr %q, i64 %i
  store i64 72340172838076673, ptr %q8, align 8
  %next = add i64 %i, 8
  br label %wide
proxy:
  %pc = getelementptr i8, ptr %ctx, i64 $C_checks
  %checks = load i32, ptr %pc, align 4
  %bit = and i32 %checks, $CHECK_PROXY
  %off = icmp eq i32 %bit, 0
  br i1 %off, label %done, label %dirt
dirt:
  %pw = getelementptr i8, ptr %ctx, i64 $C_warp
  %warp = load i32, ptr %pw, align 4
  %writer = add i32 %warp, 1
  %w16 = trunc i32 %writer to i16
  %dt = getelementptr i8, ptr %ctx, i64 $C_smem_dirty
  %db = getelementptr ptr, ptr %dt, i64 %rank
  %dirty = load ptr, ptr %db, align 8
  %from = lshr i64 %offset, 4
  %d0 = getelementptr i16, ptr %dirty, i64 %from
  store i16 %w16, ptr %d0, align 2
  %two = icmp ugt i64 %bytes, 16
  br i1 %two, label %second, label %done
second:
  %d1 = getelementptr i16, ptr %d0, i64 1
  store i16 %w16, ptr %d1, align 2
  br label %done
done:
  ret ptr %p
}
"""

_LOCAL = """
define internal ptr @mem_local(ptr %ctx, i64 %address, i64 %bytes, i32 %lane) nounwind {
entry:
<aligned address>
  %pn = getelementptr i8, ptr %ctx, i64 $C_local_bytes
  %n = load i32, ptr %pn, align 4
  %size = zext i32 %n to i64
  %end = add i64 %address, %bytes
  %over = icmp ugt i64 %end, %size
  %wrapped = icmp ult i64 %end, %bytes
  %bad = or i1 %over, %wrapped
  br i1 %bad, label %outside, label %good
good:
  %pl = getelementptr i8, ptr %ctx, i64 $C_local
  %base = load ptr, ptr %pl, align 8
  %l64 = zext i32 %lane to i64
  %skip = mul i64 %l64, %size
  %at = add i64 %skip, %address
  %p = getelementptr i8, ptr %base, i64 %at
  ret ptr %p
outside:
  %f2 = call ptr @mem_fault(ptr %ctx, i32 $LOCAL, i64 %address, i64 %bytes, i32 %lane)
  ret ptr null
}
"""

_PARAM = """
define internal ptr @mem_param(ptr %ctx, i64 %address, i64 %bytes, i32 %lane) nounwind {
<aligned address>
  %ps = getelementptr i8, ptr %ctx, i64 $C_param
  %start = load i64, ptr %ps, align 8
  %pn = getelementptr i8, ptr %ctx, i64 $C_param_bytes
  %n = load i32, ptr %pn, align 4
  %size = zext i32 %n to i64
  %distance = sub i64 %address, %start
  %lower = and i64 %distance, 4294967295
  %short = icmp ult i64 %address, 4294967296
  %offset = select i1 %short, i64 %lower, i64 %distance
  %end = add i64 %offset, %bytes
  %over = icmp ugt i64 %end, %size
  %before = icmp ugt i64 %offset, %size
  %bad = or i1 %over, %before
  br i1 %bad, label %outside, label %good
good:
  %at = add i64 %start, %offset
  %p = inttoptr i64 %at to ptr
  ret ptr %p
outside:
  %f2 = call ptr @mem_fault(ptr %ctx, i32 $PARAM, i64 %address, i64 %bytes, i32 %lane)
  ret ptr null
}
"""

_GENERIC = """
define internal ptr @mem_generic_DIR(ptr %ctx, i64 %address, i64 %bytes, i32 %lane) nounwind {
  %top = lshr i64 %address, 56
  %low = and i64 %address, 4294967295
  switch i64 %top, label %global [ i64 $SHARED_TOP, label %shared
                                   i64 $LOCAL_TOP, label %local ]
global:
  %g = call ptr @mem_global_DIR(ptr %ctx, i64 %address, i64 %bytes, i32 %lane)
  ret ptr %g
shared:
  %s = call ptr @mem_shared_DIR(ptr %ctx, i64 %low, i64 %bytes, i32 %lane)
  ret ptr %s
local:
  %l = call ptr @mem_local(ptr %ctx, i64 %low, i64 %bytes, i32 %lane)
  ret ptr %l
}
"""

_CODES = {
    name: str(getattr(abi, f"FAULT_{name}"))
    for name in ("GLOBAL", "SHARED", "LOCAL", "PARAM", "ALIGN", "UNINIT", "PAST_END")
}
_CODES |= {"PADDED": str(abi.PADDED), "END": str(abi.PADDED - 1)}
_CODES |= {"CHECK_INIT": str(abi.CHECK_INIT), "CHECK_PROXY": str(abi.CHECK_PROXY), "RANKS": str(abi.MAX_CLUSTER)}
_CODES |= {"SHARED_TOP": str(_SHARED_TOP), "LOCAL_TOP": str(_LOCAL_TOP)}


def _ready(text: str) -> str:
    for name, part in _PARTS.items():
        text = text.replace(name, part)
    text = fill(text)
    for name, value in sorted(_CODES.items(), key=lambda item: -len(item[0])):
        text = text.replace(f"${name}", value)
    return text


HELPERS["mem_fault"] = _ready(_FAULT)
HELPERS["mem_past_end"] = _ready(_PAST_END)
HELPERS["mem_global"] = _ready(_GLOBAL)
HELPERS["mem_shared"] = _ready(_SHARED)
HELPERS["mem_local"] = _ready(_LOCAL)
HELPERS["mem_param"] = _ready(_PARAM)
HELPERS["mem_generic"] = _ready(_GENERIC.replace("DIR", "ld") + _GENERIC.replace("DIR", "st"))

# Which HELPERS texts the functions of a state space need.
_NEEDS = {
    "global": ("mem_global", "mem_past_end", "mem_fault"),
    "shared": ("mem_shared", "mem_fault"),
    "local": ("mem_local", "mem_fault"),
    "param": ("mem_param", "mem_fault"),
    "generic": ("mem_generic", "mem_global", "mem_past_end", "mem_shared", "mem_local", "mem_fault"),
}
_FUNCTION = {
    ("global", False): "mem_global_ld",
    ("global", True): "mem_global_st",
    ("shared", False): "mem_shared_ld",
    ("shared", True): "mem_shared_st",
    ("local", False): "mem_local",
    ("local", True): "mem_local",
    ("param", False): "mem_param",
    ("generic", False): "mem_generic_ld",
    ("generic", True): "mem_generic_st",
}


def space_of(name: str) -> str:
    """Choose the checking rule of a PTX state space; "" is generic addressing."""
    plain = name.partition("::")[0]
    return {"": "generic", "const": "global"}.get(plain, plain)


def pointer_of(e: Emitter, space: str, store: bool, address: Value, nbytes: int, lane: Value) -> Value:
    """Emit the host pointer of one lane's access, and a return if it faults."""
    for name in _NEEDS[space]:
        e.helpers.add(name)
    args = f"ptr %ctx, {address.typed}, i64 {nbytes}, {lane.typed}"
    pointer = e.line(f"call ptr @{_FUNCTION[space, store]}({args})", "ptr", 0)
    failed = e.line(f"icmp eq ptr {pointer.ref}, null", "i1", 0)
    with e.when(failed):
        e.ret(abi.STOP_FAULT)
    return pointer


@dataclass(frozen=True)
class Checked:
    """All lanes' accesses, checked at once by vector arithmetic.

    Attributes:
        ok: scalar i1: every lane's access is possible; else the lanes have to be looked at one by one.
        pointers: <32 x i64> host addresses; idle lanes repeat the first active lane's.
        init: distance from a data pointer to its byte in the table of written bytes (shared memory).
        dirty: <32 x i64> host addresses of the chunks' entries in the dirty table (shared memory).
    """

    ok: Value
    pointers: Value
    init: Value | None = None
    dirty: Value | None = None


def check_all(e: Emitter, space: str, store: bool, lanes: Value, nbytes: int, mask: Value) -> Checked | None:
    """Check the addresses of the lanes in ``mask`` together. None for state spaces without such a check.

    Generic addresses pass if they are global: the windows of the other spaces lie outside of every allocation.
    """
    if space not in ("global", "generic", "shared", "local"):
        return None
    first = e.extract(lanes, e.intrinsic("llvm.cttz", mask, e.flag(True)))
    safe = e.select(e.lanes(mask), lanes, e.splat(first))
    if space in ("global", "generic"):
        table = e.context("alloc", "ptr")
        at = e.pointer(table, e.cast("zext", e.context("alloc_last"), "i64") << 4)
        start, stop = e.load_from(at, 0, "i64"), e.load_from(at, 8, "i64")
        # For stores the read-only mark stays: it makes the end of an allocation negative, and so the room.
        stop = stop & (~abi.PADDED if store else abi.PADDED - 1)
        room = stop - start - nbytes
        some = e.icmp("ne", e.context("alloc_count"), 0) & e.icmp("sge", room, 0)
        return Checked(some & _within(e, safe - e.splat(start), room, nbytes, safe), safe)
    if space == "local":
        size = e.cast("zext", e.context("local_bytes"), "i64")
        base = e.splat(e.context("local", "i64")) + e.lane_ids("i64") * e.splat(size)
        return Checked(e.icmp("uge", size, nbytes) & _within(e, safe, size - nbytes, nbytes, safe), safe + base)
    rank = first >> RANK_SHIFT
    near = e.icmp("ult", rank, abi.MAX_CLUSTER)
    rank = e.select(near, rank, 0)
    data, init, dirty = (_entry(e, name, rank) for name in ("smem", "smem_init", "smem_dirty"))
    room = e.cast("zext", e.context("smem_bytes"), "i64") - nbytes
    offsets = safe - e.splat(rank << RANK_SHIFT)  # a lane of another CTA has an offset beyond any shared memory
    ok = near & e.icmp("ne", data, 0) & _within(e, offsets, room, nbytes, offsets)
    chunks = (offsets >> 3) & -2  # two bytes for every 16
    return Checked(ok, offsets + e.splat(data), init - data, chunks + e.splat(dirty))


def _within(e: Emitter, offsets: Value, room: Value, nbytes: int, lanes: Value) -> Value:
    """Scalar i1: all offsets are at most ``room``, and all addresses are multiples of ``nbytes``."""
    bad = e.icmp("ugt", offsets, e.splat(room))
    if nbytes > 1:
        bad = bad | e.icmp("ne", lanes & (nbytes - 1), 0)
    return e.icmp("eq", e.bits(bad), 0)


def _entry(e: Emitter, table: str, rank: Value) -> Value:
    """Host address of a per-CTA table of the cluster."""
    at = e.pointer("%ctx", (rank << 3) + context_offset(table))
    return e.load_from(at, 0, "i64")


def addresses(e: Emitter, operand: int) -> Value:
    """Emit all lanes' base + offset, as <32 x i64>. A 32-bit base wraps at 32 bits."""
    leaf = e.leaves[operand]
    if leaf == "32":
        low = e.load(operand, "i32") + e.splat(e.cast("trunc", e.imm(), "i32"))
        return e.cast("zext", low, "i64")
    return e.load(operand, "i64") + e.splat(e.imm())


def spill(e: Emitter, values: Value) -> Value:
    """Store a vector in memory, to index it by a lane number."""
    slot = e.line("alloca [32 x i64], align 64", "ptr", 0)
    e.raw(f"store {values.typed}, ptr {slot.ref}, align 64")
    return slot


def lane_of(e: Emitter, slot: Value, lane: Value, kind: str) -> Value:
    """Load element ``lane`` of a spilled vector or a register."""
    at = e.line(f"getelementptr {kind}, ptr {slot.ref}, {lane.typed}", "ptr", 0)
    return e.line(f"load {kind}, ptr {at.ref}, align {int(kind[1:]) // 8}", kind, 0)


def finish(e: Emitter, space: str) -> None:
    """Return; stop if a lane read unwritten shared or out-of-range global memory."""
    if space not in ("shared", "generic", "global"):
        e.ret(abi.CONTINUE)
        return
    fault = e.context("fault")
    clean = e.icmp("eq", fault, 0)
    code = e.line(f"select {clean.typed}, i32 {abi.CONTINUE}, i32 {abi.STOP_FAULT}", "i32", 0)
    e.ret(code)
