"""Implement multimem. Loads, stores and reductions of one buffer on all devices of a group (NVLink SHARP).

A multimem address lies in a multicast range (driver/devices.py) and stands for one address on every device. Devices are
combined in an order that the launch's policy chooses: hardware promises none. Without ``.acc`` the sum is rounded to
the type after every device; ``.acc::f32`` and ``.acc::f16`` keep it in that precision to the end. FP8 results saturate.

Source: PTX ISA, "multimem.ld_reduce, multimem.st, multimem.red": valid types and vectors.
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, MemoryFault
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.ptx.ir import Instr, Memory, Operand, Vector
from dsv4lib.emulator.units import numeric
from dsv4lib.emulator.units.reduction import reduce

_SCOPE = "<scope:cta|cluster|gpu|sys>"
_INTEGERS = (
    "<op:add>.<type:u32|s32|u64>",
    "<op:min|max>.<type:u32|s32|u64|s64>",
    "<op:and|or|xor>.<type:b32|b64>",
)
# The type and vector of a floating-point operation have 32, 64 or 128 bits together.
_HALVES = ("<vec:v2|v4|v8>.<type:f16|bf16>", "[<vec:v2|v4>.]<type:f16x2|bf16x2>")
_SINGLES = ("[<vec:v2|v4>.]<type:f32>", "<type:f64>")
_FP8 = ("<vec:v2|v4|v8>.<type:e4m3x2|e5m2x2>", "[<vec:v2|v4>.]<type:e4m3x4|e5m2x4>")
_LOADS = (
    *_INTEGERS,
    *(f"<op:add>[.<acc:acc::f32>].{kind}" for kind in _HALVES),
    *(f"<op:min|max>.{kind}" for kind in _HALVES),
    *(f"<op:add>.{kind}" for kind in _SINGLES),
    *(f"<op:add>[.<acc:acc::f16>].{kind}" for kind in _FP8),
    *(f"<op:min|max>.{kind}" for kind in _FP8),
)
_REDS = (
    *_INTEGERS,
    *(f"<op:add>.{kind}" for kind in (*_HALVES, *_SINGLES)),
    "<op:min|max>.<vec:v2|v4|v8>.<type:f16|bf16>",
    "<op:min|max>.<vec:v2|v4>.<type:f16x2|bf16x2>",
)
_STORES = ("<type:b32|u32|s32|b64|u64|s64>", *_HALVES, *_SINGLES, *_FP8)
_FP8_VALUES = {"e4m3": numeric.E4M3, "e5m2": numeric.E5M2}
_UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}


def _variants(base: str, semantics: str, tails: tuple[str, ...]) -> list[str]:
    return [f"{base}{order}[.global].{tail}" for order in ("[.weak]", f".<sem:{semantics}>.{_SCOPE}") for tail in tails]


@isa.service(*_variants("multimem.ld_reduce", "relaxed|acquire", _LOADS))
def ld_reduce(warp: Warp, instr: Instr, form: Form) -> None:
    """``d, [a]``: the values of all devices combined."""
    target, source = instr.operands
    items, bits = _items(warp, target, form)
    lanes = warp.lanes()
    machine, nbytes = warp.cta.machine, bits // 8 * len(items)
    places = _places(warp, source, nbytes)
    parts = [machine.gmem.gather(places[i], nbytes) for i in machine.device_order(len(places))]
    _accesses(warp, places, nbytes, False, form)
    total = combine(form.get("op"), element_of(form.get("type")), form.get("acc"), parts)
    values = np.zeros((32, len(items)), _UNSIGNED[bits])
    values[lanes] = total.view(_UNSIGNED[bits])
    for i, item in enumerate(items):
        warp.write(item, values[:, i].copy())


@isa.service(*_variants("multimem.st", "relaxed|release", _STORES))
def store(warp: Warp, instr: Instr, form: Form) -> None:
    """``[a], b``: the same value to all devices."""
    target, source = instr.operands
    data = _data(warp, source, form)
    places = _places(warp, target, data.shape[1])
    for where in places:
        warp.cta.machine.gmem.scatter(where, data)
    _accesses(warp, places, data.shape[1], True, form)


@isa.service(
    *(variant.replace("[.weak]", "") for variant in _variants("multimem.red", "relaxed|release", _REDS)),
)
def red(warp: Warp, instr: Instr, form: Form) -> None:
    """``[a], b``: reduce into every device's memory, lane by lane."""
    target, source = instr.operands
    data, element = _data(warp, source, form), element_of(form.get("type"))
    gmem = warp.cta.machine.gmem
    places = _places(warp, target, data.shape[1])
    for where in places:
        for address, row in zip(where.tolist(), data, strict=True):
            memory = gmem.view(address, len(row), write=True)
            memory[:] = reduce(form.get("op"), element, memory, row)
    _accesses(warp, places, data.shape[1], True, form)


def _accesses(warp: Warp, places: list[np.ndarray], nbytes: int, write: bool, form: Form) -> None:
    """Report the accesses on every device to the race detector; strong ones may synchronise."""
    race = warp.cta.machine.race
    if race is None or not race.full or not len(warp.lanes()):
        return
    strong = form.has("sem") or form.opcode.startswith("multimem.red")  # which is relaxed where it does not say
    for where in places:
        race.global_lanes(warp, where, nbytes, write, strong)
    if write and strong:
        race.global_release(warp, np.concatenate(places), form.opcode)


def element_of(kind: str) -> str:
    """Get the element of a packed type: f16 of f16x2."""
    return kind.partition("x")[0]


def combine(op: str, element: str, acc: str, parts: list[np.ndarray]) -> np.ndarray:
    """Combine uint8 arrays of one shape, one a device: ``op`` of all, per element."""
    if element not in _FP8_VALUES and not acc:
        total = parts[0]
        for part in parts[1:]:
            total = reduce(op, element, total, part).reshape(total.shape)
        return total
    if element in _FP8_VALUES:
        values = [_FP8_VALUES[element][part] for part in parts]
        wide = np.float16 if acc else np.float32
    else:
        values = [numeric.decode(np.ascontiguousarray(part), element) for part in parts]
        wide = np.float32
    with np.errstate(all="ignore"):
        total = values[0].astype(wide)
        for value in values[1:]:
            if op == "add":
                total = (total + value.astype(wide)).astype(wide)
                if element in _FP8_VALUES and not acc:
                    total = _FP8_VALUES[element][encode_fp8(total, element)]
            else:
                total = (np.fmin if op == "min" else np.fmax)(total, value.astype(wide))
    single = total.astype(np.float32)
    if element in _FP8_VALUES:
        return encode_fp8(single, element)
    return _halves(single, element).view(np.uint8)


def _halves(values: np.ndarray, element: str) -> np.ndarray:
    """uint16 codes of float32, to nearest even; NaN is 0x7FFF."""
    if element == "f16":
        codes = numeric.encode_half(values)
    else:
        bits = values.view(np.uint32)
        codes = ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), codes)


def encode_fp8(values: np.ndarray, element: str) -> np.ndarray:
    """Encode floats as uint8 codes. To nearest even, saturating to finite, NaN to 0x7F."""
    known = _FP8_VALUES[element][:128]
    finite = known[np.isfinite(known)]
    nan = np.isnan(values)
    magnitude = np.minimum(np.abs(np.where(nan, 0, values).astype(np.float64)), finite[-1])
    above = np.minimum(np.searchsorted(finite, magnitude), len(finite) - 1)
    below = np.maximum(above - 1, 0)
    down, up = magnitude - finite[below], finite[above] - magnitude
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    code = np.where(nan, 0x7F, code | np.signbit(values).astype(np.int64) << 7)
    return code.astype(np.uint8)


# --- operands ---------------------------------------------------------------------------------------------------------


def _items(warp: Warp, operand: Operand, form: Form) -> tuple[tuple[Operand, ...], int]:
    """Registers of an operand and their width.

    Raises:
        EmulatorError: not as many as the vector says.
    """
    items = operand.items if isinstance(operand, Vector) else (operand,)
    kind = form.get("type")
    base, _, count = kind.partition("x")
    bits = {"f16": 16, "bf16": 16, "e4m3": 8, "e5m2": 8}.get(base) or int(base[1:])
    if len(items) != int(form.get("vec", "v1")[1:]):
        raise EmulatorError(f"{form.opcode} takes {form.get('vec', 'one register')}, got {len(items)}", warp.place())
    return items, bits * int(count or 1)


def _data(warp: Warp, operand: Operand, form: Form) -> np.ndarray:
    """uint8[active lanes, bytes]: what the lanes store."""
    items, bits = _items(warp, operand, form)
    values = np.stack([warp.read(item, _UNSIGNED[bits]) for item in items], 1)
    return np.ascontiguousarray(values[warp.lanes()]).view(np.uint8)


def _places(warp: Warp, memory: Operand, nbytes: int) -> list[np.ndarray]:
    """Per device, uint64[active lanes]: where the lanes' multimem addresses lead.

    Raises:
        MemoryFault: misaligned, or not in a multicast range.
    """
    assert isinstance(memory, Memory)
    gmem = warp.cta.machine.gmem
    found = []
    for lane, address in zip(warp.lanes().tolist(), warp.address(memory)[warp.lanes()].tolist(), strict=True):
        if address % nbytes:
            raise MemoryFault(f"lane {lane}: address {address:#x} is not a multiple of {nbytes}", warp.place())
        targets = gmem.multicast(address, nbytes)
        if not targets:
            raise MemoryFault(
                f"lane {lane}: multimem access of {nbytes} bytes at {address:#x}, which is in no multicast range",
                warp.place(),
            )
        found.append(targets)
    return list(np.array(found, np.uint64).T)
