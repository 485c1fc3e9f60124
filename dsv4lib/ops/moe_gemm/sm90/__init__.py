"""The experts' GEMM on Hopper: MXFP4 weights, tiled at load time, times MXFP8 or bf16 activations."""
