"""Make operands for an instruction from its opcode alone: several lists where the ISA offers a choice."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence

from dsv4lib.emulator.isa import variants

_LETTERS = {1: "p", 8: "c", 16: "h", 32: "r", 64: "d", 128: "q"}
SHARED, GLOBAL, BARRIER = "[smem]", "[%d100]", "[smem+64]"
POLICY = "%d120"


def width(word: str) -> int | None:
    """Bits of a type, None if the word is not one."""
    if word == "pred":
        return 1
    if word in ("tf32", "f16x2", "bf16x2", "u16x2", "s16x2"):
        return 32
    if word == "f32x2":
        return 64
    if re.fullmatch(r"e\dm\dx4", word):
        return 32
    if word == "bf16" or re.fullmatch(r"u?e\dm\dx2|s2f6x2", word):
        return 8 if word == "e2m1x2" else 16
    match = re.fullmatch(r"[usfb](\d+)", word)
    return int(match.group(1)) if match and match.group(1) in ("8", "16", "32", "64", "128") else None


def types(words: Sequence[str]) -> list[int]:
    """List the widths of the types of an opcode."""
    return [w for w in map(width, words) if w is not None]


def reg(bits: int, number: int = 0) -> str:
    """A register; 8-bit values live in 16-bit ones except where the ISA asks for .b8."""
    return f"%{_LETTERS[bits]}{number}"


def vector(bits: int, n: int, start: int = 0) -> str:
    """``{%r0, %r1}``, a plain register for one."""
    names = ", ".join(reg(bits, start + i) for i in range(max(n, 1)))
    return "{" + names + "}"


def operands(opcode: str) -> list[str]:
    """List operands to try with an opcode in the ISA's order."""
    head = variants.name(opcode)
    words = opcode[len(head) + 1 :].split(".")
    for pattern, make in _TABLE:
        if re.fullmatch(pattern, head):
            return make(head, words)
    return [""]


def _same(n: int) -> Callable[[str, list[str]], list[str]]:
    """A destination and ``n`` sources of the last type."""

    def make(head: str, words: list[str]) -> list[str]:
        bits = max(16, types(words)[-1]) if types(words)[-1] > 1 else 1
        return [", ".join(reg(bits, i) for i in range(n + 1))]

    return make


def _fixed(*lists: str) -> Callable[[str, list[str]], list[str]]:
    return lambda head, words: list(lists)


def _mixed(head: str, words: list[str]) -> list[str]:
    """add, sub, fma: of the last type, or f32 with 16-bit sources."""
    n = 3 if head.startswith(("fma", "mad")) else 2
    kinds = types(words)
    wide = kinds[-1] * 2 if head.endswith("wide") else kinds[0]
    out = [", ".join([reg(wide), *(reg(kinds[-1], i + 1) for i in range(n - 1)), reg(wide, n)])]
    sources = ", ".join([reg(kinds[0]), *(reg(kinds[-1], i + 1) for i in range(n))])
    return [*out, sources, ", ".join([reg(wide), *(reg(kinds[-1], i + 1) for i in range(n))])]


def _cvt(head: str, words: list[str]) -> list[str]:
    if head == "cvt.pack":
        return ["%r0, %r1, %r2, %r3" if "b32" in words else "%r0, %r1, %r2"]
    to, of = types(words)[:2]
    to_, of_ = (
        max(b, 16) if w != "e2m1x2" else 8 for b, w in zip((to, of), [w for w in words if width(w)], strict=True)
    )
    if to <= 8 and "e2m1x2" not in words:
        to_ = 16
    packed = [w for w in words if width(w)]
    double = packed[1] == "f32" and packed[0].endswith("x2")
    sources = ", ".join(reg(of_, 1 + i) for i in range(1 + double))
    scale = ", %h9" if any(w.startswith("scaled") for w in words) else ""
    if "rs" in words:
        scale += ", %r9"
    out = [f"{reg(to_)}, {sources}{scale}"]
    if "bf16" in words and 8 in (to, of):  # here the ISA wants .b8
        out.append(f"{reg(to)}, {reg(of, 1)}")
    return out


def _setp(head: str, words: list[str]) -> list[str]:
    bits = types(words)[-1]
    third = ", %p3" if {"and", "or", "xor"}.intersection(words) else ""
    pair = "|%p1" if words[-1].endswith(("f16x2",)) else ""
    first = f"%p0{pair}" if head == "setp" else reg(max(types(words)[0], 16))
    return [f"{first}, {reg(bits, 1)}, {reg(bits, 2)}{third}"]


def _data(words: list[str], start: int = 0) -> str:
    bits = max(16, types(words)[-1])
    n = next((int(w[1:]) for w in words if re.fullmatch(r"v\d", w)), 0)
    return vector(bits, n, start) if n else reg(bits, start)


def _address(words: list[str]) -> str:
    spaces = [w for w in words if variants.kind(w) == "space"]
    return {"shared": SHARED, "const": "[%d100]", "local": "[mem]", "param": "[argument]"}.get(
        spaces[-1].partition("::")[0] if spaces else "", GLOBAL
    )


def _hint(words: list[str]) -> str:
    return f", {POLICY}" if "L2::cache_hint" in words else ""


def _load(head: str, words: list[str]) -> list[str]:
    return [f"{_data(words)}, {_address(words)}{_hint(words)}"]


def _store(head: str, words: list[str]) -> list[str]:
    return [f"{_address(words)}, {_data(words)}{_hint(words)}"]


def _atom(head: str, words: list[str]) -> list[str]:
    new = f", {_data(words, 40)}" if "cas" in words else ""
    old = "" if head == "red" else f"{_data(words)}, "
    return [f"{old}{_address(words)}, {_data(words, 20)}{new}{_hint(words)}"]


def _barrier(head: str, words: list[str]) -> list[str]:
    if "warp" in head:
        return ["-1"]
    if "cluster" in head:
        return [""]
    if head.endswith("red"):
        return ["%p0, 1, 64, %p1" if "pred" in words else "%r0, 1, 64, %p1"]
    return ["1, 64"]


def _clc(head: str, words: list[str]) -> list[str]:
    if head.endswith("async"):
        return [f"{SHARED}, {BARRIER}"]
    first = "%p0" if "is_canceled" in words else vector(32, 4) if "v4" in words else "%r0"
    return [f"{first}, %q1"]


def _bulk(head: str, words: list[str]) -> list[str]:
    if head.endswith(("commit_group",)):
        return [""]
    if head.endswith("wait_group"):
        return ["0"]
    if head.endswith("prefetch"):
        return [f"{GLOBAL}, %r1{_hint(words)}"]
    wide = "b128" in words
    to, source = _two_spaces(words)
    out = [to, source] + ([] if wide else ["%r1"])
    out = [to, source, "%r1"]
    if "ignore_oob" in words:
        out += ["%r5", "%r6"]
    if "mbarrier::complete_tx::bytes" in words:
        out.append(BARRIER)
    if "multicast::cluster" in words:
        out.append("%h1")
    if "L2::cache_hint" in words:
        out.append(POLICY)
    if "cp_mask" in words:
        out.append("%h2")
    return [", ".join(out)]


def _two_spaces(words: list[str]) -> tuple[str, str]:
    spaces = [w for w in words if variants.kind(w) == "space"]
    place = {"shared": SHARED, "global": GLOBAL}
    to, source = (place[s.partition("::")[0]] for s in spaces[:2])
    return to, "[smem+256]" if source == SHARED else source


def _tensor(head: str, words: list[str]) -> list[str]:
    dims = (
        int(words[0][0])
        if re.fullmatch(r"\dd", words[0])
        else int(next(w for w in words if re.fullmatch(r"\dd", w))[0])
    )
    many = any("4" in w and w.startswith("tile::") for w in words)
    box = f"[%d100, {vector(32, 5 if many else dims)}]"
    im2col = any(w.startswith("im2col") and w != "im2col_no_offs" for w in words)
    offsets = [vector(16, dims - 2)] if im2col and not any("::w" in w for w in words) else []
    if im2col and any("::w" in w for w in words):
        offsets = [vector(16, 2)]
    if "prefetch" in head:
        out = [box, *offsets]
    elif "bulk_group" in words:
        out = [box, SHARED]
    else:
        out = [SHARED, box, BARRIER, *offsets]
    if "multicast::cluster" in words:
        out.append("%h9")
    return [", ".join(out) + _hint(words)]


def _mbarrier(head: str, words: list[str]) -> list[str]:
    what = head.split(".")[1]
    if what == "init":
        return [f"{SHARED}, 1"]
    if what == "inval":
        return [SHARED]
    if what in ("expect_tx", "complete_tx"):
        return [f"{SHARED}, 16"]
    if what in ("test_wait", "try_wait"):
        return [f"%p0, {SHARED}, {'%r1' if head.endswith('parity') else '%d1'}"]
    if what == "pending_count":
        return ["%r0, %d1"]
    if what == "check_layout":
        return [f"%p0, {SHARED}"]
    count = ", 1" if "noComplete" in words or head.endswith("expect_tx") else ""
    return [f"%d0, {SHARED}{count}", f"_, {SHARED}{count}"]


def _mma(head: str, words: list[str]) -> list[str]:
    if "block_scale" in words:
        scales = "%r40, {0, 0}, %r41, {0, 0}"
        return [f"{vector(32, 4)}, {vector(32, 4, 4)}, {vector(32, 2, 8)}, {vector(32, 4, 12)}, {scales}"]
    out = []
    for d, a, b in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)):
        bits = 64 if "f64" in words else 32
        sparse = ", %r40, 0" if words[0].startswith("sp") else ""
        out.append(f"{vector(bits, d)}, {vector(bits, a, 10)}, {vector(bits, b, 20)}, {vector(bits, d, 30)}{sparse}")
    return out


def _wgmma(head: str, words: list[str]) -> list[str]:
    if not head.endswith("mma_async"):
        return ["0" if head.endswith("wait_group") else ""]
    n = int(re.search(r"n(\d+)k", ".".join(words)).group(1))
    kinds = [w for w in words if width(w) or w in ("e4m3", "e5m2", "b1")]
    count = n // 4 if kinds[0] == "f16" else n // 2
    floating = kinds[1] not in ("s8", "u8", "b1")
    tail = ", 1, 1, 1" if floating else ", 1"
    if kinds[1] in ("f16", "bf16"):
        tail += ", 0, 0"
    sources = "%d1, %d2" + ", %r1, 0" * ("sp" in words)
    # The predicate scale-d must be one; ptxas also takes an immediate.
    return [f"{vector(32, count)}, {sources}{tail}", f"{vector(32, count)}, {sources}, %p1{tail.removeprefix(', 1')}"]


def _tcgen(head: str, words: list[str]) -> list[str]:
    what = head.partition(".")[2]
    if what in ("ld", "st", "ld.red"):
        return _tmem(what, words)
    if what == "alloc":
        return [f"{SHARED}, 32"]
    if what == "dealloc":
        return ["%r0, 32"]
    if what == "commit":
        return [
            f"{SHARED}{', %h1' if 'multicast::cluster' in words else ''}",
            f"[%d1]{', %h1' if 'multicast::cluster' in words else ''}",
        ]
    if what == "cp":
        return ["[%r1], %d1"]
    if what == "shift":
        return ["[%r1]"]
    if what in ("mma", "mma.ws", "mma.sp"):
        if "block_scale" in words:
            return ["[%r0], %d1, %d2, %r3, [%r4], [%r5], %p0", "[%r0], [%r6], %d2, %r3, [%r4], [%r5], %p0"]
        lanes = "" if what == "mma.ws" else ", " + vector(32, 8 if "cta_group::2" in words else 4, 60)
        metadata = ", [%r7]" if what == "mma.sp" else ""
        return [f"[%r0], {a}, %d2{metadata}, %r3{m}, %p0" for a in ("%d1", "[%r6]") for m in ("", lanes)]
    return [""]


def _tmem(what: str, words: list[str]) -> list[str]:
    shape = next(w for w in words if re.match(r"\d+x", w))
    n = int(next(w for w in words if re.fullmatch(r"x\d+", w))[1:])
    n *= {"16x128b": 2, "16x256b": 4}.get(shape, 1)
    data = vector(32, n)
    half = ", 8" if shape == "16x32bx2" else ""
    if what == "st":
        return [f"[%r150]{half}, {data}"]
    return [f"{data}{', %r151' if what == 'ld.red' else ''}, [%r150]{half}"]


def _map(head: str, words: list[str]) -> list[str]:
    if head.endswith("cp_fenceproxy"):
        return [f"{GLOBAL}, {SHARED}, 128"]
    value = "%d1" if "b64" in words else "%r1"
    field = {"elemtype": "1", "interleave_layout": "0", "swizzle_mode": "1", "swizzle_atomicity": "1", "fill_mode": "0"}
    value = next((field[w] for w in words if w in field), value)
    index = "0, " if {"box_dim", "global_dim", "global_stride", "element_stride"}.intersection(words) else ""
    return [f"{_address(words)}, {index}{value}"]


def _matrix(head: str, words: list[str]) -> list[str]:
    n = int(next(w for w in words if re.fullmatch(r"x\d", w))[1:])
    if head == "ldmatrix":
        n *= 2 if "m16n16" in words else 1
        return [f"{vector(32, n)}, {SHARED}"]
    return [f"{SHARED}, {vector(32, n)}"]


def _policy(head: str, words: list[str]) -> list[str]:
    if head.endswith("range"):
        return ["%d0, [%d1], %r1, %r2"]
    return ["%d0, %d1" if head.endswith("cvt") else "%d0, 1.0"]


def _slct(head: str, words: list[str]) -> list[str]:
    first, last = types(words)
    return [f"{reg(first)}, {reg(first, 1)}, {reg(first, 2)}, {reg(last, 3)}"]


def _bitfield(head: str, words: list[str]) -> list[str]:
    bits = types(words)[0]
    d, a = reg(bits), reg(bits, 1)
    return {
        "bfe": [f"{d}, {a}, %r2, %r3"],
        "bfi": [f"{d}, {a}, {reg(bits, 2)}, %r2, %r3"],
        "bfind": [f"%r0, {a}"],
        "clz": [f"%r0, {a}"],
        "popc": [f"%r0, {a}"],
        "shl": [f"{d}, {a}, %r2"],
        "shr": [f"{d}, {a}, %r2"],
        "testp": [f"%p0, {a}"],
        "match.any": [f"%r0, {a}, -1"],
        "match.all": [f"%r0|%p0, {a}, -1"],
    }[head]


def _lop3(head: str, words: list[str]) -> list[str]:
    return ["%r0|%p0, %r1, %r2, %r3, 1, %p1"] if "or" in words or "and" in words else ["%r0, %r1, %r2, %r3, 1"]


def _async(head: str, words: list[str]) -> list[str]:
    if "mbarrier::complete_tx::bytes" in words:
        return [f"{SHARED}, {_data(words, 20)}, {BARRIER}"]
    return [f"{GLOBAL}, {_data(words, 20)}", f"{GLOBAL}, %c1"]


def _cp_async(head: str, words: list[str]) -> list[str]:
    return [f"{SHARED}, {GLOBAL}, {n}{_hint(words)}" for n in (16, 4)]


def _fma_mul(head: str, words: list[str]) -> list[str]:
    bits = types(words)[-1]
    wide = reg(2 * bits) if head.endswith("wide") else reg(bits)
    return [f"{wide}, {reg(bits, 1)}, {reg(bits, 2)}"]


_TABLE: list[tuple[str, Callable[[str, list[str]], list[str]]]] = [
    ("abs|neg|not|cnot|brev|rcp|rsqrt|sqrt|sin|cos|ex2|lg2|tanh|mov", _same(1)),
    (r"and|or|xor|min|max|div(\.full)?|rem|copysign", lambda h, w: _same(2)(h, w) + _same(3)(h, w)),
    (r"add|sub|addc|subc|fma|mad|(mad|madc|mad24)\.\w+", _mixed),
    (r"mul(24)?(\.\w+)?", _fma_mul),
    ("sad", _same(3)),
    ("selp", lambda h, w: [_same(2)(h, w)[0] + ", %p1"]),
    ("slct", _slct),
    ("bfe|bfi|bfind|clz|popc|shl|shr|testp|match.*", _bitfield),
    ("bmsk|szext|fns", lambda h, w: ["%r0, %r1, %r2" + (", %r3" if h == "fns" else "")]),
    (r"shf\.\w|prmt|dp2a\.\w+|dp4a|v(add|sub|avrg|absdiff|min|max|set)[24]", _fixed("%r0, %r1, %r2, %r3")),
    ("alloca", lambda h, w: [f"{reg(types(w)[0])}, {reg(types(w)[0], 1)}, 16"]),
    ("stacksave|stackrestore", _same(0)),
    ("lop3", _lop3),
    ("activemask", _fixed("%r0")),
    ("elect", _fixed("%r0|%p0, -1")),
    ("vote", lambda h, w: [f"{'%r0' if 'ballot' in w else '%p0'}, %p1, -1"]),
    ("shfl", _fixed("%r0|%p0, %r1, %r2, %r3, -1")),
    ("redux", _fixed("%r0, %r1, -1")),
    ("set|setp", _setp),
    (r"cvt(\.pack)?", _cvt),
    (r"cvta(\.to)?", lambda h, w: ["%d0, %d1"]),
    ("isspacep", _fixed("%p0, %d1")),
    ("mapa", lambda h, w: [f"{reg(types(w)[0])}, {reg(types(w)[0], 1)}, %r2"]),
    ("getctarank", lambda h, w: [f"%r0, {reg(types(w)[0], 1)}"]),
    ("ld|ldu", _load),
    ("st", _store),
    ("atom|red", _atom),
    (r"multimem\.ld_reduce", _load),
    (r"multimem\.(st|red)", _store),
    ("(st|red).async", _async),
    (r"st\.bulk", lambda h, w: [f"{SHARED if 'shared::cta' in w else '[%d1]'}, %d2, 0"]),
    ("applypriority|discard", _fixed(f"{GLOBAL}, 128")),
    ("prefetch|prefetchu", lambda h, w: ["[argument]" if "param" in w else "[mem]" if "local" in w else GLOBAL]),
    ("bra", _fixed("$end")),
    ("brx", _fixed("%r0, table")),
    (r"bar(rier)?\..*", _barrier),
    ("clusterlaunchcontrol.*", _clc),
    (r"cp(\.reduce)?\.async\.bulk(\.prefetch)?\.tensor", _tensor),
    (r"cp(\.reduce)?\.async\.bulk.*", _bulk),
    (r"cp\.async\.mbarrier\.arrive", _fixed(SHARED)),
    (r"cp\.async\.wait_group", _fixed("0")),
    (r"cp\.async", _cp_async),
    ("createpolicy.*", _policy),
    ("mbarrier.*", _mbarrier),
    ("mma", _mma),
    ("wgmma.*", _wgmma),
    ("tcgen05.*", _tcgen),
    ("tensormap.*", _map),
    ("ldmatrix|stmatrix", _matrix),
    ("movmatrix", _fixed("%r0, %r1")),
    (r"setmaxnreg\.\w+", _fixed("64")),
    ("nanosleep|pmevent", _fixed("1")),
    (
        r"fence\.proxy.*",
        lambda h, w: [f"{GLOBAL}, 128" if "acquire" in w and "tensormap::generic" in ".".join([h, *w]) else ""],
    ),
]
