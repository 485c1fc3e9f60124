"""Compress KV. ``rate`` tokens become one entry by a softmax per channel, with the state that decode keeps.

For a token at position t, with z the gate and ape a bias by the token's place in its window::

    k(t) = wkv x_t            z(t) = wgate x_t + ape[t mod rate]

    HCA   e_w = sum_t softmax_t(z(t)) * k(t)     over the ``rate`` tokens of window w, one softmax per channel
    CSA   rows are twice as wide, [Ca | Cb]; e_w pools 2 * rate slots: window w - 1 through its Ca half and
          window w through its Cb half (before window 0: gate -inf, value 0)

    entry w = codec(rope(RMSNorm(e_w), position w * rate))

An entry exists once its window is complete; the token that completes it already sees it. The state is a ring of (k, z)
rows, slot = position mod rows: ``rate`` rows for HCA, ``2 * rate`` for CSA, whose overlap needs the window before too.
Source: DSV4 paper, CSA and HCA equations; released inference code for halves, bias and position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from dsv4lib.errors import ArgumentError
from dsv4lib.reference import rmsnorm, rope
from dsv4lib.reference.qnorm_rope_kv import Codec


class State(NamedTuple):
    """What a compressor must remember between calls.

    k, z ``[B, rows, width]``, row of position t at slot ``t mod rows``; z includes the bias. Slots never written have
    z = -inf and k = 0, so that the window before the first one pools to nothing.
    """

    k: torch.Tensor
    z: torch.Tensor


class Weights(NamedTuple):
    """Hold wkv, wgate ``[width, d]``, ape ``[rate, width]``, norm ``[D]``.

    width is D (HCA) or 2 D (CSA).
    """

    wkv: torch.Tensor
    wgate: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor


def new_state(batch: int, rate: int, width: int, overlap: bool, dtype: torch.dtype, device: torch.device) -> State:
    """Empty state: ``rate`` rows, or ``2 * rate`` with overlap."""
    shape = (batch, 2 * rate if overlap else rate, width)
    return State(
        torch.zeros(shape, dtype=dtype, device=device),
        torch.full(shape, float("-inf"), dtype=dtype, device=device),
    )


def visible_count(positions: torch.Tensor, rate: int) -> torch.Tensor:
    """Count the entries that the query at 0-based position t sees.

    Entry s is visible iff ``s < floor((t + 1) / rate)``.
    """
    return torch.div(positions + 1, rate, rounding_mode="floor")


def entry_positions(index: torch.Tensor, rate: int) -> torch.Tensor:
    """Rope position of entry ``index``: the first token of its window."""
    return index * rate


def project(x: torch.Tensor, positions: torch.Tensor, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``k = wkv x`` and ``z = wgate x + ape[position mod rate]``. x ``[B, T, d]`` -> two ``[B, T, width]``."""
    rate = weights.ape.shape[0]
    return linear(x, weights.wkv), linear(x, weights.wgate) + weights.ape[positions % rate]


def pool(k: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return ``sum_t softmax_t(z) * k`` per channel. k, z ``[..., slots, D]`` -> ``[..., D]``."""
    return (torch.softmax(z, dim=-2) * k).sum(-2)


def overlap_slots(previous: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Return the ``2 * rate`` slots a CSA entry pools.

    Ca (first half) of the previous window, Cb (second half) of this one.

    Both ``[B, n, rate, 2 D]`` -> ``[B, n, 2 * rate, D]``. Used for k and z alike.
    """
    half = current.shape[-1] // 2
    return torch.cat((previous[..., :half], current[..., half:]), dim=-2)


def pool_windows(rows_k: torch.Tensor, rows_z: torch.Tensor, rate: int, overlap: bool) -> torch.Tensor:
    """Pool rows of whole windows to entries.

    Args:
        rows_k, rows_z: ``[B, n * rate, D]``, or with overlap ``[B, (1 + n) * rate, 2 D]`` starting one window earlier.
        rate: tokens per window.
        overlap: CSA pooling over two windows.

    Returns:
        ``[B, n, D]``.
    """
    if rows_k.shape != rows_z.shape or rows_k.shape[1] % rate:
        allowed = f"the shape of rows_z {tuple(rows_z.shape)}, with whole windows of {rate} rows"
        raise ArgumentError("rows_k.shape", tuple(rows_k.shape), allowed)
    k, z = (rows.unflatten(1, (-1, rate)) for rows in (rows_k, rows_z))
    if overlap:
        k, z = (overlap_slots(windows[:, :-1], windows[:, 1:]) for windows in (k, z))
    return pool(k, z)


def finish(
    pooled: torch.Tensor,
    index: torch.Tensor,
    norm: torch.Tensor,
    rate: int,
    freqs: torch.Tensor,
    eps: float,
    codec: Codec | None = None,
) -> torch.Tensor:
    """Norm, rotate and round pooled entries ``[B, n, D]``.

    Their entry numbers are index ``[n]``.
    """
    entries = rope.apply(rmsnorm.rmsnorm(pooled, norm, eps), entry_positions(index, rate), freqs)
    return entries if codec is None else codec(entries)


def history(state: State, start: int, rate: int, overlap: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows before position ``start`` that the next entries need, oldest first.

    Those of the open window, and with overlap the window before it (gate -inf and value 0 if there is none).
    """
    first = start - start % rate - (rate if overlap else 0)
    positions = torch.arange(first, start, device=state.k.device)
    slots, missing = positions % state.k.shape[1], (positions < 0)[:, None]
    return state.k[:, slots].masked_fill(missing, 0.0), state.z[:, slots].masked_fill(missing, float("-inf"))


def update(state: State, k: torch.Tensor, z: torch.Tensor, start: int) -> State:
    """Return the state after the rows of positions ``start ..``. The newest rows overwrite the oldest."""
    rows = state.k.shape[1]
    keep = min(rows, k.shape[1])
    slots = torch.arange(start + k.shape[1] - keep, start + k.shape[1], device=k.device) % rows
    return State(
        state.k.index_copy(1, slots, k[:, k.shape[1] - keep :]),
        state.z.index_copy(1, slots, z[:, z.shape[1] - keep :]),
    )


def advance(
    k: torch.Tensor, z: torch.Tensor, state: State, start: int, rate: int, overlap: bool
) -> tuple[torch.Tensor, torch.Tensor, State]:
    """Pool the windows that the rows of positions ``start ..`` complete.

    Args:
        k, z: ``[B, T, width]``, z with its bias.
        state, start, rate, overlap: as in :func:`compress`.

    Returns:
        pooled ``[B, n, D]`` (n may be 0), entry numbers ``[n]``, the new state.
    """
    length = k.shape[1]
    old_k, old_z = history(state, start, rate, overlap)
    first, after = start // rate, (start + length) // rate
    rows = (after - first + (1 if overlap else 0)) * rate
    rows_k, rows_z = torch.cat((old_k, k), dim=1)[:, :rows], torch.cat((old_z, z), dim=1)[:, :rows]
    if after > first:
        pooled = pool_windows(rows_k, rows_z, rate, overlap)
    else:
        pooled = k.new_zeros(k.shape[0], 0, k.shape[2] // (2 if overlap else 1))
    return pooled, torch.arange(first, after, device=k.device), update(state, k, z, start)


def compress(
    x: torch.Tensor,
    state: State,
    start: int,
    weights: Weights,
    freqs: torch.Tensor,
    eps: float,
    *,
    overlap: bool,
    codec: Codec | None = None,
) -> tuple[torch.Tensor, State]:
    """Compress the tokens at positions ``start .. start + T - 1``, continuing from ``state``.

    Args:
        x: ``[B, T, d]``, the layer's normed input.
        state: rows kept from the tokens before; see :class:`State`.
        start: position of ``x[:, 0]``; any, also inside a window.
        weights: see :class:`Weights`.
        freqs: the layer's rope frequencies.
        eps: of the RMSNorm.
        overlap: True for CSA and its indexer, False for HCA.
        codec: rounding of the finished entries.

    Returns:
        The entries whose windows these tokens complete, numbers ``start // rate .. (start + T) // rate - 1``, as
        ``[B, n, D]`` (n may be 0), and the new state.
    """
    rate = weights.ape.shape[0]
    k, z = project(x, torch.arange(start, start + x.shape[1], device=x.device), weights)
    pooled, index, state = advance(k, z, state, start, rate, overlap)
    return finish(pooled, index, weights.norm, rate, freqs, eps, codec), state


class Packed(NamedTuple):
    """Projected rows of a batch of requests, side by side.

    kv, gate ``[T, width]`` (the gate without bias), ape ``[rate, width]``, norm ``[D]``, cos, sin ``[P, n_freqs]`` by
    position; requests int32 ``[B, 4]``: first row, rows, position of the first row (negative: no request), row of the
    state; slots ``[T]``: where the entry goes that a token closes, -1: nowhere.
    """

    kv: torch.Tensor
    gate: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    requests: torch.Tensor
    slots: torch.Tensor

    def requests_of(self) -> Iterator[tuple[int, int, int, int]]:
        """Those that have rows, a position and a place."""
        return (one for one in self.requests.tolist() if one[1] > 0 and one[2] >= 0 and one[3] >= 0)

    def rows_of(self, row: int, count: int, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and z of a request, ``[count, width]`` each."""
        places = torch.arange(start, start + count, device=self.gate.device) % self.ape.shape[0]
        return self.kv[row : row + count], self.gate[row : row + count] + self.ape[places]

    def ended(
        self, pooled: torch.Tensor, index: torch.Tensor, row: int, start: int, eps: float, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Norm and rotate a request's stored entries; return them with their slots."""
        rate = self.ape.shape[0]
        positions = entry_positions(index, rate)
        normed = rounded(rmsnorm.rmsnorm(rounded(pooled, dtype), self.norm, eps), dtype)
        target = self.slots[row + positions + rate - 1 - start]
        turned = rounded(rope.apply_tables(normed, self.cos[positions], self.sin[positions]), dtype)
        return turned[target >= 0], target[target >= 0]


def rounded(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The numbers of x as ``dtype`` holds them, in the type of x; None: x."""
    return x if dtype is None else x.to(dtype).to(x.dtype)


def compress_packed(
    batch: Packed, state: State, eps: float, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, State]:
    """Compress all requests of a batch, each from its own position.

    Args:
        batch: see :class:`Packed`; overlap where width is 2 D.
        state: rows of all requests, ``[S, rows, width]``; of a call the newest rows that an entry pools are stored.
        eps: of the RMSNorm.
        dtype: what an entry is rounded to after pooling, after the norm and after RoPE; None: nothing. The released
            code pools in fp32 and stores in bf16 from there on, before it quantises.

    Returns:
        The entries that are stored ``[n, D]``, their slots ``[n]``, the new state.
    """
    rate, dim = batch.ape.shape[0], batch.norm.shape[0]
    overlap, after = batch.kv.shape[1] == 2 * dim, State(state.k.clone(), state.z.clone())
    found = [(batch.kv.new_zeros(0, dim), batch.slots[:0])]
    for row, count, start, place in batch.requests_of():
        k, z = batch.rows_of(row, count, start)
        own = State(*(x[place : place + 1] for x in state))
        pooled, index, own = advance(k[None], z[None], own, start, rate, overlap)
        found.append(batch.ended(pooled[0], index, row, start, eps, dtype))
        stored = torch.arange(start + max(0, count - rate * (1 + overlap)), start + count) % state.k.shape[1]
        for old, new in zip(after, own, strict=True):
            old[place, stored] = new[0, stored]
    entries, slots = zip(*found, strict=True)
    return torch.cat(entries), torch.cat(slots), after


def running_part(k: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """What a running softmax keeps of rows: k, z ``[n, D]``, n >= 1 -> ``[3, D]``.

    Maximum m of the gates, sum of exp(z - m), sum of exp(z - m) k; the quotient of the sums is what the rows pool to.
    """
    top = z.amax(0)
    weights = torch.exp(z - _subtracted(top))
    return torch.stack((top, weights.sum(0), (weights * k).sum(0)))


def _subtracted(top: torch.Tensor) -> torch.Tensor:
    """What gates of this maximum are reduced by: rows that all have -inf weigh nothing, they are not NaN."""
    return top.masked_fill(top == float("-inf"), 0.0)


def merge_parts(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What :func:`running_part` gives of the rows of both: ``[..., 3, D]`` each."""
    top = torch.maximum(a[..., 0, :], b[..., 0, :])
    base = _subtracted(top)[..., None, :]
    scaled = [part[..., 1:, :] * torch.exp(part[..., :1, :] - base) for part in (a, b)]
    return torch.cat((top[..., None, :], scaled[0] + scaled[1]), dim=-2)


def compress_running(
    batch: Packed, parts: torch.Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compress as :func:`compress_packed` without overlap.

    The state is running, ``[S, 3, D]`` (:func:`running_part`).

    The part of a request counts where its position is inside a window, and is written where its end is.
    """
    rate, after = batch.ape.shape[0], parts.clone()
    found = [(batch.kv.new_zeros(0, parts.shape[2]), batch.slots[:0])]
    for row, count, start, place in batch.requests_of():
        k, z = batch.rows_of(row, count, start)
        first, end = start // rate, start + count
        for window in range(first, (end - 1) // rate + 1):
            rows = slice(max(window * rate - start, 0), (window + 1) * rate - start)
            part = running_part(k[rows], z[rows])
            if window * rate < start:
                part = merge_parts(parts[place], part)
            if (window + 1) * rate <= end:
                pooled, index = (part[2] / part[1])[None], torch.tensor([window], device=k.device)
                found.append(batch.ended(pooled, index, row, start, eps, dtype))
            else:
                after[place] = part
    entries, slots = zip(*found, strict=True)
    return torch.cat(entries), torch.cat(slots), after
