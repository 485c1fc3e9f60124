"""Draw figures.

Every function takes arrays or traces, returns a Figure with alt text, and knows nothing of DeepSeek-V4.
"""

from dsv4lib.viz import (  # noqa: F401
    bars,
    dumbbells,
    errors,
    grids,
    history,
    layout,
    model,
    over_runs,
    ptx,
    roofline,
    smem,
    tile,
    timeline,
    times,
    tma,
    tmem,
    tv,
    widgets,
)
