"""Find the bench modules of the ops. They are ``ops/<op>/bench.py``, and ``bench_<op>.py`` where ops share a kernel."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from dsv4lib import env
from dsv4lib.bench.ops import standins, timing
from dsv4lib.bench.ops.case import Row
from dsv4lib.errors import ArgumentError


def modules(only: Sequence[str] = ()) -> tuple[dict[str, Callable[[], list[Row]]], dict[str, str]]:
    """Return the functions `rows` of the ops' bench modules by op. Also why a module cannot be imported, by its op.

    Raises:
        ArgumentError: ``only`` names an op without a bench module.
    """
    standins.install()
    places = known()
    unknown = sorted(set(only) - set(places))
    if unknown:
        raise ArgumentError("only", ", ".join(unknown), f"ops with rows: {', '.join(sorted(places))}")
    found, broken = {}, {}
    for name in sorted(only or places):
        try:
            found[name] = importlib.import_module(places[name]).rows
        except Exception as error:  # one op's trouble is not the others'
            broken[name] = timing.first_line(error)
    return found, broken


def known() -> dict[str, str]:
    """Return the bench modules by op. ``bench`` beside an op, ``bench_<op>`` beside another op of the same kernel."""
    found = {"layer_chain": "dsv4lib.bench.ops.layer_chain"}
    for path in (env.package() / "ops").glob("*/bench*.py"):
        op = path.parent.name if path.stem == "bench" else path.stem.removeprefix("bench_")
        found[op] = f"dsv4lib.ops.{path.parent.name}.{path.stem}"
    return found
