"""Pick the exact top-k of fp32 scores, as a torch op. `topk` calls `torch.ops.dsv4.topk`: int32 indices, in place."""

from dsv4lib.ops.topk.op import topk

__all__ = ["topk"]
