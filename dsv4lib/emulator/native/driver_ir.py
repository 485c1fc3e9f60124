"""Run a warp in LLVM IR. Fetch a record, evaluate its guard, call its handler, follow branches.

Divergence: a warp is one *running* group of lanes and up to 31 *waiting* ones, each with its own pc. The loop runs the
group with the lowest pc and merges groups with the same pc. Structured code reconverges where it joins, because a join
lies after everything that leads to it. ``.aligned`` and ``.sync`` instructions need their lanes converged even where
the compiler laid the code out differently: a group that reaches one without them (the live lanes of its member masks,
or all) lets all other groups run first, and goes on alone only when every group stands at such an instruction.

Progress: within ``run`` a spinning group keeps the warp. The scheduler breaks that by rotating groups (``sticky`` = 1:
run this group for one slice), and ``sticky`` = 2 lets a group pass one converging instruction alone.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import abi, library
from dsv4lib.emulator.native.irtools import HELPERS, Emitter, context_offset, record_offset

NEVER = 0x7FFFFFFF  # watch: nothing waits
_ALWAYS = -0x80000000  # watch: look for merges after every instruction
_LATE = 1 << 30  # added to the pc of a group that should converge first


@isa.native("bra[.<uni:uni>]")
def bra(e: Emitter, form: Form) -> None:
    """Branch; the driver moves the lanes of ``mask`` to the record's target."""
    e.ret(abi.BRANCH)


@isa.native("exit", "ret[.<uni:uni>]", note="ret leaves the kernel: device functions are inlined in what we run")
def leave(e: Emitter, form: Form) -> None:
    """End of the kernel for the lanes of ``mask``."""
    e.ret(abi.EXIT)


def _fields() -> dict[str, str]:
    """Offsets as text for the IR templates below."""
    out = {f"C_{name}": str(context_offset(name)) for name in abi.CONTEXT.names}
    out |= {f"R_{name}": str(record_offset(name)) for name in abi.RECORD.names}
    out["RECORD"] = str(abi.RECORD.itemsize)
    out |= {"NEVER": str(NEVER), "ALWAYS": str(_ALWAYS), "LATE": str(_LATE), "CONVERGE": str(abi.FLAG_CONVERGE)}
    out["MEMBERS"] = str(abi.FLAG_MEMBERS)
    return out


def fill(template: str) -> str:
    """Replace ``$NAME`` by offsets and constants of the binary interface."""
    for name, value in sorted(_fields().items(), key=lambda item: -len(item[0])):
        template = template.replace(f"${name}", value)
    return template


# i32 key(ctx, records, pc, mask, forced): order in which groups run.
_KEY = """
define internal i32 @driver_key(ptr %ctx, ptr %records, i32 %pc, i32 %mask, i32 %sticky) nounwind {
  %empty = icmp eq i32 %mask, 0
  br i1 %empty, label %none, label %some
none:
  ret i32 $NEVER
some:
  %pc64 = sext i32 %pc to i64
  %at = mul i64 %pc64, $RECORD
  %rec = getelementptr i8, ptr %records, i64 %at
  %pf = getelementptr i8, ptr %rec, i64 $R_flags
  %flags = load i32, ptr %pf, align 4
  %bit = and i32 %flags, $CONVERGE
  %conv = icmp ne i32 %bit, 0
  %pl = getelementptr i8, ptr %ctx, i64 $C_live
  %live = load i32, ptr %pl, align 4
  %partial = icmp ne i32 %live, %mask
  %free = icmp ne i32 %sticky, 2
  %a = and i1 %conv, %partial
  %b = and i1 %a, %free
  br i1 %b, label %apart, label %now
now:
  ret i32 %pc
apart:
  %mbit = and i32 %flags, $MEMBERS
  %named = icmp ne i32 %mbit, 0
  %late = add i32 %pc, $LATE
  br i1 %named, label %members, label %wait
members:
  %po = getelementptr i8, ptr %rec, i64 $R_target
  %offset = load i32, ptr %po, align 4
  %offset64 = zext i32 %offset to i64
  %pr = getelementptr i8, ptr %ctx, i64 $C_regs
  %regs = load ptr, ptr %pr, align 8
  %pm = getelementptr i8, ptr %regs, i64 %offset64
  %values = load <32 x i32>, ptr %pm, align 4
  %on = bitcast i32 %mask to <32 x i1>
  %mine = select <32 x i1> %on, <32 x i32> %values, <32 x i32> zeroinitializer
  %wanted = call i32 @llvm.vector.reduce.or.v32i32(<32 x i32> %mine)
  %alive = and i32 %wanted, %live
  %not = xor i32 %mask, -1
  %missing = and i32 %alive, %not
  %converged = icmp eq i32 %missing, 0
  %key = select i1 %converged, i32 %pc, i32 %late
  ret i32 %key
wait:
  ret i32 %late
}
"""

# i32 select(ctx, records): merge the running group with those at its pc, run the group that comes first.
# 0 = it has to wait for parked lanes, 1 = go.
_SELECT = """
define internal i32 @driver_select(ptr %ctx, ptr %records) nounwind {
entry:
  %ppc = getelementptr i8, ptr %ctx, i64 $C_pc
  %pgroup = getelementptr i8, ptr %ctx, i64 $C_group
  %pn = getelementptr i8, ptr %ctx, i64 $C_groups
  %psticky = getelementptr i8, ptr %ctx, i64 $C_sticky
  %pwatch = getelementptr i8, ptr %ctx, i64 $C_watch
  %pcs = getelementptr i8, ptr %ctx, i64 $C_group_pc
  %masks = getelementptr i8, ptr %ctx, i64 $C_group_mask
  %pparked = getelementptr i8, ptr %ctx, i64 $C_parked
  %pc = load i32, ptr %ppc, align 4
  %group = load i32, ptr %pgroup, align 4
  %n = load i32, ptr %pn, align 4
  %sticky = load i32, ptr %psticky, align 4
  br label %merge
merge:
  %i = phi i32 [ 0, %entry ], [ %i, %drop ], [ %i.next, %keep ]
  %count = phi i32 [ %n, %entry ], [ %less, %drop ], [ %count, %keep ]
  %all = phi i32 [ %group, %entry ], [ %more, %drop ], [ %all, %keep ]
  %end = icmp sge i32 %i, %count
  br i1 %end, label %merged, label %look
look:
  %qpc = getelementptr i32, ptr %pcs, i32 %i
  %qmask = getelementptr i32, ptr %masks, i32 %i
  %ipc = load i32, ptr %qpc, align 4
  %same = icmp eq i32 %ipc, %pc
  %running = icmp ne i32 %group, 0
  %merges = and i1 %same, %running
  br i1 %merges, label %drop, label %keep
drop:
  %imask = load i32, ptr %qmask, align 4
  %more = or i32 %all, %imask
  %less = sub i32 %count, 1
  %lpc = getelementptr i32, ptr %pcs, i32 %less
  %lmask = getelementptr i32, ptr %masks, i32 %less
  %lastpc = load i32, ptr %lpc, align 4
  %lastmask = load i32, ptr %lmask, align 4
  store i32 %lastpc, ptr %qpc, align 4
  store i32 %lastmask, ptr %qmask, align 4
  br label %merge
keep:
  %i.next = add i32 %i, 1
  br label %merge
merged:
  store i32 %count, ptr %pn, align 4
  store i32 %all, ptr %pgroup, align 4
  %mykey = call i32 @driver_key(ptr %ctx, ptr %records, i32 %pc, i32 %all, i32 %sticky)
  %stay = icmp eq i32 %sticky, 1
  %ready = icmp slt i32 %mykey, $LATE
  %stick = and i1 %stay, %ready
  br i1 %stick, label %stuck, label %choose
stuck:
  %any = icmp sgt i32 %count, 0
  %w = select i1 %any, i32 $ALWAYS, i32 $NEVER
  store i32 %w, ptr %pwatch, align 4
  ret i32 1
choose:
  br label %best
best:
  %j = phi i32 [ 0, %choose ], [ %j.next, %better ]
  %bi = phi i32 [ -1, %choose ], [ %bi.next, %better ]
  %bk = phi i32 [ %mykey, %choose ], [ %bk.next, %better ]
  %done = icmp sge i32 %j, %count
  br i1 %done, label %swap, label %better
better:
  %rpc = getelementptr i32, ptr %pcs, i32 %j
  %rmask = getelementptr i32, ptr %masks, i32 %j
  %jpc = load i32, ptr %rpc, align 4
  %jmask = load i32, ptr %rmask, align 4
  %jkey = call i32 @driver_key(ptr %ctx, ptr %records, i32 %jpc, i32 %jmask, i32 %sticky)
  %lower = icmp slt i32 %jkey, %bk
  %bi.next = select i1 %lower, i32 %j, i32 %bi
  %bk.next = select i1 %lower, i32 %jkey, i32 %bk
  %j.next = add i32 %j, 1
  br label %best
swap:
  %other = icmp sge i32 %bi, 0
  br i1 %other, label %exchange, label %settle
exchange:
  %xpc = getelementptr i32, ptr %pcs, i32 %bi
  %xmask = getelementptr i32, ptr %masks, i32 %bi
  %npc = load i32, ptr %xpc, align 4
  %nmask = load i32, ptr %xmask, align 4
  store i32 %npc, ptr %ppc, align 4
  store i32 %nmask, ptr %pgroup, align 4
  %gone = icmp eq i32 %all, 0
  br i1 %gone, label %shrink, label %putback
putback:
  store i32 %pc, ptr %xpc, align 4
  store i32 %all, ptr %xmask, align 4
  br label %remerge
shrink:
  %fewer = sub i32 %count, 1
  %ypc = getelementptr i32, ptr %pcs, i32 %fewer
  %ymask = getelementptr i32, ptr %masks, i32 %fewer
  %y1 = load i32, ptr %ypc, align 4
  %y2 = load i32, ptr %ymask, align 4
  store i32 %y1, ptr %xpc, align 4
  store i32 %y2, ptr %xmask, align 4
  store i32 %fewer, ptr %pn, align 4
  br label %remerge
remerge:
  %again = call i32 @driver_select(ptr %ctx, ptr %records)
  ret i32 %again
settle:
  store i32 0, ptr %psticky, align 4
  br label %watching
watching:
  %k = phi i32 [ 0, %settle ], [ %k.next, %scan ]
  %low = phi i32 [ $NEVER, %settle ], [ %low.next, %scan ]
  %over = icmp sge i32 %k, %count
  br i1 %over, label %finish, label %scan
scan:
  %spc = getelementptr i32, ptr %pcs, i32 %k
  %kpc = load i32, ptr %spc, align 4
  %under = icmp slt i32 %kpc, %low
  %low.next = select i1 %under, i32 %kpc, i32 %low
  %k.next = add i32 %k, 1
  br label %watching
finish:
  store i32 %low, ptr %pwatch, align 4
  %parked = load i32, ptr %pparked, align 4
  %none_parked = icmp eq i32 %parked, 0
  %free = icmp slt i32 %bk, $LATE
  %ok = or i1 %none_parked, %free
  %go = zext i1 %ok to i32
  ret i32 %go
}
"""

# void push(ctx, pc, mask): add a waiting group, joining one at the same pc.
_PUSH = """
define internal void @driver_push(ptr %ctx, i32 %pc, i32 %mask) nounwind {
entry:
  %pn = getelementptr i8, ptr %ctx, i64 $C_groups
  %pcs = getelementptr i8, ptr %ctx, i64 $C_group_pc
  %masks = getelementptr i8, ptr %ctx, i64 $C_group_mask
  %pwatch = getelementptr i8, ptr %ctx, i64 $C_watch
  %n = load i32, ptr %pn, align 4
  %watch = load i32, ptr %pwatch, align 4
  %lower = icmp slt i32 %pc, %watch
  %w = select i1 %lower, i32 %pc, i32 %watch
  store i32 %w, ptr %pwatch, align 4
  br label %loop
loop:
  %i = phi i32 [ 0, %entry ], [ %next, %step ]
  %end = icmp sge i32 %i, %n
  br i1 %end, label %new, label %test
test:
  %q = getelementptr i32, ptr %pcs, i32 %i
  %ipc = load i32, ptr %q, align 4
  %same = icmp eq i32 %ipc, %pc
  br i1 %same, label %join, label %step
step:
  %next = add i32 %i, 1
  br label %loop
join:
  %m = getelementptr i32, ptr %masks, i32 %i
  %old = load i32, ptr %m, align 4
  %sum = or i32 %old, %mask
  store i32 %sum, ptr %m, align 4
  ret void
new:
  %q2 = getelementptr i32, ptr %pcs, i32 %n
  %m2 = getelementptr i32, ptr %masks, i32 %n
  store i32 %pc, ptr %q2, align 4
  store i32 %mask, ptr %m2, align 4
  %more = add i32 %n, 1
  store i32 %more, ptr %pn, align 4
  ret void
}
"""

_RUN = """
define i32 @NAME(ptr %ctx, ptr %records, i32 %quantum) nounwind {
entry:
  %pregs = getelementptr i8, ptr %ctx, i64 $C_regs
  %regs.i = load i64, ptr %pregs, align 8
  %regs = inttoptr i64 %regs.i to ptr
  %pmask = getelementptr i8, ptr %ctx, i64 $C_mask
  %pgroup = getelementptr i8, ptr %ctx, i64 $C_group
  %ppc = getelementptr i8, ptr %ctx, i64 $C_pc
  %plive = getelementptr i8, ptr %ctx, i64 $C_live
  %pn = getelementptr i8, ptr %ctx, i64 $C_groups
  %pwatch = getelementptr i8, ptr %ctx, i64 $C_watch
  br label %choose
choose:
  %c.left = phi i32 [ %quantum, %entry ], [ %left, %merge ], [ %f.left, %alone ], [ %x.left, %change ]
  %picked = call i32 @driver_select(ptr %ctx, ptr %records)
  %s.pc = load i32, ptr %ppc, align 4
  %can = icmp ne i32 %picked, 0
  br i1 %can, label %budget, label %stalled
stalled:
  br label %stop
next:
  %pc = phi i32 [ %n.pc, %advance ], [ %j.pc, %jumped ], [ %target, %converged ], [ %d.pc, %diverge ]
  %left = phi i32 [ %n.left, %advance ], [ %b.left, %jumped ], [ %b.left, %converged ], [ %b.left, %diverge ]
  %watch = load i32, ptr %pwatch, align 4
  %met = icmp sge i32 %pc, %watch
  br i1 %met, label %merge, label %fetch
merge:
  store i32 %pc, ptr %ppc, align 4
  br label %choose
fetch:
  %f.pc = phi i32 [ %pc, %next ]
  %f.left = phi i32 [ %left, %next ]
  %f.pc64 = sext i32 %f.pc to i64
  %f.at = mul i64 %f.pc64, $RECORD
  %f.rec = getelementptr i8, ptr %records, i64 %f.at
  %pflags = getelementptr i8, ptr %f.rec, i64 $R_flags
  %flags = load i32, ptr %pflags, align 4
  %conv.bit = and i32 %flags, $CONVERGE
  %conv = icmp ne i32 %conv.bit, 0
  br i1 %conv, label %converged.test, label %budget
converged.test:
  %t.group = load i32, ptr %pgroup, align 4
  %t.live = load i32, ptr %plive, align 4
  %whole = icmp eq i32 %t.group, %t.live
  br i1 %whole, label %budget, label %alone
alone:
  store i32 %f.pc, ptr %ppc, align 4
  br label %choose
budget:
  %g.pc = phi i32 [ %s.pc, %choose ], [ %f.pc, %fetch ], [ %f.pc, %converged.test ]
  %g.left = phi i32 [ %c.left, %choose ], [ %f.left, %fetch ], [ %f.left, %converged.test ]
  %out = icmp sle i32 %g.left, 0
  br i1 %out, label %expired, label %guard
expired:
  store i32 %g.pc, ptr %ppc, align 4
  br label %stop
guard:
  %pc64 = sext i32 %g.pc to i64
  %at = mul i64 %pc64, $RECORD
  %rec = getelementptr i8, ptr %records, i64 %at
  %group = load i32, ptr %pgroup, align 4
  %pg = getelementptr i8, ptr %rec, i64 $R_guard
  %offset = load i32, ptr %pg, align 4
  %guarded = icmp sge i32 %offset, 0
  br i1 %guarded, label %predicate, label %execute
predicate:
  %offset64 = zext i32 %offset to i64
  %pp = getelementptr i8, ptr %regs, i64 %offset64
  %p = load i32, ptr %pp, align 4
  %png = getelementptr i8, ptr %rec, i64 $R_guard_negated
  %negated = load i32, ptr %png, align 4
  %flip = sub i32 0, %negated
  %q = xor i32 %p, %flip
  %on = and i32 %group, %q
  %none_on = icmp eq i32 %on, 0
  br i1 %none_on, label %advance, label %execute
execute:
  %mask = phi i32 [ %group, %guard ], [ %on, %predicate ]
  store i32 %mask, ptr %pmask, align 4
  store i32 %g.pc, ptr %ppc, align 4
  %ph = getelementptr i8, ptr %rec, i64 $R_handler
  %address = load i64, ptr %ph, align 8
  %b.left = sub i32 %g.left, 1
  %python = icmp eq i64 %address, 0
  br i1 %python, label %service, label %call
call:
  %handler = inttoptr i64 %address to ptr
  %rc = call i32 %handler(ptr %ctx, ptr %rec)
  switch i32 %rc, label %fault [
    i32 0, label %advance
    i32 1, label %jumped
    i32 2, label %service
    i32 5, label %branch
    i32 6, label %exit ]
advance:
  %n.pc = add i32 %g.pc, 1
  %n.left = sub i32 %g.left, 1
  br label %next
jumped:
  %j.pc = load i32, ptr %ppc, align 4
  br label %next
branch:
  %pt = getelementptr i8, ptr %rec, i64 $R_target
  %target = load i32, ptr %pt, align 4
  %uniform = icmp eq i32 %mask, %group
  br i1 %uniform, label %converged, label %diverge
converged:
  br label %next
diverge:
  %taken.not = xor i32 %mask, -1
  %rest = and i32 %group, %taken.not
  %fall = add i32 %g.pc, 1
  %back = icmp slt i32 %target, %fall
  %d.pc = select i1 %back, i32 %target, i32 %fall
  %d.mask = select i1 %back, i32 %mask, i32 %rest
  %w.pc = select i1 %back, i32 %fall, i32 %target
  %w.mask = select i1 %back, i32 %rest, i32 %mask
  store i32 %d.mask, ptr %pgroup, align 4
  call void @driver_push(ptr %ctx, i32 %w.pc, i32 %w.mask)
  br label %next
exit:
  %x.not = xor i32 %mask, -1
  %live = load i32, ptr %plive, align 4
  %alive = and i32 %live, %x.not
  store i32 %alive, ptr %plive, align 4
  %remain = and i32 %group, %x.not
  store i32 %remain, ptr %pgroup, align 4
  %x.left = sub i32 %g.left, 1
  %some = icmp ne i32 %remain, 0
  br i1 %some, label %advance, label %empty
empty:
  %waiting = load i32, ptr %pn, align 4
  %others = icmp ne i32 %waiting, 0
  br i1 %others, label %change, label %exited
change:
  br label %choose
exited:
  br label %stop
service:
  br label %stop
fault:
  br label %stop
stop:
  %reason = phi i32 [ $STALLED, %stalled ], [ $DONE, %expired ], [ $EXITED, %exited ], [ $SERVICE, %service ],
                    [ $FAULT, %fault ]
  %unused = phi i32 [ %c.left, %stalled ], [ %g.left, %expired ], [ %x.left, %exited ], [ %g.left, %service ],
                    [ %g.left, %fault ]
  %used = sub i32 %quantum, %unused
  %used64 = sext i32 %used to i64
  %pe = getelementptr i8, ptr %ctx, i64 $C_executed
  %e0 = load i64, ptr %pe, align 8
  %e1 = add i64 %e0, %used64
  store i64 %e1, ptr %pe, align 8
  ret i32 %reason
}
"""

HELPERS["driver_key"] = fill(_KEY)
HELPERS["driver_select"] = fill(_SELECT)
HELPERS["driver_push"] = fill(_PUSH)


# At the top of `execute`, in the loop that counts: executions of each record, modulo 2^32.
_COUNT = """
  %pcount = getelementptr i8, ptr %rec, i64 $R_pad
  %count = load i32, ptr %pcount, align 4
  %count.next = add i32 %count, 1
  store i32 %count.next, ptr %pcount, align 4
"""


@functools.cache
def run_loop(counting: bool = False) -> Callable[[int, int, int], int]:
    """Compile the loop: ``run(context address, records address, quantum) -> reason``.

    With ``counting`` it counts the executions of each record in the record's ``pad`` field.
    """
    text = _RUN
    if counting:
        head = "  store i32 %mask, ptr %pmask, align 4\n"
        text = text.replace(head, head + _COUNT)
    for name in ("STALLED", "SERVICE", "EXITED", "DONE", "FAULT"):
        text = text.replace(f"${name}", str(getattr(abi, name)))
    helpers = ("driver_key", "driver_select", "driver_push")
    declared = ["declare i32 @llvm.vector.reduce.or.v32i32(<32 x i32>)"]
    address = library.default().function(fill(text), helpers, declared)
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)(address)
