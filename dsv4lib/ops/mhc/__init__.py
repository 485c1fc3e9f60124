"""Write and read residual streams between two sublayers, as torch ops. What one leaves there, what the next reads."""

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
