"""Compare what a GPU gave with the emulator, bit for bit, and make recordings that tests replay.

| verdict | meaning |
| --- | --- |
| same | every bit agrees |
| differs | all sums of the probe are exact, so it is a difference of meaning |
| rounds differently | sums of the probe round; the distance is in units of the last place |
| crashed, hung, refused | the kernel ended its process, never ended, or was refused by the driver |
| another kernel | the archive's probe is not this version's: nothing is compared |
| not run | the archive has no result of it |
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib import env
from dsv4lib.errors import DSV4Error
from dsv4lib.lab.day_one import forms, worker
from dsv4lib.lab.day_one.archive import Archive, ArchiveError
from dsv4lib.lab.day_one.probe import Emulated, Probe, digest

SAME, DIFFERS, ROUNDS = "same", "differs", "rounds differently"
OTHER, MISSING, DAMAGED = "another kernel", "not run", "damaged"
BAD = (DIFFERS, worker.CRASHED, worker.HUNG, worker.REFUSED, DAMAGED)
VERDICTS = (SAME, ROUNDS, *BAD, OTHER, MISSING)
TABLE, ARRAYS = "probes.csv", "probes.npz"
STAGES, TIMES = "stages.csv", "times.csv"
OF_TIME = ("_s", "_seconds")
CARDS = {"sm_100a": "B200", "sm_90a": "H200"}  # whose rates predict times


@dataclass(frozen=True)
class Compared:
    """A probe's result beside the emulator's.

    Attributes:
        name, form, verdict: see the module. detail: of a failure.
        words: of 32 bits that differ. first: the first of them as "CTA c, row r, word w".
        got, want: bits of the first one, of the GPU and the emulator, in hex.
        max_ulp: largest distance of float32 words, -1 where words are no numbers.
        map: bool (CTAs, rows, words) where they differ, None if nowhere.
    """

    name: str
    form: str
    verdict: str
    detail: str = ""
    words: int = 0
    first: str = ""
    got: str = ""
    want: str = ""
    max_ulp: int = -1
    map: np.ndarray | None = None


def compare(archive: Archive) -> Iterator[Compared]:
    """Compare every probe of the archive's architecture, in the plan's order."""
    arch = archive.manifest.get("arch")
    wanted = archive.manifest.get("probes")
    for probe in forms.probes():
        if probe.arch == arch and (not isinstance(wanted, list) or probe.name in wanted):
            yield _one(probe, archive)


def _one(probe: Probe, archive: Archive) -> Compared:
    found = archive.results.get(probe.name)
    if found is None:
        return Compared(probe.name, probe.form, MISSING)
    if found["code"] != probe.digest:
        return Compared(probe.name, probe.form, OTHER)
    if found["status"] != worker.RAN:
        status = found["status"] if found["status"] in BAD else DAMAGED
        return Compared(probe.name, probe.form, status, found["detail"])
    try:
        out = output(probe, archive)
    except ArchiveError as error:
        return Compared(probe.name, probe.form, DAMAGED, str(error))
    return beside(probe, out, np.frombuffer(Emulated(probe).out, np.uint8))


def output(probe: Probe, archive: Archive) -> np.ndarray:
    """uint8 output of a probe.

    Raises:
        ArchiveError: it is missing or damaged, or its digest is not that of its result.
    """
    out = archive.changed(probe.name, probe.out_bytes) ^ worker.unchanged(probe)
    if digest(out.tobytes()) != archive.results[probe.name]["out"]:
        raise ArchiveError(f"archive: the output of {probe.name} is not the one of its result")
    return out


def beside(probe: Probe, out: np.ndarray, emulated: np.ndarray) -> Compared:
    """Compare two outputs of a probe."""
    got, want = (x.view("<u4").reshape(probe.ctas, -1, probe.row_bytes // 4) for x in (out, emulated))
    where = got != want
    if not where.any():
        return Compared(probe.name, probe.form, SAME)
    first = tuple(int(x) for x in np.argwhere(where)[0])
    return Compared(
        probe.name,
        probe.form,
        DIFFERS if probe.exact else ROUNDS,
        words=int(where.sum()),
        first="CTA {}, row {}, word {}".format(*first),
        got=f"{got[first]:08x}",
        want=f"{want[first]:08x}",
        max_ulp=int(ulps(got[where], want[where]).max()) if probe.element == "f32" else -1,
        map=where,
    )


def ulps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Distances of float32 words in units of the last place."""
    codes = [x.view("<i4").astype(np.int64) for x in (first, second)]
    codes = [np.where(code < 0, -(1 << 31) - code, code) for code in codes]
    return np.abs(codes[0] - codes[1])


def counts(compared: Iterable[Compared]) -> dict[str, dict[str, int]]:
    """Probes by form and verdict."""
    found: dict[str, dict[str, int]] = {}
    for one in compared:
        of_form = found.setdefault(one.form, dict.fromkeys(VERDICTS, 0))
        of_form[one.verdict] += 1
    return found


# --- times ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """Our time of a row of the op bench beside its floor and the model's prediction, both None where there is none."""

    op: str
    shape: str
    us: float
    floor_us: float | None
    modelled_us: float | None


def times(archive: Archive) -> list[Timed]:
    """Times of our kernels that came back."""
    predicted, found = predictions(str(archive.manifest.get("arch"))), []
    for step in sorted(archive.commands):
        data = archive.commands[step].get("rows.csv")
        if data is None:
            continue
        for line in csv.DictReader(io.StringIO(data.decode(errors="replace"))):
            if line.get("provider") == "ours" and line.get("state") == "timed":
                op, shape = line.get("op") or "", line.get("shape") or ""
                us = _number(line.get("us"))
                if us is not None:
                    found.append(Timed(op, shape, us, _number(line.get("floor_us")), predicted.get((op, shape))))
    return found


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if np.isfinite(value) else None


def predictions(arch: str = "sm_100a") -> dict[tuple[str, str], float]:
    """Modelled times of rows of the bench: router and dispatch on both GPUs, and of a B200 or an H200 what follows.

    A B200 ("sm_100a"): decode steps of attention at its 32,768 tokens. Its GEMMs have no rows. An H200 ("sm_90a"): all
    GEMMs of the experts. A row of the combine adds the shared expert, which the model does not.
    """
    from dsv4lib.bench.ops import inputs, modelled
    from dsv4lib.predict import moe
    from dsv4lib.predict.rates import gpu

    if arch not in CARDS:
        return {}
    card, found = gpu(CARDS[arch]), _attention() if arch == "sm_100a" else modelled.gemms(gpu(CARDS[arch]))
    for model, tokens in itertools.product(moe.MODELS, inputs.DECODE):
        launches = moe.others_us(moe.Shape(model, "mxfp4", tokens), card)
        for op, name in (("router", "router"), ("moe_dispatch", "dispatch")):
            found[op, f"{model} T {tokens}"] = launches[name]
    return found


def _attention() -> dict[tuple[str, str], float]:
    from dsv4lib.predict import fmha

    found = {}
    for row in fmha.recorded():
        of_bench = row.context == 32768 or row.kind == "SWA"
        if row.phase == "decode" and row.pool == "fp8" and row.variant == "as built" and of_bench:
            found["fmha", f"{row.model} {row.kind} T {row.batch}"] = row.modelled_us
    return found


# --- recordings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded:
    """A line of a recording.

    Attributes:
        probe, form: names. code: digest of kernel and inputs. out: digest of what the GPU gave.
        words: that differed from the emulator when it was recorded; max_ulp: their distance, -1 for no numbers.
    """

    probe: str
    form: str
    code: str
    out: str
    words: int
    max_ulp: int


@dataclass(frozen=True)
class Metric:
    """What a stage that ran natively said of a metric."""

    stage: str
    metric: str
    value: float


def metrics(archive: Archive) -> list[Metric]:
    """Metrics of stages that ran natively and passed, in the archive's order."""
    found = []
    for files in archive.commands.values():
        lines = parsed_list(files.get("records.json", b"[]"))
        native = [one for one in lines if one.get("verdict") == "passed" and one.get("backend") == "native"]
        for one in native:
            numbers = one["metrics"] if isinstance(one.get("metrics"), dict) else {}
            for name, value in numbers.items():
                if isinstance(value, int | float) and not name.endswith(OF_TIME):
                    found.append(Metric(str(one.get("stage")), name, float(value)))
    return sorted(found, key=lambda one: one.stage)


def parsed_list(data: bytes) -> list[Mapping[str, Any]]:
    """Objects of a JSON list; none if it is no such list."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def metrics_recorded(folder: Path) -> list[Metric]:
    """Read the metrics of a recording; none if it has none."""
    if not (folder / STAGES).is_file():
        return []
    with (folder / STAGES).open(newline="") as file:
        return [Metric(line["stage"], line["metric"], float(line["value"])) for line in csv.DictReader(file)]


def times_recorded(folder: Path) -> list[Timed]:
    """Read the times of a recording; none if it has none."""
    if not (folder / TIMES).is_file():
        return []
    with (folder / TIMES).open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [
        Timed(one["op"], one["shape"], float(one["us"]), *(_number(one[name]) for name in ("floor_us", "modelled_us")))
        for one in lines
    ]


def record_commands(archive: Archive, folder: Path) -> None:
    """Add metrics of stages and times of ops to a recording. Of what it has of a stage or row the new one stays."""
    stages = {one.stage for one in metrics(archive)}
    kept = [one for one in metrics_recorded(folder) if one.stage not in stages] + metrics(archive)
    rows = {(one.op, one.shape): one for one in [*times_recorded(folder), *times(archive)]}
    for name, kind, lines in (
        (STAGES, Metric, sorted(kept, key=lambda one: one.stage)),
        (TIMES, Timed, sorted(rows.values(), key=lambda one: one.op)),
    ):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                {key: f"{value:.5g}" if isinstance(value, float) else value for key, value in asdict(line).items()}
                for line in lines
            )


def record(archive: Archive, compared: Iterable[Compared], folder: Path) -> list[Recorded]:
    """Write what a GPU gave as a recording: a line for each probe, and the outputs that differ.

    Raises:
        ArchiveError: the archive is of a fake device.
    """
    if archive.manifest.get("fake") is not None:
        raise ArchiveError("archive: a fake device made it, which is no GPU to record")
    lines = write(archive, compared, folder)
    record_commands(archive, folder)
    return lines


def write(archive: Archive, compared: Iterable[Compared], folder: Path) -> list[Recorded]:
    """Write a recording of any archive, see `record`."""
    known, lines, arrays = {probe.name: probe for probe in forms.probes()}, [], {}
    for one in compared:
        if one.verdict not in (SAME, DIFFERS, ROUNDS):
            continue
        probe = known[one.name]
        lines.append(
            Recorded(one.name, one.form, probe.digest, archive.results[one.name]["out"], one.words, one.max_ulp)
        )
        if one.verdict != SAME:
            arrays[one.name] = output(probe, archive) ^ worker.unchanged(probe)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TABLE).open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Recorded)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(line) for line in lines)
    np.savez_compressed(folder / ARRAYS, **arrays)
    return lines


def recorded(folder: Path) -> list[Recorded]:
    """Read a recording."""
    with (folder / TABLE).open(newline="") as file:
        lines = list(csv.DictReader(file))
    numbers = {"words": int, "max_ulp": int}
    return [Recorded(**{key: numbers.get(key, str)(value) for key, value in line.items()}) for line in lines]


def recordings(root: Path | None = None) -> list[Path]:
    """Folders of all recordings, data/emulator/<gpu>."""
    return sorted(path.parent for path in (root or env.root() / "data" / "emulator").glob(f"*/{TABLE}"))


def replay(line: Recorded, folder: Path, probe: Probe) -> str:
    """Compare the emulator with a line of a recording. What is wrong in words, "" if nothing is.

    A probe whose sums round may be as far from the GPU as when it was recorded, and no further.

    Raises:
        DSV4Error: the recording is of another kernel.
    """
    if line.code != probe.digest:
        raise DSV4Error(f"{line.probe}: the kernel or its inputs have changed: record it again")
    out = Emulated(probe).out
    if digest(out) == line.out:
        return ""
    with np.load(folder / ARRAYS, allow_pickle=False) as arrays:
        if line.probe not in arrays:
            return f"{line.probe}: agreed with the GPU when it was recorded, and no longer does"
        given = arrays[line.probe] ^ worker.unchanged(probe)
    found = beside(probe, given, np.frombuffer(out, np.uint8))
    if not probe.exact and found.words <= line.words and found.max_ulp <= line.max_ulp:
        return ""
    return f"{line.probe}: {found.words} words differ, first {found.first}: {found.got}, here {found.want}"


def folder_of(manifest: Mapping[str, object]) -> str:
    """Name of a GPU's folder, "NVIDIA B200" -> "b200"."""
    words = re.findall(r"[a-z0-9]+", str(manifest.get("gpu", "")).lower())
    return "_".join(word for word in words if word != "nvidia") or "gpu"
