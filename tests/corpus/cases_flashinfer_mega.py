"""FlashInfer's fused MoE for NVFP4 (CuTeDSL, one rank, no NVSHMEM): dispatch, both GEMMs, SwiGLU, combine.

What it exercises: tensor memory as a transposing buffer (four shapes of tcgen05.ld and .st), block-scaled MMAs with as
many columns as an expert has tokens, flags between CTAs, 256-bit stores. Inputs and oracle are our own kernel's by
FlashInfer's names.
"""

from __future__ import annotations

import os
from unittest import mock

import torch
from corpus import U_BF16, Case, Check

COUNT = 17

# What this kernel is known to show; see data/emulator/findings.md.
LINTS = frozenset({"tmem_lane_quarter", "missing_proxy_fence_global"})
ERRORS = frozenset({"race_global", "missing_tcgen05_wait", "uninitialised_tmem"})


def mega_moe() -> list[Check]:
    """17 tokens of 4 experts, top-2, some routes left out; both GEMMs with factors of each expert."""
    from tests.layers import test_flashinfer_mega_moe as ours

    knobs = {"mma_tiler_mnk": (128, 128, 256), "cluster_shape_mnk": (1, 1, 1), "use_2cta_instrs": False}
    given, y = ours.tokens(COUNT), torch.zeros(COUNT, ours.HIDDEN).bfloat16()
    with mock.patch.dict(os.environ, {"MEGA_NO_DIST": "1"}):  # read at import and by its allocator
        from flashinfer.moe_ep.kernel_src.sm100 import cutedsl_megamoe as theirs

        first, second = ours.alphas()
        factors = {"fc1_alpha": first, "fc2_alpha": second, "fc1_norm_const": ours.NORM}
        buffer = theirs.get_symm_buffer_for_mega_moe(
            *ours.SIZES, 0, 1, gate_up_clamp=ours.LIMIT, **factors, knobs=knobs
        )
        buffer.topk_idx.fill_(-1)
        ours.fill(buffer, given)
        theirs.nvfp4_mega_moe(y, *ours.transformed(ours.weights()), buffer, num_tokens=COUNT)
    want = ours.want(given)
    # a route's output is rounded to bf16 before the sum over top-k, the sum once more
    largest = float(want.abs().max())
    reason = "two roundings to bf16; one step of E2M1 where h is near a tie"
    return [Check("y", y, want.float(), U_BF16, 4 * U_BF16, U_BF16 * largest, reason)]


CASES = [
    Case(
        "flashinfer_mega_moe",
        "flashinfer",
        mega_moe,
        sm_count=4,
        schedules=("adversarial",),  # the one that changes results
        lints=LINTS,
        errors=ERRORS,
        unstable="wrong",
        slow=True,
    )
]
