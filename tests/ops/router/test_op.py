"""Router, dispatch and combine as PyTorch sees them: back ends, schemas, fakes, torch.compile, bad arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.moe_dispatch.op import Dispatch, max_rows, moe_dispatch
from dsv4lib.ops.router.op import TOGETHER, Hashed, Workspace, router, tile_of, workspace

T, E, K, DEPTH, FACTOR = 5, 24, 6, 128, 1.5
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(T, DEPTH, generator=GENERATOR).bfloat16()
WEIGHT = (torch.randn(E, DEPTH, generator=GENERATOR) * DEPTH**-0.5).bfloat16()
BIAS = 0.3 * torch.randn(E, generator=GENERATOR)
TABLE = torch.rand(11, E, generator=GENERATOR).argsort(-1)[:, :K]
TOKENS = torch.randint(11, (T,), generator=GENERATOR)
LOGITS = X.float() @ WEIGHT.float().T
HASHED = Hashed(TABLE, TOKENS)


def settings(**changed):
    return {"k": K, "factor": FACTOR, "bias": BIAS, "backend": "emulator", **changed}


def routes():
    return router(LOGITS, **settings(backend="reference"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_router_on_both_back_ends(fused, hashed):
    given = (X, WEIGHT) if fused else (LOGITS,)
    chosen = {"bias": None, "hashed": HASHED} if hashed else {}
    experts, weights = router(*given, **settings(**chosen))
    want = router(*given, **settings(**chosen, **{"backend": "reference"}))
    assert torch.equal(experts, want[0]) and experts.dtype == torch.int32
    assert float(((weights - want[1]) / want[1]).abs().max()) < 2.0**-20
    assert torch.allclose(weights.sum(1), torch.full((T,), FACTOR))
    if hashed:
        assert torch.equal(experts.long(), TABLE[TOKENS])


def test_a_layer_of_experts_through_all_three():
    """Route, permute, multiply each row by its expert's number, combine: the sum that the routes name."""
    experts, weights = router(LOGITS, **settings())
    found = moe_dispatch(experts, weights, count=E, backend="emulator")
    want = moe_dispatch(experts, weights, count=E, backend="reference")
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    owner = torch.bucketize(torch.arange(len(found.rows)), found.offsets[1:].long(), right=True)
    y = torch.where(found.rows[:, None] >= 0, X[found.rows] * owner[:, None], float("nan")).bfloat16()
    exact = (weights.double()[..., None] * (experts[..., None] * X[:, None]).bfloat16()).sum(1)
    for backend in ("emulator", "reference"):
        out = moe_combine(y, found.row_of, weights, X, backend=backend)
        assert bool(((out - exact - X).abs() <= 2.0**-8 * (exact + X).abs() + 1e-6).all())


def test_outputs_and_workspace_of_the_caller():
    """Written in place; slots are zero again, so a workspace serves the next call."""
    space = workspace(T, E, "cpu")
    out = torch.zeros(T, K, dtype=torch.int32), torch.zeros(T, K)
    for _ in range(2):
        back = router(X, WEIGHT, **settings(space=space, out=out))
        assert back[0] is out[0] and back[1] is out[1] and not space.slots.any()
    fresh = router(X, WEIGHT, **settings())
    assert torch.equal(out[0], fresh[0]) and torch.equal(out[1], fresh[1])


def test_no_tokens():
    empty = torch.empty(0, E)
    assert [tuple(x.shape) for x in router(empty, **settings())] == [(0, K), (0, K)]
    for max_m in (0, 128):
        for backend in ("emulator", "reference"):
            given = torch.empty(0, K, dtype=torch.int32), torch.empty(0, K)
            found = moe_dispatch(*given, count=E, max_m=max_m, backend=backend)
            assert not found.counts.any() and torch.equal(found.offsets, torch.arange(E + 1).int() * max_m)
            assert bool((found.rows == -1).all()) and not found.row_weight.any() and len(found.rows) == E * max_m
    none = moe_combine(X[:0], torch.full((T, K), -1).int(), shared=X, backend="emulator")
    assert torch.equal(none, X)


def test_schemas_and_fake_implementations_agree_with_the_ops():
    """torch's own check of what is mutated, of fakes and of tracing."""
    experts, weights = routes()
    ops, backend = torch.ops.dsv4, "reference"
    found = moe_dispatch(experts, weights, count=E, backend=backend)
    y = torch.randn(len(found.rows), DEPTH).bfloat16()
    calls = {
        ops.router: (LOGITS, None, BIAS, None, None, experts.clone(), weights.clone(), None, FACTOR, backend),
        ops.moe_dispatch: (experts, weights, *(x.clone() for x in found), 128, 0, backend),
        ops.moe_combine: (y, found.row_of, weights, X, torch.zeros_like(X), backend),
    }
    with torch.no_grad():
        for op, given in calls.items():
            result = torch.library.opcheck(op.default, given)
            assert set(result.values()) == {"SUCCESS"}, (op, result)


def test_fakes_of_any_size_compile_nothing():
    before = compile_cache.default().counts.compiled
    with FakeTensorMode():
        x, weight = torch.empty(4096, 7168).bfloat16(), torch.empty(384, 7168).bfloat16()
        experts, weights = router(x, weight, bias=torch.empty(384))
        found = moe_dispatch(experts, weights, count=384)
        assert found.rows.shape == (max_rows(4096, 6, 384),) and found.row_of.shape == (4096, 6)
        out = moe_combine(torch.empty(len(found.rows), 7168).bfloat16(), found.row_of, shared=x)
        assert (out.shape, out.dtype) == (x.shape, torch.bfloat16)
    assert compile_cache.default().counts.compiled == before


def test_torch_compile_takes_them_whole():
    def layer(x, bias):
        experts, weights = router(x * 0.5, **settings(bias=bias))
        found = moe_dispatch(experts, weights, count=E, backend="emulator")
        y = torch.where(found.rows[:, None] >= 0, x[found.rows][:, :16], 0).bfloat16()
        return moe_combine(y, found.row_of, weights, backend="emulator") + 1

    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(LOGITS, BIAS), layer(LOGITS, BIAS))


def test_a_tokens_bits_are_those_of_any_form_and_number_of_launches():
    x, weight, bias = torch.randn(TOGETHER + 7, 128).bfloat16(), torch.randn(E, 128).bfloat16(), torch.randn(E)
    whole = router(x, weight, k=3, bias=bias, backend="emulator")
    for rows in (slice(0, 3), slice(5, 30), slice(63, 103), slice(112, 130)):
        part = router(x[rows], weight, k=3, bias=bias, backend="emulator")
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True))
    assert len({tuple(tile_of(n, E, 128).items()) for n in (1, 9, 17, 33)}) == 4


def test_bad_arguments_are_named():
    experts, weights = routes()
    nan, wide = LOGITS.clone(), torch.randn(T, 96).bfloat16()
    nan[2, 3] = float("nan")
    out = experts, weights
    for given, changed, name in (
        ((LOGITS[0],), {}, "x"),
        ((LOGITS.double(),), {}, "x"),
        ((nan,), {}, "x"),
        ((LOGITS,), {"bias": BIAS[1:]}, "bias"),
        ((LOGITS,), {"bias": None}, "bias"),
        ((LOGITS,), {"hashed": HASHED}, "bias"),
        ((LOGITS,), {"bias": None, "hashed": Hashed(TABLE + E, TOKENS)}, "hashed.table"),
        ((LOGITS,), {"k": 17}, "k"),
        ((LOGITS,), {"out": (experts.long(), weights)}, r"out\[0\]"),
        ((LOGITS,), {"out": out, "k": 5}, r"out\[0\]"),
        ((wide, WEIGHT[:, :96]), {}, "x.shape"),
        ((X, WEIGHT[:, :64]), {}, "weight"),
        ((X, WEIGHT), {"space": Workspace(torch.zeros(7))}, "space.slots"),
        ((LOGITS,), {"backend": "magic"}, "backend"),
    ):
        with pytest.raises(ArgumentError, match=name):
            router(*given, **settings(**changed))
    found = moe_dispatch(experts, weights, count=E, backend="reference")
    for given, changed, name in (
        ((experts.long(), weights), {}, "experts"),
        ((experts, weights[:, 1:]), {}, "weights"),
        ((experts, weights), {"count": 513}, "count"),
        ((experts, weights), {"align": 6}, "align"),
        ((experts, weights), {"max_m": 100}, "max_m"),
        ((torch.zeros(200, K).int(),), {"max_m": 256}, "max_m"),
        ((experts, weights), {"out": Dispatch(*found[:2], found.rows[4:], found.row_of, found.row_weight[4:])}, "rows"),
        ((experts,), {"out": found}, "row_weight"),
    ):
        with pytest.raises(ArgumentError, match=name):
            moe_dispatch(*given, **{"count": E, "backend": "reference", **changed})
    for given, changed, name in (
        ((X.float(), experts), {}, "y"),
        ((X, experts), {"shared": X[1:]}, "shared"),
        ((X[:, :12], experts), {}, "y"),
        ((X, experts, weights[1:]), {}, "weights"),
    ):
        with pytest.raises(ArgumentError, match=name):
            moe_combine(*given, **{"backend": "reference", **changed})
