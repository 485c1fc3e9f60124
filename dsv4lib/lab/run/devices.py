"""Let one run at a time on a GPU. A run holds its device's lock, across all workspaces of this user on the machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from dsv4lib.errors import DSV4Error


def gpus() -> list[str]:
    """Return identifiers of the GPUs this process may use. As in CUDA_VISIBLE_DEVICES. Empty without a driver."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    answer = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()] if answer.returncode == 0 else []


def lock_folder() -> Path:
    """Return a private folder of this user for the locks. It is the same for all workspaces on this machine.

    Raises:
        DSV4Error: something else lies there: a link, a file, a folder that others own or may write.
    """
    folder = Path(tempfile.gettempdir()) / f"dsv4-locks-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise DSV4Error(
            "the folder for GPU locks is a link, no folder, or one that others own or may write; "
            "set TMPDIR to a folder of your own"
        )
    return folder


def try_take(devices: list[str]) -> tuple[str, FileLock] | None:
    """Take the first free device and its lock, held; None if all are busy."""
    for device in devices:
        name = "".join(c if c.isalnum() else "-" for c in device)
        lock = FileLock(lock_folder() / f"gpu-{name}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        return device, lock
    return None
