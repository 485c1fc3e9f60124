"""Write `compressor` in a few lines of torch, for torch.compile. Rows are pooled, normed, rotated, packed, stored.

What one writes without a kernel: a decode step pools every request's window, closed or not, because shapes must not
depend on values. What closes none goes to a page of its own past the end of the pool. Prefill is one prompt of whole
windows from position 0, as the rows have it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import providers
from dsv4lib.bench.ops.case import Call, Given, Provider
from dsv4lib.formats import hadamard, indexer_key, kv_entry
from dsv4lib.ops.quantize.bench import blocks_of

NAMES = ("kv", "gate", "ape", "norm", "cos", "sin", "requests", "slots")
LAYOUTS = {"kv": kv_entry.LAYOUT, "fp8": indexer_key.FP8_LAYOUT, "fp4": indexer_key.FP4_LAYOUT}
ROPE = 64


def provider(running: bool) -> Provider:
    """Return what torch.compile makes of it. running: the state is a softmax of the open window."""

    def bind(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
        step, out = plain(given, running)
        call, _ = providers.compiled(step, *NAMES).bind(given)
        return call, out

    return Provider("torch.compile", bind)


def plain(given: Given, running: bool) -> tuple[Callable[..., dict[str, Tensor]], dict[str, Tensor]]:
    """(a function of the inputs `NAMES` that writes in place, what it writes)."""
    rate, overlap, dim, form, size = (given[name] for name in ("rate", "overlap", "dim", "format", "page_size"))
    single = len(given["requests"]) == len(given["kv"])
    store = torch.cat((given["pages"], given["pages"][:1]))  # the last page is for what is not stored
    state, parts = given["state"].clone(), given["online"].clone()
    k, z = state.chunk(2, -1)
    rotation = hadamard.matrix(dim, torch.float32).to(store.device) if dim == indexer_key.DIM else None

    def step(
        kv: Tensor, gate: Tensor, ape: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, requests: Tensor, slots: Tensor
    ) -> dict[str, Tensor]:
        starts, place = requests[:, 2].long(), requests[:, 3].long()
        if single:
            biased, windows, targets = gate + ape[starts % rate], starts // rate, slots
            if running:
                entries = _merged(kv, biased, parts, starts, place, rate)
            else:
                k[place, starts % k.shape[1]], z[place, starts % k.shape[1]] = kv, biased
                entries = _pooled(*_rows(k, z, windows, place, rate, overlap))
        else:
            rows = kv.unflatten(0, (-1, rate)), gate.unflatten(0, (-1, rate)) + ape
            if not running:  # the newest rows, whole windows, stay
                for ring, new in zip((k, z), rows, strict=True):
                    ring[place] = new.flatten(0, 1)[-ring.shape[1] :][None]
            windows, targets = torch.arange(len(rows[0]), device=kv.device), slots[rate - 1 :: rate]
            entries = _pooled(*(_two_windows(*rows) if overlap else rows))
        entries = entries * (entries.square().mean(-1, keepdim=True) + given["eps"]).rsqrt() * norm
        entries = _rotated(entries, cos[windows * rate], sin[windows * rate])
        _pack(store, size, form, targets, entries if rotation is None else entries @ rotation)
        return {}

    out = {"pages": store[:-1]} | ({} if running else {"state_k": k, "state_z": z})
    return step, out


def _pooled(k: Tensor, z: Tensor) -> Tensor:
    """[n, rows, D] each to [n, D]."""
    return (z.softmax(1) * k).sum(1)


def _rows(k: Tensor, z: Tensor, windows: Tensor, place: Tensor, rate: int, overlap: bool) -> tuple[Tensor, Tensor]:
    """The rows that a window pools, from rings that have the newest one."""
    if not overlap:
        return k[place], z[place]
    dim, half = k.shape[2] // 2, torch.arange(rate, device=k.device)
    now, before = ((windows + shift)[:, None] % 2 * rate + half for shift in (0, 1))
    none = (windows == 0)[:, None, None]
    found = []
    for ring, nothing in ((k, 0.0), (z, float("-inf"))):
        old = ring[place[:, None], before, :dim].masked_fill(none, nothing)
        found.append(torch.cat((old, ring[place[:, None], now, dim:]), 1))
    return found[0], found[1]


def _two_windows(k: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Windows [n, rate, 2 D] to what their entries pool, [n, 2 rate, D]: half of the one before, half of this one."""
    dim, found = k.shape[2] // 2, []
    for rows, nothing in ((k, 0.0), (z, float("-inf"))):
        before = torch.cat((torch.full_like(rows[:1, :, :dim], nothing), rows[:-1, :, :dim]))
        found.append(torch.cat((before, rows[..., dim:]), 1))
    return found[0], found[1]


def _merged(kv: Tensor, z: Tensor, parts: Tensor, starts: Tensor, place: Tensor, rate: int) -> Tensor:
    """A row into the running softmax of its window, which is written where it stays open; what it pools to."""
    top, total, value = parts[place].unbind(1)
    there = (starts % rate != 0)[:, None]
    most = torch.where(there, torch.maximum(top, z), z)
    old, new = torch.where(there, (top - most).exp(), 0.0), (z - most).exp()
    after = torch.stack((most, total * old + new, value * old + kv * new), 1)
    stays = ((starts + 1) % rate != 0)[:, None, None]
    parts[place] = torch.where(stays, after, parts[place])
    return after[:, 2] / after[:, 1]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last 64 dims, neighbours in pairs."""
    even, odd = x[:, -ROPE:].unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1)
    return torch.cat((x[:, :-ROPE], rotated.flatten(-2)), -1)


def _pack(store: Tensor, size: int, form: str, slots: Tensor, entries: Tensor) -> None:
    """Entries into pages; those with slot -1 into the last one."""
    layout = LAYOUTS[form]
    codes, scales = blocks_of(entries[:, : kv_entry.NOPE], "kv" if form == "kv" else "mxfp4" if form == "fp4" else form)
    if form == "kv":
        codes = torch.cat((codes, entries[:, kv_entry.NOPE :].bfloat16().view(torch.uint8)), -1)
        scales = torch.nn.functional.pad(scales, (0, 1))
    elif form == "fp8":
        scales = (scales.int() << 23).view(torch.float32).view(torch.uint8)
    index = torch.where(slots >= 0, slots, (len(store) - 1) * size).long()
    data = store[:, : size * layout.data_bytes].unflatten(1, (size, -1))
    tail = store[:, size * layout.data_bytes : size * layout.entry_bytes].unflatten(1, (size, -1))
    data[index // size, index % size] = codes
    tail[index // size, index % size] = scales
