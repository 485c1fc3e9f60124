"""Run micro-kernels in a process of their own, which may crash or hang: `python -m ... FOLDER NAME...`.

Of each it writes first ``NAME.started``, then ``NAME.npz`` and ``NAME.json``; it ends at the first error, after which a
CUDA context is not to be trusted. The runner starts another for the rest. Files say what became of it; its exit code is
`UNABLE` where the machine failed and not the probe, which is then left without a result and with no start counted.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from dsv4lib.lab.day_one import forms
from dsv4lib.lab.day_one.gpu import Driver, GpuError
from dsv4lib.lab.day_one.probe import Probe, digest
from dsv4lib.lab.run.files import write_atomic

RAN, REFUSED, CRASHED, HUNG = "ran", "refused", "crashed", "hung"
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
FAKE = "DSV4_DAY_ONE_FAKE"  # JSON list of differences; unset: the GPU
DEVICE = "DSV4_DAY_ONE_DEVICE"  # what the runner calls the device in keys
UNABLE = 75  # exit code: no memory, or another failure before the launch


def unchanged(probe: Probe) -> np.ndarray:
    """The output if the probe's action did nothing: the end of each CTA's image. Outputs are kept as XOR with it."""
    share = probe.out_bytes // probe.ctas
    return np.ascontiguousarray(probe.image[:, -share:]).reshape(-1)


def packed(probe: Probe, out: bytes) -> bytes:
    """An output as a file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, changed=np.frombuffer(out, np.uint8) ^ unchanged(probe))
    return buffer.getvalue()


def key(probe: Probe, device: str = "") -> str:
    """What a result is kept under: the probe's digest and the device."""
    return f"{probe.digest}.{device}" if device else probe.digest


def result(
    probe: Probe, status: str, *, detail: str = "", seconds: float = 0.0, out: str = "", device: str = ""
) -> dict[str, object]:
    """A result as it is written: ``code`` is the probe's digest, ``out`` the output's, ``key`` see `key`."""
    return {
        "name": probe.name,
        "form": probe.form,
        "status": status,
        "detail": detail[:2000],
        "seconds": round(seconds, 3),
        "code": probe.digest,
        "key": key(probe, device),
        "out": out,
    }


def write(folder: Path, found: dict[str, object]) -> None:
    """Write a result."""
    write_atomic(folder / f"{found['name']}.json", json.dumps(found, indent=1).encode())


def started(folder: Path, name: str) -> Path:
    """The file that says how often a probe was started."""
    return folder / f"{name}.started"


def starts(mark: Path, code: str) -> int:
    """How often something of this code was started."""
    try:
        before, count = mark.read_text().split()
        return int(count) if before == code else 0
    except (OSError, ValueError):
        return 0


def start(mark: Path, code: str) -> None:
    """Count one more start."""
    write_atomic(mark, f"{code} {starts(mark, code) + 1}".encode())


def uncount(mark: Path, code: str) -> None:
    """Take a start back."""
    write_atomic(mark, f"{code} {max(0, starts(mark, code) - 1)}".encode())


def run(folder: Path, names: list[str], device: Driver, called: str = "") -> None:
    """Run probes until one fails.

    Args:
        folder: of the results. names: of probes. device: to run them on. called: the device's name in keys.

    Raises:
        GpuError: the machine failed and not the probe, which has no result.
    """
    known = {probe.name: probe for probe in forms.probes()}
    device.open()
    for name in names:
        probe = known[name]
        mark, code = started(folder, name), key(probe, called)
        start(mark, code)
        begin = time.monotonic()
        try:
            out = device.run(probe)
        except GpuError as error:
            if not error.refused and not error.faulted:
                uncount(mark, code)
                raise
            status = REFUSED if error.refused else CRASHED
            seconds = time.monotonic() - begin
            write(folder, result(probe, status, detail=str(error), seconds=seconds, device=called))
            return
        write_atomic(folder / f"{name}.npz", packed(probe, out))
        seconds = time.monotonic() - begin
        write(folder, result(probe, RAN, seconds=seconds, out=digest(out), device=called))


def main() -> None:
    """Command line, for `runner`."""
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # a worker never outlives its runner
    wanted = os.environ.get(FAKE)
    if wanted is None:
        device = Driver()
    else:
        from dsv4lib.lab.day_one.differences import Fake

        device = Fake(json.loads(wanted))
    try:
        run(Path(sys.argv[1]), sys.argv[2:], device, os.environ.get(DEVICE, ""))
    except GpuError as error:
        print(error, file=sys.stderr)
        sys.exit(UNABLE)


if __name__ == "__main__":
    main()
