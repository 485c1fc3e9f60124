"""Make queries and cache entries of tokens' projections, as a torch op."""

from dsv4lib.ops.qnorm_rope_kv.op import qnorm_rope_kv, shape_of

__all__ = ["qnorm_rope_kv", "shape_of"]
