"""Make figures of a notebook from a trace of one of our kernels. Barriers get names, warps get roles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dsv4lib import viz
from dsv4lib.emulator.machine.request import SMEM_RESERVED
from dsv4lib.emulator.memory.addressing import OFFSET_MASK
from dsv4lib.emulator.trace.perfetto import lanes_of
from dsv4lib.emulator.trace.trace import TMEM_KINDS, Trace, unpack_lanes
from dsv4lib.viz.history import Barrier
from dsv4lib.viz.timeline import Phases, Track

_LAST = {4: "mma", 5: "load"}  # warps 0-3 read the accumulator
ROLES = {**dict.fromkeys(range(4), "epilogue"), **_LAST}
SOFTMAX_ROLES = {**dict.fromkeys(range(4), "softmax"), **_LAST, 6: "load", 7: "load"}
SOFTMAX_ROLES |= dict.fromkeys(range(8, 12), "epilogue")
MAX_LANES = 8  # copies in flight that are drawn one by one
_UNITS = {"tma": "copy in flight", "tensor": "MMA"}
CELLS = {"mma": "written by an MMA", "st": "stored", "cp": "copied", "A": "read as A", "ld": "loaded by threads"}
BYTES = {
    "tma": "written by TMA",
    "tma store": "read by TMA",
    "bulk load": "written by bulk copies",
    "bulk store": "read by bulk copies",
    "cp.async": "written by cp.async",
    "threads": "written by threads",
    "mma A": "read as A",
    "mma B": "read as B",
    "tcgen05.cp": "read by tcgen05.cp",
}
BYTES |= {f"wgmma {operand}": f"read as {operand}" for operand in "AB"}


def barrier_names(kernel: Any) -> dict[int, str]:
    """Offset in shared memory -> name of each mbarrier of a kernel."""
    first = SMEM_RESERVED + sum(size for _, size in kernel.buffers())
    return {first + 8 * i: name for i, name in enumerate(kernel.barriers())}


def regions(kernel: Any) -> list[tuple[str, int, int]]:
    """(name, first byte, end) of the buffers in shared memory."""
    out, at = [], SMEM_RESERVED
    for name, size in kernel.buffers():
        out.append((name, at, at + size))
        at += size
    return out


def warp_timeline(trace: Trace, cta: int = 0, now: float | None = None, roles: dict[int, str] = ROLES) -> Figure:
    """Draw the roles and asynchronous units of one CTA on one clock."""
    tracks, born = [], trace.life(cta)[0]
    states = trace.states[trace.states["cta"] == cta]
    for warp in sorted(set(states["warp"].tolist()), reverse=True):
        mine = states[states["warp"] == warp]
        waits = ["waits: mbarrier" if r == "mbarrier" else "waits: barrier" for r in mine["reason"]]
        kinds = ["runs" if s == "run" else w for s, w in zip(mine["state"], waits, strict=True)]
        tracks.append(Track(f"warp {warp} {roles.get(warp, '')}", mine["time"] - born, mine["end"] - born, kinds))
    ends = np.where(trace.ops["done_time"] < 0, trace.time, trace.ops["done_time"])
    for unit, name in (("tma", "TMA"), ("tensor", "tensor core")):
        rows = np.nonzero((trace.ops["cta"] == cta) & (trace.ops["unit"] == unit))[0]
        starts = trace.ops["time"][rows]
        if unit == "tensor":  # a queue: an operation starts when the one before it is done
            starts = np.maximum(starts, np.append(0, ends[rows][:-1]))
        starts, stops = starts - born, ends[rows] - born
        lanes = lanes_of(starts, stops)
        if lanes.max(initial=-1) >= MAX_LANES:
            first, last = _union(starts, stops)
            label = f"{name}, up to {int(lanes.max()) + 1} at once"
            tracks.append(Track(label, first, last, [_UNITS[unit]] * len(first)))
            continue
        for lane in range(int(lanes.max(initial=-1)) + 1):
            mine = lanes == lane
            commits = [trace.labels[i].startswith("commit") for i in rows[mine]]
            kinds = ["commit" if c else _UNITS[unit] for c in commits]
            label = f"{name} {lane}" if lanes.any() else name
            tracks.append(Track(label, starts[mine], stops[mine], kinds))
    return viz.timeline.timeline(tracks, f"CTA {cta}: running and waiting warps", now=now)


def _union(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The spans in which at least one of the intervals runs."""
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    new = np.append(True, starts[1:] > ends[:-1])
    return starts[new], ends[np.append(np.nonzero(new)[0][1:] - 1, len(ends) - 1)]


def barrier_chart(trace: Trace, names: dict[int, str], cta: int = 0, now: float | None = None) -> Figure:
    """Show the phases of every mbarrier of one CTA, and the warps that wait."""
    born, end = trace.life(cta)
    rows = trace.mbarriers[trace.mbarriers["cta"] == cta]
    waits = trace.states[(trace.states["cta"] == cta) & (trace.states["state"] == "wait")]
    out = []
    for offset, name in names.items():
        mine = rows[(rows["offset"] == offset) & rows["done"]]
        on = waits[(waits["barrier"] >= 0) & (waits["barrier"] & OFFSET_MASK == offset)]
        out.append(Phases(name, mine["time"] - born, np.stack([on["time"], on["end"]], 1) - born))
    return viz.timeline.barrier_phases(out, end - born, f"CTA {cta}: mbarriers", now)


def tmem_panels(
    trace: Trace, events: list[int] | None = None, cta: int = 0, plan: Sequence[tuple[str, int, int]] = ()
) -> Figure:
    """Draw the tensor memory at six moments (or at ``events``). It shows the last access, paler the older it is.

    ``plan`` names columns: (name, first, end).
    """
    if events is None:
        mine = trace.tmem["event"][trace.tmem["cta"] == cta]
        events = mine[np.linspace(0, len(mine) - 1, 6).astype(int)].tolist()
    states = [trace.tmem_state(event, cta) for event in events]
    now = [trace.time_of(event) for event in events]
    born, end = trace.life(cta)
    fresh = [1 - (t - s[1]) / max(end - born, 1) for s, t in zip(states, now, strict=True)]
    moments = [f"after {t - born:,} instructions" for t in now]
    names = [CELLS[kind] for kind in TMEM_KINDS]
    title = f"CTA {cta}: tensor memory, by last access"
    return viz.history.tmem_over_time([s[0] for s in states], names, moments, title, fresh, regions=plan)


def tmem_columns(
    trace: Trace, plan: Sequence[tuple[str, int, int]] = (), cta: int = 0, lane: int = 0, points: int = 500
) -> Figure:
    """Draw the columns of one lane of tensor memory. From the first event of a CTA to the last; ``plan`` names them."""
    rows = trace.tmem[(trace.tmem["cta"] == cta) & unpack_lanes(trace.tmem["lanes"])[:, lane]]
    born, end = trace.life(cta)
    clock = np.linspace(born, end, points)
    codes, state, done = np.empty((viz.tmem.COLUMNS, points), np.int64), np.full(viz.tmem.COLUMNS, -1), 0
    for i, time in enumerate(clock):
        while done < len(rows) and rows["time"][done] <= time:
            state[rows["column"][done] : rows["end"][done]] = TMEM_KINDS.index(rows["what"][done])
            done += 1
        codes[:, i] = state
    names = [CELLS[kind] for kind in TMEM_KINDS]
    title = f"CTA {cta}: columns of tensor memory, lane {lane}"
    return viz.history.tmem_against_time(codes, clock - born, names, title, plan)


def smem_map(trace: Trace, kernel: Any, cta: int = 0, points: int = 400) -> Figure:
    """Draw the shared memory of one CTA from the first event to the last."""
    events = trace.events_of(cta)
    times = np.maximum.accumulate(trace.times_of(events))
    born, end = trace.life(cta)
    grid = np.linspace(born, end, points)
    shown = events[np.maximum(np.searchsorted(times, grid, side="right") - 1, 0)]
    different, place = np.unique(shown, return_inverse=True)
    codes, names = trace.smem_history(different, cta)
    codes = codes[:, place]
    labels = [BYTES.get(name, name) for name in names]
    return viz.history.smem_over_time(codes, grid - born, labels, f"CTA {cta}: shared memory", regions(kernel))


def box_iterations(
    trace: Trace, operand: Any, name: str, cta: int = 0, whole: bool = False, axes: tuple[str, str] = ("row", "k")
) -> Figure:
    """Draw the which box of an operand each iteration of one CTA's loop loads.

    ``whole``: the loop has to cover all rows, not only those between the first and the last it loads.
    """
    number = next(i for i, t in enumerate(trace.tensors) if t.address == operand.data_ptr())
    tensor = trace.tensors[number]
    coords = trace.loads(number, cta)[:, ::-1]
    row0, last = (0, operand.shape[0]) if whole else (int(coords[:, 0].min()), int(coords[:, 0].max()))
    rows = min(operand.shape[0], last + tensor.box[1]) - row0
    box, title = (tensor.box[1], tensor.box[0]), f"{name}: loads of CTA {cta}"
    return viz.tma.iterations((rows, operand.shape[1]), box, coords - [[row0, 0]], title, axes)


def gathered(trace: Trace, operand: Any, cta: int = 0) -> np.ndarray:
    """Return rows of an operand that one CTA loads, in the order of the loop. By TMA gather4 or in boxes; -1: no key.

    Warps that share the stages may be in different iterations: each sends something to every stage, which counts them.
    """
    numbers = [i for i, t in enumerate(trace.tensors) if t.address == operand.data_ptr()]
    if not numbers:
        return np.empty(0, np.int64)
    boxes = trace.boxes[(trace.boxes["kind"] == "load") & (trace.boxes["cta"] == cta)]
    boxes = boxes[np.argsort(trace.ops["event"][boxes["op"]], kind="stable")]
    warps, iteration = trace.ops["warp"][boxes["op"]], np.zeros(len(boxes), np.int64)
    for warp in np.unique(warps):
        stages = boxes["barrier"][warps == warp]
        iteration[warps == warp] = np.cumsum(np.diff(stages, prepend=stages[0]) != 0)
    mine = np.isin(boxes["tensor"], numbers) & (boxes["coords"][:, 0] == 0)  # a row's first chunk stands for all of it
    boxes, iteration = boxes[mine], iteration[mine]
    rows = [np.empty(0, np.int64)]
    for box in boxes[np.lexsort((boxes["first"], iteration))]:
        size = trace.tensors[box["tensor"]].box[1]
        rows.append(box["coords"][1:5] if size == 1 else box["coords"][1] + np.arange(size))
    rows = np.concatenate(rows)
    return np.where(rows < 0, -1, rows)


def swizzle(trace: Trace, rows: int = 128) -> Figure:
    """Draw where TMA put the chunks of the first ``rows`` rows. Bank groups as written, and as without the swizzle."""
    first = trace.boxes[0]
    boxes = trace.boxes[(trace.boxes["cta"] == first["cta"]) & (trace.boxes["tensor"] == first["tensor"])]
    boxes = boxes[(boxes["kind"] == "load") & (boxes["coords"][:, 0] == first["coords"][0])]
    boxes = boxes[np.argsort(trace.ops["event"][boxes["op"]], kind="stable")]
    across = trace.tensors[first["tensor"]].box[0] * 2 // 16
    base, parts = int(boxes["first"][0]) >> 4, []
    for box in boxes:
        row = int(np.nonzero((trace.smem["op"] == box["op"]) & trace.smem["write"])[0][0])
        parts.append((trace.chunks[row] - base).reshape(-1, across))
        if sum(map(len, parts)) >= rows:
            break
    chunks = np.concatenate(parts)[:rows]
    offsets = (chunks[:, :, None] * 8 + np.arange(8)).reshape(len(chunks), -1)
    plain = np.arange(offsets.size).reshape(offsets.shape)
    return viz.smem.swizzle_map(offsets, 2, "as TMA wrote it", plain, "row after row")


def moment(
    trace: Trace, names: dict[int, str], event: int, cta: int = 0, roles: dict[int, str] = ROLES
) -> tuple[Figure, str]:
    """Draw tensor memory, shared memory and barriers at one event. One line tells of the warps that wait."""
    time = trace.time_of(event)
    cells, _ = trace.tmem_state(event, cta)
    chunks, kinds = trace.smem_history(np.array([event]), cta)
    known = trace.mbarriers_at(event, cta)
    barriers = [
        Barrier(
            names[o],
            int(r["phase"]) + int(r["done"]),
            int(r["expected"] if r["done"] else r["pending"]),
            int(r["expected"]),
            int(r["tx"]),
        )
        for o, r in sorted(known.items())
        if o in names
    ]
    live = trace.states[(trace.states["cta"] == cta) & (trace.states["time"] <= time) & (trace.states["end"] > time)]
    waiting = [f"{int(r['warp'])} {roles.get(int(r['warp']), '')}" for r in live if r["state"] == "wait"]
    figure = viz.history.moment(
        (cells, [CELLS[kind] for kind in TMEM_KINDS]),
        (chunks[:, 0], [BYTES.get(kind, kind) for kind in kinds]),
        barriers,
        f"Event {event} of {trace.events}, after {time} warp-instructions",
    )
    return figure, f"waiting warps: {', '.join(waiting) or 'none'}"
