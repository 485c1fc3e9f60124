"""Grouped GEMM of experts on Hopper for many tokens an expert in E4M3: MXFP4 weights become E4M3, scales included.

It is `wide.kernel` with MMAs that are twice as fast. Tokens have a scale a 128 of K (`quantize` with recipe "fp8"), and
a row's blocks of weights scales that differ by 2^11 or less, so that E4M3 holds a weight times its block's scale beside
the row's largest one, exactly (`layout`, mode "w4a8_row"). The rest are two factors of a sum:

    y[r, n] = 2^(base_n - 133) sum over 128 of K:  2^(scale of r and the 128) x (E4M3 MMAs of the 128)

The tensor core's own sums keep some 13 bits below the largest addend: they are of 128 of K, and are added up in fp32.

    a stage = 256 rows x 128 K        SMEM                                 registers of a warpgroup
    weights  4 x 4,096 B, bulk   -->  | X  112 tokens x 128 B       | --desc--> wgmma m64n112k32, A = table of 8 bytes
    scales   4 x 1,088 B, bulk   -->  | W  4 x 5,184 B              | --lds---> by prmt, one for a row and 32 of K
    tokens   112 x 128 B, cp.async -> | token scales 112 x fp32     | --lds---> 56 sums of 128 K -> 2 x 56 fp32
                                      | codes or sums, mbarriers    |

A warpgroup has two blocks of 64 rows. During the MMAs of one the weights of the next are expanded, those of the
next stage's first block, too.

What parts cost is measured in data/bench/moe_gemm.md. Computed: a block of 64 rows x 128 K x 104 tokens takes 208
cycles of MMA; of the 208 issue slots that a warp has in that time promotion takes 60, expansion 100.

`wide.finish` has the end of a tile: SwiGLU and E4M3 in registers, or rows in bf16.

Source: as `wide.kernel`; the table by prmt is that of several mixed-input GEMMs.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from dsv4lib.dsl import wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.ops.moe_gemm.sm90.epilogue import Ends, Scales
from dsv4lib.ops.moe_gemm.sm90.groups import Groups, Tile
from dsv4lib.ops.moe_gemm.sm90.layout import BLOCK, CHUNK_K, TILE_M
from dsv4lib.ops.moe_gemm.sm90.load import Sources, Stages
from dsv4lib.ops.moe_gemm.sm90.mma import CHUNK_BYTES, HALF_BYTES, THREAD_BYTES, load, looked_up, pure
from dsv4lib.ops.moe_gemm.sm90.wide.config import BLOCKS, TILE_BLOCKS, WideE4m3Config
from dsv4lib.ops.moe_gemm.sm90.wide.finish import Finish
from dsv4lib.ops.moe_gemm.sm90.wide.kernel import WideMoeGemm

AHEAD = 2  # loads of four tokens' scales each, before they are used
REST = 133  # what E4M3 of a row's largest scale lacks: 127, and 2^6 that it has more


class WideE4m3MoeGemm(Finish, WideMoeGemm, WideE4m3Config):
    """Grouped GEMM of many tokens an expert in E4M3 on Hopper: options as `WideE4m3Config`."""

    # --------------------------------------------------------------- consume

    @cute.jit
    def consume(self, sources: Sources, groups: Groups, total: Int32, stages: Stages, sSum: cute.Tensor, ends: Ends):
        """Run the consumer warps: tile after tile, with MMAs of as few columns as its rows need."""
        block, _, _ = cute.arch.block_idx()
        grid, _, _ = cute.arch.grid_dim()
        tidx, _, _ = cute.arch.thread_idx()
        group = cute.arch.make_warp_uniform(tidx // 128)
        chunks = sources.w.shape[2] * (self.step_k // CHUNK_K)
        mine = stages._replace(w=stages.w + group * (BLOCKS * self.block_bytes))
        stage, parity = Int32(0), Int32(0)
        rSum = cute.make_rmem_tensor(BLOCKS * self.tile_n // 2, Float32)
        for index in cutlass.range(block, total, grid, unroll=1):
            rows = self.tile(groups, index).rows
            rSum.fill(0.0)
            if cutlass.const_expr(len(self.columns) == 1):
                stage, parity = self.add_tile(self.tile_n, chunks, mine, stage, parity, rSum)
            elif rows <= self.columns[0]:
                stage, parity = self.add_tile(self.columns[0], chunks, mine, stage, parity, rSum)
            elif rows <= self.columns[1]:
                stage, parity = self.add_tile(self.columns[1], chunks, mine, stage, parity, rSum)
            else:
                stage, parity = self.add_tile(self.tile_n, chunks, mine, stage, parity, rSum)
            tile = self.tile(groups, index)  # again: no registers hold it beside the MMAs
            self.finish_blocks(sources.w, tile, group, sSum, ends, rSum)

    @cute.jit
    def add_tile(
        self,
        columns: cutlass.Constexpr,
        chunks: Int32,
        stages: Stages,
        stage: Int32,
        parity: Int32,
        rSum: cute.Tensor,
    ):
        """Add the products of a tile's first ``columns`` tokens; a block is expanded during the MMAs before its own.

        The last block's MMAs have no next one: its own stage's first is expanded once more, and not used.

        Args:
            stages: with the weights of this warpgroup.

        Returns:
            (stage, parity) of the next tile.
        """
        each = self.step_k // CHUNK_K
        rA = cute.make_rmem_tensor(CHUNK_K // BLOCK * 4, Int32)
        self.wait_for_stage(stages, stage, parity)
        self.expand(stages.w.toint() + stage * self.w_bytes, Int32(0), rA)
        for chunk in cutlass.range(chunks, unroll=1):
            next_stage, next_parity, last = self.after(stage, parity, chunk, chunks)
            operand, sfx = wgmma.operand(stages.x + stage * self.x_bytes), stages.sfx + stage * self.sfx_bytes
            w = stages.w.toint() + stage * self.w_bytes + self.block_bytes
            follows = cutlass.select_(last, stage, next_stage)
            sums = self.issue(columns, operand, rA)
            self.part(stages, stage, parity)
            self.expand(w, chunk % each, rA)
            self.promote(sums, 0, sfx, rSum, 0)
            sums = self.issue(columns, operand, rA)
            self.wait_for_stage(stages, follows, cutlass.select_(last, parity, next_parity))
            self.expand(stages.w.toint() + follows * self.w_bytes, (chunk + 1) % each, rA)
            self.promote(sums, 1, sfx, rSum, 0)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(stages.empty + stage)
            stage, parity = next_stage, next_parity
        return stage, parity

    def after(self, stage: Int32, parity: Int32, chunk: Int32, chunks: Int32) -> tuple:
        """Return the stage and parity that follow, and whether the tile's last 128 of K is in this one."""
        wraps = stage == self.stages - 1
        return (
            cutlass.select_(wraps, Int32(0), stage + 1),
            cutlass.select_(wraps, parity ^ 1, parity),
            chunk + 1 == chunks,
        )

    def wait_for_stage(self, stages: Stages, stage: Int32, parity: Int32) -> None:
        """Wait until a stage is full, and visible to the tensor core."""
        cute.arch.mbarrier_wait(stages.full + stage, parity)
        self.copied_by_threads()

    def issue(self, columns: int, operand: Int64, rA: cute.Tensor) -> list:
        """Start the MMAs of a block of rows and 128 of K."""
        wgmma.fence()
        a = [rA[i] for i in range(CHUNK_K // BLOCK * 4)]
        sums = wgmma.multiply(a, operand, self.offsets(0, range(CHUNK_K // BLOCK)), columns, self.kind, apart=False)
        wgmma.commit()
        return sums

    def promote(self, sums: list, own: int, sfx: Int32, rSum: cute.Tensor, waits: int) -> None:
        """Add sums of 128 of K, times their tokens' scales.

        Args:
            own: which of the warpgroup's blocks they are of.
            waits: groups of MMAs that may be in flight then.
        """
        scales: list[list] = []
        sixteens = -(-len(sums) // 8)
        for c, one in enumerate(sums):
            while len(scales) < min(c // 8 + AHEAD + 1, sixteens):
                scales.append(self.token_scales(sfx, len(scales)))
            if c == 0:
                wgmma.wait(waits)
            at = own * (self.tile_n // 2) + c
            rSum[at] = wgmma.multiply_add(one, scales[c // 8][c // 4 % 2 * 2 + c % 2], rSum[at])

    def token_scales(self, sfx: Int32, sixteen: int) -> list:
        """Load the scales of a thread's four of 16 tokens."""
        place = sfx + cute.arch.lane_idx() % 4 * 16 + 64 * sixteen
        return asm("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", [Float32] * 4, [place])

    def part(self, stages: Stages, stage: Int32, parity: Int32) -> None:
        """Wait for what is there: MMAs before and expansion after stay apart in the assembler's order."""
        cute.arch.mbarrier_wait(stages.full + stage, parity)

    def expand(self, w: Int32, chunk: Int32, rA: cute.Tensor) -> None:
        """Make words of A of a block of rows, 128 K."""
        for i, word in enumerate(self.expanded(w, chunk)):
            rA[i] = word

    def expanded(self, w: Int32, chunk: Int32) -> list:
        """Make words of A of a block of rows: 128 K."""
        tidx, _, _ = cute.arch.thread_idx()
        first = tidx % 128 // 32 * 16 + tidx % 32 // 4
        rows = []
        for half in range(2):
            row = first + 8 * half
            stored = load(w + CHUNK_BYTES + row * self.blocks + chunk * (CHUNK_K // BLOCK), 1)[0]
            base = asm("ld.shared.u8 $0, [$1];", [Int32], [w + CHUNK_BYTES + TILE_M * self.blocks + row])
            words = load(w + half * HALF_BYTES + tidx % 128 * THREAD_BYTES, 4)
            halves = self.halves_of(stored, base)
            rows.append([looked_up(word, *table(halves, block)) for block, word in enumerate(words)])
        return [rows[half][block][i] for block in range(CHUNK_K // BLOCK) for i in range(2) for half in range(2)]

    def halves_of(self, stored: Int32, base: Int32) -> Int32:
        """Return four codes of 0.5 x 2^6 x the scale of a block beside the row's largest."""
        return pure(
            "{ .reg .b32 a; mul.lo.u32 a, $2, 0x01010101; sub.u32 a, a, $1; mul.lo.u32 a, a, 8;"
            " sub.u32 $0, 0x60606060, a; }",
            stored,
            base,
        )

    # ---------------------------------------------------------------- finish

    @cute.jit
    def finish_blocks(
        self, mW: cute.Tensor, tile: Tile, group: Int32, sSum: cute.Tensor, ends: Ends, rSum: cute.Tensor
    ):
        """See `WideMoeGemm.finish_blocks`; sums get the factors of their rows before."""
        factors = self.row_factors(mW, tile, group)
        scales = self.both(factors, self.scales_of(tile, ends))
        if cutlass.const_expr(self.quantised):
            self.finish_tile(mW.shape[1], tile, group, sSum, ends, scales, rSum)
        elif cutlass.const_expr(self.out == "bf16" and not self.swiglu):
            self.finish_rows(mW.shape[1], tile, group, sSum, ends, scales, rSum)
        else:
            self.multiply_rows(factors, rSum)
            WideMoeGemm.finish_blocks(self, mW, tile, group, sSum, ends, rSum)

    def row_factors(self, mW: cute.Tensor, tile: Tile, group: Int32) -> list[Float32]:
        """Return what sums of row g, and of g + 8, of each block lack."""
        tidx, _, _ = cute.arch.thread_idx()
        start = TILE_M * self.step_k // 2 + TILE_M * self.blocks
        factors = []
        for own in range(BLOCKS):
            feature = cutlass.min(tile.feature * TILE_BLOCKS + group * BLOCKS + own, mW.shape[1] - 1)
            for half in range(2):
                row = tidx % 128 // 32 * 16 + tidx % 32 // 4 + 8 * half
                bits = Int32(mW[tile.expert, feature, 0, start + row]) + (127 - REST) << 23
                factors.append(asm("mov.b32 $0, $1;", [Float32], [bits], pure=True))
        return factors

    def both(self, factors: list[Float32], scales: Scales) -> list[Scales]:
        """Return factors of a block's gates and ups, of those of its rows and those of the expert."""
        return [Scales(factors[2 * b] * scales.low, factors[2 * b + 1] * scales.high) for b in range(BLOCKS)]

    def multiply_rows(self, factors: list[Float32], rSum: cute.Tensor) -> None:
        """Multiply a thread's sums by what they lack."""
        each = self.tile_n // 2
        for c in range(BLOCKS * each):
            rSum[c] = rSum[c] * factors[c // each * 2 + c // 2 % 2]


def table(halves: Int32, block: int) -> tuple[Int32, Int32]:
    """Make the table of a block of four codes of 0.5: what 0, 0.5, 1, 1.5 are, and 2, 3, 4, 6."""
    code = pure(f"prmt.b32 $0, $1, 0, {0x1111 * block:#x};", halves)
    low = pure("{ .reg .b32 a; and.b32 a, $1, 0xFFFFFF00; add.u32 $0, a, 0x0C080000; }", code)
    return low, pure("add.u32 $0, $1, 0x1C181410;", code)
