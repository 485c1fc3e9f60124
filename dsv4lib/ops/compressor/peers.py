"""Time peers of `compressor`. vLLM's writes partial states into a paged cache, then compresses from there.

The state of a request becomes pages of their own size (`STATE_PAGE` positions) in a table of their own; the timed call
writes the new rows there and makes the entries, as vLLM's layer does after its GEMM.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import torch

from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Given, Provider

STATE_PAGE = {4: 4, 128: 8}  # positions of a page of the state, by rate
ROPE = 64
PLAIN = {"launch_pdl": False}
# By format: dims of a scale, bytes of an entry's data and of its scales.
ENTRY = {"kv": (64, 576, 8), "fp8": (128, 128, 4), "fp4": (32, 64, 4)}
OPS = "vllm.models.deepseek_v4.common.ops."


def providers() -> tuple[Provider, ...]:
    """List the peers of the compressor.

    Triton's compression, and CuTe DSL's for heads of 512, which is the one vLLM takes.
    """
    return Provider("vLLM Triton", partial(_bind, dsl=False)), Provider("vLLM CuTe DSL", partial(_bind, dsl=True))


def _bind(given: Given, dsl: bool) -> peers.Bound:
    save = peers.load(OPS + "save_partial_states").save_partial_states
    if dsl:
        module = peers.load("vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl", "cutlass", "quack")
        compress = module.compress_norm_rope_store_cutedsl
    else:
        compress = peers.load(OPS + "fused_compress_quant_cache").compress_norm_rope_store_triton
    form, dim, rate, overlap = (given[name] for name in ("format", "dim", "rate", "overlap"))
    if dsl and form != "kv":
        raise Absent("only for heads of 512; the indexer's keys are Triton's")
    if form != "kv" and given.get("hadamard", True):
        raise Absent("vLLM's keys have no Hadamard rotation")
    if form == "fp4" and peers.capability() < 100:
        raise Absent("its conversion to E2M1 is an instruction of sm_100")
    block, (group, data, scale) = STATE_PAGE[rate], ENTRY[form]
    width = given["kv"].shape[1]
    state, table, slots = paged_state(given, block)
    pages, size = given["pages"].clone(), given["page_size"]
    cache = pages.as_strided((len(pages), size, data + scale), (pages.stride(0), data + scale, 1))
    requests, positions = given["token_request"], given["positions"]
    entries = SimpleNamespace(slot_mapping=given["slots"].long())

    def run() -> None:
        rows = given["kv"], given["gate"], given["ape"], positions
        save(*rows, state, slots, block, width, rate, PLAIN)
        compress(
            state_cache=state,
            num_actual=len(positions),
            token_to_req_indices=requests,
            positions=positions,
            slot_mapping=slots,
            block_table=table,
            block_size=block,
            state_width=width,
            cos_sin_cache=given["cos_sin"],
            kv_cache=cache,
            k_cache_metadata=entries,
            pdl_kwargs=PLAIN,
            head_dim=dim,
            rope_head_dim=ROPE,
            compress_ratio=rate,
            overlap=overlap,
            use_fp4_cache=form == "fp4",
            rms_norm_weight=given["norm"],
            rms_norm_eps=given["eps"],
            quant_block=group,
            token_stride=data,
            scale_dim=scale,
        )

    return peers.bound(run, pages=lambda _: pages)


def paged_state(given: Given, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Put the state in pages.

    Returns cache fp32 [N, block, 2 W], table int32 [B, pages], slot of every new token int64 [T].

    A request has pages for the positions of its ring before the call and for its new ones; the rest of its table says
    page 0, which is never read. Pages come in an order that is not that of the positions.
    """
    ring = given["state"]  # [B, R, 2 W]
    device, batch, rows = ring.device, len(ring), ring.shape[1]
    starts, counts = given["starts"].long(), given["offsets"].diff().long()
    oldest = (starts - rows).clamp_min(0) // block
    pages = (starts + counts - 1) // block - oldest + 1
    most, total = int(((starts + counts - 1) // block).max()) + 1, int(pages.sum())
    place = torch.arange(total, device=device).flip(0)  # the last page first
    first = pages.cumsum(0) - pages
    column = torch.arange(most, device=device)
    held = (column >= oldest[:, None]) & (column < (oldest + pages)[:, None])
    number = (first[:, None] + column - oldest[:, None]).clamp(0, total - 1)
    table = torch.where(held, place[number], 0)
    cache = torch.zeros(total * block, ring.shape[2], device=device)
    past = starts[:, None] - 1 - torch.arange(rows, device=device)  # [B, R]
    request = torch.arange(batch, device=device)[:, None].expand_as(past)
    known = past >= 0
    past, request = past[known], request[known]
    cache[table[request, past // block] * block + past % block] = ring[request, past % rows]
    positions, owner = given["positions"], given["token_request"].long()
    slots = table[owner, positions // block] * block + positions % block
    return cache.view(total, block, -1), table.int().contiguous(), slots
