"""Figures: every function takes arrays or traces, returns a Figure with alt text, and knows nothing of DeepSeek-V4."""

from dsv4lib.viz import errors, history, layout, model, ptx, smem, timeline, tma, tmem, tv, widgets  # noqa: F401
