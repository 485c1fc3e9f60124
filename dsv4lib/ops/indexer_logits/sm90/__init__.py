"""The indexer's scores on Hopper: FP8 or FP4 queries and keys."""
