"""Whole kernels on an H200 and in the emulator: how the record in data/emulator/h200 was made, and how to read it.

To make it again, with a Hopper GPU somewhere:

    python tests/emulator/h200/record.py save LAUNCHES         # here: run every case in the emulator, one file a launch
    for f in LAUNCHES/*.npz; do                                # there: nothing but Python, numpy and the driver
        python on_gpu.py $f RESULTS/$(basename $f); done
    python tests/emulator/h200/record.py write LAUNCHES RESULTS

Other people's kernels need their packages (requirements-corpus.lock) and CUTLASS_CHECKOUT; see strangers.py. Both
machines run the same code: the GPU the cubin, the emulator the PTX that CuTeDSL assembled it from. The GPU starts every
launch from the memory that the emulated one found, so errors do not add up over the launches of a program.

The record: ``whole_kernels.csv``, a line for each region of memory that a launch wrote, with digests of the code and of
the inputs; ``CASE.npz``, what the GPU left there, as ``LAUNCH.REGION``. test_whole_kernels.py replays it without a GPU.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
sys.path[:0] = [str(ROOT), str(HERE)]

import strangers  # noqa: E402

DATA = ROOT / "data" / "emulator" / "h200"
TABLE = DATA / "whole_kernels.csv"
COLUMNS = (
    "case",
    "source",
    "compiler",
    "launch",
    "grid",
    "block",
    "cluster",
    "instructions",
    "region",
    "element",
    "elements",
    "different",
    "max_ulp",
    "code",
    "inputs",
)
# Steps of the output format between emulator and GPU, as seen; cases that are not listed agree bit for bit. All of
# these use ex2, lg2, rcp or rsqrt, whose last bits are the hardware's own (native/special.py: within 1 ulp here, 2 ulp
# documented for ex2). The rest of a kernel carries such a difference to its output.
APPROXIMATED = {
    "row_softmax": 3,
    "cutlass_fmha": 1,
    "cutlass_cta_norm": 1,
    "quack_cross_entropy": 1,
    "fa4": 2,
    "fa4_causal": 2,
}
WIDTHS = {"f16": 2, "bf16": 2, "f32": 4, "bytes": 1}
PACKAGES = {"quack": "quack-kernels", "fa4": "flash-attn-4"}
COMPILER = "nvidia-cutlass-dsl"


def ulps(first: np.ndarray, second: np.ndarray, element: str) -> np.ndarray:
    """Distance of two uint8 arrays of numbers, in steps of their format (bytes: their difference).

    Values of different sign are as far apart as their distances from zero add up to; NaNs are compared by their bits.
    """
    codes = [x.view(f"<i{WIDTHS[element]}" if element != "bytes" else "u1").astype(np.int64) for x in (first, second)]
    if element != "bytes":
        lowest = -(1 << 8 * WIDTHS[element] - 1)
        codes = [np.where(code < 0, lowest - code, code) for code in codes]
    return np.abs(codes[0] - codes[1])


def source(case: str) -> str:
    """Where a kernel comes from: a package with its version, or an example script with the digest of its text."""
    kind = case.partition("_")[0]
    if kind == "cutlass":
        script = strangers.example(case)
        return f"CUTLASS {script.name} {hashlib.sha256(script.read_bytes()).hexdigest()[:12]}"
    return f"{PACKAGES[kind]} {importlib.metadata.version(PACKAGES[kind])}" if kind in PACKAGES else "lab"


def compiler() -> str:
    """Name and version of what compiles them all."""
    return f"{COMPILER} {importlib.metadata.version(COMPILER)}"


def rows_of(case: str, launch: int, saved: Any, contents: dict[int, np.ndarray]) -> list[dict[str, Any]]:
    """Lines of the table for one launch.

    Args:
        saved: file of the launch, as `launches.save` wrote it.
        contents: what the GPU left in its regions; those that neither it nor the emulator changed are left out.
    """
    shape = json.loads(saved["shape"].tobytes())
    rows = []
    for i, element in enumerate(shape["elements"]):
        before, after, gpu = saved[f"before_{i}"], saved[f"after_{i}"], contents[i]
        if np.array_equal(before, after) and np.array_equal(before, gpu):
            continue
        distance = ulps(after, gpu, element)
        rows.append(
            {
                "case": case,
                "source": source(case),
                "compiler": compiler(),
                "launch": launch,
                **{key: "x".join(map(str, shape[key])) for key in ("grid", "block", "cluster")},
                "instructions": shape["instructions"],
                "region": i,
                "element": element,
                "elements": distance.size,
                "different": int((distance > 0).sum()),
                "max_ulp": int(distance.max()),
                "code": shape["code"],
                "inputs": shape["inputs"],
            }
        )
    return rows


def own(name: str, folder: Path) -> None:
    """Run a case of the lab and save its launches."""
    import launches
    import own_cases

    with launches.recording() as records:
        own_cases.run(own_cases.CASES[name]("cpu"), "emulator")
    for i, record in enumerate(records):
        launches.save(record, folder / f"{name}.{i}.npz")


def stranger(name: str, folder: Path) -> None:
    """Run a case of strangers.py in a process of its own; it saves its launches.

    Raises:
        RuntimeError: it did not end well.
    """
    command = [sys.executable, "-W", "ignore", str(HERE / "strangers.py"), name, str(folder)]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-4000:]}")


def files_of(name: str, folder: Path) -> list[Path]:
    """Saved launches of a case, in order."""
    return sorted(folder.glob(f"{name}.*.npz"), key=lambda path: int(path.name.split(".")[1]))


def save(folder: Path, names: list[str]) -> None:
    """Run cases and save their launches."""
    import own_cases

    folder.mkdir(parents=True, exist_ok=True)
    for name in names or [*own_cases.CASES, *strangers.NAMES]:
        reason = strangers.missing(name) if name in strangers.NAMES else None
        if reason:
            print(f"{name}: left out, {reason}")
            continue
        (own if name in own_cases.CASES else stranger)(name, folder)
        print(name, len(files_of(name, folder)), "launches", flush=True)


def table() -> dict[str, list[dict[str, str]]]:
    """The lines of the table by case."""
    if not TABLE.exists():
        return {}
    with TABLE.open(newline="") as file:
        return {case: list(rows) for case, rows in groupby(csv.DictReader(file), key=lambda row: row["case"])}


def write(folder: Path, results: Path) -> None:
    """Write the contents and the table's lines of the cases that have results."""
    DATA.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {**table()}
    for name in sorted({path.name.split(".")[0] for path in results.glob("*.npz")}):
        rows[name], kept = [], {}
        for launch, path in enumerate(files_of(name, results)):
            saved, found = np.load(folder / path.name), np.load(path)
            lines = rows_of(name, launch, saved, {i: found[f"gpu_{i}"] for i in range(len(found.files))})
            kept |= {f"{launch}.{line['region']}": found[f"gpu_{line['region']}"] for line in lines}
            rows[name] += lines
        np.savez_compressed(DATA / f"{name}.npz", **kept)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for name in sorted(rows) for row in rows[name])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    saving = commands.add_parser("save", help="run cases in the emulator and save their launches")
    saving.add_argument("launches", type=Path)
    saving.add_argument("names", nargs="*", help="only these")
    writing = commands.add_parser("write", help="write the record")
    writing.add_argument("launches", type=Path)
    writing.add_argument("results", type=Path)
    options = parser.parse_args()
    if options.command == "save":
        save(options.launches, options.names)
    else:
        write(options.launches, options.results)


if __name__ == "__main__":
    main()
