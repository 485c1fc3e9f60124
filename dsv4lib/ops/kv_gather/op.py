"""Gather 584-byte entries of pages as bf16 rows: the torch op `dsv4::kv_gather`.

For attention that knows no pages. One launch, written in place, nothing read by the host: it can be captured in a CUDA
graph after one call has compiled it. The oracle, bit by bit, is `dsv4lib.formats.kv_entry.gather`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.formats.kv_entry import HEAD_DIM, LAYOUT, gather
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.kv_gather import arguments
from dsv4lib.ops.kv_gather.kernel import KvGather


@typed
def kv_gather(
    pages: Tensor, page_size: int, indices: Tensor, *, out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Fetch and dequantise entries.

    Args:
        pages: uint8 ``[P, kv_entry.LAYOUT.page_bytes(page_size)]``, pages on 16 bytes, any distance apart.
        page_size: entries of a page.
        indices: int32, any contiguous shape: page * page_size + slot; negative: a row of zeros, nothing is read. On a
            GPU an index outside the pool counts as -1.
        out: bf16 ``[*indices.shape, 512]``, contiguous, to write into; None: a new tensor.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    if out is None:
        out = torch.empty(*indices.shape, HEAD_DIM, dtype=torch.bfloat16, device=pages.device)
    Call.op(pages, indices, out, page_size, backend)
    return out


@op("kv_gather", mutates=("out",))
class Call(NamedTuple):
    """A call of `kv_gather`."""

    pages: Tensor
    indices: Tensor
    out: Tensor
    page_size: int
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        shape = tuple(self.indices.shape)
        launching.check(
            {
                "pages": (self.pages, torch.uint8, (None, LAYOUT.page_bytes(self.page_size))),
                "indices": (self.indices, torch.int32, shape),
                "out": (self.out, torch.bfloat16, (*shape, HEAD_DIM)),
            }
        )
        for name, x in (("indices", self.indices), ("out", self.out)):
            if not x.is_contiguous():
                raise ArgumentError(f"{name}.stride()", x.stride(), "a contiguous tensor")

    def check_values(self) -> None:
        """Check indices."""
        entries = len(self.pages) * self.page_size
        wrong = self.indices[self.indices >= entries]
        if len(wrong):
            raise ArgumentError("indices", wrong.tolist()[:8], f"negative or 0..{entries - 1}")

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        pages, indices, out, page_size, _ = self
        if indices.numel() == 0:
            return
        if len(pages) == 0:
            out.zero_()
        elif backend == "reference":
            out.copy_(gather(pages, page_size, indices.clamp_min(-1))[0])
        else:
            launching.launch(backend, KvGather, {}, arguments.fake_args, arguments.launch_args, self)
