"""JSON of chats: beyond what RFC 8259 has is refused, and nesting does not depend on the stack of the caller."""

import math

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.model import strict_json


def nested(depth, inner="1"):
    return "[" * depth + inner + "]" * depth


def below(frames, call):
    """Call ``call`` under so many frames of Python."""
    return call() if frames == 0 else below(frames - 1, call)


def test_what_is_read_is_written():
    for text in ("1e308", "-0.0", '"京\\u0000"', '{"a": [null, true, {}], "b": 12345678901234567890}', nested(100)):
        assert strict_json.write(strict_json.read(text)) == text.replace("1e308", "1e+308")


@pytest.mark.parametrize(
    "text, message",
    [
        ("NaN", "NaN is no JSON"),
        ("[-Infinity]", "-Infinity is no JSON"),
        ("1e999", "1e999 is beyond"),
        ("-1.5E400", "beyond"),
        ("1" * 5000, "4300"),
        ("[1", "delimiter"),
        ("", "Expecting value"),
        (nested(101), "nested deeper than 100"),
        (nested(990), "nested deeper than 100"),
        (nested(10**6), "nested deeper than 100"),
        ('{"a":' * 101 + "1" + "}" * 101, "nested deeper than 100"),
    ],
)
def test_texts_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        strict_json.read(text)


def test_brackets_in_strings_do_not_nest():
    assert strict_json.read(f'["{"[{" * 500}", "\\\\", "\\"{"[" * 200}"]')[0] == "[{" * 500


def test_the_callers_stack_does_not_count():
    """Far below the limit of the interpreter, and near it."""
    for frames in (0, 500, 800):
        assert below(frames, lambda: strict_json.write(strict_json.read(nested(100)))) == nested(100)
        with pytest.raises(ValueError, match="nested deeper"):
            below(frames, lambda: strict_json.read(nested(101)))


def test_values_that_are_refused():
    deep, circle = [], []
    circle.append(circle)
    for _ in range(5000):
        deep = [deep]
    cases = (
        (math.nan, "Out of range"),
        ([math.inf], "Out of range"),
        ({1, 2}, "set"),
        (deep, "deeper"),
        (circle, "Circular"),
    )
    for value, message in cases:
        with pytest.raises(ValueError, match=message):
            strict_json.write(value)
    assert "nested too deeply to show" in str(ArgumentError("value", deep, "less"))
