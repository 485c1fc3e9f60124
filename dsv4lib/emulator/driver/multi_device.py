"""Run launches of several devices and streams at the same time.

A kernel may wait for a flag that a kernel on another device sets, so a launch on a device of a group is only queued;
`LaunchQueues.run` then interleaves all of them until every queue is empty. The order within a stream is kept and events
order streams; everything else is the policy's choice, as between the warps of one launch. The same order is what the
race detectors of the launches know of each other. Faults of devices (rank_faults.py) are injected here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsv4lib.emulator.checks.launches import Known, Launches
from dsv4lib.emulator.checks.race import Detector
from dsv4lib.emulator.driver.rank_faults import DROPPED, EMPTY, LATE, RankFault
from dsv4lib.emulator.errors import Deadlock, EmulatorError
from dsv4lib.emulator.machine import machine
from dsv4lib.emulator.machine.livelock import Watch
from dsv4lib.emulator.machine.request import LaunchRequest
from dsv4lib.emulator.native import fpenv

if TYPE_CHECKING:
    from dsv4lib.emulator.driver.interfaces import DeviceView

Stream = tuple[int, int]  # device, handle
_BURST = 64  # slices that the others get when a launch that ran alone makes no progress


@dataclass(eq=False)
class Mark:
    """An event: what has been queued on a stream up to a point.

    ``reached`` once all of that has run; ``known``: what the stream knew of other launches then.
    """

    reached: bool = False
    known: Known = field(default_factory=Known)


@dataclass
class _Queued:
    """An entry of a stream: a launch (with what keeps its memory alive), an event recorded, or one waited for."""

    device: DeviceView
    request: LaunchRequest | None = None
    keep: Any = None
    record: Mark | None = None
    wait: Mark | None = None


@dataclass
class _Streams:
    """Queues by stream, and the launch that each of them runs.

    Attributes:
        dropped: launches that an injected fault has stopped. launches, known: for the race detectors, by stream.
        late: devices whose launches wait; ran: warp-instructions of launches that have ended.
    """

    queues: dict[Stream, deque[_Queued]] = field(default_factory=dict)
    running: dict[Stream, tuple[_Queued, machine.Machine]] = field(default_factory=dict)
    dropped: dict[Stream, tuple[_Queued, machine.Machine]] = field(default_factory=dict)
    launches: Launches = field(default_factory=Launches)
    known: dict[Stream, Known] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)
    ran: int = 0

    def executed(self) -> int:
        """Count the warp-instructions so far."""
        return self.ran + sum(launch.time for _, launch in self.running.values())


class LaunchQueues:
    """Queues of launches, and their common run.

    Args:
        schedule: policy by name (policies.py) that picks the next launch: round robin over devices, one as long as it
            makes progress, or any.
        seed: of the random policies.

    Attributes:
        faults: injected ones, by device.
    """

    def __init__(self, schedule: str, seed: int):
        self.faults: dict[int, RankFault] = {}
        self._policy = _ORDERS.get(schedule, _in_turn)  # a directed schedule directs warps
        self._random = random.Random(seed)
        self._streams = _Streams()

    def launch(self, device: DeviceView, stream: int, request: LaunchRequest, keep: Any) -> None:
        """Queue a launch; ``keep`` holds the memory that it may use."""
        self._add(device, stream, _Queued(device, request, keep))

    def record(self, device: DeviceView, stream: int) -> Mark:
        """Record an event after what is queued on a stream now."""
        mark = Mark()
        self._add(device, stream, _Queued(device, record=mark))
        return mark

    def wait(self, device: DeviceView, stream: int, mark: Mark) -> None:
        """Order what is queued on a stream from now on after ``mark``."""
        self._add(device, stream, _Queued(device, wait=mark))

    def pending(self, index: int | None = None) -> bool:
        """Tell whether launches are queued, on any device or on one."""
        return any(
            item.request is not None
            for (device, _), queue in self._streams.queues.items()
            if index is None or device == index
            for item in queue
        )

    def discard(self) -> None:
        """Forget what is queued."""
        self._streams = _Streams()

    def run(self) -> None:
        """Run until every queue is empty.

        Raises:
            Deadlock: the launches wait for each other, or a stream for an event that is not recorded any more.
            Other EmulatorErrors: what stopped one launch; the others end with it.
        """
        streams, self._streams = self._streams, _Streams()  # what is queued from here on is the next run's
        running = streams.running
        streams.late = {device for device, fault in self.faults.items() if fault.kind == LATE}
        watch, slices = Watch(), self._policy(streams, self._random)
        try:
            with fpenv.ieee():
                while self._begin(streams):
                    stream = next(slices)
                    item, launch = running[stream]
                    if self._drop(streams, stream):
                        continue
                    launch.ahead = streams.executed() - launch.time
                    launch.scheduler.step(self._limit(stream[0]))
                    if not launch.scheduler.running:
                        self._finish(streams, stream)
                    elif not self._release_late(streams):
                        watch.look(launch, [m for _, m in running.values()])
            if any(queue for stream, queue in streams.queues.items() if stream not in streams.dropped):
                raise Deadlock("deadlock: streams wait for events that are recorded on none of them")
        except EmulatorError as error:
            _explain(error, [m for _, m in running.values()])
            if isinstance(error, Deadlock):
                error.args = ("\n".join([str(error), *self._absent(streams)]),)
            raise
        finally:
            for item, launch in (*running.values(), *streams.dropped.values()):
                _leave(item.device, launch)

    def _limit(self, device: int) -> int | None:
        """Warp-instructions after which the launches of a device stop; None: they do not."""
        fault = self.faults.get(device)
        return fault.after if fault is not None and fault.kind == DROPPED else None

    def _drop(self, streams: _Streams, stream: Stream) -> bool:
        """Stop a launch of a device that an injected fault drops, once it has executed enough."""
        limit = self._limit(stream[0])
        if limit is None or streams.running[stream][1].time < limit:
            return False
        streams.dropped[stream] = streams.running.pop(stream)
        return True

    def _release_late(self, streams: _Streams) -> bool:
        """Let the launches of late devices begin: the others have executed enough, or only spin."""
        running = [launch for _, launch in streams.running.values()]
        if not streams.late or not all(launch.scheduler.stuck for launch in running):
            executed = streams.executed()
            due = {d for d in streams.late if (after := self.faults[d].after) is not None and executed >= after}
        else:
            due = set(streams.late)
        streams.late -= due
        return bool(due)

    def _absent(self, streams: _Streams) -> list[str]:
        """List the devices on which nothing runs, for the report of a deadlock; and the injected faults."""
        lines = ["  " + fault.describe(device) for device, fault in self.faults.items()]
        busy = {device for device, _ in streams.running} | set(self.faults)
        group = {item.device.index: item.device for item, _ in streams.running.values()}
        for device in next(iter(group.values())).group if group else ():
            if device.index not in busy:
                lines.append(f"  device {device.index}: nothing runs, {len(device.launches)} launches have ended")
        return lines

    def _finish(self, streams: _Streams, stream: Stream) -> None:
        item, launch = streams.running[stream]
        result = launch.end()
        streams.ran += launch.time
        if isinstance(launch.race, Detector):
            streams.known[stream] = launch.race.far.ended()
        del streams.running[stream]
        _leave(item.device, launch)
        if launch.trace is not None:
            result.trace = item.device.trace
        item.device.ran(item.request, result)

    def _add(self, device: DeviceView, stream: int, item: _Queued) -> None:
        self._streams.queues.setdefault((device.index, stream), deque()).append(item)

    def _begin(self, streams: _Streams) -> bool:
        """Start what is at the head of its stream; pass events. False if nothing runs then."""
        moved = True
        while moved:
            moved = False
            for stream, queue in streams.queues.items():
                while queue and stream not in streams.running and stream not in streams.dropped:
                    item = queue[0]
                    late = item.request is not None and stream[0] in streams.late
                    if late or item.wait is not None and not item.wait.reached:
                        break
                    queue.popleft()
                    moved = True
                    self._enter(streams, stream, item)
            if not moved and not streams.running and streams.late:
                streams.late, moved = set(), True
        return bool(streams.running)

    def _enter(self, streams: _Streams, stream: Stream, item: _Queued) -> None:
        """Pass an event, or begin a launch."""
        known = streams.known.setdefault(stream, Known())
        fault = self.faults.get(stream[0])
        if item.record is not None:
            item.record.reached, item.record.known = True, known.copy()
        elif item.wait is not None:
            known.add(item.wait.known)
        elif item.request is not None and (fault is None or fault.kind != EMPTY):
            launch = machine.prepare(item.request, item.device, streams.launches, known)
            streams.running[stream] = item, launch
            launch.begin()


def _leave(device: DeviceView, launch: machine.Machine) -> None:
    """A launch is over, or given up."""
    launch.close()
    if launch.trace is not None:
        device.trace = launch.trace.finish()


def _explain(error: EmulatorError, running: list[machine.Machine]) -> None:
    """Add what the checks had reported on the device of an error first, then on the others."""
    at = error.place.device if error.place is not None else None
    for launch in sorted(running, key=lambda m: m.device != at):
        found = error.hazards
        launch.explain(error)
        error.hazards = [*found, *error.hazards]


# --- which launch runs next ------------------------------------------------------------------------------------------


def _in_turn(streams: _Streams, rng: random.Random) -> Iterator[Stream]:
    while True:
        yield from [s for s in list(streams.running) if s in streams.running]


def _one_first(streams: _Streams, pick: Any) -> Iterator[Stream]:
    """The launch that ``pick`` chooses runs until it makes no progress; then another one gets its chance."""
    worn: dict[Stream, int] = {}
    while True:
        fresh = min(worn.get(s, 0) for s in streams.running)
        stream = pick([s for s in sorted(streams.running) if worn.get(s, 0) == fresh])
        yield stream
        while stream in streams.running and not streams.running[stream][1].scheduler.spins:
            yield stream
        worn[stream] = worn.get(stream, 0) + 1
        for _ in range(_BURST):  # it may wait for any of the others
            for other in sorted(streams.running):
                if other != stream and other in streams.running:
                    yield other
        if not streams.running:
            return


def _oldest(streams: _Streams, rng: random.Random) -> Iterator[Stream]:
    return _one_first(streams, lambda found: found[0])


def _newest(streams: _Streams, rng: random.Random) -> Iterator[Stream]:
    return _one_first(streams, lambda found: found[-1])


def _any(streams: _Streams, rng: random.Random) -> Iterator[Stream]:
    while True:
        yield rng.choice(sorted(streams.running))


def _skewed(streams: _Streams, rng: random.Random) -> Iterator[Stream]:
    """One launch for a long while, then another."""
    while True:
        stream = rng.choice(sorted(streams.running))
        for _ in range(rng.choice((1, 8, 512))):
            if stream not in streams.running:
                break
            yield stream


_ORDERS = {
    "round_robin": _in_turn,
    "oldest_first": _oldest,
    "newest_first": _newest,
    "random": _any,
    "adversarial": _skewed,
}
