"""Entries quantised into pages: every bf16 number, any page size, holes, pages far apart, the Hadamard rotation."""

from functools import cache

import pytest
import torch

from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import kv_entry
from dsv4lib.ops.quantize.arguments import entry_args, fake_args
from dsv4lib.ops.quantize.config import has_fp4_conversion
from dsv4lib.ops.quantize.entries import IndexerKeys, KvEntries
from dsv4lib.ops.quantize.op import Slots
from dsv4lib.reference import quantize as reference
from tests.budget import built, small

ARCHS = ("sm_90a", "sm_100a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
STALE = 0xA5


@cache
def compiled(arch, kernel_type, *settings):
    kernel, code = built(kernel_type, fake_args, arch, *settings)
    assert code.local_bytes == 0 and code.smem_bytes == 0 and small(code)
    return kernel, code


def kernel_of(kind, arch, dtype="bf16", rotate=True):
    if kind == "kv":
        return compiled(arch, KvEntries, dtype)
    return compiled(arch, IndexerKeys, dtype, rotate, has_fp4_conversion(arch))


def pool(kernel, entries, page_size, apart=0):
    """Pages full of stale bytes, ``apart`` more bytes from one to the next than they must be."""
    size = kernel.layout.page_bytes(page_size)
    return torch.full((-(-entries // page_size), size + apart), STALE, dtype=torch.uint8)[:, :size]


def check(kind, arch, x, indices, page_size, apart=0, rotate=True, **device):
    """Pages of the kernel and of the oracle agree to the byte, but for the payload of a NaN among rope dims."""
    kernel, code = kernel_of(kind, arch, "bf16" if x.dtype == torch.bfloat16 else "fp32", rotate)
    entries = int(indices.max()) + 3
    pages = pool(kernel, entries, page_size, apart)
    want = pages.clone()
    if kind == "kv":
        reference.kv_entries(want, page_size, indices, x)
    else:
        reference.indexer_keys(want, page_size, indices, x, rotate)
    gpu = make(arch, **device)
    launch(code, *entry_args(kernel, x, Slots(pages, page_size, indices)), gpu=gpu)
    assert not gpu.hazards
    wrong = pages != want
    if kind == "kv":
        data, expected = (kv_entry.LAYOUT.views(p, page_size)[0][..., kv_entry.NOPE :] for p in (pages, want))
        nan = torch.stack([t.clone().view(torch.bfloat16).isnan() for t in (data, expected)])
        assert torch.equal(*nan)
        wrong_bytes = wrong.to(torch.uint8)
        rope = kv_entry.LAYOUT.views(wrong_bytes, page_size)[0][..., kv_entry.NOPE :]
        rope[nan[0].repeat_interleave(2, -1)] = 0
        wrong = wrong_bytes.bool()
    assert not wrong.any(), (int(wrong.sum()), wrong.nonzero()[0].tolist())
    return pages


def rows_of(kind, tokens, dtype=torch.bfloat16, seed=0):
    """Normals, rows of very different scale."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-5, 5, tokens)[torch.randperm(tokens, generator=generator)]
    return (torch.randn(tokens, {"kv": 512, "key": 128}[kind], generator=generator) * scale[:, None]).to(dtype)


def places(tokens, seed=0):
    """Indices in any order; some entries are dropped."""
    indices = torch.randperm(tokens + 9, generator=torch.Generator().manual_seed(seed))[:tokens].int()
    indices[[0, tokens // 2]] = -1
    return indices


@pytest.fixture(params=ARCHS)
def arch(request):
    return request.param


@pytest.fixture(params=["kv", "key"])
def kind(request):
    return request.param


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("page_size", "apart"), [(1, 0), (7, 16), (64, 576)])
def test_pages(kind, arch, page_size, apart):
    """Nothing but the entries changes: not what lies between them, nor past the last page's scales."""
    check(kind, arch, rows_of(kind, 45, seed=page_size), places(45, page_size), page_size, apart)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_types_and_sizes(kind, dtype):
    """One token (a step of one request), more than a CTA holds, rows further apart than they must be."""
    for tokens in (1, 3, 37):
        wide = torch.nn.functional.pad(rows_of(kind, tokens, dtype), (0, 8))
        check(kind, "sm_90a", wide[:, :-8], torch.arange(tokens).flip(0).int(), 5)


def test_kv_every_number_as_the_largest_of_its_group(arch):
    """All 2^15 magnitudes of bf16 in a group of their own, all 2^16 numbers among the rope dims."""
    values = torch.arange(1 << 15).to(torch.int16).view(torch.bfloat16)
    values = torch.cat((values, values.new_zeros(-len(values) % 7)))
    parts = torch.linspace(-1, 1, 63).roll(17)
    groups = torch.cat((values[:, None], (values.float()[:, None] * parts).bfloat16()), 1)
    nope = groups.view(-1, 448)
    rope = (torch.arange(len(nope) * 64) % (1 << 16)).to(torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    check("kv", arch, torch.cat((nope, rope), 1), torch.arange(len(nope)).int(), 64)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rotate", [True, False])
def test_keys_with_what_is_no_number(arch, rotate):
    """A NaN or Inf reaches all of a rotated key, its block alone otherwise; sums that leave fp32; zeros."""
    x = rows_of("key", 8)
    x[0, 3], x[1, 127], x[2], x[3], x[4] = float("nan"), -float("inf"), 3e38, 0, -0.0
    x[5] = 2.0**-133
    check("key", arch, x, torch.arange(8).int(), 3, rotate=rotate)


def test_hadamard_sums_in_the_order_of_the_oracle():
    """Two large numbers that cancel, after small ones were rounded into them: what is left depends on the order."""
    x = rows_of("key", 64, torch.float32).sign() * (1 + torch.rand(64, 128, generator=torch.Generator().manual_seed(4)))
    for row, stride in enumerate((1, 2, 4, 8, 16, 32, 64)):
        x[row::7, 0] = x[row::7, stride] = 2.0**22
    check("key", "sm_100a", x, torch.arange(64).int(), 64)


def test_indices_out_of_the_pool_are_dropped(kind):
    kernel, code = kernel_of(kind, "sm_90a")
    pages, x = pool(kernel, 6, 3), rows_of(kind, 5)
    indices = torch.tensor([6, -5, 2**31 - 1, -(2**31), 4], dtype=torch.int32)
    want = pages.clone()
    options = () if kind == "kv" else (True,)
    store = reference.kv_entries if kind == "kv" else reference.indexer_keys
    store(want, 3, torch.tensor([-1, -1, -1, -1, 4]), x, *options)
    launch(code, *entry_args(kernel, x, Slots(pages, 3, indices)), gpu=make("sm_90a"))
    assert torch.equal(pages, want)


@pytest.mark.one_in(2)
def test_every_schedule_gives_the_same_bits(kind):
    x, indices = rows_of(kind, 9), places(9)
    for schedule in SCHEDULES:
        check(kind, "sm_100a", x, indices, 4, schedule=schedule, checks="race")


def test_tensors_that_vectors_cannot_serve(kind):
    kernel = {"kv": KvEntries, "key": IndexerKeys}[kind]()
    x, indices = rows_of(kind, 4), torch.arange(4).int()
    wide = torch.empty(2, kernel.layout.page_bytes(4) + 2, dtype=torch.uint8)
    with pytest.raises(ArgumentError, match="pages"):
        entry_args(kernel, x, Slots(wide[:, :-2], 4, indices))
    with pytest.raises(ArgumentError, match="pages"):
        entry_args(kernel, x, Slots(wide[:, :100], 4, indices))
    with pytest.raises(ArgumentError, match=rf"{kernel.given}\.stride"):
        entry_args(kernel, x.t().contiguous().t(), Slots(pool(kernel, 4, 4), 4, indices))
    with pytest.raises(ConfigError, match="dtype"):
        type(kernel)("fp16")
