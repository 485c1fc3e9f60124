"""Hold the memory of the emulated device: global allocations, address windows."""
