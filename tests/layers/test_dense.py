"""Dense layers: modes of their weights, joined ones, groups, sizes that are no multiple of a tile."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block
from dsv4lib.layers.dense import Dense, GroupedDense, normed
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.rmsnorm.op import rmsnorm


def weight(rows, columns, seed, fp8=True):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-2, 1, rows)[:, None]
    return fp8_block.quantize(x) if fp8 else x.bfloat16()


def value(w):
    return fp8_block.dequantize(w, torch.float64) if isinstance(w, fp8_block.FP8Tensor) else w.double()


def inputs(rows, columns, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * torch.logspace(-1, 2, rows)[:, None]).bfloat16()


def error(found, want):
    """Root mean square error of each column over the column's size; the worst."""
    return float(((found.double() - want).square().mean(0) / want.square().mean(0)).sqrt().max())


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize(
    ("shapes", "fp8", "precision", "mode"),
    [
        ([(40, 256), (200, 256)], True, "fp8", "mxfp8"),
        ([(40, 256), (200, 256)], True, "bf16", "bf16"),
        ([(72, 160)], True, "fp8", "bf16"),  # K is no multiple of the activations' 128
        ([(24, 96), (56, 96)], False, "fp8", "bf16"),
    ],
)
def test_numbers(shapes, fp8, precision, mode, backend):
    """Exact but for the output's rounding to bf16, 2^-9 at most; of quantised activations: given those."""
    weights = [weight(*shape, seed, fp8) for seed, shape in enumerate(shapes)]
    layer, x = Dense(weights, precision, backend=backend), inputs(5, shapes[0][1])
    assert layer.mode == mode
    given = fp8_block.fake_quantize(x.float()) if mode == "mxfp8" else x
    for found, w in zip(layer(x), weights, strict=True):
        want = given.double() @ value(w).T
        assert found.dtype == torch.bfloat16 and torch.allclose(found.double(), want, rtol=2**-8, atol=1e-4)


def test_joined_layers_have_the_bits_of_single_ones():
    weights, x = [weight(40, 256, 1), weight(136, 256, 2)], inputs(7, 256)
    joined = Dense(weights, backend="emulator")(x)
    for found, w in zip(joined, weights, strict=True):
        assert torch.equal(found, Dense([w], backend="emulator")(x)[0])


def test_fp32_out():
    w, x = weight(48, 64, 3, fp8=False), inputs(3, 64)
    found = Dense([w], out="fp32", backend="emulator")(x)[0]
    want = x.double() @ value(w).T
    assert found.dtype == torch.float32 and error(found, want) <= 2 * error(x.float() @ value(w).float().T, want)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize(("columns", "mode"), [(256, "mxfp8"), (160, "bf16")])
def test_a_norm_writes_what_the_layer_reads(columns, mode, backend):
    """The bits of a norm and a cast in launches of their own; rows are part of longer ones."""
    layer, x, gain = Dense([weight(40, columns, 1)], backend=backend), inputs(5, 320)[:, :columns], torch.rand(columns)
    found = normed(x, gain, 1e-6, layer)
    assert layer.mode == mode and isinstance(found, Operand) == (mode == "mxfp8")
    want = rmsnorm(x, gain, 1e-6, out=torch.empty(5, columns).bfloat16(), backend=backend)
    assert torch.equal(layer(found)[0], layer(want)[0])


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_groups(precision):
    """Rows of a group that are no multiple of the weight's 128 x 128 tile."""
    w = weight(3 * 48, 256, 4)
    layer = GroupedDense(w, 3, precision, "reference")
    o = inputs(4, 3 * 256).view(4, 3, 256)
    if precision == "fp8":
        from dsv4lib.formats import scale_swizzle

        q = fp8_block.quantize_activation(o.float())
        scales = torch.stack([scale_swizzle.swizzle(q.scales[:, g].repeat_interleave(4, -1)) for g in range(3)])
        given, o = Operand(q.codes.view(torch.uint8), scales), fp8_block.dequantize(q, torch.float64)
    else:
        given = Operand(o)
    want = torch.einsum("tgk,grk->tgr", o.double(), value(w).unflatten(0, (3, 48))).flatten(1)
    assert error(layer(given), want) < 4e-3


def test_scales_that_are_no_powers_of_two_stay_bf16():
    w = weight(40, 256, 5)
    plain = fp8_block.FP8Tensor(w.codes, torch.full((1, 2), 0.3), w.tile)
    assert Dense([plain]).mode == "bf16"


def test_bad_arguments_are_named():
    with pytest.raises(ArgumentError, match="weights"):
        Dense([weight(8, 64, 0, False), weight(8, 32, 0, False)])
    with pytest.raises(ArgumentError, match="precision"):
        Dense([weight(8, 64, 0)], "fp4")
