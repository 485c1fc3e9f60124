"""From packed weights in shared memory to sums in registers.

A consumer warpgroup takes every fourth stage. A thread loads 16 bytes of each of its two rows and 128 K, converts words
into A fragments (`layout` says how the bits lie) and issues the MMAs of `group` blocks of 32 K; it adds up the sums of
the group before while these run.

    w4a8     sum += (E4M3 MMA of 32 K) x 2^(scale of the row's block) x 2^(scale of the token's block), in fp32
    w4a16    weights are multiplied by their scale in bf16, exactly; sum += bf16 MMA over the blocks of a group
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.dsl import wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.ops.moe_gemm.sm90.config import CONSUMERS, ROW_BYTES
from dsv4lib.ops.moe_gemm.sm90.groups import Walk
from dsv4lib.ops.moe_gemm.sm90.layout import BLOCK, CHUNK_K, TILE_M
from dsv4lib.ops.moe_gemm.sm90.load import Stages

THREAD_BYTES = 16  # of a row and 128 K
HALF_BYTES = THREAD_BYTES * 128  # rows g of all warps
CHUNK_BYTES = 2 * HALF_BYTES
UNIT = 0x3C383000, 0x4C484440  # E4M3 of 0, 0.5, 1, 1.5; 2, 3, 4, 6


class Mma(Walk):
    """What a consumer warpgroup does with a stage."""

    @cute.jit
    def sum_up(self, steps: Int32, due: Int32, stage: Int32, parity: Int32, stages: Stages, rSum: cute.Tensor):
        """Multiply the steps of a tile that this warpgroup has, from step ``due`` on.

        Returns:
            (due of the next tile, stage, parity) after it.
        """
        for c in cutlass.range_constexpr(self.tile_n // 2):
            rSum[c] = Float32(0.0)
        while due < steps:
            cute.arch.mbarrier_wait(stages.full + stage, parity)
            self.copied_by_threads()
            self.multiply(stages, stage, rSum)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(stages.empty + stage)
            due = due + CONSUMERS
            stage = stage + CONSUMERS
            if stage >= self.stages:
                stage, parity = stage - self.stages, parity ^ 1
        return due - steps, stage, parity

    def copied_by_threads(self) -> None:
        """Make what `cp.async` wrote visible to the tensor core.

        It reads through another proxy.
        """
        cute.arch.fence_proxy("async.shared", space="cta")

    def multiply(self, stages: Stages, stage: Int32, rSum: cute.Tensor) -> None:
        """Add the products of a stage."""
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = tidx % 32, tidx % 128 // 32
        w = stages.w.toint() + stage * self.w_bytes
        scales = w + TILE_M * self.step_k // 2 + (warp * 16 + lane // 4) * self.blocks
        row_scales = [load(scales + half * (8 * self.blocks), self.chunks) for half in range(2)]
        operand = wgmma.operand(stages.x + stage * self.x_bytes)
        sfx = stages.sfx + stage * self.sfx_bytes + lane % 4 * 8
        pending = None
        for chunk in range(self.chunks):
            mine = w + chunk * CHUNK_BYTES + tidx % 128 * THREAD_BYTES
            words = [load(mine + half * HALF_BYTES, 4) for half in range(2)]
            own = [row_scales[half][chunk] for half in range(2)]
            tokens = []
            if self.scaled:
                tokens = [load(sfx + (chunk * self.tile_n + 8 * i) * 4, 2) for i in range(self.tile_n // 8)]
            for first in range(0, CHUNK_K // BLOCK, self.group):
                blocks = range(first, first + self.group)
                a = [word for block in blocks for word in self.fragments([half[block] for half in words], own, block)]
                wgmma.fence()
                sums = wgmma.multiply(a, operand, self.offsets(chunk, blocks), self.tile_n, self.kind, self.scaled)
                wgmma.commit()
                if pending is not None:
                    wgmma.wait(1)
                    self.promote(*pending, rSum)
                pending = sums, own, tokens, blocks
        wgmma.wait(0)
        self.promote(*pending, rSum)

    def offsets(self, chunk: int, blocks: Any) -> list[int]:
        """Return the bytes from the stage's tokens to the operand B of each MMA."""
        steps = [(chunk * (CHUNK_K // BLOCK) + b) * self.block_mmas + i for b in blocks for i in range(self.block_mmas)]
        return [s // 4 * self.tile_n * ROW_BYTES + s % 4 * wgmma.STEP_BYTES for s in steps]

    def fragments(self, words: list, scales: list, block: int) -> list:
        """Return words of A of a block's MMAs, of the packed words of rows g and g + 8."""
        if self.scaled:
            rows = [looked_up(word, *UNIT) if self.mode_name == "w4a8_row" else to_e4m3(word) for word in words]
            return [rows[half][i] for i in range(2) for half in range(2)]
        rows = [to_bf16(word, scale, block) for word, scale in zip(words, scales, strict=True)]
        return [rows[half][2 * mma + i] for mma in range(2) for i in range(2) for half in range(2)]

    def factors(self, rows: list, tokens: list, blocks: Any) -> list:
        """Return what each sum of a group of MMAs is multiplied by. It is the row's scale times the token's."""
        found = []
        for block in blocks:
            of_rows = [power(word, block) for word in rows]
            of_tokens = [[power(word, block) for word in pair] for pair in tokens]
            found += [of_rows[c // 2 % 2] * of_tokens[c // 4][c % 2] for c in range(self.tile_n // 2)]
        return found

    def promote(self, sums: list, rows: list, tokens: list, blocks: Any, rSum: cute.Tensor) -> None:
        """Add the sums of a group of MMAs that are done."""
        factors = self.factors(rows, tokens, blocks) if self.scaled else None
        for i, one in enumerate(sums):
            c = i % (self.tile_n // 2)
            rSum[c] = wgmma.add(one, rSum[c]) if factors is None else wgmma.multiply_add(one, factors[i], rSum[c])


def load(address: Int32, words: int) -> list:
    """Load 1, 2 or 4 words of shared memory."""
    places = ", ".join(f"${i}" for i in range(words))
    if words == 1:
        return [asm("ld.shared.b32 $0, [$1];", [Int32], [address])]
    return asm(f"ld.shared.v{words}.b32 {{{places}}}, [${words}];", [Int32] * words, [address])


def pure(text: str, *arguments: Any) -> Int32:
    """Compute one word that depends on the arguments alone."""
    return asm(text, [Int32], [x if isinstance(x, Int32) else Int32(x) for x in arguments], pure=True)


def masked(word: Int32, shift: int, mask: int) -> Int32:
    """Bits of a word, moved to the left (right where ``shift`` is below 0)."""
    moved = word
    if shift:
        moved = pure(f"{'shl' if shift > 0 else 'shr'}.b32 $0, $1, {abs(shift)};", word)
    return pure(f"and.b32 $0, $1, {mask:#x};", moved)


def merged(word: Int32, shift: int, mask: int, others: Int32) -> Int32:
    """`masked` or ``others``, in one instruction after the shift."""
    moved = word
    if shift:
        moved = pure(f"{'shl' if shift > 0 else 'shr'}.b32 $0, $1, {abs(shift)};", word)
    return pure(f"lop3.b32 $0, $1, {mask:#x}, $2, 0xEA;", moved, others)


def to_e4m3(word: Int32) -> list:
    """Convert to two words of E4M3, each weight x 2^-6; 5 instructions."""
    return [masked(word, 0, 0x9C9C9C9C), merged(word, 2, 0x8C8C8C8C, masked(word, -2, 0x10101010))]


def looked_up(word: Int32, low: Any, high: Any) -> list:
    """Convert to two words of E4M3 by a table of what magnitudes 0 to 7 are; 7 instructions."""
    selectors = masked(word, 0, 0x77777777)
    upper = pure("shr.b32 $0, $1, 16;", selectors)
    halves = [pure("prmt.b32 $0, $1, $2, $3;", low, high, one) for one in (selectors, upper)]
    return [merged(word, 4, 0x80808080, halves[0]), merged(word, 0, 0x80808080, halves[1])]


def to_bf16(word: Int32, scales: Int32, block: int) -> list:
    """Four words of bf16, weights x their scale x 2^-20."""
    bits = 0x81C081C0
    last = merged(word, -5, 0x01000100, masked(word, -4, 0x00C000C0))
    found = [masked(word, shift, bits) for shift in (0, 3, 6)] + [merged(word, 1, 0x80008000, last)]
    # bytes (scale, 0, scale, 0) of the block: two bf16 exponents, once shifted by the bits of the fraction
    scale = pure(f"prmt.b32 $0, $1, 0, {0x4040 + 0x101 * block:#x};", scales)
    scale = pure("shl.b32 $0, $1, 7;", scale)
    return [pure("mul.bf16x2 $0, $1, $2;", one, scale) for one in found]


def power(scales: Int32, block: int) -> Float32:
    """Return 2^(byte - 127) of byte ``block`` of a word; 0 for byte 0."""
    bits = masked(scales, 23 - 8 * block, 0x7F800000)
    return asm("mov.b32 $0, $1;", [Float32], [bits], pure=True)
