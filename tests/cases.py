"""Cases of a test: those of the default run, and further ones of the same check."""

import pytest


def cases(*default, full):
    """Parameters for ``pytest.mark.parametrize``: ``default``, then ``full`` with that mark; a tuple: several names."""
    return [*default, *(pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=pytest.mark.full) for x in full)]
