"""Choose the back end a result comes from. There are three; says why one is or is not usable here.

`native` is a GPU whose architecture matches the kernel's, `emulator` our functional PTX emulator on the CPU and
`reference` the PyTorch oracle. Back ends register themselves by an import path, so this module imports neither the
emulator nor the kernels. `auto` takes native, else emulator; it never falls back after a failure, and it takes
`reference` only where no kernel is to be verified.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dsv4lib import env
from dsv4lib.errors import ArgumentError, BackendUnavailable

NAMES = ("auto", "native", "emulator", "reference")

# The compute capability each target is made for. An `a` target runs on exactly that one; `f` and plain targets also run
# on later minor versions of the same major version.
CAPABILITY = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100a": (10, 0), "sm_100f": (10, 0), "sm_103a": (10, 3)}

# The emulator joins by existing: this module is looked up, never imported, until it is used.
EMULATOR_MODULE = "dsv4lib.emulator"


@dataclass(frozen=True)
class Status:
    """Whether a back end can run here.

    Attributes:
        name: one of `native`, `emulator`, `reference`.
        available: True if it can run kernels of the wanted architecture now.
        reason: one sentence, why or why not.
        fix: what would make it available; empty if it is.
    """

    name: str
    available: bool
    reason: str
    fix: str = ""


def status(name: str, arch: str = "sm_100a") -> Status:
    """Say whether back end ``name`` runs kernels of ``arch`` on this machine.

    Raises:
        ArgumentError: unknown ``name`` or ``arch``.
    """
    if arch not in CAPABILITY:
        raise ArgumentError("arch", arch, "one of " + ", ".join(CAPABILITY))
    if name == "native":
        return _native(arch)
    if name == "emulator":
        if importlib.util.find_spec(EMULATOR_MODULE) is None:
            return Status("emulator", False, "the emulator is not part of this version of the lab", "update the lab")
        if _emulating not in (None, arch):
            return Status("emulator", False, f"it emulates {_emulating} here, the kernel is for {arch}", f"use {arch}")
        return Status("emulator", True, f"the emulator runs {arch} kernels on this CPU")
    if name == "reference":
        return Status("reference", True, "the PyTorch oracle runs anywhere; it verifies the model, not a kernel")
    raise ArgumentError("backend", name, "one of " + ", ".join(NAMES[1:]))


_recorded: str | None = None  # architecture of `recorded`


@contextmanager
def recorded(arch: str) -> Iterator[None]:
    """Make native an emulated device of ``arch`` inside. On it the caller records what ops launch.

    Ops keep what they have once found out about the machine: record in a process of its own.
    """
    global _recorded
    before, _recorded = _recorded, arch
    try:
        yield
    finally:
        _recorded = before


_emulating: str | None = None  # architecture of `emulating`


@contextmanager
def emulating(arch: str) -> Iterator[None]:
    """Make the emulator one GPU of ``arch`` inside. Ops that have no kernel for it are refused by name.

    Outside of it every kernel is emulated on the architecture that it is made for.

    Raises:
        ArgumentError: an unknown architecture.
    """
    global _emulating
    if arch not in CAPABILITY:
        raise ArgumentError("arch", arch, "one of " + ", ".join(CAPABILITY))
    before, _emulating = _emulating, arch
    try:
        yield
    finally:
        _emulating = before


def emulated_arch() -> str | None:
    """Return the architecture of `emulating`; None outside of it."""
    return _emulating


def _native(arch: str) -> Status:
    if _recorded is not None:
        return Status("native", arch == _recorded, f"launches for {_recorded} are recorded", "record for this one")
    if env.driver_cuda() is None:
        return Status("native", False, "no NVIDIA driver", "a machine with a GPU (see ./dsv4 doctor)")
    import torch

    needed = CAPABILITY[arch]

    def fits(have: tuple[int, int]) -> bool:
        return have == needed or (not arch.endswith("a") and have[0] == needed[0] and have[1] >= needed[1])

    if torch.version.cuda is None:
        return Status("native", False, "torch is a CPU build", "install a CUDA build of torch (see ./dsv4 doctor)")
    if not torch.cuda.is_available():
        return Status("native", False, "no usable NVIDIA driver or GPU", "see ./dsv4 doctor")
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    for major, minor in filter(fits, found):
        return Status("native", True, f"a GPU of compute capability {major}.{minor} runs {arch} kernels")
    have = ", ".join(f"{a}.{b}" for a, b in sorted(found))
    need = f"{needed[0]}.{needed[1]}"
    return Status("native", False, f"the GPU has compute capability {have}; {arch} needs {need}", f"use a {need} GPU")


def check_name(name: str) -> None:
    """Refuse what names no back end; whether it can run here is not asked.

    Raises:
        ArgumentError: an unknown ``name``.
    """
    if name not in NAMES:
        raise ArgumentError("backend", name, "one of " + ", ".join(NAMES))


def resolve(name: str, arch: str | Sequence[str] = "sm_100a", kernel: bool = True) -> str:
    """The back end that a choice means here.

    Args:
        name: `auto`, `native`, `emulator` or `reference`.
        arch: the architecture the kernels are compiled for, or several: native wants a GPU of one of them.
        kernel: True if a kernel must run; then `auto` never means `reference`.

    Returns:
        `native`, `emulator` or `reference`.

    Raises:
        ArgumentError: unknown ``name`` or ``arch``.
        BackendUnavailable: it cannot run here; the message says why and what would help.
    """
    check_name(name)
    archs = (arch,) if isinstance(arch, str) else tuple(arch)
    if name != "auto":
        found = _first(name, archs)
        if not found.available:
            raise BackendUnavailable(f"back end {name} cannot run here: {found.reason} (fix: {found.fix})")
        return name
    tried = [_first("native", archs), _first("emulator", archs)]
    for candidate in tried:
        if candidate.available:
            return candidate.name
    if not kernel:
        return "reference"
    why = "; ".join(f"{s.name}: {s.reason}" for s in tried)
    raise BackendUnavailable(f"no back end runs {' or '.join(archs)} kernels here ({why})")


def runs(name: str, archs: Sequence[str]) -> str:
    """Return the architecture whose code a back end of `resolve` runs here: the first that it can, else the first."""
    return next((arch for arch in archs if status(name, arch).available), archs[0])


def _first(name: str, archs: Sequence[str]) -> Status:
    """Status for the first architecture that it is available for, else for the first."""
    return status(name, runs(name, archs))


def device(name: str) -> str:
    """Return where the tensors of a launch live on back end ``name``. It is "cuda" for native, else "cpu"."""
    return "cuda" if name == "native" else "cpu"


def launch(name: str, compiled: Any, *args: Any) -> Any:
    """Call a compiled CuTeDSL function on a back end, and wait for it. The back end runs kernels.

    Args:
        name: `native` or `emulator`, as `resolve` returned it.
        compiled: what ``compile_for`` returned, or ``cute.compile`` with its PTX kept.
        args: CuTe tensors over memory of `device(name)`, numbers.

    Returns:
        None on native, the emulated device (its last launch is in ``launches[-1]``) on the emulator.

    Raises:
        ArgumentError: ``name`` runs no kernels.
        EmulatorError: the emulator stopped the kernel.
    """
    done = enqueue(name, compiled, *args)
    if name == "native":
        import torch

        torch.cuda.synchronize()
    return done


def enqueue(name: str, compiled: Any, *args: Any) -> Any:
    """Launch without waiting. On a GPU the work is queued on the stream among ``args``, and may be captured."""
    if name == "native":
        getattr(compiled, "function", compiled)(*args)
        return None
    if name == "emulator":
        return importlib.import_module(EMULATOR_MODULE).launch(compiled, *args)
    raise ArgumentError("backend", name, "native or emulator: only these run kernels")


def enqueue_ptx(*args: Any, **kwargs: Any) -> Any:
    """Launch a kernel of a PTX text in the emulator; see `emulator.driver.direct.launch_ptx`."""
    return importlib.import_module(EMULATOR_MODULE).launch_ptx(*args, **kwargs)


def emulated() -> Any:
    """Return the emulator's runtime while a device of it is active, else None. It then answers for the GPU."""
    module = sys.modules.get(f"{EMULATOR_MODULE}.driver.symbols")
    return module.RUNTIME if module is not None and module.RUNTIME.devices else None


def oracle(op: str) -> Any:
    """Return the module of `dsv4lib.reference` that says what op ``op`` computes. Back end `reference` runs it."""
    return importlib.import_module(f"dsv4lib.reference.{op}")
