"""Write files that are whole or absent, whatever interrupts the writer. Also files that only this user can have put."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` through a temporary file beside it and a rename. A reader never sees half of it.

    Raises:
        OSError: as the file system gives it (errno ENOSPC on a full disk); ``path`` is then unchanged.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_own(path: Path, most: int = 1 << 20, *, anybody: bool = False) -> bytes:
    """Read a regular file of this user. A FIFO, a device, a link or another user's file is refused unread.

    Args:
        path: the file.
        most: bytes that it may have.
        anybody: it may belong to anybody, as in a workspace that several share.

    Raises:
        OSError: there is none, it is not such a file (EPERM) or it is larger (EFBIG).
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or (found.st_uid != os.geteuid() and not anybody):
            raise PermissionError(errno.EPERM, "not a regular file of this user", str(path))
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
    return data


def own_folders(parent: Path, prefix: str) -> list[Path]:
    """List this user's folders in ``parent`` whose names start so. Others' folders and links there are left out."""
    found = []
    for entry in os.scandir(parent):
        if entry.name.startswith(prefix):
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                    found.append(Path(entry.path))
    return sorted(found)
