"""Sources of methods as a configuration compiles them, and what changed between two."""

from __future__ import annotations

import ast

import cutlass
import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.fmha.config import HEAD_DIMS
from dsv4lib.ops.fmha.ladder import STAGES, Ladder
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.viz import source


class Kernel:
    """A configuration and a method that branches on it."""

    def __init__(self, mode: str = "a", wide: bool = False):
        self.mode, self.wide = mode, wide

    def __repr__(self) -> str:
        return f"Kernel({self.mode})"

    def method(self, x: int, y: int) -> int:
        """Branch."""
        if cutlass.const_expr(self.mode == "a"):
            # first
            x += 1
        elif cutlass.const_expr(self.mode == "b"):
            for i in range(y):
                if cutlass.const_expr(not self.wide):
                    x += i
                else:
                    # wide
                    x += 2 * i
                x += 3
        else:
            x += 4
        if x > 7:
            x = 7
        if cutlass.const_expr(self.unknown):
            x = 8
        if cutlass.const_expr(self.wide):
            return y
        return x


HEAD = ["def method(self, x, y):", '    """Branch."""']
END = ["    if x > 7:", "        x = 7", "    if cutlass.const_expr(self.unknown):", "        x = 8"]


@pytest.mark.parametrize(
    ("kernel", "middle", "end"),
    [
        (Kernel("a"), ["    # first", "    x += 1"], "    return x"),
        (Kernel("b"), ["    for i in range(y):", "        x += i", "        x += 3"], "    return x"),
        (
            Kernel("b", True),
            ["    for i in range(y):", "        # wide", "        x += 2 * i", "        x += 3"],
            "    return y",
        ),
        (Kernel("c"), ["    x += 4"], "    return x"),
    ],
)
def test_only_the_taken_branches_are_shown(kernel: Kernel, middle: list[str], end: str) -> None:
    assert source.specialised(Kernel.method, kernel) == [*HEAD, *middle, *END, end]


@pytest.mark.parametrize(
    ("test", "value"),
    [
        ("self.mode == 'a' and not self.wide", True), ("self.mode != 'a' or self.wide", False),
        ("self.mode in ('b', 'c')", False), ("self.mode not in ('b',)", True), ("self.mode is not None", True),
        ("self.wide or x == 0", None), ("self.mode == 'a' or x == 0", True), ("self.mode == MODE", None),
        ("self.mode.upper() == 'A'", None), ("self.other", None),
    ],
)  # fmt: skip
def test_what_the_configuration_decides(test: str, value: bool | None) -> None:
    node = ast.parse(f"if cutlass.const_expr({test}): pass").body[0]
    assert source._value(node, Kernel()) is value


def test_without_a_kernel_nothing_is_decided() -> None:
    lines = source.specialised(Kernel.method)
    assert sum("const_expr" in line for line in lines) == 5 and lines[-1] == "    return x"
    with pytest.raises(ArgumentError, match="written with def"):
        source.specialised(Kernel)


@pytest.mark.parametrize("stage", STAGES)
def test_a_specialised_method_of_a_kernel_is_python_without_decided_branches(stage: str) -> None:
    for method in (Ladder.softmax, Ladder.mma, Ladder.store_p):
        text = "\n".join(source.specialised(method, Ladder(stage)))
        compile(text, "x", "exec")
        assert "const_expr" not in text


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_production_kernel_is_too(head_dim: int) -> None:
    for method in (Fmha.softmax_tiles, Fmha.valid_keys, Fmha.final_scale, Fmha.mma_qk, Fmha.mma_items):
        compile("\n".join(source.specialised(method, Fmha(head_dim))), "x", "exec")


def test_a_method_is_shown_with_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    source.show_method(Kernel.method, Kernel("c"), Kernel("a"))
    text = shown[0]["text/plain"].splitlines()
    assert text[0].startswith("test_source.py, line ") and text[0].endswith("+ new, - gone since Kernel(a)")
    assert [line for line in text[1:] if line[0] != " "] == ["-     # first", "-     x += 1", "+     x += 4"]
    line = int(text[0].split("line ")[1].split(";")[0])
    assert open(__file__).read().splitlines()[line - 1].lstrip().startswith("def method(")
    assert "x &gt; 7" in shown[0]["text/html"] and shown[0]["text/html"].count("background") == 3
    source.show_method(Kernel.method)
    assert "gone" not in shown[1]["text/plain"]


class Renamed(Kernel):
    def other(self, x):
        x += 9
        return x


def test_a_method_is_compared_with_the_one_it_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    source.show_method(Renamed.other, Renamed("a"), Kernel("a"), was=Kernel.method)
    text = shown[0]["text/plain"].splitlines()
    assert text[0].endswith("gone since Kernel(a), method") and "+     x += 9" in text
    with pytest.raises(ArgumentError, match="a kernel with a method other"):
        source.show_method(Renamed.other, Renamed("a"), Kernel("a"))
