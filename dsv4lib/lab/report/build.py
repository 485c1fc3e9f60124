"""Build the static report of one command. An index has every verdict, red ones first; each notebook has one page.

It opens from file://, runs no script and loads nothing: style and pictures are inside each page, and a content security
policy in its head forbids the rest. Every text is escaped and freed of private paths and host names. The index is
filtered by links to anchors (`:target` of its style sheet).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dsv4lib.errors import DSV4Error
from dsv4lib.lab.records import Record
from dsv4lib.lab.report import cells
from dsv4lib.lab.report.links import Links, connect
from dsv4lib.lab.report.scrub import scrub
from dsv4lib.lab.run.files import write_atomic
from dsv4lib.lab.stage import discover
from dsv4lib.lab.verdicts import LOOKS, SEVERITY, Verdict, exit_code_table

TEMPLATES = Path(__file__).parent / "templates"
# Red classes first, the worst of them on top; then what verified nothing; then what passed.
ORDER = (*SEVERITY, Verdict.SKIPPED, Verdict.PASSED)


def write_report(
    folder: Path,
    records: Sequence[Record],
    root: Path,
    *,
    missing: Sequence[str] = (),
    interrupted: bool = False,
    sources: Mapping[str, Path] | None = None,
) -> Path:
    """Write `report/` under ``folder`` and return the path of its index.

    Args:
        folder: data/runs/<run id>.
        records: the last record of each job.
        root: the workspace, shown as "." in every path.
        missing: what a nightly lost against the one before.
        interrupted: a signal ended the command.
        sources: folder of a record's notebook by its run id, where it is not ``folder``.
    """
    out = folder / "report"
    out.mkdir(exist_ok=True)
    clean = functools.partial(scrub, root=root)
    templates = environment()
    places = sources or {}
    shown = [Shown(record, places.get(record.run_id, folder), clean) for record in records]
    notebooks = _notebooks(root)
    runs = [one for one in shown if one.record.kind == "run" and one.record.stage in notebooks]
    pages = {notebooks[one.record.stage]: one.file for one in reversed(runs)}  # no link leads to an injected fault
    for index, one in enumerate(shown):
        source = notebooks.get(one.record.stage, one.record.notebook)
        connect(one.page.blocks, Links(root, {**pages, source: one.file}), source, one.file)
        neighbours = {
            "before": shown[index - 1] if index else None,
            "after": shown[index + 1] if index + 1 < len(shown) else None,
        }
        text = templates.get_template("notebook.html").render(shown=one, record=one.record, **neighbours)
        write_atomic(out / one.file, text.encode(errors="replace"))
    counts = Counter(record.verdict for record in records)
    text = templates.get_template("index.html").render(
        records=records,
        shown=sorted(shown, key=lambda one: ORDER.index(one.record.verdict)),
        counts=[(LOOKS[verdict], verdict, counts[verdict]) for verdict in ORDER if counts[verdict]],
        skipped_checks=sum(len(record.skipped) for record in records),
        seconds=sum(record.seconds for record in records),
        missing=[clean(key) for key in missing],
        interrupted=interrupted,
        codes=exit_code_table(),
        run_id=folder.name,
    )
    write_atomic(out / "index.html", text.encode(errors="replace"))
    return out / "index.html"


def _notebooks(root: Path) -> dict[str, str]:
    """Paths of the notebooks by stage; none where a contract cannot be read, which must not cost the report."""
    try:
        return {stage.name: stage.notebook for stage in discover(root)} if (root / "stages").is_dir() else {}
    except DSV4Error:
        return {}


class Shown:
    """A record with its rendered notebook, for the templates."""

    def __init__(
        self, record: Record, folder: Path, clean: Callable[[str], str], pictures: cells.Pictures | None = None
    ):
        self.record, self.file, self.look = record, f"{record.job}.html", LOOKS[record.verdict]
        notebook = folder / record.notebook
        self.page = cells.Page()
        if record.notebook and notebook.is_file():
            try:
                self.page = cells.render(notebook, record.title, clean, pictures)
            except Exception as error:  # one page must not cost the report
                self.page = cells.Page([cells.note(f"This notebook cannot be shown ({type(error).__name__}).")])
        gated = {gate.metric for gate in record.gates}
        self.measured = {name: value for name, value in record.metrics.items() if name not in gated}
        self.other_skips = {name: why for name, why in record.skipped.items() if name not in gated}
        self.parameters = {name: clean(str(value)) for name, value in record.parameters.items()}

    @property
    def is_red(self) -> bool:
        """Tell whether the run failed, in any way."""
        return self.record.verdict not in (Verdict.PASSED, Verdict.SKIPPED)


def environment(*folders: Path) -> Environment:
    """Return the templates of ``folders`` and of the report, which escape every text."""
    made = Environment(
        loader=FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["number"] = lambda value: "" if value is None else f"{value:.6g}"
    made.globals["LOOKS"] = LOOKS
    made.globals["GATE_LOOK"] = {
        "passed": LOOKS[Verdict.PASSED],
        "failed": LOOKS[Verdict.GATE_FAILED],
        "skipped": LOOKS[Verdict.SKIPPED],
        "missing": LOOKS[Verdict.NO_VERDICT],
    }
    return made
