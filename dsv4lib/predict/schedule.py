"""Run a tile schedule. Tasks on units, each unit one task at a time and in order, for a number of tiles.

    load j ----> qk j ----> softmax j ----> pv j          units: TMA, tensor core, softmax warps
                 qk j + 1 goes out before pv j            leads: how many tiles ahead a task is issued

This is where what is exposed comes from: the first load and product, the last softmax and product, and gaps in the
middle when fewer stages are in flight than cover a latency.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from dsv4lib.errors import ArgumentError


@dataclass(frozen=True)
class Task:
    """One task of every tile.

    Attributes:
        name, unit: what and where.
        clocks: how long its unit is busy; latency: from then until others see the result.
        after: (task, lag): instance j waits for instance j - lag of that task; none where j < lag.
        lead: tiles that it is issued ahead of tasks with lead 0.
        freed: task that frees the stage that this one fills, of the ring of `persistent_end`; "": it fills none.
        holds: of a transition's task in `persistent_end`: the task of the next item's first tile that waits for it;
            "": none does.
    """

    name: str
    unit: str
    clocks: float
    latency: float = 0
    after: tuple[tuple[str, int], ...] = ()
    lead: int = 0
    freed: str = ""
    holds: str = ""


def run(tasks: list[Task], tiles: int, ready: dict[str, float] | None = None) -> dict[str, list[tuple[float, float]]]:
    """(start, end) of every instance of every task, latency not counted.

    Args:
        tasks: in the order in which a unit issues its own within a step; tiles: how many.
        ready: clock at which a unit can begin, 0 where it is not named.

    Raises:
        ArgumentError: a task waits for one that is issued later: the order deadlocks.
    """
    done: dict[str, list[tuple[float, float]]] = {task.name: [] for task in tasks}
    latency = {task.name: task.latency for task in tasks}
    free = dict(ready or {})
    for task, tile in _in_order(tasks, tiles):
        start = free.get(task.unit, 0.0)
        for other, lag in task.after:
            if tile < lag:
                continue
            if len(done[other]) <= tile - lag:
                raise ArgumentError(f"order of {task.name}", task.after, f"{other} {tile - lag} issued before it")
            start = max(start, done[other][tile - lag][1] + latency[other])
        done[task.name].append((start, start + task.clocks))
        free[task.unit] = start + task.clocks
    return done


def end(tasks: list[Task], tiles: int, ready: dict[str, float] | None = None) -> float:
    """Return the clock at which the last result is there. The largest ``ready`` without tiles."""
    done = run(tasks, tiles, ready)
    ends = [instances[-1][1] + task.latency for task in tasks if (instances := done[task.name])]
    return max([*ends, *(ready or {}).values(), 0.0])


def persistent_end(
    tasks: list[Task], transition: list[Task], tiles: int, items: int, stages: int = 0, across: bool = False
) -> float:
    """Return the clock at which the last of ``items`` is done.

    Each has ``tiles`` tiles; units take one after the other.

    A unit goes through its tasks in the order of `run`, item after item, without waiting for other units to get there:
    loads of the next item run ahead as far as stages are free.

    Args:
        tasks: of every tile, counted through over all items.
        transition: of every item, after its tiles; their ``after`` names tasks of its last tile, or each other.
        stages: of a ring that tasks with ``freed`` fill, of tiles and of the transition, in the order of the lists.
        across: tasks are issued ahead of those of the item before too: a task of the transition by its ``lead`` before
            the next item's first tile; else an item's tasks, and its transition, all come before those of the next.

    Raises:
        ArgumentError: a task waits for one that its unit would do later.
    """
    latency = {task.name: task.latency for task in (*tasks, *transition)}
    queues: dict[str, deque[tuple[Task, int]]] = {task.unit: deque() for task in (*tasks, *transition)}
    fills: list[tuple[str, int]] = []  # what frees each stage that is filled, in order
    held: dict[tuple[str, int], list[tuple[str, int]]] = {}  # what a task waits for besides
    for task, tile in _in_items(tasks, transition, tiles, items, across):
        queues[task.unit].append((task, tile))
        if task.holds:
            held.setdefault((task.holds, tile + 1), []).append((task.name, tile))
        if task.freed:
            if len(fills) >= stages:
                held.setdefault((task.name, tile), []).append(fills[len(fills) - stages])
            fills.append((task.freed, tile))
    done: dict[tuple[str, int], float] = {}
    free = dict.fromkeys(queues, 0.0)
    while any(queues.values()):
        moved = False
        for unit, queue in queues.items():
            while queue:
                task, tile = queue[0]
                needs = [(other, tile - lag) for other, lag in task.after if tile >= lag]
                needs += held.get((task.name, tile), [])
                if any(need not in done for need in needs):
                    break
                start = max([free[unit], *(done[need] + latency[need[0]] for need in needs)])
                free[unit] = done[task.name, tile] = start + task.clocks
                queue.popleft()
                moved = True
        if not moved:
            stuck = [queue[0][0].name for queue in queues.values() if queue]
            raise ArgumentError("order of tasks", stuck, "tasks that do not wait for each other")
    return max((end + latency[name] for (name, _), end in done.items()), default=0.0)


def _in_items(
    tasks: list[Task], transition: list[Task], tiles: int, items: int, across: bool
) -> Iterator[tuple[Task, int]]:
    """(task, tile) of all items in the order of issue; a transition's task has the last tile of its item."""
    if across:
        most = max(task.lead for task in (*tasks, *transition))
        for step in range(-most, tiles * items + 1):
            for task in transition:
                if (step + task.lead) % tiles == 0 and 0 < step + task.lead <= tiles * items:
                    yield task, step + task.lead - 1
            for task in tasks:
                if 0 <= step + task.lead < tiles * items:
                    yield task, step + task.lead
        return
    for item in range(items):
        yield from ((task, item * tiles + tile) for task, tile in _in_order(tasks, tiles))
        yield from ((task, (item + 1) * tiles - 1) for task in transition)


def _in_order(tasks: list[Task], tiles: int) -> Iterator[tuple[Task, int]]:
    """(task, tile) in the order in which units issue them."""
    for step in range(-max(task.lead for task in tasks), tiles):
        for task in tasks:
            if 0 <= step + task.lead < tiles:
                yield task, step + task.lead
