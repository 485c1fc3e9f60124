"""Export a trace as a Chrome trace.

The JSON opens in ui.perfetto.dev and chrome://tracing.

One process a CTA: a thread a warp (run and wait), a thread an asynchronous unit (issue to completion, on lanes of their
own where they overlap), counters for the mbarriers' phases. A microsecond stands for one executed warp-instruction:
order and overlap are real, durations are not times of a GPU. Every slice names its PTX line, the instruction and the
line of the source; what a check reports is an instant of its CTA.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib.emulator.trace.trace import Trace

_UNITS = 1000  # thread numbers of units start here


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """Make a JSON object with ``traceEvents``, a microsecond per warp-instruction."""
    events = [*_names(trace), *_warps(trace), *_operations(trace), *_barriers(trace), *_hazards(trace)]
    return {"traceEvents": events, "otherData": {"kernel": trace.kernel, "clock": "warp-instructions"}}


def save(trace: Trace, path: str | Path) -> Path:
    """Write the Chrome trace to a file; returns its path."""
    target = Path(path)
    target.write_text(json.dumps(chrome_trace(trace)), encoding="utf-8")
    return target


def lanes_of(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Find the lowest lane each interval fits in without overlap, int64[n]. In order of start."""
    lane = np.zeros(len(start), np.int64)
    free: list[int] = []
    for i in np.argsort(start, kind="stable"):
        found = next((k for k, until in enumerate(free) if until <= start[i]), len(free))
        if found == len(free):
            free.append(0)
        free[found] = int(end[i])
        lane[i] = found
    return lane


def _names(trace: Trace) -> list[dict[str, Any]]:
    """Names of processes and of the warps' threads."""
    gx, gy, _ = trace.grid
    out: list[dict[str, Any]] = []
    for cta in np.unique(trace.states["cta"]).tolist():
        name = f"CTA ({cta % gx}, {cta // gx % gy}, {cta // (gx * gy)})"
        out.append({"ph": "M", "name": "process_name", "pid": cta, "args": {"name": name}})
        for warp in np.unique(trace.states["warp"][trace.states["cta"] == cta]).tolist():
            out.append({"ph": "M", "name": "thread_name", "pid": cta, "tid": warp, "args": {"name": f"warp {warp}"}})
    return out


def _warps(trace: Trace) -> list[dict[str, Any]]:
    """Run and wait stretches."""
    out, code = [], _code(trace)
    for row in trace.states:
        args = _where(code, int(row["line"]))
        if row["barrier"] >= 0:
            args["barrier"] = f"{int(row['barrier']):#x}"
        name = "run" if row["state"] == "run" else f"wait: {row['reason']}"
        out.append(_slice(name, str(row["state"]), row, int(row["warp"]), row["time"], row["end"], args))
    return out


def _operations(trace: Trace) -> list[dict[str, Any]]:
    """Asynchronous operations; those that overlap in one unit get threads of their own."""
    out: list[dict[str, Any]] = []
    ops, thread, code = trace.ops, _UNITS, _code(trace)
    ends = np.where(ops["done_time"] < 0, trace.time, ops["done_time"])
    for cta, unit in sorted({(int(o["cta"]), str(o["unit"])) for o in ops}):
        rows = np.nonzero((ops["cta"] == cta) & (ops["unit"] == unit))[0]
        lanes = lanes_of(ops["time"][rows], ends[rows])
        for lane in range(int(lanes.max()) + 1):
            name = {"name": f"{unit} {lane}" if lane else unit}
            out.append({"ph": "M", "name": "thread_name", "pid": cta, "tid": thread + lane, "args": name})
        for row, lane in zip(rows, lanes.tolist(), strict=True):
            args = _where(code, int(ops["line"][row])) | {"warp": int(ops["warp"][row]), "order": int(row)}
            if ops["done_event"][row] < 0:
                args["note"] = "never completed"
            label = trace.labels[row]
            out.append(_slice(label, unit, ops[row], thread + lane, ops["time"][row], ends[row], args))
        thread += int(lanes.max()) + 1
    return out


def _barriers(trace: Trace) -> list[dict[str, Any]]:
    """Phase of every mbarrier as a counter."""
    return [
        {
            "ph": "C",
            "name": f"mbarrier {int(row['offset']):#x} phase",
            "pid": int(row["cta"]),
            "ts": int(row["time"]),
            "args": {"phase": int(row["phase"]) + int(row["done"])},
        }
        for row in trace.mbarriers
    ]


def _hazards(trace: Trace) -> list[dict[str, Any]]:
    """First reports of the checks."""
    code = _code(trace)
    return [
        {
            "ph": "i",
            "s": "p",
            "name": str(row["kind"]),
            "cat": "hazard",
            "pid": max(int(row["cta"]), 0),
            "tid": max(int(row["warp"]), 0),
            "ts": int(row["time"]),
            "args": _where(code, int(row["line"])) | {"against_ptx_line": int(row["owner"])},
        }
        for row in trace.hazards
    ]


def _code(trace: Trace) -> dict[int, tuple[str, str]]:
    """The instruction and the source line of each PTX line."""
    texts = trace.texts or [str(name) for name in trace.opcodes]
    return dict(zip(trace.lines.tolist(), zip(texts, trace.sources, strict=True), strict=True))


def _where(code: dict[int, tuple[str, str]], line: int) -> dict[str, Any]:
    """What a slice says of its place."""
    text, source = code.get(line, ("", ""))
    return {"ptx_line": line, **({"ptx": text} if text else {}), **({"source": source} if source else {})}


def _slice(name: str, kind: str, row: np.void, thread: int, start: int, end: int, args: dict) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": int(row["cta"]),
        "tid": thread,
        "ts": int(start),
        "dur": max(int(end) - int(start), 1),
        "args": args,
    }
