"""Compare other people's kernels with ours in the emulator: calls, runs in processes of their own, tables."""
