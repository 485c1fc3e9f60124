"""The bench of ops without a GPU: providers and their order, how goals are judged, bytes of rows, the table."""

import dataclasses
import importlib
import re
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4lib.bench.ops import harness, inputs, modules, providers, results, timing
from dsv4lib.bench.ops.case import Absent, Provider, Row
from dsv4lib.bench.ops.results import ABSENT, COPY, FAILED, OURS, TIMED, WRONG, Found, Result
from dsv4lib.bench.ops.timing import Cold, TimingError, Work
from dsv4lib.config import FLASH, PRO
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import verdicts
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.pages.hopper import ops_table
from dsv4lib.viz import dumbbells, style

FACTS = {"run": "today", "gpu": "GPU", "driver": "1", "torch": "2", "cuda": "3", "packages": "p 1", "kernels": "abc"}
FACTS |= {"command": "bench", "method": "a clock"}


class FakeClock:
    """Calls every provider as often as wanted, alternating, and gives times by the order of the providers."""

    def __init__(self, *us, broken=()):
        self.us, self.broken, self.seen = us, broken, []

    def cold(self, calls):
        self.seen.append(len(calls))
        for order in timing.rounds_of(len(calls), 3):
            for i in order:
                calls[i]()
        return [Cold((us - 0.5, us, us + 1), 1) for us, _ in zip(self.us, calls, strict=False)]

    def warm(self, calls):
        return [us / 2 if i else "a sync" for i, (us, _) in enumerate(zip(self.us, calls, strict=False))]

    def host(self, calls):
        return [us + 10 for us, _ in zip(self.us, calls, strict=False)]


def provider(name, compute):
    return providers.in_place(
        name, lambda g: {"y": torch.empty_like(g["x"])}, lambda g, out: out["y"].copy_(compute(g["x"]))
    )


def check(given, outputs):
    inputs.same_bytes(outputs, {"y": given["x"] * 2})


def row(*others, goal=None, copy_goal=None, ours=lambda x: x * 2, checked=check):
    def given(generator):
        return {"x": torch.randn(7, 5, generator=generator), "more": (torch.randn(3, generator=generator), 4)}

    taken = (provider(OURS, ours), *others)
    return Row("double", "T 7", 280, 0, given, checked, taken, goal, copy_goal)


def states(result):
    return {one.provider: one.state for one in result.found}


# ------------------------------------------------------------------- the harness


def gone(given):
    raise Absent("package missing")


def broken(given):
    raise RuntimeError("no such kernel\nand more")


def test_only_what_is_right_is_timed():
    clock = FakeClock(2.0, 4.0)
    triple = provider("triple", lambda x: x * 3)
    result = harness.measure(
        row(triple, provider("twice", lambda x: x + x), Provider("gone", gone), Provider("bad", broken)), clock, "cpu"
    )
    assert states(result) == {OURS: TIMED, "triple": WRONG, "twice": TIMED, "gone": ABSENT, "bad": FAILED}
    assert clock.seen == [2]
    by_name = {one.provider: one for one in result.found}
    assert by_name["gone"].detail == "package missing" and "no such kernel" in by_name["bad"].detail
    assert re.search(r"y: \d+ of 140 bytes differ", by_name["triple"].detail)
    ours = by_name[OURS]
    assert (ours.us, ours.low_us, ours.high_us, ours.calls, ours.warm_us) == (2.0, 1.5, 3.0, 3, None)
    assert ours.detail == "no graph: a sync" and by_name["twice"].warm_us == 2.0
    assert (ours.host_us, by_name["twice"].host_us) == (12.0, 14.0)
    text = "\n".join(results.lines(result))
    assert "gone" in text and "absent: package missing" in text and "wrong: y:" in text and "0.50x of twice" in text


def test_a_replayed_call_has_no_host_time():
    made = row(provider("peer", lambda x: x * 2))
    replayed = dataclasses.replace(made.providers[0], hosted=False)
    result = harness.measure(
        dataclasses.replace(made, providers=(replayed, *made.providers[1:])), FakeClock(2.0, 4.0), "cpu"
    )
    assert result.named(OURS).host_us is None and result.named(OURS).us == 2.0
    assert result.named("peer").host_us == 14.0


def test_ours_that_is_wrong_is_not_timed_and_misses_its_goal():
    result = harness.measure(
        row(provider("peer", lambda x: x * 2), goal=0.9, ours=lambda x: x * 2.001), FakeClock(9.0), "cpu"
    )
    assert states(result) == {OURS: WRONG, "peer": TIMED}
    assert result.verdict == "missed" and result.ratio is None


def test_ours_that_goes_wrong_while_it_is_timed_is_found():
    calls = Counter()

    def later(x):
        calls["ours"] += 1
        return x * 2 if calls["ours"] == 1 else x * 3

    result = harness.measure(row(ours=later), FakeClock(1.0), "cpu")
    assert states(result) == {OURS: WRONG} and "after many launches" in result.found[0].detail


def test_a_provider_that_changes_its_inputs_is_wrong_and_harms_no_other():
    def bind(given):
        out = {"y": torch.empty_like(given["x"])}
        return lambda: (out["y"].copy_(given["x"] * 2), given["more"][0].zero_()), out

    result = harness.measure(
        row(Provider("greedy", bind), provider("peer", lambda x: x * 2)), FakeClock(1.0, 2.0), "cpu"
    )
    assert states(result) == {OURS: TIMED, "greedy": WRONG, "peer": TIMED}
    assert result.named("greedy").detail == "it changed its input more[0]"


def test_a_provider_that_writes_nothing_is_wrong():
    """Even where its memory held another's answers before: every provider is bound before the first runs."""

    def lazy(given):
        return (lambda: None), {"y": torch.full_like(given["x"], float("nan"))}

    assert states(harness.measure(row(Provider("lazy", lazy)), FakeClock(1.0), "cpu"))["lazy"] == WRONG


def test_outputs_that_the_check_cannot_read_are_wrong():
    def bind(given):
        return (lambda: None), {"z": given["x"] * 2}

    found = harness.measure(row(Provider("other", bind)), FakeClock(1.0), "cpu").named("other")
    assert found.state == WRONG and "the check stops: KeyError" in found.detail


def test_who_breaks_when_called_often_does_not_spoil_the_others():
    class Picky(FakeClock):
        def cold(self, calls):
            for call in calls:
                for _ in range(3):
                    call()
            return super().cold(calls)

    calls = Counter()

    def tired(x):
        calls["n"] += 1
        if calls["n"] > 2:
            raise RuntimeError("out of breath")
        return x * 2

    result = harness.measure(row(provider("tired", tired)), Picky(1.0, 2.0), "cpu")
    assert states(result) == {OURS: TIMED, "tired": FAILED}
    assert "out of breath" in result.named("tired").detail


def test_a_copy_is_timed_where_it_is_the_goal():
    result = harness.measure(row(copy_goal=0.9), FakeClock(2.0, 1.9), "cpu")
    assert [one.provider for one in result.found] == [OURS, COPY]
    assert result.copy_ratio == pytest.approx(0.95) and result.verdict == "reached" and result.peer is None


def test_names_must_differ_and_peers_can_be_chosen():
    with pytest.raises(ArgumentError, match="names that differ"):
        harness.measure(row(provider("a", lambda x: x), provider("a", lambda x: x)), FakeClock(1.0), "cpu")
    both = row(provider("torch.compile", lambda x: x * 2), provider("vLLM Triton", lambda x: x * 2))
    assert list(states(harness.measure(both, FakeClock(1.0, 2.0), "cpu", ["Triton"]))) == [OURS, "vLLM Triton"]


def test_inputs_are_the_same_in_every_run_and_not_in_every_row():
    seen = []

    def keep(given, outputs):
        seen.append(given["x"].clone())

    for shape in ("T 7", "T 7", "T 8"):
        harness.measure(dataclasses.replace(row(checked=keep), shape=shape), FakeClock(1.0), "cpu")
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[4])


def test_a_row_that_fails_does_not_end_the_run(capsys):
    sick = dataclasses.replace(row(), given=lambda generator: 1 / 0, shape="sick")
    found = harness.run([sick, row()], FakeClock(1.0), "cpu")
    assert [states(one) for one in found] == [{OURS: FAILED}, {OURS: TIMED}]
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert harness.run([row()], FakeClock(1.0), "cpu", seconds=-1) == []
    assert "not run, no time left: double T 7" in capsys.readouterr().out


def test_without_a_gpu_rows_are_listed_and_nothing_is_timed(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert harness.main(["--only", "rmsnorm", "--shape", "Pro T 8"]) == harness.NOTHING_TIMED
    out = capsys.readouterr().out
    assert "rmsnorm Pro T 8: 0.258 MB, ours" in out and "no GPU: nothing timed" in out
    assert verdicts.LOOKS[verdicts.Verdict.SKIPPED].code == harness.NOTHING_TIMED
    assert harness.main(["--only", "rmsnorm,nothing"]) == 2 and "'nothing'" in capsys.readouterr().out
    assert harness.main(["--only", "rmsnorm", "--shape", "T 5"]) == 2


# ------------------------------------------------------------------- timing


def test_turns_alternate():
    order = timing.rounds_of(3, 6)
    assert order[0] == [0, 1, 2] and order[1] == [2, 1, 0] and order[2] == [1, 2, 0]
    assert all(sorted(one) == [0, 1, 2] for one in order)
    assert {one[0] for one in order} == {0, 1, 2}


def works(*names):
    """One after the other, each 1 us long, 1 us apart; later ones first, as a profiler may list them."""
    return [Work(name, 2000 * i, 2000 * i + 1000) for i, name in enumerate(names)][::-1]


SPIN = "void at::native::(anonymous namespace)::spin_kernel(long)"


def test_a_calls_time_is_from_its_first_kernel_to_its_last():
    seen = works(
        "add", SPIN, "a", "add", SPIN, "b1", "add", "b2", "add", SPIN, "b1", "b2", "add", SPIN, "a", "add", SPIN
    )
    a, b = timing.by_way(seen, [[0, 1], [1, 0]])
    assert a == Cold((1.0, 1.0), 1)
    assert b.us == (5.0, 3.0)  # a kernel called as the flush is counts, between the spin and the flush
    overlapping = [
        *works("add", SPIN),
        Work("c", 4000, 9000),
        Work("d", 4500, 7000),
        *works(*["-"] * 5, "add", SPIN)[:2],
    ]
    assert timing.by_way(overlapping, [[0]])[0].us == (5.0,)


def test_lost_kernels_are_seen():
    with pytest.raises(TimingError, match="no work"):
        timing.by_way(works("add", SPIN, "add", SPIN), [[0]])
    with pytest.raises(TimingError, match="saw 1 of 2 calls"):
        timing.by_way(works("add", SPIN, "a", "add", SPIN), [[0, 1]])


# ------------------------------------------------------------------- goals


def result(ours=None, peer=None, copied=None, goal=None, copy_goal=None, op="double", shape="T 7"):
    times = {OURS: ours, "peer": peer, COPY: copied}
    found = [Found(name, TIMED, us, us, us, 21, 1, us / 2, 10 * us) for name, us in times.items() if us is not None]
    return Result(op, shape, 4_800_000, 0, goal, copy_goal, 1.0, tuple(found))


@pytest.mark.parametrize(
    ("given", "verdict"),
    [
        ({"ours": 3.0, "peer": 5.0}, ""),
        ({"ours": 3.0, "peer": 5.0, "goal": 0.6}, "reached"),
        ({"ours": 3.1, "peer": 5.0, "goal": 0.6}, "missed"),
        ({"ours": 3.0, "goal": 0.6}, "not judged"),
        ({"peer": 5.0, "goal": 0.6}, "missed"),
        ({"ours": 10.0, "copied": 9.0, "copy_goal": 0.9}, "reached"),
        ({"ours": 10.0, "copied": 8.9, "copy_goal": 0.9}, "missed"),
        ({"ours": 10.0, "copied": 8.9, "copy_goal": 0.9, "goal": 0.6}, "missed"),
        ({"ours": 10.0, "copied": 9.5, "copy_goal": 0.9, "goal": 0.6}, "not judged"),
    ],
)
def test_goals(given, verdict):
    assert result(**given).verdict == verdict


@pytest.mark.parametrize(("state", "reached"), [("failed", "not judged"), ("absent", "reached"), ("wrong", "reached")])
def test_no_goal_is_reached_where_a_peer_failed(state, reached):
    without = Found("faster", state, detail="why")
    reaches, misses = result(ours=3.0, peer=5.0, goal=0.6), result(ours=3.1, peer=5.0, goal=0.6)
    reaches, misses = (dataclasses.replace(one, found=(*one.found, without)) for one in (reaches, misses))
    assert (reaches.verdict, reaches.graph_verdict) == (reached, reached)
    assert (misses.verdict, misses.graph_verdict) == ("missed", "missed")


def test_a_run_is_recorded_with_its_command(monkeypatch):
    card = SimpleNamespace(stdout="580.1, 1980 MHz, 3201 MHz, 700.00 W\n")
    monkeypatch.setattr(harness.subprocess, "run", lambda *args, **options: card)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = harness.facts("python -m harness --only topk")
    assert found["command"] == "python -m harness --only topk" and found["driver"] == "580.1"


@pytest.mark.parametrize(
    ("ours", "peer", "slow", "cold", "graph"),
    [
        ((3.0, 3.0), (5.0, 4.9), (9.0, 9.0), "reached", "missed"),  # the peer wins back its gaps in a graph
        ((3.0, 2.4), (5.0, 4.9), (9.0, 3.9), "reached", "missed"),  # and another one is the best there
        ((4.0, 2.0), (5.0, 4.9), (9.0, 3.9), "missed", "reached"),
        ((3.0, None), (5.0, 4.9), (9.0, 3.9), "reached", "not judged"),
        ((3.0, 2.0), (5.0, None), (9.0, None), "reached", "not judged"),
    ],
)
def test_goals_are_judged_by_graph_times_too(ours, peer, slow, cold, graph):
    times = zip((OURS, "a", "b"), (ours, peer, slow), strict=True)
    found = [Found(name, TIMED, us, us, us, 3, 1, warm) for name, (us, warm) in times]
    one = Result("double", "T 7", 4_800_000, 0, 0.6, None, 1.0, tuple(found))
    assert (one.verdict, one.graph_verdict) == (cold, graph)


def test_the_best_peer_is_neither_ours_nor_the_copy():
    one = result(3.0, 5.0, 1.0)
    slower = Found("slower", TIMED, 6.0)
    wrong, second = Found("wrong", WRONG, None), Found("ours, a second one", TIMED, 2.0)
    one = dataclasses.replace(one, found=(*one.found, slower, wrong, second))
    assert one.peer.provider == "peer" and one.ratio == 0.6


def test_bandwidth_is_known_by_the_gpus_name():
    assert harness.peak("NVIDIA H200") == 4.8e12 and harness.peak("NVIDIA H100 80GB HBM3") == 3.35e12
    assert harness.peak("NVIDIA B200") == 8e12 and harness.peak("NVIDIA H20") is None


# ------------------------------------------------------------------- rows


ALL = [made for make in modules.modules()[0].values() for made in make()]


def test_every_module_can_be_imported():
    assert modules.modules()[1] == {}


@pytest.mark.parametrize("made", ALL, ids=lambda made: f"{made.op} {made.shape}")
def test_rows_are_complete(made):
    assert made.providers[0].name == OURS and len({provider.name for provider in made.providers}) == len(made.providers)
    assert made.bytes > 0 and made.flops >= 0
    assert re.search(r"\bT \d+\b", made.shape)
    assert made.goal is None or 0 < made.goal <= 1
    assert made.copy_goal is None or 0 < made.copy_goal <= 1


def test_names_of_rows_differ():
    assert max(Counter((made.op, made.shape) for made in ALL).values()) == 1


@pytest.mark.parametrize(("model", "config"), [("Flash", FLASH), ("Pro", PRO)])
def test_bytes_are_those_of_the_formulas(model, config):
    """Per token: what is read and written once, and weights; to 1 % of the rest (scales, picks, indices)."""
    by_name, d, t = {(made.op, made.shape): made.bytes for made in ALL}, config.hidden, 4096
    formulas = {
        ("rmsnorm", f"{model} T {t}"): t * d * 4,
        ("add_rmsnorm", f"{model} T {t}"): t * d * 8,
        ("router", f"{model} T {t}"): config.n_experts * d * 2 + t * d * 2,
        ("router", f"{model} T 1"): config.n_experts * d * 2,
        ("moe_combine", f"{model} T {t}"): t * d * 2 * (6 + 1 + 1),
        ("quantize", f"fp8 {model} T {t}"): t * d * (2 + 1 + 1 / 128),
        ("quantize", f"mxfp8 {model} T {t}"): t * d * (2 + 1 + 1 / 32),
        ("quantize", f"mxfp4 {model} T {t}"): t * d * (2 + 0.5 + 1 / 32),
        ("quantize", f"nvfp4 {model} T {t}"): t * d * (2 + 0.5 + 1 / 16),
        ("kv_append", f"chunks of 64 T {t}"): t * 2 * 1024,
        ("kv_append", f"prefill T {t}"): 128 * 2 * 1024,
    }
    for key, size in formulas.items():
        assert by_name[key] == pytest.approx(size, rel=0.01), key


# A row of an op at a size that a CPU has time for: in plain torch, and inputs that are not trivial.
SMALL = {
    "rmsnorm": "_plain",
    "add_rmsnorm": "_plain",
    "moe_combine": "_plain",
    "moe_dispatch": "_plain",
    "quantize": "_plain",
    "kv_append": "_plain",
    "turbo4_encode": "_plain",
    "mla_page_table": "_plain",
}


@pytest.mark.parametrize("op", SMALL)
def test_checks_take_the_plain_way_and_refuse_one_changed_value(op):
    module = importlib.import_module(modules.known()[op])
    names = {
        "quantize": ["fp8 Flash T 8"],
        "kv_append": ["decode T 8", "chunks of 512 T 4096"],
        "turbo4_encode": ["GQA 8 d128 T 8"],
        "mla_page_table": ["S 4K T 1"],
    }.get(op, ["Flash T 8"])
    for made in (one for one in module.rows() if one.shape in names):
        given = made.given(torch.Generator().manual_seed(3))
        for x in given.values():
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 1:
                assert float(x.float().std()) > 0
        outputs = module._plain(*given.values())
        made.check(given, outputs)
        for name, x in outputs.items():
            bad = dict(outputs)
            bad[name] = x.clone()
            flat = bad[name].view(-1)
            flat[: max(1, len(flat) // 100)] += 3
            with pytest.raises(AssertionError, match=name):
                made.check(given, bad)


def test_the_routers_check_takes_near_ties_alone():
    from dsv4lib.ops.router import bench as router

    made = next(one for one in router.rows() if one.shape == "Flash T 8")
    given = made.given(torch.Generator().manual_seed(5))
    logits = given["x"].float() @ given["weight"].float().T
    good = router._select(logits, given["bias"], given["k"], given["factor"])
    made.check(given, good)
    for change, said in (
        (lambda e, w: (e.roll(1, 0), w), "k-th best"),
        (lambda e, w: (e[:, [0, 0, 2, 3, 4, 5]], w), "twice"),
        (lambda e, w: (e + 256, w), "outside"),
        (lambda e, w: (e, w * 1.01), "weights"),
        (lambda e, w: (e.roll(1, 1), w), "weights"),
    ):
        experts, weights = change(good["experts"], good["weights"])
        with pytest.raises(AssertionError, match=said):
            made.check(given, {"experts": experts, "weights": weights})


def test_the_chain_of_a_layer_is_checked_op_by_op(monkeypatch):
    from dsv4lib.bench.ops import layer_chain

    def small(op, shape):
        name = {"mhc": "y", "topk": "z"}.get(op)
        if name is None:
            return None

        def checked(given, outputs):
            assert set(given) == {"x", "more"} and torch.equal(outputs[name], 2 * given["x"]), f"{op}: {name}"

        def bind(factor, given):
            out = {}
            return lambda: out.update({name: factor * given["x"]}), out

        providers_of = (Provider(OURS, partial(bind, 2)), Provider("fast", partial(bind, 2 if op == "mhc" else 3)))
        return dataclasses.replace(row(checked=checked), op=op, providers=providers_of)

    monkeypatch.setattr(layer_chain, "CHAIN", (("mhc", "", "fast"), ("topk", "", "fast")))
    monkeypatch.setattr(layer_chain, "_row", small)
    (made,) = layer_chain.rows()
    result = harness.measure(made, FakeClock(2.0, 4.0), "cpu")
    assert states(result) == {OURS: TIMED, "public kernels": WRONG} and made.bytes == 560
    assert result.named("public kernels").detail == "topk: z"
    ours, clock = result.named(OURS), FakeClock(2.0, 4.0)
    assert (ours.us, ours.calls, ours.host_us) == (None, 0, 12.0) and ours.detail.startswith("no cold time: ")
    harness.measure(made, clock, "cpu")
    assert clock.seen == []


def test_a_row_without_cold_times_is_compared_in_a_graph_alone(tmp_path):
    """Its peer there, its host times; no ratio and no verdict by what it does not have."""
    clock = FakeClock(3.0, 4.0, 5.0)
    clock.warm = lambda calls: [2.0, 4.0, 3.0]
    slow, fast = provider("slow", lambda x: x * 2), provider("fast", lambda x: x * 2)
    made = dataclasses.replace(row(slow, fast, goal=0.9), no_cold="a reason")
    found = harness.measure(made, clock, "cpu")
    assert states(found) == dict.fromkeys((OURS, "slow", "fast"), TIMED)
    assert found.peer is None and found.ratio is None and found.verdict == "not judged"
    assert found.graph_peer.provider == "fast" and found.graph_ratio == 2 / 3 and found.graph_verdict == "reached"
    assert any("no cold time: a reason" in line and "13.00" in line for line in results.lines(found))
    results.record([found], FACTS, tmp_path)
    (cells,) = ops_table.cells(results.load(tmp_path), {})
    assert cells[2] == "no cold time: a reason" and cells[6:9] == ("2", "fast", "3") and cells[10:12] == ("13", "15")


# ------------------------------------------------------------------- what is recorded


def recorded(folder):
    rows = [
        result(3.0, 5.0, goal=0.6, shape="T 1"),
        result(4.0, 5.0, goal=0.6, shape="T 8"),
        result(8.0, None, 9.0, copy_goal=0.9, op="other", shape="T 1"),
    ]
    gone, wrong = Found("gone", ABSENT, detail="no package"), Found("bad", WRONG, detail='y, "all"')
    rows[2] = dataclasses.replace(rows[2], found=(*rows[2].found, gone, wrong), floor_us=None)
    results.record(rows, FACTS, folder)
    return rows


def test_rows_come_back_as_they_were(tmp_path):
    rows = recorded(tmp_path)
    assert results.load(tmp_path) == [dataclasses.replace(one, run="today") for one in rows]
    assert results.runs(tmp_path) == {"today": FACTS}
    results.record([result(2.0, 5.0, goal=0.6, shape="T 8")], {**FACTS, "run": "later"}, tmp_path)
    found = {(one.op, one.shape): one for one in results.load(tmp_path)}
    assert len(found) == 3 and found["double", "T 8"].ours_us == 2.0 and found["double", "T 8"].run == "later"
    assert set(results.runs(tmp_path)) == {"later", "today"}


def test_a_folder_of_another_version_is_refused(tmp_path):
    with pytest.raises(DSV4Error, match="rows.csv is missing"):
        results.load(tmp_path)
    (tmp_path / "rows.csv").write_text("op,us\na,1\n")
    with pytest.raises(DSV4Error, match="other columns"):
        results.load(tmp_path)


def test_the_table_shows_what_is_missed_and_why(tmp_path):
    recorded(tmp_path)
    notes = tmp_path / "notes.csv"
    notes.write_text("op,shape,limit,tried\ndouble,T 8,latency of one load,two polls 4.5\ndouble,T 1,nothing,\n")
    lines = ops_table.markdown(tmp_path, notes).splitlines()
    reached, missed, copied = lines[2:5]
    times = "3 | peer | 5 | 0.60 | 1.5 | the same | 2.5 | 0.60 | 30 | 50"
    assert reached.startswith(f"| double | T 1 | {times} | <= 0.6x | reached | reached | 1 | 3.0 |")
    assert (
        "**missed** | **missed**" in missed
        and missed.endswith("| latency of one load | two polls 4.5 |")
        and "nothing" not in reached
    )
    assert "| none |" in copied and "* other: gone" in lines and "copy 1.12" in copied and "reached" in copied
    assert any("driver 1" in line and "`bench`" in line for line in lines)
    notes.write_text("op,shape,limit,tried\n")
    assert "not looked into yet" in ops_table.markdown(tmp_path, notes)
    with pytest.raises(DSV4Error, match="op, shape, limit, tried"):
        ops_table.notes(tmp_path / "no.csv")
    for text, words in (("op,shape,limit\n", "other columns"), ("op,shape,limit,tried\na,b,,c\n", "a b has no limit")):
        notes.write_text(text)
        with pytest.raises(DSV4Error, match=words):
            ops_table.notes(notes)


def test_the_figure_says_every_time(tmp_path):
    recorded(tmp_path)
    figure = ops_table.figure(tmp_path)
    assert len([ax for ax in figure.axes if ax.axison]) == 2
    text = style.alt_text(figure)
    assert "T 8 floor 1, ours 4, peer 5" in text and "T 1 floor none, ours 8, other none" in text
    assert style.to_png(figure).startswith(b"\x89PNG")
    with pytest.raises(ArgumentError, match="at least one"):
        dumbbells.dumbbells({"a": [dumbbells.Case("x", None, None, None)]}, "t")


def test_the_recorded_command_names_no_folder_of_the_machine():
    assert harness.command_line(["--record=/some/where"], Path("/some/where")).endswith("harness --record=DIR")
    found = harness.command_line(["--only", "mhc, topk", "--record", "/a/b/", "--ahead", "8"], Path("/a/b"), None)
    assert found == "python -m dsv4lib.bench.ops.harness --only 'mhc, topk' --record DIR --ahead 8"


def test_the_page_is_that_of_the_recorded_rows():
    written = peer_pages.written(ops_table.PAGE, ops_table.MODULE)
    if not (results.FOLDER / "rows.csv").is_file():
        assert written == "" and ops_table.notes() == {}
        pytest.skip("no rows are recorded yet")
    assert written == ops_table.markdown(), "python -m dsv4lib.pages.hopper.ops_table writes it"
    assert peer_pages.written(ops_table.README, ops_table.MODULE) == ops_table.extract()
    missed = {(one.op, one.shape) for one in results.load() if one.verdict == "missed"}
    assert missed == set(ops_table.notes()), "a missed row, and no other, has a line in ops_notes.csv"
