"""Run one launch: a grid of CTAs in their clusters, and the memory they share.

Clusters are created lazily. As many as fit on the SMs are *resident*: they are guaranteed to make progress together,
which is what persistent, cooperative and flag-waiting kernels rely on. The rest wait in a queue, from which
clusterlaunchcontrol may cancel them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsv4lib.emulator.checks.global_memory import GlobalRaces
from dsv4lib.emulator.checks.launches import Known, Launches
from dsv4lib.emulator.checks.order import Order
from dsv4lib.emulator.checks.race import Detector
from dsv4lib.emulator.checks.report import Hazard
from dsv4lib.emulator.checks.taint import Taint
from dsv4lib.emulator.errors import EmulatorError, HazardError, LaunchError, Place
from dsv4lib.emulator.isa import calls
from dsv4lib.emulator.machine import request as limits
from dsv4lib.emulator.machine.async_units import AsyncUnits
from dsv4lib.emulator.machine.cores import Split
from dsv4lib.emulator.machine.cta import CTA_CREATED, CTA_EXITED, Cluster, Cta, Smem, aligned_zeros
from dsv4lib.emulator.machine.limits import ClusterQueue
from dsv4lib.emulator.machine.livelock import Watch
from dsv4lib.emulator.machine.request import Dim3, LaunchRequest, LaunchResult, Settings, check_shape
from dsv4lib.emulator.machine.warp import Block, Warp
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.memory.marks import Marks
from dsv4lib.emulator.native import fpenv
from dsv4lib.emulator.native.abi import CHECK_PROXY, CHECK_RACE
from dsv4lib.emulator.trace.recorder import Recorder

__all__ = ["Block", "Cluster", "Cta", "GlobalMemory", "Machine", "Smem", "Warp", "run"]

_NOTES = 5  # hazards that an error's message lists

GRID_WORKSPACE = 8  # bytes


class Machine:
    """One launch.

    Attributes:
        grid, block, cluster_shape: dimensions, x first.
        gmem: global memory; arch: "sm_100a" and the like.
        units: asynchronous units (async_units.py).
        trace: None or the launch's recorder (recorder.py).
        rng: seeded numpy generator; all randomness of a run comes from it.
        stats: counts by name.
        time: logical time: warp-instructions executed so far.
        ahead: what to add to it for a time that is common to all devices: what the other launches have executed.
        events: bumped by everything that could unblock a warp: every service does.
        progress: bumped by ``changed``; stands still when the warps only poll. lasting: the same without arrivals at
            barriers that warps may repeat for ever.
        clusters: resident clusters in launch order.
        before: global memory of the launches that a programmatic dependent launch may overlap, the latest first.
        launches: what the race detectors of launches that run at the same time share; None: nothing runs beside it.
        known: what it knows of them when it begins.
        taint: reads in vain.
        race: the order between warps, and with CHECK_RACE the race detector; None = off.
        device: number of the device where there are several, else None.
        scheduler: from `begin` on.
        watch: looks for loops that never end. split: runs clusters in several processes; from `run` on.
        marks: which words of global memory clusters have accessed, while several processes run them; else None.
    """

    def __init__(
        self,
        program: Any,
        request: LaunchRequest,
        gmem: GlobalMemory,
        settings: Settings | None = None,
        *,
        variables: dict[str, int] | None = None,
        trace: bool | int = False,
        units: Any = None,
        device: int | None = None,
        before: tuple[GlobalRaces, ...] = (),
        launches: Launches | None = None,
        known: Known | None = None,
    ):
        self.program, self.request, self.gmem = program, request, gmem
        self.settings = settings or Settings()
        self.device = device
        self.arch = self.settings.arch
        self.grid, self.block, self.cluster_shape = request.grid, request.block, request.cluster
        self.variables = variables or {}
        self.trace = Recorder(self, 0 if trace is True else trace) if trace else None
        self.rng = np.random.default_rng(self.settings.seed)
        self.stats: Counter[str] = Counter()
        self.time = self.ahead = 0
        self.events = 0
        self.progress = self.lasting = 0
        self.hazards: dict[tuple[str, int, int], Hazard] = {}
        self.clusters: list[Cluster] = []
        self.smem_bytes = limits.SMEM_RESERVED + program.smem_static + request.dynamic_smem
        check_shape(request, self.smem_bytes - limits.SMEM_RESERVED)
        self.param_bytes = program.kernel.param_bytes
        self._params = aligned_zeros(max(self.param_bytes, 1), 128)
        self._params[: self.param_bytes] = np.frombuffer(request.params, np.uint8)[: self.param_bytes]
        self.param_address = self._params.ctypes.data
        # The barrier of a cooperative launch (CUDA's cooperative_groups, "grid_workspace"), after its size.
        self._workspace = aligned_zeros(GRID_WORKSPACE if request.attributes.get("cooperative") else 0, 128)
        self._workspace[:4].view(np.uint32)[:] = GRID_WORKSPACE
        self.grid_workspace = self._workspace.ctypes.data if len(self._workspace) else 0
        self.units = AsyncUnits(self) if units is None else units
        checks = self.settings.native_checks
        self.launches, self.known = launches, known
        self.before = before if request.attributes.get("programmatic") else ()
        self.race = Detector(self) if checks & CHECK_RACE else Order(self) if checks & CHECK_PROXY else None
        self.taint = Taint(self, isinstance(self.race, Detector))
        self.queue = self._clusters_to_run()
        self.scheduler: Any = None
        self.marks: Marks | None = None
        self.watch = Watch()
        self.split: Split | None = None
        self._began = 0.0

    def changed(self, lasting: bool = True) -> None:
        """Signal progress of the launch to the scheduler. An arrival, a completion, an exit.

        ``lasting``: not an arrival at a barrier, which a loop that waits for ever may make each time around.
        """
        self.events += 1
        self.progress += 1
        self.lasting += lasting

    def device_order(self, count: int) -> Sequence[int]:
        """Choose in which order a sum over ``count`` devices is formed; ascending before `begin`."""
        return range(count) if self.scheduler is None else self.scheduler.policy.device_order(count)

    def variable_address(self, name: str) -> int:
        """Get the device address of a ``.global`` or ``.const`` variable."""
        if name not in self.variables:
            raise LaunchError(f"variable {name} has no device memory")
        return self.variables[name]

    def report(self, kind: str, message: str, place: Place | None, **facts: Any) -> Hazard | None:
        """Record a hazard; one entry per kind and pair of PTX lines. ``owner=``: the place it conflicts with.

        Returns:
            the entry, None with all checks off or this kind muted.

        Raises:
            HazardError: the kind is fatal.
        """
        if not self.settings.native_checks or kind in self.settings.muted:
            return None
        hazard = Hazard(kind, message, place, facts, facts.pop("owner", None))
        known = self.hazards.setdefault(hazard.key(), hazard)
        if known is not hazard:
            known.count += 1
        elif self.trace is not None:
            self.trace.hazard(hazard)
        if self.settings.fatal & {kind, hazard.severity, "all"}:
            raise HazardError(f"{kind}: {message}", place)
        return known

    def cancel_cluster(self) -> Dim3 | None:
        """Take the next unlaunched cluster (clusterlaunchcontrol.try_cancel).

        Returns:
            ctaid of its first CTA, None if all are launched.
        """
        if not self.queue:
            return None
        self.stats["clc_cancelled"] += 1
        return self.queue.popleft()

    def run(self) -> LaunchResult:
        """Run the launch to its end.

        Raises:
            EmulatorError: whatever stopped it.
        """
        try:
            with fpenv.ieee():
                self.begin()
                self.split = split = Split(self)
                self.advance(split.look if split.possible else None)
                return self.end()
        except EmulatorError as error:
            self.explain(error)
            raise
        finally:
            self.close()

    def advance(self, between: Callable[[], bool | None] | None = None) -> None:
        """Run until every cluster has exited.

        Args:
            between: called when nothing runs and clusters are left; True ends it there.
        """
        scheduler = self.scheduler
        while scheduler.running:
            scheduler.step()
            self.watch.look(self, [self])
            if between is not None and scheduler.quiet and scheduler.waiting and between():
                return

    def begin(self) -> None:
        """Create the first clusters. The caller advances ``scheduler`` and closes."""
        from dsv4lib.emulator.machine.scheduler import Scheduler

        self._began = time.perf_counter()
        self.gmem.register_array(self._params, "kernel parameters", writable=False)
        if self.grid_workspace:
            self.gmem.register_array(self._workspace, "grid workspace")
        if any(service is calls.malloc for service, _ in self.program.services.values()):
            _ = self.gmem.heap  # known before the first CTA reads the table of allocations
        self.scheduler = Scheduler(self)
        self.scheduler.start()

    def end(self) -> LaunchResult:
        """Complete what is in flight after the last cluster has exited. What came of the launch."""
        self.scheduler.finish()
        self.taint.end()
        self.stats.update(self.scheduler.policy.counts())
        return LaunchResult(
            instructions=self.time,
            seconds=time.perf_counter() - self._began,
            schedule_hash=self.scheduler.schedule_hash,
            reordered=self.units.reordered,
            stats=self.stats,
            hazards=list(self.hazards.values()),
        )

    def explain(self, error: EmulatorError) -> None:
        """Give an error that stopped the launch what the checks had reported before."""
        error.hazards = list(self.hazards.values())
        for hazard in error.hazards[:_NOTES]:
            error.add_note(f"reported before: {hazard}")

    def close(self) -> None:
        """Give back what `begin` took; also after an error in it."""
        for address in (self.param_address, self.grid_workspace):
            if self.gmem.find(address) is not None:
                self.gmem.unregister(address)
            if isinstance(self.race, Detector):
                self.race.far.forget(address)

    def cluster_started(self, cluster: Cluster) -> None:
        """Begin a cluster: its checks, its CTAs, what hooks make of them."""
        self.clusters.append(cluster)
        if self.race is not None:
            self.race.started(cluster)
        self.stats["ctas"] += len(cluster.ctas)
        for cta in cluster.ctas:
            for hook in CTA_CREATED:
                hook(cta)

    def cta_exited(self, cta: Cta, last: Warp) -> None:
        """End a CTA whose last warp has exited: counters, checks, pending copies, hooks."""
        if self.race is not None:
            self.race.exited(cta, last)
        for warp in cta.warps:
            self.stats["bank_conflicts"] += int(warp.ctx["conflicts"])
            self.stats["global_sectors"] += int(warp.ctx["sectors"])
        self.units.cta_exited(cta)
        for hook in CTA_EXITED:
            hook(cta)

    def cluster_finished(self, cluster: Cluster) -> None:
        """Forget a cluster whose last warp has exited."""
        self.clusters.remove(cluster)

    def _clusters_to_run(self) -> ClusterQueue:
        """The first CTA of each cluster to run."""
        chosen = self.request.ctas
        if chosen is not None:
            outside = [c for c in chosen if any(not 0 <= v < g for v, g in zip(c, self.grid, strict=True))]
            if outside or not chosen:
                raise LaunchError(f"ctas={sorted(chosen)}: CTAs of the grid {self.grid} are needed")
            cx, cy, cz = self.cluster_shape
            chosen = {(x // cx * cx, y // cy * cy, z // cz * cz) for x, y, z in chosen}
        return ClusterQueue(self.grid, self.cluster_shape, chosen)


def prepare(
    request: LaunchRequest, device: Any, launches: Launches | None = None, known: Known | None = None
) -> Machine:
    """Make the machine for one launch on a device. ``launches``, ``known``: see `Machine`.

    ``device`` gives ``gmem``, ``settings``, ``program(module, kernel_name)``, ``variables(module)`` (addresses by
    name) and, optionally, ``tracing``, ``number`` and ``before``, the detector of the launch before on the stream.
    """
    before = getattr(device, "before", None)
    return Machine(
        device.program(request.module, request.kernel_name),
        request,
        device.gmem,
        device.settings,
        variables=device.variables(request.module),
        trace=getattr(device, "tracing", False),
        device=getattr(device, "number", None),
        before=() if before is None else before.unfinished(),
        launches=launches,
        known=known,
    )


def run(request: LaunchRequest, device: Any) -> LaunchResult:
    """Run one launch on a device.

    `prepare` says what the device gives. After the launch its race detector is the device's ``before``.

    If the device traces, it is given the launch's ``trace``, also on failure.
    """
    machine = prepare(request, device)
    device.before = None
    try:
        result = machine.run()
    finally:
        if machine.trace is not None:
            device.trace = machine.trace.finish()
    if machine.trace is not None:
        result.trace = device.trace
    if isinstance(machine.race, Detector):
        device.before = machine.race
    return result
