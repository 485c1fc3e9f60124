"""Attention over a paged 4-bit KV cache, as a torch op: `turbo4_decode` calls `torch.ops.dsv4.turbo4_decode`."""

from dsv4lib.ops.turbo4_decode.op import turbo4_decode

__all__ = ["turbo4_decode"]
