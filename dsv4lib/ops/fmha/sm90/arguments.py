"""Make the kernel's arguments: fake tensors to compile, checked ones to launch."""

from __future__ import annotations

import torch
from cutlass import Int32

from dsv4lib.ops.fmha import arguments
from dsv4lib.ops.fmha.sm90.kernel import DecodeFmha
from dsv4lib.ops.fmha.sm90.prefill.kernel import PrefillFmha
from dsv4lib.ops.fmha.work import KeyRows


def fake_args(kernel: DecodeFmha | PrefillFmha) -> tuple:
    """Arguments for `compile_for`: symbolic extents and strides, no memory."""
    q, entries, window, _, *rest, scale, splits, _, _, stream = arguments.fake_args(kernel)
    ctas = (Int32(1),) if isinstance(kernel, PrefillFmha) else ()
    return q, entries, window, *rest, scale, splits, *ctas, stream


def launch_args(
    kernel: DecodeFmha | PrefillFmha,
    q: torch.Tensor,
    entries: KeyRows | None,
    window: KeyRows | None,
    sink: torch.Tensor | None,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    splits: int = 1,
    stream: int = 0,
    ctas: int = 1,
) -> tuple:
    """Make arguments of either kernel of torch tensors. As `ops.fmha.arguments.launch_args`.

    Args:
        ctas: of a split and block of 64 heads of `PrefillFmha`, 1 or more; each takes token after token.

    Raises:
        ArgumentError: a tensor that is missing, not wanted, or of the wrong type, shape or stride.
    """
    given = arguments.launch_args(kernel, q, entries, window, sink, rope, o, lse, scale, splits, stream)
    q, entries, window, _, *rest, scale, splits, _, _, stream = given
    last = (Int32(ctas),) if isinstance(kernel, PrefillFmha) else ()
    return q, entries, window, *rest, scale, splits, *last, stream
