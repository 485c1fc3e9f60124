"""The launch side: what CuTeDSL's compiled host code calls instead of the CUDA runtime."""
