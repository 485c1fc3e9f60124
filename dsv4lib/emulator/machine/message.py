"""Write plain data with arrays as bytes, and read it again: what worker processes send (cores.py).

JSON for the structure, the arrays one after another. Known dataclasses, tuples, dictionaries with any plain keys and
numbers of any size come back as they were. Reading makes data only.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import numpy as np


def write(value: Any) -> bytes:
    """Write a value: numbers, strings, None, lists, tuples, dictionaries, arrays, dataclasses."""
    arrays: list[np.ndarray] = []
    head = json.dumps(_plain(value, arrays)).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(a.tobytes() for a in arrays)


def read(raw: bytes | bytearray, kinds: tuple[type, ...]) -> Any:
    """Read what `write` has written. ``kinds``: the dataclasses that may be in it."""
    end = 8 + int.from_bytes(raw[:8], "little")
    reader = _Reader(memoryview(raw)[end:], {kind.__name__: kind for kind in kinds})
    return reader.value(json.loads(bytes(raw[8:end])))


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": [value.dtype.str, list(value.shape)]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, arrays) for item in value]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[_plain(key, arrays), _plain(item, arrays)] for key, item in value.items()]}
    fields = [_plain(getattr(value, field.name), arrays) for field in dataclasses.fields(value)]
    return {"record": [type(value).__name__, fields]}


class _Reader:
    """Reads values in the order in which they were written; ``arrays``: the bytes of those that are left."""

    def __init__(self, arrays: memoryview, kinds: dict[str, type]):
        self._arrays, self._kinds = arrays, kinds

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, content),) = plain.items()
        if kind == "array":
            return self._array(np.dtype(content[0]), content[1])
        if kind == "tuple":
            return tuple(self.value(item) for item in content)
        if kind == "record":
            return self._kinds[content[0]](*(self.value(item) for item in content[1]))
        pairs = {self.value(key): self.value(item) for key, item in content}
        return Counter(pairs) if kind == "counter" else pairs

    def _array(self, dtype: np.dtype, shape: list[int]) -> np.ndarray:
        nbytes = dtype.itemsize * int(np.prod(shape))
        raw, self._arrays = self._arrays[:nbytes], self._arrays[nbytes:]
        return np.frombuffer(raw, dtype).reshape(shape)
