"""The op: back ends, no tokens, schema, fakes, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, scale_swizzle, ue8m0
from dsv4lib.ops.inv_rope_quant.op import inv_rope_quant
from dsv4lib.ops.linear.op import linear, mxfp8_of
from dsv4lib.ops.output_proj.op import output_proj

GENERATOR = torch.Generator().manual_seed(0)
O = torch.randn(3, 5, 512, generator=GENERATOR).bfloat16()
ANGLES = 6 * torch.rand(7, 32, generator=GENERATOR)
TABLE, POSITIONS = torch.cat((ANGLES.cos(), ANGLES.sin()), -1), torch.tensor([6, 0, 2])

CODES, IMAGE = torch.zeros(3, 5, 512, dtype=torch.uint8), torch.zeros(10240, dtype=torch.uint8)
SHIFTED, ROWS = torch.zeros(10241, dtype=torch.uint8)[1:], torch.zeros(3, 5, 4)


def test_back_ends_agree_and_rows_may_be_gathered_before():
    want = inv_rope_quant(O, POSITIONS, TABLE, backend="reference")
    for given in ((POSITIONS, TABLE), (None, TABLE[POSITIONS])):
        found = inv_rope_quant(O, *given, backend="emulator")
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def images(scales, groups):
    """Images of 1x32 of row-major scales of 1x128."""
    by_group = scales.unflatten(1, (groups, -1)).transpose(0, 1).flatten(2)
    return scale_swizzle.swizzle(by_group.repeat_interleave(4, -1))


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize(("tokens", "heads", "groups"), [(3, 5, 5), (130, 4, 2), (1, 6, 1)])
def test_layouts_of_scales_hold_the_same_numbers(tokens, heads, groups, backend):
    """A last block of few rows, of almost all that it can pad, and one after a full one."""
    o = torch.randn(tokens, heads, 512, generator=GENERATOR) * torch.logspace(-3, 3, tokens * heads).view(-1, heads, 1)
    o, table = o.bfloat16(), TABLE[torch.arange(tokens) % len(TABLE)]
    codes, want = inv_rope_quant(o, None, table, backend="reference")

    def found(**options):
        got, scales = inv_rope_quant(o, None, table, backend=backend, **options)
        assert torch.equal(got, codes)
        return scales

    assert torch.equal(found(), want)
    assert torch.equal(found(layout="swizzled", groups=groups), images(want, groups))
    assert torch.equal(found(layout="swizzled"), images(want, 1)[0])
    wide, words = found(layout="colmajor"), found(layout="colmajor_ue8m0")
    assert torch.equal(wide, ue8m0.decode(want)) and torch.equal(words, want.view(torch.int32)[..., 0])
    rows = -(-tokens // 4) * 4
    assert wide.stride() == (1, 4 * rows, rows) and words.stride() == (1, rows)
    # As DeepGEMM takes the scales of a group: [groups, T, K / 128], column-major, without a copy.
    assert tokens == 1 or wide.view(tokens, groups, -1).transpose(0, 1).stride()[1:] == (1, rows)


def test_the_output_projection_reads_what_is_written():
    """Attention's bf16 to u, two launches: the bits of a torch pass between them; near the numbers in fp64."""
    tokens, heads, groups, rank = 5, 4, 2, 48
    o = (torch.randn(tokens, heads, 512, generator=GENERATOR) * torch.logspace(-2, 1, heads)[:, None]).bfloat16()
    table, weights = TABLE[:tokens], torch.randn(groups, rank, 1024, generator=GENERATOR) / 32
    q = fp8_block.quantize(weights)
    w = mxfp8_of(q.codes, q.scales)
    given = inv_rope_quant(o, None, table, layout="swizzled", groups=groups, backend="emulator")
    u = output_proj(given, w, mode="mxfp8", backend="emulator")

    codes, scales = inv_rope_quant(o, None, table, backend="reference")
    passed = mxfp8_of(*(x.unflatten(1, (groups, -1)).transpose(0, 1).flatten(2) for x in (codes, scales)))
    assert torch.equal(u, output_proj((codes.flatten(1), passed.scales), w, mode="mxfp8", backend="emulator"))

    x = fp8_block.dequantize(fp8_block.FP8Tensor(codes, scales, (1, 128)), torch.float64)
    exact = torch.einsum("tgi,gri->tgr", x.view(tokens, groups, -1), fp8_block.dequantize(q, torch.float64)).flatten(1)
    torch.testing.assert_close(u.double(), exact, rtol=2**-8, atol=1e-5 * float(exact.abs().max()))

    turned = o.double()
    a, b = turned[..., 448::2].clone(), turned[..., 449::2].clone()
    cos, sin = table.double()[:, None].chunk(2, -1)
    turned[..., 448::2], turned[..., 449::2] = a * cos + b * sin, b * cos - a * sin
    wide = torch.einsum("tgi,gri->tgr", turned.view(tokens, groups, -1), weights.double()).flatten(1)
    error = (u.double() - wide).norm() / wide.norm()
    assert 1e-3 < float(error) < 0.06, float(error)  # two FP8 operands


def test_a_linear_reads_one_image_of_all_heads():
    weights = fp8_block.quantize(torch.randn(32, 2048, generator=GENERATOR))
    w = mxfp8_of(weights.codes, weights.scales)
    codes, scales = inv_rope_quant(O[:, :4], POSITIONS, TABLE, layout="swizzled", backend="emulator")
    y = linear((codes.view(3, -1), scales), w, mode="mxfp8", backend="emulator").codes
    assert torch.equal(y, output_proj((codes, scales[None]), (w.codes[None], w.scales[None]), mode="mxfp8"))


def test_outputs_of_the_caller_and_nothing_to_do():
    out = torch.zeros(3, 5, 512).byte(), torch.zeros(3, 5, 4).byte()
    back = inv_rope_quant(O, POSITIONS, TABLE, out=out, backend="emulator")
    assert back is out and bool(out[0].any()) and bool(out[1].all())
    assert inv_rope_quant(O[:0], POSITIONS[:0], TABLE, backend="emulator")[0].shape == (0, 5, 512)
    assert inv_rope_quant(O[:, :0], POSITIONS, TABLE, backend="emulator")[1].shape == (3, 0, 4)


def test_schema_and_fakes():
    given = O, POSITIONS, TABLE, torch.zeros(3, 5, 512).byte(), torch.zeros(3, 5, 4).byte(), "rowmajor", "reference"
    result = torch.library.opcheck(torch.ops.dsv4.inv_rope_quant.default, given)
    assert set(result.values()) == {"SUCCESS"}, result
    with FakeTensorMode():
        o = torch.empty(1 << 16, 128, 512, dtype=torch.bfloat16)
        assert inv_rope_quant(o, None, torch.empty(1 << 16, 64))[1].shape == (1 << 16, 128, 4)


def test_bad_arguments_are_named():
    for call, name in (
        (lambda: inv_rope_quant(O[0], POSITIONS, TABLE), "o"),
        (lambda: inv_rope_quant(O[..., :256], POSITIONS, TABLE), r"o\.shape"),
        (lambda: inv_rope_quant(O.float(), POSITIONS, TABLE), "o"),
        (lambda: inv_rope_quant(O, POSITIONS[:2], TABLE), r"positions\.shape"),
        (lambda: inv_rope_quant(O, POSITIONS.int(), TABLE), "positions"),
        (lambda: inv_rope_quant(O, POSITIONS + 1, TABLE), "positions"),
        (lambda: inv_rope_quant(O, None, TABLE), r"cos_sin\.shape"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE.bfloat16()), "cos_sin"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, out=(O, O)), r"out\[0\]"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, layout="columns"), "layout"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, groups=5), "groups"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, layout="swizzled", groups=2), "groups.*divisor"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, layout="swizzled", groups=0), "groups"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, layout="swizzled", out=(CODES, IMAGE[None])), r"out\[1\]"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, layout="swizzled", out=(CODES, IMAGE[:-512])), r"out\[1\]"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, layout="swizzled", out=(CODES, SHIFTED)), r"out\[1\]"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, layout="colmajor", out=(CODES, IMAGE)), r"out\[1\]"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, layout="colmajor", out=(CODES, ROWS)), r"out\[1\]\.stride"),
        (lambda: inv_rope_quant(O, POSITIONS, TABLE, out=(CODES.flatten()[1:7665].unfold(0, 512, 512), IMAGE)), "out"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call()
