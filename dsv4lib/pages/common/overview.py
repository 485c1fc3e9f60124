"""Draw the picture on the README's first screen. The notebooks' functions draw it.

`python -m dsv4lib.pages.common.overview` rewrites data/figures/overview.png: how an operand tile of an SM100 kernel
lies in shared memory without and with the swizzle, and where a result is wrong (a 32 x 32 tile of a product, stale on
purpose).
"""

from __future__ import annotations

import torch
from matplotlib.figure import Figure

from dsv4lib import check, env, viz
from dsv4lib.dsl import layouts
from dsv4lib.pages.common import drawn
from dsv4lib.viz import style, widgets

DPI = 140  # of the picture: some 1,260 x 390 pixels


def draw() -> Figure:
    """Compose the picture; needs the CuTeDSL compiler for the layouts, no GPU."""
    operand = layouts.smem_operand(128, 64, "bf16")
    plain = layouts.without_swizzle(operand)
    swizzle = viz.smem.swizzle_map(operand.offsets, 2, operand.text, plain.offsets, plain.text)
    wrong, right = _stale_tile()
    errors = viz.errors.error_map(wrong, right, name="bf16 product", tile=(32, 32))
    panels = [
        ("See: an operand tile in shared memory, without and with the swizzle", swizzle, ""),
        ("Verify: errors are maps, here with one stale tile", errors, ""),
    ]
    alt = "Two figures: " + " ".join(style.alt_text(figure) for _, figure, _ in panels)
    return style.set_alt(widgets.small_multiples(panels, columns=2), alt)


def _stale_tile() -> tuple[torch.Tensor, torch.Tensor]:
    """A bf16 product [160, 224] with one tile taken from half of K, and the fp64 product of the same operands."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(160, 512, generator=generator).bfloat16()
    b = torch.randn(224, 512, generator=generator).bfloat16()
    right = a.double() @ b.double().T
    wrong = right.bfloat16()
    wrong[64:96, 128:160] = (a[64:96, :256].double() @ b[128:160, :256].double().T).bfloat16()
    assert not check.compare(wrong, right.bfloat16()).passed
    return wrong, right


def picture() -> bytes:
    """Return the PNG file, small enough for a first screen."""
    return drawn.small(style.to_png(draw(), dpi=DPI))


def main() -> None:
    """Write data/figures/overview.png."""
    target = env.root() / "data" / "figures" / "overview.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(picture())


if __name__ == "__main__":
    main()
