"""Helper modules of these tests (tc_*.py, ../launching.py) are imported by name; no program outlives its module."""

import gc
import pathlib
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left(kernels_in_memory):
    """No program and no warp outlives a module: what units keep of them, megabytes each, goes with them."""
    from dsv4lib.emulator.machine.program import Program
    from dsv4lib.emulator.machine.warp import Warp

    def alive():
        gc.collect()
        return {id(one) for one in gc.get_objects() if type(one) in (Program, Warp)}

    before = alive()
    yield
    left = len(alive() - before)
    assert not left, f"{left} programs and warps are still referenced"
