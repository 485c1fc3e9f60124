"""Run the steps of a plan, each in processes of its own with a time limit, a file a result, so that a run can go on.

A crash or a hang ends one probe or one command, never the rest. What has a result of the same code is not run again;
what was started in two runs and has none is taken to have ended them (a GPU or a machine can go down with a kernel).
A folder is of one device, which `DEVICE` names: no result of an emulator or another GPU is ever taken for this one's.

A run may have a time of its own: no step starts after it, a command that is then running is ended, keeps its tables
and is `UNFINISHED`, and a second call goes on there.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsv4lib import env
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab.day_one import forms, plan, worker
from dsv4lib.lab.day_one.plan import Step
from dsv4lib.lab.day_one.worker import CRASHED, HUNG, RAN
from dsv4lib.lab.report.scrub import scrub
from dsv4lib.lab.run.files import write_atomic

TURN = "DSV4_BENCH_TURN"  # `bench.ops.harness.TURN`, which imports torch
FAILED = "failed"  # of a command: it ended with another exit code than 0
ABSENT = "absent"  # of a command: there is nothing for it to do here, as it says itself
ABSENT_CODES = (20, 21)  # everything was skipped or nothing timed; no Nsight Compute
UNFINISHED = "unfinished"  # of a command: the run's time was over before it ended
AGAIN = (FAILED, HUNG, CRASHED, UNFINISHED)  # of a command: run again while it has starts left
STARTS = 2  # of a probe or command without a result
POLL_S = 0.05
WORKER_S = 90.0  # until a worker has started its first probe
TAIL = 2000  # characters of a command's output
FILE_BYTES = 8 << 20
KILL_S = 10.0  # until a killed process is gone
OUTPUTS, FILES = "probes", "commands"
DEVICE = "device.json"  # whose results a folder holds
RECORDS = "records.json"
UNABLE = "unable"  # of a worker: the machine failed, no probe did


class Stuck(DSV4Error):
    """A process that does not end when it is killed: the driver holds it, and the GPU is not to be used again."""


@dataclass
class Runner:
    """Where and how to run.

    Attributes:
        folder: of the results. fake: differences of the fake device, None: the GPU.
        gpu: what tells it from others (name, driver); of a fake its differences do.
        tell: is called with a line for each step. limit_s: of a probe, instead of the step's.
        seconds: of the whole run. after: is called when a step has ended.
        left: names of steps that the run's time did not reach, or that it ended.
    """

    folder: Path
    fake: list[str] | None = None
    gpu: dict[str, str] = field(default_factory=dict)
    tell: Callable[[str], None] = print
    limit_s: float | None = None
    seconds: float = math.inf
    after: Callable[[], None] = lambda: None
    left: list[str] = field(default_factory=list)
    _end: float = math.inf
    _stopped: bool = False
    _prepare: bool = False
    _calls: set[Call] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _known: dict[str, Any] = field(default_factory=dict)
    _device: str = ""

    def __post_init__(self) -> None:
        device = {"gpu": self.gpu} if self.fake is None else {"fake": sorted(self.fake)}
        claim(self.folder, device)
        self._device = hashlib.sha256(json.dumps(device, sort_keys=True).encode()).hexdigest()[:16]
        for name in (OUTPUTS, FILES):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._known = {probe.name: probe for probe in forms.probes()}

    def run(self, steps: list[Step]) -> bool:
        """Run all steps in order, those that time nothing side by side.

        False if a process that cannot be killed stopped the run.
        """
        self._end, self._stopped = time.monotonic() + self.seconds, False
        self._prepare = any(step.waits and self._due(step) for step in steps)
        numbers = {step.name: f"[{number}/{len(steps)}] {step.name}" for number, step in enumerate(steps, 1)}
        for beside, group in itertools.groupby(steps, key=lambda step: step.beside):
            if beside:
                self._side_by_side(list(group), numbers)
            else:
                self._in_turn(list(group), numbers)
        return not self._stopped

    def _side_by_side(self, steps: list[Step], numbers: dict[str, str]) -> None:
        with ThreadPoolExecutor(beside_at_once()) as pool:
            try:
                list(pool.map(lambda step: self._step(step, numbers[step.name]), steps))
            except BaseException:  # an interrupt: the pool waits for its threads, and they for their processes
                self._stopped = True
                for call in [*self._calls]:
                    call.kill()
                raise

    def _in_turn(self, steps: list[Step], numbers: dict[str, str]) -> None:
        """Run steps one after another; the process of the next one that waits is started early."""
        early: Call | None = None
        try:
            for step, following in itertools.zip_longest(steps, steps[1:]):
                mine, early = early, None
                if following is not None and following.waits and not self._stopped and self._due(following):
                    early = Call(following, self._environment())
                self._step(step, numbers[step.name], mine)
        finally:
            if early is not None:
                early.close()

    def _step(self, step: Step, name: str, early: Call | None = None) -> None:
        start = time.monotonic()
        try:
            if self._stopped:
                return
            if step.skipped or (step.kind == "command" and self.fake is not None):
                said = f"skipped: {step.skipped or 'it needs a GPU'}"
            elif time.monotonic() >= self._end:
                self.left.append(step.name)
                said = "no time left, call again"
            else:
                said = self._probes(step) if step.kind == "probes" else self._command(step, early)
        except Stuck as error:
            self._stopped = True
            self.tell(f"{name}: the run stops here: {error}")
            return
        finally:
            if early is not None:
                with contextlib.suppress(Stuck):  # it has been said, or the GPU was never touched
                    early.close()
        with self._lock:
            self.tell(f"{name}: {said} ({time.monotonic() - start:.1f} s)")
            self.after()

    # --- probes -----------------------------------------------------------------------------------------------------

    def result(self, name: str) -> dict[str, Any] | None:
        """The result of a probe, None if it has none for this code and device."""
        found = _read(self.folder / OUTPUTS / f"{name}.json")
        return found if found is not None and found.get("key") == self._key(name) else None

    def finished(self, arch: str) -> list[str]:
        """Names of all probes of an architecture that have a result."""
        return [name for name, probe in self._known.items() if probe.arch == arch and self.result(name) is not None]

    def _key(self, name: str) -> str:
        return worker.key(self._known[name], self._device)

    def _probes(self, step: Step) -> str:
        limit = self.limit_s or step.limit_s
        left = [name for name in step.probes if self.result(name) is None]
        kept = len(step.probes) - len(left)
        for name in left:
            if self._starts(name) >= STARTS:
                self._ended(name, CRASHED, f"{STARTS} runs ended while it ran")
        while left := [name for name in left if self.result(name) is None]:
            before = {name: self._starts(name) for name in left}
            try:
                status, detail = self._work(left, limit)
            except Stuck as error:
                begun = (name for name in left if self.result(name) is None and self._starts(name) > before[name])
                if (running := next(begun, None)) is not None:
                    self._ended(running, HUNG, str(error))
                raise
            running = next((name for name in left if self.result(name) is None), None)
            if running is None:
                break
            if status == UNABLE:
                rest = sum(self.result(name) is None for name in left)
                return f"stopped ({detail.splitlines()[-1]}): {rest} of them have no result, call again"
            if status != RAN:
                if self._starts(running) == before[running]:
                    last = detail.splitlines()[-1:] or ["no word of it"]
                    return f"the worker did not start ({last[0]}): nothing of it has a result, call again"
                self._ended(running, status, detail)
        seen = [self.result(name)["status"] for name in step.probes]
        counts = ", ".join(f"{seen.count(one)} {one}" for one in dict.fromkeys(seen))
        return f"{counts}{f', {kept} of them before' if kept else ''}"

    def _starts(self, name: str) -> int:
        """How often a probe was started without a result."""
        return worker.starts(worker.started(self.folder / OUTPUTS, name), self._key(name))

    def _ended(self, name: str, status: str, detail: str) -> None:
        found = worker.result(self._known[name], status, detail=scrub(detail, env.root()), device=self._device)
        worker.write(self.folder / OUTPUTS, found)

    def _work(self, names: list[str], limit: float) -> tuple[str, str]:
        """Run a worker until it ends or a probe takes too long. What became of it, and its last words."""
        command = [sys.executable, "-m", "dsv4lib.lab.day_one.worker", str(self.folder / OUTPUTS), *names]
        with tempfile.TemporaryFile() as said, _started(command, said, self._environment()) as process:
            first = {name: self._starts(name) for name in names}
            seen, deadline = 0, time.monotonic() + WORKER_S
            while process.poll() is None:
                now = sum(self._starts(name) > first[name] for name in names)
                if now != seen:
                    seen, deadline = now, time.monotonic() + limit
                if time.monotonic() > deadline:
                    return HUNG, f"killed after {limit if seen else WORKER_S:g} s without a result"
                time.sleep(POLL_S)
            said.seek(0)
            text = said.read().decode(errors="replace").strip()[-TAIL:]
            if process.returncode < 0:
                return CRASHED, f"ended by {signal.Signals(-process.returncode).name}"
            if process.returncode == worker.UNABLE:
                return UNABLE, text or "no word of it"
            undone = all(self.result(name) is None for name in names)
            return (CRASHED, text) if process.returncode or undone else (RAN, text)

    def _environment(self) -> dict[str, str]:
        paths = os.pathsep.join(filter(None, [str(env.package().parent), os.environ.get("PYTHONPATH", "")]))
        found = {name: value for name, value in os.environ.items() if name != worker.FAKE}
        fake = {} if self.fake is None else {worker.FAKE: json.dumps(self.fake)}
        return {**found, "PYTHONPATH": paths, worker.DEVICE: self._device, **fake}

    # --- commands ---------------------------------------------------------------------------------------------------

    def _before(self, step: Step) -> str:
        """What a command ended as, if it is not to run again; else ""."""
        folder, code = self.folder / FILES / step.name, code_of(step)
        found = _read(folder / "result.json")
        if found is None or found.get("code") != code or (step.prepares and self._prepare and found["status"] == RAN):
            return ""
        again = found.get("status") in AGAIN and worker.starts(folder / "started", code) < STARTS
        return "" if again else f"{found['status']} before"

    def _due(self, step: Step) -> bool:
        """Whether a step will run a command."""
        ended = worker.starts(self.folder / FILES / step.name / "started", code_of(step)) >= STARTS
        command = step.kind == "command" and not step.skipped and self.fake is None
        return command and not ended and not self._before(step)

    def _command(self, step: Step, early: Call | None) -> str:
        folder = self.folder / FILES / step.name
        path, mark, code = folder / "result.json", folder / "started", code_of(step)
        if before := self._before(step):
            return before
        folder.mkdir(parents=True, exist_ok=True)
        for name in (*plan.KEPT, RECORDS):  # no table of an earlier run stays beside this one's result
            (folder / name).unlink(missing_ok=True)
        stuck = None
        if worker.starts(mark, code) >= STARTS:
            status, detail, seconds = CRASHED, f"{STARTS} runs ended while it ran", 0.0
        else:
            worker.start(mark, code)
            start = time.monotonic()
            call = early or Call(step, self._environment())
            self._calls.add(call)
            limit = min(step.limit_s, max(0.0, self._end - start))
            try:
                status, detail = call.result(limit)
                if (status == HUNG and limit < step.limit_s) or (status == CRASHED and self._stopped):
                    status = UNFINISHED
                    worker.uncount(mark, code)
                    self.left.append(step.name)
                if status == RAN and step.prepares:
                    worker.uncount(mark, code)
            finally:
                self._calls.discard(call)
                try:
                    self._keep(call.out, folder)
                    call.close()
                except Stuck as error:
                    status, detail, stuck = HUNG, str(error), error
            seconds = time.monotonic() - start
        found = {
            "name": step.name,
            "status": status,
            "detail": scrub(detail, env.root()),
            "seconds": round(seconds, 2),
            "code": code,
        }
        write_atomic(path, json.dumps(found, indent=1).encode())
        if stuck is not None:
            raise stuck
        return status

    def _keep(self, out: Path, folder: Path) -> None:
        """Keep the tables that a command wrote, and the records of a stage as JSON, without private detail."""
        for name in plan.KEPT:
            path = out / name
            if path.is_file() and path.stat().st_size <= FILE_BYTES:
                write_atomic(folder / name, scrub(path.read_text(errors="replace"), env.root()).encode())
        if any(out.glob("*/records/*.parquet")):
            from dsv4lib.lab import records

            fields = ("stage", "set", "backend", "verdict", "reason", "metrics", "seconds", "cpu_s")
            found = [{name: getattr(one, name) for name in fields} for one in records.load(out)]
            text = scrub(json.dumps(found, indent=1, default=str), env.root())
            write_atomic(folder / RECORDS, text.encode())


class Call:
    """A command's process and its folder. One that waits does nothing on the GPU before `result`.

    Attributes:
        step: whose it is. out: its folder.
    """

    def __init__(self, step: Step, environment: Mapping[str, str]):
        self.step, self._stack = step, contextlib.ExitStack()
        self.out = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dsv4-day-one-")))
        self._said = self._stack.enter_context(tempfile.TemporaryFile())
        self._turn = self.out / "turn"
        command = [part.replace(plan.OUT, str(self.out)) for part in step.command]
        turn = {TURN: str(self._turn)} if step.waits else {}
        self._process = self._stack.enter_context(_started(command, self._said, {**environment, **turn}))

    def result(self, limit: float) -> tuple[str, str]:
        """Give it the GPU until it ends or the limit, in seconds. What became of it, and its last words."""
        self._turn.touch()
        try:
            code = self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return HUNG, f"{self._text()}\nkilled after {limit:g} s".strip()
        text = self._text()
        if code < 0:
            return CRASHED, f"ended by {signal.Signals(-code).name}: {text}"
        if code in ABSENT_CODES:
            return ABSENT, text
        return (RAN, text) if code == 0 else (FAILED, f"exit code {code}: {text}")

    def _text(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace").strip()[-TAIL:]

    def kill(self) -> None:
        """Kill the process, for which another thread waits."""
        self._process.kill()

    def close(self) -> None:
        """End it with its children. A second call does nothing.

        Raises:
            Stuck: it does not end.
        """
        self._stack.close()


def beside_at_once() -> int:
    """How many steps run side by side here: a notebook and the compiler take some three cores each."""
    return max(1, min(8, (os.cpu_count() or 1) // 3))


def code_of(step: Step) -> str:
    """What a command's result is kept under: its arguments and the lab's code."""
    text = json.dumps([step.command[1:], env.source_fingerprint()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def command_code(folder: Path) -> str | None:
    """The code that a command's folder has a result of."""
    return (_read(folder / "result.json") or {}).get("code")


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else None
    return None


@contextlib.contextmanager
def _started(command: list[str], said: Any, environment: dict[str, str]) -> Iterator[subprocess.Popen]:
    """A process in a session of its own; whatever happens, it and its children end with the block.

    Raises:
        Stuck: it does not end.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        try:
            process.wait(timeout=KILL_S)
        except subprocess.TimeoutExpired:
            raise Stuck(f"a process still runs {KILL_S:g} s after SIGKILL, reset the GPU or the machine") from None


def fresh(folder: Path) -> None:
    """Forget earlier results."""
    for name in (OUTPUTS, FILES):
        shutil.rmtree(folder / name, ignore_errors=True)
    (folder / DEVICE).unlink(missing_ok=True)


def claim(folder: Path, device: dict[str, Any]) -> None:
    """Make a folder a device's.

    Raises:
        ArgumentError: it has results of another device, or of one that it does not name.
    """
    path = folder / DEVICE
    kept = any(any((folder / name).glob("*")) for name in (OUTPUTS, FILES))
    if path.exists() or kept:
        before = _read(path)
        if before == device:
            return
        of = "a device that it does not name" if before is None else f"another device, {json.dumps(before)}"
        raise ArgumentError("out", str(folder), f"its results are of {of}: another folder, or --fresh to forget them")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(device).encode())
