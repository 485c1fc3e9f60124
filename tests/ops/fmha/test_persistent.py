"""Run persistent CTAs: fewer of them than tokens, so that each takes several, one after the other."""

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.fmha.arguments import launch_args
from dsv4lib.ops.fmha.inputs import case, paged, prefill_case
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.pages.fmha.run_case import bits, compiled, parts, run_fmha, run_split

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
ENTRIES, KEYS = [70, 0, 150, 0, 0, 64, 9], [33, 0, 0, 5, 0, 0, 65]  # 2, 0, 3, 1, 0, 1, 2 tiles


def settings(entries, cluster=1, groups=False, fp8=False):
    return (512, "bf16", entries, True, True, True, False, fp8, fp8, cluster, groups)


def same(outcomes):
    return len({(bits(outcome.output), bits(outcome.lse)) for outcome in outcomes}) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("which", "one", "sms", "ctas"),
    [  # 7 tokens over 3 CTAs: three rounds, the last with one of them; CTA 1 starts without keys
        (settings("index"), case(37, ENTRIES, KEYS), 3, 3),
        (settings("index", 2), case(100, ENTRIES, KEYS), 7, 6),  # an SM is left over
        (settings("index", 2), case(100, [70, 130, 0, 64], [33, 5, 0, 65]), 2, 2),  # 3, 4, 0, 3 tiles on one pair
        (settings("range", 2, True), prefill_case(50, [0, 127, 300], 3), 4, 4),  # 6 groups
        (settings("index", 1, False, True), paged(case(37, ENTRIES, KEYS), 48), 3, 3),
        (settings("index", 2, False, True), paged(case(100, ENTRIES, KEYS), 48), 4, 4),
        (settings("none"), case(37, [0] * 7, KEYS), 1, 1),
        (settings("index", 2), case(130, [70, 9, 0], [3, 0, 65]), 5, 4),  # two pairs for the heads, so one a token
    ],
)
def test_a_cta_takes_several_tokens(which, one, sms, ctas):
    """The bits of a CTA a token, also where tokens have no keys at all."""
    few, many = (run_fmha(Fmha, which, one, sms=n) for n in (sms, None))
    assert few.clean, few.findings()
    assert same([few, many]) and few.result.stats["ctas"] == ctas < many.result.stats["ctas"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("which", "one"),
    [
        (settings("index"), case(64, [150, 0, 70], [1, 0, 33])),
        (settings("index", 2), case(100, [150, 0, 70], [1, 0, 33])),
        (settings("index", 2, False, True), paged(case(100, [150, 0, 70], [1, 0, 33]), 48)),
    ],
)
def test_every_schedule_gives_the_same_bits(which, one):
    outcomes = [run_fmha(Fmha, which, one, schedule=s, sms=which[9]) for s in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert same(outcomes) and len({outcome.result.schedule_hash for outcome in outcomes}) >= 4


@pytest.mark.full
@pytest.mark.parametrize(("splits", "sharing"), [(3, (1,)), (2, (2, True))])
def test_a_cta_keeps_its_part(splits, sharing):
    """Parts of the keys of several tokens; some parts are empty."""
    one = prefill_case(40, [300, 0], 2) if len(sharing) > 1 else case(64, [150, 0, 9], [33, 0, 0])
    outcome = run_split(one, "range" if len(sharing) > 1 else "index", True, splits, sharing=sharing, sms=splits)
    assert outcome.clean, outcome.findings()


@pytest.mark.full
def test_raw_parts_of_several_tokens():
    one = case(64, [150, 0, 9], [33, 0, 0])
    (o, state, hazards), (o_alone, alone, _) = (
        parts(one, "index", True, 1, (1, False, True), sms=n) for n in (1, None)
    )
    assert not hazards and bits(o) == bits(o_alone) and bits(state) == bits(alone)


def test_a_bad_number_of_sms_is_named():
    kernel, one = compiled(Fmha, settings("none"))[0], case(37, [0], [5])
    window, (o, lse) = (one.span, None, one.window_first, one.window_count), one.outputs()
    with pytest.raises(ArgumentError, match="sms"):
        launch_args(kernel, one.q, None, window, one.sink, (one.cos, one.sin), o, lse, 1.0, sms=0)
