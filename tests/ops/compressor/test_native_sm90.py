"""The compressor on a Hopper: the oracle's entries and states, the encoders' bits, CUDA graphs."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.ops.compressor.op import Batch, Pages, Ring, compressor
from tests.ops.compressor import cases

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
RAGGED = [5, 0, 1, 300, 3, 2, 129, 77], [0, 7, 3, 6, 0, 5, 1001, 1_048_400]
BATCHES = {
    "csa": (4, *RAGGED, {"drop": (1, 7)}),
    "csa decode": (4, [1] * 67, [*range(64), 1_048_571, -1, 1_048_575], {"single": True}),
    "csa many": (4, [3, 0, 2, 6] * 20, list(range(5, 85)), {}),
    "hca ring": (128, *RAGGED, {}),
    "hca ring decode": (128, [1] * 5, [0, 127, 1_048_575, 255, -1], {"single": True}),
    "hca ring decode many": (128, [1] * 40, [128 * i - 1 if i % 3 else i for i in range(40)], {"single": True}),
    "hca running": (128, *RAGGED, {"running": True}),
    "hca running decode": (128, [1] * 5, [0, 127, 1_048_575, 131, -1], {"running": True, "single": True}),
    "indexer": (4, *RAGGED, {"dim": 128}),
    "indexer decode": (4, [1] * 67, [*range(64), 1_048_571, -1, 1_048_575], {"dim": 128, "single": True}),
}
FORMS = {512: ("kv",), 128: ("fp4", "fp8")}


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name):
    """fp32 entries and the state against the oracle; every format against it with the released code's roundings."""
    rate, counts, starts, options = BATCHES[name]
    case = cases.make(rate, counts, starts, **options)
    there = case.to("cuda")
    found, slots = cases.verify(case, lambda form: cases.run(there, form, "native"))
    for form in FORMS[case.dim]:
        cases.verify_stored(case, form, cases.run(there, form, "native")[0])
    rows, _ = cases.run(there, "bf16", "native")
    assert torch.equal(rows.cpu()[slots.long()], found[slots.long()].bfloat16())


def test_rows_of_a_state_that_lie_apart():
    """k and z as views of one tensor: a copy a row instead of one of many, the same bits."""
    case = cases.make(128, [1] * 3, [127, 255, 9], single=True).to("cuda")
    pages, state = cases.run(case, "fp32", "native")
    views = Ring(*torch.stack(tuple(case.state), 2).unbind(2))
    out = Pages(torch.full_like(pages, 7.0), cases.PAGE, "fp32")
    compressor(*case[:2], case.weights, case.batch, views, out, eps=cases.EPS, backend="native")
    assert torch.equal(out.data, pages)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(views, state, strict=True))


def test_native_and_emulator_give_the_same_entries():
    """To the approximations of exp2, of a reciprocal and of its root."""
    case = cases.make(4, [9, 4], [6, 3])
    there, here = cases.run(case.to("cuda"), "fp32", "native"), cases.run(case, "fp32", "emulator")
    torch.testing.assert_close(there[0].cpu(), here[0], rtol=0, atol=2e-6 * float(here[0].abs().max()))


@pytest.mark.parametrize("running", [False, True])
def test_decode_in_a_cuda_graph_continues_a_prefill(running):
    """A step captured once, replayed with the next rows and positions in the same memory: entries as in one call."""
    rate, count, prefix = (128 if running else 4), 150, 9
    whole = cases.make(rate, [count], [0], running=running).to("cuda")
    pages, state = cases.run(whole, "fp32", "native")
    now, out = type(whole.state)(*(x.clone() for x in whole.state)), torch.full_like(pages, 7.0)
    plan, slots = whole.batch.requests.clone(), whole.batch.slots[:1].clone()
    kv, gate = whole.kv[:1].clone(), whole.gate[:1].clone()
    plan[0, 1] = prefix
    first = Batch(plan.clone(), whole.batch.slots[:prefix])
    to = Pages(out, 1, "fp32")
    compressor(whole.kv[:prefix], whole.gate[:prefix], whole.weights, first, now, to, eps=cases.EPS, backend="native")
    plan[0, 1] = 1

    def step():
        batch = Batch(plan, slots, single=True)
        compressor(kv, gate, whole.weights, batch, now, to, eps=cases.EPS, backend="native")

    plan[0, 2] = -1  # padding: compiles, changes nothing
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(prefix, count):
        kv.copy_(whole.kv[i : i + 1])
        gate.copy_(whole.gate[i : i + 1])
        slots.copy_(whole.batch.slots[i : i + 1])
        plan[0, 2] = i
        graph.replay()
    scale = float(pages[whole.batch.slots[whole.batch.slots >= 0].long()].abs().max())
    torch.testing.assert_close(out, pages, rtol=0, atol=(3e-6 if running else 0) * scale)
    for a, b in zip(now, state, strict=True):
        bound = 3e-6 * float(b.nan_to_num().abs().max()) if running else 0
        torch.testing.assert_close(a, b, rtol=0, atol=bound, equal_nan=True)
