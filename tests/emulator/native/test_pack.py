"""mov, selp, slct, address spaces and hints."""

from __future__ import annotations

import pytest
from cases import Case, prepare_cases, run_case, sign, width
from harness import library, unit

from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.library import emit

TYPES = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
SHARED, LOCAL = 0x7E << 56, 0x7D << 56


def raw(t: str) -> str:
    """Operand kind with plain random bits for a type."""
    return f"b{width(t)}"


def moves() -> list[Case]:
    out = [Case("mov.pred", ("pred",), lambda a: a, ("pred",))]
    out.append(Case("mov.b128", ("b128",), lambda a: a, ("b128",)))
    for t in TYPES:
        out.append(Case(f"mov.{t}", (raw(t),), lambda a: a, (raw(t),)))
    for whole, parts in ((16, 2), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 2), (128, 4)):
        part = whole // parts
        vector = "{" + ",".join([str(part)] * parts) + "}"
        join = lambda *v, part=part: sum(x << part * i for i, x in enumerate(v))  # noqa: E731
        split = lambda a, part=part, parts=parts: tuple(a >> part * i & ((1 << part) - 1) for i in range(parts))  # noqa: E731
        names, one = (f"b{part}",) * parts, (f"b{whole}",)
        out.append(Case(f"mov.b{whole}", names, join, one, shape=f"{whole} {vector}", alias=False))
        out.append(Case(f"mov.b{whole}", one, split, names, shape=f"{vector} {whole}", alias=False))
    return out


def choices() -> list[Case]:
    out = []
    for t in TYPES:
        k = raw(t)
        out.append(Case(f"selp.{t}", (k, k, "pred"), lambda a, b, p: a if p else b, (k,)))
        out.append(Case(f"slct.{t}.s32", (k, k, "s32"), lambda a, b, c: a if sign(c, 32) >= 0 else b, (k,)))
        at_least = lambda c: c <= 0x7F800000 or c == 0x80000000  # noqa: E731
        out.append(Case(f"slct.{t}.f32", (k, k, "f32"), lambda a, b, c, f=at_least: a if f(c) else b, (k,)))
        flushed = lambda c: c <= 0x7F800000 or 0x80000000 <= c < 0x80800000  # noqa: E731
        out.append(Case(f"slct.ftz.{t}.f32", (k, k, "f32"), lambda a, b, c, f=flushed: a if f(c) else b, (k,)))
    out.append(Case("selp.b32", ("b32", "b32", "pred"), lambda a, b, p: b if p else a, shape="32 32 32 !1"))
    return out


def spaces() -> list[Case]:
    out = []
    for space in ("global", "const", "param", "param::entry", "shared", "shared::cta", "shared::cluster", "local"):
        window = {"shared": SHARED, "local": LOCAL}.get(space.split("::")[0])
        generic = (lambda a, w=window: a & 0xFFFFFFFF | w) if window else (lambda a: a)
        back = (lambda a: a & 0xFFFFFFFF) if window else (lambda a: a)
        out.append(Case(f"cvta.{space}.u64", ("b64",), generic, ("b64",)))
        out.append(Case(f"cvta.to.{space}.u64", ("b64",), back, ("b64",)))
    for opcode, kind in (("mapa.shared::cluster.u32", "b32"), ("mapa.shared::cluster.u64", "b64"), ("mapa.u64", "b64")):
        move = lambda a, r: a & ~0xFF000000 | (r & 0xFF) << 24  # noqa: E731
        out.append(Case(opcode, (kind, "rank"), move, (kind,)))
        rank = opcode.replace("mapa", "getctarank")
        out.append(Case(rank, (kind,), lambda a: a >> 24 & 0xFF, ("b32",)))
    return out


CASES = moves() + choices() + spaces()
HINTS = {
    **dict.fromkeys(
        ["prefetch.global.L2", "prefetch.L1", "prefetch.local.L1", "prefetch.global.L2::evict_last", "prefetchu.L1"],
        "[64]",
    ),
    "prefetch.tensormap": "[64]",
    "prefetch.param.tensormap": "[i]",
    "applypriority.global.L2::evict_normal": "[64] i",
    "discard.global.L2": "[64] i",
}
POLICIES = {
    "createpolicy.fractional.L2::evict_last.b64": "64 i",
    "createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64": "64",
    "createpolicy.range.global.L2::evict_last.b64": "64 [64] 32 32",
    "createpolicy.cvt.L2.b64": "64 i",
}


@pytest.fixture(scope="module", autouse=True)
def compiled():
    prepare_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_lanes(case):
    run_case(case)


SPACE_OF = {
    "global": {"g", "p", "after"},
    "local": {"l"},
    "shared": {"own"},
    "shared::cta": {"own"},
    "shared::cluster": {"own", "peer"},
    "param": {"p"},
    "param::entry": {"p"},
}


@pytest.mark.parametrize("space", SPACE_OF)
def test_isspacep(space):
    """Addresses of every kind seen from CTA 3 of a cluster."""
    import numpy as np

    param = 0x5500_0000_0040
    address = {
        "g": 0x7F00_0000_1000,
        "own": SHARED | 3 << 24 | 0x400,
        "peer": SHARED | 1 << 24 | 0x400,
        "l": LOCAL | 8,
        "p": param + 0x7F,
        "after": param + 0x80,
    }
    kinds = [list(address)[k % len(address)] for k in range(32)]
    u = unit(f"isspacep.{space}", "1 64")
    u.run({1: np.array([address[k] for k in kinds], np.uint64)}, rank=3, param=param, param_bytes=0x80)
    assert int(u.register(0)[0]) == sum((k in SPACE_OF[space]) << i for i, k in enumerate(kinds))


@pytest.mark.parametrize(("opcode", "shape"), [*HINTS.items(), *POLICIES.items()])
def test_hints(opcode, shape):
    """Hints touch nothing; a policy is 0 in the active lanes."""
    u = unit(opcode, shape)
    before = u.file.copy()
    u.run({}, 0x0000FFFF)
    before[:] = 0xCD
    if opcode in POLICIES:
        assert u.register(0).tolist() == [0] * 16 + [0xCDCDCDCDCDCDCDCD] * 16
        u.register(0)[:] = 0xCDCDCDCDCDCDCDCD
    assert (u.file == before).all()


def test_operands_that_do_not_fit():
    """Widths are checked when the handler is emitted, before anything runs."""
    with pytest.raises(EmulatorError, match="32-bit register, the instruction wants 64"):
        emit("mov.b64", "64 32")
    with pytest.raises(EmulatorError, match="vector on both sides"):
        emit("mov.b64", "{32,32} {32,32}")
    with pytest.raises(EmulatorError, match="more operands"):
        emit("selp.b32", "32 32 32")


def test_same_code_is_shared():
    """Variants with the same IR are one function, whatever they are called."""
    done = library().handlers([("mov.b32", "32 32"), ("mov.f32", "32 i"), ("mov.u32", "32 32"), ("mov.b16", "16 16")])
    addresses = [c.address for c in done.values()]
    assert len(set(addresses[:3])) == 1
    assert addresses[3] != addresses[0]
    assert abi.CONTINUE == 0
