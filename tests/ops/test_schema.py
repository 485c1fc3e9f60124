"""One annotated record an op: what torch, fakes, errors and the record itself see of its fields."""

from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import plans, schema


class Ring(NamedTuple):
    k: Tensor
    z: Tensor


class Running(NamedTuple):
    parts: Tensor


class Pages(NamedTuple):
    data: Tensor
    size: int = 16


class Record(NamedTuple):
    x: Tensor
    state: Ring | Running
    pages: Pages | None
    out: tuple[Tensor, Tensor | None]
    mode: Literal["a", "b"]
    sizes: tuple[int, ...]
    eps: float
    backend: str

    def check(self):
        if self.x.dim() != 1:
            raise ArgumentError("x.shape", tuple(self.x.shape), "[T]")

    def check_values(self):
        seen.append("values")

    def run(self, backend):
        seen.append(self)
        self.out[0].copy_(self.x + len(self.state))


seen = []
SCHEMA = (
    "(Tensor x, Tensor? state_k, Tensor? state_z, Tensor? state_parts, Tensor? pages_data, int? pages_size, "
    "Tensor(a!) out_0, Tensor(b!)? out_1, str mode, int[] sizes, float eps, str backend) -> ()"
)
X, A, B = (torch.full((3,), float(n)) for n in range(3))
REST = "b", (1, 2), 0.5, "reference"


@pytest.fixture(scope="module")
def registered():
    made = schema.op("test_schema", mutates=("out",), in_place=[("out[0]", "x")], names={"pages.data": "table"})(Record)
    yield made.op
    plans._OPS.remove(made.op)


@pytest.fixture(autouse=True)
def nothing_seen():
    seen.clear()


def test_the_schema_has_the_members_of_groups():
    signature = schema.Signature(Record)
    assert signature.schema(signature.places("out")) == SCHEMA
    assert [leaf.path for leaf in signature.leaves][1:8] == (
        ["state.k", "state.z", "state.parts", "pages.data", "pages.size", "out[0]", "out[1]"]
    )


def test_an_alias_names_an_argument_in_the_schema_alone():
    signature = schema.Signature(Record, {"pages.data": "table"})
    assert signature.schema(signature.places("out")) == SCHEMA.replace("pages_data", "table")
    assert [leaf.path for leaf in signature.leaves] == [leaf.path for leaf in schema.Signature(Record).leaves]


def test_torch_errors_and_overlaps_know_the_fields(registered):
    found = registered._opoverload._schema
    assert str(found) == "dsv4::test_schema" + SCHEMA
    assert registered.names[4:8] == ["table", "pages.size", "out[0]", "out[1]"]
    assert registered.written == [6, 7] and registered.overlaps._in_place == {(6, 0)}


@pytest.mark.parametrize("through_torch", [False, True])
@pytest.mark.parametrize("state", [Ring(A, B), Running(B)], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("pages", [None, Pages(A, 8)], ids=["no pages", "pages"])
def test_the_record_comes_back_whole(registered, through_torch, state, pages):
    record = Record(X, state, pages, (torch.zeros(3), None), *REST)
    if through_torch:
        torch.ops.dsv4.test_schema(*registered._flatten(tuple(record)))
    else:
        registered(*record)
    first, found = seen
    assert first == "values" and type(found) is Record
    assert type(found.state) is type(state) and type(found.pages) is type(pages) and type(found.out) is tuple
    assert all(a is b for a, b in zip(found.state, state, strict=True)) or through_torch
    assert (found.mode, tuple(found.sizes), found.eps) == REST[:3]
    assert pages is None or found.pages.size == 8
    assert record.out[0].tolist() == [len(state)] * 3


def test_fakes_are_checked_and_nothing_else(registered):
    with FakeTensorMode():
        x = torch.empty(3)
        registered(x, Running(x), None, (torch.empty(3), None), *REST)
        with pytest.raises(ArgumentError, match=r"^x\.shape"):
            registered(x[None], Running(x), None, (torch.empty(3), None), *REST)
    assert seen == []


@pytest.mark.parametrize(
    ("name", "state", "pages"),
    [("state.z", (A, None, None), (None, None)), ("state", (A, B, A), (None, None)), ("state.k", (None,) * 3, (A, 1))],
)
def test_parts_of_groups_are_refused_by_name(registered, name, state, pages):
    """What only calls through torch can give."""
    with pytest.raises(ArgumentError) as caught:
        torch.ops.dsv4.test_schema(X, *state, *pages, torch.zeros(3), None, *REST)
    assert caught.value.name == name


def test_what_no_schema_holds_is_refused():
    class Set(NamedTuple):
        x: Tensor
        names: set[str]

    class Nested(NamedTuple):
        x: tuple[Tensor, Pages]

    for record in (Set, Nested):
        with pytest.raises(TypeError, match="nothing that a schema has"):
            schema.Signature(record)
    with pytest.raises(ArgumentError, match="mutates"):
        schema.op("test_unknown", mutates=("y",))(Record)
