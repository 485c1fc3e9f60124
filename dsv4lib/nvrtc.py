"""Compile CUDA C++ to PTX and cubin by NVRTC. It needs neither a GPU nor a driver.

The library is loaded from, in this order: DSV4_NVRTC (a path), the wheel nvidia-cuda-nvrtc of this environment, the
folders of CUDA_HOME and CUDA_PATH, the system's. Headers such as cuda_bf16.h come from the wheel nvidia-cuda-runtime.
Source: NVRTC documentation, "Basic Usage".
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dsv4lib.errors import ArgumentError, BackendUnavailable, DSV4Error

INSTALL = "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime, or set DSV4_NVRTC to the path of libnvrtc.so"
VERSIONS = ("13", "12")
MAX_BYTES = 1 << 24  # of a source file
FLAGS = ("-lineinfo", "--std=c++17")
_START = 1 << 16
_INCLUDE = re.compile(r"""^\s*#\s*include\s*[<"]([^">]+)[">]""", re.MULTILINE)
_MISSING = re.compile(r'cannot open source file "[a-z_]+"')  # of the C++ library: NVRTC has none of it
_HOST = (
    "\nNVRTC compiles device code alone and has no headers of the host. If the file has host code, let nvcc make its"
    "\nPTX, and give that: nvcc -ptx -lineinfo -arch=sm_{0} -o {1}.ptx {2}"
)
_ARCH = re.compile(r"sm_(\d{2,3}[af]?)")


class CompileError(DSV4Error):
    """A source that NVRTC refuses; the message is its log."""


class Output(NamedTuple):
    """PTX with line info, and the cubin that NVRTC's assembler makes of it; "" and b"" where not asked for."""

    ptx: str
    cubin: bytes = b""


def candidates() -> Iterator[str]:
    """List where the library may be, the best place first."""
    if named := os.environ.get("DSV4_NVRTC"):
        yield named  # and nothing else: a wrong path is an error
        return
    names = [f"libnvrtc.so.{version}" for version in VERSIONS]
    roots = [Path(entry) / "nvidia" for entry in sys.path if entry]
    folders = [root / part / "lib" for root in roots for part in ("cu13", "cuda_nvrtc")]
    folders += [Path(os.environ[key]) / "lib64" for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)]
    yield from (str(folder / name) for folder in folders for name in names if (folder / name).is_file())
    yield from names


def path() -> str:
    """Find the file of NVRTC; it is not loaded.

    Raises:
        BackendUnavailable: there is none in a place that we know; the system's own is not looked for.
    """
    for name in candidates():
        if "/" in name and Path(name).is_file():
            return str(Path(name).resolve())
    raise BackendUnavailable(f"NVRTC is not installed: {INSTALL}")


def library() -> tuple[ctypes.CDLL, Path | None]:
    """Load NVRTC; also the folder of the toolkit that it lies in, None if the system found it.

    NVRTC loads its built-in functions by name. Some versions look in the system's folders only, so the file beside the
    library is loaded here first.

    Raises:
        BackendUnavailable: it is not installed; the message says how to install it.
    """
    tried = list(candidates())
    for name in tried:
        try:
            found = opened(name)
        except (OSError, AttributeError):
            continue
        return found, Path(name).resolve().parent.parent if "/" in name else None
    raise BackendUnavailable(f"CUDA C++ needs NVRTC, and none of {', '.join(tried)} can be loaded: {INSTALL}")


def opened(name: str) -> ctypes.CDLL:
    """Load one file of NVRTC, and its built-in functions if they lie beside it.

    Raises:
        OSError: it cannot be loaded. AttributeError: it is no NVRTC.
    """
    found = ctypes.CDLL(name)
    found.nvrtcVersion  # noqa: B018  the symbol itself
    if "/" in name:
        for builtins in sorted(Path(name).resolve().parent.glob("libnvrtc-builtins.so.*")):
            with suppress(OSError):
                ctypes.CDLL(str(builtins))
    return found


def version() -> str:
    """Ask the library for its version, such as "13.0".

    Raises:
        BackendUnavailable: it is not installed.
    """
    nvrtc, _ = library()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(nvrtc, "nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def build() -> str:
    """Return what tells builds of one version apart: sizes and first bytes, with build ids, of the library's files.

    Raises:
        BackendUnavailable: it is not installed.
    """
    _, toolkit = library()
    files = [] if toolkit is None else sorted(toolkit.glob("lib*/libnvrtc*.so.*"))
    facts = [version()]
    for one in files:
        with one.open("rb") as opened:
            facts.append(f"{one.name} {one.stat().st_size} {hashlib.sha256(opened.read(_START)).hexdigest()}")
    return "; ".join(facts)


def include_folders(path: Path, more: Iterable[Path] = ()) -> list[Path]:
    """List where a source's headers are looked for.

    Raises:
        BackendUnavailable: NVRTC is not installed.
    """
    _, toolkit = library()
    found = [path.resolve().parent, *more]
    found += [toolkit / "include", toolkit / "include" / "cccl"] if toolkit else []
    return [folder for folder in found if folder.is_dir()]


def included(text: str, path: Path, folders: Sequence[Path]) -> list[Path]:
    """List the headers that a source may read, whatever its macros are. Those that are not found are left out."""
    found: dict[Path, None] = {}
    waiting = [(text, path.resolve().parent)]
    while waiting:
        text, here = waiting.pop()
        for name in _INCLUDE.findall(text):
            header = next((one for folder in (here, *folders) if (one := folder / name).is_file()), None)
            if header is not None and header not in found:
                found[header] = None
                waiting.append((header.read_text(errors="replace"), header.parent))
    return sorted(found)


def compile_file(path: Path, arch: str, options: Sequence[str] = ()) -> str:
    """Compile a .cu file to PTX, with line info.

    Args:
        arch: sm_90a and the like. options: further options of NVRTC, such as ``-DN=4``.

    Raises:
        ArgumentError: no such file, or no architecture.
        BackendUnavailable: NVRTC is not installed.
        CompileError: the source has errors.
    """
    return compile_text(read(path), path, arch, ["-default-device", *options]).ptx


def read(path: Path) -> str:
    """Read a source file.

    Raises:
        ArgumentError: there is none, or it is too big.
    """
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise ArgumentError("source", str(path), f"a CUDA C++ file of at most {MAX_BYTES:,} bytes")
    return path.read_text(errors="replace")


def compile_text(
    text: str, path: Path, arch: str, options: Sequence[str] = (), folders: Iterable[Path] = (), cubin: bool = False
) -> Output:
    """Compile a text as if it were the file ``path``, whose name is in messages and line info.

    Args:
        arch: sm_90a and the like. options: further options of NVRTC. folders: where else headers are.
        cubin: assemble the PTX, too.

    Raises:
        ArgumentError: no architecture.
        BackendUnavailable: NVRTC is not installed.
        CompileError: the source has errors.
    """
    target = _ARCH.fullmatch(arch)
    if target is None:
        raise ArgumentError("arch", arch, "sm_80, sm_90a, sm_100a and their like")
    nvrtc, _ = library()
    flags = [f"--gpu-architecture={'sm' if cubin else 'compute'}_{target[1]}", *FLAGS]
    flags += [f"-I{folder}" for folder in include_folders(path, folders)] + list(options)
    raw = [flag.encode() for flag in flags]
    program = ctypes.c_void_p()
    _call(nvrtc, "nvrtcCreateProgram", ctypes.byref(program), text.encode(), str(path).encode(), 0, None, None)
    try:
        code = nvrtc.nvrtcCompileProgram(program, len(raw), (ctypes.c_char_p * len(raw))(*raw))
        if code:
            log = _bytes(nvrtc, "nvrtcGetProgramLog", program).split(b"\0")[0].decode(errors="replace")
            advice = _HOST.format(target[1], path.stem, path.name) if _MISSING.search(log) else ""
            raise CompileError(f"NVRTC refuses {path.name}:\n{log.strip() or f'error {code}'}{advice}")
        ptx = _bytes(nvrtc, "nvrtcGetPTX", program).rstrip(b"\0").decode(errors="replace")
        return Output(ptx, _bytes(nvrtc, "nvrtcGetCUBIN", program) if cubin else b"")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _bytes(nvrtc: ctypes.CDLL, name: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _call(nvrtc, f"{name}Size", program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(max(size.value, 1))
    _call(nvrtc, name, program, buffer)
    return buffer.raw[: size.value]


def _call(nvrtc: ctypes.CDLL, name: str, *args: object) -> None:
    code = getattr(nvrtc, name)(*args)
    if code:
        raise CompileError(f"{name} ended with error {code}")
