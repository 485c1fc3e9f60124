"""Compare other people's kernels with ours in the emulator. Calls, runs in processes of their own, tables."""
