"""Compile an entry point into a package's CUDA C++, host code and kernels, by nvcc.

An `Entry` is a C++ expression with a record of parameters; `source` writes a file of a few lines around it, which
includes the package's header and takes the record's fields as 64-bit words, in their order, and then for each whether
its word is a double. A field that a checkout does not have is a compile error, never another field's value.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv4lib.bench.cpp_peers import host
from dsv4lib.errors import BackendUnavailable, DSV4Error
from dsv4lib.folders import cache_root, own_folder

FLAGS = (
    "-std=c++20",
    "-lineinfo",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-diag-suppress=177",
)
LIMIT_S = 1800
_FRAME = """#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <type_traits>
%(includes)s

namespace {
template <class Field> void put(Field& field, unsigned long long word, bool is_double) {
    if constexpr (std::is_floating_point_v<Field>) {
        double value;
        std::memcpy(&value, &word, sizeof value);
        field = static_cast<Field>(is_double ? value : (double)(long long)word);
    } else {
        if (is_double) throw std::invalid_argument("a double for a field that is none");
        field = (Field)word;
    }
}
}  // namespace

extern "C" const char* dsv4_run(const unsigned long long* words) {
    static std::string said;
    try {
        %(record)s p{};
%(fields)s
        %(call)s;
    } catch (const std::exception& error) {
        said = error.what();
        return said.c_str();
    }
    return nullptr;
}
"""


class BuildError(DSV4Error):
    """A checkout that cannot be compiled or loaded; nvcc's message is the end of its output."""


@dataclass(frozen=True)
class Checkout:
    """A package's sources and where its headers are.

    Attributes:
        name: of the package. variable: of the environment, that names the folder. folders: with headers, in there.
    """

    name: str
    variable: str
    folders: tuple[str, ...]

    def root(self) -> Path:
        """Find the folder.

        Raises:
            BackendUnavailable: the variable is not set, or there are no such headers.
        """
        given = os.environ.get(self.variable)
        if not given:
            raise BackendUnavailable(f"{self.variable} does not name a checkout of {self.name}")
        root = Path(given).resolve()
        for folder in self.folders:
            if not (root / folder).is_dir():
                raise BackendUnavailable(f"{self.variable}: {root} has no folder {folder}")
        return root

    def commit(self) -> str:
        """Return the commit of the checkout, with "+" if files of it are changed; "" if it is no clone of its own."""
        root = self.root()

        def git(*command: str) -> str:
            done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=False)
            return done.stdout.strip() if done.returncode == 0 else ""

        top = git("rev-parse", "--show-toplevel")
        if not top or Path(top).resolve() != root:  # a folder inside another repository
            return ""
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=9", "HEAD") + ("+" if changed else "")


CUTLASS = Checkout("CUTLASS", "DSV4_CUTLASS", ("include",))


@dataclass(frozen=True)
class Entry:
    """What to compile.

    Attributes:
        checkout: whose. arch: such as "sm_90a". includes: headers, as the source names them.
        record: C++ type of the parameters. fields: their names, in the order of their words.
        call: C++ expression of the record `p`. uses: a line of C++ after the includes, such as an alias.
    """

    checkout: Checkout
    arch: str
    includes: tuple[str, ...]
    record: str
    fields: tuple[str, ...]
    call: str
    uses: str = ""

    def source(self) -> str:
        """Write the file that is compiled."""
        includes = "\n".join([*(f'#include "{name}"' for name in self.includes), self.uses])
        fields = "\n".join(
            f"        put(p.{name}, words[{i}], words[{len(self.fields) + i}]);" for i, name in enumerate(self.fields)
        )
        return _FRAME % {"includes": includes, "record": self.record, "fields": fields, "call": self.call}


@dataclass(frozen=True)
class Built:
    """A shared library, and the PTX of the kernels in it."""

    library: Path
    ptx: str


def nvcc() -> str:
    """Find nvcc: DSV4_NVCC, in PATH, in CUDA_HOME.

    Raises:
        BackendUnavailable: there is none.
    """
    home = os.environ.get("CUDA_HOME", "")
    for name in (os.environ.get("DSV4_NVCC"), shutil.which("nvcc"), f"{home}/bin/nvcc" if home else None):
        if name and Path(name).is_file():
            return name
    raise BackendUnavailable(
        "nvcc is not installed: the CUDA toolkit, or the wheels nvidia-cuda-nvcc, -crt, -cccl, nvvm"
    )


def build(entry: Entry) -> Built:
    """Compile, or find what was compiled of the same sources before.

    Raises:
        BackendUnavailable: no checkout, no nvcc.
        BuildError: nvcc fails, or takes longer than the limit.
    """
    compiler, root, cutlass = nvcc(), entry.checkout.root(), CUTLASS.root()
    folders = [*(root / folder for folder in entry.checkout.folders), cutlass / "include"]
    target = entry.arch.replace("sm", "compute")
    command = [*FLAGS, f"-gencode=arch={target},code={target}", *(f"-I{folder}" for folder in folders)]
    version = _run([compiler, "--version"], root)
    key = _key([entry.source(), version, *command], folders)
    cache = cache_root()
    if cache is None:
        kept = Path(tempfile.mkdtemp(prefix="dsv4-peers-"))
        atexit.register(shutil.rmtree, kept, ignore_errors=True)
    else:
        kept = own_folder(cache / "cpp_peers" / key)
    if not (kept / "peer.o").is_file():
        _made(kept, ("peer.ptx", "peer.o"), lambda folder: _compile(compiler, command, entry, folder))
    library = f"peer-{hashlib.sha256(host.SOURCE.encode()).hexdigest()[:16]}.so"
    if not (kept / library).is_file():
        _made(kept, (library,), lambda folder: _link(compiler, kept / "peer.o", folder / library))
    return Built(kept / library, (kept / "peer.ptx").read_text())


def _made(kept: Path, names: tuple[str, ...], make: Callable[[Path], None]) -> None:
    """Make files in a folder beside, then move them; the last one says that all are there."""
    with tempfile.TemporaryDirectory(prefix="making-", dir=kept) as scratch:
        make(Path(scratch))
        for name in names:
            os.replace(Path(scratch) / name, kept / name)


def _key(texts: list[str], folders: list[Path]) -> str:
    """Hash what the object depends on: headers of the package and of CUTLASS by content."""
    seen = hashlib.sha256("\n".join(texts).encode())
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".h", ".hpp", ".cuh", ".cu", ".inl") and file.is_file():
                seen.update(file.read_bytes())
    return seen.hexdigest()[:32]


def _compile(compiler: str, command: list[str], entry: Entry, folder: Path) -> None:
    """Make peer.o and peer.ptx."""
    source = folder / "peer.cu"
    source.write_text(entry.source())
    keep = ["--keep", "--keep-dir", str(folder)]
    _run([compiler, *command, "-Xcompiler", "-fPIC", *keep, "-c", str(source), "-o", str(folder / "peer.o")], folder)
    if not (folder / "peer.ptx").is_file():
        raise BuildError("nvcc kept no PTX of peer.cu")


def _link(compiler: str, compiled: Path, library: Path) -> None:
    """Make the shared library, with the stand-in for the CUDA runtime."""
    text, standing = library.with_name("host.cpp"), library.with_name("host.o")
    text.write_text(host.SOURCE)
    _run(
        [compiler, "-x", "c++", "-std=c++17", "-Xcompiler", "-fPIC", "-c", str(text), "-o", str(standing)],
        library.parent,
    )
    shared = ["-shared", "-Xlinker", "-Bsymbolic", "--cudart", "none"]
    _run([compiler, *shared, str(compiled), str(standing), "-o", str(library)], library.parent)


def _run(command: list[str], folder: Path) -> str:
    """Run nvcc; returns what it prints."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"nvcc takes longer than {LIMIT_S:g} s") from error
    except OSError as error:
        raise BuildError(f"nvcc does not start: {error}") from error
    if done.returncode:
        raise BuildError((done.stderr + done.stdout)[-4000:])
    return done.stdout


def words(fields: tuple[str, ...], values: Mapping[str, int | float]) -> list[int]:
    """Lay out a record's values: whole numbers and addresses as they are, floats as the bits of a double.

    Returns:
        the words, and then for each whether it is a double: a floating-point field may be given a whole number.

    Raises:
        BuildError: a field without a value, or a value without a field.
    """
    if set(fields) != set(values):
        raise BuildError(f"fields {sorted(set(fields) ^ set(values))} are in one of record and call alone")
    pack = struct.Struct("<d")
    out = []
    for name in fields:
        value = values[name]
        bits = int.from_bytes(pack.pack(value), "little") if isinstance(value, float) else int(value)
        out.append(bits & 0xFFFFFFFFFFFFFFFF)
    return out + [int(isinstance(values[name], float)) for name in fields]
