"""Test-wide settings: one thread per test process, so parallel tests do not fight for cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
