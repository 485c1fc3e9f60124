"""The experts' GEMMs at the model's own sizes: true E, N and K, tiles of three experts, one tile a CTA.

A small case has all the numbers: three experts, two tiles of features each. Its rows and blocks of scales are put where
the first and the last expert, and one between them, have two of theirs; all other weights are pages that are never
touched. So the output can be judged as that of the small case, and the rest of it must stay as it was.
"""

import dataclasses
import mmap

import pytest
import torch

from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.moe_gemm.arguments import fake_args, launch_args
from dsv4lib.ops.moe_gemm.inputs import SENTINEL, case, outputs
from dsv4lib.ops.moe_gemm.sm100 import MoeGemm
from dsv4lib.pages.moe_gemm.run_case import FACTOR, TIES, judge
from tests.cases import cases

# Tokens of a tile, CTAs that share it -> those of the experts that have any: a second, ragged tile; one token; a tile
# not quite full.
COUNTS = {(64, 1): [65, 1, 63], (128, 2): [130, 1, 127], (192, 2): [200, 1, 31]}
TILE = 128
MODEL = {"Flash": (256, 4096, 2048), "Pro": (384, 7168, 3072)}  # E, d, I
# Precision mode -> mode of the GEMM, planes of the weights along K, output of L1. `ue8m0_naive` is `mxfp4`'s kernel.
MODES = {
    "nvfp4": ("nvfp4", 1, "nvfp4"),
    "mxfp4": ("w4a8", 1, "mxfp8"),
    "e4m3_expand": ("mxfp8", 1, "mxfp8"),
    "e4m3_split": ("mxfp8", 2, "mxfp8"),
    "bf16": ("bf16", 1, "bf16"),
}
NORESERVE = 0x4000  # of Linux: pages are there when they are touched


def untouched(*shape, dtype=torch.uint8):
    """Zeros, up to 34 GB, that cost nothing until they are read or written."""
    size = torch.empty(0, dtype=dtype).element_size() * torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)


def placed(small, kernel, experts, features, chosen):
    """The call of a small case among all experts and features; ``chosen``: (experts, tiles of features)."""
    old = small.call
    pairs = [(i, e, j, f) for i, e in enumerate(chosen[0]) for j, f in enumerate(chosen[1])]

    def spread(values, *shape):
        """[3, 2 * X, ..] -> [E, N / 128 * X, ..]."""
        out = untouched(*shape, dtype=values.dtype)
        parts, target = (t.unflatten(1, (n, -1)) for t, n in ((values, 2), (out, features // TILE)))
        for i, e, j, f in pairs:
            target[e, f] = parts[i, j]
        return out

    def scattered(values):
        out = values.new_zeros(experts)
        out[torch.tensor(chosen[0])] = values
        return out

    new = dataclasses.replace(old, w=spread(old.w, experts, features, old.w.shape[2]))
    if old.w_scales is not None:
        new.w_scales = spread(old.w_scales, experts, old.w_scales.shape[1] // 2 * (features // TILE))
    for name in ("offsets", "counts", "alpha", "alpha_up", "out_global"):
        if getattr(old, name) is not None:
            setattr(new, name, scattered(getattr(old, name)))
    outputs(kernel, new, len(old.x), features)
    return new


def gathered(kernel, new, old, features, tiles):
    """Bring the tiles' outputs to the small case; is what is left of them as it was?"""

    def parts(of, count):
        return of.view(torch.uint8).unflatten(-1, (count, -1))

    for j, f in enumerate(tiles):
        parts(old.out, 2)[:, j] = parts(new.out, features // TILE)[:, f]
        parts(new.out, features // TILE)[:, f] = SENTINEL
    stayed = bool((new.out.view(torch.uint8) == SENTINEL).all())
    if kernel.quantised:
        width = features // 2 // (16 if kernel.out == "nvfp4" else 32)
        per_tile = width // (features // TILE)
        found = scale_swizzle.unswizzle(new.out_scales, len(old.x), width)
        own = torch.cat([found[:, f * per_tile :][:, :per_tile] for f in tiles], 1)
        old.out_scales = scale_swizzle.swizzle(own)
        for f in tiles:
            found[:, f * per_tile :][:, :per_tile] = SENTINEL
        stayed &= bool((found == SENTINEL).all())
    return stayed


PRO, FLASH = ([(mode, model, layer, (64, 1)) for mode in MODES for layer in ("L1", "L2")] for model in ("Pro", "Flash"))
PAIRS = [("nvfp4", "Flash", "L1", (128, 2)), ("mxfp4", "Flash", "L2", (192, 2))]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("precision", "model", "layer", "tile"), cases(*PRO, *PAIRS, full=FLASH))
def test_true_shapes(precision, model, layer, tile):
    mode, planes, out = MODES[precision]
    experts, d, width = MODEL[model]
    first = layer == "L1"
    features, k = (2 * width, d) if first else (d, width)
    (tile_n, ctas), counts = tile, COUNTS[tile]
    settings = {"mode": mode, "tile_n": tile_n, "ctas": ctas, "swiglu": first, "routed": first}
    settings["out"] = out if first else "bf16"
    kernel, code = compile_cache.default().get(MoeGemm, settings, fake_args)
    small = case(kernel, counts, 2 * TILE, planes * k)
    last = features // TILE - 1
    chosen = [0, experts // 2 + 1, experts - 1], [1 if ctas == 1 else last - 1, last]
    new = placed(small, kernel, experts, features, chosen)
    # Tiles go by experts, tiles of features (a pair has two), tiles of tokens.
    wanted, before = [], 0
    for count in counts:
        across = -(-count // tile_n)
        wanted += [before + f * across + t for f in sorted({f // ctas for f in chosen[1]}) for t in range(across)]
        before += features // TILE // ctas * across
    gpu = make("sm_100a", checks="race", ctas=[(ctas * i + j, 0, 0) for i in wanted for j in range(ctas)])
    launch(code, *launch_args(kernel, new, before), gpu=gpu)
    assert gpu.hazards == [] and len(wanted) <= 16
    assert gathered(kernel, new, small.call, features, chosen[1])
    over, wrong = judge(kernel, small)
    assert over <= FACTOR and wrong <= TIES
