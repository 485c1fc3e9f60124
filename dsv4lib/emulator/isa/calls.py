"""Implement what kernels call without its code. ``vprintf``, ``__assertfail``, ``malloc``, ``free``.

A call passes its arguments in variables of the ``.param`` space (PTX ISA, "Abstracting the ABI"), which the lowering
places in local memory. ``vprintf(format, arguments)`` takes two generic pointers; the arguments lie packed at their
natural alignment, after C's promotions (CUDA programming guide, "Formatted Output"). Lanes print in order.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.errors import EmulatorError, MemoryFault
from dsv4lib.emulator.memory.addressing import LOW_32, is_local
from dsv4lib.emulator.ptx.functions import DEEPER, MAX_DEPTH, NOWHERE
from dsv4lib.emulator.ptx.ir import Instr, Operand, Symbol, Variable, Vector

if TYPE_CHECKING:
    from dsv4lib.emulator.isa import Form
    from dsv4lib.emulator.machine.interfaces import WarpView

MAX_FORMAT = 1 << 16
STACK = Variable("(stack)", "local", 1 << 14, 16)  # what `stacks` gives out
_CONVERSION = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(hh|h|ll|l|j|z|t)?([diouxXeEfFgGcsp%])")


def local(warp: WarpView, lane: int, offset: int, nbytes: int) -> Any:
    """Get bytes of a lane's local memory."""
    size = int(warp.ctx["local_bytes"])
    if offset + nbytes > size:
        raise MemoryFault(f"a call reads {nbytes} bytes at {offset} of {size} bytes of local memory", warp.place())
    return (ctypes.c_uint8 * nbytes).from_address(int(warp.ctx["local"]) + lane * size + offset)


def _passed(warp: WarpView, operand: Operand, sizes: tuple[int, ...]) -> Iterator[tuple[int, list[int]]]:
    """Every active lane with the arguments that it passes, ``sizes`` bytes each."""
    assert isinstance(operand, Vector) and len(operand.items) == len(sizes)
    places = [warp.program.symbol(item.name)[1] for item in operand.items if isinstance(item, Symbol)]
    for lane in warp.lanes().tolist():
        yield (
            lane,
            [int.from_bytes(local(warp, lane, at, n), "little") for at, n in zip(places, sizes, strict=True)],
        )


def vprintf(warp: WarpView, instr: Instr, form: Form) -> None:
    """``call (result), vprintf, (format, arguments)``: print once per active lane. The result is the argument count."""
    result, _, passed = instr.operands
    assert isinstance(result, Vector) and isinstance(result.items[0], Symbol)
    answer = warp.program.symbol(result.items[0].name)[1]
    for lane, (pattern, buffer) in _passed(warp, passed, (8, 8)):
        text, count = formatted(warp, lane, pattern, buffer)
        sys.stdout.write(text)
        local(warp, lane, answer, 4)[:] = count.to_bytes(4, "little")


def assertfail(warp: WarpView, instr: Instr, form: Form) -> None:
    """``call __assertfail, (message, file, line, function, char size)``.

    Raises:
        EmulatorError: always, with the assertion of the first active lane.
    """
    for lane, (message, file, line, function, _) in _passed(warp, instr.operands[-1], (8, 8, 4, 8, 8)):
        texts = [c_string(warp, lane, pointer) for pointer in (message, file, function)]
        place = warp.place(instr)
        raise EmulatorError(f"assertion {texts[0]!r} failed at {texts[1]}:{line} in {texts[2]} (lane {lane})", place)


def malloc(warp: WarpView, instr: Instr, form: Form) -> None:
    """``call (address), malloc, (size)``: for every active lane. 0 where there is no room."""
    result, _, passed = instr.operands
    assert isinstance(result, Vector) and isinstance(result.items[0], Symbol)
    answer = warp.program.symbol(result.items[0].name)[1]
    machine = warp.cta.machine
    races = getattr(machine.race, "far", None)  # of the race detector; the order of accesses alone has none
    for lane, (nbytes,) in _passed(warp, passed, (8,)):
        address = machine.gmem.heap.allocate(nbytes)
        if address and races is not None:
            races.recycled(address, nbytes)
        local(warp, lane, answer, 8)[:] = address.to_bytes(8, "little")


def free(warp: WarpView, instr: Instr, form: Form) -> None:
    """``call free, (address)``.

    Raises:
        MemoryFault: an address that malloc did not return, or that was freed before.
    """
    for lane, (address,) in _passed(warp, instr.operands[-1], (8,)):
        if not warp.cta.machine.gmem.heap.free(address):
            raise MemoryFault(f"lane {lane} frees {address:#x}, which malloc did not return", warp.place(instr))


def nowhere(warp: WarpView, instr: Instr, form: Form) -> None:
    """Refuse a call of an address that is no candidate function's.

    Candidates: ptx/functions.py.

    Raises:
        EmulatorError: always.
    """
    address = int(warp.read(instr.operands[1], np.uint64)[warp.lanes()[0]])
    raise EmulatorError(
        f"call of {address:#x}: no function with such parameters, or one that is being called already: recursion",
        warp.place(instr),
    )


def deeper(warp: WarpView, instr: Instr, form: Form) -> None:
    """Refuse a call of a function by itself that is deeper than it was inlined.

    Raises:
        EmulatorError: always.
    """
    raise EmulatorError(
        f"recursion is deeper than the emulator inlines a function into itself: {MAX_DEPTH} times, fewer if it calls "
        "itself in several places",
        warp.place(instr),
    )


# Built-in functions by name: the implementation, numbers of results and arguments.
BUILTINS = {
    "vprintf": (vprintf, 1, 2),
    "__assertfail": (assertfail, 0, 5),
    "malloc": (malloc, 1, 1),
    "free": (free, 0, 1),
    NOWHERE: (nowhere, 0, 0),
    DEEPER: (deeper, 0, 0),
}


def fits(instr: Instr, name: str) -> bool:
    """Tell whether the call passes, in variables, what the builtin takes."""
    _, *counts = BUILTINS[name]
    groups = [o.items for o in instr.operands if isinstance(o, Vector)]
    return [len(items) for items in groups] == [n for n in counts if n] and all(
        isinstance(item, Symbol) for items in groups for item in items
    )


def formatted(warp: WarpView, lane: int, pattern: int, buffer: int) -> tuple[str, int]:
    """Format what one lane prints; return the text and how many arguments it takes."""
    parts: list[str] = []
    position = offset = count = 0
    text = c_string(warp, lane, pattern)
    for match in _CONVERSION.finditer(text):
        parts.append(text[position : match.start()])
        position = match.end()
        flags, length, kind = match.groups()
        if kind == "%":
            parts.append("%")
            continue
        size = 8 if kind in "eEfFgGsp" or length in ("l", "ll", "j", "z", "t") else 4
        offset = -(-offset // size) * size
        raw = read(warp, lane, buffer + offset, size)
        offset += size
        count += 1
        parts.append(_convert(warp, lane, flags, kind, raw))
    return "".join([*parts, text[position:]]), count


def _convert(warp: WarpView, lane: int, flags: str, kind: str, raw: bytes) -> str:
    if kind in "eEfFgG":
        return f"%{flags}{kind}" % struct.unpack("<d", raw)
    if kind == "s":
        return f"%{flags}s" % c_string(warp, lane, int.from_bytes(raw, "little"))
    if kind == "p":
        return f"%{flags}s" % hex(int.from_bytes(raw, "little"))
    if kind == "c":
        return f"%{flags}s" % chr(raw[0])
    return f"%{flags}{kind}" % int.from_bytes(raw, "little", signed=kind in "di")


def read(warp: WarpView, lane: int, address: int, nbytes: int) -> bytes:
    """Read bytes at a generic address of global memory or of the lane's local memory."""
    if is_local(np.array([address], np.uint64))[0]:
        return bytes(local(warp, lane, address & LOW_32, nbytes))
    return warp.cta.machine.gmem.view(address, nbytes).tobytes()


def c_string(warp: WarpView, lane: int, address: int) -> str:
    """Read a zero-terminated string."""
    return b"".join(_until_zero(warp, lane, address)).decode(errors="replace")


def _until_zero(warp: WarpView, lane: int, address: int) -> Iterator[bytes]:
    for i in range(MAX_FORMAT):
        byte = read(warp, lane, address + i, 1)
        if byte == b"\0":
            return
        yield byte
    raise EmulatorError(f"a string of more than {MAX_FORMAT} bytes", warp.place())
