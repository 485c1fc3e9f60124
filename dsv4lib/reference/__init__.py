"""Compute DeepSeek-V4 in plain PyTorch: the oracle. One module per operator, to be read beside the equations.

Why it exists: every kernel is judged against these functions. They compute in the dtype of their inputs (fp32 or
fp64), are differentiable, and take tensors and return tensors; the only state is in :mod:`dsv4lib.reference.cache`.
Speed is not a goal, being obviously right is.

Modules call each other through module attributes (``mhc.sinkhorn(...)``), so a test can replace one decision of the
architecture by a fault and see which check notices.
"""
