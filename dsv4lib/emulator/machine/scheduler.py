"""Schedule warps in slices, and asynchronous operations as the policy says.

A correct kernel gives the same bits under every policy; a race shows under one of them. The scheduler also finds out
when nothing can run any more and lists what each warp waits on.
"""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Any

from dsv4lib.emulator.errors import Deadlock, EmulatorError, LimitExceeded, Place
from dsv4lib.emulator.isa import barriers
from dsv4lib.emulator.machine.cta import Cluster
from dsv4lib.emulator.machine.directed import make_policy
from dsv4lib.emulator.machine.faults import raise_fault, report_diverged
from dsv4lib.emulator.machine.grid import GridBuilder
from dsv4lib.emulator.machine.limits import INSTRUCTIONS, SECONDS
from dsv4lib.emulator.machine.policies import Policy
from dsv4lib.emulator.machine.warp import GROUP, GROUPS, LIVE, MASK, PC, STICKY, Block, Parked, Warp
from dsv4lib.emulator.native import abi
from dsv4lib.emulator.native.driver_ir import run_loop
from dsv4lib.errors import DSV4Error

_EXECUTED = abi.CONTEXT.fields["executed"][1] // 8
_CLOCK = abi.CONTEXT.fields["clock"][1] // 8
_PARKED = abi.CONTEXT.fields["parked"][1] // 4
# Turns and instructions without progress after which a kernel that spins gets what the policy still holds back.
_PATIENCE, _SPINNING = 32, 50_000
_AROUND = 5_000  # arrivals at barriers, and nothing else, after which a launch may be waiting for another
# Suspended waits (mbarrier.try_wait) may end without their phase; rounds of that without progress mean a deadlock.
_EXPIRIES = 16
# Kernels with these instructions or attributes get all resident clusters at once; others one after another.
_CLUSTER_CONTROL = "clusterlaunchcontrol"


class Scheduler:
    """Runs one machine to its end.

    Attributes:
        ready: warps that can run; blocked: warps that wait, see ``Warp.block``.
        hash: of the sequence of slices since the launch was last quiet; folded: of all slices and completions before.
        folds: what `folded` was made of, for those that ask for it by making it a list.
        resident: clusters that the SMs hold at once; at_once: those that run at the same time.
        fruitless: how often the warps were found to only spin, with nothing held back, since the launch made progress.
    """

    def __init__(self, machine: Any):
        self.machine = machine
        self.builder = GridBuilder(machine)
        self.policy: Policy = make_policy(machine.settings.schedule, machine.rng)
        self.units = machine.units
        self.ready: list[Warp] = []
        self.blocked: list[Warp] = []
        self.hash = self.folded = self.fruitless = self._expiries = 0
        self.folds: list[int] | None = None
        program, self.trace = machine.program, machine.trace
        self._run = run_loop(counting=self.trace is not None)
        records = program.records if self.trace is None else self.trace.counting_records()
        self._records = records.ctypes.data
        self._services = [None] * len(program.instructions)
        for i, (function, form) in program.services.items():
            self._services[i] = (function, program.instructions[i], form)
        self._aligned = frozenset(i for i in program.services if ".aligned" in program.instructions[i].opcode)
        self._agents = 0
        self._live: dict[Cluster, int] = {}
        self._seen = -1
        self._progress, self._idle, self._since = 0, 0, 0
        self._lasting = self._arrivals = 0
        self._limit, self._deadline, self._began = machine.settings.instruction_limit, 0.0, 0.0
        self.resident = self.builder.resident_clusters()
        # What fits on the SMs at the start is launched, if only later; the rest can be cancelled.
        self._launchable = [machine.queue.popleft() for _ in range(min(self.resident, len(machine.queue)))][::-1]
        resident = machine.request.attributes.get("cooperative") or program.uses(_CLUSTER_CONTROL)
        self.at_once = self.resident if resident else min(self.resident, self.policy.clusters)

    def run(self) -> None:
        """Run until every cluster has exited.

        Raises:
            Deadlock: nothing can run. LimitExceeded: instructions or time. Other EmulatorErrors: what a warp did.
        """
        self.start()
        while self.running:
            self.step()
        self.finish()

    @property
    def running(self) -> bool:
        """Tell whether a cluster has not exited."""
        return bool(self._live or self._launchable or self.machine.queue)

    @property
    def quiet(self) -> bool:
        """Tell whether nothing runs and nothing is in flight: between clusters that run one after another."""
        return not self._live and not len(self.units)

    @property
    def waiting(self) -> int:
        """Count the clusters that have not begun."""
        return len(self._launchable) + len(self.machine.queue)

    def skip(self, clusters: int) -> None:
        """Leave out the next clusters, which run elsewhere; those after them are numbered as if they had run here."""
        for _ in range(clusters):
            if self._launchable:
                self._launchable.pop()
            else:
                self.machine.queue.popleft()
        self._agents += self.builder.skip(clusters)

    def start(self) -> None:
        """Launch the first clusters; from here on the time limit counts."""
        self._deadline, self._began = time.monotonic() + self.machine.settings.time_limit, time.process_time()
        self._launch()
        self._progress = self.machine.progress
        self._settle()

    def step(self, limit: int | None = None) -> None:
        """Run one slice of the policy and the completions that follow it. Errors as of `run`.

        Args:
            limit: warp-instructions of the whole launch at which this ends, at the latest one later.
        """
        machine, policy = self.machine, self.policy
        if not self._live and not len(self.units):
            self._launch()
        for warp, quantum in policy.slices(self.ready):
            if limit is None:
                self._slice(warp, quantum)
            while limit is not None and machine.time < limit and quantum > 0 and warp in self.ready:
                self.single_step(warp)
                quantum -= 1
        completed = len(self.units) > 0 and self._complete(policy.completions(self.units, bool(self.ready)))
        if machine.events != self._seen:
            self.wake()
        if machine.progress != self._progress:
            self._progress, self._since = machine.progress, machine.time
            self._idle = self.fruitless = self._expiries = 0
            if machine.lasting != self._lasting:
                self._settle()
        self._idle += 1
        spinning = self._idle >= _PATIENCE and machine.time - self._since >= _SPINNING
        if self._live and (spinning or not (self.ready or completed)):
            self._unstick()
        if not self._live:
            if not len(self.units):
                self.fold()
            elif not completed:  # what cannot complete does not hold up the next cluster
                self._launch()
        if time.monotonic() > self._deadline:
            self._count_seconds()

    def absorb(self, clusters: int, folds: list[int], seconds: float) -> None:
        """Go on as if the next clusters had run here; the machine's counts include them. ``seconds`` they took."""
        self.skip(clusters)
        for one in folds:
            self.folded = hash((self.folded, one))
        self._progress, self._since, self._seen = self.machine.progress, self.machine.time, self.machine.events
        self._settle()
        self.restart_clock(self.seconds + seconds)

    def fold(self) -> None:
        """Add what happened since the launch was last quiet to the hash of the whole."""
        one = hash((self.hash, self.units.fold()))
        self.hash, self.folded = 0, hash((self.folded, one))
        if self.folds is not None:
            self.folds.append(one)

    @property
    def schedule_hash(self) -> int:
        """Hash the interleaving of slices and completions so far."""
        return hash((self.folded, self.hash, self.units.hash))

    def restart_clock(self, seconds: float = 0.0) -> None:
        """Count processor time from now on; ``seconds`` were used before."""
        self._began = time.process_time() - seconds

    @property
    def seconds(self) -> float:
        """Processor time since `start`."""
        return time.process_time() - self._began

    def _count_seconds(self) -> None:
        """The time is over by the clock on the wall; on a busy machine the launch had less of it, and gets the rest."""
        limit = self.machine.settings.time_limit
        left = limit - self.seconds
        if left <= 0:
            raise LimitExceeded(f"time limit of {limit} s reached ({SECONDS.how})", self._anywhere())
        self._deadline = time.monotonic() + left

    def finish(self) -> None:
        """Complete what is still in flight when the last cluster has exited."""
        self.units.drain()

    # --- one slice --------------------------------------------------------------------------------------------------

    def _slice(self, warp: Warp, quantum: int) -> None:
        """Let a ready warp run up to ``quantum`` instructions between two services."""
        machine, words, longs = self.machine, warp.words, warp.longs
        start = longs[_EXECUTED]
        longs[_CLOCK] = machine.time - start
        if self.trace is not None:
            self.trace.slice_begins(warp)
        again = warp.block is not None
        services, race = self.policy.services, machine.race
        while True:
            if again:
                again = False
                if not self._resume(warp):
                    continue
                reason = abi.SERVICE
            else:
                reason = self._run(warp.context_address, self._records, quantum)
                if race is not None and race.pending[0]:
                    race.drain(warp)
            if reason == abi.SERVICE:
                if warp.resume:
                    warp.pending = warp.resume.pop(words[PC], None)
                block = self._serve(warp, words[PC])
                if block is None:
                    services -= 1
                    if services > 0:
                        continue
                    break
                if self._wait(warp, block):
                    break
            elif reason == abi.DONE:
                if words[GROUPS]:
                    self._rotate(warp)
                break
            elif reason == abi.EXITED:
                if self._exit(warp):
                    break
            elif reason == abi.STALLED:
                self._sleep(warp, self._any_parked(warp), stalled=True)
                break
            else:
                raise_fault(warp)
        executed = longs[_EXECUTED]
        if self.trace is not None:
            self.trace.slice_ends(warp)
        machine.time += executed - start
        self.hash = hash((self.hash, warp.agent, executed))
        if machine.time > self._limit:
            message = f"instruction limit of {self._limit:,} reached ({INSTRUCTIONS.how})"
            raise LimitExceeded(message, warp.place())

    def _serve(self, warp: Warp, pc: int) -> Block | None:
        """Call the service at ``pc``; step over it if it is done."""
        function, instr, form = self._services[pc]
        if self.machine.race is not None:
            self.machine.race.warp = warp
        if self.trace is not None:
            self.trace.serves(warp, instr)
        if pc in self._aligned and warp.words[MASK] != warp.words[LIVE] and warp.pending is None:
            report_diverged(warp, instr, warp.words[LIVE] & ~warp.words[MASK])
        try:
            block = function(warp, instr, form)
        except EmulatorError as error:
            if error.place is not None:
                raise
            raise type(error)(str(error), warp.place(instr)) from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, DSV4Error):
                raise
            why = f"cannot be carried out with these operands ({type(error).__name__}: {error})"
            raise EmulatorError(f"{instr.opcode} {why}", warp.place(instr)) from error
        if block is None:
            warp.pending = None
            warp.words[PC] += 1
            warp.longs[_EXECUTED] += 1
            self.machine.events += 1
        return block

    def single_step(self, warp: Warp) -> None:
        """Let a ready warp run one instruction."""
        services, self.policy.services = self.policy.services, 1
        try:
            self._slice(warp, 1)
        finally:
            self.policy.services = services

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, warp: Warp, block: Block) -> bool:
        """The running group waits. True if the whole warp does."""
        words = warp.words
        if not words[GROUPS] and not warp.parked:
            self._sleep(warp, block)
            return True
        warp.parked.append(Parked(words[PC], words[GROUP], block, warp.pending))
        warp.pending = None
        words[GROUP] = 0
        words[_PARKED] = 1
        if words[GROUPS]:
            return False
        self._sleep(warp, self._any_parked(warp))
        return True

    def _sleep(self, warp: Warp, block: Block, stalled: bool = False) -> None:
        warp.block, warp.stalled = block, stalled
        if self.trace is not None:
            self.trace.warp_waits(warp, block)
        self.ready.remove(warp)
        self.blocked.append(warp)
        self._seen = -1  # its ready() has to be called once

    def _resume(self, warp: Warp) -> bool:
        """A ready warp goes on. True if it stands at the service that blocked it, False if the driver decides."""
        warp.block, warp.stalled = None, False
        if not warp.parked:
            return self._services[warp.words[PC]] is not None
        for parked in [p for p in warp.parked if p.block.ready()]:
            warp.parked.remove(parked)
            warp.resume[parked.pc] = parked.pending
            warp.push(parked.pc, parked.mask)
        warp.words[_PARKED] = bool(warp.parked)
        return False

    def _any_parked(self, warp: Warp) -> Block:
        parked = warp.parked
        return Block("lane groups", lambda: any(p.block.ready() for p in parked))

    def wake(self) -> None:
        """Move warps whose wait is over to the ready list."""
        self._seen = self.machine.events
        still = []
        for warp in self.blocked:
            (self.ready if warp.block.ready() else still).append(warp)
        self.blocked = still

    def _rotate(self, warp: Warp) -> None:
        """A divergent warp used its whole slice: every few slices another of its groups gets one."""
        warp.spins += 1
        if warp.spins % 4 == 0:
            warp.rotate()
            warp.words[STICKY] = 1
        else:
            warp.words[STICKY] = 0

    # --- progress of the launch -------------------------------------------------------------------------------------

    def _complete(self, operations: list[Any]) -> bool:
        """Let operations happen. True if there were any."""
        for operation in operations:
            self.units.complete(operation)
        return bool(operations)

    def _launch(self) -> None:
        """Fill up with clusters."""
        machine = self.machine
        while len(self._live) < self.at_once:
            if self._launchable:
                origin = self._launchable.pop()
            elif machine.queue:
                origin = machine.queue.popleft()
            else:
                return
            cluster = self.builder.cluster(origin, self._agents)
            warps = [w for cta in cluster.ctas for w in cta.warps]
            self._agents += len(warps)
            self._live[cluster] = len(warps)
            machine.cluster_started(cluster)
            self.ready.extend(warps)
            machine.changed()

    def _exit(self, warp: Warp) -> bool:
        """The running lanes have exited. True if the warp is gone or waits."""
        if warp.parked:
            barriers.lanes_exited(warp)
            self._sleep(warp, self._any_parked(warp))
            return True
        if self.trace is not None:
            self.trace.warp_exits(warp)
        warp.exited = True
        self.ready.remove(warp)
        cluster = warp.cta.cluster
        barriers.warp_exited(warp)
        self.machine.changed()
        self._live[cluster] -= 1
        if all(w.exited for w in warp.cta.warps):
            self.machine.cta_exited(warp.cta, warp)
        if not self._live[cluster]:
            del self._live[cluster]
            self.machine.cluster_finished(cluster)
            if self.at_once > 1:  # else when all that the cluster has begun is complete
                self._launch()
        return True

    def _unstick(self) -> None:
        """Nothing can run, or nothing changes: release what was held back, one thing at a time."""
        self._idle, self._since = 0, self.machine.time
        if not self.release():
            if self.ready:
                self.fruitless += 1
            else:
                self._force()
        self.wake()

    def release(self) -> bool:
        """Let happen what the policy held back: an operation, or the next cluster. True if there was any."""
        if len(self.units) and (candidates := self.units.candidates()):
            return self._complete(candidates[:1])
        if len(self._live) >= self.resident or not (self._launchable or self.machine.queue):
            return False
        self.at_once = len(self._live) + 1
        self._launch()
        return True

    @property
    def circling(self) -> int:
        """Count the arrivals at barriers since anything else has happened."""
        return self.machine.progress - self.machine.lasting - self._arrivals

    def _settle(self) -> None:
        """Count from here on."""
        self._lasting = self.machine.lasting
        self._arrivals = self.machine.progress - self._lasting

    def force_stalled(self) -> bool:
        """Let the lanes of a warp that waits to converge pass alone. True if there was one."""
        stalled = next((w for w in self.blocked if w.stalled), None)
        if stalled is None:
            return False
        stalled.block, stalled.stalled = None, False
        stalled.words[STICKY] = 2
        self.blocked.remove(stalled)
        self.ready.append(stalled)
        return True

    def expire_waits(self) -> bool:
        """End suspensions (mbarrier.try_wait). True if there were any."""
        expire = [e for w in self.blocked for b in _blocks(w) if (e := getattr(b, "expire", None)) is not None]
        for end in expire:
            end()
        self._seen = -1  # call their ready()
        return bool(expire)

    def _force(self) -> None:
        """All warps wait and nothing else can happen: let lanes pass a converging instruction alone, end suspensions.

        Raises:
            Deadlock: that has been tried, and nothing changed since.
        """
        if self.force_stalled():
            return
        self._expiries += 1
        if self._expiries > _EXPIRIES or not self.expire_waits():
            raise Deadlock(self.report())

    @property
    def spins(self) -> bool:
        """Tell whether the last slices brought no progress."""
        return self.stuck or self._idle >= _PATIENCE

    @property
    def stuck(self) -> bool:
        """Tell whether the warps seem to wait for another launch: they only spin, or go around with barriers."""
        return self.fruitless > 0 or self.circling >= _AROUND

    def report(self, without: Container[Warp] = ()) -> str:
        """List what each warp waits on, but for some."""
        blocked = [warp for warp in self.blocked if warp not in without]
        pending = f"{len(self.units)} pending asynchronous operations cannot complete" if len(self.units) else ""
        lines = [f"deadlock: no warp can run and {pending or 'no asynchronous operation is pending'}"]
        for warp in blocked[:64]:
            place = warp.place()
            device = "" if place.device is None else f"device {place.device} "
            owner = f"{device}CTA {warp.cta.ctaid} warp {warp.warp_id}"
            waits = [(p.block, p.pc, f"{owner} lanes {p.mask:#010x}") for p in warp.parked]
            if warp.stalled or not waits:
                waits.append((warp.block, warp.words[PC], owner))
            for block, pc, name in waits:
                place, detail = warp.program.place(pc), block.detail()
                where = f" ({place.python})" if place.python else ""
                what = f"{block.reason}: {detail}" if detail else block.reason
                lines.append(f"  {name}: {what}, PTX line {place.ptx_line}{where}: {place.ptx}")
        if len(blocked) > 64:
            lines.append(f"  ... and {len(blocked) - 64} more warps")
        lines += [f"  {operation}" for operation, _ in zip(self.units, range(16), strict=False)]
        return "\n".join(lines)

    def _anywhere(self) -> Place | None:
        """The place of some warp, for messages about the whole launch."""
        warps = self.ready or self.blocked
        return warps[0].place() if warps else None


def _blocks(warp: Warp) -> list[Block]:
    """What a blocked warp waits for: one block, or those of its lane groups."""
    return [p.block for p in warp.parked] or [warp.block]
