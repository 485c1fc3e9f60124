"""The contract: what stage.toml may say, and that each kind of wrong parameter is refused in its own words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4lib.lab.run import plan
from dsv4lib.lab.stage import (
    OutOfBounds,
    Parameter,
    Stage,
    StageError,
    UnknownParameter,
    UnknownStage,
    WrongType,
    discover,
    load,
    resolve_parameters,
)

TILE = {"type": "int", "default": 128, "min": 16, "max": 256, "multiple_of": 16, "help": "columns"}


def parameters(**extra: Any) -> dict[str, Any]:
    return {"fault": {"type": "str", "default": "none", "choices": ["none", "injected"], "help": "fault"}, **extra}


def test_four_faults_give_four_messages(make: Callable[..., Stage], tmp_path: Path) -> None:
    stage = make("layouts", parameters=parameters(tile_n=TILE))
    said = {}
    with pytest.raises(UnknownStage) as caught:
        load("layuots", tmp_path)
    said["stage"] = str(caught.value)
    for kind, error, text in (
        ("word", WrongType, {"tile_n": "abc"}),
        ("bound", OutOfBounds, {"tile_n": "1024"}),
        ("name", UnknownParameter, {"tile_m": "64"}),
    ):
        with pytest.raises(error) as refused:
            resolve_parameters(stage, {}, text)
        said[kind] = str(refused.value)
    assert len(set(said.values())) == 4
    assert "'layuots'" in said["stage"] and "nearest name is layouts" in said["stage"]
    for kind in ("word", "bound", "name"):
        assert "stage layouts" in said[kind]
    assert "an int" in said["word"] and "'abc'" in said["word"] and "16 <= value <= 256" in said["word"]
    assert "tile_n=1024" in said["bound"] and "16 <= value <= 256, multiple of 16" in said["bound"]
    assert "'tile_m'" in said["name"] and "nearest name is tile_n" in said["name"] and "tile_n (int)" in said["name"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("int", "1.0"), ("int", "true"), ("int", ""), ("int", "0x10"), ("bool", "1"), ("bool", "True"), ("bool", "yes"),
     ("float", "abc")],
)  # fmt: skip
def test_text_is_read_strictly_by_type(kind: str, text: str, tmp_path: Path) -> None:
    default = {"int": 1, "bool": True, "float": 1.0}[kind]
    with pytest.raises(WrongType):
        Parameter(type=kind, default=default, help="x").parse("s", "x", text, tmp_path)


def test_text_of_each_type(tmp_path: Path) -> None:
    def read(kind: str, default: Any, text: str) -> Any:
        return Parameter(type=kind, default=default, help="x").parse("s", "x", text, tmp_path)

    (tmp_path / "text.txt").write_text("x")
    assert read("int", 1, "-3") == -3
    assert read("bool", True, "false") is False
    assert read("float", 1.0, "2") == 2.0 and isinstance(read("float", 1.0, "2"), float)
    assert read("str", "a", "1") == "1"
    assert read("path", "a", "text.txt") == "text.txt"
    with pytest.raises(OutOfBounds, match="existing file"):
        read("path", "a", "nothing.txt")
    for text in ("nan", "inf"):
        with pytest.raises(OutOfBounds):
            read("float", 1.0, text)


@pytest.mark.parametrize("value", [True, 1.5, "16", None])
def test_values_of_sets_are_typed_too(make: Callable[..., Stage], value: Any) -> None:
    stage = make(parameters=parameters(tile_n=TILE))
    with pytest.raises(WrongType):
        resolve_parameters(stage, {"tile_n": value})


def test_multiple_of_and_choices(make: Callable[..., Stage]) -> None:
    stage = make(parameters=parameters(tile_n=TILE))
    with pytest.raises(OutOfBounds, match="multiple of 16"):
        resolve_parameters(stage, {"tile_n": 24})
    with pytest.raises(OutOfBounds, match="nearest choice is injected"):
        resolve_parameters(stage, {"fault": "injectd"})
    assert resolve_parameters(stage, {"tile_n": 64}, {"tile_n": "32"})["tile_n"] == 32


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"surprise": 1}, "surprise"),
        ({"gates": []}, "gates"),
        ({"sets": {"quick": {"time_limit_s": 60, "runs": [{"sed": 1}]}}}, "no parameter 'sed'"),
        (
            {"negatives": [{"name": "n", "parameters": {"fault": "injected"}, "expect_fail": "wring"}]},
            "nearest name is wrong",
        ),
        (
            {"negatives": [{"name": "n", "parameters": {"fault": "injected"}, "expect_fail": ["wrong", "wring"]}]},
            "no gate on wring; the nearest name is wrong",
        ),
        ({"negatives": [{"name": "n", "parameters": {"fault": "injected"}, "expect_fail": []}]}, "expect_fail"),
        ({"negatives": [{"name": "n", "parameters": {"fault": "other"}, "expect_fail": "wrong"}]}, "out of bounds"),
        (
            {"negatives": [{"name": "n", "parameters": {"fault": "injected"}, "reds": "wrong"}]},
            "called expect_fail now",
        ),
        ({"kernel": "yes"}, "kernel"),
        ({"notebook": "/etc/passwd"}, "inside the workspace"),
        ({"parameters": parameters(tile_n={**TILE, "default": 17})}, "out of bounds"),
        ({"parameters": parameters(text={"type": "str", "default": "a", "min": 1, "help": "x"})}, "min and max"),
    ],
)
def test_a_contract_that_contradicts_itself_is_refused(
    make: Callable[..., Stage], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(StageError, match=words):
        make(**changes)


def test_a_folder_without_a_contract_is_an_error(make: Callable[..., Stage], tmp_path: Path) -> None:
    make("one")
    (tmp_path / "stages" / "two").mkdir()
    with pytest.raises(StageError, match="two has no stage.toml"):
        discover(tmp_path)


def test_command_line_values_must_suit_every_chosen_stage(make: Callable[..., Stage]) -> None:
    one, two = make("one", parameters=parameters(tile_n=TILE)), make("two")
    assert [job.parameters["tile_n"] for job in plan.make([one], "quick", texts={"tile_n": "64"})] == [64]
    with pytest.raises(UnknownParameter, match="stage two"):
        plan.make([one, two], "quick", texts={"tile_n": "64"})


def test_equal_runs_are_run_once(make: Callable[..., Stage]) -> None:
    stage = make(sets={"quick": {"time_limit_s": 9, "runs": [{"seed": 1}, {"seed": 2}]}})
    assert [job.name for job in plan.make([stage], "quick")] == ["tiny-00", "tiny-01"]
    assert len(plan.make([stage], "quick", texts={"seed": "3"})) == 1


def test_missing_sets_and_unknown_sets_are_named(make: Callable[..., Stage]) -> None:
    stage = make(sets={"quick": {"time_limit_s": 9, "runs": [{}]}})
    with pytest.raises(StageError, match="no parameter set nightly"):
        plan.make([stage], "nightly")
    with pytest.raises(StageError, match="nearest name is quick"):
        plan.make([stage], "quik")


def test_the_fingerprint_of_a_stage_follows_its_notebook(make: Callable[..., Stage]) -> None:
    before = make("one").fingerprint()
    assert before == make("one").fingerprint()
    assert before != make("one", "x = 1").fingerprint()
