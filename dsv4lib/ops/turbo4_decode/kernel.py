"""Attend to a paged turbo4 cache with one query token a request, in the rotated space.

    q' = H (s * q) / sqrt(D)
    s_t = scale n_t (q' . c_t)          centroids of N(0, 1) by MMA, norms and 1 / sqrt(D) outside
    p = softmax(s)
    o' = sum_t (p_t m_t) d_t            values' norms folded into P
    o = s * (H o') / sqrt(D)            once a head

    phase            what
    load Q           a warp a head: signs, Hadamard matrix by shuffles, a power of two that makes the largest 1 to 2,
                     to SMEM as two fp16 numbers
    fetch K          4-bit codes to registers, 16 bytes a lane, in flight while the tile before is worked on
    Q K^T            codes to centroids in registers (`dequant`), m16n8k16; dims of 256 and 512 are shared by warps
    softmax          online; the norm of a token multiplies its logits
    fetch V, P V     the same for values, its norm in P
    write            warps' O' combined in SMEM, rotated back; partial and rotated with splits (`output`)

A CTA has 4 warps, one KV head of one request, up to 16 query heads, and one split of the tokens. Warps take tiles of 32
tokens in turns (`attend`): no barrier between tiles, but for dims of 256 and 512, where 2 or 4 warps add up S.

    SMEM | O' of token groups, 16 x (D + 4) fp32, or before, pairs | q' | S of dim warps | max, sum, powers |

MMAs are fp16: q' is two such numbers, of the centroids 11 bits remain, of P times a norm as many above 2^-14. K and V
may be the same pages. Neither bytes nor the integer instructions of dequantisation alone account for the time; what
bounds it is not known (data/bench/turbo4.md).

Source: `dsv4lib.reference.turbo4_decode`; FlashAttention-2 (arXiv 2307.08691) for the layout of P.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, memory

from dsv4lib.dsl import convert, hadamard
from dsv4lib.ops.turbo4_decode import attend, dequant
from dsv4lib.ops.turbo4_decode.attend import Place, Softmax
from dsv4lib.ops.turbo4_decode.config import ROWS, TILE, WARP, WARPS
from dsv4lib.ops.turbo4_decode.output import LN_2, Lane, flip, lane_of, store_rotated_back

LOG2_E = math.log2(math.e)
EXPONENT = 0xFF << 23  # of an fp32


class Output(NamedTuple):
    """O and LSE: [B, H, D] and fp32 [B, H]; of a split kernel fp32 [splits, B, H, D] and [splits, B, H]."""

    o: cute.Tensor
    lse: cute.Tensor


class Shared(NamedTuple):
    """Hold the tensors of SMEM.

    Attributes:
        sO: O' of token groups, before it the table of pairs. sQ: rows of q'. sS: S of warps that share a tile.
        sStats: row_max and row_sum of token groups. sPowers: powers of two taken out of q'.
    """

    sO: cute.Tensor
    sQ: cute.Tensor
    sS: cute.Tensor
    sStats: cute.Tensor
    sPowers: cute.Tensor


class Task(NamedTuple):
    """What a CTA works on: request, first query head, heads that exist, KV head, split."""

    request: Int32
    first: Int32
    heads: Int32
    kv_head: Int32
    split: Int32


class Turbo4Decode(attend.Attend):
    """Attend; see the module docstring, and `config.Config` for the arguments."""

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mTable: cute.Tensor,
        mLengths: cute.Tensor,
        output: Output,
        scale: Float32,
        seed: Int32,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        """Launch a CTA for each split, 16 query heads of a KV head, and request.

        Args:
            mQ: [B, H, D]. mK, mV: int32 [P, H / group, S / 4], pages. mTable: int32 [B, W]. mLengths: int32 [B].
            output: `Output`, of ``splits`` splits. scale: of logits. seed: of the signs.
            splits: of the tokens.
            stream: where the launch is queued.
        """
        blocks = mK.shape[1] * self.head_blocks
        self.kernel(mQ, mK, mV, mTable, mLengths, output, scale, seed).launch(
            grid=(splits, blocks, mQ.shape[0]),
            block=(WARP * WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=self.carveout,
        )

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mTable: cute.Tensor,
        mLengths: cute.Tensor,
        output: Output,
        scale: Float32,
        seed: Int32,
    ):
        """Find the CTA's tokens; if there are any, attend, else write that there are none."""
        split, block, request = cute.arch.block_idx()
        splits, _, _ = cute.arch.grid_dim()
        shared = self.allocate()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()  # after the wait: this kernel ends after the one before
        kv_head, part = block // self.head_blocks, block % self.head_blocks
        heads = cutlass.min(self.group - part * ROWS, ROWS)
        task = Task(request, kv_head * self.group + part * ROWS, heads, kv_head, split)
        length = cutlass.min(mLengths[request], mTable.shape[1] * self.page_size)
        share = cute.ceil_div(cute.ceil_div(length, TILE), splits) * TILE
        first = split * share
        stop = cutlass.min(first + share, length)
        if first < stop:
            self.work(
                mQ,
                mK[None, kv_head, None],
                mV[None, kv_head, None],
                mTable[request, None],
                output,
                scale,
                seed,
                task,
                shared,
                first,
                stop,
            )
        else:
            self.write_nothing(output, task)

    def allocate(self) -> Shared:
        """Allocate shared memory."""
        room = memory.SmemAllocator()
        return Shared(
            room.allocate_tensor(Float32, cute.make_layout(self.floats), byte_alignment=128),
            room.allocate_tensor(
                Float16, cute.make_layout((self.q_rows, self.head_dim), stride=(self.q_stride, 1)), byte_alignment=16
            ),
            room.allocate_tensor(Float32, cute.make_layout(self.exchange), byte_alignment=16),
            room.allocate_tensor(Float32, cute.make_layout((self.token_groups, ROWS, 2), stride=(2 * ROWS, 2, 1))),
            room.allocate_tensor(Float32, cute.make_layout(ROWS)),
        )

    @cute.jit
    def work(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mTable: cute.Tensor,
        output: Output,
        scale: Float32,
        seed: Int32,
        task: Task,
        shared: Shared,
        first: Int32,
        stop: Int32,
    ):
        """Rotate q, go through this warp's tiles, combine warps, write."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        number = warp // self.dim_warps
        step = TILE * self.token_groups
        begin = first + TILE * number
        exchange = shared.sS.iterator.toint() + number * (2 * self.dim_warps * WARP * 32 * self.halves)
        pairs = shared.sO.iterator.toint()
        part = (warp % self.dim_warps) * self.slice + lane % 4 * (self.slice // 4)
        query = shared.sQ.iterator.toint() + 2 * (lane // 4 * self.q_stride + part)
        place = Place(lane // 4, lane % 4, warp % self.dim_warps, number, mTable, pairs, query, exchange)
        tile = self.new_tile()
        self.load_keys(mK, place, tile, begin, stop)
        self.load_values(mV, place, tile, begin, stop)
        self.rotate_queries(mQ, task, shared, seed)
        if cutlass.const_expr(self.table == "shared"):
            self.write_pairs(pairs)
        self.sync()
        rS = cute.make_rmem_tensor((4, attend.BLOCKS), Float32)
        rO = cute.make_rmem_tensor((4, self.m_blocks, self.halves), Float32)
        rO.fill(0.0)
        state = Softmax(*(cute.make_rmem_tensor(self.halves, Float32) for _ in range(2)))
        state.row_max.fill(-Float32.inf)
        state.row_sum.fill(0.0)
        rScale = cute.make_rmem_tensor(self.halves, Float32)
        for half in cutlass.range_constexpr(self.halves):
            factor = Float32(LOG2_E * self.head_dim**-0.5 / self.levels.gain)
            rScale[half] = scale * factor * shared.sPowers[place.row + 8 * half]
        parity = Int32(0)
        for now in cutlass.range(begin, stop, step, unroll=1):
            left = self.left(stop, now + attend.BLOCK * place.column)
            self.scores(place, tile, rS)
            if cutlass.const_expr(self.dim_warps > 1):
                self.add_slices(place, rS, parity)
                parity = parity ^ 1
            self.softmax(tile, state, rS, rO, rScale, left)
            self.load_keys(mK, place, tile, now + step, stop)
            self.add_values(place, tile, rS, rO, left)
            self.load_values(mV, place, tile, now + step, stop)
        self.combine_warps(shared, place, state, rO)
        self.write(output, task, shared, seed)

    def sync(self) -> None:
        """Wait for all warps of the CTA."""
        cute.arch.barrier()

    @cute.jit
    def rotate_queries(self, mQ: cute.Tensor, task: Task, shared: Shared, seed: Int32):
        """Rotate heads to SMEM, a warp a head; zeros where there is none."""
        lane = lane_of(seed, cute.arch.lane_idx(), self.head_dim)
        for i in cutlass.range(cute.arch.warp_idx(), 8 * self.halves, WARPS, unroll=1):
            rX = cute.make_rmem_tensor(self.run, self.element)
            rX.fill(0.0)
            if i < task.heads:
                row = mQ[task.request, task.first + i, None]
                cute.autovec_copy(cute.local_tile(row, (self.run,), (lane.number,)), rX)
            x = rX.load().to(Float32)
            y = self.rotated([x[k] for k in range(self.run)], lane)
            largest = Float32(0.0)
            for k in cutlass.range_constexpr(self.run):
                largest = cute.arch.fmax(largest, convert.magnitude(y[k]))
            power = convert.bits(cute.arch.warp_reduction_max(largest)) & Int32(EXPONENT)
            inverse = convert.from_bits(Int32(254 << 23) - power)
            rY, rHalf = cute.make_rmem_tensor(self.run, Float32), cute.make_rmem_tensor(self.run, Float16)
            for k in cutlass.range_constexpr(self.run):
                rY[k] = y[k] * inverse
            for low in cutlass.range_constexpr(2):
                rHalf.store(rY.load().to(Float16))
                rY.store(rY.load() - rHalf.load().to(Float32))
                row = shared.sQ[self.query_row(i, low), None]
                cute.autovec_copy(rHalf, cute.local_tile(row, (self.run,), (lane.number,)))
            if lane.number == 0:
                shared.sPowers[i] = convert.from_bits(power)

    @cute.jit
    def rotated(self, x: list, lane: Lane):
        """Flip signs and multiply by the Hadamard matrix."""
        return hadamard.rotate(flip(x, lane.signs), lane.number, self.head_dim)

    @cute.jit
    def write_pairs(self, pairs: Int32):
        """Write this lane's column of the table of pairs, a quarter of the pairs a warp."""
        column = pairs + 4 * cute.arch.lane_idx()
        for pair in cutlass.range(cute.arch.warp_idx(), dequant.PAIRS, WARPS, unroll=1):
            words = dequant.by_registers(pair, self.words)
            dequant.store_pair(column + 4 * WARP * pair, words[0])

    @cute.jit
    def combine_warps(self, shared: Shared, place: Place, state: Softmax, rO: cute.Tensor):
        """Write O' of all token groups relative to one row_max, and their row_sums."""
        for half in cutlass.range_constexpr(self.halves):
            row_sum = state.row_sum[half]
            for i in cutlass.range_constexpr(2):
                row_sum += cute.arch.shuffle_sync_bfly(row_sum, 1 << i)
            if (place.column == 0) & (place.slice == 0):
                shared.sStats[place.number, place.row + 8 * half, 0] = state.row_max[half]
                shared.sStats[place.number, place.row + 8 * half, 1] = row_sum
        self.sync()  # also: all have read the table of pairs
        run = 2 * self.m_blocks  # neighbouring dims of a lane
        for half in cutlass.range_constexpr(self.halves):
            for c in cutlass.range_constexpr(2):
                row = 8 * half + 2 * place.column + c
                own = shared.sStats[place.number, row, 0]
                scale = cute.math.exp2(own - self.largest(shared, row), fastmath=True)
                at = (place.number * ROWS + row) * self.o_stride + place.slice * self.slice + place.row * run
                for m in cutlass.range_constexpr(0, self.m_blocks, 2):
                    values = [rO[c + r, m + k, half] * scale for k in range(2) for r in (0, 2)]
                    attend.store_four(shared.sO.iterator.toint() + 4 * (at + 2 * m), values)
        self.sync()

    @cute.jit
    def largest(self, shared: Shared, row: Int32):
        """Return the largest row_max of all token groups; 0 if all are -inf."""
        found = shared.sStats[0, row, 0]
        for i in cutlass.range_constexpr(1, self.token_groups):
            found = cute.arch.fmax(found, shared.sStats[i, row, 0])
        return Float32(cutlass.select_(found > -Float32.inf, found, Float32(0.0)))

    @cute.jit
    def write(self, output: Output, task: Task, shared: Shared, seed: Int32):
        """Add token groups up, divide by row_sum, rotate back and store; a warp a head."""
        lane = lane_of(seed, cute.arch.lane_idx(), self.head_dim)
        for i in cutlass.range(cute.arch.warp_idx(), task.heads, WARPS, unroll=1):
            row_max, row_sum = self.largest(shared, i), Float32(0.0)
            for w in cutlass.range_constexpr(self.token_groups):
                share = cute.math.exp2(shared.sStats[w, i, 0] - row_max, fastmath=True)
                row_sum += shared.sStats[w, i, 1] * share
            scale = cute.arch.rcp_approx(row_sum) * Float32(self.head_dim**-0.5 / self.levels.gain)
            values = []
            for k in cutlass.range_constexpr(self.run):
                total = Float32(0.0)
                for w in cutlass.range_constexpr(self.token_groups):
                    total += shared.sO[(w * ROWS + i) * self.o_stride + lane.number * self.run + k]
                values.append(total * scale)
            head, lse = task.first + i, row_max + cute.math.log2(row_sum)
            if cutlass.const_expr(self.split):
                self.store_partial(values, output.o[task.split, task.request, head, None], lane.number)
                if lane.number == 0:
                    output.lse[task.split, task.request, head] = lse
            else:
                store_rotated_back(values, lane, output.o[task.request, head, None], self.element)
                if lane.number == 0:
                    output.lse[task.request, head] = lse * LN_2

    @cute.jit
    def store_partial(self, values: list, mRow: cute.Tensor, lane: Int32):
        """Store a lane's dims of a partial O'."""
        rOut = cute.make_rmem_tensor(self.run, Float32)
        for k in cutlass.range_constexpr(self.run):
            rOut[k] = values[k]
        cute.autovec_copy(rOut, cute.local_tile(mRow, (self.run,), (lane,)))

    @cute.jit
    def write_nothing(self, output: Output, task: Task):
        """No tokens: an LSE of -inf, and O of zeros unless it is partial."""
        lane = cute.arch.lane_idx()
        for i in cutlass.range(cute.arch.warp_idx(), task.heads, WARPS, unroll=1):
            head = task.first + i
            if cutlass.const_expr(self.split):
                if lane == 0:
                    output.lse[task.split, task.request, head] = -Float32.inf
            else:
                rOut = cute.make_rmem_tensor(self.run, self.element)
                rOut.fill(0.0)
                row = output.o[task.request, head, None]
                cute.autovec_copy(rOut, cute.local_tile(row, (self.run,), (lane,)))
                if lane == 0:
                    output.lse[task.request, head] = -Float32.inf
