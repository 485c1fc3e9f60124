"""Choose splits of the tokens (split-KV), size the workspace, pad page tables.

Tokens are split in whole tiles of 128. With ``tiles`` of a request and so many splits, split i takes

    tiles_per_split = ceil(tiles / splits)        i * tiles_per_split .. min((i + 1) * tiles_per_split, tiles) - 1

so a short request may have splits without tiles; they write zeros and an LSE of -inf.

An item of work is (request, split), and of 128 heads a cluster of two CTAs takes one: a GPU of 148 SMs runs 74 items at
once. `num_kv_splits_by_clusters` counts so; up to 64 heads it counts an SM for an item, as our kernels have one CTA for
them. `num_kv_splits_by_sms` counts an SM for each item of 128 heads, as CUTLASS does: its choice needs a second wave of
clusters in most cases (132 SMs, 4 requests of 8192 tokens: 128 items, 66 at once) and doubles what is combined. The op
takes the first; the second is here to compare with.

Source: CUTLASS, examples/77_blackwell_fmha, `sm100_fmha_mla_tma_warpspecialized.hpp` (`set_split_kv`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching

TILE = 128  # tokens
HEADS_OF_CTA = 64
CLUSTER = 2  # CTAs of an item of 128 heads
MOST_SPLITS = 256  # of a launch
SM_COUNT = 148  # where there is no GPU: of a B200
HEADS, LATENT = 128, 512  # the most heads, and dims of out
PAGES = 16, 32, 64, 128  # tokens of a page
FILL = -1  # of a padded page table


def num_kv_splits_by_clusters(
    max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int = -1, heads: int = HEADS
) -> int:
    """Choose splits so that the items of a launch fill the clusters that run at once.

    Args:
        max_seq_len: tokens of the longest request, or as many as the page table can name. num_batches: requests.
        sm_count: SMs of the GPU. num_kv_splits: 1 or more: that many, at most `MOST_SPLITS`; below 1: choose.
        heads: H.
    """
    return _choose(max_seq_len, num_batches, sm_count // ctas_of(heads), num_kv_splits)


def ctas_of(heads: int) -> int:
    """Count the CTAs of an item: 1 up to 64 heads, else 2."""
    return -(-heads // HEADS_OF_CTA)


def num_kv_splits_by_sms(
    max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int = -1, fused_reduction: bool = False
) -> int:
    """Choose splits as CUTLASS does, which counts an SM for an item.

    Arguments as of `num_kv_splits_by_clusters`.

    Args:
        fused_reduction: CUTLASS's reduction in the same launch, which wants half of the SMs at most.
    """
    splits = _choose(max_seq_len, num_batches, sm_count, num_kv_splits)
    if fused_reduction and num_kv_splits < 1 and splits > 1:
        splits = max(1, min(splits, sm_count // CLUSTER))
    return splits


def _choose(max_seq_len: int, num_batches: int, at_once: int, wanted: int) -> int:
    """Choose splits of the longest request, for so many items at once."""
    if wanted >= 1:
        return min(wanted, MOST_SPLITS)
    if max_seq_len < 1 or num_batches < 1:
        return 1
    tiles = -(-max_seq_len // TILE)
    most = min(tiles, max(1, at_once // num_batches))
    return min(-(-tiles // -(-tiles // most)), MOST_SPLITS)


class Steps(NamedTuple):
    """Length of a launch.

    Attributes:
        steps: tiles that a cluster works on one after the other, over all waves. waves: of clusters.
    """

    steps: int
    waves: int


def steps_of(max_seq_len: int, num_batches: int, sm_count: int, num_kv_splits: int) -> Steps:
    """Count steps and waves of requests of one length and 128 heads.

    What combining takes is not in them.
    """
    tiles = -(-max_seq_len // TILE)
    waves = -(-num_batches * num_kv_splits // (sm_count // CLUSTER))
    return Steps(waves * -(-tiles // num_kv_splits), waves)


def mla_workspace_size(max_seq_len: int, num_batches: int, sm_count: int = 0, num_kv_splits: int = -1) -> int:
    """Count the bytes of `mla_decode`'s workspace.

    It holds O and LSE of every split in fp32; none for one split.

    Args:
        max_seq_len: page size x width of the page table. num_batches: requests.
        sm_count: SMs of the GPU; 0: of the current one, or `SM_COUNT` where there is none.
        num_kv_splits: as in the call that it is for.

    Raises:
        ArgumentError: a negative number; splits that `mla_decode` does not take.
    """
    for name, value in (("max_seq_len", max_seq_len), ("num_batches", num_batches), ("sm_count", sm_count)):
        if value < 0:
            raise ArgumentError(name, value, "0 or more")
    check_num_kv_splits(num_kv_splits)
    given = max_seq_len, num_batches, sm_count or current_sm_count(), num_kv_splits
    # Of few heads there may be more splits, of fewer heads each.
    return max(workspace_bytes(num_batches, num_kv_splits_by_clusters(*given, h), h) for h in (HEADS_OF_CTA, HEADS))


def workspace_bytes(num_batches: int, num_kv_splits: int, heads: int = HEADS) -> int:
    """Count the bytes of O and LSE of every split; 0 for one split.

    They are of as many heads as the CTAs of an item have.
    """
    rows = num_batches * num_kv_splits * ctas_of(heads) * HEADS_OF_CTA
    return rows * (LATENT + 1) * 4 if num_kv_splits > 1 else 0


def check_num_kv_splits(num_kv_splits: int) -> None:
    """Check splits of a call.

    Raises:
        ArgumentError: neither -1 nor 1 to `MOST_SPLITS`.
    """
    if num_kv_splits != -1 and not 1 <= num_kv_splits <= MOST_SPLITS:
        raise ArgumentError("num_kv_splits", num_kv_splits, f"1 to {MOST_SPLITS}, or -1: chosen from the shapes")


def current_sm_count() -> int:
    """Count the SMs of the current GPU; `SM_COUNT` where there is none."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return SM_COUNT
    return launching.sm_count(torch.device("cuda", torch.cuda.current_device()))


def pack_factor(page_size: int) -> int:
    """Count the pages of a tile.

    Raises:
        ArgumentError: a page size that is not one of `PAGES`.
    """
    if page_size not in PAGES:
        raise ArgumentError("page_size", page_size, "one of " + ", ".join(map(str, PAGES)))
    return TILE // page_size


def pad_page_table(table: Tensor, page_size: int) -> Tensor:
    """Pad a page table to whole tiles of 128 tokens, with -1.

    One that has whole tiles is returned as it is.

    Args:
        table: int32 [B, N], pages of each request. page_size: tokens of a page, 16, 32, 64 or 128.

    Raises:
        ArgumentError: another type, shape or page size.
    """
    if table.dtype != torch.int32 or table.dim() != 2:
        raise ArgumentError("table", f"{table.dtype}{list(table.shape)}", "int32 [B, N]")
    more = -table.shape[1] % pack_factor(page_size)
    return torch.nn.functional.pad(table, (0, more), value=FILL) if more else table
