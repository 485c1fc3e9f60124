"""Remembered source lines: the PTX is the one that the DSL writes by itself, and the DSL is left as it was."""

import contextlib
import re
import sys

import pytest
from cutlass._mlir_helpers import op

from dsv4lib.dsl import source_lines
from dsv4lib.dsl.compile import CompileError, compile_for
from dsv4lib.ops.gemm_tile.sm100 import GemmTile
from dsv4lib.ops.rmsnorm.arguments import fake_args
from dsv4lib.ops.rmsnorm.kernel import RmsNorm

GEMM, NORM = GemmTile(tile_n=64, stages=3), RmsNorm(512)
KERNELS = {"gemm_tile": (GEMM, GEMM.fake_args()), "rmsnorm": (NORM, fake_args(NORM))}


@pytest.mark.parametrize("name", KERNELS)
def test_ptx_and_its_lines_are_the_same(name, monkeypatch):
    remembered = compile_for(*KERNELS[name])
    monkeypatch.setattr(source_lines, "remembered", contextlib.nullcontext)
    without = compile_for(*KERNELS[name])
    assert len(re.findall(r"^\t?\.loc", without.ptx, re.MULTILINE)) > 20
    assert remembered.ptx == without.ptx and remembered.cubin == without.cubin


def test_the_dsl_has_what_is_remembered_and_gets_it_back():
    own = {name: getattr(op, name) for name in source_lines._REMEMBER}
    with source_lines.remembered(), source_lines.remembered():
        assert all(getattr(op, name) is not found for name, found in own.items())
    assert all(getattr(op, name) is found for name, found in own.items())


def test_it_gets_it_back_from_a_kernel_that_does_not_compile():
    own = {name: getattr(op, name) for name in source_lines._REMEMBER}
    with pytest.raises(CompileError):
        compile_for(lambda: 1 / 0, ())
    assert own == {name: getattr(op, name) for name in own}


def test_a_line_is_looked_up_once():
    looked = []
    remembering = source_lines._of_instruction(lambda frame: looked.append(frame.f_lasti) or frame.f_lineno)
    lines = [remembering(sys._getframe()) for _ in range(3)]
    assert len(set(lines)) == len(looked) == 1 and lines[0] == lines[2]
