"""The gather kernel: the bits of `formats.kv_entry.gather`, both architectures, schedules, what it reads."""

from functools import cache

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ConfigError
from dsv4lib.formats import kv_entry
from dsv4lib.ops.kv_gather.arguments import fake_args, launch_args
from dsv4lib.ops.kv_gather.kernel import KvGather
from dsv4lib.ops.kv_gather.op import Call
from tests.budget import built, small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")


@cache
def compiled(arch):
    kernel, code = built(KvGather, fake_args, arch)
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize(("page_size", "count"), [(3, 21), (64, 5)])
def test_all_codes_and_scales(arch, page_size, count):
    kernel, code = compiled(arch)
    pages = pool(page_size, 7)
    indices = torch.randint(-1, 7 * page_size, (count,), dtype=torch.int32)
    indices[[0, 3]] = torch.tensor([-1, 7 * page_size - 1], dtype=torch.int32)
    results = []
    for schedule in SCHEDULES:
        out = torch.full((count, 512), 7.0).bfloat16()
        gpu = device(arch, checks="race", schedule=schedule, seed=1)
        launch(code, *launch_args(kernel, Call(pages, indices, out, page_size, "emulator")), gpu=gpu)
        assert not gpu.hazards and same(out, pages, page_size, indices)
        results.append(out.view(torch.int16))
    assert all(torch.equal(one, results[0]) for one in results)


def test_what_only_a_gpu_gets_to_see():
    """Indices outside the pool, which the op refuses on the CPU, are rows of zeros."""
    kernel, code = compiled("sm_90a")
    pages = pool(5, 4)
    indices = torch.tensor([20, 2**31 - 1, -2, -(2**31), 19], dtype=torch.int32)
    out, gpu = torch.full((5, 512), 7.0).bfloat16(), device("sm_90a", checks="race")
    launch(code, *launch_args(kernel, Call(pages, indices, out, 5, "emulator")), gpu=gpu)
    assert not gpu.hazards and same(out[4:], pages, 5, indices[4:]) and not out[:4].any()


def test_skipped_entries_are_not_read():
    """Sectors of 32 bytes, counted: 32 to store, one index for each of 2 warps; 18 of data and 2 of scales if it is."""
    kernel, code = compiled("sm_90a")
    pages, sectors = kv_entry.LAYOUT.allocate(2, 64), []
    for index in (-1, 3):
        out, gpu = torch.empty(64, 512).bfloat16(), device("sm_90a", checks="race,counters")
        call = Call(pages, torch.full((64,), index, dtype=torch.int32), out, 64, "emulator")
        launch(code, *launch_args(kernel, call), gpu=gpu)
        sectors.append(gpu.launches[-1].result.stats["global_sectors"] / 64)
    assert sectors == [34, 54]


def test_bad_settings_are_named():
    with pytest.raises(ConfigError, match="at_once"):
        KvGather(9)
