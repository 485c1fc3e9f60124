"""`turbo4_encode`: bytes on both back ends, schedules, budget, faults, schema, hard values, bad arguments."""

import math

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import turbo4
from dsv4lib.ops.turbo4_encode.arguments import fake_args, launch_args
from dsv4lib.ops.turbo4_encode.faults import FAULTS
from dsv4lib.ops.turbo4_encode.kernel import Turbo4Encode
from dsv4lib.ops.turbo4_encode.op import Call, turbo4_encode
from dsv4lib.pages.turbo4.run_case import store, vectors
from tests.budget import built, small
from tests.cases import cases

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
ARCHS = cases("sm_90a", full=["sm_100a"])
INDICES = torch.tensor([9, -1, 30, 4, 11, 12, 0]).int()
BF16, FP16 = torch.bfloat16, torch.float16


def pages_of(count, heads, dim, page_size):
    return torch.full((count, heads, turbo4.layout(dim).page_bytes(page_size)), 0xA5, dtype=torch.uint8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "dtype", "backend"),
    cases(
        (3, 128, 16, BF16, "emulator"),
        (1, 64, 5, FP16, "emulator"),
        (2, 512, 16, BF16, "emulator"),
        (3, 128, 7, BF16, "reference"),
        full=[(5, 256, 33, FP16, "emulator"), (2, 512, 7, FP16, "emulator"), (3, 64, 1, BF16, "emulator")],
    ),
)
def test_bytes(heads, dim, page_size, dtype, backend, arch):
    """The oracle's bytes and nothing else, 20 dB with outlier channels, no report of the race detector."""
    result = store(vectors(len(INDICES), heads, dim, 1, dtype), page_size, INDICES, backend, seed=11, arch=arch)
    assert result.differing == 0 and result.hazards == 0 and 20 < result.error_db < 22


def test_bytes_of_an_oracle_in_fp64():
    """Codes by distance to all 16 centroids of what fp64 rotates: a few differ by one, next to a boundary."""
    x = vectors(7, 3, 128, 2)
    result = store(x, 16, INDICES, "emulator", seed=3)
    y = turbo4.rotate(x.double(), 3)
    norm = y.norm(dim=-1)
    codes = (y[..., None] - norm[..., None, None] * turbo4.centroids(128)).abs().argmin(-1)
    data, norms = turbo4.layout(128).views(result.pages.flatten(0, 1), 16)
    data, norms = data.unflatten(0, (-1, 3)), norms.unflatten(0, (-1, 3)).contiguous().view(torch.float16)[..., 0]
    for row, index in enumerate(INDICES.tolist()):
        if index >= 0:
            found = turbo4.unpack(data[index // 16, :, index % 16])
            apart = (found.int() - codes[row]).abs()
            assert int(apart.max()) <= 1 and int(apart.sum()) <= 2
            assert torch.allclose(norms[index // 16, :, index % 16].double(), norm[row], rtol=2**-11)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dim", cases(128, full=[64, 256, 512]))
def test_schedules_and_budget(dim, arch):
    """All schedules write the same bytes, also of rows and pages that lie apart; none of an index past the end."""
    kernel, code = built(Turbo4Encode, fake_args, arch, head_dim=dim)
    assert code.local_bytes == 0 and code.registers <= 128 and small(code)
    x, results = vectors(7, 4, dim, 5)[:, 1:], []
    wide, beyond = pages_of(4, 5, dim, 9), INDICES.clone()
    beyond[1] = 4 * 9
    for schedule in SCHEDULES:
        pages = wide.clone()
        gpu = device(arch, checks="race", schedule=schedule, seed=1)
        launch(code, *launch_args(kernel, Call(x, pages[:, 1:4], 9, beyond, 2, "emulator")), gpu=gpu)
        assert not gpu.hazards and bool((pages[:, [0, 4]] == 0xA5).all())
        results.append(pages)
    assert all(torch.equal(one, results[0]) for one in results)
    want = wide.clone()
    turbo4_encode(x, want[:, 1:4], 9, INDICES, seed=2, backend="reference")
    assert torch.equal(results[0], want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name, arch):
    assert store(vectors(7, 2, 64, 1), 16, INDICES, "emulator", fault=name, arch=arch).error_db < 15


def test_hard_values():
    """Zeros, values on boundaries, -0, subnormal and large norms; NaN and Inf stay in their rows, seen in the norm."""
    x = torch.zeros(10, 1, 64)
    x[1, 0, 7], x[2, 0, ::2], x[3] = 1.0, -0.0, 8188.0  # a norm of 65504 is the largest
    x[4], x[5, 0, 0], x[6, 0, 1], x[7, 0, :2] = 1e-7, math.nan, math.inf, torch.tensor([math.inf, -math.inf])
    x[8], x[9, 0, :3] = 3e4, torch.tensor([1.0, -0.0, 1.0])
    for dtype in (BF16, FP16):
        found, want = pages_of(1, 1, 64, 10), pages_of(1, 1, 64, 10)
        for pages, backend in ((found, "emulator"), (want, "reference")):
            turbo4_encode(x.to(dtype), pages, 10, torch.arange(10).int(), backend=backend)
        norms, wanted = (pages[0, 0, 320:340].view(FP16) for pages in (found, want))
        assert torch.equal(found[..., :320], want[..., :320]) and torch.equal(norms.nan_to_num(), wanted.nan_to_num())
        assert norms.isnan().tolist() == wanted.isnan().tolist()
        assert not norms[0].any() and norms[5:9].isfinite().tolist() == [False] * 4
        # x is bf16(8188) = 8192: the norm 65536 is above fp16's largest
        assert bool(norms[3].isfinite()) == (dtype == FP16)


def test_seed_changes_the_bytes():
    x = vectors(7, 1, 64, 1)
    first, second = (store(x, 16, INDICES, "emulator", seed=seed).pages for seed in (0, 2**31 - 1))
    assert not torch.equal(first, second)


def test_nothing_to_do():
    pages = pages_of(2, 3, 64, 4)
    turbo4_encode(torch.zeros(0, 3, 64).bfloat16(), pages, 4, torch.zeros(0).int(), backend="emulator")
    assert bool((pages == 0xA5).all())


def test_schema():
    pages = pages_of(1, 2, 64, 4)
    given = torch.zeros(2, 2, 64).bfloat16(), pages, 4, torch.tensor([1, 3]).int(), 0, "reference"
    torch.library.opcheck(torch.ops.dsv4.turbo4_encode, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_bad_arguments_are_named(backend):
    x, pages, indices = torch.zeros(2, 2, 64).bfloat16(), pages_of(3, 2, 64, 4), torch.tensor([1, 3]).int()
    by_2, by_8 = (torch.zeros(pages.numel() + n, dtype=torch.uint8)[n:].view(pages.shape) for n in (2, 8))
    size = turbo4.layout(64).page_bytes(1 << 16)
    many = torch.zeros(size + 2 * 16 * (1 << 15), dtype=torch.uint8).as_strided((1 << 15, 2, size), (32, 16, 1))
    for name, change in (
        ("x.dtype", {"x": x.float()}),
        ("x.shape", {"x": x[0]}),
        ("x.shape", {"x": torch.zeros(2, 2, 96).bfloat16()}),
        ("pages.shape", {"x": x[:, :1]}),
        ("pages.shape", {"pages": pages[..., :-16]}),
        ("pages.shape", {"page_size": 5}),
        ("pages", {"pages": pages.int()}),
        ("pages.stride()", {"pages": torch.zeros(3, 2, 145).byte()[..., :144]}),
        ("page_size", {"page_size": 0}),
        ("pages", {"pages": by_2}),
        ("pages", {"pages": by_8}),
        ("pages.shape", {"pages": many, "page_size": 1 << 16}),
        ("x.stride()", {"x": torch.zeros(2, 2, 128).bfloat16()[..., ::2]}),
        ("x.stride()", {"x": torch.zeros(2, 2, 65).bfloat16()[..., :64]}),
        ("indices.stride()", {"indices": torch.tensor([1, 1, 3]).int()[::2]}),
        ("indices", {"indices": indices.long()}),
        ("indices", {"indices": torch.tensor([1, 12]).int()}),
        ("indices", {"indices": torch.tensor([1, 1]).int()}),
        ("indices.shape", {"indices": indices[:1]}),
        ("seed", {"seed": -1}),
    ):
        given = {"x": x, "pages": pages, "page_size": 4, "indices": indices, "backend": backend} | change
        with pytest.raises(ArgumentError) as caught:
            turbo4_encode(**given)
        assert caught.value.name == name
    for options, name in (({"threads": 33}, "threads"), ({"dtype": "fp32"}, "dtype"), ({"head_dim": 96}, "head_dim")):
        with pytest.raises(ConfigError, match=name):
            Turbo4Encode(**options)
