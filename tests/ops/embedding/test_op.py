"""The op: back ends, both types of ids, no tokens, schema, fakes, bad arguments, what a GPU does with bad ids."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.embedding.op import Embedded, embedding

WEIGHT = torch.randn(40, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
TOKENS = torch.tensor([3, -1, 39, 0, -7])


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_back_ends_agree(backend, dtype):
    found = embedding(TOKENS.to(dtype), WEIGHT, keep=True, backend=backend)
    want = torch.nn.functional.embedding(TOKENS.clamp_min(0), WEIGHT) * (TOKENS >= 0)[:, None]
    assert torch.equal(found.rows, want) and torch.equal(found.streams, want[:, None].expand(-1, 4, -1))
    rows = embedding(TOKENS.to(dtype), WEIGHT, copies=0, keep=True, backend=backend)
    assert rows.streams is None and torch.equal(rows.rows, want)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_outputs_of_the_caller_and_no_tokens(backend):
    out = Embedded(torch.zeros(5, 2, 72).bfloat16())
    assert embedding(TOKENS, WEIGHT, out=out, backend=backend) is out and bool(out.streams[0].any())
    none = embedding(TOKENS[:0], WEIGHT, backend=backend)
    assert none.streams.shape == (0, 4, 72) and none.rows is None


def test_schema_and_fakes():
    out = torch.zeros(5, 4, 72).bfloat16(), torch.zeros(5, 72).bfloat16()
    with torch.no_grad():
        for given in (out, (out[0], None)):
            result = torch.library.opcheck(torch.ops.dsv4.embedding.default, (TOKENS, WEIGHT, *given, "reference"))
            assert set(result.values()) == {"SUCCESS"}, result
    with FakeTensorMode():
        found = embedding(torch.empty(1 << 20, dtype=torch.int64), torch.empty(129280, 7168, dtype=torch.bfloat16))
        assert found.streams.shape == (1 << 20, 4, 7168) and found.rows is None


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_bad_arguments_are_named(backend):
    for bad, name in (
        ({"tokens": TOKENS + 1}, "tokens"),
        ({"tokens": TOKENS.float()}, "tokens"),
        ({"tokens": TOKENS[None]}, "tokens"),
        ({"tokens": TOKENS.short()}, "tokens"),
        ({"weight": WEIGHT.float()}, "weight"),
        ({"weight": WEIGHT[:, :70]}, "weight"),
        ({"weight": WEIGHT[0]}, "weight"),
        ({"copies": 9}, "copies"),
        ({"copies": 0}, "out"),
        ({"out": Embedded(WEIGHT[:5])}, r"out\.streams"),
        ({"out": Embedded(None, WEIGHT[:4].clone())}, r"out\.rows"),
    ):
        with pytest.raises(ArgumentError, match=name):
            embedding(**{"tokens": TOKENS, "weight": WEIGHT, "backend": backend, **bad})
