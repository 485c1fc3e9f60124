"""List the micro-kernels of tcgen05.mma: kinds, descriptors, .ws, pairs, sparse A, block scales."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dsv4lib.lab.day_one.probe import Probe, generator
from dsv4lib.lab.day_one.tensor_memory import (
    A_AT,
    B_AT,
    D_AT,
    LANES,
    META_AT,
    SFA_AT,
    SFB_AT,
    About,
    Action,
    Contents,
    descriptor,
    made,
    strides,
)

F16 = {"f16": 0, "bf16": 1}
F8 = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
FORMATS = {
    "f16": F16,
    "tf32": {"tf32": 2},
    "f8f6f4": F8,
    "i8": {"u8": 0, "s8": 1},
    "mxf8f6f4": F8,
    "mxf4": {"e2m1": 1},
    "mxf4nvf4": {"e2m1": 1},
}
D_CODES = {"f16": 0, "f32": 1, "s32": 2}
ELEMENT = {"f16": 2, "tf32": 4, "f8f6f4": 1, "i8": 1, "mxf8f6f4": 1, "mxf4": 1, "mxf4nvf4": 1}
SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
N = 64


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma.

    Attributes:
        kind, a, b, d: types. m, n: shape. group: CTAs. ws: weight-stationary.
        majors, swizzles: of A and B. base: base offset of A's swizzle, and its start 128 bytes later each.
        tmem: A comes from tensor memory. accumulate: onto D.
        negate: A, B. saturate: of i8.
        scale_d: scale-input-d, 0 is none. disabled: words of disable-output-lane.
        collector: qualifier. mask: zero-column mask descriptor of .ws; max_shift: its field.
        sparse: selector of metadata, -1 is dense.
        vector: of block scales ("scale_vec::2X"); scale: "ue8m0" or "ue4m3"; ids: data ids; at: columns that the
            scale factors of A and B begin after their place; own_quarters: factors differ between lane quarters.
        style: of operands.
    """

    kind: str
    a: str
    b: str
    d: str = "f32"
    m: int = 128
    n: int = N
    group: int = 1
    ws: bool = False
    majors: tuple[str, str] = ("K", "K")
    swizzles: tuple[str, str] = ("128B", "128B")
    base: int = 0
    tmem: bool = False
    accumulate: bool = True
    negate: tuple[bool, bool] = (False, False)
    saturate: bool = False
    scale_d: int = 0
    disabled: tuple[int, ...] = ()
    collector: str = ""
    mask: int = -1
    max_shift: int = 0
    sparse: int = -1
    vector: str = ""
    scale: str = ""
    ids: tuple[int, int] = (0, 0)
    at: tuple[int, int] = (0, 0)
    own_quarters: bool = False
    style: str = "small"

    @property
    def idesc(self) -> int:
        """The instruction descriptor."""
        codes = FORMATS[self.kind]
        bits = codes[self.a] << 7 | codes[self.b] << 10 | self.negate[0] << 13 | self.negate[1] << 14
        bits |= (self.majors[0] == "MN") << 15 | (self.majors[1] == "MN") << 16 | (self.n >> 3) << 17
        if self.scale:
            return bits | self.ids[1] << 4 | (self.scale == "ue8m0") << 23 | (self.m >> 7) << 27 | self.ids[0] << 29
        bits |= D_CODES[self.d] << 4 | self.saturate << 3 | (self.m >> 4) << 24 | self.max_shift << 30
        return bits | (4 | self.sparse if self.sparse >= 0 else 0)

    def action(self) -> Action:
        """Its PTX."""
        act, element = Action(), ELEMENT[self.kind]
        opcode = f"tcgen05.mma{'.ws' * self.ws}{'.sp' * (self.sparse >= 0)}.cta_group::{self.group}.kind::{self.kind}"
        opcode += f"{'.block_scale' * bool(self.scale)}{'.' * bool(self.vector)}{self.vector}"
        opcode += f"{'.collector::' * bool(self.collector)}{self.collector}"
        constants = [
            descriptor(swizzle, *strides(swizzle, major, self.m, element), base=self.base if i == 0 else 0)
            for i, (swizzle, major) in enumerate(zip(self.swizzles, self.majors, strict=True))
        ]
        d, idesc = act.tensor(D_AT), act.word(self.idesc)
        a = f"[{act.tensor(A_AT)}]" if self.tmem else act.matrix(128 * self.base, constants[0])
        operands = [f"[{d}]", a, act.matrix(B_AT, constants[1])]
        operands += [f"[{act.tensor(META_AT)}]"] if self.sparse >= 0 else []
        operands += [idesc]
        if self.scale:
            operands += [f"[{act.tensor(SFA_AT + self.at[0])}]", f"[{act.tensor(SFB_AT + self.at[1])}]"]
        if self.disabled:
            operands += ["{" + ", ".join(act.word(word) for word in self.disabled) + "}"]
        operands += ["%p5" if self.accumulate else "%p4"]
        if self.scale_d:
            operands += [str(self.scale_d)]
        if self.mask >= 0:
            operands += [act.long(self.mask)]
        act.add(f"{opcode} {', '.join(operands)}")
        return act

    def contents(self, name: str) -> Contents:
        """What memory holds before it."""
        rng, columns = generator(name + " columns"), {}
        if self.scale:
            columns[SFA_AT] = self._scales(rng)
        if self.sparse >= 0:
            columns[META_AT] = self._metadata(rng)
        return Contents(self.a, self.b, self.d, self.style, columns)

    def _scales(self, rng: np.random.Generator) -> np.ndarray:
        """uint32 (CTAs, 128, 16) around 1; the same in all lane quarters, unless the probe asks about that."""
        few = (126, 127, 128) if self.scale == "ue8m0" else (0x30, 0x38, 0x3C, 0x40)
        quarters = 4 if self.own_quarters else 1
        codes = rng.choice(np.array(few, np.uint8), (self.group, quarters, 32, 64)).view("<u4")
        return np.broadcast_to(codes, (self.group, 4, 32, 16)).reshape(self.group, LANES, 16)

    def _metadata(self, rng: np.random.Generator) -> np.ndarray:
        """uint32 (CTAs, 128, 2) of codes that the type allows: two different places, the first before the second."""
        allowed = (4, 14) if self.kind == "tf32" else tuple(f + 4 * s for s in range(4) for f in range(s))
        codes = rng.choice(np.array(allowed, np.uint32), (self.group, LANES, 2, 8))
        return (codes << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)


def probe(name: str, form: str, mma: Mma, hazards: frozenset[str] = frozenset()) -> Probe:
    """Make the probe of an MMA."""
    about = About(
        name,
        form,
        mma.group,
        {"f32": "f32", "f16": "u32", "s32": "u32"}[mma.d],
        exact=mma.style == "small",
        hazards=hazards,
    )
    return made(about, mma.action(), mma.contents(name))


PAIRS = (
    ("f16", "f16", "f16", "f32"),
    ("f16", "f16", "f16", "f16"),
    ("f16", "bf16", "bf16", "f32"),
    ("tf32", "tf32", "tf32", "f32"),
    ("f8f6f4", "e4m3", "e5m2", "f32"),
    ("f8f6f4", "e5m2", "e4m3", "f16"),
    ("f8f6f4", "e2m3", "e3m2", "f32"),
    ("f8f6f4", "e2m1", "e4m3", "f32"),
    ("f8f6f4", "e3m2", "e2m1", "f32"),
    ("i8", "s8", "u8", "s32"),
    ("i8", "u8", "s8", "s32"),
)


def _name(prefix: str, types: tuple[str, str, str, str], suffix: str = "") -> str:
    kind, a, b, d = types
    return ".".join(part for part in (prefix, kind, f"{a}-{b}-{d}", suffix) if part)


def _dense() -> Iterator[Probe]:
    for types in PAIRS:
        kind, a, b, d = types
        for m in (64, 128):
            yield probe(_name("dense", types, f"m{m}"), "mma_dense", Mma(kind, a, b, d, m=m))
        if kind != "f8f6f4" or a == "e4m3":
            yield probe(_name("a_in_tmem", types), "mma_a_tmem", Mma(kind, a, b, d, tmem=True))
    yield probe("a_in_tmem.f16.m64", "mma_a_tmem", Mma("f16", "f16", "f16", m=64, tmem=True))
    yield probe("fresh.f16", "mma_dense", Mma("f16", "bf16", "bf16", accumulate=False))
    for use in ("fill", "use", "lastuse", "discard"):
        if use != "use":
            yield probe(f"collector.a.{use}", "mma_dense", Mma("f16", "f16", "f16", collector=f"a::{use}"))


def _descriptors() -> Iterator[Probe]:
    for major in ("K", "MN"):
        for swizzle in ("none", "32B", "64B", "128B"):
            for side in (0, 1):
                majors = tuple(major if i == side else "K" for i in (0, 1))
                swizzles = tuple(swizzle if i == side else "128B" for i in (0, 1))
                given = {"majors": majors, "swizzles": swizzles}
                name = f"smem.{'ab'[side]}.{major}.{swizzle}"
                if (major, swizzle) != ("K", "128B"):
                    yield probe(f"{name}.bf16", "smem_descriptor", Mma("f16", "bf16", "bf16", **given))
                    yield probe(f"{name}.e4m3", "smem_descriptor", Mma("f8f6f4", "e4m3", "e4m3", **given))
    both = {"majors": ("MN", "MN"), "swizzles": ("128B_32", "128B_32")}
    yield probe("smem.ab.MN.128B_32.tf32", "smem_descriptor", Mma("tf32", "tf32", "tf32", **both))
    for base in (1, 4):
        yield probe(f"smem.base_offset.{base}", "smem_base_offset", Mma("f16", "bf16", "bf16", base=base))
    for negate in ((True, False), (False, True), (True, True)):
        name = "negate." + "".join("ab"[i] for i in (0, 1) if negate[i])
        yield probe(name, "instruction_descriptor", Mma("f16", "f16", "f16", negate=negate))
    yield probe("negate.e4m3", "instruction_descriptor", Mma("f8f6f4", "e4m3", "e4m3", negate=(True, False)))
    for a, b in (("s8", "s8"), ("u8", "u8")):
        yield probe(f"saturate.{a}", "instruction_descriptor", Mma("i8", a, b, "s32", saturate=True))
    for shift in (1, 8, 15):
        yield probe(f"scale_d.{shift}.f16", "scale_input_d", Mma("f16", "f16", "f16", scale_d=shift))
        yield probe(f"scale_d.{shift}.tf32", "scale_input_d", Mma("tf32", "tf32", "tf32", scale_d=shift))
    words = (0x00FF00FF, 0xFFFFFFFF, 0x80000001, 0)
    yield probe("disabled_lanes", "disable_output_lane", Mma("f16", "bf16", "bf16", disabled=words))
    pair = {"m": 256, "group": 2, "disabled": (*words, *reversed(words))}
    yield probe("disabled_lanes.pair", "disable_output_lane", Mma("f16", "bf16", "bf16", **pair))


def zero_columns(starts: tuple[int, ...], zero_first: int, zeros: int, used: int, shift: int = 0) -> int:
    """Bits of a zero-column mask descriptor."""
    bits = sum(start << 8 * i for i, start in enumerate(starts))
    return bits | zero_first << 32 | 1 << 39 | (zeros - 1) << 40 | (used - 1) << 48 | shift << 56


def _weight_stationary() -> Iterator[Probe]:
    for kind, a, b, d in (PAIRS[2], PAIRS[3], PAIRS[4], PAIRS[9]):
        for m in (32, 64, 128):
            for tmem in (False, True):
                name = f"ws.{kind}.m{m}{'.a_in_tmem' * tmem}"
                form = "ws_a_tmem" if tmem else "ws"
                yield probe(name, form, Mma(kind, a, b, d, m=m, ws=True, tmem=tmem))
    for m in (32, 64, 128):
        starts = (1, 5, 0, 3)[: 128 // m]
        given = {"m": m, "ws": True}
        mask = zero_columns(starts, 0b0101, 3, 5)
        yield probe(f"ws.mask.m{m}", "ws_zero_column_mask", Mma("f16", "bf16", "bf16", mask=mask, **given))
        mask = zero_columns(starts, 0, 2, 6, 8)
        given |= {"mask": mask, "max_shift": 1}
        yield probe(f"ws.shift.m{m}", "ws_zero_column_mask", Mma("f16", "bf16", "bf16", **given))
    for buffer in ("b0", "b1", "b2", "b3"):
        given = {"ws": True, "collector": f"{buffer}::fill"}
        yield probe(f"ws.collector.{buffer}", "ws", Mma("f16", "bf16", "bf16", **given))


def _pairs() -> Iterator[Probe]:
    for types in (PAIRS[2], PAIRS[3], PAIRS[4], PAIRS[9]):
        kind, a, b, d = types
        for m in (128, 256):
            for tmem in (False, True):
                name = _name("pair", types, f"m{m}{'.a_in_tmem' * tmem}")
                form = "pair_different_a" if tmem else "pair"
                yield probe(name, form, Mma(kind, a, b, d, m=m, group=2, tmem=tmem))
    given = {"m": 256, "group": 2, "majors": ("MN", "MN")}
    yield probe("pair.m256.MN", "pair", Mma("f16", "bf16", "bf16", **given))


def _sparse() -> Iterator[Probe]:
    for kind, a, b, d, selectors in (
        ("f16", "f16", "bf16", "f32", (0, 1)),
        ("f16", "f16", "f16", "f16", (1,)),
        ("tf32", "tf32", "tf32", "f32", (0, 1)),
        ("f8f6f4", "e4m3", "e5m2", "f32", (0,)),
        ("i8", "s8", "u8", "s32", (0,)),
    ):
        for selector in selectors:
            for m in (64, 128):
                name = f"sparse.{kind}.{d}.s{selector}.m{m}"
                yield probe(name, "sparse", Mma(kind, a, b, d, m=m, sparse=selector))
    yield probe("sparse.pair", "sparse", Mma("f16", "bf16", "bf16", m=256, group=2, sparse=0))
    yield probe("sparse.a_in_tmem", "sparse", Mma("f8f6f4", "e4m3", "e4m3", sparse=0, tmem=True))


SCALES = (
    ("mxf8f6f4", "e4m3", "e5m2", "scale_vec::1X", "ue8m0", (0, 1, 2, 3)),
    ("mxf8f6f4", "e2m1", "e4m3", "scale_vec::1X", "ue8m0", (0,)),
    ("mxf8f6f4", "e2m3", "e3m2", "scale_vec::1X", "ue8m0", (0,)),
    ("mxf4", "e2m1", "e2m1", "scale_vec::2X", "ue8m0", (0, 2)),
    ("mxf4nvf4", "e2m1", "e2m1", "scale_vec::2X", "ue8m0", (0, 2)),
    ("mxf4nvf4", "e2m1", "e2m1", "scale_vec::4X", "ue4m3", (0,)),
    ("mxf4nvf4", "e2m1", "e2m1", "scale_vec::4X", "ue8m0", (0,)),
)


def _block_scaled() -> Iterator[Probe]:
    for kind, a, b, vector, scale, ids in SCALES:
        base = f"scaled.{kind}.{a}-{b}.{vector[-2:]}.{scale}"
        common = {"vector": vector, "scale": scale}
        for one in ids:
            other = ids[-1 - ids.index(one)]
            yield probe(f"{base}.ids{one}{other}", "block_scale", Mma(kind, a, b, ids=(one, other), **common))
        if a != "e2m1" or b != "e4m3":
            for at in ((1, 0), (3, 0), (0, 1), (0, 3), (2, 2)):
                name = f"{base}.columns{at[0]}{at[1]}"
                yield probe(name, "scale_columns", Mma(kind, a, b, at=at, **common))
        for m in (256,) if b != "e2m1" else (128, 256):
            name = f"{base}.pair.m{m}"
            # M = 128: the halves of the lanes have scale factors of their own halves of N, here the same.
            yield probe(name, "block_scale_pair", Mma(kind, a, b, m=m, group=2, **common))
    yield probe(
        "scaled.quarters",
        "scale_quarters",
        Mma("mxf8f6f4", "e4m3", "e4m3", vector="scale_vec::1X", scale="ue8m0", own_quarters=True),
        frozenset({"scale_factors_not_replicated"}),
    )


def _arithmetic() -> Iterator[Probe]:
    for types in (PAIRS[0], PAIRS[1], PAIRS[2], PAIRS[3], PAIRS[4], PAIRS[6]):
        kind, a, b, d = types
        yield probe(_name("sums", types), "accumulation", Mma(kind, a, b, d, style="normal"))
        yield probe(_name("sums", types, "fresh"), "accumulation", Mma(kind, a, b, d, style="normal", accumulate=False))


def probes() -> Iterator[Probe]:
    """Every probe of tcgen05.mma."""
    for part in (_dense, _descriptors, _weight_stationary, _pairs, _sparse, _block_scaled, _arithmetic):
        yield from part()
