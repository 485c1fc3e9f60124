"""A Hopper's MoE layer on a real GPU: from a file to its output, eager and replayed, against fp64."""

import pytest
import torch

from dsv4lib import backends
from tests.loader.test_moe import as_bf16, difference, simulated, tokens, write
from tests.loader.test_moe_sm90 import ARCH, BOUND, as_fp8, idle, made

NATIVE = backends.status("native", ARCH)
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
COUNTS = 1, 3, 17, 128


@torch.no_grad()
@pytest.mark.parametrize("precision", [None, "w4a16"])
def test_from_a_file_to_the_output(tmp_path, precision):
    """Also as a CUDA graph that is replayed on other tokens: groups change their sizes, nothing waits for the host."""
    folder = write(tmp_path, False, change=idle)
    layer, rounded = made(folder, "native", precision=precision).cuda(), {"routed": as_bf16} if precision else {}
    for count in COUNTS:
        x, other = tokens(2 * count).split(count)
        want = simulated(folder, x, shared=as_fp8, **rounded)
        given = x.cuda()
        for _ in range(3):  # as it is, recorded, replayed by the ops' plans
            assert difference(layer(given).cpu(), want) < BOUND
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(given)
        given.copy_(other)
        graph.replay()
        assert torch.equal(found, layer(other.cuda()))  # the eager call's bits
