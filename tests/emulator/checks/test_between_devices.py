"""Order between devices: litmus tests by scope, faulty kernels that are reported, repaired twins that are silent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from dsv4lib import emulator
from dsv4lib.emulator.machine.directed import make_policy
from dsv4lib.emulator.machine.policies import POLICIES
from tests.emulator.driver.test_devices import RELAY, request
from tests.emulator.launching import entry

SCOPE, RACE = "scope_between_devices", "race_between_devices"

# Message passing: device 0 stores data and raises a flag, both on device 1, which waits for the flag and reads.
SEND = "ld.param.u64 %rd1, [buffer]; mov.u32 %r1, %tid.x; setp.ne.u32 %p1, %r1, 0; @%p1 bra END; {} END:"
MESSAGE = SEND.format("st.global.u32 [%rd1+64], 7;\n{before} {write} [%rd1], 1;")
WAIT = SEND.format("L: {read} %r2, [%rd1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra L;\n{after} ld.global.u32 %r3, [%rd1+64];")
ORDERS = ["weak", *(f"{sem}.{scope}" for sem in ("relaxed", "strong") for scope in ("cta", "gpu", "sys"))]


def kinds_of(send, receive, schedule="round_robin", seed=0, *, cells=64):
    """Reports of both devices for a sender on device 0 and a receiver on device 1, with a buffer of device 1."""
    with emulator.devices(2, checks="race", shims=False, schedule=schedule, seed=seed) as gpus:
        buffer = gpus.symmetric(cells, np.uint32, "buffer")
        gpus[0].launch(request(entry("u64 buffer", send), buffer[1]))
        gpus[1].launch(request(entry("u64 buffer", receive), buffer[1]))
        gpus.synchronize()
        return gpus.hazards


def message(write, read, before="", after="", **options):
    """Kinds reported for the data (offset 0x40) and for the flag (0x0)."""
    write = f"st.{write.replace('strong', 'release')}.global.u32"
    read = f"ld.{read.replace('strong', 'acquire')}.global.u32"
    found = kinds_of(MESSAGE.format(before=before, write=write), WAIT.format(read=read, after=after), **options)
    at = {0: set(), 64: set()}
    for hazard in found:
        at[int(hazard.message.partition("at 0x")[2].split()[0], 16)].add(hazard.kind)
    return at[64], at[0]


@pytest.mark.parametrize("read", ORDERS)
@pytest.mark.parametrize("write", ORDERS)
def test_message_passing(write, read):
    """Only release.sys and acquire.sys make the data safe; a flag needs .sys on both sides."""
    data, flag = message(write, read)
    assert data == (set() if (write, read) == ("strong.sys", "strong.sys") else {RACE})
    wide = write.endswith("sys") and read.endswith("sys")
    assert flag == (set() if wide else {RACE} if write == read == "weak" else {SCOPE})


@pytest.mark.parametrize("schedule", POLICIES)
def test_message_passing_under_every_schedule(schedule):
    for seed in range(3):
        assert message("strong.sys", "strong.sys", schedule=schedule, seed=seed) == (set(), set())
        assert message("strong.gpu", "strong.sys", schedule=schedule, seed=seed) == ({RACE}, {SCOPE})
        assert message("strong.sys", "strong.gpu", schedule=schedule, seed=seed) == ({RACE}, {SCOPE})
        assert message("relaxed.sys", "relaxed.sys", schedule=schedule, seed=seed) == ({RACE}, set())


@pytest.mark.parametrize("send", ["cta", "gpu", "sys"])
@pytest.mark.parametrize("receive", ["cta", "gpu", "sys"])
def test_fences_need_the_scope_too(send, receive):
    data, flag = message("relaxed.sys", "relaxed.sys", f"fence.acq_rel.{send};", f"fence.acq_rel.{receive};")
    assert data == (set() if send == receive == "sys" else {RACE}) and flag == set()


def test_a_scope_error_names_both_accesses_and_the_fix():
    found = kinds_of(
        MESSAGE.format(before="", write="st.release.gpu.global.u32"),
        WAIT.format(read="ld.acquire.sys.global.u32", after=""),
    )
    hazard = next(h for h in found if h.kind == SCOPE)
    sides = {hazard.place.device: hazard.place.ptx, hazard.owner.device: hazard.owner.ptx}
    assert "st.release.gpu" in sides[0] and "ld.acquire.sys" in sides[1]
    assert "of device 0" in hazard.message and "of device 1" in hazard.message
    assert "`st.release.gpu.global.u32 [%rd1], 1` is weak or narrower than .sys" in hazard.message
    assert "`ld.acquire" not in hazard.message and "buffer of device 1" in hazard.message
    assert hazard.severity == "error" and ".sys scope on both sides" in hazard.fix


PULL = (
    "mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 64;"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%rd1+64], 64, [bar];"
    "P: mbarrier.try_wait.parity.shared.b64 %p3, [bar], 0; @!%p3 bra P;"
)
PUSH = (
    "mov.u32 %r4, tile; st.shared.u32 [%r4], 7; st.shared.u32 [%r4+4], 7; st.shared.u32 [%r4+8], 7;"
    "st.shared.u32 [%r4+12], 7; fence.proxy.async.shared::cta;"
    "cp.async.bulk.global.shared::cta.bulk_group [%rd1+64], [%r4], 16; cp.async.bulk.commit_group;"
    "cp.async.bulk.wait_group{} 0; st.release.sys.global.u32 [%rd1], 1;"
)
FLAG = "L: ld.acquire.sys.global.u32 %r2, [%rd1]; setp.eq.u32 %p2, %r2, 0; @%p2 bra L;"
COUNT = "L: ld.acquire.sys.global.u32 %r2, [%rd1]; setp.lt.u32 %p2, %r2, 2; @%p2 bra L;"
SHARED = ".shared .align 128 .b8 tile[128]; .shared .align 8 .b64 bar;"


@dataclass(frozen=True)
class Twin:
    """Two devices' bodies; ``faulty`` replaces ``repaired`` in one of them."""

    kind: str
    send: str
    receive: str
    repaired: str
    faulty: str


TWINS = {
    "an atomic without scope counts arrivals of two devices": Twin(
        SCOPE, "st.global.u32 [%rd1+64], 7; atom.release.sys.global.add.u32 %r5, [%rd1], 2;", FLAG,
        "atom.release.sys.global", "atom.global",
    ),
    "both devices add to one counter": Twin(
        SCOPE, "red.release.sys.global.add.u32 [%rd1], 1;", "red.release.sys.global.add.u32 [%rd1], 1;" + COUNT,
        "red.release.sys.global.add.u32 [%rd1], 1;", "red.release.gpu.global.add.u32 [%rd1], 1;",
    ),
    "a bulk copy pulls what a peer has written": Twin(
        RACE, "st.global.u32 [%rd1+64], 7; fence.proxy.async.global; st.release.sys.global.u32 [%rd1], 1;",
        FLAG + PULL, "ld.acquire.sys", "ld.relaxed.sys",
    ),
    "a bulk store pushes, and only its reading is complete": Twin(
        RACE, PUSH.format(""), FLAG + "ld.global.u32 %r3, [%rd1+64];", "wait_group 0", "wait_group.read 0",
    ),
    "the flag before the data": Twin(
        RACE, "st.global.u32 [%rd1+64], 7; st.release.sys.global.u32 [%rd1], 1;",
        FLAG + "ld.global.u32 %r3, [%rd1+64];",
        "st.global.u32 [%rd1+64], 7; st.release.sys.global.u32 [%rd1], 1;",
        "st.release.sys.global.u32 [%rd1], 1; st.global.u32 [%rd1+64], 7;",
    ),
    "an asynchronous reduction raises the flag": Twin(
        RACE, "st.global.u32 [%rd1+64], 7; red.async.release.sys.global.add.u32 [%rd1], 1;",
        FLAG + "ld.global.u32 %r3, [%rd1+64];", "red.async.release.sys", "red.async.release.gpu",
    ),
    "both write the same word": Twin(
        RACE, "st.global.u32 [%rd1+64], 7; st.release.sys.global.u32 [%rd1], 1;",
        FLAG + "st.global.u32 [%rd1+64], 8;", FLAG, "",
    ),
}  # fmt: skip
SCHEDULES = [(name, 0) for name in POLICIES] + [("random", 1), ("adversarial", 1)]


def reported(twin, change, schedule, seed):
    bodies = [SHARED + SEND.format(change(body)) for body in (twin.send, twin.receive)]
    return kinds_of(*bodies, schedule, seed)


@pytest.mark.parametrize("name", TWINS)
def test_the_repaired_twin_is_silent(name):
    for schedule, seed in SCHEDULES:
        assert reported(TWINS[name], lambda body: body, schedule, seed) == [], schedule


@pytest.mark.parametrize("name", TWINS)
def test_the_bug_is_reported_under_every_schedule(name):
    twin = TWINS[name]
    for schedule, seed in SCHEDULES:
        found = reported(twin, lambda body: body.replace(twin.repaired, twin.faulty), schedule, seed)
        first = next((h for h in found if h.kind == twin.kind), None)
        assert first is not None, (schedule, found)
        assert {first.place.device, first.owner.device} == {0, 1}


# --- multimem ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize("schedule", POLICIES)
def test_a_multicast_flag_has_a_scope(scope, schedule):
    """What NVIDIA's GEMM with all-reduce does: a flag on all devices by multimem.red, released at .gpu scope."""
    send = f"st.global.u32 [%rd2], 7; multimem.red.release.{scope}.global.add.u32 [%rd1], 1;"
    body = "ld.param.u64 %rd1, [all]; ld.param.u64 %rd2, [data]; mov.u32 %r1, %tid.x;"
    body += "setp.ne.u32 %p1, %r1, 0; @%p1 bra END;"
    with emulator.devices(2, checks="race", shims=False, schedule=schedule) as gpus:
        flags, data = gpus.symmetric(16, np.uint32, "flags"), gpus.symmetric(16, np.uint32, "data")
        gpus[0].launch(request(entry("u64 all, u64 data", body + send + "END:"), flags.multicast, data[1]))
        receive = body + FLAG + "ld.global.u32 %r3, [%rd2]; END:"
        gpus[1].launch(request(entry("u64 all, u64 data", receive), flags[1], data[1]))
        gpus.synchronize()
        assert {h.kind for h in gpus.hazards} == (set() if scope == "sys" else {SCOPE, RACE})


ALIAS = "missing_alias_fence"


@pytest.mark.parametrize(
    ("between", "kinds"),
    [
        ("bar.sync 0;", {ALIAS}),
        ("fence.proxy.alias; bar.sync 0;", set()),
        ("bar.sync 0; fence.proxy.alias;", set()),
        ("fence.acq_rel.gpu; bar.sync 0;", {ALIAS}),
        ("fence.acq_rel.sys; bar.sync 0;", set()),
        ("", {ALIAS, "race_global"}),
    ],
)
@pytest.mark.parametrize("schedule", POLICIES)
def test_a_multicast_store_is_read_back_after_an_alias_fence(between, kinds, schedule):
    """Warp 0 stores to all devices through the multicast address; warp 1 reads its device's part."""
    body = (
        "ld.param.u64 %rd1, [all]; ld.param.u64 %rd2, [own]; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0;"
        "setp.eq.u32 %p2, %r1, 32; @%p1 multimem.st.weak.global.u32 [%rd1], 7;"
    )
    text = entry("u64 all, u64 own", f"{body} {between} @%p2 ld.global.u32 %r2, [%rd2];")
    with emulator.devices(2, checks="race", shims=False, schedule=schedule) as gpus:
        buffer = gpus.symmetric(16, np.uint32, "buffer")
        gpus[0].launch(request(text, buffer.multicast, buffer[0], block=64))
        gpus.synchronize()
        found = {h.kind for h in gpus.hazards}
    if not between:  # a read that comes first sees nothing of the store
        assert "race_global" in found and found <= kinds
        return
    assert found == kinds


def test_a_flag_of_all_devices_publishes_multicast_stores():
    send = "ld.param.u64 %rd1, [all]; multimem.st.weak.global.u32 [%rd1+64], 7; {} 1;"
    receive = "ld.param.u64 %rd1, [own];" + FLAG + "ld.global.u32 %r3, [%rd1+64];"
    for flag in ("multimem.red.release.sys.global.add.u32 [%rd1],", "multimem.st.release.sys.global.u32 [%rd1],"):
        with emulator.devices(2, checks="race", shims=False) as gpus:
            buffer = gpus.symmetric(64, np.uint32, "buffer")
            gpus[0].launch(request(entry("u64 all", send.format(flag)), buffer.multicast, block=1))
            gpus[1].launch(request(entry("u64 own", receive), buffer[1], block=1))
            gpus.synchronize()
            assert not gpus.hazards


def test_the_order_of_a_sum_over_devices_is_the_schedules():
    """multimem.ld_reduce promises no order, so a kernel must not rely on one rounding."""
    values = [np.float32(v) for v in (1.0, 1e8, -1e8)]
    body = (
        "ld.param.u64 %rd1, [all]; ld.param.u64 %rd2, [out];"
        "multimem.ld_reduce.relaxed.sys.global.add.f32 %f1, [%rd1]; st.global.f32 [%rd2], %f1;"
    )
    sums = set()
    for schedule, seed in SCHEDULES:
        with emulator.devices(3, shims=False, schedule=schedule, seed=seed) as gpus:
            buffer = gpus.symmetric(4, np.float32)
            for i, value in enumerate(values):
                buffer[i][0] = value
            out = gpus[0].copy(np.zeros(1, np.float32))
            gpus[0].launch(request(entry("u64 all, u64 out", body), buffer.multicast, out))
            gpus.synchronize()
            sums.add(float(out[0]))
    assert sums == {0.0, 1.0}


# --- what orders launches ---------------------------------------------------------------------------------------------

STORE = entry(
    "u64 to", "ld.param.u64 %rd1, [to]; mov.u32 %r1, %tid.x; setp.eq.u32 %p1, %r1, 0; @%p1 st.global.u32 [%rd1], 1;"
)


@pytest.mark.parametrize("how", ["stream", "event", "synchronize", ""])
def test_streams_events_and_synchronisation_order_launches(how):
    with emulator.devices(2, checks="race", shims=False) as gpus:
        word = gpus[0].copy(np.zeros(4, np.uint32), "word")
        gpus[0].launch(request(STORE, word), stream=1)
        if how == "event":
            gpus.queues.wait(gpus[0], 2, gpus.queues.record(gpus[0], 1))
        if how == "synchronize":
            gpus.synchronize()
        gpus[0].launch(request(STORE, word), stream=1 if how == "stream" else 2)
        gpus.synchronize()
        assert {h.kind for h in gpus.hazards} == (set() if how else {"race_global_same_value"})


def test_what_a_launch_has_learned_the_next_one_on_its_stream_knows():
    """Device 0 stores x and hands on; the second launch of device 1 reads x, after the first has acquired."""
    load = entry("u64 x", "ld.param.u64 %rd1, [x]; ld.global.u32 %r1, [%rd1+64];")
    for relay in (RELAY, RELAY.replace("acquire", "relaxed")):
        with emulator.devices(2, checks="race", shims=False) as gpus:
            buffer, other = gpus.symmetric(64, np.uint32), gpus.symmetric(4, np.uint32)
            gpus[0].launch(
                request(entry("u64 buffer", MESSAGE.format(before="", write="st.release.sys.global.u32")), buffer[1])
            )
            gpus[1].launch(request(relay, buffer[1], other[1], 1, block=1))
            gpus[1].launch(request(load, buffer[1], block=1))
            gpus.synchronize()
            assert {h.kind for h in gpus.hazards} == (set() if relay is RELAY else {RACE})


def test_a_trace_has_what_crosses_devices_on_one_clock():
    """A bulk copy pulls 64 bytes from device 1 after a flag that device 1 stores on device 0."""
    pull = SHARED + SEND.format(FLAG + PULL.replace("[%rd1+64], 64", "[%rd2+64], 64").replace("P:", "P0:"))
    pull = pull.replace("bra P;", "bra P0;").replace("mov.u32 %r1", "ld.param.u64 %rd2, [peer]; mov.u32 %r1")
    push = SEND.format("st.release.sys.global.u32 [%rd1], 1; red.relaxed.sys.global.add.u32 [%rd1+4], 1;")
    with emulator.devices(2, checks="race", shims=False, trace=True) as gpus:
        buffer = gpus.symmetric(64, np.uint32, "buffer")
        gpus[0].launch(request(entry("u64 buffer, u64 peer", pull), buffer[0], buffer[1]))
        gpus[1].launch(request(entry("u64 buffer", push), buffer[0]))
        gpus.synchronize()
        rows, times = zip(*((gpu.trace.peers, gpu.trace.common(gpu.trace.peers["time"])) for gpu in gpus), strict=True)
    assert rows[0][["what", "device", "nbytes"]].tolist() == [("bulk load", 1, 64)]
    assert rows[1][["what", "device", "nbytes"]].tolist() == [("store", 0, 4), ("atomic", 0, 4)]
    assert rows[0]["address"] == buffer[1].ctypes.data + 64
    assert times[1].max() < times[0].min()  # the flag comes before what waits for it


@pytest.mark.parametrize("name", ["random", "adversarial"])
def test_random_policies_form_sums_in_any_order(name):
    policy = make_policy(name, np.random.default_rng(0))
    assert len({tuple(policy.device_order(3)) for _ in range(60)}) == 6
