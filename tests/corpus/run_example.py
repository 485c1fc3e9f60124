"""Run one script of another package under a device, unmodified, and print what was seen as one line of JSON.

`python run_example.py ARCH TORCH DEVICES MODES SCRIPT ARGS...`. TORCH is the version that torch claims, "" for its own:
two scripts bring a reference of their own for older ones, and for newer ones take a function that torch lacks on the
CPU. With more than one of DEVICES the script is one for torchrun (`run_distributed.py`), in the default mode. The
script's own comparison decides; `torch.testing.assert_close` is only listened to, for the size of the error and because
a script may go on after a failed one. A notebook runs as the sequence of its code cells.

Every launch runs once in the default mode, and then again from the same memory in each of MODES ("race,random", ""
for none): what these change in memory is compared byte for byte with what the first one left, and the script goes on
with that.
"""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import run_distributed
import torch

from dsv4lib import emulator
from dsv4lib.emulator.checks.selection import select
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.machine import machine

MODES = {
    "race": {"native_checks": select("race").bits, "muted": select("race").muted},
    "adversarial": {"schedule": "adversarial"},
    "random": {"schedule": "random", "seed": 1},
}
_TEXT = 300  # characters of an error that are kept


class Replay:
    """Repeats the launches of a device in other modes.

    Attributes:
        modes: names of `MODES`.
        differing: by mode, bytes of all launches; stopped: by mode, the error that ended it, "" = none.
        kinds: by mode, the kinds of hazards seen.
    """

    def __init__(self, gpu: emulator.Device, modes: list[str]):
        self.gpu, self.modes = gpu, modes
        self.differing = dict.fromkeys(modes, 0)
        self.stopped = dict.fromkeys(modes, "")
        self.kinds: dict[str, set[str]] = {mode: set() for mode in ("default", *modes)}
        self._launch = gpu.launch
        gpu.launch = self.launch  # type: ignore[method-assign]

    def launch(self, request: Any, stream: int = 0) -> Any:
        """`Device.launch`, then the repetitions."""
        self.gpu.memory.sweep()
        before = self._memory()
        result = self._launch(request, stream)
        self.kinds["default"] |= {h.kind for h in result.hazards}
        after = self._memory()
        settings = self.gpu.settings
        for mode in self.modes:
            if self.stopped[mode]:
                continue
            self._restore(before)
            self.gpu.settings = dataclasses.replace(settings, **MODES[mode])
            try:
                self.kinds[mode] |= {h.kind for h in machine.run(request, self.gpu).hazards}
                now = self._memory()
                self.differing[mode] += sum(int((now[start] != after[start]).sum()) for start in after)
            except EmulatorError as error:
                self.stopped[mode] = " ".join(f"{type(error).__name__}: {error}".split())[:_TEXT]
        self.gpu.settings = settings
        self._restore(after)
        return result

    def row(self) -> dict[str, str]:
        """By mode: "same" or how many bytes came out differently, with the kinds of hazards of this mode alone."""
        out = {}
        for mode in self.modes:
            verdict = f"{self.differing[mode]} bytes differ" if self.differing[mode] else "same"
            extra = sorted(self.kinds[mode] - self.kinds["default"])
            out[mode] = " ".join([self.stopped[mode] or verdict, *extra])
        return out

    def _memory(self) -> dict[int, np.ndarray]:
        """A copy of everything that a kernel may write."""
        gmem = self.gpu.gmem
        return {a.start: gmem.view(a.start, a.nbytes).copy() for a in gmem if a.writable}

    def _restore(self, memory: dict[int, np.ndarray]) -> None:
        for start, data in memory.items():
            self.gpu.gmem.view(start, len(data), write=True)[:] = data


def as_script(path: Path, folder: str) -> Path:
    """The script itself, or the code cells of a notebook as one, without the cells that talk to IPython."""
    if path.suffix != ".ipynb":
        return path
    cells = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
    out = Path(folder) / f"{path.stem}.py"
    out.write_text("\n\n".join(c for c in cells if not any(line.startswith(("%", "!")) for line in c.splitlines())))
    return out


def listened(compared: list[tuple[float, float]], failed: list[str]) -> Any:
    """`assert_close` that notes the largest error and the largest reference of every call, and what it raised."""
    original = torch.testing.assert_close

    def assert_close(actual: Any, expected: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor) and actual.shape == expected.shape:
            a, e = actual.double(), expected.double()
            compared.append((float((a - e).abs().max()), float(e.abs().max())))
        try:
            original(actual, expected, *args, **kwargs)
        except AssertionError as error:
            failed.append(f"AssertionError: {error}"[:400])
            raise

    return assert_close


def result(note: str, launches: int) -> str:
    """pass; fail, if the script's comparison said so; stopped, if anything else ended it."""
    if note:
        return "fail" if note.startswith("AssertionError") else "stopped"
    return "pass" if launches else "nothing launched"


def one_device(arch: str, modes: list[str], path: Path) -> tuple[str, list[emulator.Device], dict[str, str]]:
    """Run a script on one device; what ended it ("" = nothing did), the device, and what the other modes gave."""
    note = ""
    with tempfile.TemporaryDirectory() as folder, emulator.device(arch, default_device="cpu") as gpu:
        replay = Replay(gpu, modes)
        try:
            runpy.run_path(str(as_script(path, folder)), run_name="__main__")
        except SystemExit as stop:
            note = f"exit code {stop.code}" if stop.code else ""
        except Exception as error:
            note = f"{type(error).__name__}: {error}"[:400]
    return note, [gpu], replay.row()


def several_devices(arch: str, count: int, path: Path) -> tuple[str, list[emulator.Device], dict[str, str]]:
    """Run a script for torchrun, one rank a device; what ended it ("" = nothing did), and the devices."""
    failed, gpus = run_distributed.run(count, path, sys.argv[1:], arch=arch)
    frames, _, last = (failed[0] if failed else "").rpartition('\n  File "')  # of a traceback
    error = [line for line in last.splitlines()[1:] if not line.startswith("    ")] if frames else [last]
    return "\n".join(error)[:400], list(gpus), {}


def main() -> None:
    """Command line."""
    arch, version, devices, modes, script, *arguments = sys.argv[1:]
    if version:
        torch.__version__ = torch.torch_version.TorchVersion(version)
    torch.set_num_threads(1)
    compared: list[tuple[float, float]] = []
    failed: list[str] = []
    torch.testing.assert_close = listened(compared, failed)
    path = Path(script).resolve()
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.parent)
    sys.path += [str(folder) for folder in path.parents if (folder / "helpers").is_dir() or folder.name == "cute"]
    if devices == "1":
        note, gpus, replayed = one_device(arch, [mode for mode in MODES if mode in modes.split(",")], path)
    else:
        note, gpus, replayed = several_devices(arch, int(devices), path)
    note = note or (failed or [""])[0]  # of a script that goes on after a wrong result
    results = [launch.result for gpu in gpus for launch in gpu.launches]
    hazards: dict[str, int] = {}
    for hazard in (hazard for gpu in gpus for hazard in gpu.hazards):
        hazards[hazard.kind] = hazards.get(hazard.kind, 0) + hazard.count
    errors, references = zip(*compared, strict=True) if compared else ((), ())
    row = {
        "result": result(note, len(results)),
        "max_err": max(errors, default=""),
        "max_ref": max(references, default=""),
        "instructions": sum(r.instructions for r in results),
        "seconds": round(sum(r.seconds for r in results), 3),
        "launches": len(results),
        "hazards": hazards,
        "note": " ".join(re.sub(r"\x1b\[[\d;]*m", "", note).split()),  # without the colours of the DSL's errors
        **(replayed if results else {}),
    }
    print()
    print(json.dumps(row))


if __name__ == "__main__":
    main()
