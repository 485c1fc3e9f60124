"""Implement instructions across the lanes of a warp. They are shfl, vote, match, redux, elect, activemask.

The driver brings the lanes of a ``.sync`` instruction together first (FLAG_CONVERGE of ``abi.py``), so a handler works
on the lanes that execute. A live lane that the member mask names but that does not execute contributes nothing, and is
reported: hardware would wait for it. So is a lane that executes and that its own mask does not name. Reading the
register of a lane that does not execute by shfl is undefined in the PTX ISA, here it yields the register's bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import abi, fp
from dsv4lib.emulator.native.irtools import Emitter, Value


def gather(e: Emitter, i: int, lane: Value) -> Value:
    """Register operand ``i`` of lane ``lane`` (i32 lanes, each 0..31)."""
    e.load(i, "i32")  # declares the width
    wide = e.cast("zext", lane, "i64")
    pointers = e.line(f"getelementptr i32, ptr {e.address(i).ref}, {wide.typed}", "ptr", abi.LANES)
    name = f"llvm.masked.gather.v{abi.LANES}i32.v{abi.LANES}p0"
    result = f"<{abi.LANES} x i32>"
    types = f"<{abi.LANES} x ptr>, i32, <{abi.LANES} x i1>, {result}"
    e.declarations.add(f"declare {result} @{name}({types})")
    every = e.const(1, "i1")
    return e.line(f"call {result} @{name}({pointers.typed}, i32 4, {every.typed}, {result} poison)", "i32")


def note(e: Emitter, missing: Value) -> None:
    """Put a fault in the context. The lanes of scalar mask ``missing`` do not take part."""
    e.set_context("fault", e.const(abi.FAULT_DIVERGED, "i32", 0))
    e.set_context("fault_address", e.cast("zext", missing, "i64"))


def finish(e: Emitter, missing: Value, outside: Value | None = None) -> None:
    """Return; stop with a report if lanes that must take part are missing, or others take part.

    Both are scalar masks of lanes.
    """
    if outside is not None:
        with e.when(e.icmp("ne", outside, 0)):
            e.set_context("fault", e.const(abi.FAULT_OUTSIDE, "i32", 0))
            e.set_context("fault_address", e.cast("zext", outside, "i64"))
            e.ret(abi.STOP_FAULT)
    with e.when(e.icmp("ne", missing, 0)):
        note(e, missing)
        e.ret(abi.STOP_FAULT)
    e.ret()


def absent(e: Emitter, wanted: Value) -> Value:
    """Find live lanes of scalar mask ``wanted`` that do not execute."""
    return wanted & e.context("live") & ~e.mask()


def absent_members(e: Emitter, i: int) -> Value:
    """Find live lanes that are named as members and do not execute.

    Executing lanes name members by operand ``i``.
    """
    return absent(e, reduce(e, "or", e.load(i, "i32"), e.mask(), 0))


def uninvited(e: Emitter, i: int) -> Value:
    """Find executing lanes that are not in their own member mask, operand ``i``."""
    return e.mask() & ~e.bits(e.icmp("ne", (e.load(i, "i32") >> e.lane_ids()) & 1, 0))


@contextmanager
def member_groups(e: Emitter, i: int) -> Iterator[Value]:
    """Run the block once per member mask. It yields the executing lanes that have the mask and that it names.

    Lanes may come together with different masks, operand ``i``, such as two halves of a warp each with its own. Inside,
    only the lanes of the group execute.
    """
    masks, every = e.load(i, "i32"), e.mask()
    missing, outside = absent_members(e, i), uninvited(e, i)  # before the result overwrites the mask
    before, rest = e.block, Value(e, "%ungrouped", "i32", 0)
    e.raw("br label %group")
    e.label("group")
    e.raw(f"%ungrouped = phi i32 [ {every.ref}, %{before} ], [ %others, %grouped ]")
    first = e.intrinsic("llvm.cttz", rest, e.flag(False)) & (abi.LANES - 1)
    wanted = e.extract(masks, first)
    group = e.bits(e.icmp("eq", masks, e.splat(wanted))) & rest
    with e.executing(group):
        yield wanted & group
    e.raw("br label %grouped")
    e.label("grouped")
    e.raw(f"%others = and i32 %ungrouped, {(~group).ref}")
    again = e.icmp("ne", Value(e, "%others", "i32", 0), 0)
    e.raw(f"br i1 {again.ref}, label %group, label %regrouped")
    e.label("regrouped")
    finish(e, missing, outside)


@isa.native("shfl.sync.<mode:up|down|bfly|idx>.b32")
def shfl(e: Emitter, form: Form) -> None:
    """d[|p] = a of another lane; p says that this lane lies in the segment."""
    pair = len(e.groups[0]) == 2
    first = 2 if pair else 1
    b, c = e.load(first + 1, "i32") & 31, e.load(first + 2, "i32")
    missing, outside = absent_members(e, first + 3), uninvited(e, first + 3)
    lane = e.lane_ids()
    segment = (c >> 8) & 31
    low = lane & segment
    limit = low | (c & ~segment & 31)
    mode = form.get("mode")
    sources = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": low | (b & ~segment)}
    j = sources[mode]
    inside = e.icmp("sge" if mode == "up" else "sle", j, limit)
    source = e.select(inside, j, lane)
    e.store(0, gather(e, first, source))
    if pair:
        e.store_pred(1, inside)
    finish(e, missing, outside)


@isa.native("movmatrix.sync.aligned.m8n8.trans.b16")
def movmatrix(e: Emitter, form: Form) -> None:
    """d = transposed 8x8 matrix of 16-bit elements. Lane i holds elements 2i and 2i + 1 in row order."""
    elements = e.bitcast(e.load(1, "i32"), "i16")
    e.store(0, e.bitcast(e.shuffle(elements, [(k % 8) * 8 + k // 8 for k in range(64)]), "i32"))
    finish(e, absent(e, e.const(-1, "i32", 0)))


@isa.native("vote.sync.<mode:all|any|uni>.pred")
def vote(e: Emitter, form: Form) -> None:
    """d = the predicate holds in all, any, or equally in the members."""
    with member_groups(e, 2) as part:
        yes = e.pred(1) & part
        every, none = e.icmp("eq", yes, part), e.icmp("eq", yes, 0)
        answer = {"all": every, "any": none ^ 1, "uni": every | none}[form.get("mode")]
        e.store_pred(0, e.cast("sext", answer, "i32"))


@isa.native("vote.sync.ballot.b32")
def ballot(e: Emitter, form: Form) -> None:
    """d = member lanes whose predicate holds."""
    with member_groups(e, 2) as part:
        e.store(0, e.splat(e.pred(1) & part))


@isa.native("activemask.b32")
def activemask(e: Emitter, form: Form) -> None:
    """d = executing lanes."""
    e.store(0, e.splat(e.mask()))


@isa.native("elect.sync", note="elects the lowest executing lane of the member mask")
def elect(e: Emitter, form: Form) -> None:
    """d|p = the leader's lane | this lane is the leader."""
    with member_groups(e, 2) as part:
        leader = e.intrinsic("llvm.cttz", part, e.flag(False))
        e.store(0, e.splat(leader))
        e.store_pred(1, part & -part)


@isa.native("match.any.sync.<type:b32|b64>")
def match_any(e: Emitter, form: Form) -> None:
    """d = members with this lane's value."""
    a = e.load(1, f"i{form.get('type')[1:]}")
    table = e.line(f"alloca <{abi.LANES} x i32>, align 64", "ptr", 0)
    e.raw(f"store {e.const(0, 'i32').typed}, ptr {table.ref}, align 64")
    with member_groups(e, 2) as part:
        with e.each_lane(part) as lane:
            same = e.bits(e.icmp("eq", a, e.splat(e.extract(a, lane)))) & part
            e.store_to(table, e.cast("zext", lane, "i64") << 2, same)
        e.store(0, e.load_from(table, 0, "i32", abi.LANES))


@isa.native("match.all.sync.<type:b32|b64>")
def match_all(e: Emitter, form: Form) -> None:
    """d[|p] = the members if they all have one value, else 0 | whether they do."""
    pair = len(e.groups[0]) == 2
    first = 2 if pair else 1
    a = e.load(first, f"i{form.get('type')[1:]}")
    with member_groups(e, first + 1) as part:
        lowest = e.intrinsic("llvm.cttz", part, e.flag(False)) & (abi.LANES - 1)
        same = e.bits(e.icmp("eq", a, e.splat(e.extract(a, lowest)))) & part
        every = e.cast("sext", e.icmp("eq", same, part), "i32")
        e.store(0, e.splat(every & part))
        if pair:
            e.store_pred(1, every)


def reduce(e: Emitter, op: str, a: Value, part: Value, identity: int) -> Value:
    """Reduce a scalar over the lanes of ``part``."""
    return e.intrinsic(f"llvm.vector.reduce.{op}", e.select(e.lanes(part), a, identity), n=0)


# PTX operation and type -> LLVM reduction and its neutral element.
REDUCTIONS = {
    ("add", "u32"): ("add", 0),
    ("add", "s32"): ("add", 0),
    ("min", "u32"): ("umin", 0xFFFFFFFF),
    ("max", "u32"): ("umax", 0),
    ("min", "s32"): ("smin", 0x7FFFFFFF),
    ("max", "s32"): ("smax", 0x80000000),
    ("and", "b32"): ("and", 0xFFFFFFFF),
    ("or", "b32"): ("or", 0),
    ("xor", "b32"): ("xor", 0),
}


@isa.native("redux.sync.<op:add|min|max>.<type:u32|s32>", "redux.sync.<op:and|or|xor>.<type:b32>")
def redux(e: Emitter, form: Form) -> None:
    """d = reduction over the members."""
    op, identity = REDUCTIONS[form.get("op"), form.get("type")]
    with member_groups(e, 2) as part:
        e.store(0, e.splat(reduce(e, op, e.load(1, "i32"), part, identity)))


@isa.native("redux.sync.<op:min|max>[.<abs:abs>][.<nan:NaN>].<type:f32>")
def redux_float(e: Emitter, form: Form) -> None:
    """d = minimum or maximum over the members. -0 < +0; NaN only if all are, or with .NaN if any is."""
    bits = e.load(1, "i32")
    if form.has("abs"):
        bits = bits & 0x7FFFFFFF
    not_numbers = e.bits(fp.is_nan(e, e.bitcast(bits, "f32")))
    key = bits ^ (bits.sar(31) & 0x7FFFFFFF)  # integers in the order of the floats
    op, identity = REDUCTIONS[form.get("op"), "s32"]
    with member_groups(e, 2) as part:
        nans, numbers = not_numbers & part, part & ~not_numbers
        best = reduce(e, op, key, numbers, identity)
        best = best ^ (best.sar(31) & 0x7FFFFFFF)
        spoiled = e.icmp("ne", nans, 0) if form.has("nan") else e.icmp("eq", numbers, 0)
        e.store(0, e.splat(e.select(spoiled, best.like(0x7FFFFFFF), best)))
