"""No network in a run: what a notebook shows must not depend on a server.

The runner asks for it (`CLOSED`), the kernel's process gets an audit hook that refuses every connection and look-up but
those of this machine: AF_UNIX, loopback and its own name. What was refused stands in `REFUSED` in the run's folder, so
that a library that swallows the error cannot hide it: the run is then red whatever its verdict says. The hook sees
Python's sockets, not those of a library's own code or of other processes.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

CLOSED = "DSV4_NETWORK"  # environment variable: "off" closes it
REFUSED = "network.txt"
LINES = 20  # kept of what was refused

# Audit events -> number of the argument that says where to.
EVENTS = {
    "socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1,
    "socket.getaddrinfo": 0, "socket.gethostbyname": 0, "socket.gethostbyaddr": 0,
}  # fmt: skip


class NetworkClosed(ConnectionRefusedError):
    """A notebook under `./dsv4 run` reached for the network."""


def close_if_asked() -> None:
    """Close the network of this process, for good, if the environment says so."""
    if os.environ.get(CLOSED) != "off":
        return
    folder = os.environ.get("DSV4_RUN_DIR")
    here = {socket.gethostname(), "localhost"}  # read now: this is a system call, not a look-up

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and not _is_here(arguments[EVENTS[event]], here):
            what = f"{event.removeprefix('socket.')} {arguments[EVENTS[event]]!r}"
            if folder:
                _note(os.path.join(folder, REFUSED), what)
            raise NetworkClosed(f"there is no network in a run of a stage: {what}")

    sys.addaudithook(hook)


def refused(folder: Path) -> list[str]:
    """List what the run of this folder reached for."""
    try:
        return (folder / REFUSED).read_text(errors="replace").splitlines()
    except OSError:
        return []


def _is_here(address: Any, here: set[str]) -> bool:
    inside = isinstance(address, tuple)
    host = address[0] if inside and address else address
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if not isinstance(host, str):
        return host is None or inside  # no host, or of another family than the internet's, such as netlink
    if not inside and host[:1] in ("/", "\0"):
        return True  # AF_UNIX
    return host in here or host.startswith("127.") or host in ("", "::1", "0.0.0.0", "::")


def _note(path: str, what: str) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError:
        return
    try:
        if os.fstat(handle).st_size < LINES * 200:
            os.write(handle, (what[:199] + "\n").encode(errors="replace"))
    finally:
        os.close(handle)
