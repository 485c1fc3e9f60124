"""Build native handlers by opcode and shape. Emit, compile the missing ones in one batch, keep the code on disk.

    library = Library()
    handlers = library.handlers([("add.s32", "32 32 i"), ...])
    handlers["add.s32", "32 32 i"].address

Opcodes whose IR is the same share their code (``mov.b32`` and ``mov.f32``; ``add.s32`` with a register or a constant
as operand). Compiled code is cached per batch in the folder ``native`` of the cache (``dsv4lib.folders``), which no
other user may write: that is checked each time before files are read or written. The key covers the IR, the
processor and LLVM's version. A damaged file is removed and compiled again; a foreign one is ignored.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.native import irtools
from dsv4lib.errors import DSV4Error
from dsv4lib.folders import cache_root, own_folder

MAGIC = b"dsv4 native 2\n"
OPT_LEVEL = 2
KEEP = 256  # cache files; the least recently used go
MAX_HEADER = 1 << 24  # bytes
FAMILIES = ("compare", "cvt", "cvt_packed", "float", "int", "logic", "pack", "special", "warp")


def register_families() -> None:
    """Import the modules that register native implementations (twice does nothing)."""
    for name in FAMILIES:
        importlib.import_module(f"dsv4lib.emulator.native.{name}")


register_families()  # they need irtools, not this module


@dataclass(frozen=True)
class Compiled:
    """A handler ready to run.

    Attributes:
        address: of the function ``i32 (context*, record*)``.
        widths: bits of every flattened operand as the handler reads or writes it; 0 = not accessed.
        stores: the flattened operands it writes.
    """

    address: int
    widths: tuple[int, ...]
    stores: frozenset[int]


@functools.cache
def emit(opcode: str, shape: str) -> irtools.Handler:
    """Emit the IR of one opcode with one operand shape (see ``irtools``).

    Raises:
        UnsupportedInstruction: no native implementation matches the opcode.
        EmulatorError: the operands do not fit the instruction.
    """
    entry, form = isa.lookup(opcode)
    if entry.kind != "native":
        raise AssertionError(f"{opcode} is a service, not native")
    emitter = irtools.Emitter(form, shape)
    try:
        entry.implementation(emitter, form)
    except (IndexError, KeyError, ValueError) as error:  # it takes its operands apart by their number and width
        if isinstance(error, DSV4Error):
            raise
        raise EmulatorError(f"{opcode} takes operands of another number or form") from error
    return emitter.finish()


def target_machine() -> llvm.TargetMachine:
    """Make a code generator for this processor."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    cpu = llvm.get_host_cpu_name()
    machine = llvm.Target.from_default_triple()
    return machine.create_target_machine(cpu=cpu, features=features, opt=OPT_LEVEL, jit=True)


@functools.cache
def compiler() -> llvm.TargetMachine:
    """Get the code generator of this process."""
    return target_machine()


@functools.cache
def host_key() -> str:
    """Describe what compiled code depends on apart from its IR."""
    parts = (llvmlite.__version__, llvm.llvm_version_info, llvm.get_default_triple(), llvm.get_host_cpu_name())
    return repr((*parts, llvm.get_host_cpu_features().flatten(), OPT_LEVEL))


@functools.cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dsv4-native-")


def cache_folder() -> Path:
    """Name the folder of compiled code. DSV4_CACHE=off: one of this process, gone with it.

    Raises:
        CacheError: there is no place for it.
    """
    root = cache_root()
    return Path(_own_folder().name) if root is None else root / "native"


def unit_name(text: str, helpers: Iterable[str] = ()) -> str:
    """Name a piece of code: a hash of everything its machine code depends on."""
    digest = hashlib.sha256(host_key().encode())
    for part in (text, *(irtools.HELPERS[h] for h in sorted(helpers))):
        digest.update(part.encode() + b"\0")
    return "dsv4_" + digest.hexdigest()[:32]


def compile_object(text: str, optimised: bool = False) -> bytes:
    """Compile a module of IR to machine code. ``optimised``: LLVM's passes go over it first."""
    machine = compiler()
    module = llvm.parse_assembly(text)
    module.triple = llvm.get_default_triple()
    if optimised:
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=OPT_LEVEL))
        passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


# Linkers live as long as the process: handed-out addresses point into their memory.
_ENGINES: list[llvm.ExecutionEngine] = []


class Library:
    """Compiled code of this process. It has symbols by name, filled from the disk cache or by compiling.

    Raises:
        CacheError: whenever files are needed and others may write the folder or one above it.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = cache_folder() if folder is None else folder
        machine = target_machine()  # becomes the engine's own
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        _ENGINES.append(self._engine)
        self._address: dict[str, int] = {}
        self._on_disk: dict[str, Path] = {}
        self._seen: set[Path] = set()
        self.compiled = 0  # symbols compiled by this process, for tests and measurements

    def handlers(self, wanted: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Compiled]:
        """Get addresses of handlers by (opcode, shape). The missing ones are compiled in one batch."""
        emitted = {key: emit(*key) for key in wanted}
        names = {key: unit_name(h.text, h.helpers) for key, h in emitted.items()}
        missing = {name: emitted[key] for key, name in names.items()}
        self._provide({name: (h.text.replace("@NAME", f"@{name}"), h) for name, h in missing.items()})
        return {k: Compiled(self._address[names[k]], h.widths, h.stores) for k, h in emitted.items()}

    def function(
        self, text: str, helpers: Sequence[str] = (), declarations: Iterable[str] = (), optimised: bool = False
    ) -> int:
        """Get the address of one function given as IR text that calls itself ``@NAME``.

        ``optimised``: LLVM's passes go over it, for text that was not written with care.
        """
        name = unit_name(text + "; optimised" * optimised, helpers)
        unit = irtools.Handler(text, (), frozenset(), frozenset(declarations), frozenset(helpers))
        self._provide({name: (text.replace("@NAME", f"@{name}"), unit)}, optimised)
        return self._address[name]

    def _provide(self, units: dict[str, tuple[str, irtools.Handler]], optimised: bool = False) -> None:
        """Make every symbol of ``units`` callable."""
        missing = [name for name in units if name not in self._address]
        if missing:
            self.folder = own_folder(self.folder)
            self._scan()
            for path in {self._on_disk[name] for name in missing if name in self._on_disk}:
                self._load(path)
        missing = [name for name in missing if name not in self._address]
        if missing:
            self._load(self._compile({name: units[name] for name in missing}, optimised))

    def _scan(self) -> None:
        """Read the symbol lists of cache files not seen before."""
        for path in sorted(self.folder.glob("*.code")):
            if path not in self._seen:
                self._seen.add(path)
                names, _ = read_file(path, use=False)
                self._on_disk.update(dict.fromkeys(names, path))

    def _compile(self, units: dict[str, tuple[str, irtools.Handler]], optimised: bool) -> Path:
        """Compile a batch and write it to the cache."""
        helpers = sorted({h for _, unit in units.values() for h in unit.helpers})
        declared = {d for _, unit in units.values() for d in unit.declarations}
        bodies = [irtools.HELPERS[h] for h in helpers] + [body for body, _ in units.values()]
        code = compile_object("\n".join([*sorted(declared), *bodies]), optimised)
        self.compiled += len(units)
        header = json.dumps({"sha256": checksum(list(units), code), "names": list(units)}).encode() + b"\n"
        path = self.folder / (hashlib.sha256("".join(sorted(units)).encode()).hexdigest()[:32] + ".code")
        handle, draft = tempfile.mkstemp(dir=self.folder, suffix=".draft")  # mode 0600
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + header + code)
        os.replace(draft, path)  # atomic: a reader sees the old file or the whole new one
        self._seen.add(path)
        self._prune()
        return path

    def _prune(self) -> None:
        """Remove cache files not used for longest; code that is loaded does not need its file."""
        files = sorted(self.folder.glob("*.code"), key=last_use, reverse=True)
        for path in files[KEEP:]:
            path.unlink(missing_ok=True)
            self._on_disk = {name: where for name, where in self._on_disk.items() if where != path}

    def _load(self, path: Path) -> None:
        """Link a cached batch into the process; a damaged file is removed and compiled anew by the caller."""
        names, code = read_file(path, use=True)
        if not names:
            path.unlink(missing_ok=True)
            self._on_disk = {name: where for name, where in self._on_disk.items() if where != path}
            return
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()
        for name in names:
            self._address.setdefault(name, self._engine.get_function_address(name))


def checksum(names: list[str], code: bytes) -> str:
    """Digest all contents of a cache file."""
    return hashlib.sha256("\n".join(names).encode() + b"\0" + code).hexdigest()


def read_file(path: Path, use: bool) -> tuple[list[str], bytes]:
    """Read the symbols of a cache file and, for ``use``, its code.

    Both are checked against its checksum.

    No symbols if it is not one of ours, was cut short or changed, or has just been pruned by another process.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.getuid() or file.readline(len(MAGIC)) != MAGIC:
                return [], b""
            header = json.loads(file.readline(MAX_HEADER))
            names = header.get("names") if isinstance(header, dict) else None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                return [], b""
            if not use:
                return names, b""
            os.utime(file.fileno())  # see _prune
            code = file.read()
            return (names, code) if header.get("sha256") == checksum(names, code) else ([], b"")
    except (OSError, ValueError, RecursionError):
        return [], b""


def last_use(path: Path) -> int:
    """Get the time a cache file was used last; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


@functools.cache
def default() -> Library:
    """Get the library of this process."""
    return Library()
