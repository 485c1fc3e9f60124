"""Tensors on their way into a kernel: what `wrap` takes as it lies, and what it refuses by name."""

import cutlass
import pytest
import torch

from dsv4lib import backends, emulator
from dsv4lib.dsl.tensors import DeviceTensor, wrap
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.linear.op import linear
from dsv4lib.ops.mla_decode import inputs
from dsv4lib.ops.mla_decode.op import mla_decode
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.rmsnorm.op import rmsnorm

X = torch.randn(6, 72, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_rows_far_apart_and_one_row_expanded():
    wide = torch.cat([X, X], 1)
    want = rmsnorm(X, backend="emulator")
    assert torch.equal(rmsnorm(wide[:, :72], backend="emulator"), want)
    assert torch.equal(rmsnorm(wide[::2, 72:], backend="emulator"), want[::2])
    one = X[0].expand(1, 72).as_strided((1, 72), (0, 1))  # one row: its stride says nothing
    assert torch.equal(rmsnorm(one, backend="emulator"), want[:1])


def strode(x, stride):
    """The same tensor with this stride where the extent is 1."""
    pairs = zip(x.shape, x.stride(), strict=True)
    return x.as_strided(x.shape, [stride if extent == 1 else own for extent, own in pairs])


ODD = (7, 0, 1, 24, 1 << 41)  # no 16 bytes, none, too many for a descriptor


@pytest.mark.parametrize("stride", ODD)
def test_a_stride_of_one_row_says_nothing(stride):
    """Kernels get one that follows the other dimensions, on 128 bytes; strides of more rows stay."""
    for shape, want in (
        ((1, 72), (128, 1)),
        ((6, 1, 72), (72, 128, 1)),
        ((1, 6, 72), (448, 72, 1)),
        ((6, 72, 1), (72, 1, 1)),
        ((1, 1, 1), (64, 64, 1)),
    ):
        assert DeviceTensor(strode(torch.zeros(shape).bfloat16(), stride), cutlass.BFloat16).stride == want


@pytest.mark.parametrize("stride", ODD)
def test_tma_of_one_row(stride):
    """The tensor maps of a GEMM of one token, and of a cache of one page, are those of packed tensors."""
    x, w = X[:1, :64], X[:, :64].repeat(8, 1)
    one = inputs.case([5], 4, 16)
    page = one.kv_cache[one.page_table[0, :1].long()]
    one = one._replace(kv_cache=page, page_table=torch.zeros(1, 8).int())
    for call in (
        lambda odd: linear(Operand(odd(x)), Operand(w), mode="bf16", backend="emulator").codes,
        lambda odd: mla_decode(*one._replace(kv_cache=odd(page), q_nope=odd(one.q_nope)), backend="emulator").out,
    ):
        found = []
        for odd in (torch.clone, lambda x: strode(x, stride)):
            with backends.emulating("sm_100a"), emulator.device("sm_100a", trace=True) as gpu:
                out = call(odd)
                found.append((out, [(tensor.dims, tensor.strides) for tensor in gpu.trace.tensors]))
        (want, maps), (out, others) = found
        assert torch.equal(out, want) and maps == others and all(min(strides) >= 128 for _, strides in maps)


def test_one_row_of_a_larger_tensor():
    """A slice of one token, an expanded one: nothing is copied, numbers are those of a copy."""
    wide = torch.randn(5, 3, 72, generator=torch.Generator().manual_seed(1)).bfloat16()
    for x in (wide[2, 1:2], wide[:1, 2], wide[3].expand(1, 3, 72)[:, 1], wide.mT.contiguous().mT[4, :1].contiguous()):
        assert torch.equal(rmsnorm(x, backend="emulator"), rmsnorm(x.clone(), backend="emulator"))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (X[:1].expand(6, 72), "no stride 0"),
        (X[:, :1].expand(6, 72), "stride 1 in the last dimension"),
        (X.T, "stride 1 in the last dimension"),
        (X[:, 1:65], "rows that start on 16 bytes"),
        (X[:0], "no extent 0"),
        (X.half(), "a tensor of torch.bfloat16"),
    ],
)
def test_refused_by_name(x, words):
    with pytest.raises(ArgumentError, match=rf"^x\b.*{words}"):
        wrap("x", x, cutlass.BFloat16, (None, None), 16)
