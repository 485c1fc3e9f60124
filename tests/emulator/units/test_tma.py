"""Tensor copies as instructions, against loops written from the PTX ISA; signals, orders, hazards, errors."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct

import numpy as np
import pytest

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError, HazardError, MemoryFault, UnsupportedInstruction
from dsv4lib.emulator.units import tensormap
from tests.emulator.units.async_bench import Bench, at, vector

BAR, BUF = 1024, 4096
U8, U16, U64, F16, F32, BF16, U4, U4_PADDED, U6_PADDED = 0, 1, 4, 6, 7, 9, 13, 14, 15
LOAD = "cp.async.bulk.tensor.{}d.shared::cluster.global{}.mbarrier::complete_tx::bytes{}"
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta{}.bulk_group"


def swizzled(address, swizzle):
    """Where a byte goes: the tables of "Swizzling Modes", by address bits."""
    row = address >> 7
    if swizzle in (0, 1, 2, 3):
        return address ^ (row & (0, 1, 3, 7)[swizzle]) << 4
    return address ^ ((row & 3) << 5 if swizzle == 4 else (row & 1) << 6)


def expected_tile(data, dims, strides, size, box, coords, steps, swizzle, start, smem):
    """Shared memory after a tiled load, one element at a time. ``data``: uint8 of the whole tensor."""
    counts = [box[0]] + [-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True)]
    width = {0: size * box[0], 1: 32, 2: 64}.get(swizzle, 128)
    out = smem.copy()
    for row, rest in enumerate(itertools.product(*(range(c) for c in counts[:0:-1]))):
        index = [c + i * s for c, i, s in zip(coords[1:], rest[::-1], steps[1:], strict=True)]
        for x in range(box[0]):
            inside = 0 <= coords[0] + x < dims[0] and all(0 <= i < d for i, d in zip(index, dims[1:], strict=True))
            source = (coords[0] + x) * size + sum(i * s for i, s in zip(index, strides, strict=True))
            for b in range(size):
                out[swizzled(start + row * width + x * size + b, swizzle)] = data[source + b] if inside else 0
    return out


def tensor(bench, nbytes=1 << 15, seed=1):
    return bench.array(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8), "tensor")


def descriptor(bench, raw):
    """Address of a descriptor in global memory."""
    return bench.array(np.frombuffer(raw, np.uint8), "descriptor").ctypes.data


CASES = [
    # type, element bytes, dims, strides, box, traversal, swizzle
    (U8, 1, [80, 9], [80], [32, 5], [1, 1], 0),
    (F16, 2, [40, 7, 5], [96, 720], [16, 3, 2], [1, 1, 1], 1),
    (BF16, 2, [64, 11], [128], [32, 6], [1, 1], 2),
    (F32, 4, [48, 12], [208], [32, 9], [1, 1], 3),
    (F32, 4, [48, 12], [208], [32, 9], [1, 1], 4),
    (U8, 1, [200, 12], [208], [128, 11], [1, 1], 6),
    (U64, 8, [10, 4, 3, 2], [96, 400, 1216], [4, 2, 2, 1], [1, 1, 1, 1], 0),
    (U16, 2, [24, 3, 4, 3, 2], [48, 144, 592, 1792], [8, 2, 3, 1, 2], [1, 1, 1, 1, 1], 0),
    (F16, 2, [32, 13], [64], [16, 9], [1, 3], 1),
    (U8, 1, [112], [], [48], [1], 0),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tiled_load(case):
    """All positions from outside one edge to outside the other, in every dimension."""
    kind, size, dims, strides, box, steps, swizzle = case
    bench = Bench()
    data = tensor(bench)
    raw = tensormap.encode_tiled(kind, data.ctypes.data, dims, strides, box, steps, 0, swizzle)
    where = descriptor(bench, raw)
    counts = [box[0]] + [-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True)]
    nbytes = size * int(np.prod(counts))
    unit = 16 // size
    places = [[0] * len(dims), [d - b for d, b in zip(dims, box, strict=True)]]
    for d in range(len(dims)):
        for shift in (-1, 1):
            places.append(
                [(shift * (unit if d == 0 else 1)) * (d == e) + (dims[e] // 2 * (d != e)) for e in range(len(dims))]
            )
            places[-1][0] -= places[-1][0] % unit
    places[1][0] -= places[1][0] % unit
    for i, coords in enumerate(places):
        start = BUF + 128 * (i % 3) if swizzle else BUF
        bench.barrier(BAR + 8 * i, 1, tx=nbytes)
        before = bench.cta.smem.data.copy()
        bench.run(LOAD.format(len(dims), "", ""), at(start), at(where, coords), at(BAR + 8 * i), lanes=5)
        assert (bench.cta.smem.data == before).all()  # nothing happens at issue
        bench.units.drain()
        want = expected_tile(data, dims, strides, size, box, coords, steps, swizzle, start, before)
        assert (bench.cta.smem.data == want).all(), coords
        assert bench.cta.mbarriers[BAR + 8 * i].tx == 0
    written = bench.cta.smem.init[BUF:]
    assert written.any() and bench.machine.stats["tma_loads"] == len(places)


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3, 4, 6])
def test_store_is_the_inverse_of_load(swizzle):
    bench = Bench()
    source, target = tensor(bench), bench.array(np.zeros(1 << 15, np.uint8), "target")
    box = {0: 128, 1: 32, 2: 64}.get(swizzle, 128)
    maps = [
        descriptor(bench, tensormap.encode_tiled(U8, a.ctypes.data, [256, 20], [272], [box, 7], [1, 1], 0, swizzle))
        for a in (source, target)
    ]
    bench.barrier(BAR, 1, tx=box * 7)
    bench.run(LOAD.format(2, ".tile", ".L2::cache_hint"), at(BUF), at(maps[0], [64, 5]), at(BAR), 0, lanes=0)
    bench.units.drain()
    bench.run(STORE.format(2, ".tile"), at(maps[1], [64, 5]), at(BUF))
    bench.run("cp.async.bulk.commit_group")
    block = bench.run("cp.async.bulk.wait_group", 0)
    assert block is not None and not target.any()
    bench.units.drain()
    assert block.ready() and bench.machine.stats["tma_stores"] == 1  # 32 lanes, one store
    inside = np.zeros(1 << 15, bool)
    inside[(np.arange(5, 12)[:, None] * 272 + np.arange(64, 64 + box)).ravel()] = True
    assert (target[inside] == source[inside]).all() and not target[~inside].any()
    assert not bench.machine.hazards


def test_wait_group_read_comes_before_the_write():
    bench = Bench()
    target = bench.array(np.zeros(4096, np.uint8), "target")
    where = descriptor(bench, tensormap.encode_tiled(U8, target.ctypes.data, [64, 8], [64], [64, 4], [1, 1]))
    bench.write_smem(BUF, np.full(256, 7, np.uint8))
    bench.run(STORE.format(2, ""), at(where, [0, 0]), at(BUF), lanes=0)
    bench.run("cp.async.bulk.commit_group", lanes=0)
    assert bench.run("cp.async.bulk.wait_group.read", 0, lanes=0) is not None
    (reading,) = bench.units.candidates()
    bench.units.complete(reading)
    bench.cta.smem.data[BUF : BUF + 256] = 9  # the source may be reused now
    bench.warp.pending = None
    assert bench.run("cp.async.bulk.wait_group.read", 0, lanes=0) is None
    assert bench.run("cp.async.bulk.wait_group", 0, lanes=0) is not None and not target.any()
    bench.units.drain()
    assert (target[:256] == 7).all()


def test_gather4_and_scatter4():
    bench = Bench()
    source, target = tensor(bench), bench.array(np.zeros(1 << 13, np.uint8), "target")
    make = [
        descriptor(bench, tensormap.encode_tiled(F16, a.ctypes.data, [64, 30], [144], [32, 1], [1, 1], 0, 2))
        for a in (source, target)
    ]
    rows = [7, 29, 0, 12]
    bench.barrier(BAR, 1, tx=4 * 64)
    load = "cp.async.bulk.tensor.2d.tile::gather4.shared::cluster.global.mbarrier::complete_tx::bytes"
    bench.run(load, at(BUF), at(make[0], [32, *rows]), at(BAR), lanes=0)
    bench.units.drain()
    for i, row in enumerate(rows):
        line = source[row * 144 + 64 : row * 144 + 128]
        got = [bench.cta.smem.data[swizzled(BUF + 64 * i + b, 2)] for b in range(64)]
        assert got == line.tolist()
    bench.run(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group", at(make[1], [0, 3, 30, 1, 2]), at(BUF)
    )
    bench.units.drain()
    for i, row in enumerate([3, 30, 1, 2]):
        if row < 30:  # row 30 does not exist: nothing is stored
            assert (target[row * 144 : row * 144 + 64] == source[rows[i] * 144 + 64 : rows[i] * 144 + 128]).all()
    assert target[30 * 144 :].max() == 0 and not bench.cta.mbarriers[BAR].tx


def test_gather4_row_out_of_bounds_is_zero():
    bench = Bench()
    source = tensor(bench)
    where = descriptor(bench, tensormap.encode_tiled(U8, source.ctypes.data, [64, 30], [64], [32, 1], [1, 1]))
    bench.barrier(BAR, 1, tx=128)
    load = "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    bench.run(load, at(BUF), at(where, [0, -1, 30, 29, 0]), at(BAR), lanes=0)
    bench.units.drain()
    got = bench.cta.smem.data[BUF : BUF + 128].reshape(4, 32)
    assert not got[:2].any() and (got[2] == source[29 * 64 : 29 * 64 + 32]).all() and (got[3] == source[:32]).all()


@pytest.mark.parametrize("space", ["shared::cta", "shared::cluster"])
def test_im2col_as_an_instruction(space):
    """4 x 3 images of 5 x 4 pixels, 3x3 filter at (2, 1): against a walk through the padded image."""
    bench = Bench()
    pixels = np.random.default_rng(2).integers(1, 250, (3, 4, 5, 16), dtype=np.uint8)
    data = bench.array(pixels, "images")
    raw = tensormap.encode_im2col(
        U8, data.ctypes.data, [16, 5, 4, 3], [16, 80, 320], [-1, -1], [-1, -1], 16, 37, [1] * 4
    )
    where = descriptor(bench, raw)
    bench.barrier(BAR, 1, tx=37 * 16)
    load = f"cp.async.bulk.tensor.4d.{space}.global.im2col.mbarrier::complete_tx::bytes"
    bench.run(load, at(BUF), at(where, [0, 2, 1, 0]), at(BAR), vector(2, 1), lanes=0)
    prefetch = "cp.async.bulk.prefetch.tensor.4d.L2.global.im2col.L2::cache_hint"
    bench.run(prefetch, at(where, [0, 2, 1, 0]), vector(2, 1), 0, lanes=0)
    bench.units.drain()
    padded = np.zeros((4, 6, 7, 16), np.uint8)
    padded[:3, 1:5, 1:6] = pixels
    walk = [(n, h, w) for n in range(4) for h in range(4) for w in range(5)]
    first = walk.index((0, 2, 3))  # start (w 2, h 1) counts from the lower corner (-1, -1)
    want = [padded[n, h + 1, w + 2] if w + 2 < 7 else np.zeros(16) for n, h, w in walk[first : first + 37]]
    assert (bench.cta.smem.data[BUF : BUF + 37 * 16].reshape(37, 16) == np.array(want)).all()


@pytest.mark.parametrize("op", ["", "max"])
def test_im2col_stores(op):
    """20 pixels of 2 x 3 images of 5 x 4, of which the last column is outside the box, from (w 1, h 2) on."""
    bench = Bench()
    before = np.random.default_rng(3).integers(1, 1 << 32, (2, 4, 5, 4), dtype=np.uint32)
    images = bench.array(before, "images")
    raw = tensormap.encode_im2col(2, images.ctypes.data, [4, 5, 4, 2], [16, 80, 320], [0, 0], [-1, 0], 4, 20, [1] * 4)
    where = descriptor(bench, raw)
    rows = np.random.default_rng(4).integers(1, 1 << 32, (20, 4), dtype=np.uint32)
    bench.write_smem(BUF, rows)
    stem = "cp.reduce.async" if op else "cp.async"
    opcode = f"{stem}.bulk.tensor.4d.global.shared::cta.{op + '.' if op else ''}im2col_no_offs.bulk_group"
    bench.run(opcode, at(where, [0, 1, 2, 0]), at(BUF), lanes=0)
    bench.units.drain()
    want = before.copy()
    walk = [(n, h, w) for n in range(2) for h in range(4) for w in range(4)]
    first = walk.index((0, 2, 1))
    for at_pixel, row in zip(walk[first : first + 20], rows, strict=True):
        want[at_pixel] = np.maximum(want[at_pixel], row) if op else row
    assert (images == want).all()


def test_multicast_signals_every_destination():
    bench = Bench(ctas=4)
    data = tensor(bench)
    where = descriptor(bench, tensormap.encode_tiled(U8, data.ctypes.data, [128, 8], [128], [64, 4], [1, 1]))
    for rank in range(4):
        bench.barrier(BAR, 1, tx=256 if rank in (0, 2, 3) else 0, rank=rank)
    operands = (at(BUF), at(where, [16, 2]), at(BAR), 0b1101)
    bench.run(LOAD.format(2, "", ".multicast::cluster"), *operands, lanes=0)
    assert len(bench.units) == 3
    bench.units.drain(lambda candidates: candidates[-1])
    for rank, cta in enumerate(bench.cluster.ctas):
        assert cta.mbarriers[BAR].tx == 0
        got = cta.smem.data[BUF : BUF + 256].reshape(4, 64)
        want = data.reshape(-1, 128)[2:6, 16:80] if rank != 1 else 0
        assert (got == want).all()


@pytest.mark.parametrize("parity", [0, 1])
def test_pairs_signal_the_cta_of_the_barriers_parity(parity):
    bench = Bench(ctas=4)
    data = tensor(bench)
    where = descriptor(bench, tensormap.encode_tiled(U8, data.ctypes.data, [128, 8], [128], [64, 4], [1, 1]))
    for rank in range(4):
        bench.barrier(BAR, 1, rank=rank)
    opcode = LOAD.format(2, ".tile", ".multicast::cluster.L2::cache_hint.cta_group::2")
    bench.run(opcode, at(BUF), at(where, [0, 0]), at(parity << 24 | BAR), 0b0111, 0, lanes=0)
    bench.units.drain()
    signalled = [cta.mbarriers[BAR].tx for cta in bench.cluster.ctas]
    want = [0, 0, 0, 0]
    for rank in (0, 1, 2):
        want[rank & ~1 | parity] -= 256
    assert signalled == want


def test_pair_without_multicast():
    bench = Bench(ctas=2)
    data = tensor(bench)
    where = descriptor(bench, tensormap.encode_tiled(U8, data.ctypes.data, [128, 8], [128], [64, 4], [1, 1]))
    bench.barrier(BAR, 1, tx=256)
    bench.barrier(BAR, 1, rank=1)
    early = "cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes"
    bench.run(early, at(1 << 24 | BUF), at(where, [0, 0]), at(BAR), lanes=0)
    bench.units.drain()
    assert bench.cta.mbarriers[BAR].tx == 0 and bench.cluster.ctas[1].smem.init[BUF]
    with pytest.raises(HazardError, match="mbarrier in CTA 0"):
        bench.run(LOAD.format(2, "", ""), at(1 << 24 | BUF), at(where, [0, 0]), at(BAR), lanes=0)
    with pytest.raises(MemoryFault, match="not in this CTA"):
        opcode = LOAD.format(2, "", "").replace("shared::cluster", "shared::cta")
        bench.run(opcode, at(1 << 24 | BUF), at(where, [0, 0]), at(1 << 24 | BAR), lanes=0)


def test_the_barrier_of_a_pair_may_be_the_peers_in_the_cta_variant():
    """cuDNN's sparse attention gathers into its own CTA and signals the leader's barrier."""
    bench = Bench(ctas=2)
    data = tensor(bench)
    where = descriptor(bench, tensormap.encode_tiled(U8, data.ctypes.data, [128, 8], [128], [64, 4], [1, 1]))
    bench.barrier(BAR, 1, tx=256, rank=1)
    opcode = LOAD.format(2, ".tile", ".cta_group::2").replace("shared::cluster", "shared::cta")
    bench.run(opcode, at(BUF), at(where, [0, 0]), at(1 << 24 | BAR), lanes=0)
    bench.units.drain()
    assert bench.cluster.ctas[1].mbarriers[BAR].tx == 0 and bench.cta.smem.init[BUF]
    with pytest.raises(MemoryFault, match="not in this CTA"):
        bench.run(opcode, at(1 << 24 | BUF), at(where, [0, 0]), at(BAR), lanes=0)
    with pytest.raises(MemoryFault, match="not in this CTA"):
        single = opcode.replace(".cta_group::2", "")
        bench.run(single, at(BUF), at(where, [0, 0]), at(1 << 24 | BAR), lanes=0)


@pytest.mark.parametrize(("kind", "packed", "bits"), [(U4, 16, 4), (U4_PADDED, 8, 4), (U6_PADDED, 12, 6)])
def test_sub_byte_types(kind, packed, bits):
    """Sixteen elements take 8 or 12 packed bytes; padded types spread them to 16 and count the packed bytes."""
    bench = Bench()
    data = tensor(bench)
    stride = 128 * 2 * bits // 8
    raw = tensormap.encode_tiled(kind, data.ctypes.data, [256, 6], [stride], [128, 3], [1, 1], 0, 0)
    where = descriptor(bench, raw)
    row = 128 * bits // 8
    bench.barrier(BAR, 1, tx=3 * row)
    bench.cta.smem.data[:] = 0xEE
    bench.run(LOAD.format(2, "", ""), at(BUF), at(where, [128, 2]), at(BAR), lanes=0)
    bench.units.drain()
    assert bench.cta.mbarriers[BAR].tx == 0
    rows = np.stack([data[(2 + r) * stride + row : (2 + r) * stride + 2 * row] for r in range(3)])
    got = bench.cta.smem.data[BUF : BUF + 3 * (row if kind == U4 else 128)].reshape(3, -1, 16)
    assert (got[:, :, :packed] == rows.reshape(3, -1, packed)).all() and (got[:, :, packed:] == 0xEE).all()
    if kind != U4:
        with pytest.raises(HazardError, match="multiple of 128 elements"):
            bench.run(LOAD.format(2, "", ""), at(BUF), at(where, [64, 0]), at(BAR), lanes=0)
        with pytest.raises((HazardError, UnsupportedInstruction)):
            bench.run(STORE.format(2, ""), at(where, [0, 0]), at(BUF), lanes=0)


def test_reduction_runs_once_per_lane():
    bench = Bench()
    target = bench.array(np.arange(64, dtype=np.float32), "target")
    where = descriptor(bench, tensormap.encode_tiled(F32, target.ctypes.data, [16, 4], [64], [16, 4], [1, 1]))
    bench.write_smem(BUF, np.full(64, 0.5, np.float32))
    opcode = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group.L2::cache_hint"
    bench.run(opcode, at(where, [0, 0]), at(BUF), 0, lanes=[0, 7])
    bench.units.drain()
    assert (target == np.arange(64) + 1).all() and bench.machine.stats["tma_reductions"] == 2
    with pytest.raises(HazardError, match="no type f32"):
        bench.run(opcode.replace(".add.", ".min."), at(where, [0, 0]), at(BUF), 0, lanes=0)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_completion_gives_the_same_bytes(seed):
    rng = np.random.default_rng(seed)
    bench = Bench()
    data, target = tensor(bench), bench.array(np.zeros(1 << 13, np.uint8), "target")
    source = descriptor(bench, tensormap.encode_tiled(U8, data.ctypes.data, [256, 64], [256], [64, 8], [1, 1], 0, 2))
    output = descriptor(bench, tensormap.encode_tiled(U8, target.ctypes.data, [256, 32], [256], [64, 8], [1, 1], 0, 2))
    bench.barrier(BAR, 1, tx=8 * 512)
    for i in range(8):
        bench.run(LOAD.format(2, "", ""), at(BUF + 512 * i), at(source, [64 * (i % 4), 8 * (i // 4)]), at(BAR), lanes=0)

    def choose(candidates):
        return candidates[rng.integers(len(candidates))]

    bench.units.drain(choose)
    for i in range(8):
        bench.run(STORE.format(2, ""), at(output, [64 * (i % 4), 8 * (i // 4)]), at(BUF + 512 * i), lanes=0)
    bench.units.drain(choose)
    assert (target[: 16 * 256] == data[: 16 * 256]).all() and bench.units.reordered > 0


def ready_store(bench):
    target = bench.array(np.zeros(1024, np.uint8), "target")
    return descriptor(bench, tensormap.encode_tiled(U8, target.ctypes.data, [64, 16], [64], [64, 4], [1, 1]))


def test_source_hazards():
    bench = Bench()
    where = ready_store(bench)
    bench.write_smem(BUF, np.ones(200, np.uint8))
    bench.run(STORE.format(2, ""), at(where, [0, 0]), at(BUF), lanes=0)
    bench.units.drain()
    assert bench.machine.hazards == ["uninitialised_smem"]
    bench.write_smem(BUF, np.ones(256, np.uint8))
    bench.cta.smem.dirty[(BUF + 32) >> 4] = 2
    bench.run(STORE.format(2, ""), at(where, [0, 0]), at(BUF), lanes=0)
    bench.units.drain()
    assert bench.machine.hazards[1:] == ["missing_proxy_fence"]
    bench.run("fence.proxy.async.shared::cta", warp=bench.cta.warps[1])
    bench.run(STORE.format(2, ""), at(where, [0, 0]), at(BUF), lanes=0)
    bench.units.drain()
    assert len(bench.machine.hazards) == 2


def test_the_descriptor_must_stay_as_it_is():
    bench = Bench()
    where = ready_store(bench)
    bench.write_smem(BUF, np.ones(256, np.uint8))
    bench.run(STORE.format(2, ""), at(where, [0, 0]), at(BUF), lanes=0)
    bench.gmem.view(where, 128, write=True)[32] ^= 1
    bench.units.drain()
    assert bench.machine.hazards == ["descriptor_modified"]


def test_exit_with_copies_in_flight():
    bench = Bench()
    where = ready_store(bench)
    bench.barrier(BAR, 1, tx=256)
    bench.run(LOAD.format(2, "", ""), at(BUF), at(where, [0, 0]), at(BAR), lanes=0)
    bench.run(STORE.format(2, ""), at(where, [0, 0]), at(BUF), lanes=0)
    bench.units.cta_exited(bench.cta)
    assert sorted(bench.machine.hazards) == ["async_read_after_exit", "async_write_after_exit"]


def test_a_store_overwrites_the_padding_of_a_row():
    bench = Bench()
    target = bench.array(np.zeros(256, np.uint8), "target")
    where = descriptor(bench, tensormap.encode_tiled(U8, target.ctypes.data, [21, 4], [48], [32, 2], [1, 1]))
    bench.write_smem(BUF, np.full(64, 5, np.uint8))
    bench.run(STORE.format(2, ""), at(where, [0, 1]), at(BUF), lanes=0)
    bench.units.drain()
    assert bench.machine.hazards == ["tma_store_padding"]
    assert (np.nonzero(target)[0] == [48 * r + c for r in (1, 2) for c in range(32)]).all()


def test_only_the_last_row_can_lack_padding():
    """Memory ends with the last element, as that of a view does: an H200 overwrites the padding of the other rows."""
    bench = Bench()
    target = bench.array(np.zeros(48 * 2 + 21, np.uint8), "target")
    where = descriptor(bench, tensormap.encode_tiled(U8, target.ctypes.data, [21, 3], [48], [32, 2], [1, 1]))
    bench.write_smem(BUF, np.full(64, 5, np.uint8))
    bench.run(STORE.format(2, ""), at(where, [0, 1]), at(BUF), lanes=0)
    bench.units.drain()
    assert bench.machine.hazards == ["tma_store_padding"]
    assert np.nonzero(target)[0].tolist() == [48 + c for c in range(32)] + [96 + c for c in range(21)]


@pytest.mark.parametrize(
    ("coords", "start", "error", "text"),
    [
        ([3, 0], BUF, HazardError, "multiple of 16 bytes"),
        ([0, 0], BUF + 16, HazardError, "multiple of 128"),
        ([0, 0], 64 * 1024 - 128, MemoryFault, "run over the end"),
        ([0], BUF, EmulatorError, "takes 2 coordinates"),
    ],
)
def test_load_errors(coords, start, error, text):
    bench = Bench()
    where = ready_store(bench)
    bench.barrier(BAR)
    with pytest.raises(error, match=text):
        bench.run(LOAD.format(2, "", ""), at(start), at(where, coords), at(BAR), lanes=0)


def test_more_errors():
    bench = Bench()
    where = ready_store(bench)
    with pytest.raises(HazardError, match="no mbarrier"):
        bench.run(LOAD.format(2, "", ""), at(BUF), at(where, [0, 0]), at(BAR), lanes=0)
    bench.barrier(BAR)
    with pytest.raises(HazardError, match="3-dimensional copy with a descriptor of rank 2"):
        bench.run(LOAD.format(3, "", ""), at(BUF), at(where, [0, 0, 0]), at(BAR), lanes=0)
    with pytest.raises(MemoryFault, match="outside every allocation"):
        bench.run(LOAD.format(2, "", ""), at(BUF), at(1 << 20, [0, 0]), at(BAR), lanes=0)
    with pytest.raises(MemoryFault, match="aligned to 64"):
        bench.run(LOAD.format(2, "", ""), at(BUF), at(where + 16, [0, 0]), at(BAR), lanes=0)
    with pytest.raises(MemoryFault, match="must lie in param"):
        bench.run(LOAD.format(2, "", ""), at(BUF), at(0x7E << 56 | BUF, [0, 0]), at(BAR), lanes=0)
    with pytest.raises(HazardError, match="multicast mask 0x0002"):
        bench.run(LOAD.format(2, "", ".multicast::cluster"), at(BUF), at(where, [0, 0]), at(BAR), 2, lanes=0)
    with pytest.raises(HazardError, match="negative"):
        bench.run(STORE.format(2, ""), at(where, [0, -1]), at(BUF), lanes=0)
    with pytest.raises(EmulatorError, match="operands do not match"):
        bench.run(LOAD.format(2, "", ""), at(BUF), at(where, [0, 0]), at(BAR), 7, lanes=0)
    with pytest.raises(HazardError, match="im2col copy with a tiled descriptor"):
        bench.run(LOAD.format(3, ".im2col", ""), at(BUF), at(cube(bench), [0, 0, 0]), at(BAR), vector(0), lanes=0)


def cube(bench):
    data = tensor(bench, 4096, seed=9)
    return descriptor(bench, tensormap.encode_tiled(U8, data.ctypes.data, [32, 8, 8], [32, 256], [16, 4, 4], [1] * 3))


@pytest.mark.parametrize(
    ("word", "bits", "text"),
    [
        (2, 1 << 2, "unknown bits"),
        (2, 1 << 25, "unknown bits"),
        (2, 14 << 7, "element type"),
        (7, 1 << 16, "word 7"),
        (13, 1 << 16, "word 13"),
        (15, 1, "word 15 of a tiled map"),
    ],
)
def test_unknown_descriptor_bits_are_refused(word, bits, text):
    raw = bytearray(tensormap.encode_tiled(U8, 4096, [64, 16], [64], [64, 4], [1, 1]))
    value = struct.unpack_from("<I", raw, 4 * word)[0]
    struct.pack_into("<I", raw, 4 * word, value | bits)
    bench = Bench()
    bench.barrier(BAR)
    with pytest.raises(HazardError, match=text):
        bench.run(LOAD.format(2, "", ""), at(BUF), at(descriptor(bench, bytes(raw)), [0, 0]), at(BAR), lanes=0)


@pytest.mark.parametrize(
    ("change", "text"),  # of a map whose maker did not ask the driver
    [
        ({"address": 4096 + 8}, "multiples of 16"),
        ({"box": (24, 4)}, "24 elements of u8, must be a multiple of 16 bytes"),
        ({"box": (64, 4), "swizzle": 1}, "64 bytes, must fit in the 32 bytes"),
        ({"box": (32, 4), "swizzle": 1}, ""),
        ({"nan_fill": True}, "u8 cannot be filled with NaN"),
        ({"element": tensormap.ELEMENT_TYPES[U4_PADDED]}, "64 and 256, must be 128"),
        ({"element": tensormap.ELEMENT_TYPES[U4_PADDED], "box": (128, 4)}, ""),
        ({"element": tensormap.ELEMENT_TYPES[U4_PADDED], "box": (128, 4), "dims": (192, 16)}, "128 and 192, must be"),
        ({"element": tensormap.ELEMENT_TYPES[U4_PADDED], "box": (128, 4), "strides": (272,)}, "multiples of 32"),
        (
            {"element": tensormap.ELEMENT_TYPES[U4_PADDED], "box": (128, 4), "swizzle": 3, "atom": 2},
            "no 128-byte swizzle with atom code 2",
        ),
    ],
)
def test_maps_that_no_copy_can_use_are_refused(change, text):
    good = tensormap.decode(tensormap.encode_tiled(U8, 4096, [256, 16], [256], [64, 4], [1, 1])[:64])
    changed = dataclasses.replace(good, **change)
    assert tensormap.decode(tensormap.encode(changed)[:64]) == changed
    bench = Bench()
    bench.barrier(BAR)
    raw = tensormap.encode(changed)
    run = functools.partial(bench.run, LOAD.format(2, "", ""), at(BUF), at(descriptor(bench, raw), [0, 0]), at(BAR))
    if not text:
        run(lanes=0)
        return
    with pytest.raises(HazardError, match=text):
        run(lanes=0)


@pytest.mark.parametrize(
    "opcode",
    [
        LOAD.format(4, ".im2col::w", ""),
        LOAD.format(4, ".im2col::w::128", ""),
        LOAD.format(2, ".tile::scatter4", ""),
        STORE.format(2, ".tile::gather4"),
        "cp.async.bulk.tensor.6d.shared::cta.global.mbarrier::complete_tx::bytes",
        "cp.async.bulk.tensor.2d.shared::cta.global.bulk_group",
        "cp.async.bulk.prefetch.tensor.2d.L1.global",
    ],
)
def test_refused(opcode):
    with pytest.raises(UnsupportedInstruction):
        isa.lookup(opcode)


def test_a_modifier_twice_is_refused():
    load = "cp.async.bulk.tensor.2d.{}.shared::cta.global.{}.mbarrier::complete_tx::bytes.{}.{}"
    with pytest.raises(UnsupportedInstruction):
        isa.lookup(load.format("tile", "tile", "cta_group::1", "L2::cache_hint"))
    with pytest.raises(UnsupportedInstruction):
        isa.lookup(load.format("tile", "cta_group::1", "cta_group::2", "L2::cache_hint"))


def test_prefetch_checks_and_moves_nothing():
    bench = Bench()
    where = ready_store(bench)
    bench.run("cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint", at(where, [0, 0]), 0, lanes=0)
    bench.run("cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4", at(where, [0, 1, 2, 3, 4]), lanes=0)
    assert len(bench.units) == 0 and bench.machine.stats["tma_prefetches"] == 2


@pytest.mark.parametrize("opcode", [LOAD.format(4, "", ""), STORE.format(4, "")])
def test_addresses_wrap_around(opcode):
    """A ragged tensor of quack and Triton: coordinates 1 and 2 count from a size of 2^30 back to a sequence's end, and
    the stride of dimension 2 makes what both have added a multiple of 2^64."""
    bench, pitch, many, start, length = Bench(), 64, 1 << 30, 7, 3
    data = tensor(bench)
    strides, dims = [pitch, (1 << 34) - pitch, pitch], [64, many, (1 << 31) - 1, (1 << 31) - 1]
    raw = tensormap.encode_tiled(U8, data.ctypes.data, dims, strides, [64, 5, 1, 1], [1, 1, 1, 1])
    bench.barrier(BAR, 1, tx=5 * 64)
    where, coords = descriptor(bench, raw), [0, many - length, many, start + length]
    before, there = data.copy(), slice(start * pitch, (start + length) * pitch)
    if "shared::cluster.global" in opcode:
        bench.run(opcode, at(BUF), at(where, coords), at(BAR), lanes=0)
        bench.units.drain()
        got = bench.cta.smem.data[BUF : BUF + 5 * 64]
        assert (got[: length * 64] == data[there]).all() and not got[length * 64 :].any()
    else:
        bench.write_smem(BUF, np.full(5 * 64, 7, np.uint8))
        bench.run(opcode, at(where, coords), at(BUF), lanes=0)
        bench.units.drain()
        before[there] = 7
    assert (data == before).all()
