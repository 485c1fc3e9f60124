"""Attention of many tokens on a Hopper: fp64, the bits of the kernel of few tokens, the same in every launch."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.config import FLASH, PRO, LayerKind
from dsv4lib.ops.fmha import bench
from dsv4lib.ops.fmha.op import Fp8Pages, Selected, fmha
from dsv4lib.ops.fmha.sm90 import launch
from dsv4lib.ops.fmha.sm90.kernel import DecodeFmha
from dsv4lib.ops.fmha.sm90.prefill.kernel import PrefillFmha
from dsv4lib.pages.fmha.run_case import bits
from tests.ops.fmha.hopper import run
from tests.ops.fmha.test_prefill_sm90 import LONG, RUNS, right

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]


@pytest.mark.parametrize("name", [*RUNS, *LONG])
def test_numbers(name):
    options, one, ctas = (RUNS | LONG)[name]
    few, outputs = run(options, one, native=True), set()
    for _ in range(3):
        outcome = run(options, one, PrefillFmha, native=True, ctas=ctas)
        assert right(outcome, name) and not outcome.guards_written, outcome.findings()
        outputs.add(bits(outcome.output))
    assert outputs == {bits(few.output)}


@pytest.mark.parametrize("tokens", [133, 1000])
@pytest.mark.parametrize("config", [FLASH, PRO], ids=["Flash", "Pro"])
def test_a_chunk_of_the_model_in_a_cuda_graph(config, tokens, monkeypatch):
    one = bench.shape(config, LayerKind.CSA)
    given = bench.prefill_of(one, tokens, 8192, torch.Generator("cuda").manual_seed(0))
    out, few = bench.new(given), bench.new(given)
    bench._ours(given, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench._ours(given, out)
    out["o"].zero_()
    graph.replay()
    bench.check(given, out)
    first = out["o"].clone()
    for _ in range(20):
        graph.replay()
        assert torch.equal(out["o"], first)
    monkeypatch.setattr(launch, "PrefillFmha", DecodeFmha)
    pool = Fp8Pages(given["pages"], bench.PAGE)
    entries, window = (Selected(pool, given[x], given[y]) for x, y in (("index", "count"), ("window", "window_count")))
    fmha(given["q"], entries, window, sink=given["sink"], o=few["o"], splits=1, backend="native")  # a call of its own
    assert torch.equal(few["o"], first)
