"""Read the two sides of a comparison. torch or numpy, any rank, into fp64 tensors, with typed errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dsv4lib.check import tolerances
from dsv4lib.errors import ArgumentError

Array = torch.Tensor | np.ndarray

_NUMPY_NAMES = {  # ml_dtypes registers these as numpy dtypes; torch.from_numpy does not know them
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
}


def read(name: str, value: Any) -> tuple[torch.Tensor, str]:
    """Return ``value`` as an fp64 tensor, and the table's name of its own format.

    Integers beyond 2^53 would not survive fp64 and are refused.
    """
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
        fmt = tolerances.format_name(tensor.dtype)
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.name in _NUMPY_NAMES:
            fmt = _NUMPY_NAMES[array.dtype.name]
            tensor = torch.from_numpy(array.astype(np.float64))
        elif array.dtype.kind in "iub":
            fmt = "int"
            tensor = torch.from_numpy(array.astype(np.int64))
        else:
            raise ArgumentError(name, array.dtype.name, "a real floating-point, integer or bool numpy array")
    else:
        raise ArgumentError(name, type(value).__name__, "a torch tensor or a numpy array")
    if fmt == "int" and tensor.dtype == torch.int64 and tensor.numel() and int(tensor.abs().max()) > 2**53:
        raise ArgumentError(name, int(tensor.abs().max()), "integers of magnitude up to 2^53, which fp64 holds exactly")
    if tensor.is_complex():
        raise ArgumentError(name, tensor.dtype, "real numbers")
    return tensor.to(torch.float64), fmt


def read_pair(actual: Any, expected: Any) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Return both sides in fp64 on one device, and the coarser of their formats.

    Raises:
        ArgumentError: not arrays, shapes differ, one side holds integers and the other does not, or nothing to compare.
    """
    a, a_fmt = read("actual", actual)
    e, e_fmt = read("expected", expected)
    if a.shape != e.shape:
        raise ArgumentError("actual.shape", tuple(a.shape), f"expected.shape, {tuple(e.shape)}; nothing is broadcast")
    if (a_fmt == "int") != (e_fmt == "int"):
        raise ArgumentError(
            "actual.dtype", a_fmt, f"the kind of expected.dtype, {e_fmt}: both integer or both floating"
        )
    if a.numel() == 0:
        raise ArgumentError("actual.shape", tuple(a.shape), "at least one element: comparing nothing proves nothing")
    return a, e.to(a.device), tolerances.coarser(a_fmt, e_fmt)


def row_length(shape: tuple[int, ...]) -> int:
    """Count the elements of one row: the last axis that is not 1. A column vector is one row, not rows of one."""
    return next((n for n in reversed(shape) if n > 1), 1)


def row_rms(x: torch.Tensor) -> torch.Tensor:
    """Compute the RMS of each row's finite elements of ``x``, [rows, 1]. The peak is factored out against overflow."""
    rows = torch.nan_to_num(x.reshape(-1, row_length(tuple(x.shape))), nan=0.0, posinf=0.0, neginf=0.0)
    finite = torch.isfinite(x).reshape(rows.shape).sum(dim=1, keepdim=True).clamp(min=1)
    peak = rows.abs().amax(dim=1, keepdim=True)
    unit = rows / torch.where(peak > 0, peak, torch.ones_like(peak))
    return peak * ((unit * unit).sum(dim=1, keepdim=True) / finite).sqrt()


def row_scale(a: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """Return the scale of each element's row, shaped like ``a``.

    It is the smaller RMS of two sides: neither can inflate it.
    """
    scale = torch.minimum(row_rms(a), row_rms(e))
    return scale.expand(-1, row_length(tuple(a.shape))).reshape(a.shape)
