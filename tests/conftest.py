"""Test-wide settings: one thread per test process, so parallel tests do not fight for cores; SIGTERM cleans up."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: fixtures and temporary folders end properly
