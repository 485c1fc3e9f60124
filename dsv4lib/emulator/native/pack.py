"""Implement mov with packing, selection and address-space casts.

Also unpacking and cache hints without effect.
"""

from __future__ import annotations

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.irtools import Emitter, Value
from dsv4lib.emulator.native.typed import SCALARS, bits_of

SPACES = "global|shared|shared::cta|shared::cluster|local|param|param::entry|const"


@isa.native("mov.pred")
def mov_pred(e: Emitter, form: Form) -> None:
    """d = a for predicates."""
    e.store_pred(0, e.pred(1))


@isa.native(f"mov.<type:b128|{SCALARS}>")
def mov(e: Emitter, form: Form) -> None:
    """d = a, d = {a, b, ...} (the first is lowest) or {d, e, ...} = a."""
    bits = bits_of(form.get("type"))
    to, source = e.groups
    if len(to) == len(source) == 1:
        e.store(0, e.load(1, f"i{bits}"))
    elif len(to) == 1:
        parts = [e.load(i, f"i{bits // len(source)}") for i in source]
        e.store(0, join_halves(e, parts) if bits == 128 else e.pack(parts, f"i{bits}"))
    elif len(source) == 1:
        part = f"i{bits // len(to)}"
        value = e.load(source[0], f"i{bits}")
        parts = split_halves(e, value, len(to)) if bits == 128 else e.unpack(value, part, len(to))
        for i, piece in zip(to, parts, strict=True):
            e.store(i, piece)
    else:
        raise EmulatorError(f"{form.opcode} has a vector on both sides")


def split_halves(e: Emitter, value: Value, parts: int) -> list[Value]:
    """Split a b128 value (low halves, then high) to 2 lanes-of-64 or 4 lanes-of-32."""
    halves = [e.shuffle(value, range(k, k + abi.LANES)) for k in (0, abi.LANES)]
    return halves if parts == 2 else [piece for half in halves for piece in e.unpack(half, "i32", 2)]


def join_halves(e: Emitter, parts: list[Value]) -> Value:
    """Join halves, the inverse of ``split_halves``."""
    halves = parts if len(parts) == 2 else [e.pack(parts[k : k + 2], "i64") for k in (0, 2)]
    return e.shuffle(halves[0], range(2 * abi.LANES), halves[1])


@isa.native(f"selp.<type:{SCALARS}>")
def selp(e: Emitter, form: Form) -> None:
    """d = p ? a : b."""
    kind = f"i{bits_of(form.get('type'))}"
    a, b = e.load(1, kind), e.load(2, kind)
    e.store(0, e.select(e.lanes(e.pred(3)), a, b))


@isa.native(f"slct.<type:{SCALARS}>.s32", f"slct[.<ftz:ftz>].<type:{SCALARS}>.<ctype:f32>")
def slct(e: Emitter, form: Form) -> None:
    """d = c >= 0 ? a : b; -0 counts as 0 and NaN chooses b."""
    kind = f"i{bits_of(form.get('type'))}"
    a, b = e.load(1, kind), e.load(2, kind)
    if form.get("ctype") == "f32":
        c = e.load(3, "f32")
        condition = e.fcmp("oge", c, 0.0)
        if form.has("ftz"):  # a negative subnormal is -0
            condition = condition | e.icmp("eq", e.bitcast(c, "i32") & 0x7F800000, 0)
    else:
        condition = e.icmp("sge", e.load(3, "i32"), 0)
    e.store(0, e.select(condition, a, b))


# --- address spaces -------------------------------------------------------------------------------------------------

WINDOWS = {"shared": abi.SHARED_WINDOW, "local": abi.LOCAL_WINDOW}


@isa.native(f"cvta.<space:{SPACES}>.u64")
def cvta(e: Emitter, form: Form) -> None:
    """Generic address of an address in ``space``: a window for shared and local, the address itself otherwise.

    Of a parameter's address a kernel may have kept 32 bits (LLVM's short pointers).
    """
    space = form.get("space").split("::")[0]
    window = WINDOWS.get(space, 0)
    a = e.load(1, "i64")
    if space == "param":
        start = e.splat(e.context("param", "i64"))
        a = e.select(e.icmp("ult", a, 1 << 32), start + ((a - start) & 0xFFFFFFFF), a)
    e.store(0, (a & 0xFFFFFFFF) | window if window else a)


@isa.native(f"cvta.to.<space:{SPACES}>.u64")
def cvta_to(e: Emitter, form: Form) -> None:
    """Convert a generic address to one in ``space``."""
    window = WINDOWS.get(form.get("space").split("::")[0], 0)
    a = e.load(1, "i64")
    e.store(0, a & 0xFFFFFFFF if window else a)


@isa.native("isspacep.<space:global|shared|shared::cta|shared::cluster|local|param|param::entry>")
def isspacep(e: Emitter, form: Form) -> None:
    """p = generic address a lies in ``space``. .shared is .shared::cta, this CTA's part of the window."""
    a = e.load(1, "i64")
    space = form.get("space")
    top = a >> 56
    if space == "global":
        inside = e.icmp("ne", top, abi.SHARED_WINDOW >> 56) & e.icmp("ne", top, abi.LOCAL_WINDOW >> 56)
    elif space == "local":
        inside = e.icmp("eq", top, abi.LOCAL_WINDOW >> 56)
    elif space.startswith("param"):  # part of the global space
        start, size = e.context("param", "i64"), e.cast("zext", e.context("param_bytes"), "i64")
        inside = e.icmp("ult", a - e.splat(start), e.splat(size))
    else:
        inside = e.icmp("eq", top, abi.SHARED_WINDOW >> 56)
        if space != "shared::cluster":
            rank = e.splat(e.cast("zext", e.context("rank"), "i64"))
            inside = inside & e.icmp("eq", (a >> 24) & 0xFF, rank)
    e.store_pred(0, inside)


def replace_rank(e: Emitter, a: Value, rank: Value) -> Value:
    """Move a shared address (cluster rank << 24 | offset) to another CTA. Higher bits are kept."""
    return (a & ~0xFF000000) | (e.resize(rank, a.kind) << 24)


@isa.native("mapa.shared::cluster.<type:u32|u64>", "mapa.<type:u64>")
def mapa(e: Emitter, form: Form) -> None:
    """d = address of the same variable in CTA b of the cluster. A generic address stays generic."""
    a = e.load(1, f"i{bits_of(form.get('type'))}")
    e.store(0, replace_rank(e, a, e.load(2, "i32")))


@isa.native("getctarank.shared::cluster.<type:u32|u64>", "getctarank.<type:u64>")
def getctarank(e: Emitter, form: Form) -> None:
    """d = rank of the CTA in the cluster that owns shared address a."""
    a = e.load(1, f"i{bits_of(form.get('type'))}")
    e.store(0, e.resize((a >> 24) & 0xFF, "i32"))


# --- hints ----------------------------------------------------------------------------------------------------------

EVICTION = "L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged"


@isa.native(
    "prefetch[.<space:global|local>].<level:L1|L2>",
    "prefetch.global.<level:L2::evict_last|L2::evict_normal>",
    "prefetch[.<space:const|param>].tensormap",
    "prefetchu.L1",
    "applypriority[.global].L2::evict_normal",
    "discard[.global].L2",
    note="no effect: caches are not modelled, and discarded data keeps its value",
)
def hint(e: Emitter, form: Form) -> None:
    """Do nothing: a hint."""


@isa.native(
    f"createpolicy.fractional.<primary:{EVICTION}>[.<secondary:L2::evict_first|L2::evict_unchanged>].b64",
    f"createpolicy.range[.global].<primary:{EVICTION}>[.<secondary:L2::evict_first|L2::evict_unchanged>].b64",
    "createpolicy.cvt.L2.b64",
    note="caches are not modelled: the opaque policy is 0",
)
def createpolicy(e: Emitter, form: Form) -> None:
    """d = an opaque cache policy."""
    e.store(0, e.const(0, "i64"))
