"""The experts' GEMM on a Hopper: fp64, the emulator's bits, many tiles a CTA, CUDA graphs."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.formats import mxfp4
from dsv4lib.ops.moe_gemm.op import Operand, moe_gemm, new_output
from dsv4lib.ops.moe_gemm.sm90.inputs import case
from dsv4lib.ops.moe_gemm.sm90.kernel import TiledMoeGemm
from dsv4lib.ops.moe_gemm.sm90.layout import tile_weights
from dsv4lib.ops.moe_gemm.sm90.wide.e4m3 import WideE4m3MoeGemm
from dsv4lib.ops.moe_gemm.sm90.wide.kernel import WideMoeGemm
from tests.ops.moe_gemm.hopper import run

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
L1 = {"swiglu": True, "routed": True}
RUNS = {  # options, counts, N, K
    "one token": ({"out": "fp32"}, [1], 1024, 4096),
    "ragged": ({"out": "fp32"}, [3, 0, 1, 9, 17, 0, 2], 1024, 2048),
    "many tiles a CTA": ({"out": "fp32", "step_k": 256}, [3, 1, 9, 0, 5, 8, 2, 7] * 4, 512, 1280),
    "16 tokens": ({"tile_n": 16, "out": "fp32"}, [15, 0, 33], 512, 3072),
    "32 tokens": ({"tile_n": 32, "out": "fp32"}, [31, 0, 70], 512, 7168),
    "to mxfp8": ({**L1, "out": "mxfp8"}, [3, 0, 9, 1], 1024, 4096),
    "to mxfp8, 16 tokens": ({**L1, "out": "mxfp8", "tile_n": 16}, [18, 2], 512, 7168),
    "bf16": ({"mode": "w4a16", "out": "fp32"}, [3, 0, 9, 1], 1024, 4096),
    "to mxfp8, early": ({**L1, "out": "mxfp8", "early": True}, [3, 0, 9, 1], 512, 4096),
    "bf16, swiglu": ({**L1, "mode": "w4a16", "tile_n": 16, "step_k": 128}, [1, 0, 17], 512, 1152),
    "a list of rows": ({**L1, "out": "mxfp8", "gather": True}, [3, 0, 9, 1], 1024, 4096),
    "bf16, a list of rows": ({"mode": "w4a16", "out": "fp32", "gather": True}, [3, 0, 9, 1], 1024, 4096),
}


WIDE = {
    "32 tokens": ({"tile_n": 32, "out": "fp32"}, [31, 0, 70, 9], 1024, 4096),
    "64 tokens": ({"tile_n": 64, "out": "fp32", "step_k": 256}, [64, 0, 31, 49, 1], 320, 1280),
    "128 tokens": ({"out": "fp32"}, [128, 80, 81, 0, 104, 300], 1024, 7168),
    "swiglu": ({**L1}, [100, 3, 129], 1024, 4096),
    "w4a8": ({"mode": "w4a8", "out": "fp32"}, [128, 80, 81, 0, 104, 300], 1024, 7168),
    "w4a8, 64 tokens": ({"mode": "w4a8", "tile_n": 64, "out": "fp32", "step_k": 256}, [64, 0, 31, 49, 1], 320, 1280),
    "w4a8, swiglu": ({**L1, "mode": "w4a8"}, [100, 3, 129], 1024, 4096),
    "to mxfp8": ({**L1, "out": "mxfp8"}, [100, 3, 129], 512, 2048),
}


E4M3 = {
    "128 tokens": ({"out": "fp32"}, [128, 80, 81, 0, 104, 300], 1024, 7168),
    "64 tokens": ({"tile_n": 64, "out": "fp32", "step_k": 256}, [64, 0, 31, 49, 1], 320, 1280),
    "swiglu": ({**L1}, [100, 3, 129], 1024, 4096),
    "to mxfp8": ({**L1, "out": "mxfp8"}, [100, 3, 129], 576, 2048),
}
ALL = {TiledMoeGemm: RUNS, WideMoeGemm: WIDE, WideE4m3MoeGemm: E4M3}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, runs in ALL.items() for name in runs])
def test_numbers(kind, name):
    """Against fp64, on all SMs and on few; three launches in a row give the same bits."""
    options, *sizes = ALL[kind][name]
    made = case(kind(**options), *sizes)
    outputs = set()
    for grid in (132, 7, 132):
        outcome = run(options, made, kind, grid=grid, native=True)
        assert outcome.findings() == set(), (outcome.findings(), outcome.error, outcome.codes, outcome.scales)
        scales = b"" if made.call.out_scales is None else made.call.out_scales.numpy().tobytes()
        outputs.add(made.call.out.view(torch.uint8).numpy().tobytes() + scales)
    assert len(outputs) == 1


@pytest.mark.parametrize("mode", ["w4a8", "w4a16"])
def test_native_and_emulator_agree(mode):
    """To the rounding of the tensor core's sums."""
    options = {"out": "fp32", "step_k": 128, "mode": mode}
    made = case(TiledMoeGemm(**options), [3, 9], 128, 384)
    found = []
    for native in (False, True):
        assert run(options, made, native=native).findings() == set()
        found.append(made.call.out[made.rows()].clone())
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5


def test_in_a_cuda_graph():
    """Both GEMMs captured once; a replay takes groups of other sizes."""
    generator = torch.Generator().manual_seed(0)
    experts, hidden, width, rows = 6, 1024, 512, 6 * 128

    def weights(n, k):
        q = mxfp4.quantize(torch.randn(experts, n, k, generator=generator))
        return Operand(tile_weights(q.packed, q.scales, "w4a16").cuda())

    w1, w2 = weights(2 * width, hidden), weights(hidden, width)
    x = Operand(torch.randn(rows, hidden, generator=generator).bfloat16().cuda())
    offsets = torch.arange(0, rows, 128, dtype=torch.int32).cuda()
    counts = torch.tensor([3, 0, 9, 1, 0, 2], dtype=torch.int32).cuda()
    h, y = new_output(x.codes, width, "bf16"), new_output(x.codes, hidden, "bf16")

    def layer(backend="native"):
        common = {"mode": "w4a16", "expected": 3, "backend": backend}
        moe_gemm(x, w1, offsets, counts, swiglu=True, out=h, **common)
        moe_gemm(h, w2, offsets, counts, out=y, **common)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer()
    for sizes in ([3, 0, 9, 1, 0, 2], [1, 17, 0, 0, 5, 8]):
        counts.copy_(torch.tensor(sizes, dtype=torch.int32))
        y.codes.zero_()
        graph.replay()
        own = torch.cat([torch.arange(128 * e, 128 * e + n) for e, n in enumerate(sizes)])
        found = y.codes.cpu()[own].double()
        layer("reference")
        want = y.codes.cpu()[own].double()
        assert float((found - want).norm() / want.norm()) < 2.0**-8 and float(want.norm()) > 1
