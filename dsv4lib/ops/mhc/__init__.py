"""The boundary between two sublayers as torch ops: what one leaves in the residual streams, what the next reads."""

from dsv4lib.ops.mhc.op import (
    Call,
    Eps,
    Fp8,
    Plan,
    Site,
    launch,
    mhc_head,
    mhc_post_pre,
    mhc_pre,
    new_fp8,
    plan,
    run,
    workspace,
)

__all__ = ["Call", "Eps", "Fp8", "Plan", "Site", "launch", "mhc_head", "mhc_post_pre", "mhc_pre", "new_fp8", "plan"]
__all__ += ["run", "workspace"]
