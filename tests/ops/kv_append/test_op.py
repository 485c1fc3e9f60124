"""`kv_append` as PyTorch sees it: back ends, forms, ragged and empty batches, schema, torch.compile, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.common.requests import plan
from dsv4lib.ops.kv_append.op import kv_append, settings_for
from dsv4lib.reference.cache import append_window

WINDOW = 16
BATCHES = {  # rows, positions of the first ones
    "one token": ([1], [37]),
    "one at the end of the ring": ([1], [15]),
    "ragged": ([5, 0, 1, 21, 3, 2], [0, 7, 3, 1_048_550, -1, 7]),
    "longer than the ring": ([40], [3]),
    "no request": ([2, 1], [-1, -5]),
}


def case(counts, starts, window=WINDOW, spare=2, seed=0):
    """(kv, rings, table, rings afterwards); rings that are not written hold NaN, too."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(counts)
    kv = torch.randn(int(counts.sum()), 512, generator=generator).bfloat16()
    ring = torch.full((len(counts) + spare, window, 512), float("nan"), dtype=torch.bfloat16)
    places = torch.randperm(len(ring), generator=generator)[: len(counts)]
    table = plan(torch.cat((counts.new_zeros(1), counts.cumsum(0))), torch.tensor(starts), places)
    want = ring.clone()
    for row, count, start, place in table.tolist():
        if count and start >= 0:
            want[place] = append_window(want[place : place + 1], kv[None, row : row + count], start)[2][0]
    return kv, ring, table, want


def same(found, want):
    return torch.equal(found.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_both_back_ends(name, backend):
    kv, ring, table, want = case(*BATCHES[name])
    assert kv_append(kv, ring, table, backend=backend) is None
    assert same(ring, want)


def test_long_batches_have_a_warp_a_slot():
    """As soon as rings have fewer slots than the batch has rows, and not before."""
    assert settings_for(128, 8, 16) == {"window": 16, "by_slot": False}
    assert settings_for(129, 8, 16) == {"window": 16, "by_slot": True}
    chosen = {name: settings_for(sum(counts), len(counts), WINDOW)["by_slot"] for name, (counts, _) in BATCHES.items()}
    assert chosen["longer than the ring"] and not chosen["ragged"]


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_nothing_to_do(backend):
    kv, ring, table, _ = case([3], [4])
    before = ring.clone()
    for given in ((kv[:0], ring, table[:0]), (kv, ring, table[:0]), (kv[:0], ring[:0], table[:0])):
        kv_append(*given, backend=backend)
    assert same(ring, before)


def test_rows_and_rings_of_larger_tensors():
    """A part of a projection's output, rings between other state."""
    kv, ring, table, want = case(*BATCHES["ragged"])
    wide, room = torch.zeros(len(kv), 1024).bfloat16(), torch.zeros(len(ring), WINDOW + 3, 520).bfloat16()
    wide[:, 512:], room[:, 1:-2, :512] = kv, ring
    kv_append(wide[:, 512:], room[:, 1:-2, :512], table, backend="emulator")
    assert same(room[:, 1:-2, :512].contiguous(), want)
    assert not room[:, 0].any() and not room[:, -2:].any() and not room[..., 512:].any()


def test_schema_and_fake():
    kv, ring, table, _ = case(*BATCHES["ragged"])
    result = torch.library.opcheck(torch.ops.dsv4.kv_append.default, (kv, ring.nan_to_num(), table, "reference"))
    assert set(result.values()) == {"SUCCESS"}, result
    before = compile_cache.default().counts.compiled
    with FakeTensorMode():
        room = torch.empty(9, 128, 512, dtype=torch.bfloat16)
        kv_append(torch.empty(4096, 512, dtype=torch.bfloat16), room, torch.empty(3, 4, dtype=torch.int32))
        with pytest.raises(ArgumentError, match="ring"):
            kv_append(torch.empty(4, 512, dtype=torch.bfloat16), room.float(), torch.empty(3, 4, dtype=torch.int32))
    assert compile_cache.default().counts.compiled == before


def test_torch_compile_takes_it_whole():
    """What is read from the rings after the append has the new rows."""

    def layer(x, ring, table):
        kv_append(x * 2, ring, table, backend="emulator")
        return ring.nan_to_num().sum(-1) + 1

    kv, ring, table, _ = case(*BATCHES["ragged"])
    torch._dynamo.reset()
    fast, other = torch.compile(layer, fullgraph=True, backend="aot_eager"), ring.clone()
    assert torch.equal(fast(kv, other, table), layer(kv, ring, table)) and same(other, ring)


def _with(table, place, value):
    changed = table.clone()
    changed[place] = value
    return changed


def test_bad_arguments_are_named():
    kv, ring, table, _ = case(*BATCHES["ragged"])
    before = ring.clone()
    for change, name in (
        ({"kv": kv.float()}, "kv"),
        ({"kv": kv[:, :256]}, r"kv\.shape"),
        ({"kv": kv[0]}, "kv"),
        ({"kv": None}, "kv"),
        ({"requests": table.tolist()}, "requests"),
        ({"kv": kv.T.contiguous().T}, r"kv\.stride"),
        ({"ring": ring.float()}, "ring"),
        ({"ring": ring[0]}, "ring"),
        ({"ring": ring[..., :256]}, r"ring\.shape"),
        ({"requests": table.long()}, "requests"),
        ({"requests": table[:, :3]}, r"requests\.shape"),
        ({"requests": _with(table, (0, 0), -1)}, r"requests\[:, 0\]"),
        ({"requests": _with(table, (3, 0), 2)}, "requests.*order"),
        ({"requests": _with(table, (5, 1), 3)}, "requests.*apart"),
        ({"requests": _with(table, (0, 3), int(table[3, 3]))}, "requests.*once"),
        ({"requests": _with(table, (0, 3), len(ring))}, r"requests\[:, 3\]"),
        ({"backend": "magic"}, "backend"),
    ):
        with pytest.raises(ArgumentError, match=name):
            kv_append(**{"kv": kv, "ring": ring, "requests": table, "backend": "emulator", **change})
    assert same(ring, before)
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable):
            kv_append(kv, ring, table, backend="native")
