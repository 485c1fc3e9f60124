"""Every variant that the emulator takes is one that ptxas takes, in whatever order the modifiers stand."""

from __future__ import annotations

import random

import expand
import operands
import ptxas
import pytest

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import implementations
from dsv4lib.emulator.isa.coverage import PACKAGE
from dsv4lib.emulator.machine.program import lower
from dsv4lib.emulator.ptx import parse

A_PATTERN = 60  # variants looked at
PTXAS = ptxas.find()
needs_ptxas = pytest.mark.skipif(PTXAS is None, reason="no ptxas: pip install triton, or set PTXAS")


def sample(rng: random.Random) -> list[str]:
    """List variants of every registered pattern."""
    implementations.load()
    own = [e for e in isa.entries() if e.implementation.__module__.startswith(PACKAGE)]
    return list(dict.fromkeys(opcode for e in own for opcode in expand.variants_of(e.pattern, A_PATTERN, rng)))


def is_refused(opcode: str) -> bool:
    """The emulator refuses the instruction before anything runs."""
    line = f"{opcode} {operands.operands(opcode)[0]};"
    module = parse.parse(ptxas.module([line], "sm_100a"))
    try:
        lower(module.kernels["k"], module)
    except EmulatorError:
        return True
    return False


@needs_ptxas
def test_what_is_taken_exists():
    """What no architecture has is not registered, or is refused with its operands (vectors that are too long)."""
    variants = sample(random.Random(0))
    assert len(variants) > 8000
    unknown = ptxas.refused(PTXAS, [(opcode, operands.operands(opcode)) for opcode in variants])
    assert len(unknown) < len(variants) / 20, "the operands of the test are wrong"
    assert {opcode: text for opcode, text in unknown.items() if not is_refused(opcode)} == {}


@needs_ptxas
def test_shuffled_modifiers():
    """ptxas and the emulator agree that the order of modifiers does not matter, and on what the instruction is."""
    rng = random.Random(1)
    choices = {}
    for opcode in sample(rng):
        other = expand.shuffled(opcode, rng)
        assert isa.lookup(other)[1].opcode == opcode, other
        choices[other] = operands.operands(opcode)
    unknown = ptxas.refused(PTXAS, choices.items())
    assert {opcode: text for opcode, text in unknown.items() if not is_refused(isa.lookup(opcode)[1].opcode)} == {}


@needs_ptxas
@pytest.mark.parametrize(
    "line",
    ["add.sat.s64 %d0, %d1, %d2", "cvt.rn.s32.f32 %r0, %r1", "mbarrier.parity.try_wait.shared.b64 %p0, [smem], %r1"],
)
def test_the_judge_refuses(line):
    assert 0 in ptxas.errors(PTXAS, [line + ";"], "sm_100a")
    assert ptxas.errors(PTXAS, ["add.s32 %r0, %r1, %r2;", line + ";"], "sm_100a").keys() == {1}
    with pytest.raises(isa.UnsupportedInstruction):
        isa.lookup(line.split()[0])


def test_modifiers_in_any_order():
    """Without an assembler: modifiers are a bag, types and state spaces a list, names fixed."""
    implementations.load()
    same = {
        "add.f32.rn.ftz": "add.rn.ftz.f32",
        "atom.shared.cta.max.s32": "atom.cta.shared.max.s32",
        "cvt.f32.rn.s32": "cvt.rn.f32.s32",
        "ld.global.L1::no_allocate.nc.b32": "ld.global.nc.L1::no_allocate.b32",
        "mbarrier.try_wait.parity.shared::cta.acquire.cta.b64": "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64",
        "tcgen05.mma.kind::f16.cta_group::1": "tcgen05.mma.cta_group::1.kind::f16",
    }
    assert {opcode: isa.lookup(opcode)[1].opcode for opcode in same} == same
    for wrong in ("cvt.rn.s32.f32", "mad.s32.lo", "add.rn.rn.f32", "bar.popc.red.u32", "add.rn.f32.f32"):
        assert isa.find(wrong) is None, wrong
