"""Look up embedding rows and start the residual streams, as a torch op."""

from dsv4lib.ops.embedding.op import Embedded, embedding

__all__ = ["Embedded", "embedding"]
