"""Branches of a captured graph: which stream launches go to, and what waits for what."""

from contextlib import contextmanager

import pytest
import torch

from dsv4lib.ops.common.graph_capture import Beside, capture

DEVICE = torch.device("cuda", 0)


class Stream:
    """A stream that keeps a list of calls."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch):
    """Calls of streams while one is captured: functions of torch, replaced."""
    found, now = [], []
    now.append(Stream(found, "capture"))

    @contextmanager
    def inside(stream):
        now.append(stream)
        try:
            yield
        finally:
            now.pop()

    monkeypatch.setattr(Beside, "_streams", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(found, "branch"))
    monkeypatch.setattr(torch.cuda, "stream", inside)
    return found


@pytest.fixture
def launch(log):
    """A launch: where it is queued."""
    return lambda name: log.append(f"{name} on {torch.cuda.current_stream().name}")


def used(device, launch, **options):
    branch = Beside(device, **options)
    with branch:
        launch("f")
    launch("g")
    branch.join()
    launch("h")
    return branch.apart


BRANCHED = ["branch waits for capture", "f on branch", "g on capture", "capture waits for branch", "h on capture"]
IN_ORDER = ["f on capture", "g on capture", "h on capture"]


def test_a_branch_starts_after_what_was_queued_and_is_joined(log, launch):
    assert used(DEVICE, launch)
    assert used(DEVICE, launch)  # the same stream again
    assert log == 2 * BRANCHED and len(Beside._streams) == 1


def test_without_a_capture_launches_are_in_order(log, launch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not used(DEVICE, launch)
    assert log == IN_ORDER


@pytest.mark.parametrize(("device", "allowed"), [(torch.device("cpu"), True), (DEVICE, False)], ids=["CPU", "refused"])
def test_where_there_is_no_branch(device, allowed, log, launch):
    assert not used(device, launch, allowed=allowed)
    assert log == IN_ORDER


def test_an_error_leaves_the_branch(log, launch):
    branch = Beside(DEVICE)
    with pytest.raises(ValueError, match="f"), branch:
        raise ValueError("f")
    launch("g")
    assert log[-1] == "g on capture"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a capture needs a GPU")
def test_a_graph_with_a_branch_gives_the_same_numbers():
    x = torch.randn(1 << 16, device="cuda")

    def run():
        branch = Beside(x.device)
        with branch:
            y = x * 2
        z = x + 1
        branch.join()
        return y + z

    captured = capture(run)
    captured.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured.out, x * 2 + (x + 1))
