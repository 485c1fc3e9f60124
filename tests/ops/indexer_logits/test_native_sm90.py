"""The indexer's scores on a Hopper: fp64, the emulator's numbers, a CUDA graph that reads new lengths."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.ops.indexer_logits.inputs import case
from dsv4lib.ops.indexer_logits.op import KeyPages, Visible, indexer_logits
from dsv4lib.ops.indexer_q.op import IndexerQueries
from tests.ops.indexer_logits.test_sm90 import ARCH, BOUNDS, EMPTY, KERNELS, RUNS

NATIVE = backends.status("native", ARCH)
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]


def on_gpu(made):
    """The call's tensors on the GPU."""
    (codes, scales, weights), (pages, page_size) = made.queries, made.keys
    queries = IndexerQueries(codes.cuda(), scales if scales is None else scales.cuda(), weights.cuda())
    return queries, KeyPages(pages.cuda(), page_size), Visible(*(t.cuda() for t in made.visible))


def made_for(name, variant="fp8"):
    heads, page_size, _, *rows = RUNS[name]
    return case(variant, *rows, heads=heads, page_size=page_size)


@pytest.mark.parametrize("variant", KERNELS)
@pytest.mark.parametrize("name", RUNS)
def test_numbers(name, variant):
    """Against fp64, and the emulator's to a rounding; nothing else is written; the same bits again."""
    made, found = made_for(name, variant), []
    for _ in range(2):
        out = torch.full((len(made.visible.requests), made.keys_of.shape[1] + 3), EMPTY, device="cuda")
        indexer_logits(*on_gpu(made), out=out, backend="native")
        found.append(out.cpu())
    assert torch.equal(*found) and (found[0][~made.written(found[0].shape[1])] == EMPTY).all()
    assert made.error(found[0]) <= BOUNDS[variant]


@pytest.mark.parametrize("variant", KERNELS)
def test_many_keys(variant):
    """Both sizes of a model: more tiles than CTAs."""
    for heads, tokens in ((64, 3), (128, 2)):
        made = case(variant, list(range(tokens)), [9000 - 7 * i for i in range(tokens)], heads=heads)
        out = torch.full((tokens, made.keys_of.shape[1]), EMPTY, device="cuda")
        indexer_logits(*on_gpu(made), out=out, backend="native")
        assert made.error(out.cpu()) <= BOUNDS[variant] and (out.cpu()[~made.written(out.shape[1])] == EMPTY).all()


def test_a_graph_reads_new_lengths():
    made = made_for("decode")
    queries, keys, visible = on_gpu(made)
    out = torch.full((3, made.keys_of.shape[1]), EMPTY, device="cuda")
    for _ in range(3):
        indexer_logits(queries, keys, visible, out=out, backend="native")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indexer_logits(queries, keys, visible, out=out, backend="native")
    want = out.clone()
    visible.lengths.copy_(torch.tensor([17, 0, 128]))
    out.fill_(EMPTY)
    graph.replay()
    left = torch.arange(out.shape[1], device="cuda") < visible.lengths[:, None]
    assert torch.equal(out[left], want[left]) and (out[~left] == EMPTY).all()
