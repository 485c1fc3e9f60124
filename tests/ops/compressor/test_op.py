"""The compressor op: back ends, state and pages in place, schema, fakes, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.formats import hadamard, mxfp4
from dsv4lib.ops.common.requests import plan as plan_of
from dsv4lib.ops.compressor.op import MANY, Batch, Pages, Ring, Running, Weights, compressor, cut
from tests.ops.compressor import cases

CSA = cases.make(4, [1, 6], [3, 5])


@pytest.mark.parametrize(
    "case", [CSA, cases.make(128, [1, 1], [127, 64], running=True, single=True)], ids=["csa", "hca running"]
)
def test_back_ends_agree(case):
    for backend in ("emulator", "reference"):
        cases.verify(case, lambda form, backend=backend: cases.run(case, form, backend))


def test_a_decode_step_of_many_requests_has_the_bits_of_one_of_few():
    """From a number of requests on the op cuts them in another way."""
    many = cases.make(32, [1] * MANY, [31 if i % 9 == 0 else i for i in range(MANY)], single=True)
    found, _ = cases.verify(many, lambda form: cases.run(many, form, "emulator"))
    few = many._replace(kv=many.kv[:10], gate=many.gate[:10], batch=Batch(*(x[:10] for x in many.batch[:2]), True))
    pages, _ = cases.run(few, "fp32", "emulator")
    slots = few.batch.slots[few.batch.slots >= 0].long()
    assert len(slots) > 1 and torch.equal(pages[slots], found[slots])
    assert cut(32, False, False, True, MANY) != cut(32, False, False, True, MANY - 1)


def released(case, rotate):
    """Entries of one request from position 0, in the released code's steps: pooled wide, bf16 from there on."""
    half, (ape, norm, cos, sin) = case.dim, (x.double() for x in case.weights)
    windows = len(case.kv) // 4
    kv = case.kv.double()[: 4 * windows].unflatten(0, (-1, 4))
    gate = case.gate.double()[: 4 * windows].unflatten(0, (-1, 4)) + ape
    found = []
    for w in range(windows):
        k, z = kv[w, :, half:], gate[w, :, half:]
        if w:
            k, z = torch.cat((kv[w - 1, :, :half], k)), torch.cat((gate[w - 1, :, :half], z))
        x = (z.softmax(0) * k).sum(0).bfloat16().double()
        x = (x / (x.square().mean() + cases.EPS).sqrt() * norm).bfloat16().double()
        a, b, c, s = x[-64::2].clone(), x[-63::2].clone(), cos[4 * w], sin[4 * w]
        x[-64::2], x[-63::2] = a * c - b * s, a * s + b * c
        x = x.bfloat16().double()
        found.append(hadamard.transform(x).bfloat16().double() if rotate else x)
    return torch.stack(found)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
@pytest.mark.parametrize("form", ["kv", "fp4", "fp8"])
def test_rounds_where_the_released_code_does(form, backend):
    """Entry by entry the codes that the released code's roundings give; less rounding changes 3 % of them."""
    case = cases.make(4, [34], [0], dim=512 if form == "kv" else 128, seed=3)
    x = released(case, form != "kv")
    pages, _ = cases.run(case, form, backend)
    closed = torch.arange(3, 34, 4)
    data, scales, valid = cases.LAYOUTS[form].read(pages, cases.PAGE, case.batch.slots[closed].long())
    assert bool(valid.all())
    if form == "fp4":
        want = mxfp4.quantize(x)
        found, parts = data, [(scales, want.scales)]
        want = want.packed
    else:
        nope, group = (448, 64) if form == "kv" else (128, 128)
        blocks = x[:, :nope].unflatten(1, (-1, group))
        scale = torch.exp2((blocks.abs().amax(-1) / 448).log2().ceil())
        want = (blocks / scale[..., None]).float().to(torch.float8_e4m3fn).flatten(1).view(torch.uint8)
        found = data[:, :nope]
        if form == "kv":
            exponents = (scale.log2() + 127).to(torch.uint8)
            rope = data[:, nope:].clone().view(torch.bfloat16)
            parts = [(scales[:, :7], exponents), (rope, x[:, nope:].bfloat16())]
        else:
            parts = [(scales.clone().view(torch.float32), scale.float())]
    for a, b in ((found, want), *parts):
        assert a.shape == b.shape
        # an fp32 sum within its error of a tie of bf16 may go either way
        assert int((a != b).sum()) <= a.numel() // 500, f"{int((a != b).sum())} of {a.numel()}"


def test_rotation_is_for_128_dims_unless_said():
    case = cases.make(4, [4], [4], dim=128)
    turned, plain = (cases.run(case, "fp32", "reference", rotate=r)[0] for r in (None, False))
    slot = int(case.batch.slots.max())
    torch.testing.assert_close(turned[slot].norm(), plain[slot].norm())
    assert not torch.allclose(turned[slot], plain[slot], atol=1e-2)


RUNNING = cases.make(128, [1, 1], [127, 64], running=True, single=True)


@pytest.mark.parametrize("case", [CSA, RUNNING], ids=["rows", "running"])
@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_a_state_may_come_as_its_bytes(case, backend):
    """Strided, as pages of a pool hold it; the same bits, written in place."""
    room = [torch.zeros(len(x), x.shape[1] + 3, x.shape[2] + 8) for x in case.state]
    inside = [one[:, 1:-2, 4:-4].copy_(x) for one, x in zip(room, case.state, strict=True)]
    entries = cases.run(case, "kv", backend)
    found = case._replace(state=type(case.state)(*(x.view(torch.uint8) for x in inside)))
    pages = cases.blank("kv", int(case.batch.slots.max()) + 1, 512)
    compressor(*found[:4], found.state, Pages(pages, cases.PAGE, "kv"), eps=cases.EPS, backend=backend)
    assert torch.equal(pages, entries[0])
    for x, y, before in zip(inside, entries[1], case.state, strict=True):
        assert torch.equal(x.view(torch.int32), y.view(torch.int32))
        assert not torch.equal(x.view(torch.int32), before.view(torch.int32))


def test_nothing_to_do():
    empty = CSA._replace(kv=CSA.kv[:0], gate=CSA.gate[:0], batch=Batch(CSA.batch.requests[:0], CSA.batch.slots[:0]))
    _, state = cases.run(empty, "kv", "emulator")
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(state, CSA.state, strict=True))


def test_plan():
    plan = plan_of(torch.tensor([0, 2, 2, 5]), torch.tensor([7, -1, 0]), torch.tensor([2, 0, 1]))
    assert plan.dtype == torch.int32 and plan.tolist() == [[0, 2, 7, 2], [2, 0, -1, 0], [2, 3, 0, 1]]


def test_schema_and_fake():
    given = (CSA.kv, CSA.gate, *CSA.weights, *CSA.batch, *(x.nan_to_num() for x in CSA.state), None)
    pages = cases.blank("kv", 8, 512)
    flags = cases.PAGE, "kv", cases.EPS, False, "reference"
    result = torch.library.opcheck(torch.ops.dsv4.compressor.default, (*given, pages, *flags))
    assert set(result.values()) == {"SUCCESS"}, result
    with FakeTensorMode():
        kv = torch.empty(4096, 512)
        weights = Weights(*(torch.empty(s) for s in ((128, 512), (512,), (1 << 20, 32), (1 << 20, 32))))
        batch = Batch(torch.empty(3, 4, dtype=torch.int32), torch.empty(4096, dtype=torch.int32))
        pages = Pages(torch.empty(99, 1728, dtype=torch.uint8), 2)
        compressor(kv, kv, weights, batch, Running(torch.empty(3, 3, 512)), pages)
        with pytest.raises(ArgumentError, match=r"state\.parts"):
            compressor(kv, kv, weights, batch, Running(torch.empty(3, 2, 512)), pages)


def test_torch_compile_takes_it_whole():
    """The state that a graph reads after the op is the new one."""

    def layer(kv, gate, k, z, pages):
        out, state = Pages(pages, cases.PAGE, "kv"), Ring(k, z)
        compressor(kv * 1.0, gate, CSA.weights, CSA.batch, state, out, eps=cases.EPS, backend="emulator")
        return k.nan_to_num().sum(-1) + 1, pages.int().sum()

    torch._dynamo.reset()
    found = []
    for one in (torch.compile(layer, fullgraph=True, backend="aot_eager"), layer):
        pages = cases.blank("kv", 8, 512)
        given = *(x.clone() for x in CSA.state), pages
        found.append((*one(CSA.kv, CSA.gate, *given), *(x.nan_to_num() for x in given)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][2], CSA.state.k.nan_to_num())


def _with(values, place, value):
    changed = values.clone()
    changed[place] = value
    return changed


def test_bad_arguments_are_named():
    plan, slots, pages = CSA.batch.requests, CSA.batch.slots, Pages(cases.blank("kv", 8, 512), cases.PAGE)
    for change, name in (
        ({"kv": CSA.kv.half()}, "kv"),
        ({"gate": CSA.gate[1:]}, "gate"),
        ({"weights": CSA.weights._replace(ape=CSA.weights.ape[:3])}, "weights.ape"),
        ({"weights": CSA.weights._replace(norm=torch.ones(96))}, "weights.norm"),
        ({"weights": CSA.weights._replace(cos=CSA.weights.cos[:5], sin=CSA.weights.sin[:5])}, "requests.*positions"),
        ({"state": Ring(CSA.state.k[:, :4], CSA.state.z[:, :4])}, r"state\.k"),
        ({"state": Running(torch.zeros(4, 3, 512))}, "kv.shape"),
        ({"state": (1, 2)}, "state"),
        ({"state": Ring(CSA.state.k.view(torch.uint8), CSA.state.z)}, r"state\.z\.dtype"),
        ({"state": Ring(CSA.state.k, CSA.state.z.view(torch.uint8))}, r"state\.z"),
        ({"state": Ring(*(x.view(torch.uint8)[:, :, :-1] for x in CSA.state))}, r"state\.k=.*bytes of fp32"),
        ({"state": Ring(*(x.view(torch.uint8)[:, :, 2:-2] for x in CSA.state))}, r"state\.k=.*bytes of fp32"),
        ({"state": Ring(*(x.view(torch.uint8)[:, :, :-4] for x in CSA.state))}, r"state\.k"),
        ({"state": Ring(CSA.state.k, None)}, r"state\.z"),
        ({"state": Ring(CSA.state.k, CSA.state.k)}, r"state\.z"),
        ({"kv": CSA.kv.tolist()}, "kv"),
        ({"weights": tuple(CSA.weights)}, "weights"),
        ({"weights": CSA.weights._replace(cos=CSA.weights.cos[0, 0])}, "weights.cos"),
        ({"weights": CSA.weights._replace(norm=None)}, "weights.norm"),
        ({"batch": tuple(CSA.batch)}, "batch"),
        ({"batch": CSA.batch._replace(slots=[1])}, "slots"),
        ({"out": pages.data}, "out"),
        ({"out": pages._replace(data=None)}, r"out\.data"),
        ({"gate": CSA.gate.T.contiguous().T}, r"gate\.stride"),
        ({"out": pages._replace(form="nvfp4")}, "out.form"),
        ({"out": pages._replace(page_size=4)}, "out.data"),
        ({"batch": Batch(plan.long(), slots)}, "requests"),
        ({"batch": Batch(_with(plan, (1, 0), 0), slots)}, "requests.*apart"),
        ({"batch": Batch(_with(plan, (1, 3), 99), slots)}, "requests"),
        ({"batch": Batch(_with(plan, (1, 3), int(plan[0, 3])), slots)}, "requests.*once"),
        ({"batch": Batch(plan, _with(slots, 0, 10**6))}, "slots"),
        ({"batch": Batch(plan, slots, single=True)}, "requests"),
        ({"rotate": True}, "rotate"),
    ):
        given = {"kv": CSA.kv, "gate": CSA.gate, "weights": CSA.weights, "batch": CSA.batch, "state": CSA.state}
        given |= {"out": pages, "backend": "emulator"}
        with pytest.raises(ArgumentError, match=name):
            compressor(**{**given, **change})


LARGER = {
    "csa": cases.make(4, [1, 6, 9, 40], [3, 5, 30, 2], dim=128, rows=16),
    "csa decode": cases.make(4, [1, 1, 1, 1], [3, 7, 14, 31], rows=32, single=True),
    "hca": cases.make(32, [1, 40, 5], [31, 50, 62], rows=64),
    "hca decode": cases.make(32, [1, 1, 1], [31, 63, 100], rows=64, single=True),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", LARGER)
@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_rings_of_more_rows_than_an_entry_has(name, backend):
    case = LARGER[name]
    cases.verify(case, lambda form: cases.run(case, form, backend))


def entries_with_drafts(rows, most, backend):
    """Entries of 40 tokens of a request whose steps end with drafts of noise, all taken back; 1 to 8 rows a step."""
    whole = cases.make(4, [40], [0], dim=128, seed=4)
    generator = torch.Generator().manual_seed(5)
    state = Ring(*(torch.full((1, rows, 256), float("nan")) for _ in range(2)))
    pages, start, accepted = torch.zeros(10, 128), 0, 0
    while start < 40:
        kept = min(1 + accepted, 40 - start)
        drafts = most - kept + 1
        given = [torch.cat((x[start : start + kept], torch.randn(drafts, 256, generator=generator))) for x in whole[:2]]
        positions = torch.arange(start, start + kept + drafts)
        slots = torch.where((positions + 1) % 4 == 0, positions // 4, -1)
        slots = torch.where(slots < 10, slots, -1).int()
        table = plan_of(torch.tensor([0, len(positions)]), torch.tensor([start]), torch.tensor([0]))
        angles = (torch.nn.functional.pad(x.nan_to_num(), (0, 0, 0, 8)) for x in whole.weights[2:])
        weights = whole.weights._replace(**dict(zip(("cos", "sin"), angles, strict=True)))
        compressor(*given, weights, Batch(table, slots), state, Pages(pages, 1, "fp32"), eps=cases.EPS, backend=backend)
        start, accepted = start + kept, (accepted + 3) % (most + 1)
    return pages, cases.expected(whole)


@pytest.mark.parametrize("backend", ["emulator", "reference"])
def test_up_to_seven_rows_are_taken_back(backend):
    """A ring of 16 rows serves 7 drafts, wherever windows close; one of 8 rows loses rows that are still read."""
    found, (entries, slots, _) = entries_with_drafts(16, 7, backend)
    assert torch.allclose(found[: len(slots)], entries.float(), rtol=1e-4, atol=1e-5)
    lost, _ = entries_with_drafts(8, 7, backend)
    assert not torch.allclose(lost, found, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("rows", [4, 12, 24])
def test_rings_of_other_sizes_are_refused(rows):
    state = Ring(*(torch.zeros(4, rows, 1024) for _ in range(2)))
    with pytest.raises(ArgumentError, match="state.k"):
        cases.run(CSA._replace(state=state), "fp32", "emulator")
