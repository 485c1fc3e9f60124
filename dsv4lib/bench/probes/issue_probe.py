"""Measure how fast a warp sends tiles of scattered rows to shared memory. By the way it issues its copies (Hopper).

A tile is 64 keys x 512 dimensions, 128 copies of 4 rows x 128 bytes, as `ops.fmha.load` gathers it (`gather4` is
Blackwell's; here boxes of 4 adjacent rows). Loader warps bring tile after tile into three stages, and
use a stage again when its bytes have landed: nothing but loads.

    lanes     16 lanes have 4 rows each and issue 8 copies. A copy takes its operands from uniform registers, so the
              compiler makes a loop of each instruction: elect a lane, move its operands, issue, until all have
    elected   one lane issues the 8 copies of 4 rows, then of the next 4: what differs is moved once for 8 copies
    whole     8 boxes of 64 rows: not a gather, the floor

    python -m dsv4lib.bench.probes.issue_probe --record issue_times.csv        (on the GPU)

data/bench/issue_times.csv is the record of an H200.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, memory

from dsv4lib.bench.probes import common as probes
from dsv4lib.dsl import boxes
from dsv4lib.dsl.tensors import Fakes, wrap

ROWS, DIM, CHUNK, BOX_ROWS, STAGES, THREADS = 64, 512, 64, 4, 3, 256
GROUPS, CHUNKS = ROWS // BOX_ROWS, DIM // CHUNK
TILE_BYTES, CHUNK_BYTES = ROWS * DIM * 2, ROWS * CHUNK * 2
POOL, TILES, REPLAYS = 4096, 64, 9
LISTS = ("none", "in line", "ahead")  # row numbers: computed, read when the tile needs them, or a tile earlier
CASES = (
    *(("lanes", 1, n) for n in LISTS),
    *(("lanes", n, "ahead") for n in (2, 4)),
    *(("elected", 1, n) for n in LISTS),
    *(("elected", n, "ahead") for n in (2, 3, 4, 8)),
    ("whole", 1, "none"),
)


class Loads:
    """Loader warps alone; see the module docstring.

    Args:
        variant: "lanes", "elected" or "whole"; warps: that load, a share of every tile each; lists: one of `LISTS`.
    """

    def __init__(self, variant: str, warps: int, lists: str):
        self.variant, self.warps, self.lists = variant, warps, lists

    def __repr__(self) -> str:
        return f"Loads({self.variant}, {self.warps}, {self.lists})"

    def fake_args(self) -> tuple:
        """Return what it is compiled with."""
        fakes = Fakes()
        tensors = fakes(BFloat16, "rd", 16), fakes(Int32, "tg"), fakes(BFloat16, "ctk", 16), fakes(Int64, "cm")
        return *tensors, cuda.CUstream(0)

    @cute.jit
    def __call__(
        self, mKeys: cute.Tensor, mIndex: cute.Tensor, mLast: cute.Tensor, mClocks: cute.Tensor, stream: cuda.CUstream
    ):
        """Keys [R, 512] bf16; index [tiles, 16] int32, first of 4 rows each; last [CTAs, 8, 4096] bf16, the last tile
        as it lies in shared memory; clocks [CTAs, 3] int64: start, all issued, all landed."""

        @cute.struct
        class Storage:
            tiles: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, STAGES * TILE_BYTES], 1024]
            barriers: cute.struct.MemRange[cutlass.Int64, STAGES]

        self.storage = Storage
        count, depth = mKeys.shape
        columns_first = cute.make_tensor(mKeys.iterator, cute.make_layout((depth, count), stride=(1, mKeys.stride[0])))
        rows = ROWS if cutlass.const_expr(self.variant == "whole") else BOX_ROWS
        atom = boxes.box_atom(columns_first, (CHUNK, rows))
        self.kernel(atom, mIndex, mLast, mClocks).launch(
            grid=(mClocks.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, mIndex: cute.Tensor, mLast: cute.Tensor, mClocks: cute.Tensor):
        """Set up, load all tiles, wait for the last, hand it out."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tidx, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        storage = memory.SmemAllocator().allocate(self.storage)
        barriers, tiles = storage.barriers.data_ptr(), storage.tiles.data_ptr().toint()
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(STAGES):
                    cute.arch.mbarrier_init(barriers + i, self.warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        count = mIndex.shape[0]
        if warp < self.warps:
            start = cute.arch.clock64()
            self.load(atom, mIndex, tiles, barriers, warp)
            issued = cute.arch.clock64()
            for i in cutlass.range(cutlass.max(count - STAGES, 0), count, unroll=1):
                cute.arch.mbarrier_wait(barriers + i % STAGES, i // STAGES % 2)
            if tidx == 0:
                mClocks[cta, 0], mClocks[cta, 1], mClocks[cta, 2] = start, issued, cute.arch.clock64()
        cute.arch.sync_threads()  # a wait for a phase could pass before the one ahead of it has ended
        cute.arch.mbarrier_wait(barriers + (count - 1) % STAGES, (count - 1) // STAGES % 2)
        source = tiles + (count - 1) % STAGES * TILE_BYTES + tidx * 16
        for chunk in cutlass.range(CHUNKS, unroll=1):
            for i in cutlass.range(CHUNK_BYTES // (16 * THREADS), unroll=1):
                address = source + chunk * CHUNK_BYTES + i * (16 * THREADS)
                smem = cute.make_ptr(BFloat16, address, cute.AddressSpace.smem, assumed_align=16)
                place = cute.local_tile(mLast[cta, chunk, None], (8,), (i * THREADS + tidx,))
                cute.autovec_copy(cute.make_tensor(smem, 8), place)

    @cute.jit
    def load(self, atom: cute.CopyAtom, mIndex: cute.Tensor, tiles: Int32, barriers: cute.Pointer, warp: Int32):
        """Load as a loader warp: its share of every tile, group after group of 4 rows."""
        lane = cute.arch.lane_idx()
        first = warp * GROUPS // self.warps
        share = (warp + 1) * GROUPS // self.warps - first
        group = first + lane
        row = self.row(mIndex, Int32(0), group)
        for tile in cutlass.range(mIndex.shape[0], unroll=1):
            if cutlass.const_expr(self.lists == "in line"):
                row = self.row(mIndex, tile, group)
            following = row
            if cutlass.const_expr(self.lists == "ahead"):
                following = self.row(mIndex, cutlass.min(tile + 1, mIndex.shape[0] - 1), group)
            stage = tile % STAGES
            barrier = barriers + stage
            if tile >= STAGES:
                cute.arch.mbarrier_wait(barrier, (tile // STAGES - 1) % 2)
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, TILE_BYTES // GROUPS * share)
            cute.arch.sync_warp()
            self.issue(atom, tiles + stage * TILE_BYTES, barrier, row, first, share)
            row = following
            if cutlass.const_expr(self.lists == "none"):
                row = (row + 52) % (POOL - ROWS)

    @cute.jit
    def row(self, mIndex: cute.Tensor, tile: Int32, group: Int32):
        """Find the first row of a group; a lane without one has a number all the same."""
        return mIndex[tile, cutlass.min(group, GROUPS - 1)]

    @cute.jit
    def issue(self, atom: cute.CopyAtom, target: Int32, barrier: cute.Pointer, row: Int32, first: Int32, share: Int32):
        """Issue this warp's copies of a tile. They are of ``share`` groups of 4 rows from ``first`` on."""
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.variant == "whole"):
            with cute.arch.elect_one():
                for chunk in cutlass.range_constexpr(CHUNKS):
                    boxes.load_box(atom, target + chunk * CHUNK_BYTES, barrier, (Int32(chunk * CHUNK), row))
        elif cutlass.const_expr(self.variant == "lanes"):
            if lane < share:
                self.group(atom, target + (first + lane) * (BOX_ROWS * 2 * CHUNK), barrier, row)
        else:
            for i in cutlass.range(share, unroll=1):
                of_group = cute.arch.shuffle_sync(row, i)
                with cute.arch.elect_one():
                    self.group(atom, target + (first + i) * (BOX_ROWS * 2 * CHUNK), barrier, of_group)

    @cute.jit
    def group(self, atom: cute.CopyAtom, target: Int32, barrier: cute.Pointer, row: Int32):
        """Issue the 8 copies of 4 rows."""
        for chunk in cutlass.range_constexpr(CHUNKS):
            boxes.load_box(atom, target + chunk * CHUNK_BYTES, barrier, (Int32(chunk * CHUNK), row))


@dataclass(frozen=True)
class Rate:
    """Clocks a tile of `TILES`, of the median CTA. Issued: until the last copy was sent; B/clk: of a tile's 64 KiB."""

    variant: str
    warps: int
    lists: str
    ctas: int
    issue_clk: float
    tile_clk: float
    bytes_clk: float


class Bench:
    """Tensors of the probe on the current GPU."""

    def __init__(self, ctas: int, tiles: int = TILES):
        import torch

        self.ctas, self.tiles = ctas, tiles
        self.keys = torch.randn(POOL, DIM, device="cuda").bfloat16()
        group = torch.arange(tiles)[:, None] * 37 + torch.arange(GROUPS) * 13
        self.index = (group % (POOL // BOX_ROWS) * BOX_ROWS).int().cuda()
        self.last = torch.zeros(ctas, CHUNKS, ROWS * CHUNK, dtype=torch.bfloat16, device="cuda")
        self.clocks = torch.zeros(ctas, 3, dtype=torch.int64, device="cuda")

    def call(self, code: Any) -> None:
        """Launch it on torch's current stream."""
        import torch

        keys, index = wrap("keys", self.keys, BFloat16, (None, DIM), 16), wrap("index", self.index, Int32, (None, None))
        last = wrap("last", self.last, BFloat16, (None, CHUNKS, ROWS * CHUNK), 16)
        code.function(keys, index, last, wrap("clocks", self.clocks, Int64, (None, 3)), probes.stream())
        torch.cuda.synchronize()

    def check(self, variant: str, lists: str) -> None:
        """Check that the last tile is what its rows say, swizzled.

        Raises:
            RuntimeError: it is not.
        """
        import torch

        first = self.index[-1].long()
        if lists == "none":
            first = self.index[0].long()
            for _ in range(self.tiles - 1):
                first = (first + 52) % (POOL - ROWS)
        count = ROWS if variant == "whole" else BOX_ROWS
        first = first[:1] if variant == "whole" else first
        rows = (first[:, None] + torch.arange(count, device=first.device)).flatten()
        tile = self.keys[rows].view(ROWS, CHUNKS, 8, 8).transpose(0, 1)
        place = torch.arange(8, device=first.device)[None] ^ (torch.arange(ROWS, device=first.device) % 8)[:, None]
        wanted = tile.gather(2, place[None, :, :, None].expand(CHUNKS, ROWS, 8, 8)).reshape(CHUNKS, -1)
        if not torch.equal(self.last, wanted.expand_as(self.last)):
            raise RuntimeError(f"{variant}: the last tile is not what its rows say")
        self.last.zero_()

    def measure(self, case: tuple[str, int, str], code: Any) -> Rate:
        """Measure the median of replays, checked."""
        found = []
        for _ in range(REPLAYS):
            self.call(code)
            self.check(case[0], case[2])
            start, issued, landed = self.clocks.cpu().double().unbind(1)
            found.append(((issued - start).median().item() / self.tiles, (landed - start).median().item() / self.tiles))
        issue, tile = (statistics.median(column) for column in zip(*found[1:] or found, strict=True))
        return Rate(*case, self.ctas, issue, tile, TILE_BYTES / max(tile, 1e-9))


def compiled(arch: str = "sm_90a", processes: int = 1, cases: tuple = CASES) -> dict[tuple[str, int, str], Any]:
    """Return `Loads` by case, from the cache of compiled kernels."""
    names = "variant", "warps", "lists"
    wanted = [(Loads, dict(zip(names, case, strict=True)), Loads.fake_args, arch) for case in cases]
    return dict(zip(cases, probes.get_all(wanted, processes), strict=True))


def run(processes: int) -> list[Rate]:
    """Measure all cases on the GPU here, one CTA alone and one an SM."""
    import torch

    codes, rows = compiled(processes=processes), []
    for ctas in (1, torch.cuda.get_device_properties(0).multi_processor_count):
        bench = Bench(ctas)
        for case, code in codes.items():
            rows.append(bench.measure(case, code))
            print(probes.line(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    from dsv4lib.bench.probes import issue_probe  # what another process compiles must not be of __main__

    probes.main(__doc__, issue_probe.Rate, issue_probe.run)
