"""Rows of the kernels in CUDA C++: the check of the row passes in the emulator; absent without their packages."""

import pytest
import torch

from dsv4lib import nvrtc
from dsv4lib.bench.ops import harness, peers
from dsv4lib.bench.ops.case import Absent
from dsv4lib.bench.ops.providers import IN_CPP
from dsv4lib.errors import BackendUnavailable
from dsv4lib.ops.compressor import bench as compressor
from dsv4lib.ops.rmsnorm import bench as rmsnorm
from dsv4lib.ops.router import bench as router
from dsv4lib.ops.topk import bench as topk

SHAPES = [
    (rmsnorm, "Flash T 1"),
    (topk, "Flash k 512 L 1024 T 1"),
    (router, "Flash T 1"),
    (compressor, "CSA decode T 1"),
    (compressor, "indexer FP4 decode T 1"),
]


def row_of(module, shape):
    row = next(row for row in module.rows() if row.shape.endswith(shape))
    return row, next(provider for provider in row.providers if provider.name == IN_CPP)


@pytest.mark.parametrize(("module", "shape"), SHAPES, ids=lambda x: x if isinstance(x, str) else "")
def test_rows_pass_their_check(module, shape):
    row, provider = row_of(module, shape)
    given = harness.inputs(row, "cpu")
    call, outputs = provider.bind(given)
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        row.check(given, {name: torch.zeros_like(x) for name, x in outputs.items()})  # what was never written
    call()
    row.check(given, outputs)


def test_rows_of_many_tokens_have_none():
    for module, text in (
        (router, "T 4096"),
        (compressor, "prefill"),
        (compressor, "steps"),
        (compressor, "HCA decode"),
    ):
        rows = [row for row in module.rows() if text in row.shape]
        assert rows and not any(provider.name == IN_CPP for row in rows for provider in row.providers)


def test_absent_without_a_package(monkeypatch):
    def missing():
        raise BackendUnavailable("CUDA C++ needs NVRTC")

    _, provider = row_of(rmsnorm, "Flash T 1")
    monkeypatch.setattr(nvrtc, "library", missing)
    with pytest.raises(Absent, match="needs NVRTC"):
        provider.bind({})
    monkeypatch.setattr(peers, "installed", lambda package: False)
    with pytest.raises(Absent, match="nvidia-cutlass-dsl is not installed"):
        provider.bind({})
