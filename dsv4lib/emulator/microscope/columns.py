"""Code columns of numbers and words as short JSON, and decode them again. `assets/data.js` decodes the same.

A column is one of: ``{"all": value, "n": rows}``; ``{"steps": [...]}``, differences to the row before, the first to 0;
``{"runs": [value, rows, ...]}``; ``{"values": [...]}``. A column of words has ``words`` beside it, a list that its
numbers index.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from dsv4lib.errors import ArgumentError


def encode(values: Any) -> dict[str, Any]:
    """Code whole numbers, whichever way is shortest.

    Raises:
        ArgumentError: they are no column of whole numbers.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iub"):
        raise ArgumentError("values", f"{array.dtype}{array.shape}", "one dimension of whole numbers")
    array = array.astype(np.int64)
    if not len(array) or (array == array[0]).all():
        return {"all": int(array[0]) if len(array) else 0, "n": len(array)}
    starts = np.append(0, np.nonzero(np.diff(array))[0] + 1)
    lengths = np.diff(np.append(starts, len(array)))
    ways = (
        {"values": array.tolist()},
        {"steps": np.diff(array, prepend=0).tolist()},
        {"runs": np.stack([array[starts], lengths], 1).ravel().tolist()},
    )
    return min(ways, key=lambda way: len(json.dumps(way)))


def encode_words(values: Sequence[str]) -> dict[str, Any]:
    """Code words as numbers of a list, in the order in which they come first."""
    words = list(dict.fromkeys(map(str, values)))
    number = {word: i for i, word in enumerate(words)}
    return encode([number[str(value)] for value in values]) | {"words": words}


def decode(column: dict[str, Any]) -> list[Any]:
    """Return the values of a column.

    Raises:
        ArgumentError: it is coded in none of the ways.
    """
    if "all" in column:
        numbers = [column["all"]] * column["n"]
    elif "steps" in column:
        numbers = np.cumsum(column["steps"], dtype=np.int64).tolist()
    elif "runs" in column:
        numbers = [v for v, n in zip(column["runs"][::2], column["runs"][1::2], strict=True) for _ in range(n)]
    elif "values" in column:
        numbers = list(column["values"])
    else:
        raise ArgumentError("column", sorted(column), "all, steps, runs or values")
    return numbers if "words" not in column else [column["words"][number] for number in numbers]
