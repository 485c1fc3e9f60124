"""The CPU stand-in for block-scaled torch._scaled_mm, against a loop over single elements."""

import pytest
import torch

from dsv4lib.emulator.driver.scaled_mm import E2M1, scaled_mm, unblocked


def blocked(matrix):
    """Put scales in blocked order, one at a time."""
    rows, columns = -(-matrix.shape[0] // 128) * 128, -(-matrix.shape[1] // 4) * 4
    out = torch.zeros(rows * columns, dtype=torch.uint8)
    codes = matrix.view(torch.uint8)
    for r in range(matrix.shape[0]):
        for c in range(matrix.shape[1]):
            tile = (r // 128) * (columns // 4) + c // 4
            out[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] = codes[r, c]
    return out.view(matrix.dtype)


def never(*args, **kwargs):
    raise AssertionError("torch's own was called")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_unblocked_inverts_the_order(dtype):
    scales = torch.randint(1, 120, (200, 7), dtype=torch.uint8).view(dtype)
    assert torch.equal(unblocked(blocked(scales), 200, 7), scales.float().double())


def test_nvfp4():
    m, n, k = 130, 6, 64
    a, b = (torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8) for rows in (m, n))
    sa, sb = (torch.rand(rows, k // 16).mul(4).add(0.1).to(torch.float8_e4m3fn) for rows in (m, n))
    packed = (x.view(torch.float4_e2m1fn_x2) for x in (a, b))
    left, right = packed
    out = scaled_mm(never, left, right.t(), blocked(sa), blocked(sb), out_dtype=torch.float32)

    def value(codes, scales, r, c):
        code = int(codes[r, c // 2]) >> 4 * (c % 2) & 15
        return (-1.0 if code & 8 else 1.0) * E2M1[code & 7] * float(scales[r, c // 16].float())

    for r, c in ((0, 0), (129, 5), (31, 3), (77, 1)):
        exact = sum(value(a, sa, r, i) * value(b, sb, c, i) for i in range(k))
        assert out[r, c].item() == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_mxfp8_with_bias():
    a, b = (torch.randn(rows, 64).to(torch.float8_e4m3fn) for rows in (5, 3))
    sa, sb = (torch.randint(120, 134, (rows, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu) for rows in (5, 3))
    bias = torch.randn(3)
    out = scaled_mm(never, a, b.t(), blocked(sa), blocked(sb), bias=bias, out_dtype=torch.float32)
    wide = [x.float() * s.float().repeat_interleave(32, 1) for x, s in ((a, sa), (b, sb))]
    assert torch.allclose(out, wide[0] @ wide[1].t() + bias, rtol=1e-5, atol=1e-5)


def test_other_scales_go_to_torch():
    seen = []
    scaled_mm(lambda *a, **k: seen.append(a), torch.zeros(1), torch.zeros(1), torch.ones(()), torch.ones(()))
    assert len(seen) == 1
