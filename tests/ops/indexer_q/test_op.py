"""The op: back ends, no tokens, schema, fakes, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.indexer_q.op import IndexerQueries, indexer_q

GENERATOR = torch.Generator().manual_seed(0)
Q = torch.randn(3, 5, 128, generator=GENERATOR).bfloat16()
WEIGHTS = torch.randn(3, 5, generator=GENERATOR).bfloat16()
ANGLES = 6 * torch.rand(7, 32, generator=GENERATOR)
TABLE, POSITIONS = torch.cat((ANGLES.cos(), ANGLES.sin()), -1), torch.tensor([6, 0, 2])


@pytest.mark.parametrize("variant", ["fp8", "fp4"])
def test_back_ends_agree(variant):
    want = indexer_q(Q, WEIGHTS, POSITIONS, TABLE, variant=variant, backend="reference")
    for given in ((POSITIONS, TABLE), (None, TABLE[POSITIONS])):
        found = indexer_q(Q, WEIGHTS, *given, variant=variant, backend="emulator")
        assert all(b is None or torch.equal(a, b) for a, b in zip(found, want, strict=True))


# Of fp64 arithmetic, the matrix multiplied out: bf16 after RoPE and after the rotation, then the nearest E2M1.
GOLDEN_CODES = """
30d44a6a0a99149a90942ec2234ad845a9343b9d2329a1ec99d619eaa913db39382c9249b98111002ca0591a91821bcce4a964d8cb221928a0c59ad5
2acd54294a64ba7101a011a9e9a028d0a45ad3352a2c524dd2088a39d94502ea2a9a2194029ca44928819120819b15591ab14a8b113c616c108a29d5
9662c9cd9909b12b"""
GOLDEN_SCALES = "8181828181818281"


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_rounds_where_the_released_code_does(backend):
    """Codes of two heads in its steps; three bytes are others where nothing is rounded before FP4."""
    i = torch.arange(256).view(1, 2, 128)
    q, angles = ((i * 37 % 101 - 50) * (1 + i % 7) / 16).bfloat16(), torch.arange(32) * 0.25
    table = torch.cat((angles.cos(), angles.sin()))[None]
    found = indexer_q(q, torch.tensor([[1.0, -3.0]]), None, table, backend=backend)
    assert bytes(found.codes.flatten().tolist()).hex() == "".join(GOLDEN_CODES.split())
    assert bytes(found.scales.flatten().tolist()).hex() == GOLDEN_SCALES
    assert found.weights.tolist() == [[2**-4, -3 * 2**-4]]  # (128 x 2 heads)^-0.5


def test_outputs_of_the_caller_and_nothing_to_do():
    out = IndexerQueries(torch.zeros(3, 5, 64).byte(), torch.zeros(3, 5, 4).byte(), torch.zeros(3, 5))
    assert indexer_q(Q, WEIGHTS, POSITIONS, TABLE, out=out, backend="emulator") is out
    assert bool(out.codes.any()) and bool(out.scales.all()) and bool(out.weights.all())
    assert indexer_q(Q[:0], WEIGHTS[:0], POSITIONS[:0], TABLE, backend="emulator").codes.shape == (0, 5, 64)


def test_schema_and_fakes():
    out = torch.zeros(3, 5, 64).byte(), torch.zeros(3, 5, 4).byte(), torch.zeros(3, 5)
    given = Q, WEIGHTS, POSITIONS, TABLE, *out, "fp4", True, "reference"
    result = torch.library.opcheck(torch.ops.dsv4.indexer_q.default, given)
    assert set(result.values()) == {"SUCCESS"}, result
    with FakeTensorMode():
        q, weights = torch.empty(99, 64, 128, dtype=torch.bfloat16), torch.empty(99, 64)
        found = indexer_q(q, weights, None, torch.empty(99, 64), variant="fp8")
        assert found.scales is None and found.codes.shape == q.shape and found.weights.dtype == torch.float32


def test_bad_arguments_are_named():
    def call(**bad):
        return indexer_q(**{"q": Q, "weights": WEIGHTS, "positions": POSITIONS, "cos_sin": TABLE, **bad})

    short = IndexerQueries(torch.zeros(3, 5, 64).byte(), None, torch.zeros(3, 5))
    for bad, name in (
        ({"q": Q[0]}, "q"),
        ({"q": Q[..., :64]}, r"q\.shape"),
        ({"weights": WEIGHTS.half()}, r"weights\.dtype"),
        ({"weights": WEIGHTS[:, :4]}, r"weights\.shape"),
        ({"positions": POSITIONS + 9}, "positions"),
        ({"cos_sin": TABLE.double()}, "cos_sin"),
        ({"variant": "fp6"}, "variant"),
        ({"out": short}, r"out\.scales"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call(**bad)
