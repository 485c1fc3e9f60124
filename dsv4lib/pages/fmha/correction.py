"""Judge a variant of the attention kernel's correction step: its numbers, its order, and how often it corrects."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4lib.ops.fmha.inputs import Case, case
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.pages.fmha.run_case import Outcome, bits, run_fmha

SETTINGS = (512, "bf16", "index", True, True, True)  # one pass over entries and window, sink, inverse RoPE
STORED = 32  # columns of a tcgen05.st of the correction
OTHER_SCHEDULES = ("adversarial", "newest_first")


@dataclass(frozen=True)
class Correction:
    """What one variant did.

    Attributes:
        outcome: of the traced run, under the first schedule.
        count: corrections of O by a warp.
        different: schedules whose bits differ from the first's, or which stopped.
        hazards: of all schedules.
    """

    outcome: Outcome
    count: int
    different: int
    hazards: int

    @property
    def clean(self) -> bool:
        """Tell whether numbers are right and no check of any schedule has anything to say."""
        return self.outcome.clean and not self.hazards and not self.different


def some_tokens(heads: int = 64, seed: int = 0) -> Case:
    """Return a token of five tiles, in which maxima grow a little, and a short one."""
    return case(heads, [200, 40], [100, 9], seed=seed)


def try_correction(kernel_type: type[Fmha], one: Case) -> Correction:
    """Run a kernel under three schedules with the race detector; count its corrections in the trace."""
    first = run_fmha(kernel_type, SETTINGS, one, trace=True)
    others = [run_fmha(kernel_type, SETTINGS, one, schedule=name) for name in OTHER_SCHEDULES]
    different = sum(r.error is not None or bits(r.output) != bits(first.output) for r in others)
    hazards = sum(len(r.hazards) for r in [first, *others])
    stores = sum(n for name, n in first.trace.counts().items() if name.startswith("tcgen05.st"))
    return Correction(first, stores * STORED // first.kernel.q_column, different, hazards)
