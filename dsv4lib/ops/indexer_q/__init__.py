"""Queries of the lightning indexer as its scoring kernels read them, from their projection, as a torch op."""

from dsv4lib.ops.indexer_q.op import IndexerQueries, indexer_q, shape_of

__all__ = ["IndexerQueries", "indexer_q", "shape_of"]
