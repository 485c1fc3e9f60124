"""Several devices: kernels that wait for each other, symmetric memory and multicast, streams and events, deadlocks."""

import ml_dtypes
import numpy as np
import pytest

from dsv4lib import emulator
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import Deadlock, LaunchError, MemoryFault, UnsupportedInstruction
from dsv4lib.emulator.machine.policies import POLICIES
from dsv4lib.emulator.machine.request import LaunchRequest
from dsv4lib.emulator.ptx import parse
from dsv4lib.errors import ArgumentError
from tests.emulator.launching import entry, pack

# Send 5 + rank to the peer, raise its flag, wait for the own flag, keep what came.
EXCHANGE = entry(
    "u64 mine, u64 theirs, u64 out, u32 rank",
    """
    ld.param.u64 %rd1, [mine]; ld.param.u64 %rd2, [theirs]; ld.param.u64 %rd3, [out]; ld.param.u32 %r5, [rank];
    add.u32 %r6, %r5, 5;
    st.global.u32 [%rd2+4], %r6;
    red.release.sys.global.add.u32 [%rd2], 1;
    L: ld.acquire.sys.global.u32 %r2, [%rd1];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra L;
    ld.global.u32 %r3, [%rd1+4];
    st.global.u32 [%rd3], %r3;
    """,
)
# Wait until the word at `from` is `value`, then store value + 1 at `to`.
RELAY = entry(
    "u64 from, u64 to, u32 value",
    """
    ld.param.u64 %rd1, [from]; ld.param.u64 %rd2, [to]; ld.param.u32 %r1, [value];
    L: ld.acquire.sys.global.u32 %r2, [%rd1];
    setp.ne.u32 %p1, %r2, %r1;
    @%p1 bra L;
    add.u32 %r3, %r1, 1;
    st.release.sys.global.u32 [%rd2], %r3;
    """,
)
VOLATILE_RELAY = RELAY.replace("acquire.sys", "volatile").replace("release.sys", "volatile")


def request(text, *args, block=32, grid=1):
    """A launch of the only kernel of ``text``."""
    module = parse.parse(text)
    (name,) = module.kernels
    return LaunchRequest(name, module, (grid, 1, 1), (block, 1, 1), params=pack(module.kernels[name], args))


@pytest.fixture(params=POLICIES)
def pair(request):
    """Two devices, under every schedule."""
    with emulator.devices(2, schedule=request.param, shims=False) as gpus:
        yield gpus


# Raise the other device's flag to %r3; the first thread asks until its own is %r4, for all threads of the CTA.
ASK = entry(
    "u64 mine, u64 other, u32 given, u32 wanted",
    "ld.param.u64 %rd1, [mine]; ld.param.u64 %rd2, [other]; ld.param.u32 %r3, [given]; ld.param.u32 %r4, [wanted];"
    "mov.u32 %r0, %tid.x; setp.eq.u32 %p1, %r0, 0; mov.u32 %r9, sm; @%p1 st.release.sys.global.u32 [%rd2], %r3;"
    "L: @%p1 ld.acquire.sys.global.u32 %r5, [%rd1]; @%p1 st.shared.u32 [%r9], %r5; bar.sync 0;"
    "ld.shared.u32 %r6, [%r9]; bar.sync 0; setp.ne.u32 %p2, %r6, %r4; @%p2 bra L;",
    shared=".shared .align 4 .b8 sm[16];",
)


def exchange(gpus):
    flags = gpus.symmetric(4, np.uint32, "flags")
    outs = [gpu.copy(np.zeros(1, np.uint32), "out") for gpu in gpus]
    for i, gpu in enumerate(gpus):
        assert gpu.launch(request(EXCHANGE, flags[i], flags[1 - i], outs[i], i)) is None
    return flags, outs


def test_kernels_of_two_devices_wait_for_each_other(pair):
    flags, outs = exchange(pair)
    assert not flags[0].any()  # nothing has run
    pair.synchronize()
    assert [int(out[0]) for out in outs] == [6, 5]
    assert [len(gpu.launches) for gpu in pair] == [1, 1]
    assert not pair.hazards
    pair.synchronize()  # nothing is left
    assert [len(gpu.launches) for gpu in pair] == [1, 1]


def test_a_missing_flag_is_a_deadlock_that_names_device_and_value(pair):
    flags = pair.symmetric(4, np.uint32, "flags")
    out = [gpu.copy(np.zeros(1, np.uint32)) for gpu in pair]
    pair[0].launch(request(EXCHANGE, flags[0], flags[1], out[0], 0))
    pair[1].launch(request(EXCHANGE, flags[1], flags[1], out[1], 1))  # the mistake: it raises its own flag
    with pytest.raises(Deadlock) as error:
        pair.synchronize()
    text = str(error.value)
    assert "device 0, kernel k: 1 warps spin" in text and "device 1" not in text.partition("reads")[0]
    assert "ld.acquire.sys.global.u32 %r2, [%rd1]" in text and "= 0x0, byte 0 of flags of device 0" in text
    assert not pair.queues.pending()


def test_a_deadlock_says_which_value_is_awaited(pair):
    flags = pair.symmetric(4, np.uint32, "flags")
    pair[0].launch(request(RELAY, flags[0][1:2], flags[1], 3))
    with pytest.raises(Deadlock) as error:
        pair.synchronize()
    text = str(error.value)
    assert "CTA (0, 0, 0) warp 0" in text and "= 0x0, byte 4 of flags of device 0; waits until it is 0x3" in text
    assert "device 1: nothing runs, 0 launches have ended" in text


@pytest.mark.parametrize(
    ("compare", "until"),
    [
        ("setp.lt.u32 %p1, %r2, 9; @%p1 bra L;", "until it is at least 0x9"),
        ("setp.ge.s32 %p1, %r2, %r9; @!%p1 bra L;", "until it is at least 0x5"),
        ("setp.gt.u32 %p1, 7, %r2; @%p1 bra L;", "until it is at least 0x7"),
        ("setp.ne.u32 %p1, %r2, 0; @%p1 bra OUT; bra L; OUT:", "until it is not 0x0"),
        ("mov.b64 {%r3, %r4}, %rd3; setp.ne.u32 %p1, %r4, 6; @%p1 bra L;", "until its upper word is 0x6"),
        ("and.b32 %r3, %r2, 1; setp.eq.u32 %p1, %r3, 0; @%p1 bra L;", ""),  # another register is compared
    ],
)
def test_the_awaited_value_is_read_from_the_loop(compare, until):
    load = "ld.volatile.global.u64 %rd3, [%rd1];" if "%rd3" in compare else "ld.volatile.global.u32 %r2, [%rd1];"
    body = f"ld.param.u64 %rd1, [a]; mov.u32 %r9, 5; L: {load} {compare}"
    with emulator.devices(2, shims=False) as gpus:
        gpus[0].launch(request(entry("u64 a", body), gpus.symmetric(4, np.uint32, "flags")[1]))
        with pytest.raises(Deadlock, match="byte 0 of flags of device 1") as error:
            gpus.synchronize()
        assert (f"; waits {until}\n" if until else "flags of device 1\n") in str(error.value)


@pytest.mark.one_in(5)
def test_a_loop_that_sleeps_is_seen_through(pair):
    """A kernel that leaves the memory alone for a while between two looks."""
    flags = pair.symmetric(4, np.uint32, "flags")
    sleepy = RELAY.replace("L: ld", "bra FIRST; L: nanosleep.u32 32; FIRST: ld")
    pair[0].launch(request(sleepy, flags[0], flags[1], 3))
    with pytest.raises(Deadlock, match="byte 0 of flags of device 0; waits until it is 0x3"):
        pair.synchronize()
    flags[0][0] = 3
    pair[1].launch(request(sleepy, flags[1], flags[0][1:], 4))
    pair[0].launch(request(sleepy, flags[0], flags[1], 3))
    pair.synchronize()
    assert flags[0][:2].tolist() == [3, 5]


# --- faults of devices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_device_changes_nothing(pair, late):
    pair.inject(late, "late")
    _, outs = exchange(pair)
    pair.synchronize()
    assert [int(out[0]) for out in outs] == [6, 5] and not pair.hazards
    others, its = pair[1 - late].launches[0].result, pair[late].launches[0].result
    assert others.instructions > 1000 > its.instructions  # the other one waited until it only went round
    pair.inject(late, "none")
    exchange(pair)
    pair.synchronize()
    assert pair[1 - late].launches[1].result.instructions < others.instructions


@pytest.mark.parametrize("late", [0, 1, None])
@pytest.mark.parametrize("schedule", ["round_robin", "oldest_first", "newest_first"])
def test_devices_that_ask_with_barriers_wait_for_each_other(schedule, late):
    """A loop with a barrier makes arrivals, which are no progress of the launch that waits."""
    with emulator.devices(2, shims=False, schedule=schedule) as gpus:
        flags = gpus.symmetric(4, np.uint32, "flags")
        if late is not None:
            gpus.inject(late, "late")
        for mine, other in ((0, 1), (1, 0)):
            gpus[mine].launch(request(ASK, flags[mine], flags[other], 3 + mine, 4 - mine))
        gpus.synchronize()
        assert [int(flags[i][0]) for i in range(2)] == [4, 3]
        gpus[0].launch(request(ASK, flags[0], flags[1], 3, 9))
        with pytest.raises(Deadlock, match="byte 0 of flags of device 0"):
            gpus.synchronize()


def test_a_late_device_enters_after_so_many_instructions():
    counts = []
    for after in (0, 3_000, 6_000):
        with emulator.devices(2, shims=False) as gpus:
            gpus.inject(0, "late", after=after)
            exchange(gpus)
            gpus.synchronize()
            counts.append(gpus[1].launches[0].result.instructions)
    assert counts[0] < 2_500 < counts[1] < 4_500 < counts[2] < 10_000


def test_the_launches_of_a_device_that_is_late_alone_still_run():
    with emulator.devices(2, shims=False) as gpus:
        gpus.inject(0, "late")
        words = gpus[0].copy(np.array([1, 0], np.uint32))
        gpus[0].launch(request(RELAY, words[0:1], words[1:2], 1))
        gpus.synchronize()
        assert words.tolist() == [1, 2]


def test_a_device_without_work_must_still_take_part(pair):
    pair.inject(1, "empty")
    exchange(pair)
    with pytest.raises(Deadlock) as error:
        pair.synchronize()
    assert "device 0, kernel k: 1 warps spin" in str(error.value)
    assert "device 1: its launches did nothing, an injected fault" in str(error.value)
    assert not pair[1].launches


@pytest.mark.parametrize("after", [0, 6])  # the seventh instruction raises the flag
def test_a_dropped_device_is_named(pair, after):
    pair.inject(1, "dropped", after=after)
    flags, _ = exchange(pair)
    with pytest.raises(Deadlock) as error:
        pair.synchronize()
    text = str(error.value)
    assert "byte 0 of flags of device" in text and "waits until it is not 0x0" in text
    assert f"device 1: stopped after {after} warp-instructions, an injected fault" in text
    assert not pair[1].launches and flags[0][0] == 0


def test_a_device_that_is_dropped_after_its_part_does_no_harm(pair):
    pair.inject(1, "dropped", after=7)
    flags, outs = exchange(pair)
    pair.synchronize()
    assert flags[0][0] != 0 and int(outs[0][0]) == 6 and int(outs[1][0]) == 0
    assert len(pair[0].launches) == 1 and not pair[1].launches


def test_a_device_that_is_dropped_when_nobody_needs_it_any_more_ends_the_run():
    with emulator.devices(2, shims=False) as gpus:
        gpus.inject(1, "dropped", after=1)
        words = [gpu.copy(np.array([1, 0], np.uint32)) for gpu in gpus]
        for gpu, mine in zip(gpus, words, strict=True):
            gpu.launch(request(RELAY, mine[0:1], mine[1:2], 1 if gpu.index == 0 else 5))  # device 1's waits for ever
            gpu.launch(request(RELAY, mine[0:1], mine[1:2], 1))
        gpus.synchronize()
        assert [w.tolist() for w in words] == [[1, 2], [1, 0]] and len(gpus[0].launches) == 2
        assert not gpus[1].launches


def test_faults_may_be_given_with_the_group():
    with emulator.devices(2, shims=False, faults={0: ("late", None)}) as gpus:
        _, outs = exchange(gpus)
        gpus.synchronize()
        assert [int(out[0]) for out in outs] == [6, 5] and gpus[1].launches[0].result.instructions > 1000
    with pytest.raises(ArgumentError, match="index="), emulator.devices(2, faults={2: ("late", None)}):
        pass


def test_bad_faults():
    with emulator.devices(2, shims=False) as gpus:
        with pytest.raises(ArgumentError, match="index="):
            gpus.inject(2, "late")
        for kind in ("slow", None, 1):
            with pytest.raises(ArgumentError, match="kind="):
                gpus.inject(0, kind)
        for kind, after in (("dropped", None), ("late", -1), ("late", 1.5), ("dropped", True)):
            with pytest.raises(ArgumentError, match="after="):
                gpus.inject(0, kind, after)


def test_devices_that_wait_for_each_other_both_show():
    flags = None
    with pytest.raises(Deadlock) as error, emulator.devices(2, shims=False) as gpus:
        flags = gpus.symmetric(2, np.uint32, "flags")
        gpus[0].launch(request(RELAY, flags[0][:1], flags[1][:1], 1))
        gpus[1].launch(request(RELAY, flags[1][:1], flags[0][:1], 2))
    assert "device 0, kernel k" in str(error.value) and "device 1, kernel k" in str(error.value)


def test_a_local_deadlock_names_its_device():
    hang = entry("u64 a", "mov.u32 %r1, %tid.x; setp.lt.u32 %p1, %r1, 32; @%p1 bar.sync 1, 64; @%p1 bar.sync 2, 64;")
    with pytest.raises(Deadlock, match="device 1 CTA"), emulator.devices(2, shims=False) as gpus:
        gpus[1].launch(request(hang, 0, block=32))


def test_memory_belongs_to_one_device_unless_it_is_symmetric(pair):
    flags = pair.symmetric(4, np.uint32, "flags")
    out = pair[0].copy(np.zeros(1, np.uint32), "out")
    pair[1].launch(request(EXCHANGE, flags[0], flags[0], out, 1))
    with pytest.raises(MemoryFault, match="hits out .*of device 0: only symmetric memory") as error:
        pair.synchronize()
    assert error.value.place.device == 1 and "device 1 cta (0, 0, 0)" in str(error.value)


def test_streams_run_together_and_events_order_them(pair):
    gpu = pair[0]
    words = gpu.copy(np.array([1, 0, 0, 0], np.uint32))
    # Stream 7 needs what stream 8 does afterwards in program order: one queue a device would hang.
    gpu.launch(request(RELAY, words[1:2], words[2:3], 2), stream=7)
    gpu.launch(request(RELAY, words[0:1], words[1:2], 1), stream=8)
    mark = pair.queues.record(gpu, 7)
    pair.queues.wait(pair[1], 9, mark)
    copied = pair.symmetric(1, np.uint32)
    pair[1].launch(request(RELAY, copied[1], copied[0], 0), stream=9)
    assert pair.queues.pending(1) and not mark.reached
    pair.synchronize()
    assert words.tolist() == [1, 2, 3, 0] and mark.reached and copied[0][0] == 1


def test_a_stream_that_waits_for_ever(pair):
    stale = pair.queues.record(pair[0], 1)
    pair.queues.discard()
    pair.queues.wait(pair[0], 2, stale)
    with pytest.raises(Deadlock, match="streams wait for events"):
        pair.synchronize()


def test_an_exception_drops_what_is_queued():
    with pytest.raises(ZeroDivisionError), emulator.devices(2, shims=False) as gpus:
        exchange(gpus)
        raise ZeroDivisionError
    assert not gpus.queues.pending() and not RUNTIME.devices and not gpus[0].launches


def test_the_end_of_the_context_runs_the_rest():
    with emulator.devices(2, shims=False, trace=True) as gpus:
        _, outs = exchange(gpus)
    assert [int(out[0]) for out in outs] == [6, 5]
    assert all(gpu.launches[0].result.trace is gpu.trace is not None for gpu in gpus)


# Warp 0 writes x and raises `go`, warp 1 waits for `back` and reads x. HOW = "st.release.sys.global.u32 [%rd2]".
HANDED_ROUND = """
    mov.u32 %r1, %tid.x; ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [go]; ld.param.u64 %rd3, [back];
    setp.ge.u32 %p1, %r1, 32; @%p1 bra SECOND;
    setp.ne.u32 %p2, %r1, 0; @%p2 bra END;
    st.global.u32 [%rd1], 77; HOW, 1; bra END;
    SECOND: setp.ne.u32 %p2, %r1, 32; @%p2 bra END;
    L: ld.acquire.sys.global.u32 %r2, [%rd3]; setp.eq.u32 %p3, %r2, 0; @%p3 bra L;
    ld.global.u32 %r3, [%rd1]; st.global.u32 [%rd1+4], %r3;
    END:
"""


@pytest.mark.parametrize("how", ["st.release.sys.global.u32 [%rd2]", "multimem.red.release.sys.global.add.u32 [%rd2]"])
def test_order_through_another_device_is_no_race(how):
    text = entry("u64 x, u64 go, u64 back", HANDED_ROUND.replace("HOW", how))
    with emulator.devices(2, checks="race", shims=False) as gpus:
        go, back = gpus.symmetric(1, np.uint32), gpus.symmetric(1, np.uint32)
        x = gpus[0].copy(np.zeros(2, np.uint32))
        gpus[0].launch(request(text, x, go.multicast if "multimem" in how else go[1], back[0], block=64))
        gpus[1].launch(request(RELAY, go[1], back[0], 1))
        gpus.synchronize()
        assert x.tolist() == [77, 77] and not gpus.hazards


def test_a_race_on_one_of_several_devices_is_found():
    text = entry("u64 x, u64 go, u64 back", HANDED_ROUND.replace("HOW", "st.weak.global.u32 [%rd2]"))
    with emulator.devices(2, checks="race", shims=False) as gpus:
        go, back = gpus.symmetric(1, np.uint32), gpus.symmetric(1, np.uint32)
        x = gpus[0].copy(np.zeros(2, np.uint32))
        gpus[0].launch(request(text, x, go[1], back[0], block=64))
        gpus[1].launch(request(RELAY, go[1], back[0], 1))
        gpus.synchronize()
        assert {hazard.kind for hazard in gpus.hazards} == {"race_global", "scope_between_devices"}
        (race,) = (hazard for hazard in gpus.hazards if hazard.kind == "race_global")
        assert race.place.device == race.owner.device == 0


def test_a_relay_that_neither_acquires_nor_releases_orders_nothing():
    text = entry("u64 x, u64 go, u64 back", HANDED_ROUND.replace("HOW", "st.release.sys.global.u32 [%rd2]"))
    with emulator.devices(2, checks="race", shims=False) as gpus:
        go, back = gpus.symmetric(1, np.uint32), gpus.symmetric(1, np.uint32)
        x = gpus[0].copy(np.zeros(2, np.uint32))
        gpus[0].launch(request(text, x, go[1], back[0], block=64))
        gpus[1].launch(request(VOLATILE_RELAY, go[1], back[0], 1))
        gpus.synchronize()
        assert {hazard.kind for hazard in gpus.hazards} == {"race_global"}


# --- multicast --------------------------------------------------------------------------------------------------------

MULTIMEM = """
    mov.u32 %r1, %tid.x; mul.wide.u32 %rd9, %r1, 16;
    ld.param.u64 %rd1, [all]; ld.param.u64 %rd2, [out]; add.u64 %rd1, %rd1, %rd9; add.u64 %rd2, %rd2, %rd9;
"""


def multimem(gpus, values, body):
    """Device 0 runs ``body``: %rd1 = its 16 bytes of the multicast range, %rd2 = of its own output."""
    shared = gpus.symmetric(values[0].shape, values[0].dtype, "buffer")
    for i, value in enumerate(values):
        shared[i][...] = value
    out = gpus[0].copy(np.zeros(512, np.uint8))
    gpus[0].launch(request(entry("u64 all, u64 out", MULTIMEM + body), shared.multicast, out))
    gpus.synchronize()
    return shared, out


@pytest.mark.parametrize(
    ("variant", "dtype", "wide"),
    [
        ("weak.global.add.v4.f32", np.float32, np.float32),
        ("weak.global.add.acc::f32.v4.f16x2", np.float16, np.float32),
        ("relaxed.sys.global.add.v4.f16x2", np.float16, None),
        ("weak.global.add.acc::f32.v4.bf16x2", ml_dtypes.bfloat16, np.float32),
        ("weak.global.add.v4.bf16x2", ml_dtypes.bfloat16, None),
        ("weak.global.add.acc::f16.v4.e4m3x4", ml_dtypes.float8_e4m3fn, np.float16),
        ("weak.global.add.acc::f16.v4.e5m2x4", ml_dtypes.float8_e5m2, np.float16),
        ("acquire.gpu.max.v4.f16x2", np.float16, "max"),
        ("weak.global.min.v4.bf16x2", ml_dtypes.bfloat16, "min"),
    ],
)
def test_multimem_ld_reduce(variant, dtype, wide):
    rng = np.random.default_rng(5)
    count = 512 // np.dtype(dtype).itemsize
    values = [rng.normal(size=count).astype(dtype) for _ in range(3)]
    with emulator.devices(3, shims=False) as gpus:
        four = "{%r4, %r5, %r6, %r7}"
        body = f"multimem.ld_reduce.{variant} {four}, [%rd1]; st.global.v4.b32 [%rd2], {four};"
        _, out = multimem(gpus, [v.view(np.uint8) for v in values], body)
    if isinstance(wide, str):
        expected = getattr(np, f"{wide}imum").reduce([v.astype(np.float32) for v in values]).astype(dtype)
    elif wide is None:  # rounded after every device
        expected = ((values[0].astype(np.float32) + values[1].astype(np.float32)).astype(dtype).astype(np.float32)
                    + values[2].astype(np.float32)).astype(dtype)  # fmt: skip
    else:
        expected = (values[0].astype(wide) + values[1].astype(wide) + values[2].astype(wide)).astype(dtype)
    assert (out == expected.view(np.uint8)).all()


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_fp8_results_are_nearest_even_and_saturate(kind):
    from dsv4lib.emulator.units.multimem import encode_fp8

    dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    nan = np.isnan(values)
    expected = np.clip(np.where(nan, 0, values), -largest, largest).astype(dtype).view(np.uint8)
    expected = np.where(nan, 0x7F, expected)
    assert (encode_fp8(values, kind) == expected).all()


def test_multimem_integers_stores_and_reductions():
    words = [np.arange(128, dtype=np.uint32) * factor for factor in (3, 5)]
    with emulator.devices(2, shims=False) as gpus:
        _, out = multimem(gpus, words, "multimem.ld_reduce.weak.global.add.u32 %r4, [%rd1]; st.global.u32 [%rd2], %r4;")
        assert (out.view(np.uint32)[::4] == (words[0] + words[1])[::4]).all()
        shared, _ = multimem(gpus, words, "multimem.st.relaxed.sys.global.u32 [%rd1], %r1;")
        for i in range(2):
            assert (shared[i][::4] == np.arange(32)).all() and (shared[i][1::4] == words[i][1::4]).all()
        one = "mov.b64 %rd8, %rd1; ld.param.u64 %rd8, [all]; multimem.red.release.sys.global.add.s32 [%rd8], 1;"
        shared, _ = multimem(gpus, words, one)
        assert [int(shared[i][0] - words[i][0]) for i in range(2)] == [32, 32]


def test_a_multicast_range_lives_as_long_as_its_devices():
    """Nothing else may get its addresses, also when nothing refers to the buffer any more."""
    import gc
    import weakref

    with emulator.devices(2, shims=False) as gpus:
        window = weakref.ref(gpus.symmetric(1024).multicast.base)
        gc.collect()
        assert window() is not None


def test_ordinary_accesses_to_multicast_addresses_fault():
    words = [np.zeros(128, np.uint32)] * 2
    with emulator.devices(2, shims=False) as gpus:
        with pytest.raises(MemoryFault, match="hits the multicast range of buffer"):
            multimem(gpus, words, "ld.global.u32 %r4, [%rd1];")
        with pytest.raises(MemoryFault, match="in no multicast range"):
            multimem(gpus, words, "multimem.st.weak.global.u32 [%rd2], %r1;")
        with pytest.raises(MemoryFault, match="is not a multiple of 4"):
            multimem(gpus, words, "add.u64 %rd1, %rd1, 2; multimem.st.weak.global.u32 [%rd1], %r1;")
        with pytest.raises(UnsupportedInstruction, match="multimem.st.bad"):
            multimem(gpus, words, "multimem.st.bad.global.u32 [%rd1], %r1;")


# --- torch ------------------------------------------------------------------------------------------------------------


def test_torch_tensors_are_on_their_device():
    import torch

    with emulator.devices(2) as gpus:
        assert torch.cuda.device_count() == 2 and torch.cuda.current_device() == 0
        a = torch.zeros(4, device="cuda:1")
        assert str(a.device) == "cuda:1" and str((a + 1).device) == "cuda:1" and a.get_device() == 1
        assert str(torch.tensor(a).device) == "cuda:1"
        assert str(torch.zeros(4, device="cuda").device) == "cuda:0"
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1 and str(torch.ones(2, device="cuda").device) == "cuda:1"
        with gpus.on(1):
            assert str(torch.ones(2).cuda().device) == "cuda:1" and str(a.cuda(0).device) == "cuda:0"
        assert torch.cuda.current_device() == 0 and str(a.cpu().device) == "cpu"
        torch.cuda.set_device(1)
        assert RUNTIME.device() is gpus[1]
        a.data_ptr()
        assert gpus[1].gmem.find(a.data_ptr()) is not None and gpus[0].gmem.find(a.data_ptr()) is None
        with pytest.raises(LaunchError, match="device 2 does not exist; there are 2"):
            torch.zeros(1, device="cuda:2")


def test_looking_at_a_tensor_runs_what_is_queued():
    import torch

    with emulator.devices(2) as gpus:
        flags = gpus.symmetric(4, torch.int32, "flags")
        outs = [torch.zeros(1, dtype=torch.int32, device=f"cuda:{i}") for i in range(2)]
        for i, gpu in enumerate(gpus):
            gpu.launch(
                request(EXCHANGE, flags.tensor(i).data_ptr(), flags.tensor(1 - i).data_ptr(), outs[i].data_ptr(), i)
            )
            torch.zeros(3, device="cuda:1")  # a fresh tensor has nothing to wait for
        assert gpus.queues.pending(0) and gpus.queues.pending(1)
        assert outs[1].item() == 5
        assert not gpus.queues.pending()
        event, side = torch.cuda.Event(), torch.cuda.Stream()
        assert side.cuda_stream != 0
        gpus[0].launch(request(EXCHANGE, flags.tensor(0).data_ptr(), flags.tensor(1).data_ptr(), outs[0].data_ptr(), 0))
        event.record()
        side.wait_event(event)
        assert not event.query() and not side.query()
        torch.cuda.synchronize()
        assert event.query() and side.query()


def test_memory_of_a_queued_launch_lives_until_it_has_run():
    import gc

    import torch

    with emulator.devices(2) as gpus:
        flags = gpus.symmetric(2, np.uint32)
        gone = torch.full((64,), 7, dtype=torch.int32, device="cuda")
        gpus[0].launch(request(RELAY, gone.data_ptr(), flags[0].ctypes.data, 7))
        del gone
        gc.collect()
        torch.full((64,), 9, dtype=torch.int32, device="cuda")
        gpus.synchronize()
        assert flags[0][0] == 8


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, -1, 65, True, 1.0, "2", None])
def test_bad_counts(count):
    with pytest.raises(ArgumentError, match="count="), emulator.devices(count):
        pass


def test_bad_indices_shapes_and_dtypes(pair):
    for index in (2, -1, "0", True, None):
        with pytest.raises(ArgumentError, match="index="):
            pair[index]
        with pytest.raises(ArgumentError, match="index="), pair.on(index):
            pass
    for shape in (0, (2, 0), (2, 1.5), None, "4", (True,)):
        with pytest.raises(ArgumentError, match="shape="):
            pair.symmetric(shape)
    with pytest.raises(ArgumentError, match="dtype="):
        pair.symmetric(4, "nonsense")
    with pytest.raises(ArgumentError, match="index="):
        pair.symmetric(4)[2]
    with pytest.raises(ArgumentError, match="active"), emulator.devices(1, shims=False), pair.on(0):
        pass
