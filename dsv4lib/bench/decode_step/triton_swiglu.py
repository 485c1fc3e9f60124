"""Multiply clamped gates and values in an epilogue of triton_kernels, as DSV4 does. Importing it needs Triton."""

import triton
import triton.language as tl


@triton.jit
def clamped_swiglu(x: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Return SwiGLU of a tile [M, N], whose gates and values alternate: [M, N / 2].

    The gate is clamped above, the value on both sides.
    """
    gate, value = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    gate = tl.minimum(gate.to(tl.float32), limit)
    value = tl.maximum(tl.minimum(value.to(tl.float32), limit), -limit)
    return gate / (1 + tl.exp(-gate)) * value
