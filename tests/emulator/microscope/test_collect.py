"""Which launches a page keeps, and how they are counted."""

import numpy as np

from dsv4lib.emulator import gpu
from dsv4lib.emulator.errors import LaunchError
from dsv4lib.emulator.microscope.collect import Collector
from tests.emulator.gpu.test_gpu import SCALE


def test_an_error_before_a_launch_is_no_launch():
    module = gpu.load(SCALE, arch="sm_90a")
    collector = Collector(module.device)
    (name,) = module.kernels
    x = np.zeros(32, np.float32)
    module.kernel(name).launch(1, 32, [x, x, 1.0, 32])
    collector.stopped(LaunchError("of another kind"))
    assert collector.launches == len(collector.kept) == 1
    module.kernel(name).launch(1, 32, [x, x, 1.0, 32])
    assert [one.number for one in collector.kept] == [1, 2]
