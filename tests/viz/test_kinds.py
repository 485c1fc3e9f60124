"""Colours: one table, none by order of appearance, in the library, on pages and in notebooks."""

from __future__ import annotations

import ast
import json
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_hex

from dsv4lib import env
from dsv4lib.errors import ArgumentError
from dsv4lib.lab.day_one.reading import VERDICTS
from dsv4lib.pages.emulator.figures import BYTES, CELLS
from dsv4lib.viz import bars, grids, history, kinds, model, roofline, style, timeline, times, tma, tmem
from dsv4lib.viz.tile import Part, tile_picture

LIBRARY = env.root() / "dsv4lib"
HOME = {LIBRARY / "viz" / "kinds.py", LIBRARY / "viz" / "style.py"}
DRAWING = {
    "plot",
    "bar",
    "barh",
    "broken_barh",
    "hist",
    "scatter",
    "fill_between",
    "stairs",
    "step",
    "vlines",
    "hlines",
}
COLOUR = {"color", "colors", "facecolor", "facecolors", "c", "edgecolor", "markeredgecolor", None}  # None: **style
NAMES = ("alpha", "beta", "gamma", "delta")
TOGETHER = (  # kinds that one figure shows
    ("runs", "waits: mbarrier", "waits: barrier", "copy in flight", "MMA", "commit"),
    tuple(CELLS.values()),
    tuple(dict.fromkeys(BYTES.values())),
    ("even phase", "odd phase", "a warp waits for it"),
    ("Q", "KV", "S", "P", "O"),
    ("W", "X", "D", "scales of W", "scales of X", "exchange"),
    ("SWA", "CSA", "HCA"),
    ("window", "csa", "keys", "hca", "csa_state", "keys_state", "hca_state", "cached"),
    ("tensor core", "TMEM", "TMA", "barriers", "warp", "memory", "scalar"),
    ("given", "product", "transform", "choice", "storage", "result"),
    ("mHC", "attention", "experts", "choice", "projection", "norm"),
    ("tiles of keys", "starts", "combine"),
    ("routes and counts", "tokens pulled", "L1", "L2", "results returned"),
    ("old", "known", "accepted", "rejected"),
    ("draft", "target", "accepted"),
    VERDICTS,
    ("a run", "noise", "worse", "better", "open"),
    ("passed", "failed", "error", "skipped", "not judged"),
)


def sources() -> list[tuple[str, ast.Module]]:
    """Every module that may draw and every notebook's code."""
    found = [(str(p.relative_to(env.root())), p.read_text()) for p in LIBRARY.rglob("*.py") if p not in HOME]
    for path in sorted((env.root() / "notebooks").glob("*.ipynb")):
        code = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        found.append((path.name, "\n".join(code)))
    return [(name, ast.parse(text)) for name, text in found if "viz" in text or "matplotlib" in text or "/viz/" in name]


def breaches(name: str, tree: ast.Module) -> list[str]:
    """Lines that take a colour elsewhere than from the table."""
    out = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Name | ast.Attribute)
            and (getattr(node, "id", "") or getattr(node, "attr", "")) == "PALETTE"
        ):
            out.append(f"{name}:{node.lineno}: PALETTE")
        if isinstance(node, ast.Constant) and node.value in style.PALETTE:
            out.append(f"{name}:{node.lineno}: {node.value}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DRAWING:
            owner = ast.unparse(node.func.value)
            drawn = owner.split(".")[-1].split("[")[0] in (
                "ax",
                "axis",
                "left",
                "right",
                "linear",
                "powers",
                "bars",
                "lines",
            )
            if drawn and not {keyword.arg for keyword in node.keywords} & COLOUR:
                out.append(f"{name}:{node.lineno}: {node.func.attr} without a colour")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("kinds.colour", "colour", "kind_colour"):
            (kind,) = node.args
            if isinstance(kind, ast.Constant) and kinds.kind_of(kind.value) is None:
                out.append(f"{name}:{node.lineno}: no kind {kind.value}")
    return out


def test_no_colour_is_taken_elsewhere_than_from_the_table() -> None:
    assert not [found for name, tree in sources() for found in breaches(name, tree)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("c = PALETTE[i % 8]", "PALETTE"),
        ("c = style.PALETTE[2]", "PALETTE"),
        ('c = "#E69F00"', "#E69F00"),
        ("ax.plot(x, y)", "without a colour"),
        ('c = kinds.colour("nothing known")', "no kind"),
        ('ax.plot(x, y, color=kinds.colour("MMA"))', ""),
        ("ax.plot(x, y, **look)", ""),
    ],
)
def test_the_rule_finds_what_it_is_for(text: str, said: str) -> None:
    found = breaches("x", ast.parse(text))
    assert (not found) if not said else len(found) == 1 and said in found[0]


@pytest.mark.parametrize("group", TOGETHER, ids=lambda group: group[0])
def test_kinds_that_one_figure_shows_differ(group: tuple[str, ...]) -> None:
    for a, b in combinations(group, 2):
        assert kinds.colour(a) != kinds.colour(b), (a, b)
    assert list(kinds.colours(group).values()) == [kinds.colour(kind) for kind in group]


def test_a_name_has_its_kind_with_and_without_a_number() -> None:
    assert kinds.colour("S 1") == kinds.colour("S") != kinds.colour("P 1")
    assert kinds.kind_of("O 128-255") == kinds.kind_of("O, 64 x 512") == "O" and kinds.kind_of("Oval") is None
    assert kinds.kind_of("W scales 3") == "scales of W" and kinds.kind_of("CSA entries") == "CSA"
    with pytest.raises(ArgumentError, match="kind='Oval'"):
        kinds.colour("Oval")


def test_colours_follow_from_the_names_and_not_from_their_order() -> None:
    known = kinds.colours(["MMA", *NAMES])
    assert len(set(known.values())) == len(known)
    for shift in range(5):
        assert kinds.colours([*NAMES[shift:], "MMA", *NAMES[:shift]]) == known
    assert list(kinds.colours(["b", "a", "b"])) == ["b", "a"]


def tracks(names):
    return [timeline.Track(f"row {n}", [0.0], [1.0], [n]) for n in names]


def lines(names):
    return {name: np.arange(1.0, 4.0) for name in names}


def stacked(names):
    return bars.Panel("p", [9.0], "{:.0f}", parts={name: [1.0] for name in names})


FIGURES = {
    "timeline": lambda names: timeline.timeline(tracks(names), "t"),
    "curves": lambda names: model.curves(np.arange(3.0), {"p": lines(names)}, "x", "y"),
    "histograms": lambda names: grids.histograms({"p": lines(names)}, "x", "t", 4),
    "stacked bars": lambda names: bars.side_by_side(["a"], [stacked(names)], [True], "t"),
    "times": lambda names: times.over_bytes({n: [(1e3, 2.0), (1e5, 3.0)] for n in names}, {"b": 1.0}, {}, "t"),
    "roofline": lambda names: roofline.roofline({"p": {n: [(1.0, 2.0, "")] for n in names}}, 9.0, {"b": 1.0}, "t"),
    "byte map": lambda names: grids.byte_map(list(range(len(names))), names, "t", per_row=4),
    "category map": lambda names: grids.category_map([list(range(len(names)))], names, ("a", "b"), "t"),
    "smem": lambda names: history.smem_over_time([[i] * 2 for i in range(len(names))], [0, 1], names, "t"),
    "gathers": lambda names: tma.gathers(np.arange(4), [(n, 1) for n in names], 4, "t"),
    "kv bytes": lambda names: model.kv_bytes({"M": {n: 1.0 for n in names}}, [1, 2], {"M": 0.0}),
}  # fmt: skip


def coloured(fig) -> dict[str, str]:
    """Label -> colour of a figure's legends."""
    found = {}
    for legend in [*fig.legends, *(ax.get_legend() for ax in fig.axes if ax.get_legend())]:
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True):
            taken = next(getattr(handle, get)() for get in ("get_facecolor", "get_color") if hasattr(handle, get))
            taken = taken[0] if getattr(taken, "ndim", 1) == 2 else taken
            found[text.get_text().split(":")[0]] = to_hex(taken)
    return found


@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_gives_a_name_its_colour_in_any_order(figure: str) -> None:
    first, other = (coloured(FIGURES[figure](list(names))) for names in (NAMES, NAMES[::-1]))
    assert set(NAMES) <= first.keys()
    assert {n: first[n] for n in NAMES} == {n: other[n] for n in NAMES} and len({first[n] for n in NAMES}) == len(NAMES)


def test_a_tile_picture_gives_a_tensor_one_colour_everywhere() -> None:
    parts = Part("Q", 64, 64, "SMEM"), Part("K^T", 64, 128, "SMEM"), Part("S", 64, 128, "TMEM")
    fig = tile_picture([parts], [("Q", 9_000), ("kv 0", 90_000)], 232_448, [tmem.Region("S 0", 0, 128, 0, 128)], "t")
    product, stack, plan = fig.axes
    used = [to_hex(patch.get_facecolor()) for patch in product.patches]
    assert used == [kinds.colour(n).lower() for n in ("Q", "KV", "S")]
    assert [to_hex(bar.get_facecolor()) for bar in stack.patches] == used[:2]
    assert to_hex(plan.texts[0].get_bbox_patch().get_facecolor()) == used[2]
