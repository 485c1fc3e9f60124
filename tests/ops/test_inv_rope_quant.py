"""The op: back ends, no tokens, schema, fakes, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.inv_rope_quant import inv_rope_quant

GENERATOR = torch.Generator().manual_seed(0)
O = torch.randn(3, 5, 512, generator=GENERATOR).bfloat16()
ANGLES = 6 * torch.rand(7, 32, generator=GENERATOR)
TABLE, POSITIONS = torch.cat((ANGLES.cos(), ANGLES.sin()), -1), torch.tensor([6, 0, 2])


def test_back_ends_agree_and_rows_may_be_gathered_before():
    want = inv_rope_quant(O, POSITIONS, TABLE, backend="reference")
    for given in ((POSITIONS, TABLE), (None, TABLE[POSITIONS])):
        found = inv_rope_quant(O, *given, backend="emulator")
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_outputs_of_the_caller_and_nothing_to_do():
    out = torch.zeros(3, 5, 512).byte(), torch.zeros(3, 5, 4).byte()
    back = inv_rope_quant(O, POSITIONS, TABLE, out=out, backend="emulator")
    assert back is out and bool(out[0].any()) and bool(out[1].all())
    assert inv_rope_quant(O[:0], POSITIONS[:0], TABLE, backend="emulator")[0].shape == (0, 5, 512)
    assert inv_rope_quant(O[:, :0], POSITIONS, TABLE, backend="emulator")[1].shape == (3, 0, 4)


def test_schema_and_fakes():
    given = O, POSITIONS, TABLE, torch.zeros(3, 5, 512).byte(), torch.zeros(3, 5, 4).byte(), "reference"
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
    ):
        with pytest.raises(ArgumentError, match=name):
            call()
