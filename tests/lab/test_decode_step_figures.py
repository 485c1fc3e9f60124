"""The page on a decode step: the model's schedule, floors from sizes, each check and its fault, what is said of it."""

import re
import tomllib
from collections import Counter
from dataclasses import replace

import pytest

from dsv4lib import backends, env
from dsv4lib.bench.decode_step import lines as step
from dsv4lib.bench.ops import harness
from dsv4lib.bench.ops.results import OURS, TIMED, Found, Result
from dsv4lib.config import FLASH, PRO, LayerKind
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab import stage
from dsv4lib.pages.decode_step import figures, floors, run_case, schedule
from dsv4lib.pages.hopper import ops_table
from dsv4lib.viz.style import alt_text, to_png
from dsv4lib.viz.waterfall import Part

ROWS = run_case.recorded()
STEPS = run_case.whole_steps()
H100 = "NVIDIA H100 80GB HBM3"
SEEN = {  # by its check, and by no other but README's sums, which most changes move
    "line_dropped": {"unaccounted", "readme_off"},
    "layer_miscounted": {"counts_off", "readme_off"},
    "every_expert": {"floors_off"},
    "too_fast": {"impossible", "readme_off"},
    "class_moved": {"readme_off"},
    "torch_counted": {"not_packages"},
    "any_card": {"elsewhere"},
    "doubled": {"readme_off", "over_floor"},
    "pretended": {"pretended"},
    "none": set(),
}


@pytest.fixture(scope="module")
def scheduled():
    return schedule.of_a_step()


# ------------------------------------------------------------------ the schedule


def test_the_model_calls_what_the_bench_counts(scheduled):
    """Counts of calls against those that the bench gives its lines, which are typed there."""
    counted = {line.name: line.ours_count for line in step.lines(1, 32768, step.known_rows())}
    assert scheduled.counts == counted and scheduled.unnamed == []
    # Outside of the layers: embedding, the head's site and its product.
    layers = {kind: sum(n for (_, of), n in scheduled.calls.items() if of is kind) for kind in (*LayerKind, None)}
    assert scheduled.calls_a_step == 2 * layers["SWA"] + 21 * layers["CSA"] + 20 * layers["HCA"] + 3
    assert layers[None] == 3
    assert layers["CSA"] - layers["SWA"] == 6 and layers["HCA"] - layers["SWA"] == 2
    assert scheduled.a_layer("routed MoE MXFP4", LayerKind.CSA) == 5
    assert scheduled.places_of("wq_b fp8") == scheduled.places_of("indexer wq_b fp8")  # one call


def test_a_call_in_no_line_is_named(scheduled):
    place = schedule.Place("attn", "softcap")
    more = replace(scheduled, calls={**scheduled.calls, (place, LayerKind.CSA): 2})
    assert more.unnamed == [place] and more.calls_a_step == scheduled.calls_a_step + 42
    assert run_case.unaccounted(ROWS, more) == ["attn: softcap"]
    fewer = {key: n for key, n in scheduled.calls.items() if key[0].op != "topk"}
    assert run_case.unaccounted(ROWS, replace(scheduled, calls=fewer)) == ["top-k: no call of the model"]


# -------------------------------------------------------------------- the floors


def test_floors_are_those_of_the_bench_for_every_batch_and_context():
    """Bytes of every line from sizes alone, against those of the operands of the bench's rows."""
    known = step.known_rows()
    for batch in step.BATCHES:
        for context in step.CONTEXTS:
            derived = {one.name: one for one in floors.needs(FLASH, batch, context)}
            lines = step.lines(batch, context, known)
            assert derived.keys() == {line.name for line in lines}
            for line in lines:
                need = derived[line.name]
                assert (need.group, need.count, need.bytes) == (line.group, line.count, line.bytes), line.name
                assert need.floor_us(step.BANDWIDTH) == pytest.approx(line.floor_us), line.name


def test_other_sizes_change_what_they_should():
    few, many = ({one.name: one for one in floors.needs(FLASH, batch, 32768)} for batch in (1, 64))
    assert all(many[name].weights == one.weights for name, one in few.items() if name != "routed MoE MXFP4")
    for name, one in few.items():
        assert many[name].cache == 64 * one.cache and many[name].tokens == pytest.approx(64 * one.tokens), name
    assert floors.reached(256, 6, 1) == pytest.approx(6) and floors.reached(256, 6, 10**5) == pytest.approx(256)
    short, long = ({one.name: one for one in floors.needs(FLASH, 1, context)} for context in (32768, 1 << 20))
    assert {name for name in short if short[name].bytes != long[name].bytes} == {
        "attention HCA",
        "indexer logits fp8",
        "top-k",
    }
    wider = {one.name: one for one in floors.needs(PRO, 1, 32768)}
    assert wider["LM head"].weights / few["LM head"].weights == PRO.hidden / FLASH.hidden
    assert run_case.half_of_experts(FLASH) == 30 and run_case.half_of_experts(PRO) == 45
    for config in (FLASH, PRO):
        half, given = run_case.half_of_experts(config), (config.n_experts, config.experts_per_token)
        assert floors.reached(*given, half - 1) < config.n_experts / 2 <= floors.reached(*given, half)


# -------------------------------------------------------------- checks and faults


def checks(fault, scheduled):
    rows = run_case.recorded(fault)
    found = {
        "unaccounted": run_case.unaccounted(rows, scheduled),
        "counts_off": run_case.counts_off(rows, scheduled),
        "floors_off": run_case.floors_off(rows, fault),
        "impossible": run_case.impossible(rows),
        "readme_off": run_case.readme_off(rows),
        "not_packages": run_case.not_packages(rows),
        "elsewhere": run_case.judged_elsewhere(run_case.judged(rows, STEPS, fault)),
        "over_floor": run_case.over_floor(rows, 128) > 1.6,
    }
    if fault == "pretended" or not backends.status("native", "sm_90a").available:
        found["pretended"] = run_case.pretended(run_case.live(rows, (step.MHC, step.HEAD), fault=fault))
    return {name for name, what in found.items() if what}


@pytest.mark.parametrize("fault", SEEN)
def test_each_fault_is_seen_by_its_check_alone(fault, scheduled):
    assert checks(fault, scheduled) == SEEN[fault]


def test_every_fault_is_among_them():
    contract = tomllib.loads((env.root() / "stages/decode_step/stage.toml").read_text())
    assert set(SEEN) == set(run_case.FAULTS) == set(contract["parameters"]["fault"]["choices"])
    assert {one["parameters"]["fault"] for one in contract["negatives"]} == set(SEEN) - {"none"}
    gates = {gate["metric"] for gate in contract["gates"]}
    negatives = stage.load("decode_step", env.root()).negatives
    assert gates == {metric for one in negatives for metric in one.metrics}


def test_what_checks_look_at(scheduled):
    """Each end of a check: a floor off by its last digit, a peer below the floor, a cell of README, a silent run."""
    first = ROWS[0]
    assert run_case.floors_off([first._replace(floor_us=first.floor_us * 1.0001)]) == ["routed MoE MXFP4, b 1"]
    assert run_case.floors_off([first._replace(bytes=first.bytes + 1)]) == ["routed MoE MXFP4, b 1"]
    low = first._replace(public=run_case.Public(first.floor_us / 2, "peer", ()))
    assert run_case.impossible([low]) == ["routed MoE MXFP4, b 1"]
    lost = [one._replace(ours_us=None, state=TIMED) if one.name == "top-k" else one for one in ROWS]
    assert run_case.unaccounted(lost, scheduled) == [f"top-k, b {batch}" for batch in step.BATCHES]
    slower = [one._replace(ours_us=1.01 * one.ours_us) if one.name == "LM head" else one for one in ROWS]
    assert set(run_case.readme_off(slower)) >= {f"LM head bf16, b {batch}" for batch in step.BATCHES}
    assert run_case.pretended(run_case.Live([], "")) == ["silent"]


def test_sums_are_of_the_same_lines():
    """Ours and floor of what ours timed; public and ours of what both timed."""
    base = ROWS[0]._replace(count=2, ours_count=1, floor_us=1e3, ours_us=4e3, public=None)
    peer = base._replace(public=run_case.Public(3e3, "peer", ()))
    none = base._replace(ours_us=None, public=run_case.Public(9e3, "peer", ()))
    assert run_case.total([base, peer, none]) == run_case.Sum(8.0, 4.0, 2, 3, 6.0, 4.0, 1)
    assert (base.lost_ms, none.lost_ms) == (2.0, 0.0)


def row(op, shape, gpu, **times):
    """A recorded row of another's kernels: us by name, on a GPU."""
    found = tuple(Found(name.replace("_", " "), TIMED, us, us, us, 21) for name, us in times.items())
    return {(op, shape): Result(op, shape, 0, 0, None, None, 1.0, found, f"today now {gpu}")}


def test_a_public_kernel_is_the_fastest_package_of_that_card():
    key = "some", "T 1"
    first = row(*key, run_case.CARD, ours=1.0, torch_compile=2.0, vLLM=5.0)
    second = row(*key, run_case.CARD, vLLM=4.0, DeepGEMM=4.5)
    other = row(*key, H100, vLLM=3.0)
    assert run_case._best(key, [first], False) == run_case.Public(5.0, "vLLM", (f"today now {run_case.CARD}",))
    assert run_case._best(key, [first, second, other], False).us == 4.0
    assert run_case._best(key, [first, second, other], True).us == 2.0
    assert run_case._best(key, [other], False) is None and run_case._best(("other", ""), [first], True) is None


def test_attention_is_compared_with_the_same_work_alone():
    """Its public times are of the ops' own rows; a row of another context has other bytes."""
    known = step.known_rows()
    line = next(one for one in step.lines(8, run_case.CONTEXT, known) if one.name == "attention HCA")
    key = "fmha", "Flash HCA T 8"
    record = row(*key, run_case.CARD, FlashMLA=9.0)
    with pytest.raises(DSV4Error, match="not a step of 32768 tokens"):
        run_case._public(line, 8, [record], False)
    record[key] = replace(record[key], bytes=line.bytes)
    assert run_case._public(line, 8, [record], False).us == 9.0
    shared = next(one for one in step.lines(8, run_case.CONTEXT, known) if one.name == "shared expert fp8")
    parts = {**row("linear", "Flash shared w1+w3 T 8", run_case.CARD, DeepGEMM=3.0)}
    assert run_case._public(shared, 8, [parts], False) is None  # one of two GEMMs
    parts |= row("linear", "Flash shared w2 T 8", run_case.CARD, DeepGEMM=2.0)
    assert run_case._public(shared, 8, [parts], False)[:2] == (5.0, "DeepGEMM")


def test_other_work_is_no_public_time():
    """HCA's compressor keeps a running softmax where packages read 128 rows."""
    line = next(one for one in step.lines(8, run_case.CONTEXT, step.known_rows()) if one.name == "HCA compressor")
    assert run_case._public(line, 8, [row(*step.key_of(line.others[0]), run_case.CARD, vLLM=3.0)], False) is None
    assert set(run_case.UNEQUAL) <= {one.name for one in ROWS}
    assert {one.name for one in ROWS if one.public is None} >= set(run_case.UNEQUAL)


def test_both_records_agree_on_the_same_kernels(monkeypatch):
    count, ratio = run_case.same_kernels()
    assert count > 0 and ratio == pytest.approx(17.695 / 15.68)  # cuBLAS, wq_b of 8 tokens, on two days
    made = {
        run_case.FOLDER: row("a", "", run_case.CARD, ours=1.0, vLLM=2.0, torch_topk=9.0)
        | row("b", "", run_case.CARD, cuBLAS=4.0)
        | row("c", "", run_case.CARD, cuBLAS=4.0),
        run_case.results.FOLDER: row("a", "", run_case.CARD, ours=5.0, vLLM=3.0, torch_topk=1.0)
        | row("b", "", run_case.CARD, cuBLAS=3.2)
        | row("c", "", H100, cuBLAS=8.0),
    }
    monkeypatch.setattr(run_case.results, "load", lambda folder: list(made[folder].values()))
    assert run_case.same_kernels() == (2, 1.5)
    made[run_case.FOLDER] = row("d", "", run_case.CARD, cuBLAS=4.0)
    assert run_case.same_kernels() == (0, 1.0)


def test_a_source_says_whether_kernels_changed_since(monkeypatch):
    monkeypatch.setattr(run_case.results, "runs", lambda folder: {"today": {"kernels": "0123"}})
    rows = [one._replace(run="today") for one in ROWS[:2]]
    for now, said in (("0123", "those of this source"), ("4567", "changed since, 4567 now")):
        monkeypatch.setattr(run_case.env, "kernel_fingerprint", lambda now=now: now)
        assert run_case.sources(rows) == [f"today, kernels 0123: {said}"]


# -------------------------------------------------------------------------- goals


@pytest.mark.parametrize(
    ("goal", "us", "gpu", "said"),
    [
        (10, 10.0, run_case.CARD, "reached"),
        (10, 10.1, run_case.CARD, "missed"),
        (10, 10.0, H100, "reached on a slower card"),
        (10, 9.0, "NVIDIA B200", "open"),  # faster than the card of the goal
        (10, 10.1, "NVIDIA B200", "missed at any bandwidth"),
        (10, 14.0, H100, "open"),  # 9.8 if all of it were bytes
        (10, 15.0, H100, "missed at any bandwidth"),
    ],
)
def test_a_goal_is_judged_by_its_own_card(goal, us, gpu, said):
    assert run_case.verdict(goal, us, gpu) == said
    assert run_case.verdict(goal, us, gpu, "any_card") == ("reached" if us <= goal else "missed")


def test_goals_name_lines_and_batches_that_there_are():
    names = {(one.name, one.batch) for one in ROWS}
    for goal in run_case.goals():
        if goal.what != run_case.WHOLE:
            assert all((name, goal.batch) in names for name in goal.what.split(" & ")), goal
    judged = {(one.goal.what, one.goal.batch): one for one in run_case.judged(ROWS, STEPS)}
    both = judged["indexer wq_b fp8 & indexer compressor+weights GEMM", 1]
    single = {one.name: one.ours_us for one in ROWS if one.batch == 1}
    assert both.us == single["indexer wq_b fp8"] + single["indexer compressor+weights GEMM"]
    assert {one.gpu for key, one in judged.items() if key[0] == run_case.WHOLE} == {one.gpu for one in STEPS}
    (lost,) = (one for one in run_case.judged(ROWS[1:], STEPS) if one.us is None)
    assert lost.goal.what == "routed MoE MXFP4" and lost.verdict == "not measured"
    assert run_case.judged(ROWS, [])[0].verdict == "not measured"
    mixed = [one._replace(run=f"today now {H100}") if one.name == "indexer wq_b fp8" else one for one in ROWS]
    (sums,) = (one for one in run_case.judged(mixed, STEPS) if " & " in one.goal.what and one.goal.batch == 1)
    assert sums.verdict == "open" and sums.us == both.us and sums.gpu == f"{H100}, {run_case.CARD}"


def test_bad_files_and_cards_are_refused(monkeypatch, tmp_path):
    with pytest.raises(ArgumentError, match="gpu"):
        run_case.bandwidth("some card")
    monkeypatch.setattr(run_case, "FOLDER", tmp_path)
    (tmp_path / "goals.csv").write_text("what,us\n")
    with pytest.raises(DSV4Error, match="other columns"):
        run_case.goals()


def test_limits_are_of_lines_and_pages_that_there_are(monkeypatch):
    limits = run_case._limits()
    assert set(limits) <= {one.name for one in ROWS}
    assert all((env.root() / "data/bench" / one.source).is_file() and one.limit for one in limits.values())
    note = {("router", "Flash T 1"): ops_table.Note("a chain", "")}
    monkeypatch.setattr(ops_table, "notes", lambda: note)
    monkeypatch.setattr(run_case, "_limits", lambda: {"wq_b fp8": run_case.Limit("bytes", "linear.md")})
    by = {(one.name, one.batch): run_case.limit(one) for one in ROWS}
    assert by["router", 1] == ("a chain", "ops.md") and by["wq_b fp8", 8] == ("bytes", "linear.md")
    assert by["router", 8] == by["attention HCA", 1] == (ops_table.UNKNOWN.limit, "")


# --------------------------------------------------------------------------- here


def test_without_a_hopper_nothing_is_timed_and_that_is_said(capsys):
    if backends.status("native", "sm_90a").available:
        pytest.skip("there is one: live() would time")
    found = run_case.live(ROWS, (step.MHC,))
    assert found.lines == [] and found.skipped.startswith("no Hopper GPU here: no ")
    figures.here(found)
    assert "SKIPPED" in capsys.readouterr().out


def test_with_one_its_lines_are_timed_by_the_bench(monkeypatch, capsys):
    """On a machine that says it has one, with a clock of ours: the rows of the classes, beside the record."""
    seen = []

    def measure(wanted, clock, providers):
        seen.extend(wanted)
        times = {"mhc_fp8": 5.0, "mhc": 9.0}
        return [
            Result(row.op, row.shape, row.bytes, row.flops, None, None, 1.0, (Found(OURS, TIMED, us, us, us, 21),))
            for row in wanted
            if (us := times.get(row.op))
        ]

    monkeypatch.setattr(run_case.backends, "status", lambda *_: backends.Status("native", True, ""))
    monkeypatch.setattr(harness, "run", measure)
    monkeypatch.setattr(run_case.timing, "GpuClock", lambda: None)
    monkeypatch.setattr(run_case.torch.cuda, "get_device_name", lambda: H100)
    found = run_case.live(ROWS, (step.MHC, step.HEAD))
    mhc, head = found.lines
    assert (mhc.name, mhc.us, mhc.calls, mhc.gpu) == ("mHC post, pre, norm", 5.0, 21, H100) and not found.skipped
    assert (head.name, head.us, head.calls) == ("LM head", None, 0)  # its row failed
    assert {row.op for row in seen} == {"mhc", "mhc_fp8", "linear_bf16"} and run_case.pretended(found) == []
    assert run_case.pretended(run_case.Live([mhc._replace(calls=0)], "")) == [mhc.name]
    assert run_case.pretended(run_case.Live([head, mhc._replace(us=None, calls=0)], "")) == ["silent"]  # all failed
    figures.here(found)
    out = capsys.readouterr().out
    assert "not timed" in out and run_case.CARD in out


# ------------------------------------------------------------------------ figures


def test_figures_say_which_card_and_what_is_missing(monkeypatch):
    some = [one._replace(public=None) if one.group in (step.MOE, step.HEAD) else one for one in ROWS]
    some = [one._replace(ours_us=None, state="no kernel") if one.name == "top-k" else one for one in some]
    waterfall, whole = figures.measured(some), figures.one_graph(ROWS, STEPS)
    text = alt_text(waterfall)
    assert run_case.CARD in text and "no public time" in text and "of 26 lines" in text
    assert alt_text(figures.measured(ROWS)) != text and text.count("no public time") >= 8
    counts = Counter(re.findall(r"b \d+(?=: routed)", text))
    assert list(counts) == [f"b {batch}" for batch in step.BATCHES]
    assert run_case.CARD in alt_text(whole) and all(one.gpu in alt_text(whole) for one in STEPS)
    monkeypatch.setattr(run_case, "goals", list)
    assert "(no goal)" in alt_text(figures.one_graph(ROWS, STEPS)) and "(no goal)" not in alt_text(whole)
    for fig in (waterfall, whole, figures.losses(ROWS, 5)):
        assert to_png(fig).startswith(b"\x89PNG")


def test_a_class_says_of_how_many_lines_it_is():
    full = run_case.Sum(4.0, 1.0, 3, 3, 5.0, 4.0, 3)
    assert figures._part("mHC", full) == Part("mHC", 4.0, 1.0, 5.0)
    part = figures._part("mHC", full._replace(timed=2, compared=1, public_ours=1.5))
    assert part.note == "\n2 of 3 lines timed\npublic: 1 of 3 lines, ours there 1.5"
    alone = figures._part("mHC", full._replace(compared=0, public=0.0))
    assert alone == Part("mHC", 4.0, 1.0, None, "\nno public time")
    nothing = figures._part("mHC", run_case.Sum(0.0, 0.0, 0, 1, 0.0, 0.0, 0))
    assert nothing.value is nothing.inner is nothing.other is None


def test_what_is_missing_is_listed(monkeypatch):
    shown = []
    monkeypatch.setattr(figures, "show_table", lambda head, rows: shown.append(rows))
    both = ROWS[0]._replace(ours_us=1.0, public=run_case.Public(1.0, "peer", ()))
    figures.lacking(
        [both, both._replace(batch=8, ours_us=None, state="no kernel"), both._replace(batch=32, public=None)]
    )
    (rows,) = shown
    ours, public = "ours: no kernel when it was recorded", "public: no package's kernel was timed"
    assert rows == [(both.name, ours, "8"), (both.name, public, "32")]
    figures.lacking([one for one in ROWS if one.name == "HCA compressor"])
    assert shown[1] == [("HCA compressor", f"public: {run_case.UNEQUAL['HCA compressor']}", "1, 8, 32, 128")]


def test_rows_of_the_first_tables(scheduled, monkeypatch):
    """Launches by kind of layer; MB of a launch; which of bytes and MMAs is the floor."""
    shown = []
    monkeypatch.setattr(figures, "show_table", lambda head, rows: shown.append({row[1]: row[2:] for row in rows}))
    figures.what_a_step_is(scheduled)
    figures.floors_table(128, 32768, 4.8)
    figures.floors_table(512, 32768, 100.0)
    step_is, slow, fast = shown
    assert step_is["top-k"] == ("", "1", "", 21, "attn: topk")
    assert step_is["mHC post, pre, norm"][:4] == ("2", "2", "2", 86)
    assert {row[-1] for row in slow.values()} == {"bytes"}
    assert fast["routed MoE MXFP4"][-1] == "MMAs" and fast["top-k"][-1] == "bytes"
    assert slow["LM head"][:3] == (1, "1,059", "") and slow["attention SWA"][:2] == (2, "")


def test_lines_are_ordered_by_what_they_lose(monkeypatch):
    shown = []
    monkeypatch.setattr(figures, "show_table", lambda head, rows: shown.append(rows))
    figures.furthest(ROWS, 128, 4)
    lost = {one.name: one.lost_ms for one in ROWS if one.batch == 128}
    assert [row[0] for row in shown[0]] == sorted(lost, key=lost.__getitem__, reverse=True)[:4]
    short = ROWS[0]._replace(ours_us=figures.TWO, floor_us=1.0)
    assert figures._nature(short).startswith("a launch")
    assert figures._nature(short._replace(ours_us=4.0)) == "25 % of it is the floor"
    assert figures._nature(short._replace(ours_us=101.0)).startswith("under 1 %")
    worst = figures._order(ROWS, 30)
    assert set(worst) == {one.name for one in ROWS} and worst[0] == max(lost, key=lost.__getitem__)


def test_the_floor_of_any_step():
    figure, said = figures.floor_of(8, 32768, 4.8)
    total = sum(one.count * one.floor_us(4.8e12) for one in floors.needs(FLASH, 8, 32768)) / 1e3
    assert said.startswith(f"floor {total:.3g} ms, ") and f"{8e3 / total:,.0f} tokens/s" in said
    assert "b 8, 32,768 tokens, 4.8 TB/s" in alt_text(figure)
    parts = figures.floor_parts(FLASH, 8, 32768, 4.8)
    assert all(0 <= part.inner <= part.value for part in parts) and sum(p.value for p in parts) == pytest.approx(total)
    assert figures.floor_of(8, 32768, 0.48)[1].startswith(f"floor {10 * total:.3g} ms, ")
    half = figures.floor_parts(FLASH, 8, 32768, 2.4)
    assert sum(p.value for p in half) == pytest.approx(2 * total)  # all of it bytes
    for name, change in (("batch", {"batch": 0}), ("context", {"context": 1 << 21}), ("bandwidth", {"bandwidth": 0})):
        with pytest.raises(ArgumentError, match=name):
            figures.floor_of(**{"batch": 1, "context": 4096, "bandwidth": 4.8} | change)


def test_tables(scheduled, capsys):
    figures.what_a_step_is(scheduled)
    figures.floors_table(1, 32768, 4.8)
    figures.lacking([one._replace(ours_us=None, state="no kernel", public=None) for one in ROWS[:1]])
    figures.furthest(ROWS, 1, 3)
    figures.graph_table(ROWS, STEPS)
    figures.goals(run_case.judged(ROWS, STEPS))
    figures.checks({"one": [], "two": ["a", "b"]})
    out = capsys.readouterr().out
    assert "in no line: model: embedding" in out and "2 SWA, 21 CSA, 20 HCA layers" in figures.calls_of(scheduled)
    assert "ours: no kernel when it was recorded" in out and "nothing" in out and "a; b" in out
    assert f"{STEPS[0].batch * 1e3 / STEPS[0].ms:,.0f}" in out and STEPS[0].gpu in out
    assert len(run_case.sources(ROWS)) == len({one.run for one in ROWS})
