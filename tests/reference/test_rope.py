"""Rotary embedding against complex numbers, frequencies against the closed formula, RMSNorm against a loop."""

import cmath
import math
import struct
from dataclasses import replace

import pytest
import torch

from dsv4lib.config import FLASH, PRO, TINY, LayerKind, YarnConfig
from dsv4lib.errors import ArgumentError
from dsv4lib.reference import rmsnorm, rope


def fp32(x):
    """Round a Python float to fp32."""
    return struct.unpack("f", struct.pack("f", x))[0]


def test_rotation_against_complex_numbers(randn):
    x, freqs = randn(2, 5, 3, 10), rope.base_freqs(6, 100.0)
    positions = torch.tensor([0, 1, 2, 77, 5000])
    got = rope.apply(x, positions[:, None], freqs)
    for b in range(2):
        for t, position in enumerate(positions.tolist()):
            for h in range(3):
                row = x[b, t, h].tolist()
                want = row[:4]  # dims before the last 6 stay as they are
                for i, freq in enumerate(freqs.tolist()):
                    z = complex(row[4 + 2 * i], row[5 + 2 * i]) * cmath.exp(1j * fp32(position * freq))
                    want += [z.real, z.imag]
                torch.testing.assert_close(got[b, t, h], torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-12)


def test_inverse_undoes(randn):
    x, positions = randn(2, 5, 3, 10), torch.tensor([0, 3, 99, 4095, 1048575])[:, None]
    freqs = rope.base_freqs(6, 10000.0)
    torch.testing.assert_close(
        rope.apply_inverse(rope.apply(x, positions, freqs), positions, freqs), x, rtol=0, atol=1e-12
    )
    assert (rope.apply(x, positions, freqs) - x).abs().max() > 0.1


def test_dot_product_depends_on_distance_only(randn):
    q, k, freqs = randn(1, 1, 8), randn(1, 1, 8), rope.base_freqs(8, 10000.0)

    def dot(t, s):
        return (rope.apply(q, torch.tensor([t]), freqs) * rope.apply(k, torch.tensor([s]), freqs)).sum().item()

    assert dot(7, 3) == pytest.approx(dot(104, 100), abs=1e-5)
    assert abs(dot(7, 3) - dot(7, 2)) > 1e-3


def test_base_frequencies():
    freqs = rope.base_freqs(64, 10000.0)
    assert freqs.dtype == torch.float32 and freqs.shape == (32,)
    for i, freq in enumerate(freqs.tolist()):
        assert freq == pytest.approx(10000.0 ** (-i / 32), rel=3e-7)


@pytest.mark.parametrize("config", [FLASH, PRO], ids=["flash", "pro"])
@pytest.mark.parametrize("kind", [LayerKind.CSA, LayerKind.HCA])
def test_yarn_keeps_fast_pairs_and_slows_the_others(config, kind):
    freqs = rope.layer_freqs(config, kind)
    for i, freq in enumerate(freqs.tolist()):
        base = 160000.0 ** (-i / 32)
        kept = min(max((25 - i) / 10, 0), 1)  # 1 up to pair 15, 0 from pair 25 on
        assert freq == pytest.approx(base * (kept + (1 - kept) / 16), rel=3e-7)
    assert torch.equal(freqs[:16], rope.base_freqs(64, 160000.0)[:16])
    assert torch.equal(freqs[25:], rope.base_freqs(64, 160000.0)[25:] / 16)


def test_frequencies_are_bitwise_those_of_transformers():
    """Same fp32 steps as a widely used implementation: one ULP more would be 0.06 rad at position 1M."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = {"rope_type": "yarn", "rope_theta": 160000.0, "factor": 16.0, "original_max_position_embeddings": 65536}
    yarn |= {"beta_fast": 32, "beta_slow": 1}
    config = LlamaConfig(head_dim=64, max_position_embeddings=1048576, rope_parameters=yarn)
    assert torch.equal(rope.layer_freqs(FLASH, LayerKind.CSA), ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")[0])


def test_yarn_bounds_follow_the_formula():
    """Numbers of turns over the original context decide, for other sizes too."""
    yarn, dim, theta = YarnConfig(factor=4.0, original_positions=2048, beta_fast=8.0, beta_slow=2.0), 32, 10000.0
    base = rope.base_freqs(dim, theta)
    turns = [2048 * theta ** (-2 * i / dim) / (2 * math.pi) for i in range(dim // 2)]
    got = (rope.yarn_freqs(base, theta, yarn) / base).tolist()
    for n, ratio in zip(turns, got, strict=True):
        if n >= 8:
            assert ratio > 0.25
        if n <= 1:
            assert ratio == pytest.approx(0.25, rel=1e-6)
    fast = max(i for i, n in enumerate(turns) if n >= 8)  # floor of the fractional index
    assert got[: fast + 1] == pytest.approx([1.0] * (fast + 1)) and got[fast + 1] < 1


def test_swa_layers_use_the_plain_rope():
    assert torch.equal(rope.layer_freqs(FLASH, LayerKind.SWA), rope.base_freqs(64, 10000.0))
    without = replace(TINY, yarn=None)
    assert torch.equal(rope.layer_freqs(without, LayerKind.HCA), rope.base_freqs(8, 160000.0))


def test_no_amplitude_factor():
    cos, sin = rope.cos_sin(torch.tensor([0, 12345]), rope.layer_freqs(FLASH, LayerKind.CSA), torch.float64)
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


def test_angles_are_fp32_products():
    """At position 1048575 the fp32 angle is a multiple of 2^-4 of a radian; fp64 would not be."""
    freqs = torch.tensor([0.7498942], dtype=torch.float32)
    cos, _ = rope.cos_sin(torch.tensor([1048575]), freqs, torch.float64)
    angle = fp32(1048575 * freqs.item())
    assert cos.item() == pytest.approx(math.cos(angle), abs=1e-12)
    assert abs(math.cos(angle) - math.cos(1048575 * freqs.item())) > 1e-4


def test_refusals(randn):
    with pytest.raises(ArgumentError, match="dim=7"):
        rope.base_freqs(7, 10000.0)
    with pytest.raises(ArgumentError, match="freqs=3"):
        rope.apply(randn(1, 1, 4), torch.tensor([0]), rope.base_freqs(6, 10000.0))


@pytest.mark.parametrize("weighted", [True, False])
def test_rmsnorm(randn, weighted):
    x, weight, eps = randn(3, 5), randn(5), 0.3
    got = rmsnorm.rmsnorm(x, weight if weighted else None, eps)
    for row, out in zip(x.tolist(), got.tolist(), strict=True):
        rms = math.sqrt(sum(v * v for v in row) / 5 + eps)
        want = [v / rms * (w if weighted else 1) for v, w in zip(row, weight.tolist(), strict=True)]
        assert out == pytest.approx(want, abs=1e-13)
