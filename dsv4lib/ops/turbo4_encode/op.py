"""Store vectors as turbo4 in a paged KV cache, as a torch op.

`turbo4_encode` calls `torch.ops.dsv4.turbo4_encode`, which writes in place: one launch, no value of a tensor read by
the host. Keys and values whose pages are heads of one cache are stored by one call. The oracle is
`dsv4lib.reference.turbo4_encode`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import turbo4
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.turbo4_encode import arguments
from dsv4lib.ops.turbo4_encode.kernel import HEAD_DIMS, Turbo4Encode

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_SEED = 1 << 31
MAX_PAGE = 1 << 16  # entries
MOST_ENTRIES = 1 << 31  # of a cache: kernels count them in 32 bits


@typed
def turbo4_encode(
    x: Tensor, pages: Tensor, page_size: int, indices: Tensor, *, seed: int = 0, backend: str = "auto"
) -> None:
    """Rotate and quantise vectors, and store them in pages, in place.

    Args:
        x: bf16 or fp16 [T, H, D], D 64, 128, 256 or 512, rows on 16 bytes. A NaN or Inf, or a norm above 65504, leaves
            a norm of NaN or Inf.
        pages: uint8 [P, H, bytes], bytes those of `formats.turbo4.layout(D)` for ``page_size``; heads on 16 bytes,
            P * page_size below 2^31.
        page_size: entries of a page, 1 to 65536.
        indices: int32 [T], page * page_size + slot, none twice; a negative one drops the row, on a GPU also one past
            the end.
        seed: of the signs, 0 to 2^31 - 1; attention must have the same.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    Call.op(x, pages, page_size, indices, seed, backend)


def check_pages(name: str, pages: Tensor, page_size: int, heads: int, dim: int) -> None:
    """Check a cache.

    Raises:
        ArgumentError: its type, shape or strides are not those of `turbo4_encode`.
    """
    if not 1 <= page_size <= MAX_PAGE:
        raise ArgumentError("page_size", page_size, f"1 to {MAX_PAGE}")
    size = turbo4.layout(dim).page_bytes(page_size)
    launching.check({name: (pages, torch.uint8, (None, heads, size))})
    if len(pages) * page_size >= MOST_ENTRIES:
        raise ArgumentError(f"{name}.shape", tuple(pages.shape), f"less than 2^31 entries, {page_size} a page")
    if pages.stride(2) != 1 or any(stride % turbo4.ALIGN for stride in pages.stride()[:2]):
        raise ArgumentError(
            f"{name}.stride()", pages.stride(), f"pages and heads on {turbo4.ALIGN} bytes, bytes adjacent"
        )


@op("turbo4_encode", mutates=("pages",))
class Call(NamedTuple):
    """A call of `turbo4_encode`."""

    x: Tensor
    pages: Tensor
    page_size: int
    indices: Tensor
    seed: int
    backend: str

    def check(self) -> None:
        """Check types, shapes, devices and the seed."""
        x = self.x
        if x.dtype not in DTYPES:
            raise ArgumentError("x.dtype", x.dtype, "bfloat16 or float16")
        if x.dim() != 3 or x.shape[2] not in HEAD_DIMS or not x.shape[1]:
            allowed = f"[T, H, D], H at least 1 and D one of {', '.join(map(str, HEAD_DIMS))}"
            raise ArgumentError("x.shape", tuple(x.shape), allowed)
        if not 0 <= self.seed < MAX_SEED:
            raise ArgumentError("seed", self.seed, "0 to 2^31 - 1")
        launching.check(
            {
                "x": (x, x.dtype, tuple(x.shape)),
                "indices": (self.indices, torch.int32, (len(x),)),
                "pages": (self.pages, torch.uint8, (None, None, None)),
            }
        )
        check_pages("pages", self.pages, self.page_size, x.shape[1], x.shape[2])

    def check_values(self) -> None:
        """Check indices."""
        entries, kept = len(self.pages) * self.page_size, self.indices[self.indices >= 0]
        if bool((kept >= entries).any()):
            raise ArgumentError("indices", kept[kept >= entries].tolist()[:8], f"negative (drop) or 0..{entries - 1}")
        if len(kept.unique()) != len(kept):
            raise ArgumentError("indices", kept.tolist()[:8], "each index at most once")

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        if 0 in (len(self.x), len(self.pages)):
            return
        settings = {"dtype": DTYPES[self.x.dtype], "head_dim": self.x.shape[2]}
        if backend == "reference":
            arguments.launch_args(Turbo4Encode(**settings), self)  # checks: what one back end takes all take
            kept = self.indices.clamp_min(-1)
            backends.oracle("turbo4_encode").append(self.pages, self.page_size, kept, self.x, self.seed)
            return
        launching.launch(backend, Turbo4Encode, settings, arguments.fake_args, arguments.launch_args, self)
