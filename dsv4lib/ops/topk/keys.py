"""Treat scores as integers. Keys that order as scores do, the bins of a first look at them, and ranges of keys.

key    signed: bits of x >= 0, -1 - magnitude below 0; -0 as 0, NaN below -inf, `NOTHING` below NaN
place  of a key among the bins of a histogram, 0 for the best: 5 bits of exponent, 2^-16 to 2^16, and 4 to 6 of the
       mantissa, for either sign; what is outside goes to the bin at the end
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

NOTHING = -(1 << 31)  # where there is no score
NAN = NOTHING + 1
MAGNITUDE = (1 << 31) - 1
LOWEST = -1 - 0x7F800000  # of -inf


@cute.jit
def key_of(x: Float32, zero: Float32 | float = 0.0) -> Int32:
    """Return an integer that orders as the number does."""
    number = x + zero  # makes 0 of -0
    bits = number.bitcast(Int32)
    key = bits ^ ((bits >> 31) & Int32(MAGNITUDE))
    return cutlass.select_(number == number, key, Int32(NAN))


class Bins:
    """A histogram of `size` bins over all keys; see the module docstring.

    Args:
        size: 1024, 2048 or 4096.
    """

    def __init__(self, size: int):
        self.size, self.half = size, size // 2
        mantissa = self.half.bit_length() - 1 - 5
        self.shift = 23 - mantissa
        self.base = (127 - 16) << mantissa

    @cute.jit
    def place(self, key: Int32) -> Int32:
        """Return the bin of a key."""
        signed = key >> self.shift
        sign = signed >> 31
        q = cutlass.max(cutlass.min((signed ^ sign) - self.base, Int32(self.half - 1)), Int32(0))
        return q ^ (self.half - 1) ^ (sign & (self.size - 1))

    @cute.jit
    def keys(self, place: Int32):
        """Return (lowest, highest) key of a bin."""
        negative = place >= self.half
        q = cutlass.select_(negative, place - self.half, (self.half - 1) - place)
        low = cutlass.select_(q == 0, Int32(0), (q + self.base) << self.shift)
        high = cutlass.select_(q == self.half - 1, Int32(MAGNITUDE), ((q + (self.base + 1)) << self.shift) - 1)
        lowest = cutlass.select_(negative, cutlass.max(-1 - high, Int32(NAN)), low)
        return lowest, cutlass.select_(negative, -1 - low, high)


@cute.jit
def edge_of(key: Int32) -> Float32:
    """Return the lowest number of at least this key.

    The key may be no number's own; -inf for the keys of NaN, too.
    """
    near = cutlass.max(key, Int32(LOWEST))
    bits = cutlass.select_(near < 0, (-1 - near) | Int32(NOTHING), near)
    return Int32(bits).bitcast(Float32)


@cute.jit
def digit_shift(span: Uint32, bits: int) -> Uint32:
    """Return how far to shift 0 .. span to have numbers of at most ``bits`` bits."""
    return Int32(cutlass.max(Int32(32 - bits) - Int32(cute.arch.clz(span)), Int32(0))).bitcast(Uint32)
