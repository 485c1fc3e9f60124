"""Check which targets take which variant of a block-scaled MMA: the table on which two documents contradict each other.

One says that SM100 has no NVFP4 instruction, the other that it runs on a B200. The assembler knows: `sm_100a` takes
every variant, the family target `sm_100f` only those that name the block.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dsv4lib.dsl.block_scale_probe import KINDS, TAKEN, TARGETS, BlockScaleProbe, recorded, refusal
from dsv4lib.dsl.compile import CompileError, compile_for

VARIANTS = [(kind, block) for kind, blocks in KINDS.items() for block in blocks]


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("kind, block", VARIANTS)
def test_who_takes_what(kind, block, arch):
    said = refusal(kind, block, arch)
    if arch == "sm_100f" and block.startswith("scale_vec"):
        assert f"Feature '.{block}' not supported on .target 'sm_100f'" in said
    else:
        assert said is None
    assert recorded()[kind, block, arch] == (said or TAKEN), "run python -m dsv4lib.dsl.block_scale_probe"


def test_the_committed_table_has_every_variant():
    assert set(recorded()) == {(kind, block, target) for kind, block in VARIANTS for target in TARGETS}
    assert sum(said != TAKEN for said in recorded().values()) == 4
    assert recorded()["mxf4nvf4", "scale_vec::4X", "sm_100a"] == TAKEN  # the B200 has the instruction
    assert "not supported on .target 'sm_100f'" in recorded()["mxf4nvf4", "scale_vec::4X", "sm_100f"]


@pytest.mark.parametrize("block", ["scale_vec::4X", "block16"])
def test_a_pair_of_ctas_is_no_different(block):
    assert [refusal("mxf4nvf4", block, arch, ctas=2) is None for arch in TARGETS] == [
        True,
        block == "block16",
        True,
    ]


@pytest.mark.parametrize("kind, block", [("mxf4nvf4", "block64"), ("mxf8f6f4", "block16"), ("mxf4", "scale_vec::4X")])
def test_the_judge_refuses_what_does_not_exist(kind, block):
    assert refusal(kind, block, "sm_100a")


def test_hopper_has_none_of_it():
    assert refusal("mxf4nvf4", "block16", "sm_90a")


def test_the_reason_names_the_assembler():
    import cutlass

    with pytest.raises(CompileError, match="PTX assembly failed: Feature '.scale_vec::4X' not supported"):
        compile_for(BlockScaleProbe("mxf4nvf4", "scale_vec::4X"), (cutlass.Int32(0), cutlass.Int64(0)), "sm_100f")


def test_a_stand_alone_ptxas_agrees():
    """The DSL's assembler is part of its library; the one of a CUDA toolkit must say the same."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "emulator" / "variants"))
    try:
        import ptxas
    finally:
        sys.path.pop(0)
    tool = ptxas.find()
    if tool is None:
        pytest.skip("no ptxas: pip install triton, or set PTXAS")
    head = "tcgen05.mma.cta_group::1.kind"
    lines = [f"{head}::{k}.block_scale.{b} [%r0], %d0, %d1, %r1, [%r2], [%r3], %p0;" for k, b in VARIANTS]
    for arch in TARGETS:
        refused = {VARIANTS[i] for i in ptxas.errors(tool, lines, arch)}
        assert refused == {(k, b) for k, b in VARIANTS if arch == "sm_100f" and b.startswith("scale_vec")}
