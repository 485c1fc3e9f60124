"""Serve launches. CuTeDSL's compiled host code calls this instead of the CUDA runtime."""

from __future__ import annotations

from typing import Any

__all__ = ["launch"]


def __getattr__(name: str) -> Any:
    if name == "launch":
        from dsv4lib.emulator.driver.host import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
