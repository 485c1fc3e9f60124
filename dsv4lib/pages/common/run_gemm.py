"""Try a GEMM kernel in the emulator. Compile, run, compare with fp64, and collect all that speaks for or against it.

For notebooks and exercises. A kernel that stops with an error is a result, not an exception: the error is kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from dsv4lib import check
from dsv4lib.dsl.compile import Compiled, compile_for
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.gemm_tile import inputs
from dsv4lib.reference.gemm_tile import gemm_tile
from dsv4lib.viz import tma


@dataclass
class Outcome:
    """What one run says.

    Attributes:
        name: of the kernel.
        record: comparison with fp64, None if the kernel stopped.
        hazards: what the checks reported; error: what stopped it.
        trace: of the launch; result: of the launch, None if it stopped.
        output: C; operands: A and B.
        padding: nothing was written past the end of C.
    """

    name: str
    record: Any
    hazards: list[Any]
    error: EmulatorError | None
    trace: Any
    result: Any
    output: torch.Tensor
    operands: tuple[torch.Tensor, torch.Tensor]
    padding: bool
    never: dict[str, int] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Tell whether the numbers are as they should be, whatever the checks say."""
        return self.error is None and self.record.passed and self.padding

    @property
    def clean(self) -> bool:
        """Tell whether it is right, without hazard, every box of the operands loaded."""
        return self.right and not self.hazards and not any(self.never.values())

    def findings(self) -> list[tuple[str, str, str]]:
        """Return (kind, Python line or "", what) of everything that was found. The most specific comes first."""
        out = reported(self.hazards)
        if self.error is not None:
            out.append((type(self.error).__name__, where(self.error.place), str(self.error).splitlines()[0]))
        out += [
            ("boxes never loaded", loads_of(self.trace, self.operands["AB".index(name)]), f"{n} boxes of {name}")
            for name, n in self.never.items()
            if n
        ]
        if self.error is None and not self.record.passed:
            out.append(("wrong numbers", "", f"rel L2 {self.record.rel_l2:.2g}"))
        if not self.padding:
            out.append(("wrong numbers", "", "padding past the end of C was written"))
        return out


def reported(hazards: list[Any]) -> list[tuple[str, str, str]]:
    """Return (kind, Python line, what) of hazards. After "against" the instruction that a hazard conflicts with."""
    out = []
    for hazard in hazards:
        place, owner = where(hazard.place), where(hazard.owner)
        out.append((hazard.kind, f"{place} against {owner}" if owner else place, hazard.message))
    return out


def loads_of(trace: Any, operand: torch.Tensor) -> str:
    """Return the Python lines that load an operand by TMA."""
    tensors = [i for i, tensor in enumerate(trace.tensors) if tensor.address == operand.data_ptr()]
    lines = np.unique(trace.ops["line"][trace.boxes["op"][np.isin(trace.boxes["tensor"], tensors)]])
    places: dict[str, list[int]] = {}
    for line in lines.tolist():
        places.setdefault(trace.source(line), []).append(line)
    return "; ".join(_where(python, *found) for python, found in places.items())


def where(place: Any) -> str:
    """Return Python file, line and PTX line of a place, without folders."""
    return "" if place is None else _where(place.python, place.ptx_line)


def where_of(trace: Any, line: int) -> str:
    """Return Python file, line and PTX line of a PTX line of a trace."""
    return _where(trace.source(line), line)


def _where(python: str, *lines: int) -> str:
    """``file:line`` without folders, and PTX lines; the files of a notebook's cells have numbers for names."""
    folder, _, file = python.replace("\\", "/").rpartition("/")
    if folder.rpartition("/")[2].startswith("ipykernel_"):
        file = f"notebook cell, line {file.rpartition(':')[2]}"
    ptx = f"PTX line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}"
    return f"{file}, {ptx}" if file else ptx


def cached(kernel_type: type, settings: tuple, fake_args: Callable[[Any], tuple]) -> tuple[Any, Compiled]:
    """Compile a kernel for sm_100a, or take it from the compile cache. Returns (kernel object, its code).

    A class whose arguments have no names (``*settings``) has no place there: it is compiled once in a process.
    """
    bound = inspect.signature(kernel_type).bind(*settings)
    if any(p.kind is p.VAR_POSITIONAL for p in bound.signature.parameters.values()):
        return _here(kernel_type, settings, fake_args, None)
    return compile_cache.default().get(kernel_type, bound.arguments, fake_args)


@lru_cache(maxsize=16)
def _here(kernel_type: type, settings: tuple, fake_args: Any, change: Any) -> tuple[Any, Compiled]:
    """What no cache on disk may keep, because its key would not know all."""
    kernel = kernel_type(*settings)
    if change is not None:
        change(kernel)
    return kernel, compile_for(kernel, fake_args(kernel), "sm_100a")


def run_gemm(
    kernel_type: type,
    shape: tuple[int, int, int],
    settings: tuple = (),
    *,
    seed: int = 0,
    schedule: str = "round_robin",
    checks: str = "race",
    trace: bool = True,
    change: Any = None,
) -> Outcome:
    """Run a `GemmTile` (or a variant of it) on M, N, K = ``shape``.

    Args:
        kernel_type: the class; settings: its arguments (in_dtype, out_dtype, tile_n, stages).
        shape: M, N, K.
        seed: of operands and schedule; schedule, checks, trace: of the device.
        change: called with the kernel object before it is compiled.
    """
    fake_args = kernel_type.fake_args
    kernel, compiled = (
        cached(kernel_type, settings, fake_args) if change is None else _here(kernel_type, settings, fake_args, change)
    )
    a, b, c = inputs.operands(*shape, kernel.in_dtype, kernel.out_dtype, seed)
    gpu = make("sm_100a", seed=seed, schedule=schedule, checks=checks, trace=trace)
    error = None
    try:
        launch(compiled, *kernel.launch_args(a, b, c), gpu=gpu)
    except EmulatorError as caught:
        error = caught
    record = None if error is not None else check.compare(c, gemm_tile(a, b))
    result = gpu.launches[-1].result if gpu.launches else None
    outcome = Outcome(
        kernel_type.__name__, record, gpu.hazards, error, gpu.trace, result, c, (a, b), inputs.padding_untouched(c)
    )
    if trace and error is None:
        outcome.never = never_loaded(gpu.trace, {"A": a, "B": b})
    return outcome


def never_loaded(trace: Any, operands: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return the boxes of each operand that no CTA has loaded."""
    out = {}
    for number, tensor in enumerate(trace.tensors):
        name = next((n for n, x in operands.items() if x.data_ptr() == tensor.address), None)
        if name is None:
            continue
        starts = trace.loads(number, cta=None)[:, ::-1]
        counts = tma.coverage(tuple(operands[name].shape), (tensor.box[1], tensor.box[0]), starts)
        out[name] = int((counts[:: tensor.box[1], :: tensor.box[0]] == 0).sum())
    return out
