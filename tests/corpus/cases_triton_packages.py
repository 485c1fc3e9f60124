"""liger-kernel, gemlite and fla: packages of Triton kernels, through their own functions and Triton's own launcher.

What they exercise: autograd around kernels, reductions over rows that are no power of two, atomics across programs,
autotuned kernels with pre-hooks, integers unpacked from words into mma.sync and wgmma, states that a loop carries.
"""

from __future__ import annotations

import math

import torch
from corpus import Case, Check

LIGER, GEMLITE, FLA = "liger_kernel", "gemlite", "fla"


def close(name: str, got: torch.Tensor, want: torch.Tensor, slack: float = 1e-6) -> Check:
    """A result in fp32 of sums in fp32; ``want`` is fp64."""
    most = float(want.abs().max())
    reason = "fp32 sums in another order, approximated functions"
    return Check(name, got.detach(), want.detach().float(), slack, 0.0, 4 * slack * most, reason)


def with_gradient(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf in fp32 and the same in fp64, both with gradients."""
    x = torch.randn(*shape)
    return x.clone().requires_grad_(), x.double().requires_grad_()


def rms_norm(rows: int = 6, columns: int = 300) -> list[Check]:
    """Forward and backward."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    (x, x64), (w, w64), dy = with_gradient(rows, columns), with_gradient(columns), torch.randn(rows, columns)
    y = LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, "llama", False)
    want = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-6) * w64
    y.backward(dy)
    want.backward(dy.double())
    return [close("y", y, want), close("dx", x.grad, x64.grad), close("dw", w.grad, w64.grad)]


def layer_norm(rows: int = 5, columns: int = 200) -> list[Check]:
    """Forward and backward."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    (x, x64), (w, w64), (b, b64) = with_gradient(rows, columns), with_gradient(columns), with_gradient(columns)
    y = LigerLayerNormFunction.apply(x, w, b, 1e-6)
    want = torch.nn.functional.layer_norm(x64, (columns,), w64, b64, 1e-6)
    dy = torch.randn(rows, columns)
    y.backward(dy)
    want.backward(dy.double())
    pairs = (("y", y, want), ("dx", x.grad, x64.grad), ("dw", w.grad, w64.grad), ("db", b.grad, b64.grad))
    return [close(*pair) for pair in pairs]


def swiglu(rows: int = 7, columns: int = 130) -> list[Check]:
    """Forward and backward."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    (a, a64), (b, b64), dy = with_gradient(rows, columns), with_gradient(rows, columns), torch.randn(rows, columns)
    y, want = LigerSiLUMulFunction.apply(a, b), torch.nn.functional.silu(a64) * b64
    y.backward(dy)
    want.backward(dy.double())
    return [close("y", y, want), close("da", a.grad, a64.grad), close("db", b.grad, b64.grad)]


def cross_entropy(rows: int = 6, classes: int = 301) -> list[Check]:
    """The loss and its gradient, which the kernel writes over the logits; one row is ignored."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    (x, x64), target = with_gradient(rows, classes), torch.randint(0, classes, (rows,))
    target[2] = -100
    made = LigerCrossEntropyFunction.apply(x * 1.0, target, None, -100, 0.0, 0.0, "mean", None, False)
    loss, want = made[0] if isinstance(made, tuple) else made, torch.nn.functional.cross_entropy(x64, target)
    loss.backward()
    want.backward()
    return [close("loss", loss.reshape(1), want.reshape(1), 2e-6), close("dx", x.grad, x64.grad, 2e-6)]


def gemlite_linear(rows: int = 5, inputs: int = 256, outputs: int = 96, group: int = 64) -> list[Check]:
    """Four-bit weights with a scale and a zero for each group, fp16 activations."""
    import gemlite
    from gemlite.core import DType, GemLiteLinearTriton

    gemlite.set_autotune("default")
    words = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    scales = (torch.rand(outputs * inputs // group, 1) * 0.1 + 0.01).half()
    zeros = torch.full_like(scales, 8.0)
    layer = GemLiteLinearTriton(4, group, inputs, outputs, input_dtype=DType.FP16, output_dtype=DType.FP16)
    weights = ((words.double().reshape(-1, group) - zeros.double()) * scales.double()).reshape(outputs, inputs)
    layer.pack(words, scales, zeros, None)
    x = torch.randn(rows, inputs).half()
    want = x.double() @ weights.t()
    u = 2.0**-11  # of fp16: weights are rounded once, and so is the result
    bound = 2 * u * float((x.double().abs() @ weights.abs().t()).max())
    return [Check("y", layer(x), want.float(), 2 * u / math.sqrt(3), 1.01 * u, bound, "weights and result in fp16")]


def gated_delta_rule(tokens: int = 37, heads: int = 2, keys: int = 32, values: int = 48) -> list[Check]:
    """S decays, k @ S is corrected to v by beta, o = scale q @ S: token by token, from and to a state."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k = (torch.nn.functional.normalize(torch.randn(1, tokens, heads, keys), dim=-1) for _ in "qk")
    v, start = torch.randn(1, tokens, heads, values), torch.randn(1, heads, keys, values)
    g, beta = -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads)
    o, end = fused_recurrent_gated_delta_rule(
        q, k, v, g=g, beta=beta, scale=0.3, initial_state=start, output_final_state=True
    )
    state, want = start[0].double(), torch.empty(1, tokens, heads, values, dtype=torch.float64)
    for t in range(tokens):
        state = state * g[0, t].double().exp()[:, None, None]
        missing = v[0, t].double() - torch.einsum("hk,hkv->hv", k[0, t].double(), state)
        state = state + torch.einsum("hk,hv->hkv", k[0, t].double(), beta[0, t].double()[:, None] * missing)
        want[0, t] = 0.3 * torch.einsum("hk,hkv->hv", q[0, t].double(), state)
    return [close("o", o, want), close("state", end, state[None])]


def simple_gla(tokens: int = 45, heads: int = 3, keys: int = 40, values: int = 24) -> list[Check]:
    """S decays and takes k v; o = scale q @ S. Sizes that are no powers of two."""
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    q, k = (torch.randn(1, tokens, heads, keys) for _ in "qk")
    v, g = torch.randn(1, tokens, heads, values), -torch.rand(1, tokens, heads)
    o, end = fused_recurrent_simple_gla(q, k, v, g=g, scale=0.3, output_final_state=True)
    state, want = torch.zeros(heads, keys, values, dtype=torch.float64), torch.empty(o.shape, dtype=torch.float64)
    for t in range(tokens):
        state = state * g[0, t].double().exp()[:, None, None] + torch.einsum(
            "hk,hv->hkv", k[0, t].double(), v[0, t].double()
        )
        want[0, t] = 0.3 * torch.einsum("hk,hkv->hv", q[0, t].double(), state)
    return [close("o", o, want), close("state", end, state[None])]


CASES = [
    Case("fla_gated_delta_rule", FLA, gated_delta_rule),
    Case("fla_gated_delta_rule_sm90", FLA, gated_delta_rule, arch="sm_90a"),
    Case("fla_simple_gla", FLA, simple_gla),
    Case("liger_rms_norm", LIGER, rms_norm),
    Case("liger_rms_norm_sm90", LIGER, rms_norm, arch="sm_90a"),
    Case("liger_layer_norm", LIGER, layer_norm),
    Case("liger_swiglu", LIGER, swiglu),
    Case(
        "liger_cross_entropy",
        LIGER,
        cross_entropy,
        lints=frozenset({"race_shared_same_value"}),
        errors=frozenset({"race_global"}),
    ),
    Case("gemlite_w4a16", GEMLITE, gemlite_linear, errors=frozenset({"global_read_past_end"})),
    Case("gemlite_w4a16_gemv_sm90", GEMLITE, lambda: gemlite_linear(rows=1), arch="sm_90a", unstable="bits"),
]
