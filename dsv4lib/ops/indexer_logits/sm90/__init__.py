"""The indexer's scores on Hopper: FP8 queries and keys."""
