"""mbarrier: phases and counts against a small model, waits, every error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import HazardError, MemoryFault, UnsupportedInstruction
from dsv4lib.emulator.ptx.ir import Pair, Reg
from dsv4lib.emulator.units import mbarrier
from tests.emulator.units.async_bench import SINK, Bench, at

BAR = 1024


class Model:
    """The PTX ISA's description of a barrier, one operation at a time."""

    def __init__(self, count):
        self.expected = self.pending = count
        self.tx = self.phase = 0

    def step(self):
        if self.pending == 0 and self.tx == 0:
            self.phase, self.pending = self.phase + 1, self.expected

    def arrive(self, count, expect=0, drop=False):
        self.tx += expect
        self.expected -= count if drop else 0
        self.pending -= count
        self.step()

    def transactions(self, amount):
        self.tx += amount
        self.step()


def test_layout_query():
    bench = Bench(smem=2048)
    bench.barrier(BAR, 3)
    for layout, want in (("v0", True), ("v1", False)):
        answer = bench.register(not want, bool)
        bench.run(f"mbarrier.check_layout.layout::{layout}.shared::cta.b64", answer, at(BAR))
        assert (bench.warp.registers[answer.index] == want).all()
    with pytest.raises(HazardError):
        bench.run("mbarrier.check_layout.layout::v0.shared::cta.b64", answer, at(BAR + 64))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 3)),
        st.tuples(st.just("arrive_expect"), st.integers(0, 64)),
        st.tuples(st.just("expect"), st.integers(1, 64)),
        st.tuples(st.just("complete"), st.integers(1, 64)),
        st.tuples(st.just("drop"), st.just(1)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(count=st.integers(1, 9), operations=OPERATIONS)
def test_against_the_model(count, operations):
    bench = Bench(smem=2048)
    barrier, model = bench.barrier(BAR, count), Model(count)
    for name, value in operations:
        arrivals = value if name in ("arrive", "drop") else 1
        if "arrive" in name or name == "drop":
            if arrivals > model.pending or (name == "drop" and model.expected <= 1):
                continue  # undefined
        if name == "arrive":
            bench.run("mbarrier.arrive.shared.b64", SINK, at(BAR), value, lanes=0)
            model.arrive(value)
        elif name == "arrive_expect":
            bench.run("mbarrier.arrive.expect_tx.shared::cta.b64", SINK, at(BAR), value, lanes=3)
            model.arrive(1, expect=value)
        elif name == "drop":
            bench.run("mbarrier.arrive_drop.shared.b64", SINK, at(BAR), lanes=1)
            model.arrive(1, drop=True)
        else:
            bench.run(f"mbarrier.{name}_tx.relaxed.cta.shared.b64", at(BAR), value, lanes=0)
            model.transactions(value if name == "expect" else -value)
        seen = (barrier.expected, barrier.pending, barrier.tx, barrier.phase)
        assert seen == (model.expected, model.pending, model.tx, model.phase)
        for parity in (0, 1):
            done = bench.register(0, bool)
            bench.run("mbarrier.test_wait.parity.shared.b64", done, at(BAR), parity, lanes=0)
            assert bench.warp.registers[done.index][0] == (model.phase % 2 != parity)
    assert not bench.machine.hazards


def test_a_parity_is_its_lowest_bit():
    """As an H200 answers after 0, 1, 2 and 3 phases, test_wait and try_wait alike; more than 0 and 1 is a lint."""
    parities = (0, 1, 2, 3, 4, 5, 0x80000000, 0x80000001, 0xFFFFFFFF)
    bench = Bench()
    bench.barrier(BAR)
    for phase in range(4):
        answers = []
        for parity in parities:
            done = bench.register(0, bool)
            bench.run("mbarrier.test_wait.parity.shared.b64", done, at(BAR), parity, lanes=0)
            answers.append(bool(bench.warp.registers[done.index][0]))
        assert answers == [(parity & 1) != phase % 2 for parity in parities]
        bench.run("mbarrier.arrive.shared.b64", SINK, at(BAR), lanes=0)
    assert set(bench.machine.hazards) == {"mbarrier_parity_range"}


def test_a_full_warp_arrives_lane_by_lane():
    bench = Bench()
    barrier = bench.barrier(BAR, 16)
    state = bench.register(0, np.uint64)
    bench.run("mbarrier.arrive.shared.b64", state, at(BAR))
    states = bench.warp.registers[state.index]
    assert barrier.phase == 2 and barrier.pending == 16
    assert (states[:16] >> np.uint64(32) == 0).all() and (states[16:] >> np.uint64(32) == 1).all()
    count = bench.register(0)
    bench.run("mbarrier.pending_count.b64", count, state)
    assert bench.warp.registers[count.index].tolist() == [16 - i % 16 for i in range(32)]


def test_wait_on_a_state():
    bench = Bench()
    barrier = bench.barrier(BAR, 2)
    state, done = bench.register(0, np.uint64), bench.register(0, bool)
    bench.run("mbarrier.arrive.noComplete.shared.b64", state, at(BAR), 1, lanes=0)
    bench.run("mbarrier.test_wait.shared.b64", done, at(BAR), state, lanes=0)
    assert not bench.warp.registers[done.index][0]
    bench.run("mbarrier.arrive.shared.b64", SINK, at(BAR), lanes=0)
    bench.run("mbarrier.test_wait.acquire.cta.shared.b64", done, at(BAR), state, lanes=0)
    assert bench.warp.registers[done.index][0]
    barrier.phase += 1
    with pytest.raises(HazardError, match="neither the current nor the one before"):
        bench.run("mbarrier.test_wait.shared.b64", done, at(BAR), state, lanes=0)


def test_try_wait_suspends_until_the_phase():
    bench = Bench()
    barrier = bench.barrier(BAR, 1, tx=64)
    done = bench.register(0, bool)
    wait = ("mbarrier.try_wait.parity.acquire.cta.shared::cta.b64", done, at(BAR), 0, 1000)
    block = bench.run(*wait)
    assert block.reason == "mbarrier" and not block.ready()
    assert "phase 0" in block.detail() and "64 bytes" in block.detail() and barrier.waiters
    bench.run("mbarrier.arrive.shared.b64", SINK, at(BAR), lanes=0)
    assert not block.ready()
    barrier.complete_tx(64, bench.warp.place)
    assert block.ready()
    assert bench.run(*wait) is None and bench.warp.registers[done.index].all() and not barrier.waiters


@pytest.mark.parametrize("end", ["expire", "deadline"])
def test_try_wait_gives_up(end):
    bench = Bench()
    bench.barrier(BAR, 1)
    done = bench.register(1, bool)
    wait = ("mbarrier.try_wait.parity.shared.b64", done, at(BAR), 0)
    block = bench.run(*wait)
    if end == "expire":
        block.expire()
    else:
        bench.machine.time = block.deadline
    assert block.ready() and bench.run(*wait) is None
    assert not bench.warp.registers[done.index].any()


def test_lanes_with_different_barriers():
    """A wait of several phases ends with the first; the others answer False."""
    bench = Bench()
    first = bench.barrier(BAR, 1)
    bench.barrier(BAR + 8, 1)
    address = bench.register(np.where(np.arange(32) < 20, BAR, BAR + 8))
    done = bench.register(0, bool)
    wait = ("mbarrier.try_wait.parity.shared.b64", done, at(address), 0)
    block = bench.run(*wait)
    first.arrive(1, bench.warp.place)
    assert block.ready() and bench.run(*wait) is None
    assert bench.warp.registers[done.index].tolist() == [True] * 20 + [False] * 12


def test_remote_arrival():
    bench = Bench(ctas=2)
    barrier = bench.barrier(BAR, 2, rank=1)
    remote = 1 << 24 | BAR
    bench.run("mbarrier.arrive.release.cluster.shared::cluster.b64", SINK, at(remote), lanes=0)
    bench.run("mbarrier.arrive.expect_tx.shared::cluster.b64", SINK, at(remote), 0, lanes=0)
    assert barrier.phase == 1
    with pytest.raises(HazardError, match="must be _"):
        state = bench.register(0, np.uint64)
        bench.run("mbarrier.arrive.shared::cluster.b64", state, at(remote), lanes=0)
    with pytest.raises(MemoryFault, match="not in this CTA"):
        bench.run("mbarrier.arrive.shared.b64", SINK, at(remote), lanes=0)
    with pytest.raises(HazardError, match="another CTA"):
        done, generic = bench.register(0, bool), bench.register(0x7E << 56 | remote, np.uint64)
        bench.run("mbarrier.test_wait.parity.b64", done, at(generic), 0, lanes=0)


def test_generic_addresses():
    bench = Bench()
    barrier = bench.barrier(BAR, 1)
    bench.run("mbarrier.arrive.b64", SINK, at(bench.register(0x7E << 56 | BAR, np.uint64)), lanes=0)
    assert barrier.phase == 1
    with pytest.raises(MemoryFault, match="outside the shared window"):
        bench.run("mbarrier.arrive.b64", SINK, at(bench.register(BAR, np.uint64)), lanes=0)


@pytest.mark.parametrize("space", ["shared", "shared::cta", "shared::cluster"])
@pytest.mark.parametrize("lanes", [[3], range(32)])
def test_a_generic_address_is_none_of_a_shared_space(space, lanes):
    """As with ld.shared; a forgotten cvta.to.shared must not pass."""
    bench = Bench()
    bench.barrier(BAR, 64)
    opcode = f"mbarrier.arrive.{space}.b64"
    bench.run(opcode, SINK, at(bench.register(BAR, np.uint64)), lanes=lanes)
    with pytest.raises(MemoryFault, match="is not in shared memory: is it a generic one"):
        bench.run(opcode, SINK, at(bench.register(0x7E << 56 | BAR, np.uint64)), lanes=lanes)


def _over_arrival(bench):
    bench.run("mbarrier.arrive.shared.b64", SINK, at(BAR), 3, lanes=0)


def _tx_overflow(bench):
    for _ in range(2):
        bench.run("mbarrier.expect_tx.relaxed.cta.shared.b64", at(BAR), (1 << 19) + 8, lanes=0)


def _reinit(bench):
    bench.run("mbarrier.init.shared.b64", at(BAR), 1, lanes=0)


def _reinit_waited(bench):
    bench.run("mbarrier.try_wait.parity.shared.b64", bench.register(0, bool), at(BAR), 0)
    _reinit(bench)


def _overwritten(bench):
    bench.write_smem(BAR + 4, np.zeros(4, np.uint8))
    bench.run("mbarrier.arrive.shared.b64", SINK, at(BAR), lanes=0)


def _no_complete(bench):
    bench.run("mbarrier.arrive.noComplete.shared.b64", SINK, at(BAR), 2, lanes=0)


def _leftover(bench):
    bench.run("mbarrier.expect_tx.relaxed.cta.shared.b64", at(BAR), 16, lanes=0)
    mbarrier.check_exit(bench.cta)


def _inval(bench):
    bench.run("mbarrier.expect_tx.relaxed.cta.shared.b64", at(BAR), 16, lanes=0)
    bench.run("mbarrier.inval.shared.b64", at(BAR), lanes=0)


def test_a_whole_warp_may_initialise_one_barrier():
    """Shipped kernels let all 32 lanes run the same init (FlashInfer's prefill, FlashAttention's MLA)."""
    bench = Bench()
    bench.run("mbarrier.init.shared.b64", at(BAR), 2)
    assert bench.machine.hazards == []
    bench = Bench()
    bench.run("mbarrier.init.shared.b64", at(BAR), bench.register(np.where(np.arange(32) < 5, 2, 3)))
    assert bench.machine.hazards == ["mbarrier_reinit"]


@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        ("mbarrier_over_arrival", _over_arrival),
        ("mbarrier_tx_overflow", _tx_overflow),
        ("mbarrier_reinit", _reinit),
        ("mbarrier_reinit_waited", _reinit_waited),
        ("mbarrier_overwritten", _overwritten),
        ("mbarrier_no_complete", _no_complete),
        ("mbarrier_tx_leftover", _leftover),
        ("mbarrier_inval_in_use", _inval),
    ],
)
def test_hazards(kind, mistake):
    bench = Bench()
    bench.barrier(BAR, 2)
    mistake(bench)
    assert bench.machine.hazards == [kind]


def test_uninitialised_and_misaligned():
    bench = Bench()
    with pytest.raises(HazardError, match="no mbarrier was initialised at 0x400"):
        bench.run("mbarrier.try_wait.parity.shared.b64", bench.register(0, bool), at(BAR), 0)
    with pytest.raises(MemoryFault, match="not a multiple of 8"):
        bench.run("mbarrier.init.shared.b64", at(BAR + 4), 1, lanes=0)
    with pytest.raises(HazardError, match="arrival count 0"):
        bench.run("mbarrier.init.shared.b64", at(BAR), 0, lanes=0)
    with pytest.raises(HazardError, match="arrival count 1048576"):
        bench.run("mbarrier.init.shared.b64", at(BAR), 1 << 20, lanes=0)
    bench.barrier(BAR)
    bench.run("mbarrier.inval.shared.b64", at(BAR), lanes=0)
    with pytest.raises(HazardError, match="no mbarrier"):
        bench.run("mbarrier.arrive.shared.b64", SINK, at(BAR), lanes=0)


def test_a_barrier_reads_as_not_written():
    bench = Bench()
    bench.write_smem(BAR, np.ones(16, np.uint8))
    bench.barrier(BAR)
    assert not bench.cta.smem.init[BAR : BAR + 8].any() and bench.cta.smem.init[BAR + 8 : BAR + 16].all()


@pytest.mark.parametrize(
    "opcode",
    [
        "mbarrier.init.layout::v1.shared.b64",
        "mbarrier.arrive.acquire.cta.shared.b64",
        "mbarrier.try_wait.parity.shared::cluster.b64",
        "mbarrier.try_wait.parity.phase_type::conditional.shared.b64",
        "mbarrier.expect_tx.release.cta.shared.b64",
        "mbarrier.arrive.noComplete.shared::cluster.b64",
    ],
)
def test_refused(opcode):
    with pytest.raises(UnsupportedInstruction):
        isa.lookup(opcode)


def test_payload_reports_are_refused():
    bench = Bench()
    bench.barrier(BAR)
    both = Pair(Reg(0), Reg(1))
    with pytest.raises(UnsupportedInstruction, match="payload"):
        bench.run("mbarrier.test_wait.parity.phase_type::primary.shared.b64", both, at(BAR), 0)
