"""Run one notebook in a process of its own. Forked (`forkserver`) or `python -m` this module with a private folder.

It executes the notebook with papermill and says how that ended. It judges nothing: papermill's own metadata calls a
notebook `completed` after a timeout or a dead kernel, so the class comes from the exception, and the runner, which
started this process, owns the verdict. Time limits are the runner's as well.
"""

from __future__ import annotations

import errno
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4lib.lab.notebook import slices
from dsv4lib.lab.run.files import write_atomic
from dsv4lib.lab.run.meter import own_cpu_s
from dsv4lib.lab.run.processes import die_with_parent, oom_kills
from dsv4lib.lab.run.quick_nbformat import nbformat  # before papermill, which imports it as well
from dsv4lib.lab.verdicts import Verdict

if TYPE_CHECKING:
    from dsv4lib.lab.run.forkserver import IdleKernel

OUT_OF_MEMORY = ("MemoryError", "OutOfMemoryError", "_ArrayMemoryError")
OUT_OF_MEMORY_TEXT = ("can't allocate memory", "CUDA out of memory", "Cannot allocate memory", "[Errno 12]")


def execute(job: dict[str, Any], private: Path, idle: IdleKernel | None = None) -> None:
    """Run the notebook of ``job``; raises whatever ended it early.

    Args:
        job: input, output, cwd (paths), parameters, and a slice if not the whole notebook is to run.
        private: folder for sockets and the progress file; its path is short, as socket paths must be.
        idle: a process that waits to become the lab's kernel; without, one is started.
    """
    import papermill
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_client.provisioning import local_provisioner
    from papermill import engines
    from traitlets.config import Config

    notebook = nbformat.read(job["input"], as_version=4)
    if "slice" in job:
        slices.apply(notebook.cells, slices.Slice(**job["slice"]))
    cells = len(notebook.cells) + 1  # papermill adds one with the parameters

    def on_cell_start(cell: Any, cell_index: int) -> None:
        write_atomic(private / "progress.json", json.dumps({"cell": cell_index, "cells": cells}).encode())

    class Manager(AsyncKernelManager):
        """Remembers how its kernel ended, which the client forgets."""

        async def _async_is_alive(self) -> bool:
            alive = await super()._async_is_alive()
            process = getattr(self.provisioner, "process", None)
            if not alive and process is not None:
                write_atomic(private / "kernel_exit", str(process.poll()).encode())
            return alive

        is_alive = _async_is_alive

    for name in ("cell_start", "cell_complete"):
        setattr(
            engines.NotebookExecutionManager, name, _saving_what_ran(getattr(engines.NotebookExecutionManager, name))
        )
    if idle is not None:
        local_provisioner.launch_kernel = idle.launch
    config = Config()
    config.KernelManager.transport = "ipc"
    config.KernelManager.ip = str(private / "s")
    papermill.execute_notebook(
        notebook, job["output"], parameters=job["parameters"], cwd=job["cwd"], progress_bar=False, log_output=False,
        config=config, kernel_manager_class=Manager, on_cell_start=on_cell_start, autosave_cell_every=2,
    )  # fmt: skip


def _saving_what_ran(method: Callable[..., None]) -> Callable[..., None]:
    """A method of papermill's manager that saves the notebook only around cells that are executed."""

    def wrapped(self: Any, cell: Any, *others: Any, **named: Any) -> None:
        path = self.output_path
        if cell.cell_type != "code" or slices.LEFT_OUT in cell.metadata.get("tags", ()):
            self.output_path = None
        try:
            method(self, cell, *others, **named)
        finally:
            self.output_path = path

    return wrapped


def classify(error: BaseException, private: Path, oom_before: int) -> tuple[Verdict, str]:
    """Classify what ended an execution: class and one-sentence reason."""
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    if isinstance(error, PapermillExecutionError):
        said = f"{error.ename}: {error.evalue}" if error.evalue else error.ename
        if error.ename == "AssertionError":
            return Verdict.ASSERTION, said
        if error.ename in OUT_OF_MEMORY or any(text in error.evalue for text in OUT_OF_MEMORY_TEXT):
            return Verdict.OOM, said
        if f"[Errno {errno.ENOSPC}]" in error.evalue:
            return Verdict.DISK_FULL, said
        return Verdict.ERROR, said
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return Verdict.DISK_FULL, "the notebook could not be saved: no space left on device"
    if isinstance(error, NoSuchKernel):
        return Verdict.MISSING_KERNEL, f"no Jupyter kernel named {error.name!r} is installed"
    if isinstance(error, ValueError) and "No kernel name found" in str(error):
        return Verdict.MISSING_KERNEL, "the notebook names no kernel"
    if isinstance(error, DeadKernelError) or "Kernel died before replying" in str(error):
        return _death(private, oom_before)
    if isinstance(error, MemoryError):
        return Verdict.OOM, "the process that runs the notebook had no memory left"
    return Verdict.ERROR, f"{type(error).__name__}: {error}"


def _death(private: Path, oom_before: int) -> tuple[Verdict, str]:
    import signal

    path = private / "kernel_exit"
    code = int(path.read_text()) if path.is_file() and path.read_text().lstrip("-").isdigit() else None
    if code == -signal.SIGKILL and oom_kills() > oom_before:
        return Verdict.OOM, "the operating system killed the kernel: out of memory"
    if code is None:
        return Verdict.CRASH, "the kernel process died"
    if code < 0:
        return Verdict.CRASH, f"the kernel process died from {signal.Signals(-code).name}"
    return Verdict.CRASH, f"the kernel process ended itself with exit code {code}"


def run(folder: str, idle: IdleKernel | None = None) -> None:
    """Run the job of ``folder``/job.json and leave ``folder``/outcome.json. ``idle``: see `execute`."""
    private = Path(folder)
    job = json.loads((private / "job.json").read_text())
    oom_before = oom_kills()
    outcome: dict[str, str | float | None] = {"class": None, "reason": ""}
    try:
        execute(job, private, idle)
    except Exception as error:  # the one place where every failure gets a class
        traceback.print_exc()
        kind, reason = classify(error, private, oom_before)
        outcome = {"class": str(kind), "reason": reason}
    outcome["cpu_s"] = own_cpu_s()
    write_atomic(private / "outcome.json", json.dumps(outcome).encode())


def main(folder: str) -> None:
    """Run the job of ``folder`` in this process, which was started for it."""
    die_with_parent()
    sys.modules.setdefault("pyarrow", None)  # type: ignore[arg-type]  # papermill's way to Hadoop, 0.5 s to import
    run(folder)


if __name__ == "__main__":
    main(sys.argv[1])
