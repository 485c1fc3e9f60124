"""`kv_append`, `quantize_kv_entries` and `kv_gather` on a Hopper: full sizes, values the CPU refuses, graphs."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.formats import kv_entry
from dsv4lib.ops.kv_append.op import kv_append, settings_for
from dsv4lib.ops.kv_gather.op import kv_gather
from dsv4lib.ops.quantize.op import quantize_kv_entries
from tests.ops.kv_append.test_op import case, same

NATIVE = backends.status("native", "sm_90a")
pytestmark = [pytest.mark.sm90, pytest.mark.skipif(not NATIVE.available, reason=NATIVE.reason)]
WINDOW, PAGE = 128, 64
BATCHES = {
    "step": ([1] * 128, [*range(1000, 1128)]),
    "chunks": ([64] * 40, [*range(0, 4000, 100)]),
    "prefill": ([4096], [77]),
    "mixed": ([1, 300, 0, 5, 128], [1_048_575, 0, 3, -1, 64]),
}


@pytest.mark.parametrize("name", BATCHES)
def test_rings(name):
    """The same bits after many launches in a row, without a wait between them."""
    kv, ring, table, want = case(*BATCHES[name], WINDOW)
    ring, kv, table = ring.cuda(), kv.cuda(), table.cuda()
    for _ in range(50):
        kv_append(kv, ring, table, backend="native")
    assert same(ring.cpu(), want)


def test_places_outside_the_rings_are_left_out():
    """Both variants; on a GPU the values are not checked."""
    for counts in ([3, 2, 4], [200, 200, 300]):
        kv, ring, table, want = case(counts, [10, 20, 30], WINDOW)
        assert settings_for(len(kv), 3, WINDOW)["by_slot"] == (sum(counts) > 384)
        for row, place in ((0, len(ring)), (2, -1)):
            want[int(table[row, 3])] = float("nan")
            table[row, 3] = place
        kv_append(kv.cuda(), there := ring.cuda(), table.cuda(), backend="native")
        assert same(there.cpu(), want)


def test_rings_in_a_cuda_graph():
    """Captured once, replayed on new keys, tables and rings in the same memory; both forms."""
    for counts in ([1] * 32, [500]):
        kv, ring, table, _ = (x.cuda() for x in case(counts, [5] * len(counts), WINDOW))
        kv_append(kv, ring, table, backend="native")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kv_append(kv, ring, table, backend="native")
        for seed in (1, 2):
            starts = [97 * seed + i for i in range(len(counts))]
            *given, want = case(counts, starts, WINDOW, seed=seed)
            for there, new in zip((kv, ring, table), given, strict=True):
                there.copy_(new)
            graph.replay()
            torch.cuda.synchronize()
            assert same(ring.cpu(), want)


@pytest.mark.parametrize("count", [1, 17, 128 * 512])
def test_any_code_under_any_scale(count):
    """Random bytes: all codes, scales from 2^-127 to NaN, any bf16; one index in many is -1."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randint(256, (40, kv_entry.LAYOUT.page_bytes(PAGE)), generator=generator, dtype=torch.uint8)
    indices = torch.randint(-1, PAGE * 40, (count,), generator=generator, dtype=torch.int32)
    found = kv_gather(pages.cuda(), PAGE, indices.cuda(), backend="native").cpu()
    want, _ = kv_entry.gather(pages, PAGE, indices)
    nan = want.isnan()
    assert torch.equal(found.isnan(), nan) and same(found[~nan], want[~nan])


@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_entries_there_and_back(tokens):
    """Any order of slots; an index outside the pool stores nothing and reads zeros."""
    kv = (torch.randn(tokens, 512) * torch.logspace(-4, 4, tokens)[:, None]).bfloat16().cuda()
    pages = kv_entry.LAYOUT.allocate(-(-(tokens + 9) // PAGE), PAGE).cuda()
    indices = torch.randperm(tokens + 9)[:tokens].int().cuda()
    quantize_kv_entries(kv, pages, PAGE, indices, "native")
    want = kv_entry.fake_quantize(kv.cpu())
    assert torch.equal(kv_gather(pages, PAGE, indices, backend="native").cpu(), want)
    before = pages.clone()
    outside = torch.full_like(indices, len(pages) * PAGE)
    quantize_kv_entries(kv, pages, PAGE, outside, "native")
    assert torch.equal(pages, before)
    for beyond in (outside, torch.full_like(indices, 2**31 - 1), torch.full_like(indices, -7)):
        assert not kv_gather(pages, PAGE, beyond, backend="native").any()


def test_entries_in_a_cuda_graph():
    kv, indices = torch.randn(64, 512).bfloat16().cuda(), torch.randperm(128)[:64].int().cuda()
    pages, out = kv_entry.LAYOUT.allocate(2, PAGE).cuda(), torch.zeros(64, 512).bfloat16().cuda()

    def step():
        quantize_kv_entries(kv, pages, PAGE, indices, "native")
        kv_gather(pages, PAGE, indices, out=out, backend="native")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        kv.copy_(torch.randn(64, 512, generator=generator) * 10**seed)
        indices.copy_(torch.randperm(128, generator=generator)[:64])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), kv_entry.fake_quantize(kv.cpu()))
