"""Make queries and cache entries of the projections of tokens, as a torch op.

    q' = bf16(rope(q / sqrt(mean(q^2) + eps)))            each head, no weight, last 64 dims rotated
    entry at indices[t] = quantised(bf16(rope(kv[t])))    584 bytes; with ``kv_norm`` kv is normed first

One launch of `dsv4::qnorm_rope_kv`, outputs written in place, nothing read by the host; on a GPU an index out of range
counts as -1, and a position that the table does not have makes rotated values NaN. The window's ring and the paged
cache are filled alike: an index says where. The oracles are `dsv4lib.reference.rmsnorm`, `.rope` and `.quantize`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.dsl.head_rows import DIM
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching, rotary
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.qnorm_rope_kv import arguments
from dsv4lib.ops.qnorm_rope_kv.kernel import QnormRopeKv
from dsv4lib.ops.quantize.entries import KvEntries
from dsv4lib.ops.quantize.op import SLOTS, Slots


@typed
def qnorm_rope_kv(
    q: Tensor,
    kv: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor,
    pages: Tensor,
    page_size: int,
    indices: Tensor,
    *,
    kv_norm: Tensor | None = None,
    eps: float = 1e-6,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Norm and rotate queries; rotate, quantise and append KV vectors.

    Args:
        q: bf16 [T, H, 512], heads on 16 bytes.
        kv: bf16 [T, 512], rows on 16 bytes.
        positions, cos_sin: angles, see `ops.common.rotary`.
        pages: uint8 [P, `kv_entry.LAYOUT.page_bytes(page_size)`], pages on 16 bytes, any distance apart; changed.
        page_size: entries of a page.
        indices: int32 [T], page * page_size + slot, none twice; a negative number, or position, drops the entry.
        kv_norm: fp32 [512]: kv is normed with this weight, and rounded to bf16, before RoPE; None: it came normed.
        eps: added to means of squares.
        out: bf16 [T, H, 512] to write into; None: a new tensor.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    launching.check_eps(eps=eps)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    Call.op(q, kv, kv_norm, positions, cos_sin, out, (pages, page_size, indices), eps, backend)
    return out


def shape_of(tokens: int, heads: int) -> dict[str, int]:
    """Choose heads a warp and warps a CTA: few are spread widely."""
    if tokens * heads <= 4096 or heads < 16:
        return {"heads": 1, "warps": 4}
    return {"heads": 2, "warps": 2}


@op("qnorm_rope_kv", mutates=("out", "slots.pages"), names=SLOTS)
class Call(NamedTuple):
    """A call of `qnorm_rope_kv`."""

    q: Tensor
    kv: Tensor
    kv_norm: Tensor | None
    positions: Tensor | None
    cos_sin: Tensor
    out: Tensor
    slots: Slots
    eps: float
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        if self.q.dim() != 3:
            raise ArgumentError("q.shape", tuple(self.q.shape), f"[T, H, {DIM}]")
        bf16, shape = torch.bfloat16, (*self.q.shape[:2], DIM)
        launching.check(
            {
                "q": (self.q, bf16, shape),
                "kv": (self.kv, bf16, (len(self.q), DIM)),
                "kv_norm": (self.kv_norm, torch.float32, (DIM,)),
                **rotary.wanted(len(self.q), self.positions, self.cos_sin),
                "out": (self.out, bf16, shape),
            }
        )
        self.slots.check(KvEntries, self.kv)

    def check_values(self) -> None:
        """Check positions and indices."""
        rotary.check_values(self.positions, self.cos_sin)
        self.slots.check_values()

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        if len(self.q) == 0:
            return
        if self.q.shape[1] == 0 or len(self.slots.pages) == 0:  # there is no launch that does one half alone
            allowed = "a head, and a page among pages, where there are tokens"
            raise ArgumentError("q.shape", tuple(self.q.shape), allowed)
        if backend == "reference":
            return _reference(self)
        flags = {"gathered": self.positions is not None, "normed": self.kv_norm is not None}
        settings = {**shape_of(*self.q.shape[:2]), **flags}
        launching.launch(backend, QnormRopeKv, settings, arguments.fake_args, arguments.launch_args, self)


def _reference(call: Call) -> None:
    """Ask the oracles in fp64; entries are rotated in fp32, as in the kernel."""
    norm, rope = backends.oracle("rmsnorm").rmsnorm, backends.oracle("rope")
    cos, sin = rotary.cosines_sines(call.positions, call.cos_sin)
    nope = DIM - rotary.WIDTH
    q = norm(call.q.double(), None, call.eps)
    call.out.copy_(torch.cat((q[..., :nope], rope.rotate(q[..., nope:], cos, sin)), -1))
    kv = call.kv if call.kv_norm is None else norm(call.kv.double(), call.kv_norm.double(), call.eps).bfloat16()
    wide = kv.float()[:, None]
    rotated = torch.cat((wide[..., :nope], rope.rotate(wide[..., nope:], cos, sin)), -1)[:, 0].bfloat16()
    pages, page_size, indices = call.slots
    kept = indices if call.positions is None else indices.masked_fill(call.positions < 0, -1)
    backends.oracle("quantize").kv_entries(pages, page_size, kept.clamp_min(-1), rotated)
