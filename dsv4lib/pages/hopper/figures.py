"""Show what an H200 measured, from committed rows, and one kernel that runs here."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import torch
from matplotlib.figure import Figure

from dsv4lib import backends
from dsv4lib.bench.ops import counters, results
from dsv4lib.bench.ops.counters import Counted
from dsv4lib.bench.ops.results import COPY, OURS, Result
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.formats import fp8_block
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.inv_rope_quant.arguments import fake_args, launch_args
from dsv4lib.ops.inv_rope_quant.faults import FAULTS as KERNEL_FAULTS
from dsv4lib.ops.inv_rope_quant.kernel import InvRopeQuant
from dsv4lib.ops.inv_rope_quant.op import Call
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.hopper import ops_table
from dsv4lib.reference import rope
from dsv4lib.viz.dumbbells import Case, dumbbells
from dsv4lib.viz.table import show_table
from dsv4lib.viz.times import over_bytes

ARCHS = "sm_100a", "sm_90a"
ALLOWED = {"bytes_over_least": 1.25}  # the stage's bound: up to it a check has found nothing
SHEET = 4.8  # TB/s of an H200, from the data sheet
COPIED = 4.05  # TB/s of a large copy with a cold L2, bytes read and written
ONE = 1.09  # us, cold: a kernel with next to nothing to do, the shortest row that was recorded
TWO = 3.1  # us, cold: two small kernels that depend on each other
LARGE = 64 << 20  # bytes of a row whose inputs and outputs the caches of a GPU do not hold
LAST = (1 << 20) - 1  # the largest position


def recorded(fault: str = "none") -> list[Result]:
    """Return the committed rows; with an injected fault, as if bytes or verdicts were miscounted."""
    rows = results.load()
    if fault == "bytes_doubled":
        return [dataclasses.replace(row, floor_us=row.floor_us and 2 * row.floor_us) for row in rows]
    if fault == "wrong_hidden":  # a provider of ours that failed its check, timed all the same
        ours = dataclasses.replace(rows[0].found[0], state=results.WRONG, detail="injected")
        return [dataclasses.replace(rows[0], found=(ours, *rows[0].found[1:])), *rows[1:]]
    return rows


def impossible(rows: Sequence[Result]) -> list[tuple[str, str, str]]:
    """List (op, shape, provider) of every time shorter than the row's bytes take: these are miscounted."""
    return [
        (row.op, row.shape, provider.provider)
        for row in rows
        for provider in row.found
        if provider.us is not None and row.floor_us is not None and provider.us < row.floor_us
    ]


def wrong(rows: Sequence[Result]) -> list[tuple[str, str]]:
    """Return (op, shape) where ours was not right, failed or was not timed."""
    return [(r.op, r.shape) for r in rows if (ours := r.named(OURS)) is None or ours.state != results.TIMED]


def unexplained(rows: Sequence[Result], fault: str = "none") -> list[tuple[str, str]]:
    """Return (op, shape) of missed rows without a note."""
    notes = {} if fault == "silent" else ops_table.notes()
    return [(r.op, r.shape) for r in rows if r.verdict == "missed" and not notes.get((r.op, r.shape))]


def judged(rows: Sequence[Result]) -> Counter[str]:
    """Count how many rows were reached, missed, not judged, or promised nothing."""
    return Counter(row.verdict or "no promise" for row in rows)


def verdicts(rows: Sequence[Result]) -> None:
    """Show a line an op: rows, verdicts, and our time over the best other's."""
    table = []
    for op, some in groupby(rows, key=lambda row: row.op):
        own = list(some)
        ratios = sorted(row.ratio for row in own if row.ratio)
        middle = f"{ratios[len(ratios) // 2]:.2f}" if ratios else ""
        ends = f"{ratios[0]:.2f} .. {ratios[-1]:.2f}" if ratios else "no other"
        count = judged(own)
        names = "reached", "missed", "not judged", "no promise"
        table.append((op, len(own), *(count[name] or "" for name in names), middle, ends))
    show_table(("op", "rows", "reached", "missed", "not judged", "no promise", "median ratio", "ratios"), table)


def times(rows: Sequence[Result]) -> Figure:
    """Draw all rows at once: bytes, and how long ours, the best other and a copy took."""
    both = [row for row in rows if row.ours_us]
    series = {
        "ours": [(row.bytes, row.ours_us) for row in both],
        "best other": [(row.bytes, row.peer.us) for row in both if row.peer],
        COPY: [(row.bytes, provider.us) for row in both if (provider := row.named(COPY)) is not None and provider.us],
    }
    speeds = {"data sheet": SHEET, "large copies": COPIED}
    levels = {"one small kernel": ONE, "two, one after the other": TWO}
    return over_bytes(series, speeds, levels, "H200, cold L2: time over bytes")


def panels(rows: Sequence[Result], ops: Sequence[str], containing: str = "") -> Figure:
    """Draw floor, ours and the best other of the rows of some ops, a panel an op."""
    chosen = {op: [_case(row) for row in rows if row.op == op and containing in row.shape] for op in ops}
    return dumbbells({op: cases for op, cases in chosen.items() if cases}, "H200, cold L2")


def _case(row: Result) -> Case:
    peer, good = row.peer, {"reached": True, "missed": False}.get(row.verdict)
    return Case(row.shape, row.floor_us, row.ours_us, peer.us if peer else None, peer.provider if peer else "", good)


def missed(rows: Sequence[Result]) -> None:
    """Show the rows that miss their goal: by how much, what bounds them, what was tried."""
    notes = ops_table.notes()
    lines = [
        (
            f"{r.op}, {r.shape}",
            f"{r.ours_us:.1f}" if r.ours_us else "",
            f"{r.ratio:.2f}, {r.promise}" if r.ratio else r.promise,
            *note,
        )
        for r in rows
        if r.verdict == "missed" and (note := notes.get((r.op, r.shape), ops_table.UNKNOWN))
    ]
    show_table(("row", "ours us", "ratio, goal", "limit", "tried"), lines)


def counted(fault: str = "none") -> dict[tuple[str, str], Counted]:
    """Return what the GPU's counters said of ours, by (op, shape); a fault reads everything twice."""
    ours = {key[:2]: one for key, one in counters.load().items() if key[2] == OURS}
    if fault == "read_twice":
        return {key: dataclasses.replace(one, hbm_read=2 * one.hbm_read) for key, one in ours.items()}
    return ours


def excess(rows: Sequence[Result], found: dict[tuple[str, str], Counted]) -> dict[tuple[str, str], float]:
    """Return counted HBM bytes over the least that a row needs, for rows of at least `LARGE` bytes."""
    return {
        key: (one.hbm_read + one.hbm_write) / row.bytes
        for row in rows
        if row.bytes >= LARGE and (one := found.get(key := (row.op, row.shape))) is not None
    }


def slots(rows: Sequence[Result], found: dict[tuple[str, str], Counted]) -> None:
    """Show where the time of the missed rows goes, by the GPU's counters."""
    names = "op", "shape", "us", "HBM MB", "least MB", "L2 MB", "issue slots %", "warps %", "waits mostly for"
    lines = []
    for row in rows:
        one = found.get((row.op, row.shape))
        if row.verdict == "missed" and one is not None:
            sizes = (f"{size / 1e6:.3g}" for size in (one.hbm_read + one.hbm_write, row.bytes, one.l2))
            wait = f"{one.stall}, {one.stalled:.0f} %"
            lines.append(
                (row.op, row.shape, f"{row.ours_us:.3g}", *sizes, f"{one.issue:.0f}", f"{one.warps:.0f}", wait)
            )
    show_table(names, lines)


def live(only: str = "inv_rope_quant", shape: str = "Flash T 128") -> str:
    """Time a row on this machine's GPU if it has one; otherwise say why not."""
    status = backends.status("native", "sm_90a")
    if not status.available:
        return f"nothing timed here: {status.reason}"
    from dsv4lib.bench.ops import harness

    return f"exit code {harness.main([f'--only={only}', f'--shape={shape}'])}"


def one_source(tokens: int, heads: int, seed: int, fault: str = "none") -> tuple[int, int, int]:
    """Run inverse RoPE with FP8 quantisation in the emulator, compiled for Blackwell and for Hopper.

    Args:
        tokens, heads: of the attention output. seed: of its values.
        fault: "forward": the table rotates the other way; "forward_on_hopper": on a Hopper alone; or one of the kernel.

    Returns:
        (bytes of codes and scales that differ between the architectures, from the oracle, hazards).
    """
    generator = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-3, 3, tokens * heads).view(tokens, heads, 1)
    o = (torch.randn(tokens, heads, 512, generator=generator) * scales).bfloat16()
    positions, freqs = torch.linspace(0, LAST, tokens).long(), rope.layer_freqs(FLASH, LayerKind.CSA)
    want = fp8_block.quantize_activation(rope.apply_inverse(o.float(), positions[:, None], freqs))
    cos, sin = rope.cos_sin(positions, freqs, torch.float32)
    found, hazards = [], 0
    for arch in ARCHS:
        turned = fault == "forward" or (fault == "forward_on_hopper" and arch == "sm_90a")
        table = torch.cat((cos, -sin if turned else sin), -1)
        kernel_type = KERNEL_FAULTS.get(fault, InvRopeQuant)
        kernel, code = compile_cache.default().get(kernel_type, {"gathered": False}, fake_args, arch)
        codes, exponents = (torch.full((tokens, heads, n), 255, dtype=torch.uint8) for n in (512, 4))
        gpu = make(arch, checks="race")
        call = Call(o, None, table, (codes, exponents), kernel.layout, "emulator")
        launch(code, *launch_args(kernel, call), gpu=gpu)
        hazards += len(gpu.hazards)
        found.append((codes, exponents))
    between = sum(int((a != b).sum()) for a, b in zip(*found, strict=True))
    oracle = sum(int((a != b).sum()) for a, b in zip(found[1], (want.codes, want.scales), strict=True))
    return between, oracle, hazards


FAULTS = {
    "none": "Everything as it was recorded.",
    "bytes_doubled": "A row counts its bytes twice: its floor doubles, and its time looks better.",
    "wrong_hidden": "A kernel that failed its check was timed all the same.",
    "silent": "Missed goals have no note on what limits them.",
    "read_twice": "Inputs cross the memory twice.",
}


def faults_table(names: Sequence[str]) -> int:
    """Show what sees each fault of ``names`` in the record. Returns how many nothing sees."""

    def judged(name: str) -> dict[str, float]:
        rows = recorded(name)
        seen = {"impossible_times": len(impossible(rows)), "wrong_rows": len(wrong(rows))}
        seen["unexplained_misses"] = len(unexplained(rows, name))
        return seen | {"bytes_over_least": max(excess(rows, counted(name)).values())}

    return injected.seen_by({name: name for name in names}, FAULTS.__getitem__, judged, ALLOWED)
