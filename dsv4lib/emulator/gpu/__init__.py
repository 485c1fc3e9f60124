"""Run PTX on numpy arrays: load a file, launch its kernels, read what the checks found.

module = gpu.load("scale.ptx")                                # the architecture is that of its .target
result = module.kernel("scale").launch(grid=4, block=128, args=[x, y, 2.0, 500], checks="race")
for hazard in result.hazards: print(hazard, hazard.fix)
"""

from dsv4lib.emulator.gpu.arguments import Pointer, Struct, TensorMap
from dsv4lib.emulator.gpu.module import Kernel, Module, load

__all__ = ["Kernel", "Module", "Pointer", "Struct", "TensorMap", "load"]
