"""Call the same attention by other people's kernels and by ours. One set of numbers, and how each kernel takes it.

The problem is one token of DSV4's sparse attention without a sink: H heads of 512 against rows of a pool, K = V. All
numbers of q and the pool are numbers of fp8 e4m3, so kernels for bf16 and for fp8 read exactly the same inputs.

What differs, because a kernel takes nothing else:
* `gather`: FA4, cuDNN and ours fetch the rows by index; FlashInfer's kernels read pages, which are filled with the same
  rows in the same order (HCA takes the first 128 by index).
* `keys`: ours also reads DSV4's 584-byte entries, which hold these numbers exactly.
* `dims`: FlashInfer's MLA kernels and the form of FA4 for DSV3 have K of 512 + 64 (rope) and V of 512. Our problem is
  embedded with a rope part of zeros: 576 dimensions are loaded and multiplied, the result is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dsv4lib.errors import ArgumentError

DIM, HEADS, POOL_ROWS, ROPE = 512, 128, 2048 + 5, 64
SCALE = DIM**-0.5
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
_WORKSPACE = 64 << 20  # bytes; split kernels ask for some


@dataclass(frozen=True)
class Problem:
    """One token: q fp8 [1, H, 512], pool fp8 [R, 512], index int32 [keys]. Its rows of the pool are all different."""

    q: torch.Tensor
    pool: torch.Tensor
    index: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        """Return the keys in order, fp8 [keys, 512]."""
        return self.pool[self.index.long()]

    def truth(self) -> torch.Tensor:
        """Return O in fp64 [1, H, 512]."""
        q, rows = self.q.double(), self.rows.double()
        return torch.softmax(SCALE * q @ rows.T, -1) @ rows


def problem(heads: int, keys: int, seed: int = 0) -> Problem:
    """Return the problem with the first ``heads`` of 128 heads. It has the first ``keys`` of 2,048 keys.

    Scores of a head have a standard deviation of 1/4 .. 2: no head can stand in for another, and a maximum over the
    first tile is rarely exceeded by much, so the steady state has no rescaling that a threshold could avoid.
    """
    if not 0 < heads <= HEADS or not 0 < keys <= POOL_ROWS:
        raise ArgumentError("heads, keys", (heads, keys), f"1 .. {HEADS} and 1 .. {POOL_ROWS}")
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    place = torch.arange(HEADS) * 37 % HEADS
    scales = torch.logspace(-2, 1, HEADS, base=2.0)[place][None, :, None]
    q, pool = (normal(1, HEADS, DIM) * scales).to(FP8), normal(POOL_ROWS, DIM).to(FP8)
    index = torch.randperm(POOL_ROWS, generator=generator).int()
    return Problem(q[:, :heads].contiguous(), pool, index[:keys].contiguous())


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
        name: of the row; package: PyPI name, "" for ours; module: what is imported.
        heads: of a token; keys: what a key is in memory; dims: of K as it runs; gather: how keys are found.
        call: from a `Problem` to O [1, H, 512], on the active device.
        environment: variables that choose this kernel.
    """

    name: str
    package: str
    module: str
    heads: int
    keys: str
    dims: int
    gather: str
    call: Callable[[Problem], torch.Tensor]
    environment: dict[str, str] = field(default_factory=dict)


def _ours(given: Problem, paged: bool = False, **options: Any) -> torch.Tensor:
    from dsv4lib.dsl.compile import compile_for
    from dsv4lib.emulator.driver.host import launch
    from dsv4lib.ops.fmha import arguments
    from dsv4lib.ops.fmha.sm100 import Fmha

    key = (paged, *sorted(options.items()))
    if key not in _COMPILED:
        kernel = Fmha(DIM, "bf16", "index", window=False, sink=False, fp8_entries=paged, **options)
        _COMPILED[key] = kernel, compile_for(kernel, arguments.fake_args(kernel), "sm_100a")
    kernel, code = _COMPILED[key]
    q, pool, index = given.q.to(BF16), given.pool.to(BF16), given.index[None]
    if paged:
        pool, index = _entries(given)
    o, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    count = torch.tensor([index.shape[1]], dtype=torch.int32)
    launch(code, *arguments.launch_args(kernel, q, (pool, index, None, count), None, None, None, o, lse, SCALE))
    return o


def _entries(given: Problem, page: int = 64) -> tuple[tuple[torch.Tensor, int], torch.Tensor]:
    """The pool as 584-byte entries in pages of random order, and the index that finds the same rows there."""
    from dsv4lib.ops.fmha import inputs

    one = inputs.case(1, [len(given.index)], [0])
    one = replace(one, q=given.q.to(BF16), pool=given.pool.to(BF16), index=given.index[None])
    found = inputs.paged(one, page, seed=0)
    if not torch.equal(found.pool[found.index[0].long()].float(), given.rows.float()):
        raise ArgumentError("pool", "numbers that an entry rounds", "numbers that a 584-byte entry holds exactly")
    return found.pool_pages, found.index


_COMPILED: dict[tuple, Any] = {}


def _fa4(given: Problem, rope: bool = False) -> torch.Tensor:
    from flash_attn.cute.interface import _flash_attn_fwd

    q, v = given.q.to(BF16)[None], given.pool.to(BF16)[None, :, None]
    zeros = [torch.zeros(*x.shape[:-1], ROPE, dtype=BF16) for x in (q, v)] if rope else (None, None)
    out = _flash_attn_fwd(*zeros, v, qv=q, gather_kv_indices=given.index[None, None].contiguous(), softmax_scale=SCALE)
    return out[0][0]


def _cudnn(given: Problem) -> torch.Tensor:
    from cudnn.deepseek_sparse_attention.sparse_attention_forward import sparse_attention_forward_wrapper

    return sparse_attention_forward_wrapper(given.q.to(BF16), given.pool.to(BF16), given.index[None])["out"]


def _full(value: int) -> torch.Tensor:
    return torch.full((1,), value, dtype=torch.int32)


def _hca(given: Problem, page: int = 128) -> torch.Tensor:
    from flashinfer.cute_dsl.attention.wrappers.batch_hca import cute_dsl_hca_decode

    keys, pages = len(given.index), given.rows[128:].reshape(-1, page, DIM)
    table = torch.arange(len(pages), dtype=torch.int32)[None]
    workspace = torch.zeros(_WORKSPACE, dtype=torch.int8)
    window = given.index[None, :128].contiguous()
    lengths = _full(keys), _full(keys), _full(128)
    out = cute_dsl_hca_decode(given.q[None], given.pool, pages, workspace, window, table, *lengths, SCALE)
    return out.reshape(given.q.shape)


def _mla(given: Problem, form: str, dtype: torch.dtype, page: int = 64) -> torch.Tensor:
    from flashinfer.cute_dsl.attention.mla_dispatch import cute_dsl_mla_decode

    def widened(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x.float(), (0, ROPE)).to(dtype)

    keys = len(given.index)
    cache = widened(given.rows).reshape(-1, page, DIM + ROPE)
    table = torch.arange(len(cache), dtype=torch.int32)[None]
    workspace = torch.zeros(_WORKSPACE, dtype=torch.int8)
    out = cute_dsl_mla_decode(
        widened(given.q)[None], cache, workspace, DIM, ROPE, table, _full(keys), keys, SCALE, cute_dsl_impl=form
    )
    return out.reshape(given.q.shape)


_ONE_CTA, _PAIR = ({"FLASH_ATTENTION_MLA_1CTA": value} for value in "10")
_FA4, _CUDNN = ("flash-attn-4", "flash_attn.cute"), ("nvidia-cudnn-frontend", "cudnn")
_INFER = "flashinfer-python", "flashinfer"
_OURS = "", "dsv4lib"

KERNELS = (
    Kernel("ours, 64 heads", *_OURS, 64, "bf16", 512, "gather4", _ours),
    Kernel("ours, 584-byte", *_OURS, 64, "fp8+bf16", 512, "loads", lambda p: _ours(p, paged=True)),
    Kernel("FA4 MLA .ws", *_FA4, 64, "bf16", 512, "cp.async", _fa4, _ONE_CTA),
    Kernel("FA4 MLA .ws, 576", *_FA4, 64, "bf16", 576, "cp.async", lambda p: _fa4(p, rope=True), _ONE_CTA),
    Kernel("cuDNN DSA, 64 heads", *_CUDNN, 64, "bf16", 512, "gather4", _cudnn),
    Kernel("ours, 128 heads", *_OURS, 128, "bf16", 512, "gather4", lambda p: _ours(p, cluster=2)),
    Kernel("FA4 MLA pair", *_FA4, 128, "bf16", 512, "cp.async", _fa4, _PAIR),
    Kernel("FA4 MLA pair, 576", *_FA4, 128, "bf16", 576, "cp.async", lambda p: _fa4(p, rope=True), _PAIR),
    Kernel("cuDNN DSA, 128 heads", *_CUDNN, 128, "bf16", 512, "gather4", _cudnn),
    Kernel("FlashInfer MLA", *_INFER, 128, "bf16", 576, "pages", lambda p: _mla(p, "modular", BF16)),
    Kernel("FlashInfer MLA fp8", *_INFER, 128, "fp8", 576, "pages", lambda p: _mla(p, "modular", FP8)),
    Kernel("FlashInfer HCA fp8", *_INFER, 128, "fp8", 512, "pages", _hca),
)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
