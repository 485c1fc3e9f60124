"""The gather kernel and its op: the bits of `formats.kv_entry.gather`, both architectures, schedules, bad arguments."""

from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib import backends
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import kv_entry
from dsv4lib.kernels.compile import compile_for
from dsv4lib.kernels.kv_gather.arguments import fake_args, launch_args
from dsv4lib.kernels.kv_gather.simt import KvGather
from dsv4lib.ops.kv_gather import kv_gather
from tests.kernels.budget import quick

NATIVE = backends.status("native", "sm_90a")


@cache
def compiled(arch):
    kernel = KvGather()
    code = compile_for(kernel, fake_args(kernel), arch)
    assert code.local_bytes == 0 and quick(kernel, code), (code.local_bytes, code.seconds)
    return kernel, code


def pool(page_size, pages, seed=0):
    """Random bytes: all codes, all scales from 2^-127 to NaN, any bf16."""
    generator = torch.Generator().manual_seed(seed)
    shape = pages, kv_entry.LAYOUT.page_bytes(page_size)
    return torch.randint(256, shape, generator=generator, dtype=torch.uint8)


def same(found, pages, page_size, indices):
    want, _ = kv_entry.gather(pages, page_size, indices)
    nan = want.isnan()
    return torch.equal(found.isnan(), nan) and torch.equal(found[~nan].view(torch.int16), want[~nan].view(torch.int16))


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize(("page_size", "count"), [(3, 21), (64, 5)])
def test_all_codes_and_scales(arch, page_size, count):
    kernel, code = compiled(arch)
    pages = pool(page_size, 7)
    indices = torch.randint(-1, 7 * page_size, (count,), dtype=torch.int32)
    indices[[0, 3]] = torch.tensor([-1, 7 * page_size - 1], dtype=torch.int32)
    results = []
    for schedule in ("round_robin", "adversarial", "random"):
        out = torch.full((count, 512), 7.0).bfloat16()
        gpu = device(arch, checks="race", schedule=schedule, seed=1)
        launch(code, *launch_args(kernel, pages, indices, out, page_size), gpu=gpu)
        assert not gpu.hazards and same(out, pages, page_size, indices)
        results.append(out.view(torch.int16))
    assert all(torch.equal(one, results[0]) for one in results)


def test_op():
    pages, indices = pool(5, 4), torch.tensor([[3, -1], [19, 0], [7, 7]], dtype=torch.int32)
    for backend in ("emulator", "reference"):
        assert same(kv_gather(pages, 5, indices, backend=backend), pages, 5, indices)
    assert kv_gather(pages, 5, indices[:0], backend="emulator").shape == (0, 2, 512)
    assert not kv_gather(pages[:0], 5, indices.clamp_max(-1), backend="emulator").any()
    given = pages, indices, torch.zeros(3, 2, 512).bfloat16(), 5, "reference"
    assert set(torch.library.opcheck(torch.ops.dsv4.kv_gather.default, given).values()) == {"SUCCESS"}
    with FakeTensorMode():
        room = torch.empty(99, kv_entry.LAYOUT.page_bytes(64), dtype=torch.uint8)
        assert kv_gather(room, 64, torch.empty(128, 1024, dtype=torch.int32)).shape == (128, 1024, 512)


def test_bad_arguments_are_named():
    pages, indices = pool(5, 4), torch.tensor([3, -1], dtype=torch.int32)
    for change, name in (
        ({"pages": pages.int()}, "pages"),
        ({"page_size": 6}, "pages"),
        ({"indices": indices.long()}, "indices"),
        ({"indices": indices + 30}, "indices"),
        ({"out": torch.zeros(2, 512)}, "out"),
        ({"out": torch.zeros(2, 1024).bfloat16()[:, ::2]}, "out"),
    ):
        with pytest.raises(ArgumentError, match=name):
            kv_gather(**{"pages": pages, "page_size": 5, "indices": indices, "backend": "emulator", **change})
    with pytest.raises(ConfigError, match="at_once"):
        KvGather(9)


@pytest.mark.parametrize("count", [1, 17, 128 * 512])
@pytest.mark.sm90
@pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)
def test_on_a_hopper(count):
    """Also in a CUDA graph."""
    pages = pool(64, 40)
    indices = torch.randint(-1, 64 * 40, (count,), dtype=torch.int32)
    there = pages.cuda(), indices.cuda()
    out = kv_gather(there[0], 64, there[1], backend="native")
    assert same(out.cpu(), pages, 64, indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_gather(there[0], 64, there[1], out=out, backend="native")
    there[1].copy_(indices.flip(0))
    out.zero_()
    graph.replay()
    assert same(out.cpu(), pages, 64, indices.flip(0))
