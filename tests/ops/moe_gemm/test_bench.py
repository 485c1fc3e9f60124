"""The bench's rows at a size for a CPU: the kernel passes their check in the emulator, a changed value does not."""

import pytest
import torch

from dsv4lib.ops.moe_gemm import bench

SMALL = {
    "gate/up": bench.Gemm("Flash", "gate/up", 6, 2, 128, 384),
    "down": bench.Gemm("Flash", "down", 6, 2, 192, 128),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mode", bench.OUTPUTS)
@pytest.mark.parametrize("name", SMALL)
def test_the_check_takes_our_kernel_and_refuses_a_changed_row(name, mode):
    made = bench._row(SMALL[name], mode, 5)
    given = made.given(torch.Generator().manual_seed(0))
    call, outputs = made.providers[0].bind(given)
    call()
    made.check(given, outputs)
    (expert, own), *_ = bench._first_rows(given)
    main = outputs["y" if name == "down" else "h"]
    main[own[0]] = main[own[0]].roll(1)
    with pytest.raises(AssertionError, match="off by"):
        made.check(given, outputs)


def test_rows_have_the_models_sizes():
    """Packed weights are most of the bytes: 0.53125 a weight."""
    sizes = {row.shape: row.bytes for row in bench.rows()}
    assert len(sizes) == 36
    assert sizes["Flash gate/up w4a8 T 1"] == pytest.approx(6 * 4096 * 4096 * 0.53125, rel=0.01)
    assert sizes["Flash down w4a16 T 4096"] == pytest.approx(256 * 4096 * 2048 * 0.53125, rel=0.3)  # and tokens
    assert sizes["Pro down w4a8 T 1"] == pytest.approx(6 * 7168 * 3072 * 0.53125, rel=0.01)
