"""Memory of the emulated device: global allocations, address windows."""
