"""Open JupyterLab on this workspace, `dsv4 lab`. On 127.0.0.1 with a token, the lab importable in every kernel."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from dsv4lib import env
from dsv4lib.errors import ArgumentError, DSV4Error

FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"
TOKEN = "JUPYTER_TOKEN"  # environment variable of jupyter_server, readable by this user only
PORTS = 50  # tried


def command(notebook: str = FIRST_NOTEBOOK, port: int = 8888, browser: bool = True) -> list[str]:
    """Run the command line that starts JupyterLab. The token is in its environment, as any user may read command lines.

    Args:
        notebook: what to open first, relative to the workspace.
        port: TCP port on 127.0.0.1.
        browser: open the system's browser.

    Raises:
        ArgumentError: the notebook does not exist or the port is out of range.
        DSV4Error: JupyterLab is not installed (possible with DSV4_PYTHON).
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise DSV4Error(f"this environment has no jupyterlab: {sys.executable} -m {env.install()}")
    root = served()
    if not (root / notebook).is_file():
        have = ", ".join(sorted(p.name for p in (root / "notebooks").glob("*.ipynb")))
        raise ArgumentError("notebook", notebook, f"a notebook of this workspace ({have})")
    if not 1024 <= port <= 65535:
        raise ArgumentError("port", port, "1024 to 65535")
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={root}",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",  # the address that was printed, or none
        f"--LabApp.default_url=/lab/tree/{notebook}",
        *([] if browser else ["--no-browser"]),
        # In containers one often is root; the server stays on 127.0.0.1 with a token all the same.
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]


def served() -> Path:
    """Return the folder that JupyterLab shows: the clone, or for a wheel the user's own copy of its notebooks."""
    if not env.is_installed():
        return env.root()
    own = env.own_data() / f"notebooks-{env.version()}"
    if not own.is_dir():
        own.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=own.parent) as part:  # whole or not at all
            shutil.copytree(env.root() / "notebooks", Path(part) / "whole" / "notebooks")
            (Path(part) / "whole").rename(own)
    return own


def token() -> str:
    """Return the access token: JUPYTER_TOKEN if it is set, else a fresh random one.

    Raises:
        DSV4Error: JUPYTER_TOKEN is shorter than 8 characters; an empty token would switch authentication off.
    """
    chosen = os.environ.get(TOKEN)
    if chosen is not None and len(chosen) < 8:
        raise DSV4Error(f"{TOKEN} needs at least 8 characters")
    return chosen or secrets.token_hex(16)


def free_port(first: int) -> int:
    """Return the first port on 127.0.0.1 from ``first`` on that is free.

    Raises:
        DSV4Error: none of `PORTS` is free.
    """
    for port in range(first, min(first + PORTS, 65536)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise DSV4Error(f"no port from {first} to {min(first + PORTS, 65536) - 1} is free; choose another with --port")


def greeting(notebook: str, port: int, secret: str, terminal: bool) -> str:
    """Return what to print.

    It is the address to open, with the token only where a person reads it and no file keeps it.
    """
    where = f"http://127.0.0.1:{port}/lab/tree/{notebook}"
    if not terminal:
        return f"JupyterLab: {where}\nits token is shown by: {sys.executable} -m jupyter server list"
    return f"JupyterLab: {where}?token={secret}\nfrom another machine: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE"


def main(notebook: str = FIRST_NOTEBOOK, port: int = 8888, browser: bool = True) -> None:
    """Replace this process by JupyterLab, so Ctrl-C and signals reach it directly."""
    command(notebook, port, browser)  # refuses first
    secret, port = token(), free_port(port)
    arguments = command(notebook, port, browser)
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(env.package().parent), path]))
    os.environ[TOKEN] = secret
    os.environ.pop("DSV4_HEADLESS", None)
    print(greeting(notebook, port, secret, sys.stdout.isatty()))
    sys.stdout.flush()
    os.execv(arguments[0], arguments)
