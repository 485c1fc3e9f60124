"""Say where compiled code is kept between processes, and whether to trust it.

A user who can write a folder of compiled code decides what its owner runs. So the folder must belong to the user, and
no other user may write it or a folder above it. Group-writable counts as "others may write", also where the group is
the user's own: an access control list shows in the same bit, and members can be added later.

    DSV4_CACHE      the folder; "off": nothing is kept; default: dsv4 in XDG_CACHE_HOME or ~/.cache
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dsv4lib.errors import DSV4Error


class CacheError(DSV4Error, RuntimeError):
    """The folder of the cache may not be used. The message says why and what would fix it."""


def cache_root() -> Path | None:
    """Return the folder that the environment names, None for "off". It need not exist.

    Raises:
        CacheError: nothing is named and the user has no home.
    """
    chosen = os.environ.get("DSV4_CACHE", "")
    if chosen:
        return None if chosen == "off" else Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: a relative path is ignored
        return Path(base) / "dsv4"
    try:
        return Path.home() / ".cache" / "dsv4"
    except RuntimeError as error:
        raise CacheError(f"cache folder: {error} (give DSV4_CACHE a folder of your own, or DSV4_CACHE=off)") from error


def own_folder(folder: Path) -> Path:
    """Make ``folder`` if it is missing. Check that only this user can put files into it.

    Whatever is made, parents included, gets mode 0700 under any umask.

    Returns:
        The folder without symbolic links: no other user can make this path lead elsewhere afterwards.

    Raises:
        CacheError: it cannot be made, is not a folder or another user's, or others may write it or a folder above it.
    """
    fix = "give DSV4_CACHE a folder of your own, or DSV4_CACHE=off"
    try:
        for place in [*(p for p in reversed(folder.parents) if not p.exists()), folder]:
            place.mkdir(mode=0o700, exist_ok=True)
        for place in (path := folder.resolve(), *path.parents):
            facts = place.stat()
            if not stat.S_ISDIR(facts.st_mode):
                raise CacheError(f"cache folder {folder}: {place} is not a folder ({fix})")
            if facts.st_uid != os.getuid() and (place == path or facts.st_uid != 0):
                raise CacheError(f"cache folder {folder}: {place} belongs to user {facts.st_uid} ({fix})")
            open_to_all = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if open_to_all and (place == path or not facts.st_mode & stat.S_ISVTX):
                mode = stat.filemode(facts.st_mode)
                close = f"chmod go-w {place}, or {fix}" if facts.st_uid == os.getuid() else fix
                raise CacheError(f"cache folder {folder}: others may write {place}, mode {mode} ({close})")
    except OSError as error:
        raise CacheError(f"cache folder {folder}: {error.strerror} ({fix})") from error
    return path
