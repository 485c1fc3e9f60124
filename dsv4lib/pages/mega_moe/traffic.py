"""Count what crosses devices in an emulated run of the fused MoE, and what must: by region of the buffer, and when."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

from dsv4lib.errors import DSV4Error
from dsv4lib.ops.mega_moe.inputs import Case
from dsv4lib.pages.mega_moe.run_case import Outcome

DISPATCH, COMBINE = ("x", "x_scales", "topk_weights"), ("combine",)
FLAGS = ("counts", "routes", "combined")  # what the protocol adds


class Crossings(NamedTuple):
    """Accesses of one rank to one region of a peer's buffer, in order.

    Attributes:
        rank: whose kernel makes them. peer: whose memory. region: of `Layout.regions`.
        times: int64 [n], on the clock of all devices. nbytes: int64 [n].
    """

    rank: int
    peer: int
    region: str
    times: np.ndarray
    nbytes: np.ndarray


def crossings(found: Outcome) -> list[Crossings]:
    """List what crossed devices in a run with ``trace=True`` and the race detector."""
    layout = found.buffers[0].layout
    names, starts = zip(*layout.offsets().items(), strict=True)
    out = []
    for rank, trace in enumerate(found.traces):
        rows, times = trace.peers, trace.common(trace.peers["time"])
        base = np.array([buffer.storage.data_ptr() for buffer in found.buffers])
        offsets = rows["address"] - base[rows["device"]]
        regions = np.array([names[bisect.bisect_right(starts, offset) - 1] for offset in offsets.tolist()], "U16")
        for peer in np.unique(rows["device"]).tolist():
            for region in names:
                chosen = (rows["device"] == peer) & (regions == region)
                if chosen.any():
                    out.append(Crossings(rank, peer, region, times[chosen], rows["nbytes"][chosen]))
    return out


def crossed_bytes(found: Outcome) -> dict[str, int]:
    """Count the bytes that crossed devices, by region."""
    out: dict[str, int] = {}
    for one in crossings(found):
        out[one.region] = out.get(one.region, 0) + int(one.nbytes.sum())
    return out


def remote_routes(made: Case) -> int:
    """Count routes whose expert is on another rank than the token."""
    local = made.layout.local
    owners = [one.topk_idx // local for one in made.ranks]  # -1 stays negative
    return sum(int(((owner >= 0) & (owner != rank)).sum()) for rank, owner in enumerate(owners))


def needed_bytes(made: Case) -> dict[str, int]:
    """Count the bytes that must cross devices, by region; ``combined`` depends on the tiles and is not said."""
    one, routes = made.layout, remote_routes(made)
    each = {
        "routes": 4,
        "x": one.code_bytes(one.hidden),
        "x_scales": one.pitch,
        "topk_weights": 4,
        "combine": 2 * one.hidden,
    }
    counts = 8 * one.world * (one.experts - one.local)  # every rank tells every expert of the others
    return {"counts": counts, **{name: size * routes for name, size in each.items()}}


def difference(made: Case, found: Outcome) -> int:
    """Count the bytes by which a run differs from what must cross devices, over the regions that can be said."""
    seen, needed = crossed_bytes(found), needed_bytes(made)
    return sum(abs(seen.get(name, 0) - size) for name, size in needed.items())


class Product(NamedTuple):
    """MMAs of one rank that belong to one layer: their times on the clock of all devices."""

    rank: int
    layer: str
    times: np.ndarray


def products(made: Case, found: Outcome) -> list[Product]:
    """List when each rank's tensor cores worked, L1 and L2 apart, in a run with ``trace=True``.

    A K step takes one box of weights, and a CTA's steps are multiplied in the order in which their boxes are loaded.
    So the tensor that a step's box comes from says which layer its MMAs belong to.

    Raises:
        DSV4Error: MMAs that are no whole number for each box of weights.
    """
    out = []
    for rank, trace in enumerate(found.traces):
        layers = {"L1": made.l1[rank].codes, "L2": made.l2[rank].codes}
        of_tensor = [_holder(layers, tensor.address) for tensor in trace.tensors]
        weights = trace.boxes[np.isin(trace.boxes["tensor"], [i for i, name in enumerate(of_tensor) if name])]
        mmas = np.sort(trace.mmas, order="op")
        times, labels = trace.common(mmas["time"]), np.empty(len(mmas), "U2")
        for cta in np.unique(mmas["cta"]):
            steps = np.sort(weights[weights["cta"] == cta], order="op")["tensor"]
            mine = mmas["cta"] == cta
            if not len(steps) or mine.sum() % len(steps):
                raise DSV4Error(f"CTA {cta} of rank {rank}: {mine.sum()} MMAs for {len(steps)} boxes of weights")
            labels[mine] = np.repeat([of_tensor[tensor] for tensor in steps], mine.sum() // len(steps))
        out += [Product(rank, name, times[labels == name]) for name in layers]
    return [one for one in out if len(one.times)]


def _holder(tensors: Mapping[str, Tensor], address: int) -> str:
    """Return the name of the tensor that has an address; "" if none has."""
    inside = (name for name, x in tensors.items() if x.data_ptr() <= address < x.data_ptr() + x.nbytes)
    return next(inside, "")
