"""Run the hazard suite: small faulty kernels, each with a twin that differs by the repair alone.

A body is PTX. ``<<faulty||repaired>>`` is what differs, ``//!`` marks the lines that a report must name. Every kernel
begins with `START`, whose registers the table of `cases` uses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsv4lib import emulator
from dsv4lib.emulator.checks.report import Hazard
from dsv4lib.emulator.checks.selection import select
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.machine.request import LaunchRequest, Settings
from dsv4lib.emulator.ptx import parse
from dsv4lib.emulator.units import tensormap
from tests.emulator.launching import aligned, entry, launch, pack

WORDS = 4096  # of the array `data`
SMEM = ".shared .align 1024 .b8 sm[16384]; .shared .align 8 .b64 bar; .shared .align 8 .b64 bar2;"
SMEM += ".shared .align 4 .b32 slot;"
# %r0 thread, %r1 its word of shared memory, %r2 sm, %r3 warp, %r4 the word of the thread in the other warp, %r5 lane,
# %r6 the word of the next lane, %r7 rank in the cluster, %r8 and %r9 two mbarriers, %r10 CTA. %rd1 data, %rd2 the
# thread's word of it, %rd3 that of the thread in the other warp, %rd4 a word for flags, %rd5 the thread's word of the
# output. %p1: warp 0; %p2: thread 0; %p3: first lane; %p4: CTA 0. Bodies use the others.
START = """
mov.u32 %r0, %tid.x; mov.u32 %r2, sm; mov.u32 %r8, bar; mov.u32 %r9, bar2; ld.param.u64 %rd1, [data];
shl.b32 %r1, %r0, 2; add.s32 %r1, %r1, %r2; shr.u32 %r3, %r0, 5; and.b32 %r5, %r0, 31;
xor.b32 %r4, %r0, 32; mul.wide.u32 %rd3, %r4, 4; shl.b32 %r4, %r4, 2; add.s32 %r4, %r4, %r2;
xor.b32 %r6, %r0, 1; shl.b32 %r6, %r6, 2; add.s32 %r6, %r6, %r2; mov.u32 %r7, %cluster_ctarank; mov.u32 %r10, %ctaid.x;
mul.wide.u32 %rd2, %r0, 4; add.s64 %rd2, %rd2, %rd1; add.s64 %rd3, %rd3, %rd1; add.s64 %rd4, %rd1, 12288;
mad.lo.u32 %r11, %r10, 256, %r0; mul.wide.u32 %rd5, %r11, 4; add.s64 %rd5, %rd5, %rd1; add.s64 %rd5, %rd5, 4096;
setp.eq.u32 %p1, %r3, 0; setp.eq.u32 %p2, %r0, 0; setp.eq.u32 %p3, %r5, 0; setp.eq.u32 %p4, %r10, 0;
"""
_DIFFERENCE = re.compile(r"<<(.*?)\|\|(.*?)>>", re.S)
LIMIT = 5_000_000  # instructions: more than the watch for loops that never end needs


@dataclass(frozen=True)
class Case:
    """A faulty kernel and its twin.

    Attributes:
        kind: what is reported, or the name of the error that stops the launch; with ``|`` other names under schedules
            that meet the fault differently.
        body: PTX with the difference and the marks.
        second: of the other device, or of the launch that depends on the first.
        where: "launch", "devices" (two of them) or "dependent" (two launches in a row).
        arch, threads, grid, cluster: of the launch.
        tensor: rows of the tensor map ``map`` over `data`: (columns, rows, box columns, box rows, pitch in bytes).
        schedules: under which the fault is looked for; the twin runs under all.
    """

    kind: str
    body: str
    second: str = ""
    where: str = "launch"
    arch: str = "sm_100a"
    threads: int = 64
    grid: int = 1
    cluster: int = 1
    tensor: tuple[int, int, int, int, int] | None = None
    schedules: tuple[str, ...] = ("round_robin", "adversarial")

    def text(self, repaired: bool, second: bool = False) -> str:
        """Make the PTX of the faulty or the repaired kernel."""
        body = _DIFFERENCE.sub(lambda m: m.group(2 if repaired else 1), self.second if second else self.body)
        parameters = "u64 data, b8 map" if self.tensor else "u64 data"
        made = entry(parameters, START + body, shared=SMEM).replace("sm_100a", self.arch).replace("%r<64>", "%r<200>")
        return made.replace(".param .b8 map", ".param .align 64 .b8 map[128]")

    def marked(self, second: bool = False) -> set[int]:
        """List the PTX lines that a report must name."""
        lines = self.text(False, second).splitlines()
        return {number for number, line in enumerate(lines, 1) if "//!" in line}


@dataclass(frozen=True)
class Outcome:
    """What a run reported: hazards, and the error that stopped it."""

    hazards: list[Hazard]
    error: EmulatorError | None = None

    @property
    def kinds(self) -> set[str]:
        """Names of what was reported."""
        return {h.kind for h in self.hazards} | ({type(self.error).__name__} if self.error else set())


def run(case: Case, repaired: bool, schedule: str = "round_robin", seed: int = 0, checks: str = "sanitize") -> Outcome:
    """Run one kernel of a case with the checks that ``sanitize`` has by default."""
    runner = {"launch": _launch, "devices": _devices, "dependent": _dependent}[case.where]
    try:
        return Outcome(runner(case, repaired, {"schedule": schedule, "seed": seed, "checks": checks}))
    except EmulatorError as error:
        return Outcome(list(getattr(error, "hazards", [])), error)


def _launch(case: Case, repaired: bool, options: dict[str, Any]) -> list[Hazard]:
    chosen = select(options.pop("checks"))
    settings = Settings(
        arch=case.arch, native_checks=chosen.bits, muted=chosen.muted, instruction_limit=LIMIT, **options
    )
    data = numbers()
    shape = {"cluster": (case.cluster, 1, 1)} if case.cluster > 1 else {}
    more = (tensor_map(case, data),) if case.tensor else ()
    text = case.text(repaired)
    return launch(text, data, *more, grid=case.grid, block=case.threads, settings=settings, **shape).hazards


def tensor_map(case: Case, data: np.ndarray) -> bytes:
    """Encode a map of 32-bit numbers over `data`."""
    columns, rows, across, down, pitch = case.tensor
    return tensormap.encode_tiled(2, data.ctypes.data, [columns, rows], [pitch], [across, down], [1, 1])


def numbers() -> np.ndarray:
    """Make the array of a launch: every word differs; the flags and the output are 0."""
    data = aligned(WORDS, np.uint32)
    data[:1024] = np.arange(1, 1025)
    return data


def _request(text: str, parameters: tuple[Any, ...], case: Case, dependent: bool = False) -> LaunchRequest:
    module = parse.parse(text)
    (kernel,) = module.kernels.values()
    attributes = {"programmatic": True} if dependent else {}
    shape = (case.grid, 1, 1), (case.threads, 1, 1)
    return LaunchRequest("k", module, *shape, params=pack(kernel, parameters), attributes=attributes)


def _devices(case: Case, repaired: bool, options: dict[str, Any]) -> list[Hazard]:
    """Both devices have the array of device 1."""
    with emulator.devices(2, shims=False, instruction_limit=LIMIT, **options) as gpus:
        buffer = gpus.symmetric(WORDS, np.uint32, "data")
        for i in range(2):
            buffer[i][:1024] = np.arange(1, 1025)
            address = (int(buffer[1].ctypes.data),)
            gpus[i].launch(_request(case.text(repaired, bool(i)), address, case))
        gpus.synchronize()
        return gpus.hazards


def _dependent(case: Case, repaired: bool, options: dict[str, Any]) -> list[Hazard]:
    gpu = make(case.arch, instruction_limit=LIMIT, **options)
    data = gpu.copy(numbers(), "data")
    first = gpu.launch(_request(case.text(repaired), (data,), case), 0).hazards
    return first + gpu.launch(_request(case.text(repaired, True), (data,), case, dependent=True), 0).hazards


# What the fault of a kind may cause: words that are not written yet, or a stop, and what else is out of order then.
CONSEQUENCES = {
    "race_shared": {
        "uninitialised_smem", "uninitialised_smem_unused", "mbarrier_phase_unordered", "barrier_phase_mixed",
        "missing_proxy_fence", "missing_warp_sync",
    },
    "race_tensor": {"uninitialised_tmem"},
    "race_global": {"race_global_same_value"},
    "missing_bulk_wait": {"missing_proxy_fence"},
    "missing_cp_async_wait": {"uninitialised_smem"},
    "missing_tcgen05_wait": {"uninitialised_tmem"},
    "async_write_after_exit": {"mbarrier_tx_leftover"},
    "scope_between_devices": {"race_between_devices"},
    "mbarrier_tx_unexpected": {"uninitialised_smem", "race_shared"},
    "mbarrier_phase_lapped": {"Deadlock"},
}  # fmt: skip


def caught(case: Case, outcome: Outcome) -> bool:
    """Tell whether the fault was reported under its name, perhaps beside others."""
    return bool(set(case.kind.split("|")) & outcome.kinds)


def alone(case: Case, outcome: Outcome) -> bool:
    """Tell whether nothing was reported but the fault and its `CONSEQUENCES`."""
    names = set(case.kind.split("|"))
    return outcome.kinds <= names.union(*(CONSEQUENCES.get(name, set()) for name in names))


def in_place(case: Case, outcome: Outcome) -> bool:
    """Tell whether reports of the fault, or the error that is its name, name marked lines and no others."""
    names = set(case.kind.split("|"))
    marked = case.marked() | (case.marked(second=True) if case.second else set())
    if outcome.error is not None and type(outcome.error).__name__ in names:
        error = outcome.error
        lines = {error.place.ptx_line} if error.place else {int(n) for n in re.findall(r"PTX line (\d+)", str(error))}
        return bool(lines) and lines <= marked
    places = [hazard.place for hazard in outcome.hazards if hazard.kind in names]
    return bool(places) and all(place is not None and place.ptx_line in marked for place in places)
