"""`indexer_logits` as PyTorch sees it: back ends, its neighbours' outputs, schema, torch.compile, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.formats import indexer_key
from dsv4lib.ops.indexer_logits.inputs import case
from dsv4lib.ops.indexer_logits.op import KeyPages, Visible, indexer_logits, splits_of
from dsv4lib.ops.indexer_q.op import indexer_q
from dsv4lib.ops.quantize.op import quantize_indexer_keys
from dsv4lib.ops.topk.op import topk

BATCHES = {
    "decode": ([0, 1, 2], [70, 0, 130]),
    "drafts": ([0, 0, 0, 1, 1, 1], [63, 63, 64, 20, 20, 21]),
    "padded": ([1, -1, 0, -1], [64, 9, 65, -1]),
}


def new(made, value=7.0):
    return torch.full((len(made.visible.requests), made.keys_of.shape[1]), value)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("variant", ["fp8", "fp4"])
def test_both_back_ends(variant, name):
    made = case(variant, *BATCHES[name])
    for backend in ("emulator", "reference"):
        out = new(made)
        assert indexer_logits(*made[:3], out=out, backend=backend) is out
        assert (out[~made.written(out.shape[1])] == 7).all()
        assert made.error(out) <= 2 * made.torch_error() if backend == "emulator" else made.error(out) < 1e-7


@pytest.mark.parametrize("variant", ["fp8", "fp4"])
def test_between_its_neighbours(variant):
    """indexer_q and quantize_indexer_keys before it, topk after it, against the oracles of all four at once."""
    generator, heads, entries, k = torch.Generator().manual_seed(3), 64, 150, 24
    q = torch.randn(3, heads, 128, generator=generator).bfloat16()
    weights = torch.randn(3, heads, generator=generator).bfloat16()
    positions = torch.tensor([400, 599, 130])
    table = torch.randn(600, 64, generator=generator).clamp(-1, 1)
    raw = torch.randn(entries, 128, generator=generator).bfloat16()
    lengths = ((positions + 1) // 4).int()
    found = {}
    for backend in ("emulator", "reference"):
        queries = indexer_q(q, weights, positions, table, variant=variant, backend=backend)
        layout = {"fp8": indexer_key.FP8_LAYOUT, "fp4": indexer_key.FP4_LAYOUT}[variant]
        pages = layout.allocate(3, 64)
        if variant == "fp4":
            quantize_indexer_keys(raw, pages, 64, torch.arange(entries, dtype=torch.int32), True, backend)
        else:
            indexer_key.append(pages, 64, torch.arange(entries), raw, variant)
        visible = Visible(torch.arange(3, dtype=torch.int32)[None], torch.zeros(3, dtype=torch.int32), lengths)
        scores = indexer_logits(queries, KeyPages(pages, 64), visible, backend=backend)
        found[backend] = scores, topk(scores, k, lengths, backend=backend)
    (ours, ours_picked), (want, want_picked) = found["emulator"], found["reference"]
    counted = torch.arange(ours.shape[1]) < lengths[:, None]
    size = want[counted].abs().max()
    assert float((ours - want)[counted].abs().max() / size) < 1e-6
    assert torch.equal(ours_picked, want_picked)


def test_a_new_output_has_a_column_for_every_entry_of_the_table():
    made = case("fp8", [0, 1], [100, 3])
    assert indexer_logits(*made[:3], backend="reference").shape == (2, 128)


def test_nothing_to_do():
    made = case("fp8", [0], [0])
    out = new(made)
    for backend in ("emulator", "reference"):
        indexer_logits(*made[:3], out=out, backend=backend)
    assert (out == 7).all()


def test_schema_and_fake():
    made = case("fp4", [0, 1], [30, 64])
    flat = *made.queries, *made.keys, *made.visible
    out = new(made)
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.dsv4.indexer_logits, _in_order(flat, out), test_utils=tests)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in flat]
        queries, keys, visible = type(made.queries)(*fakes[:3]), KeyPages(*fakes[3:5]), Visible(*fakes[5:])
        assert indexer_logits(queries, keys, visible).shape == (2, 64)


def _in_order(flat, out):
    """Arguments as the schema lists them."""
    return *flat, out, "reference"


def test_splits_fill_the_gpu():
    assert splits_of(1, 128 * 500, 148) == 148
    assert splits_of(1, 300, 148) == 3
    assert splits_of(1000, 1 << 18, 148) == 1


def test_no_back_end_is_chosen_silently():
    made = case("fp8", [0], [5])
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(BackendUnavailable):
        indexer_logits(*made[:3], backend="native")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda q, k, v: (q._replace(codes=q.codes[:, :40]), k, v), "codes"),
        (lambda q, k, v: (q._replace(weights=q.weights.double()), k, v), "weights"),
        (lambda q, k, v: (q, k._replace(page_size=48), v), "page_size"),
        (lambda q, k, v: (q, k._replace(pages=k.pages[:, :-4]), v), "pages"),
        (lambda q, k, v: (q, k, v._replace(table=v.table.long())), "table"),
        (lambda q, k, v: (q, k, v._replace(requests=v.requests + 2)), "requests"),
        (lambda q, k, v: (q, k, v._replace(lengths=v.lengths + 999)), "lengths"),
        (lambda q, k, v: (q, k, v._replace(table=v.table + 99)), "table"),
        (lambda q, k, v: (q, k, v._replace(table=v.table[0])), "table"),
    ],
)
@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_bad_arguments_are_named(change, name, backend):
    made = case("fp8", [0, 1], [30, 64])
    with pytest.raises(ArgumentError, match=name):
        indexer_logits(*change(*made[:3]), backend=backend)
