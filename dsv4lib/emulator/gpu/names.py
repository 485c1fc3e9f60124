"""Demangle C++ names of kernels, by the C++ runtime library where there is one.

Source: Itanium C++ ABI, chapter "Demangler API".
"""

from __future__ import annotations

import ctypes
import functools
import re
from typing import Any

_LIBRARIES = ("libstdc++.so.6", "libc++abi.so.1")
_MANGLED = re.compile(r"_Z[\w$.]{1,1000}")
# CuTe's DSL appends its arguments' types: kernel_cutlass_NAME_tensor000o...
_CUTE = re.compile(r"kernel_cutlass_(\w+?)_(?:tensor|Tensor|CopyAtom|TiledMMA|Ptr|ptr|\d+_)\w*")


@functools.cache
def _demangler() -> tuple[Any, Any] | None:
    for name in _LIBRARIES:
        try:
            demangle, free = ctypes.CDLL(name).__cxa_demangle, ctypes.CDLL(None).free
        except (OSError, AttributeError):
            continue
        demangle.restype = ctypes.c_void_p
        demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
        free.argtypes, free.restype = [ctypes.c_void_p], None
        return demangle, free
    return None


@functools.lru_cache(4096)
def demangled(name: str) -> str:
    """Demangle a C++ name; any other comes back as it is.

    >>> demangled("k")
    'k'
    """
    if not _MANGLED.fullmatch(name):
        return name
    found = _demangler()
    if found is None:
        return name
    demangle, free = found
    status = ctypes.c_int(0)
    address = demangle(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    try:
        return ctypes.string_at(address).decode(errors="replace") if status.value == 0 else name
    finally:
        free(address)


def shortened(name: str, most: int = 100) -> str:
    """Demangle a name and shorten it for a line of a report: argument types of a DSL's kernel, a long tail."""
    plain = demangled(name)
    if match := _CUTE.fullmatch(plain):
        plain = match[1]
    return plain if len(plain) <= most else f"{plain[: most - 3]}..."
