"""What a model fixes so that a token's bits do not depend on how many others are in its step."""

from collections import defaultdict

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.layers.dense import HOPPER
from dsv4lib.loader.model import batch_invariance, transformer
from dsv4lib.ops.common import plans
from dsv4lib.ops.fmha import op as attention
from dsv4lib.ops.mhc import op as mhc
from dsv4lib.pages.full_model import run_case

FIXED = {"fmha": (attention.Call, "splits"), "mhc_site": (mhc.Call, "batch_invariant")}


def chosen(model, monkeypatch):
    """What a prefill and a draft say to ops that would choose by the number of tokens: values, by op."""
    said, call = defaultdict(list), plans.Op.__call__

    def heard(self, *fields):
        if self._name in FIXED:
            record, name = FIXED[self._name]
            said[self._name].append(fields[record._fields.index(name)])
        return call(self, *fields)

    monkeypatch.setattr(plans.Op, "__call__", heard)
    with torch.no_grad():
        _, streams = model.hidden(model.step([[1, 2, 3]], [0], [0]), keep_streams=True)
        model.draft(streams, model.step([[2, 3, 4]], [0], [0]))
    monkeypatch.undo()
    assert len(said["fmha"]) == len(model.layers) + 1 and len(said["mhc_site"]) == 2 * len(said["fmha"]) + 2
    return {name: set(values) for name, values in said.items()}


@pytest.mark.parametrize("wanted", [None, False])
def test_every_op_that_adds_in_another_order_for_other_steps_is_told(wanted, monkeypatch):
    """Attention of a decode step over long lists would split its keys, of a prefill not; mHC has two variants."""
    model = transformer(
        run_case.listed(), capacity=256, mtp=True, backend="reference", arch="sm_100a", batch_invariant=wanted
    )
    fast = wanted is False
    assert chosen(model, monkeypatch) == {"fmha": {0 if fast else 1}, "mhc_site": {not fast}}
    assert attention.choose_splits(1, 64, 512, 128, fp8=True).keys > attention.choose_splits(99, 64, 512, 128).keys == 1


def test_a_hopper_does_not_promise_it():
    assert batch_invariance(None, HOPPER) is False is batch_invariance(False, HOPPER)
    assert batch_invariance(None, "sm_100a") is True is batch_invariance(True, "sm_103a")
    with pytest.raises(ArgumentError, match="batch_invariant=True"):
        batch_invariance(True, HOPPER)
