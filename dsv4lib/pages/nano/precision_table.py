"""Write what each precision costs nano into the README. `python -m dsv4lib.pages.nano.precision_table`.

`data/nano/precision.csv` has the variants of the reference model, `data/nano/kernels.csv` the modes of the kernels.
Both are written by `./dsv4 evaluate --table`.
"""

from __future__ import annotations

import csv
from pathlib import Path

from dsv4lib import env
from dsv4lib.nano import on_kernels
from dsv4lib.pages.common import peers as peer_pages

MODULE = "nano.precision_table"
FOLDER, README = env.root() / "data" / "nano", env.root() / "README.md"
ORACLE = "fp8 linears", "fp8 activations", "experts mxfp4", "experts nvfp4", "kv fp8, 584 bytes", "indexer fp4"
KERNELS = on_kernels.SHIPPED, "linears bf16", "experts nvfp4", on_kernels.NAIVE


def markdown(folder: Path = FOLDER) -> str:
    """The table: one change on the oracle a row, then modes of the kernels."""
    columns = "changed", "through", "bytes", "bits per byte", "KL", "same byte"
    lines = [f"| {' | '.join(columns)} |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    with open(folder / "precision.csv") as stream:
        found = {r["name"]: r for r in csv.DictReader(stream) if (r["model"], r["judge"]) == ("bf16", "speeches")}
    lines += [_line(found[name], "oracle, fp32") for name in ORACLE]
    with open(folder / "kernels.csv") as stream:
        found = {r["name"]: r for r in csv.DictReader(stream)}
    lines += [_line(found[name], f"kernels, {found[name]['group']}") for name in KERNELS]
    return "\n".join(lines)


def _line(row: dict[str, str], through: str) -> str:
    difference, low, high = (f"{float(row[key]):+.4f}" for key in ("difference", "low", "high"))
    spread = "" if row["windows"] == "1" else f" [{low}, {high}]"  # one window has none
    judged, interval = f"{int(row['judged']):,}", difference + spread
    numbers = f"{float(row['kl']):.4f} | {float(row['same']):.3f}"
    return f"| {row['name']} | {through} | {judged} | {interval} | {numbers} |"


def main() -> None:
    """Rewrite the table in the README."""
    peer_pages.replace(README, MODULE, markdown())


if __name__ == "__main__":
    main()
