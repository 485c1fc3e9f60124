"""List the micro-kernels that move tensor memory: tcgen05.cp, .shift, .ld, .st, and what else SM100 adds."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4lib.lab.day_one.probe import Probe
from dsv4lib.lab.day_one.tensor_memory import About, Action, Contents, descriptor, made, strides

SHAPES = ("128x256b", "128x128b", "4x256b", "64x128b.warpx2::02_13", "64x128b.warpx2::01_23", "32x128b.warpx4")
TO = 64  # column that results go to
# Shape -> columns and registers of .x1.
FRAGMENTS = {"32x32b": (1, 1), "16x64b": (2, 1), "16x128b": (4, 2), "16x256b": (8, 4), "16x32bx2": (1, 1)}


def _cp(form: str, shape: str, format: str = "", group: int = 1, swizzle: str = "128B") -> Probe:
    act = Action()
    target = act.tensor(4)
    source = act.matrix(0, descriptor(swizzle, *strides(swizzle, "K", 128, 1)))
    act.add(f"tcgen05.cp.cta_group::{group}.{shape}{'.' * bool(format)}{format} [{target}], {source}")
    name = f"cp.{shape.replace('::', '_')}{'.' * bool(format)}{format.replace('.', '_')}"
    name += f"{'.pair' * (group > 1)}{'' if swizzle == '128B' else '.' + swizzle}"
    return made(About(name, form, group, "u32"), act, Contents())


def _copies() -> Iterator[Probe]:
    for shape in SHAPES:
        for group in (1, 2):
            yield _cp("cp", shape, group=group)
        for swizzle in ("none", "32B"):
            yield _cp("cp", shape, swizzle=swizzle)
        for format in ("b8x16.b6x16_p32", "b8x16.b4x16_p64"):
            yield _cp("cp_decompression", shape, format)


def _shifts() -> Iterator[Probe]:
    for group, lane in ((1, 0), (1, 32), (1, 96), (2, 64)):
        act = Action()
        act.add(f"tcgen05.shift.cta_group::{group}.down [{act.tensor(8, lane)}]")
        yield made(About(f"shift.lane{lane}{'.pair' * (group > 1)}", "shift", group, "u32"), act, Contents())


def _names(count: int) -> str:
    return "{" + ", ".join(f"%r{100 + i}" for i in range(count)) + "}"


def _fragment(shape: str, times: int, packed: bool, load: bool) -> Probe:
    """A load by a shape, stored lane by lane, or the other way round."""
    columns, registers = (x * times for x in FRAGMENTS[shape])
    registers = registers if not packed else max(1, registers // (1 if load else 2))
    act = Action(every=True)
    suffix = (".pack::16b" if load else ".unpack::16b") if packed else ""
    extra = f", {columns}" if shape == "16x32bx2" else ""
    count = FRAGMENTS[shape][1] * times
    if load:
        act.add(f"tcgen05.ld.sync.aligned.{shape}.x{times}{suffix}.b32 {_names(count)}, [{act.tensor(0)}]{extra}")
        act.add("tcgen05.wait::ld.sync.aligned")
        act.add(f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{act.tensor(TO)}], {_names(count)}")
    else:
        act.add(f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {_names(count)}, [{act.tensor(0)}]")
        act.add("tcgen05.wait::ld.sync.aligned")
        act.add(f"tcgen05.st.sync.aligned.{shape}.x{times}{suffix}.b32 [{act.tensor(TO)}]{extra}, {_names(count)}")
    act.add("tcgen05.wait::st.sync.aligned")
    name = f"{'ld' if load else 'st'}.{shape}.x{times}{'.packed' * packed}"
    return made(About(name, "fragments", 1, "u32"), act, Contents())


def _fragments() -> Iterator[Probe]:
    for shape in FRAGMENTS:
        for times in (1, 4):
            for packed in (False, True):
                for load in (True, False):
                    yield _fragment(shape, times, packed, load)


def probes() -> Iterator[Probe]:
    """Every probe of this module."""
    for part in (_copies, _shifts, _fragments):
        yield from part()
