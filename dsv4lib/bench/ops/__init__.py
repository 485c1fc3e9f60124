"""Time the memory-bound ops on a GPU: rows by op, peers on the same inputs, one harness."""
