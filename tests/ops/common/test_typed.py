"""Types of the ops' arguments: a typed error that names the argument, before torch's schema or an attribute of None."""

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.compressor.op import Batch, Pages, Running, Weights, compressor
from dsv4lib.ops.fmha.op import Fp8Pages, Gathered, Ring, Rows, Selected, fmha
from dsv4lib.ops.kv_gather.op import kv_gather
from dsv4lib.ops.mhc.op import Eps, Site, mhc_pre
from dsv4lib.ops.moe_gemm.op import moe_gemm
from dsv4lib.ops.quantize.op import quantize, quantize_indexer_keys, quantize_kv_entries
from dsv4lib.ops.rmsnorm.op import add_rmsnorm, rmsnorm
from dsv4lib.ops.router.op import router

X = torch.zeros(2, 512, dtype=torch.bfloat16)
Q = torch.zeros(2, 4, 512, dtype=torch.bfloat16)
INDEX = torch.zeros(2, 3, dtype=torch.int32)
PAGES = torch.zeros(1, 1088, dtype=torch.uint8)
SITE = Site(*(torch.zeros(shape) for shape in ((24, 512), (3,), (24,), (128,))))
STREAMS = torch.zeros(1, 4, 128, dtype=torch.bfloat16)
Pair = tuple[torch.Tensor, torch.Tensor | None] | None
WEIGHTS = Weights(*(torch.zeros(1) for _ in range(4)))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", lambda: rmsnorm(None)),
        ("x", lambda: rmsnorm([1.0])),
        ("x.layout", lambda: rmsnorm(X.to_sparse())),
        ("eps", lambda: rmsnorm(X, None, "small")),
        ("eps", lambda: rmsnorm(X, eps=True)),
        ("eps", lambda: rmsnorm(X, eps=-1e-6)),
        ("eps", lambda: rmsnorm(X, eps=float("nan"))),
        ("backend", lambda: rmsnorm(X, backend=None)),
        ("out[1]", lambda: add_rmsnorm(X, X, out=(X, None))),
        ("out", lambda: add_rmsnorm(X, X, out=(X,))),
        ("eps.hc", lambda: mhc_pre(STREAMS, SITE, eps=Eps(float("inf")))),
        ("site", lambda: mhc_pre(STREAMS, tuple(SITE))),
        ("site.base", lambda: mhc_pre(STREAMS, SITE._replace(base=0.0))),
        ("weight.shape", lambda: router(X, X[0], bias=torch.zeros(512))),
        ("k", lambda: router(X.float(), k=-1, bias=torch.zeros(512))),
        ("k", lambda: router(X.float(), k=6.0, bias=torch.zeros(512))),
        ("factor", lambda: router(X.float(), factor=None, bias=torch.zeros(512))),
        ("q", lambda: fmha(Q.tolist())),
        ("q.layout", lambda: fmha(Q.to_sparse())),
        ("entries", lambda: fmha(Q, X)),
        ("entries.index", lambda: fmha(Q, Selected(X, None))),
        ("entries.pool.page", lambda: fmha(Q, Selected(Fp8Pages(PAGES, "1"), INDEX))),
        ("entries.pool.pages", lambda: fmha(Q, Selected(Fp8Pages(X, 1), INDEX))),
        ("window", lambda: fmha(Q, None, Gathered(X, INDEX))),
        ("window.index", lambda: fmha(Q, None, Selected(X, INDEX.float()))),
        ("window.most", lambda: fmha(Q, None, Rows(X, INDEX[0], INDEX[0], 1.5))),
        ("scale", lambda: fmha(Q, scale=float("nan"))),
        ("rope[0]", lambda: fmha(Q, rope=(1.0, X))),
        ("page_size", lambda: kv_gather(PAGES, 1.5, INDEX)),
        ("pages", lambda: kv_gather(None, 16, INDEX)),
        ("kv", lambda: quantize_kv_entries(None, PAGES, 16, INDEX[0])),
        ("kv", lambda: quantize_kv_entries(X.double(), PAGES, 16, INDEX[0])),
        ("keys", lambda: quantize_indexer_keys(X, PAGES, 16, INDEX[0])),
        ("out[1]", lambda: quantize(X, "fp8", out=(X, 1, None))),
        ("x[0]", lambda: moe_gemm((None, None), (X, X), INDEX, INDEX)),
        ("x", lambda: moe_gemm(X, (X, X), INDEX, INDEX)),
        ("weights.sin", lambda: compressor(X, X, WEIGHTS._replace(sin=None), None, None, None)),
        ("state", lambda: compressor(X, X, WEIGHTS, Batch(INDEX, INDEX), PAGES, Pages(PAGES, 16))),
        ("out.form", lambda: compressor(X, X, WEIGHTS, Batch(INDEX, INDEX), Running(X), Pages(PAGES, 16, 1))),
    ],
)
def test_the_error_names_the_argument(name, call):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.name == name and caught.value.allowed


def test_what_is_not_looked_at_and_what_python_says_itself():
    @typed
    def op(x: torch.Tensor, count: int = 1, names: list[str] | None = None, *, given: object = None) -> int:
        return count

    assert op(X, 2, 3, given=4) == 2 and op(x=X) == 1
    assert op.__name__ == "op"
    for call in (lambda: op(), lambda: op(X, 1, None, 1), lambda: op(X, other=1)):
        with pytest.raises(TypeError):
            call()


def test_what_fitted_once_says_nothing_of_other_calls():
    @typed
    def op(x: torch.Tensor, site: Site | None = None, *, count: int = 1, text: str = "", pair: Pair = None) -> int:
        return count

    for _ in range(2):
        assert op(X, SITE, count=2, text="") == op(X, text="", count=2) == op(X, None, pair=(X, None)) + 1 == 2
    for name, call in (
        ("site.base", lambda: op(X, SITE._replace(base=0.0), count=2, text="")),
        ("count", lambda: op(X, count="", text=2)),
        ("pair[0]", lambda: op(X, None, pair=(None, X))),
        ("pair", lambda: op(X, None, pair=(X,))),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.name == name


def test_compiles_without_a_break():
    @typed
    def op(x: torch.Tensor, count: int, site: Site | None = None) -> torch.Tensor:
        return x * count

    compiled = torch.compile(op, fullgraph=True, backend="eager", dynamic=True)
    for count in (2, 3, 5):
        assert torch.equal(compiled(X + 1, count, SITE), (X + 1) * count)


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("window.rings.shape", {"rings": torch.zeros(2, 129, 512, dtype=torch.bfloat16)}),
        ("window.rings.shape", {"rings": X}),
        ("window.request_ids", {"request_ids": torch.tensor([0, 2], dtype=torch.int32)}),
        ("window.request_ids", {"request_ids": torch.tensor([0.0, 1.0])}),
        ("window.request_ids", {"swa_lens": torch.tensor([3], dtype=torch.int32)}),
        ("window.swa_lens", {"swa_lens": torch.tensor(3, dtype=torch.int32)}),
    ],
)
def test_a_ring_is_looked_at_before_it_is_indexed(name, changed):
    given = {"rings": torch.zeros(2, 128, 512, dtype=torch.bfloat16)}
    given |= {n: torch.tensor([0, 1], dtype=torch.int32) for n in ("request_ids", "swa_lens")}
    assert Ring(**given).rows().first.tolist() == [0, 128]
    with pytest.raises(ArgumentError) as caught:
        fmha(Q, None, Ring(**{**given, **changed}))
    assert caught.value.name == name
