"""Attend as DeepSeek-V4 does, as a torch op. Heads of a token read selected entries, window keys and a sink."""

from dsv4lib.ops.fmha.op import choose_splits, cluster_of, fmha, warm_up, workspace_size

__all__ = ["choose_splits", "cluster_of", "fmha", "warm_up", "workspace_size"]
