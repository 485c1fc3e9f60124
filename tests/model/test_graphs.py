"""CUDA graphs of decode steps, captured by a fake on a CPU: what is static stays where it is, what changes is read."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.errors import BackendUnavailable
from dsv4lib.model import graphs
from dsv4lib.model.graphs import DecodeGraph
from dsv4lib.model.paged import PagedCaches
from dsv4lib.model.scheduler import Scheduler
from dsv4lib.ops.common.graph_capture import Captured
from tests.model.test_scheduler import model
from tests.model.test_transformer import GREEDY, ids
from tests.whole_model import listed, peer  # noqa: F401  fixtures

NATIVE = backends.status("native", "sm_100a")


class Fake:
    """Captures as a graph does: the callable with all that it closed over, and the addresses of what it reads."""

    def __init__(self, caches):
        self.caches, self.captured, self.replays = caches, [], []

    def addresses(self):
        """Of the tables, and of all pages."""
        return self.caches.tables.device.data_ptr(), self.caches.storage.pages.data_ptr()

    def __call__(self, run):
        pages, addresses, out = self.caches.storage.pages.clone(), self.addresses(), run()
        assert torch.equal(pages, self.caches.storage.pages), "captured on padding, which writes nothing"
        self.captured.append(len(out))

        def replay():
            assert self.addresses() == addresses, "a graph reads the addresses that it was captured with"
            self.replays.append(self.caches.tables["lengths"].tolist())
            out.copy_(run())

        return Captured(replay, out)


@pytest.fixture
def fake(listed, monkeypatch):  # noqa: F811
    """(model, caches, fake): the model claims a CUDA device where graphs look for one."""
    one = model(listed)
    caches = PagedCaches(one, requests=3, tokens=64, positions=512)
    fake = Fake(caches)
    monkeypatch.setattr(graphs, "capture", fake)
    monkeypatch.setattr(graphs, "on_cuda", lambda model: True)
    return one, caches, fake


def test_a_replay_is_the_eager_step_whatever_the_length(listed, fake):  # noqa: F811
    """Captured on padding; replayed for one request and for three, before and after windows of 4 and 128 close."""
    one, caches, fake = fake
    found, logits = {}, {}
    for graphed, at in ((True, caches), (False, None)):
        made = one if graphed else model(listed)
        at = at or PagedCaches(made, requests=3, tokens=64, positions=512)
        scheduler, seen, right = Scheduler(made, at, decode_sizes=[1, 3], graphs=graphed), [], made.head.forward
        made.head.forward = lambda x, right=right, seen=seen: (seen.append(x.clone()), right(x))[1]
        for name, count in (("long", 380), ("short", 2), ("closes", 125)):
            scheduler.add(name, ids(count, count), GREEDY, 8)
        found[graphed] = [tuple(token) for token in scheduler.run()]
        logits[graphed] = seen
    assert fake.captured == [1, 3] and found[True] == found[False]
    assert all(torch.equal(a, b) for a, b in zip(logits[True], logits[False], strict=True))
    lengths = [sorted(row) for row in fake.replays]
    assert any(row[-1] > 380 and row[0] > 0 for row in lengths) and any(row[0] == 0 for row in lengths)


def test_each_replay_writes_the_same_memory_and_reads_new_tables(fake):
    one, caches, fake = fake
    graph = DecodeGraph(one, caches, 3)
    scheduler = Scheduler(one, caches)
    scheduler.add("a", ids(5, 1), GREEDY, 9)
    scheduler.step()
    outs = []
    for _ in range(2):
        batch = scheduler.manager.begin(scheduler._works())
        hidden = graph.run(batch)
        outs.append((hidden.data_ptr(), hidden[0].clone(), hidden[1:].clone()))
        scheduler.manager.commit(batch)
        scheduler.manager.append("a", [7])
    assert outs[0][0] == outs[1][0] and not torch.equal(outs[0][1], outs[1][1])
    assert torch.equal(outs[0][2], outs[1][2])  # padding


def test_without_a_cuda_device_graphs_are_refused(listed):  # noqa: F811
    one = model(listed)
    caches = PagedCaches(one, requests=1, tokens=8, positions=64)
    with pytest.raises(BackendUnavailable, match="CUDA device"):
        Scheduler(one, caches, decode_sizes=[1], graphs=True)


@pytest.mark.sm100
@pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)
def test_a_graph_on_a_gpu_is_the_eager_step(listed):  # noqa: F811
    found = []
    for graphed in (False, True):
        made = model(listed, "native").to("cuda")
        caches = PagedCaches(made, requests=3, tokens=64, positions=512)
        scheduler = Scheduler(made, caches, decode_sizes=[1, 3], graphs=graphed)
        for name, count in (("long", 380), ("short", 2), ("closes", 125)):
            scheduler.add(name, ids(count, count), GREEDY, 8)
        found.append([tuple(token) for token in scheduler.run()])
    assert found[0] == found[1]
