"""Run a kernel of a PTX file on numpy arrays. It needs neither torch nor the CuTe DSL.

`run_ptx` is the function, `command` is `dsv4 emulate kernel.ptx`. An argument of the command is one parameter of the
kernel, in order: ``x.npy`` (an array, copied to the device), ``float32[4,100]`` (zeros of that shape), ``7`` (an
integer of the parameter's size) or ``0.5`` (a float of its size: 2, 4 or 8 bytes).
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dsv4lib.emulator.driver import arguments, config
from dsv4lib.emulator.driver.arch import ARCHITECTURES
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.machine.request import Dim3, LaunchRequest, LaunchResult
from dsv4lib.emulator.ptx.ir import Kernel, Module, Param
from dsv4lib.emulator.ptx.parse import parse
from dsv4lib.errors import ArgumentError

FLOATS = {2: "<e", 4: "<f", 8: "<d"}  # formats of struct by size
TARGET = re.compile(r"sm_\d+[af]?")
ZEROS = re.compile(r"([a-z]+\d+)\[(\d+(?:,\d+)*)\]")
MAX_BYTES = 1 << 34  # of the parameters' arrays
DIMENSIONS = "one to three whole numbers from 1 with commas between them"


class Shape(NamedTuple):
    """Shape of a launch. Dimensions are x first; ``dynamic_smem`` is bytes."""

    grid: Dim3 = (1, 1, 1)
    block: Dim3 = (32, 1, 1)
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0


def run_ptx(
    text: str,
    values: Sequence[np.ndarray | int | float],
    shape: Shape = Shape(),  # noqa: B008  (immutable)
    entry: str = "",
    arch: str = "auto",
    **settings: Any,
) -> LaunchResult:
    """Run one kernel of PTX ``text`` to its end; arrays among ``values`` are changed in place.

    Args:
        values: one for each parameter: an array by its address, an integer or a float by value.
        shape: see `Shape`.
        entry: the kernel's name; it may be left out if there is one kernel.
        arch: of the device; "auto": the PTX file's target.
        settings: as `device` takes them.

    Raises:
        ArgumentError: a value does not fit its parameter, or there is no such kernel.
        EmulatorError: the text is not PTX, or the launch was stopped.
    """
    module = parse(text)
    kernel = _kernel(module, entry)
    if len(values) != len(kernel.params):
        names = ", ".join(f"{p.name} ({p.size} bytes)" for p in kernel.params) or "none"
        raise ArgumentError("values", f"{len(values)} of them", f"one for each parameter of {kernel.name}: {names}")
    gpu = make(_target(module) if arch == "auto" else arch, **settings)
    block = bytearray(kernel.param_bytes)
    kept = []
    for param, value in zip(kernel.params, values, strict=True):
        if isinstance(value, np.ndarray):
            memory = gpu.copy(value, param.name)
            kept.append((value, memory))
            value = memory.ctypes.data
        block[param.offset : param.offset + param.size] = _bytes(param, value)
    attributes = {"cluster": True} if shape.cluster != (1, 1, 1) else {}
    request = LaunchRequest(kernel.name, module, *shape, params=bytes(block), attributes=attributes)
    config.check(request, gpu.arch, gpu.settings.sm_count, gpu.arch.smem_per_cta)
    try:
        result = gpu.launch(request)
    finally:
        for value, memory in kept:
            value[...] = memory
    assert result is not None  # a device alone runs at once
    return result


def _kernel(module: Module, entry: str) -> Kernel:
    if entry in module.kernels:
        return module.kernels[entry]
    if entry or len(module.kernels) != 1:
        raise ArgumentError("entry", entry, "a kernel of this file: " + (", ".join(module.kernels) or "it has none"))
    return next(iter(module.kernels.values()))


def _target(module: Module) -> str:
    """The first emulated architecture that runs code of the file's target."""
    fits = (
        [name for name in ARCHITECTURES if config.runs_on(module.target, name)]
        if TARGET.fullmatch(module.target)
        else []
    )
    if not fits:
        raise ArgumentError("target", module.target, "what runs on one of " + ", ".join(ARCHITECTURES))
    return fits[0]


def _bytes(param: Param, value: Any) -> bytes:
    if isinstance(value, float | np.floating) and param.size in FLOATS:
        return struct.pack(FLOATS[param.size], value)
    if not isinstance(value, bool) and isinstance(value, int | np.integer):
        try:
            return int(value).to_bytes(param.size, "little", signed=value < 0)
        except OverflowError:
            pass
    raise ArgumentError(param.name, value, f"an array, or a number of {param.size} bytes")


def command(
    path: Path, texts: Sequence[str], shape: Shape, entry: str, save: Path | None, arch: str, **settings: Any
) -> int:
    """Run a kernel of the file ``path`` and print what came of it; return the exit code of `dsv4 emulate`.

    Args:
        texts: the kernel's parameters as words, see the module.
        save: folder for the arrays after the launch; None: they are only described.
    """
    from dsv4lib.emulator.checks import errors
    from dsv4lib.emulator.driver.script import FAILED, HAZARD

    if save is not None and not save.is_dir():
        raise ArgumentError("save", str(save), "a folder that exists")
    values = [value(text) for text in texts]
    before = [v.copy() if isinstance(v, np.ndarray) else v for v in values]
    try:
        result = run_ptx(path.read_text(errors="replace"), values, shape, entry, arch, **settings)
    except EmulatorError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    print(f"{result.instructions} warp-instructions, {len(result.hazards)} hazards")
    for number, (old, new) in enumerate(zip(before, values, strict=True)):
        if isinstance(new, np.ndarray):
            changed = old.tobytes() != new.tobytes()
            print(f"argument {number}: {_described(new)}, {'changed' if changed else 'as it was'}")
            if save is not None:
                np.save(save / f"argument_{number}.npy", new, allow_pickle=False)
    for hazard in result.hazards:
        print(f"dsv4 emulate: {hazard}", file=sys.stderr)
    return HAZARD if errors(result.hazards) else 0


def _described(array: np.ndarray) -> str:
    with np.printoptions(threshold=8, edgeitems=3, precision=6):
        return f"{array.dtype}[{','.join(map(str, array.shape))}] {' '.join(str(array.reshape(-1)).split())}"


def value(text: str) -> np.ndarray | int | float:
    """Read one word of the command line as a parameter.

    >>> value("0x10"), value("0.5"), value("float32[2,3]").shape
    (16, 0.5, (2, 3))
    """
    allowed = "FILE.npy, zeros such as float32[100], an integer or a float"
    if text.endswith(".npy"):
        try:
            array = np.load(text, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ArgumentError("argument", text, f"a file that numpy.load reads ({error})") from error
        if not isinstance(array, np.ndarray) or array.dtype.hasobject:
            raise ArgumentError("argument", text, "a file with one array of numbers")
        return np.array(array, order="C", ndmin=1)
    if found := ZEROS.fullmatch(text):
        return _zeros(text, found[1], [int(n) for n in found[2].split(",")])
    try:
        return int(text, 0)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ArgumentError("argument", text, allowed) from None


def _zeros(text: str, dtype: str, shape: list[int]) -> np.ndarray:
    try:
        kind = np.dtype(dtype)
    except TypeError:
        raise ArgumentError("argument", text, "zeros of a dtype of numpy, such as float32[100]") from None
    if math.prod(shape) * kind.itemsize > MAX_BYTES:
        raise ArgumentError("argument", text, f"at most {MAX_BYTES:,} bytes")
    return np.zeros(shape, kind)


def dimensions(name: str, text: str) -> Dim3:
    """Read the dimensions of a launch.

    >>> dimensions("grid", "4,2")
    (4, 2, 1)
    """
    words = text.split(",")
    if len(words) > 3 or not all(word.strip().isascii() and word.strip().isdigit() for word in words):
        raise ArgumentError(name, text, DIMENSIONS)
    numbers = [arguments.whole(name, int(word), 1) for word in words]
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z
