"""Calls of ops with kernels planted in place of theirs, and launches whose bytes are counted; for pages and stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from dsv4lib import emulator
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.ops import compile_cache

ARCH, ARCHS = "sm_100a", ("sm_100a", "sm_90a")
SECTOR = 32  # bytes of memory that are moved together


def run(backend: str, call: Callable[[], Any], *kernels: tuple[Any, str, type]) -> int:
    """Call ops with kernels planted, each as (module of the op, name there, class); no two such calls at once.

    Returns:
        hazards, which only the emulator sees.
    """
    with ExitStack() as stack:
        gpu = stack.enter_context(emulator.device(ARCH, checks="race")) if backend == "emulator" else None
        for module, name, kernel in kernels:
            stack.enter_context(patch.object(module, name, kernel))
        call()
        return len(gpu.hazards) if gpu is not None else 0


def sectors(
    arch: str, kernel_type: type, settings: Mapping[str, Any], fake: Callable, args: Callable, *given: Any
) -> int:
    """Run a kernel in the emulator, wherever the page runs; returns the sectors that its warps asked for."""
    kernel, code = compile_cache.default().get(kernel_type, dict(settings), fake, arch)
    gpu = make(arch, checks="all")
    launch(code, *args(kernel, *given), gpu=gpu)
    return gpu.launches[-1].result.stats["global_sectors"]
