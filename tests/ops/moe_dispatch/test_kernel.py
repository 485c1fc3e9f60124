"""Dispatch and combine on both architectures: the permutation to the last row, sums to a rounding, schedules."""

from functools import cache

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.ptx.dependent import ahead_of_wait, touches_global
from dsv4lib.emulator.ptx.parse import parse
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.moe_combine import arguments as combine_arguments
from dsv4lib.ops.moe_combine.kernel import MoeCombine
from dsv4lib.ops.moe_combine.op import Call as Combined
from dsv4lib.ops.moe_dispatch import arguments
from dsv4lib.ops.moe_dispatch.arguments import max_rows
from dsv4lib.ops.moe_dispatch.kernel import MoeDispatch
from dsv4lib.ops.moe_dispatch.op import Call, Dispatch
from dsv4lib.reference import moe_combine as sums
from dsv4lib.reference import moe_dispatch as reference
from tests.budget import built, small

ARCHS = ("sm_100a", "sm_90a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
UNTOUCHED = -77


@cache
def compiled(kind, settings, arch):
    kernel, code = built(kind, (arguments if kind is MoeDispatch else combine_arguments).fake_args, arch, *settings)
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


def routes(tokens, k, experts, seed=0):
    """(experts [T, k], distinct in a token, weights)."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :k].int()
    return picks.contiguous(), torch.rand(tokens, k, generator=generator)


def run(settings, arch, experts, weights, max_m=0, spare=0, **device):
    """A `Dispatch` of a launch without hazards; everything was written, and nothing past the rows."""
    kernel, code = compiled(MoeDispatch, settings, arch)
    count = kernel.experts
    size = (count * max_m if max_m else max_rows(*experts.shape, count, kernel.align)) + spare
    ints = [torch.full((n,), UNTOUCHED, dtype=torch.int32) for n in (count, count + 1, size, experts.numel())]
    row_weight = None if weights is None else torch.full((size,), float("nan"))
    found = Dispatch(*ints[:3], ints[3].view(experts.shape), row_weight)
    gpu = make(arch, **{"checks": "race", **device})
    call = Call(experts, weights, found, kernel.align, max_m, "emulator")
    launch(code, *arguments.launch_args(kernel, call), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return found


def same(found, want):
    for name in want._fields:
        a, b = getattr(found, name), getattr(want, name)
        assert (a is None and b is None) or torch.equal(a, b), name


def right(found, experts, weights, max_m=0, align=128):
    same(found, reference.moe_dispatch(experts, weights, len(found.counts), len(found.rows), align, max_m))


# ----------------------------------------------------------------- reference


def test_the_reference_against_loops():
    experts, weights = routes(9, 3, 5)
    experts[2, 1], experts[4], experts[6, 2] = -1, 7, experts[6, 0]
    found = reference.moe_dispatch(experts, weights, 5, 60, align=8)
    row, starts = [], []
    for e in range(5):
        starts.append(len(row))
        row += [(t, float(weights[t, s])) for t in range(9) for s in range(3) if experts[t, s] == e]
        assert int(found.counts[e]) == len(row) - starts[-1]
        row += [(-1, 0.0)] * (-len(row) % 8)
    assert found.offsets.tolist() == [*starts, len(row)]
    row += [(-1, 0.0)] * (60 - len(row))
    assert found.rows.tolist() == [t for t, _ in row] and found.row_weight.tolist() == [w for _, w in row]
    for t in range(9):
        for s in range(3):
            there = int(found.row_of[t, s])
            routed = 0 <= experts[t, s] < 5
            assert (there >= 0) == routed and (not routed or row[there] == (t, float(weights[t, s])))


@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 6, 256), (3, 2, 2), (50, 6, 7), (128, 6, 256), (300, 1, 3)])
def test_no_routing_needs_more_rows_than_the_bound_and_one_needs_all(tokens, k, experts):
    bound = max_rows(tokens, k, experts)
    n, active = tokens * k, min(tokens * k, experts)
    worst = torch.zeros(n, dtype=torch.int32)  # one route each, the others in whole blocks and a rest with one expert
    worst[:active] = torch.arange(active)
    for e in (worst, routes(n, 1, experts)[0][:, 0], torch.zeros_like(worst)):
        used = int(reference.moe_dispatch(e.view(tokens, k), None, experts, bound).offsets[-1])
        assert used <= bound
        assert e is not worst or used == bound


# ------------------------------------------------------------------ dispatch


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("experts", "k", "tokens"), [(256, 6, 1), (384, 6, 129), (300, 5, 67), (1, 1, 3)])
def test_random_routes(arch, experts, k, tokens):
    given = routes(tokens, k, experts, seed=tokens)
    right(run((experts, k), arch, *given), *given)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["one expert", "two experts", "masked routes", "no expert", "expert twice"])
def test_odd_routes(arch, kind):
    """131 tokens: routes end amid a 16-byte load's group of four CTAs; experts without a route in all of them."""
    experts, weights = routes(131, 5, 40)
    if kind == "one expert":
        experts.fill_(17)
    elif kind == "two experts":
        experts.copy_(torch.where(experts % 2 == 0, 0, 39))
    elif kind == "masked routes":
        experts[torch.rand(131, 5, generator=torch.Generator().manual_seed(2)) < 0.4] = -1
        experts[7], experts[9, 2], experts[130, 4] = -1, 40, 1 << 30
    elif kind == "no expert":
        experts.fill_(-1)
    else:
        experts[:, 3] = experts[:, 1]
    right(run((40, 5), arch, experts, weights, spare=260), experts, weights)


def test_without_weights_and_with_another_alignment():
    experts, _ = routes(77, 6, 20)
    right(run((20, 6, 12, False, False), "sm_90a", experts, None), experts, None, align=12)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_masked_layout(arch):
    """Expert e from row e max_m on; one is full, and what does not fit goes nowhere."""
    experts, weights = routes(128, 6, 20)
    experts[:, 2] = 3
    experts[experts == 3] = 3
    for t in range(128):  # no other route may name 3
        experts[t][(experts[t] == 3) & (torch.arange(6) != 2)] = -1
    found = run((20, 6, 128, True), arch, experts, weights, max_m=128, spare=4)
    right(found, experts, weights, max_m=128)
    assert int(found.counts[3]) == 128
    experts[5, 4] = 3  # the 129th
    over = run((20, 6, 128, True), arch, experts, weights, max_m=128, spare=4)
    assert int(over.counts[3]) == 129 and int((over.row_of == -1).sum()) == int((experts < 0).sum()) + 1
    assert int(over.row_of[127, 2]) == -1 and torch.equal(
        over.rows[3 * 128 : 4 * 128].sort().values[:6], torch.tensor([0, 1, 2, 3, 4, 5]).int()
    )


def test_4096_tokens():
    """What a prefill brings, three tokens in four to one expert."""
    experts, weights = routes(4096, 6, 256)
    experts[::4, 0], experts[1::4, 1], experts[2::4, 2] = 9, 9, 9
    right(run((256, 6), "sm_90a", experts, weights, checks="default"), experts, weights)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
def test_all_schedules_give_the_same_bits(arch):
    experts, weights = routes(131, 5, 40, seed=4)
    y = torch.randn(9, 1032, generator=torch.Generator().manual_seed(0)).bfloat16()
    row_of = torch.randint(-1, 9, (3, 6), generator=torch.Generator().manual_seed(1)).int()
    first = None
    for schedule in SCHEDULES:
        found = run((40, 5), arch, experts, weights, schedule=schedule, seed=3)
        out = combine((6, False, False), arch, y, row_of, None, None, schedule=schedule, seed=3)
        first = first or (found, out)
        same(found, first[0])
        assert torch.equal(out, first[1])


@pytest.mark.parametrize(("kind", "settings"), [(MoeDispatch, (40, 5)), (MoeCombine, (6, False, False))])
def test_nothing_is_touched_before_the_kernel_before_is_done(kind, settings):
    """It may have written all that is read, and may still read what is written."""
    (kernel,) = parse(compiled(kind, settings, "sm_90a")[1].ptx).kernels.values()
    assert any(touches_global(instr.opcode) for instr in kernel.instructions)
    assert not [instr.text for instr in ahead_of_wait(kernel)]


# ------------------------------------------------------------------- combine


def combine(settings, arch, y, row_of, weights, shared, **device):
    kernel, code = compiled(MoeCombine, settings, arch)
    out = torch.full((len(row_of), y.shape[1]), float("nan"), dtype=torch.bfloat16)
    gpu = make(arch, **{"checks": "race", **device})
    launch(code, *combine_arguments.launch_args(kernel, Combined(y, row_of, weights, shared, out, "emulator")), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("k", "d", "weighted", "shared"), [(6, 4096, 0, 1), (6, 1032, 1, 1), (11, 8, 1, 0), (1, 520, 0, 0)]
)
def test_sums(arch, k, d, weighted, shared):
    """Rows that no token names hold NaN; a token without rows is 0 or the shared expert's."""
    generator = torch.Generator().manual_seed(k)
    y = (torch.randn(40, d, generator=generator) * torch.linspace(0.2, 4, 40)[:, None]).bfloat16()
    row_of = torch.randint(20, (5, k), generator=generator).int()
    row_of[1], row_of[2, k // 2], row_of[4, 0] = -1, -1, 40
    y[20:] = float("nan")
    weights = torch.rand(5, k, generator=generator) if weighted else None
    both = torch.randn(5, d, generator=generator).bfloat16() if shared else None
    out = combine((k, bool(weighted), bool(shared)), arch, y, row_of, weights, both)
    wide = (None if x is None else x.double() for x in (weights, both))
    want = sums.moe_combine(y.double(), row_of, *wide)
    bound = 2.0**-8 * want.abs() + 1e-5  # the rounding to bf16; sums of k values in fp32 where terms cancel
    assert bool(((out.double() - want).abs() <= bound).all())
    assert torch.equal(out[1], both[1] if shared else torch.zeros(d).bfloat16())


def test_there_and_back():
    """Rows gathered by `rows`, combined by `row_of`: each token gets the sum of its weights times itself."""
    experts, weights = routes(67, 6, 40)
    experts[3, 2] = -1
    found = run((40, 6), "sm_90a", experts, weights)
    x = torch.randn(67, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    y = torch.where(found.rows[:, None] >= 0, x[found.rows], float("nan"))
    out = combine((6, True, False), "sm_90a", y, found.row_of, weights, None)
    want = (weights * (experts >= 0)).sum(1, keepdim=True).double() * x.double()
    assert bool(((out.double() - want).abs() <= 2.0**-8 * want.abs() + 1e-6).all())


# ----------------------------------------------------------------- arguments


def test_bad_arguments_are_named():
    for settings, name in (
        ((0,), "experts"),
        ((513,), "experts"),
        ((8, 17), "k"),
        ((8, 2, 6), "align"),
        ((8, 2, 0), "align"),
    ):
        with pytest.raises(ConfigError, match=name):
            MoeDispatch(*settings)
    with pytest.raises(ConfigError, match="k"):
        MoeCombine(17)
    kernel, (experts, weights) = MoeDispatch(40, 5), routes(7, 5, 40)
    ints = [torch.zeros(size, dtype=torch.int32) for size in (40, 41, max_rows(7, 5, 40))]
    out = Dispatch(*ints, experts.clone(), ints[2].float())
    good = Call(experts, weights, out, kernel.align, 0, "emulator")
    for bad, name in (
        ({"experts": experts.long()}, "experts"),
        ({"experts": experts.t().contiguous().t()}, "experts"),
        ({"weights": None}, "weights"),
        ({"out": out._replace(counts=out.offsets)}, "counts"),
        ({"out": out._replace(offsets=out.counts)}, "offsets"),
        ({"out": out._replace(rows=out.rows[4:])}, "rows"),
        ({"out": out._replace(row_weight=out.row_weight[4:])}, "row_weight"),
        ({"out": out._replace(row_of=experts[:-1])}, "row_of"),
        ({"max_m": 128}, "max_m"),
    ):
        with pytest.raises(ArgumentError, match=name):
            arguments.launch_args(kernel, good._replace(**bad))
    y = torch.zeros(9, 24).bfloat16()
    good = Combined(y, experts, None, y[:7].clone(), y[:7].clone(), "emulator")
    for bad, name in (
        ({"y": y.half()}, "y"),
        ({"y": y[:, :16]}, "y"),
        ({"row_of": experts[1:]}, "row_of"),
        ({"weights": weights}, "weights"),
        ({"shared": None}, "shared"),
        ({"out": y[:7, :20]}, "out"),
    ):
        with pytest.raises(ArgumentError, match=name):
            combine_arguments.launch_args(MoeCombine(5), good._replace(**bad))
