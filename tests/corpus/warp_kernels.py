"""Kernels in Warp, for cases_simt; each compiles alone, without its derivative."""

import warp as wp

COLUMNS = wp.constant(200)


@wp.kernel(module="unique", enable_backward=False)
def rotate(points: wp.array(dtype=wp.vec3), turn: wp.quat, out: wp.array(dtype=wp.vec3)):
    """Rotate points."""
    i = wp.tid()
    out[i] = wp.quat_rotate(turn, points[i])


@wp.kernel(module="unique", enable_backward=False)
def potential(points: wp.array(dtype=wp.vec3), out: wp.array(dtype=float)):
    """Sum of squared distances to all points."""
    i = wp.tid()
    total = float(0.0)  # noqa: UP018  a variable of Warp, not a constant
    for j in range(points.shape[0]):
        total += wp.length_sq(points[i] - points[j])
    wp.atomic_add(out, 0, total)


@wp.kernel(module="unique", enable_backward=False)
def row_sums(a: wp.array2d(dtype=float), out: wp.array(dtype=float)):
    """Sum rows, each by a block that shares a tile."""
    i = wp.tid()
    wp.tile_store(out, wp.tile_sum(wp.tile_load(a[i], shape=COLUMNS)), offset=i)
