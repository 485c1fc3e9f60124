"""Turn SIGTERM into an exception, so that contexts undo what they made.

These are temporary folders and patches.

Python's default for SIGTERM ends the process at once, without clean-up. Batch systems, `timeout` and test
runners send it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_CODE)


@contextmanager
def unwinding() -> Iterator[None]:
    """Raise SystemExit(143) inside on SIGTERM.

    A handler that is already installed stays. Off the main thread nothing changes: handlers can only be set there.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        if ours and signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
