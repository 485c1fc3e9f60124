"""Rows of the embedding for tokens, and the residual streams that begin with them, as a torch op."""

from dsv4lib.ops.embedding.op import Embedded, embedding

__all__ = ["Embedded", "embedding"]
