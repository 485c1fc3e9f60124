"""Show which checks of the pages on mHC and on the router see which injected fault."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4lib.ops.mhc.faults import FAULTS as MHC_FAULTS
from dsv4lib.pages.common import faults as injected
from dsv4lib.pages.router_mhc import figures
from dsv4lib.pages.router_mhc.figures import Boundary, Found

WHAT = {
    "comb_plain": "comb acts untransposed",
    "normed_copy": "rsqrt before the product, rounded to bf16",
    "post_without_2": "post at logit 0 is a half",
    "few_pairs": "3 pairs instead of 20",
    "weight_forgotten": "y without the norm's weight",
    **{name: kernel.__doc__.split("\n")[0] for name, kernel in MHC_FAULTS.items()},
    "bias_forgotten": "experts by affinity alone",
    "ties_high": "of equal scores the higher number first",
    "bias_in_weights": "weights of a + bias",
    "uniform_hash": "weights of a table's experts all alike",
    "none": "everything as it is",
}
OF_MHC = ("comb_plain", "normed_copy", "post_without_2", "few_pairs", "weight_forgotten", *MHC_FAULTS)
OF_ROUTER = ("bias_forgotten", "ties_high", "bias_in_weights", "uniform_hash")
IN_THE_RULE = ("normed_copy", "post_without_2", "ties_high", "bias_in_weights", "uniform_hash", "none")
# The stages' bounds: up to these a check has found nothing.
ALLOWED = {"coefficient_error": 1e-6, "stream_error": 1, "y_error": 1, "row_sum_error": 3e-7}
ALLOWED |= {"column_sum_error": 4e-6, "weight_error": 6e-7, "hash_weight_error": 6e-7}


def show_faults(given: Boundary, found: Found, names: Sequence[str]) -> int:
    """Show what sees each fault of ``names``. Returns how many nothing sees.

    Args:
        given: what crosses the boundary. found: what the ops made of it, without a fault.
    """

    def judged(name: str) -> dict[str, float]:
        outcome = found if name in IN_THE_RULE else figures.run(given, name)
        return figures.judge(given, outcome, name).metrics

    return injected.seen_by({name: name for name in names}, WHAT.__getitem__, judged, ALLOWED)
