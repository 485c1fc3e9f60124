"""Inject faults into the encoder, one at a time: each class replaces one thing. `FAULTS` holds them by name."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from dsv4lib.ops.turbo4_encode import kernel as encode_kernel


class NotRotated(encode_kernel.Turbo4Encode):
    """Leaves signs and Hadamard matrix out: right for normals, useless where channels differ."""

    @cute.jit
    def rotated(self, rX: cute.Tensor, flips: Int32, lane: Int32):
        """As it came."""
        x = rX.load().to(Float32)
        return [x[i] for i in range(encode_kernel.RUN)]


class SameSigns(encode_kernel.Turbo4Encode):
    """Takes the signs of the first 32 dims for all: still a rotation, another one than attention's."""

    @cute.jit
    def signs(self, seed: Int32, lane: Int32):
        """Forget the lane."""
        return encode_kernel.sign_word(seed, Int32(0))


class OddDimLow(encode_kernel.Turbo4Encode):
    """Puts odd dims into the low nibbles."""

    def words_of(self, y: list, norm: Float32) -> list:
        """Swap neighbours."""
        return super().words_of([y[i ^ 1] for i in range(len(y))], norm)


class NormsFromOne(encode_kernel.Turbo4Encode):
    """Counts norms of a page from 1: an entry has its successor's."""

    def norm_slot(self, slot: Int32) -> Int32:
        """The one after."""
        return slot + 1


FAULTS = {kernel.__name__: kernel for kernel in (NotRotated, SameSigns, OddDimLow, NormsFromOne)}
