"""Time the memory-bound ops on a GPU. Rows by op, peers on the same inputs, one harness."""
