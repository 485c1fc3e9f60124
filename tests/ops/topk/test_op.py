"""`topk` as PyTorch sees it: back ends, schema, fake, torch.compile, bad arguments, settings for every size."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.emulator.machine import machine
from dsv4lib.emulator.machine.request import check_shape
from dsv4lib.errors import ArgumentError
from dsv4lib.layers.step import rows_of
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.topk.cluster import ClusterTopK
from dsv4lib.ops.topk.kernel import TopK
from dsv4lib.ops.topk.op import MAX_K, MAX_LENGTH, Paged, plan, topk

GENERATOR = torch.Generator().manual_seed(0)
SCORES = (torch.randn(3, 700, generator=GENERATOR) * 30).round()  # ties
LENGTHS = torch.tensor([700, 300, 41], dtype=torch.int32)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("by_score", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_both_back_ends(by_score, ragged):
    given = SCORES, 50, LENGTHS if ragged else None
    found = topk(*given, by_score=by_score, backend="emulator")
    assert torch.equal(found, topk(*given, by_score=by_score, backend="reference")) and found.dtype == torch.int32


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("k", "size"), [(50, 64), (20, 32), (700, 100), (9, 1)])
def test_rows_of_pages(k, size):
    """Looked up where the picks are made: a request without pages, a negative page, one past the table."""
    table = torch.randperm(3 * 700, generator=GENERATOR).int().view(3, 700)[:, : -(-700 // size)].contiguous()
    table[1, 1], requests = -4, torch.tensor([2, 1, 0], dtype=torch.int32)
    for pages in (Paged(table, requests, size), Paged(table[:, :2].contiguous(), requests.clamp(max=1) - 1, size)):
        found = topk(SCORES, k, LENGTHS, pages=pages, backend="emulator")
        picks = topk(SCORES, k, LENGTHS, backend="reference")
        held = torch.where(picks < size * pages.table.shape[1], picks, -1)
        want = rows_of(pages.table, pages.requests, held, size)
        by_reference = topk(SCORES, k, LENGTHS, pages=pages, backend="reference")
        assert torch.equal(found, want) and torch.equal(by_reference, want)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"page_size": 0}, "pages.page_size"),
        ({"table": torch.zeros(2, 0, dtype=torch.int32)}, "pages.table.shape"),
        ({"table": torch.zeros(2, 5)}, "pages.table"),
        ({"requests": torch.zeros(2, dtype=torch.int32)}, "pages.requests"),
        ({"requests": torch.tensor([0, 1, 2], dtype=torch.int32)}, "pages.requests"),
    ],
)
def test_pages_that_are_refused(change, name):
    good = Paged(torch.zeros(2, 11, dtype=torch.int32), torch.zeros(3, dtype=torch.int32), 64)
    with pytest.raises(ArgumentError) as caught:
        topk(SCORES, 5, pages=good._replace(**change), backend="reference")
    assert caught.value.name.startswith(name)
    with pytest.raises(ArgumentError, match="by_score"):
        topk(SCORES, 5, pages=good, by_score=True, backend="reference")


def test_rows_of_a_larger_tensor_into_the_callers_memory():
    """Rows on 4 bytes; lengths beyond either end mean all and none."""
    lengths, out = torch.tensor([705, -1, 699], dtype=torch.int32), torch.zeros(3, 192, dtype=torch.int32)
    rows = SCORES[:, 1:]
    assert topk(rows, 192, lengths, out=out, backend="emulator") is out
    assert torch.equal(out, topk(rows, 192, lengths, backend="reference")) and bool((out[1] == -1).all())
    assert topk(SCORES[:0], 5, backend="emulator").shape == (0, 5)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("k", [3, 5, 2000])
def test_many_rows(k, monkeypatch):
    """More than a grid has along its second axis, of rows that are picked whole and of others: the launch is taken."""

    class Taken(Exception):
        """It would run now."""

    def check(request, smem_bytes):
        check_shape(request, smem_bytes)
        assert request.grid[0] == 66_000
        raise Taken

    monkeypatch.setattr(machine, "check_shape", check)
    with pytest.raises(Taken):
        topk(torch.zeros(66_000, 4), k, backend="emulator")


def test_schema_and_fake():
    picks = torch.empty(3, 50, dtype=torch.int32)
    given = SCORES, LENGTHS, picks, None, None, 0, False, "reference"
    result = torch.library.opcheck(torch.ops.dsv4.topk.default, given)
    assert set(result.values()) == {"SUCCESS"}, result
    before = compile_cache.default().counts.compiled
    with FakeTensorMode():
        assert topk(torch.empty(128, 262144), 2048, torch.empty(128, dtype=torch.int32)).shape == (128, 2048)
    assert compile_cache.default().counts.compiled == before


def test_torch_compile_takes_it_whole():
    def layer(x, lengths):
        return topk(x * 0.5, 50, lengths, backend="emulator") + 1

    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(SCORES, LENGTHS), layer(SCORES, LENGTHS))


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 128, 4096])
def test_settings_take_every_size(rows):
    for size in (1, 1024, 1025, 2048, 4096, 8192, 8193, 32768, 32769, 262144, 262145, MAX_LENGTH):
        for k in (1, 512, 1024, MAX_K):
            settings = plan(rows, size, k)
            kernel = (ClusterTopK if settings.get("ctas", 1) > 1 else TopK)(**settings)
            assert size <= kernel.ctas * kernel.capacity
            assert 4 * sum(kernel.buffers.values()) <= 227 << 10


@pytest.mark.parametrize("by_score", [False, True])
def test_a_row_of_a_cluster(by_score):
    """Settings as the op has them: a cluster of 8 CTAs a row."""
    scores, lengths = torch.randn(2, 4100, generator=GENERATOR), torch.tensor([4100, 700], dtype=torch.int32)
    found = topk(scores, 512, lengths, by_score=by_score, backend="emulator")
    assert torch.equal(found, topk(scores, 512, lengths, by_score=by_score, backend="reference"))


def test_bad_arguments_are_named():
    for given, changed, name in (
        ((SCORES[0], 5), {}, "scores"),
        ((SCORES.double(), 5), {}, "scores"),
        ((torch.empty(1, MAX_LENGTH + 1), 5), {}, "scores.shape"),
        ((SCORES, 0), {}, "k"),
        ((SCORES, 5.0), {}, "k=5.0"),
        ((SCORES, "5"), {}, "k='5'"),
        ((SCORES, True), {}, "k=True"),
        ((SCORES, 5, [700, 300, 41]), {}, "lengths"),
        ((SCORES, 5, LENGTHS[:, None]), {}, "lengths"),
        ((SCORES[:, :0], 5), {}, "scores.shape"),
        ((SCORES[:1].expand(3, 700), 5), {}, "scores.stride"),
        ((SCORES, 5), {"out": [1]}, "out"),
        ((SCORES, 5), {"out": torch.zeros(3, 10).int()[:, ::2]}, r"out.stride"),
        ((SCORES, MAX_K + 1), {}, "k"),
        ((SCORES, 5, LENGTHS.long()), {}, "lengths"),
        ((SCORES, 5, LENGTHS[1:]), {}, "lengths"),
        ((SCORES, 5), {"out": torch.empty(3, 6).int()}, "out.shape"),
        ((SCORES, 5), {"out": torch.empty(3, 5)}, "out"),
        ((SCORES.T.contiguous().T, 5), {}, "scores.stride"),
        ((SCORES * torch.nan, 5), {"backend": "reference"}, "scores"),
        ((SCORES, 5), {"backend": "magic"}, "backend"),
    ):
        with pytest.raises(ArgumentError, match=name):
            topk(*given, **{"backend": "emulator", **changed})
