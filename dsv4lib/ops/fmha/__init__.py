"""Attention of DeepSeek-V4 as a torch op: heads of a token against selected entries, window keys and a sink."""

from dsv4lib.ops.fmha.op import choose_splits, cluster_of, fmha, warm_up, workspace_size

__all__ = ["choose_splits", "cluster_of", "fmha", "warm_up", "workspace_size"]
