"""Read from a cubin what ptxas has found out about a kernel: registers and local memory.

A cubin is a 64-bit ELF file. Its section ``.nv.info`` is a list of attributes: u8 format, u8 number, u16 size or value,
and for format 4 that many bytes. Numbers 0x2f (registers) and 0x11 (bytes of the frame, in local memory) carry the
index of the kernel in the symbol table and the value. Source: the names that cuobjdump -elf prints.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from dsv4lib.emulator.errors import LaunchError

REGISTER_COUNT, FRAME_SIZE = 0x2F, 0x11
SIZED = 4  # the format of attributes with bytes after them


class Resources(NamedTuple):
    """What a kernel takes: registers of a thread, bytes of local memory of a thread."""

    registers: int
    local_bytes: int


class _Section(NamedTuple):
    """A section: bytes [offset, offset + size) of the file."""

    name: str
    offset: int
    size: int


def resources(cubin: bytes, kernel: str) -> Resources:
    """Read what a kernel of a cubin takes.

    Raises:
        LaunchError: no cubin, or one that says nothing about the kernel.
    """
    try:
        sections = {section.name: section for section in _sections(cubin)}
        symbols = _symbols(cubin, sections)
        info = sections[".nv.info"]
        found: dict[int, int] = {}
        for number, value in _attributes(cubin[info.offset : info.offset + info.size]):
            if number in (REGISTER_COUNT, FRAME_SIZE):
                symbol, amount = struct.unpack_from("<II", value)
                if symbols[symbol] == kernel:
                    found[number] = amount
        return Resources(found[REGISTER_COUNT], found.get(FRAME_SIZE, 0))
    except (struct.error, LookupError, ValueError, OverflowError) as error:
        raise LaunchError(f"the cubin does not say how many registers {kernel} takes") from error


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _sections(cubin: bytes) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in heads:
        yield _Section(_text(cubin, heads[names][4] + name), offset, length)


def _symbols(cubin: bytes, sections: dict[str, _Section]) -> list[str]:
    table, names = sections[".symtab"], sections[".strtab"]
    starts = range(table.offset, table.offset + table.size, 24)
    return [_text(cubin, names.offset + struct.unpack_from("<I", cubin, at)[0]) for at in starts]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(info):
        form, number, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == SIZED:
            yield number, info[at : at + size]
            at += size
