"""Run the launches of a description, and compare what they left with what was expected."""

from __future__ import annotations

import hashlib
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib.emulator import gpu
from dsv4lib.emulator.checks import Hazard
from dsv4lib.emulator.driver.device import ALIGNMENT, Device
from dsv4lib.emulator.errors import Deadlock, EmulatorError, HazardError, LimitExceeded, MemoryFault
from dsv4lib.emulator.machine.cta import aligned_zeros
from dsv4lib.emulator.machine.limits import BYTES
from dsv4lib.emulator.microscope.collect import Collector
from dsv4lib.emulator.sanitize import numbers
from dsv4lib.emulator.sanitize.description import Description, Expectation, Tensor, argument
from dsv4lib.errors import ArgumentError

STOPPED = (Deadlock, HazardError, LimitExceeded, MemoryFault)  # a running launch; all other errors say why none began


@dataclass(frozen=True)
class Ran:
    """A launch that ended: kernel, shape and what it executed."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    instructions: int
    seconds: float


@dataclass
class Outcome:
    """What came of a target.

    Attributes:
        hazards: of all launches, also of the one that was stopped.
        stopped: the error that stopped a launch, or None.
        launches: that ended. tensors: summaries of what changed, by name. wrong: what is not as expected, by name.
        arch: architecture that ran. collector: traces of the launches, None where none were wanted.
        stats: counts of each launch that ended.
    """

    hazards: list[Hazard] = field(default_factory=list)
    stopped: EmulatorError | None = None
    launches: list[Ran] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: dict[str, numbers.Difference] = field(default_factory=dict)
    arch: str = ""
    collector: Collector | None = None
    stats: list[Counter[str]] = field(default_factory=list)


def run(
    wanted: Description, ptx: str, arch: str | None, save: Path | None, tracing: bool = False, **settings: Any
) -> Outcome:
    """Run a description on the kernels of a PTX text.

    Args:
        arch: in place of the description's and the text's own.
        save: .npz file for all tensors as the launches left them; types that numpy lacks as float32.
        tracing: keep traces of the launches.
        settings: of the device, as `emulator.device` takes them.

    Raises:
        ArgumentError: the description does not fit the kernels.
        EmulatorError: PTX that cannot be read or run at all; what stops a launch is in the outcome.
    """
    module = gpu.load(ptx, arch=arch or wanted.arch, **settings)
    arrays = {name: _on_device(module.device, one) for name, one in wanted.tensors.items()}
    before = {name: _digest(array) for name, array in arrays.items()}
    _fill_variables(wanted, module)
    for name, tensor in wanted.tensors.items():
        if tensor.expect is not None:  # a wrong one is refused before anything is launched
            _wanted(tensor.expect, numbers.decode(arrays[name], tensor.dtype), name, wanted, arrays)
    outcome = Outcome(arch=module.device.arch.name, collector=Collector(module.device) if tracing else None)
    planned = []
    for i, one in enumerate(wanted.launches):
        args = [argument(f"launch[{i}].args[{j}]", value, arrays, wanted.maps) for j, value in enumerate(one.args)]
        planned.append((module.kernel(one.kernel), one, args))
    for kernel, one, args in planned:
        shape = {"cluster": one.cluster, "shared": one.shared, "cooperative": one.cooperative}
        try:
            result = kernel.launch(one.grid, one.block, args, **shape)
        except EmulatorError as error:
            if not isinstance(error, STOPPED):
                raise
            outcome.stopped = error
            outcome.hazards += error.hazards
            if outcome.collector is not None:
                outcome.collector.stopped(error)
            break
        outcome.hazards += result.hazards
        outcome.stats.append(result.stats)
        outcome.launches.append(Ran(kernel.name, one.grid, one.block, result.instructions, result.seconds))
    for name, array in arrays.items():
        tensor = wanted.tensors[name]
        if _digest(array) != before[name] or tensor.expect is not None:
            facts = {"dtype": tensor.dtype, "shape": list(tensor.shape), "changed": _digest(array) != before[name]}
            outcome.tensors[name] = facts | numbers.summary(array, tensor.dtype) | {"sha256": _digest(array)[:16]}
        if tensor.expect is not None and outcome.stopped is None:
            got = numbers.decode(array, tensor.dtype)
            found = numbers.compare(got, _wanted(tensor.expect, got, name, wanted, arrays), *_bounds(tensor.expect))
            if found is not None:
                outcome.wrong[name] = found
    if save is not None:
        _save(save, wanted, arrays)
    return outcome


def _on_device(device: Device, tensor: Tensor) -> np.ndarray:
    """Put a tensor in device memory, where it stays from launch to launch. Loads past its end are reported."""
    values = tensor.make()
    device.claim(tensor.nbytes)
    memory = aligned_zeros(tensor.nbytes, ALIGNMENT).view(values.dtype).reshape(values.shape)
    memory[...] = values
    if tensor.nbytes:
        label = f"{tensor.name} {tensor.shape} {tensor.dtype}"
        device.gmem.register(memory.ctypes.data, tensor.nbytes, label, owner=memory, padded=True)
    return memory


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(array).hexdigest()


def _bounds(expect: Expectation) -> tuple[float, float]:
    return expect.rtol, expect.atol


def _wanted(
    expect: Expectation, got: np.ndarray, name: str, wanted: Description, arrays: dict[str, np.ndarray]
) -> np.ndarray:
    """The expected values, of the shape of ``got``."""
    if expect.kind == "value":
        return np.broadcast_to(np.asarray(expect.value), got.shape)
    if expect.kind == "tensor":
        values = numbers.decode(arrays[expect.name], wanted.tensors[expect.name].dtype)
    else:
        values = numbers.decode(*numbers.read_npy(expect.name, f"tensors.{name}.expect.file", int(BYTES.value())))
    if values.shape != got.shape:
        raise ArgumentError(f"tensors.{name}.expect", values.shape, f"the shape {got.shape}")
    return values


def _fill_variables(wanted: Description, module: gpu.Module) -> None:
    for name, tensor in wanted.variables.items():
        memory, raw = module.variable(name), tensor.make().reshape(-1).view(np.uint8)
        if raw.nbytes != memory.nbytes:
            raise ArgumentError(f"variables.{name}.shape", tensor.shape, f"{memory.nbytes} bytes, as the file has")
        memory[:] = raw


def _save(path: Path, wanted: Description, arrays: dict[str, np.ndarray]) -> None:
    with zipfile.ZipFile(path, "w") as archive:  # numpy.savez takes no tensor that is called "file"
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as out:
                np.lib.format.write_array(out, numbers.decode(array, wanted.tensors[name].dtype), allow_pickle=False)
