"""The compressor's decode step in CUDA C++: the oracle's entries and states, by the checks that the DSL's passes."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import cpp as cpp_cache
from dsv4lib.ops.compressor import cpp
from dsv4lib.ops.compressor.config import Sizes
from dsv4lib.ops.compressor.op import Pages, Ring
from tests.budget import small
from tests.emulated import emulated, observed
from tests.ops.compressor import cases
from tests.ops.compressor.test_kernel import ARCHS, BATCHES, FORMS, SCHEDULES, call_of, case_of

DECODE = [name for name in BATCHES if name.endswith("decode")]


def run(case, form, arch, *edits, **options):
    """(pages, state) after a launch without hazards."""
    with emulated(arch, **options):
        return launched(case, form, *edits)


def launched(case, form, *edits):
    pages = cases.blank(form, int(case.batch.slots.max()) + 1, case.dim)
    state = type(case.state)(*(x.clone() for x in case.state))
    cpp.run(call_of(case._replace(state=state), Pages(pages, cases.PAGE, form)), *edits)
    return pages, state


@pytest.mark.one_in(4)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "settings",
    [
        {"form": "kv"},
        {"rate": 128, "overlap": False, "slices": 8, "split": 16},
        {"rate": 128, "overlap": False, "running": True},
        {"dim": 128, "form": "fp4", "rotate": True},
        {"dim": 128, "form": "fp8", "rotate": True},
    ],
    ids=lambda given: " ".join(f"{k} {v}" for k, v in given.items()),
)
def test_budget(arch, settings):
    code = cpp_cache.compiled(cpp.kernel(Sizes(single=True, **settings)), arch)
    assert code.local_bytes == 0 and small(code) and code.registers <= 128, code


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "arch"), [(n, ARCHS[i % 2]) for i, n in enumerate(DECODE)])
def test_batches(name, arch):
    """fp32 entries and the state against the oracle; every format against it with the released code's roundings."""
    case = case_of(name)
    cases.verify(case, lambda form: run(case, form, arch))
    for form in FORMS[case.dim]:
        cases.verify_stored(case, form, run(case, form, ARCHS[arch == ARCHS[0]])[0])
    fp32, bf16 = (run(case, form, arch)[0] for form in ("fp32", "bf16"))
    assert torch.equal(bf16, fp32.bfloat16())


def test_a_ring_with_rows_to_spare():
    case = cases.make(4, [1, 1, 1], [3, 7, 1_048_571], single=True, rows=16)
    cases.verify(case, lambda form: run(case, form, "sm_100a"))


def test_an_entry_without_a_slot():
    case = case_of("csa decode", drop=(1,))
    cases.verify(case, lambda form: run(case, form, "sm_90a"))
    cases.verify_stored(case, "kv", run(case, "kv", "sm_90a")[0])


@pytest.mark.parametrize("name", ["csa decode", "hca running decode"])
def test_all_schedules_give_the_same_bits(name):
    case = case_of(name, seed=2)
    results = [run(case, "kv", "sm_90a", schedule=s, seed=3) for s in SCHEDULES]
    for pages, state in results[1:]:
        assert torch.equal(pages, results[0][0])
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(state, results[0][1], strict=True))


def test_steps_follow_each_other():
    """Six steps of a request, each on the state that the one before has left."""
    rate, state, entries = 4, None, []
    whole = cases.make(rate, [6], [6])
    for i in range(6):
        plan = torch.tensor([[0, 1, 6 + i, int(whole.batch.requests[0, 3])]], dtype=torch.int32)
        slots = torch.tensor([i if (7 + i) % rate == 0 else -1], dtype=torch.int32)
        batch = whole.batch._replace(requests=plan, slots=slots, single=True)
        step = whole._replace(kv=whole.kv[i : i + 1], gate=whole.gate[i : i + 1], batch=batch)
        step = step._replace(state=whole.state if state is None else state)
        wide = step._replace(batch=batch._replace(slots=slots.clamp_min(0)))
        pages, state = run(wide, "fp32", "sm_100a")
        entries += [pages[i]] if slots[0] >= 0 else []
    want = cases.expected(whole)
    assert len(entries) == len(want[0]) == 2
    for found, exact in zip(entries, want[0], strict=True):
        assert float((found - exact).abs().max() / exact.abs().max()) < 4e-6
    assert float((state.k - want[2].k).nan_to_num().abs().max()) == 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("fault", [None, *cpp.FAULTS])
def test_faults_are_found(fault):
    case = cases.make(4, [1] * 4, [3, 7, 10, 6], single=True, seed=5)
    case.batch.requests[3, 1] = 0  # padding
    edits = () if fault is None else (cpp.FAULTS[fault],)
    with observed("sm_100a") as seen:
        found = launched(case, "fp32", *edits)
    assert seen == ({"race_shared", "uninitialised_smem"} if fault == "no_barrier" else set())
    if fault is None:
        cases.verify(case, lambda _: found)
    elif not seen:
        with pytest.raises(AssertionError):
            cases.verify(case, lambda _: found)


@pytest.mark.parametrize("fault", cpp.FAULTS_OF_RUNNING)
def test_faults_of_a_running_softmax_are_found(fault):
    case = cases.make(32, [1] * 3, [31, 70, 64], running=True, single=True, seed=5)
    cases.verify(case, lambda form: run(case, form, "sm_100a"))
    found = run(case, "fp32", "sm_100a", cpp.FAULTS_OF_RUNNING[fault])
    with pytest.raises(AssertionError):
        cases.verify(case, lambda _: found)


def test_as_the_op_has_it_and_bad_arguments():
    case = case_of("csa decode")
    valid = case._replace(batch=case.batch._replace(requests=case.batch.requests.clone()))
    state = Ring(*(x.clone() for x in case.state))
    pages = Pages(cases.blank("kv", int(case.batch.slots.max()) + 1, 512), cases.PAGE, "kv")
    good = {"state": state, "out": pages, "batch": valid.batch}

    def call(**changes):
        given = {**good, **changes}
        kv = given.pop("kv", case.kv)
        options = {name: given.pop(name) for name in ("eps", "rotate", "backend") if name in given}
        cpp.compressor(kv, case.gate, case.weights, **given, eps=options.pop("eps", cases.EPS), **options)

    call(backend="emulator")
    cases.verify_stored(case, "kv", pages.data)
    for changes, name in (
        ({"batch": valid.batch._replace(single=False), "backend": "emulator"}, "batch.single"),
        ({"kv": case.kv[:, 4:]}, "kv.shape"),
        ({"out": pages._replace(form="fp16")}, "out.form"),
        ({"rotate": True}, "rotate"),
        ({"eps": -1.0}, "eps"),
        ({"backend": "reference"}, "backend"),
        ({"batch": valid.batch._replace(slots=valid.batch.slots + 100)}, "slots"),
        ({"state": Ring(state.k, state.z[:, :4])}, "state.z"),
        ({"state": Ring(state.k, state.k)}, "state.z='memory of state.k'"),
    ):
        with pytest.raises(ArgumentError, match=name):
            call(**changes)


def test_padded_rows_are_neither_read_nor_written():
    """Requests without rows, with a negative start or place; their rows are NaN, what they name does not exist."""
    real = cases.make(4, [1, 1], [3, 6], single=True, seed=3)
    nowhere, places = 1 << 30, [1, 3]
    table = torch.tensor([[0, 0, nowhere, nowhere], [0] * 4, [2, 1, -1, nowhere], [0] * 4, [4, 1, 3, -1]]).int()
    table[places] = real.batch.requests
    table[places, 0] = torch.tensor(places).int()
    kv, gate = (torch.full((5, x.shape[1]), torch.nan) for x in (real.kv, real.gate))
    kv[places], gate[places] = real.kv, real.gate
    slots = torch.full((5,), -1, dtype=torch.int32)
    slots[places] = real.batch.slots
    padded = real._replace(kv=kv, gate=gate, batch=real.batch._replace(requests=table, slots=slots))
    found, want = (run(case, "kv", "sm_100a") for case in (padded, real))
    assert torch.equal(found[0], want[0])
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found[1], want[1], strict=True))
