"""The bench's rows at a size for a CPU: the kernel passes their check in the emulator, a changed value does not."""

import pytest
import torch

from dsv4lib.ops.linear import bench
from dsv4lib.ops.linear.op import linear

SMALL = {"alone": bench.Shape("wq_b", 1, 136, 256), "groups": bench.Shape("wo_a", 2, 72, 384)}


@pytest.mark.parametrize("name", SMALL)
def test_the_check_takes_our_kernel_and_refuses_a_changed_token(name):
    made = bench._row("Flash", SMALL[name], 5)
    given = made.given(torch.Generator().manual_seed(0))
    out = bench.new(given)
    x, w = (given["x"], given["x_scales"]), (given["w"], given["w_scales"])
    linear(x, w, mode="fp8_block", out=(out["y"], None), backend="emulator")
    bench.check(given, out)
    out["y"][..., 3, :] = out["y"][..., 3, :].roll(1, -1)
    with pytest.raises(AssertionError, match="off by"):
        bench.check(given, out)


def test_rows_have_the_models_sizes():
    """Weights are most of the bytes, 1 of each."""
    sizes = {row.shape: row.bytes for row in bench.rows()}
    assert len(sizes) == 56
    assert sizes["Flash wo_b T 1"] == pytest.approx(4096 * 8192, rel=0.002)
    assert sizes["Pro wo_a T 8"] == pytest.approx(16 * 1024 * (4096 + 16) + 8 * 16 * (4096 + 2 * 1024), rel=0.02)
