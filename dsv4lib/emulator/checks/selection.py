"""Select the checks of a launch. ``checks=`` of a device becomes bits for the machine, and unreported kinds.

``checks`` is a preset, or names separated by commas, read from left to right. A name is a preset, a group of kinds
(`Kind.check`), a kind, or ``counters``; a ``-`` in front takes a group or kind away: ``"race,-tmem_lane_quarter"``,
``"default,pedantic"``, ``"race_global"``.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.emulator.checks.kinds import GROUPS, KINDS
from dsv4lib.emulator.native import abi
from dsv4lib.errors import ArgumentError

COUNTERS = "counters"
_DEFAULT = ("allocation", "initialisation", "pending", "barrier", "proxy")
PRESETS: dict[str, tuple[str, ...]] = {
    "off": (),
    "default": _DEFAULT,
    "race": (*_DEFAULT, "race"),
    "sanitize": (*_DEFAULT, "race", "code", "lanes"),
    "all": (*GROUPS, COUNTERS),
}
# What a group, or a kind on its own, needs beside being reported.
_BITS = {
    "initialisation": abi.CHECK_INIT,
    "proxy": abi.CHECK_PROXY,
    "race": abi.CHECK_INIT | abi.CHECK_PROXY | abi.CHECK_RACE,
    "code": abi.CHECK_INIT | abi.CHECK_PROXY | abi.CHECK_RACE | abi.CHECK_CODE,
    "lanes": abi.CHECK_INIT | abi.CHECK_PROXY | abi.CHECK_RACE | abi.CHECK_LANES,
    "pedantic": abi.CHECK_INIT | abi.CHECK_PROXY | abi.CHECK_RACE | abi.CHECK_PEDANTIC,
    COUNTERS: abi.CHECK_COUNTERS,
}


@dataclass(frozen=True)
class Selection:
    """What to check.

    Attributes:
        bits: CHECK_* of native/abi.py; 0 = nothing is reported.
        muted: kinds that are not reported.
    """

    bits: int
    muted: frozenset[str]


def select(checks: str) -> Selection:
    """Read ``checks``.

    Raises:
        ArgumentError: a name that is no preset, group or kind.
    """
    if not isinstance(checks, str):
        raise ArgumentError("checks", checks, "a string: " + ", ".join([*PRESETS, *GROUPS, COUNTERS]))
    chosen: set[str] = set()
    for part in checks.split(","):
        name = part.strip()
        away, name = name.startswith("-"), name.removeprefix("-")
        found = _members(name) if away else _expand(name)
        if found is None:
            allowed = ", ".join([*PRESETS, *GROUPS, COUNTERS])
            raise ArgumentError("checks", checks, f"{allowed} or kinds of hazards.KINDS, separated by commas")
        chosen = chosen - found if away else chosen | found
    kinds = chosen - {COUNTERS}
    bits = abi.CHECK_REPORT if kinds else 0
    for name in {KINDS[kind].check for kind in kinds} | (chosen & {COUNTERS}):
        bits |= _BITS.get(name, 0)
    return Selection(bits, frozenset(KINDS) - kinds)


def _expand(name: str) -> set[str] | None:
    """Kinds (and "counters") that a name adds; a preset comes before the group of its name."""
    if name in PRESETS:
        return {kind for part in PRESETS[name] for kind in _members(part)}
    return _members(name)


def _members(name: str) -> set[str] | None:
    """Kinds (and "counters") of a group, or the one kind of that name."""
    if name in GROUPS:
        return {kind.name for kind in KINDS.values() if kind.check == name}
    return {name} if name in KINDS or name == COUNTERS else None
