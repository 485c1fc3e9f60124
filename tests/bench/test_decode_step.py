"""The bench of a decode step without a GPU: floors, counts, rows that are right and wrong, sums, what is stored."""

import csv
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsv4lib import backends
from dsv4lib.bench.decode_step import lines as step
from dsv4lib.bench.decode_step import peers as step_peers
from dsv4lib.bench.decode_step import rows, run, table
from dsv4lib.bench.ops import harness
from dsv4lib.bench.ops.results import ABSENT, FAILED, OURS, TIMED, WRONG, Found, Result
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.formats import kv_entry, mxfp4
from dsv4lib.lab.commands import benches
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.pages.decode_step import run_case, summary
from dsv4lib.pages.hopper import step_table

TOKENS = 3
SMALL = replace(
    FLASH,
    hidden=256,
    expert_width=128,
    n_experts=8,
    experts_per_token=2,
    n_heads=4,
    o_groups=2,
    index_topk=24,
)
# us of one at b 1, 8, 32, 128, context 32K: counted by hand from the model's sizes for the study of 2026-11-23.
FLOORS = {
    "routed MoE MXFP4": (16.7, 123, 379, 679),
    "wq_a+wkv fp8": (1.31, 1.32, 1.36, 1.50),
    "wq_b fp8": (7.00, 7.10, 7.43, 8.77),
    "CSA compressor GEMM": (3.50, 3.52, 3.58, 3.82),
    "HCA compressor GEMM": (1.75, 1.76, 1.82, 2.02),
    "indexer wq_b fp8": (1.75, 1.78, 1.86, 2.21),
    "indexer compressor+weights GEMM": (0.985, 0.999, 1.04, 1.23),
    "wo_a fp8": (7.00, 7.07, 7.32, 8.30),
    "wo_b fp8": (6.99, 7.02, 7.10, 7.43),
    "shared expert fp8": (5.25, 5.28, 5.39, 5.84),
    "attention SWA": (0.043, 0.343, 1.37, 5.49),
    "attention CSA": (0.105, 0.841, 3.37, 13.5),
    "attention HCA": (0.074, 0.592, 2.37, 9.47),
    "indexer logits fp8": (0.232, 1.86, 7.43, 29.7),
    "top-k": (0.007, 0.058, 0.232, 0.929),
    "mHC post, pre, norm": (0.348, 0.468, 0.878, 2.52),
    "activation cast to FP8": (0.003, 0.020, 0.082, 0.328),
    "q_norm, kv_norm": (0.001, 0.010, 0.041, 0.164),
    "qnorm_rope_kv": (0.028, 0.222, 0.886, 3.54),
    "CSA compressor": (0.009, 0.069, 0.277, 1.11),
    "HCA compressor": (0.002, 0.018, 0.072, 0.289),
    "indexer_q": (0.005, 0.042, 0.168, 0.673),
    "indexer key compressor": (0.002, 0.017, 0.069, 0.275),
    "inv_rope_quant": (0.021, 0.165, 0.659, 2.63),
    "router": (0.439, 0.451, 0.492, 0.657),
    "LM head": (221, 221, 222, 228),
}
SUMS = {1: 2.35, 8: 7.0, 32: 18.4, 128: 32.7}  # ms


@pytest.fixture(scope="module")
def known():
    return step.known_rows()


def test_floors_are_those_of_the_study(known):
    """To a unit of the last digit that it gives, each line and the step."""
    for place, tokens in enumerate(step.BATCHES):
        found = step.lines(tokens, 32768, known)
        assert {line.name for line in found} == FLOORS.keys()
        for line in found:
            want = FLOORS[line.name][place]
            assert line.floor_us == pytest.approx(want, rel=0.006, abs=6e-4), line.name
        assert sum(line.count * line.floor_us for line in found) / 1e3 == pytest.approx(SUMS[tokens], rel=0.006)


def test_a_longer_context_costs_only_what_reads_it(known):
    """Indexer, top-k and HCA by its length; CSA not above the entries that are picked, and less below them."""
    short, long = (step.lines(8, context, known) for context in (4096, 131072))
    longer = {b.name: b.floor_us / a.floor_us for a, b in zip(short, long, strict=True) if b.floor_us != a.floor_us}
    assert longer.keys() == {"attention HCA", "indexer logits fp8", "top-k"}
    assert longer["indexer logits fp8"] == pytest.approx(32)
    assert rows.entries_of(LayerKind.CSA, 4096) == (1024, 512) and rows.entries_of(LayerKind.CSA, 1024) == (256, 256)
    for change in ({"tokens": 3}, {"context": 1000}):
        with pytest.raises(ArgumentError, match=next(iter(change)).replace("tokens", "batch")):
            step.lines(**{"tokens": 1, "context": 4096, "known": known} | change)


def test_every_layer_is_counted(known):
    counts = {line.name: line.count for line in step.lines(1, 32768, known)}
    assert sum(counts[f"attention {kind}"] for kind in LayerKind) == counts["wo_a fp8"] == FLASH.n_layers
    assert (counts["CSA compressor"], counts["HCA compressor"], counts["mHC post, pre, norm"]) == (21, 20, 86)
    groups = Counter(line.group for line in step.lines(1, 32768, known))
    assert set(groups) == set(step.CLASSES) and groups[step.GEMMS] == 9
    assert {line.group for line in step.lines(1, 32768, known, [step.MHC, step.HEAD])} == {step.MHC, step.HEAD}


# -------------------------------------------------------------- rows of its own

MADE = {
    "linear_bf16": lambda: rows.linear_bf16("some", 64, 256, TOKENS),
    "cast": lambda: rows.cast(256, TOKENS),
    "routed_moe": lambda: rows.routed_moe(TOKENS),
    "shared_expert": lambda: rows.shared_expert(TOKENS),
    "SWA": lambda: rows.attention(LayerKind.SWA, 512, TOKENS),
    "CSA": lambda: rows.attention(LayerKind.CSA, 512, TOKENS),
    "HCA": lambda: rows.attention(LayerKind.HCA, 8256, TOKENS),
    "indexer_logits": lambda: rows.logits(552, TOKENS),
    "indexer_logits fp4": lambda: rows.logits(552, TOKENS, "fp4"),
}


@pytest.mark.parametrize("name", MADE)
def test_a_row_takes_what_is_right_and_nothing_else(name, monkeypatch):
    """Ours by the ops' oracles, on small sizes: it fits its check and leaves its inputs alone; off by a tenth it fails.

    Bytes are at least those of results and of inputs that all tokens share.
    """
    monkeypatch.setattr(rows, "FLASH", SMALL)
    monkeypatch.setattr(rows, "BACKEND", "reference")
    row = MADE[name]()
    given = harness.inputs(row, "cpu")
    call, out = row.providers[0].bind(given)
    tried = harness._tried(OURS, call, out, row, given, "cpu")
    assert tried.state == TIMED, tried
    result = next(iter(out.values())) if name != "cast" else out["codes"]
    result.copy_(result.flip(0) if name == "cast" else 1.1 * result)
    with pytest.raises(AssertionError):
        row.check(given, out)
    assert row.bytes >= sum(x.nbytes for x in out.values() if not name.startswith("indexer_logits"))


def test_deep_gemm_reads_our_pages(monkeypatch):
    """Its call over a stand-in of its arithmetic: the layout of pages, queries and lengths that it is given."""

    def score(queries, pages, weights, lengths, table, schedule, most):
        q, scales_of_queries = queries
        assert schedule == "plan" and scales_of_queries is None and q.shape[1] == 1
        flat = pages.flatten(1)[table.long()]  # [B, W, bytes]: data of all keys, then their scales
        size = q.shape[-1]
        codes = flat[..., : rows.PAGE * size].unflatten(-1, (rows.PAGE, size)).flatten(1, 2).contiguous()
        scales = flat[..., rows.PAGE * size :].contiguous().view(torch.float32).flatten(1)
        found = torch.einsum("bhd,bsd->bhs", q[:, 0].double(), codes.view(torch.float8_e4m3fn).double()).relu()
        assert int(lengths.max()) <= most == found.shape[2] and lengths.shape == (len(q), 1)
        return ((found * weights[..., None]).sum(1) * scales).float()

    module = SimpleNamespace(get_num_sms=lambda: 132, fp8_fp4_paged_mqa_logits=score)
    module.get_paged_mqa_logits_metadata = lambda lengths, page, sms: "plan"
    monkeypatch.setattr(rows.peers, "load", lambda name: module)
    row = MADE["indexer_logits"]()
    given = harness.inputs(row, "cpu")
    call, out = row.providers[1].bind(given)
    call()
    row.check(given, out)


def test_an_op_without_a_kernel_here_is_absent(monkeypatch):
    """No GPU, no native kernel: the op's own words, and "no kernel" in the table; nothing is timed for it."""
    monkeypatch.setattr(rows, "FLASH", SMALL)
    found = harness.measure(rows.attention(LayerKind.SWA, 512, TOKENS), None, "cpu")
    ours, theirs = found.found
    assert (theirs.provider, theirs.state, theirs.detail) == ("FlashMLA", ABSENT, "package vllm is not installed")
    assert ours.state == ABSENT and ours.detail.startswith("op fmha: back end native cannot run here")


@pytest.mark.parametrize("kind", [LayerKind.SWA, LayerKind.CSA, LayerKind.HCA])
def test_flash_mla_reads_our_pages(kind, monkeypatch):
    """Its call over a stand-in of its arithmetic: pages as entries of 584 bytes, slots, lists filled up with -1."""

    def attend(q, cache, table, lengths, width, schedule, *, indices, attn_sink, softmax_scale, **options):
        assert table is lengths is None and schedule == "plan" and options.pop("is_fp8_kvcache")
        lists = [(cache, indices)]
        if options:
            lists.append((options.pop("extra_k_cache"), options.pop("extra_indices_in_kvcache")))
        assert not options and all(index.shape[2] % 64 == 0 for _, index in lists)
        out = torch.empty(len(q), 1, *q.shape[2:], dtype=q.dtype)
        for t in range(len(q)):
            keys = torch.cat([_entries(pages, index[t, 0]) for pages, index in lists]).double()
            scores = q[t, 0].double() @ keys.T * softmax_scale
            every = torch.cat((scores, attn_sink.double()[:, None]), 1).softmax(1)
            out[t, 0] = (every[:, :-1] @ keys).to(q.dtype)
        return out, None

    module = SimpleNamespace(get_mla_metadata=lambda: ("plan", None), flash_mla_with_kvcache=attend)
    for name, stand_in in (("load", lambda name: module), ("capability", lambda: 90)):
        monkeypatch.setattr(rows.peers, name, stand_in)
    monkeypatch.setattr(rows, "FLASH", SMALL)
    row = MADE[str(kind)]()
    given = harness.inputs(row, "cpu")
    call, out = row.providers[1].bind(given)
    call()
    row.check(given, out)


def _entries(pages, slots):
    """Decode entries of pages as FlashMLA addresses them; a slot of -1 is none."""
    count, page, one, size = pages.shape
    assert (one, size) == (1, kv_entry.LAYOUT.entry_bytes) and pages.stride()[1:3] == (size, size)
    flat = torch.as_strided(pages, (count, pages.stride(0)), (pages.stride(0), 1))  # padding after the entries, too
    return kv_entry.gather(flat, page, slots[slots >= 0].long())[0]


def test_triton_kernels_gets_our_experts(monkeypatch):
    """Its calls over stand-ins of its arithmetic: routes by expert, weights with K before N, gates beside values."""
    monkeypatch.setattr(rows, "FLASH", SMALL)
    monkeypatch.setattr(step_peers, "FLASH", SMALL)
    monkeypatch.setattr(rows.peers, "capability", lambda: 90)
    monkeypatch.setattr(step_peers, "_module", _triton_kernels)
    monkeypatch.setitem(sys.modules, "dsv4lib.bench.decode_step.triton_swiglu", SimpleNamespace(clamped_swiglu="ours"))
    row = MADE["routed_moe"]()
    given = harness.inputs(row, "cpu")
    call, out = row.providers[1].bind(given)
    call()
    row.check(given, out)


def _triton_kernels(name):
    """Stand-ins of what is used of triton_kernels: the order of its arguments, fp64 arithmetic."""
    if name == "matmul_ogs":
        plain = {word: SimpleNamespace for word in ("PrecisionConfig",)}
        specs = lambda *given: given  # noqa: E731
        return SimpleNamespace(matmul_ogs=_ragged, FnSpecs=specs, FusedActivation=specs, **plain)
    if name == "routing":
        data = SimpleNamespace
        routes = lambda weights, counts, n, k, expert_data: data(gate_scal=weights, counts=counts, k=k)  # noqa: E731
        pair = lambda src, dst: data(src=src, dst=dst)  # noqa: E731
        blocks = lambda counts, n, rows: None  # noqa: E731
        return data(RoutingData=routes, GatherIndx=pair, ScatterIndx=pair, compute_expt_data=blocks)
    if name == "tensor":
        same = lambda tensor, layout, **options: tensor  # noqa: E731
        return SimpleNamespace(FP4="FP4", wrap_torch_tensor=lambda tensor, dtype=None: tensor, convert_layout=same)
    if name == "tensor_details.layout":
        value = lambda mx_axis: ("value", {"mx_axis": mx_axis})  # noqa: E731
        scale = lambda mx_axis, num_warps: ("scale", {"mx_axis": mx_axis, "num_warps": num_warps})  # noqa: E731
        return SimpleNamespace(make_default_matmul_mxfp4_w_layout=value, make_default_matmul_mxfp4_w_scale_layout=scale)
    assert name == "matmul_ogs_details.opt_flags"
    return SimpleNamespace(update_opt_flags_constraints=lambda constraints: None)


def _ragged(x, w, bias, routes, gather_indx=None, scatter_indx=None, precision_config=None, gammas=None, **options):
    """Multiply rows of experts: gathered by `src // k`, or scattered to `dst // k` and added."""
    packed, scales = (tensor.transpose(1, 2) for tensor in (w, precision_config.weight_scale))
    assert packed.is_contiguous() and bias is None
    weights = mxfp4.dequantize(mxfp4.MXFP4Tensor(packed, scales), torch.float64)
    experts = torch.repeat_interleave(torch.arange(len(weights)), routes.counts)
    given = x.double() if gather_indx is None else x.double()[gather_indx.src.long() // routes.k]
    found = torch.einsum("rk,rnk->rn", given, weights[experts])
    if options:
        (_, _, names), (limit,), step_n = options["fused_activation"]
        assert names == ("limit",) and step_n == 2
        gate, value = found[:, ::2].clamp(max=limit), found[:, 1::2].clamp(-limit, limit)
        found = torch.nn.functional.silu(gate) * value
    if gammas is not None:
        found = found * gammas.double()[:, None]
    if scatter_indx is None:
        return found.bfloat16()
    back = found[scatter_indx.src.long()]  # rows of a token one after another
    return back.view(-1, routes.k, back.shape[1]).sum(1).bfloat16()


# ----------------------------------------------------------------------- tables


def result(row, us, *others, state=TIMED):
    """A measured row: ours took ``us``, the others so long."""
    found = [Found(OURS, state, us, us, us, 5, 1, us and us / 2, us and 10.0)] if us or state != TIMED else []
    found += [Found(f"peer {i}", TIMED, one, one, one, 5, 1, one, 30.0) for i, one in enumerate(others)]
    return Result(row.op, row.shape, row.bytes, row.flops, None, None, 1.0, tuple(found))


def entries(known, **change):
    """A step of b 8: every row of ours 2 us, others 3 and 4 us; ``change`` by name of line: (us, state)."""
    made, found = [], {}
    for line in step.lines(8, 32768, known):
        us, state = change.get(line.name.replace(" ", "_"), (2.0, TIMED))
        for row in line.ours:
            found[step.key_of(row)] = result(row, us, *((4.0, 3.0) if row in line.others else ()), state=state)
        for row in line.others:
            found.setdefault(step.key_of(row), result(row, None, 3.0, 5.0))
        made.append(table.entry(line, found))
    return made


def test_sums_are_of_what_was_timed(known):
    found = entries(known, attention_SWA=(None, ABSENT), attention_CSA=(None, WRONG), LM_head=(None, ABSENT))
    states = {one.line.name: one.state for one in found if one.state != TIMED}
    assert states == {"attention SWA": table.NO_KERNEL, "attention CSA": WRONG, "LM head": table.NO_KERNEL}
    by_class = {row[0]: row[1:] for row in table.classes(found)}
    assert by_class["sparse attention"][0] == "0.04 (1 of 3)"  # 20 HCA layers of 2 us
    assert by_class["sparse attention"][1] == "0.129" and by_class["sparse attention"][-1] == "attention SWA"
    assert by_class["LM head bf16"][:2] == ["no kernel", "0.003"]
    assert by_class["mHC"][:2] == ["0.172", "0.258"]  # 86 of 2 and 3 us
    assert by_class[step.SMALL][:2] == ["0.596", "1.15"]  # 298 of 2 us, and 384 of 3: casts are 43 of ours, else 129
    small = next(one for one in found if one.line.name == "activation cast to FP8")
    assert (small.line.count, small.line.ours_count, small.public_us, small.ours_us) == (129, 43, 3.0, 2.0)
    shared = next(one for one in found if one.line.name == "shared expert fp8")
    assert (shared.public_us, shared.ours_us, shared.host_us) == (6.0, 2.0, 10.0)  # two GEMMs of others
    assert by_class["sum"][0].endswith(f"({len(found) - 3} of {len(found)})") and by_class["sum"][-1] == ""
    text = table.page(8, 32768, found, "some GPU")
    assert (
        "| attention CSA | 21 | wrong | - | 3 | 0.841 | - | peer 1 |" in text
        and "b 8, context 32K, on some GPU" in text
    )


def test_what_was_not_run_is_not_guessed(known):
    (line,) = step.lines(8, 32768, known, [step.MHC])
    assert table.entry(line, {})[1:] == (None, "", None, None, None, table.NOT_RUN)
    assert table.classes([table.entry(line, {})])[0][1:3] == ["-", "-"]


def test_steps_are_stored_beside_others(known, tmp_path):
    found = entries(known, LM_head=(None, FAILED))
    table.record({(8, 32768): found}, "first", tmp_path)
    table.record({(8, 4096): found[:2], (1, 4096): found[:1]}, "second", tmp_path)
    table.record({(8, 32768): found[-1:]}, "third", tmp_path)
    with (tmp_path / table.FILE).open(newline="") as file:
        lines = list(csv.DictReader(file))
    kept = [(one["batch"], one["context"], one["run"]) for one in lines]
    assert kept == [("1", "4096", "second"), *2 * [("8", "4096", "second")], ("8", "32768", "third")]
    last = lines[-1]
    assert (last["line"], last["ours"], last["ours_us"], last["public_us"]) == ("LM head", "failed", "", "3")
    (tmp_path / table.FILE).write_text("batch,context\n")
    with pytest.raises(DSV4Error, match="other columns"):
        table.record({(8, 4096): found}, "fourth", tmp_path)


# ------------------------------------------------------------------ the command


def test_without_a_gpu_one_line_says_so(capsys):
    if backends.status("native", rows.ARCH).available:
        pytest.skip("there is one")
    assert benches.decode_step(["mhc"], batch="8", context="4096") == harness.NOTHING_TIMED
    assert capsys.readouterr().out.startswith("nothing timed: a decode step is timed on an H200, and here no ")
    for wrong, name in (["--batch=3"], "batch"), (["--context=4k"], "context"), (["--only=mlp"], "only"):
        assert run.main(wrong) == 2 and capsys.readouterr().out.startswith(f"{name}=")


def test_a_run_prints_and_stores_its_steps(capsys, monkeypatch, tmp_path, known):
    """On a machine that says it has such a GPU, with a clock of ours: each row once, a table a step, all in files."""
    seen = []

    def measure(wanted, clock, providers, seconds):
        seen.extend(wanted)
        return [result(row, 2.0, 3.0) for row in wanted]

    monkeypatch.setattr(run.backends, "status", lambda *_: backends.Status("native", True, ""))
    monkeypatch.setattr(run, "known_rows", lambda: known)
    monkeypatch.setattr(harness, "run", measure)
    monkeypatch.setattr(run.timing, "GpuClock", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(harness, "facts", lambda command: {"run": "today", "command": command})
    options = ["--batch=1,8", "--context=4096,32768", "--only=mhc,indexer", f"--record={tmp_path}"]
    assert run.main(options) == 0
    out = capsys.readouterr().out
    assert out.count("Decode step of DSV4-Flash") == 4 and "| mHC | 0.172 | 0.258 | 0.0402 |" in out
    assert len(seen) == len({step.key_of(row) for row in seen}) == 2 * (2 + 2 * 2)  # mHC: ours and others'; by context
    with (tmp_path / table.FILE).open(newline="") as file:
        assert {one["run"] for one in csv.DictReader(file)} == {"today"}
    assert (tmp_path / "rows.csv").is_file() and str(tmp_path) not in (tmp_path / "runs.csv").read_text()


def test_the_readme_shows_what_was_recorded():
    """Every line of every batch is recorded; the table is theirs, and says how many lines it is of."""
    recorded = step_table.load()
    assert Counter(row["batch"] for row in recorded) == {str(batch): 26 for batch in step.BATCHES}
    written = peer_pages.written(step_table.README, step_table.MODULE)
    steps = step_table.load_whole()
    assert {row["batch"] for row in steps} <= {str(batch) for batch in step.BATCHES} and steps
    assert written == step_table.table(recorded, steps), "python -m dsv4lib.pages.hopper.step_table writes it"
    first = peer_pages.written(step_table.README, summary.MODULE)
    made = summary.table(run_case.recorded(), run_case.whole_steps())
    assert first == made, "python -m dsv4lib.pages.decode_step.summary writes it"
    text = step_table.README.read_text()
    assert text.index(summary.MODULE) < text.index("| --- |")  # before every other table
    line = {"ours": TIMED, "ours_us": "3", "ours_count": "43", "floor_us": "1", "count": "86"}
    assert step_table.milliseconds([line, line]) == "0.258 / 0.172"
    assert step_table.milliseconds([line, line | {"ours": table.NO_KERNEL}]) == "0.129 / 0.086 (1 of 2)"
    assert step_table.milliseconds([line | {"ours": table.NO_KERNEL}]) == "no kernel"
