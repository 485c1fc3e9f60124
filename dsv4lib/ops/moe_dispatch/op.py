"""Sort routes by expert, as a torch op: what a grouped GEMM reads its rows by.

`moe_dispatch` calls `torch.ops.dsv4.moe_dispatch`, which writes five tensors in place with one launch. Their sizes
follow from T, k and E alone: the host never waits for a count. The result is defined to the last row, padding included.
The oracle is `dsv4lib.reference.moe_dispatch`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.moe_dispatch import arguments
from dsv4lib.ops.moe_dispatch.kernel import MAX_EXPERTS, MAX_K, QUAD, MoeDispatch
from dsv4lib.ops.moe_dispatch.size import max_rows

MAX_ROWS = 2**31 - 256  # numbers of rows are int32, those of a block past the last too


class Dispatch(NamedTuple):
    """Where each route went.

    Attributes:
        counts: int32 [E], routes to each expert.
        offsets: int32 [E + 1], each expert's first row; last, the rows of all.
        rows: int32 [R], the token of each row, -1: none.
        row_of: int32 [T, k], the row of each route, -1: none.
        row_weight: fp32 [R], the weight of each row's route, 0: none; None without weights.
    """

    counts: Tensor
    offsets: Tensor
    rows: Tensor
    row_of: Tensor
    row_weight: Tensor | None


@typed
def moe_dispatch(
    experts: Tensor,
    weights: Tensor | None = None,
    *,
    count: int,
    align: int = 128,
    max_m: int = 0,
    out: Dispatch | None = None,
    backend: str = "auto",
) -> Dispatch:
    """Lay the rows of experts out one after the other.

    Each expert's are in token order, those of one token in slot order.

    Args:
        experts: int32 [T, k], contiguous; a number outside 0 .. count - 1 (-1) is a masked route and goes nowhere.
        weights: fp32 [T, k], contiguous, or None.
        count: E.
        align: an expert's first row is a multiple of it; itself a multiple of 4.
        max_m: 0, or the rows that every expert has (masked layout): a multiple of ``align``, at least T.
        out: tensors to write into, with `max_rows` rows or more (E max_m if masked); None: new ones.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        A `Dispatch`. A token that names an expert twice may overflow max_m; such routes get row -1 on a GPU, while the
        counts say how many there were, and are refused on the CPU.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    if experts.dim() != 2:
        raise ArgumentError("experts", tuple(experts.shape), "a tensor [T, k]")
    if not 1 <= count <= MAX_EXPERTS:
        raise ArgumentError("count", count, f"1 to {MAX_EXPERTS}")
    check_rows(*experts.shape, count, align, max_m)  # before as many are allocated
    if out is None:

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=experts.device)

        size = count * max_m if max_m else max_rows(*experts.shape, count, align)
        row_weight = None if weights is None else new(size, dtype=torch.float32)
        out = Dispatch(new(count), new(count + 1), new(size), new(*experts.shape), row_weight)
    Call.op(experts, weights, out, align, max_m, backend)
    return out


def check_rows(tokens: int, k: int, count: int, align: int, max_m: int) -> None:
    """Refuse what no memory holds: rows are numbered in int32.

    Raises:
        ArgumentError: see `moe_dispatch`.
    """
    if not QUAD <= align <= MAX_ROWS or align % QUAD:
        raise ArgumentError("align", align, f"a multiple of {QUAD}, at most {MAX_ROWS}")
    if max_m and (not tokens <= max_m <= MAX_ROWS or max_m % align):
        raise ArgumentError("max_m", max_m, f"0, or a multiple of {align}, T = {tokens} to {MAX_ROWS}")
    rows = count * max_m if max_m else max_rows(tokens, k, count, align)
    if rows > MAX_ROWS:
        name, value = ("max_m", max_m) if max_m else ("align", align)
        raise ArgumentError(name, value, f"so small that {count} experts have at most {MAX_ROWS} rows, not {rows}")


@op("moe_dispatch", mutates=("out",))
class Call(NamedTuple):
    """A call of `moe_dispatch`."""

    experts: Tensor
    weights: Tensor | None
    out: Dispatch
    align: int
    max_m: int
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        for name, x in (("out.counts", self.out.counts), ("out.rows", self.out.rows)):
            if x.dim() != 1:
                raise ArgumentError(f"{name}.shape", tuple(x.shape), "one dimension")
        fp32, i32, count = torch.float32, torch.int32, self.out.counts.shape[0]
        if self.experts.dim() != 2 or not 1 <= self.experts.shape[1] <= MAX_K:
            raise ArgumentError("experts.shape", tuple(self.experts.shape), f"[T, k] with k 1 to {MAX_K}")
        shape = tuple(self.experts.shape)
        launching.check(
            {
                "experts": (self.experts, i32, shape),
                "weights": (self.weights, fp32, shape),
                "out.counts": (self.out.counts, i32, (None,)),
                "out.offsets": (self.out.offsets, i32, (count + 1,)),
                "out.rows": (self.out.rows, i32, (None,)),
                "out.row_of": (self.out.row_of, i32, shape),
                "out.row_weight": (self.out.row_weight, fp32, (self.out.rows.shape[0],)),
            }
        )
        for name, x in (("experts", self.experts), ("weights", self.weights), ("out.row_of", self.out.row_of)):
            if x is not None and not x.is_contiguous():
                raise ArgumentError(name, x.stride(), "contiguous")
        if (self.weights is None) != (self.out.row_weight is None):
            raise ArgumentError(
                "out.row_weight", None if self.out.row_weight is None else "given", "with weights, only"
            )
        check_rows(*shape, count, self.align, self.max_m)
        least = count * self.max_m if self.max_m else max_rows(*shape, count, self.align)
        if self.out.rows.shape[0] < least or self.out.rows.shape[0] % QUAD:
            raise ArgumentError("out.rows.shape", tuple(self.out.rows.shape), f"a multiple of {QUAD}, at least {least}")

    def check_values(self) -> None:
        """Check that an expert has rows for its routes."""
        if self.max_m:
            routed = self.experts[(self.experts >= 0) & (self.experts < len(self.out.counts))]
            most = int(routed.bincount(minlength=1).max())
            if most > self.max_m:
                raise ArgumentError("max_m", self.max_m, f"at least {most}, the routes of one expert")

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        experts, weights, out, align, max_m, _ = self
        count = len(out.counts)
        settings = {"experts": count, "k": experts.shape[1], "align": align}
        settings |= {"masked": max_m > 0, "weighted": weights is not None}
        if experts.shape[0] == 0:
            out.counts.zero_()
            out.rows.fill_(-1)
            torch.arange(0, (count + 1) * max_m, max_m, out=out.offsets) if max_m else out.offsets.zero_()
            if out.row_weight is not None:
                out.row_weight.zero_()
        elif backend == "reference":
            arguments.launch_args(MoeDispatch(**settings), self)  # checks: what one back end takes all take
            found = backends.oracle("moe_dispatch").moe_dispatch(experts, weights, count, len(out.rows), align, max_m)
            for target, source in zip(out, found, strict=True):
                if target is not None:
                    target.copy_(source)
        else:
            launching.launch(backend, MoeDispatch, settings, arguments.fake_args, arguments.launch_args, self)
