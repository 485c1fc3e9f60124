"""Run one script of somebody else under a device, unmodified, and print what was seen as one line of JSON.

`python run_example.py ARCH TORCH SCRIPT ARGS...`. TORCH is the version that torch claims, "" for its own: two scripts
bring a reference of their own for older ones, and for newer ones take a function that torch lacks on the CPU. The
script's own comparison decides; `torch.testing.assert_close` is only listened to, for the size of the error.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from dsv4lib import emulator


def listened(compared: list[tuple[float, float]]) -> Any:
    """`assert_close` that notes the largest error and the largest reference of every call."""
    original = torch.testing.assert_close

    def assert_close(actual: Any, expected: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor) and actual.shape == expected.shape:
            a, e = actual.double(), expected.double()
            compared.append((float((a - e).abs().max()), float(e.abs().max())))
        original(actual, expected, *args, **kwargs)

    return assert_close


def result(note: str, launches: int) -> str:
    """pass; fail, if the script's comparison said so; stopped, if anything else ended it."""
    if note:
        return "fail" if note.startswith("AssertionError") else "stopped"
    return "pass" if launches else "nothing launched"


def main() -> None:
    """Command line."""
    arch, version, script, *arguments = sys.argv[1:]
    if version:
        torch.__version__ = torch.torch_version.TorchVersion(version)
    torch.set_num_threads(1)
    compared: list[tuple[float, float]] = []
    torch.testing.assert_close = listened(compared)
    path = Path(script).resolve()
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.parent)
    sys.path += [str(folder) for folder in path.parents if (folder / "helpers").is_dir() or folder.name == "cute"]
    note = ""
    with emulator.device(arch, default_device="cpu") as gpu:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as stop:
            note = f"exit code {stop.code}" if stop.code else ""
        except Exception as error:
            note = f"{type(error).__name__}: {error}"[:400]
    results = [launch.result for launch in gpu.launches]
    hazards: dict[str, int] = {}
    for hazard in gpu.hazards:
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
        "note": " ".join(note.split()),
    }
    print()
    print(json.dumps(row))


if __name__ == "__main__":
    main()
