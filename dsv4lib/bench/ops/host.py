"""Time calls on the host. How long a call keeps the CPU that makes it, the GPU's work apart.

    python -m dsv4lib.bench.ops.host [--only mhc,topk] [--shape "T 8"] [--without-gpu]

A burst of calls is queued without waiting, short enough that the launch queue never fills; the time of a burst over
its calls, the median of several bursts. `layer` is one eager chain: the twelve ops of a CSA layer in decode.

Without a GPU, everything but the driver's launch runs: nothing is compiled, and the host code of kernels is replaced by
a C function that does nothing. Compare such times with each other only.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dsv4lib import backends
from dsv4lib.bench.ops import harness
from dsv4lib.bench.ops.case import Call, Row
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import compile_cache, launching, native, plans

CALLS = 32  # of a burst: 32 calls of a few kernels each stay below the 1,024 launches that a stream queues
BURSTS = 25
WARM = 3  # calls that compile and make plans
WITHOUT_GPU = ("sm_90a", "sm_100a")  # the first that an op has kernels for
LAYER = (  # (op, row) of a CSA layer of Flash in decode, 8 tokens, in order
    ("mhc", "Flash T 8"),
    ("quantize", "fp8 Flash T 8"),
    ("qnorm_rope_kv", "Flash T 8"),
    ("compressor", "Flash and Pro, CSA decode T 8"),
    ("compressor", "Flash and Pro, indexer FP4 decode T 8"),
    ("indexer_q", "fp4 T 8"),
    ("topk", "Flash k 512 L 8192 T 8"),
    ("inv_rope_quant", "Flash T 8"),
    ("mhc", "Flash T 8"),
    ("router", "Flash T 8"),
    ("moe_dispatch", "Flash T 8"),
    ("moe_combine", "Flash T 8"),
)


def host_us(
    call: Call, calls: int = CALLS, bursts: int = BURSTS, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the microseconds of the host that a warm call takes. It is the median of bursts.

    Args:
        call: queues work on the current stream.
        clock: seconds; `time.process_time` on a busy machine without a GPU.
    """
    for _ in range(WARM):
        call()
    times = []
    for _ in range(bursts):
        _wait()
        start = clock()
        for _ in range(calls):
            call()
        times.append((clock() - start) / calls * 1e6)
    _wait()
    return statistics.median(times)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def layer(device: str = "cuda") -> Call:
    """Return a call of the ops of `LAYER`, ours. They run one after the other on the current stream.

    Raises:
        ArgumentError: a row that is not there.
    """
    rows, _ = harness.chosen(sorted({op for op, _ in LAYER}), "T 8")
    by_name = {(row.op, row.shape): row for row in rows}
    missing = [one for one in LAYER if one not in by_name]
    if missing:
        raise ArgumentError("LAYER", missing, "rows of the bench")
    calls = [bound(by_name[one], device) for one in LAYER]

    def chain() -> None:
        for call in calls:
            call()

    return chain


def bound(row: Row, device: str = "cuda") -> Call:
    """Return our provider of a row over inputs and outputs of its own."""
    call, outputs = row.providers[0].bind(harness.inputs(row, device))

    def kept() -> None:
        call()

    kept.outputs = outputs  # alive as long as the call
    return kept


class Uncompiled:
    """In place of a kernel's code: what a launch is checked against."""

    def __init__(self, kernel: Any, arguments: tuple):
        self.name, self.arguments = repr(kernel), arguments
        self.function = self

    @staticmethod
    @functools.cache
    def of(kernel_type: type, settings: tuple, fake_args: Callable) -> tuple[Any, Uncompiled]:
        """Return the kernel, with this in place of its code."""
        kernel = kernel_type(**dict(settings))
        return kernel, Uncompiled(kernel, fake_args(kernel))


@contextmanager
def without_gpu(entry: Callable[[Any], Any] | None = None) -> Iterator[None]:
    """Let ops over CPU tensors take the path of a GPU, up to the driver.

    Args:
        entry: the C function in place of that of an `Uncompiled`; None: one that does nothing.
    """
    nothing = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(("abs", ctypes.CDLL(None)))

    def get(cache: Any, kernel_type: type, settings: Any, fake_args: Callable, arch: str = "") -> tuple:
        return Uncompiled.of(kernel_type, tuple(settings.items()), fake_args)

    changes = (
        (compile_cache.CompileCache, "get", get),
        (backends, "resolve", lambda name, arch="", kernel=True: "native"),
        (backends, "device", lambda name: "cpu"),
        (launching, "arch", lambda name, archs=launching.ARCHS: next(a for a in WITHOUT_GPU if a in archs)),
        (launching, "on_host", lambda x: False),
        (launching, "stream", lambda name, x: 0),
        (launching, "sm_count", lambda device: 132),
        (native, "entry", entry or (lambda function: nothing)),
        (plans, "plannable", lambda x: True),
    )
    plans.forget()
    try:
        with ExitStack() as stack:
            for module, name, value in changes:
                stack.enter_context(patch.object(module, name, value))
            yield
    finally:
        plans.forget()


def table(rows: Iterable[Row], device: str, clock: Callable[[], float]) -> Iterator[tuple[str, float | str]]:
    """Yield (row, microseconds or why there are none), `layer` last."""
    for row in rows:
        try:
            yield f"{row.op} {row.shape}", host_us(bound(row, device), clock=clock)
        except Exception as error:  # an op that has no kernel for this GPU; the others are timed
            yield f"{row.op} {row.shape}", harness.timing.first_line(error)
    yield f"layer, {len(LAYER)} ops", host_us(layer(device), clock=clock)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m dsv4lib.bench.ops.host", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="ops, with commas between them")
    parser.add_argument("--shape", default="T 8", help="rows whose shape ends with this")
    parser.add_argument("--without-gpu", action="store_true", help="all but the driver's launch, in CPU time")
    given = parser.parse_args(arguments)
    rows, _ = harness.chosen(harness.parts(given.only), given.shape)
    rows = [row for row in rows if row.shape.endswith(given.shape)]
    with ExitStack() as stack:
        if given.without_gpu:
            stack.enter_context(without_gpu())
        device, clock = ("cpu", time.process_time) if given.without_gpu else ("cuda", time.perf_counter)
        with torch.no_grad():
            for name, found in table(rows, device, clock):
                print(f"{name:48} {found if isinstance(found, str) else f'{found:8.1f} us'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
