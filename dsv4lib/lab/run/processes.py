"""Hold the processes of one run. Started in their own session, marked, and ended as one, wherever they went.

A Jupyter kernel starts a session of its own, so a process group is not enough to end a run. Every process of a run
inherits a mark of its own in its environment; `end` kills what carries the mark until nothing does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import psutil

MARK = "DSV4_RUN_TOKEN"


class Worker(Protocol):
    """The first process of a run: a `subprocess.Popen`, or a forked one."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None:
        """Return exit code, None while it runs."""
        ...


def start(arguments: list[str], environment: Mapping[str, str], cwd: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start ``arguments`` in a new session with stdout and stderr in ``log``."""
    with log.open("wb") as file:
        return subprocess.Popen(
            arguments, env=dict(environment), cwd=cwd, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, even by SIGKILL.

    The parent is the process that started it.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the request
            os._exit(1)


def marked(token: str) -> list[psutil.Process]:
    """List living processes of this user that carry ``token``."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == token:
                found.append(process)
    return found


def end(token: str, worker: Worker | None = None, patience_s: float = 10.0) -> None:
    """Kill everything that carries ``token``, and reap ``worker``.

    Raises:
        TimeoutError: something survived SIGKILL for ``patience_s`` (stuck in the operating system).
    """
    deadline = time.monotonic() + patience_s
    while True:
        if worker is not None and worker.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
        left = marked(token)
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not left and (worker is None or worker.poll() is not None):
            return
        time.sleep(0.02)
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(left)} processes of a run could not be killed")


def oom_kills() -> int:
    """Count how often this system's out-of-memory killer has struck. 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
