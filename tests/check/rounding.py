"""Rounding to each format of the table, written for these tests alone so that they depend on no codec of the lab."""

import torch

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


def _scaled(x: torch.Tensor, block: int, scale_of, rounding) -> torch.Tensor:
    """Blocks of ``block`` along the last axis, each divided by its scale, rounded, multiplied back; fp64 in and out."""
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -n % block)).unflatten(-1, (-1, block))
    scale = scale_of(padded.abs().nan_to_num(posinf=0.0).amax(dim=-1, keepdim=True).clamp(min=1e-300))
    out = (rounding(padded / scale) * scale).flatten(-2)[..., :n]
    return torch.where(torch.isfinite(x), out, x)


def _power_of_two(limit: float):
    return lambda amax: torch.exp2(torch.ceil(torch.log2(amax / limit)))


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    nearest = (x.abs().nan_to_num(posinf=6.0).unsqueeze(-1) - E2M1).abs().argmin(dim=-1)
    return E2M1[nearest].copysign(x)


def round_to(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x`` (fp64) rounded to format ``name``: fp16 and bf16 stay in their dtype, scaled formats come back in fp64."""
    plain = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if name in plain:
        return x.to(plain[name])
    if name == "e4m3":
        return _scaled(x, 128, _power_of_two(448.0), lambda y: y.to(torch.float8_e4m3fn).double())
    if name == "e5m2":
        return _scaled(x, 128, _power_of_two(57344.0), lambda y: y.to(torch.float8_e5m2).double())
    if name == "e2m1":
        return _scaled(x, 32, _power_of_two(6.0), _e2m1)
    assert name == "nvfp4"
    tensor_scale = float(x.abs().nan_to_num(posinf=0.0).max()) / (6 * 448)

    def scale(amax):  # clamped to the smallest normal: a row 2^16 below the largest cannot have a smaller scale
        return (amax / 6 / tensor_scale).clamp(min=2.0**-6).to(torch.float8_e4m3fn).double() * tensor_scale

    return _scaled(x, 16, scale, _e2m1)


FLOATS = ("fp64", "fp32", "fp16", "bf16", "e4m3", "e5m2", "nvfp4", "e2m1")


def rows_of_different_scale(shape: tuple[int, ...], seed: int, octaves: float = 4.0) -> torch.Tensor:
    """fp64 normals whose rows differ in scale by up to 2^(2 x octaves)."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    exponent = (torch.rand(*shape[:-1], 1, generator=generator, dtype=torch.float64) * 2 - 1) * octaves
    return x * torch.exp2(exponent)
