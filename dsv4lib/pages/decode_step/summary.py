"""Write the table that README.md begins with. A decode step on an H200, ours, public kernels and the floor.

`python -m dsv4lib.pages.decode_step.summary` rewrites it from what is recorded; no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsv4lib.bench.decode_step.table import markdown
from dsv4lib.pages.common import peers as peer_pages
from dsv4lib.pages.decode_step import run_case
from dsv4lib.pages.hopper import step_table

MODULE = "decode_step.summary"
HEAD = "DSV4-Flash, a decode step, 32K tokens of context, one H200: ms"


def table(rows: Sequence[run_case.Recorded], steps: Sequence[run_case.Whole]) -> str:
    """Make the table: a column a batch.

    Args:
        rows: every line. steps: captured whole, which has less work in the gaps between ops than their sum.
    """
    whole = {one.batch: one.ms for one in steps}
    goals = {one.batch: one.us / 1e3 for one in run_case.goals() if one.what == run_case.WHOLE}
    sums = [run_case.total(one for one in rows if one.batch == batch) for batch in run_case.BATCHES]
    compared = {f"{one.compared} of {one.lines}" for one in sums}
    lines = f"{', '.join(sorted(compared))} lines, added up"
    cells = [
        ["ours, whole, as one CUDA graph", *(f"**{whole[batch]:.3g}**" for batch in run_case.BATCHES)],
        ["goal of it", *(f"{goals[batch]:.3g}" for batch in run_case.BATCHES)],
        [f"best public kernels, {lines}", *(f"{one.public:.3g}" for one in sums)],
        ["ours, the same lines", *(f"{one.public_ours:.3g}" for one in sums)],
        ["floor of all lines: bytes at 4.8 TB/s, or MMAs", *(f"{one.floor:.3g}" for one in sums)],
    ]
    return markdown([HEAD, *(f"b {batch}" for batch in run_case.BATCHES)], cells)


def main() -> None:
    """Rewrite the table."""
    peer_pages.replace(step_table.README, MODULE, table(run_case.recorded(), run_case.whole_steps()))


if __name__ == "__main__":
    main()
