"""Hold the ops, a folder each. `op` checks arguments, chooses a back end, compiles once and launches its kernels.

A folder holds `op.py` (the function, also importable from the folder), `kernel.py` or one file an architecture
(`sm100.py`, `sm90.py`), `arguments.py` (from tensors to a launch) and `faults.py` (kernels with injected faults).
"""
