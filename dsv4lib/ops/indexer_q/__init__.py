"""Make indexer queries from their projection, as a torch op.

They are as the scoring kernels read them.
"""

from dsv4lib.ops.indexer_q.op import IndexerQueries, indexer_q, shape_of

__all__ = ["IndexerQueries", "indexer_q", "shape_of"]
