"""Reads past the end of a tensor, or of what nothing wrote: a note unless the value matters."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4lib.emulator.checks.selection import select
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.memory.gmem import GlobalMemory
from tests.emulator.launching import aligned, entry, prepare
from tests.emulator.suite.harness import SMEM, START

READS = {  # lanes from 20 on read what is not there
    "global_read_past_end": "ld.global.b32 %r20, [%rd2];",
    "uninitialised_smem": "setp.lt.u32 %p5, %r0, 20; @%p5 st.shared.b32 [%r1], %r0; bar.warp.sync -1;"
    "ld.shared.b32 %r20, [%r1];",
}
NOTES = {"global_read_past_end": "global_read_past_end_unused", "uninitialised_smem": "uninitialised_smem_unused"}
USES = {  # what becomes of the value, and whether it matters
    "nothing": ("", False),
    "a sum that nothing stores": ("add.u32 %r21, %r20, 1; mul.lo.u32 %r22, %r21, %r21;", False),
    "a store by the lanes that have it": ("setp.lt.u32 %p6, %r0, 20; @%p6 st.global.b32 [%rd5], %r20;", False),
    "a store by a lane that has not": ("setp.eq.u32 %p6, %r0, 20; @%p6 st.global.b32 [%rd5], %r20;", True),
    "a store by all": ("st.global.b32 [%rd5], %r20;", True),
    "a sum that is stored": ("add.u32 %r21, %r20, 1; st.global.b32 [%rd5], %r21;", True),
    "a shuffle to lanes that store": (
        "shfl.sync.bfly.b32 %r21, %r20, 16, 31, -1; setp.lt.u32 %p6, %r0, 8; @%p6 st.global.b32 [%rd5], %r21;", True
    ),
    "a branch": ("setp.eq.u32 %p6, %r20, 7; @%p6 bra OUT; OUT:", True),
    "an address": ("and.b32 %r21, %r20, 15; mul.wide.u32 %rd6, %r21, 4; add.s64 %rd6, %rd6, %rd5;"
                   "ld.global.b32 %r22, [%rd6];", True),
}  # fmt: skip


@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("use", USES)
def test_a_value_that_does_not_matter_is_a_note(kind, use):
    text, matters = USES[use]
    for schedule in POLICIES:
        data = aligned(2048, np.uint32)
        chosen = select("race")
        settings = Settings(native_checks=chosen.bits, muted=chosen.muted, schedule=schedule)
        out = "ld.param.u64 %rd5, [out]; mul.wide.u32 %rd6, %r0, 4; add.s64 %rd5, %rd5, %rd6;"
        few = aligned(20, np.uint32)
        machine = prepare(entry("u64 data, u64 out", START + out + READS[kind] + text, shared=SMEM), few, data,
                          settings=settings)  # fmt: skip
        gmem = machine.gmem = GlobalMemory()
        gmem.register(few.ctypes.data, few.nbytes, "few", owner=few, padded=True)
        gmem.register_array(data, "out")
        found = machine.run().hazards
        assert [(h.kind, h.severity) for h in found] == ([(kind, "error")] if matters else [(NOTES[kind], "lint")]), (
            schedule
        )
