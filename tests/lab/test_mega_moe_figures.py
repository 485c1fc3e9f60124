"""The page on the fused MoE: its figures and tables, the table of features, and the reader's solution."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4lib import env
from dsv4lib.dsl.block_scale_probe import TARGETS
from dsv4lib.errors import DSV4Error
from dsv4lib.ops.mega_moe.faults import FAULTS
from dsv4lib.pages.mega_moe import figures, page, rows, traffic
from dsv4lib.pages.mega_moe.run_case import run_mega_moe
from dsv4lib.pages.quantize import run_case as conversions
from dsv4lib.predict import overlap
from dsv4lib.viz.style import alt_text
from tests.cases import cases


@pytest.fixture(scope="module")
def run():
    """Two ranks, nine and fourteen tokens, traced."""
    return page.run(2, 14, 0)


def test_bytes_that_cross_are_those_that_must(run, capsys):
    assert run.found.right and not run.found.hazards and figures.crossing_table(run.made, run.found) == 0
    routes, layout = traffic.remote_routes(run.made), run.made.layout
    needed = traffic.needed_bytes(run.made)
    assert needed["combine"] == 2 * layout.hidden * routes and needed["x"] == layout.hidden * routes > 0
    assert needed["counts"] == 2 * 8 * layout.local  # two ranks tell each other about four experts
    seen = traffic.crossed_bytes(run.found)
    assert set(seen) == {"combined", *needed} and sum(seen.values()) > sum(needed.values())


@pytest.mark.full
def test_four_bits_on_both_sides(run):
    """Half the bytes; weights lose less, activations more; a fault of the other mode changes nothing."""
    four = page.run(2, 14, 0, mode="nvfp4")
    assert page.wrong(four) == 0 and page.wrong(run) == 0
    eight, four_bits = page.rounded(run), page.rounded(four)
    assert (eight.pulled, four_bits.pulled) == (256 + 16, 128 + 16)
    assert four_bits.of_weights < eight.of_weights < eight.error < four_bits.error < 0.4
    assert "nvfp4 has least, 144" in alt_text(figures.formats({"w4a8": run, "nvfp4": four}))
    assert page.rounded(page.run(2, 14, 0, "calibrated_too_low", "nvfp4")).error > 0.4
    assert page.wrong(page.run(2, 14, 0, "SwappedFactors", "nvfp4")) > 0
    kinds = {(mode, name): type(page.run(2, 1, 0, name, mode).found.kernel).__name__ for mode, name in OTHERS}
    assert set(kinds.values()) == {"MegaMoe"}


OTHERS = ("w4a8", "SwappedFactors"), ("nvfp4", "FirstWeight")


def test_a_result_that_stays_at_home_is_missing(run):
    """Bytes and numbers say so; with one rank the same kernel is right."""
    found = page.run(2, 14, 0, "SlotOfOwner").found
    alone = run_mega_moe(run.made.as_one_rank(), FAULTS["SlotOfOwner"])
    assert alone.clean and page.differing(found.outs, alone.outs) > 1000
    assert traffic.difference(run.made, found) == traffic.needed_bytes(run.made)["combine"]


def test_what_comes_first(run):
    """Counts before the rows that they announce, rows before products, products before results."""
    times = {(one.rank, one.region): one.times for one in traffic.crossings(run.found)}
    layers = {(one.rank, one.layer): one.times for one in traffic.products(run.made, run.found)}
    for rank in range(2):
        assert times[1 - rank, "counts"].min() < times[rank, "x"].min() < layers[rank, "L2"].max()
        assert layers[rank, "L1"].max() < layers[rank, "L2"].max()
        assert times[rank, "combine"].min() > layers[rank, "L2"].min()
    seen = figures.shares(run.made, run.found)
    assert 0 <= seen.pulled < 1 and 0 <= seen.returned < 1
    assert figures.overlap_said(run.made, run.found).startswith(f"{seen.pulled:.0%} of the pulled rows")
    assert alt_text(figures.timeline(run.made, run.found)).count("rank 1") >= 5


def test_products_are_told_by_the_weights_of_their_steps(run):
    """As many MMAs a layer as its tiles take; the layers of weights that are exchanged are exchanged."""
    made, layout, tile = run.made, run.made.layout, run.found.kernel.tile_n
    counted = {(one.rank, one.layer): len(one.times) for one in traffic.products(made, run.found)}
    routes = torch.cat([one.topk_idx for one in made.ranks]).flatten()
    for rank in range(2):
        counts = [int((routes == e).sum()) for e in range(rank * layout.local, (rank + 1) * layout.local)]
        tiles = sum(-(-count // tile) for count in counts)  # of tokens; 128 features each, 4 MMAs for 128 of K
        assert counted[rank, "L1"] == tiles * (2 * layout.intermediate // 128) * (layout.hidden // 128) * 4
        assert counted[rank, "L2"] == tiles * (layout.hidden // 128) * (layout.intermediate // 128) * 4
    other = traffic.products(replace(made, l1=made.l2, l2=made.l1), run.found)
    assert {(one.rank, one.layer): len(one.times) for one in other} == {
        (rank, {"L1": "L2", "L2": "L1"}[layer]): count for (rank, layer), count in counted.items()
    }
    with pytest.raises(DSV4Error, match="MMAs for 0 boxes"):
        traffic.products(replace(made, l1=made.l1[::-1], l2=made.l2[::-1]), run.found)


@pytest.mark.parametrize(
    ("pulled", "returned", "shares", "said"),
    [
        ([1, 2], [50, 60], (0.0, 0.0), ("nothing of it", "nothing of it")),
        ([1, 20, 30, 35], [35, 60], (0.75, 0.5), ("75% of the pulled", "50% of the writes")),
        ([20], [30], (1.0, 1.0), ("rank: hidden", "rank: hidden")),
        ([], [], (0.0, 0.0), ("0% of the pulled", "0% of the writes")),
    ],
)
def test_what_is_said_of_overlap_is_counted(pulled, returned, shares, said, monkeypatch):
    times = {"x": np.array(pulled), "combine": np.array(returned), "counts": np.array([0, 99])}
    crossed = [traffic.Crossings(0, 1, name, one, one) for name, one in times.items() if len(one)]
    monkeypatch.setattr(traffic, "crossings", lambda found: crossed)
    work = [traffic.Product(0, "L1", np.array([10, 15])), traffic.Product(0, "L2", np.array([25, 40]))]
    monkeypatch.setattr(traffic, "products", lambda made, found: work)
    assert figures.shares(None, None) == shares
    lines = figures.overlap_said(None, None).splitlines()
    assert len(lines) == 2 and all(part in line for part, line in zip(said, lines, strict=True))


@pytest.mark.full
def test_the_same_bits_however_it_runs(run):
    assert page.same_bits(run) == (0, 0, 0)
    other = page.run(2, 14, 0, "FirstWeight").found
    assert page.differing(run.found.outs, other.outs) > 100
    assert page.differing(run.found.outs, other.outs[:1]) == 23 * page.HIDDEN  # not as many: all differ


@pytest.mark.parametrize("seed", cases(full=[0]))
def test_every_fault_is_seen(seed, capsys):
    found = page.faults(seed)
    assert len(found) == len(page.SHOWN) + 1 and figures.faults_table(found) == 0
    assert "scope_between_devices" in found[0][2]
    assert [one[0] for one in page.faults(seed, watched=False) if not one[3]] == ["CountOfOneDevice"]
    assert figures.faults_table([(*found[0][:3], False)]) == 1
    assert set(page.SHOWN) <= set(FAULTS)


@pytest.mark.parametrize("seed", cases(full=[0]))
def test_a_dropped_rank_is_reported(seed):
    text = page.dropped(seed)
    assert "of buffer of device 0; waits until" in text
    assert text.endswith(f"device 1: stopped after {page.STOPPED_AFTER} warp-instructions, an injected fault")


def test_conversions():
    sample = conversions.samples(4, ("gaussian",))["gaussian"]
    figure, weights, outputs = figures.losses(sample, conversions.expert(16, 256, 128, 0.02, 10.0, 0))
    assert alt_text(figure) and alt_text(figures.ratios(sample))
    assert weights["e4m3_split"].relative == weights["bf16"].relative == 0 < weights["e4m3_expand"].relative < 0.03
    assert figures.weights_error(sample, "e4m3_split", planes=1) == weights["e4m3_expand"]
    assert weights[figures.LITERAL].cos < 0.98 < figures.weights_error(sample, "mxfp4").cos
    assert outputs["bf16"].relative < outputs["e4m3_split"].relative < outputs["e4m3_expand"].relative < 0.1
    assert outputs[figures.LITERAL].relative > 0.3


def test_the_assembler_and_the_predictions(capsys):
    figure, wrong = figures.variants({name: name for name in TARGETS})
    assert wrong == 0 and "sm_100f" in [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert figures.variants({"sm_100f": "sm_100a"})[1] == 4
    assert "mxfp8: predicted, not measured" in figures.predicted("Flash", 8).get_suptitle()
    assert "nvfp4: predicted" in figures.predicted("Flash", 8, activations="nvfp4").get_suptitle()
    assert alt_text(figures.bytes_a_token())
    figures.published()
    assert "all predicted" in capsys.readouterr().out


def test_features_are_where_the_table_says(capsys):
    """Every path and every test that a row names exists, and what is not verified says so."""
    table = rows.table()
    assert [row.row for row in table] == [f"4.{i}" for i in range(1, 23)]
    for row in table:
        assert row.verified.startswith(rows.STATES), row
        assert row.paths() or row.verified == "not built" and row.where == "-", row
        for path in row.paths():
            assert (env.root() / path).is_file(), (row.row, path)
        for path, function in row.tests():
            assert f"def {function}(" in (env.root() / path).read_text(), (row.row, function)
    figures.features()
    shown = capsys.readouterr().out
    assert all(f"{row.row} " in shown for row in table)


def test_the_folded_solution_is_right():
    cells = json.loads((env.root() / "notebooks" / "87_mega_moe.ipynb").read_text())["cells"]
    turn = "".join(next(cell["source"] for cell in cells if cell["id"] == "turn"))
    names = {"overlap": overlap}
    exec(re.search(r"<details>.*```python\n(.*?)```", turn, re.S).group(1), names)
    now, then = 7168 + 224 + 4 + 14336, 2 * (7168 + 224) + 4
    assert names["saved"](7168) == pytest.approx(1 - then / now) and np.isclose(names["saved"](7168), 0.32, atol=0.005)
