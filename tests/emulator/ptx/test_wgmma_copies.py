"""Copies of accumulators that the compiler put in front of the wait move after it, where all paths agree."""

import pytest

from dsv4lib.emulator.ptx.parse import parse
from dsv4lib.emulator.ptx.wgmma_copies import after_waits
from dsv4lib.emulator.ptx.wgmma_registers import findings

MMA = "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f0, %f1, %f2, %f3}, %rd0, %rd1, 1, 1, 1;"
OTHER = MMA.replace("%f0, %f1, %f2, %f3", "%f4, %f5, %f6, %f7")
COMMIT, COPY, USE = "wgmma.commit_group.sync.aligned;", "mov.b32 %r0, %f0;", "mov.b32 %r5, %r0;"


def wait(left=0):
    return f"wgmma.wait_group.sync.aligned {left};"


def kernel(body):
    head = ".version 8.0\n.target sm_90a\n.address_size 64\n"
    registers = ".reg .pred %p<4>; .reg .b32 %r<20>; .reg .f32 %f<20>; .reg .b64 %rd<8>;"
    return parse(f"{head}.entry k() {{ {registers}\n{body}\n}}\n").kernels["k"]


def order(kernel):
    """What is left when wgmmas and commits are taken out, a word or two each."""
    texts = [i.text for i in kernel.instructions if not i.opcode.startswith(("wgmma.mma", "wgmma.commit"))]
    return [t.replace("wgmma.wait_group.sync.aligned ", "wait ").split(",")[0].rstrip(";") for t in texts]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (f"{MMA} {COMMIT} {COPY} {wait()}", ["wait 0", "mov.b32 %r0"]),
        (f"{MMA} {COPY} {COMMIT} {wait()}", ["wait 0", "mov.b32 %r0"]),
        (f"{MMA} {COMMIT} {COPY} mov.b32 %f9, %r0; {wait()}", ["wait 0", "mov.b32 %r0", "mov.b32 %f9"]),  # of a copy
        (f"{MMA} {COMMIT} mov.b64 %rd2, {{%f0, %f1}}; {wait()}", ["wait 0", "mov.b64 %rd2"]),
        (f"{MMA} {COMMIT} {OTHER} {COMMIT} {COPY} {wait(1)} {wait(0)}", ["wait 1", "mov.b32 %r0", "wait 0"]),
        (f"{OTHER} {COMMIT} {MMA} {COMMIT} {COPY} {wait(1)} {wait(0)}", ["wait 1", "wait 0", "mov.b32 %r0"]),
        (f"{MMA} {COMMIT} {COPY} @%p0 bra A; mov.b32 %r5, 0; A: {wait()}",
         ["@%p0 bra A", "mov.b32 %r5", "wait 0", "mov.b32 %r0"]),
        # Two waits, one on each path.
        (f"{MMA} {COMMIT} {COPY} @%p0 bra A; {wait()} bra B; A: {wait()} B: mov.b32 %r5, %r0;",
         ["@%p0 bra A", "wait 0", "mov.b32 %r0", "bra B", "wait 0", "mov.b32 %r0", "mov.b32 %r5"]),
        # A loop that waits at its top, and one that leaves a group pending: only the last turn's copy is wanted.
        (f"A: {wait()} {MMA} {COMMIT} {COPY} @%p0 bra A; {wait()} mov.b32 %r5, %r0;",
         ["wait 0", "@%p0 bra A", "wait 0", "mov.b32 %r0", "mov.b32 %r5"]),
        (f"A: {MMA} {COMMIT} {COPY} {wait(1)} @%p0 bra A; {wait()} mov.b32 %r5, %r0;",
         ["wait 1", "@%p0 bra A", "wait 0", "mov.b32 %r0", "mov.b32 %r5"]),
        (f"{MMA} {COMMIT} @%p0 bra A; {COPY} A: {wait()}", ["@%p0 bra A", "wait 0"]),  # never used
    ],
)  # fmt: skip
def test_copies_move(body, expected):
    moved = after_waits(kernel(body))
    assert order(moved) == expected
    assert [i.index for i in moved.instructions] == list(range(len(moved.instructions)))
    assert not [f for f in findings(moved) if not f.waited]


@pytest.mark.parametrize(
    "body",
    [
        f"{MMA} {COMMIT} {COPY} add.u32 %r1, %r0, 1; {wait()}",  # used
        f"{MMA} {COMMIT} {COPY} @%p0 mov.b32 %r0, 0; {wait()} {USE}",  # perhaps overwritten
        f"{MMA} {COMMIT} {COPY} {MMA} {COMMIT} {wait()} {USE}",  # an older value than the one after the wait
        f"{MMA} {COMMIT} {COPY} mov.b32 %r1, %r0; {MMA} {COMMIT} {wait()} mov.b32 %r5, %r1;",  # through a copy
        f"{MMA} {COMMIT} @%p0 {COPY} {wait()}",
        f"mov.b32 %r0, 5; {MMA} {COMMIT} @%p0 bra A; {COPY} A: {wait()} {USE}",  # not on all paths
        f"{MMA} {COMMIT} {COPY} @%p0 {wait()} add.u32 %r1, %r0, 1;",
        f"{MMA} {COMMIT} add.f32 %f9, %f0, %f1; {wait()}",  # no copy
        f"A: {MMA} {COMMIT} {COPY} add.u32 %r5, %r5, %r0; @%p0 bra A; {wait()}",
    ],
)
def test_what_is_not_just_another_name_stays(body):
    before = kernel(body)
    assert after_waits(before) is before
    assert [f for f in findings(before) if not f.waited]


@pytest.mark.parametrize(
    "body", [f"{MMA} {COMMIT} {wait()} {COPY}", COPY, f"{MMA} {COMMIT} mov.b32 %r0, %r1; {wait()}"]
)
def test_nothing_to_do(body):
    before = kernel(body)
    assert after_waits(before) is before


def test_labels_follow():
    """A branch to where a copy stood reaches what followed it; one to after the wait does not reach the copy."""
    moved = after_waits(kernel(f"@%p0 bra B; {MMA} {COMMIT} A: {COPY} {wait()} B: mov.b32 %r5, 0; @%p1 bra B;"))
    assert moved.instructions[moved.labels["A"]].opcode.startswith("wgmma.wait_group")
    assert moved.instructions[moved.labels["B"]].text.startswith("mov.b32 %r5")
