"""Execute one job on a worker of a dask.distributed scheduler, and send back what it left.

A worker needs a clone with the same sources and its environment; no folder is shared. A job has one ticket, which lies
in a queue of the scheduler: who takes it runs the job, so a job is run once even if the scheduler, having lost a
worker, hands its jobs to another. The runner of `./dsv4 run` executes it, with a folder of its own; notebook, log and
record go back as bytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dsv4lib import env
from dsv4lib.lab.run import plan, processes, runner
from dsv4lib.lab.run.files import own_folders, read_own
from dsv4lib.lab.stage import StageError, UnknownStage, load, workspace

GPU = "GPU"  # resource of a worker that may run native kernels: dask worker --resources "GPU=1"
LOOK_EVERY_S = 0.5
FILES = ("notebook.ipynb", "worker.log", "verdict.json")
FILE_BYTES = 1 << 28
PREFIX, LOCK = "dsv4-night-", ".lock"  # of a job's folder, and the file in it that its worker holds
STALE_S = 60.0  # age from which a folder without a holder is one that a killed worker left
TAKEN, REFUSED, RECORD = "taken", "refused", "record"


def identity() -> dict[str, Any]:
    """Return what a worker must have in common with the others, and what it is called."""
    return {"fingerprint": env.source_fingerprint(), "commit": env.revision().commit, "label": env.machine_label()}


def take(ticket: str, client: Any = None) -> bool:
    """Take the ticket of a job; False if somebody has it."""
    from distributed import Queue

    return bool(Queue(ticket, client=client).get(batch=True))


def execute(task: dict[str, Any]) -> dict[str, Any]:
    """Run the job of ``task`` on this worker unless it was begun elsewhere.

    Args:
        task: job (as a dict), set, ticket, fingerprint, memory_mb (or None) and figures.

    Returns:
        {"taken": True}, {"refused": why}, or the bytes of the record and of the files of its notebook.
    """
    from distributed import get_worker

    worker = get_worker()
    asked = functools.partial(_withdrawn, worker, worker.get_current_task())
    if not take(task["ticket"]):
        return {TAKEN: True}
    root, job = workspace(), plan.Job(**task["job"])
    if why := differs(task, job, root):
        return {REFUSED: why}
    job = plan.resolve_here(job, load(job.stage, root))
    clear_after_killed_workers()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder, FileLock(Path(folder, LOCK)):
        options = runner.Options(
            out=Path(folder), workers=1, memory_mb=task["memory_mb"], figures=task["figures"], stop=_seldom(asked)
        )
        result = runner.run([job], root, task["set"], options)
        return _packed(result)


def clear_after_killed_workers() -> None:
    """End processes and remove folders that workers of this user left here when they were killed."""
    for folder in own_folders(Path(tempfile.gettempdir()), PREFIX):
        with contextlib.suppress(OSError, Timeout):
            if time.time() - folder.stat().st_mtime < STALE_S:
                continue
            with FileLock(folder / LOCK, timeout=0):
                for job in folder.glob("*/*/"):
                    processes.end(f"{job.parent.name}/{job.name}")  # as the runner marks them
                shutil.rmtree(folder, ignore_errors=True)


def differs(task: dict[str, Any], job: plan.Job, root: Path) -> str:
    """Say how the sources here differ from the plan's; empty if they do not."""
    if env.source_fingerprint() != task["fingerprint"]:
        return "the worker's dsv4lib differs from the plan's"
    try:
        stage = load(job.stage, root)
    except (StageError, UnknownStage) as error:
        return f"the worker's stage cannot be read: {error}"
    if stage.fingerprint() != job.stage_fingerprint:
        return f"the worker's stage {job.stage} differs from the plan's"
    return ""


def _packed(result: runner.Result) -> dict[str, Any]:
    """The record of the one job as bytes, and those files of its folder that a report or a reader wants."""
    folder, (record,) = result.manifest.folder, result.records
    (stored,) = (folder / "records").glob("*.parquet")
    files = {}
    for name in FILES if record.notebook else ():
        path = folder / Path(record.notebook).parent / name
        if path.is_file():
            files[name] = read_own(path, FILE_BYTES)
    return {RECORD: stored.read_bytes(), "files": files}


def _withdrawn(worker: Any, key: str) -> bool:
    """True if the result is not wanted any more: the job was cancelled, or the client that submitted it is gone."""
    state = worker.state.tasks.get(key)
    return state is None or state.state == "cancelled"


def _seldom(asked: Any) -> Any:
    """What the runner asks all the time: the number of a signal once ``asked`` says so, looked up now and then."""
    last, answer = [0.0], [0]

    def stop() -> int:
        now = time.monotonic()
        if not answer[0] and now - last[0] > LOOK_EVERY_S:
            last[0], answer[0] = now, signal.SIGTERM if asked() else 0
        return answer[0]

    return stop


def as_task(job: plan.Job, **facts: Any) -> dict[str, Any]:
    """Return what `execute` needs, of plain types only."""
    return json.loads(json.dumps({"job": job.as_dict(), **facts}))
