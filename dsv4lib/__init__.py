"""The DSV4 kernel lab: formats, reference model, kernels, emulator, checks and figures behind the notebooks."""

__version__ = "0.1.0"
