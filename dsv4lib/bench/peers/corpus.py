"""Run `dsv4 test --corpus`. Packages of requirements-corpus.lock are installed beside the lab for tests/corpus.

They get a folder of their own and come without their requirements: those would replace the lab's pins. The tests put
the folder last on the path, so that the lab's own packages win.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dsv4lib import env
from dsv4lib.errors import DSV4Error

LOCK, FOLDER = "requirements-corpus.lock", "corpus-site"
VARIABLE = "DSV4_CORPUS_SITE"  # names the folder to the tests
_DRIVER = tuple(f"tests/emulator/driver/test_{name}.py" for name in ("doors", "tvm_ffi", "triton", "libcuda"))
TESTS = ("tests/corpus", *_DRIVER)  # what needs the packages
READY = ".dsv4-ready"  # in the folder: what it was made from
MIN_FREE_GIB = 5.6  # 2.7 GiB installed, and about as much again while the wheels are unpacked


def fingerprint() -> str:
    """Return the hash of the pins and of the Python that they were chosen for."""
    lock = (env.root() / LOCK).read_bytes()
    return hashlib.sha256(lock + f"{sys.version_info[:2]}".encode()).hexdigest()[:16]


def install() -> Path:
    """Return the folder with the packages. Installed on first use, anew when the pins change.

    Raises:
        DSV4Error: too little disk, or pip failed.
    """
    folder = env.root() / FOLDER
    if (folder / READY).is_file() and (folder / READY).read_text() == fingerprint():
        return folder
    free = shutil.disk_usage(env.root()).free / 2**30
    if free < MIN_FREE_GIB:
        raise DSV4Error(f"{FOLDER} needs {MIN_FREE_GIB:g} GiB of free disk, {free:.1f} are left")
    shutil.rmtree(folder, ignore_errors=True)  # pip does not replace what an interrupted attempt left
    print(f"installing {LOCK} into {FOLDER} (0.75 GiB to load, 2.7 on disk)", file=sys.stderr, flush=True)
    began = time.monotonic()
    if subprocess.run(pip_command(folder), check=False).returncode:
        raise DSV4Error(f"the packages of {LOCK} could not be installed; the cause is above")
    (folder / READY).write_text(fingerprint())
    print(f"installed in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return folder


def packages() -> Path:
    """Return the folder that `VARIABLE` names, else that of `install`."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else install()


def pip_command(folder: Path) -> list[str]:
    """Return what installs the packages. DSV4_PIP_ARGS goes to pip as in the front door."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    own = os.environ.get("DSV4_PIP_ARGS", "").split()
    return [*pip, *own, "--no-deps", "--target", str(folder), "-r", str(env.root() / LOCK)]


def pytest_arguments(arguments: list[str]) -> list[str]:
    """Make pytest's arguments of `dsv4 test`. ``--corpus`` installs the packages and chooses the tests that need them.

    All of them, or with ``--tenth`` three tenths (tests/conftest.py).

    Raises:
        DSV4Error: see `install`.
    """
    if "--corpus" not in arguments:
        return arguments
    os.environ[VARIABLE] = str(install())
    rest = [a for a in arguments if a != "--corpus"]
    if any(a.startswith("tests/") for a in rest):
        return rest
    return [*([] if any(a.startswith("--tenth") for a in rest) else ["--all"]), *TESTS, *rest]
