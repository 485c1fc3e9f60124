"""`mla_page_table`: tables and checks on both back ends, schedules, budget, faults, schema, bad arguments."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.mla_page_table import op as page_table_op
from dsv4lib.ops.mla_page_table.arguments import fake_args, launch_args
from dsv4lib.ops.mla_page_table.faults import FAULTS
from dsv4lib.ops.mla_page_table.kernel import MlaPageTable
from dsv4lib.ops.mla_page_table.op import NONE, Call, MisalignedPage, mla_page_table
from dsv4lib.pages.mla.page_table import slots_of, text_example
from tests.budget import built, small
from tests.cases import cases

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
ARCHS = cases("sm_90a", full=["sm_100a"])
TOKENS = [300, 0, 33, 1, 128, 77]  # of each request of the map
REQUESTS = torch.tensor([3, 5, -1, 0, 2, 4, 1]).int()
LENGTHS = torch.tensor([1, 77, 9, 300, 33, 0, -5]).int()


def wanted(slots, requests, lengths, page, starts=None, width=0):
    """The table, token by token, from the sentence that defines it."""
    rows = []
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        start = 0 if starts is None else int(starts[row])
        tokens = range(length) if request >= 0 and start >= 0 else ()
        pages = {t // page: int(slots[request, start + t // page * page]) // page for t in tokens}
        rows.append([pages.get(p, -1) for p in range(width or -(-slots.shape[1] // page))])
    return torch.tensor(rows).int()


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize(
    ("page", "width"), cases((16, 307), (128, 301), full=[(1, 300), (3, 305), (64, 320), (32, 303), (4096, 5000)])
)
def test_tables(page, width, backend):
    """Requests out of order and padded ones; what is past a row's pages keeps its value; no misaligned token."""
    slots = slots_of(TOKENS, page, width, seed=page)
    given, options = (slots, REQUESTS, LENGTHS, page), {"backend": backend}
    assert torch.equal(mla_page_table(*given, **options), wanted(*given))
    out = torch.full((7, 400), 7).int()[:, 3:]
    found = torch.full((7, 2), 7).int()
    assert mla_page_table(*given, out=out, misaligned=found, **options) is out
    assert torch.equal(out, torch.where((want := wanted(*given, width=397)) < 0, 7, want))
    assert found.tolist() == [[0, NONE]] * 7


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_starts(backend):
    """Rows that begin within a request; one at a token that does not begin a page is misaligned, all of it."""
    slots, starts = slots_of(TOKENS, 16, 310, seed=1), torch.tensor([0, 16, 3, 32, -1]).int()
    given = slots, torch.tensor([3, 5, -1, 0, 0]).int(), torch.tensor([1, 61, 9, 268, 5]).int(), 16
    assert torch.equal(mla_page_table(*given, starts=starts, check=True, backend=backend), wanted(*given, starts))
    starts[1] = 17
    given[2][1] = 60
    with pytest.raises(MisalignedPage) as caught:
        mla_page_table(*given, starts=starts, check=True, backend=backend)
    assert (caught.value.row, caught.value.request, caught.value.token, caught.value.count) == (1, 5, 17, 60)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_the_texts_example_is_refused(backend):
    """Slots 14 to 313 in pages of 128: attention would read slot 0 for token 0."""
    slots, ids, lengths = text_example()
    table = mla_page_table(slots, ids, lengths, 128, backend=backend)
    assert table.tolist() == [[0, 1, 2]]  # what the text expects, and what attention would use
    with pytest.raises(MisalignedPage, match=r"req_to_token\[0, 0\]=14 is not allowed: slot % 128 == 0") as caught:
        mla_page_table(slots, ids, lengths, 128, check=True, backend=backend)
    assert (caught.value.slot, caught.value.count) == (14, 300)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_one_token_elsewhere_is_named(backend):
    """Two tokens of a page exchanged; a token without a slot; a page that continues in another."""
    slots = slots_of(TOKENS, 16, 300, seed=2)
    slots[0, [21, 25]] = slots[0, [25, 21]]
    slots[2, 32] = -1
    slots[5, 40:48] = slots[5, 8:16]
    found = torch.empty(7, 2).int()
    table = mla_page_table(slots, REQUESTS, LENGTHS, 16, misaligned=found, backend=backend)
    assert found.tolist() == [[0, NONE], [8, 40], [0, NONE], [2, 21], [1, 32], [0, NONE], [0, NONE]]
    assert table[4].tolist()[:3] == [*(slots[2, [0, 16]] // 16).tolist(), -1]
    with pytest.raises(MisalignedPage) as caught:
        mla_page_table(slots, REQUESTS, LENGTHS, 16, check=True, backend=backend)
    assert (caught.value.row, caught.value.request, caught.value.token) == (1, 5, 40)
    slots[2, 16:32] = -1  # a whole page without slots
    mla_page_table(slots, REQUESTS, LENGTHS, 16, misaligned=found, backend=backend)
    assert found[4].tolist() == [17, 16]


@pytest.mark.parametrize("check", [False, True])
def test_tokens_are_read_only_to_be_checked(check, monkeypatch):
    seen = []
    monkeypatch.setattr(page_table_op.launching, "launch", lambda *given: seen.append(given[2]))
    monkeypatch.setattr(page_table_op, "_raise_misaligned", lambda *given: None)
    slots = slots_of(TOKENS, 16, 310, seed=2)
    mla_page_table(slots, REQUESTS, LENGTHS, 16, check=check, backend="emulator")
    assert seen == [{"started": False, "checked": check}]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("checked", [False, True])
def test_schedules_and_budget(checked, arch):
    """All schedules write the same; neither request, start nor length makes the kernel leave the map or the table."""
    kernel, code = built(MlaPageTable, fake_args, arch, True, checked)
    assert code.local_bytes == code.smem_bytes == 0 and code.registers <= 32 and small(code)
    whole = slots_of(TOKENS, 16, 310, seed=3)
    slots, results = whole[:, 2:302], []  # rows 8 bytes off, between others
    slots[0] = whole[0, :300].clone()
    big = 2**31 - 1
    ids = torch.tensor([0, 0, 6, big, -(2**31), 0, 0, 0, 0]).int()
    lengths = torch.tensor([290, big, 5, 5, 5, 5, 5, 5, -(2**31)]).int()
    starts = torch.tensor([0, 16, 0, 0, 0, 300, big, -(2**31), 0]).int()
    for schedule in SCHEDULES:
        out = torch.full((9, 20), 7).int()
        found = torch.tensor([[0, NONE]] * 9).int() if checked else None
        gpu = device(arch, checks="race", schedule=schedule, seed=1)
        call = Call(slots, ids, lengths, starts, out[:, :18], found, 16, "emulator")
        launch(code, *launch_args(kernel, call), gpu=gpu)
        assert not gpu.hazards
        results.append((out, found))
    out, found = results[0]
    assert all(torch.equal(one, out) and (f is None or torch.equal(f, found)) for one, f in results)
    assert out[:2, :18].tolist() == [(slots[0, start::16] // 16).tolist()[:18] for start in (0, 16)]
    assert found is None or found.tolist() == [[0, NONE]] * 9
    assert bool((out[2:] == 7).all()) and bool((out[:, 18:] == 7).all())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name, arch, monkeypatch):
    """By the table, or by what the check of the text's example finds."""
    monkeypatch.setattr(page_table_op, "MlaPageTable", FAULTS[name])
    slots = slots_of(TOKENS, 16, 310, seed=4)
    starts = torch.tensor([0, 16, 0, 32, 0, 0, 0]).int()
    lengths = LENGTHS - torch.tensor([0, 16, 0, 32, 0, 0, 0]).int()
    with backends.emulating(arch):
        table = mla_page_table(slots, REQUESTS, lengths, 16, starts=starts, backend="emulator")
        example, found = text_example(), torch.empty(1, 2).int()
        mla_page_table(*example, 128, misaligned=found, backend="emulator")
    same = torch.equal(table, wanted(slots, REQUESTS, lengths, 16, starts))
    assert same == (name == "NeighboursAlone")
    assert not same or found.tolist() != [[300, 0]]


def test_nothing_to_do():
    slots, none = slots_of(TOKENS, 16, 310, seed=4), torch.zeros(0).int()
    assert mla_page_table(slots, none, none, 16, check=True, backend="emulator").shape == (0, 20)
    empty = mla_page_table(slots[:, :0], REQUESTS[:1], torch.zeros(1).int(), 16, backend="emulator")
    assert empty.shape == (1, 0)


def test_schema():
    slots, out, found = slots_of(TOKENS, 16, 310, seed=4), torch.full((7, 20), -1).int(), torch.zeros(7, 2).int()
    given = slots, REQUESTS, LENGTHS, torch.zeros(7).int(), out, found, 16, "reference"
    torch.library.opcheck(torch.ops.dsv4.mla_page_table, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_bad_arguments_are_named(backend):
    slots, ids, lengths = slots_of(TOKENS, 16, 310, seed=5), torch.tensor([0, 2]).int(), torch.tensor([300, 33]).int()
    for name, change in (
        ("req_to_token", {"req_to_token": slots.long()}),
        ("req_to_token.shape", {"req_to_token": slots[0]}),
        ("req_to_token.stride()", {"req_to_token": slots.repeat_interleave(2, 1)[:, ::2]}),
        ("requests", {"requests": ids.long()}),
        ("requests", {"requests": torch.tensor([6, 2]).int()}),
        ("lengths", {"lengths": torch.tensor([311, 2]).int()}),
        ("lengths.shape", {"lengths": lengths[:1]}),
        ("lengths", {"starts": torch.tensor([16, 0]).int()}),
        ("lengths", {"out": torch.zeros(2, 18).int()}),
        ("starts", {"starts": torch.zeros(2)}),
        ("out.shape", {"out": torch.zeros(3, 20).int()}),
        ("out.stride()", {"out": torch.zeros(2, 40).int()[:, ::2]}),
        ("misaligned.shape", {"misaligned": torch.zeros(2, 3).int()}),
        ("page_size", {"page_size": 0}),
        ("page_size", {"page_size": 65537}),
    ):
        given = {"req_to_token": slots, "requests": ids, "lengths": lengths, "page_size": 16, "backend": backend}
        if name == "lengths" and "lengths" not in change and "starts" in change:
            change = change | {"lengths": torch.tensor([300, 33]).int()}
        with pytest.raises(ArgumentError) as caught:
            mla_page_table(**given | change)
        assert caught.value.name == name
    with pytest.raises(ConfigError, match="threads"):
        MlaPageTable(threads=33)


@pytest.mark.parametrize("checked", [False, True])
def test_repeated_calls_read_what_is_there_now(checked):
    """More calls than a plan takes to be made, on the same memory with other contents; counts start from 0."""
    slots, ids, lengths = slots_of(TOKENS, 16, 310, seed=6), torch.tensor([0, 2]).int(), torch.tensor([300, 33]).int()
    out, found = torch.zeros(2, 20).int(), torch.zeros(2, 2).int() if checked else None
    for call in range(6):
        slots[0, 17 + call] += 5
        ids.copy_(ids.roll(1))
        lengths.copy_(lengths.roll(1))
        out.fill_(-1)
        mla_page_table(slots, ids, lengths, 16, out=out, misaligned=found, backend="emulator")
        assert torch.equal(out, wanted(slots, ids, lengths, 16))
        assert found is None or sorted(found.tolist()) == [[0, NONE], [call + 1, 17]]
