"""Write a shared library whose functions are callbacks of this process, and load it under a name of our choice.

Compiled packages reach a driver in one way: they load ``libcuda.so.1`` and look up its functions. A library of that
name which is loaded already is what they get. The one written here has no code of its own: each exported function jumps
to the address in its slot of a table, which is filled after loading. No compiler or linker is needed.

An ELF file with program headers only: one segment of code and symbols, one of the table and the dynamic section.
Source: System V ABI, generic and for x86-64 and AArch64 ("Object Files", "Program Loading and Dynamic Linking").
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dsv4lib.errors import BackendUnavailable

PAGE = 0x10000  # no machine has larger ones
STUB = 8  # bytes of a function
TABLE, ZERO = "dsv4_table", "dsv4_zero"  # the table, and a function that returns 0
LOAD, DYNAMIC, GNU_STACK = 1, 2, 0x6474E551  # kinds of segments
HASH, STRTAB, SYMTAB, STRSZ, SYMENT, SONAME = 4, 5, 6, 10, 11, 14  # tags of the dynamic section
_EXECUTE, _WRITE, _READ = 1, 2, 4
RTLD_NOW, RTLD_NOLOAD, RTLD_GLOBAL = os.RTLD_NOW, os.RTLD_NOLOAD, os.RTLD_GLOBAL


def _x86(at: int, slot: int) -> bytes:
    """``jmp [slot]``, relative to the next instruction."""
    return b"\xff\x25" + struct.pack("<i", slot - (at + 6)) + b"\x66\x90"


def _arm(at: int, slot: int) -> bytes:
    """``ldr x16, slot; br x16``: 16 and 17 are the registers that calls may change."""
    return struct.pack("<II", 0x58000010 | ((slot - at) // 4 & 0x7FFFF) << 5, 0xD61F0200)


# ELF's number of a machine, its jump, and code that returns 0.
MACHINES: dict[str, tuple[int, Callable[[int, int], bytes], bytes]] = {
    "x86_64": (62, _x86, b"\x31\xc0\xc3"),
    "aarch64": (183, _arm, struct.pack("<II", 0x52800000, 0xD65F03C0)),
}


def image(soname: str, names: Sequence[str], machine: str) -> bytes:
    """Make the file: functions ``names`` and the variable `TABLE` with a slot for each of them."""
    number, stub, zero = MACHINES[machine]
    strings, starts = b"\0", {}
    for name in (soname, TABLE, ZERO, *names):
        starts[name] = len(strings)
        strings += name.encode() + b"\0"
    count = len(names) + 3  # with the empty symbol, the table and the function of ours
    symbols = 0x40 + 4 * 56
    hashes = symbols + 24 * count
    text = -(-(hashes + 4 * (2 + 1 + count) + len(strings)) // 16) * 16
    string_table = hashes + 4 * (2 + 1 + count)
    code_end = text + STUB * (len(names) + 1)
    table = -(-code_end // PAGE) * PAGE
    dynamic = table + 8 * len(names)
    entries = (
        (SONAME, starts[soname]), (HASH, hashes), (STRTAB, string_table), (SYMTAB, symbols), (STRSZ, len(strings)),
        (SYMENT, 24), (0, 0),
    )  # fmt: skip
    end = dynamic + 16 * len(entries)
    out = bytearray(end)
    header = (b"\x7fELF\x02\x01\x01" + bytes(9), 3, number, 1, 0, 0x40, 0, 0, 64, 56, 4, 64, 0, 0)
    struct.pack_into("<16sHHIQQQIHHHHHH", out, 0, *header)
    segments = (
        (LOAD, _READ | _EXECUTE, 0, code_end, PAGE),
        (LOAD, _READ | _WRITE, table, end - table, PAGE),
        (DYNAMIC, _READ | _WRITE, dynamic, end - dynamic, 8),
        (GNU_STACK, _READ | _WRITE, 0, 0, 16),
    )
    for i, (kind, flags, start, size, align) in enumerate(segments):
        struct.pack_into("<IIQQQQQQ", out, 0x40 + 56 * i, kind, flags, start, start, start, size, size, align)
    struct.pack_into("<IBBHQQ", out, symbols + 24, starts[TABLE], 0x11, 0, 1, table, 8 * len(names))
    struct.pack_into("<IBBHQQ", out, symbols + 48, starts[ZERO], 0x12, 0, 1, code_end - STUB, STUB)
    out[code_end - STUB : code_end - STUB + len(zero)] = zero
    for i, name in enumerate(names):
        at = text + STUB * i
        struct.pack_into("<IBBHQQ", out, symbols + 24 * (i + 3), starts[name], 0x12, 0, 1, at, STUB)
        out[at : at + STUB] = stub(at, table + 8 * i)
    chain = [*range(2, count), 0]  # one bucket: each symbol leads to the next
    struct.pack_into(f"<{3 + count}I", out, hashes, 1, count, 1, 0, *chain)
    out[string_table : string_table + len(strings)] = strings
    for i, entry in enumerate(entries):
        struct.pack_into("<QQ", out, dynamic + 16 * i, *entry)
    return bytes(out)


def loaded(soname: str) -> bool:
    """Tell whether this process has loaded a library of that name."""
    try:
        ctypes.CDLL(soname, mode=RTLD_NOW | RTLD_NOLOAD)
    except OSError:
        return False
    return True


def load(soname: str, names: Sequence[str], folder: str) -> ctypes.CDLL:
    """Write the library into a private folder and load it; it stays as long as the process. See `fill`.

    Raises:
        BackendUnavailable: a library of that name is loaded already, or a machine for which we know no jump.
    """
    machine = platform.machine()
    if machine not in MACHINES:
        raise BackendUnavailable(f"a stand-in for {soname} needs {' or '.join(MACHINES)}, this is {machine}")
    if loaded(soname):
        raise BackendUnavailable(f"{soname} is loaded in this process already: start the emulator in a fresh one")
    path = Path(folder) / soname
    path.write_bytes(image(soname, names, machine))
    return ctypes.CDLL(str(path), mode=RTLD_NOW | RTLD_GLOBAL)


def address_of(library: ctypes.CDLL, name: str) -> int:
    """Get the address of a function of the library."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def fill(library: ctypes.CDLL, names: Sequence[str], addresses: Mapping[str, int]) -> None:
    """Write the addresses of the functions into the table; ``names`` as for `load`."""
    table = (ctypes.c_uint64 * len(names)).in_dll(library, TABLE)
    for i, name in enumerate(names):
        table[i] = addresses[name]
