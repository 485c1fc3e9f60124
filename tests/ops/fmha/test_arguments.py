"""Arguments of the attention op, one changed at a time: refused by their public names before anything is compiled, or
computed right."""

import dataclasses

import pytest
import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.fmha.inputs import case, paged
from dsv4lib.ops.fmha.op import Fp8Pages, Gathered, Ring, fmha
from dsv4lib.ops.fmha.sources import _flat
from dsv4lib.pages.fmha.run_op import op_arguments

ONE = case(4, [70, 33], [20, 100])
INDEX, RANGE = (op_arguments(ONE, kind, True, rope=True) for kind in ("index", "range"))
Q, RINGS, NONE = ONE.q, torch.zeros(2, 128, 512).bfloat16(), ONE.pool[:0]
PAGES, PAGE = paged(ONE, 7).pool_pages


def ints(*values):
    return torch.tensor(values).int()


def shifted(x):
    """The same numbers in memory that starts one element late."""
    wide = x.new_empty(x.numel() + 1)[1:].view(x.shape)
    return wide.copy_(x)


def selected(**changed):
    return {"entries": INDEX["entries"]._replace(**changed)}


def rows(**changed):
    return {"entries": RANGE["entries"]._replace(**changed)}


def window(**changed):
    return {"window": INDEX["window"]._replace(**changed)}


def ring(ids=(0, 1), lens=(1, 1), rings=RINGS):
    return {"window": Ring(rings, ints(*ids), ints(*lens))}


WRONG = (
    *(("scale", {"scale": x}) for x in (0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-50, 10**400)),
    ("splits", {"splits": 0}),
    ("splits", {"splits": 10**9}),
    ("splits", {"splits": 2**70}),
    (r"q\.stride", {"q": shifted(Q)}),
    (r"q\.stride", {"q": Q.transpose(1, 2).contiguous().transpose(1, 2)}),
    (r"q\.stride", {"q": Q[:1].expand(2, -1, -1)}),
    (r"entries\.index\.stride", selected(index=ONE.index.T.contiguous().T)),
    (r"entries\.index", selected(index=ONE.index + 2**30)),
    (r"entries\.index", selected(pool=NONE)),
    (r"entries\.count=\[2147483647\].* 70 or fewer", selected(count=ints(2**31 - 1, 1))),
    (r"entries\.count\.stride", selected(count=ints(33).expand(2))),
    (r"entries\.pool\.stride", selected(pool=shifted(ONE.pool))),
    (r"entries\.pool\.stride", selected(pool=ONE.pool.T.contiguous().T)),
    (r"entries\.pool\.page=", selected(pool=Fp8Pages(PAGES, 2**40))),
    (r"entries\.pool\.pages", selected(pool=Fp8Pages(PAGES, PAGE + 2))),
    (r"entries\.pool\.stride", selected(pool=Fp8Pages(shifted(PAGES), PAGE))),
    *((r"entries\.most=", rows(most=x)) for x in (-1, 2**31, 2**70)),
    (r"entries\.count.* 3 or fewer", rows(most=3)),
    (r"entries\.first", rows(first=ints(2**31 - 1, 0))),
    (r"window\.most=", window(most=2**31)),
    (r"window\.count", window(count=ints(129, 1))),
    (r"window\.first", window(pool=NONE)),
    (r"window\.request_ids=\[2\]", ring(ids=(0, 2))),
    (r"window\.request_ids", ring(rings=RINGS[:0])),
    (r"window\.swa_lens", ring(lens=(1, 129))),
    (r"o\.stride", {"o": shifted(Q)}),
    (r"lse\.stride", {"lse": torch.zeros(2, 8)[:, ::2]}),
    (r"workspace\.stride", {"splits": 3, "workspace": shifted(torch.zeros(10**5))}),
    (r"rope\.stride", {"rope": (ONE.cos.T.contiguous().T, ONE.sin)}),
    (r"groups\.shape", {"entries": RANGE["entries"], "groups": torch.zeros(0, 2).int()}),
)


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_arguments_are_named_before_anything_is_compiled(number):
    name, changed = WRONG[number]
    before = dataclasses.replace(compile_cache.default().counts)
    with pytest.raises(ArgumentError, match=f"^{name}"):
        fmha(**{**INDEX, **changed}, backend="emulator")
    assert compile_cache.default().counts == before


RIGHT = {
    "a pool without rows that is not read": selected(pool=NONE, index=torch.full_like(ONE.index, -1)),
    "lists without places": selected(index=ONE.index[:, :0], count=ints(0, -1)),
    "gathered entries of no rows": {"entries": Gathered(ONE.pool[:0].view(2, 0, 512))},
    "rings without slots": ring(lens=(0, 0), rings=RINGS[:, :0]),
    "no heads": {"q": Q[:, :0], "sink": ONE.sink[:0]},
    "more parts than tiles": {"splits": 9},
    "a list that could be longer than its pool": rows(most=2**31 - 1),
    "keys that are all NaN for one token": {"q": torch.cat((Q[:1], torch.full_like(Q[1:], float("nan"))))},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", RIGHT)
def test_unusual_arguments_are_computed_right(name):
    given = {**INDEX, **RIGHT[name]}
    (o, lse), wanted = (fmha(**given, backend=backend) for backend in ("emulator", "reference"))
    torch.testing.assert_close(o, wanted[0], rtol=2e-2, atol=2e-2, equal_nan=True)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_the_stride_of_one_page_or_of_pages_of_one_row_says_nothing():
    pool = torch.randn(4, 64)
    for shape, steps in (((1, 4, 64), (7, 64, 1)), ((4, 1, 64), (64, 7, 1))):
        rows, page = _flat("pool", pool.as_strided(shape, steps))
        assert torch.equal(rows, pool) and rows.data_ptr() == pool.data_ptr() and page == 0
    with pytest.raises(ArgumentError, match="without a gap"):
        _flat("pool", torch.randn(2, 3, 64)[:, :2])
