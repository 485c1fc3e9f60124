"""Other people's kernels, unmodified, in the emulator: what a case is, how it is run and judged.

A case builds inputs, calls a package's own public function inside `emulator.device`, and says what fp32 arithmetic on
the same (quantised) inputs gives. It is judged twice: by relative L2 error over the whole result, and element by
element against `atol + rtol * |want|`. Both bounds follow from the rounding steps of the kernel, named in `reason`; a
defect of the emulator (a wrong lane, a missed copy, a stale tile) breaks them by orders of magnitude.

Where bounds come from: u is the largest relative rounding error, 2^-4 for fp8 e4m3 and 2^-8 for bf16. Independent
errors of at most u have an RMS of at most u/sqrt(3); a sum of products whose one factor carries such errors inherits
that relative L2 error when the terms are of random sign.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

U_E4M3, U_BF16 = 2.0**-4, 2.0**-8
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Check:
    """One array of a result.

    Attributes:
        name: of the array; got: as the kernel wrote it; want: fp32.
        rel_l2: bound on |got - want|_2 / |want|_2.
        rtol, atol: bounds of every element; atol may be an array of want's shape.
        reason: where the bounds come from.
    """

    name: str
    got: torch.Tensor
    want: torch.Tensor
    rel_l2: float
    rtol: float
    atol: float | torch.Tensor
    reason: str

    def measure(self) -> dict[str, float]:
        """Largest error, largest reference, relative L2 error, elements out of bounds (NaN counts)."""
        got, want = self.got.float(), self.want.float()
        if got.shape != want.shape:
            raise AssertionError(f"{self.name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
        error = (got - want).abs()
        outside = ~(error <= self.atol + self.rtol * want.abs())
        return {
            "max_err": float(error.max()),
            "max_ref": float(want.abs().max()),
            "rel_l2": float(torch.linalg.vector_norm(error.double()) / torch.linalg.vector_norm(want.double())),
            "outside": int(outside.sum()),
        }

    def failure(self) -> str | None:
        """What is wrong, None if nothing is."""
        seen = self.measure()
        if seen["rel_l2"] <= self.rel_l2 and seen["outside"] == 0:  # a NaN fails the first
            return None
        return (
            f"{self.name}: relative L2 error {seen['rel_l2']:.3g} (allowed {self.rel_l2:.3g}), {seen['outside']} of "
            f"{self.want.numel()} elements out of bounds, largest error {seen['max_err']:.3g} at values up to "
            f"{seen['max_ref']:.3g}; bounds: {self.reason}"
        )


@dataclass(frozen=True)
class Case:
    """One call of another package's kernel.

    Attributes:
        name: of the case; module: what must be importable.
        run: called inside the device; returns the checks.
        arch: of the device; sm_count: its SMs (packages choose kernels and splits by it; few keep grids small).
        slow: takes more than 30 s.
        schedule: of the first run; another than round robin only for a kernel that is wrong under it.
        lints: kinds of lint that the kernel shows under some schedule; errors: kinds of error. Exactly these: what they
            come from is said in data/emulator/findings.md.
        schedules: of the tests, with the race detector, of a case too slow for all of them (`run_case.SCHEDULES`).
        unstable: how results depend on the schedule: not at all (""), by the order of floating-point additions alone
            ("bits"), or some schedules give wrong results ("wrong").
    """

    name: str
    module: str
    run: Callable[[], list[Check]]
    arch: str = "sm_100a"
    sm_count: int = 2
    slow: bool = False
    schedule: str = "round_robin"
    schedules: tuple[str, ...] = ()
    lints: frozenset[str] = frozenset()
    errors: frozenset[str] = frozenset()
    unstable: str = ""


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Standard normal numbers rounded to ``dtype``."""
    return torch.randn(*shape).to(dtype)


def integers(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Integers of -2..2: products and short sums of them are exact in every format."""
    return torch.randint(-2, 3, shape).to(dtype)


def rounded(name: str, got: torch.Tensor, want: torch.Tensor, u: float = U_BF16, slack: float = 1e-5) -> Check:
    """A result computed in fp32 and rounded once to a format with relative error ``u``.

    ``slack``: relative to the largest value, for fp32 sums in another order and approximated functions.
    """
    return Check(
        name,
        got,
        want,
        u / math.sqrt(3) + slack,
        1.01 * u,
        slack * float(want.abs().max()),
        "one rounding of the result",
    )


def exact(name: str, got: torch.Tensor, want: torch.Tensor) -> Check:
    """Integers small enough that every step is exact."""
    return Check(name, got, want, 0.0, 0.0, 0.0, "small integers: every step is exact")


def attention_check(name: str, got: torch.Tensor, want: torch.Tensor, values: torch.Tensor, p_u: float) -> Check:
    """The output of softmax(S) V with P rounded with relative error ``p_u`` and the output to bf16.

    Element by element an error of P is worth at most ``p_u * max|V|``; the relative L2 error is the RMS of the rounding
    errors (values of V have random sign). A factor of 1.5 on the latter covers e4m3's subnormal P.
    """
    return Check(
        name,
        got,
        want,
        1.5 * (p_u + U_BF16) / math.sqrt(3),
        1.01 * U_BF16,
        (p_u + 2e-4) * float(values.float().abs().max()),
        f"P rounded with relative error {p_u:g}, exp2 by polynomial, output rounded to bf16",
    )


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    causal: bool = False,
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp32.

    Args:
        q: (batch, queries, heads, d); k, v: (batch, keys, KV heads, d or dv), heads a multiple of KV heads.
        causal: the last query sees the last key.
        sink: (heads,) logit that takes part in the denominator only.

    Returns:
        output (batch, queries, heads, dv) and log-sum-exp (batch, heads, queries).
    """
    repeat = q.shape[2] // k.shape[2]
    k, v = (t.float().repeat_interleave(repeat, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), k) * scale
    if causal:
        queries, keys = scores.shape[-2:]
        visible = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
        scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        column = sink.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        p = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        p = torch.softmax(scores, -1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), torch.logsumexp(scores, -1)


def decode_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """fp32 values of bytes that hold two e2m1 numbers, low half first: (..., n) -> (..., 2n)."""
    packed = packed.view(torch.uint8)
    return torch.stack([E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]], -1).flatten(-2)


def unswizzle_scales(stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Block scales from the 128x4 tile order of the tensor core (32 x 4 x 4 bytes a tile) to (rows, columns)."""
    row_tiles, column_tiles = -(-rows // 128), -(-columns // 4)
    tiles = stored.reshape(-1)[: row_tiles * column_tiles * 512].reshape(row_tiles, column_tiles, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * 128, column_tiles * 4)[:rows, :columns]
