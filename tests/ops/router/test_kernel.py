"""The router's kernels against fp64 on both architectures: picks exactly, weights to fp32, ties, NaN, schedules."""

from functools import cache

import cutlass.cute as cute
import pytest
import torch
from torch.nn.functional import softplus

from dsv4lib.dsl import exchange
from dsv4lib.dsl.compile import compile_for
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import Deadlock
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.router.arguments import fake_args, fused_args, launch_args
from dsv4lib.ops.router.fused import FusedRouter
from dsv4lib.ops.router.kernel import Router
from dsv4lib.ops.router.op import Call, Hashed, Workspace
from dsv4lib.ops.router.picks import padded
from dsv4lib.reference import router as reference
from tests.budget import built, small
from tests.cases import cases

ARCHS = ("sm_100a", "sm_90a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
FACTOR = 2.5
ULPS = 8 * 2.0**-24  # of a weight: exp2, series, square root and reciprocal are good to an ulp or two each


@cache
def compiled(kind, settings, arch):
    kernel, code = built(kind, fake_args, arch, *settings)
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


def outputs(tokens, k):
    return torch.full((tokens, k), -7, dtype=torch.int32), torch.full((tokens, k), float("nan"))


def call_of(x, weight, chosen, out, slots=None):
    """``chosen``: a bias, or (table, tokens)."""
    bias, hashed = (None, Hashed(*chosen)) if isinstance(chosen, tuple) else (chosen, None)
    return Call(x, weight, bias, hashed, out, None if slots is None else Workspace(slots), FACTOR, "emulator")


def run(kind, settings, arch, inputs, chosen, **device):
    """(experts, weights) of a launch without hazards."""
    kernel, code = compiled(kind, settings, arch)
    gpu = make(arch, **{"checks": "race", **device})
    if kind is FusedRouter:
        tokens = inputs[0].shape[0]
        slots, out = torch.zeros(kernel.splits, tokens, padded(kernel.experts)), outputs(tokens, kernel.k)
        launch(code, *fused_args(kernel, call_of(*inputs, chosen, out, slots)), gpu=gpu)
        assert not slots.view(torch.int32).any()  # as the next launch needs it
    else:
        out = outputs(inputs.shape[0], kernel.k)
        launch(code, *launch_args(kernel, call_of(inputs, None, chosen, out)), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return out


def expected(logits, k, bias=None, picks=None):
    """(experts, weights) of fp64 logits, and the smallest distance between a pick's score and the next score."""
    a = softplus(logits.double(), threshold=1e9).sqrt()
    if picks is not None:
        return picks, reference.expert_weights(a, picks, FACTOR), float("inf")
    score = a + bias.double()
    picks = reference.select_by_score(a, bias.double(), k)
    ranked = score.sort(-1, descending=True).values[:, : k + 1]
    gap = (ranked[:, :-1] - ranked[:, 1:]).min() if ranked.shape[1] > 1 else float("inf")
    return picks, reference.expert_weights(a, picks, FACTOR), float(gap)


def close(found, want):
    experts, weights = found
    assert torch.equal(experts.long(), want[0])
    assert float(((weights.double() - want[1]) / want[1]).abs().max()) < ULPS


def case(tokens, experts, seed=0):
    """(logits with a scale and an offset of its own a token, bias)."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator)
    logits = logits * torch.linspace(0.3, 6, tokens)[:, None] + torch.linspace(2, -9, tokens)[:, None]
    return logits, 0.3 * torch.randn(experts, generator=generator)


def operands(tokens, experts, d, seed=0):
    """(x, weight) with rows of different scales."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, d, generator=generator) * torch.linspace(0.5, 3, tokens)[:, None]
    return x.bfloat16(), (torch.randn(experts, d, generator=generator) * d**-0.5).bfloat16()


# ------------------------------------------------------------------- logits


SHAPES = [(256, 6, 11), (384, 6, 1), (250, 16, 3), (512, 8, 2), (5, 1, 9)]
BY_TURNS = [(ARCHS[i % 2], *shape) for i, shape in enumerate(SHAPES)]
OTHER = [(ARCHS[(i + 1) % 2], *shape) for i, shape in enumerate(SHAPES)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("arch", "experts", "k", "tokens"), cases(*BY_TURNS, full=OTHER))
def test_from_logits(arch, experts, k, tokens):
    logits, bias = case(tokens, experts, seed=k)
    want = expected(logits, k, bias)
    assert want[2] > 4e-6  # else fp32 may order two scores otherwise
    close(run(Router, (experts, k), arch, logits, bias), want)


def test_every_expert_is_picked_once():
    logits, bias = case(4, 13)
    assert torch.equal(
        run(Router, (13, 13), "sm_90a", logits, bias)[0].sort().values, torch.arange(13).int().repeat(4, 1)
    )


@pytest.mark.parametrize("arch", ARCHS)
def test_ties_go_to_the_lower_number(arch):
    """Equal scores across lanes and within one, among them 0 of either sign and rows of one value."""
    logits, bias = torch.full((5, 256), -2.0), torch.zeros(256)
    logits[1, [200, 3, 7, 129, 128, 131, 4, 255]] = 1.5
    logits[2, 77] = 3
    logits[3, 64:] = 0.25
    logits[4] = -float("inf")  # affinity 0: scores are the bias, here 0, -0 and one above
    bias[10:20], bias[254] = -0.0, 1e-30
    experts, weights = run(Router, (256, 6), arch, logits, bias)
    assert torch.equal(experts.long(), expected(logits, 6, bias)[0])
    assert experts.tolist()[1:5] == [
        [3, 4, 7, 128, 129, 131],
        [77, 0, 1, 2, 3, 4],
        [64, 65, 66, 67, 68, 69],
        [254, 0, 1, 2, 3, 4],
    ]
    assert bool(weights[4].isnan().all())  # 0 / 0, as in the oracle
    assert bool(expected(logits, 6, bias)[1][4].isnan().all())


def test_the_bias_selects_and_no_more():
    logits, bias = case(3, 64)
    bias[5] = 100.0
    found = run(Router, (64, 6), "sm_100a", logits, bias)
    assert bool((found[0][:, 0] == 5).all())
    close(found, expected(logits, 6, bias))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_affinities_from_end_to_end(arch):
    """Weights of two experts whose logits are far from, and at, the places where formulas change."""
    logits = torch.cat((torch.linspace(-170, 90, 41), torch.tensor([-1e-6, 0, 1e-6, 1e4, -17, 17]))).float()
    rows = torch.stack((logits, logits.roll(1)), 1)
    want = expected(rows, 2, torch.zeros(2))
    found = run(Router, (2, 2), arch, rows, torch.zeros(2))
    assert torch.equal(found[0].long(), want[0])
    big = want[1] > 1e-36  # smaller ones are near the end of fp32
    assert float(((found[1] - want[1]) / want[1])[big].abs().max()) < ULPS and int((~big).sum()) < 6


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_nan_poisons_its_row_and_no_other(arch):
    """Experts stay valid and distinct; a NaN is picked only when nothing else is left."""
    logits, bias = case(4, 32)
    clean = run(Router, (32, 6), arch, logits, bias)
    logits[1, 9], logits[2] = float("nan"), float("nan")
    experts, weights = run(Router, (32, 6), arch, logits, bias)
    assert bool(weights[1:3].isnan().all())
    assert 9 not in experts[1] and experts[2].tolist() == [0, 1, 2, 3, 4, 5]
    for t in (0, 3):
        assert torch.equal(experts[t], clean[0][t]) and torch.equal(weights[t], clean[1][t])


def test_experts_by_table():
    logits, _ = case(7, 40)
    generator = torch.Generator().manual_seed(1)
    table = torch.stack([torch.randperm(40, generator=generator)[:6] for _ in range(23)])
    tokens = torch.randint(23, (7,), generator=generator)
    close(run(Router, (40, 6, True), "sm_90a", logits, (table, tokens)), expected(logits, 6, picks=table[tokens]))


# -------------------------------------------------------------------- fused


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("arch", "experts", "k", "tile", "tokens", "d"),
    [
        ("sm_90a", 256, 6, (1, 1, 1, False, 8, 8, False, True, False, 2, True), 1, 4096),  # a decode step of Flash
        ("sm_90a", 42, 6, (1, 1, 3, False, 1, 16, True, True, False, 4, True), 13, 1024),  # two tiles of 8 tokens
        ("sm_100a", 60, 7, (2, 1, 3, True, 1, 16, True, True, False, 2), 35, 1024),  # sums in the place of operands
        ("sm_100a", 40, 6, (1, 2, 1, False, 2), 37, 320),  # 3 tiles of tokens, most CTAs without a share of d
        # No 16-byte access to logits, a last tile of 10 experts, more units than are under way together.
        ("sm_90a", 42, 5, (2, 4, 1, True, 2, 8, True), 35, 2112),
        ("sm_100a", 33, 16, (4, 2, 2, True, 3, 16, False, False, True), 70, 64),
        ("sm_100a", 384, 6, (4, 4, 3, True, 7, 16, False, True, True), 7, 7168),  # a decode step of Pro
    ],
)
def test_fused(arch, experts, k, tile, tokens, d):
    x, weight = operands(tokens, experts, d, seed=k)
    bias = 0.3 * torch.randn(experts, generator=torch.Generator().manual_seed(1))
    want = expected(x.double() @ weight.double().T, k, bias)
    assert want[2] > 2e-6
    close(run(FusedRouter, (experts, k, False, *tile), arch, (x, weight), bias), want)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("experts", [256, 40])
def test_fused_ties_go_to_the_lower_number(arch, experts):
    """Of a token whose scores are the bias: equal ones of a lane, of two, for the last pick, and all."""
    falling = -0.01 * torch.arange(experts)
    for equal, score in (((9, 12), 1.0), ((3, experts - 7), 1.0), ((11, experts - 1), -0.045), (range(experts), 0.5)):
        bias = falling.clone()
        bias[list(equal)] = score
        x, weight = torch.zeros(1, 128).bfloat16(), operands(1, experts, 128)[1]
        found = run(FusedRouter, (experts, 6, False, 1, 1, 2, False, 1), arch, (x, weight), bias)
        close(found, expected(torch.zeros(1, experts), 6, bias))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_fused_nan_poisons_its_row(arch):
    x, weight = operands(2, 40, 128)
    bias = torch.zeros(40)
    bias[9] = float("nan")
    experts, weights = run(FusedRouter, (40, 6, False, 1, 1, 2, False, 1), arch, (x, weight), bias)
    assert bool(weights.isnan().all()) and not bool((experts == 9).any())
    assert all(len(set(row)) == 6 for row in experts.tolist())


def test_fused_by_table():
    x, weight = operands(9, 24, 128)
    table, tokens = torch.arange(24).view(4, 6).flip(0), torch.tensor([3, 0, 1, 2, 2, 2, 0, 3, 1])
    want = expected(x.double() @ weight.double().T, 6, picks=table[tokens])
    close(run(FusedRouter, (24, 6, True), "sm_100a", (x, weight), (table, tokens)), want)


@pytest.mark.full
def test_a_tokens_bits_depend_neither_on_its_batch_nor_on_tiles():
    for d, others in (
        (320, [((2, 4, 1, True, 3), slice(0, 37)), ((4, 1, 2, True, 1), slice(3, 37))]),
        (2048, [((1, 1, 5, False, 2, 16, False, True), slice(20, 23)), ((2, 1, 2, True, 1), slice(20, 23))]),
        (1024, [((1, 1, 2, False, 1, 16, False, True, False, 4, True), slice(20, 23))]),
        (1024, [((2, 1, 2, True, 1, 16, True, True, False, 2), slice(2, 37))]),
    ):
        x, weight = operands(37, 40, d)
        bias = torch.zeros(40)
        whole = run(FusedRouter, (40, 6, False, 1, 1, 1, False, 2), "sm_90a", (x, weight), bias)
        for tile, rows in others:
            part = run(FusedRouter, (40, 6, False, *tile), "sm_90a", (x[rows], weight), bias)
            assert torch.equal(part[0], whole[0][rows]) and torch.equal(part[1], whole[1][rows])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_all_schedules_give_the_same_bits(arch):
    logits, bias = case(9, 40)
    x, weight = operands(18, 40, 128)
    for kind, settings, inputs in (
        (Router, (40, 6), logits),
        (FusedRouter, (40, 6, False, 1, 1, 2, True, 1), (x, weight)),
    ):
        found = [run(kind, settings, arch, inputs, bias, schedule=s, seed=3) for s in SCHEDULES]
        assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(one, found[0], strict=True))


def broken_run(checks="race", d=128):
    """(hazards, weights, slots) of a launch of `FusedRouter` as it is now."""
    kernel = FusedRouter(40, 6)
    code = compile_for(kernel, fake_args(kernel), "sm_90a")
    x, weight = operands(3, 40, d)
    slots, out = torch.zeros(kernel.splits, 3, 40), outputs(3, 6)
    gpu = make("sm_90a", checks=checks)
    launch(code, *fused_args(kernel, call_of(x, weight, torch.zeros(40), out, slots)), gpu=gpu)
    return gpu.hazards, out[1], slots


def injected(monkeypatch, old, new):
    """PTX of the kernel with ``new`` for ``old``; at least one instruction must have it."""
    real, seen = cute.arch.inline_ptx, []

    def spell(text, **given):
        seen.append(old in text)
        return real(text.replace(old, new), **given)

    monkeypatch.setattr(cute.arch, "inline_ptx", spell)
    result = broken_run()
    assert any(seen)
    return result


@pytest.mark.one_in(3)
@pytest.mark.parametrize("weak", ["st.relaxed.gpu.global.v2", "ld.relaxed.gpu.global.v4", "st.relaxed.gpu.global.v4"])
def test_slots_that_are_not_exchanged_by_strong_accesses_are_found(monkeypatch, weak):
    """Injected: numbers are right here, but nothing says that another CTA will see them, or only them."""
    hazards, weights, _ = injected(monkeypatch, weak, weak.replace(".relaxed.gpu", ""))
    assert {hazard.kind for hazard in hazards} == {"race_global"} and not weights.isnan().any()


def test_a_zero_that_is_not_marked_is_waited_for(monkeypatch):
    """Injected: a share without any of d says 0, as if it had not come."""
    monkeypatch.setattr(exchange, "nonzero", lambda value: value)
    with pytest.raises(Deadlock):
        broken_run(checks="default")


def test_slots_that_stay_are_seen(monkeypatch):
    """Injected: slots are not reset; the next launch would not wait for its own."""
    monkeypatch.setattr(exchange, "reset", lambda *given: None)
    _, _, slots = broken_run()
    assert bool(slots.view(torch.int32).any())


# ---------------------------------------------------------------- arguments


def test_bad_arguments_are_named():
    for settings, name in (((0,), "experts"), ((513,), "experts"), ((8, 9), "k"), ((64, 0), "k"), ((64, 17), "k")):
        with pytest.raises(ConfigError, match=name):
            Router(*settings)
    for tile, name in (((3, 1), "m"), ((1, 8), "n"), ((4, 4, 9), "across"), ((4, 4, 8, True, 0), "units")):
        with pytest.raises(ConfigError, match=name):
            FusedRouter(64, 6, False, *tile)
    for options, name in (({"deep": 3, "whole": True}, "deep"), ({"deep": 2}, "deep"), ({"few": True, "m": 2}, "few")):
        with pytest.raises(ConfigError, match=name):
            FusedRouter(64, 6, **options)
    for shares, deep, name in ((4, 1, "shares"), (8, 4, "splits")):
        with pytest.raises(ConfigError, match=name):
            FusedRouter(64, 6, shares=shares, deep=deep, whole=True)
    kernel, (logits, bias) = Router(64, 6), case(3, 64)
    out = outputs(3, 6)
    good = call_of(logits, None, bias, out)
    for bad, name in (
        ({"x": logits[None]}, "logits"),
        ({"bias": bias.double()}, "bias"),
        ({"hashed": Hashed(bias, bias)}, "chosen"),
        ({"out": (out[0].long(), out[1])}, "experts"),
        ({"out": (out[0], out[1][:2])}, "weights"),
    ):
        with pytest.raises(ArgumentError, match=name):
            launch_args(kernel, good._replace(**bad))
    x, weight = operands(3, 64, 96)
    good = call_of(x, weight, bias, out, logits)
    for kernel in (FusedRouter(64), FusedRouter(64, units=1, whole=True)):
        with pytest.raises(ArgumentError, match="x.shape"):
            fused_args(kernel, good)
    with pytest.raises(ArgumentError, match="x.shape"):  # not 16 shares of a unit
        fused_args(kernel, good._replace(x=x[:, :64], weight=weight[:, :64]))
