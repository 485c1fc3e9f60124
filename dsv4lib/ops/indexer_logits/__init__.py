"""Score for the lightning indexer, as a torch op. `indexer_logits` writes fp32 rows for `dsv4lib.ops.topk`."""

from dsv4lib.ops.indexer_logits.op import indexer_logits

__all__ = ["indexer_logits"]
