"""Traces of small kernels, record by record."""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.trace.recorder import Recorder
from dsv4lib.emulator.trace.trace import Trace, pack_lanes, unpack_lanes
from tests.emulator.launching import aligned, entry, prepare

START = """
ld.param.b64 %rd1, [out]; mov.u32 %r1, %tid.x; shr.u32 %r2, %r1, 5; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd1, %rd1, %rd3;
"""


def traced(text: str, *args: np.ndarray, **options) -> Trace:
    machine = prepare(text, *args, **options)
    machine.trace = Recorder(machine)
    machine.run()
    return machine.trace.finish()


def test_lanes_are_packed_lowest_first():
    packed = pack_lanes([0, 33, 127])
    assert packed[0] == 1 and packed[4] == 2 and packed[15] == 128 and packed.sum() == 131
    assert np.nonzero(unpack_lanes(packed))[0].tolist() == [0, 33, 127]
    assert unpack_lanes(np.stack([packed, packed])).shape == (2, 128)


def test_threads_barriers_and_counts():
    """Two warps store, meet, and loop: three rounds for warp 0, five for warp 1."""
    body = (
        START
        + """
    mov.u32 %r3, s; shl.b32 %r4, %r1, 2; add.s32 %r5, %r3, %r4; st.shared.b32 [%r5], %r1; bar.sync 1, 64;
    mul.lo.s32 %r6, %r2, 2; add.s32 %r6, %r6, 3;
    LOOP: sub.s32 %r6, %r6, 1; setp.gt.s32 %p1, %r6, 0; @%p1 bra LOOP;
    setp.eq.u32 %p2, %r2, 7; @%p2 xor.b32 %r6, %r6, 1;
    ld.shared.b32 %r7, [%r5]; st.global.b32 [%rd1], %r7;
    """
    )
    out = aligned(64, np.int32)
    trace = traced(entry("u64 out", body, shared=".shared .align 16 .b8 s[256];"), out, block=64)
    assert out.tolist() == list(range(64))
    counts = trace.counts()
    assert counts["sub.s32"] == 8 and counts["setp.gt.s32"] == 8
    # Taken by some lanes in all rounds but the last of each warp; no lane ever takes part in the xor.
    assert counts["bra"] == 6 and "xor.b32" not in counts
    stores = trace.smem[trace.smem["what"] == "threads"]
    assert stores["write"].all() and sorted(stores["warp"].tolist()) == [0, 1]
    at = int(stores["first"].min())
    for row, chunks in zip(trace.smem, trace.chunks, strict=True):
        assert (chunks * 16).tolist() == list(range(at + 128 * row["warp"], at + 128 * row["warp"] + 128, 16))
    assert trace.named[["kind", "number", "arrived", "expected"]].tolist() == [
        ("named", 1, 32, 64),
        ("named", 1, 64, 64),
    ]
    waits = trace.states[trace.states["state"] == "wait"]
    assert (
        len(waits) == 1
        and waits["reason"][0] == "barrier 1"
        and "bar.sync" in trace.opcodes[trace.lines == waits["line"][0]]
    )


TENSOR = """
mov.u32 %r3, s; setp.ne.u32 %p1, %r2, 0; @%p1 bra WAIT;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r3], 32;
WAIT: bar.sync 0; ld.shared.b32 %r4, [s];
shl.b32 %r5, %r2, 21; add.s32 %r6, %r4, %r5;
tcgen05.st.sync.aligned.32x32b.x2.b32 [%r6], {%r1, %r2}; tcgen05.wait::st.sync.aligned;
add.s32 %r7, %r6, 1048577; tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r8}, [%r7]; tcgen05.wait::ld.sync.aligned;
st.global.b32 [%rd1], %r8; bar.sync 0; @%p1 bra END;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 32; END:
"""


def test_cells_of_tensor_memory():
    """Each warp stores two columns of its 32 lanes and loads two columns of the upper 16, from column 1."""
    out = aligned(128, np.int32)
    trace = traced(entry("u64 out", START + TENSOR, shared=".shared .align 16 .b8 s[16];"), out, block=128)
    assert trace.tmem["what"].tolist().count("st") == 4 and trace.tmem["what"].tolist().count("ld") == 4
    for row in trace.tmem:
        lanes = np.nonzero(unpack_lanes(row["lanes"]))[0].tolist()
        first = 32 * int(row["warp"])
        if row["what"] == "st":
            assert row["write"] and (row["column"], row["end"]) == (0, 2) and lanes == list(range(first, first + 32))
        else:
            assert not row["write"] and (row["column"], row["end"]) == (1, 3)
            assert lanes == list(range(first + 16, first + 32))
    written, read = trace.tmem_at(trace.events - 1), trace.tmem_at(trace.events - 1, write=False)
    assert (written[:, :2] >= 0).all() and (written[:, 2:] == -1).all()
    upper = np.arange(128) % 32 >= 16
    assert (read[upper, 1:3] >= 0).all() and (read[~upper] == -1).all() and (read[:, 3:] == -1).all()
    assert (trace.tmem["warp"][written[:, 0]] == np.arange(128) // 32).all()
    kinds, times = trace.tmem_state(trace.events - 1)
    assert kinds[0, 0] == 2 and kinds[16, 1] == 1 and times[16, 1] >= times[16, 0]


WGMMA = (
    ".version 9.1\n.target sm_90a\n.address_size 64\n.visible .entry k(\n.param .u64 out\n)\n{\n"
    ".reg .b32 %r<16>; .reg .b64 %rd<16>; .reg .f32 %f<8>; .reg .pred %p<4>;\n.shared .align 128 .b8 s[4096];\n"
)


def test_wgmma_and_its_operands():
    """D += A B with A 64 x 16 at the start of shared memory and B 8 x 16 after it, no swizzle."""
    body = (
        START
        + """
    mov.u32 %r3, s; mov.u32 %r9, 0; mad.lo.s32 %r4, %r1, 32, %r3;
    st.shared.v4.b32 [%r4], {%r9, %r9, %r9, %r9}; st.shared.v4.b32 [%r4+16], {%r9, %r9, %r9, %r9};
    fence.proxy.async.shared::cta; bar.sync 0;
    shr.u32 %r5, %r3, 4; cvt.u64.u32 %rd4, %r5; or.b64 %rd5, %rd4, 0x0000001000080000;
    add.s32 %r6, %r3, 2048; shr.u32 %r6, %r6, 4; cvt.u64.u32 %rd6, %r6; or.b64 %rd7, %rd6, 0x0000001000080000;
    mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1, %f2, %f3, %f4}, %rd5, %rd7, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    st.global.f32 [%rd1], %f1;
    """
    )
    out = aligned(128, np.float32)
    trace = traced(WGMMA + body + "\nret;\n}\n", out, block=128, settings=Settings(arch="sm_90a"))
    assert (out == 0).all()
    assert trace.mmas[["m", "n", "k", "column", "flops"]].tolist() == [(16, 8, 16, -1, 2 * 16 * 8 * 16)] * 4
    reads = trace.smem[~trace.smem["write"]]
    assert sorted(reads["what"].tolist()) == ["wgmma A"] * 4 + ["wgmma B"] * 4
    b = [chunks for row, chunks in zip(trace.smem, trace.chunks, strict=True) if row["what"] == "wgmma B"]
    start = int(trace.smem["first"][trace.smem["what"] == "threads"].min()) + 2048
    assert all(sorted((16 * chunks).tolist()) == list(range(start, start + 256, 16)) for chunks in b)
