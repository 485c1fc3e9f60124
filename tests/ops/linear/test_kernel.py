"""The kernel of linear layers: every schedule, no hazards, no spills; what it computes is tested with the op."""

import torch

from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.formats import nvfp4, scale_swizzle
from dsv4lib.ops.linear.sm100 import Linear
from dsv4lib.ops.moe_gemm.arguments import Gemm, fake_args, launch_args
from dsv4lib.reference.linear import linear
from tests.budget import small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")


def test_every_schedule_gives_the_same_bits():
    """Two groups, two tiles of tokens, two of features, the second of each ragged, over three CTAs."""
    kernel = Linear(tile_n=64, out="fp32")
    done = compile_for(kernel, fake_args(kernel))
    assert (done.local_bytes, done.spills) == (0, 0) and small(done)
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(2, n, 320, generator=generator) for n in (70, 208))
    qx, qw = nvfp4.quantize(x, 0.01), nvfp4.quantize(w, 0.01)
    images = (scale_swizzle.swizzle(q.scales) for q in (qx, qw))
    call = Gemm(qx.packed, qw.packed, torch.empty(0), *images, torch.tensor([1e-4, 2e-4]))
    outputs, hashes = [], set()
    for schedule in SCHEDULES:
        call.out = torch.zeros(2, 70, 208)
        gpu = make("sm_100a", checks="race", schedule=schedule)
        launch(done, *launch_args(kernel, call, 3), gpu=gpu)
        assert gpu.hazards == []
        outputs.append(call.out)
        hashes.add(gpu.launches[-1].result.schedule_hash)
    assert all(torch.equal(out, outputs[0]) for out in outputs) and len(hashes) >= 4
    want = linear(
        *(nvfp4.dequantize(q, torch.float64) for q in (qx, qw)), torch.tensor([1.0, 2.0], dtype=torch.float64)
    )
    assert float((outputs[0].double() - want).norm() / want.norm()) < 3e-7
