"""Both ops: back ends, no tokens, schema, fakes, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.ops.rmsnorm.op import add_rmsnorm, rmsnorm
from dsv4lib.ops.rmsnorm_quant.op import AddNormed, Normed, add_rmsnorm_quant, rmsnorm_quant

X, RESIDUAL = torch.randn(2, 3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
WEIGHT = 1 + 0.3 * torch.randn(256, generator=torch.Generator().manual_seed(1))
SCALE = torch.tensor([0.003])


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_two_ops_in_one(recipe):
    """To the bit on the emulator; the reference's norm is fp64, so nearly all of its codes."""
    g = SCALE if recipe == "nvfp4" else None
    found = add_rmsnorm_quant(X, RESIDUAL, WEIGHT, recipe, global_scale=g, keep=True, backend="emulator")
    h, y = add_rmsnorm(X, RESIDUAL, WEIGHT, backend="emulator")
    want = quantize(y, recipe, global_scale=g, backend="emulator")
    assert torch.equal(found.h, h) and torch.equal(found.y, y)
    assert torch.equal(found.codes, want.codes) and torch.equal(found.scales, want.scales)
    oracle = add_rmsnorm_quant(X, RESIDUAL, WEIGHT, recipe, global_scale=g, backend="reference")
    assert torch.equal(oracle.h, h) and oracle.y is None
    assert float((oracle.codes != found.codes).float().mean()) < 0.02


@pytest.mark.parametrize("weight", [WEIGHT, None], ids=["weight", "ones"])
def test_norm_and_format_in_one(weight):
    found = rmsnorm_quant(X, weight, "fp8", keep=True, swizzled=True, backend="emulator")
    y = rmsnorm(X, weight, backend="emulator")
    want = quantize(y, "fp8", swizzled=True, backend="emulator")
    assert torch.equal(found.y, y) and torch.equal(found.codes, want.codes) and torch.equal(found.scales, want.scales)
    oracle = rmsnorm_quant(X, weight, "fp8", swizzled=True, backend="reference")
    assert oracle.y is None and float((oracle.codes != found.codes).float().mean()) < 0.02
    want = quantize(rmsnorm(X, weight, backend="reference"), "fp8", swizzled=True, backend="reference")
    assert torch.equal(oracle.codes, want.codes) and torch.equal(oracle.scales, want.scales)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_scales_as_a_block_scaled_mma_reads_them(recipe, backend):
    g = SCALE if recipe == "nvfp4" else None
    plain, found = (
        add_rmsnorm_quant(X, RESIDUAL, WEIGHT, recipe, global_scale=g, swizzled=flag, backend=backend)
        for flag in (False, True)
    )
    assert torch.equal(found.h, plain.h) and torch.equal(found.codes, plain.codes)
    assert torch.equal(found.scales, scale_swizzle.swizzle(plain.scales)) and found.scales.dim() == 1
    assert not torch.equal(found.scales[: plain.scales.numel()], plain.scales.flatten())


def test_outputs_of_the_caller_and_no_tokens():
    out = AddNormed(torch.zeros_like(X), torch.zeros(3, 256).byte(), torch.zeros(3, 2).byte())
    assert add_rmsnorm_quant(X, RESIDUAL, None, "fp8", out=out, backend="emulator") is out
    assert bool(out.h.any()) and bool(out.codes.any()) and bool(out.scales.all())
    assert add_rmsnorm_quant(X[:0], RESIDUAL[:0], None, "fp8", backend="emulator").codes.shape == (0, 256)
    out = Normed(torch.zeros(3, 256).byte(), torch.zeros(3, 2).byte())
    assert rmsnorm_quant(X, None, "fp8", out=out, backend="emulator") is out and bool(out.codes.any())
    for backend in ("emulator", "reference"):
        assert rmsnorm_quant(X[:0], None, "fp8", swizzled=True, backend=backend).scales.shape == (0,)


def test_schema_and_fakes():
    out = torch.zeros_like(X), torch.zeros(3, 256).byte(), torch.zeros(3, 2).byte(), None
    given = X, RESIDUAL, WEIGHT, None, *out, "fp8", 1e-6, False, "reference"
    with torch.no_grad():
        result = torch.library.opcheck(torch.ops.dsv4.add_rmsnorm_quant.default, given)
        assert set(result.values()) == {"SUCCESS"}, result
        given = X, WEIGHT, None, *out[1:], "fp8", 1e-6, False, "reference"
        result = torch.library.opcheck(torch.ops.dsv4.rmsnorm_quant.default, given)
        assert set(result.values()) == {"SUCCESS"}, result
    with FakeTensorMode():
        x = torch.empty(1 << 20, 7168, dtype=torch.bfloat16)
        found = add_rmsnorm_quant(x, x, None, "nvfp4", global_scale=torch.empty(1))
        assert found.codes.shape == (1 << 20, 3584) and found.scales.shape == (1 << 20, 448)
        found = add_rmsnorm_quant(x[:5], x[:5], None, "mxfp8", swizzled=True)
        assert found.scales.shape == (128 * 224,)
        assert rmsnorm_quant(x[:130], None, "fp8", swizzled=True).scales.shape == (256 * 224,)


def test_bad_arguments_are_named():
    def call(**bad):
        return add_rmsnorm_quant(**{"x": X, "residual": RESIDUAL, "weight": WEIGHT, "recipe": "fp8", **bad})

    for bad, name in (
        ({"x": X[0]}, "x"),
        ({"x": X[:, :192]}, r"x\.shape"),
        ({"x": X.float()}, "x"),
        ({"residual": RESIDUAL[1:]}, "residual"),
        ({"weight": WEIGHT.bfloat16()}, "weight"),
        ({"recipe": "fp6"}, "recipe"),
        ({"global_scale": SCALE}, "global_scale"),
        ({"recipe": "nvfp4"}, "global_scale"),
        ({"recipe": "nvfp4", "global_scale": -SCALE}, "global_scale"),
        ({"out": AddNormed(X.float(), X, X)}, r"out\.h"),
        ({"out": AddNormed(X, X[..., :256].byte(), X[:, :2].byte()), "swizzled": True}, r"out\.scales"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call(**bad)
    for bad, name in (
        ({"x": X[:, :192]}, r"x\.shape"),
        ({"weight": WEIGHT[1:]}, "weight"),
        ({"recipe": "fp6"}, "recipe"),
        ({"out": Normed(X[..., :256].byte(), X[:, :1].byte())}, r"out\.scales"),
        ({"eps": -1.0}, "eps"),
    ):
        with pytest.raises(ArgumentError, match=name):
            rmsnorm_quant(**{"x": X, "weight": WEIGHT, "recipe": "fp8", **bad})
