"""The sum over a token's experts and the shared expert, as a torch op."""

from dsv4lib.ops.moe_combine.op import moe_combine

__all__ = ["moe_combine"]
