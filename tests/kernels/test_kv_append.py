"""The append kernel and its op: the bits of the reference's ring, both architectures, schedules, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib import backends
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.kernels.kv_append.arguments import fake_args, launch_args
from dsv4lib.kernels.kv_append.simt import KvAppend
from dsv4lib.ops import compile_cache
from dsv4lib.ops.kv_append import kv_append
from dsv4lib.ops.requests import plan
from dsv4lib.reference.cache import append_window

NATIVE = backends.status("native", "sm_90a")
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


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
@pytest.mark.parametrize("counts", [RAGGED, ([1] * 40, [*range(40)])], ids=["ragged", "forty requests"])
def test_any_chunks(arch, counts):
    kernel, code = compile_cache.default().get(KvAppend, {"window": WINDOW}, fake_args, arch)
    assert code.local_bytes == 0
    kv, ring, table, want = case(*counts, WINDOW)
    assert not torch.equal(ring, want)
    for schedule in ("round_robin", "adversarial", "random"):
        found, gpu = ring.clone(), device(arch, checks="race", schedule=schedule, seed=2)
        launch(code, *launch_args(kernel, kv, found, table), gpu=gpu)
        assert not gpu.hazards and torch.equal(found, want)


def test_op():
    kv, ring, table, want = case(*RAGGED, WINDOW)
    for backend in ("emulator", "reference"):
        found = ring.clone()
        kv_append(kv, found, table, backend=backend)
        assert torch.equal(found, want)
    kv_append(kv[:0], found, table[:0], backend="emulator")
    result = torch.library.opcheck(torch.ops.dsv4.kv_append.default, (kv, ring.clone(), table, "reference"))
    assert set(result.values()) == {"SUCCESS"}
    with FakeTensorMode():
        rows = torch.empty(4096, 512, dtype=torch.bfloat16)
        kv_append(rows, torch.empty(9, 128, 512, dtype=torch.bfloat16), torch.empty(3, 4, dtype=torch.int32))


def test_bad_arguments_are_named():
    kv, ring, table, _ = case(*RAGGED, WINDOW)
    twice, behind = table.clone(), table.clone()
    twice[0, 3], behind[-1, 1] = twice[2, 3], 3
    for change, name in (
        ({"kv": kv.float()}, "kv"),
        ({"ring": ring[..., :256]}, "ring"),
        ({"requests": table.long()}, "requests"),
        ({"requests": table.flip(0)}, "requests.*order"),
        ({"requests": twice}, "requests.*once"),
        ({"requests": behind}, "requests.*apart"),
    ):
        with pytest.raises(ArgumentError, match=name):
            kv_append(**{"kv": kv, "ring": ring, "requests": table, "backend": "emulator", **change})
    for settings, name in (({"window": 0}, "window"), ({"warps": 17}, "warps")):
        with pytest.raises(ConfigError, match=name):
            KvAppend(**settings)


@pytest.mark.sm90
@pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)
@pytest.mark.parametrize("counts", [RAGGED, ([1] * 128, [*range(128)]), ([4000], [77])], ids=["ragged", "step", "long"])
def test_on_a_hopper(counts):
    kv, ring, table, want = case(*counts, 128)
    found = ring.cuda()
    kv_append(kv.cuda(), found, table.cuda(), backend="native")
    assert torch.equal(found.cpu(), want)
