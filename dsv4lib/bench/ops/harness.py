"""Time the rows of the ops' bench modules on a GPU. Each row is printed when it is done.

    python -m dsv4lib.bench.ops.harness [--only rmsnorm,router] [--shape "T 4096"] [--providers ours,Triton]
        [--seconds 60]

Inputs of a row come from a seed. Every provider is bound, run once and compared with the reference by the row's check.
Only right providers are timed, alternating in this process (`timing`). A provider that cannot run is listed with the
reason, a wrong one with the difference. The harness needs torch, numpy and the DSL, nothing else of the lab.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import shlex
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Protocol

import torch

from dsv4lib import env
from dsv4lib.bench import history
from dsv4lib.bench.ops import replay, timing
from dsv4lib.bench.ops.case import Absent, Call, Given, Provider, Row, tensors
from dsv4lib.bench.ops.modules import modules
from dsv4lib.bench.ops.results import ABSENT, COPY, FAILED, HEAD, OURS, TIMED, WRONG, Found, Result, lines, record
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.predict import rates

NOTHING_TIMED = 20  # the exit code of a stage that was skipped
NO_TIME = "not run, no time left: "
TURN = "DSV4_BENCH_TURN"  # a file: until it exists, another process times on the GPU
POLL_S = 0.02
PACKAGES = ("triton", "nvidia-cutlass-dsl", "vllm", "tilelang", "tile-kernels", "quack-kernels")


class Clock(Protocol):
    """What times calls; `timing.GpuClock`, or a test's own."""

    def cold(self, calls: Sequence[Call]) -> list[timing.Cold]:
        """Time each call with a cold L2, alternating between calls."""

    def warm(self, calls: Sequence[Call]) -> list[float | str]:
        """Return us of each call in a graph, or why it cannot be captured."""

    def host(self, calls: Sequence[Call]) -> list[float]:
        """Return us of the caller's thread to queue each call once more."""


def measure(
    row: Row, clock: Clock, device: str = "cuda", providers: Sequence[str] = (), rate: float | None = None
) -> Result:
    """Make the inputs of a row, check its providers, time what is right.

    Args:
        providers: parts of the names of the peers to take; ours always. rate: bytes/s of the GPU's memory.
    """
    given, candidates = inputs(row, device), taken(row, providers)
    found: dict[str, Found] = {}
    bound: dict[str, tuple[Call, Mapping[str, torch.Tensor]]] = {}
    for provider in candidates:  # all before the first runs: no output may lie where an earlier result was
        try:
            bound[provider.name] = provider.bind(given)
        except Absent as reason:
            found[provider.name] = Found(provider.name, ABSENT, detail=str(reason))
        except Exception as error:  # a peer's own, of any kind
            found[provider.name] = Found(provider.name, FAILED, detail=timing.first_line(error))
    for name, (call, outputs) in bound.items():
        found[name] = _tried(name, call, outputs, row, given, device)
    calls = {name: call for name, (call, _) in bound.items() if found[name].state == TIMED}
    if calls and row.copy_goal is not None:
        calls[COPY] = _copy(row.bytes, device)
    replayed = {provider.name for provider in candidates if not provider.hosted}
    for name, one in _times(calls, clock, row.no_cold).items():
        found[name] = dataclasses.replace(one, host_us=None) if name in replayed else one
    ours = found.get(OURS)
    if ours and ours.state == TIMED:  # right too after many launches in a row, without a wait in between
        again = _compared(OURS, bound[OURS][1], row, given)
        found[OURS] = ours if again is None else Found(OURS, WRONG, detail=f"after many launches: {again.detail}")
    order = [provider.name for provider in candidates] + [COPY] * (COPY in found)
    return _result(row, [found[name] for name in order], rate)


def inputs(row: Row, device: str, seed: int = 0) -> Given:
    """Return the inputs, for a seed the same ones in every run."""
    return row.given(torch.Generator(device).manual_seed(zlib.crc32(f"{row.op} {row.shape}".encode()) + seed))


def taken(row: Row, providers: Sequence[str]) -> list[Provider]:
    """Return ours, and the peers whose name contains one of ``providers``. All if none is named."""
    names = [provider.name for provider in row.providers]
    if len(set(names)) < len(names):
        raise ArgumentError("providers", names, "names that differ")
    return [
        provider
        for provider in row.providers
        if provider.name == OURS or not providers or any(part in provider.name for part in providers)
    ]


def _result(row: Row, found: Sequence[Found], rate: float | None) -> Result:
    floor = None if rate is None else row.bytes / rate * 1e6
    return Result(row.op, row.shape, row.bytes, row.flops, row.goal, row.copy_goal, floor, tuple(found))


def _tried(name: str, call: Call, outputs: Mapping[str, torch.Tensor], row: Row, given: Given, device: str) -> Found:
    """A first call of a provider, and whether it is right and left its inputs alone."""
    before = {key: x.clone() for key, x in tensors(given).items()}
    try:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    except Absent as reason:
        return Found(name, ABSENT, detail=str(reason))
    except Exception as error:  # a peer's own, of any kind
        return Found(name, FAILED, detail=timing.first_line(error))
    changed = [key for key, x in tensors(given).items() if not torch.equal(_bytes(x), _bytes(before[key]))]
    for key in changed:
        tensors(given)[key].copy_(before[key])
    if changed:
        return Found(name, WRONG, detail=f"it changed its input {', '.join(changed)}")
    return _compared(name, outputs, row, given) or Found(name, TIMED)


def _compared(name: str, outputs: Mapping[str, torch.Tensor], row: Row, given: Given) -> Found | None:
    """None if the row's check finds nothing."""
    try:
        row.check(given, outputs)
    except AssertionError as wrong:
        return Found(name, WRONG, detail=timing.first_line(wrong).removeprefix("AssertionError: "))
    except Exception as error:  # outputs of another shape or name than the check reads
        return Found(name, WRONG, detail=f"the check stops: {timing.first_line(error)}")
    return None


def _times(calls: Mapping[str, Call], clock: Clock, no_cold: str = "") -> dict[str, Found]:
    """Time all calls alternately; if one session cannot, time each alone, so that the culprit shows.

    Args:
        no_cold: why there are no times with a cold L2, see `Row`.
    """
    names = list(calls)
    try:
        cold = clock.cold(list(calls.values())) if calls and not no_cold else [None] * len(calls)
        warm = clock.warm(list(calls.values())) if calls else []
        host = clock.host(list(calls.values())) if calls else []
    except Exception as error:  # a provider that breaks only when called often
        if len(names) == 1:
            return {names[0]: Found(names[0], FAILED, detail=timing.first_line(error))}
        return {name: one for name in names for one in _times({name: calls[name]}, clock, no_cold).values()}
    found = {}
    for name, one, graph, queued in zip(names, cold, warm, host, strict=True):
        times = {}
        if one is not None:
            times = {"us": one.median, "low_us": min(one.us), "high_us": max(one.us), "calls": len(one.us)}
            times["kernels"] = one.kernels
        warm_us, lacking = (None, f"no graph: {graph}") if isinstance(graph, str) else (graph, "")
        detail = "; ".join(text for text in (no_cold and f"no cold time: {no_cold}", lacking) if text)
        found[name] = Found(name, TIMED, **times, warm_us=warm_us, host_us=queued, detail=detail)
    return found


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """All of it as bytes: NaN equals NaN."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def _copy(size: int, device: str) -> Call:
    """Reads half of ``size`` bytes and writes as many."""
    source = torch.randn(-(-size // 8), device=device)
    target = torch.empty_like(source)

    def call() -> None:
        target.copy_(source)

    return call


def peak(name: str) -> float | None:
    """Return bytes/s of a GPU's memory by its data sheet. None where the table does not have it."""
    known = {rate.gpu: rate.value for rate in rates.table() if rate.name == "hbm_sheet_bytes_s"}
    return next((value for gpu, value in known.items() if gpu in name.split()), None)


def run(
    rows: Iterable[Row],
    clock: Clock,
    device: str = "cuda",
    providers: Sequence[str] = (),
    seconds: float = 1e9,
    keep: Callable[[Result], None] = lambda result: None,
) -> list:
    """Measure rows and print each when it is done; those that find no time are named.

    Args:
        seconds: no row starts later than this. keep: takes each result as it comes. Others: see `measure`.

    Returns:
        the results.
    """
    start, results, late = time.perf_counter(), [], []
    rate = peak(torch.cuda.get_device_name()) if device == "cuda" else None
    print(HEAD, flush=True)
    for row in rows:
        if time.perf_counter() - start > seconds:
            late.append(f"{row.op} {row.shape}")
            continue
        try:
            results.append(measure(row, clock, device, providers, rate))
        except Exception as error:  # of the row itself: its inputs, or the GPU's memory
            results.append(_result(row, [Found(OURS, FAILED, detail=timing.first_line(error))], rate))
        print("\n".join(lines(results[-1])), flush=True)
        keep(results[-1])
        gc.collect()  # the row's memory, before the next one's
        if device == "cuda" and not _alive():
            print("the GPU's context is lost: no further row can run in this process")
            break
    if late:
        print(f"{NO_TIME}{'; '.join(late)}")
    print(f"{len(results)} rows in {time.perf_counter() - start:.0f} s")
    return results


def _alive() -> bool:
    """False after an illegal access: CUDA refuses every further call of the process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def first_calls(rows: Iterable[Row], providers: Sequence[str] = (), device: str = "cuda") -> None:
    """Call every provider once, so that what it compiles is on disk. What fails says so when it is measured."""
    for row in rows:
        given = inputs(row, device)
        for provider in taken(row, providers):
            with suppress(Exception):
                provider.bind(given)[0]()


def ahead(processes: int, arguments: Sequence[str], module: str = "dsv4lib.bench.ops.harness") -> None:
    """Make the `first_calls` of chosen rows, in so many processes at once. ``arguments`` of ``module`` choose them."""
    start = time.perf_counter()
    command = [sys.executable, "-m", module, *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = [subprocess.Popen([*command, "--part", f"{i}/{processes}"], **quiet) for i in range(processes)]
    for process in running:
        process.wait()
    print(f"first calls in {processes} processes: {time.perf_counter() - start:.0f} s", flush=True)


def part(rows: Sequence[Row], one: int, count: int) -> list[Row]:
    """Return a process's part of the rows. Rows of an op share kernels: of several ops it is whole ops."""
    ops = list(dict.fromkeys(row.op for row in rows))
    return list(rows[one::count]) if len(ops) == 1 else [row for row in rows if ops.index(row.op) % count == one]


def await_turn() -> None:
    """Wait for the file that `TURN` names. A process may so be imported while the one before it still times.

    Raises:
        SystemExit: the process that started this one has ended.
    """
    path, parent = os.environ.get(TURN), os.getppid()
    while path and not Path(path).exists():
        if os.getppid() != parent:
            raise SystemExit("nothing timed: the process that gives turns has ended")
        time.sleep(POLL_S)


def chosen(only: Sequence[str], shape: str) -> tuple[list[Row], dict[str, str]]:
    """Return rows of these ops whose shape contains ``shape``.

    All if none is named; also modules that cannot be imported.
    """
    found, broken = modules(only)
    rows = []
    for name, make in found.items():
        try:
            rows += [row for row in make() if shape in row.shape]
        except Absent as reason:  # it needs its op to count bytes
            broken[name] = str(reason)
    if not rows and not broken:
        raise ArgumentError("shape", shape, "a part of a row's shape")
    return rows, broken


def packed(rows: Iterable[Row], folder: Path) -> list[Row]:
    """Return the rows with our provider from a pack.

    Raises:
        ReplayError: it is no pack.
    """
    pack, driver = replay.Pack(folder), replay.Driver()
    print(f"our kernels: {len(pack.index['rows'])} rows compiled for {pack.index['arch']}, {pack.index['kernels']}")
    return [dataclasses.replace(row, providers=(pack.provider(row, driver), *row.providers[1:])) for row in rows]


def listed(rows: Iterable[Row]) -> list[str]:
    """Return rows without times: what a machine without a GPU can say of them."""
    return [
        f"{row.op} {row.shape}: {row.bytes / 1e6:.3g} MB, {', '.join(provider.name for provider in row.providers)}"
        for row in rows
    ]


def command_line(arguments: Sequence[str], *folders: Path | None, module: str = "dsv4lib.bench.ops.harness") -> str:
    """Return the command as it is recorded. Paths of its ``folders`` are left out: no time depends on them."""

    def shown(word: str) -> str:
        option, equals, value = word.rpartition("=")
        return f"{option}{equals}DIR" if Path(value) in folders else shlex.quote(word)

    return " ".join([f"python -m {module}", *map(shown, arguments)])


def facts(command: str) -> dict[str, str]:
    """Return what times of this machine depend on, and ``command``, which took them. It is a line of `runs.csv`."""
    now, name = datetime.now(UTC), torch.cuda.get_device_name()
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,clocks.max.memory,power.limit"]
    query += ["--format=csv,noheader", "-i", "0"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip().split(", ")
    except (OSError, subprocess.SubprocessError):
        smi = []
    driver, sm, memory, power = smi if len(smi) == 4 else [""] * 4
    versions = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "run": f"{now:%Y-%m-%d %H:%M} {name}",
        "gpu": name,
        "driver": driver,
        "max_clocks": f"SM {sm}, memory {memory}",
        "power_limit": power,
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "packages": ", ".join(f"{package} {version}" for package, version in versions.items()),
        "kernels": env.kernel_fingerprint(),
        "command": command,
        "method": timing.METHOD,
    }


def parts(text: str) -> list[str]:
    """Split text at its commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        the exit code: 0; 1 where a module cannot be imported or a provider of ours is not timed; 2 for bad arguments;
        `NOTHING_TIMED` without a GPU.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m dsv4lib.bench.ops.harness", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="ops, with commas between them")
    parser.add_argument("--shape", default="", help="rows whose shape contains this")
    parser.add_argument("--providers", default="", help="peers whose name contains one of these (commas)")
    parser.add_argument("--seconds", type=float, default=1e9, help="no row starts later")
    parser.add_argument("--ahead", type=int, default=0, help="first make all first calls, in so many processes at once")
    parser.add_argument("--first-calls", action="store_true", help="make those of --ahead, and time nothing")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # of `ahead`: which rows
    parser.add_argument("--pack", type=Path, help="our kernels come from this folder (see export), not from the DSL")
    parser.add_argument("--record", type=Path, help="write rows.csv and runs.csv into this folder")
    parser.add_argument("--history", type=Path, help="add the times to the history in this folder")
    given = parser.parse_args(arguments)
    try:
        rows, broken = chosen(parts(given.only), given.shape)
    except DSV4Error as error:
        print(error)
        return 2
    for name, reason in broken.items():
        print(f"{name}: cannot be imported: {reason}")
    await_turn()
    if not torch.cuda.is_available():
        print("\n".join(listed(rows)))
        print("no GPU: nothing timed, rows listed")
        return NOTHING_TIMED
    try:
        rows = rows if given.pack is None else packed(rows, given.pack)
    except DSV4Error as error:
        print(error)
        return 2
    if given.part:
        one, count = map(int, given.part.split("/"))
        first_calls(part(rows, one, count), parts(given.providers))
        return 0
    if given.ahead:
        ahead(min(given.ahead, len(rows)), arguments)
    if given.first_calls:
        return 1 if broken else 0
    known = facts(command_line(arguments, given.record, given.pack, given.history))

    def keep(result: Result) -> None:
        if given.record is not None:
            record([result], known, given.record)

    clock, providers = timing.GpuClock(), parts(given.providers)
    results = run(rows, clock, providers=providers, seconds=given.seconds, keep=keep)
    if given.history is not None:
        history.append(history.of_results("ops", results), given.history, known)
    ours = [result.named(OURS) for result in results]
    return 1 if broken or any(one is None or one.state != TIMED for one in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
