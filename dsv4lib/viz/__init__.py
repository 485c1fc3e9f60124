"""Figures: every function takes arrays or traces, returns a Figure with alt text, and knows nothing of DeepSeek-V4."""

from dsv4lib.viz import errors, layout, model, ptx, smem, tma, tmem, tv, widgets  # noqa: F401
