"""The DSV4 kernel lab: formats, reference model, kernels, emulator, checks and figures that the notebooks call."""

__version__ = "0.1.0"
