"""quack (quack-kernels on PyPI): norms, reductions, top-k and GEMMs for SM90 and SM100, through its public functions.

What they exercise: st.async reductions over a cluster, TMA multicast, tcgen05 2-CTA MMA, dynamic scheduling by
clusterlaunchcontrol, block scaling, wgmma.
"""

from __future__ import annotations

import math

import torch
from corpus import BF16, U_BF16, Case, Check, exact, integers, normal, rounded

MODULE = "quack"


def rmsnorm(rows: int, columns: int) -> list[Check]:
    """y = x / rms(x) * w; more than 32768 columns are spread over a cluster that reduces through st.async."""
    from quack.rmsnorm import rmsnorm as function

    x, w = normal(rows, columns), torch.randn(columns)
    xf = x.float()
    return [rounded("y", function(x, w), xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + 1e-6) * w)]


def softmax() -> list[Check]:
    from quack.softmax import softmax as function

    x = normal(8, 1024)
    return [rounded("y", function(x), torch.softmax(x.float(), -1))]


def topk() -> list[Check]:
    """The kernel carries the index in the lowest 8 bits of the value: values are cut to 16 bits of significand."""
    from quack.topk import topk_fwd

    x, k = torch.randn(8, 256), 8
    values, indices = topk_fwd(x, k)
    want = torch.topk(x, k, -1).values
    u = 2.0 ** (8 - 23)
    return [
        Check("values", values, want, u, u, 0.0, "8 bits of the significand hold the index"),
        Check("x at indices", torch.gather(x, 1, indices.long()), want, u, u, 0.0, "order is decided by cut values"),
    ]


def cross_entropy() -> list[Check]:
    from quack.cross_entropy import cross_entropy_fwd

    x, target = normal(8, 1024), torch.randint(0, 1024, (8,))
    result = cross_entropy_fwd(x, target)
    loss = result[0] if isinstance(result, tuple | list) else result
    want = torch.nn.functional.cross_entropy(x.float(), target, reduction="none")
    return [Check("loss", loss, want, 2e-6, 0.0, 1e-5, "fp32 sums in another order, approximated exp and log")]


def gemm(m: int, n: int, k: int) -> list[Check]:
    from quack.gemm_interface import gemm as function

    a, b = integers(m, k), integers(n, k).t()
    return [exact("d", function(a, b, tuned=False), a.float() @ b.float())]


def gemm_relu() -> list[Check]:
    from quack.gemm_interface import gemm_act

    a, b = normal(256, 128), (torch.randn(256, 128) / 11).to(BF16).t()
    result = gemm_act(a, b, activation="relu", tuned=False)
    return [rounded("relu(ab)", result[1] if isinstance(result, tuple) else result, torch.relu(a.float() @ b.float()))]


def gemm_scaled(form: str) -> list[Check]:
    """Block-scaled operands, quantised by quack itself; the reference multiplies its own dequantised values."""
    from quack.blockscaled.operand import BlockScaledOperand
    from quack.gemm_interface import gemm as function

    a, b = (BlockScaledOperand.quantize(normal(256, 256), form) for _ in range(2))
    want = a.dequantize(torch.float32) @ b.dequantize(torch.float32).t()
    got = function(a, b.mT, tuned=False, out_dtype=BF16)
    # bf16 of a sum is half a unit off at most; a sum of fp32 near a tie may fall to the other side.
    return [Check("d", got, want, U_BF16 / math.sqrt(3) + 1e-5, 1.01 * U_BF16, 1e-3, "one rounding to bf16")]


CASES = [
    Case("quack_rmsnorm", MODULE, lambda: rmsnorm(8, 1024)),
    Case("quack_rmsnorm_cluster", MODULE, lambda: rmsnorm(2, 65536)),
    Case("quack_softmax", MODULE, softmax),
    Case("quack_topk", MODULE, topk),
    Case("quack_cross_entropy", MODULE, cross_entropy),
    Case("quack_gemm", MODULE, lambda: gemm(256, 256, 128)),
    Case("quack_gemm_ragged", MODULE, lambda: gemm(200, 136, 72)),
    Case("quack_gemm_relu", MODULE, gemm_relu),
    Case("quack_gemm_mxfp8", MODULE, lambda: gemm_scaled("mxfp8")),
    Case("quack_gemm_nvfp4", MODULE, lambda: gemm_scaled("nvfp4")),
    Case("quack_gemm_mxfp4", MODULE, lambda: gemm_scaled("mxfp4")),
    Case("quack_gemm_sm90", MODULE, lambda: gemm(256, 256, 128), arch="sm_90a"),
    Case("quack_gemm_ragged_sm90", MODULE, lambda: gemm(200, 136, 72), arch="sm_90a"),
    Case("quack_rmsnorm_sm90", MODULE, lambda: rmsnorm(8, 1024), arch="sm_90a"),
]
