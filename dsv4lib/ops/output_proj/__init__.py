"""Project attention's output in groups, as a torch op. Each group of heads has weights of its own."""

from dsv4lib.ops.output_proj.op import output_proj

__all__ = ["output_proj"]
