"""The compressor in the emulator on both architectures: any chunks and positions, formats, schedules, faults."""

import re
from functools import cache

import pytest
import torch

from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make as device
from dsv4lib.emulator.errors import Deadlock
from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.ops.compressor import faults, stream
from dsv4lib.ops.compressor import kernel as compressor_kernel
from dsv4lib.ops.compressor.arguments import fake_args, launch_args
from dsv4lib.ops.compressor.op import Call, Pages, Ring, Running, cut
from dsv4lib.ops.quantize.config import has_fp4_conversion
from tests.budget import built, small
from tests.ops.compressor import cases

ARCHS = ("sm_100a", "sm_90a")
FULL = pytest.mark.full
LONG = (128, 2, "sm_100a"), (128, 1, "sm_90a")
SCHEDULES = ("round_robin", "oldest_first", "newest_first", "adversarial", "random")
RAGGED = [1, 0, 6, 9, 2], [3, 7, 0, 6, 5]  # rows and positions: chunk boundaries anywhere in a window
BATCHES = {
    "csa": (4, *RAGGED, {}),
    "csa decode": (4, [1] * 5, [0, 3, 4, 1_048_571, -1], {"single": True}),
    "hca ring": (128, [30, 1], [100, 4], {}),
    "hca ring decode": (128, [1, 1], [255, 9], {"single": True}),
    "hca running": (32, [40, 1, 3], [28, 127, 64], {"running": True}),
    "hca running decode": (128, [1] * 5, [0, 127, 1_048_575, 131, -1], {"running": True, "single": True}),
    "indexer": (4, *RAGGED, {"dim": 128}),
    "indexer decode": (4, [1] * 5, [0, 3, 7, 1_048_575, -1], {"dim": 128, "single": True}),
}
FAULTS = [kernel for kernel in faults.WINDOWS if kernel is not faults.ScalesFourApart]  # fp32 rows have none
ROWS = {"rate": 128, "overlap": False, "single": True, "split": 16}  # what may be streamed
PAGES = Pages(cases.blank("kv", 9, 512), cases.PAGE)
FORMS = {512: ("kv",), 128: ("fp4", "fp8")}


@cache
def compiled(kernel_type, settings, arch):
    settings = dict(settings) | {"fp4_conversion": has_fp4_conversion(arch)}
    kernel, code = built(kernel_type, fake_args, arch, **settings)
    assert code.local_bytes == 0 and small(code), (code.local_bytes, code.instructions)
    return kernel, code


def cut_by(slices, rate):
    """Settings of a decode step with a ring: so many slices, two teams where they have work; 0: `simt`."""
    if not slices:
        return {"slices": 8, "split": rate // 8}
    groups = rate // 8 // slices
    return {"slices": slices, "split": rate // 8, "stages": min(6, groups), "teams": min(2, groups)}


def call_of(case, out):
    return Call(case.kv, case.gate, case.weights, case.batch, case.state, out, cases.EPS, case.dim == 128, "emulator")


def run(case, form, arch, kernel_type=None, slices=None, apart=False, **options):
    """(pages, state) after a launch without hazards; `cut_by` so many slices, or as the op would cut it.

    apart: rows of k and z in turn, as views of one tensor have them.
    """
    rate, dim, running = len(case.weights.ape), case.dim, isinstance(case.state, Running)
    overlap, single = case.kv.shape[1] == 2 * dim, case.batch.single
    settings = {"rate": rate, "overlap": overlap, "dim": dim, "form": form, "rotate": dim == 128}
    settings |= {"single": single, "running": running}
    settings |= cut(rate, overlap, running, single) if slices is None else cut_by(slices, rate)
    kernel_type = kernel_type or (stream.StreamedCompressor if settings.get("stages") else compressor_kernel.Compressor)
    kernel, code = compiled(kernel_type, tuple(settings.items()), arch)
    pages = cases.blank(form, int(case.batch.slots.max()) + 1, dim)
    state = type(case.state)(*(x.clone() for x in case.state))
    if apart:
        state = Ring(*torch.stack(tuple(state), 2).unbind(2))
    call = call_of(case._replace(state=state), Pages(pages, cases.PAGE, form))
    gpu = device(arch, **{"checks": "race", **options})
    launch(code, *launch_args(kernel, call), gpu=gpu)
    assert not gpu.hazards, gpu.hazards[0].message
    return pages, state


def case_of(name, **more):
    rate, counts, starts, options = BATCHES[name]
    return cases.make(rate, counts, starts, **options, **more)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "arch"), [(n, ARCHS[i % 2]) for i, n in enumerate(BATCHES)])
def test_batches(name, arch):
    """fp32 entries and the state against the oracle; every format against it with the released code's roundings."""
    case = case_of(name, drop=(1,) if name == "csa" else ())
    cases.verify(case, lambda form: run(case, form, arch))
    for form in FORMS[case.dim]:
        cases.verify_stored(case, form, run(case, form, arch)[0])


@pytest.mark.parametrize("name", ["csa", pytest.param("hca running", marks=FULL)])
def test_the_other_architecture(name):
    case = case_of(name, seed=1)
    arch = ARCHS[1 - list(BATCHES).index(name) % 2]
    cases.verify(case, lambda form: run(case, form, arch))


@pytest.mark.parametrize("name", ["csa", pytest.param("hca running", marks=FULL)])
def test_all_schedules_give_the_same_bits(name):
    case = case_of(name, seed=2)
    results = [run(case, "kv", "sm_90a", schedule=s, seed=3) for s in SCHEDULES]
    for pages, state in results[1:]:
        assert torch.equal(pages, results[0][0])
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(state, results[0][1], strict=True))


def test_decode_continues_a_prefill():
    """Ten tokens at once, or 3, 1, 1 and 5 of them: the entries have the same bits, the ring the same rows."""
    whole = cases.make(4, [10], [6])
    pages, state = run(whole, "fp32", "sm_90a")
    now, first, parts = whole.state, 0, cases.blank("fp32", len(pages), 512)
    for count in (3, 1, 1, 5):
        rows = slice(first, first + count)
        plan = whole.batch.requests.clone()
        plan[0, 1], plan[0, 2] = count, 6 + first
        batch = whole.batch._replace(requests=plan, slots=whole.batch.slots[rows], single=count == 1)
        step = whole._replace(kv=whole.kv[rows], gate=whole.gate[rows], batch=batch, state=now)
        found, now = run(step, "fp32", "sm_90a") if int(batch.slots.max()) >= 0 else (None, run_states(step))
        for slot in batch.slots[batch.slots >= 0].tolist():
            parts[slot] = found[slot]
        first += count
    assert torch.equal(parts, pages)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(now, state, strict=True))


def run_states(case):
    """The state alone, where no window closes; the pool has a row that is not written."""
    slots = case.batch.slots.clone()
    wide = case._replace(batch=case.batch._replace(slots=slots.clamp_min(0)))
    pages, state = run(wide, "fp32", "sm_90a")
    assert bool((pages == 7.0).all())
    return state


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", [compressor_kernel.Compressor, *FAULTS])
def test_injected_faults_are_found(fault):
    case = cases.make(4, [4, 3], [0, 6], seed=5)
    found = run(case, "fp32", "sm_90a", fault)
    if fault is compressor_kernel.Compressor:
        cases.verify(case, lambda _: found)
        return
    with pytest.raises(AssertionError):
        cases.verify(case, lambda _: found)


def streamed_case(rate=128, seed=6):
    """Windows that close at once, later, not yet, and a request that is none."""
    return cases.make(rate, [1] * 5, [2 * rate - 1, 9, rate - 1, 8 * rate - 1, -1], single=True, seed=seed)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("rate", "slices", "arch"), [(128, 8, "sm_100a"), (32, 2, "sm_90a"), pytest.param(128, 1, "sm_90a", marks=FULL)]
)
def test_streamed_rows(rate, slices, arch):
    case = streamed_case(rate)
    cases.verify(case, lambda form: run(case, form, arch, slices=slices))
    cases.verify_stored(case, "kv", run(case, "kv", arch, slices=slices)[0])


@pytest.mark.parametrize("slices", [8, pytest.param(1, marks=FULL)])
def test_streamed_rows_that_lie_apart(slices):
    """A copy a row instead of one of many: the same bits."""
    case = streamed_case(seed=13)
    pages, state = run(case, "fp32", "sm_90a", slices=slices)
    found, after = run(case, "fp32", "sm_90a", slices=slices, apart=True)
    assert not after.k.is_contiguous() and torch.equal(found, pages)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, state, strict=True))


@pytest.mark.full
def test_all_schedules_and_cuts_give_the_same_bits_of_streamed_rows():
    case = streamed_case(seed=7)
    first = run(case, "fp32", "sm_90a", slices=2)
    for schedule in SCHEDULES:
        for slices in (1, 8):
            pages, state = run(case, "fp32", "sm_90a", slices=slices, schedule=schedule, seed=3)
            assert torch.equal(pages, first[0])
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(state, first[1], strict=True))


@pytest.mark.full
@pytest.mark.parametrize(("rate", "slices", "arch"), [(32, 4, "sm_90a"), *(pytest.param(*x, marks=FULL) for x in LONG)])
def test_both_forms_give_the_same_bits_whatever_the_order_of_requests(rate, slices, arch):
    case = streamed_case(rate, seed=9)
    order = torch.tensor([3, 4, 0, 2, 1])
    plan = case.batch.requests[order].clone()
    plan[:, 0] = torch.arange(5)
    batch = case.batch._replace(requests=plan, slots=case.batch.slots[order])
    turned = case._replace(kv=case.kv[order], gate=case.gate[order], batch=batch)
    pages, state = run(case, "fp32", arch, slices=0)
    for one, by in ((case, slices), (turned, slices), (turned, 0)):
        found, after = run(one, "fp32", arch, slices=by)
        assert torch.equal(found, pages)
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, state, strict=True))


@pytest.mark.parametrize("slices", [0, 2])
def test_a_decode_step_gives_the_bits_of_a_prefill(slices):
    """A window of 32 rows at once, or 31 of them and then the last one."""
    whole = cases.make(32, [32], [64], seed=10)
    pages, state = run(whole, "fp32", "sm_90a")
    plan = whole.batch.requests.clone()
    plan[0, 1] = 31
    batch = whole.batch._replace(requests=plan, slots=whole.batch.slots[:31])
    now = run_states(whole._replace(kv=whole.kv[:31], gate=whole.gate[:31], batch=batch))
    plan = plan.clone()
    plan[0, 1], plan[0, 2] = 1, 95
    batch = whole.batch._replace(requests=plan, slots=whole.batch.slots[31:], single=True)
    last = whole._replace(kv=whole.kv[31:], gate=whole.gate[31:], batch=batch, state=now)
    found, after = run(last, "fp32", "sm_90a", slices=slices)
    slot = int(whole.batch.slots.max())
    assert torch.equal(found[slot], pages[slot])
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(after, state, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fault", faults.STREAMED)
def test_injected_faults_of_streamed_rows_are_found(fault):
    case = streamed_case(seed=8)
    with pytest.raises((AssertionError, Deadlock)):
        cases.verify(case, lambda form: run(case, form, "sm_90a", fault, slices=1))


def test_gates_of_minus_infinity_count_for_nothing():
    case = case_of("hca running", seed=4)
    case.gate[:30] = float("-inf")
    cases.verify(case, lambda form: run(case, form, "sm_90a"))


def test_a_maximum_that_is_no_number_spoils_its_entry():
    """Of a running state: its sums alone look right."""
    case = cases.make(32, [1, 1], [31, 63], running=True, single=True, seed=4)
    place, slot = int(case.batch.requests[0, 3]), int(case.batch.slots[0])
    pages, _ = run(case, "fp32", "sm_90a")
    case.state.parts[place, 0, 77] = float("nan")
    found, _ = run(case, "fp32", "sm_90a")
    others = torch.arange(len(pages)) != slot
    assert bool(found[slot].isnan().all()) and torch.equal(found[others], pages[others])


@pytest.mark.parametrize("slices", [0, 4, pytest.param(1, marks=FULL)])
@pytest.mark.parametrize("bad", [float("nan"), pytest.param(float("inf"), marks=FULL)])
def test_a_row_that_is_no_number_spoils_its_entry_alone(slices, bad):
    """A gate or value of an old row or of the newest one: its entry is NaN where the oracle's is, others keep bits."""
    case = streamed_case(32, seed=12)
    pages, _ = run(case, "fp32", "sm_90a", slices=slices)
    for part, old in (("gate", False), ("kv", False), ("gate", True), ("kv", True)):
        spoilt = case._replace(kv=case.kv.clone(), gate=case.gate.clone(), state=Ring(*(x.clone() for x in case.state)))
        if old:
            (spoilt.state.z if part == "gate" else spoilt.state.k)[int(case.batch.requests[2, 3]), 5, 77] = bad
        else:
            getattr(spoilt, part)[2, 77] = bad
        found, _ = run(spoilt, "fp32", "sm_90a", slices=slices)
        mine = int(case.batch.slots[2])
        entries, slots, _ = cases.expected(spoilt)
        nowhere = entries[slots == mine][0].isnan()
        assert bool(nowhere[77]) and bool(found[mine][nowhere].isnan().all())
        others = torch.arange(len(pages)) != mine
        assert torch.equal(found[others], pages[others])


def test_bad_arguments_are_named():
    for settings, name in (
        ({"rate": 3}, "rate"),
        ({"dim": 256}, "dim"),
        ({"form": "fp4"}, "form"),
        ({"rotate": True}, "rotate"),
        ({"running": True}, "running"),
        ({"slices": 3}, "slices"),
        ({"split": 2}, "split"),
        ({"rate": 128, "overlap": False, "split": 1}, "split"),
        ({"stages": 4}, "stages"),
        ({**ROWS, "stages": 3, "teams": 2}, "stages"),
        ({**ROWS, "stages": 32}, "stages"),
        ({**ROWS, "stages": 4, "teams": 4}, "teams"),
        ({**ROWS, "rate": 32, "split": 4, "stages": 4, "slices": 8}, "slices"),
    ):
        with pytest.raises(ConfigError, match=name):
            compressor_kernel.Compressor(**settings)
    case = case_of("csa")
    many = torch.zeros(1, 4, dtype=torch.int32).repeat(70_000, 1)
    good = call_of(case, PAGES)
    with pytest.raises(ArgumentError, match=r"requests\.shape.*65535 entries"):
        launch_args(compressor_kernel.Compressor(), good._replace(batch=case.batch._replace(requests=many)))

    def wrong(group, name):
        x = getattr(group, name)
        return group._replace(**{name: x.half() if x.is_floating_point() else x.long()})

    members = ("kv", "gate", "weights.ape", "weights.norm", "weights.cos", "weights.sin", "batch.requests")
    for path in (*members, "batch.slots", "state.k", "state.z", "out.data"):
        field, _, member = path.partition(".")
        bad = good._replace(**{field: wrong(getattr(good, field), member)}) if member else wrong(good, field)
        with pytest.raises(ArgumentError, match=re.escape(path.removeprefix("batch."))):
            launch_args(compressor_kernel.Compressor(), bad)
