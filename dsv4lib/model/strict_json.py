"""Read and write JSON as RFC 8259 has it: no NaN, no infinity, nesting of at most `DEEPEST`.

Python's `json` takes NaN and Infinity, makes an infinity of 1e999, and how deep a value may nest depends on the stack
of the caller. A value that is read here can be written here, in any caller.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

DEEPEST = 100  # lists and objects inside one another
_STEPS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


def read(text: str) -> Any:
    """Read a JSON text.

    Raises:
        ValueError: no JSON, a number that float has not, or nesting that is too deep; it says which.
    """
    _check_depth(text)
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def write(value: Any) -> str:
    """Write a value as JSON text, other characters than ASCII as they are.

    Raises:
        ValueError: a value that JSON has not, or nesting that is too deep; it says which.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from error
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_depth(text)
    return text


def _check_depth(text: str) -> None:
    depth = 0
    for match in _STEPS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth > DEEPEST:
            raise ValueError(_too_deep())


def _too_deep() -> str:
    return f"nested deeper than {DEEPEST}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond the largest float")
    return value
