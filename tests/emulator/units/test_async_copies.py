"""Bulk copies, cp.async, st.async, red.async, cluster launch control: results, completion mechanisms, errors."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError, MemoryFault, UnsupportedInstruction
from dsv4lib.emulator.units import clc
from dsv4lib.emulator.units.tcgen05_ldst import POISON
from tests.emulator.units.async_bench import SINK, Bench, at, vector

BAR, BUF = 1024, 4096
TX = "mbarrier::complete_tx::bytes"
BULK_LOAD = f"cp.async.bulk.shared::cluster.global.{TX}"
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group"
PEER = f"cp.async.bulk.shared::cluster.shared::cta.{TX}"


def values(nbytes, seed=3):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


# --- bulk -------------------------------------------------------------------------------------------------------------


def test_bulk_load():
    bench = Bench()
    data = bench.array(values(512))
    barrier = bench.barrier(BAR, 1, tx=208)
    bench.run(BULK_LOAD, at(BUF), at(data.ctypes.data + 32), 208, at(BAR), lanes=0)
    assert not bench.cta.smem.init[BUF] and barrier.tx == 208
    data[40] ^= 0xFF  # the source is read when the copy completes
    bench.cta.smem.dirty[BUF >> 4] = 1
    bench.units.drain()
    assert (bench.cta.smem.data[BUF : BUF + 208] == data[32:240]).all() and barrier.tx == 0
    assert bench.cta.smem.init[BUF : BUF + 208].all() and not bench.cta.smem.init[BUF + 208]
    assert bench.cta.smem.dirty[BUF >> 4] == 0


def test_bulk_multicast():
    bench = Bench(ctas=3)
    data = bench.array(values(64))
    for rank in range(3):
        bench.barrier(BAR, 1, rank=rank)
    bench.run(
        f"{BULK_LOAD}.multicast::cluster.L2::cache_hint", at(BUF), at(data.ctypes.data), 64, at(BAR), 0b101, 0, lanes=0
    )
    bench.units.drain()
    assert [cta.mbarriers[BAR].tx for cta in bench.cluster.ctas] == [-64, 0, -64]
    assert [bool(cta.smem.init[BUF]) for cta in bench.cluster.ctas] == [True, False, True]


def test_bulk_ignore_oob():
    """Ignored bytes may lie outside the allocation; the others may not."""
    bench = Bench()
    data = bench.array(values(96))
    bench.gmem.unregister(data.ctypes.data)
    bench.gmem.register(data.ctypes.data + 5, 80, "odd", owner=data)
    bench.barrier(BAR)
    opcode = f"cp.async.bulk.shared::cta.global.{TX}.ignore_oob"
    bench.run(opcode, at(BUF), at(data.ctypes.data), 96, 5, 11, at(BAR), lanes=0)
    bench.units.drain()
    got = bench.cta.smem.data[BUF : BUF + 96]
    assert (got[5:85] == data[5:85]).all() and bench.cta.mbarriers[BAR].tx == -96
    bench.run(opcode, at(BUF), at(data.ctypes.data), 96, 4, 11, at(BAR), lanes=0)
    with pytest.raises(MemoryFault):
        bench.units.drain()
    with pytest.raises(HazardError, match="0 to 15"):
        bench.run(opcode, at(BUF), at(data.ctypes.data), 96, 16, 0, at(BAR), lanes=0)


def test_bulk_store_mask_and_groups():
    bench = Bench()
    target = bench.array(np.zeros(64, np.uint8))
    bench.write_smem(BUF, values(64))
    bench.run(f"{BULK_STORE}.L2::cache_hint.cp_mask", at(target.ctypes.data), at(BUF), 64, 0, 0x80F1)
    bench.run("cp.async.bulk.commit_group")
    first = bench.run("cp.async.bulk.wait_group", 0)
    assert first.detail().startswith("waits for bulk store of 64 bytes")
    bench.warp.pending = None
    assert bench.run("cp.async.bulk.wait_group", 1) is None  # one group may be pending
    bench.units.drain()
    mask = np.array([0x80F1 >> i & 1 for i in range(16)], bool)
    source = bench.cta.smem.data[BUF : BUF + 64].reshape(4, 16)
    assert (target.reshape(4, 16)[:, mask] == source[:, mask]).all() and not target.reshape(4, 16)[:, ~mask].any()
    assert first.ready() and bench.machine.stats["bulk_stores"] == 1


def test_groups_complete_in_order_of_commits():
    bench = Bench()
    target = bench.array(np.zeros(64, np.uint8))
    bench.write_smem(BUF, values(64))
    for i in range(2):
        bench.run(BULK_STORE, at(target.ctypes.data + 16 * i), at(BUF), 16, lanes=4)
        bench.run("cp.async.bulk.commit_group", lanes=4)
    wait = bench.run("cp.async.bulk.wait_group", 1, lanes=4)
    bench.warp.pending = None
    other = bench.run("cp.async.bulk.wait_group", 0, lanes=5)
    assert other is None  # lane 5 has no groups
    for _ in range(2):  # the younger store completes first: the older group is still pending
        bench.units.complete(bench.units.candidates()[-1])
    assert not wait.ready()
    bench.units.drain()
    assert wait.ready()


def test_copies_of_128_bit_words():
    """The relaxed forms move what the weak ones do: load, multicast load, store with a mask, copy to a peer."""
    bench = Bench(ctas=2)
    data, target = bench.array(values(64)), bench.array(np.zeros(64, np.uint8))
    for rank in range(2):
        bench.barrier(BAR, 1, rank=rank)
    strong = "cp.async.bulk.relaxed.gpu"
    bench.run(f"{strong}.shared::cta.global.{TX}.b128", at(BUF), at(data.ctypes.data), 64, at(BAR), lanes=0)
    multicast = f"{strong}.shared::cluster.global.{TX}.multicast::cluster.L2::cache_hint.b128"
    bench.run(multicast, at(BUF + 64), at(data.ctypes.data), 32, at(BAR), 0b11, 0, lanes=0)
    bench.units.drain()
    bench.run(
        f"cp.async.bulk.relaxed.cluster.shared::cluster.shared::cta.{TX}.b128",
        *(at(1 << 24 | BUF), at(BUF), 64, at(1 << 24 | BAR)),
        lanes=0,
    )
    bench.run(
        f"{strong}.global.shared::cta.bulk_group.cp_mask.b128", at(target.ctypes.data), at(BUF), 64, 0x00FF, lanes=0
    )
    bench.units.drain()
    for rank, cta in enumerate(bench.cluster.ctas):
        assert (cta.smem.data[BUF : BUF + 64] == data).all() and (cta.smem.data[BUF + 64 : BUF + 96] == data[:32]).all()
        assert cta.mbarriers[BAR].tx == -96, rank
    low = np.tile(np.arange(16) < 8, 4)
    assert (target == np.where(low, data, 0)).all()


def test_bulk_zeros():
    bench = Bench(ctas=2)
    bench.write_smem(BUF, values(64))
    size = bench.register(24, np.uint64)
    bench.run("st.bulk.weak.shared::cta", at(BUF + 8), size, 0, lanes=0)
    smem = bench.cta.smem
    assert (smem.data[BUF : BUF + 64] == np.where(np.abs(np.arange(64) - 19.5) < 12, 0, values(64))).all()
    assert smem.dirty[BUF >> 4] and smem.dirty[BUF + 16 >> 4] and not smem.dirty[BUF + 32 >> 4]  # not fenced
    bench.run("st.bulk", at(bench.register((0x7E << 56) | 8192, np.uint64)), 16, 0, lanes=0)
    assert smem.init[8192:8208].all() and not smem.init[8208]
    for wrong, error in (((at(BUF), 12, 0), HazardError), ((at(BUF), 16, 1), HazardError)):
        with pytest.raises(error, match="multiples of 8, of 0"):
            bench.run("st.bulk.shared::cta", *wrong, lanes=0)
    with pytest.raises(MemoryFault):
        bench.run("st.bulk.shared::cta", at(1 << 24 | BUF), 16, 0, lanes=0)
    with pytest.raises(MemoryFault):
        bench.run("st.bulk.shared::cta", at(64 * 1024 - 8), 16, 0, lanes=0)


def test_bulk_prefetch():
    """Nothing moves; sizes and addresses are checked."""
    bench = Bench()
    data = bench.array(values(64))
    bench.run("cp.async.bulk.prefetch.L2.global", at(data.ctypes.data), 64, lanes=0)
    bench.run("cp.async.bulk.prefetch.L2.global.L2::cache_hint", at(data.ctypes.data), 32, 0, lanes=0)
    assert not bench.cta.smem.init.any() and len(bench.units) == 0
    with pytest.raises(HazardError, match="multiples of 16"):
        bench.run("cp.async.bulk.prefetch.L2.global", at(data.ctypes.data + 8), 16, lanes=0)
    with pytest.raises(EmulatorError, match="operands"):
        bench.run("cp.async.bulk.prefetch.L2.global", at(data.ctypes.data), 16, 0, lanes=0)


def test_copy_to_a_peer():
    bench = Bench(ctas=2)
    data = values(48)
    bench.write_smem(BUF, data)
    barrier = bench.barrier(BAR, 1, tx=48, rank=1)
    bench.run(PEER, at(1 << 24 | 8192), at(BUF), 48, at(1 << 24 | BAR), lanes=0)
    bench.units.drain()
    assert (bench.cluster.ctas[1].smem.data[8192:8240] == data).all() and barrier.tx == 0
    with pytest.raises(HazardError, match="must be another"):
        bench.run(PEER, at(8192), at(BUF), 48, at(1 << 24 | BAR), lanes=0)


def test_reduction_into_a_peer():
    bench = Bench(ctas=2)
    bench.write_smem(BUF, np.array([5, 7, 1 << 31, 4], np.uint32))
    bench.write_smem(BUF, np.array([1, 9, 3, 4], np.uint32), rank=1)
    bench.barrier(BAR, 1, rank=1)
    opcode = f"cp.reduce.async.bulk.shared::cluster.shared::cta.{TX}.min.s32"
    bench.run(opcode, at(1 << 24 | BUF), at(BUF), 16, at(1 << 24 | BAR), lanes=0)
    bench.units.drain()
    got = bench.cluster.ctas[1].smem.data[BUF : BUF + 16].view(np.uint32)
    assert got.tolist() == [1, 7, 1 << 31, 4]


@pytest.mark.parametrize(
    ("op", "old", "new", "want"),
    [
        ("add.u32", [7, 0xFFFFFFFF], [2, 3], [9, 2]),
        ("add.s32", [7, 0xFFFFFFFF], [2, 3], [9, 2]),
        ("inc.u32", [4, 5, 9], [5, 5, 5], [5, 0, 0]),
        ("dec.u32", [0, 4, 9], [5, 5, 5], [5, 3, 5]),
        ("max.u32", [1, 0x80000000], [2, 1], [2, 0x80000000]),
        ("and.b32", [0b1100], [0b1010], [0b1000]),
        ("or.b32", [0b1100], [0b1010], [0b1110]),
        ("xor.b32", [0b1100], [0b1010], [0b0110]),
    ],
)
def test_reductions_in_a_peer(op, old, new, want):
    """By one bulk copy, and by red.async of one lane an element."""
    old, new = (np.array(v + [0] * (4 - len(v)), np.uint32) for v in (old, new))
    bench = Bench(ctas=2)
    barrier = bench.barrier(BAR, 1, tx=16 + 4 * len(want), rank=1)
    for offset in (BUF, BUF + 64):
        bench.write_smem(offset, old, rank=1)
    bench.write_smem(BUF, new)
    peer = at(1 << 24 | BAR)
    bench.run(
        f"cp.reduce.async.bulk.relaxed.cluster.shared::cluster.shared::cta.{TX}.{op}",
        at(1 << 24 | BUF),
        at(BUF),
        16,
        peer,
        lanes=0,
    )
    to = bench.register((1 << 24 | BUF + 64) + 4 * np.arange(32))
    source = bench.register(np.resize(new, 32))
    opcode = f"red.async.relaxed.cluster.shared::cluster.{TX}.{op}"
    bench.run(opcode, at(to), source, peer, lanes=np.arange(len(want)))
    bench.units.drain()
    data = bench.cluster.ctas[1].smem.data
    for offset in (BUF, BUF + 64):
        assert data[offset : offset + 16].view(np.uint32)[: len(want)].tolist() == want
    assert barrier.tx == 0


def test_reductions_of_64_bits_in_a_peer():
    bench = Bench(ctas=2)
    bench.barrier(BAR, 1, rank=1)
    big = np.array([1 << 63, (1 << 40) + 5], np.uint64)
    bench.write_smem(BUF, big)
    bench.write_smem(BUF, big, rank=1)
    opcode = f"cp.reduce.async.bulk.shared::cluster.shared::cta.{TX}.add.u64"
    bench.run(opcode, at(1 << 24 | BUF), at(BUF), 16, at(1 << 24 | BAR), lanes=0)
    bench.units.drain()
    assert bench.cluster.ctas[1].smem.data[BUF : BUF + 16].view(np.uint64).tolist() == [0, (1 << 41) + 10]
    for wrong in ("add.b64", "min.u64", "and.b64", "inc.s32"):
        with pytest.raises(UnsupportedInstruction):
            isa.lookup(opcode.replace("add.u64", wrong))


@pytest.mark.parametrize(
    ("op", "old", "new", "want"),
    [
        ("add.u32", [1, 0xFFFFFFFF], [2, 3], [3, 2]),
        ("inc.u32", [4, 5, 9], [5, 5, 5], [5, 0, 0]),
        ("dec.u32", [0, 4, 9], [5, 5, 5], [5, 3, 5]),
        ("max.s32", [1, 0x80000000], [0xFFFFFFFF, 0xFFFFFFFF], [1, 0xFFFFFFFF]),
        ("xor.b32", [0b1100], [0b1010], [0b0110]),
        ("add.f32", [0x3F800000, 1, 0x80000001], [0x3F800000, 1, 0x80000000], [0x40000000, 0, 0x80000000]),
    ],
)
def test_bulk_reductions(op, old, new, want):
    bench = Bench()
    old, new = (np.array(v + [0] * (4 - len(v)), np.uint32) for v in (old, new))
    target = bench.array(old)
    bench.write_smem(BUF, new)
    bench.run(f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}", at(target.ctypes.data), at(BUF), 16, lanes=0)
    bench.units.drain()
    assert target[: len(want)].tolist() == want


def test_bulk_half_additions():
    """f16 and bf16: sums rounded to nearest even, subnormals kept, once per lane."""
    for kind, one in (("f16", 0x3C00), ("bf16", 0x3F80)):
        bench = Bench()
        target = bench.array(np.array([one, 1] * 4, np.uint16))
        bench.write_smem(BUF, np.array([one, 1] * 4, np.uint16))
        opcode = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.{kind}"
        bench.run(opcode, at(target.ctypes.data), at(BUF), 16, lanes=[1, 2])
        bench.units.drain()
        three = {"f16": 0x4200, "bf16": 0x4040}[kind]
        assert target.tolist() == [three, 3] * 4


@pytest.mark.parametrize(
    ("to", "start", "size"), [(BUF + 8, 0, 16), (BUF, 8, 16), (BUF, 0, 24)], ids=["destination", "source", "size"]
)
def test_bulk_alignment(to, start, size):
    bench = Bench()
    data = bench.array(values(64))
    bench.barrier(BAR)
    with pytest.raises(HazardError, match="multiples of 16"):
        bench.run(BULK_LOAD, at(to), at(data.ctypes.data + start), size, at(BAR), lanes=0)


def test_bulk_errors():
    bench = Bench(ctas=2)
    data = bench.array(values(64))
    bench.barrier(BAR)
    bench.barrier(BAR, rank=1)
    with pytest.raises(HazardError, match="another CTA"):
        bench.run(BULK_LOAD, at(BUF), at(data.ctypes.data), 16, at(1 << 24 | BAR), lanes=0)
    with pytest.raises(MemoryFault, match="run over the end"):
        bench.run(BULK_LOAD, at(64 * 1024 - 16), at(data.ctypes.data), 32, at(BAR), lanes=0)
    bench.run(BULK_LOAD, at(BUF), at(data.ctypes.data), 80, at(BAR), lanes=0)
    with pytest.raises(MemoryFault, match="over the end"):
        bench.units.drain()
    with pytest.raises(EmulatorError, match="operands"):
        bench.run(BULK_STORE, at(data.ctypes.data), at(BUF), 16, 0, lanes=0)


# --- cp.async ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cop", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
def test_cp_async(cop, size):
    bench = Bench()
    data = bench.array(values(32 * 16))
    lanes = np.arange(32)
    to = bench.register(BUF + size * (31 - lanes))
    start = bench.register(data.ctypes.data + size * lanes, np.uint64)
    active = [0, 1, 5, 30]
    bench.run(f"cp.async.{cop}.shared.global.L2::128B", at(to), at(start), size, lanes=active)
    assert not bench.cta.smem.init.any()
    bench.units.drain()
    got = bench.cta.smem.data[BUF : BUF + 32 * size].reshape(32, size)[::-1]
    assert (got[active] == data[: 32 * size].reshape(32, size)[active]).all()
    assert bench.cta.smem.init[BUF : BUF + 32 * size].sum() == size * len(active)


def test_cp_async_fills_with_zeros():
    bench = Bench()
    data = bench.array(np.full(512, 9, np.uint8))
    to, start = (
        bench.register(BUF + 16 * np.arange(32)),
        bench.register(data.ctypes.data + 16 * np.arange(32), np.uint64),
    )
    sizes = bench.register(np.arange(32) % 17)
    bench.run("cp.async.cg.shared::cta.global.L2::cache_hint", at(to), at(start), 16, sizes, 0)
    bench.units.drain()
    got = bench.cta.smem.data[BUF : BUF + 512].reshape(32, 16)
    assert (got.sum(1) == 9 * (np.arange(32) % 17)).all()
    ignore = bench.register(np.arange(32) % 2 == 0, bool)
    beyond = bench.register(np.where(np.arange(32) % 2 == 0, 1 << 20, data.ctypes.data), np.uint64)
    bench.run("cp.async.ca.shared.global", at(to), at(beyond), 16, ignore)  # ignored sources are not touched
    bench.units.drain()
    got = bench.cta.smem.data[BUF : BUF + 512].reshape(32, 16)
    assert not got[::2].any() and (got[1::2] == 9).all()


def test_cp_async_groups():
    bench = Bench()
    data = bench.array(values(512))
    to, start = (
        bench.register(BUF + 16 * np.arange(32)),
        bench.register(data.ctypes.data + 16 * np.arange(32), np.uint64),
    )
    for _ in range(3):
        bench.run("cp.async.cg.shared.global", at(to), at(start), 16)
        bench.run("cp.async.commit_group")
    wait = bench.run("cp.async.wait_group", 1)
    oldest, middle, _ = bench.units.candidates()
    bench.units.complete(middle)
    assert not wait.ready()
    bench.units.complete(oldest)
    assert wait.ready()
    bench.warp.pending = None
    assert bench.run("cp.async.wait_all") is not None
    bench.warp.pending = None
    bench.units.drain()
    assert bench.run("cp.async.wait_all") is None


@pytest.mark.parametrize("noinc", [False, True])
def test_cp_async_arrives_when_done(noinc):
    bench = Bench()
    data = bench.array(values(512))
    barrier = bench.barrier(BAR, 32 if noinc else 1)
    to, start = (
        bench.register(BUF + 16 * np.arange(32)),
        bench.register(data.ctypes.data + 16 * np.arange(32), np.uint64),
    )
    for _ in range(2):
        bench.run("cp.async.cg.shared.global", at(to), at(start), 16)
    bench.run(f"cp.async.mbarrier.arrive{'.noinc' if noinc else ''}.shared.b64", at(BAR))
    bench.run("cp.async.cg.shared.global", at(to), at(start), 16)  # later copies are not waited for
    assert barrier.pending == (32 if noinc else 33)
    assert len(bench.units.candidates()) == 3  # the arrival is not ready
    first, second, _ = bench.units.candidates()
    bench.units.complete(second)
    bench.units.complete(first)
    arrival = bench.units.candidates()[0]
    bench.units.complete(arrival)
    assert (barrier.phase, barrier.pending) == ((1, 32) if noinc else (0, 1))


def test_cp_async_errors():
    bench = Bench()
    data = bench.array(values(512))
    base = data.ctypes.data
    with pytest.raises(HazardError, match="cp.async.cg of 8 bytes"):
        bench.run("cp.async.cg.shared.global", at(BUF), at(base), 8, lanes=0)
    with pytest.raises(MemoryFault, match="multiples of 16"):
        bench.run("cp.async.cg.shared.global", at(BUF + 8), at(base), 16, lanes=0)
    with pytest.raises(MemoryFault, match="past the end"):
        bench.run("cp.async.cg.shared.global", at(64 * 1024), at(base), 16, lanes=0)
    with pytest.raises(HazardError, match="src-size"):
        bench.run("cp.async.cg.shared.global", at(BUF), at(base), 16, 17, lanes=0)
    with pytest.raises(MemoryFault, match="not global"):
        bench.run("cp.async.cg.shared.global", at(BUF), at(0x7E << 56), 16, lanes=0)


def test_cp_async_needs_a_proxy_fence_of_its_own_kind():
    bench = Bench()
    data, target = bench.array(values(512)), bench.array(np.zeros(512, np.uint8))
    to, start = (
        bench.register(BUF + 16 * np.arange(32)),
        bench.register(data.ctypes.data + 16 * np.arange(32), np.uint64),
    )
    store = (BULK_STORE, at(target.ctypes.data), at(BUF), 512)
    bench.run("cp.async.cg.shared.global", at(to), at(start), 16)
    bench.units.drain()
    bench.run(*store, lanes=0)
    bench.units.drain()
    assert bench.machine.hazards == ["missing_proxy_fence_cp_async"]
    bench.run("fence.proxy.async")
    bench.run(*store, lanes=0)
    bench.units.drain()
    assert len(bench.machine.hazards) == 1 and (target == data).all()


# --- st.async and red.async -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "count", "kind"), [("b32", 1, np.uint32), ("v4.f32", 4, np.uint32), ("v2.b64", 2, np.uint64)]
)
def test_st_async(suffix, count, kind):
    bench = Bench(ctas=2)
    size = count * np.dtype(kind).itemsize
    barrier = bench.barrier(BAR, 1, tx=32 * size, rank=1)
    to = bench.register((1 << 24 | BUF) + size * np.arange(32))
    items = [bench.register(np.arange(32) * 10 + i, kind) for i in range(count)]
    source = items[0] if count == 1 else vector(*items)
    bench.run(f"st.async.shared::cluster.{TX}.{suffix}", at(to), source, at(1 << 24 | BAR))
    assert barrier.tx == 32 * size
    bench.units.drain()
    got = bench.cluster.ctas[1].smem.data[BUF : BUF + 32 * size].view(kind).reshape(32, count)
    assert (got == np.arange(32)[:, None] * 10 + np.arange(count)).all() and barrier.tx == 0


def test_st_async_to_several_ctas_and_128_bits():
    bench = Bench(ctas=2)
    for rank in (0, 1):
        bench.barrier(BAR, 1, rank=rank)
    rank = np.arange(32) % 2
    to = bench.register((rank << 24 | BUF) + 16 * np.arange(32))
    wide = bench.register(0, np.uint32)
    bench.warp.registers[wide.index] = np.arange(64, dtype=np.uint64).reshape(2, 32)
    bench.run(f"st.async.weak.shared::cluster.{TX}.b128", at(to), wide, at(bench.register(rank << 24 | BAR)))
    bench.units.drain()
    assert [cta.mbarriers[BAR].tx for cta in bench.cluster.ctas] == [-256, -256]
    got = bench.cluster.ctas[1].smem.data[BUF + 16 * 5 : BUF + 16 * 6].view(np.uint64)
    assert got.tolist() == [5, 37]


def test_red_async():
    bench = Bench(ctas=2)
    barrier = bench.barrier(BAR, 1, rank=1)
    bench.write_smem(BUF, np.array([100], np.uint32), rank=1)
    bench.cluster.ctas[1].smem.dirty[BUF >> 4] = 1  # written by a thread: red.async needs no proxy fence either
    opcode = f"red.async.relaxed.cluster.shared::cluster.{TX}.add.u32"
    bench.run(opcode, at(1 << 24 | BUF), bench.register(np.arange(32)), at(1 << 24 | BAR))
    bench.units.drain()
    assert not bench.machine.hazards
    assert bench.cluster.ctas[1].smem.data[BUF : BUF + 4].view(np.uint32)[0] == 100 + 31 * 16 and barrier.tx == -128
    with pytest.raises(HazardError, match="executing CTA"):
        bench.run(opcode, at(BUF), 1, at(BAR), lanes=0)
    with pytest.raises(HazardError, match="different CTAs"):
        bench.run(opcode, at(1 << 24 | BUF), 1, at(BAR), lanes=0)


def test_st_async_needs_a_cluster():
    bench = Bench()
    bench.barrier(BAR)
    with pytest.raises(HazardError, match="without clusters"):
        bench.run(f"st.async.shared::cluster.{TX}.b32", at(BUF), 1, at(BAR), lanes=0)


def test_global_forms():
    bench = Bench()
    target = bench.array(np.zeros(32, np.uint32))
    address = bench.register(target.ctypes.data + 4 * np.arange(32), np.uint64)
    bench.run("st.async.release.gpu.global.u32", at(address), bench.register(np.arange(32)))
    bench.run("red.async.release.sys.global.add.u32", at(target.ctypes.data), bench.register(2))
    assert not target.any()
    bench.units.drain(lambda candidates: candidates[0])
    assert target[0] == 64 and (target[1:] == np.arange(1, 32)).all()
    bench.run("st.async.mmio.release.sys.global.u32", at(address), bench.register(np.arange(32)))
    bench.run("red.async.mmio.release.sys.add.u32", at(target.ctypes.data), bench.register(1))
    bench.units.drain(lambda candidates: candidates[0])
    assert target.tolist() == [32, *range(1, 32)]


# --- cluster launch control -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multicast", [False, True])
def test_cluster_launch_control(multicast):
    bench = Bench(ctas=2)
    bench.machine.waiting = [(4, 2, 1), (6, 0, 0)]
    barriers = [bench.barrier(BAR, 1, tx=16, rank=rank) for rank in range(2)]
    suffix = ".multicast::cluster::all" if multicast else ""
    for attempt in range(2):
        bench.run(f"clusterlaunchcontrol.try_cancel.async.shared::cta.{TX}{suffix}.b128", at(BUF), at(BAR), lanes=0)
        bench.units.drain(lambda candidates: candidates[-1])
        for rank in range(2 if multicast else 1):
            raw = bench.cluster.ctas[rank].smem.data[BUF : BUF + 16].view(np.uint64)
            handle = bench.register(0)
            bench.warp.registers[handle.index] = np.repeat(raw[:, None], 32, 1)
            done = bench.register(0, bool)
            bench.run("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", done, handle)
            succeeded = bench.warp.registers[done.index][0]
            if succeeded:
                parts = [bench.register(0) for _ in "xyz"]
                bench.run("clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128", vector(*parts, SINK), handle)
                bench.run("clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128", parts[1], handle)
                assert [bench.warp.registers[p.index][3] for p in parts] == [4, 2, 1]
        if attempt == 0:
            assert bench.machine.waiting == [(6, 0, 0)]  # one request takes one cluster
            bench.machine.waiting.clear()
            assert succeeded and barriers[0].tx == 0 and barriers[1].tx == (0 if multicast else 16)
            for barrier in barriers:
                barrier.expect_tx(16, bench.warp.place)
    assert not succeeded
    first = bench.register(0)
    bench.run("clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128", first, handle)
    assert (bench.warp.registers[first.index] == POISON).all()
    clc.check_exit(bench.cta)
    assert not bench.machine.hazards  # is_canceled has been tested


def test_a_failed_response_that_is_never_tested_is_reported():
    bench = Bench()
    handle = bench.register(0)
    bench.warp.registers[handle.index] = np.zeros((2, 32), np.uint64)
    bench.run("clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128", bench.register(0), handle)
    clc.check_exit(bench.cta)
    assert bench.machine.hazards == ["clc_failed_response"]


@pytest.mark.parametrize(
    "opcode",
    [
        f"cp.async.bulk.shared::cta.global.{TX}.multicast::cluster.ignore_oob",
        "cp.async.bulk.global.shared::cta.mbarrier::complete_tx::bytes",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.f32",
        "cp.async.cs.shared.global",
        f"st.async.shared::cluster.{TX}.v4.b64",
        f"red.async.relaxed.cluster.shared::cluster.{TX}.min.u64",
        "cp.async.bulk.wait_group.write",
        f"cp.async.bulk.shared::cta.global.{TX}.multicast::cluster",
        f"cp.async.bulk.relaxed.shared::cta.global.{TX}.b128",
        "st.async.mmio.release.gpu.global.u32",
    ],
)
def test_refused(opcode):
    with pytest.raises(UnsupportedInstruction):
        isa.lookup(opcode)
