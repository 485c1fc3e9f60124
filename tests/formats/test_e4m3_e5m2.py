"""The two FP8 modules: their constants and defaults (the arithmetic is tested in test_floatcodec)."""

from __future__ import annotations

import math

import torch

from dsv4lib.formats import e4m3, e5m2


def test_constants_match_torch():
    for module, dtype in ((e4m3, torch.float8_e4m3fn), (e5m2, torch.float8_e5m2)):
        assert torch.finfo(dtype).max == module.MAX == module.FORMAT.max
        smallest = torch.ones(1, dtype=torch.uint8).view(dtype).float()
        assert smallest == module.FORMAT.min_subnormal


def test_special_codes():
    special = torch.tensor([math.inf, -math.inf, math.nan, 1e9])
    assert e4m3.encode(special).tolist() == [0x7E, 0xFE, e4m3.NAN, 0x7E]
    assert e4m3.encode(special, saturate=False).tolist() == [e4m3.NAN] * 4
    assert e5m2.encode(special).tolist() == [0x7B, 0xFB, e5m2.NAN, 0x7B]
    assert e5m2.encode(special, saturate=False).tolist() == [e5m2.INF, 0x80 | e5m2.INF, e5m2.NAN, e5m2.INF]


def test_subnormals_spelled_out():
    step = 2.0**-9
    x = torch.tensor([0.5, 0.51, 1.0, 1.5, 2.5, 7.0, 7.5, 8.0]) * step
    assert (e4m3.decode(e4m3.encode(x)) / step).tolist() == [0, 1, 1, 2, 2, 7, 8, 8]
