"""The cache on a GPU: tables filled while the device is busy, a graph that reads them, pages copied and swapped."""

import time

import caches
import pytest
import torch

from dsv4lib import backends
from dsv4lib.cache import Storage, Work, read_slots
from dsv4lib.cache.conformance import JUNK, ManagerAdapter, check_edges, check_hits, run_machine
from dsv4lib.cache.faults import inject
from dsv4lib.cache.tables import BUFFERS, Tables

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
CLOCKS = 400_000_000  # that the device is kept busy: some 0.2 s
STEPS = BUFFERS


def steps(adapter, count):
    """Begin ``count`` steps of one request after one another: a prompt of 7 tokens, then one token each."""
    adapter.add("a", [i % 3 + 1 for i in range(7)])
    for number in range(count):
        if number:
            adapter.append("a", [number % 3 + 1])
        step = adapter.manager.begin([Work("a", 1 if number else 7)])
        yield step
        adapter.manager.commit(step)


def filled_while_the_device_is_busy():
    """Tables of `STEPS` steps, each as kernels queued on a busy device read them; seconds that the host took."""
    adapter = caches.paged()
    made = Tables(adapter.manager, 2, 16, 32, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(CLOCKS)
    began, seen = time.perf_counter(), []
    for step in steps(adapter, STEPS):
        made.fill(step)
        seen.append(made.device.clone())
    taken = time.perf_counter() - began
    busy = not torch.cuda.current_stream().query()
    return [one.cpu() for one in seen], taken, busy


def expected():
    """The same on a CPU."""
    adapter = caches.paged()
    made = Tables(adapter.manager, 2, 16, 32)
    out = []
    for step in steps(adapter, STEPS):
        made.fill(step)
        out.append(made.device.clone())
    return out


def test_a_busy_device_reads_each_steps_own_tables_and_the_host_does_not_wait():
    seen, taken, busy = filled_while_the_device_is_busy()
    assert busy, f"the host waited for the device ({taken:.3f} s)"
    assert all(torch.equal(a, b) for a, b in zip(seen, expected(), strict=True))


def test_one_staging_buffer_is_found():
    with inject("one_staging_buffer"):
        seen, _, busy = filled_while_the_device_is_busy()
    assert busy and not all(torch.equal(a, b) for a, b in zip(seen, expected(), strict=True))


def test_a_graph_reads_the_tables_of_each_replay():
    adapter = caches.paged()
    made = Tables(adapter.manager, 2, 16, 32, device="cuda")
    group = adapter.groups["window"]
    values = torch.arange(16, dtype=torch.int32, device="cuda")[None].expand(16, -1).contiguous()

    def read():
        return read_slots(made["blocks.window"][0], made["request_ids"], values, group), made["slots.csa"] + 0

    read()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = read()
    seen = set()
    for step in steps(adapter, 6):
        made.fill(step)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, read(), strict=True))
        seen.add(tuple(out[1].flatten().tolist()))
    assert len(seen) > 3, "steps have slots of their own"


class OnGpu(ManagerAdapter):
    """The kit's words in the pool of a `Storage` on a GPU; swapped pages in its pinned memory."""

    def __init__(self, *args, **given):
        super().__init__(*args, **given)
        self.storage = Storage(self.manager, "cuda")
        assert self.storage.host.is_pinned()
        self.pages = self.storage.pages.view(torch.int64)
        for words in (self.pages, self.storage.host.view(torch.int64)):
            words.fill_(JUNK)

    def _copy(self, copies):
        self.storage.run(copies)


def on_gpu():
    made = caches.paged()
    return OnGpu(caches.FLASH_LIKE, made.manager.groups, 3, pages=140, page_bytes=160, host_pages=60)


@pytest.mark.parametrize("check", (check_edges, check_hits))
def test_hits_on_a_gpu_equal_recomputing(check):
    check(on_gpu)


def test_any_mixture_on_a_gpu_equals_recomputing():
    """Forks, preemptions by swap and by recomputing, evictions and rolled back drafts."""
    run_machine(on_gpu, runs=12, calls=30)


def test_a_swap_that_copies_nothing_is_found(monkeypatch):
    monkeypatch.setattr(Storage, "run", lambda self, copies: None)
    with pytest.raises(AssertionError):
        run_machine(on_gpu, runs=12, calls=30)
