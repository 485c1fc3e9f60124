"""How rows are cut, by their number and size. It needs no DSL: the bench lists its rows without one."""

from __future__ import annotations

from typing import Any


def plan(rows: int, size: int, k: int) -> dict[str, Any]:
    """Choose the fastest settings of a sweep on an H200.

    For ``k`` of ``rows`` rows of ``size`` scores.

    They are of `kernel.TopK`, with ``ctas`` of `cluster.ClusterTopK`. Few rows are shared by clusters;
    maxima are worth counting from 8192 scores a CTA on.
    """
    if size <= 2048:
        return {"threads": 256, "vectors": 1 if size <= 1024 else 2, "bins": 1024}
    if size <= 8192:
        return {"threads": 256, "vectors": 1, "ctas": 8} if rows <= 16 else {"threads": 1024, "vectors": 2}
    if size <= 32768:
        if rows <= 16:
            return {"threads": 256, "vectors": 4, "ctas": 8}
        if rows <= 33:
            tight = {"threads": 1024, "vectors": 4, "ctas": 2, "maxima": 1}
            return tight if k <= 512 else {"threads": 512, "vectors": 4, "ctas": 4, "maxima": 4}
        return {"threads": 1024, "vectors": 8, "maxima": 2}
    if size <= 262144 and rows <= 4:
        return {"threads": 512, "vectors": 8, "ctas": 16, "maxima": 4}
    ctas = 8 if rows <= 16 else 4 if size > 262144 else 2 if rows <= 66 else 1
    keep = 1 << (13 if k <= 1024 else 14)
    return {"threads": 1024, "vectors": 4, "ctas": ctas, "maxima": 4, "stream": True, "keep": keep}
