"""Show what each way of storing an NVFP4 weight costs.

Conversions beside the modes, and one expert through all of them.

The rows are the modes of `dsv4lib.formats.weight_modes` and the neighbours they are chosen against: other roundings of
the bad conversion, codes requantised, residual planes, other element formats. Errors are against the exact weights.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import linear

from dsv4lib import env
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import e2m1, mxfp4, nvfp4, ue8m0, weight_modes
from dsv4lib.formats.floatcodec import E2M3, E3M2, E4M3, MiniFloat
from dsv4lib.formats.nvfp4 import NVFP4Tensor
from dsv4lib.reference.moe_gemm import swiglu

SHAPE = 512, 7168  # of every sample
OTHER = "std"  # in the name of a sample whose standard deviation is not .02
SAMPLES = ("gaussian", "gaussian, std 1", "gaussian, std .005", "laplace", "t4")  # std .02 unless it says otherwise


@dataclass(frozen=True)
class Sample:
    """Synthetic weights of one distribution.

    Attributes:
        original: float32 [rows, K]. quantized: as NVFP4, under the global scale of all `SHAPE` rows.
        values: what that stands for, fp64.
    """

    original: torch.Tensor
    quantized: NVFP4Tensor
    values: torch.Tensor


def samples(rows: int = SHAPE[0], names: tuple[str, ...] = SAMPLES, stretch: float = 1.0) -> dict[str, Sample]:
    """The first ``rows`` rows of each sample. All come from one stream of random numbers, in the order of `SAMPLES`.

    Fewer rows are a part of the same matrices: the global scale, whose mantissa moves most of the bad conversions by
    a decibel, stays that of the whole. ``stretch`` multiplies it, to move the mantissa.
    """
    if not 1 <= rows <= SHAPE[0]:
        raise ArgumentError("rows", rows, f"1 to {SHAPE[0]}")
    random = np.random.default_rng(0)  # the stream of the recorded table
    draw = {
        "gaussian": lambda: random.standard_normal(SHAPE) * 0.02,
        "gaussian, std 1": lambda: random.standard_normal(SHAPE),
        "gaussian, std .005": lambda: random.standard_normal(SHAPE) * 0.005,
        "laplace": lambda: random.laplace(size=SHAPE) * (0.02 / math.sqrt(2)),
        "t4": lambda: random.standard_t(4, SHAPE) * (0.02 / math.sqrt(2)),  # 4 degrees of freedom: variance 2
    }
    out = {}
    for name in SAMPLES[: max(SAMPLES.index(name) for name in names) + 1]:
        whole = torch.from_numpy(draw[name]().astype(np.float32))
        if name in names:
            part = whole[:rows]
            quantized = nvfp4.quantize(part, nvfp4.shared_global_scale(whole) * stretch)
            out[name] = Sample(part, quantized, nvfp4.dequantize(quantized, torch.float64))
    return out


@dataclass(frozen=True)
class Error:
    """How far x is from a reference.

    Attributes:
        db: signal over noise, 10 log10(|ref|^2 / |x - ref|^2); infinite where nothing differs.
        cos: cosine between both. gain: the factor of the reference that x contains.
        largest: largest absolute difference.
    """

    db: float
    cos: float
    gain: float
    largest: float

    @property
    def relative(self) -> float:
        """Compute |x - ref| / |ref|."""
        return 10 ** (-self.db / 20)


def error(x: torch.Tensor, reference: torch.Tensor) -> Error:
    """Return the error of ``x`` against ``reference``, in fp64."""
    x, reference = x.to(torch.float64).flatten(), reference.to(torch.float64).flatten()
    difference = x - reference
    noise, signal = difference.dot(difference), reference.dot(reference)
    db = math.inf if noise == 0 else float(10 * torch.log10(signal / noise))
    dot = x.dot(reference)
    return Error(db, float(dot / (x.norm() * reference.norm())), float(dot / signal), float(difference.abs().max()))


def mx(x: torch.Tensor, element: MiniFloat, scale: str = "ceil") -> torch.Tensor:
    """Pass [..., K] through ``element`` with one E8M0 scale per 32, back in fp64.

    ``scale``: "ceil" 2^ceil(log2(amax / largest)); "floor" OCP's, 2^(floor(log2 amax) - exponent of the largest), which
    may saturate.
    """
    blocks = x.to(torch.float64).unflatten(-1, (-1, weight_modes.MX_GROUP))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=mxfp4.AMAX_FLOOR)
    if scale == "ceil":
        unit = ue8m0.decode(ue8m0.encode_ceil(amax, element.max), torch.float64)
    else:
        unit = torch.exp2(torch.floor(torch.log2(amax)) - math.floor(math.log2(element.max)))
    return (element.decode(element.encode(blocks / unit), torch.float64) * unit).flatten(-2)


def residual_planes(x: torch.Tensor, planes: int) -> torch.Tensor:
    """Sum ``planes`` MXFP4 tensors. Each is the best one for what the planes before it left over."""
    rest = x.to(torch.float32)
    for _ in range(planes):
        rest = rest - _best(rest)
    return x - rest.to(torch.float64)


def codes_kept(q: NVFP4Tensor, rounding: str, merge: bool) -> torch.Tensor:
    """Convert badly with the global scale folded in fp32. Codes kept, scale to a power of two.

    ``rounding`` of the exponent: "floor", "nearest" or "ceil"; ``merge``: one scale per 32 (the maximum), else per 16.
    """
    scales = nvfp4.e4m3.decode(q.scales, torch.float64) * q.global_scale.to(torch.float64)
    if merge:
        scales = scales.unflatten(-1, (-1, 2)).amax(-1)
    log = torch.log2(scales.clamp(min=2.0**-127))
    exponent = {"floor": torch.floor, "nearest": torch.round, "ceil": torch.ceil}[rounding](log)
    group = weight_modes.MX_GROUP if merge else nvfp4.BLOCK
    return e2m1.decode(e2m1.unpack(q.packed), torch.float64) * torch.exp2(exponent).repeat_interleave(group, -1)


@dataclass(frozen=True)
class Row:
    """One conversion: its name, stored bits a weight.

    Also from (NVFP4 tensor, its exact values, original) to values.
    """

    name: str
    bits: float
    convert: Callable[[NVFP4Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _mode(name: str) -> Row:
    bits = weight_modes.MODES[name].bits
    return Row(name, bits, lambda q, ref, w: weight_modes.dequantize(weight_modes.convert(q, name), torch.float64))


def _best(x: torch.Tensor) -> torch.Tensor:
    return mxfp4.dequantize(weight_modes.requantize_mxfp4(x.to(torch.float32)))


ROWS = (
    _mode("nvfp4"),
    _mode("ue8m0_naive"),
    Row("codes kept, fp32 fold, floor", 4.25, lambda q, ref, w: codes_kept(q, "floor", True)),
    Row("codes kept, fp32 fold, nearest", 4.25, lambda q, ref, w: codes_kept(q, "nearest", True)),
    Row("codes kept, fp32 fold, ceil", 4.25, lambda q, ref, w: codes_kept(q, "ceil", True)),
    Row("codes kept, per 16, floor", 4.5, lambda q, ref, w: codes_kept(q, "floor", False)),
    Row("codes kept, per 16, nearest", 4.5, lambda q, ref, w: codes_kept(q, "nearest", False)),
    Row("requantised, ceil", 4.25, lambda q, ref, w: mx(ref, e2m1.FORMAT)),
    Row("requantised, OCP floor", 4.25, lambda q, ref, w: mx(ref, e2m1.FORMAT, "floor")),
    Row("requantised, best of 4", 4.25, lambda q, ref, w: _best(ref)),
    _mode("mxfp4"),
    Row("MXFP4 from the original", 4.25, lambda q, ref, w: _best(w)),
    Row("2 x E2M1 residual", 8.5, lambda q, ref, w: residual_planes(ref, 2)),
    Row("3 x E2M1 residual", 12.75, lambda q, ref, w: residual_planes(ref, 3)),
    Row("E3M2 per 32", 6.25, lambda q, ref, w: mx(ref, E3M2)),
    Row("E2M3 per 32", 6.25, lambda q, ref, w: mx(ref, E2M3)),
    Row("E4M3 per 32, global folded", 8.25, lambda q, ref, w: mx(ref, E4M3)),
    _mode("e4m3_expand"),
    _mode("e4m3_split"),
    _mode("bf16"),
)


@dataclass(frozen=True)
class Expert:
    """One expert with NVFP4 weights and some tokens.

    Attributes:
        x: tokens [T, H], float32.
        original: w1 (gate) [I, H], w3 (up) [I, H] and w2 (down) [H, I], float32.
        quantized: the same three as NVFP4; w1 and w3 share a global scale.
        limit: of the SwiGLU clamp.
    """

    x: torch.Tensor
    original: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    quantized: tuple[NVFP4Tensor, NVFP4Tensor, NVFP4Tensor]
    limit: float

    def run(self, planes: tuple[torch.Tensor, torch.Tensor, torch.Tensor], activations: str) -> torch.Tensor:
        """The expert's output [T, H] with these weights. The inputs of both GEMMs pass through ``activations``."""
        w1, w3, w2 = planes
        x = _activation(self.x, activations)
        return linear(_activation(swiglu(linear(x, w1), linear(x, w3), self.limit), activations), w2)

    def weights(self, convert: Callable[[NVFP4Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple:
        """Pass its three matrices through a `Row`'s conversion, float32."""
        values = (nvfp4.dequantize(q, torch.float64) for q in self.quantized)
        parts = zip(self.quantized, values, self.original, strict=True)
        return tuple(convert(*part).to(torch.float32) for part in parts)


def expert(tokens: int, hidden: int, width: int, std: float, limit: float, seed: int) -> Expert:
    """Make a synthetic expert. Normal weights of standard deviation ``std``, normal tokens of standard deviation 1."""
    random = np.random.default_rng(seed)

    def normals(rows: int, cols: int, scale: float) -> torch.Tensor:
        return torch.from_numpy((random.standard_normal((rows, cols)) * scale).astype(np.float32))

    x = normals(tokens, hidden, 1.0)
    w1, w3, w2 = normals(width, hidden, std), normals(width, hidden, std), normals(hidden, width, std)
    shared = nvfp4.shared_global_scale(w1, w3)
    return Expert(x, (w1, w3, w2), (nvfp4.quantize(w1, shared), nvfp4.quantize(w3, shared), nvfp4.quantize(w2)), limit)


def _activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x if kind == "fp32" else weight_modes.fake_quantize_activation(x, kind)


RECORDED = "data/formats/nvfp4_conversions.csv"


def recorded() -> dict[str, dict[str, float]]:
    """Return the same table as other code once measured it. row -> column -> dB (``gemm``: relative error)."""
    lines = (env.root() / RECORDED).read_text().splitlines()
    table = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {row.pop("row"): {k: float(v) for k, v in row.items() if v} for row in table}


@dataclass(frozen=True)
class Conversion:
    """What one row of the table loses.

    Attributes:
        name, bits: of the `Row`.
        errors: sample -> error against the exact NVFP4 weights.
        original: sample -> error against the weights before NVFP4.
    """

    name: str
    bits: float
    errors: dict[str, Error]
    original: dict[str, Error]


def table(found: dict[str, Sample], rows: Sequence[Row] = ROWS) -> list[Conversion]:
    """Every row over the samples. The samples of another standard deviation only where there is a record of them."""
    known, out = recorded(), []
    for row in rows:
        errors, original = {}, {}
        for name, sample in found.items():
            if OTHER in name and not known.get(row.name, {}).get(name):
                continue
            values = row.convert(sample.quantized, sample.values, sample.original)
            errors[name] = error(values, sample.values)
            original[name] = error(values, sample.original)
        out.append(Conversion(row.name, row.bits, errors, original))
    return out


def deviation(done: Sequence[Conversion]) -> tuple[float, str, int]:
    """Return the largest difference in dB from the recorded table.

    (dB, which cell, cells compared). Exact must be exact.
    """
    known, worst, where, cells = recorded(), 0.0, "", 0
    for row in done:
        measured = {k: e.db for k, e in row.errors.items()}
        measured |= {f"{k}, original": e.db for k, e in row.original.items()}
        for column in measured.keys() & known.get(row.name, {}).keys():
            db, wanted = measured[column], known[row.name][column]
            cells += 1
            off = 0.0 if db == wanted else abs(db - wanted)
            if off > worst:
                worst, where = off, f"{row.name}, {column}: {db:.2f} dB, recorded {wanted:g}"
    return worst, where, cells
