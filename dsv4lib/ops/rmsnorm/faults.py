"""Inject faults into the norm, one at a time: each class replaces one thing. `FAULTS` holds them by name."""

from __future__ import annotations

from dsv4lib.ops.rmsnorm import kernel as rmsnorm_kernel


class SumsTooEarly(rmsnorm_kernel.RmsNorm):
    """Adds up the warps' sums before all are there: right where the slowest warp comes first."""

    def sync(self) -> None:
        """No barrier."""


FAULTS = {SumsTooEarly.__name__: SumsTooEarly}
