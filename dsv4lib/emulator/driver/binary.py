"""Find the PTX that belongs to a binary which a program hands to the runtime.

Generated host code carries the compiled kernels as a fat binary; the PTX they were assembled from is not in it. Every
compile under our eyes puts (cubin, PTX) in `KNOWN`; a load is answered from there by the cubin's hash. Kernel names are
not unique and therefore not used as the key.

Fat binary (format read off the files that CuTeDSL writes): 32-bit magic, u16 version, u16 header size, u64 size of what
follows; then entries of u16 kind (2 = cubin), u16 version, u32 header size, u64 size. A bare cubin is an ELF file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import struct
import zlib

from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.ptx.ir import Module
from dsv4lib.emulator.ptx.parse import parse

FATBIN_MAGIC = 0xBA55ED50
ELF_MAGIC = b"\x7fELF"
KNOWN: dict[str, bytes] = {}  # sha256 of the cubin -> PTX, deflated: it stays as long as the process


def remember(cubin: bytes, ptx: str) -> str:
    """Note that ``cubin`` was assembled from ``ptx``; returns the key."""
    key = hashlib.sha256(cubin).hexdigest()
    KNOWN[key] = zlib.compress(ptx.rstrip("\0").encode(), 1)
    return key


def ptx_of(cubin: bytes) -> str | None:
    """Find the PTX that a cubin was assembled from; None: it was not compiled under our eyes."""
    known = KNOWN.get(hashlib.sha256(cubin).hexdigest())
    return None if known is None else zlib.decompress(known).decode()


def cubin_at(address: int) -> bytes:
    """Find the cubin in the fat binary (or ELF file) at a host address.

    Raises:
        LaunchError: neither, or a fat binary without exactly one cubin.
    """
    magic = ctypes.string_at(address, 4)
    if magic == ELF_MAGIC:
        return ctypes.string_at(address, _elf_size(ctypes.string_at(address, 64), address))
    if struct.unpack("<I", magic)[0] != FATBIN_MAGIC:
        raise LaunchError(f"a module that starts with {magic.hex()} is neither a cubin nor a fat binary")
    _, header, size = struct.unpack("<HHQ", ctypes.string_at(address + 4, 12))
    position, end, found = address + header, address + header + size, []
    while position < end:
        kind, _, entry_header, entry_size = struct.unpack("<HHIQ", ctypes.string_at(position, 16))
        if entry_header < 16:
            raise LaunchError("a damaged fat binary: an entry without header")
        if kind == 2:
            found.append(ctypes.string_at(position + entry_header, entry_size))
        position += entry_header + entry_size
    if len(found) != 1 or found[0][:4] != ELF_MAGIC:
        raise LaunchError(f"a fat binary with {len(found)} cubins; one is needed")
    return found[0]


def _elf_size(header: bytes, address: int) -> int:
    """Size of a 64-bit ELF file in memory: the end of the last of its tables and sections."""
    programs, sections = struct.unpack_from("<QQ", header, 0x20)
    program_size, programs_count, section_size, section_count = struct.unpack_from("<HHHH", header, 0x36)
    end = max(programs + program_size * programs_count, sections + section_size * section_count)
    for i in range(section_count):
        kind, _, _, offset, size = struct.unpack(
            "<IQQQQ", ctypes.string_at(address + sections + section_size * i + 4, 36)
        )
        if kind != 8:  # SHT_NOBITS takes no space
            end = max(end, offset + size)
    return end


@functools.lru_cache(maxsize=64)
def parsed(ptx: str) -> Module:
    """``parse``, once per text; 3 MB a kernel and what it is lowered to."""
    return parse(ptx)


def known_ptx_of(cubin: bytes) -> str:
    """Find the PTX that a cubin was assembled from.

    Raises:
        LaunchError: the binary was not compiled where we could see its PTX.
    """
    ptx = ptx_of(cubin)
    if ptx is None:
        raise LaunchError(
            "a binary is loaded whose PTX is not known: it was compiled outside of emulator.device() and comes from a "
            "cache or an object file. Compile it inside, or with --keep-ptx --keep-cubin, and turn off that cache"
        )
    return ptx


def module_at(address: int) -> Module:
    """Find the parsed PTX of the binary at a host address; see `known_ptx_of`."""
    return parsed(known_ptx_of(cubin_at(address)))
