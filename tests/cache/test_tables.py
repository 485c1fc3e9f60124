"""Tables fit the arguments of ops, padding is padding, and a step's tables outlive the next one's filling."""

import math

import caches
import pytest
import torch

from dsv4lib.cache import Storage, Work, read_slots, tables, window_positions
from dsv4lib.cache.faults import inject
from dsv4lib.cache.tables import Staging, Tables
from dsv4lib.ops.common import requests as requests_table


@pytest.fixture
def uninitialised_memory_is_filled():
    """Memory that PyTorch does not clear holds no zeros: integers are the largest there are."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def begun(adapter, *prompts):
    for name, count in enumerate(prompts):
        adapter.add(name, caches_text(count))
    return adapter.manager.begin([Work(name, count) for name, count in enumerate(prompts)])


def caches_text(count):
    return [i % 3 + 1 for i in range(count)]


def check_fields():
    adapter = caches.paged()
    manager = adapter.manager
    made = Tables(manager, 4, 40, 64)
    short = made["blocks.csa"].data_ptr(), made["tokens"].clone
    step = begun(adapter, 22, 3)
    for _ in made.stagings:  # each buffer has held more than the next step has
        made.fill(step)
    manager.commit(step)
    for name in (0, 1):
        manager.append(name, caches_text(18))
    step = manager.begin([Work(1, 18)])
    made.fill(step)
    assert made["blocks.csa"].data_ptr() == short[0], "a captured graph reads these addresses"
    assert made["tokens"].tolist() == caches_text(18) + [0] * 22
    assert made["positions"].tolist()[:18] == list(range(3, 21)) and made["request_ids"].tolist()[18:] == [-1] * 22
    assert made["lengths"].tolist() == [21, 0, 0, 0] and made["starts"].tolist() == [3, -1, -1, -1]
    for g in manager.groups:
        parts = g.pages(manager.pool.page_bytes)
        if g.kind == "ring":
            plan = made[f"requests.{g.name}"][0]
            requests_table.check_values(plan, 40, manager.pool.count)
            assert requests_table.used_of(plan)[:, :3].tolist() == [[0, 18, 3]]
            continue
        values = torch.arange(3, 21, dtype=torch.int32)
        closes = (values + 1) % g.rate == 0
        for part in range(parts):
            slots = made[f"slots.{g.name}"][part]
            expected = [
                manager.block(1, g, int(p)).pages[part] * g.entries + g.row(int(p)) if close else -1
                for p, close in zip(values, closes, strict=True)
            ]
            assert slots.tolist() == expected + [-1] * 22
            ids = made["request_ids"][:18]
            again = read_slots(made[f"blocks.{g.name}"][part], ids, (values // g.rate)[:, None], g)[:, 0]
            assert torch.equal(again[closes], slots[:18][closes])
    seen = window_positions(made["positions"][:18], 8)
    assert seen[0].tolist() == [-1] * 4 + [0, 1, 2, 3] and seen[-1].tolist() == list(range(13, 21))


def check_late_copies(monkeypatch):
    """A device that copies late, as a GPU may: only what was waited for, or the newest two, is sure to be copied."""
    late = []

    class Late(Staging):
        def wait(self):
            for one in [one for one in late if one[0] is self]:
                one[1].copy_(self.host)
                late.remove(one)

        def copy_to(self, target):
            late.append((self, target.clone().copy_(self.host) * 0))

    monkeypatch.setattr(tables, "Staging", Late)
    adapter = caches.paged()
    made = Tables(adapter.manager, 2, 16, 32)
    first = begun(adapter, 7)
    made.fill(first)
    expected = made.stagings[made.turn].host.clone()
    adapter.manager.commit(first)
    adapter.manager.append(0, [1, 2])
    made.fill(adapter.manager.begin([Work(0, 2)]))
    staging, target = late[0]
    target.copy_(staging.host)
    assert torch.equal(target, expected), "the first step's copy reads what the second step wrote"


def test_tables_hold_what_kernels_read():
    check_fields()


def test_every_table_starts_on_16_bytes():
    """Kernels read plans of rings 16 bytes at a time, whatever sizes other tables have."""
    for positions in (40, 64, 96):
        made = Tables(caches.paged().manager, 1, 13, positions)
        assert [name for name, field in made.fields.items() if field.offset % 4] == []


def test_gaps_between_tables_hold_zeros(uninitialised_memory_is_filled):
    """A copy of the whole buffer is the same whatever memory held before."""
    adapter = caches.paged()
    made = Tables(adapter.manager, 3, 21, 64)
    made.fill(begun(adapter, 5))
    gaps = torch.ones(made.size, dtype=torch.bool)
    for field in made.fields.values():
        gaps[field.offset : field.offset + math.prod(field.shape)] = False
    assert gaps.sum() > 3 and not made.device[gaps].any()


def test_a_last_token_at_a_border_has_no_value_that_looks_ahead():
    """Without drafts the MTP window has no block for it until the token ahead is known."""
    adapter = caches.paged(drafts=0)
    made, step = Tables(adapter.manager, 1, 16, 32), begun(adapter, 9)  # 8 is the first position of a block of 4
    made.fill(step)
    slots = made["slots.mtp_window"][0]
    assert slots[:8].min() >= 0 and slots[8] == -1 and made["slots.window"][0, 8] >= 0


def test_a_step_in_flight_keeps_its_tables(monkeypatch):
    check_late_copies(monkeypatch)


@pytest.mark.parametrize("name", ("padding_keeps_tokens", "captured_lengths", "one_staging_buffer"))
def test_faults_of_tables_are_found(name, monkeypatch):
    with inject(name), pytest.raises((AssertionError, ValueError)):
        check_late_copies(monkeypatch) if name == "one_staging_buffer" else check_fields()


def test_layers_share_no_byte():
    adapter = caches.paged()
    storage = Storage(adapter.manager)
    seen = set()
    for g in adapter.groups.values():
        block = adapter.manager.pool.allocate(g)
        for layer in range(g.layers):
            part, data = storage.layer(g, layer)
            own = data[block.pages[part]]
            first = own.data_ptr()
            bytes_of = set(range(first, first + len(own)))
            assert len(own) == g.layer_bytes and not seen & bytes_of
            seen |= bytes_of


def test_bad_sizes_are_refused():
    adapter = caches.paged()
    with pytest.raises(ValueError, match="tokens=0"):
        Tables(adapter.manager, 1, 0, 8)
    step = begun(adapter, 7)
    with pytest.raises(ValueError, match="tokens=7 is not allowed: 4 or fewer"):
        Tables(adapter.manager, 1, 4, 16).fill(step)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_tables_start_on_16_bytes(rows):
    """Of any number of requests and tokens: kernels refuse a plan that does not."""
    made = Tables(caches.paged().manager, rows, 2 * rows + 1, 64)
    assert {name: made[name].data_ptr() % 16 for name in made.fields} == dict.fromkeys(made.fields, 0)


def test_before_the_first_step_tables_name_nothing(monkeypatch):
    """A graph may be captured with them: memory that somebody used before is overwritten."""
    monkeypatch.setattr(torch, "empty", lambda *size, **given: torch.full(size, 2**20, **given))
    made = Tables(caches.paged().manager, 2, 16, 32)
    assert made.size and all(bool((made[name] < 0).all()) for name in made.fields)
