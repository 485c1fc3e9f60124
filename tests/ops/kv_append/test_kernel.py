"""The append kernel: the bits of the reference's ring, both forms and architectures, schedules, what it reads."""

from functools import cache

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ConfigError
from dsv4lib.ops.common.requests import plan
from dsv4lib.ops.kv_append.arguments import fake_args, launch_args
from dsv4lib.ops.kv_append.kernel import KvAppend
from dsv4lib.ops.kv_append.op import Call
from dsv4lib.reference.cache import append_window
from tests.budget import built, small

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
RAGGED = [5, 0, 1, 21, 3, 2], [0, 7, 3, 1_048_550, -1, 7]  # rows and positions; one request is left out
WINDOW = 8


def case(counts, starts, window):
    """(kv, ring, table, ring afterwards)."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.tensor(counts)
    kv = torch.randn(int(counts.sum()), 512, generator=generator).bfloat16()
    ring = torch.randn(len(counts) + 2, window, 512, generator=generator).bfloat16()
    places = torch.randperm(len(counts) + 2, generator=generator)[: len(counts)]
    offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    table, want = plan(offsets, torch.tensor(starts), places), ring.clone()
    for row, count, start, place in table.tolist():
        if count and start >= 0:
            want[place] = append_window(ring[place : place + 1], kv[None, row : row + count], start)[2][0]
    return kv, ring, table, want


@cache
def compiled(arch, by_slot):
    kernel, code = built(KvAppend, fake_args, arch, WINDOW, by_slot)
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("by_slot", [False, True], ids=["by row", "by slot"])
@pytest.mark.parametrize("counts", [RAGGED, ([1] * 40, [*range(40)])], ids=["ragged", "forty requests"])
def test_any_chunks(arch, by_slot, counts):
    kernel, code = compiled(arch, by_slot)
    kv, ring, table, want = case(*counts, WINDOW)
    assert not torch.equal(ring, want)
    for schedule in SCHEDULES:
        found, gpu = ring.clone(), device(arch, checks="race", schedule=schedule, seed=2)
        launch(code, *launch_args(kernel, Call(kv, found, table, "emulator")), gpu=gpu)
        assert not gpu.hazards and torch.equal(found, want)


@pytest.mark.parametrize("by_slot", [False, True], ids=["by row", "by slot"])
def test_what_only_a_gpu_gets_to_see(by_slot):
    """Tables that the op refuses on the CPU: places that are no rings, by slot also rows past the last one."""
    kernel, code = compiled("sm_90a", by_slot)
    kv, ring, table, want = case(*RAGGED, WINDOW)
    for request, place in ((0, len(ring)), (2, -1), (3, 2**31 - 1)):
        want[int(table[request, 3])] = ring[int(table[request, 3])]
        table[request, 3] = place
    if by_slot:
        table[-1, 1] = 3
        want[table[-1, 3], 9 % WINDOW] = ring[table[-1, 3], 9 % WINDOW]
    gpu = device("sm_90a", checks="race")
    launch(code, *launch_args(kernel, Call(kv, ring, table, "emulator")), gpu=gpu)
    assert not gpu.hazards and torch.equal(ring, want)


def test_rows_that_are_not_kept_are_not_read():
    """By slot; sectors of 32 bytes, counted: 8 rows in and out, of 300; a request's 16 bytes a warp."""
    kv, ring, table, _ = case([300], [3], WINDOW)
    sectors = []
    for by_slot in (False, True):
        kernel, code = compiled("sm_90a", by_slot)
        gpu = device("sm_90a", checks="race,counters")
        launch(code, *launch_args(kernel, Call(kv, ring.clone(), table, "emulator")), gpu=gpu)
        sectors.append(gpu.launches[-1].result.stats["global_sectors"])
    assert sectors == [(300 + 8) * 32 + 300, 2 * 8 * 32 + 8]


def test_bad_settings_are_named():
    for settings, name in (({"window": 0}, "window"), ({"warps": 17}, "warps")):
        with pytest.raises(ConfigError, match=name):
            KvAppend(**settings)
