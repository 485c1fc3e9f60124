"""Conclude a command. Its records become a table, a report, a summary for machines and an exit code.

`./dsv4 run` and `./dsv4 nightly` end here, whatever executed their jobs, and also when a signal or a time budget ended
them. Beside the report lie `summary.json` and `junit.xml` (`report/summary.py`, `report/junit.py`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4lib.lab import ledger
from dsv4lib.lab.records import Record
from dsv4lib.lab.report import junit, summary
from dsv4lib.lab.run import manifest, runner
from dsv4lib.lab.stage import GPU_SETS
from dsv4lib.lab.verdicts import LOOKS, Verdict, exit_code

NATIVE, NOTHING = "native", "none"
REQUIREMENTS = (NATIVE, NOTHING)


@dataclass(frozen=True)
class Outcome:
    """What one command came to.

    Attributes:
        result: its manifest and the last record of each job.
        planned: names of all its jobs, in order.
        missing: checks that the set's last baseline executed and this did not.
        required: `native` if every kernel had to run on a GPU, else `none`.
        known: red jobs that `tests/flaky.toml` knows, with their entries: they do not count for the exit code.
        flaky: what is known of checks with several verdicts on one commit, as `summary` shows them.
        sources: folder of the notebooks of a record, by its run id, where it is not the run's own folder.
    """

    result: runner.Result
    planned: list[str]
    missing: list[str] = field(default_factory=list)
    required: str = NOTHING
    known: dict[str, ledger.Entry] = field(default_factory=dict)
    flaky: list[dict[str, object]] = field(default_factory=list)
    sources: dict[str, Path] = field(default_factory=dict)

    @property
    def not_started(self) -> list[str]:
        """List the jobs without a record."""
        have = {record.job for record in self.result.records}
        return [name for name in self.planned if name not in have]

    @property
    def not_native(self) -> list[str]:
        """List the jobs that had to run their kernel on a GPU and did not, by skipping it, on another back end or GPU.

        Kernels of an architecture that the set's GPU does not run, and runs for which another back end was chosen,
        need not.
        """
        wanted = [r for r in self.result.records if self.required == NATIVE and _needs_gpu(r)]
        return [
            r.job for r in wanted if r.backend != NATIVE or r.verdict is Verdict.SKIPPED or r.arch not in _wanted(r)
        ]

    @property
    def code(self) -> int:
        """Return the exit code."""
        if self.result.interrupted:
            return LOOKS[Verdict.INTERRUPTED].code
        if not self.planned:  # a shard of a plan that has fewer jobs than shards
            return 0
        counting = [r.verdict for r in self.result.records if r.job not in self.known]
        return exit_code(
            counting, bool(self.missing), not_native=bool(self.not_native), unfinished=bool(self.not_started)
        )


def _needs_gpu(record: Record) -> bool:
    free = record.parameters.get("backend", "auto") in ("auto", NATIVE)
    return free and bool(record.arch) and not {record.arch, *record.archs}.isdisjoint(_wanted(record))


def _wanted(record: Record) -> tuple[str, ...]:
    """Architectures of the GPU that the record's set names; where it names none, the record's own."""
    return GPU_SETS.get(record.set, (record.arch,))


def known_flaky(records: Sequence[Record], entries: Mapping[str, ledger.Entry]) -> dict[str, ledger.Entry]:
    """Return the red jobs of stages that ``entries`` (`ledger.living`) knows, with their entries."""
    red = [record for record in records if record.verdict not in (Verdict.PASSED, Verdict.SKIPPED)]
    return {r.job: entries[f"stage {r.stage}"] for r in red if f"stage {r.stage}" in entries}


def lost(result: runner.Result, stages: Sequence[str], accept: bool = False) -> list[str]:
    """Return what a run lost against its set's last baseline; make it the next one if it is whole and lost nothing.

    A run of which a part crashed, or ended before its gates were judged, has checked less: it is no baseline. Nor is
    one that was interrupted or has jobs left, which is red for that and not compared either.

    Args:
        result: the run; parameters or back ends chosen by hand make its set incomparable, and are not given here.
        stages: names of the chosen stages.
        accept: it may have executed less.
    """
    runs, now = result.manifest.folder.parent, result.manifest
    if result.interrupted or {job["name"] for job in now.jobs} != {record.job for record in result.records}:
        return []
    missing = [] if accept else manifest.shrinkage(runs, now.set, now.executed, stages, now.run_id, now.whole)
    judged = all(record.gates or record.verdict is Verdict.SKIPPED for record in result.records)
    if now.whole and not missing and judged:
        now.save(baseline=True)
    return missing


def conclude(outcome: Outcome, console: Console, root: Path) -> int:
    """Print table and what is to be said beside it, write report, summary and JUnit file. Returns the exit code."""
    result = outcome.result
    console.print(table(result.records))
    _say(console, "yellow", outcome.not_started and "not started: " + ", ".join(outcome.not_started))
    again = [record.job for record in result.records if not record.finished]
    if again and not result.interrupted:
        text = f"not finished: {', '.join(again)}; run them again with the same command and --resume"
        _say(console, "yellow", text)
    for job, entry in outcome.known.items():
        verdict = next(r.verdict for r in result.records if r.job == job)
        text = f"known to be flaky: {job} ({verdict}), until {entry.expires}, issue {entry.issue}"
        _say(console, "yellow", text)
    for key in outcome.missing:
        _say(console, "red", f"missing since the last {result.manifest.set}: {key}")
    if outcome.not_native:
        _say(console, "red", f"not native, which was required: {', '.join(outcome.not_native)}")
    index = _write(outcome, root)
    console.print(Text(f"report: {os.path.relpath(index)}"), soft_wrap=True)
    if result.interrupted:
        _say(console, "yellow", "interrupted; go on with the same command and --resume")
    return outcome.code


def _say(console: Console, style: str, text: str | list[str]) -> None:
    if text:
        console.print(Text(str(text), style=style))


def _write(outcome: Outcome, root: Path) -> Path:
    from dsv4lib.lab.report.build import write_report

    result = outcome.result
    folder = result.manifest.folder
    index = write_report(
        folder, result.records, root, missing=outcome.missing, interrupted=result.interrupted, sources=outcome.sources
    )
    told = summary.Told(
        manifest=result.manifest, records=result.records, interrupted=result.interrupted, exit_code=outcome.code,
        missing=outcome.missing, not_started=outcome.not_started, required=outcome.required,
        not_native=outcome.not_native, known=outcome.known, flaky=outcome.flaky,
    )  # fmt: skip
    summary.write(told, index.parent, root)
    junit.write(told, index.parent, root)
    return index


def table(records: Sequence[Record]) -> Table:
    """Return the closing table: one row for each job."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("stage", "verdict", "back end", "time", "key metric"):
        out.add_column(heading, no_wrap=heading != "key metric", justify="right" if heading == "time" else "left")
    for record in records:
        look = LOOKS[record.verdict]
        out.add_row(
            record.job,
            Text(look.label, style=look.terminal),
            record.backend or "-",
            f"{record.seconds:.1f} s",
            Text(key_metric(record)),
        )
    return out


def key_metric(record: Record) -> str:
    """Choose the gate that decides: the first one not passed, else the stage's first. Without one, the reason."""
    if record.verdict not in (Verdict.PASSED, Verdict.GATE_FAILED) or not record.gates or record.negative:
        return record.reason
    shown = next((gate for gate in record.gates if gate.state != "passed"), record.gates[0])
    if shown.value is None:
        return f"{shown.metric}: {shown.reason}"
    return f"{shown.metric} = {shown.value:.6g} ({shown.op} {shown.bound:g})"
