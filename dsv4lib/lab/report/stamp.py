"""Say in the saved notebook what really happened. Verdict on top, cell states corrected, no private path.

papermill 2.7 marks a notebook `completed`, exception null, after a timeout or when its kernel died; this puts the
runner's verdict into the file, so that the file alone does not mislead.
"""

from __future__ import annotations

import html
import stat
from collections.abc import Callable
from pathlib import Path

from dsv4lib.lab.notebook.slices import LEFT_OUT
from dsv4lib.lab.records import Record
from dsv4lib.lab.report.scrub import scrub_all
from dsv4lib.lab.run.files import write_atomic
from dsv4lib.lab.run.quick_nbformat import nbformat
from dsv4lib.lab.verdicts import LOOKS, Verdict

BANNER = "dsv4-banner"
PAPERMILL_BANNER = "papermill-error-cell-tag"
# Classes in which the notebook itself ran to its end.
RAN_TO_THE_END = (Verdict.PASSED, Verdict.SKIPPED, Verdict.GATE_FAILED, Verdict.STAYED_GREEN)


def stamp(record: Record, saved: Path, source: Path, stopped_at: int | None, clean: Callable[[str], str] = str) -> None:
    """Write the executed notebook ``saved`` stamped with ``record``. If there is none, ``source``.

    Args:
        record: the runner's verdict.
        saved: where papermill wrote, and where the stamped notebook goes.
        source: the notebook as committed.
        stopped_at: index of the cell that was running when the run ended early.
        clean: takes private detail out of a text; applied to every text of the notebook but pictures in base64.
    """
    notebook = _read(saved) or _read(source) or nbformat.v4.new_notebook()
    notebook.cells = [cell for cell in notebook.cells if not _banner(cell)]
    complete = record.verdict in RAN_TO_THE_END or (record.verdict is Verdict.NO_VERDICT and stopped_at is None)
    _correct(notebook, record, complete, stopped_at)
    notebook.metadata["dsv4"] = {
        "stage": record.stage,
        "set": record.set,
        "verdict": str(record.verdict),
        "reason": record.reason,
        "parameters": record.parameters,
        "backend": record.backend,
        "fingerprint": record.fingerprint,
        "stage_fingerprint": record.stage_fingerprint,
        "started": record.started.isoformat(),
        "seconds": round(record.seconds, 3),
    }
    notebook.cells.insert(0, _banner_cell(record))
    write_atomic(saved, nbformat.writes(nbformat.from_dict(scrub_all(notebook, clean))).encode(errors="replace"))


def _read(path: Path) -> nbformat.NotebookNode | None:
    """The notebook at ``path``; None where there is no whole one (missing, a device, cut off by a full disk)."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, RecursionError, nbformat.reader.NotJSONError, nbformat.ValidationError):
        return None


def _banner(cell: nbformat.NotebookNode) -> bool:
    return bool({BANNER, PAPERMILL_BANNER} & set(cell.metadata.get("tags", [])))


def _correct(notebook: nbformat.NotebookNode, record: Record, complete: bool, stopped_at: int | None) -> None:
    meta = notebook.metadata.setdefault("papermill", {})
    meta["exception"] = None if complete else True
    meta["input_path"], meta["output_path"] = f"{record.stage}", "notebook.ipynb"
    meta["parameters"] = record.parameters
    for index, cell in enumerate(notebook.cells):
        state = cell.metadata.setdefault("papermill", {})
        if LEFT_OUT in cell.metadata.get("tags", []):
            state["status"], state["exception"] = "pending", None
        elif complete:
            state["status"], state["exception"] = "completed", None
        elif stopped_at is None or index > stopped_at:
            state["status"], state["exception"] = "pending", None
        elif index == stopped_at:
            state["status"], state["exception"] = "failed", True


def _banner_cell(record: Record) -> nbformat.NotebookNode:
    look = LOOKS[record.verdict]
    reason = html.escape(" ".join(record.reason.split()))  # an empty line would end the HTML
    text = (
        f'<div style="color:{look.ink};background:{look.paper};padding:8px 14px;border-radius:4px">'
        f"<b>{look.label}</b> · {reason}</div>"
    )
    cell = nbformat.v4.new_markdown_cell(text, metadata={"tags": [BANNER]})
    cell["id"] = "dsv4-banner"
    return cell
