"""Linears on a Hopper: fp64, the same bits in every launch, the emulator's numbers, the model's shapes."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.config import FLASH
from dsv4lib.ops.linear import bench
from dsv4lib.ops.linear.op import linear
from tests.ops.linear.hopper import run
from tests.ops.linear.test_sm90 import BF16, RUNS, made_for

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]


@pytest.mark.parametrize("name", RUNS)
def test_numbers(name):
    options, sizes, grid = RUNS[name]
    made, outputs = made_for(options, sizes), set()
    for ctas in (grid, 8 * grid, grid):
        outcome = run(options, made, grid=ctas, native=True)
        assert outcome.findings() == set(), (outcome.findings(), outcome.error)
        outputs.add(outcome.out.contiguous().view(torch.uint8).numpy().tobytes())
    assert len(outputs) == 1


@pytest.mark.parametrize("options", [{}, BF16], ids=["e4m3", "bf16"])
def test_native_and_emulator_agree(options):
    made = made_for(options, (1, 7, 200, 1040))
    options = {"out": "fp32", "split": 2} | options
    found = [run(options, made, native=native).out.clone() for native in (False, True)]
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


@pytest.mark.parametrize("shape", bench.shapes(FLASH), ids=lambda shape: shape.name)
def test_shapes_of_the_model_in_a_cuda_graph(shape):
    given = bench.given_of(shape, 8, torch.Generator("cuda").manual_seed(0))
    out = bench.new(given)
    x, w = (given["x"], given["x_scales"]), (given["w"], given["w_scales"])

    def call():
        linear(x, w, mode="fp8_block", out=(out["y"], None), backend="native")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out["y"].zero_()
    graph.replay()
    bench.check(given, out)
