"""Run the clusters of one launch in several processes, with the results and reports of one.

Clusters that run one after another (policies/`Policy.clusters`) depend on each other only through global memory. So a
launch that turns out to be long is split where nothing is in flight: this process goes on with the next clusters,
forked ones begin with later ones, from the memory as it is. Every process marks the words that it reads and writes.

In the order of the clusters, a worker's outcome is taken over if it read and wrote nothing that clusters before it have
written, and reported nothing. Otherwise it is thrown away, and its clusters run here as if nothing had been split. So
memory, counters, hashes and reports are those of one process. With the race detector, what the worker's detector has
learned is taken over too (checks/takeover.py), and a write of what earlier clusters have read is a conflict.

Not split: kernels whose code is made to communicate or to see an order (atomics, reductions and strong accesses in
global memory, tensor maps changed on the device, cluster launch control, clocks, printf, malloc), cooperative launches,
policies that mix clusters, traces, launches beside others, writable memory that other processes see, more memory than
this machine could hold once for each process.
"""

from __future__ import annotations

import gc
import math
import os
import select
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dsv4lib.emulator.checks import takeover
from dsv4lib.emulator.isa import calls
from dsv4lib.emulator.machine import message
from dsv4lib.emulator.machine.livelock import Watch
from dsv4lib.emulator.machine.program import Program, read_clock
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.memory.marks import Marks, Touched

# Seconds of processor time: of a launch before it is split; that have to be left; of a round in each process.
TRIED, WORTH, ROUND = 0.25, 0.5, 4.0
# A worker is waited for so many times as long as the clusters that run here take, and some seconds.
_PATIENCE, _GRACE = 20.0, 30.0
# Seconds that a process needs for each byte of global memory: pages to copy by the fork, marks to look through.
_LOOK = 0.25 / (1 << 30)
_SHADOWS = 4  # words that the race detector keeps for each one
_STRONG = {"volatile", "mmio", "relaxed", "acquire", "release", "acq_rel"}
_ORDERED = (calls.vprintf, calls.malloc, calls.free, read_clock)


@dataclass
class Outcome:
    """What came of clusters that ran in a worker: by how much it changed the machine, and what it accessed.

    Attributes:
        time, events, progress, stats: of the machine; issued, reordered: of its asynchronous units.
        folds: of the scheduler, one for each cluster; seconds: of processor time.
        touched: global memory; learned: by the race detector, None without one.
    """

    time: int
    events: int
    progress: int
    issued: int
    reordered: int
    stats: Counter[str]
    folds: list[int]
    seconds: float
    touched: list[Touched]
    learned: takeover.Learned | None


_KINDS = (Outcome, Touched, takeover.Learned, takeover.Shadowed)


def communicates(program: Program) -> bool:
    """Tell whether a kernel's code is made to pass something between clusters, or to see their order."""
    if "communicates" not in program.kept:
        program.kept["communicates"] = any(_orders(instr.opcode) for instr in program.instructions) or any(
            function in _ORDERED for function, _ in program.services.values()
        )
    return program.kept["communicates"]


def _orders(opcode: str) -> bool:
    base, *parts = opcode.split(".")
    near = any(part.startswith("shared") for part in parts) and "global" not in parts
    if base in ("multimem", "clusterlaunchcontrol") or "tensormap" in opcode:
        return base != "prefetch"
    if base in ("atom", "red"):
        return not near and "async" not in parts or "global" in parts
    if base in ("ld", "st"):
        return not near and "local" not in parts and bool(_STRONG.intersection(parts))
    return base == "cp" and "reduce" in parts and "global" in parts


def shares_memory(gmem: GlobalMemory) -> bool:
    """Tell whether other processes would see what is written to an allocation: then it cannot be tried out."""
    try:
        with open("/proc/self/maps") as maps:
            fields = [line.split(maxsplit=2)[:2] for line in maps]
    except OSError:
        return True
    ranges = [where.split("-") for where, rights in fields if rights[1] == "w" and rights[3] == "s"]
    shared = [(int(start, 16), int(end, 16)) for start, end in ranges]
    return any(start < a.end and a.start < end for a in gmem for start, end in shared)


def available() -> float:
    """Bytes of memory that this machine has left; 0 where that is not known."""
    try:
        with open("/proc/meminfo") as lines:
            return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0.0)
    except OSError:
        return 0.0


class Split:
    """Looks after one launch; see the module.

    Attributes:
        possible: the launch may be split.
        rounds: how often it was; taken: outcomes of workers that were taken over; dropped: thrown away.
        reason: why the latest was, else "". "conflict": with what clusters before it accessed; "reported": its clusters
            did something that has to happen here; "late", "ended": its process; "limit": of instructions; "order":
            clusters began beside each other here; "memory": allocations have changed meanwhile.
    """

    def __init__(self, machine: Any):
        self.machine = machine
        self.rounds = self.taken = self.dropped = 0
        self.reason = ""
        self._done, self._spent = 0, 0.0
        self.possible = self._possible()

    def _possible(self) -> bool:
        machine, program = self.machine, self.machine.program
        return (
            machine.settings.cores > 1
            and sys.platform == "linux"
            and machine.scheduler.at_once == 1
            and machine.scheduler.waiting > 1
            and machine.trace is None
            and machine.race is not None
            and machine.launches is None
            and not machine.request.attributes.get("cooperative")
            and not program.kept.get("split in vain")
            and not communicates(program)
        )

    def look(self) -> None:
        """Split what is left of the launch, as long as that pays. Called when nothing runs."""
        self._done += 1
        while size := self._size():
            self._round(size)

    def _size(self) -> int:
        """How many clusters each process should run next; 0: the launch is not to be split now."""
        scheduler = self.machine.scheduler
        spent, waiting = scheduler.seconds - self._spent, scheduler.waiting
        each = spent / self._done
        if not self.possible or spent < TRIED or waiting < 2 or each * waiting < WORTH or scheduler.at_once > 1:
            return 0
        cores = self.machine.settings.cores
        size = max(1, min(math.ceil(waiting / cores), int(ROUND / max(each, 1e-6))))
        nbytes = sum(allocation.nbytes for allocation in self.machine.gmem)
        if nbytes * _LOOK > each * size / 4:
            return 0
        held = nbytes * (1 + _SHADOWS * self.machine.race.full)
        if held * cores > available() / 2 or shares_memory(self.machine.gmem):
            self.possible = False
            return 0
        return size

    def _round(self, size: int) -> None:
        """Run ``size`` clusters here and as many in each worker; take over what can be."""
        machine, scheduler, waiting = self.machine, self.machine.scheduler, self.machine.scheduler.waiting
        self.rounds += 1
        machine.marks = Marks(machine.gmem)
        old = takeover.before(machine.race) if machine.race.full else None
        workers: list[Worker] = []
        began = time.monotonic()
        self._done, self._spent = 0, scheduler.seconds
        try:
            for first in range(size, min(waiting, size * machine.settings.cores), size):
                workers.append(Worker(min(size, waiting - first)))
                try:
                    workers[-1].start(machine, first, old)
                except OSError:  # no room for another process
                    workers.pop().stop()
                    self.possible = False
                    break
            machine.advance(lambda: scheduler.waiting <= waiting - size)
            self._done, spent = size, scheduler.seconds - self._spent  # what a cluster costs now
            if workers and (scheduler.waiting != waiting - size or scheduler.at_once != 1):
                self._drop("order")  # clusters of the workers have begun here
                return
            patience = _GRACE + _PATIENCE * (time.monotonic() - began)
            for worker in workers:
                outcome = worker.outcome(patience)
                reason = outcome if isinstance(outcome, str) else self._take(outcome, worker.clusters, old)
                if reason:
                    self._drop(reason)
                    break
                self.taken += 1
            self._spent = scheduler.seconds - spent
        finally:
            machine.marks = None
            stop(workers)

    def _drop(self, reason: str) -> None:
        """Throw an outcome away, and split this launch no more; nor this kernel, if that is how it works."""
        self.possible, self.reason = False, reason
        self.dropped += 1
        if reason in ("conflict", "reported"):
            self.machine.program.kept["split in vain"] = True

    def _take(self, outcome: Outcome, clusters: int, old: takeover.Before | None) -> str:
        """Go on as if the worker's clusters had run here. Else the reason why not."""
        machine, marks = self.machine, self.machine.marks
        if machine.time + outcome.time > machine.settings.instruction_limit:
            return "limit"
        if not marks.current:
            return "memory"
        if any(marks.conflicts(touched, old is not None) for touched in outcome.touched):
            return "conflict"
        if old is not None and not takeover.fits(machine.race, old, outcome.learned):
            return "conflict"
        for touched in outcome.touched:
            marks.apply(touched)
        if old is not None:
            takeover.absorb(machine.race, old, outcome.learned)
        machine.time += outcome.time
        machine.events += outcome.events
        machine.progress += outcome.progress
        machine.stats.update(outcome.stats)
        machine.units.absorb(outcome.issued, outcome.reordered)
        machine.scheduler.absorb(clusters, outcome.folds, outcome.seconds)
        return ""


class Worker:
    """A forked process that runs some of the clusters that wait; ``clusters``: how many."""

    def __init__(self, clusters: int):
        self.clusters = clusters
        self._read, self._process = -1, 0

    def start(self, machine: Any, first: int, old: takeover.Before | None) -> None:
        """Fork.

        Args:
            machine: as it is when nothing runs.
            first: how many of the clusters that wait come before the worker's.
            old: what the race detector knows, if there is one.

        Raises:
            OSError: there is no room for another process.
        """
        self._read, write = os.pipe()
        parent, status = os.getpid(), 1
        with warnings.catch_warnings():  # about threads: the child uses nothing that theirs might hold
            warnings.simplefilter("ignore", DeprecationWarning)
            held = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._process = os.fork()
                if not self._process:
                    try:  # whatever happens, the child does not go on with what its parent does
                        signal.pthread_sigmask(signal.SIG_SETMASK, held)
                        _die_with(parent)
                        gc.freeze()  # a collection would copy every page
                        _send(write, message.write(_run(machine, first, self.clusters, old)))
                        status = 0
                    except BaseException:  # what stopped it is found again, and reported, by the parent
                        pass
                    finally:
                        os._exit(status)
            finally:
                os.close(write)
                signal.pthread_sigmask(signal.SIG_SETMASK, held)

    def outcome(self, seconds: float) -> Outcome | str:
        """Wait ``seconds`` at most for the end of the worker. A reason, if its clusters have to run again."""
        raw, end = bytearray(), time.monotonic() + seconds
        ready = select.poll()
        ready.register(self._read, select.POLLIN)
        while ready.poll(1000 * max(0.0, end - time.monotonic())):
            piece = os.read(self._read, 1 << 20)
            if not piece:
                return self._received(raw)
            raw += piece
        return "late"

    def _received(self, raw: bytearray) -> Outcome | str:
        """Read what the worker sent before it ended."""
        status = 0
        with suppress(ChildProcessError):  # this process lets others wait for its children: the message tells
            _, status = os.waitpid(self._process, 0)
        self._process = 0
        if status or len(raw) < _SIZE or len(raw) != _SIZE + int.from_bytes(raw[:_SIZE], "little"):
            return "ended"
        found = message.read(memoryview(raw)[_SIZE:], _KINDS)
        return "reported" if found is None else found

    def stop(self) -> None:
        """End the process, if it still runs."""
        read, self._read = self._read, -1
        if read >= 0:
            with suppress(OSError):
                os.close(read)
        if self._process:
            with suppress(OSError):
                os.kill(self._process, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the process has ended."""
        process, self._process = self._process, 0
        if process:
            with suppress(OSError):
                os.waitpid(process, 0)


def stop(workers: Sequence[Worker]) -> None:
    """End all workers, then wait for them."""
    for worker in workers:
        worker.stop()
    for worker in workers:
        worker.wait()


_SIZE = 8  # bytes before a message: its length


def _send(write: int, raw: bytes) -> None:
    with os.fdopen(write, "wb") as pipe:
        pipe.write(len(raw).to_bytes(_SIZE, "little") + raw)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _run(machine: Any, first: int, clusters: int, old: takeover.Before | None) -> Outcome | None:
    """Run the clusters of a worker. None if they reported something or left something to do."""
    scheduler, units = machine.scheduler, machine.units
    scheduler.restart_clock()
    scheduler.folds = []
    scheduler.skip(first)
    machine.watch = Watch()
    stats, before = Counter(machine.stats), _findings(machine)
    counts = machine.time, machine.events, machine.progress, units.issued, units.reordered
    left = scheduler.waiting - clusters
    machine.advance(lambda: scheduler.waiting <= left)
    if not scheduler.quiet or scheduler.at_once > 1 or not machine.watch.fresh or _findings(machine) != before:
        return None
    now = machine.time, machine.events, machine.progress, units.issued, units.reordered
    changes = [new - old for new, old in zip(now, counts, strict=True)]
    added = Counter({name: count - stats[name] for name, count in machine.stats.items()})
    used, touched, learned = scheduler.seconds, machine.marks.touched(), None
    if old is not None:
        learned = takeover.learned(machine.race, old, touched)
        if learned is None:
            return None
    return Outcome(*changes, added, scheduler.folds, used, touched, learned)


def _findings(machine: Any) -> tuple[Any, ...]:
    """What the checks have found so far, and what they remember between clusters."""
    hazards = machine.hazards.values()
    return len(hazards), sum(h.count for h in hazards), machine.taint.amount, len(machine.units.descriptors)
