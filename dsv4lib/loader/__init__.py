"""Load checkpoints as the kernels read them. Safetensors only, headers checked before anything is allocated.

| module        | what                                                                       |
|---------------|----------------------------------------------------------------------------|
| `safetensors` | one file: header, checks, tensors                                          |
| `checkpoint`  | a folder of files and its index; tensors by name, dtype and shape checked   |
| `settings`    | config.json <-> ModelConfig, every field checked, all faults at once       |
| `names`       | every tensor of a checkpoint: name, shape, type, in each released format   |
| `whole`       | a whole checkpoint: checked, streamed, loaded into a module                |
| `share`       | what one rank of several reads: which tensors, which part of each           |
| `writer`      | a checkpoint folder written tensor by tensor, all or nothing               |
| `convert`     | one released format -> another                                             |
| `experts`     | routed and shared experts: MXFP4, NVFP4 or FP8, decided module by module     |
| `operands`    | experts -> operands of the grouped GEMM: gate/up interleaved, scales swizzled |
| `moe`         | a layer's gate, routed and shared experts -> `layers.moe.Moe`               |
| `mega_moe`    | the same for DeepGEMM's fused kernel: names, packing, buffer sizes          |
"""

from dsv4lib.loader.safetensors import CheckpointError

__all__ = ["CheckpointError"]
