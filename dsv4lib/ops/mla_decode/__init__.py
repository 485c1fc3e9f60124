"""Attend to a paged cache of latents (MLA), as a torch op.

`mla_decode` calls `torch.ops.dsv4.mla_decode`.
"""

from dsv4lib.ops.mla_decode.op import mla_decode

__all__ = ["mla_decode"]
