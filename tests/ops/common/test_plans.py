"""Plans of warm calls: never another call's words, few Python calls, and what is refused for every op."""

import ctypes
import gc
import sys
import threading
import time
import weakref
from typing import NamedTuple
from unittest.mock import patch

import cutlass
import cutlass.cute as cute
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lib.bench.ops import harness, host
from dsv4lib.dsl.tensors import DeviceTensor, leaf_bytes, leaves
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry
from dsv4lib.ops.common import native, plans, replay, schema
from dsv4lib.ops.common.overlap import Overlaps, meet, meets_itself, span
from dsv4lib.ops.common.requests import plan as requests_of
from dsv4lib.ops.compressor.op import Batch, Pages, Ring, Weights, compressor
from dsv4lib.ops.fmha.op import Fp8Pages, Selected, fmha
from dsv4lib.ops.mla_decode import inputs
from dsv4lib.ops.mla_decode.op import mla_decode
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.rmsnorm.op import add_rmsnorm, rmsnorm
from dsv4lib.ops.topk.op import topk

MOST_CALLS = 60  # Python functions that a warm call may call; 1,100 before there were plans
EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)
X = torch.randn(6, 72, generator=torch.Generator().manual_seed(0)).bfloat16()


CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Launches:
    """In place of the driver: what every launch would read."""

    def __init__(self):
        self.seen, self.kept = [], []
        self.seconds = 0.0  # that the driver takes to read
        self.python = False

    def entry(self, function):
        """Of a C function, so that calls are replayed; Python's own where `python` is set."""
        sizes = [size_of(one) for one in leaves(function.arguments)]

        def call(address):
            if self.seconds:
                time.sleep(self.seconds)
            places = (ctypes.c_uint64 * (len(sizes) + 1)).from_address(address)
            words = tuple(ctypes.string_at(place, size) for place, size in zip(places, sizes, strict=False))
            self.seen.append((function.name, words))

        made = call if self.python else CALL(call)
        self.kept.append(made)
        return made

    def of(self, call):
        """Words of the launches of one call."""
        self.seen = []
        call()
        return self.seen


def size_of(like):
    """Bytes of an argument, by the fake one."""
    if hasattr(like, "element_type"):
        rank = len(like.shape)
        return 8 + 4 * rank + (4 * (rank % 2) + 8 * (rank - 1)) * (rank > 1)
    return 8 if not hasattr(like, "value") else len(leaf_bytes(like))


@pytest.fixture
def launches():
    seen = Launches()
    with torch.no_grad(), host.without_gpu(seen.entry):
        yield seen


# ----------------------------------------------------------- the words


@pytest.mark.parametrize(
    "x",
    [torch.zeros(5), torch.zeros(3, 8)[:, :5], torch.zeros(4, 3, 2).int(), torch.zeros(2, 3, 4, 5)[:, 1:].byte()],
    ids=lambda x: str(x.dim()),
)
def test_a_tensor_is_described_as_the_dsl_describes_it(x):
    theirs = cute.runtime.from_dlpack(x, assumed_align=4).mark_layout_dynamic(leading_dim=x.dim() - 1)
    mine = DeviceTensor(x, theirs.element_type)
    (place,), (own,) = theirs.__c_pointers__(), mine.__c_pointers__()
    size = len(mine.packed())
    packed = bytearray(ctypes.string_at(place, size))
    if x.dim() > 1 and x.dim() % 2:  # the DSL does not clear what it leaves between extents and strides
        packed[8 + 4 * x.dim() : 12 + 4 * x.dim()] = bytes(4)
    assert bytes(packed) == mine.packed() == ctypes.string_at(own, size)
    assert mine.dynamic_strides_mask == tuple(theirs.dynamic_strides_mask)
    assert size == size_of(mine)


def test_an_extent_of_31_bits_is_refused():
    x = torch.empty(1 << 31, dtype=torch.uint8, device="meta")
    with pytest.raises(ArgumentError, match="2\\^31"):
        DeviceTensor(x, cutlass.Uint8).packed()


CALLS = st.tuples(
    st.sampled_from(["rmsnorm", "add", "topk", "compressor"]),
    st.integers(2, 4),  # rows: of a single one the stride is any
    st.integers(0, 2),  # where it starts, rows
    st.sampled_from([72, 80, 96]),  # elements from row to row
    st.sampled_from([0, 8, 64]),  # columns in front
    st.sampled_from([1e-6, 1e-5]),
    st.booleans(),
)


def called(buffers, kind, rows, start, pitch, column, eps, flag):
    """One call over views of the buffers; what is there decides nothing, only where it is."""
    a, b, c, d = (x[start * pitch + column :].as_strided((rows, 72), (pitch, 1)) for x in buffers[:4])
    if kind == "rmsnorm":
        rmsnorm(a, buffers[4] if flag else None, eps, out=b, backend="native")
    elif kind == "add":
        add_rmsnorm(a, a if flag else b, None, eps, out=(c, d), backend="native")
    elif kind == "topk":
        scores = buffers[5][column : column + rows * pitch].view(rows, pitch)
        topk(scores[:, : 72 if flag else pitch], 9, by_score=flag, backend="native", out=buffers[6][:rows, :9])
    else:
        kv = buffers[7][start : start + rows]
        table, slots = buffers[8][: 1 if flag else rows], buffers[13][:rows]
        state = Ring(buffers[9], buffers[10])
        entries, half = Pages(buffers[11], 64, "fp4"), kv.shape[1] // 2
        compressor(kv[:, :half], kv[:, half:], buffers[12], Batch(table, slots), state, entries, eps=eps)


def made():
    bf16 = [torch.zeros(4096, dtype=torch.bfloat16) for _ in range(4)]
    weights = Weights(torch.zeros(4, 256), torch.ones(128), torch.zeros(64, 32), torch.zeros(64, 32))
    table = requests_of(torch.arange(5), torch.arange(4), torch.arange(4))
    state, pages = [torch.zeros(4, 8, 256) for _ in range(2)], torch.zeros(2, 64 * 68, dtype=torch.uint8)
    top = torch.zeros(4096), torch.zeros(8, 16, dtype=torch.int32)
    return [*bf16, torch.ones(72), *top, torch.zeros(8, 512), table, *state, pages, weights, torch.arange(8).int()]


@settings(EXAMPLES, max_examples=25)
@given(CALLS, CALLS, st.booleans())
def test_a_plan_never_gives_the_words_of_another_call(one, two, guarded):
    """Another shape, stride, place, alignment, scalar or memory, one or several at once, after a call with a plan."""
    seen = Launches()
    guards = patch.object(plans, "_guards_of", plans._guards_of if guarded else lambda: None)
    with torch.no_grad(), host.without_gpu(seen.entry), guards:
        kept = [made(), made()]
        others = [(*one[:i], two[i], *one[i + 1 :]) for i in range(1, len(one))]
        for n, wanted in enumerate([one] * 4 + others + [one, two, two, two, two, one]):
            buffers = kept[n % 2]
            found = seen.of(lambda: called(buffers, *wanted))  # noqa: B023 (called here)
            stored = [(op.plans, op._records) for op in plans._OPS]
            for op in plans._OPS:
                op.plans, op._records = {}, replay.Records()
            assert found == seen.of(lambda: called(buffers, *wanted)) != []  # noqa: B023
            for op, (of_op, records) in zip(plans._OPS, stored, strict=True):
                op.plans, op._records = of_op, records


def test_a_plan_keeps_no_argument_and_survives_their_memory(launches):
    x, out = X.clone(), torch.empty_like(X)
    for _ in range(3):
        rmsnorm(x, out=out, backend="native")
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None
    y = X.clone()
    ((_, words),) = launches.of(lambda: rmsnorm(y, out=out, backend="native"))
    assert int.from_bytes(words[0][:8], "little") == y.data_ptr()


def test_two_threads_never_mix_their_words(launches):
    memory = torch.zeros(8, 512, dtype=torch.bfloat16)  # 1,024 bytes each: all lie alike, and have one plan
    tensors = [tuple(memory[i + n, :432].view(6, 72) for n in (0, 4)) for i in range(4)]
    for x, out in tensors[:3]:
        rmsnorm(x, out=out, backend="native")
    launches.seen = []

    def work(x, out):
        for _ in range(5):
            rmsnorm(x, out=out, backend="native")

    launches.seconds = 1e-3
    threads = [threading.Thread(target=work, args=one) for one in tensors]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    allowed = {(x.data_ptr(), out.data_ptr()) for x, out in tensors}
    found = [tuple(int.from_bytes(words[i][:8], "little") for i in (0, 1)) for _, words in launches.seen]
    assert len(found) == 20 and {one: found.count(one) for one in found} == dict.fromkeys(allowed, 5)


def test_a_stream_has_plans_of_its_own(launches):
    """Memory that an op keeps belongs to one."""
    x, out = torch.randn(4, 64), torch.zeros(4, 9, dtype=torch.int32)
    op = next(op for op in plans._OPS if op._name == "topk")
    current = [0]
    with patch.object(plans, "asked_of", lambda device: lambda device: current[0]):
        for stream in (0, 7, 0):
            current[0] = stream
            for _ in range(4):
                topk(x, 9, out=out, backend="native")
    assert sorted(signature[-1] for signature in op.plans) == [0, 7]


def test_a_body_that_does_more_than_launch_is_never_replayed(launches):
    """Whole every time: what it does besides would be lost."""

    @schema.op("test_more", mutates=("y",))
    class Call(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor
        backend: str

        def check(self):
            pass

        def run(self, backend):
            self.y.copy_(self.x + 1)

    y = torch.zeros(3)
    for n in range(6):
        Call.op(torch.full((3,), float(n)), y, "native")
        assert y.tolist() == [n + 1.0] * 3
    plans._OPS.remove(Call.op)


def test_an_argument_that_is_left_out_is_not_another(launches):
    """As many tensors, of the same kinds."""
    code = host.Uncompiled("kernel", (cutlass.Int32(0), cutlass.Int32(0)))

    @schema.op("test_either", mutates=("y",))
    class Call(NamedTuple):
        x: torch.Tensor
        a: torch.Tensor | None
        b: torch.Tensor | None
        y: torch.Tensor
        backend: str

        def check(self):
            pass

        def run(self, backend):
            values = [cutlass.Int32(int(self.a is None)), cutlass.Int32(int(self.b is None))]
            plans.note(code.function, values)
            native.launch(code.function, values)

    x, a, y = (torch.zeros(3) for _ in range(3))
    for given_a, given_b in [(a, None)] * 4 + [(None, a)] * 4 + [(a, None), (None, a)]:
        ((_, words),) = launches.of(lambda: Call.op(x, given_a, given_b, y, "native"))  # noqa: B023 (called here)
        assert [int.from_bytes(one, "little") for one in words] == [given_a is None, given_b is None]
    plans._OPS.remove(Call.op)


# ------------------------------------------------------------------ cost


def calls_of(call):
    """Python functions that a call calls."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


ROWS = sorted({*host.LAYER, ("rmsnorm", "Flash T 8"), ("add_rmsnorm", "Flash T 8"), ("kv_append", "decode T 8")})
ROWS += [("add_rmsnorm_quant", "Flash fp8 T 8"), ("kv_gather", "Flash K 512 T 8")]


@pytest.mark.parametrize(("op", "shape"), ROWS, ids=lambda x: x)
def test_a_warm_call_is_a_few_python_calls(op, shape):
    """What a busy machine cannot change, in place of a time."""
    rows, _ = harness.chosen([op], shape)
    with torch.no_grad(), host.without_gpu():
        call = host.bound(next(row for row in rows if row.shape == shape), "cpu")
        for _ in range(host.WARM):
            call()
        assert calls_of(call) <= MOST_CALLS
        with patch.object(plans, "plannable", lambda x: False):
            plans.forget()
            assert calls_of(call) > MOST_CALLS, "the bound says nothing"


def test_attention_and_memory_for_parts(launches):
    """Two launches over memory that is another at every call."""
    q = torch.zeros(1, 64, 512, dtype=torch.bfloat16)
    pool = Fp8Pages(kv_entry.LAYOUT.allocate(10, 64), 64)
    index, count = torch.zeros(1, 640, dtype=torch.int32), torch.full((1,), 640, dtype=torch.int32)
    o, lse = torch.empty_like(q), torch.empty(1, 64)

    def call():
        fmha(q, Selected(pool, index, count), o=o, lse=lse, splits=4, backend="native")

    first, second, warm = (launches.of(call) for _ in range(3))
    assert [name.partition("(")[0] for name, _ in warm] == ["DecodeFmha", "Combine"]
    for have, want in zip(warm, first, strict=True):
        assert [len(x) for x in have[1]] == [len(x) for x in want[1]]
        assert [x[8:] for x in have[1]] == [x[8:] for x in want[1]]
    of_parts = [int.from_bytes(warm[1][1][i][:8], "little") for i in (0, 1)]
    assert of_parts[1] - of_parts[0] == 4 * 64 * 512 * 4 and of_parts[0] % 64 == 0 < of_parts[0]
    with host.without_gpu():
        for _ in range(host.WARM):
            call()
        assert calls_of(call) <= MOST_CALLS


# -------------------------------------------------------------- refusals


def test_inputs_that_require_grad_are_refused_by_name():
    weight = torch.nn.Parameter(torch.ones(72))
    for backend in ("reference", "emulator"):
        with pytest.raises(ArgumentError, match="^weight.requires_grad=True"):
            rmsnorm(X, weight, backend=backend)
    with pytest.raises(ArgumentError, match="^x.requires_grad"):
        rmsnorm(X.clone().requires_grad_(), backend="reference")
    with torch.no_grad():
        want = rmsnorm(X, weight, backend="reference")
    with torch.inference_mode():
        assert torch.equal(rmsnorm(X, weight, backend="reference"), want)


def test_a_warm_call_that_requires_grad_is_refused(launches):
    weight, out = torch.ones(72), torch.empty_like(X)
    with torch.enable_grad():
        for _ in range(4):
            rmsnorm(X, weight, out=out, backend="native")
        weight.requires_grad_()
        with pytest.raises(ArgumentError, match="^weight.requires_grad"):
            rmsnorm(X, weight, out=out, backend="native")


def test_autograd_sees_what_a_call_has_changed(launches):
    out = torch.empty_like(X)
    for _ in range(4):
        before = out._version
        rmsnorm(X, out=out, backend="native")
        assert out._version > before


def test_a_warm_call_looks_at_alignment_again(launches):
    buffer = torch.zeros(2048, dtype=torch.bfloat16)
    good, bad = (buffer[at:].as_strided((6, 72), (80, 1)) for at in (0, 1))
    out = torch.empty(6, 72, dtype=torch.bfloat16)
    for _ in range(4):
        rmsnorm(good, out=out, backend="native")
    with pytest.raises(ArgumentError, match=r"^x.stride\(\).*16 bytes"):
        rmsnorm(bad, out=out, backend="native")


BLOCKS = st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 30))


def view(buffer, start, rows, planes, block, pitch):
    return buffer[start:].as_strided((planes, rows, block), (max(rows * pitch, 1), max(pitch, 1), 1))


@EXAMPLES
@given(BLOCKS, BLOCKS)
def test_tensors_that_have_a_byte_in_common_meet(one, two):
    """Never missed; other columns of the same rows are distinguished."""
    buffer = torch.arange(1 << 10, dtype=torch.int32)
    a, b = view(buffer, *one), view(buffer, *two)
    if set(a.flatten().tolist()) & set(b.flatten().tolist()):
        assert meet(span(a), span(b)) and meet(span(b), span(a))
    pitch, ahead = one[4], two[0] - one[0]
    if pitch == two[4] and min(one[1], two[1]) > 1 and one[3] <= ahead and ahead + two[3] <= pitch:
        assert not meet(span(a), span(b)) and not meet(span(b), span(a))  # other columns of the same rows


STRIDES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=3)


@EXAMPLES
@given(STRIDES)
def test_elements_that_share_memory_are_never_missed(dims):
    x = torch.arange(64).as_strided([extent for extent, _ in dims], [stride for _, stride in dims])
    if len(x.flatten().unique()) < x.numel():
        assert meets_itself(x)
    nested = torch.zeros([extent + 1 for extent, _ in dims])
    assert not meets_itself(nested) and not meets_itself(nested[..., ::2].transpose(0, -1))


@pytest.mark.parametrize("steps", [(512, 512, 1), (3 * 512 - 1, 512, 1), (1536, 256, 1)], ids=str)
def test_an_output_that_overlaps_itself_is_refused_by_name(steps):
    """Rows that begin inside another, on every back end; expanded ones are refused before."""
    one, words = inputs.case([5, 9], 3, 16), r"^out\.stride\(\)=.*elements with memory of their own"
    for backend in ("reference", "emulator"):
        out = torch.zeros(9 * 512).bfloat16().as_strided((2, 3, 512), steps)
        with pytest.raises(ArgumentError, match=words):
            mla_decode(*one, out=out, backend=backend)
    apart = torch.zeros(9 * 512).bfloat16().as_strided((2, 3, 512), (512, 1024, 1))  # heads hold requests
    assert torch.equal(mla_decode(*one, out=apart, backend="reference").out, mla_decode(*one, backend="reference").out)


def test_only_outputs_must_not_overlap_themselves():
    alike, op = torch.zeros(1, 4).expand(3, 4), Overlaps(("out", "x"), (0,))
    op.check((torch.zeros(3, 4), alike))
    with pytest.raises(ArgumentError, match=r"^out\.stride\(\)=\(0, 1\)"):
        op.check((alike, torch.zeros(3, 4)))
    op.check((None, alike))


@pytest.mark.parametrize(
    ("sets", "apart", "refused"),
    [([[0], [1]], 96, False), ([[0, 1]], 96, True), ([], 96, True), ([[0], [1]], 80, True)],
)
def test_pages_of_one_pool_may_have_the_same_columns(sets, apart, refused):
    """Of different sets and one pitch: tables keep them apart; anything else is refused."""
    memory = torch.zeros(4000, dtype=torch.uint8)
    pages = memory[:960].view(10, 96)[:, :64], memory[: 10 * apart].view(10, apart)[:, :32]
    one = Overlaps(("out", "state"), (0, 1), one_pool=sets)
    if not refused:
        return one.check(pages)
    with pytest.raises(ArgumentError, match="state"):
        one.check(pages)


def test_outputs_that_overlap_are_refused_by_name():
    y = torch.randn(7, 72).bfloat16()
    for backend in ("reference", "emulator"):
        with pytest.raises(ArgumentError, match="^out='memory of x'"):
            rmsnorm(y[:6], out=y[1:], backend=backend)
    with pytest.raises(ArgumentError, match=r"^out\[1\]='memory of out\[0\]'"):
        add_rmsnorm(X, X, out=(y[:6], y[:6]), backend="reference")
    both = torch.zeros(6, 144, dtype=torch.bfloat16)
    both[:, :72] = X
    want = rmsnorm(X, backend="emulator")
    rmsnorm(both[:, :72], out=both[:, 72:], backend="emulator")
    assert torch.equal(both, torch.cat([X, want], 1))
    with pytest.raises(ArgumentError, match="^out='memory of x'"):
        rmsnorm(both[:, :72], out=both[:, 64:136], backend="emulator")


def test_a_warm_call_that_overlaps_is_refused(launches):
    y = torch.zeros(16, 64, dtype=torch.bfloat16)  # rows of 128 bytes: all lie alike
    for _ in range(4):
        rmsnorm(y[:6], out=y[8:14], backend="native")
    with pytest.raises(ArgumentError, match="^out='memory of x'"):
        rmsnorm(y[8:14], out=y[7:13], backend="native")


def test_what_may_be_in_place_is_right_there():
    """All that is declared, bit by bit and without a hazard."""
    other = X.flip(0).contiguous()
    h, y = add_rmsnorm(X, other, backend="emulator")
    for place in (0, 1):
        given = [X.clone(), other.clone()]
        out = torch.empty_like(X)
        add_rmsnorm(*given, out=(given[place], out), backend="emulator")
        assert torch.equal(given[place], h) and torch.equal(out, y)
        given = [X.clone(), other.clone()]
        add_rmsnorm(*given, out=(given[place], given[1 - place]), backend="emulator")
        assert torch.equal(given[place], h) and torch.equal(given[1 - place], y)
    x = X.clone()
    assert torch.equal(rmsnorm(x, out=x, backend="emulator"), rmsnorm(X, backend="emulator"))
    shared, row_of = other.clone(), torch.tensor([[0, 3], [5, -1], [2, 2], [1, 0], [4, 4], [3, 5]], dtype=torch.int32)
    want = moe_combine(X, row_of, None, other, backend="emulator")
    assert torch.equal(moe_combine(X, row_of, None, shared, out=shared, backend="emulator"), want)
    declared = {op._name: op.overlaps._in_place for op in plans._OPS if op.overlaps._in_place}
    assert set(declared) == {"rmsnorm", "add_rmsnorm", "moe_combine"}
