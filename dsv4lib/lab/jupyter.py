"""`dsv4 lab`: JupyterLab on this workspace, on 127.0.0.1 with a token, the lab importable in every kernel."""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys

from dsv4lib import env
from dsv4lib.errors import ArgumentError, DSV4Error

FIRST_NOTEBOOK = "notebooks/00_start_here.ipynb"


def command(
    notebook: str = FIRST_NOTEBOOK, port: int = 8888, token: str | None = None, browser: bool = True
) -> list[str]:
    """The command line that starts JupyterLab.

    Args:
        notebook: what to open first, relative to the workspace.
        port: TCP port on 127.0.0.1; the next free one is taken if it is in use.
        token: access token; a fresh random one by default. Never empty: an empty token switches authentication off.
        browser: open the system's browser.

    Raises:
        ArgumentError: the notebook does not exist, the port is out of range or the token is shorter than 8 characters.
        DSV4Error: JupyterLab is not installed (possible with DSV4_PYTHON).
    """
    if importlib.util.find_spec("jupyterlab") is None:
        raise DSV4Error(f"this environment has no jupyterlab: {sys.executable} -m pip install -r requirements.lock")
    if not (env.root() / notebook).is_file():
        have = ", ".join(sorted(p.name for p in (env.root() / "notebooks").glob("*.ipynb")))
        raise ArgumentError("notebook", notebook, f"a notebook of this workspace ({have})")
    if not 1024 <= port <= 65535:
        raise ArgumentError("port", port, "1024 to 65535")
    if token is not None and len(token) < 8:
        raise ArgumentError("token", token, "at least 8 characters")
    return [
        sys.executable,
        "-m",
        "jupyterlab",
        f"--ServerApp.root_dir={env.root()}",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        f"--IdentityProvider.token={token or secrets.token_hex(16)}",
        f"--LabApp.default_url=/lab/tree/{notebook}",
        *([] if browser else ["--no-browser"]),
        # In containers one often is root; the server stays on 127.0.0.1 behind a token all the same.
        *(["--allow-root"] if os.geteuid() == 0 else []),
    ]


def main(notebook: str = FIRST_NOTEBOOK, port: int = 8888, token: str | None = None, browser: bool = True) -> None:
    """Replace this process by JupyterLab, so Ctrl-C and signals reach it directly."""
    arguments = command(notebook, port, token, browser)
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(env.root()), path]))
    os.environ.pop("DSV4_HEADLESS", None)
    sys.stdout.flush()
    os.execv(arguments[0], arguments)
