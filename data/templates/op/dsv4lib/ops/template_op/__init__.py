"""Gate rows, silu(gate) * up, as a torch op. `template_op` calls `torch.ops.dsv4.template_op`."""

from dsv4lib.ops.template_op.op import template_op

__all__ = ["template_op"]
