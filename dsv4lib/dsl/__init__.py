"""Share what all kernels need. Compilation, layouts, pipelines, tensor memory, MMAs, and pieces of their code."""
