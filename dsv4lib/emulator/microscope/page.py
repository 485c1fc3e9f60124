"""Write launches as one HTML file that draws them, with no request to anywhere.

Its scripts and its style lie in `assets`, and a policy in its head allows these and nothing else. Data stands in the
page as JSON, in which nothing can end the element that holds it.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dsv4lib.emulator.microscope.collect import Collector
from dsv4lib.emulator.microscope.stream import FORMAT, LIMIT
from dsv4lib.errors import ArgumentError

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("data.js", "state.js", "timeline.js", "panels.js", "main.js")
MAX_BYTES = 5_000_000  # of a page
_UNSAFE = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@cache
def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def page(launches: Sequence[dict[str, Any]], title: str, target: str = "") -> str:
    """Return the HTML of a page.

    Args:
        launches: streams, at least one. title: of the page. target: what ran, the name of the report on the page.

    Raises:
        ArgumentError: no launch.
    """
    if not launches:
        raise ArgumentError("launches", "none", "at least one launch")
    data = {"format": FORMAT, "target": target, "launches": list(launches)}
    script = '"use strict";\n' + "\n".join(map(_asset, SCRIPTS))
    style = _asset("style.css")
    parts = {
        "script_hash": _hash(script),
        "style_hash": _hash(style),
        "title": html.escape(title),
        "style": style,
        "data": json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).translate(_UNSAFE),
        "script": script,
    }
    frame = _asset("page.html")
    out = []
    for piece in frame.split("{"):  # each piece begins with the name of a part; the frame has no other braces
        name, closed, rest = piece.partition("}")
        out.append(parts[name] + rest if closed else piece)
    return "".join(out)


def within(make: Callable[[int], str], limit: int = LIMIT, most: int = MAX_BYTES) -> str:
    """Return the page of the highest limit of events, from ``limit`` down by halves, that is below ``most`` bytes.

    Raises:
        ArgumentError: no page is.
    """
    while True:
        text = make(limit)
        if len(text.encode()) < most:
            return text
        if limit < 200:
            raise ArgumentError("most", most, f"room for a page of {len(text.encode()):,} bytes")
        limit //= 2


def write_page(path: Path, collector: Collector, target: str, command: str, checks: str) -> None:
    """Write the page of a program's launches, and say where it is, or why there is none: the run has its exit code."""
    if not collector.kept:
        print(f"{command}: no report: nothing was launched on this command's device", file=sys.stderr)
        return
    name = Path(target).name
    try:
        text = within(lambda limit: page(collector.streams(limit, checks=checks), f"{command} {name}", name))
        path.write_text(text, encoding="utf-8")
    except (ArgumentError, OSError) as error:
        print(f"{command}: no report: {error}", file=sys.stderr)
        return
    print(f"{command}: report: {path}", file=sys.stderr)


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
