"""Register an op from one annotated record. It gives schema, fake implementation, body and the names in errors.

    @op("rmsnorm", mutates=("out",), in_place=[("out", "x")])
    class Call(NamedTuple):
        x: Tensor
        weight: Tensor | None
        out: Tensor
        eps: float
        backend: str

        def check(self) -> None: ...                types, shapes and devices; all that fake tensors see
        def check_values(self) -> None: ...         optional; values, called where reading them costs no wait
        def run(self, backend: str) -> None: ...    what the op does on a device

    Call.op(x, weight, out, eps, backend)           queues a call, see `plans.Op`

A field is a tensor, a number, a text, or a group: a `NamedTuple` or ``tuple[A, B]``, perhaps None, or one of several.
torch sees the members of groups one by one. ``out: tuple[Tensor, Tensor]`` is ``out_0`` and ``out_1`` in the schema,
"out[0]" and "out[1]" in errors, and a tuple again in the record that `check` and `run` see.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.plans import Op
from dsv4lib.ops.common.typed import members_of, parts_of

Record = TypeVar("Record", bound=type)
_TYPES = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str", tuple[int, ...]: "int[]"}


def op(
    name: str,
    *,
    mutates: Iterable[str],
    in_place: Iterable[tuple[str, str]] = (),
    one_pool: Iterable[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
    aliases: Mapping[str, str] = MappingProxyType({}),
    archs: tuple[str, ...] = launching.ARCHS,
) -> Callable[[Record], Record]:
    """Make a record of annotated fields a torch op, ``dsv4::name``.

    It gets an attribute ``op``.

    Args:
        name: of the op. mutates: fields that it writes, groups or members of groups.
        in_place: (output, input) that may be the same memory. one_pool: pages that may be of one pool, see `Overlaps`.
        names: what errors call an argument, where it is not its path in the record.
        aliases: what the schema calls an argument, where its name is not made of its path.
        archs: architectures that it has kernels for.
    """

    def register(record: Record) -> Record:
        signature = Signature(record, aliases)
        first = names.get(signature.leaves[0].path, signature.leaves[0].path)

        def check(*flat: Any) -> None:
            signature.build(flat).check()

        def body(*flat: Any) -> None:
            call = signature.build(flat)
            call.check()
            try:
                backend = launching.resolve(call.backend, first, flat[0], archs)
            except BackendUnavailable as error:
                raise BackendUnavailable(f"op {name}: {error}") from None
            if hasattr(call, "check_values") and launching.on_host(flat[0]):
                call.check_values()
            call.run(backend)

        def checked(*flat: Any) -> None:
            made.check(flat)
            body(*flat)

        written = [i for path in mutates for i in signature.places(path)]
        pairs = [(i, j) for out, given in in_place for i in signature.places(out) for j in signature.places(given)]
        pool = [signature.places(path) for path in one_pool]
        registered = _registered(f"dsv4::{name}", checked, signature.schema(written), signature.names(written))
        registered.register_fake(check)
        shown = [names.get(leaf.path, leaf.path) for leaf in signature.leaves]
        made = record.op = Op(registered, body, check, shown, written, pairs, signature.flatten, pool)
        return record

    return register


class Leaf(NamedTuple):
    """An argument of the schema. path: in the record ("out.codes", "out[0]"). type: in the schema ("Tensor?")."""

    path: str
    type: str
    alias: str | None = None

    @property
    def name(self) -> str:
        """Return its name in the schema: `alias`, or else made of its path."""
        return self.alias or re.sub(r"\W+", "_", self.path).strip("_")


class _Group(NamedTuple):
    """One kind of group that a field may hold: places of its members among the field's, those that must be given."""

    kind: type
    start: int
    stop: int
    needed: tuple[int, ...]


class _Field(NamedTuple):
    """A field of the record: its first place among the leaves, their number, its groups (none: a leaf)."""

    name: str
    start: int
    count: int
    groups: tuple[_Group, ...]
    optional: bool


class Signature:
    """The fields of a record as arguments of a torch op, and back.

    Attributes:
        leaves: the arguments, in order.
        flatten: makes arguments of the values of the fields; None: they are the same.

    Raises:
        TypeError: an annotation that a schema cannot hold.
    """

    def __init__(self, record: type, aliases: Mapping[str, str] = MappingProxyType({})):
        hints = typing.get_type_hints(record)
        self.record = record
        self.leaves: list[Leaf] = []
        self._fields = [self._field(name, hints[name]) for name in inspect.signature(record).parameters]
        self.leaves = [leaf._replace(alias=aliases.get(leaf.path)) for leaf in self.leaves]
        grouped = [(i, field) for i, field in enumerate(self._fields) if field.groups]
        # From the last to the first: places in front of a group stay what they are.
        spread = [(i, (None,) * field.count, _sides(field)) for i, field in reversed(grouped)]
        self.flatten = _flattener(spread) if spread else None

    def _field(self, name: str, hint: Any) -> _Field:
        start, members = len(self.leaves), [one for one in members_of(hint) if one is not types.NoneType]
        optional = types.NoneType in members_of(hint)
        parts = [parts_of(one) for one in members]
        if None in parts:
            self.leaves.append(Leaf(name, _type_of(name, members, optional)))
            return _Field(name, start, 1, (), optional)
        groups = []
        for kind, _, hints in filter(None, parts):
            first, needed = len(self.leaves), []
            for suffix, one in hints.items():
                kinds = [x for x in members_of(one) if x is not types.NoneType]
                lacking = types.NoneType in members_of(one)
                if not lacking:
                    needed.append(len(self.leaves) - start)
                may_lack = lacking or optional or len(parts) > 1
                self.leaves.append(Leaf(name + suffix, _type_of(name + suffix, kinds, may_lack)))
            groups.append(_Group(kind, first - start, len(self.leaves) - start, tuple(needed)))
        return _Field(name, start, len(self.leaves) - start, tuple(groups), optional)

    def places(self, path: str) -> list[int]:
        """Places of the tensors of a field, or of a member of one.

        Raises:
            ArgumentError: there are none.
        """
        found = [i for i, leaf in enumerate(self.leaves) if re.match(rf"{re.escape(path)}([.\[]|$)", leaf.path)]
        found = [i for i in found if self.leaves[i].type.startswith("Tensor")]
        if not found:
            raise ArgumentError("mutates, in_place", path, f"tensors of {[leaf.path for leaf in self.leaves]}")
        return found

    def names(self, places: Iterable[int]) -> tuple[str, ...]:
        """Names in the schema."""
        return tuple(self.leaves[i].name for i in places)

    def schema(self, written: list[int]) -> str:
        """As torch writes it; ``written``: places of what is mutated."""
        alias = {place: f"({chr(ord('a') + n)}!)" for n, place in enumerate(written)}
        texts = (
            f"{leaf.type.replace('Tensor', 'Tensor' + alias.get(i, ''))} {leaf.name}"
            for i, leaf in enumerate(self.leaves)
        )
        return f"({', '.join(texts)}) -> ()"

    def build(self, flat: tuple) -> Any:
        """The record of arguments of the schema.

        Raises:
            ArgumentError: a group of which not all is given that it needs.
        """
        values = {}
        for field in self._fields:
            own = flat[field.start : field.start + field.count]
            values[field.name] = self._group_of(field, own) if field.groups else own[0]
        return self.record(**values)

    def _group_of(self, field: _Field, own: tuple) -> Any:
        given = [i for i, one in enumerate(own) if one is not None]
        if not given and field.optional:
            return None
        for group in field.groups:
            if all(group.start <= i < group.stop for i in given):
                lacking = [self.leaves[field.start + i].path for i in group.needed if own[i] is None]
                if lacking:
                    raise ArgumentError(lacking[0], None, f"given with the rest of {field.name}")
                members = own[group.start : group.stop]
                return members if group.kind is tuple else group.kind(*members)
        raise ArgumentError(field.name, "several", " or ".join(group.kind.__name__ for group in field.groups))


def _type_of(path: str, members: list[Any], optional: bool) -> str:
    """An annotation as a schema writes it: of a ``Literal`` of texts str."""
    if len(members) == 1:
        texts = typing.get_args(members[0]) if typing.get_origin(members[0]) is typing.Literal else ()
        found = "str" if texts and all(isinstance(one, str) for one in texts) else _TYPES.get(members[0])
        if found is not None:
            return found + "?" * optional
    raise TypeError(f"{path}: {members} is nothing that a schema has")


def _flattener(spread: list[tuple[int, tuple, Any]]) -> Callable[[tuple], list]:
    """Spread groups: (place, what stands for None, `_sides`) of each, the last first. Every call passes here."""

    def flatten(values: tuple) -> list:
        flat = [*values]
        for place, blank, sides in spread:
            value = flat[place]
            if value is None:
                value = blank
            elif sides is not None:
                before, after = sides[type(value)]
                value = (*before, *value, *after)
            flat[place : place + 1] = value
        return flat

    return flatten


def _sides(field: _Field) -> dict[type, tuple[tuple, tuple]] | None:
    """By kind of group, what stands for the others before and after it; None: there is one kind."""
    if len(field.groups) == 1:
        return None
    return {one.kind: ((None,) * one.start, (None,) * (field.count - one.stop)) for one in field.groups}


def _registered(name: str, body: Callable[..., None], schema: str, mutates: tuple[str, ...]) -> Any:
    """``torch.library.custom_op`` whose first call does not import torch._dynamo, 1 s in every process.

    torch keeps dynamo out of a custom op's body by `torch._dynamo.disable`, which it imports for it. While nothing
    else has imported dynamo, nothing traces: the body is called as it is, and as torch would call it from then on.
    """
    made = torch.library.custom_op(name, body, mutates_args=mutates, schema=schema)
    guarded = getattr(made, "_backend_fns", {}).get(None)  # torch._compile._disable_dynamo's: keeps what it imports
    inner: Any = getattr(guarded, "__wrapped__", None)
    if inner is None:  # a torch that is made otherwise: right, and a second slower
        return made

    def untraced(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return inner(*args, **kwargs)
        del inner.__dynamo_disable  # torch makes its own
        return guarded(*args, **kwargs)

    inner.__dynamo_disable = untraced
    return made
