"""MLA decode on a Hopper: fp64, the same bits in every launch, the emulator's numbers, splits, CUDA graphs."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.ops.mla_decode import bench
from dsv4lib.ops.mla_decode.inputs import NOWHERE, case
from dsv4lib.ops.mla_decode.op import E4M3, SM_SCALE, mla_decode
from dsv4lib.ops.mla_decode.splits import mla_workspace_size
from tests.ops.mla_decode.hopper import errors, run, scales_of
from tests.ops.mla_decode.test_sm90 import LONG, RUNS, made

BF16, FP16 = torch.bfloat16, torch.float16
NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
SHAPES = {  # lengths, heads, page
    "mixed lengths": ([100, 5000, 200, 8000, 0], 128, 64),
    "long": ([40000], 16, 128),
    "many requests": ([511, 0, 64, -3] * 10, 16, 64),
    "odd": ([1023, 777, 1], 77, 16),
}


@pytest.mark.parametrize("name", [*RUNS, *LONG])
def test_numbers(name):
    outputs = []
    for _ in range(3):
        outcome = run(made(name), native=True)
        assert outcome.right, outcome.findings()
        outputs.append(outcome.out)
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


@pytest.mark.parametrize("tokens", [64, 128, 192, 1000])
def test_two_head_blocks(tokens):
    """One tile, a tile a stage, a stage used again, many."""
    outcome = run(case([tokens, tokens - 1], 128, 64), native=True)
    assert outcome.right, outcome.findings()


@pytest.mark.parametrize("splits", [2, 7])
def test_splits_combine_to_the_whole(splits):
    outcome = run(case([330, 0, 70], 5, 16, past=NOWHERE, spread=10.0), splits=splits, native=True)
    assert outcome.right, outcome.findings()


def test_native_and_emulator_agree():
    one = case([270], 70, 64, seed=3)
    found = [run(one, native=native).out.cpu().double() for native in (False, True)]
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-3


@pytest.mark.parametrize("splits", [-1, 1, 3, 64])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, BF16), (FP16, FP16), (BF16, E4M3), (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_the_op(name, dtype, kv_dtype, splits):
    one = case(*SHAPES[name], dtype=dtype, kv_dtype=kv_dtype, spread=3.0)
    q_scale, kv_scale = scales_of(one)
    there = one.to("cuda")
    batch, capacity = len(one.q_nope), one.page_table.shape[1] * one.kv_cache.shape[1]
    size = mla_workspace_size(capacity, batch, num_kv_splits=splits)
    for space in (None, torch.empty(size, dtype=torch.uint8, device="cuda")):
        scales = {"q_scale": q_scale, "kv_scale": kv_scale}
        out, lse = mla_decode(*there, workspace=space, num_kv_splits=splits, **scales, backend="native")
        wrong, peer, of_lse = errors(one, out, lse, SM_SCALE)
        assert wrong <= 2 * peer and of_lse < 1e-4, (wrong, peer, of_lse)


def test_batches_and_splits_do_not_hang():
    """1 to 128 requests, 1 to 64 splits; every result has the bits of its own second launch."""
    one = case([300] * 128, 16, 64).to("cuda")
    for batch in (1, 2, 8, 32, 128):
        part = one._replace(**{n: getattr(one, n)[:batch] for n in ("q_nope", "q_pe", "seq_lens", "page_table")})
        for splits in (1, 2, 8, 64):
            first, second = (mla_decode(*part, num_kv_splits=splits, backend="native") for _ in range(2))
            assert torch.equal(first.out, second.out) and torch.equal(first.lse, second.lse)


@pytest.mark.parametrize(("heads", "tokens", "batch"), [(128, 1024, 2), (16, 4096, 8), (128, 512, 40)])
def test_a_step_in_a_cuda_graph(heads, tokens, batch):
    """Captured once, replayed with other lengths and pages."""
    given = bench.given_of(heads, tokens, batch, torch.Generator("cuda").manual_seed(0))
    out = bench.new(given)
    bench._ours(given, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench._ours(given, out)
    for shift in (0, 1):
        given["table"].copy_(given["table"].roll(shift, 0))
        given["lengths"].fill_(tokens - 37 * shift)
        out["o"].zero_()
        graph.replay()
        bench.check(given, out)
        first = out["o"].clone()
        for _ in range(20):
            graph.replay()
        assert torch.equal(out["o"], first)
