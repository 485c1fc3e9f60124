"""The page on the compressor: its inputs, counts and figures, without a kernel; the stage runs the kernels."""

from __future__ import annotations

import pytest
import torch

from dsv4lib.bench.ops import results
from dsv4lib.formats import kv_entry
from dsv4lib.ops.compressor.faults import FAULTS, RUNNING
from dsv4lib.ops.compressor.kernel import Compressor
from dsv4lib.pages.compressor import figures, run_case
from dsv4lib.pages.compressor.run_case import CSA, HCA, INDEXER, PAGE
from dsv4lib.viz.model import OWN, PREVIOUS
from dsv4lib.viz.style import alt_text


@pytest.fixture(scope="module")
def csa() -> run_case.Tokens:
    return run_case.draw(CSA, 19, 3)


@pytest.mark.parametrize("kind", [CSA, HCA, INDEXER], ids=["csa", "hca", "indexer"])
def test_a_run_in_pieces_against_the_oracle(kind):
    """By the back end without a kernel: states, slots and pages of the outcome fit together."""
    tokens = run_case.draw(kind, 2 * kind.rate + 3, 1)
    exact, ring = run_case.truth(tokens)
    assert exact.shape == (2, kind.dim)
    for pieces in ((), (kind.rate - 1, 1, 1, kind.rate + 2)):
        found = run_case.run(tokens, "fp32", pieces, backend="reference")
        assert run_case.error(found.pages, exact) < 1e-6 and len(found.history) == max(1, len(pieces))
        assert bool((found.pages[2] == 7.0).all())
        if kind.overlap:
            assert run_case.state_wrong(found.state, ring) == 0


def test_counts_see_what_they_count(csa):
    exact, ring = run_case.truth(csa)
    found = run_case.run(csa, "fp32", backend="reference")
    off = found.pages.clone()
    off[1, 5] = float("nan")
    assert run_case.error(off, exact) == float("inf")
    found.state.z[3, 7] = float("nan")
    assert run_case.state_wrong(found.state, ring) == 1


def test_maps_of_positions(csa):
    fed = run_case.fed(CSA, 14, backend="reference")
    assert fed.tolist() == run_case.intended(CSA, 14).tolist()
    assert fed[0].tolist() == [OWN] * 4 + [0] * 10
    assert fed[2].tolist() == [0] * 4 + [PREVIOUS] * 4 + [OWN] * 4 + [0] * 2
    hca = run_case.intended(HCA, 300)
    assert torch.equal(run_case.fed(HCA, 300, backend="reference"), hca) and hca.count_nonzero() == 256


def test_shares_add_up_and_are_those_of_the_oracle(csa):
    share = run_case.shares(csa, 2)
    torch.testing.assert_close(share.sum(0), torch.ones(512, dtype=torch.float64))
    values = torch.cat((csa.kv[4:8, :512], csa.kv[8:12, 512:])).double()
    pooled = (share * values).sum(0)
    norm = csa.weights.norm.double() * pooled / (pooled.square().mean() + run_case.EPS).sqrt()
    torch.testing.assert_close(norm[:448], run_case.truth(csa)[0][2, :448])


def test_a_fault_is_injected_where_it_belongs():
    for name, kernel in FAULTS.items():
        about = HCA if kernel in RUNNING else CSA
        assert run_case.kernel_of(name, about) is kernel
        assert all(run_case.kernel_of(name, kind) is Compressor for kind in (CSA, HCA, INDEXER) if kind != about)


def test_a_race_between_warps_is_reported():
    """Also where the numbers come out right; the right kernel has none."""
    tokens = run_case.draw(HCA, 130, 1)
    assert run_case.run(tokens, "fp32", kernel=FAULTS["WarpsNotAwaited"]).hazards
    assert not run_case.run(tokens, "fp32").hazards


def test_adjacent_bytes_are_no_entry(csa):
    rows = run_case.truth(csa)[0].float()
    pages, indices = run_case.encoded(csa, "kv", rows), torch.tensor([3, -1, 1], dtype=torch.int32)
    want = kv_entry.fake_quantize(rows)[[3, 0, 1]].bfloat16()
    want[1] = 0
    assert torch.equal(run_case.gathered(pages, indices, "reference"), want)
    assert not torch.equal(run_case.gathered(pages, indices, "reference", adjacent=True), want)


def test_bytes_are_those_of_the_configuration_and_of_the_record(capsys):
    assert figures.state_table() == 0
    recorded = {row.shape: row.bytes for row in results.load() if row.op == "compressor"}
    for name, size in figures.step_bytes().items():
        assert recorded[f"Flash and Pro, {name} decode T 1"] == size


def test_figures(csa):
    steps = run_case.run(csa, "kv", (1,) * 19, backend="reference")
    held = figures.held(csa, steps)
    assert held[18].tolist() == [16, 17, 18, 11, 12, 13, 14, 15] and held[2].tolist() == [0, 1, 2] + [-1] * 5
    assert "8 slots: Ca of w-1, Cb of w" in alt_text(figures.flow())
    assert "0 of 96 cells are 0" in alt_text(figures.channels(csa, 2))
    assert "CSA, channels: median" in alt_text(figures.leaders({"CSA": (csa, 1)}))
    assert "running softmax has least, 6" in alt_text(figures.state_bytes())
    words = alt_text(figures.page_map())
    size = kv_entry.LAYOUT.page_bytes(PAGE)
    assert f"{size} bytes: 1344 E4M3" in words and "384 bf16" in words and "21 UE8M0 scale, 3 padding" in words
    figures.entry_bytes(steps.pages, 1, run_case.truth(csa)[0][1].float())
