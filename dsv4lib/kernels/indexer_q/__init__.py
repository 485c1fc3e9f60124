"""The lightning indexer's queries: rotated twice (RoPE, Hadamard) and quantised, with their head weights."""
