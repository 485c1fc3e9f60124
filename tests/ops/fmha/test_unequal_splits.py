"""A last part of the keys of another length: numbers, CTAs, every form; bits do not depend on a token's place."""

from dataclasses import replace

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.fmha.arguments import launch_args
from dsv4lib.ops.fmha.inputs import case, paged
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.pages.fmha import run_case
from dsv4lib.pages.fmha.run_case import bits, compiled, run_split

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
LISTS = [700, 0, 77, 300], [128, 0, 50, 128]
PER_TOKEN = "q", "index", "first", "count", "window_first", "window_count", "cos", "sin"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("splits", "tail", "sms", "ctas"),
    [  # (tokens at a time, 1024ths); 4 tokens
        (2, (1, 200), None, 5),
        (3, (2, 150), None, 10),
        (3, (1, 300), 4, 3),  # fewer CTAs than tokens for each part
        (2, (3, 1), None, 7),  # no list is so long that this were a tile
        pytest.param(2, (1, 1024), None, 5, marks=pytest.mark.full),  # all
    ],
)
@pytest.mark.parametrize("cluster", [1, pytest.param(2, marks=pytest.mark.full)])
def test_any_share(splits, tail, sms, ctas, cluster):
    one = case(64 * cluster, *LISTS)
    sms = None if sms is None else sms * cluster
    outcome = run_split(one, "index", True, splits, sharing=(cluster,), sms=sms, tail=tail)
    assert outcome.clean, outcome.findings()
    _, gpu, _, made, state = run_case._run_parts(one, "index", True, (splits, tail), (cluster,), sms)
    empty = state.isinf().all(-1)
    assert not gpu.hazards and not made[empty].any()
    if tail[1] in (1, 1024):  # nothing in the last part, or all
        assert bool(empty[-1 if tail[1] == 1 else 0].all())
    assert gpu.launches[0].result.stats["ctas"] == ctas * cluster


@pytest.mark.full
def test_entries_of_584_bytes():
    one = paged(case(64, *LISTS), 48)
    outcome = run_split(one, "range", True, 2, tail=(1, 130))
    assert outcome.clean, outcome.findings()


@pytest.mark.full
@pytest.mark.parametrize("cluster", [2, pytest.param(1, marks=pytest.mark.full)])
def test_every_schedule_gives_the_same_bits(cluster):
    one = case(64 * cluster, [150, 0, 200], [1, 0, 33])
    outcomes = [run_split(one, "index", True, 2, sharing=(cluster,), tail=(1, 400), schedule=s) for s in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert len({bits(outcome.output) for outcome in outcomes}) == 1


def test_a_token_does_not_depend_on_its_place():
    """Alone, or after others in the same CTA of the last part."""
    one = case(64, *LISTS)
    whole = run_split(one, "index", True, 2, tail=(1, 200))
    for token in (0, 3):
        own = {name: getattr(one, name)[[token]] for name in PER_TOKEN}
        alone = run_split(replace(one, **own), "index", True, 2, tail=(1, 200))
        assert bits(alone.output[0]) == bits(whole.output[token]) and bits(alone.lse[0]) == bits(whole.lse[token])


@pytest.mark.parametrize("bad", [(1, 0), (0, 9), (1, 1025), (-1, 5)])
def test_bad_numbers_are_named(bad):
    kernel, one = compiled(Fmha, (512, "bf16", "none", True, False, False, True))[0], case(37, [0], [5])
    window, (o, lse) = (one.span, None, one.window_first, one.window_count), one.outputs(2)
    with pytest.raises(ArgumentError, match="tail"):
        launch_args(kernel, one.q, None, window, None, None, o, lse, 1.0, 2, tail=bad)
