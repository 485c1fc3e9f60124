"""Check arguments of the codecs.

Shared, so that each refusal reads the same and names the argument.
"""

from __future__ import annotations

import torch

from dsv4lib.errors import ArgumentError

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# float16 is left out on purpose: its range is smaller than that of the scales, so a dequantised value could overflow.
OUTPUT_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def working_copy(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` detached, in float32 (float64 if it is float64). The widening is exact for every accepted dtype.

    Raises:
        ArgumentError: ``x`` is no tensor, or its dtype is not one of ``INPUT_DTYPES``.
    """
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(name, type(x).__name__, "a torch.Tensor")
    if x.dtype not in INPUT_DTYPES:
        raise ArgumentError(f"{name}.dtype", x.dtype, f"one of {list(INPUT_DTYPES)}")
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype`` if a value may be decoded to it, else raise ArgumentError."""
    if dtype not in OUTPUT_DTYPES:
        raise ArgumentError("dtype", dtype, f"one of {list(OUTPUT_DTYPES)}")
    return dtype


def as_bytes(name: str, t: torch.Tensor, *same_bits: torch.dtype) -> torch.Tensor:
    """Return ``t`` as uint8 without changing a bit. Besides uint8 the dtypes ``same_bits`` are accepted."""
    if not isinstance(t, torch.Tensor):
        raise ArgumentError(name, type(t).__name__, "a torch.Tensor")
    if t.dtype != torch.uint8 and t.dtype not in same_bits:
        raise ArgumentError(f"{name}.dtype", t.dtype, f"one of {[torch.uint8, *same_bits]}")
    return t.view(torch.uint8)


def looked_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the entry of ``table`` [256 or less] for each uint8 code, contiguous, on the codes' device."""
    return table.to(codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def last_dim(name: str, x: torch.Tensor, *, multiple_of: int = 1, equal_to: int | None = None) -> int:
    """Return the size of the last dimension, checked."""
    if x.dim() == 0:
        raise ArgumentError(f"{name}.shape", tuple(x.shape), "at least one dimension")
    size = x.shape[-1]
    if equal_to is not None and size != equal_to:
        raise ArgumentError(f"{name}.shape", tuple(x.shape), f"last dimension {equal_to}")
    if size % multiple_of:
        raise ArgumentError(f"{name}.shape", tuple(x.shape), f"last dimension a multiple of {multiple_of}")
    return size


def shape(name: str, t: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise ArgumentError unless ``t`` has exactly the shape ``expected``."""
    if tuple(t.shape) != tuple(expected):
        raise ArgumentError(f"{name}.shape", tuple(t.shape), f"{tuple(expected)}")


def same_device(name: str, t: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ArgumentError unless both tensors live on one device."""
    if t.device != other.device:
        raise ArgumentError(f"{name}.device", str(t.device), f"the device of {other_name}, {other.device}")
