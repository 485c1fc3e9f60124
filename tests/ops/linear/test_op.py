"""The ops dsv4::linear and dsv4::output_proj: the emulated kernel against the oracle, groups, FP8, bad arguments."""

import pytest
import torch

from dsv4lib import backends
from dsv4lib.config import FLASH
from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.formats import e4m3, fp8_block, mxfp4, nvfp4, scale_swizzle
from dsv4lib.ops.linear.op import linear, mxfp8_of
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.output_proj.op import output_proj
from dsv4lib.ops.quantize.op import quantize
from dsv4lib.ops.rmsnorm_quant.op import add_rmsnorm_quant
from dsv4lib.reference import output_proj as oracle
from dsv4lib.reference.linear import linear as exact
from dsv4lib.reference.linear import linear_fp8 as fp8_oracle
from dsv4lib.reference.moe_gemm import swiglu

pytestmark = pytest.mark.filterwarnings("error:the emulator reports")  # hazards
FORMS = {"nvfp4": ("nvfp4", "nvfp4"), "w4a8": ("mxfp8", "mxfp4"), "mxfp8": ("mxfp8", "mxfp8"), "bf16": ("bf16", "bf16")}


def operand(shape, form, seed):
    """(operand, what it stands for in fp64): normals, rows of different size."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-1, 1, shape[-2], base=2.0)[torch.randperm(shape[-2], generator=generator), None]
    x = torch.randn(*shape, generator=generator) * scale
    if form == "bf16":
        x = x.bfloat16()
        return Operand(x), x.double()
    if form == "mxfp8":
        q = fp8_block.quantize_activation(x, 32)
        return Operand(q.codes, scale_swizzle.swizzle(q.scales)), fp8_block.dequantize(q, torch.float64)
    kind = {"nvfp4": nvfp4, "mxfp4": mxfp4}[form]
    q = kind.quantize(x, 1.0) if kind is nvfp4 else kind.quantize(x)
    return Operand(q.packed, scale_swizzle.swizzle(q.scales)), kind.dequantize(q, torch.float64)


def off(found, want):
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", FORMS)
def test_dense(mode):
    """One tile and its ragged neighbours in both directions; fp32 sums of exact products."""
    (x, a), (w, b) = operand((37, 384), FORMS[mode][0], 1), operand((144, 384), FORMS[mode][1], 2)
    alpha = torch.tensor([0.03])
    y = linear(x, w, mode=mode, alpha=alpha, out_format="fp32", backend="emulator").codes
    assert y.shape == (37, 144) and off(y, exact(a, b, alpha.double()[0])) < 3e-7
    again = linear(x, w, mode=mode, alpha=alpha, out_format="fp32", backend="reference").codes
    assert off(again, exact(a, b, alpha.double()[0])) < 1e-7


@pytest.mark.one_in(2)
@pytest.mark.parametrize("out_format", ["nvfp4", "mxfp8"])
def test_first_gemm_of_a_shared_expert(out_format):
    """A pair of CTAs, clamped, quantised: the codes of the reference back end but at ties."""
    mode = "nvfp4" if out_format == "nvfp4" else "mxfp8"
    (x, a), (w, b) = operand((260, 256), FORMS[mode][0], 3), operand((320, 256), FORMS[mode][1], 4)
    keys = {"alpha": torch.tensor([0.05]), "alpha_up": torch.tensor([0.04]), "swiglu": True, "limit": 1.0}
    keys |= {"out_global": torch.tensor([1.0 / nvfp4.RANGE])} if out_format == "nvfp4" else {}
    found, want = (
        linear(x, w, mode=mode, out_format=out_format, backend=name, **keys) for name in ("emulator", "reference")
    )
    assert (found.codes != want.codes).double().mean() <= 1e-3 and len(found.codes.unique()) > 100
    columns = 160 // (16 if out_format == "nvfp4" else 32)
    scales = [scale_swizzle.unswizzle(one.scales, 260, columns) for one in (found, want)]
    assert (scales[0] != scales[1]).double().mean() <= 1e-3
    if out_format == "mxfp8":
        gate, up = (a @ b.T).unflatten(1, (-1, 2, 8)).unbind(2)
        h = swiglu(0.05 * gate, 0.04 * up, 1.0).flatten(1)
        q = fp8_block.FP8Tensor(found.codes, scales[0], (1, 32))
        assert off(fp8_block.dequantize(q, torch.float64), h) < 0.04


@pytest.mark.parametrize("mode", ["bf16", "mxfp8"])
def test_output_projection(mode):
    """Three groups of 2 heads of 64 side by side in rows that are longer; nothing is written past u."""
    groups, k, r, tokens = 3, 128, 80, 21
    (w, b), (x, a) = operand((groups, r, k), mode, 5), operand((groups, tokens, k), mode, 6)
    flat = x.codes.transpose(0, 1).flatten(1)
    rows = torch.zeros(tokens, groups * k + 64, dtype=flat.dtype)
    rows[:, : groups * k] = flat
    out = torch.full((tokens, groups * r + 16), 7.0, dtype=torch.bfloat16)
    o = Operand(rows[:, : groups * k], x.scales)
    u = output_proj(o, w, mode=mode, out=out[:, : groups * r], backend="emulator")
    want = oracle.grouped(a.transpose(0, 1), b)
    assert u.data_ptr() == out.data_ptr() and (out[:, groups * r :] == 7).all()
    assert off(u, want) <= 1.001 * off(want.bfloat16(), want)
    assert torch.equal(output_proj(o, w, mode=mode, backend="reference"), want.bfloat16())


def test_fp8_tiles_of_the_checkpoint():
    """Weights 128 x 128 and activations 1 x 128 keep their numbers as MXFP8."""
    generator = torch.Generator().manual_seed(7)
    x, w = torch.randn(5, 256, generator=generator), torch.randn(208, 256, generator=generator)
    w[130:] *= 9
    qx, qw = fp8_block.quantize_activation(x), fp8_block.quantize(w)
    y = linear(mxfp8_of(qx.codes, qx.scales), mxfp8_of(qw.codes, qw.scales), mode="mxfp8", backend="reference").codes
    a, b = (fp8_block.dequantize(q, torch.float64) for q in (qx, qw))
    assert torch.equal(y, exact(a, b).bfloat16()) and qw.scales[0, 0] != qw.scales[1, 0]
    with pytest.raises(ArgumentError, match="scales"):
        mxfp8_of(qw.codes, qw.scales[:1])


@pytest.mark.parametrize("producer", ["quantize", "add_rmsnorm_quant"])
def test_fp8_activations_come_as_they_are_read(producer):
    """1x128 scales as an image: the bits of a torch pass between the launches."""
    generator = torch.Generator().manual_seed(8)
    x = (torch.randn(131, 256, generator=generator) * torch.logspace(-2, 2, 131)[:, None]).bfloat16()
    q = fp8_block.quantize(torch.randn(32, 256, generator=generator))
    w = mxfp8_of(q.codes, q.scales)
    for backend in ("emulator", "reference"):
        if producer == "quantize":
            plain, made = (quantize(x, "fp8", swizzled=flag, backend=backend) for flag in (False, True))
        else:
            plain, made = (
                add_rmsnorm_quant(x, x, None, "fp8", swizzled=flag, backend=backend) for flag in (False, True)
            )
        passed = mxfp8_of(plain.codes, plain.scales)
        assert torch.equal(made.scales, passed.scales) and torch.equal(made.codes, passed.codes)
        y = linear((made.codes, made.scales), w, mode="mxfp8", backend=backend).codes
        a = fp8_block.dequantize(fp8_block.FP8Tensor(plain.codes, plain.scales, (1, 128)), torch.float64)
        assert off(y, exact(a, fp8_block.dequantize(q, torch.float64))) < 2.5e-3


# Shapes of the model: name -> (groups, N, K); Flash, Pro.
TRUE = {
    "wo_a": (16, 1024, 4096),
    "wo_b, Flash": (1, 4096, 8192),
    "shared w2, Pro": (1, 7168, 3072),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", TRUE)
def test_true_shapes(name):
    """First, last and ragged tiles by CTA; what no CTA computed stays as it was."""
    from dsv4lib import emulator

    groups, n, k = TRUE[name]
    tokens = 33
    generator = torch.Generator().manual_seed(8)
    codes = [torch.randint(0, 256, (groups, rows, k), dtype=torch.uint8, generator=generator) for rows in (tokens, n)]
    codes = [c.masked_fill_(c & 0x7F >= 0x70, 0x18) for c in codes]  # no NaN, nothing huge
    scales = [
        torch.randint(124, 131, (groups, rows, k // 32), dtype=torch.uint8, generator=generator) for rows in (tokens, n)
    ]
    x, w = (Operand(c, scale_swizzle.swizzle(s)) for c, s in zip(codes, scales, strict=True))
    tiles = groups * n // 128
    wanted = [0, tiles // 2 + 1, tiles - 1]
    out = torch.full((groups, tokens, n), 7.0, dtype=torch.bfloat16)
    with emulator.device("sm_100a", ctas=[(i, 0, 0) for i in wanted], checks="race") as gpu:
        linear(x, w, mode="mxfp8", out=Operand(out), backend="emulator")
    assert not gpu.hazards
    seen = torch.zeros_like(out, dtype=torch.bool)
    for tile in wanted:
        g, first = tile // (n // 128), tile % (n // 128) * 128
        rows = slice(first, first + 128)
        a, b = (
            e4m3.decode(c, torch.float64) * torch.exp2(s.double() - 127).repeat_interleave(32, -1)
            for c, s in ((codes[0][g], scales[0][g]), (codes[1][g, rows], scales[1][g, rows]))
        )
        want = a @ b.T
        assert off(out[g, :, rows], want) <= 1.001 * off(want.bfloat16(), want)
        seen[g, :, rows] = True
    assert (out[~seen] == 7).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("tokens", "ctas"), [(1, (0, 121)), (17, (121,)), (130, (120, 121)), (300, (94, 95))])
def test_lm_head(tokens, ctas):
    """bf16 in, fp32 out, the model's vocabulary: what these persistent CTAs compute, the last tile with it."""
    from dsv4lib import emulator

    vocab, k = FLASH.vocab, 128
    (x, a), (w, b) = operand((tokens, k), "bf16", 1), operand((vocab, k), "bf16", 2)
    out = torch.full((tokens, vocab), 7.0)
    with emulator.device("sm_100a", ctas=[(i, 0, 0) for i in ctas], checks="race") as gpu:
        linear(x, w, mode="bf16", out_format="fp32", out=Operand(out), backend="emulator")
    assert not gpu.hazards
    seen = out != 7
    columns = seen.any(0).nonzero().flatten()
    assert bool(seen[-1, -1]) and len(columns) >= 7 * 128
    there, want = seen[:, columns], a @ b[columns].T
    plain = x.codes.float() @ w.codes[columns].float().T
    assert off(out[:, columns][there], want[there]) <= 2 * off(plain[there], want[there])


def fp8_operands(groups, tokens, features, k, seed=0):
    """FP8 as a checkpoint and `quantize` have them, and fp64 of both."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(*groups, rows, k, generator=generator) for rows in (tokens, features))
    qx, qw = fp8_block.quantize_activation(x), fp8_block.quantize(w)
    return (qx.codes, qx.scales), (qw.codes, qw.scales), fp8_oracle(qx, qw)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("groups", "sizes"), [((), (1, 200, 528)), ((), (70, 75, 400)), ((3,), (9, 136, 144))], ids=str
)
def test_fp8_block(groups, sizes):
    """The Hopper's mode: emulated kernel and oracle, alone and in groups; FP8 types are bytes."""
    x, w, want = fp8_operands(groups, *sizes)
    assert torch.equal(linear(x, w, mode="fp8_block", backend="reference").codes, want.bfloat16())
    y = linear(x, w, mode="fp8_block", out_format="fp32", backend="emulator").codes
    assert y.shape == want.shape and off(y, want) < 2.0**-12
    typed = [(c.view(torch.float8_e4m3fn), s.view(torch.float8_e8m0fnu)) for c, s in (x, w)]
    assert torch.equal(linear(*typed, mode="fp8_block", out_format="fp32", backend="emulator").codes, y)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("groups", "sizes"), [((), (1, 200, 264)), ((), (70, 75, 200)), ((3,), (9, 136, 72))], ids=str)
def test_bf16_on_a_hopper(groups, sizes):
    """Emulated kernel and oracle, alone and in groups; rows that are parts of longer ones."""
    tokens, features, k = sizes
    (x, a), (w, b) = operand((*groups, tokens, k + 8), "bf16", 1), operand((*groups, features, k), "bf16", 2)
    x, want = Operand(x.codes[..., :k]), exact(a[..., :k], b)
    with backends.emulating("sm_90a"):
        assert torch.equal(linear(x, w, mode="bf16", backend="reference").codes, want.bfloat16())
        y = linear(x, w, mode="bf16", out_format="fp32", backend="emulator").codes
        u = linear(x, w, mode="bf16", backend="emulator").codes
    assert y.shape == want.shape and off(y, want) < 1e-6 and torch.equal(u, y.bfloat16())


def test_bf16_on_a_hopper_that_is_refused():
    (x, _), (w, _) = operand((5, 72), "bf16", 1), operand((16, 72), "bf16", 2)
    good = {"mode": "bf16", "backend": "reference"}
    for name, call in (
        ("alpha", lambda: linear(x, w, alpha=torch.ones(1), **good)),
        ("swiglu", lambda: linear(x, w, swiglu=True, **good)),
        ("out_format", lambda: linear(x, w, out_format="nvfp4", **good)),
        ("x.scales", lambda: linear((x.codes, torch.ones(5, 1)), w, **good)),
        ("K", lambda: linear(Operand(x.codes[:, :70]), Operand(w.codes[:, :70]), **good)),
        ("w", lambda: linear(x, Operand(w.codes.float()), **good)),
        ("w.shape", lambda: linear(x, Operand(w.codes[:, :64]), **good)),
        ("x.stride", lambda: linear(Operand(x.codes.T.contiguous().T), w, **good)),
    ):
        with backends.emulating("sm_90a"), pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.name == name, caught.value


def test_fp8_block_of_no_tokens():
    x, w, _ = fp8_operands((), 0, 72, 144)
    for backend in ("emulator", "reference"):
        assert linear(x, w, mode="fp8_block", backend=backend).codes.shape == (0, 72)


def test_fp8_block_reads_what_quantize_writes():
    """And its numbers are those of mode "mxfp8" with the same operands, to the tensor cores' rounding."""
    generator = torch.Generator().manual_seed(9)
    x = (torch.randn(5, 256, generator=generator) * torch.logspace(-2, 2, 5)[:, None]).bfloat16()
    q = fp8_block.quantize(torch.randn(80, 256, generator=generator))
    made = quantize(x, "fp8", backend="emulator")
    y = linear(made[:2], (q.codes, q.scales), mode="fp8_block", out_format="fp32", backend="emulator").codes
    mxfp8 = (mxfp8_of(made.codes, made.scales), mxfp8_of(q.codes, q.scales))
    assert off(y, linear(*mxfp8, mode="mxfp8", out_format="fp32", backend="emulator").codes.double()) < 2.0**-12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("heads", [True, False])
def test_output_projection_fp8_block(heads):
    """Three groups side by side in rows that are longer, scales as `inv_rope_quant` has them row-major."""
    groups, k, r, tokens = 3, 256, 72, 5
    (codes, scales), w, want = fp8_operands((groups,), tokens, r, k)
    o = codes.transpose(0, 1).contiguous()
    o = o.view(tokens, 2 * groups, 128) if heads else o.flatten(1)
    scales = scales.transpose(0, 1).flatten(1)
    scales = scales.view(tokens, 2 * groups, 1) if heads else scales
    out = torch.full((tokens, groups * r + 16), 7.0, dtype=torch.bfloat16)
    for backend in ("emulator", "reference"):
        u = output_proj((o, scales), w, mode="fp8_block", out=out[:, : groups * r], backend=backend)
        flat = want.transpose(0, 1).flatten(1)
        assert (out[:, groups * r :] == 7).all() and off(u, flat) <= 1.01 * off(flat.bfloat16(), flat)


def test_output_projection_bf16_on_a_hopper():
    groups, k, r, tokens = 3, 72, 80, 5
    (o, a), (w, b) = operand((tokens, groups * k), "bf16", 1), operand((groups, r, k), "bf16", 2)
    want = exact(a.unflatten(1, (groups, k)).transpose(0, 1), b).transpose(0, 1).flatten(1)
    for backend in ("emulator", "reference"):
        with backends.emulating("sm_90a"):
            u = output_proj(o, w, backend=backend)
        assert off(u, want) <= 1.01 * off(want.bfloat16(), want)


def test_fp8_block_that_is_refused():
    (x, xs), (w, ws), _ = fp8_operands((), 5, 72, 144)
    good = {"mode": "fp8_block", "backend": "reference"}
    for name, call in (
        ("alpha", lambda: linear((x, xs), (w, ws), alpha=torch.ones(1), **good)),
        ("swiglu", lambda: linear((x, xs), (w, ws), swiglu=True, **good)),
        ("out_format", lambda: linear((x, xs), (w, ws), out_format="mxfp8", **good)),
        ("x.scales", lambda: linear((x, None), (w, ws), **good)),
        ("x, w", lambda: linear((x[None], xs), (w, ws), **good)),
        ("x_scales.shape", lambda: linear((x, xs[:, :1]), (w, ws), **good)),
        ("w_scales.shape", lambda: linear((x, xs), (w, ws.repeat(2, 1)), **good)),
        ("w_scales.dtype", lambda: linear((x, xs), (w, ws.double()), **good)),
        ("K", lambda: linear((x[:, :136], xs), (w[:, :136], ws), **good)),
        ("w", lambda: linear((x, xs), (w.float(), ws), **good)),
        ("x.stride()", lambda: linear((x[:, ::2].repeat(1, 2)[:, ::1].T.contiguous().T, xs), (w, ws), **good)),
        ("o.scales", lambda: output_proj((x, xs), (w[None], ws[None]), **good)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.name == name, caught.value


def test_a_gpu_without_the_mode_is_named():
    """fp8_block has a kernel for sm_90a alone, as the others have none for it."""
    x, w, _ = fp8_operands((), 5, 72, 144)
    with pytest.raises(BackendUnavailable, match="native"):
        linear(x, w, mode="fp8_block", backend="native")


def test_what_is_refused():
    (x, _), (w, _) = operand((5, 128), "bf16", 1), operand((16, 128), "bf16", 2)
    good = {"mode": "bf16", "backend": "reference"}
    for name, call in (
        ("mode", lambda: linear(x, w, mode="fp4")),
        ("x, w", lambda: linear(Operand(x.codes[None]), w, **good)),
        ("x, w", lambda: linear(x, Operand(w.codes[:, :64].contiguous()), **good)),
        ("alpha.shape", lambda: linear(x, w, alpha=torch.ones(2), **good)),
        ("w.shape", lambda: linear(x, Operand(w.codes[:15]), **good)),
        ("o, w", lambda: output_proj(x, w, **good)),
        ("out.shape", lambda: output_proj(x, Operand(w.codes[None]), out=torch.empty(5, 8), **good)),
        ("out", lambda: output_proj(x, Operand(w.codes[None]), out=torch.empty(5, 16), **good)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.name == name
