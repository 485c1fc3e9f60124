"""The top-k kernel in CUDA C++: the oracle's picks to the last tie, by every check that the DSL's kernel passes."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.layers.step import rows_of
from dsv4lib.ops.common import cpp as cpp_cache
from dsv4lib.ops.topk import cpp
from dsv4lib.ops.topk.op import Call, Paged, topk
from dsv4lib.reference.topk import topk as reference
from tests.budget import small
from tests.emulated import emulated, observed
from tests.ops.topk.test_kernel import SCHEDULES, SIZE, expected, full, kinds

ARCHS = ("sm_100a", "sm_90a")


def call_of(scores, lengths, picks):
    return Call(scores, lengths, picks, None, None, 0, False, "emulator")


def run(arch, scores, lengths, k, **device):
    """Picks of a launch without hazards."""
    picks = torch.full((len(scores), k), -7, dtype=torch.int32)
    with emulated(arch, **device):
        cpp.run(call_of(scores, lengths, picks))
    return picks


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize(("by_score", "page"), [(False, 0), (True, 0), (False, 64)])
def test_budget(arch, by_score, page):
    code = cpp_cache.compiled(cpp.kernel(SIZE, by_score, page), arch)
    assert code.local_bytes == 0 and small(code) and code.registers <= 64, code


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_of_every_kind(arch):
    rows = kinds(500)
    scores = torch.stack(list(rows.values()))
    lengths = full(scores)
    lengths[0] -= 1
    for k in (1, 130):
        want, found = expected(scores, lengths, k), run(arch, scores, lengths, k)
        wrong = [name for name, a, b in zip(rows, found, want, strict=True) if not torch.equal(a, b)]
        assert not wrong, (k, wrong)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("k", [1, 192, 2048])
def test_lengths_around_k(arch, k):
    """Rows of all lengths from none to all, of scores of which many are equal; more than L means L."""
    scores = (torch.randn(7, SIZE, generator=torch.Generator().manual_seed(k)) * 20).round()
    lengths = torch.tensor([-3, 1, k - 1, k, k + 1, SIZE - 3, SIZE + 5]).int()
    scores[torch.arange(SIZE) >= lengths.clamp(0, SIZE)[:, None]] = torch.nan  # is not read, or does not count
    want = expected(scores.nan_to_num(0), lengths.clamp(0, SIZE), k)
    assert torch.equal(run(arch, scores, lengths, k), want)


def test_rows_that_lie_apart_and_start_anywhere():
    storage = torch.full((3, 1300), torch.nan)
    scores = storage[:, 1:1224]
    scores.copy_(torch.stack([x[:1223] for x in list(kinds().values())[:3]]))
    assert torch.equal(run("sm_90a", scores, None, 100), expected(scores, full(scores), 100))


def test_nan_ranks_behind_everything():
    scores = torch.stack([kinds(300)["normal"]] * 2)
    scores[0, ::3] = torch.nan
    scores[1, 200:], scores[1, 5:190] = -torch.nan, -torch.inf
    found = run("sm_100a", scores, None, 250)
    assert torch.equal(found[:1], expected(torch.where(scores.isnan(), -torch.inf, scores), full(scores), 250)[:1])
    assert torch.equal(found[1], torch.arange(250).int())


def test_all_schedules_give_the_same_bits():
    scores = torch.stack([kinds(300)[name] for name in ("normal", "three values", "one octave")])
    for schedule in SCHEDULES:
        found = run("sm_100a", scores, None, 150, schedule=schedule, seed=3)
        assert torch.equal(found, expected(scores, full(scores), 150)), schedule


@pytest.mark.parametrize("by_score", [False, True])
def test_as_the_op_has_it(by_score):
    scores = torch.stack([kinds(700)[name] for name in ("normal", "equal", "three values")])
    lengths = torch.tensor([700, 300, 41], dtype=torch.int32)
    for given in (lengths, None):
        found = cpp.topk(scores, 50, given, by_score=by_score, backend="emulator")
        assert torch.equal(found, topk(scores, 50, given, by_score=by_score, backend="reference"))
    if by_score:
        assert torch.equal(found, reference(scores, 50).int())


@pytest.mark.parametrize(("k", "size"), [(50, 64), (700, 100), (9, 1)])
def test_rows_of_pages(k, size):
    generator = torch.Generator().manual_seed(0)
    scores = (torch.randn(3, 700, generator=generator) * 30).round()
    lengths = torch.tensor([700, 300, 41], dtype=torch.int32)
    table = torch.randperm(3 * 700, generator=generator).int().view(3, 700)[:, : -(-700 // size)].contiguous()
    table[1, 1], requests = -4, torch.tensor([2, 1, 0], dtype=torch.int32)
    for pages in (Paged(table, requests, size), Paged(table[:, :2].contiguous(), requests.clamp(max=1) - 1, size)):
        found = cpp.topk(scores, k, lengths, pages=pages, backend="emulator")
        picks = topk(scores, k, lengths, backend="reference")
        held = torch.where(picks < size * pages.table.shape[1], picks, -1)
        assert torch.equal(found, rows_of(pages.table, pages.requests, held, size))


SEEN = {
    "no_barrier": {"race_shared", "uninitialised_smem"},
    "ties_anyhow": {"race_global"},
}  # by the checks; the others by the picks


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", cpp.FAULTS)
def test_faults_are_found(fault):
    rows = kinds(300)
    scores = torch.stack([rows["zeros of either sign"], rows["three values"], rows["normal"], rows["normal"]])
    scores[2, 7] = torch.nan
    lengths = torch.tensor([300, 300, 300, 20], dtype=torch.int32)
    scores[3, 20] = 1e9
    ranked = torch.where(scores.isnan(), -torch.inf, scores)
    for faults in ((), (cpp.FAULTS[fault],)):
        picks = torch.full((4, 2000), -7, dtype=torch.int32)[:, :75]
        with observed("sm_100a") as seen:
            cpp.run(call_of(scores, lengths, picks), *faults)
        wrong = not torch.equal(picks, expected(ranked, lengths, 75))
        assert (wrong or bool(seen)) == bool(faults)
        assert seen == (SEEN.get(fault, set()) if faults else set())


def test_bad_arguments_are_named():
    scores, lengths = torch.randn(3, 100), torch.tensor([1, 2, 3])
    for call, name in (
        (lambda: cpp.topk(scores, 0), "k"),
        (lambda: cpp.topk(scores[0], 5), "scores"),
        (lambda: cpp.topk(scores.double(), 5), "scores"),
        (lambda: cpp.topk(scores, 5, lengths), "lengths"),
        (lambda: cpp.topk(scores, 5, backend="reference"), "backend"),
        (lambda: cpp.topk(scores.T[:3], 5, backend="emulator"), "scores.stride"),
        (lambda: cpp.topk(scores, 5, out=torch.zeros(3, 4).int()), "out.shape"),
        (lambda: cpp.topk(scores, 5, pages=Paged(torch.zeros(2, 3).int(), torch.full((3,), 2).int(), 64)), "requests"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()
