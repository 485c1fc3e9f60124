"""Score FP4 entries on Hopper, which has no FP4 tensor core. Keys become bf16 in registers, exactly.

    out[t, s] = sum_h weights[t, h] * ReLU(q[t, h] . k[s])        s < lengths[t], q and k MXFP4: E2M1 x E8M0 a 32 of K

As `kernel`, but for the way of a number to the tensor core. E2M1 times a power of two has 2 significant bits, so bf16
holds it, products are exact, and m64n64k16 adds them in fp32.

    keys       64 x 64 B a tile    --bulk copies of pages-->  ring of stages  --lds.v4, one a thread and key-->  words
    scales     64 x 4 B            --with them, or apart--->                  --lds.u8, of a thread's block--->  S
    queries    heads x 64 B        --once, as bf16--------->  B, shared memory: two panels of 64 of K

**Order of K.** Lane t of a quad has block t of a key, 16 bytes: nibble n of word j is K = 32 t + 8 j + n. Nibbles n and
n + 4 are one register of A, so MMA 2 j + n / 2 multiplies, at 2 t + 8 (n % 2) + b,

    K = 32 t + 8 j + n + 4 b        b: half of the register

and queries are stored in that order. A quad's lanes need a scale each, not four.

**Scales.** The sign of a nibble goes to bit 15 of bf16, the magnitude to bits 8 to 6: that is value x 2^-126, zero and
subnormals included. One multiplication gives value x 2^(S - M), where M is the largest scale of the key's four blocks,
and the key's sum is multiplied by 2^M: blocks that are 2^126 times smaller than another of their key count as zero.
Scale 255 makes the score NaN.

A query's scales are in its bf16: sums are not scaled by them. Before 2^M a sum is at most 768 |q|, 128 times a key's
largest 6, so |q| x 768 must stay below 2^128, |q| the largest magnitude of a head's numbers; above it scores are inf.

Source: as `kernel`; OCP Microscaling Formats 1.0 (E2M1, E8M0).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.dsl import wgmma
from dsv4lib.dsl.asm import asm
from dsv4lib.ops.indexer_logits.sm90.config import BLOCK, COLUMNS, DIM, PIECE, SCALE_BYTES, THREADS
from dsv4lib.ops.indexer_logits.sm90.kernel import HopperLogits, Ring

PANEL = 64  # of K: 128 bytes of bf16
STEPS = DIM // 16  # MMAs of a tile and 64 heads
NAN = 0x7FC07FC0  # two bf16
PLACED = 0x7E807E80  # two bf16 of 2^126: what a nibble that lies as bits of bf16 lacks


class HopperLogitsFp4(HopperLogits):
    """Score FP4 entries; options as `Config`."""

    variant = "fp4"
    key_bytes = DIM // 2
    query_row = DIM // 2
    operand_row = 2 * DIM

    @cute.jit
    def load_queries(self, mQ: cute.Tensor, mScales: cute.Tensor | None, token: Int32, queries: Int32):
        """Store a token's heads as bf16 in the order of K that the keys have, swizzled; a thread a block."""
        thread, _, _ = cute.arch.thread_idx()
        rCodes = cute.make_rmem_tensor(BLOCK // 2, cutlass.Uint8)
        words = cute.recast_tensor(rCodes, Int32)
        for i in cutlass.range_constexpr(self.heads * (DIM // BLOCK) // THREADS):
            number = i * THREADS + thread
            head, block = number // 4, number % 4
            cute.autovec_copy(cute.local_tile(mQ[token, head, None], (BLOCK // 2,), (block,)), rCodes)
            scale = two_powers(self.byte(mScales[token, head], block))
            for j in cutlass.range_constexpr(4):
                for n, placed in enumerate(placed_pairs(words[j])):
                    step, half = 2 * j + n // 2, n % 2
                    panel = queries + step // 4 * (self.heads * 2 * PANEL)
                    piece = step % 4 * 2 + half
                    place = panel + head * (2 * PANEL) + ((piece ^ head % 8) << 4) + 4 * block
                    value = scaled(scaled(placed, Int32(PLACED)), scale)
                    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[place, value])

    def byte(self, word: Int32, number: Int32) -> Int32:
        """Byte ``number`` of a word."""
        return (word >> (8 * number)) & 255

    def take(self, ring: Ring, stage: Int32) -> tuple[list, list]:
        """Load this thread's blocks of two keys as words of A, and make the keys' factors."""
        thread, _, _ = cute.arch.thread_idx()
        row, block = thread // 32 * 16 + thread % 32 // 4, thread % 4
        base = ring.keys.toint() + stage * self.stage_bytes
        base = base + row // self.part * (self.part * (self.key_bytes + SCALE_BYTES))
        place, words, factors = row % self.part, [], []
        for half in range(2):
            source = base + (place + 8 * half) * self.key_bytes + block * PIECE
            codes = asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", [Int32] * 4, [source])
            source = base + self.part * self.key_bytes + (place + 8 * half) * SCALE_BYTES
            own = asm("ld.shared.u8 $0, [$1];", [Int32], [source + self.scale_of(block)])
            largest = self.largest(own)
            relative = below(own, largest)
            words += [scaled(placed, relative) for word in codes for placed in self.placed(word)]
            factors.append(power(largest))
        return words, factors

    def scale_of(self, block: Int32) -> Int32:
        """Which of a key's scales a block has."""
        return block

    def placed(self, word: Int32) -> list:
        """Words of A of eight codes, without their scale."""
        return placed_pairs(word)

    @cute.jit
    def largest(self, own: Int32) -> Int32:
        """Return the largest scale of a key's four blocks, at least 1."""
        found = cutlass.max(own, Int32(1))
        for step in cutlass.range_constexpr(2):
            found = cutlass.max(found, cute.arch.shuffle_sync_bfly(found, 1 << step))
        return found

    def votes(self, words: list, rWeights: cute.Tensor, queries: Int32) -> list:
        """Weighted sums over this thread's heads, of its two keys."""
        # MMA s has the registers 2 s and 2 s + 1 of both keys, which have 16 each.
        a = [words[16 * row + 2 * s + half] for s in range(STEPS) for half in range(2) for row in range(2)]
        found = [Float32(0.0), Float32(0.0)]
        for number in range(self.passes):
            b = wgmma.operand(queries + number * COLUMNS * 2 * PANEL)
            panels = [s // 4 * (self.heads * 2 * PANEL) + wgmma.STEP_BYTES * (s % 4) for s in range(STEPS)]
            wgmma.fence()
            sums = wgmma.multiply(a, b, panels, COLUMNS, "bf16", False)
            wgmma.commit()
            sums = wgmma.wait_for(sums)
            for c, one in enumerate(sums):  # row c / 2 % 2, column 8 (c / 4) + 2 t + c % 2
                weight = rWeights[number * COLUMNS // 4 + 2 * (c // 4) + c % 2]
                found[c // 2 % 2] = found[c // 2 % 2] + self.relu(one) * weight
        return found


def placed_pairs(word: Int32) -> list:
    """Put nibbles n and n + 4, n = 0 to 3, into halves of a word each, as bf16 of value x 2^-126."""
    return [_placed(word, 6 - 4 * n, 12 - 4 * n) for n in range(4)]


def _placed(word: Int32, magnitude: int, sign: int) -> Int32:
    moved = asm(f"{{ .reg .b32 a; {_shift('a', magnitude)} and.b32 $0, a, 0x01C001C0; }}", [Int32], [word], pure=True)
    text = f"{{ .reg .b32 a; {_shift('a', sign)} lop3.b32 $0, a, 0x80008000, $2, 0xEA; }}"
    return asm(text, [Int32], [word, moved], pure=True)


def _shift(target: str, left: int) -> str:
    return f"{'shl' if left >= 0 else 'shr'}.b32 {target}, $1, {abs(left)};"


def scaled(pair: Int32, factors: Int32) -> Int32:
    """Multiply two bf16 by two."""
    return asm("mul.bf16x2 $0, $1, $2;", [Int32], [pair, factors], pure=True)


def two_powers(scale: Int32) -> Int32:
    """Make two bf16 of 2^(scale - 127): the subnormal 2^-127 of scale 0, NaN of scale 255."""
    bits = cutlass.select_(scale == 0, Int32(0x00400040), scale * Int32(0x00800080))
    return cutlass.select_(scale == 255, Int32(NAN), bits)


def below(scale: Int32, largest: Int32) -> Int32:
    """Make two bf16 of 2^(126 + scale - largest), 0 where that is too small."""
    return cutlass.max(scale - largest + 253, Int32(0)) * Int32(0x00800080)


def power(scale: Int32) -> Float32:
    """Return 2^(scale - 127) of a scale from 1; NaN of 255."""
    bits = cutlass.select_(scale == 255, Int32(NAN), scale << 23)
    return asm("mov.b32 $0, $1;", [Float32], [bits], pure=True)
