"""The page on rings and pages: its inputs, counts and figures without a kernel, and every fault found with one."""

from __future__ import annotations

import pytest
import torch

from dsv4lib.formats import kv_entry
from dsv4lib.ops.common.requests import check_values
from dsv4lib.ops.kv_append import faults as kv_append_faults
from dsv4lib.ops.kv_gather import faults as kv_gather_faults
from dsv4lib.ops.quantize import faults as quantize_faults
from dsv4lib.pages.cache import figures, managed, run_case
from dsv4lib.pages.cache.run_case import DIM, NOPE, PAGE, WINDOW, Kernels
from dsv4lib.pages.common import faults as injected
from dsv4lib.viz.style import alt_text

# The checks that see a fault, and those that do not although they look at the same bytes.
SEEN = {
    "OneSlotLate": ({"slots_wrong"}, {"hazards"}),
    "SlotOfTheRow": ({"slots_wrong"}, {"hazards"}),
    "OlderRowsToo": ({"hazards"}, {"page_bytes"}),
    "ScaleOneGroupOn": ({"page_bytes", "round_trip", "nope_error"}, {"rope_wrong", "gathered_wrong"}),
    "ScaleRoundedDown": ({"page_bytes", "round_trip", "nope_error"}, {"rope_wrong", "gathered_wrong"}),
    "NanScaleDropped": ({"nan_wrong"}, {"page_bytes", "round_trip"}),
    "RopeQuantised": ({"page_bytes", "rope_wrong"}, {"nope_error", "gathered_wrong"}),
    "PagesTransposed": ({"page_bytes", "moved_wrong"}, {"round_trip", "skipped_wrong"}),
    "MinusOneIsRowZero": ({"skipped_wrong"}, {"round_trip", "gathered_wrong"}),
    "ScaleOfTheNextGroup": ({"gathered_wrong", "round_trip"}, {"page_bytes", "pairs_wrong"}),
    "NanScaleIsInfinity": ({"pairs_wrong"}, {"round_trip", "gathered_wrong", "nan_wrong"}),
}


@pytest.mark.filterwarnings("ignore:the emulator reports")  # of a race, which is one of the faults
@pytest.mark.parametrize("fault", ["none", *SEEN])
def test_a_fault_is_seen_by_its_checks_alone(fault):
    seen, blind = SEEN.get(fault, (set(), set()))
    found = run_case.judged(run_case.kernels_of(fault), 300, 0, "emulator")
    red = {check for check, value in found.items() if value > figures.ALLOWED.get(check, 0)}
    assert seen <= red and not blind & red and bool(red) == bool(seen), found


def test_every_fault_is_among_them():
    modules = kv_append_faults, quantize_faults, kv_gather_faults
    assert {name for module in modules for name in module.FAULTS} == set(SEEN) == set(run_case.FAULTS)
    for name, kernels in run_case.FAULTS.items():
        changed = [kernel for kernel, right in zip(kernels, Kernels(), strict=True) if kernel is not right]
        assert len(changed) == 1 + (name == "PagesTransposed") and all(name == one.__name__ for one in changed)


def test_rings_from_positions_alone():
    held = run_case.newest((3, 126, 200))
    assert held[0].tolist() == [0, 1, 2] + [-1] * 125
    assert held[1].tolist() == [128, *range(1, 128)]
    assert sorted(held[2].tolist()) == list(range(201, 329)) and bool((held[2] % WINDOW == torch.arange(128)).all())
    pieces = (100, 1, 40, 300)
    kv = run_case.keys(sum(pieces), 5)
    assert torch.equal(run_case.grown(kv, pieces, "reference")[0], run_case.newest(pieces))


def test_the_ragged_batch_is_one_the_op_takes():
    batch = run_case.ragged(300, 1)
    check_values(batch.table, len(batch.kv), batch.rings)
    ring, _ = run_case.append(batch, "reference")
    assert run_case.slots_wrong(batch, ring) == 0
    ring[1, 7, 3] = 1.0  # of no request
    ring[5, 9, 511] = 0.0
    assert run_case.slots_wrong(batch, ring) == 2
    words = alt_text(figures.owners(batch, ring))
    assert "1 decode, 20 chunk of 20 at 120, 128 prefill of 300, 0 left out, 64 chunk of 64 at 4,090" in words


def test_pools_and_page_tables():
    pool = run_case.pool_of((19, 5, 33), 3)
    assert len(pool.indices.unique()) == 57 and pool.pages == 12 and [len(t) for t in pool.tables] == [3, 1, 5]
    pages, _ = run_case.store(pool, "reference")
    assert run_case.page_bytes(pool, pages) == 0
    pages[0, -1] ^= 1  # padding of the page
    assert run_case.page_bytes(pool, pages) == 1
    picked = run_case.selection(pool, 2, 24, 0)
    assert int((picked < 0).sum()) == 4 and bool(torch.isin(picked[picked >= 0] // PAGE, pool.tables[2]).all())
    shuffled, indices = run_case.moved(pages, picked, 0)
    assert not torch.equal(shuffled, pages) and bool((indices[picked < 0] == -1).all())
    assert torch.equal(kv_entry.gather(shuffled, PAGE, indices)[0], kv_entry.gather(pages, PAGE, picked)[0])


def test_errors_in_half_steps():
    kv = torch.zeros(1, DIM, dtype=torch.bfloat16)
    kv[0, :5] = torch.tensor([448.0, 232.0, 17.0, 2.0**-9, 3.0])  # scale 1: halves of 32, 16, 2, 2^-9
    found = kv.clone()
    found[0, 1], found[0, 2], found[0, 3] = 224.0, 16.0, 0.0
    assert run_case.half_steps(found, kv)[0, :5].tolist() == [0.0, 1.0, 1.0, 2.0, 0.0]
    keys = run_case.keys(40, 2, octaves=24)
    assert float(run_case.half_steps(kv_entry.fake_quantize(keys), keys).max()) <= 1


def test_what_is_no_number():
    odd = run_case.no_numbers(0)
    want = kv_entry.fake_quantize(odd.kv)
    assert run_case.not_finite_wrong(want, odd.kv) == 0 and int(want.isnan().sum()) == 64 + 64 + 1
    assert run_case.not_finite_wrong(want.nan_to_num(), odd.kv) == 129
    pages, indices = run_case.all_pairs()
    values, _ = kv_entry.gather(pages, PAGE, indices, torch.float64)
    assert values[127, 56] == 1 and values[130, 0x7E] == 8 * 448 and bool(values[255, :NOPE].isnan().all())


@pytest.mark.parametrize("fault", ["none", *managed.FAULTS])
def test_a_story_of_the_manager(fault):
    """A hit, an eviction, a preemption; each fault is seen by its number."""
    told = managed.story("reference", 0, fault)
    seen = {
        "StaleRing": told.wrong > 0,
        "FirstBlockLost": told.hits["B"] != 128,
        "PaddingNotCounted": max(one.unaccounted for one in told.moments) > 0,
        "KeptOnTheHost": told.leaked > 0,
    }
    expected = {fault, "PaddingNotCounted"} if fault == "KeptOnTheHost" else {fault}  # the account misses a lost page
    assert {name for name, red in seen.items() if red} == expected - {"none"}
    assert told.preempted == 1 and told.evicted > 0 and told.compared > 5000
    assert all(sum(one.live.values()) + one.cached + one.unused == managed.PAGES for one in told.moments)


def test_a_page_that_stays_is_a_leak(monkeypatch):
    monkeypatch.setattr(managed.Manager, "evict", lambda self: 0)
    told = managed.story("reference")
    assert told.leaked == told.moments[-1].cached > 0


def test_values_depend_on_all_tokens_before():
    served = managed._Server("reference", 0)
    group = served.manager.groups[0]
    one, other = served.values([1, 2, 3], group, 0), served.values([7, 2, 3], group, 0)
    assert not bool((one == other).all(-1).any()) and not torch.equal(one, served.values([1, 2, 3], group, 1))


def test_figures_of_the_manager(capsys):
    told = managed.story("reference")
    words = alt_text(figures.pool_over_time(told))
    assert "B comes: 180, 128 found: " in words and "emptied: 0 live, 0 cached" in words
    assert set(figures.GROUP_COLOURS) == set(told.moments[0].live)
    figures.group_bytes(told)
    assert "74,752" in capsys.readouterr().out


def test_figures(capsys):
    pool = run_case.pool_of((19, 5, 33), 0)
    stored = kv_entry.fake_quantize(pool.kv)
    assert "position mod 128" in alt_text(figures.flow())
    assert "10 of 80 cells are 0" in alt_text(figures.stored_error(stored, pool.kv))
    wide = run_case.keys(64, 0, octaves=24)
    words = alt_text(figures.octave_error(wide, kv_entry.fake_quantize(wide)))
    assert "to 100; 4 significant bits goes from 6.25" in words
    assert "5 request 1" in alt_text(figures.pool_map(pool)) and "39 unused" in alt_text(figures.pool_map(pool))
    pages, every = run_case.all_pairs()
    found, _ = kv_entry.gather(pages, PAGE, every)
    assert "24 x 256 cells" in alt_text(figures.pair_map(found)) and "302 NaN" in alt_text(figures.pair_map(found))
    launches = {"one": injected.Traffic(1024, 2048, 2), "two": injected.Traffic(100, 101, 1)}
    assert "over the floor: two has least, 1.01" in alt_text(injected.traffic(launches, "row"))
    figures.index_table(torch.tensor([-1, 9]), stored[:2])
    figures.odd_table(pool.kv[:1], stored[:1])
    figures.kept_bytes()
    out = capsys.readouterr().out
    assert "nothing is read" in out and "576..1,151" in out and "4,616..4,622" in out and "0.570" in out
