"""The op dsv4::moe_gemm: the emulated kernel against the reference back end, what is chosen, what is refused."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.kernels.moe_gemm.inputs import LIMIT, case
from dsv4lib.kernels.moe_gemm.sm100 import MoeGemm
from dsv4lib.ops.moe_gemm import Operand, linear, moe_gemm, tile_of


def call_of(options, counts, features, k):
    kernel = MoeGemm(**options)
    call = case(kernel, counts, features, k).call
    given = Operand(call.x, call.x_scales), Operand(call.w, call.w_scales), call.offsets, call.counts
    keys = {name: getattr(call, name) for name in ("alpha", "alpha_up", "routing", "out_global")}
    return given, {**keys, "mode": kernel.mode_name, "swiglu": kernel.swiglu, "out_format": kernel.out, "limit": LIMIT}


def test_emulator_and_reference_agree():
    given, keys = call_of({"swiglu": True, "routed": True, "out": "nvfp4"}, [5, 0, 40], 128, 256)
    rows = torch.cat([torch.arange(5), torch.arange(128, 168)])
    ours, truth = (moe_gemm(*given, **keys, expected=20, backend=b).codes[rows] for b in ("emulator", "reference"))
    assert (ours != truth).double().mean() <= 1e-3


def test_linear_is_one_group():
    given, keys = call_of({"out": "fp32"}, [40], 144, 256)
    x, w = Operand(given[0].codes[:40].contiguous(), given[0].scales), Operand(given[1].codes[0], given[1].scales[0])
    y = linear(x, w, alpha=keys["alpha"], out_format="fp32", backend="emulator").codes
    truth = moe_gemm(*given, **keys, backend="reference").codes[:40]
    torch.testing.assert_close(y, truth, rtol=2e-6, atol=2e-6)


def test_tiles_follow_the_expected_tokens():
    assert [tile_of(n, 4096) for n in (1, 33, 128, 200, 400)] == [(32, 1), (64, 1), (128, 1), (192, 1), (192, 2)]
    assert tile_of(400, 128) == (192, 1)


def test_fake_tensors_pass():
    given, keys = call_of({"out": "fp32"}, [5], 16, 64)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = [type(g)(*map(mode.from_tensor, g)) if isinstance(g, tuple) else mode.from_tensor(g) for g in given]
        keys["alpha"] = mode.from_tensor(keys["alpha"])
        assert moe_gemm(*fake, **keys).codes.shape == (128, 16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mode", {"mode": "fp4"}),
        ("out_format", {"out_format": "fp16"}),
        ("routing", {"routing": torch.ones(128)}),
        ("counts", {"counts": torch.tensor([-1], dtype=torch.int32)}),
        ("offsets", {"offsets": torch.tensor([64], dtype=torch.int32)}),
        ("offsets", {"counts": torch.tensor([129], dtype=torch.int32)}),
        ("alpha.shape", {"alpha": torch.ones(2)}),
    ],
)
def test_what_is_refused(name, change):
    (x, w, offsets, counts), keys = call_of({"out": "fp32"}, [5], 16, 64)
    given = {"x": x, "w": w, "offsets": offsets, "counts": counts, **keys, **change}
    with pytest.raises((ArgumentError,)) as caught:
        moe_gemm(**given, backend="reference")
    assert caught.value.name == name
