"""Test-wide settings: one thread per test process, so parallel tests do not fight for cores; SIGTERM cleans up."""

import os
import signal
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: fixtures and temporary folders end properly

if packages := os.environ.get("DSV4_CORPUS_SITE"):  # set by `./dsv4 test --corpus`; last: the lab's own pins win
    sys.path.append(packages)
