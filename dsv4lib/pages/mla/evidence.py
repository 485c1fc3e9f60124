"""Count what `claims` looks at: emulated launches of MLA decode, operations by torch, bytes of tensors, code."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dsv4lib import backends, emulator
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.mla_decode import arguments as blackwell_arguments
from dsv4lib.ops.mla_decode import inputs
from dsv4lib.ops.mla_decode.op import ENTRY, LATENT, SM_SCALE, mla_decode
from dsv4lib.ops.mla_decode.sm90 import arguments as hopper_arguments
from dsv4lib.ops.mla_decode.sm90.kernel import MlaDecode as Hopper
from dsv4lib.ops.mla_decode.sm100 import MlaDecode as Blackwell
from dsv4lib.ops.mla_decode.splits import mla_workspace_size
from dsv4lib.pages.mla.arithmetic import Work
from dsv4lib.pages.mla.run_case import ARCH
from dsv4lib.reference import mla_decode as oracle

QK_STEP = 64  # dims of a step, as CUTLASS has them
CLOSE = 1e-3  # of an LSE that is summed in fp32


class Emulated(NamedTuple):
    """A launch of `mla_decode` in the emulator.

    Attributes:
        ctas: of the launch that attends. flops: of its MMAs, padded rows included.
        query_steps: steps of 64 dims in the products with keys, of every tile of tokens.
        tokens: of each split of each request, found by their LSE; empty for one split. error: relative, of out.
    """

    ctas: int
    flops: int
    query_steps: float
    tokens: tuple[tuple[int, ...], ...]
    error: float


@functools.cache
def emulated(lengths: tuple[int, ...], heads: int, splits: int = 1) -> Emulated:
    """Attend from ``heads`` heads to requests of these lengths, in pages of 64."""
    one, batch = inputs.case(list(lengths), heads), len(lengths)
    capacity = one.page_table.shape[1] * one.kv_cache.shape[1]
    space = torch.zeros(max(4, mla_workspace_size(capacity, batch, 148, splits)), dtype=torch.uint8)
    with backends.emulating(ARCH), emulator.device(ARCH, trace=True) as gpu:
        found = mla_decode(*one, num_kv_splits=splits, workspace=space, backend="emulator")
        attend = gpu.launches[0].result
        mmas = gpu.trace.mmas if splits == 1 else None
    want = oracle.mla_decode(*one, SM_SCALE)
    error = float((found.out.double() - want.out).norm() / want.out.norm())
    tokens: tuple[tuple[int, ...], ...] = ()
    if splits > 1:
        rows = splits * batch * heads
        lse = space[: 4 * rows * (LATENT + 1)].view(torch.float32)[rows * LATENT :].view(splits, batch, heads)
        tokens = tuple(tokens_of(one, b, lse[:, b]) for b in range(batch))
    steps = 0.0
    if mmas is not None:
        tile = int(mmas["n"][0])  # the first product of a tile is with keys
        tiles = sum(-(-n // tile) for n in lengths)
        values = 2 * int(mmas["m"][0]) * tile * LATENT * tiles
        steps = (int(mmas["flops"].sum()) - values) / (2 * int(mmas["m"][0]) * tile * QK_STEP * tiles)
    return Emulated(attend.stats["ctas"], attend.stats["mma_flops"], steps, tokens, error)


def tokens_of(one: inputs.Case, request: int, lse: Tensor) -> tuple[int, ...]:
    """Find how many tokens each split of a request took, by the LSE [splits, H] that it left. -1: no such number."""
    keys = oracle.entries(one.kv_cache, one.page_table[request], int(one.seq_lens[request]))
    q = torch.cat((one.q_nope[request], one.q_pe[request]), -1).double()
    logits, first, found = SM_SCALE * q @ keys.T, 0, []
    for split in lse.double():
        upto = logits[:, first:].logcumsumexp(-1)
        apart = (upto - split[:, None]).abs().amax(0)
        if bool((split == -torch.inf).all()):
            found.append(0)
        elif len(apart) and float(apart.min()) < CLOSE:
            found.append(int(apart.argmin()) + 1)
        else:
            found.append(-1)
        first += max(0, found[-1])
    return tuple(found)


def counted(batch: int, tokens: int, heads: int) -> Work:
    """Let torch count attention of one query a request to latents in bf16, over tensors without memory."""
    options = {"dtype": torch.bfloat16, "device": "meta"}
    q, kv = torch.empty(batch, heads, ENTRY, **options), torch.empty(batch, tokens, ENTRY, **options)
    with FlopCounterMode(display=False) as counter:
        out = torch.bmm(torch.bmm(q, kv.mT).softmax(-1), kv[..., :LATENT])
    return Work(q.nbytes + kv.nbytes + out.nbytes, counter.get_total_flops())


def heads_bytes(heads: int, nope: int, rope: int) -> int:
    """Measure keys and values of a token in bf16, where every head has its own."""
    options = {"dtype": torch.bfloat16, "device": "meta"}
    return torch.empty(heads, nope + rope, **options).nbytes + torch.empty(heads, nope, **options).nbytes


def ptx_of(arch: str) -> str:
    """Return the PTX of the kernel for an architecture, sm_90a or sm_100a, from the compile cache."""
    if arch == ARCH:
        settings = {"dtype": "bf16", "page_size": 64}
        return compile_cache.default().get(Blackwell, settings, blackwell_arguments.fake_args, arch)[1].ptx
    settings = {"dtype": "bf16", "page": 64, "partial": False}
    return compile_cache.default().get(Hopper, settings, hopper_arguments.fake_args, arch)[1].ptx
