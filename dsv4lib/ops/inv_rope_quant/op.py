"""Rotate attention's output back and quantise it: `dsv4::inv_rope_quant`.

    x = o, its last 64 dims rotated back by the token's angles, fp32
    codes = E4M3(x / s), s = 2^ceil(log2(max(amax, 1e-4) / 448)) of each 128 dims

One launch of `dsv4::inv_rope_quant`, outputs written in place, nothing read by the host; on a GPU a position that the
table does not have makes the rotated groups NaN. Heads stay in their order, so [T, H, 512] is the [T, groups, 4096] of
the projection. The oracle is `dsv4lib.reference.rope` in fp32 with `dsv4lib.formats.fp8_block`.

Scales are written as the projection reads them, no pass between the two launches:

| layout           | scales                                                           | read by                      |
|------------------|------------------------------------------------------------------|------------------------------|
| `rowmajor`       | UE8M0, uint8 [T, H, 4]                                           | `fp8_block.dequantize`       |
| `swizzled`       | UE8M0 of 1x32, an image of `scale_swizzle` a group: uint8        | `output_proj`, `linear` with |
|                  | [groups, bytes]; without ``groups`` one of all heads, [bytes]    | mode "mxfp8"                 |
| `colmajor`       | fp32 [T, H, 4], tokens side by side                              | DeepGEMM on Hopper           |
| `colmajor_ue8m0` | int32 [T, H], four UE8M0 a word, tokens side by side             | DeepGEMM on Blackwell        |

    u = output_proj(inv_rope_quant(o, positions, cos_sin, layout="swizzled", groups=8), wo_a, mode="mxfp8")

An image repeats each scale for its four blocks of 32, the same numbers as 1x128, and has zero bytes for the rows that
pad the tokens to 128. Column-major rows start on 16 bytes, as a TMA tensor's must: room for T up to a multiple of 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.dsl.head_rows import DIM
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import fp8_block, scale_swizzle, ue8m0
from dsv4lib.ops.common import launching, rotary
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.inv_rope_quant import arguments
from dsv4lib.ops.inv_rope_quant.kernel import GROUPS, LAYOUTS, InvRopeQuant


@typed
def inv_rope_quant(
    o: Tensor,
    positions: Tensor | None,
    cos_sin: Tensor,
    *,
    layout: str = "rowmajor",
    groups: int | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Rotate heads back and quantise them.

    Args:
        o: bf16 [T, H, 512], heads on 16 bytes.
        positions, cos_sin: angles, see `ops.common.rotary`.
        layout: of the scales, see the module docstring.
        groups: of heads, a divisor of H, each with an image of its own; "swizzled" only. None: one image, [bytes].
        out: (codes, scales) to write into; None: new tensors.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        (codes uint8 [T, H, 512] of E4M3, scales in their ``layout``).

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    if o.dim() != 3:
        raise ArgumentError("o", tuple(o.shape), f"a tensor [T, H, {DIM}]")
    if layout not in LAYOUTS:
        raise ArgumentError("layout", layout, "one of " + ", ".join(LAYOUTS))
    tokens, heads, _ = o.shape
    if groups is not None and (layout != "swizzled" or groups < 1 or heads % groups):
        allowed = f"a divisor of the {heads} heads" if layout == "swizzled" else f'None for layout "{layout}"'
        raise ArgumentError("groups", groups, allowed)
    if out is None:
        out = torch.empty(tokens, heads, DIM, dtype=torch.uint8, device=o.device), _new_scales(o, layout, groups)
    codes, scales = out
    if layout == "swizzled" and scales.dim() != (1 if groups is None else 2):
        raise ArgumentError("out[1].shape", tuple(scales.shape), "[bytes]" if groups is None else "[groups, bytes]")
    images = scales[None] if layout == "swizzled" and groups is None else scales
    Call.op(o, positions, cos_sin, (codes, images), layout, backend)
    return out


def _new_scales(o: Tensor, layout: str, groups: int | None) -> Tensor:
    """Allocate the scales of o."""
    tokens, heads, _ = o.shape
    rows = -(-tokens // 4) * 4
    if layout == "colmajor":
        by_columns = torch.empty(heads, GROUPS, rows, dtype=torch.float32, device=o.device)
        return by_columns[..., :tokens].permute(2, 0, 1)
    if layout == "colmajor_ue8m0":
        return torch.empty(heads, rows, dtype=torch.int32, device=o.device)[:, :tokens].t()
    shape = [tokens, heads, GROUPS]
    if layout == "swizzled":
        size = scale_swizzle.swizzled_bytes(tokens, heads // (groups or 1) * DIM // 32)
        shape = [size] if groups is None else [groups, size]
    return torch.empty(shape, dtype=torch.uint8, device=o.device)


def shape_of(tokens: int, heads: int) -> dict[str, int]:
    """Choose heads a warp and warps a CTA: few are spread widely."""
    if tokens * heads <= 4096 or heads < 16:
        return {"heads": 1, "warps": 4}
    return {"heads": 2 if tokens * heads <= 32768 else 4, "warps": 4}


@op("inv_rope_quant", mutates=("out",))
class Call(NamedTuple):
    """A call of `inv_rope_quant`; swizzled scales are [images, bytes]."""

    o: Tensor
    positions: Tensor | None
    cos_sin: Tensor
    out: tuple[Tensor, Tensor]
    layout: str
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        o, layout, (codes, scales) = self.o, self.layout, self.out
        if o.dim() != 3:
            raise ArgumentError("o.shape", tuple(o.shape), f"[T, H, {DIM}]")
        if layout not in LAYOUTS:
            raise ArgumentError("layout", layout, "one of " + ", ".join(LAYOUTS))
        u8, lead = torch.uint8, tuple(o.shape[:2])
        wanted = {
            "rowmajor": (u8, (*lead, GROUPS)),
            "swizzled": (u8, (None, None)),
            "colmajor": (torch.float32, (*lead, GROUPS)),
            "colmajor_ue8m0": (torch.int32, lead),
        }[layout]
        if layout == "swizzled" and scales.dim() == 2:
            images = len(scales)
            if not images or lead[1] % images:
                raise ArgumentError("out[1].shape", tuple(scales.shape), f"a divisor of the {lead[1]} heads, and bytes")
            wanted = u8, (images, scale_swizzle.swizzled_bytes(lead[0], lead[1] // images * DIM // 32))
        launching.check(
            {
                "o": (o, torch.bfloat16, (*lead, DIM)),
                **rotary.wanted(len(o), self.positions, self.cos_sin),
                "out[0]": (codes, u8, (*lead, DIM)),
                "out[1]": (scales, *wanted),
            }
        )

    def check_values(self) -> None:
        """Check positions."""
        rotary.check_values(self.positions, self.cos_sin)

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        o, positions, cos_sin, (codes, scales), layout, _ = self
        if o.numel() == 0:
            return
        if backend == "reference":
            cos, sin = rotary.cosines_sines(positions, cos_sin)
            wide = o.float()
            rotated = backends.oracle("rope").rotate(wide[..., -rotary.WIDTH :], cos, -sin)
            q = fp8_block.quantize_activation(torch.cat((wide[..., : -rotary.WIDTH], rotated), -1))
            codes.copy_(q.codes)
            scales.copy_(_laid_out(q.scales, layout, scales))
            return
        settings = {**shape_of(*o.shape[:2]), "gathered": positions is not None, "layout": layout}
        launching.launch(backend, InvRopeQuant, settings, arguments.fake_args, arguments.launch_args, self)


def _laid_out(scales: Tensor, layout: str, like: Tensor) -> Tensor:
    """Lay UE8M0 scales [T, H, 4] out, by torch."""
    if layout == "swizzled":
        by_group = scales.reshape(len(scales), len(like), -1).transpose(0, 1)
        return scale_swizzle.swizzle(by_group.repeat_interleave(4, -1))
    if layout == "colmajor":
        return ue8m0.decode(scales)
    return scales.contiguous().view(torch.int32)[..., 0] if layout == "colmajor_ue8m0" else scales
