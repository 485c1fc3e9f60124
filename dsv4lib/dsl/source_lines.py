"""Look up the Python line of a traced operation once.

The DSL gives every operation that it builds the line of its caller. For each one it walks the caller's table of
positions from the start, and compares the module of every frame on its way with a list of prefixes: a third of the time
in which an attention kernel compiles. For one instruction of the same code both answers never change, so they are
remembered while kernels are compiled.

The two functions are inside the DSL. A version that lacks one of them compiles as it would without this module
(``tests/dsl/test_source_lines.py`` fails then); PTX and the lines in it are the same either way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

_lock = threading.Lock()
_users = 0
_own: dict[str, Callable] = {}  # what the DSL had under these names


@contextmanager
def remembered() -> Iterator[None]:
    """Remember lines for as long as anyone is inside, in any thread. The DSL is as it was afterwards."""
    global _users
    from cutlass._mlir_helpers import op

    with _lock:
        _users += 1
        if _users == 1:
            for name, remember in _REMEMBER.items():
                if found := getattr(op, name, None):
                    _own[name] = found
                    setattr(op, name, remember(found))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for name, found in _own.items():
                    setattr(op, name, found)
                _own.clear()


def _of_instruction(find: Callable[[FrameType], Any]) -> Callable[[FrameType], Any]:
    """Return ``find``, called once for an instruction of a code object."""
    known: dict[tuple[int, int], tuple[CodeType, Any]] = {}  # holds the code, so that no other takes its id

    def remembering(frame: FrameType) -> Any:
        at = id(frame.f_code), frame.f_lasti
        if at not in known:
            known[at] = frame.f_code, find(frame)
        return known[at][1]

    return remembering


_REMEMBER: dict[str, Callable[[Callable], Callable]] = {
    "_fast_frameinfo": _of_instruction,
    "_is_framework_module": lru_cache(maxsize=None),
}
