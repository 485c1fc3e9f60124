"""Vectors to 4-bit entries of a paged KV cache, as a torch op: `turbo4_encode` calls `torch.ops.dsv4.turbo4_encode`."""

from dsv4lib.ops.turbo4_encode.op import turbo4_encode

__all__ = ["turbo4_encode"]
