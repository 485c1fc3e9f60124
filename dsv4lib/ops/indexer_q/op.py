"""Rotate and quantise queries of the lightning indexer, as a torch op.

    x = bf16(bf16(rope(q[t, h])) H / sqrt(128))                   H only with ``hadamard``, and keys alike
    "fp8": codes E4M3(x / s), s = 2^ceil(log2(max(amax, 1e-4) / 448)) of a head; weights' = weights (128 H)^-0.5 s
    "fp4": codes E2M1, scales UE8M0 for 32 dims (`formats.mxfp4`);               weights' = weights (128 H)^-0.5

Sums are fp32; x is bf16 after RoPE and after the rotation, as the released code stores it, and quantised from there.
Weights are not rounded on their way to fp32.

One launch of `dsv4::indexer_q`, outputs written in place, nothing read by the host; on a GPU a position that the table
does not have makes its heads NaN. The oracle is `dsv4lib.reference.indexer` with `formats.hadamard`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, mxfp4, ue8m0
from dsv4lib.formats import hadamard as hadamard_format
from dsv4lib.formats.indexer_key import DIM
from dsv4lib.ops.common import launching, rotary
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.indexer_q import arguments
from dsv4lib.ops.indexer_q.arguments import SCALES
from dsv4lib.ops.indexer_q.kernel import FORMATS, IndexerQ
from dsv4lib.ops.quantize.config import has_fp4_conversion
from dsv4lib.ops.quantize.op import DTYPES


class IndexerQueries(NamedTuple):
    """Quantised queries.

    Attributes:
        codes: uint8 [T, H, 128] (fp8) or [T, H, 64] (fp4, low nibble first).
        scales: uint8 [T, H, 4] of fp4, else None: FP8's are in the weights.
        weights: fp32 [T, H].
    """

    codes: Tensor
    scales: Tensor | None
    weights: Tensor


@typed
def indexer_q(
    q: Tensor,
    weights: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor,
    *,
    variant: str = "fp4",
    hadamard: bool = True,
    out: IndexerQueries | None = None,
    backend: str = "auto",
) -> IndexerQueries:
    """Rotate and quantise queries, scale their head weights.

    Args:
        q: bf16 [T, H, 128], heads on 16 bytes.
        weights: bf16 or fp32 [T, H], as projected.
        positions, cos_sin: angles, see `ops.common.rotary`.
        variant: "fp4", what the model was trained for, or "fp8".
        hadamard: rotate by the Hadamard matrix, too, as the keys of `quantize_indexer_keys` are by default.
        out: to write into; None: new tensors.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    if q.dim() != 3:
        raise ArgumentError("q", tuple(q.shape), f"a tensor [T, H, {DIM}]")
    if variant not in FORMATS:
        raise ArgumentError("variant", variant, "one of " + ", ".join(FORMATS))
    if out is None:
        lead, u8 = q.shape[:2], torch.uint8
        out = IndexerQueries(
            torch.empty(*lead, DIM * FORMATS[variant].bits // 8, dtype=u8, device=q.device),
            torch.empty(*lead, SCALES, dtype=u8, device=q.device) if variant == "fp4" else None,
            torch.empty(lead, dtype=torch.float32, device=q.device),
        )
    Call.op(q, weights, positions, cos_sin, out, variant, hadamard, backend)
    return out


def shape_of(tokens: int, heads: int, fp4: bool, hadamard: bool) -> dict[str, int]:
    """Choose how heads are spread: few over many warps; many in rounds."""
    if tokens * heads <= 32768:
        lanes, passes, warps, rounds = 8, 1, 4, 1
    elif fp4:
        lanes, passes, warps, rounds = 4, 1, 2, 4
    else:
        lanes, passes, warps, rounds = (8, 1, 4, 4) if hadamard else (8, 2, 4, 2)
    return {"lanes": lanes, "passes": passes, "warps": warps, "rounds": rounds}


@op("indexer_q", mutates=("out",))
class Call(NamedTuple):
    """A call of `indexer_q`."""

    q: Tensor
    weights: Tensor
    positions: Tensor | None
    cos_sin: Tensor
    out: IndexerQueries
    variant: str
    hadamard: bool
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        if self.q.dim() != 3:
            raise ArgumentError("q.shape", tuple(self.q.shape), f"[T, H, {DIM}]")
        if self.variant not in FORMATS:
            raise ArgumentError("variant", self.variant, "one of " + ", ".join(FORMATS))
        if self.weights.dtype not in DTYPES:
            raise ArgumentError("weights.dtype", self.weights.dtype, "bf16 or fp32")
        if (self.out.scales is None) != (self.variant == "fp8"):
            raise ArgumentError("out.scales", self.out.scales, "None for fp8, a tensor for fp4")
        u8, lead = torch.uint8, tuple(self.q.shape[:2])
        launching.check(
            {
                "q": (self.q, torch.bfloat16, (*lead, DIM)),
                "weights": (self.weights, self.weights.dtype, lead),
                **rotary.wanted(len(self.q), self.positions, self.cos_sin),
                "out.codes": (self.out.codes, u8, (*lead, DIM * FORMATS[self.variant].bits // 8)),
                "out.scales": (self.out.scales, u8, (*lead, SCALES)),
                "out.weights": (self.out.weights, torch.float32, lead),
            }
        )

    def check_values(self) -> None:
        """Check positions."""
        rotary.check_values(self.positions, self.cos_sin)

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        if self.q.numel() == 0:
            return
        if backend == "reference":
            return _reference(self)
        settings = {"variant": self.variant, "hadamard": self.hadamard}
        settings |= shape_of(*self.q.shape[:2], self.variant == "fp4", self.hadamard)
        settings |= {"gathered": self.positions is not None, "weights": DTYPES[self.weights.dtype]}
        settings["fp4_conversion"] = has_fp4_conversion(launching.arch(backend))
        launching.launch(backend, IndexerQ, settings, arguments.fake_args, arguments.launch_args, self)


def _reference(call: Call) -> None:
    cos, sin = rotary.cosines_sines(call.positions, call.cos_sin)
    rotation = hadamard_format.transform if call.hadamard else None
    x = backends.oracle("indexer").rotated(call.q.float(), cos, sin, rotation, torch.bfloat16)
    weights = call.weights.float() * (DIM * call.q.shape[1]) ** -0.5
    if call.variant == "fp4":
        q = mxfp4.quantize(x)
        call.out.codes.copy_(q.packed)
        call.out.scales.copy_(q.scales)
    else:
        q = fp8_block.quantize_activation(x)
        call.out.codes.copy_(q.codes)
        weights = weights * ue8m0.decode(q.scales[..., 0])
    call.out.weights.copy_(weights)
