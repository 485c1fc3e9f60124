"""What every op does at its end: choose the architecture to compile for, put a kernel on its back end."""

from __future__ import annotations

import functools
import warnings
from typing import Any

from dsv4lib import backends


@functools.cache
def arch_for(backend: str, archs: tuple[str, ...]) -> str:
    """The architecture to compile for: the first of ``archs`` that a GPU here runs, else the first."""
    if backend in ("auto", "native"):
        return next((arch for arch in archs if backends.status("native", arch).available), archs[0])
    return archs[0]


def enqueue(name: str, code: Any, args: tuple) -> None:
    """`backends.enqueue`; what the emulator reports of hazards becomes a warning."""
    gpu = backends.enqueue(name, code, *args)
    found = [] if gpu is None else gpu.launches[-1].result.hazards
    if found:
        warnings.warn(f"the emulator reports {len(found)} hazards, first: {found[0].message}", stacklevel=2)
