"""The Hadamard rotation against the recursive definition."""

from __future__ import annotations

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import hadamard


def sylvester(n: int) -> torch.Tensor:
    """H_2n = [[H, H], [H, -H]], without scale."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    h = sylvester(n // 2)
    return torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])


@pytest.mark.parametrize("n", [1, 2, 4, 32, 128, 256])
def test_matrix_is_the_recursive_construction(n):
    assert torch.equal(hadamard.matrix(n), sylvester(n) * n**-0.5)


def test_orthonormal_symmetric_and_its_own_inverse():
    h = hadamard.matrix()
    assert h.shape == (128, 128)
    assert torch.equal(h, h.t())
    assert (h @ h - torch.eye(128, dtype=torch.float64)).abs().max() < 1e-14


@pytest.mark.parametrize("n", [1, 8, 128])
def test_transform_is_the_matrix_product(n):
    x = torch.randn(3, 5, n, dtype=torch.float64, generator=torch.Generator().manual_seed(41))
    assert (hadamard.transform(x) - x @ sylvester(n) * n**-0.5).abs().max() < 1e-14
    assert (hadamard.transform(hadamard.transform(x)) - x).abs().max() < 1e-14
    assert (hadamard.transform(x).norm(dim=-1) - x.norm(dim=-1)).abs().max() < 1e-13


def test_unit_vectors_give_the_columns_in_natural_order():
    signs = hadamard.transform(torch.eye(128)).sign()
    assert torch.equal(signs, sylvester(128).float())


def test_scores_are_unchanged_when_both_sides_are_rotated_and_only_then():
    generator = torch.Generator().manual_seed(42)
    q, k = torch.randn(2, 7, 128, dtype=torch.float64, generator=generator)
    scores = q @ k.t()
    assert (hadamard.transform(q) @ hadamard.transform(k).t() - scores).abs().max() < 1e-12
    assert (hadamard.transform(q) @ k.t() - scores).abs().max() > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_inputs_are_summed_in_fp32_and_rounded_once(dtype):
    x = torch.randn(9, 128, generator=torch.Generator().manual_seed(43)).to(dtype)
    assert hadamard.transform(x).dtype == dtype
    assert torch.equal(hadamard.transform(x), hadamard.transform(x.float()).to(dtype))


def test_strides_empty_and_gradient():
    x = torch.randn(128, 6, generator=torch.Generator().manual_seed(44))
    assert torch.equal(hadamard.transform(x.t()), hadamard.transform(x.t().contiguous()))
    assert hadamard.transform(torch.empty(0, 128)).shape == (0, 128)
    leaf = torch.zeros(128, dtype=torch.float64, requires_grad=True)
    hadamard.transform(leaf)[3].backward()
    assert (leaf.grad - hadamard.matrix()[3]).abs().max() < 1e-15


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: hadamard.matrix(12), "n=12.*power of two"),
        (lambda: hadamard.matrix(0), "n=0"),
        (lambda: hadamard.matrix(4.0), "n=4.0"),
        (lambda: hadamard.transform(torch.zeros(2, 96)), "x.shape.*96.*power of two"),
        (lambda: hadamard.transform(torch.zeros(2, 0)), "power of two"),
        (lambda: hadamard.transform(torch.tensor(1.0)), "x.shape"),
        (lambda: hadamard.transform(torch.zeros(2, dtype=torch.int64)), "x.dtype"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
