"""Show how a run goes. On a terminal as live bars, elsewhere as one plain line for each finished notebook."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from dsv4lib.lab.records import Record
from dsv4lib.lab.verdicts import LOOKS


class Progress:
    """Silent base: what the runner reports of its work."""

    @contextlib.contextmanager
    def showing(self, total: int, done: int) -> Iterator[None]:
        """Surround a command of ``total`` jobs, ``done`` of them finished earlier."""
        yield

    def update(self, active: Sequence[tuple[str, tuple[int, int] | None, float]]) -> None:
        """Update by (job, (cell, cells) or None, seconds) of each run in progress. Called often."""

    def finished(self, record: Record) -> None:
        """Show a record; called once for each."""

    def note(self, text: str) -> None:
        """Show one sentence about the command as a whole."""


class ConsoleProgress(Progress):
    """Live bars if ``console`` is a terminal, else plain lines."""

    def __init__(self, console: Console):
        self.console = console
        self.total = self.count = 0
        self.bars: Bars | None = None
        self.tasks: dict[str, int] = {}

    @contextlib.contextmanager
    def showing(self, total: int, done: int) -> Iterator[None]:
        """Show until the command is over."""
        self.total, self.count = total, done
        if done:
            self.console.print(f"resuming: {done} of {total} are finished already")
        if not self.console.is_terminal:
            yield
            return
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[state]}"))
        with Bars(*columns, TimeElapsedColumn(), console=self.console, transient=True) as self.bars:
            yield
        self.bars = None

    def note(self, text: str) -> None:
        """Print it."""
        self.console.print(text, style="yellow", markup=False, highlight=False)

    def update(self, active: Sequence[tuple[str, tuple[int, int] | None, float]]) -> None:
        """Move the bars."""
        if self.bars is None:
            return
        for name in set(self.tasks) - {job for job, _, _ in active}:
            self.bars.remove_task(self.tasks.pop(name))
        for job, cell, _ in active:
            if job not in self.tasks:
                self.tasks[job] = self.bars.add_task(job, total=None, state="starting")
            if cell is not None:
                state = f"cell {cell[0] + 1} of {cell[1]}"
                self.bars.update(self.tasks[job], total=cell[1], completed=cell[0], state=state)

    def finished(self, record: Record) -> None:
        """Print one line."""
        self.count += 1
        look = LOOKS[record.verdict]
        width = len(str(self.total))
        self.console.print(
            f"[{self.count:>{width}}/{self.total}] {record.job:<28} {look.label:<14} {record.seconds:6.1f} s",
            style=look.terminal, markup=False, highlight=False,
        )  # fmt: skip
