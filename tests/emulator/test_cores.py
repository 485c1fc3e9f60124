"""One launch in several processes: memory, counters, hashes and reports are those of one process."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dsv4lib.emulator import isa
from dsv4lib.emulator.checks.selection import select
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.machine import cores, message
from dsv4lib.emulator.machine.request import Settings
from dsv4lib.emulator.memory.gmem import GlobalMemory
from dsv4lib.emulator.memory.marks import Marks, Touched
from dsv4lib.emulator.units import tensormap
from tests.cases import cases
from tests.emulator.launching import aligned, copy, entry, prepare

CLUSTERS, THREADS = 24, 64
_HEAD = """
ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y];
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mov.u32 %r3, %ntid.x; mov.u32 %r10, %nctaid.x;
mad.lo.u32 %r4, %r1, %r3, %r2;
mul.wide.u32 %rd3, %r4, 4; add.u64 %rd4, %rd1, %rd3; add.u64 %rd5, %rd2, %rd3;
"""
_SQUARE = "ld.global.f32 %f1, [%rd4]; mul.f32 %f1, %f1, %f1; st.global.f32 [%rd5], %f1;"
_LAST = "sub.u32 %r11, %r10, 1; setp.eq.u32 %p1, %r1, %r11;"  # in the last CTA


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Split every launch at once, however short it is."""
    monkeypatch.setattr(cores, "TRIED", 0.0)
    monkeypatch.setattr(cores, "WORTH", 0.0)


def run(body, processes, checks="default", shape=CLUSTERS * THREADS, dtype=np.float32, **options):
    """The launch's machine, its result or error, and y."""
    chosen = select(checks)
    settings = Settings(native_checks=chosen.bits, muted=chosen.muted, cores=processes)
    settings = replace(settings, schedule=options.pop("schedule", "round_robin"))
    x = copy(np.random.default_rng(1).integers(0, 200, shape).astype(dtype))
    y = aligned(shape, dtype)
    kernel = entry("u64 x, u64 y", _HEAD + body, options.pop("registers", ""), options.pop("shared", ""))
    machine = prepare(kernel, x, y, grid=options.pop("grid", CLUSTERS), block=THREADS, settings=settings, **options)
    try:
        outcome = machine.run()
    except EmulatorError as error:
        outcome = error
    return machine, outcome, y


def said(machine, outcome, base):
    """All that a launch says, with addresses as distances from ``base``."""
    hazards = [(str(h).replace(hex(base), "base"), h.count, str(h.owner)) for h in outcome.hazards]
    if isinstance(outcome, EmulatorError):
        return str(outcome).replace(hex(base), "base"), hazards
    numbers = outcome.instructions, outcome.schedule_hash, outcome.reordered, sorted(outcome.stats.items())
    return numbers, hazards, (machine.events, machine.progress, machine.units.issued, machine.units.completed)


def compare(body, processes=3, **options):
    """Run with one process and with several; the latter's `Split`, and the hazards."""
    alone, one, expected = run(body, 1, **dict(options))
    together, other, found = run(body, processes, **dict(options))
    assert np.array_equal(expected.view(np.uint8), found.view(np.uint8))
    assert said(alone, one, expected.ctypes.data) == said(together, other, found.ctypes.data)
    assert not alone.split.rounds
    return together.split, one.hazards


@pytest.mark.parametrize("checks", ["default", "race", "sanitize"])
@pytest.mark.parametrize("schedule", cases("round_robin", full=["oldest_first"]))
def test_clusters_that_do_not_communicate(schedule, checks):
    split, hazards = compare(_SQUARE, schedule=schedule, checks=checks)
    assert split.rounds == 1 and split.taken == 2 and not split.dropped and not hazards


@pytest.mark.parametrize("checks", ["default", "race"])
def test_several_rounds_of_clusters_of_two_ctas(checks, monkeypatch):
    monkeypatch.setattr(cores, "ROUND", 0.0)  # a round is one cluster for each process
    shape = {"cluster": (2, 1, 1), "grid": 14}
    remote = """
    mapa.shared::cluster.u32 %r20, a, 0; mul.lo.u32 %r21, %r2, 4; add.u32 %r20, %r20, %r21;
    mov.u32 %r22, %cluster_ctarank;
    setp.eq.u32 %p2, %r22, 1; @%p2 st.shared::cluster.u32 [%r20], %r4;
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire; ld.shared::cluster.u32 %r23, [%r20];
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire; st.global.u32 [%rd5], %r23;"""
    split, hazards = compare(remote, checks=checks, shared=".shared .align 16 .b8 a[256];", **shape)
    assert split.rounds == 2 and split.taken == 4 and not split.dropped and not hazards


def test_bulk_copies_that_end_after_their_cta():
    """Reads of bulk stores are waited for, writes are not: those of a cluster are complete before the next begins."""
    body = """
    setp.eq.u32 %p3, %r2, 0; mov.u32 %r20, a; mov.u32 %r21, bar;
    @%p3 mbarrier.init.shared.b64 [%r21], 1; bar.sync 0;
    @%p3 mbarrier.arrive.expect_tx.shared.b64 _, [%r21], 256;
    @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%rd4], 256, [%r21];
    W: mbarrier.try_wait.parity.shared.b64 %p4, [%r21], 0; @!%p4 bra W;
    @%p3 cp.async.bulk.global.shared::cta.bulk_group [%rd5], [%r20], 256; cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;"""
    for checks in ("default", "race"):
        split, hazards = compare(
            body, checks=checks, shared=".shared .align 128 .b8 a[256]; .shared .align 8 .b64 bar;"
        )
        assert split.taken == 2 and not split.dropped and not hazards


_REVERSED = """
sub.u32 %r12, %r10, %r1; sub.u32 %r12, %r12, 1; mad.lo.u32 %r12, %r12, %r3, %r2; mul.wide.u32 %rd6, %r12, 4;
add.u64 %rd6, %rd2, %rd6;"""  # the word of y that the CTA of the other end of the grid has
# What each does, whether the data of one cluster depends on another's, and what the race detector says.
DEPENDENT = {
    "reads what others write": (
        _SQUARE + _REVERSED + "ld.global.f32 %f2, [%rd6]; add.f32 %f2, %f2, %f1; st.global.f32 [%rd5], %f2;",
        True,
    ),  # fmt: skip
    "all write one word": ("mov.u32 %r20, %ctaid.x; st.global.u32 [%rd2], %r20;", True),
    "all write the same": ("mov.u32 %r20, 7; st.global.u32 [%rd2], %r20;", True),
    "writes what others have read": (_LAST + "ld.global.u32 %r20, [%rd2]; @%p1 st.global.u32 [%rd2], %r20;", False),
    "one writes what one has read": (
        _LAST + "setp.eq.u32 %p3, %r1, 2; @%p3 ld.global.u32 %r20, [%rd2]; @%p1 st.global.u32 [%rd2], %r20;",
        False,
    ),  # fmt: skip
    "one reads what a worker writes": (
        _SQUARE + "setp.eq.u32 %p3, %r1, 20; @%p3 ld.global.f32 %f2, [%rd2+2560]; @%p3 st.global.f32 [%rd5], %f2;",
        True,
    ),  # fmt: skip
    "bytes of one word": (
        "cvt.u64.u32 %rd7, %r1; add.u64 %rd8, %rd2, %rd7; setp.eq.u32 %p2, %r2, 0; @%p2 st.global.u8 [%rd8], %r1;",
        True,
    ),  # fmt: skip
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_clusters_run_one_after_another(name):
    """Whatever one process says of them, several say."""
    body, depends = DEPENDENT[name]
    split, _ = compare(body)
    assert (split.dropped > 0) == depends
    split, hazards = compare(body, checks="race")
    assert split.dropped == 1 and not split.possible
    assert any(h.kind.startswith("race_global") for h in hazards) == (name != "bytes of one word")


def test_a_kernel_that_was_split_in_vain_is_not_split_again():
    machine, _, _ = run(DEPENDENT["all write one word"][0], 2)
    assert machine.split.dropped and machine.program.kept["split in vain"]
    assert not cores.Split(machine).possible


def test_reports_of_a_late_cluster():
    """A read of shared memory that nothing wrote, in the last cluster only, and one in each."""
    shared = {"shared": ".shared .align 16 .b8 a[256];"}
    read = "mov.u32 %r20, a; {}ld.shared.u32 %r21, [%r20]; {}st.global.u32 [%rd5], %r21;"
    for checks in ("default", "race"):
        split, hazards = compare(_LAST + read.format("@%p1 ", "@%p1 "), checks=checks, **shared)
        assert [(h.kind, h.count) for h in hazards] == [("uninitialised_smem", 2)] and split.taken == 1
        split, hazards = compare(read.format("", ""), checks=checks, **shared)
        assert [(h.kind, h.count) for h in hazards] == [("uninitialised_smem", 2 * CLUSTERS)] and not split.taken


def test_reads_that_do_not_matter_are_counted():
    """The race detector waits for what becomes of a value; where nothing does, it notes the reads at the end."""
    body = _SQUARE + "mov.u32 %r20, a; ld.shared.u32 %r21, [%r20];"
    _, hazards = compare(body, checks="race", shared=".shared .align 16 .b8 a[256];")
    assert [(h.kind, h.count) for h in hazards] == [("uninitialised_smem_unused", 2 * CLUSTERS)]


@pytest.mark.parametrize("late", [True, False])
def test_errors_are_those_of_one_process(late):
    fault = _LAST + "mov.u32 %r20, 999996; " + ("@%p1 " if late else "@!%p1 ") + "ld.shared.u32 %r21, [%r20];"
    compare(_SQUARE + fault)
    compare(_SQUARE + fault, checks="race")
    limit = replace(Settings(), instruction_limit=500)
    for processes in (1, 3):
        machine = prepare(entry("", "mov.u32 %r1, 0;" * 30), grid=40, settings=replace(limit, cores=processes))
        with pytest.raises(EmulatorError, match="instruction limit of 500"):
            machine.run()
        assert 500 < machine.time < 600


COMMUNICATES = {
    "atom.global.add.u32": True, "atom.add.u32": True, "atom.shared::cta.add.u32": False, "red.global.add.f32": True,
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32": False,
    "ld.global.f32": False, "ld.volatile.global.u32": True, "ld.acquire.gpu.u32": True, "ld.volatile.shared.u32": False,
    "st.release.sys.global.u32": True, "st.global.v4.f32": False, "st.relaxed.cta.shared.u32": False,
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32": True,
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.s32": False,
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group": False,
    "tensormap.replace.tile.global_address.shared::cta.b1024.b64": True, "prefetch.tensormap": False,
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128": True,
    "multimem.st.relaxed.sys.global.u32": True, "fence.acq_rel.gpu": False, "griddepcontrol.wait": False,
}  # fmt: skip


def test_which_code_is_made_to_communicate():
    assert {opcode: cores._orders(opcode) for opcode in COMMUNICATES} == COMMUNICATES


@pytest.mark.parametrize(
    "body", ["atom.global.add.u32 %r20, [%rd2], 1;", "mov.u64 %rd7, %clock64; st.global.u64 [%rd2], %rd7;"]
)
def test_kernels_that_see_an_order_are_not_split(body):
    split, _ = compare(body)
    assert not split.possible and not split.rounds


def test_launches_that_are_not_split():
    for settings, request in (
        ({"schedule": "adversarial"}, {}),
        ({"native_checks": 0}, {}),
        ({}, {"attributes": {"cooperative": True}}),
        ({}, {"grid": 1}),
    ):
        machine = prepare(entry("", ""), settings=Settings(**settings, cores=2), **{"grid": 9, **request})
        machine.run()
        assert not machine.split.possible and not machine.split.rounds, (settings, request)


def test_odd_bytes_at_the_ends_of_an_allocation():
    """Words that an allocation shares with its neighbours are cut to its bytes."""
    text = entry(
        "u64 y",
        """ld.param.u64 %rd1, [y]; mov.u32 %r1, %ctaid.x; mul.wide.u32 %rd2, %r1, 5; add.u64 %rd1, %rd1, %rd2;
        mov.u32 %r2, %tid.x; cvt.u64.u32 %rd3, %r2; add.u64 %rd1, %rd1, %rd3; st.global.u8 [%rd1], %r1;""",
    )
    found = []
    for processes in (1, 2):
        memory = aligned(64, np.uint8)
        machine = prepare(text, memory[3:33], grid=6, block=5, settings=Settings(cores=processes))
        machine.run()
        found.append(memory.copy())
    assert np.array_equal(*found) and found[0][:3].tolist() == [0] * 3
    assert found[0][3:33].tolist() == [i for i in range(6) for _ in range(5)]


def test_memory_of_other_processes_is_not_tried_out():
    memory = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)  # shared
    machine = prepare(entry("u64 y", ""), memory, grid=9, settings=Settings(cores=2))
    machine.run()
    assert cores.shares_memory(machine.gmem) and not machine.split.rounds


def test_memory_that_nobody_writes_is(tmp_path):
    """A file mapped to be read, as weights are, is shared with every process that reads it."""
    (tmp_path / "file").write_bytes(bytes(4096))
    with open(tmp_path / "file", "rb") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    machine = prepare(entry("u64 y", ""), memory.ctypes.data, grid=9, settings=Settings(cores=2))
    machine.gmem.register(memory.ctypes.data, 4096, "file", writable=False, owner=memory)
    machine.run()
    assert not cores.shares_memory(machine.gmem) and machine.split.taken == 1


@isa.service("testend.u32", note="instructions of the tests")
def _end(warp, instr, form):
    """End the process, unless it is the one of the test."""
    if os.getpid() != _TESTS:
        os._exit(0)


@isa.service("testlate.u32", note="instructions of the tests")
def _late(warp, instr, form):
    """Wait for the end, unless in the process of the test."""
    if os.getpid() != _TESTS:
        time.sleep(60)


_TESTS = os.getpid()


def test_a_worker_that_ends_early():
    split, hazards = compare(_SQUARE + "testend.u32 1;")
    assert split.dropped == 1 and not split.taken and not hazards and split.reason == "ended"
    assert "split in vain" not in split.machine.program.kept
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, 0)  # no process is left


def test_a_worker_that_is_late(monkeypatch):
    monkeypatch.setattr(cores, "_GRACE", 0.0)
    monkeypatch.setattr(cores, "_PATIENCE", 0.0)
    split, _ = compare(_SQUARE + "testlate.u32 1;")
    assert (split.dropped, split.taken, split.reason) == (1, 0, "late")
    assert "split in vain" not in split.machine.program.kept
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, 0)


@pytest.mark.parametrize("end", ["", "testend.u32 1;"])
def test_children_that_others_wait_for(end):
    """Where SIGCHLD is ignored there is nothing to wait for: what a worker has sent tells."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        split, hazards = compare(_SQUARE + end)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert (split.taken, split.dropped, split.reason) == ((0, 1, "ended") if end else (2, 0, "")) and not hazards


def test_all_workers_are_ended_first():
    class Stuck(cores.Worker):
        def stop(self):
            done.append("stop")

        def wait(self):
            done.append("wait")

    done = []
    cores.stop([Stuck(1), Stuck(1)])
    assert done == ["stop", "stop", "wait", "wait"]
    gone = cores.Worker(1)
    gone._read = os.open("/dev/null", os.O_RDONLY)
    os.close(gone._read)
    gone._process = 1 << 30  # no process has that number
    cores.stop([gone])
    assert (gone._read, gone._process) == (-1, 0)


def test_signals_wait_for_the_fork(monkeypatch):
    """A handler that raises right after the fork does not let the worker go on with what its parent does."""
    fork = os.fork

    def interrupted():
        child = fork()
        if not child:
            os.kill(os.getpid(), signal.SIGUSR1)
        return child

    def interrupt(number, frame):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", interrupted)
    before = signal.signal(signal.SIGUSR1, interrupt)
    read, write = os.pipe()
    try:
        split, _ = compare(_SQUARE)
    finally:
        if os.getpid() != _TESTS:
            os.write(write, b"a worker went on with the test")
            os._exit(1)
        os.close(write)
        signal.signal(signal.SIGUSR1, before)
    assert os.read(read, 99) == b"" and split.reason == "ended"
    os.close(read)


def test_half_a_message_is_none():
    raw = message.write([1, 2])
    whole = len(raw).to_bytes(8, "little") + raw
    for given in (b"", whole[:5], whole[:8], whole[:-1], whole + b"x"):
        assert cores.Worker(1)._received(bytearray(given)) == "ended"
    assert cores.Worker(1)._received(bytearray(whole)) == [1, 2]


def test_clusters_that_begin_beside_one_that_only_computes():
    """Those of workers begin here then, and nothing of them is taken over."""
    turns = """mov.u32 %r20, 0; setp.ne.u32 %p4, %r1, 7; @%p4 bra ON;
    L: add.u32 %r20, %r20, 1; setp.lt.u32 %p5, %r20, 60000; @%p5 bra L;
    ON: setp.gt.u32 %p6, %r1, 7; @%p6 bra END; st.global.u32 [%rd5], %r20; END:"""
    split, hazards = compare(turns)
    assert (split.rounds, split.taken, split.reason, hazards) == (1, 0, "order", [])


@isa.service("testallocate.u32", note="instructions of the tests")
def _allocate(warp, instr, form):
    """Register memory once, in the process of the test, while others run."""
    machine = warp.cta.cluster.machine
    if os.getpid() == _TESTS and _LATER and machine.marks is not None:
        machine.gmem.register_array(_LATER.pop(), "registered meanwhile")


_LATER = []
_LOW = 0x40  # MAP_32BIT: below other memory, which then has other places in the table of allocations


@pytest.mark.parametrize("checks", ["default", "race"])
def test_allocations_that_change_during_a_round(checks):
    """As when another thread allocates: marks would be those of another allocation."""
    results = []
    for processes in (1, 3):
        _LATER[:] = [np.frombuffer(mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | _LOW), np.uint8)]
        machine, outcome, y = run(_SQUARE + "testallocate.u32 1;", processes, checks=checks)
        results.append((y.tobytes(), outcome.instructions, outcome.schedule_hash, outcome.hazards))
    assert results[0] == results[1] and not _LATER
    assert (machine.split.rounds, machine.split.taken, machine.split.reason) == (1, 0, "memory")


def test_memory_that_does_not_fit_or_takes_too_long(monkeypatch):
    for name, value in (("available", lambda: 20_000.0), ("_LOOK", 1.0)):
        with monkeypatch.context() as patch:
            patch.setattr(cores, name, value)
            assert not compare(_SQUARE)[0].rounds, name
    assert cores.available() > 1e8


def test_what_is_touched_costs_what_it_is_not_its_span():
    """Words at both ends of a large allocation, with odd bytes around it."""
    raw = np.zeros((1 << 24) + 8, np.uint8)
    array = raw[-raw.ctypes.data % 4 + 1 :][: (1 << 24) + 1]
    gmem = GlobalMemory()
    gmem.register_array(array, "array")
    start, end = array.ctypes.data, array.ctypes.data + array.nbytes
    worker, other = Marks(gmem), Marks(gmem)
    worker.ranges([start, start + 1000, end - 5], 5, True)
    worker.ranges([start + 2000], 4, False)
    array[:5] = array[1000:1005] = array[-5:] = [1, 2, 3, 4, 5]
    (touched,) = worker.touched()
    assert sum(a.nbytes for a in (touched.blocks, touched.read, touched.written, touched.words, touched.edges)) < 200
    want = array.copy()
    array[:] = 0
    assert not other.conflicts(touched, True)
    other.apply(touched)
    assert np.array_equal(array, want) and len(other.touched()) == 1
    assert np.array_equal(other.touched()[0].accessed(), touched.accessed())
    for address, write, strict, conflict in (
        (start + 2000, True, False, True), (start + 2000, False, True, False), (start + 1004, False, True, True),
        (start + 1004, False, False, False), (start + 1012, True, True, False), (end - 1, True, False, True),
    ):  # fmt: skip
        earlier = Marks(gmem)
        earlier.ranges([address], 1, write)
        assert earlier.conflicts(touched, strict) == conflict, (address - start, write, strict)


def test_without_room_for_another_process(monkeypatch):
    def refuse():
        raise BlockingIOError("no process")

    monkeypatch.setattr(os, "fork", refuse)
    files = len(os.listdir("/proc/self/fd"))
    split, _ = compare(_SQUARE)
    assert (split.rounds, split.taken, split.possible) == (1, 0, False)
    assert len(os.listdir("/proc/self/fd")) == files


_IN_PLACE = _SQUARE + "setp.eq.u32 %p3, %r1, 20; @%p3 st.global.f32 [%rd4], %f1;"  # the first write to x is late


@pytest.mark.parametrize(("body", "taken"), [(_SQUARE, 2), (_IN_PLACE, 1)])
def test_a_launch_that_overlaps_a_split_one(body, taken):
    """What clusters of workers did is known to the race detector when a dependent launch reads too early."""
    said = []
    for processes in (1, 3):
        first, _, _ = run(body, processes, checks="race")
        x, y = (next(a for a in first.gmem if a.label == f"argument {i}") for i in range(2))
        early = "ld.param.u64 %rd1, [y]; ld.global.u32 %r1, [%rd1+5888];\nst.global.u32 [%rd1+5892], %r1;"
        second = prepare(entry("u64 y", early), y.start, settings=first.settings, attributes={"programmatic": True})
        second.gmem = first.gmem
        second.before = second.race.dependence.earlier = first.race.unfinished()
        said.append([(h.kind, h.message, str(h.place), str(h.owner), h.count) for h in second.run().hazards])
        far, rows = first.race.far, first.race.far.accesses.rows(0).T
        for region in (far.regions[x.start], far.regions[y.start]):
            shadows = rows[region.writer], region.first, region.latest, region.values  # their numbers may differ
            said[-1].append((region.written, region.read_from, [shadow.tolist() for shadow in shadows]))
        said[-1].append((sorted(rows.tolist()), far.shared.bases, far.shared.count))
        assert (first.split.taken, first.split.dropped) == ((taken, 2 - taken) if processes > 1 else (0, 0))
    assert said[0] == said[1] and [(h[0], h[-1]) for h in said[0][:-3]] == [("dependent_launch_early", 1)] * 2


_TILES = """
.version 9.1
.target sm_100a
.address_size 64
.visible .entry k(.param .align 64 .b8 source[128], .param .align 64 .b8 target[128], .param .u64 step)
{
.reg .b32 %r<20>; .reg .b64 %rd<10>; .reg .pred %p<4>;
.shared .align 128 .b8 a[128];
.shared .align 8 .b64 bar;
mov.b64 %rd1, source; cvta.param.u64 %rd1, %rd1; mov.b64 %rd2, target; cvta.param.u64 %rd2, %rd2;
ld.param.u64 %rd3, [step]; cvt.u32.u64 %r9, %rd3; mov.u32 %r1, %ctaid.x; add.s32 %r9, %r9, %r1;
mov.b32 %r2, a; mov.b32 %r3, bar; mov.b32 %r4, 0; mbarrier.init.shared.b64 [%r3], 1;
mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r4, %r1}], [%r3];
W: mbarrier.try_wait.parity.shared.b64 %p1, [%r3], 0; @!%p1 bra W;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd2, {%r4, %r9}], [%r2];
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
ret;
}
"""


@pytest.mark.parametrize("chained", [False, True])
def test_tensor_copies(chained):
    """Row after row: of another tensor, or each cluster of what the one before it has written."""
    rows, results = 16, []
    for processes in (1, 2):
        source, target = aligned((rows + 1, 32), np.uint32), aligned((rows + 1, 32), np.uint32)
        source[...] = np.random.default_rng(1).integers(0, 1 << 32, source.shape, dtype=np.uint32)
        used = [target, target] if chained else [source, target]
        target[0] = source[0]
        maps = [tensormap.encode_tiled(2, a.ctypes.data, [32, rows + 1], [128], [32, 1], [1, 1], 0, 0) for a in used]
        machine = prepare(_TILES, *maps, int(chained), grid=rows, block=1, settings=Settings(cores=processes))
        machine.gmem.register_array(source, "source")
        machine.gmem.register_array(target, "target")
        outcome = machine.run()
        results.append((target.tolist(), outcome.schedule_hash, outcome.instructions))
        assert not outcome.hazards
    assert results[0] == results[1]
    assert (target[1:] == source[0]).all() if chained else (target[:-1] == source[:-1]).all()
    assert (machine.split.taken, machine.split.dropped) == ((0, 1) if chained else (1, 0))


def test_messages_come_back_as_they_were():
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    touched = Touched(1, array[0], *(a.view(np.uint8) for a in array), array[1], array.view(np.uint8)[0])
    value = [1 << 200, -1, None, True, "ü", (1, (2,)), {True: 1, False: -2, 3: {"a": []}}, Counter(b=0), [touched]]
    back = message.read(message.write(value), (Touched,))
    assert back[:-1] == value[:-1] and type(back[-2]) is Counter and list(back[6]) == list(value[6])
    assert [np.array_equal(x, y) for x, y in zip(vars(back[-1][0]).values(), vars(touched).values(), strict=True)] == [
        True
    ] * 6
    assert message.read(message.write(array), ()).tolist() == array.tolist()
    with pytest.raises(TypeError):
        message.write([object()])
    with pytest.raises(KeyError, match="Touched"):
        message.read(message.write(touched), ())
