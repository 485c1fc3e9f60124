"""Read the GPU's counters for the rows. Bytes of HBM and of L2, issue slots, stall reasons.

    python -m dsv4lib.bench.ops.counters [--only mhc] [--shape "T 4096"] [--providers vLLM] [--all]
        [--record data/bench/ops]

It runs itself under Nsight Compute (`ncu`), which repeats every kernel of a call for each group of counters, caches
flushed before and clocks left alone. A call of several kernels is counted kernel by kernel: what one leaves in L2 for
the next is then read from HBM. Times of a profiled kernel are not the bench's times (`harness`).
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import torch

from dsv4lib import env
from dsv4lib.bench.ops import harness
from dsv4lib.bench.ops.case import Row
from dsv4lib.bench.ops.results import FOLDER
from dsv4lib.errors import DSV4Error

FILE = "counters.csv"
SECTOR = 32  # bytes
RANGE = "dsv4"  # begins the name of a range: RANGE|op|shape|provider
BYTES = {"hbm_read": "dram__bytes_read.sum", "hbm_write": "dram__bytes_write.sum"}
L2 = "lts__t_sectors_srcunit_tex.sum"  # of loads, stores, atomics and bulk copies of the SMs
TIME = "gpu__time_duration.sum"  # ns
INSTRUCTIONS = "smsp__inst_executed.sum"
ISSUE = "smsp__issue_active.avg.pct_of_peak_sustained_elapsed"
WARPS = "sm__warps_active.avg.pct_of_peak_sustained_active"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REASONS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "wait",
)
METRICS = (*BYTES.values(), L2, TIME, INSTRUCTIONS, ISSUE, WARPS, *(STALL.format(reason) for reason in REASONS))
NO_PROFILER = 21  # the exit code where ncu is missing, or this user may not read counters
FORBIDDEN = "ERR_NVGPUCTRPERM"


class CounterError(DSV4Error, RuntimeError):
    """Nsight Compute is missing or fails. Or it prints something else than the requested counters."""


@dataclass(frozen=True)
class Counted:
    """The counters of one call of one provider of a row.

    Attributes:
        kernels: that the call launches. us: the sum of their times while profiled.
        hbm_read, hbm_write: bytes. l2: bytes that the SMs read or write through L2.
        instructions: warp-instructions. issue: % of the issue slots of all SMs that were used, over the kernels' time.
        warps: mean warps on an SM, % of 64, while it has any.
        stall: what warps wait for longest; stalled: the share of all waiting, %.
        run: when, and on which GPU.
    """

    op: str
    shape: str
    provider: str
    kernels: int
    us: float
    hbm_read: int
    hbm_write: int
    l2: int
    instructions: int
    issue: float
    warps: float
    stall: str
    stalled: float
    run: str = ""


def command(report: Path, arguments: Sequence[str]) -> list[str]:
    """Make the command that profiles this module's calls with ``--inner``. ``report`` gets the CSV."""
    flags = ["--csv", "--page", "raw", "--print-units", "base", "--nvtx", "--profile-from-start", "off"]
    flags += ["--cache-control", "all", "--clock-control", "none", "--metrics", ",".join(METRICS)]
    inner = [sys.executable, "-m", "dsv4lib.bench.ops.counters", "--inner", *arguments]
    return ["ncu", *flags, "--log-file", str(report), *inner]


def in_turn(rows: Iterable[Row]) -> list[Row]:
    """Order rows so that the first of every op come first: a limit of time then leaves no op out."""
    place: dict[str, int] = {}
    ranks = [(place.setdefault(row.op, 0), place.update({row.op: place[row.op] + 1}), row) for row in rows]
    return [row for _, _, row in sorted(ranks, key=lambda one: one[0])]


def calls(rows: Iterable[Row], providers: Sequence[str], seconds: float = 1e9) -> None:
    """Call every provider under the profiler. Of every row, first unseen, then once in a range of its name.

    seconds: no row starts later than this; those are named.
    """
    start, late = time.perf_counter(), []
    for row in in_turn(rows):
        if time.perf_counter() - start > seconds:
            late.append(f"{row.op} {row.shape}")
            continue
        given = harness.inputs(row, "cuda")
        for provider in harness.taken(row, providers):
            with suppress(Exception):  # a provider that cannot run is absent here; the bench says why
                call, _ = provider.bind(given)
                call()
                torch.cuda.synchronize()
                name = "|".join((RANGE, row.op, row.shape, provider.name))
                with torch.cuda.profiler.profile(), torch.cuda.nvtx.range(name):
                    call()
                    torch.cuda.synchronize()
    if late:
        print(f"{harness.NO_TIME}{'; '.join(late)}", flush=True)


def parsed(text: str, run: str = "") -> list[Counted]:
    """Return the counters of every call in a report of `command`. Kernels of a call are added.

    Raises:
        CounterError: no table, a counter is missing, or a kernel stands in no range.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise CounterError(f"the profiler reports no kernel: {text.strip().splitlines()[-1] if text.strip() else ''}")
    table = csv.DictReader(lines)
    next(table)  # units, all of them base units
    found: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for line in table:
        missing = [name for name in METRICS if not line.get(name)]
        if missing:
            raise CounterError(f"counters that the profiler does not have: {', '.join(missing)}")
        match = re.search(rf"{RANGE}\|([^|]+)\|([^|]+)\|([^|\"]+?)(?:\"|:none|:|$)", " ".join(map(str, line.values())))
        if match is None:
            raise CounterError(f"a kernel without a range: {line.get('Kernel Name')}")
        found.setdefault(match.groups(), []).append(line)
    return [_counted(key, kernels, run) for key, kernels in found.items()]


def _counted(key: tuple[str, ...], kernels: Sequence[Mapping[str, str]], run: str) -> Counted:
    def value(line: Mapping[str, str], name: str) -> float:
        return float(line[name].replace(",", ""))

    def total(name: str) -> float:
        return sum(value(line, name) for line in kernels)

    ns = total(TIME)

    def mean(name: str) -> float:
        """Weighted by time."""
        return sum(value(line, name) * value(line, TIME) for line in kernels) / ns

    stalls = {reason: mean(STALL.format(reason)) for reason in REASONS}
    worst = max(stalls, key=stalls.__getitem__)
    share = 100 * stalls[worst] / (sum(stalls.values()) or 1)
    return Counted(
        *key,
        kernels=len(kernels),
        us=round(ns / 1e3, 3),
        **{name: int(total(metric)) for name, metric in BYTES.items()},
        l2=int(total(L2)) * SECTOR,
        instructions=int(total(INSTRUCTIONS)),
        issue=round(mean(ISSUE), 1),
        warps=round(mean(WARPS), 1),
        stall=worst.replace("_", " "),
        stalled=round(share, 1),
        run=run,
    )


def load(folder: Path = FOLDER) -> dict[tuple[str, str, str], Counted]:
    """Return the recorded counters by op, shape and provider. None if nothing was recorded yet.

    Raises:
        DSV4Error: the file has other columns.
    """
    path, names = folder / FILE, tuple(field.name for field in fields(Counted))
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != names:
            raise DSV4Error(f"{path} has other columns than this version writes: record it anew")
        types = {"int": int, "float": float, "str": str}
        lines = [{field.name: types[field.type](line[field.name]) for field in fields(Counted)} for line in reader]
    return {(line["op"], line["shape"], line["provider"]): Counted(**line) for line in lines}


def record(counted: Iterable[Counted], folder: Path) -> None:
    """Write the counters into a folder. Those of other providers and rows that it has stay."""
    known = load(folder) | {(one.op, one.shape, one.provider): one for one in counted}
    folder.mkdir(exist_ok=True)
    with (folder / FILE).open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Counted)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(vars(one) for one in sorted(known.values(), key=lambda one: one.op))


def line(one: Counted) -> str:
    """Return the counters of a call in a line."""
    moved = f"HBM {one.hbm_read / 1e6:.4g} + {one.hbm_write / 1e6:.4g} MB, L2 {one.l2 / 1e6:.4g} MB"
    slots = f"{one.instructions / 1e3:.4g}k warp-instructions, issue {one.issue:.0f} %, warps {one.warps:.0f} %"
    return f"{one.op} {one.shape} | {one.provider}: {moved}, {slots}, {one.stall} {one.stalled:.0f} %, {one.us:.1f} us"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        the exit code: 0; 1 where the profiler fails; 2 for bad arguments; `NO_PROFILER` without `ncu` or the right to
        read counters, `harness.NOTHING_TIMED` without a GPU.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m dsv4lib.bench.ops.counters", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="ops, with commas between them")
    parser.add_argument("--shape", default="", help="rows whose shape contains this")
    parser.add_argument("--providers", default="ours", help="peers whose name contains one of these; ours always")
    parser.add_argument("--all", action="store_true", help="rows that promise nothing, too")
    parser.add_argument("--seconds", type=float, default=1e9, help="no row starts later")
    parser.add_argument("--record", type=Path, help=f"write {FILE} into this folder")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)  # under the profiler
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no GPU: nothing counted")
        return harness.NOTHING_TIMED
    try:
        rows, broken = harness.chosen(harness.parts(given.only), given.shape)
        for name, reason in broken.items():
            print(f"{name}: cannot be imported: {reason}")
        if given.inner:
            rows = [row for row in rows if given.all or (row.goal, row.copy_goal) != (None, None)]
            calls(rows, harness.parts(given.providers), given.seconds)
            return 0
        if shutil.which("ncu") is None:
            print("no ncu on the path: nothing counted")
            return NO_PROFILER
        counted = profiled(arguments)
    except CounterError as error:
        print(error)
        return NO_PROFILER if FORBIDDEN in str(error) else 1
    except DSV4Error as error:
        print(error)
        return 2
    print("\n".join(map(line, counted)))
    if given.record is not None:
        record(counted, given.record)
    return 0


def profiled(arguments: Sequence[str]) -> list[Counted]:
    """Run the calls that ``arguments`` choose under the profiler.

    Raises:
        CounterError: see `parsed`.
    """
    with tempfile.TemporaryDirectory(prefix="dsv4_ncu_") as folder:
        report = Path(folder) / "report.csv"
        done = subprocess.run(command(report, arguments), capture_output=True, text=True, cwd=env.root())
        text = report.read_text(errors="replace") if report.is_file() else ""
    lines = (text + done.stdout + done.stderr).strip().splitlines()
    if done.returncode or any(FORBIDDEN in line for line in lines):
        said = [line for line in lines if FORBIDDEN in line][:1] or lines[-3:]
        raise CounterError(f"ncu ends with {done.returncode}: {' / '.join(said)}")
    for line in lines:
        if line.startswith(harness.NO_TIME):
            print(line)
    return parsed(text, f"{datetime.now(UTC):%Y-%m-%d %H:%M} {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    sys.exit(main())
