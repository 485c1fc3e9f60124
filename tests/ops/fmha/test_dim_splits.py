"""Two CTAs, or pairs, share the dimensions of O: the bits of one that has all of them, in every form."""

import pytest

from dsv4lib.errors import ConfigError
from dsv4lib.ops.fmha.inputs import case, paged, prefill_case
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.pages.fmha.run_case import bits, compiled, parts, run_fmha, run_split
from tests.budget import small
from tests.cases import cases

SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
LISTS = [200, 0, 77], [128, 0, 50]


def settings(dim_splits, entries="index", cluster=1, groups=False, fp8=False, ends=True):
    return (512, "bf16", entries, True, ends, ends, not ends, fp8, fp8, cluster, groups, False, dim_splits)


FORMS = {
    "one CTA": ({}, case(64, *LISTS)),
    "heads that fill no block": ({}, case(100, [70, 9], [3, 0])),
    "a pair": ({"cluster": 2}, case(128, *LISTS)),
    "two pairs of heads": ({"cluster": 2, "entries": "range"}, case(200, [100], [30])),
    "584 bytes": ({"fp8": True}, paged(case(64, *LISTS), 7, 5, padding=48)),
    "584 bytes, a pair": ({"cluster": 2, "fp8": True}, paged(case(128, *LISTS), 48)),
    "a long ring": ({}, case(64, [600], [128])),
    "window only": ({"entries": "none"}, case(37, [0] * 3, [5, 0, 128])),
    "groups": ({"cluster": 2, "entries": "range", "groups": True}, prefill_case(50, [0, 127], 3)),
}

SMALLEST = ("heads that fill no block", "584 bytes, a pair")


def same(outcomes):
    return len({(bits(outcome.output), bits(outcome.lse)) for outcome in outcomes}) == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", cases(*SMALLEST, full=[name for name in FORMS if name not in SMALLEST]))
def test_the_bits_of_whole_rows(name):
    """A CTA a token, and few that stay: the grid has twice the CTAs, each output is written once."""
    options, one = FORMS[name]
    whole, *halves = (run_fmha(Fmha, settings(n, **options), one, sms=sms) for n, sms in ((1, None), (2, None), (2, 4)))
    for half in halves:
        assert half.clean, half.findings()
    assert same([whole, *halves])
    assert halves[0].result.stats["ctas"] == 2 * whole.result.stats["ctas"]


@pytest.mark.parametrize("options", cases({"cluster": 2}, full=[{"fp8": True}, {}]), ids=str)
def test_every_schedule_gives_the_same_bits(options):
    heads = 64 * options.get("cluster", 1)
    one = case(heads, [150, 0, 70], [1, 0, 33])
    one = paged(one, 48) if options.get("fp8") else one
    sms = 2 * options.get("cluster", 1)  # one CTA (or pair) takes all tokens
    outcomes = [run_fmha(Fmha, settings(2, **options), one, schedule=s, sms=sms) for s in SCHEDULES]
    assert all(outcome.clean for outcome in outcomes), [outcome.findings() for outcome in outcomes]
    assert same(outcomes) and len({outcome.result.schedule_hash for outcome in outcomes}) >= 4


@pytest.mark.full
@pytest.mark.parametrize(("splits", "cluster"), cases((3, 1), full=[(2, 2)]))
def test_with_parts_of_the_keys(splits, cluster):
    one = case(64 * cluster, [300, 0, 20], [128, 90, 0])
    both = (cluster, False, False, 2)
    outcomes = [run_split(one, "index", True, splits, sharing=sharing) for sharing in ((cluster,), both)]
    assert outcomes[1].clean, outcomes[1].findings()
    assert same(outcomes)


@pytest.mark.full
def test_raw_parts():
    one = case(64, [150, 0, 9], [33, 0, 0])
    (o, state, hazards), (o_whole, whole, _) = (
        parts(one, "index", True, 1, (1, False, True, n), sms=4) for n in (2, 1)
    )
    assert not hazards and bits(o) == bits(o_whole) and bits(state) == bits(whole)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cluster", cases(2, full=[1]))
@pytest.mark.parametrize(("fp8", "ends"), cases((True, True), (True, False), full=[(False, True), (False, False)]))
def test_what_the_compiler_says(cluster, fp8, ends):
    kernel, code = compiled(Fmha, settings(2, cluster=cluster, fp8=fp8, ends=ends))
    assert (code.local_bytes, code.spills) == (0, 0) and code.registers * code.threads <= 65_536
    budget = {row.resource: row for row in kernel.budget()}
    assert code.smem_bytes == budget["SMEM: total"].used and budget["TMEM: O"].used == 128
    assert small(code)


@pytest.mark.parametrize("bad", [{"dim_splits": 0}, {"dim_splits": 3}, {"dim_splits": 2, "head_dim": 256}])
def test_bad_numbers_are_named(bad):
    with pytest.raises(ConfigError, match="dim_splits"):
        Fmha(**bad)
