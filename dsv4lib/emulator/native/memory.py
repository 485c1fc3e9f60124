"""ld, ldu and st: every state space, type, vector and modifier, lane by lane with bounds and alignment checks.

Memory operations of a warp are performed in program order and become visible at once, which is one of the executions
that every ordering semantics (weak, relaxed, acquire, release, volatile, mmio) allows. Cache operators, eviction
priorities, prefetch sizes and cache policies are hints; all are accepted by name, none by accident.
Source: PTX ISA, "Data Movement and Conversion Instructions": ld, ld.global.nc, ldu, st.
"""

from __future__ import annotations

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.access import addresses, finish, lane_of, pointer_of, space_of, spill
from dsv4lib.emulator.native.irtools import BITS, Emitter, Value

TYPES = "b8|b16|b32|b64|b128|u8|u16|u32|u64|s8|s16|s32|s64|f32|f64"
_SPACES = "const|global|local|param|param::entry|shared|shared::cta|shared::cluster"
_STORES = "global|local|shared|shared::cta|shared::cluster"
_SCOPE = "<scope:cta|cluster|gpu|sys>"
_L1 = "<l1:L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate>"
_L2 = "<l2:L2::evict_normal|L2::evict_first|L2::evict_last>"
_HINT = "<hint:L2::cache_hint>"
_PREFETCH = "<prefetch:L2::64B|L2::128B|L2::256B>"
_TAIL = f"[.<vec:v2|v4|v8>].<type:{TYPES}>"
_EVICT = f"[.{_L1}][.{_L2}][.{_HINT}][.{_PREFETCH}]{_TAIL}"

LOADS = (
    f"ld[.<weak:weak>][.<space:{_SPACES}>]{_EVICT}",
    f"ld[.<weak:weak>][.<space:{_SPACES}>].<cop:ca|cg|cs|lu|cv>[.{_HINT}][.{_PREFETCH}]{_TAIL}",
    f"ld.volatile[.<space:{_SPACES}>][.{_PREFETCH}]{_TAIL}",
    f"ld.<sem:relaxed|acquire>.{_SCOPE}[.<space:{_SPACES}>]{_EVICT}",
    f"ld.mmio.<sem:relaxed|acquire>.sys[.<space:global>].<type:{TYPES}>",
    f"ld.<space:global>.nc{_EVICT}",
    f"ld.<space:global>.<cop:ca|cg|cs>.nc[.{_HINT}][.{_PREFETCH}]{_TAIL}",
    f"ldu[.<space:global>][.<vec:v2|v4>].<type:{TYPES}>",
)
STORES = (
    f"st[.<weak:weak>][.<space:{_STORES}>][.{_L1}][.{_L2}][.{_HINT}]{_TAIL}",
    f"st[.<weak:weak>][.<space:{_STORES}>].<cop:wb|cg|cs|wt>[.{_HINT}]{_TAIL}",
    f"st.volatile[.<space:{_STORES}>]{_TAIL}",
    f"st.<sem:relaxed|release>.{_SCOPE}[.<space:{_STORES}>][.{_L1}][.{_L2}][.{_HINT}]{_TAIL}",
    f"st.mmio.<sem:relaxed|release>.sys[.<space:global>].<type:{TYPES}>",
)


def element_bits(ptx: str) -> int:
    """Width of a PTX type."""
    return int(ptx.lstrip("bufsx"))


def vector_length(form: Form, bits: int, operands: range, e: Emitter) -> int:
    """Elements per lane, checked against the operand list and the widest access.

    Raises:
        EmulatorError: the vector is too wide or does not match its operands.
    """
    n = int(form.get("vec", "v1")[1:])
    # 32-byte accesses exist for global memory only: v8 of 32 bits and v4 of 64 bits (sm_100+).
    widest = 256 if form.get("space", "global") == "global" else 128
    if n * bits > widest or (n == 8 and bits != 32):
        raise EmulatorError(f"{form.opcode}: {n} elements of {bits} bits are not an access of this state space")
    if len(operands) != n:
        raise EmulatorError(f"{form.opcode} needs {n} registers, not {len(operands)}")
    return n


@isa.native(*LOADS)
def load(e: Emitter, form: Form) -> None:
    """Load; narrow values are sign- or zero-extended into wider registers."""
    bits, space = element_bits(form.get("type")), space_of(form.get("space"))
    targets, base = e.groups[0], e.groups[1][0]
    n = vector_length(form, bits, targets, e)
    if e.leaves[base] == "i":
        _load_uniform(e, form, space, bits, base)
        return
    slot = spill(e, addresses(e, base))
    places = [None if e.leaves[t] == "_" else target(e, t, bits) for t in targets]
    with e.each_lane() as lane:
        pointer = pointer_of(e, space, False, lane_of(e, slot, lane, "i64"), n * bits // 8, lane)
        for k, place in enumerate(places):
            if place is not None:
                put(e, place, lane, element(e, pointer, k, bits), form.get("type"))
    count(e, space, slot, n * bits // 8)
    finish(e, space)


def _load_uniform(e: Emitter, form: Form, space: str, bits: int, base: int) -> None:
    """All lanes read the same address (a parameter, a variable): one access, broadcast."""
    targets = e.groups[0]
    address = e.load_from(e.address(base), 0, "i64") + e.imm()
    e.widths[base] = 64
    lane = e.intrinsic("llvm.cttz", e.mask(), e.flag(True))
    pointer = pointer_of(e, space, False, address, len(targets) * bits // 8, lane)
    for k, t in enumerate(targets):
        if e.leaves[t] == "_":
            continue
        width = e.register_bits(t, bits)
        check_width(e, width, bits)
        if bits == 128:
            low, high = (e.splat(e.load_from(pointer, 16 * k + 8 * h, "i64", align=8)) for h in range(2))
            e.store(t, e.shuffle(low, range(64), high))
            continue
        value = element(e, pointer, k, bits)
        if width > bits:
            value = e.resize(value, f"i{width}", form.get("type").startswith("s"))
        e.store(t, e.splat(value))
    finish(e, space)


@isa.native(*STORES)
def store(e: Emitter, form: Form) -> None:
    """Store; wider registers are truncated. Of lanes that store to the same address the highest one wins."""
    bits, space = element_bits(form.get("type")), space_of(form.get("space"))
    base, sources = e.groups[0][0], e.groups[1]
    n = vector_length(form, bits, sources, e)
    slot = spill(e, addresses(e, base))
    places = [source(e, s, bits) for s in sources]
    with e.each_lane() as lane:
        pointer = pointer_of(e, space, True, lane_of(e, slot, lane, "i64"), n * bits // 8, lane)
        for k, place in enumerate(places):
            value = get(e, place, lane, bits)
            e.raw(f"store {value.typed}, ptr {e.pointer(pointer, k * bits // 8).ref}, align {bits // 8}")
    count(e, space, slot, n * bits // 8)
    e.ret(abi.CONTINUE)


# --- lanes of registers -----------------------------------------------------------------------------------------------


def check_width(e: Emitter, width: int, bits: int) -> None:
    """Refuse registers narrower than the type.

    Raises:
        EmulatorError: the register cannot hold the value.
    """
    if width < bits:
        raise EmulatorError(f"{e.form.opcode}: a {width}-bit register for {bits} bits")


def target(e: Emitter, i: int, bits: int) -> tuple[Value, int]:
    """Address and width of a destination register."""
    width = e.register_bits(i, bits)
    check_width(e, width, bits)
    e.widths[i] = width
    e.stores.add(i)
    return e.address(i), width


def source(e: Emitter, i: int, bits: int) -> tuple[Value, int]:
    """Address and width of a source register or constant."""
    width = e.register_bits(i, bits)
    check_width(e, width, bits)
    e.widths[i] = width
    return e.address(i), width


def element(e: Emitter, pointer: Value, k: int, bits: int) -> Value:
    """Element ``k`` at a checked pointer, a scalar."""
    kind = f"i{bits}"
    at = e.pointer(pointer, k * bits // 8)
    return e.line(f"load {kind}, ptr {at.ref}, align {bits // 8}", kind, 0)


def put(e: Emitter, place: tuple[Value, int], lane: Value, value: Value, ptx: str) -> None:
    """Write one lane of a register, extended to its width."""
    at, width = place
    bits = BITS[value.kind]
    if width == 128:
        low = e.cast("trunc", value, "i64")
        high = e.cast("trunc", value >> 64, "i64")
        for part, offset in ((low, 0), (high, 8 * abi.LANES)):
            half = e.pointer(at, offset)
            q = e.line(f"getelementptr i64, ptr {half.ref}, {lane.typed}", "ptr", 0)
            e.raw(f"store {part.typed}, ptr {q.ref}, align 8")
        return
    if width > bits:
        value = e.resize(value, f"i{width}", ptx.startswith("s"))
    q = e.line(f"getelementptr i{width}, ptr {at.ref}, {lane.typed}", "ptr", 0)
    e.raw(f"store {value.typed}, ptr {q.ref}, align {width // 8}")


def get(e: Emitter, place: tuple[Value, int], lane: Value, bits: int) -> Value:
    """The low ``bits`` of one lane of a register."""
    at, width = place
    if width == 128:
        low = lane_of(e, at, lane, "i64")
        high = lane_of(e, e.pointer(at, 8 * abi.LANES), lane, "i64")
        return e.cast("zext", low, "i128") | (e.cast("zext", high, "i128") << 64)
    return e.resize(lane_of(e, at, lane, f"i{width}"), f"i{bits}")


def count(e: Emitter, space: str, slot: Value, nbytes: int) -> None:
    """Performance counters, if they are switched on."""
    if space != "global":
        return
    on = e.context("checks") & abi.CHECK_COUNTERS
    with e.when(e.icmp("ne", on, 0)):
        e.helpers.add("count_sectors")
        e.raw(f"call void @count_sectors(ptr %ctx, ptr {slot.ref}, {e.mask().typed}, i64 {nbytes})")
