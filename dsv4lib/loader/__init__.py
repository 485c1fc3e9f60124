"""From checkpoints to what the kernels read: safetensors only, every header checked before anything is allocated.

| module        | what                                                                       |
|---------------|----------------------------------------------------------------------------|
| `safetensors` | one file: header, checks, tensors                                          |
| `checkpoint`  | a folder of files and its index; tensors by name, dtype and shape checked   |
| `experts`     | routed experts: MXFP4 (DeepSeek) or NVFP4 (NVIDIA), decided module by module |
| `operands`    | experts -> operands of the grouped GEMM: gate/up interleaved, scales swizzled |
| `mega_moe`    | the same for DeepGEMM's fused kernel: names, packing, buffer sizes          |
"""

from dsv4lib.loader.safetensors import CheckpointError

__all__ = ["CheckpointError"]
