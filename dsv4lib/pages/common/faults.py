"""Inject kernels in place of an op's, and show which checks of a page see them. It also counts bytes of launches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from matplotlib.figure import Figure

from dsv4lib import emulator
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.ops.common import compile_cache, launching, plans
from dsv4lib.viz.bars import Panel, side_by_side
from dsv4lib.viz.table import show_table

ARCH, ARCHS = "sm_100a", ("sm_100a", "sm_90a")
SECTOR = 32  # bytes of one memory transaction


@contextmanager
def expected() -> Iterator[None]:
    """Leave out the warning of a launch that it has hazards: a page counts them itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the emulator reports", UserWarning)
        yield


def run(backend: str, call: Callable[[], Any], *kernels: tuple[Any, str, type]) -> int:
    """Call ops with kernels injected, each as (module of the op, name there, class). No two such calls at once.

    The emulated device is that of `backends.emulating`, else the first that ops are made for.

    Returns:
        hazards, which only the emulator sees.
    """
    with ExitStack() as stack:
        gpu = (
            stack.enter_context(emulator.device(launching.arch(backend), checks="race"))
            if backend == "emulator"
            else None
        )
        stack.enter_context(expected())
        if backend == "native":  # plans replay what they have seen, not what is injected
            plans.forget()
            stack.callback(plans.forget)
        for module, name, kernel in kernels:
            stack.enter_context(patch.object(module, name, kernel))
        call()
        return len(gpu.hazards) if gpu is not None else 0


def sectors(
    arch: str, kernel_type: type, settings: Mapping[str, Any], fake: Callable, args: Callable, *given: Any
) -> int:
    """Run a kernel in the emulator, wherever the page runs. Returns the sectors that its warps requested."""
    kernel, code = compile_cache.default().get(kernel_type, dict(settings), fake, arch)
    gpu = make(arch, checks="race,counters")
    launch(code, *args(kernel, *given), gpu=gpu)
    return gpu.launches[-1].result.stats["global_sectors"]


class Traffic(NamedTuple):
    """A launch: what it must move at least, and what its warps requested, in bytes. Items that it is for."""

    floor: int
    requested: int
    items: int


def traffic(launches: Mapping[str, Traffic], item: str) -> Figure:
    """Draw the bytes an ``item`` that warps request, the floor as a tick."""
    names, items = list(launches), [one.items for one in launches.values()]
    requested = [one.requested / n for one, n in zip(launches.values(), items, strict=True)]
    floor = [one.floor / n for one, n in zip(launches.values(), items, strict=True)]
    ratio = [one.requested / one.floor for one in launches.values()]
    panels = [
        Panel(f"bytes a {item}; tick: what must be moved", requested, "{:,.1f}", bounds=floor),
        Panel("over the floor", ratio, "{:.2f}"),
    ]
    return side_by_side(names, panels, [True] * len(names), "sectors of 32 bytes that warps ask for, counted")


def said_of(kernels: Iterable[Any], right: Iterable[Any]) -> str:
    """Return the first line of the docstring of the class that differs. "" if none does."""
    changed = [kernel for kernel, other in zip(kernels, right, strict=True) if kernel is not other]
    return (changed[0].__doc__ or "").split("\n")[0] if changed else ""


def seen_by(
    faults: Mapping[str, Any],
    said: Callable[[Any], str],
    judged: Callable[[Any], Mapping[str, float]],
    allowed: Mapping[str, float],
) -> int:
    """Show which checks see which fault.

    Args:
        faults: faults by name. said: what one does. judged: every check's value of a page with it.
        allowed: the value up to which a check has found nothing, where that is not 0.

    Returns:
        how many faults no check sees.
    """
    lines, unseen = [], 0
    for name, fault in faults.items():
        seen = {check: value for check, value in judged(fault).items() if value > allowed.get(check, 0)}
        unseen += not seen
        counts = ", ".join(f"{check} {value:,.4g}" for check, value in seen.items())
        lines.append((name, said(fault), counts or "nothing"))
    show_table(("fault", "what it does", "seen by"), lines)
    return unseen


def listed(faults: Mapping[str, Any], right: Any, one: str, every: bool, harmless: bool) -> dict[str, Any]:
    """Return the faults to show: ``every`` one, or ``one``. With ``harmless`` what is right in their place."""
    if harmless:
        return {"harmless": right}
    return {name: faults[name] for name in (faults if every else [one])}
