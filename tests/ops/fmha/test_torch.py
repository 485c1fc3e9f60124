"""The op as PyTorch sees it: schema, fake tensors, torch.compile, CUDA graphs; back ends; bad arguments."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib import backends, emulator
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.fmha import op
from dsv4lib.ops.fmha.faults import FAULTS
from dsv4lib.ops.fmha.inputs import case
from dsv4lib.pages.fmha.run_case import bits
from dsv4lib.pages.fmha.run_op import native_path, op_arguments, replaced

ONE = case(64, [70, 20], [30, 0])


def arguments(one=ONE, kind="index", **changed):
    return {**op_arguments(one, kind, True, rope=True), "backend": "emulator", **changed}


def flat(splits=1, backend="emulator"):
    """Arguments of `torch.ops.dsv4.fmha`."""
    o, lse = torch.zeros_like(ONE.q), torch.zeros(2, 64)
    entries = ONE.pool, None, ONE.count, 0, 70, ONE.index
    window = ONE.span, ONE.window_first, ONE.window_count, 0, 128
    return (
        ONE.q,
        *entries,
        *window,
        None,
        None,
        ONE.sink,
        ONE.cos,
        ONE.sin,
        o,
        lse,
        None,
        ONE.scale,
        True,
        splits,
        backend,
    )


# -------------------------------------------------------------- what torch knows


def test_the_schema_says_what_is_written():
    schema = torch.ops.dsv4.fmha.default._schema
    assert [x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write] == ["o", "lse", "workspace"]


def test_schema_and_fake_implementation_agree_with_the_op():
    """torch's own check: what is mutated, that fakes and reals behave alike, that tracing works."""
    with torch.no_grad():
        found = torch.library.opcheck(torch.ops.dsv4.fmha.default, flat(backend="reference"))
    assert set(found.values()) == {"SUCCESS"}, found


def fetched():
    """How many kernels were compiled and how many were read from disk so far."""
    return compile_cache.default().counts.compiled, compile_cache.default().counts.from_disk


def test_fakes_of_any_size_compile_nothing():
    """A batch that this machine could not hold; wrong shapes are refused before anything runs."""
    before = dataclasses.replace(compile_cache.default().counts)
    with FakeTensorMode():
        q = torch.empty(4096, 128, 512, dtype=torch.bfloat16)
        pool = torch.empty(1 << 20, 64, 512, dtype=torch.bfloat16)
        index = torch.empty(4096, 1024, dtype=torch.int32)
        sink = torch.empty(128)
        o, lse = op.fmha(q, op.Selected(pool, index), sink=sink)
        assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (4096, 128), torch.float32)
        for name, bad in (("sink", {"sink": sink[1:]}), ("o", {"o": q[1:]}), ("lse", {"lse": q[..., 0]})):
            with pytest.raises(ArgumentError, match=name):
                op.fmha(q, op.Selected(pool, index), **{"sink": sink, **bad})
        with pytest.raises(ArgumentError, match="entries.index"):
            op.fmha(q, op.Selected(pool, index[1:]))
    assert compile_cache.default().counts == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_takes_it_whole(dynamic):
    """One graph, no break, work before and after it; the same bits; a second batch compiles no kernel."""

    def layer(q, pool, index, count, rings, ids, lens, sink, cos, sin):
        ring = op.Ring(rings, ids, lens)
        o, lse = op.fmha(q * 0.5, op.Selected(pool, index, count), ring, sink=sink, rope=(cos, sin), splits=1)
        return o.float() * 2 + lse[..., None]

    rings = torch.randn(2, 128, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, lens = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([17, 128], dtype=torch.int32)
    given = ONE.q, ONE.pool, ONE.index, ONE.count, rings, ids, lens, ONE.sink, ONE.cos, ONE.sin
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert bits(fast(*given)) == bits(layer(*given))
    before = fetched()
    one_token = [x[:1] if x.shape[0] == 2 and x is not rings and x is not lens else x for x in given]
    assert bits(fast(*one_token)) == bits(layer(*one_token))
    assert fetched() == before


def test_a_second_call_compiles_nothing():
    cache = compile_cache.default()
    op.fmha(**arguments(splits=2))
    before, from_memory = fetched(), cache.counts.from_memory
    op.fmha(**arguments(splits=2))
    assert fetched() == before
    assert cache.counts.from_memory == from_memory + 2


def test_a_warmed_up_call_compiles_nothing():
    compile_cache.default().clear()
    seconds = op.warm_up([{"entries": "index", "window": True, "inverse_rope": True}])
    joins = [name for name in seconds if "Combine" in name]
    assert len(joins) == 2 and len([name for name in seconds if "Fmha" in name]) == 4  # parts of keys, of dimensions
    before = fetched()
    for splits in (1, 2, 5):  # the join of 5 loads more of them at once
        op.fmha(**arguments(splits=splits))
    assert fetched() == before


def test_outputs_and_workspace_of_the_caller():
    """Written in place, rows of any stride, nothing past the last head; a workspace may be longer than needed."""
    o, lse = ONE.outputs()
    workspace = torch.full((op.workspace_size(2, 64, 512, 2) + 5,), float("nan"))
    back = op.fmha(**arguments(o=o, lse=lse, splits=2, workspace=workspace))
    assert back[0] is o and back[1] is lse
    fresh = op.fmha(**arguments(splits=2))
    assert [bits(x) for x in back] == [bits(x) for x in fresh]
    assert workspace[-5:].isnan().all() and not workspace[:-5].isnan().any()
    assert o._base[..., 64:, :].isnan().all()


@pytest.fixture
def as_native():
    op.warm_up([{"entries": "index", "window": True, "inverse_rope": True}])
    with native_path() as gpu:
        yield gpu


@pytest.mark.one_in(2)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_cuda_graph_holds_it(as_native, splits):
    """Captured on a stream: kernel launches, views and allocations, no other work and no wait; replays see new data."""
    there = case(64, [70, 20], [30, 0]).to("cuda")
    o, lse = torch.zeros_like(there.q), torch.zeros(2, 64)
    given = op_arguments(there, "index", True, rope=True) | {"o": o, "lse": lse, "splits": splits}
    given["workspace"] = torch.zeros(op.workspace_size(2, 64, 512, 2))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.cuda.graph(graph):
        op.fmha(**given)
    assert len(as_native.launches) == 0 and not o.any()
    graph.replay()
    assert len(as_native.launches) == splits and as_native.hazards == []
    first = o.clone()
    there.q.neg_()
    there.count[0] = 3
    graph.replay()
    assert not torch.equal(o, first)
    before = o.clone()
    op.fmha(**given)
    assert torch.equal(o, before)


def test_the_stream_is_torchs_current_one(as_native, monkeypatch):
    streams = []
    monkeypatch.setattr(backends, "enqueue", lambda name, code, *args: streams.append(int(args[-1])))
    there = ONE.to("cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op.fmha(**op_arguments(there, "index", True, rope=True), splits=2)
    assert streams == [stream.cuda_stream] * 2


def test_work_that_a_graph_would_not_repeat_is_seen(as_native):
    """The check above can fail: default counts are filled by a kernel of torch's."""
    there = ONE.to("cuda")
    given = op_arguments(there, "index", True, rope=True) | {"entries": op.Selected(there.pool, there.index)}
    with pytest.raises(LaunchError, match=r"torch\.full"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        op.fmha(**given)


# -------------------------------------------------------------------- back ends


def test_the_reference_is_the_same_function():
    for kind in ("index", "range", "none"):
        o, lse = op.fmha(**arguments(kind=kind))
        expected, expected_lse = op.fmha(**arguments(kind=kind, backend="reference"))
        assert (o.double() - expected.double()).norm() <= 3e-3 * expected.double().norm()
        torch.testing.assert_close(lse, expected_lse, atol=3e-6, rtol=1e-6)


def test_auto_is_native_else_emulator_and_never_falls_back(monkeypatch):
    tried = []

    def enqueue(name, *args):
        tried.append(name)
        raise RuntimeError("it stopped")

    monkeypatch.setattr(backends, "enqueue", enqueue)
    with pytest.raises(RuntimeError, match="it stopped"):
        op.fmha(**arguments(backend="auto"))
    assert tried == [backends.resolve("auto")]
    with pytest.raises(ArgumentError, match="backend='gpu'"):
        op.fmha(**arguments(backend="gpu"))
    if not backends.status("native").available:
        with pytest.raises(BackendUnavailable, match="native"):
            op.fmha(**arguments(backend="native"))


def test_hazards_do_not_pass_in_silence():
    """A faulty kernel in place of the right one: its race becomes a warning even if the device is not read."""
    with emulator.device("sm_100a", shims=False, checks="race"), replaced(FAULTS["SumOverMaximum"]):
        with pytest.warns(UserWarning, match="the emulator reports .* hazards, first: "):
            op.fmha(**arguments(splits=1))


# ---------------------------------------------------------------- bad arguments

BAD = {
    "q": [{"q": None}, {"q": ONE.q[0]}, {"q": ONE.q.float()}, {"q": ONE.q[..., :96]}],
    "entries": [{"entries": (ONE.pool, ONE.index)}, {"entries": ONE.pool}],
    r"entries\.pool": [
        {"entries": op.Selected(ONE.pool.float(), ONE.index)},
        {"entries": op.Selected(ONE.pool[:, :64], ONE.index)},
        {"entries": op.Selected(ONE.pool[0], ONE.index)},
        {"entries": op.Selected(ONE.pool[:60].view(12, 5, 512)[:, :4], ONE.index)},
    ],
    r"entries\.index": [
        {"entries": op.Selected(ONE.pool, ONE.index.long())},
        {"entries": op.Selected(ONE.pool, ONE.index[0])},
        {"entries": op.Selected(ONE.pool, ONE.index[:1])},
        {"entries": op.Selected(ONE.pool, torch.full_like(ONE.index, len(ONE.pool)))},
    ],
    r"entries\.count": [
        {"entries": op.Selected(ONE.pool, ONE.index, ONE.count[:1])},
        {"entries": op.Selected(ONE.pool, ONE.index, ONE.count + 1)},
        {"entries": op.Rows(ONE.pool, ONE.first, ONE.count, 60)},
        {"entries": op.Rows(ONE.pool, ONE.first, ONE.count + 1, int(ONE.count.max()))},
    ],
    r"entries\.first": [
        {"entries": op.Rows(ONE.pool, ONE.first.long(), ONE.count)},
        {"entries": op.Rows(ONE.pool, ONE.first + len(ONE.pool), ONE.count)},
        {"entries": op.Rows(ONE.pool, ONE.first - 1, ONE.count)},
    ],
    r"entries\.kv": [{"entries": op.Gathered(ONE.pool)}, {"entries": op.Gathered(ONE.pool[None])}],
    "window": [{"window": ONE.span}],
    r"window\.rings": [{"window": op.Ring(ONE.span, ONE.count, ONE.count)}],
    r"window\.count": [{"window": op.Rows(ONE.span, ONE.window_first, ONE.window_count, 20)}],
    "sink": [{"sink": ONE.sink[1:]}, {"sink": ONE.sink.double()}],
    "rope": [{"rope": (ONE.cos[:1], ONE.sin)}, {"rope": (ONE.cos, ONE.sin[:, 1:])}],
    "o": [{"o": torch.zeros(2, 64, 512)}, {"o": torch.zeros(2, 63, 512).bfloat16()}],
    r"o\.stride": [{"o": torch.zeros(2, 64, 513).bfloat16()[..., :512]}],
    "lse": [{"lse": torch.zeros(2, 63)}, {"lse": torch.zeros(2, 64).double()}],
    "splits": [{"splits": -1}, {"splits": 0}],
    "workspace": [{"splits": 2, "workspace": torch.zeros(9)}, {"workspace": torch.zeros(9, 9)}],
}


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, values in BAD.items() for bad in values])
def test_bad_arguments_are_named(name, bad):
    with pytest.raises(ArgumentError, match=rf"^{name}"):
        op.fmha(**arguments(**{"splits": 1, **bad}))
