"""Start the ranks of a plan as processes of this machine, and end them together.

    code = launch(["-m", "dsv4lib.lab.cli", "generate", "text", "--tensor-parallel", "2"], 2)

`torchrun` does the same, also over several machines. The store where the ranks meet is in this process, at 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from dsv4lib.parallel.place import AGENT, LIFELINE, Place, served

GRACE = 4.0  # seconds after the first rank that fails in which the others end by themselves
POLL = 0.05
HOST = "127.0.0.1"


def launch(arguments: Sequence[str], world: int, extra: Mapping[str, str] | None = None) -> int:
    """Run ``world`` processes of Python, and wait for all of them.

    Args:
        arguments: of Python. world: ranks. extra: variables of their environment.

    Returns:
        0, or the exit code of the first that failed; of one that a signal ended 128 and its number.
    """
    store = served(Place(host=HOST), datetime.timedelta(seconds=300))
    lifeline, ours = os.pipe()
    os.set_inheritable(lifeline, True)
    threads = str(max(1, len(os.sched_getaffinity(0)) // world))
    common = {"OMP_NUM_THREADS": threads, **os.environ, **(extra or {}), AGENT: "True", LIFELINE: str(lifeline)}
    common |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(store.port)}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    ranks = []
    try:
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            stdin = None if rank == 0 else subprocess.DEVNULL
            command = [sys.executable, *arguments]
            ranks.append(subprocess.Popen(command, env={**common, **own}, stdin=stdin, pass_fds=[lifeline]))
        os.close(lifeline)
        return _wait(ranks)
    finally:
        os.close(ours)
        end(ranks)


def _wait(ranks: Sequence[subprocess.Popen]) -> int:
    """Wait until all have ended, after a failure not for long."""
    first, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        codes = [one.poll() for one in ranks]
        failed = [code for code in codes if code]
        if failed and not first:
            first, deadline = failed[0], time.monotonic() + GRACE
        if None not in codes:
            break
        with contextlib.suppress(KeyboardInterrupt):  # which the ranks have got, too
            time.sleep(POLL)
    return first if first >= 0 else 128 - first


def end(ranks: Sequence[subprocess.Popen]) -> None:
    """End processes that still run: SIGTERM, after a second SIGKILL."""
    for number, seconds in ((signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
        running = [one for one in ranks if one.poll() is None]
        for one in running:
            one.send_signal(number)
        for one in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(seconds)
