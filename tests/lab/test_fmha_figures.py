"""What the pages of the ladder share: plans that follow the configuration, figures, and a count of what was found."""

import numpy as np
import pytest

from dsv4lib.dsl.budget import TMEM_COLUMNS
from dsv4lib.ops.fmha.config import HEAD_DIMS, REGION
from dsv4lib.ops.fmha.inputs import case
from dsv4lib.ops.fmha.ladder import Ladder
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.pages.emulator import figures as emulator_figures
from dsv4lib.pages.fmha import figures as fmha_figures
from dsv4lib.pages.fmha.run_case import run_fmha, run_ladder
from dsv4lib.viz.style import alt_text
from dsv4lib.viz.tmem import LANES

KERNELS = [*(Ladder(stage, 192) for stage in "abc"), *(Fmha(d) for d in HEAD_DIMS)]


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_no_cell_of_a_plan_is_claimed_twice_and_the_budget_agrees(kernel):
    claims = np.zeros((LANES, TMEM_COLUMNS), int)
    for r in fmha_figures.tmem_plan(kernel):
        claims[r.lane0 : r.lane0 + r.lanes, r.col0 : r.col0 + r.cols] += 1
    used = claims.any(axis=0)
    assert claims.max() == 1 and (claims.sum(axis=0)[used] == LANES).all()
    rows = {row.resource.removeprefix("TMEM: "): row.used for row in kernel.budget()}
    assert used.sum() == (rows["used"] if isinstance(kernel, Ladder) else rows["O"] + rows["Q"] + rows["S"])
    assert sum(end - first for _, first, end in fmha_figures.columns(kernel)) == used.sum()
    assert "of 512 columns" in fmha_figures.tile_picture(kernel).axes[-1].get_title(loc="left")


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_each_element_of_o_has_a_cell_of_its_own_inside_o(head_dim):
    kernel = Fmha(head_dim)
    places = fmha_figures.o_places(kernel).reshape(-1, 2)
    assert len(set(map(tuple, places.tolist()))) == 64 * head_dim
    assert places.min() == 0 and places[:, 0].max() == LANES - 1 and places[:, 1].max() == kernel.q_column - 1


def test_gathered_rows_are_those_of_the_lists():
    one = case(3, [70, 9], [5, 33], seed=2)
    outcome = run_fmha(Fmha, (512, "bf16", "index"), one, trace=True)
    for token, (count, first, window) in enumerate(zip(one.count, one.window_first, one.window_count, strict=True)):
        listed = one.index[token, :count].tolist()
        got = emulator_figures.gathered(outcome.trace, one.pool, token)
        assert got.tolist() == listed + [-1] * (-len(listed) % REGION)  # the window follows in the same tile
        assert emulator_figures.gathered(outcome.trace, one.span, token)[:window].tolist() == list(
            range(first, first + window)
        )
    assert "2 tiles of 64" in alt_text(fmha_figures.gathers(outcome.trace, outcome.kernel, one))


def test_the_swizzle_of_gathered_rows_is_that_of_whole_boxes():
    boxed = run_ladder(Ladder, ("a", 64, "bf16"), 5, 70, trace=True)
    rows = run_fmha(Fmha, (512, "bf16", "index"), case(3, [70], [5]), trace=True)
    shown = [emulator_figures.swizzle(trace, 64).axes[2].images[0].get_array() for trace in (boxed.trace, rows.trace)]
    assert np.array_equal(*shown) and not np.array_equal(shown[0][0], shown[0][1])


def test_faults_are_counted_only_where_they_are_found(capsys):
    def run(kind):
        return run_ladder(kind, ("a", 128, "bf16"), 5, 333, trace=True)

    assert fmha_figures.show_faults("a", run) == 3
    assert fmha_figures.show_faults("a", run, sound=Ladder) == 0
    assert fmha_figures.show_faults("none of these", run, others={"extra": (run(Ladder), "wrong numbers")}) == 0
