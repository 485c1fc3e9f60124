"""Read and run the suite's kernels in CUDA C++ (cpp/*.cu). Each file is compiled twice: as it is, and repaired.

The comment above a kernel says how a fault is called and how the kernel is launched:

    // kind: race_shared|missing_proxy_fence; threads 128; grid 2; cluster 2; schedules round_robin

``map``: a third parameter is a tensor map of 16 x 16 numbers of x, boxes of 8 x 8 (``map N``: N x 8 numbers of out in
rows of 16). ``NAME_after`` is launched after NAME, programmatically; ``NAME_other`` on the second of two devices.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib import emulator, nvrtc
from dsv4lib.emulator import gpu
from dsv4lib.emulator.checks.report import Hazard
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.machine.request import LaunchRequest
from dsv4lib.emulator.ptx import parse
from tests.emulator.suite.harness import LIMIT, Outcome

FOLDER = Path(__file__).with_name("cpp")
ARCHES = {"hopper": ("sm_90a",), "blackwell": ("sm_100a",)}  # of the other files: both
WORDS = 1024
FLAG = 100  # the word of x that is 0
_KERNEL = re.compile(r"^// kind: ([\w|]+)(.*)\n__global__ void (\w+)\(", re.M)


@dataclass(frozen=True)
class Case:
    """A faulty kernel.

    Attributes:
        kind: what is reported, or the error that stops the launch; with ``|`` other names under other schedules.
        file, name: of the kernel. marked: lines of the file that a report must name.
        companion: "after" or "other", the kernel beside it, or "". columns: of the tensor map; 0 without one.
    """

    kind: str
    file: str
    name: str
    marked: frozenset[int]
    companion: str = ""
    threads: int = 64
    grid: int = 1
    cluster: int = 1
    columns: int = 0
    schedules: tuple[str, ...] = ("round_robin", "adversarial")

    @property
    def arches(self) -> tuple[str, ...]:
        """Architectures that run it, the first by default."""
        return ARCHES.get(self.file, ("sm_90a", "sm_100a"))

    def source(self) -> str:
        """Return the text of the kernel and of the one beside it."""
        names = [self.name, *([f"{self.name}_{self.companion}"] if self.companion else [])]
        text = _text(FOLDER / f"{self.file}.cu")
        return "\n".join(_body(text, name)[1] for name in names)


def cases() -> dict[str, Case]:
    """Read all kernels, by file and name."""
    found = [_case(path, match) for path in sorted(FOLDER.glob("*.cu")) for match in _KERNEL.finditer(_text(path))]
    return {f"{case.file}: {case.name.replace('_', ' ')}": case for case in found}


@functools.cache
def _text(path: Path) -> str:
    return path.read_text()


def _case(path: Path, match: re.Match) -> Case:
    text, options = _text(path), {}
    for word in filter(None, (word.strip() for word in match[2].split(";"))):
        name, *values = word.split()
        if name == "map":
            options["columns"] = int(values[0]) if values else 16
        elif name == "schedules":
            options["schedules"] = tuple(values)
        elif name != "devices":
            options[name] = int(values[0])
    lines = _marked(text, match[3])
    for companion in ("after", "other"):
        if f"void {match[3]}_{companion}(" in text:
            options["companion"] = companion
            lines |= _marked(text, f"{match[3]}_{companion}")
    return Case(match[1], path.stem, match[3], frozenset(lines), **options)


def _body(text: str, name: str) -> tuple[int, str]:
    """Find a kernel: the number of its first line, and its text up to the bracket that closes it."""
    start = text.index(f"void {name}(")
    lines = text[start:].splitlines()
    end = 0 if lines[0].rstrip("/! ").endswith("}") else next(i for i, line in enumerate(lines) if line.startswith("}"))
    return text[:start].count("\n") + 1, "\n".join(lines[: end + 1])


def _marked(text: str, name: str) -> set[int]:
    """List the lines of a kernel with a mark."""
    first, body = _body(text, name)
    return {first + i for i, line in enumerate(body.splitlines()) if "//!" in line}


@functools.cache
def compiled(file: str, arch: str, repaired: bool) -> str:
    """Compile a file to PTX.

    Raises:
        BackendUnavailable: NVRTC is not installed.
    """
    return nvrtc.compile_file(FOLDER / f"{file}.cu", arch, ["-DREPAIRED"] if repaired else [])


def run(case: Case, repaired: bool, schedule: str = "round_robin", seed: int = 0, arch: str = "") -> Outcome:
    """Run one kernel with the checks that ``sanitize`` has by default."""
    arch = arch or case.arches[0]
    text = compiled(case.file, arch, repaired)
    options = {"checks": "sanitize", "schedule": schedule, "seed": seed, "instruction_limit": LIMIT}
    runner = {"": _launch, "after": _dependent, "other": _devices}[case.companion]
    try:
        return Outcome(runner(case, text, arch, options))
    except EmulatorError as error:
        return Outcome(list(getattr(error, "hazards", [])), error)


def _arrays() -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(1, WORDS + 1, dtype=np.int32)
    x[FLAG] = 0
    return x, np.zeros(WORDS, np.int32)


def _launch(case: Case, text: str, arch: str, options: dict[str, Any]) -> list[Hazard]:
    x, out = _arrays()
    args: list[Any] = [x, out]
    if case.columns == 16:
        args.append(gpu.TensorMap(x[:256].reshape(16, 16), (8, 8)))
    elif case.columns:
        args.append(gpu.TensorMap(out[:128].reshape(8, 16), (8, 8), dims=(case.columns, 8), strides=(64,)))
    kernel = gpu.load(text, arch=arch, **options).kernels[case.name]
    shape = {"cluster": case.cluster} if case.cluster > 1 else {}
    return kernel.launch(case.grid, case.threads, args, shared=1024, **shape).hazards


def _request(text: str, name: str, case: Case, addresses: tuple[int, ...], dependent: bool = False) -> LaunchRequest:
    params = b"".join(address.to_bytes(8, "little") for address in addresses)
    attributes = {"programmatic": True} if dependent else {}
    shape = (case.grid, 1, 1), (case.threads, 1, 1)
    return LaunchRequest(name, parse.parse(text), *shape, params=params, attributes=attributes)


def _dependent(case: Case, text: str, arch: str, options: dict[str, Any]) -> list[Hazard]:
    device = make(arch, **options)
    addresses = tuple(device.copy(array).ctypes.data for array in _arrays())
    first = device.launch(_request(text, case.name, case, addresses), 0).hazards
    return first + device.launch(_request(text, f"{case.name}_after", case, addresses, dependent=True), 0).hazards


def _devices(case: Case, text: str, arch: str, options: dict[str, Any]) -> list[Hazard]:
    with emulator.devices(2, arch, shims=False, **options) as gpus:
        x, out = (gpus.symmetric(WORDS, np.int32, name) for name in ("x", "out"))
        for mine, values in ((x, _arrays()[0]), (out, _arrays()[1])):
            mine[1][:] = values
        addresses = int(x[1].ctypes.data), int(out[1].ctypes.data)
        for i, name in enumerate((case.name, f"{case.name}_other")):
            gpus[i].launch(_request(text, name, case, addresses))
        gpus.synchronize()
        return gpus.hazards


def in_place(case: Case, outcome: Outcome, file: str = "") -> bool:
    """Tell whether reports of the fault, or the error of its name, are at marked lines of the source and no others."""
    file, names = file or f"{case.file}.cu", set(case.kind.split("|"))
    if outcome.error is not None and type(outcome.error).__name__ in names:
        lines = {int(n) for n in re.findall(rf"{re.escape(file)}:(\d+)", str(outcome.error))}
        return bool(lines) and lines <= case.marked
    places = [hazard.place for hazard in outcome.hazards if hazard.kind in names]
    where = [place.python.rpartition(":") if place else ("", "", "0") for place in places]
    return bool(where) and all(Path(path).name == file and int(line) in case.marked for path, _, line in where)
