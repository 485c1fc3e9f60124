"""Run the two launches around attention. Queries are normed and rotated, a key stored; the output is rotated back.

Run in the emulator, judged in fp64, drawn. Attention itself is left out: every token attends to itself alone, so its
output is its own stored row, in every head. An injected fault (one of `FAULTS`) is made in what an op is given.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from dsv4lib import emulator
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.formats import fp8_block, kv_entry
from dsv4lib.ops.inv_rope_quant.op import inv_rope_quant
from dsv4lib.ops.qnorm_rope_kv.op import qnorm_rope_kv
from dsv4lib.reference import rope
from dsv4lib.reference.rmsnorm import rmsnorm
from dsv4lib.viz import grids, model

ARCH, DIM, NOPE, GROUP, PAGE = "sm_100a", kv_entry.HEAD_DIM, kv_entry.NOPE, kv_entry.GROUP, 8
HEADS, EPS = 4, FLASH.rms_eps
POSITIONS = (0, 3, 130, 2047, 4000)
BASES, REACH = (0, 1000, 4000), 64  # absolute positions of the figure on distances, and how far it goes
FAULTS = "position_late", "kv_unnormed", "turned_on"


class Around(NamedTuple):
    """What went in, and what the ops made of it.

    Attributes:
        q: bf16 ``[5, 4, 512]``, kv: bf16 ``[5, 512]``, weight: fp32 ``[512]`` of kv's norm. positions: int64 ``[5]``.
        queries: bf16 ``[5, 4, 512]``; exact: what they should be, fp64.
        stored: bf16 ``[5, 512]``, rows as the pages give them back.
        back: fp64 ``[5, 4, 512]``, the output as its codes and scales give, rotated back.
        metrics: by name; hazards of all launches.
    """

    q: torch.Tensor
    kv: torch.Tensor
    weight: torch.Tensor
    positions: torch.Tensor
    queries: torch.Tensor
    exact: torch.Tensor
    stored: torch.Tensor
    back: torch.Tensor
    metrics: dict[str, float]
    hazards: int


def table(rows: int) -> torch.Tensor:
    """Return fp32 ``[rows, 64]``: cosines and sines of a CSA layer."""
    return torch.cat(rope.cos_sin(torch.arange(rows), rope.layer_freqs(FLASH, LayerKind.CSA), torch.float32), -1)


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate x ``[T, H, 512]`` by the angles of its positions, fp64."""
    cos, sin = table(int(positions.max()) + 1)[positions].double()[:, None].chunk(2, -1)
    return rope.apply_tables(x.double(), cos, sin)


def run(seed: int, fault: str = "none") -> Around:
    """Run both launches and return error, hazards and results."""
    generator = torch.Generator().manual_seed(seed)
    tokens, positions = len(POSITIONS), torch.tensor(POSITIONS)
    q = (torch.randn(tokens, HEADS, DIM, generator=generator) * torch.logspace(-1, 1, HEADS)[:, None]).bfloat16()
    kv = (3 * torch.randn(tokens, DIM, generator=generator)).bfloat16()
    weight = 1 + 0.3 * torch.randn(DIM, generator=generator)
    angles, indices = table(max(POSITIONS) + 2), torch.tensor([9, 2, 17, 0, 12]).int()
    given = q, kv, positions + (fault == "position_late"), angles
    norm = None if fault == "kv_unnormed" else weight
    pages, wanted = (kv_entry.LAYOUT.allocate(3, PAGE).fill_(0xA5) for _ in range(2))
    back_angles = angles * torch.tensor([1.0, -1.0]).repeat_interleave(32) if fault == "turned_on" else angles
    with emulator.device(ARCH, checks="race") as gpu:
        queries = qnorm_rope_kv(*given, pages, PAGE, indices, kv_norm=norm, eps=EPS, backend="emulator")
        stored = kv_entry.gather(pages, PAGE, indices)[0]
        o = stored[:, None].expand(-1, HEADS, -1).contiguous()
        codes, scales = inv_rope_quant(o, positions, back_angles, backend="emulator")
    qnorm_rope_kv(q, kv, positions, angles, wanted, PAGE, indices, kv_norm=weight, eps=EPS, backend="reference")
    right = inv_rope_quant(o, positions, angles, backend="reference")
    exact = turned(rmsnorm(q.double(), None, EPS), positions)
    # Half a unit of bf16, and some of fp32 of the pair that was turned.
    size = 2.0**-8 * exact.abs() + 2.0**-20 * exact.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, -1)
    back = fp8_block.dequantize(fp8_block.FP8Tensor(codes, scales, (1, fp8_block.ACTIVATION_GROUP)), torch.float64)
    home = rmsnorm(kv.double(), weight.double(), EPS)[:, None]
    metrics = {
        "query_error": float(((queries.double() - exact).abs() / size).max()),
        "entry_bytes": int((pages != wanted).sum()),
        "output_bytes": sum(int((a != b).sum()) for a, b in zip((codes, scales), right, strict=True)),
        "home_error": float((back - home).norm() / (home.norm() * HEADS**0.5)),
    }
    return Around(q, kv, weight, positions, queries, exact, stored, back, metrics, len(gpu.hazards))


def distances(seed: int) -> Figure:
    """Score one query against one key, from different places. By the kernel's own rotation; the lines coincide."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(2, DIM, generator=generator)
    places = torch.cat([base + torch.arange(REACH) for base in BASES])
    given = torch.stack([one.bfloat16()] * len(places))
    pages, indices = kv_entry.LAYOUT.allocate(1, PAGE), torch.full((len(places),), -1, dtype=torch.int32)
    with emulator.device(ARCH):
        kv = torch.zeros(len(places), DIM).bfloat16()
        found = qnorm_rope_kv(given, kv, places, table(max(BASES) + REACH), pages, PAGE, indices, backend="emulator")
    found, lines = found.double().view(len(BASES), REACH, 2, DIM), {}
    for base, rows in zip(BASES, found, strict=True):
        lines[f"key at {base:,}"] = (rows[:, 0] @ rows[0, 1]) * DIM**-0.5
    title = f"one query, one key, {len(BASES)} places"
    return model.curves(torch.arange(REACH), {title: lines}, "tokens between key and query", "q . k / sqrt(512)")


def way_home(around: Around) -> Figure:
    """Draw the error of each group of 64 dims in percent of its size. Stored rows as they are, and rotated back."""
    home = rmsnorm(around.kv.double(), around.weight.double(), EPS)
    rows, lines = [], []
    size = home.unflatten(-1, (-1, GROUP)).norm(dim=-1)
    for name, x in (("as attention leaves it", around.stored), ("rotated back", around.back[:, 0])):
        for at, error in zip(POSITIONS, (x - home).unflatten(-1, (-1, GROUP)).norm(dim=-1) / size, strict=True):
            rows.append(f"token {at:,}, {name}")
            lines.append(100 * error)
    columns = [f"{i * GROUP}.." for i in range(NOPE // GROUP)] + ["448.. rope"]
    labels = "", "group of 64 dims", "error, % of the group"
    return grids.value_map(torch.stack(lines), rows, columns, labels, "a token that attends to itself alone", "{:.1f}")
