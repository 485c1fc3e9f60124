"""Count the rows of the dispatch kernel's outputs.

Importable without the CuTe DSL.
"""


def max_rows(tokens: int, k: int, experts: int, align: int = 128) -> int:
    """Count the rows that ``tokens`` k routes need at most.

    Whatever experts they go to: what the host can know.

    Of n = min(E, T k) experts each needs a block of ``align`` rows; every ``align`` further routes can open another.
    """
    routes = tokens * k
    active = min(experts, routes)
    return align * (active + (routes - active) // align)
