"""The one device function that is supported: ``vprintf``, which ``cute.printf`` and ``printf`` of CUDA C++ call.

A call passes its arguments in variables of the ``.param`` space, written by ``st.param`` and read by ``ld.param``
(PTX ISA, "Abstracting the ABI"). ``vprintf(format, arguments)`` takes two generic pointers; the arguments lie packed at
their natural alignment, after C's promotions (CUDA programming guide, "Formatted Output"). Lanes print in order.
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
from dsv4lib.emulator.native.abi import LANES
from dsv4lib.emulator.ptx.ir import Instr, Memory, Symbol, Vector

if TYPE_CHECKING:
    from dsv4lib.emulator.isa import Form
    from dsv4lib.emulator.warp import Warp

PRINTF = "vprintf"
MAX_FORMAT = 1 << 16
_CONVERSION = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(hh|h|ll|l|j|z|t)?([diouxXeEfFgGcsp%])")
_WIDTHS = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f32": 4, "b32": 4, "u32": 4, "s32": 4}


def arguments(warp: Warp) -> dict[str, np.ndarray]:
    """The warp's call variables: uint64[32] by name."""
    return vars(warp).setdefault("call_arguments", {})


def _dtype(instr: Instr) -> Any:
    return np.dtype(f"<u{_WIDTHS.get(instr.opcode.rpartition('.')[2], 8)}")


def _variable(instr: Instr, memory: Any) -> str:
    if not isinstance(memory, Memory) or not isinstance(memory.base, Symbol) or memory.offset:
        raise EmulatorError(f"{instr.opcode} of a part of a call variable")
    return memory.base.name


def store_param(warp: Warp, instr: Instr, form: Form) -> None:
    """``st.param [variable], value``."""
    target, value = instr.operands
    slot = arguments(warp).setdefault(_variable(instr, target), np.zeros(LANES, np.uint64))
    lanes = warp.lanes()
    slot[lanes] = warp.read(value, _dtype(instr)).astype(np.uint64)[lanes]


def load_param(warp: Warp, instr: Instr, form: Form) -> None:
    """``ld.param register, [variable]``."""
    target, source = instr.operands
    name = _variable(instr, source)
    if name not in arguments(warp):
        raise EmulatorError(f"call variable {name} is read but was never written")
    warp.write(target, arguments(warp)[name].astype(_dtype(instr)))


def vprintf(warp: Warp, instr: Instr, form: Form) -> None:
    """``call (result), vprintf, (format, arguments)``: print once per active lane; the result is the argument count."""
    result, _, passed = instr.operands
    assert isinstance(result, Vector) and isinstance(passed, Vector)
    known = arguments(warp)
    pattern, buffer = (known[symbol.name] for symbol in passed.items)
    counts = known.setdefault(result.items[0].name, np.zeros(LANES, np.uint64))
    for lane in warp.lanes().tolist():
        text, count = formatted(warp, lane, int(pattern[lane]), int(buffer[lane]))
        sys.stdout.write(text)
        counts[lane] = count


def formatted(warp: Warp, lane: int, pattern: int, buffer: int) -> tuple[str, int]:
    """What one lane prints, and how many arguments it takes."""
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


def _convert(warp: Warp, lane: int, flags: str, kind: str, raw: bytes) -> str:
    if kind in "eEfFgG":
        return f"%{flags}{kind}" % struct.unpack("<d", raw)
    if kind == "s":
        return f"%{flags}s" % c_string(warp, lane, int.from_bytes(raw, "little"))
    if kind == "p":
        return f"%{flags}s" % hex(int.from_bytes(raw, "little"))
    if kind == "c":
        return f"%{flags}s" % chr(raw[0])
    return f"%{flags}{kind}" % int.from_bytes(raw, "little", signed=kind in "di")


def read(warp: Warp, lane: int, address: int, nbytes: int) -> bytes:
    """Bytes at a generic address of global memory or of the lane's local memory."""
    if not is_local(np.array([address], np.uint64))[0]:
        return warp.cta.machine.gmem.view(address, nbytes).tobytes()
    size, offset = int(warp.ctx["local_bytes"]), address & LOW_32
    if offset + nbytes > size:
        raise MemoryFault(f"printf reads {nbytes} bytes at {offset} of {size} bytes of local memory", warp.place())
    return ctypes.string_at(int(warp.ctx["local"]) + lane * size + offset, nbytes)


def c_string(warp: Warp, lane: int, address: int) -> str:
    """A zero-terminated string."""
    return b"".join(_until_zero(warp, lane, address)).decode(errors="replace")


def _until_zero(warp: Warp, lane: int, address: int) -> Iterator[bytes]:
    for i in range(MAX_FORMAT):
        byte = read(warp, lane, address + i, 1)
        if byte == b"\0":
            return
        yield byte
    raise EmulatorError(f"a string of more than {MAX_FORMAT} bytes", warp.place())
