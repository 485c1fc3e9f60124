"""Lead the functions of a CUDA runtime that a compiled module contains to ours (`libcudart`).

A module that is linked with ``libcudart_static.a`` and not stripped has a symbol for each of its functions. The first
bytes of each are overwritten by a jump into a library of ours (`shared_object`), whose table leads to the callbacks,
and when Python ends to a function that succeeds. Nothing is written to the file; no other process is touched.

On x86-64 alone: elsewhere the caches of instructions would have to be flushed after code is overwritten.
Source: System V ABI ("Symbol Table"), mprotect(2), proc_pid_maps(5).
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import platform
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from dsv4lib.emulator.driver import libcudart, shared_object
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.errors import BackendUnavailable

SONAME = "libdsv4cudart.so"
SYMTAB, FUNCTION = 2, 2  # kinds of sections and of symbols
_PUBLIC = re.compile(r"cuda[A-Z]\w*")
_MACHINE, _JUMP = "x86_64", b"\xff\x25\0\0\0\0"  # a jump to where the next 8 bytes say
_LIBRARY: dict[str, ctypes.CDLL] = {}
_CALLBACKS: dict[str, object] = {}


def functions(image: bytes) -> Iterator[tuple[str, int, int]]:
    """List the public functions of the runtime in an ELF file: name, address, bytes.

    Raises:
        BackendUnavailable: no ELF file of 64 bits, or one without symbols.
    """
    if image[:5] != b"\x7fELF\x02":
        raise BackendUnavailable("a compiled module that is no ELF file of 64 bits")
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, start + size * i) for i in range(count)]
    tables = [header for header in headers if header[1] == SYMTAB]
    if not tables:
        raise BackendUnavailable("a compiled module without symbols: the CUDA runtime in it cannot be found")
    for _, _, _, _, at, nbytes, link, _, _, entry in tables:
        strings = headers[link][4]
        for place in range(at, at + nbytes, entry):
            name_at, info, _, section, value, length = struct.unpack_from("<IBBHQQ", image, place)
            if info & 15 != FUNCTION or not section:
                continue
            end = image.index(b"\0", strings + name_at)
            name = image[strings + name_at : end].decode(errors="replace")
            if _PUBLIC.fullmatch(name):
                yield name, value, length


def lead(module: ModuleType, folder: str) -> None:
    """Lead every runtime function in a module's file to ours.

    Raises:
        BackendUnavailable: another machine than x86-64, a file without symbols.
        LaunchError: a function that is too short for a jump.
    """
    machine = platform.machine()
    if machine != _MACHINE:
        raise BackendUnavailable(
            f"a CUDA runtime inside {module.__name__} needs {_MACHINE}: of {machine} no caches of instructions are "
            "flushed after code is overwritten"
        )
    path = Path(module.__file__ or "").resolve()
    found = list(functions(path.read_bytes()))
    if not found:
        return
    base, library = _base(path), _library(folder, [name for name, _, _ in found])
    for name, address, nbytes in found:
        if nbytes < len(_JUMP) + 8:
            raise LaunchError(f"{name} in {path.name} has {nbytes} bytes: too short for a jump")
        _write(base + address, _JUMP + struct.pack("<Q", shared_object.address_of(library, name)))


def _library(folder: str, wanted: list[str]) -> ctypes.CDLL:
    """The library with a slot for each function: made for the first module, and again for one with other names."""
    names = tuple(sorted({*wanted, *libcudart.ENTRIES}))
    key = "\n".join(names)
    if key not in _LIBRARY:
        number = len(_LIBRARY)
        made = _LIBRARY[key] = shared_object.load(f"{number or ''}{SONAME}", names, folder)
        for name in names:
            _CALLBACKS.setdefault(name, libcudart.ENTRIES.get(name) or libcudart.refused(name))
        where = {name: ctypes.cast(_CALLBACKS[name], ctypes.c_void_p).value or 0 for name in names}  # type: ignore[arg-type]
        shared_object.fill(made, names, where)
        zero = dict.fromkeys(names, shared_object.address_of(made, shared_object.ZERO))
        atexit.register(shared_object.fill, made, names, zero)
    return _LIBRARY[key]


def _base(path: Path) -> int:
    """Where the file is loaded: the lowest of its mappings. Source: proc_pid_maps(5)."""
    starts = [
        int(line.split("-", 1)[0], 16)
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.split(maxsplit=5)[5:] == [str(path)]
    ]
    if not starts:
        raise LaunchError(f"{path.name} is not loaded in this process")
    return min(starts)


def _write(address: int, code: bytes) -> None:
    """Overwrite code of this process."""
    start = address & -mmap.PAGESIZE
    length = address + len(code) - start
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for rights in (mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_EXEC):
        if protect(start, length, rights):
            why = os.strerror(ctypes.get_errno())
            raise BackendUnavailable(f"this system does not allow to change code of a loaded library: {why}")
        if rights & mmap.PROT_WRITE:
            ctypes.memmove(address, code, len(code))
