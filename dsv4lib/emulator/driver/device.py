"""Emulate a device, within a context in which torch and CuTeDSL see a GPU."""

from __future__ import annotations

import functools
import math
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dsv4lib.emulator.checks import KINDS, Hazard
from dsv4lib.emulator.checks.race import Detector
from dsv4lib.emulator.checks.selection import PRESETS, select
from dsv4lib.emulator.driver import arguments, config, emulated_time
from dsv4lib.emulator.driver.arch import Architecture, architecture
from dsv4lib.emulator.driver.memory import Tracker
from dsv4lib.emulator.driver.on_import import installed
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.driver.termination import unwinding
from dsv4lib.emulator.errors import EmulatorError, LaunchError
from dsv4lib.emulator.machine import directed, machine
from dsv4lib.emulator.machine.cta import aligned_zeros
from dsv4lib.emulator.machine.limits import BYTES, default_settings
from dsv4lib.emulator.machine.program import Program, lower
from dsv4lib.emulator.machine.request import Dim3, LaunchRequest, LaunchResult, Settings
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.ptx.ir import Module
from dsv4lib.emulator.trace.trace import Trace
from dsv4lib.errors import ArgumentError, BackendUnavailable

if TYPE_CHECKING:
    from dsv4lib.emulator.driver.interfaces import GroupView

ALIGNMENT = 256  # of memory the device allocates, as cudaMalloc's
CHECKS = {name: select(name).bits for name in PRESETS}


@dataclass(frozen=True)
class Launch:
    """A launch that has run: its request and its result."""

    request: LaunchRequest
    result: LaunchResult


class Device:
    """One emulated GPU.

    Attributes:
        arch: its architecture; settings: how it runs kernels.
        index, count: its number and how many there are; group: the devices it belongs to, None if it is alone.
        ctas: CTAs to which every launch is restricted, None = all.
        gmem: global memory; memory: registration of tensors in it.
        launches: every launch so far, in order.
        before: race detector of the latest launch, if the next one on its stream may overlap it.
        tracing: record a trace of every launch (a number: in about so many bytes). trace: that of the latest one, also
            if it failed.
        observer: called with the request and the result of every launch that ends.
    """

    def __init__(
        self, arch: Architecture, settings: Settings, ctas: frozenset[Dim3] | None = None, tracing: bool | int = False
    ):
        self.arch, self.settings, self.ctas = arch, settings, ctas
        self.index, self.count = 0, 1
        self.group: GroupView | None = None
        self.gmem = GlobalMemory()
        self.memory = Tracker(self.gmem)
        self.launches: list[Launch] = []
        self.tracing = tracing
        self.trace: Trace | None = None
        self.observer: Callable[[LaunchRequest, LaunchResult], None] | None = None
        self.before: Detector | None = None
        self.clock = 0.0  # ms of emulated time: `emulated_time`
        self._stream = 0
        self._allocated = 0  # bytes
        self._attributes = arch.attributes(settings.sm_count)
        self._variables: dict[int, tuple[Module, dict[str, int]]] = {}

    def __repr__(self) -> str:
        number = "" if self.group is None else f" {self.index} of {self.count}"
        return f"emulated {self.arch.name}{number}, {self.settings.sm_count} SMs"

    @property
    def number(self) -> int | None:
        """Get the device's number for messages, None if it is alone."""
        return None if self.group is None else self.index

    @property
    def hazards(self) -> list[Hazard]:
        """Collect the reports of the checks over all launches."""
        return [hazard for launch in self.launches for hazard in launch.result.hazards]

    def attribute(self, number: int) -> int:
        """Look up a cudaDeviceAttr.

        Raises:
            LaunchError: it has no value here.
        """
        if number not in self._attributes:
            raise LaunchError(f"device attribute {number} is not known to the emulator")
        return self._attributes[number]

    def launch(self, request: LaunchRequest, stream: int = 0) -> LaunchResult | None:
        """Run one kernel to its end. In a group, queue it on a stream for `synchronize` and return None."""
        self.memory.sweep()
        if self.group is not None:
            self.group.queues.launch(self, stream, request, self.group.hold())
            return None
        if stream != self._stream:
            self.before, self._stream = None, stream
        result = machine.run(request, self)
        self.ran(request, result)
        return result

    def ran(self, request: LaunchRequest, result: LaunchResult) -> None:
        """Keep what came of a launch."""
        self.launches.append(Launch(request, result))
        resident = config.ctas_per_sm(request, self.arch)
        self.clock += emulated_time.milliseconds(result, self.settings.sm_count, resident)
        if self.observer is not None:
            self.observer(request, result)

    def tick(self) -> float:
        """Count an event; returns the emulated time in ms. NaN in a group, whose launches run when they are awaited."""
        self.clock += emulated_time.EVENT_MS
        return self.clock if self.group is None else math.nan

    def synchronize(self) -> None:
        """Run what is queued on this device and on the others of its group."""
        self.before = None
        if self.group is not None:
            self.group.synchronize()

    def program(self, module: Module, kernel_name: str) -> Program:
        """Lower a kernel, once per module: devices share it."""
        if kernel_name not in module.programs:
            module.programs[kernel_name] = lower(module.kernels[kernel_name], module)
        return module.programs[kernel_name]

    def variables(self, module: Module) -> dict[str, int]:
        """Get the addresses of a module's variables and functions.

        Variables are allocated at first use and kept.

        Raises:
            LaunchError: one points to what this file does not have.
        """
        if id(module) not in self._variables:
            memories, addresses = {}, {name: function.address for name, function in module.functions.items()}
            for variable in module.variables:
                if variable.space not in ("global", "const") or variable.size == 0 or variable.extern:
                    continue
                memory = self.empty(variable.size, variable.name, writable=variable.space == "global")
                if variable.data is not None:
                    memory[:] = np.frombuffer(variable.data, np.uint8)
                memories[variable.name], addresses[variable.name] = memory, memory.ctypes.data
            for variable in module.variables:
                for pointer in variable.pointers:
                    if pointer.name not in addresses:
                        raise LaunchError(f"{variable.name} points to {pointer.name}, which is not in its file")
                    value = addresses[pointer.name] + pointer.addend >> pointer.shift
                    raw = (value & (1 << 8 * pointer.size) - 1).to_bytes(pointer.size, "little")
                    memories[variable.name][pointer.offset :][: pointer.size] = np.frombuffer(raw, np.uint8)
            self._variables[id(module)] = module, addresses
        return self._variables[id(module)][1]

    def empty(self, nbytes: int, label: str, writable: bool = True) -> np.ndarray:
        """Allocate uint8[nbytes] of zeroed, aligned device memory.

        It lives as long as the device.

        Raises:
            ArgumentError: not a size, or more than the device's limit leaves.
        """
        self.claim(nbytes)
        try:
            array = aligned_zeros(max(nbytes, 1), ALIGNMENT)
        except MemoryError as error:
            raise ArgumentError("nbytes", nbytes, "what this machine's memory has room for") from error
        self.memory.sweep()  # this may have been a tensor's memory
        self.gmem.register_array(array, label, writable=writable)
        return array

    def claim(self, nbytes: int) -> None:
        """Count ``nbytes`` towards the limit of what this device allocates by itself.

        Raises:
            ArgumentError: they do not, or are not a size.
        """
        arguments.whole("nbytes", nbytes, 0)
        limit, used = self.settings.memory_limit, self._allocated
        if used + nbytes > limit:
            allowed = f"at most {limit:,} bytes, of which {used:,} are allocated ({BYTES.how})"
            raise ArgumentError("nbytes", nbytes, allowed)
        self._allocated += nbytes

    def copy(self, array: np.ndarray, label: str = "array") -> np.ndarray:
        """Copy ``array`` into device memory, with its shape and dtype; see `empty`."""
        array = np.ascontiguousarray(array)
        out = self.empty(array.nbytes, label)[: array.nbytes].view(array.dtype).reshape(array.shape)
        out[...] = array
        return out

    def free(self, address: int) -> None:
        """Give back what `empty` returned.

        Raises:
            ArgumentError: nothing was allocated there.
        """
        known = self.gmem.find(address)
        self.gmem.unregister(address)
        self._allocated -= known.nbytes


def make(
    arch: str = "sm_100a",
    *,
    seed: int = 0,
    schedule: str = "round_robin",
    checks: str = "default",
    fatal: Iterable[str] = (),
    padding: int = 512,
    sm_count: int | None = None,
    ctas: Iterable[Dim3] | None = None,
    trace: bool = False,
    instruction_limit: int | None = None,
    time_limit: float | None = None,
    memory_limit: int | None = None,
    cores: int | None = None,
) -> Device:
    """Make a device, without making it the active one. Arguments as for `device`."""
    found = architecture(arch)
    directed.check(schedule)
    arguments.whole("seed", seed, 0)
    chosen = select(checks)
    stops = arguments.names(
        "fatal", fatal, {*KINDS, "error", "lint", "all"}, 'kinds of hazards.KINDS, "error", "lint" or "all"'
    )
    if not arguments.is_whole(padding) or padding < 0 or padding & (padding - 1):
        raise ArgumentError("padding", padding, "a power of two of bytes, or 0")
    if sm_count is not None:
        arguments.whole("sm_count", sm_count, 1)
    arguments.flag("trace", trace)
    limits = default_settings()
    if instruction_limit is not None:
        limits["instruction_limit"] = arguments.whole("instruction_limit", instruction_limit, 1)
    if memory_limit is not None:
        limits["memory_limit"] = arguments.whole("memory_limit", memory_limit, 1)
    if cores is not None:
        limits["cores"] = arguments.whole("cores", cores, 1)
    if time_limit is not None:
        limits["time_limit"] = arguments.seconds("time_limit", time_limit)
    settings = Settings(
        arch,
        schedule,
        seed,
        sm_count or found.sm_count,
        native_checks=chosen.bits,
        padding=padding,
        fatal=stops,
        muted=chosen.muted,
        **limits,
    )
    return Device(found, settings, None if ctas is None else arguments.coordinates("ctas", ctas), trace)


@contextmanager
def device(
    arch: str = "sm_100a", *, shims: bool = True, default_device: str = "cuda", **settings: Any
) -> Iterator[Device]:
    """Make CuTeDSL's compiled functions run here. ``with emulator.device("sm_100a", seed=0) as gpu: ...``.

    Inside, CuTeDSL compiles for ``arch``, compiled functions run in the emulator, and (with ``shims``) torch reports
    a CUDA device whose memory is host memory. Everything is undone on leaving, also after an exception.
    Contexts nest; the innermost device runs the launches.

    Args:
        arch: ``sm_100a``, ``sm_103a``, ``sm_90a`` or ``sm_80``.
        shims: also stand in for ``torch.cuda``, device arguments and the CUDA bindings, for code that was written for
            a GPU. Code that passes CPU tensors does not need it.
        default_device: where torch makes tensors that name no device: "cuda", or "cpu" as it does on a real machine.
        seed, schedule: of the scheduler; ``checks``: "off", "default", "race", "all", or names (checks/selection.py).
        fatal: hazard kinds that stop a launch, "error" or "all".
        padding: bytes to which the allocator rounds the memory of tensors, as PyTorch's does on a GPU. A load that goes
            past the end of a tensor but stays in there meets no fault on a GPU: it is reported as
            ``global_read_past_end`` and reads 0xFF. A store is always a fault. 0: so is the load.
        sm_count: SMs the device says it has.
        ctas: run only the clusters that hold these CTAs.
        trace: record what happens (`Device.trace`).
        instruction_limit: warp-instructions of one launch, by default 10^10.
        time_limit: seconds of processor time of one launch, by default 1800; inf: none.
        memory_limit: bytes that the device allocates by itself (`Device.empty`), by default this machine's memory.
        cores: processes that run one launch, at most, by default 1. With more a launch is split once it has taken a
            while and has clusters left; results and reports are those of one process (machine/cores.py). Launches on
            several devices are not split. The commands `emulate` and `sanitize` use every core by default.
            Defaults come from DSV4_EMULATOR_INSTRUCTIONS, _SECONDS, _BYTES and _CORES where these are set.

    Raises:
        ArgumentError: a bad argument.
        BackendUnavailable: CUDA is already initialised in this process, or torch is missing.
    """
    with entered(make(arch, **settings), shims, default_device) as gpu:
        yield gpu


@contextmanager
def entered(gpu: Device, shims: bool, default_device: str) -> Iterator[Device]:
    """Enter the context of `device` for a device that has been made."""
    arguments.flag("shims", shims)
    arguments.one_of("default_device", default_device, ("cuda", "cpu"))
    need_packages()
    refuse_initialised_cuda()
    from dsv4lib.emulator.driver import driver_library, dsl, torch_shims  # here, because it takes a while

    with ExitStack() as stack:
        stack.enter_context(unwinding())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dsv4-emulator-"))  # mode 0700
        if installed("cutlass.cutlass_dsl"):
            stack.enter_context(dsl.patched(gpu, folder))
        if shims:
            stack.enter_context(torch_shims.patched(default_device))
        stack.enter_context(active(gpu))
        if shims:
            stack.enter_context(driver_library.patched(folder))
        try:
            yield gpu
            RUNTIME.raise_pending()
            gpu.synchronize()
        except BaseException:
            RUNTIME.pending = None  # one error is enough
            raise


@contextmanager
def active(gpu: Device) -> Iterator[Device]:
    """Let the runtime's symbols talk to ``gpu``. A capture that begins inside ends with it."""
    captured = RUNTIME.captured
    RUNTIME.devices.append(gpu)
    try:
        yield gpu
    finally:
        RUNTIME.devices.pop()
        RUNTIME.captured = captured
        if gpu.group is not None:
            gpu.group.left()
        elif gpu not in RUNTIME.devices:
            gpu.memory.clear()


def current() -> Device:
    """Get the active device.

    Raises:
        EmulatorError: there is none.
    """
    if not RUNTIME.devices:
        raise EmulatorError("no emulated device is active: use `with emulator.device(...)`")
    return RUNTIME.device()


def need_packages() -> None:
    """Refuse an environment in which no script can run; a PTX file needs no package.

    Without the CuTe DSL scripts run that do not import it.

    Raises:
        BackendUnavailable: torch is not installed.
    """
    if not installed("torch"):
        fix = "pip install torch, for CuTeDSL 'dsv4lab[ops]'; a PTX file runs without (`dsv4 emulate kernel.ptx`)"
        raise BackendUnavailable(f"scripts in the emulator need torch: {fix}")


def refuse_initialised_cuda() -> None:
    """Refuse a process that has initialised CUDA. Real and emulated contexts cannot be mixed.

    Raises:
        BackendUnavailable: torch has initialised CUDA.
    """
    import torch

    if torch.cuda.is_initialized():
        raise BackendUnavailable("CUDA is already initialised in this process; start the emulator in a fresh one")


@functools.cache
def engines() -> weakref.WeakSet:
    """Get the execution engines on which our symbols are registered."""
    return weakref.WeakSet()
