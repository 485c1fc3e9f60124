"""quack, continued: backward passes, rotary embedding, Hadamard transform, and the epilogues of its GEMMs.

What they exercise beyond cases_quack: reductions over rows through atomics and shared memory, split K, gated and
normalising epilogues, triangular schedules, groups of different sizes, gathered rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from cases_quack import MODULE
from corpus import BF16, Case, Check, exact, integers, normal, rounded

SUMS = "fp32 sums in another order, one rounding of the result"


def _operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (m, k) and B (k, n), K-major, whose product has variance 1."""
    return normal(m, k), (torch.randn(n, k) / math.sqrt(k)).to(BF16).t()


def rmsnorm_backward(rows: int, columns: int) -> list[Check]:
    """dx and dw of y = x / rms(x) * w; dw is summed over the rows of a CTA in fp32."""
    from quack.rmsnorm import rmsnorm_bwd

    x, w, dy = normal(rows, columns), torch.randn(columns), normal(rows, columns)
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-6)
    dx, dw = rmsnorm_bwd(x, w, dy, rstd)[:2]
    hat, wdy = x.float() * rstd[:, None], dy.float() * w
    want = (wdy - hat * (hat * wdy).mean(-1, keepdim=True)) * rstd[:, None]
    total = (hat * dy.float()).sum(0)
    return [rounded("dx", dx, want), Check("dw", dw.float(), total, 1e-5, 1e-5, 1e-4, "fp32 sums in another order")]


def layernorm(rows: int, columns: int) -> list[Check]:
    from quack.rmsnorm import layernorm_fwd

    x, w, b = normal(rows, columns), torch.randn(columns), torch.randn(columns)
    want = torch.nn.functional.layer_norm(x.float(), (columns,), w, b, 1e-6)
    return [rounded("y", layernorm_fwd(x, w, b), want)]


def rmsnorm_residual(rows: int, columns: int) -> list[Check]:
    """The sum with the residual is returned too."""
    from quack.rmsnorm import rmsnorm

    x, w, residual = normal(rows, columns), torch.randn(columns), normal(rows, columns)
    y, total = rmsnorm(x, w, residual=residual, prenorm=True)
    want = x.float() + residual.float()
    return [
        rounded("sum", total, want),
        rounded("y", y, want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-6) * w),
    ]


def softmax_backward() -> list[Check]:
    from quack.softmax import softmax_bwd

    y, dy = torch.softmax(torch.randn(8, 1024), -1).to(BF16), normal(8, 1024)
    want = y.float() * (dy.float() - (y.float() * dy.float()).sum(-1, keepdim=True))
    return [rounded("dx", softmax_bwd(dy, y), want)]


def cross_entropy_backward() -> list[Check]:
    from quack.cross_entropy import cross_entropy_bwd

    x, target, dloss = normal(8, 1024), torch.randint(0, 1024, (8,)), torch.randn(8)
    lse = torch.logsumexp(x.float(), -1)
    dx = cross_entropy_bwd(x, target, dloss, lse)
    want = (torch.softmax(x.float(), -1) - torch.nn.functional.one_hot(target, 1024)) * dloss[:, None]
    return [rounded("dx", dx, want)]


def topk_softmax() -> list[Check]:
    """The k largest and their softmax, largest first."""
    from quack.topk import topk_fwd

    x, k = torch.randn(8, 256), 8
    values, indices = topk_fwd(x, k, softmax=True)
    want = torch.softmax(torch.topk(x, k, -1).values, -1)
    reason = "values cut to 16 bits of significand, approximated exp"
    return [
        Check("p", values.float(), want, 1e-3, 1e-3, 0.0, reason),
        Check("x at indices", torch.gather(x, 1, indices.long()), torch.topk(x, k, -1).values, 1e-4, 1e-4, 0.0, reason),
    ]


def rotary() -> list[Check]:
    """Halves of 64 rotated against each other by the angle of the position."""
    from quack.rotary import apply_rotary_emb

    x = normal(1, 32, 4, 128)
    angle = torch.arange(32)[:, None] / 10000 ** (torch.arange(64) / 64)
    cos, sin = angle.cos().to(BF16), angle.sin().to(BF16)
    c, s = cos.float()[None, :, None], sin.float()[None, :, None]
    a, b = x.float().chunk(2, -1)
    return [rounded("y", apply_rotary_emb(x, cos, sin), torch.cat([a * c - b * s, a * s + b * c], -1), slack=1e-3)]


def hadamard(columns: int) -> list[Check]:
    from quack.transform.hadamard import hadamard_transform_fwd

    x, matrix = normal(8, columns), torch.ones(1, 1)
    while matrix.shape[0] < columns:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return [rounded("y", hadamard_transform_fwd(x, columns**-0.5), x.float() @ matrix * columns**-0.5, slack=1e-3)]


def gemm_add(m: int, n: int, k: int, **options: Any) -> list[Check]:
    """alpha A B + beta C + bias."""
    from quack.gemm_interface import gemm_add as function

    a, b, c, bias = integers(m, k), integers(n, k).t(), integers(m, n), integers(n)
    got = function(a, b, c, bias=bias, alpha=0.5, beta=2.0, tuned=False, out_dtype=torch.float32, **options)
    return [exact("d", got, 0.5 * (a.float() @ b.float()) + 2.0 * c.float() + bias.float())]


def gemm_gated(activation: str = "swiglu") -> list[Check]:
    """Columns come in pairs (gate, up)."""
    from quack.gemm_interface import gemm_act

    a, b = _operands(200, 256, 96)
    preact, got = gemm_act(a, b, activation=activation, tuned=False)
    x = a.float() @ b.float()
    want = torch.nn.functional.silu(x[:, ::2]) * x[:, 1::2]
    return [rounded("preact", preact, x, slack=1e-4), rounded("gated", got, want, slack=2e-3)]


def gemm_activation_backward(activation: str) -> list[Check]:
    """(A B) times the activation's derivative at the saved value, and the activation again."""
    from quack.gemm_interface import gemm_dact

    a, b = _operands(256, 256, 128)
    pre = normal(256, 256)
    dx, post = gemm_dact(a, b, pre, activation=activation, tuned=False)[:2]
    at = pre.float().requires_grad_(True)
    with torch.enable_grad():
        y = {"relu": torch.relu, "gelu_tanh_approx": lambda t: torch.nn.functional.gelu(t, approximate="tanh")}[
            activation
        ](at)
        (slope,) = torch.autograd.grad(y.sum(), at)
    return [rounded("dx", dx, a.float() @ b.float() * slope, slack=1e-3), rounded("y", post, y.detach(), slack=1e-3)]


def gemm_symmetric() -> list[Check]:
    """A A^T: only tiles on one side of the diagonal are computed."""
    from quack.gemm_interface import gemm_symmetric as function

    a = integers(256, 64)
    result = function(a, a.t())
    return [exact("d", result[-1] if isinstance(result, tuple) else result, a.float() @ a.float().t())]


def gemm_rms() -> list[Check]:
    from quack.gemm_interface import gemm_rms as function

    a, b = _operands(256, 256, 128)
    w = torch.rand(256) + 0.5
    d, rstd = function(a, b, norm_weight=w, tuned=False)
    x = a.float() @ b.float()
    want = torch.rsqrt(x.square().mean(-1) + 1e-6)
    return [rounded("d", d, x * w, slack=1e-4), Check("rstd", rstd.reshape(-1), want, 1e-5, 0.0, 1e-4, SUMS)]


def gemm_groups(gather: bool = False) -> list[Check]:
    """Groups of 100, 28 and 128 rows, each with its own B; optionally rows gathered from A."""
    from quack.gemm_interface import gemm as function

    starts = torch.tensor([0, 100, 128, 256], dtype=torch.int32)
    a, b = integers(256, 64), integers(3, 128, 64).mT
    index = torch.randperm(256).to(torch.int32) if gather else None
    got = function(a, b, cu_seqlens_m=starts, A_idx=index, tuned=False)
    rows = a.float() if index is None else a.float()[index.long()]
    parts = [rows[lo:hi] @ b[i].float() for i, (lo, hi) in enumerate(zip(starts, starts[1:], strict=False))]
    return [exact("d", got, torch.cat(parts))]


def gemm_depths() -> list[Check]:
    """Depths of 72, 8 and 120 that lie one after the other; tensor maps whose addresses wrap around at 2^64."""
    from quack.gemm_interface import gemm as function

    starts = [0, 72, 80, 200]
    a, b = integers(200, 128).t(), integers(200, 96)
    got = function(a, b, cu_seqlens_k=torch.tensor(starts, dtype=torch.int32), tuned=False)
    parts = [a.float()[:, lo:hi] @ b.float()[lo:hi] for lo, hi in zip(starts, starts[1:], strict=False)]
    return [exact("d", got, torch.stack(parts))]


def gemm_dtype(dtype: torch.dtype, u: float) -> list[Check]:
    """Operands of another type, result of the same type."""
    from quack.gemm_interface import gemm as function

    a, b = normal(128, 96, dtype=dtype), (torch.randn(192, 96) / 9).to(dtype).t()
    return [rounded("d", function(a, b, tuned=False), a.float() @ b.float(), u, slack=1e-4)]


CASES = [
    Case("quack_rmsnorm_backward", MODULE, lambda: rmsnorm_backward(16, 1024)),
    Case("quack_layernorm", MODULE, lambda: layernorm(8, 1024)),
    Case("quack_rmsnorm_residual", MODULE, lambda: rmsnorm_residual(8, 1024)),
    Case("quack_softmax_backward", MODULE, softmax_backward),
    Case("quack_cross_entropy_backward", MODULE, cross_entropy_backward),
    Case("quack_topk_softmax", MODULE, topk_softmax),
    Case("quack_rotary", MODULE, rotary),
    Case("quack_hadamard", MODULE, lambda: hadamard(512)),
    Case("quack_gemm_add", MODULE, lambda: gemm_add(200, 136, 72)),
    Case("quack_gemm_swiglu", MODULE, gemm_gated),
    Case("quack_gemm_drelu", MODULE, lambda: gemm_activation_backward("relu")),
    Case("quack_gemm_dgelu", MODULE, lambda: gemm_activation_backward("gelu_tanh_approx")),
    Case("quack_gemm_symmetric", MODULE, gemm_symmetric),
    Case("quack_gemm_rms", MODULE, gemm_rms),
    Case("quack_gemm_groups", MODULE, gemm_groups),
    Case("quack_gemm_depths", MODULE, gemm_depths),
    # See data/emulator/findings.md.
    Case(
        "quack_gemm_gathered_rows",
        MODULE,
        lambda: gemm_groups(gather=True),
        lints=frozenset({"missing_proxy_fence_cp_async"}),
    ),
    Case("quack_gemm_split_k", MODULE, lambda: gemm_add(128, 128, 512, split_k=2)),
    Case("quack_gemm_f16", MODULE, lambda: gemm_dtype(torch.float16, 2.0**-11)),
    Case("quack_gemm_add_sm90", MODULE, lambda: gemm_add(200, 136, 72), arch="sm_90a"),
    Case("quack_gemm_swiglu_sm90", MODULE, gemm_gated, arch="sm_90a"),
    Case(  # see data/emulator/findings.md
        "quack_gemm_dgelu_sm90",
        MODULE,
        lambda: gemm_activation_backward("gelu_tanh_approx"),
        arch="sm_90a",
        lints=frozenset({"mbarrier_parity_range"}),
    ),
    Case("quack_gemm_groups_sm90", MODULE, gemm_groups, arch="sm_90a"),
    Case("quack_gemm_depths_sm90", MODULE, gemm_depths, arch="sm_90a"),
    Case("quack_gemm_rms_sm90", MODULE, gemm_rms, arch="sm_90a"),
]
