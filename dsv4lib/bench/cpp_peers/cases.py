"""What a case is: a package's entry points, called once on inputs of ours, against an oracle in fp64."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from dsv4lib.bench.cpp_peers.build import Checkout, Entry, build
from dsv4lib.bench.cpp_peers.library import Library

SCHEDULES = (
    ("round_robin", 0),
    ("oldest_first", 0),
    ("newest_first", 0),
    ("adversarial", 0),
    ("random", 0),
    ("random", 1),
)


@dataclass(frozen=True)
class Output:
    """One array of a result: as the kernels wrote it, and the oracle's.

    Attributes:
        bound: on the relative L2 error. reason: where the bound comes from.
    """

    name: str
    got: torch.Tensor
    want: torch.Tensor
    bound: float
    reason: str

    def error(self) -> float:
        """Relative L2 error; infinite for another shape, or where only one of both is finite."""
        got, want = self.got.double(), self.want.double()
        if got.shape != want.shape:
            return float("inf")
        got, want = (torch.where(got == want, 0.0, one) for one in (got, want))  # infinities that agree
        finite = torch.where(self.want.isfinite(), self.want.double(), 0.0)
        return float((got - want).norm().nan_to_num(nan=float("inf")) / finite.norm())


@dataclass(frozen=True)
class Case:
    """One computation of a package.

    Attributes:
        name: of the case. checkout: whose. arch: of the device. operands: in words.
        run: called on the active device; launches, and returns what to judge.
        entries: that `run` calls. sm_count: of the device. ranks: how many devices there are.
        errors, lints: kinds of hazards that the kernels show under some schedule, argued in data/emulator/findings.md.
        slow: with the race detector under `right` alone.
        ours: our op on the same operands, None if it takes others.
        right: a schedule under which the numbers are right. unstable: others give wrong numbers.
    """

    name: str
    checkout: Checkout
    arch: str
    operands: str
    run: Callable[[], list[Output]]
    entries: tuple[Entry, ...]
    sm_count: int = 2
    ranks: int = 1
    errors: frozenset[str] = frozenset()
    lints: frozenset[str] = frozenset()
    slow: bool = False
    ours: Callable[[], list[Output]] | None = None
    right: str = "round_robin"
    unstable: bool = False


@dataclass
class Seen:
    """What one run of a case gave.

    Attributes:
        errors: relative L2 error by output; wrong: those beyond their bound. bits: hash of all outputs.
        instructions: warp-instructions by kernel, short names; hazards: count by kind; lints: the same.
        texts: of up to two hazards a kind.
    """

    errors: dict[str, float]
    wrong: list[str]
    bits: str
    instructions: dict[str, int]
    hazards: Counter[str] = field(default_factory=Counter)
    lints: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)


@lru_cache(maxsize=64)
def library(entry: Entry) -> Library:
    """Compile and load an entry point, once a process."""
    return Library(entry, build(entry))


def run(case: Case, schedule: str = "round_robin", seed: int = 0, checks: str = "race") -> Seen:
    """Run a case on devices of its own.

    Raises:
        BackendUnavailable: its checkout, CUTLASS or nvcc is missing.
        EmulatorError: what stopped a kernel.
    """
    from dsv4lib import emulator

    for entry in case.entries:  # compiled before the device is there
        library(entry)
    torch.manual_seed(0)
    settings = {"shims": False, "sm_count": case.sm_count, "schedule": schedule, "seed": seed, "checks": checks}
    if case.ranks == 1:
        with emulator.device(case.arch, **settings) as gpu:
            outputs = case.run()
        launches, hazards = gpu.launches, gpu.hazards
    else:
        with emulator.devices(case.ranks, case.arch, **settings) as group:
            outputs = case.run()
        launches, hazards = [one for gpu in group for one in gpu.launches], group.hazards
    digest = hashlib.sha256()
    for one in outputs:
        digest.update(one.got.contiguous().view(torch.uint8).numpy().tobytes())
    counts: dict[str, int] = {}
    for launch in launches:
        name = short(launch.request.kernel_name)
        counts[name] = counts.get(name, 0) + launch.result.instructions
    errors = {one.name: one.error() for one in outputs}
    wrong = [one.name for one in outputs if not errors[one.name] <= one.bound]
    seen = Seen(errors, wrong, digest.hexdigest()[:16], counts)
    for hazard in hazards:
        kinds = seen.hazards if hazard.severity == "error" else seen.lints
        if kinds[hazard.kind] < 2:
            seen.texts.append(str(hazard))
        kinds[hazard.kind] += hazard.count
    return seen


def short(mangled: str) -> str:
    """Cut a mangled C++ name to the last identifier of its nested name, one of the DSL to the class of the kernel."""
    if mangled.startswith("kernel_cutlass_kernel_"):
        return mangled.split("_")[3]
    rest, found = mangled.removeprefix("_Z").removeprefix("N").lstrip("KV"), mangled
    while rest[:1].isdigit():
        digits = len(rest) - len(rest.lstrip("0123456789"))
        end = digits + int(rest[:digits])
        found, rest = rest[digits:end], rest[end:]
    return found
