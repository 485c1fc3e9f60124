"""Races in global memory: the bug is reported with kind, lane and both instructions, the repaired twin is silent.

Every kernel runs under every schedule: what is ordered does not depend on which warp ran first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from dsv4lib import emulator
from dsv4lib.emulator import gpu
from dsv4lib.emulator.driver.device import CHECKS
from dsv4lib.emulator.errors import MemoryFault
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import LaunchRequest, Settings
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.ptx import parse
from tests.emulator.checks.test_race import FILL, INIT, SMEM, START, wait
from tests.emulator.launching import aligned, entry, launch, pack, prepare

# %rd2: the thread's word, %rd3: that of a thread of the other warp, %rd4: a flag; CTA 0 has %p5.
WORDS = """
mul.wide.u32 %rd2, %r0, 4; add.s64 %rd2, %rd2, %rd1; xor.b32 %r4, %r0, 32; mul.wide.u32 %rd3, %r4, 4;
add.s64 %rd3, %rd3, %rd1; add.s64 %rd4, %rd1, 3072; mov.u32 %r40, %ctaid.x; setp.eq.u32 %p5, %r40, 0;
"""
RAISE = "@%p2 st.release.gpu.global.b32 [%rd4], 1;"
LOWERED = "POLL: ld.acquire.gpu.global.b32 %r41, [%rd4]; setp.eq.u32 %p6, %r41, 0; @%p6 bra POLL;"
PRODUCE = "@!%p5 bra OTHER; st.global.b32 [%rd2], %r0; {} bra END; OTHER: {} ld.global.b32 %r5, [%rd3]; END:"
STORE = (
    "st.shared.b32 [%r1], %r0; fence.proxy.async.shared::cta; bar.sync 0; @!%p2 bra END;"
    "cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r2], 256; cp.async.bulk.commit_group; {}"
    "ld.global.b32 %r5, [%rd1+16]; cp.async.bulk.wait_group 0; END:"
)
STORED = INIT.format(1, 1) + "st.global.b32 [%rd2], %r0; {} bar.sync 0;" + FILL + wait("%r8", 0, "W")


@dataclass(frozen=True)
class Twin:
    """Bodies of the broken and the repaired kernel; what is reported, at and against which instructions."""

    broken: str
    repaired: str
    at: str
    owner: str
    kind: str = "race_global"
    grid: int = 1
    threads: int = 64


TWINS = {
    "warp and warp": Twin(
        "st.global.b32 [%rd2], %r0; ld.global.b32 %r5, [%rd3];",
        "st.global.b32 [%rd2], %r0; bar.sync 0; ld.global.b32 %r5, [%rd3];",
        "ld.global|st.global",
        "ld.global|st.global",
    ),
    "halves of one word": Twin(
        "cvt.u16.u32 %h1, %r0; @%p1 st.global.b16 [%rd4], %h1; @!%p1 st.global.b16 [%rd4], %h1;",
        "cvt.u16.u32 %h1, %r0; @%p1 st.global.b16 [%rd4], %h1; @!%p1 st.global.b16 [%rd4+2], %h1;",
        "st.global.b16",
        "st.global.b16",
    ),
    "generic addresses": Twin(
        "st.b32 [%rd2], %r0; ld.v2.b32 {%r5, %r6}, [%rd1+128];",
        "st.b32 [%rd2], %r0; bar.sync 0; ld.v2.b32 {%r5, %r6}, [%rd1+128];",
        "ld.v2|st.b32",
        "ld.v2|st.b32",
    ),
    "CTA and CTA without a flag": Twin(
        PRODUCE.format("", ""),
        PRODUCE.format("bar.sync 0;" + RAISE, LOWERED),
        "ld.global|st.global",
        "ld.global|st.global",
        grid=2,
    ),
    "the flag is raised for one warp alone": Twin(
        PRODUCE.format(RAISE, LOWERED),
        PRODUCE.format("bar.sync 0;" + RAISE, LOWERED),
        "ld.global|st.global",
        "ld.global|st.global",
        grid=2,
    ),
    "one thread looks at the flag": Twin(
        PRODUCE.format("bar.sync 0;" + RAISE, "@!%p2 bra ON;" + LOWERED + "ON:"),
        PRODUCE.format("bar.sync 0;" + RAISE, "@!%p2 bra ON;" + LOWERED + "ON: bar.sync 0;"),
        "ld.global|st.global",
        "ld.global|st.global",
        grid=2,
    ),
    "a relaxed flag": Twin(
        PRODUCE.format("bar.sync 0;" + RAISE.replace("release", "relaxed"), LOWERED),
        PRODUCE.format("bar.sync 0; fence.acq_rel.gpu;" + RAISE.replace("release", "relaxed"), LOWERED),
        "ld.global|st.global",
        "ld.global|st.global",
        grid=2,
    ),
    "a flag after a fence that is too early": Twin(
        PRODUCE.format("bar.sync 0;" + RAISE.replace("release", "relaxed"), LOWERED).replace(
            "st.global.b32 [%rd2]", "fence.acq_rel.gpu; st.global.b32 [%rd2]"
        ),
        # All fence, all meet, one raises the flag.
        PRODUCE.format("membar.gl; bar.sync 0;" + RAISE.replace("release", "relaxed"), LOWERED),
        "ld.global|st.global",
        "ld.global|st.global",
        grid=2,
    ),
    "a flag that is looked at without acquiring": Twin(
        PRODUCE.format("bar.sync 0;" + RAISE, LOWERED.replace("acquire", "relaxed")),
        PRODUCE.format("bar.sync 0;" + RAISE, LOWERED.replace("acquire", "relaxed") + "fence.acq_rel.gpu;"),
        "ld.global|st.global",
        "ld.global|st.global",
        grid=2,
    ),
    "a counter": Twin(
        PRODUCE.format("bar.sync 0; @%p2 red.global.add.u32 [%rd4], 1;", LOWERED),
        PRODUCE.format("bar.sync 0; @%p2 red.release.gpu.global.add.u32 [%rd4], 1;", LOWERED),
        "ld.global|st.global",
        "ld.global|st.global",
        grid=2,
    ),
    "a store and an atomic": Twin(
        "@%p1 st.global.b32 [%rd4], 5; @!%p1 red.global.add.u32 [%rd4], 1;",
        "red.global.add.u32 [%rd4], 1;",
        "st.global|red.global",
        "st.global|red.global",
        grid=2,
    ),
    "a store and a sum": Twin(  # they synchronise nothing, but do not race with each other
        "@%p1 st.global.f32 [%rd4], 0f3f800000; @!%p1 red.global.add.f32 [%rd4], 0f3f800000;",
        "red.global.add.f32 [%rd4], 0f3f800000;",
        "st.global|red.global",
        "st.global|red.global",
        grid=2,
    ),
    "two writers": Twin(
        "@%p2 st.global.b32 [%rd4], %r40;",
        "@%p5 st.global.b32 [%rd2], %r40;",
        "st.global",
        "st.global",
        grid=2,
    ),
    "a bulk store of which only the reading is complete": Twin(
        STORE.format("cp.async.bulk.wait_group.read 0;"),
        STORE.format("cp.async.bulk.wait_group 0;"),
        "ld.global|cp.async.bulk",
        "ld.global|cp.async.bulk",
    ),
    "a bulk copy of what is being stored": Twin(
        STORED.format("fence.proxy.async.global;").replace("bar.sync 0;@", "@"),
        STORED.format("fence.proxy.async.global;"),
        "st.global|cp.async.bulk",
        "st.global|cp.async.bulk",
    ),
    "the same value twice": Twin(
        "st.global.b32 [%rd4], 7;",
        "@%p1 st.global.b32 [%rd4], 7;",
        "st.global",
        "st.global",
        "race_global_same_value",
    ),
    "a bulk copy of what threads wrote": Twin(
        STORED.format(""),
        STORED.format("fence.proxy.async.global;"),
        "cp.async.bulk",
        "st.global",
        "missing_proxy_fence_global",
    ),
}
SCHEDULES = [(name, 0) for name in POLICIES] + [("random", 1), ("adversarial", 1)]


def run(body: str, twin: Twin, schedule: str = "round_robin", seed: int = 0, checks: str = "race"):
    settings = Settings(schedule=schedule, seed=seed, native_checks=CHECKS[checks], instruction_limit=2_000_000)
    text = entry("u64 data", START + WORDS + body, shared=SMEM)
    return launch(text, aligned(1024, np.uint32), grid=twin.grid, block=twin.threads, settings=settings)


@pytest.mark.parametrize("name", TWINS)
def test_the_repaired_twin_is_silent(name):
    for schedule, seed in SCHEDULES:
        assert run(TWINS[name].repaired, TWINS[name], schedule, seed).hazards == [], schedule


@pytest.mark.parametrize("name", TWINS)
def test_the_bug_is_reported_under_every_schedule(name):
    twin = TWINS[name]
    for schedule, seed in SCHEDULES:
        found = [h for h in run(twin.broken, twin, schedule, seed).hazards if h.kind == twin.kind]
        assert found, schedule
        first = found[0]
        assert any(text in first.place.ptx for text in twin.at.split("|")), first
        assert any(text in first.owner.ptx for text in twin.owner.split("|")), first
        assert first.place.cta is not None and first.place.warp is not None and first.place.lanes
        assert first.owner.cta is not None


def test_only_the_race_detector_looks():
    twin = TWINS["warp and warp"]
    assert run(twin.broken, twin, checks="default").hazards == []


@pytest.mark.parametrize("flag", ["multimem.red.release.sys.global.add.u32 [%rd1], 1;", ""])
def test_a_multicast_flag_orders_ctas(flag):
    """CTA 0 stores and raises a flag on all devices; CTA 1 waits for that of its own device."""
    head = "ld.param.u64 %rd1, [all]; ld.param.u64 %rd2, [own]; mov.u32 %r40, %ctaid.x; setp.ne.u32 %p5, %r40, 0;"
    body = f"@%p5 bra OTHER; st.global.u32 [%rd2+16], 7; {flag} bra END; OTHER:"
    poll = "POLL: ld.acquire.sys.global.u32 %r41, [%rd2]; setp.eq.u32 %p6, %r41, 0; @%p6 bra POLL;" if flag else ""
    text = entry("u64 all, u64 own", head + body + poll + "ld.global.u32 %r5, [%rd2+16]; END:")
    (kernel,) = parse.parse(text).kernels.values()
    with emulator.devices(2, shims=False, checks="race") as gpus:
        buffer = gpus.symmetric(64, np.uint32, "buffer")
        params = pack(kernel, (buffer.multicast, buffer[0]))
        gpus[0].launch(LaunchRequest("k", parse.parse(text), (2, 1, 1), (32, 1, 1), params=params))
        gpus.synchronize()
        assert {h.kind for h in gpus.hazards} == (set() if flag else {"race_global"})


def test_loads_past_the_end_do_no_harm():
    data = aligned(1024, np.uint32)
    body = "@%p2 st.global.b32 [%rd1], 1; @!%p1 ld.global.v4.b32 {%r5, %r6, %r7, %r11}, [%rd1+4080];"
    text = entry("u64 data", START + WORDS + body, shared=SMEM)
    machine = prepare(text, data, block=64, settings=Settings(native_checks=CHECKS["race"]))
    gmem = machine.gmem = GlobalMemory()
    gmem.register(data.ctypes.data, 4088, "data", owner=data, padded=True)
    assert {h.kind for h in machine.run().hazards} == {"global_read_past_end_unused"}


def test_the_lane_is_the_one_whose_access_conflicts():
    twin = Twin("setp.eq.u32 %p7, %r0, 37; @%p2 st.global.b32 [%rd4], 5; @%p7 ld.global.b32 %r5, [%rd4];", "", "", "")
    (hazard,) = run(twin.broken, twin).hazards
    places = {hazard.place.ptx.split(".")[0]: hazard.place, hazard.owner.ptx.split(".")[0]: hazard.owner}
    assert (places["@%p7 ld"].warp, places["@%p7 ld"].lanes) == (1, 1 << 5)
    assert (places["@%p2 st"].warp, places["@%p2 st"].lanes) == (0, 1)


@pytest.mark.parametrize("size", [768, 764])
def test_a_bulk_copy_at_the_end_of_an_allocation(size):
    """A copy up to the last byte takes part in races; one that leaves is an error of memory, not of the detector."""
    data = aligned(1024, np.uint32)
    body = STORE.format("cp.async.bulk.wait_group.read 0;").replace("[%rd1]", "[%rd1+512]")
    text = entry("u64 data", START + WORDS + body.replace("[%rd1+16]", "[%rd1+760]"), shared=SMEM)
    machine = prepare(text, data, block=64, settings=Settings(native_checks=CHECKS["race"]))
    gmem = machine.gmem = GlobalMemory()
    gmem.register(data.ctypes.data, size, "data", owner=data)
    if size == 768:
        assert {h.kind for h in machine.run().hazards} == {"race_global"}
    else:
        with pytest.raises(MemoryFault, match="256 bytes .* runs 4 bytes over the end of data"):
            machine.run()


HEAP = """.version 8.0
.target sm_90
.address_size 64
.extern .func (.param .b64 r) malloc(.param .b64 n);
.extern .func free(.param .b64 p);
.visible .entry k(.param .u64 out) { .reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<3>; .shared .align 8 .b64 slot;
ld.param.u64 %rd8, [out]; mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 31; setp.ne.u32 %p1, %r2, 0; mov.b64 %rd4, 64;
SHARED setp.ne.u32 %p2, %r1, 0; @%p2 bra TAKEN;
OWN @%p1 ret;
{ .param .b64 n; .param .b64 back; st.param.b64 [n], %rd4; call (back), malloc, (n); ld.param.b64 %rd1, [back]; }
SHARED st.shared.b64 [slot], %rd1; TAKEN: bar.sync 0; ld.shared.b64 %rd1, [slot]; @%p1 ret;
st.global.u32 [%rd1], %r1; ld.global.u32 %r4, [%rd1];
mul.wide.u32 %rd5, %r1, 4; add.s64 %rd6, %rd8, %rd5; st.global.u32 [%rd6], %r4;
OWN { .param .b64 p; st.param.b64 [p], %rd1; call free, (p); }
SHARED { .param .b64 n; .param .b64 back; st.param.b64 [n], %rd4; call (back), malloc, (n); }
ret; }
"""


@pytest.mark.parametrize("shared", [False, True])
def test_a_piece_of_the_heap_that_is_used_again(shared):
    """The allocator orders its users: only where warps have one piece at the same time, they race."""
    gone, left = ("OWN", "SHARED") if shared else ("SHARED", "OWN")
    text = "\n".join(line for line in HEAP.splitlines() if not line.startswith(gone)).replace(left, "")
    out = np.zeros(128, np.uint32)
    result = gpu.load(text).kernel("k").launch(1, 128, [out], checks="race")
    assert {h.kind for h in result.hazards} == ({"race_global"} if shared else set())
    assert shared or out[::32].tolist() == [0, 32, 64, 96]
