"""The DSV4 kernel lab. Formats, reference model, kernels, emulator, checks and figures that the notebooks call."""

__version__ = "0.1.0"
