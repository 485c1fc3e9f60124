"""The fused MoE over one and several emulated devices: numbers, bits, schedules, calls in a row, faults, arguments."""

import dataclasses
import itertools

import pytest
import torch

from dsv4lib import emulator
from dsv4lib.check import compare
from dsv4lib.emulator.checks.kinds import KINDS
from dsv4lib.emulator.driver.config import LaunchRefused
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.formats import e2m1, e4m3, nvfp4, scale_swizzle
from dsv4lib.ops.mega_moe import Layout, SymmetricBuffer, bench, mega_moe
from dsv4lib.ops.mega_moe.arguments import fake_args
from dsv4lib.ops.mega_moe.faults import CAUGHT_BY, FAULTS, NEEDS, NVFP4, SCHEDULE, TWO_CALLS
from dsv4lib.ops.mega_moe.inputs import CLAMP, case, rerouted, x_scale_of_all
from dsv4lib.ops.mega_moe.kernel import TILES, MegaMoe
from dsv4lib.ops.mega_moe.layout import QUANTISED
from dsv4lib.ops.mega_moe.op import Call
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.moe_dispatch.op import moe_dispatch
from dsv4lib.ops.moe_gemm.op import Operand, moe_gemm
from dsv4lib.pages.mega_moe.run_case import call_of, expected, poison, run_mega_moe
from dsv4lib.reference.moe_gemm import swiglu
from tests.budget import built, small
from tests.cases import cases

BACKENDS = "emulator", "reference"
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
TWO = Layout(2, 4, 24, 2, 256, 128)
FOUR_BITS = Layout(2, 4, 24, 2, 512, 256, "nvfp4")
LAYOUTS = {"w4a8": TWO, "nvfp4": FOUR_BITS}
RUNS = {  # layout, tokens of the ranks, tile, CTAs of a device, an expert that all tokens go to
    "two ranks": (TWO, [5, 17], 64, 2, None),
    "one rank": (Layout(1, 4, 48, 2, 256, 128), [37], 64, 3, None),
    "busy expert": (Layout(2, 2, 48, 1, 128, 384), [33, 48], 64, 2, 1),
    "two row blocks": (Layout(2, 4, 96, 2, 128, 256), [90, 96], 128, 2, 2),
    "tile 128": (Layout(1, 4, 80, 3, 256, 128), [80], 128, 2, 0),
    "four ranks": (Layout(4, 8, 40, 2, 512, 256), [5, 33, 0, 7], 64, 2, None),
    "eight ranks": (Layout(8, 8, 9, 3, 256, 128), [3, 0, 9, 1, 2, 6, 0, 4], 64, 1, None),
    "wide scales": (Layout(2, 2, 8, 1, 640, 128), [8, 1], 64, 1, None),
    "nvfp4": (FOUR_BITS, [5, 17], 64, 2, None),
    "nvfp4, weighted after": (FOUR_BITS, [5, 17], 64, 2, None),
    "nvfp4, one rank": (Layout(1, 3, 80, 3, 256, 512, "nvfp4"), [37], 64, 3, None),
    "nvfp4, two row blocks": (Layout(2, 4, 96, 2, 256, 768, "nvfp4"), [90, 96], 128, 2, 2),
    "nvfp4, eight ranks": (Layout(8, 8, 9, 3, 768, 256, "nvfp4"), [3, 0, 9, 1, 2, 6, 0, 4], 64, 1, None),
}


def run(name, **options):
    layout, tokens, tile, grid, busy = RUNS[name]
    given = {"grid": grid, "tile_n": tile, "weighted": "l2" if "after" in name else "l1"}
    return run_mega_moe(case(layout, tokens, busy=busy), **given, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    cases(
        "two ranks",
        "one rank",
        "busy expert",
        "nvfp4",
        "nvfp4, weighted after",
        full=[name for name in RUNS if name not in ("two ranks", "one rank", "busy expert") and name[:5] != "nvfp4"]
        + ["nvfp4, one rank", "nvfp4, two row blocks", "nvfp4, eight ranks"],
    ),
)
def test_numbers(name):
    """Against fp64 by the table of tolerances; no report, no result without a route; budget as computed."""
    outcome = run(name)
    assert outcome.clean, (outcome.findings(), outcome.error, outcome.hazards[:3])
    code, kernel = outcome.compiled, outcome.kernel
    assert (code.local_bytes, code.spills) == (0, 0) and code.registers <= 128 and small(code)
    rows = {row.resource: row for row in kernel.budget()}
    assert all(0 < row.used <= row.limit and row.derivation for row in rows.values())
    assert code.smem_bytes == rows["SMEM: total"].used and code.threads == rows["threads"].used
    for scope in ("st.release.sys.global.b64", "ld.acquire.sys.global.b64", "red.release.sys.global.add.u32"):
        assert scope in code.ptx


def test_budget_of_the_models():
    """Both models on 8 ranks, decode and prefill: rows of 7168 leave the rings five stages or more, TMEM fits."""
    for experts, hidden, width in ((256, 4096, 2048), (384, 7168, 3072)):
        for tile, mode in itertools.product(TILES, LAYOUTS):
            kernel = MegaMoe(8, experts, 4096, 6, hidden, width, tile, mode)
            assert kernel.stages >= 5 and kernel.first.tmem_columns <= 512
            assert all(row.used <= row.limit for row in kernel.budget())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", cases("two ranks", "nvfp4", full=["busy expert", "four ranks"]))
def test_ranks_do_not_change_bits(name):
    """Tokens and experts on one rank give the bits that they give on several."""
    layout, tokens, tile, grid, busy = RUNS[name]
    made = case(layout, tokens, seed=1, busy=busy)
    several = run_mega_moe(made, grid=grid, tile_n=tile)
    alone = run_mega_moe(made.as_one_rank(), grid=grid, tile_n=tile)
    assert several.clean and alone.clean
    assert torch.equal(torch.cat(several.outs), alone.outs[0])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", LAYOUTS)
def test_bits_are_those_of_the_ops_one_after_the_other(mode):
    """Dispatch, both GEMMs and combine as ops of their own."""
    made = case(LAYOUTS[mode], [5, 17], seed=2).as_one_rank()
    fused = run_mega_moe(made)
    (one,), (l1,), (l2,), (factors,) = made.ranks, made.l1, made.l2, made.factors
    routes = moe_dispatch(one.topk_idx.int(), one.topk_weights, count=TWO.experts, backend="emulator")
    rows = routes.rows.clamp(min=0).long()
    x = Operand(one.x[rows], scale_swizzle.swizzle(one.x_scale[rows]))
    groups = routes.offsets[:-1].contiguous(), routes.counts
    how = {"mode": mode, "expected": 1, "backend": "emulator"}
    first = {"swiglu": True, "out_format": QUANTISED[mode], "out_global": factors.l2_act_scales, "limit": CLAMP}
    if mode == "nvfp4":
        first["alpha"], first["alpha_up"] = (alpha.contiguous() for alpha in factors.l1_alphas.unbind(1))
    h = moe_gemm(x, l1, *groups, **how, **first, routing=routes.row_weight)
    y = moe_gemm(h, l2, *groups, **how, alpha=factors.l2_alphas)
    assert fused.clean and torch.equal(fused.outs[0], moe_combine(y.codes, routes.row_of, backend="emulator"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", LAYOUTS)
@pytest.mark.parametrize("order", cases([0, 1], full=[[1, 0]]), ids=str)
def test_every_schedule_gives_the_same_bits(mode, order):
    made, outputs, hashes = case(LAYOUTS[mode], [17, 6], seed=3), set(), set()
    for schedule in SCHEDULES:
        outcome = run_mega_moe(made, schedule=schedule, order=order, seed=5)
        assert outcome.clean, (schedule, outcome.findings())
        outputs.add(b"".join(out.view(torch.uint8).numpy().tobytes() for out in outcome.outs))
        hashes.add(tuple(result.schedule_hash for result in outcome.results))
    assert len(outputs) == 1 and len(hashes) >= 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", LAYOUTS)
def test_some_numbers_reach_the_clamp(mode):
    """So a clamp that is wrong shows in the numbers of the other tests; likewise the top of a calibrated range."""
    made = case(LAYOUTS[mode], [5, 17])
    x = torch.cat([one.numbers for one in made.ranks])
    gate, up = (torch.einsum("td,eid->eti", x, w) for w in (made.w1, made.w3))
    if mode == "nvfp4":
        top, scales = e4m3.encode(torch.tensor(e4m3.MAX)), torch.cat([one.x_scale for one in made.ranks])
        h = swiglu(gate, up, CLAMP)
        found = [nvfp4.quantize(*one).scales for one in zip(h, made.h_scales, strict=True)]
        for one in (scales, torch.stack(found)):
            assert 0.002 < float((one == top).double().mean()) < 0.3
    assert 0.02 < float((gate > CLAMP).double().mean()) < 0.5 and 0.02 < float((up.abs() > CLAMP).double().mean()) < 0.9


def test_ranks_and_routes_that_are_empty():
    """A rank without tokens; ranks whose routes are all -1; experts without a route; no rank has a token."""
    made = case(TWO, [0, 9])
    made.ranks[1].topk_idx[made.ranks[1].topk_idx >= 2] = -1  # rank 1's own experts get nothing
    made.ranks[1].topk_idx[4] = -1
    outcome = run_mega_moe(made)
    assert outcome.clean, outcome.findings()
    assert not outcome.outs[1][4].any() and outcome.outs[1][3].any() and outcome.outs[0].shape == (0, 256)
    made = case(TWO, [3, 9], masked=1.0)
    outcome = run_mega_moe(made)
    assert not outcome.hazards and not outcome.stray and not any(out.any() for out in outcome.outs)
    outcome = run_mega_moe(case(TWO, [0, 0]))
    assert not outcome.hazards and outcome.error is None


def test_indices_that_are_no_expert():
    """Whatever is outside 0 .. E - 1 is no expert: 64-bit numbers whose low words look like one, too."""
    made = case(TWO, [4, 3], masked=0.0)
    for rank, index in ((0, 4), (0, -(2**63)), (1, (1 << 32) + 1), (1, 2**31)):
        made.ranks[rank].topk_idx[2, index & 1] = index
    outcome = run_mega_moe(made)
    assert outcome.clean, outcome.findings()


def test_received_routes_are_counted_over_all_calls():
    """By expert of the rank, from all ranks; -1, foreign numbers and the grid do not matter."""
    first, second = case(TWO, [5, 17], seed=6, masked=0.3), case(TWO, [24, 0], seed=7)
    outcome = run_mega_moe([first, second], grid=3)
    routes = torch.cat([one.topk_idx.flatten() for made in (first, second) for one in made.ranks])
    want = torch.stack([(routes == expert).sum() for expert in range(TWO.experts)]).int()
    assert outcome.clean and torch.equal(torch.cat([buffer.received for buffer in outcome.buffers]), want)
    assert len(want.unique()) > 1 and int(want.sum()) < len(routes)


class LostInSilence(MegaMoe):
    """A rank is not told that routes found no room."""

    def marked(self, count, lost):
        """See `Dispatch.marked`."""
        return count  # WRONG: and the mark


@pytest.mark.parametrize("mode", cases("w4a8", full=["nvfp4"]))
def test_routes_without_room_are_counted_and_seen(mode):
    """Two slots of every token name one expert: half finds no room. The rank's output is NaN, others' and the next are
    right.
    """
    made = case(LAYOUTS[mode], [24, 9], seed=8, masked=0.0)
    made.ranks[0].topk_idx[:] = 1
    good = case(LAYOUTS[mode], [24, 9], seed=8)
    outcome = run_mega_moe(made)
    assert outcome.error is None and not outcome.hazards and [int(b.lost) for b in outcome.buffers] == [24, 0]
    assert bool(outcome.outs[0].isnan().all()) and compare(outcome.outs[1], outcome.wants[1].bfloat16()).passed
    after = run_mega_moe([made, good], schedule="random")
    assert after.right and not after.hazards and [int(b.lost) for b in after.buffers] == [24, 0]
    silent = run_mega_moe(made, LostInSilence)
    assert int(silent.buffers[0].lost) == 24 and not silent.outs[0].isnan().all()
    assert [int(b.lost) for b in run_mega_moe(good).buffers] == [0, 0]


def test_without_fast_math():
    """A division instead of the approximate reciprocal; what it brings, `tests/dsl/test_silu.py` measures."""
    made = case(TWO, [5, 17])
    for fast_math in (True, False):
        outcome = run_mega_moe(made, fast_math=fast_math)
        assert outcome.clean, outcome.findings()
        assert ("div.rn.f32" in outcome.compiled.ptx) == (not fast_math)
        assert ("rcp.approx" in outcome.compiled.ptx) == fast_math and outcome.compiled.spills == 0


def test_hard_values_of_four_bits():
    """Zeros of both signs; blocks whose scale is 0 beside others; one block far above the range of all scales; a scale
    that is NaN stays in its token; weights of zero.
    """
    made = case(FOUR_BITS, [9, 7], seed=4, masked=0.0)
    for one in made.ranks:
        for token, codes in ((0, 0x00), (1, 0x88)):
            one.x[token], one.numbers[token] = codes, 0.0
        one.x_scale[2, ::2] = 0
        one.numbers[2].unflatten(0, (-1, 16))[::2] = 0
        one.x_scale[3, 5] = 0x7E
        step = e4m3.MAX * float(x_scale_of_all())
        one.numbers[3, 80:96] = e2m1.decode(e2m1.unpack(one.x[3, 40:48]), torch.float64) * step
        one.topk_weights[4] = 0
    outcome = run_mega_moe(made)
    assert outcome.clean, outcome.findings()
    assert all(not out[[0, 1, 4]].any() and out[[2, 3]].any() for out in outcome.outs)
    made.ranks[0].x_scale[5, 31] = 0x7F
    found = run_mega_moe(made)
    own = torch.arange(9) != 5
    assert bool(found.outs[0][5].isnan().all()) and torch.equal(found.outs[0][own], outcome.outs[0][own])
    assert torch.equal(found.outs[1], outcome.outs[1]) and not found.hazards


def test_a_grid_that_cannot_be_resident_is_refused():
    """By the launch itself, whichever the grid comes from; a CTA an SM is resident."""
    made = case(TWO, [1, 1])
    outcome = run_mega_moe(made, grid=149)
    assert isinstance(outcome.error, LaunchRefused) and "148 can be resident on 148 SMs" in str(outcome.error)
    assert run_mega_moe(made, grid=5).clean


def test_hard_values():
    """Tokens of zeros, weights of zero, one token for several; NaN in a token stays in that token."""
    made = case(TWO, [7, 9], seed=4, masked=0.0)
    zero, weightless, nan = 1, 2, 3
    for one in made.ranks:
        one.x[zero] = 0
        one.numbers[zero] = 0
        one.topk_weights[weightless] = 0
        for x in (one.x, one.x_scale, one.numbers):
            x[5] = x[4]
    outcome = run_mega_moe(made)
    assert outcome.clean, outcome.findings()
    assert all(not out[[zero, weightless]].any() for out in outcome.outs)
    made.ranks[0].x[nan, 17] = 0x7F
    found = run_mega_moe(made)
    own = torch.arange(7) != nan
    assert bool(found.outs[0][nan].isnan().all()) and torch.equal(found.outs[0][own], outcome.outs[0][own])
    assert torch.equal(found.outs[1], outcome.outs[1]) and not found.hazards


@pytest.mark.full
@pytest.mark.parametrize("schedule", cases("random", full=["round_robin", "adversarial", "newest_first"]))
def test_calls_in_a_row(schedule):
    """Epochs: other routes, other numbers of tokens, on the same memory; the second call may start before all ends."""
    first = case(TWO, [5, 17], seed=6)
    outcome = run_mega_moe([first, rerouted(first), case(TWO, [24, 0], seed=7)], schedule=schedule)
    assert outcome.clean, outcome.findings()
    assert [int(buffer.state[Layout.EPOCH]) for buffer in outcome.buffers] == [3, 3]
    assert not any(int(buffer.state[1 : TWO.sent].abs().sum()) for buffer in outcome.buffers)  # counters are back at 0
    quick = apart()
    for order in ([0, 1], [1, 0]):
        outcome = run_mega_moe(quick, launches=3, schedule=schedule, order=order, grid=3)
        assert outcome.clean, outcome.findings()


def apart():
    """A case whose ranks need nothing of each other but counts: one may be a call ahead."""
    made = case(TWO, [0, 3], masked=0.2)
    made.ranks[1].topk_idx[made.ranks[1].topk_idx < 2] = -1
    return made


ACROSS = (
    "RelaxedCount",
    "CountOfOneDevice",
    "OneEpoch",
    "OneHalf",
    "NoReset",
    "MaskedGoesFirst",
    "ReadAlone",
    "SlotOfOwner",
    "NoWeight",
    *sorted(NVFP4),
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", cases(*ACROSS, full=[name for name in CAUGHT_BY if name not in ACROSS]))
def test_faults_are_found(name):
    """By the means that each names; the kernel without it runs clean in the same way."""
    if NEEDS.get(name, "race_global") not in KINDS:
        pytest.skip(f"the emulator has no check {NEEDS[name]}")
    made = case(LAYOUTS["nvfp4" if name in NVFP4 else "w4a8"], [5, 17], masked=0.2)
    given = [made, rerouted(made)] if name in TWO_CALLS else made
    options = {"schedule": SCHEDULE.get(name, "random"), "seed": 1}
    if name == "OneHalf":
        given, options = apart(), {**options, "launches": 2, "grid": 6, "instruction_limit": 100_000}
    outcome = run_mega_moe(given, **options)
    assert outcome.clean, outcome.findings()
    found = run_mega_moe(given, FAULTS[name], **options).findings()
    assert CAUGHT_BY[name] in found, found


# ----------------------------------------------------------------------- op


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", LAYOUTS)
def test_the_op_on_one_rank(mode):
    """Against the reference back end; tokens staged, or in the buffer already; wide rows; a kept output."""
    made = case(dataclasses.replace(LAYOUTS[mode], world=1, max_tokens=48), [21])
    (one,), l1, l2, wide = made.ranks, made.l1[0], made.l2[0], made.layout.hidden
    how = {"expected": 11, **made.factors[0]._asdict()}
    outs = []
    for backend in BACKENDS:
        buffer = SymmetricBuffer.alone(made.layout)
        poison(buffer)
        given = one.x, one.x_scale, one.topk_idx.int(), one.topk_weights
        outs.append(mega_moe(*given, l1, l2, buffer, clamp=CLAMP, **how, backend=backend))
        n = len(one.x)
        assert torch.equal(buffer.x[:n], one.x) and torch.equal(buffer.topk_idx[:n], one.topk_idx)
        out = torch.full((n, wide + 72), 7.0).bfloat16()[:, :wide]
        views = buffer.x[:n], buffer.x_scales[:n], buffer.topk_idx[:n], buffer.topk_weights[:n]
        again = mega_moe(*views, tuple(l1), tuple(l2), buffer, clamp=CLAMP, **how, out=out, backend=backend)
        assert again is out and torch.equal(again, outs[-1])
        chosen = one.topk_idx[one.topk_idx >= 0]
        assert torch.equal(buffer.received, 2 * chosen.bincount(minlength=4).int()) and int(buffer.lost) == 0
    (want,) = expected(made)
    assert compare(outs[1], want.bfloat16()).passed if mode == "nvfp4" else torch.equal(outs[1], want.bfloat16())
    error = (outs[0].double() - want.double()).square().mean().sqrt() / want.double().square().mean().sqrt()
    assert 0 < float(error) < 2**-8
    tight = mega_moe(*given, l1, l2, buffer, clamp=0.5, **how, backend="emulator")
    assert torch.isfinite(tight).all() and not torch.equal(tight, outs[0])
    slow = mega_moe(*given, l1, l2, buffer, clamp=CLAMP, **how, fast_math=False, backend="emulator")
    assert compare(slow, outs[0]).passed
    late = [mega_moe(*given, l1, l2, buffer, clamp=CLAMP, **how, weighted="l2", backend=b) for b in BACKENDS]
    assert compare(*late).passed and not torch.equal(late[0], outs[0])
    nothing = (x[:0] for x in given)
    assert mega_moe(*nothing, l1, l2, buffer, **how, backend="emulator").shape == (0, wide)


def test_the_op_on_two_devices():
    """Every rank calls; the launches run when all have."""
    made, outs = case(TWO, [5, 17]), []
    with emulator.devices(2, shims=False) as gpus:
        parts = gpus.symmetric(TWO.bytes, torch.uint8)
        storages = [parts.tensor(rank) for rank in range(2)]
        addresses = [x.data_ptr() for x in storages]
        for rank, one in enumerate(made.ranks):
            buffer = SymmetricBuffer.over(TWO, rank, storages[rank], addresses)
            with gpus.on(rank):
                weights = made.l1[rank], made.l2[rank]
                outs.append(mega_moe(*one[:4], *weights, buffer, clamp=CLAMP, expected=10, backend="emulator"))
        gpus.synchronize()
        assert not gpus.hazards
        with pytest.raises(ArgumentError, match=r"backend='reference'.*all ranks"):
            mega_moe(*one[:4], *weights, buffer, backend="reference")
    want = run_mega_moe(made)
    assert all(torch.equal(a, b) for a, b in zip(outs, want.outs, strict=True))


def wrong_calls():
    yield "l1.codes.shape", {"l1": lambda x: x._replace(codes=x.codes[:1])}
    yield "l1.scales.shape", {"l1": lambda x: x._replace(scales=x.scales[:, :512])}
    yield "l2.codes", {"l2": lambda x: x._replace(codes=x.codes.int())}
    yield "out.shape", {"out": lambda x: x[:, :64]}
    yield "out", {"out": lambda x: x.float()}
    yield "peers.shape", {"peers": lambda x: x[:1]}
    yield "state.shape", {"state": lambda x: x[1:]}
    yield "storage.shape", {"storage": lambda x: x[:-1]}
    yield "rank", {"rank": lambda x: 2}
    yield "tokens", {"tokens": lambda x: 25}
    yield "clamp", {"clamp": lambda x: float("nan")}
    yield "workspace.sources.shape", {"workspace": lambda x: x._replace(sources=x.sources[1:])}
    yield "experts", {"experts": lambda x: 5}
    yield "topk_idx", {"storage": crowded}
    yield "mode", {"formats": lambda x: "mxfp8"}
    yield "weighted", {"weighted": lambda x: "l3"}
    yield "l1_alphas", {"l1_alphas": lambda x: torch.ones(2, 2)}
    yield "l2_act_scales", {"l2_act_scales": lambda x: torch.ones(2)}


def wrong_factors():
    yield "l1_alphas", {"l1_alphas": lambda x: None}
    yield "l1_alphas.shape", {"l1_alphas": lambda x: x[:, :1]}
    yield "l1_alphas", {"l1_alphas": lambda x: x.double()}
    yield "l2_alphas", {"l2_alphas": lambda x: -x}
    yield "l2_act_scales.shape", {"l2_act_scales": lambda x: x[:1]}
    yield "l2_act_scales", {"l2_act_scales": lambda x: x * float("inf")}
    yield "l1.scales.shape", {"l1": lambda x: x._replace(scales=x.scales[:, ::2])}


def crowded(storage):
    """Every slot of every token goes to expert 1."""
    storage[TWO.offsets()["topk_idx"] :][: TWO.regions()["topk_idx"]].view(torch.int64).fill_(1)
    return storage


REFUSED = [("w4a8", *one) for one in wrong_calls()] + [("nvfp4", *one) for one in wrong_factors()]


@pytest.mark.parametrize(("mode", "name", "change"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_calls_that_are_refused(mode, name, change):
    layout = LAYOUTS[mode]
    made = case(layout, [24, 24])
    storage = torch.zeros(layout.bytes + 128, dtype=torch.uint8)
    storage = storage[-storage.data_ptr() % 128 :]
    buffer = SymmetricBuffer.over(layout, 0, storage, [storage.data_ptr()] * 2)
    buffer.stage(*made.ranks[0][:4])
    call = call_of(made, buffer, 0, torch.empty(24, layout.hidden).bfloat16())
    changed = {key: how(getattr(call, key)) for key, how in change.items()}
    with pytest.raises(ArgumentError) as caught:
        flat = dataclasses.replace(call, **changed)
        Call.op(*(getattr(flat, field.name) for field in dataclasses.fields(Call)))
    assert caught.value.name == name


def test_options_that_are_refused():
    """Tiles that would read past an expert, and a layer that does not exist."""
    with pytest.raises(ConfigError) as caught:
        MegaMoe(weighted="l3")
    assert caught.value.name == "weighted"
    for tile in (32, 192, 256):
        with pytest.raises(ConfigError) as caught:
            MegaMoe(tile_n=tile)
        assert caught.value.name == "tile_n"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", LAYOUTS)
def test_rows_of_the_bench(mode):
    """Both providers pass the row's check, and a token that is wrong does not."""
    layout = dataclasses.replace(LAYOUTS[mode], world=1, max_tokens=48)
    given = bench._given(torch.Generator().manual_seed(3), layout)
    row = next(row for row in bench.rows() if bench.NAMES[mode] in row.shape)
    found = []
    for provider in row.providers:
        call, outputs = provider.bind(given)
        call()
        bench._check(given, outputs)
        found.append(outputs["y"])
    assert torch.equal(*found)
    found[0][1] *= 1.1
    with pytest.raises(AssertionError, match="y: a token is off"):
        bench._check(given, {"y": found[0]})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", LAYOUTS)
@pytest.mark.parametrize("arch", cases("sm_103a", full=["sm_100f"]))
def test_other_targets(arch, mode):
    kernel, code = built(MegaMoe, fake_args, arch, world=2, mode=mode)
    assert f"::{kernel.first.mode.kind} " in code.ptx and code.spills == 0
    assert code.registers <= 128
