"""The page on what an H200 measured: its checks hold for what was recorded, and each notices its fault."""

import pytest

from dsv4lib.pages.hopper import figures
from dsv4lib.viz.style import alt_text, to_png

ROWS = figures.recorded()


def test_what_was_recorded_holds():
    assert (
        len(ROWS) >= 200 and not figures.impossible(ROWS) and not figures.wrong(ROWS) and not figures.unexplained(ROWS)
    )
    count = figures.judged(ROWS)
    assert sum(count.values()) == len(ROWS) and count["reached"] > count["missed"] > 0


def test_the_shortest_launch_is_the_one_that_the_page_names():
    assert min(row.ours_us for row in ROWS if row.ours_us) == pytest.approx(figures.ONE, rel=0.01)


def test_each_fault_is_noticed_by_its_check_alone():
    doubled, hidden = figures.recorded("bytes_doubled"), figures.recorded("wrong_hidden")
    assert figures.impossible(doubled) and not figures.wrong(doubled) and not figures.unexplained(doubled)
    assert figures.wrong(hidden) == [(ROWS[0].op, ROWS[0].shape)] and not figures.impossible(hidden)
    assert len(figures.unexplained(ROWS, "silent")) == figures.judged(ROWS)["missed"]


def test_large_rows_move_their_bytes_once_and_a_second_pass_is_noticed():
    once, twice = (figures.excess(ROWS, figures.counted(fault)) for fault in ("none", "read_twice"))
    large = {(row.op, row.shape) for row in ROWS if row.bytes >= figures.LARGE and row.promise}
    missing = large - set(once)
    later = {(op, shape) for op, shape in missing if op == "mla_decode" or (op == "topk" and ", " in shape)}  # to count
    assert set(once) and large - later == set(once) == set(twice)
    assert max(once.values()) <= 1.25 < max(twice.values())


@pytest.mark.parametrize(("fault", "right"), [("none", True), ("forward", False)])
def test_one_source_gives_the_same_bits_and_the_oracles(fault, right):
    between, oracle, hazards = figures.one_source(2, 3, 0, fault)
    assert (between, hazards) == (0, 0) and (oracle == 0) == right


def test_figures_show_what_was_measured(capsys):
    whole, some = figures.times(ROWS), figures.panels(ROWS, ("topk", "mhc"), "Flash")
    assert f"{len(ROWS)} of ours" in alt_text(whole)
    assert len([ax for ax in some.axes if ax.axison]) == 2 and "Pro" not in alt_text(some)
    assert all(to_png(fig).startswith(b"\x89PNG") for fig in (whole, some))
    figures.verdicts(ROWS)
    figures.missed(ROWS)
    figures.slots(ROWS, figures.counted())
    assert "mhc" in capsys.readouterr().out
    if figures.backends.status("native", "sm_90a").available:
        pytest.skip("a GPU is here: live() would time")
    assert "nothing timed here" in figures.live()
