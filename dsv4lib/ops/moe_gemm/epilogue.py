"""Run the epilogue: accumulators from tensor memory to global memory. Scale, SwiGLU, routing weight, conversion.

Lanes are features, columns tokens. `tcgen05.ld.16x256b` gives a thread rows r and r + 8 of 16 lanes: with gate and up
alternating by 8 these are gate and up of one feature, so SwiGLU needs no other thread. What is left is transposed in
shared memory, where a thread reads 16 consecutive features of one token: a block of NVFP4, half a block of MXFP8, 32
bytes of bf16. See `moe_gemm.sm100` for what the alternatives cost.

The exchange has lines of 128 words: one token of 128 features, or two of 64. A line has 8 units of 16 features in 4
quads; quad q of unit p is at group p ^ 4 (q mod 2) ^ (half of the token's number mod 4) of the 8 groups of 4 banks,
32 q words on. So both sides are free of bank conflicts: a warp writes 2 quads of a unit for 4 tokens, 8 threads read
the same quad of 8 units.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory, pipeline
from cutlass.cutlass_dsl import dsl_user_op

from dsv4lib.dsl import convert, umma
from dsv4lib.dsl.silu import silu
from dsv4lib.ops.moe_gemm.config import EPILOGUE_THREADS, EXCHANGE, OUT_VALUES
from dsv4lib.ops.moe_gemm.schedule import Groups, Schedule, Tile

LOG2_E = 1.4426950408889634


class Outputs(NamedTuple):
    """What a call writes: rows [R, F], or bytes of codes. Scales [blocks, 512] uint8 or None.

    Attributes:
        out_global: fp32 [E], the given global scales of nvfp4, or None.
    """

    out: cute.Tensor
    scales: Any
    out_global: Any


class Factors(NamedTuple):
    """Hold the factors of the sums of gate and up.

    Or of both halves of 16 features.
    """

    first: Float32
    second: Float32


class Ends(NamedTuple):
    """Arguments of the epilogue, as in the host call."""

    alpha: Any
    alpha_up: Any
    routing: Any
    out: cute.Tensor
    scales: Any
    out_global: Any
    limit: Float32


@dsl_user_op
def _load_halves(low: Int32, columns: int, there: Int32, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """Load ``columns`` (16 or 32) of the first and the last 16 lanes of a warp; ``there`` of them, up to 16s.

    Of each 8 columns a thread gets two of row r, then two of row r + 8. 16 columns of the first lanes come first, then
    those of the last, then the next 16. It includes the wait, after which the registers are valid.
    """
    lines = []
    for i in range(columns // 8):
        registers = ", ".join(f"{{$w{8 * i + j}}}" for j in range(8))
        load = f"tcgen05.ld.sync.aligned.16x256b.x2.b32 {{{registers}}}, [{{$r{i % 2}}} + {i // 2 * 16}];"
        lines.append("@more " * (i > 1) + load)
    text = "{ .reg .pred more; setp.gt.s32 more, {$r2}, 16; " + " ".join(lines) + " tcgen05.wait::ld.sync.aligned; }"
    return cute.arch.inline_ptx(
        text,
        write_only_types=[Float32] * columns,
        read_only_args=[low, low + (16 << 16), there],
        loc=loc,
        ip=ip,
    )


class Epilogue(Schedule):
    """The epilogue warps."""

    @cute.jit
    def epilogue(
        self,
        groups: Groups,
        ends: Ends,
        sH: cute.Tensor,
        allocator: memory.TmemAllocator,
        acc: pipeline.PipelineUmmaAsync,
    ):
        """Run the epilogue warps: tile after tile; warp w reads lanes 32 w .. 32 w + 31."""
        allocator.allocate(self.tmem_columns)
        allocator.relinquish_alloc_permit()
        cute.arch.griddepcontrol_wait()
        allocator.wait_for_alloc()
        address = allocator.retrieve_ptr(Float32)
        tidx, _, _ = cute.arch.thread_idx()
        lanes = address.toint() + (tidx // 32 * 32 << 16)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.acc_stages)
        buffer = Int32(0)
        place = self.first_place(groups)
        while place.expert < groups.experts:
            tile = self.tile(groups, place)
            state, buffer = self.epilogue_tile(ends, tile, lanes, sH, acc, state, buffer)
            place = self.next_place(groups, place)
        self.exchanged().arrive_and_wait()  # TMEM has been read
        allocator.free(address)

    @cute.jit
    def epilogue_tile(
        self,
        ends: Ends,
        tile: Tile,
        lanes: Int32,
        sH: cute.Tensor,
        acc: pipeline.PipelineUmmaAsync,
        state: pipeline.PipelineState,
        buffer: Int32,
    ):
        """Finish a tile, chunk by chunk.

        Args:
            lanes: TMEM address of this warp's lanes. buffer: of the exchange, where the first chunk goes.

        Returns:
            state of the pipeline and buffer after the tile.
        """
        factors = self.factors(ends, tile)
        acc.consumer_wait(state)
        umma.fence_after_thread_sync()
        for first in cutlass.range(0, tile.rows, self.chunk, unroll=1):
            source = lanes + state.index * self.tile_n + first
            self.transpose(source, tile.rows - first, sH, buffer, factors, ends.limit)
            self.exchanged().arrive_and_wait()
            self.store(sH, buffer, ends, tile, first)
            cute.arch.sync_warp()  # the next tcgen05.ld needs the warp converged
            buffer = buffer ^ 1
        umma.fence_before_thread_sync()
        self.release(acc, state)
        state.advance()
        return state, buffer

    def exchanged(self) -> pipeline.NamedBarrier:
        """Return the barrier of the epilogue warps: a buffer is written. With two of them once a chunk is enough."""
        return pipeline.NamedBarrier(EXCHANGE, EPILOGUE_THREADS)

    @cute.jit
    def release(self, acc: pipeline.PipelineUmmaAsync, state: pipeline.PipelineState):
        """Release the accumulator: one arrival a warp."""
        with cute.arch.elect_one():
            acc.consumer_release(state)

    @cute.jit
    def factors(self, ends: Ends, tile: Tile):
        """Return the factors of a tile."""
        first = second = Float32(1.0)
        if cutlass.const_expr(self.alpha):
            first = second = ends.alpha[tile.expert]
            if cutlass.const_expr(self.swiglu):
                second = ends.alpha_up[tile.expert]
        return Factors(first, second)

    @cute.jit
    def transpose(self, source: Int32, there: Int32, sH: cute.Tensor, buffer: Int32, factors: Factors, limit: Float32):
        """Store a chunk of columns to the exchange. Thread t of a warp has features t / 4 and t / 4 + 8 of halves."""
        values = _load_halves(source, self.chunk, there)
        tidx, _, _ = cute.arch.thread_idx()
        warp, lane = tidx // 32, tidx % 32
        # Line of the first token, quad of the first feature, group and place in it: fields of a word's number.
        line, unit = (lane % 4, warp) if cutlass.const_expr(self.swiglu) else (lane % 4 * 2, warp * 2)
        first = line << 7 | lane // 16 << 5 | (unit ^ lane // 16 * 4 ^ lane % 4) << 2 | lane // 4 % 4
        for half in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(self.chunk // 8):
                for i in cutlass.range_constexpr(2):
                    at = 16 * (j // 2) + 8 * half + 4 * (j % 2) + i
                    low, high = values[at] * factors.first, values[at + 2] * factors.second
                    if cutlass.const_expr(self.swiglu):
                        sH[(first ^ i << 4) + (half << 6) + (4 * j << 7), buffer] = self.activate(low, high, limit)
                    else:
                        word = (first ^ half << 2) + (8 * j + i << 7)
                        sH[word, buffer] = low
                        sH[word + (1 << 6), buffer] = high

    def activate(self, gate: Float32, up: Float32, limit: Float32):
        """Combine gate and up of a feature."""
        return swiglu(gate, up, limit)

    @cute.jit
    def store(self, sH: cute.Tensor, buffer: Int32, ends: Ends, tile: Tile, first: Int32):
        """Store this thread's 16 features of a token of the chunk.

        Where tile and output have them.
        """
        tidx, _, _ = cute.arch.thread_idx()
        units = self.out_features // OUT_VALUES
        token, own = tidx // units, tidx % units
        rH = cute.make_rmem_tensor(OUT_VALUES, Float32)
        line, group = token, own
        if cutlass.const_expr(self.swiglu):
            line, group = token // 2, token % 2 * 4 + own
        word = line << 7 | (group ^ token // 2 % 4) << 2
        for quad in cutlass.range_constexpr(OUT_VALUES // 4):
            place = cute.assume((word ^ quad % 2 << 4) + (quad << 5), divby=4)
            words = cute.make_tensor(sH.iterator + place + buffer * self.exchange_words, cute.make_layout(4))
            cute.autovec_copy(words, cute.local_tile(rH, (4,), (quad,)))
        row = tile.row + first + token
        unit = tile.feature // (128 // units) + own  # of 16 features
        inside = self.inside(tile, first + token) and unit * OUT_VALUES < self.features_of(ends)
        if cutlass.const_expr(self.routed):
            if inside:
                rH.store(rH.load() * ends.routing[row])
        if cutlass.const_expr(not self.quantised):
            if inside:
                rOut = cute.make_rmem_tensor(OUT_VALUES, ends.out.element_type)
                rOut.store(rH.load().to(ends.out.element_type))
                cute.autovec_copy(rOut, cute.local_tile(self.row_of(ends, tile, row), (OUT_VALUES,), (unit,)))
        elif cutlass.const_expr(self.out == "nvfp4"):
            if inside:
                self.store_nvfp4(rH, ends, tile, row, unit)
        else:
            self.store_mxfp8(rH, ends, tile, row, unit, inside)

    @cute.jit
    def inside(self, tile: Tile, token: Int32):
        """Return whether the tile has this token. Rows of an MMA past the last token are not stored."""
        return token < tile.rows

    def features_of(self, ends: Ends) -> Int32:
        """Count the features of a row of the output."""
        return ends.out.shape[-1] * (2 if self.out == "nvfp4" else 1)

    def at(self, tile: Tile, row: Int32) -> tuple[Int32 | None, ...]:
        """Return the index of a row of the output."""
        return *self.lead(tile), row, None

    def row_of(self, ends: Ends, tile: Tile, row: Int32) -> cute.Tensor:
        """Return a row of the output."""
        return ends.out[self.at(tile, row)]

    @cute.jit
    def store_nvfp4(self, rH: cute.Tensor, ends: Ends, tile: Tile, row: Int32, unit: Int32):
        """Store a block: its scale and codes.

        The scale is E4M3 of amax / (6 global); codes are relative to the rounded scale.
        """
        amax = amax_of(rH)
        amax = amax + 0.0 * amax  # Inf, too, makes the scale NaN, as the format has it
        scale_of_all = ends.out_global[tile.expert]
        code = convert.to_e4m3(amax * cute.arch.rcp_approx(6.0 * scale_of_all))
        step = convert.from_e4m3(code) * scale_of_all
        inverse = cutlass.select_(step > 0.0, cute.arch.rcp_approx(step), Float32(0.0))
        rH.store(rH.load() * inverse)
        words = cute.make_rmem_tensor(2, Int32)
        for i in cutlass.range_constexpr(2):
            codes = convert.to_e2m1x8([rH[8 * i + j] for j in range(8)])
            words[i] = cutlass.select_(code == convert.E4M3_NAN, Int32(0), codes)  # E2M1 has no NaN; the cast makes 6
        store_words(self.row_of(ends, tile, row), unit * (OUT_VALUES // 2), words)
        self.store_scale(ends, tile, row, unit, code)

    @cute.jit
    def store_mxfp8(self, rH: cute.Tensor, ends: Ends, tile: Tile, row: Int32, unit: Int32, inside: cutlass.Boolean):
        """Store half a block of 32; its neighbour has the other half."""
        amax = amax_of(rH)
        amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1), nan=True)
        code, inverse = convert.to_ue8m0(amax, convert.E4M3_MAX)
        if inside:
            rH.store(rH.load() * inverse)
            words = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                words[i] = convert.to_e4m3x4([rH[4 * i + j] for j in range(4)])
            store_words(self.row_of(ends, tile, row), unit * OUT_VALUES, words)
            if unit % 2 == 0:
                self.store_scale(ends, tile, row, unit // 2, code)

    @cute.jit
    def store_scale(self, ends: Ends, tile: Tile, row: Int32, column: Int32, code: Int32):
        """Store a scale where the next GEMM reads it.

        That is `formats.scale_swizzle`, blocks of 128 rows x 4 scales.
        """
        per_scale = OUT_VALUES if self.out == "nvfp4" else 2 * OUT_VALUES
        blocks = cute.ceil_div(self.features_of(ends), 4 * per_scale)
        block = row // 128 * blocks + column // 4
        at = *self.lead(tile), block, row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        ends.scales[at] = cutlass.Uint8(code)


@cute.jit
def swiglu(gate: Float32, up: Float32, limit: Float32, fast_math: cutlass.Constexpr = True):
    """Compute silu(min(gate, limit)) * clip(up, -limit, limit).

    NaN stays NaN where min and max would drop it. Without ``fast_math`` silu is that of `dsl.silu`.
    """
    gate = cute.arch.fmin(gate, limit, nan=True)
    up = cute.arch.fmax(cute.arch.fmin(up, limit, nan=True), -limit, nan=True)
    if cutlass.const_expr(not fast_math):
        return silu(gate) * up
    return gate * cute.arch.rcp_approx(1.0 + cute.math.exp2(gate * -LOG2_E, fastmath=True)) * up


@cute.jit
def amax_of(values: cute.Tensor):
    """Return the largest magnitude; NaN if one is."""
    amax = Float32(0.0)
    for i in cutlass.range_constexpr(cute.size(values)):
        amax = cute.arch.fmax(amax, convert.magnitude(values[i]), nan=True)
    return amax


@cute.jit
def store_words(row: cute.Tensor, column: Int32, words: cute.Tensor):
    """Store registers to bytes of a row, in one store."""
    size = 4 * cute.size(words)
    target = cute.local_tile(row, (size,), (column // size,))
    cute.autovec_copy(cute.recast_tensor(words, cutlass.Uint8), target)
