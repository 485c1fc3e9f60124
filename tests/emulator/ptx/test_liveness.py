"""Slots shared between registers: on no path does a register lose its value before its last use."""

import random

import pytest

from dsv4lib.emulator.ptx.liveness import bits_of, intervals, live_sets, share
from dsv4lib.emulator.ptx.parse import parse
from dsv4lib.emulator.ptx.pending import registers_of

HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n.entry k() {\n"
HEAD += ".reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %d<9>;\n"


def prepare(body):
    """Kernel, uses and defs with "first operand is written" as the rule."""
    kernel = parse(HEAD + body + "\n}\n").kernels["k"]
    uses, defs = [], []
    for instr in kernel.instructions:
        branch = instr.opcode.startswith(("bra", "ret"))
        written = set() if branch else set(registers_of(instr.operands[0]))
        used = set() if branch else {r for o in instr.operands[1:] for r in registers_of(o)}
        if instr.guard is not None:
            used |= written | {instr.guard.index}
            written = set()
        uses.append(used)
        defs.append(written)
    return kernel, uses, defs


def slots(body, pinned=()):
    kernel, uses, defs = prepare(body)
    names = [r.name for r in kernel.registers]
    found = share(kernel, uses, defs, [r.bits for r in kernel.registers], {names.index(n) for n in pinned})
    return dict(zip(names, found, strict=True))


def test_a_chain_needs_two_slots():
    s = slots("mov.b32 %r1, 0; add.s32 %r2, %r1, 1; add.s32 %r3, %r2, 1; add.s32 %r4, %r3, 1;")
    assert s["%r1"] == s["%r3"] != s["%r2"] == s["%r4"]


def test_a_result_never_shares_with_its_operands():
    s = slots("mov.b32 %r1, 0; add.s32 %r2, %r1, %r1;")
    assert s["%r1"] != s["%r2"]


def test_widths_do_not_mix():
    s = slots("mov.b32 %r1, 0; mov.b64 %d1, 0; mov.b32 %r2, 0; mov.b64 %d2, 0;")
    assert s["%r1"] == s["%r2"] != s["%d1"] == s["%d2"]


def test_pinned_registers_stay_alone():
    s = slots("mov.b32 %r1, 0; mov.b32 %r2, 0; mov.b32 %r3, 0;", pinned=["%r2"])
    assert s["%r1"] == s["%r3"] != s["%r2"]


def test_a_guarded_write_keeps_the_old_value_alive():
    body = "mov.b32 %r1, 0; mov.b32 %r2, 1; add.s32 %r3, %r2, 1; @%p1 mov.b32 %r1, 2; add.s32 %r4, %r1, 1;"
    s = slots(body)
    assert len({s["%r1"], s["%r2"], s["%r3"]}) == 3


def test_values_live_around_a_loop():
    body = "mov.b32 %r1, 0; LOOP: mov.b32 %r2, 1; add.s32 %r3, %r1, %r2; @%p1 bra LOOP; ret;"
    kernel, uses, defs = prepare(body)
    names = [r.name for r in kernel.registers]
    assert intervals(kernel, uses, defs)[names.index("%r1")] == (0, 3)
    s = slots(body)
    assert len({s["%r1"], s["%r2"], s["%r3"]}) == 3


def test_values_that_come_from_code_further_down():
    body = "bra START; B: mov.b32 %r2, 0; add.s32 %r3, %r2, 1; add.s32 %r4, %r1, 1; ret; START: mov.b32 %r1, 0; bra B;"
    s = slots(body)
    assert s["%r1"] not in (s["%r2"], s["%r3"])


def test_live_sets():
    kernel, uses, defs = prepare("mov.b32 %r1, 0; @%p1 bra A; add.s32 %r2, %r1, 1; A: add.s32 %r3, %r1, %r2;")
    names = [r.name for r in kernel.registers]
    got = [
        (start, end, {names[i] for i in bits_of(entry)}, {names[i] for i in bits_of(leave)})
        for start, end, entry, leave in live_sets(kernel, uses, defs)
    ]
    assert got == [
        (0, 2, {"%p1", "%r2"}, {"%r1", "%r2"}),
        (2, 3, {"%r1"}, {"%r1", "%r2"}),
        (3, 4, {"%r1", "%r2"}, set()),
    ]


def random_body(rng, length):
    """A random program with forward and backward branches."""
    lines = []
    for i in range(length):
        lines.append(f"L{i}:")
        guard = rng.choice(["", "", "", f"@%p{rng.randrange(4)} "])
        if rng.random() < 0.15:
            lines.append(f"{guard}bra L{rng.randrange(length)};")
        else:
            a, b, c = (rng.randrange(12) for _ in range(3))
            lines.append(f"{guard}add.s32 %r{a}, %r{b}, %r{c};")
    return "\n".join(lines)


@pytest.mark.parametrize("seed", range(60))
def test_every_use_sees_its_own_value_on_random_paths(seed):
    """Run random paths twice: with a register each, and with slots. Each definition makes a new token."""
    rng = random.Random(seed)
    kernel, uses, defs = prepare(random_body(rng, rng.randrange(2, 40)))
    slot = share(kernel, uses, defs, [r.bits for r in kernel.registers], set())
    for _ in range(20):
        registers, shared, pc = {}, {}, 0
        for step in range(200):
            if pc >= len(kernel.instructions):
                break
            instr = kernel.instructions[pc]
            taken = instr.guard is None or rng.random() < 0.5
            if instr.guard is not None:
                assert registers.get(instr.guard.index) == shared.get(slot[instr.guard.index])
            if instr.opcode == "bra":
                pc = kernel.labels[instr.operands[0].name] if taken else pc + 1
                continue
            if taken:
                for operand in instr.operands[1:]:
                    (register,) = registers_of(operand)
                    if register in registers:  # a value that was never written may be anything
                        assert registers[register] == shared[slot[register]], instr.text
                (target,) = registers_of(instr.operands[0])
                registers[target] = shared[slot[target]] = (step, pc)
            pc += 1
