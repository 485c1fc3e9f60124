"""Check op arguments against their annotations, so that errors name the argument."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError, DSV4Error

Function = TypeVar("Function", bound=Callable[..., Any])
Check = Callable[[str, Any], None]
Exact = dict[type, Any]

_compiling = torch.compiler.is_compiling
_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {  # annotation: (types, in words)
    Tensor: ((Tensor,), "a tensor"),
    int: ((int, torch.SymInt), "an int"),
    float: ((float, int, torch.SymFloat, torch.SymInt), "a float"),
    str: ((str,), "a str"),
    bool: ((bool,), "True or False"),
    types.NoneType: ((types.NoneType,), "None"),
}


def typed(function: Function) -> Function:
    """Check the types of a function's arguments before it runs. They are tensors, numbers, texts, groups of them.

    True and False are no numbers. Every member of a `NamedTuple` or ``tuple[A, B]`` is checked ("weights.ape",
    "out[0]"). Annotations of other kinds are not checked. What fitted once is known by its types. Passes torch.compile.

    Raises:
        ArgumentError: an argument is of a type that its annotation does not have (by the function that comes back).
    """
    names = tuple(inspect.signature(function).parameters)
    hints = typing.get_type_hints(function)
    checks = {name: check for name in names if (check := _check_of(hints.get(name))) is not None}
    exact = {name: _exact_of(hints[name]) if name in checks else None for name in names}
    in_order = tuple(exact.values())
    known: dict[tuple, tuple[tuple[int, set], ...]] = {}  # by types and names: (place, types that fit) of each group
    members: dict[tuple, set] = {}  # types that fit, by name and kind of a group

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        groups = None if _compiling() else known.get((*map(type, values), *kwargs))
        if groups is None:
            look(args, kwargs)
        else:
            for place, kinds in groups:
                if tuple(map(type, values[place])) not in kinds:
                    look(args, kwargs)
                    break
        try:
            return function(*args, **kwargs)
        except DSV4Error:
            raise
        except Exception:
            closer(args, kwargs)  # a tensor that is not strided, for which torch has words of its own
            raise

    def look(args: tuple, kwargs: dict[str, Any]) -> None:
        if not (_fit(in_order, args) and _fit(map(exact.get, kwargs), kwargs.values())):
            closer(args, kwargs)
        elif not _compiling():
            remember([*zip(names, args, strict=False), *kwargs.items()], (*args, *kwargs.values()), kwargs)

    def remember(given: list[tuple[str, Any]], values: tuple, kwargs: dict[str, Any]) -> None:
        groups = []
        for place, (name, value) in enumerate(given):
            fields = (exact.get(name) or {}).get(type(value), True)
            if fields is True:
                continue
            if any(one is not None and one[type(x)] is not True for one, x in zip(fields, value, strict=True)):
                return  # a group in a group
            kinds = members.setdefault((name, type(value)), set())
            kinds.add(tuple(map(type, value)))
            groups.append((place, kinds))
        known[(*map(type, values), *kwargs)] = tuple(groups)

    def closer(args: tuple, kwargs: dict[str, Any]) -> None:
        for i, value in enumerate(args[: len(names)]):  # more than there are: Python's own TypeError
            if names[i] in checks:
                checks[names[i]](names[i], value)
        for name, value in kwargs.items():
            if name in checks:
                checks[name](name, value)

    return typing.cast(Function, checked)


def _fit(exact: Iterable[Exact | None], values: Iterable[Any]) -> bool:
    """Tell whether every value is of an exact type that needs no closer look."""
    for kinds, value in zip(exact, values):  # noqa: B905 (fewer values than parameters)
        if kinds is None:
            continue
        fields = kinds.get(type(value), False)
        if fields is not True and (fields is False or len(fields) != len(value) or not _fit(fields, value)):
            return False
    return True


def members_of(hint: Any) -> tuple:
    """Return the members of a union, None as its type.

    Of another annotation itself.
    """
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def parts_of(hint: Any) -> tuple[type, str, dict[str, Any]] | None:
    """Take a `NamedTuple` or ``tuple[A, B]`` apart. Type, in words, and members' annotations; None: it is neither.

    Members are keyed by what follows the name of the whole: ".ape", "[0]".
    """
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        hints = typing.get_type_hints(hint)
        return hint, f"a {hint.__name__}", {f".{name}": hints.get(name) for name in hint._fields}
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is tuple and inner and ... not in inner:
        return tuple, f"{len(inner)} in a tuple", {f"[{i}]": one for i, one in enumerate(inner)}
    return None


def _exact_of(hint: Any) -> Exact:
    """Collect the exact types that an annotation takes: True, or those of its members."""
    found: dict[type, Any] = {}
    for one in members_of(hint):
        group = _group_of(one)
        if group is not None:
            found[group.kind] = group.exact
        elif one is Tensor:
            found |= {Tensor: True, torch.nn.Parameter: True}
        else:
            found |= dict.fromkeys(_PLAIN[one][0], True)
    return found


def _check_of(hint: Any) -> Check | None:
    """Make the check of an argument of this annotation; None: it has none."""
    members = members_of(hint)
    plain = [_PLAIN[one] for one in members if one in _PLAIN]
    groups = [group for one in members if (group := _group_of(one)) is not None]
    if len(plain) + len(groups) < len(members):
        return None
    wanted = sum((kinds for kinds, _ in plain), ())
    numbers = bool not in members
    words = " or ".join([*(group.words for group in groups), *(text for _, text in plain)])

    def check(name: str, value: Any) -> None:
        for group in groups:
            if isinstance(value, group.kind) and len(value) == len(group.fields):
                for (place, of_field), one in zip(group.fields, value, strict=True):
                    if of_field is not None:
                        of_field(name + place, one)
                return
        if not isinstance(value, wanted) or (numbers and isinstance(value, bool)):
            shown = value if isinstance(value, (bool, int, float, str, types.NoneType)) else type(value).__name__
            raise ArgumentError(name, shown, words)
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise ArgumentError(f"{name}.layout", value.layout, "torch.strided")

    return check


class _Group(NamedTuple):
    """A `NamedTuple`, or a tuple of so many.

    Attributes:
        fields: (what follows the name of the whole, check or None) of each. exact: of each, `_exact_of` or None.
    """

    kind: type
    words: str
    fields: tuple[tuple[str, Check | None], ...]
    exact: tuple[Exact | None, ...]


def _group_of(hint: Any) -> _Group | None:
    """Checks of the members of a `NamedTuple` or ``tuple[A, B]``; None: another annotation."""
    parts = parts_of(hint)
    if parts is None:
        return None
    kind, words, hints = parts
    checks = {name: _check_of(one) for name, one in hints.items()}
    exact = tuple(None if checks[name] is None else _exact_of(one) for name, one in hints.items())
    return _Group(kind, words, tuple(checks.items()), exact)
