"""Print what `dsv4 bench` measures. The emulator's speed, static models of attention and the MoE, times on a GPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dsv4lib.bench import history
from dsv4lib.lab.stage import runs_folder

BENCHES = "bench"  # of the runs' folder: what benches measured


def emulator(cutlass: Path | None, record: Path | None) -> bool:
    """Measure the emulator; True if every floor was reached."""
    from dsv4lib.bench.speed import emulator, rows

    with tempfile.TemporaryDirectory(prefix="dsv4-bench-") as folder:
        found = emulator.run(folder, cutlass)
    table = Table("measured", "value", "floor", "", "detail")
    for row in found:
        floor = "" if row.floor is None else f"{'>=' if row.more_is_better else '<='} {row.floor:.3g}"
        value = "" if row.value is None else f"{row.value:.3g} {row.unit}"
        colour = {True: "green", False: "red", None: "dim"}[row.reached]
        table.add_row(row.what, value, floor, f"[{colour}]{row.verdict}[/]", row.detail)
    Console().print(table)
    if record is not None:
        rows.record(found, record)
    history.append(history.of_rows("emulator", found), runs_folder() / BENCHES)
    return not any(row.reached is False for row in found)


def fmha(record: Path | None, figure: Path | None) -> None:
    """Check the static model on Hopper, then predict the attention kernel on a B200.

    Args:
        record: write the predictions to this CSV file; figure: draw them as a roofline into this PNG file.
    """
    from dsv4lib import viz
    from dsv4lib.predict import calibration, fmha
    from dsv4lib.viz.style import to_png

    console = Console(width=190)
    checked = Table("Hopper launch", "regime", "modelled clk", "measured clk", "error", title="Calibration, H200")
    for done in calibration.check():
        fitted = " (fitted)" if done.case.case in calibration.FITTED else ""
        numbers = f"{done.clocks:,.0f}", f"{done.case.clocks:,.0f}", f"{done.error:+.1%}{fitted}"
        checked.add_row(done.case.case, done.case.regime, *numbers)
    console.print(checked)
    modelled, published = calibration.flashmla()
    console.print(f"B200, FlashMLA sparse prefill: modelled {modelled:.0f} TFLOP/s, published {published:.0f}")
    rows = fmha.run()
    columns = (
        "shape",
        "pool",
        "keys",
        "variant",
        "parts",
        "modelled us",
        "alone us",
        "model's error",
        "bound",
        "floor us",
        "fraction",
        "target",
    )
    table = Table(*columns, "met", "published", title="Attention on a B200: modelled, not measured")
    for row in rows:
        shape = f"{row.model} {row.kind} {row.phase} B{row.batch} {row.context >> 10}K"
        error = f"{row.error_low:+.0%} .. {row.error_high:+.0%}"
        times = f"{row.modelled_us:.1f}", f"{row.alone_us:.1f}"
        numbers = *times, error, row.bound, f"{row.floor_us:.2f}", f"{row.fraction:.2f}"
        met = f"[{'green' if row.met == 'yes' else 'red'}]{row.met}[/]"
        parts = f"{row.splits} x {row.dims}" if row.dims > 1 else str(row.splits)
        table.add_row(shape, row.pool, str(row.keys), row.variant, parts, *numbers, row.target, met, row.published)
    console.print(table)
    if record is not None:
        fmha.record(rows, record)
    if figure is not None:
        figure.write_bytes(to_png(viz.roofline.roofline(fmha.points(rows), fmha.PEAK / 1e12, {"HBM 8 TB/s": 8.0})))


def moe(record: Path | None, figure: Path | None) -> None:
    """Predict the MoE layer on a B200.

    Args:
        record: write the predictions to this CSV file; figure: draw them as a roofline into this PNG file.
    """
    from dsv4lib.pages.moe_gemm import figures
    from dsv4lib.predict import moe
    from dsv4lib.viz.style import to_png

    rows, console = moe.run(), Console(width=190)
    table = Table(*figures.PREDICTED[:-1], title="The MoE layer on a B200: modelled, not measured")
    for line in figures.predicted(rows):
        table.add_row(*map(str, line[:-1]))
    console.print(table)
    for row in rows:
        if row.published:
            console.print(f"{row.model} {row.mode}, T {row.tokens}: {row.modelled_us:.0f} us; {row.published}")
    if record is not None:
        moe.record(rows, record)
    if figure is not None:
        figure.write_bytes(to_png(figures.rooflines(rows)))


def ops(only: list[str], shape: str, providers: str, ahead: int, seconds: float | None, record: Path | None) -> int:
    """Time ops on this machine's GPU. The exit code of `bench.ops.harness.main`, whose options these are."""
    from dsv4lib.bench.ops import harness

    lines = {"providers": providers, "ahead": ahead, "seconds": seconds, "record": record}
    lines["history"] = runs_folder() / BENCHES
    return harness.main(_options(only, shape, **lines))


def decode_step(only: list[str], **options: object) -> int:
    """Time a decode step on this GPU. The exit code of `bench.decode_step.run.main`, whose options these are."""
    from dsv4lib.bench.decode_step import run

    return run.main(_options(only, "", history=runs_folder() / BENCHES, **options))


def count_ops(only: list[str], shape: str, providers: str, record: Path | None) -> int:
    """Read the GPU's counters of ops. The exit code of `bench.ops.counters.main`, whose options these are."""
    from dsv4lib.bench.ops import counters

    return counters.main(_options(only, shape, providers=providers, record=record))


def _options(only: list[str], shape: str, **others: object) -> list[str]:
    options = {"only": ",".join(only), "shape": shape, **others}
    return [f"--{name}={value}" for name, value in options.items() if value]


def export_ops(path: Path, arch: str, only: list[str], shape: str) -> int:
    """Pack ops for a GPU machine without the DSL. The exit code of `bench.ops.export`, in the process that it needs."""
    options = [f"--arch={arch}", f"--only={','.join(only)}", f"--shape={shape}"]
    return subprocess.run(
        [sys.executable, "-m", "dsv4lib.bench.ops.export", str(path), *options], check=False
    ).returncode
