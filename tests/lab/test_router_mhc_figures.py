"""The page on mHC, norms and the router: its rules are the reference's, its text is true of its inputs."""

import pytest
import torch

from dsv4lib.ops.mhc.op import mhc_post_pre
from dsv4lib.ops.router.op import router
from dsv4lib.pages.hopper import figures as hopper_figures
from dsv4lib.pages.router_mhc import figures as router_mhc_figures
from dsv4lib.reference import mhc as oracle
from dsv4lib.viz.style import alt_text


@pytest.fixture(scope="module")
def given():
    return router_mhc_figures.case(5, 128, 32, 0)


@pytest.fixture(scope="module")
def found(given):
    """The reference's outputs in the place of the emulator's: the rest of the page is the same."""
    boundary = mhc_post_pre(given.streams, given.f, given.post, given.comb, given.site, backend="reference")
    options = {"k": router_mhc_figures.K, "factor": router_mhc_figures.FACTOR, "backend": "reference"}
    experts, weights = router(boundary[1], given.gate, bias=given.bias, **options)
    logits = boundary[1].float() @ given.gate.float().T
    return router_mhc_figures.Found(
        *boundary, experts, weights, logits, *router(logits, hashed=given.hashed, **options), 0
    )


def test_the_reference_passes_and_faults_in_the_rule_do_not(given, found):
    right = router_mhc_figures.judge(given, found).metrics
    assert right["experts_wrong"] == 0 and right["stream_error"] <= 1 and right["y_error"] <= 1
    exact = {"coefficient_error": 1e-6, "weight_error": 6e-7, "hash_weight_error": 6e-7, "row_sum_error": 4e-6}
    assert all(right[name] <= bound for name, bound in exact.items())
    for fault, metric, least in (
        ("normed_copy", "coefficient_error", 1e-4),
        ("post_without_2", "coefficient_error", 0.1),
        ("bias_in_weights", "weight_error", 0.1),
        ("ties_high", "experts_wrong", 2),
        ("uniform_hash", "hash_weight_error", 0.1),
    ):
        assert router_mhc_figures.judge(given, found, fault).metrics[metric] >= least, fault


def test_sums_do_not_tell_comb_from_its_transpose_but_the_streams_do(given, found):
    turned = oracle.post(given.f.double(), given.streams.double(), given.post.double(), given.comb.double().mT)
    wrong = found._replace(streams=turned.bfloat16())
    assert router_mhc_figures.judge(given, wrong).metrics["stream_error"] > 100
    stopped = oracle.sinkhorn(
        router_mhc_figures.comb_logits(given, found), 3, router_mhc_figures.EPS
    ).float()  # columns last: rows are off
    metrics = router_mhc_figures.judge(given, found._replace(comb=stopped)).metrics
    assert metrics["row_sum_error"] > 1e-3 > 1e-5 > metrics["column_sum_error"]
    metrics = router_mhc_figures.judge(given, found._replace(comb=stopped.mT)).metrics
    assert metrics["column_sum_error"] > 1e-3 > 1e-5 > metrics["row_sum_error"]
    assert float((given.comb.sum(-1) - 1).abs().max()) < 1e-3 > float((given.comb.sum(-2) - 1).abs().max())


def test_twins_are_taken_by_every_token_the_lower_first(given, found):
    places = [(found.experts == expert).nonzero() for expert in router_mhc_figures.TWINS]
    assert all(len(place) == len(given.f) for place in places)
    assert bool((places[0][:, 1] < places[1][:, 1]).all())


def test_pairs_end_where_the_reference_does(given, found):
    start = router_mhc_figures.comb_logits(given, found)
    steps = router_mhc_figures.pairs(start)
    assert len(steps) == 20 and torch.equal(steps[-1], oracle.sinkhorn(start, 20, router_mhc_figures.EPS))
    assert float((steps[-1] - found.comb).abs().max()) < 1e-6


def test_gains_and_loads_say_what_the_text_says():
    gains = router_mhc_figures.gains()
    assert float((gains["20 pairs"] - 1).abs().max()) < 1e-3 and float(gains["1 + 0.1 normal, unconstrained"][-1]) > 5
    loads = router_mhc_figures.loads(experts=32)
    assert all(abs(float(line.mean()) - 1) < 1e-5 for line in loads.values())
    assert float(loads["no bias"][0]) > 2 > 1.2 > float(loads["a trained bias"][0])


def test_bytes_of_the_chain_and_of_the_record():
    steps, wanted = router_mhc_figures.norm_chain(3, 256)
    assert router_mhc_figures.fused_bytes(steps, wanted) == 3 * (3 * 512 + 256 + 2) + 1024
    assert router_mhc_figures.chain_bytes(steps) == router_mhc_figures.fused_bytes(steps, wanted) + 2 * 3 * 512
    rows = hopper_figures.recorded()
    assert (
        router_mhc_figures.traffic(rows) == 0
        and router_mhc_figures.traffic(rows, "fn_uncounted") == 5 * 24 * 4 * 4096 * 4
    )


def test_figures_say_what_they_show(given, found):
    judged = router_mhc_figures.judge(given, found)
    figures = (
        router_mhc_figures.flow(),
        router_mhc_figures.coefficient_map(found),
        router_mhc_figures.combs(found),
        router_mhc_figures.convergence(given, found),
        router_mhc_figures.growth(),
        router_mhc_figures.scores(given, found, judged),
    )
    assert all(len(alt_text(figure)) > 60 for figure in figures)
