"""Time calls on a GPU. With a cold L2 by the GPU's own record of its kernels, and as nodes of a CUDA graph.

Cold, one call after the other, all providers alternating in one profiler session:

    flush (in place, over more than L2)  |  spin  |  the call's kernels      |  flush  |  spin  | ...
                                                  ^---- the time of it ----^

The spin kernel lets the host run ahead, so that no kernel waits to be queued; its length follows from the host time
of the call under the profiler, where our ops go through torch's dispatcher and take the host some 20 times as long. The
time is from the start of the call's first kernel to the end of its last one (copies and memsets
count). Warm: a CUDA graph of `NODES` calls, replayed between two events. Host: the caller's time to queue `BURST` calls
in a row after a kernel that spins, so that none waits for the GPU or for room in its queue; a call's share of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dsv4lib.errors import DSV4Error

FLUSH_BYTES = 384 << 20
ROUNDS = 21  # cold calls of a provider; fewer where they take longer than SECONDS, never under FEWEST
FEWEST = 5
SECONDS = 0.5  # of a provider
NODES = 20  # calls in a graph
REPLAYS = 9
BURST = 64  # calls queued in a row: fewer kernels than a stream's queue holds
BURSTS = 15
KINDS = [torch.profiler.ProfilerActivity.CUDA]
SPIN = "spin_kernel"  # what torch calls it
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # activities that count
METHOD = (
    f"us: cold L2 ({FLUSH_BYTES >> 20} MiB in place before each call), median of {ROUNDS} calls (fewer if over "
    f"{SECONDS} s), providers alternate, first start to last end by CUPTI; warm_us: graph of {NODES} calls, median of "
    f"{REPLAYS} replays; host_us: of the caller, a call of {BURST} queued in a row, median of {BURSTS}"
)

Call = Callable[[], None]


class TimingError(DSV4Error, RuntimeError):
    """A call cannot be timed. The profiler lost kernels, the call launches none, or a graph cannot hold it."""


class Cold(NamedTuple):
    """Times of one provider, in us, one a call."""

    us: tuple[float, ...]
    kernels: int  # of a call, copies and memsets among them

    @property
    def median(self) -> float:
        """Return the median in us."""
        return statistics.median(self.us)


class Work(NamedTuple):
    """One piece of work that the GPU did."""

    name: str
    start: int  # ns
    end: int


def works_of(session: torch.profiler.profile) -> list[Work]:
    """Return all that the GPU did in a profiler's session."""
    events = session.profiler.kineto_results.events()
    return [Work(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if _is_work(e)]


def rounds_of(count: int, rounds: int) -> list[list[int]]:
    """Order the calls. Each round has every provider once, odd rounds in reverse, the first one shifted."""
    order = []
    for i in range(rounds):
        shifted = [(i // 2 + j) % count for j in range(count)]
        order.append(shifted[::-1] if i % 2 else shifted)
    return order


def split(works: Sequence[Work]) -> list[list[Work]]:
    """Return the works of each call. They are what is between a spin and the flush before the next one.

    Raises:
        TimingError: a call without any work.
    """
    spins = [i for i, work in enumerate(works) if SPIN in work.name]
    calls = [list(works[a + 1 : b - 1]) for a, b in zip(spins, spins[1:], strict=False)]
    if not all(calls):
        raise TimingError("a call launches no work on the GPU")
    return calls


def by_way(works: Sequence[Work], order: Sequence[Sequence[int]]) -> list[Cold]:
    """Return the times of every provider from what one session recorded. A flush and a spin come last.

    Raises:
        TimingError: the record has another number of calls than were made.
    """
    calls = split(sorted(works, key=lambda work: work.start))
    flat = [provider for one in order for provider in one]
    if len(calls) != len(flat):
        raise TimingError(f"the profiler saw {len(calls)} of {len(flat)} calls")
    found: list[list[list[Work]]] = [[] for _ in order[0]]
    for provider, call in zip(flat, calls, strict=True):
        found[provider].append(call)
    return [
        Cold(
            tuple((max(w.end for w in call) - call[0].start) / 1e3 for call in calls),
            statistics.mode(len(call) for call in calls),
        )
        for calls in found
    ]


@dataclass
class GpuClock:
    """Times calls on the current device; it holds the memory that flushes L2."""

    def __post_init__(self) -> None:
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        size = max(FLUSH_BYTES, 4 * facts.L2_cache_size)
        self._room = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
        for _ in range(200):  # the clocks of an idle GPU are low
            self._room.add_(1)
        self._cycles = 1e7 / self._device_us(lambda: torch.cuda._sleep(10_000_000))  # of a us
        self._flush_us = self._device_us(lambda: self._room.add_(1))

    def cold(self, calls: Sequence[Call]) -> list[Cold]:
        """Time each call with a cold L2, alternating between calls.

        Raises:
            TimingError: twice the profiler lost kernels, or a call launches none.
        """
        for call in calls:
            call()  # what it makes once is no part of its host time
        with torch.profiler.profile(activities=KINDS):
            hosts = [self._host_us(call) for call in calls]
        device = [self._device_us(call) for call in calls]
        spins = [10 + 1.5 * host for host in hosts]
        whole = sum(device) + sum(spins) + len(calls) * self._flush_us
        rounds = max(FEWEST, min(ROUNDS, int(SECONDS * 1e6 * len(calls) / whole)))
        order = rounds_of(len(calls), rounds)
        for again in (True, False):
            works = self._session(calls, spins, order)
            try:
                return by_way(works, order)
            except TimingError:
                if not again:
                    raise
        raise AssertionError

    def warm(self, calls: Sequence[Call]) -> list[float | str]:
        """Time each call as a node of a graph. us, median of alternating replays, or why it cannot be captured."""
        graphs: list[torch.cuda.CUDAGraph | str] = [self._capture(call) for call in calls]
        times: list[list[float]] = [[] for _ in calls]
        for order in rounds_of(len(calls), REPLAYS + 1):
            for provider in order:
                graph = graphs[provider]
                if isinstance(graph, str):
                    continue
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(int(60 * self._cycles))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[provider].append(start.elapsed_time(end) * 1e3 / NODES)
        return [g if isinstance(g, str) else statistics.median(t[1:]) for g, t in zip(graphs, times, strict=True)]

    def host(self, calls: Sequence[Call]) -> list[float]:
        """Time the caller's thread queueing one more call of each. us, no graph, median of alternating bursts."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        times: list[list[float]] = [[] for _ in calls]
        for order in rounds_of(len(calls), BURSTS):
            for provider in order:
                torch.cuda._sleep(int(20 * self._cycles))
                start = time.perf_counter()
                for _ in range(BURST):
                    calls[provider]()
                times[provider].append((time.perf_counter() - start) / BURST * 1e6)
                torch.cuda.synchronize()
        return [statistics.median(one) for one in times]

    def _session(self, calls: Sequence[Call], spins: Sequence[float], order: Sequence[Sequence[int]]) -> list[Work]:
        """All that the GPU did for cold calls in this order."""
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=KINDS, acc_events=True) as session:
            for provider in (provider for one in order for provider in one):
                self._flush(spins[provider])
                calls[provider]()
            self._flush(1)
            torch.cuda.synchronize()
        return works_of(session)

    def _flush(self, spin: float) -> None:
        self._room.add_(1)
        torch.cuda._sleep(int(spin * self._cycles))

    def _capture(self, call: Call) -> torch.cuda.CUDAGraph | str:
        """A graph of `NODES` calls, or why there is none."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):  # what a stream's first call allocates is no part of the graph
                call()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(NODES):
                    call()
            graph.replay()
            torch.cuda.synchronize()
        except Exception as error:  # a peer's own, of any kind
            torch.cuda.synchronize()
            return first_line(error)
        return graph

    def _host_us(self, call: Call) -> float:
        """Of queueing a call."""
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(3):
            call()
        passed = time.perf_counter() - start
        torch.cuda.synchronize()
        return passed / 3 * 1e6

    def _device_us(self, call: Call) -> float:
        """Of a call, roughly: the least of three, between events."""
        found = []
        for _ in range(3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) * 1e3)
        return min(found)


def _is_work(event: object) -> bool:
    """Whether the GPU worked, by the activity's kind, or, in a torch without that field, by the device."""
    if hasattr(event, "activity_type"):
        return event.activity_type() in WORK
    on_gpu = event.device_type() == torch.autograd.DeviceType.CUDA
    return on_gpu and event.duration_ns() > 0 and "Sync" not in event.name()


def first_line(error: BaseException) -> str:
    """Return what an error says, in one line of at most 160 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
