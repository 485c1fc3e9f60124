"""Memory that the small ops take as it is or refuse by name: strides, offsets, extents, rows very far apart."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.compressor.op import Pages, compressor
from dsv4lib.ops.indexer_q.op import IndexerQueries, indexer_q
from dsv4lib.ops.inv_rope_quant.op import inv_rope_quant
from dsv4lib.ops.mhc.op import Eps, Site, mhc_pre
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.output_proj.op import output_proj
from dsv4lib.ops.quantize.op import Quantized, quantize
from dsv4lib.ops.rmsnorm.op import add_rmsnorm, rmsnorm
from dsv4lib.ops.rmsnorm_quant.op import AddNormed, add_rmsnorm_quant
from tests.ops.compressor import cases

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 128, generator=GENERATOR).bfloat16()
O, Q = (torch.randn(3, 2, n, generator=GENERATOR).bfloat16() for n in (512, 128))
ANGLES = torch.rand(3, 32, generator=GENERATOR)
TABLE = torch.cat((ANGLES.cos(), ANGLES.sin()), -1)
STREAMS = torch.randn(3, 4, 128, generator=GENERATOR).bfloat16()
SITE = Site(torch.randn(24, 512, generator=GENERATOR) / 30, torch.ones(3), torch.zeros(24), torch.ones(128))
WEIGHTS = torch.zeros(2, 48, 512).bfloat16()
CSA = cases.make(4, [1, 6], [3, 5])
FAR = 2**31 + 64  # elements from row to row


def u8(*shape):
    return torch.zeros(*shape, dtype=torch.uint8)


def apart(x):
    """Every second element of memory."""
    return torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]


def shifted(x):
    """An element past where memory starts."""
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


def compress(**changed):
    given = {"kv": CSA.kv, "gate": CSA.gate, "weights": CSA.weights, "batch": CSA.batch, "state": CSA.state}
    given |= {"out": Pages(cases.blank("kv", 8, 512), cases.PAGE)}
    return compressor(**{**given, **changed}, backend="emulator")


def queries(codes, scales=None):
    out = IndexerQueries(codes, u8(3, 2, 4) if scales is None else scales, torch.zeros(3, 2))
    return indexer_q(Q, torch.ones(3, 2), None, TABLE, out=out, backend="emulator")


def project(o, w=WEIGHTS):
    return output_proj(Operand(*o), Operand(w), backend="emulator")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("out.stride()", lambda: rmsnorm(X, out=apart(X), backend="emulator")),
        ("out.stride()", lambda: rmsnorm(X, out=shifted(X), backend="emulator")),
        ("out.stride()", lambda: rmsnorm(X, out=torch.zeros(1, 128).bfloat16().expand(3, -1), backend="reference")),
        ("out[0].stride()", lambda: add_rmsnorm(X, X, out=(apart(X), X + 0), backend="emulator")),
        ("out[1].stride()", lambda: add_rmsnorm(X, X, out=(X + 0, apart(X)), backend="emulator")),
        ("out[1].shape", lambda: add_rmsnorm(X, X, out=(X + 0, X[1:] + 0))),
        ("out.codes.stride()", lambda: queries(apart(u8(3, 2, 64)))),
        ("out.codes.stride()", lambda: queries(shifted(u8(3, 2, 64)))),
        ("out.codes.stride()", lambda: queries(u8(3, 2, 65)[..., :64])),
        ("out.scales.stride()", lambda: queries(u8(3, 2, 64), shifted(u8(3, 2, 4)))),
        (
            "out[0].stride()",
            lambda: inv_rope_quant(O, None, TABLE, out=(shifted(u8(3, 2, 512)), u8(3, 2, 4)), backend="emulator"),
        ),
        (
            "out.codes.stride()",
            lambda: add_rmsnorm_quant(X, X, None, "fp8", out=AddNormed(X + 0, shifted(u8(3, 128)), u8(3, 1))),
        ),
        ("weights.norm.shape", lambda: compress(weights=CSA.weights._replace(norm=torch.tensor(1.0)))),
        ("out.data.stride()", lambda: compress(out=Pages(apart(cases.blank("kv", 8, 512)), cases.PAGE))),
        ("site.fn.stride()", lambda: mhc_pre(STREAMS, SITE._replace(fn=shifted(SITE.fn)), backend="emulator")),
        ("eps", lambda: rmsnorm(X, eps=1e39)),
        ("eps", lambda: rmsnorm(X, eps=2**70, backend="reference")),
        ("eps", lambda: rmsnorm(X, eps=2**1100)),
        ("eps.hc", lambda: mhc_pre(STREAMS, SITE, eps=Eps(1e300))),
        ("o, w", lambda: project((X[:, :64],), torch.tensor(1.0).bfloat16())),
        ("o", lambda: project((torch.zeros(3, 1024),))),
        ("o.stride()", lambda: project((shifted(torch.zeros(3, 1024).bfloat16()),))),
        ("o.stride()", lambda: project((O.transpose(0, 1).contiguous().transpose(0, 1),))),
        ("o_scales", lambda: project((torch.zeros(3, 1024).bfloat16(), u8(2, 512)))),
    ],
)
def test_the_error_names_the_argument(name, call):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.name == name and caught.value.allowed


def test_extents_that_32_bits_do_not_count():
    with FakeTensorMode():
        wide = torch.empty(2**31, 64, dtype=torch.bfloat16)
        with pytest.raises(ArgumentError, match=r"x\.shape"):
            rmsnorm(wide)
        o = torch.empty(2**24, 8, 512, dtype=torch.bfloat16)  # an image of 2^31 bytes
        assert inv_rope_quant(o, None, torch.empty(2**24, 64))[1].shape == (2**24, 8, 4)
        with pytest.raises(ArgumentError, match=r"out\[1\]\.shape"):
            inv_rope_quant(o, None, torch.empty(2**24, 64), layout="swizzled", groups=1)


def test_heads_come_as_attention_left_them():
    """[T, H, D] is [T, H D] to the projection; a token's heads may be part of a longer row."""
    wide = torch.zeros(3, 3, 512).bfloat16()
    wide[:, :2] = O
    w = Operand(torch.randn(2, 48, 512, generator=GENERATOR).bfloat16())
    want = output_proj(Operand(O.flatten(1)), w, backend="emulator")
    assert torch.equal(output_proj(Operand(wide[:, :2]), w, backend="emulator"), want)


def far(x):
    """``x`` in rows that are more than 2^31 elements apart; untouched memory is never made."""
    memory = torch.empty(FAR * (len(x) - 1) + x[0].numel(), dtype=x.dtype)
    return memory.as_strided(x.shape, (FAR, *x.stride()[1:])).copy_(x)


OPS = {
    "rmsnorm": lambda to: (rmsnorm(to(X), out=to(X * 0), backend="emulator"),),
    "add_rmsnorm_quant": lambda to: add_rmsnorm_quant(
        to(X), to(X), None, "fp8", out=AddNormed(to(X * 0), to(u8(3, 128)), to(u8(3, 1))), backend="emulator"
    )[:3],
    "quantize": lambda to: quantize(to(X), "fp8", out=Quantized(u8(3, 128), u8(3, 1), None), backend="emulator")[:2],
    "inv_rope_quant": lambda to: inv_rope_quant(
        to(O), None, to(TABLE), out=(to(u8(3, 2, 512)), to(u8(3, 2, 4))), backend="emulator"
    ),
    "indexer_q": lambda to: indexer_q(
        to(Q),
        to(torch.ones(3, 2)),
        None,
        to(TABLE),
        out=IndexerQueries(to(u8(3, 2, 64)), to(u8(3, 2, 4)), to(torch.zeros(3, 2))),
        backend="emulator",
    ),
    "mhc_pre": lambda to: mhc_pre(
        to(STREAMS), SITE, out=(to(X * 0), to(torch.zeros(3, 4)), to(torch.zeros(3, 4, 4))), backend="emulator"
    ),
}


@pytest.mark.parametrize("op", OPS)
def test_rows_further_apart_than_32_bits_count(op):
    near, away = OPS[op](lambda x: x.clone()), OPS[op](far)
    assert all(torch.equal(a, b) for a, b in zip(near, away, strict=True)) and bool(near[0].any())
