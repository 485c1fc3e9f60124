"""Run what the page on the fused MoE shows: one case, the same in other ways, and with faults."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from dsv4lib.ops.mega_moe import inputs
from dsv4lib.ops.mega_moe.faults import FAULTS, NVFP4
from dsv4lib.ops.mega_moe.kernel import MegaMoe
from dsv4lib.ops.mega_moe.layout import Layout
from dsv4lib.pages.mega_moe import traffic
from dsv4lib.pages.mega_moe.run_case import Outcome, run_mega_moe, unrounded

EXPERTS, TOPK, HIDDEN, WIDTH = 8, 2, 256, 256
FIRST = 9  # tokens of the first rank
SCHEDULE = "random"  # of the emulator: devices and warps in any order, by seed
SHOWN = ("CountOfOneDevice", "ReadAlone", "SlotOfOwner", "FirstWeight")
STOPPED_AFTER = 2000  # warp-instructions of a rank that is dropped
HEADROOM, TOO_LOW = 2.0, 0.25  # of NVFP4's calibrated ranges: nothing saturates, or most


class Run(NamedTuple):
    """A case and what came of it."""

    made: traffic.Case
    found: Outcome
    seed: int


def case(ranks: int, tokens: int, seed: int, mode: str = "w4a8", headroom: float = HEADROOM) -> traffic.Case:
    """Make tokens: nine on the first rank, ``tokens`` on the last one, between those numbers on the others."""
    steps = max(1, ranks - 1)
    counts = [FIRST + (tokens - FIRST) * rank // steps for rank in range(ranks)]
    layout = Layout(ranks, EXPERTS, max(counts), TOPK, HIDDEN, WIDTH, mode)
    return inputs.case(layout, counts, seed, headroom=headroom)


def run(ranks: int, tokens: int, seed: int, fault: str = "none", mode: str = "w4a8") -> Run:
    """Run the kernel, or one with a fault of `FAULTS` that the mode can have, with trace and race detector.

    ``fault`` "calibrated_too_low": tokens and h of NVFP4 are above the ranges that their scales have.
    """
    made = case(ranks, tokens, seed, mode, TOO_LOW if fault == "calibrated_too_low" else HEADROOM)
    kind = FAULTS.get(fault, MegaMoe) if (fault in NVFP4) == (mode == "nvfp4") else MegaMoe
    return Run(made, run_mega_moe(made, kind, trace=True, schedule=SCHEDULE, seed=seed), seed)


class Same(NamedTuple):
    """Numbers that differ from those of the first run.

    Attributes:
        alone: of one rank with all experts. late: where one rank begins when the others can go no further.
        empty: of the other ranks, where the first one has no tokens.
    """

    alone: int
    late: int
    empty: int


def same_bits(one: Run) -> Same:
    """Run the same kernel on the same tokens on one rank, with a late rank, and without the first rank's tokens."""
    made, outs = one.made, one.found.outs
    options = {"kernel_type": type(one.found.kernel), "schedule": SCHEDULE, "seed": one.seed}
    alone = run_mega_moe(made.as_one_rank(), **options).outs
    late = run_mega_moe(made, faults={made.layout.world - 1: ("late", None)}, **options).outs
    nothing = made.ranks[0]._replace(**{name: x[:0] for name, x in made.ranks[0]._asdict().items()})
    empty = run_mega_moe(replace(made, ranks=[nothing, *made.ranks[1:]]), **options).outs
    return Same(differing(outs, alone), differing(outs, late), differing(outs[1:], empty[1:]))


class Rounded(NamedTuple):
    """What a format costs in a run.

    Attributes:
        pulled: bytes of codes and scales that a remote route pulls.
        error: of all outputs, against fp64 of tokens and weights before they were quantised, as a share of them.
        of_weights: the same of exact products of the quantised weights and tokens that are not.
    """

    pulled: int
    error: float
    of_weights: float


def rounded(one: Run) -> Rounded:
    """Count the bytes and compute the errors of a run."""
    made, layout = one.made, one.made.layout
    exact = torch.cat(unrounded(made))
    outs = one.found.outs, unrounded(made, inputs.Matrices(made.w1, made.w2, made.w3))
    errors = (float((torch.cat(out).double() - exact).norm() / exact.norm()) for out in outs)
    return Rounded(layout.code_bytes(layout.hidden) + layout.pitch, *errors)


def wrong(one: Run) -> int:
    """Count what speaks against a run: numbers, reports, bytes that crossed, and bits that one rank changes."""
    alone = run_mega_moe(one.made.as_one_rank(), type(one.found.kernel), schedule=SCHEDULE, seed=one.seed).outs
    counts = int(not one.found.right), len(one.found.hazards), traffic.difference(one.made, one.found)
    return sum(counts) + differing(one.found.outs, alone)


def differing(some: list[torch.Tensor], others: list[torch.Tensor]) -> int:
    """Count numbers of other bits; all of them if there are not as many."""
    a, b = torch.cat(some).view(torch.int16), torch.cat(others).view(torch.int16)
    return int((a != b).sum()) if a.shape == b.shape else a.numel()


def faults(seed: int, watched: bool = True) -> list[tuple[str, str, str, bool]]:
    """Run faults on two ranks: name, what it does, what finds it, whether anything does.

    Args:
        watched: by the race detector, without which a race that costs no number is not seen.
    """
    made, out = case(2, 14, seed), []
    options = {"schedule": SCHEDULE, "seed": seed} | ({} if watched else {"checks": "default"})
    for name in SHOWN:
        kind = FAULTS[name]
        found = run_mega_moe(made, kind, **options).findings()
        out.append((name, kind.__doc__.splitlines()[0], ", ".join(found) or "nothing", bool(found)))
    late = run_mega_moe(made, faults={1: ("empty", None)}, **options).findings()
    does = "A rank without work does not launch."
    out.append(("empty rank", does, ", ".join(late) or "nothing", bool(late)))
    return out


def dropped(seed: int, lines: int = 12) -> str:
    """Stop rank 1 on the way; returns the beginning and the end of the report."""
    found = run_mega_moe(case(2, 14, seed), faults={1: ("dropped", STOPPED_AFTER)}, schedule=SCHEDULE, seed=seed)
    text = [line[:160] for line in str(found.error).splitlines()]
    return "\n".join([*text[: lines - 1], *(["  ..."] if len(text) > lines else []), text[-1]])
