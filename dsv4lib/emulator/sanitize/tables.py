"""Take a TOML table apart: every value typed and bounded, every key known, every error with its place."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsv4lib.errors import ArgumentError

MAX_BYTES = 1 << 20
LARGEST = 1 << 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,79}")
_MISSING: Any = object()


def read(path: Path) -> Table:
    """Read a TOML file.

    Raises:
        ArgumentError: no such file, too big, or not TOML.
    """
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ArgumentError("description", str(path), f"a TOML file of at most {MAX_BYTES:,} bytes")
        return Table("", tomllib.loads(path.read_text()))
    except RecursionError:
        raise ArgumentError("description", str(path), "tables that are not nested without end") from None
    except (ValueError, OSError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("description", str(path), f"TOML: {error}") from None


def shown(value: Any) -> Any:
    """Replace what cannot be printed: whole numbers of thousands of digits."""
    if isinstance(value, int) and abs(value) >= LARGEST:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list):
        return [shown(item) for item in value[:20]]
    if isinstance(value, dict):
        return {key: shown(item) for key, item in list(value.items())[:20]}
    return value


class Table:
    """One table of a description. Keys are taken one by one; `done` refuses what is left.

    Attributes:
        place: its name in messages, such as ``tensors.x``.
    """

    def __init__(self, place: str, values: Any):
        self.place = place
        if not isinstance(values, dict):
            raise ArgumentError(place, shown(values), "a table")
        self._values = dict(values)
        self._taken: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def name(self, key: str) -> str:
        """Name a key in messages."""
        return f"{self.place}.{key}" if self.place else key

    def refuse(self, key: str, value: Any, allowed: str) -> ArgumentError:
        """Make the error about a value."""
        return ArgumentError(self.name(key), shown(value), allowed)

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """Take a value as it is.

        Raises:
            ArgumentError: it is missing and has no default.
        """
        self._taken.append(key)
        if key in self._values:
            return self._values.pop(key)
        if default is _MISSING:
            raise ArgumentError(self.name(key), None, "given: it has no default")
        return default

    def text(self, key: str, default: Any = _MISSING, among: Iterable[str] = ()) -> Any:
        """Take a text, one of some if ``among`` names them."""
        value = self.take(key, default)
        among = list(among)
        if value is not default and (not isinstance(value, str) or (among and value not in among)):
            raise self.refuse(key, value, "one of " + ", ".join(among) if among else "a text")
        return value

    def whole(self, key: str, default: Any = _MISSING, least: int = 0, most: int = LARGEST - 1) -> Any:
        """Take a whole number from ``least`` to ``most``."""
        value = self.take(key, default)
        good = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        if value is not default and not good:
            raise self.refuse(key, value, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: Any = _MISSING, least: float = -math.inf) -> Any:
        """Take a number that is not NaN."""
        value = self.take(key, default)
        if value is default:
            return value
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or (isinstance(value, int) and abs(value) >= LARGEST) or math.isnan(value) or value < least:
            raise self.refuse(key, value, "a number" + ("" if least == -math.inf else f" from {least:g}"))
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Take true or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, value, "true or false")
        return value

    def wholes(self, key: str, default: Any = _MISSING, count: range = range(0, 9), least: int = 0) -> Any:
        """Take a list of whole numbers, its length in ``count``; a number alone stands for a list of one."""
        value = self.take(key, default)
        if value is default:
            return value
        values = value if isinstance(value, list) else [value]
        good = all(isinstance(v, int) and not isinstance(v, bool) and least <= v < 1 << 40 for v in values)
        if len(values) not in count or not good:
            allowed = f"{count.start} to {count.stop - 1} whole numbers from {least} to 2^40 - 1"
            raise self.refuse(key, value, allowed)
        return tuple(values)

    def tables(self, key: str) -> dict[str, Table]:
        """Take tables by name: ``[tensors.x]``."""
        outer = Table(self.name(key), self.take(key, {}))
        for name in outer._values:
            if not _NAME.fullmatch(name):
                raise outer.refuse(name[:80], "this name", "letters, digits and underscores, at most 80")
        return {name: Table(f"{outer.place}.{name}", value) for name, value in outer._values.items()}

    def several(self, key: str, most: int = 1000) -> list[Table]:
        """Take a list of tables: ``[[launch]]``."""
        values = self.take(key, [])
        if not isinstance(values, list) or len(values) > most:
            raise self.refuse(key, values, f"a list of at most {most} tables")
        return [Table(f"{self.name(key)}[{i}]", value) for i, value in enumerate(values)]

    def done(self) -> None:
        """Refuse keys that nothing has taken.

        Raises:
            ArgumentError: there is one; the message names the nearest that is known.
        """
        for key, value in self._values.items():
            near = difflib.get_close_matches(key, self._taken, 1)
            known = "one of " + ", ".join(dict.fromkeys(self._taken))
            raise self.refuse(key, value, f"{known}; the nearest name is {near[0]}" if near else known)
