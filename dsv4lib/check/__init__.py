"""Judge numbers. One comparator, one table of tolerances, and the corruptions that both must catch.

The package imports nothing of the lab but its error types and takes plain torch or numpy arrays.

    record = check.compare(kernel_output, oracle)       # tolerance from the table, by dtype
    assert record.passed, str(record)

Why so many criteria: a cosine alone passes a kernel with one tile of 1,024 zeroed; element-wise bounds alone pass a
systematic drift inside them; neither says *where* to look. The record holds all of them and the place.
"""

from dsv4lib.check import corrupt
from dsv4lib.check.comparator import Comparison, compare
from dsv4lib.check.factor import FactorResult, within_factor
from dsv4lib.check.tolerances import TOLERANCES, Tolerance, tolerance

__all__ = [
    "TOLERANCES",
    "Comparison",
    "FactorResult",
    "Tolerance",
    "compare",
    "corrupt",
    "tolerance",
    "within_factor",
]
