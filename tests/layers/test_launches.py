"""What a step of the trained nano model launches: one kernel a call of an op, counted by op."""

from collections import Counter

import pytest
import torch

from dsv4lib.ops.common import plans
from dsv4lib.pages.full_model import run_case


@pytest.fixture(scope="module")
def nano():
    return run_case.model(run_case.listed(), "reference", mtp=True)


def calls_of(step, monkeypatch):
    """Calls of each op while ``step`` runs."""
    calls, call = Counter(), plans.Op.__call__

    def counted(self, *fields):
        calls[self._name] += 1
        return call(self, *fields)

    monkeypatch.setattr(plans.Op, "__call__", counted)
    step()
    monkeypatch.undo()
    return calls


@torch.no_grad()
def test_a_step(nano, monkeypatch):
    """Only routed experts, which gather rows, have a launch of `quantize`; a launch before every FP8 layer would be 12.

    Of 89 kernels (and two of PyTorch's for embedding and streams) 82 are left.
    """
    nano([[1, 2, 3]], [0], [0])
    calls = calls_of(lambda: nano.hidden(nano.step([[4]], [0], [3])), monkeypatch)
    layers = len(nano.layers)
    assert calls["quantize"] == layers == 4
    assert calls["embedding"] == 1 and calls["mhc_site"] == 2 * layers + 1
    assert sum(calls.values()) == 82, calls


@torch.no_grad()
def test_a_chunk(nano, monkeypatch):
    """A prefill fills windows as it makes queries: one pass over q and KV a layer, and no other."""
    calls = calls_of(lambda: nano.hidden(nano.step([list(range(20))], [0], [0])), monkeypatch)
    assert calls["qnorm_rope_kv"] == len(nano.layers) and not calls["kv_append"] and not calls["quantize_kv_entries"]
    assert sum(calls.values()) == 82, calls


@torch.no_grad()
def test_a_draft(nano, monkeypatch):
    """The projections of streams and embedding read what their norms quantised."""
    _, streams = nano.hidden(nano.step([[1, 2]], [0], [0]), keep_streams=True)
    calls = calls_of(lambda: nano.draft(streams, nano.step([[2, 3]], [0], [0])), monkeypatch)
    assert calls["rmsnorm_quant"] == 2 and calls["quantize"] == 1 and calls["embedding"] == 1
