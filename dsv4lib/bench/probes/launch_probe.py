"""Measure what a launch like attention's costs before its first byte is there. By two small kernels (Hopper).

    graph    flush L2 (or not) | before: writes Q, a count and an index list | after: the set-up of an attention kernel

`After` sets up what `ops.fmha.sm100` does, as far as Hopper has it: 226 KiB of shared memory, 26 mbarriers, tensor
maps, 384 threads, alone or in pairs; then a count, one box of Q ahead of all, Q, an index list and its keys, a little
work on each element, and O. Q and keys come by 128 copies of 4 rows x 128 bytes each, as the kernel gathers them (or
see `VARIANTS`). Tensor memory, and the `tcgen05` copies of Q, are missing. Every CTA notes %globaltimer at

    entered | ready (set-up done) | released (griddepcontrol.wait) | counted | first byte (of Q) | Q | keys | end

each by a warp that does nothing else, but for the loads' own. `Before` notes its end. What a launch exposes is the time
from the last end of `before` to the first byte: launch, set-up, fetch of the tensor maps, and the first load, whichever
of these the end of `before` does not cover.

    python -m dsv4lib.bench.probes.launch_probe --record launch_times.csv        (on the GPU)

data/bench/launch_times.csv is the record of an H200; `first_byte_pdl_clk` of rates.csv is its "counted".
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, memory
from cutlass.cute.nvgpu import cpasync

from dsv4lib.bench.probes import common as probes
from dsv4lib.dsl import boxes
from dsv4lib.dsl.tensors import Fakes, wrap

ROWS, DIM, CHUNK, BOX_ROWS = 64, 512, 64, 4
TILE_BYTES, STAGES, BARRIERS, THREADS = ROWS * DIM * 2, 3, 26, 384
PADDING = 226 * 1024 - STAGES * TILE_BYTES - 8 * BARRIERS
MARKS = ("entered", "ready", "released", "counted", "first byte", "Q", "keys", "end")
# Senders of copies: 16 lanes, 4 rows each; one lane all; the same, Q by boxes of 64 rows; three warps share the keys.
VARIANTS = ("lanes", "elected", "whole", "three")
FLUSH_BYTES, REPLAYS, FIRST, NODES = 384 << 20, 25, 3, 20  # the first replays do not count
LOAD_WARP, WATCHERS = 5, (8, 9, 10)


@cute.jit
def mark(mTimes: cute.Tensor, place: cutlass.Constexpr):
    """Read this CTA's %globaltimer, ns; one thread calls it."""
    token, half, _ = cute.arch.block_idx()
    _, halves, _ = cute.arch.grid_dim()
    mTimes[token * halves + half, place] = cute.arch.globaltimer()


class Before:
    """A small kernel that writes what `After` reads. It has a CTA a token, ``spin`` clocks of work in between.

    Args:
        trigger: launch dependents at once (`griddepcontrol.launch_dependents`); else they come when all CTAs have left.
        room: ask for an SM's memory as shared memory, in percent; None: the driver's choice. If an SM has to be idle to
            change the division, a CTA of `After` cannot share an SM with one that has little shared memory.
    """

    def __init__(self, trigger: bool, room: int | None = None):
        self.trigger, self.room = trigger, room

    def __repr__(self) -> str:
        return f"Before({self.trigger}, {self.room})"

    def fake_args(self) -> tuple:
        """Return what it is compiled with."""
        fakes = Fakes()
        lists = fakes(Int32, "tk"), fakes(Int32, "t")
        return fakes(BFloat16, "tmd", 16), *lists, fakes(Int64, "cs"), Int32(0), cuda.CUstream(0)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mIndex: cute.Tensor,
        mCount: cute.Tensor,
        mTimes: cute.Tensor,
        spin: Int32,
        stream: cuda.CUstream,
    ):
        """Q [T, 64, 512] bf16, index [T, 16] and count [T] int32. Times [CTAs, 3] int64: start, end, clocks between."""
        self.kernel(mQ, mIndex, mCount, mTimes, spin).launch(
            grid=(mQ.shape[0], 1, 1),
            block=(128, 1, 1),
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=self.room,
        )

    @cute.kernel
    def kernel(self, mQ: cute.Tensor, mIndex: cute.Tensor, mCount: cute.Tensor, mTimes: cute.Tensor, spin: Int32):
        """Write, wait a while, leave."""
        token, _, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(self.trigger):
            cute.arch.griddepcontrol_launch_dependents()
        start = cute.arch.clock64()
        if tidx == 0:
            mark(mTimes, 0)
        for row in cutlass.range(ROWS, unroll=1):
            cute.local_tile(mQ[token, row, None], (4,), (tidx,)).fill(BFloat16(1.0))
        if tidx < ROWS // BOX_ROWS:
            mIndex[token, tidx] = (token * 37 + tidx * 13) % 1024 * BOX_ROWS
        if tidx == 0:
            mCount[token] = Int32(ROWS)
        now = cute.arch.clock64()
        while now < start + spin:
            now = cute.arch.clock64()
        cute.arch.sync_threads()
        if tidx == 0:
            mTimes[token, 2] = cute.arch.clock64() - start
            mark(mTimes, 1)


class After:
    """A kernel with the set-up of attention, one tile of work.

    Args:
        pdl: a programmatic dependent launch; prefetch: of the tensor maps, in the set-up; cluster: CTAs of a token.
        variant: one of `VARIANTS`.
    """

    def __init__(self, pdl: bool, prefetch: bool, cluster: int = 1, variant: str = "lanes"):
        self.pdl, self.prefetch, self.cluster, self.variant = pdl, prefetch, cluster, variant
        self.q_rows = ROWS if variant in ("whole", "three") else BOX_ROWS
        self.warps = 3 if variant == "three" else 1

    def __repr__(self) -> str:
        return f"After({self.pdl}, {self.prefetch}, {self.cluster}, {self.variant})"

    def fake_args(self) -> tuple:
        """Return what it is compiled with."""
        fakes = Fakes()
        tensors = fakes(BFloat16, "qd", 16), fakes(BFloat16, "rd", 16), fakes(Int32, "tk"), fakes(Int32, "t")
        return *tensors, fakes(BFloat16, "od", 16), fakes(Int64, "cs"), cuda.CUstream(0)

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mKeys: cute.Tensor,
        mIndex: cute.Tensor,
        mCount: cute.Tensor,
        mO: cute.Tensor,
        mTimes: cute.Tensor,
        stream: cuda.CUstream,
    ):
        """Q and O [64 T, 512], keys [R, 512] bf16, index, count as `Before`. Times [CTAs, 8] int64, see `MARKS`."""

        @cute.struct
        class Storage:
            tiles: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, STAGES * TILE_BYTES], 1024]
            rest: cute.struct.MemRange[cutlass.Uint8, PADDING]
            barriers: cute.struct.MemRange[cutlass.Int64, BARRIERS]

        self.storage = Storage
        self.kernel(self.atom(mQ, self.q_rows), self.atom(mKeys), self.atom(mO), mIndex, mCount, mO, mTimes).launch(
            grid=(mCount.shape[0], self.cluster, 1),
            block=(THREADS, 1, 1),
            cluster=(1, self.cluster, 1) if self.cluster > 1 else None,
            stream=stream,
            use_pdl=self.pdl,
        )

    def atom(self, rows: cute.Tensor, of_box: int = BOX_ROWS) -> cute.CopyAtom:
        """Return the boxes of so many rows x 128 bytes."""
        count, depth = rows.shape
        columns_first = cute.make_tensor(rows.iterator, cute.make_layout((depth, count), stride=(1, rows.stride[0])))
        return boxes.box_atom(columns_first, (CHUNK, of_box), swizzle=False)

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        tma_keys: cute.CopyAtom,
        tma_window: cute.CopyAtom,
        mIndex: cute.Tensor,
        mCount: cute.Tensor,
        mO: cute.Tensor,
        mTimes: cute.Tensor,
    ):
        """Set up, wait, load Q and keys, add them, store."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tidx, _, _ = cute.arch.thread_idx()
        if tidx == LOAD_WARP * 32:
            mark(mTimes, 0)
        storage = memory.SmemAllocator().allocate(self.storage)
        barriers, tiles = storage.barriers.data_ptr(), storage.tiles.data_ptr().toint()
        if cutlass.const_expr(self.prefetch):
            if warp == LOAD_WARP:
                for atom in (tma_q, tma_keys, tma_window):
                    cpasync.prefetch_descriptor(atom)
        if warp == 0:
            with cute.arch.elect_one():
                for i in cutlass.range_constexpr(BARRIERS):
                    cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if tidx == LOAD_WARP * 32:
            mark(mTimes, 1)
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
        if warp >= LOAD_WARP and warp < LOAD_WARP + self.warps:
            self.load(tma_q, tma_keys, mIndex, mCount, tiles, barriers, mTimes, warp - LOAD_WARP)
        elif warp < 4:
            self.work(tiles, barriers, mO)
        for i, watcher in enumerate(WATCHERS):
            if tidx == watcher * 32:
                cute.arch.mbarrier_wait(barriers + i, 0)
                mark(mTimes, 4 + i)
        if warp < 4:
            cute.arch.barrier(barrier_id=1, number_of_threads=128)
            if tidx == 0:
                mark(mTimes, 7)

    @cute.jit
    def load(
        self,
        tma_q: cute.CopyAtom,
        tma_keys: cute.CopyAtom,
        mIndex: cute.Tensor,
        mCount: cute.Tensor,
        tiles: Int32,
        barriers: cute.Pointer,
        mTimes: cute.Tensor,
        loader: Int32,
    ):
        """Load as a load warp: what is read first decides what is loaded, as in attention."""
        token, half, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        if lane == 0 and loader == 0:
            mark(mTimes, 2)
        if mCount[token] > 0:
            if lane == 0 and loader == 0:
                mark(mTimes, 3)
                for i, nbytes in enumerate((self.q_rows * 2 * CHUNK, TILE_BYTES, TILE_BYTES)):
                    cute.arch.mbarrier_arrive_and_expect_tx(barriers + i, nbytes)
            cute.arch.sync_warp()
            if loader == 0:
                with cute.arch.elect_one():
                    boxes.load_box(tma_q, tiles + 2 * TILE_BYTES, barriers, (Int32(0), token * ROWS))
                self.tile(tma_q, tiles, barriers + 1, token * ROWS + lane * BOX_ROWS, self.q_rows, Int32(0), 1)
            row = mIndex[token, cutlass.min(lane, ROWS // BOX_ROWS - 1)]
            self.tile(tma_keys, tiles + TILE_BYTES, barriers + 2, row, BOX_ROWS, loader, self.warps)

    @cute.jit
    def tile(
        self,
        atom: cute.CopyAtom,
        tile: Int32,
        barrier: cute.Pointer,
        row: Int32,
        of_box: cutlass.Constexpr,
        loader: Int32,
        warps: cutlass.Constexpr,
    ):
        """64 rows in boxes of so many, a warp's share of them. ``row``: the first of the four of this lane, of 16."""
        lane = cute.arch.lane_idx()
        if cutlass.const_expr(self.variant == "lanes"):
            if lane < ROWS // BOX_ROWS:
                self.rows(atom, tile + lane * (BOX_ROWS * 2 * CHUNK), barrier, row)
        else:
            count = ROWS // of_box
            for i in cutlass.range(loader * count // warps, (loader + 1) * count // warps, unroll=1):
                first = cute.arch.shuffle_sync(row, i)
                with cute.arch.elect_one():
                    self.rows(atom, tile + i * (of_box * 2 * CHUNK), barrier, first)

    @cute.jit
    def rows(self, atom: cute.CopyAtom, target: Int32, barrier: cute.Pointer, row: Int32):
        """The boxes of a few rows, one for each 128 bytes of them."""
        for chunk in cutlass.range_constexpr(DIM // CHUNK):
            boxes.load_box(atom, target + chunk * (ROWS * 2 * CHUNK), barrier, (Int32(chunk * CHUNK), row))

    @cute.jit
    def work(self, tiles: Int32, barriers: cute.Pointer, mO: cute.Tensor):
        """Compute O = Q + keys with 128 threads. Element by element in the order of shared memory."""
        token, half, _ = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.mbarrier_wait(barriers + 1, 0)
        cute.arch.mbarrier_wait(barriers + 2, 0)
        place = tiles + tidx * 16
        for row in cutlass.range(ROWS // 2, unroll=2):
            parts = []
            for tile in cutlass.range_constexpr(2):
                address = place + tile * TILE_BYTES + row * (4 * DIM)
                smem = cute.make_ptr(BFloat16, address, cute.AddressSpace.smem, assumed_align=16)
                rPart = cute.make_rmem_tensor(8, BFloat16)
                cute.autovec_copy(cute.make_tensor(smem, 8), rPart)
                parts.append(rPart)
            rO = cute.make_rmem_tensor(8, BFloat16)
            rO.store((parts[0].load().to(Float32) + parts[1].load().to(Float32)).to(BFloat16))
            cute.autovec_copy(rO, cute.local_tile(mO[token * ROWS + 2 * row + tidx // 64, None], (8,), (tidx % 64,)))


@dataclass(frozen=True)
class Exposed:
    """A measured launch. Times in us are medians over replays, of the median CTA (``worst``: of the last one).

    Attributes:
        l2: "cold" (flushed before the pair) or "warm"; ctas, cluster: of `After`; before_us: how long `before` ran.
        pdl, trigger, prefetch, variant, room: as of `After` and `Before`; room 0: none reserved.
        entered_us .. end_us: of the marks, from the end of `before`; first_byte_clk: the same at ``clock_ghz``.
        total_us: from the end of `before` to the end of the last CTA.
    """

    l2: str
    ctas: int
    cluster: int
    before_us: float
    pdl: int
    trigger: int
    prefetch: int
    variant: str
    room: int
    clock_ghz: float
    entered_us: float
    ready_us: float
    released_us: float
    counted_us: float
    first_byte_us: float
    worst_first_byte_us: float
    q_us: float
    keys_us: float
    total_us: float
    first_byte_clk: float


class Bench:
    """The tensors of the probe and its compiled kernels, on the current GPU."""

    def __init__(self, tokens: int, cluster: int):
        import torch

        self.tokens, self.cluster = tokens, cluster
        ctas = tokens * cluster
        device = "cuda"
        self.q = torch.zeros(tokens, ROWS, DIM, dtype=torch.bfloat16, device=device)
        self.keys = torch.randn(4096, DIM, device=device).bfloat16()
        self.o = torch.empty_like(self.q)
        self.index = torch.zeros(tokens, ROWS // BOX_ROWS, dtype=torch.int32, device=device)
        self.count = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.before = torch.zeros(tokens, 3, dtype=torch.int64, device=device)
        self.after = torch.zeros(ctas, len(MARKS), dtype=torch.int64, device=device)
        self.flushed = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
        for _ in range(200):  # the clocks of an idle GPU are low
            self.flushed.add_(1)

    def calls(self, before: Any, after: Any, spin: int) -> Any:
        """Return a function that queues both kernels on torch's current stream."""

        def queue() -> None:
            stream = probes.stream()
            q, o = (x.flatten(0, 1) for x in (self.q, self.o))
            lists = wrap("index", self.index, Int32, (None, None)), wrap("count", self.count, Int32, (None,))
            first = wrap("q", self.q, BFloat16, (None, ROWS, DIM), 16), *lists
            before.function(*first, wrap("times", self.before, Int64, (None, None)), Int32(spin), stream)
            rows = tuple(wrap(n, x, BFloat16, (None, DIM), 16) for n, x in (("q", q), ("keys", self.keys)))
            times = wrap("times", self.after, Int64, (None, None))
            after.function(*rows, *lists, wrap("o", o, BFloat16, (None, DIM), 16), times, stream)

        return queue

    def measure(self, codes: tuple, spin: int, cold: bool, flags: tuple) -> Exposed:
        """Measure one combination. A graph of flush (or none) and `NODES` or one pair is replayed.

        Args:
            codes: (before, after), compiled; flags: (pdl, trigger, prefetch, variant, room).

        Raises:
            RuntimeError: O is not what the kernels should have made of what `before` wrote.
        """
        import torch

        queue = self.calls(*codes, spin)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            queue()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            if cold:
                self.flushed.add_(1)
            for _ in range(1 if cold else NODES):
                queue()
        found = []
        for _ in range(REPLAYS):
            for x in (self.after, self.q, self.count, self.index, self.o):
                x.zero_()
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            self._check()
            found.append(self._read())
        return self._row(found[FIRST:], cold, spin, flags)

    def _check(self) -> None:
        import torch

        rows = (self.index[:, :, None] + torch.arange(BOX_ROWS, device=self.index.device)).flatten().long()
        wanted = self.keys[rows].view(self.tokens, ROWS, DIM // CHUNK, CHUNK) + 1
        if not torch.equal(self.o, wanted.transpose(1, 2).reshape(self.o.shape)) or not bool((self.after > 0).all()):
            raise RuntimeError("the dependent kernel read what its predecessor had not written")

    def _read(self) -> dict[str, float]:
        """Of the last pair: marks of the median CTA after the end of `before`, ns."""
        before, after = self.before.cpu(), self.after.cpu()
        end = int(before[:, 1].max())
        out = {name: statistics.median((after[:, i] - end).tolist()) for i, name in enumerate(MARKS)}
        first, last = MARKS.index("first byte"), MARKS.index("end")
        out["worst"], out["total"] = (float((after[:, i] - end).max()) for i in (first, last))
        spans = (before[:, 1] - before[:, 0]).double()
        out["before"], out["ghz"] = end - float(before[:, 0].min()), float((before[:, 2] / spans).median())
        return out

    def _row(self, found: list[dict[str, float]], cold: bool, spin: int, flags: tuple) -> Exposed:
        m = {name: statistics.median(one[name] for one in found) for name in found[0]}
        us = {name: m[name] / 1e3 for name in m}
        ghz = m["ghz"]
        pdl, trigger, prefetch, variant, room = flags
        names = "entered", "ready", "released", "counted", "first byte", "worst", "Q", "keys", "total"
        return Exposed(
            "cold" if cold else "warm",
            self.tokens * self.cluster,
            self.cluster,
            us["before"],
            *map(int, (pdl, trigger, prefetch)),
            variant,
            room,
            ghz,
            *(us[name] for name in names),
            first_byte_clk=m["first byte"] * ghz,
        )


def compiled(arch: str = "sm_90a", processes: int = 1) -> tuple[dict[tuple, Any], dict[tuple, Any]]:
    """Return kernels from the compile cache.

    `Before` by (trigger, room), `After` by (pdl, prefetch, cluster, variant).
    """
    truth = False, True
    before = {key: (Before, {"trigger": key[0], "room": key[1]}) for key in itertools.product(truth, (None, 100))}
    names = "pdl", "prefetch", "cluster", "variant"
    keys = [(*key, VARIANTS[0]) for key in itertools.product(truth, truth, (1, 2))]
    keys += [(True, True, cluster, variant) for cluster, variant in itertools.product((1, 2), VARIANTS[1:])]
    after = {key: (After, dict(zip(names, key, strict=True))) for key in keys}
    codes = probes.get_all(
        [(kind, settings, kind.fake_args, arch) for kind, settings in (*before.values(), *after.values())], processes
    )
    return dict(zip(before, codes, strict=False)), dict(zip(after, codes[len(before) :], strict=True))


def run(processes: int) -> list[Exposed]:
    """Measure all combinations on the GPU here."""
    before, after = compiled(processes=processes)
    rows = []
    for tokens, cluster in ((132, 1), (64, 2), (8, 1)):
        bench = Bench(tokens, cluster)
        truth = False, True
        launches = [(False, False, False, VARIANTS[0])]  # (pdl, trigger, prefetch, variant)
        launches += [(True, *flags, VARIANTS[0]) for flags in itertools.product(truth, truth)]
        launches += [(True, True, True, variant) for variant in VARIANTS[1:]]
        for cold, spin, room in itertools.product((True, False), (2000, 8000, 20000), (None, 100)):
            for pdl, trigger, prefetch, variant in launches:
                codes = before[trigger, room], after[pdl, prefetch, cluster, variant]
                rows.append(bench.measure(codes, spin, cold, (pdl, trigger, prefetch, variant, room or 0)))
                print(probes.line(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    from dsv4lib.bench.probes import launch_probe  # what another process compiles must not be of __main__

    probes.main(__doc__, launch_probe.Exposed, launch_probe.run)
