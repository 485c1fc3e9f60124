"""Attend to a paged cache of latents (DeepSeek's MLA, absorbed), as a torch op.

    s_t = sm_scale * (q_nope . c_t + q_pe . r_t)        entry t: latent c_t (512 dims), rotated key r_t (64)
    out = sum_t softmax(s)_t c_t                        lse = ln sum_t e^{s_t}

`mla_decode` calls `torch.ops.dsv4.mla_decode`, which writes in place: one launch, or two where tokens are split
(`splits`); no value of a tensor is read by the host. Names and shapes are those of CUTLASS's and SGLang's MLA decode.
The oracle is `dsv4lib.reference.mla_decode`.

Padded rows: a request with a length of 0 or less reads nothing, not its queries nor its row of the page table. Its out
is 0 and its LSE -inf. Of the page table nothing past a length is read, of the last page nothing past it counts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching, plans
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.mla_decode import launch as blackwell
from dsv4lib.ops.mla_decode.config import LATENT, ROPE
from dsv4lib.ops.mla_decode.sm90 import launch as hopper
from dsv4lib.ops.mla_decode.splits import (
    PAGES,
    SM_COUNT,
    check_num_kv_splits,
    num_kv_splits_by_clusters,
    pack_factor,
    workspace_bytes,
)

ARCHS = (*blackwell.ARCHS, *hopper.ARCHS)
ENTRY = LATENT + ROPE
MOST_HEADS = 128
MOST_TOKENS = 1 << 30  # of a request: 32 bits count them, and tiles and splits past the last
SM_SCALE = 1 / math.sqrt(128 + 64)  # of DeepSeek's heads before W_UK is absorbed: 128 dims and 64 rotated ones
BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
CACHE_DTYPES = {BF16: (BF16, E4M3), FP16: (FP16,), E4M3: (E4M3,)}  # by that of queries
MOST_REQUESTS = 65535  # of a grid's z
SCALES = 2.0**-100, 2.0**100  # a scale that is 0 in fp32, or negative, would make a masked score NaN


class MlaOutput(NamedTuple):
    """Output of an attention.

    Attributes:
        out: [B, H, 512]. lse: fp32 [B, H], natural logarithm of the sum of exponentials.
    """

    out: Tensor
    lse: Tensor


@typed
def mla_decode(
    q_nope: Tensor,
    q_pe: Tensor,
    kv_cache: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    workspace: Tensor | None = None,
    sm_scale: float | None = None,
    num_kv_splits: int = -1,
    q_scale: float = 1.0,
    kv_scale: float = 1.0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> MlaOutput:
    """Attend with one query token a request to the latents of its pages.

    Args:
        q_nope: [B, H, 512] bf16, fp16 or float8_e4m3fn, H 1 to 128; multiplied by W_UK (absorbed).
        q_pe: [B, H, 64] of the same type, rotated (RoPE).
        kv_cache: [P, page, 576], latents and rotated keys, page 16, 32, 64 or 128. Of q's type, or float8_e4m3fn with
            bf16 queries. Views may lie apart, by multiples of 16 bytes.
        seq_lens: int32 [B], tokens of each request; 0 or less: out is 0 and the LSE -inf; more than N * page: that
            many.
        page_table: int32 [B, N], pages of each request, whole tiles of 128 tokens (`splits.pad_page_table`). Nothing
            past a length is read.
        workspace: uint8, at least `splits.mla_workspace_size` bytes, for splits; None: from torch's allocator.
        sm_scale: of logits, 2^-100 to 2^100; None: 1 / sqrt(192).
        num_kv_splits: of the tokens, 1 to 256; -1: `splits.num_kv_splits_by_clusters`, on a Hopper
            `sm90.launch.choose_splits`.
        q_scale, kv_scale: of FP8 queries and FP8 entries, 2^-100 to 2^100; else 1.
        out: [B, H, 512], written in place; None: a new one. Of q's type, of FP8 queries bf16 or fp16.
        lse: fp32 [B, H], written in place; None: a new one.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    _check_rank("q_nope", q_nope, "[B, H, 512]")
    if out is None:
        out = torch.empty(q_nope.shape, dtype=BF16 if q_nope.dtype == E4M3 else q_nope.dtype, device=q_nope.device)
    if lse is None:
        lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
    numbers = SM_SCALE if sm_scale is None else sm_scale, q_scale, kv_scale, num_kv_splits
    _check_scales(*numbers[:3])  # before the schema, which has no room for all ints
    Call.op(q_nope, q_pe, kv_cache, seq_lens, page_table, out, lse, workspace, *numbers, backend)
    return MlaOutput(out, lse)


def _check_rank(name: str, x: Tensor, allowed: str) -> None:
    if x.dim() != 3:
        raise ArgumentError(f"{name}.shape", tuple(x.shape), allowed)


def _check_scales(sm_scale: float, q_scale: float, kv_scale: float) -> None:
    for name, value in (("sm_scale", sm_scale), ("q_scale", q_scale), ("kv_scale", kv_scale)):
        if not SCALES[0] <= value <= SCALES[1]:
            raise ArgumentError(name, value, "a number from 2^-100 to 2^100")
    if not SCALES[0] <= sm_scale * q_scale * kv_scale <= SCALES[1]:  # what the kernels multiply logits by
        raise ArgumentError("sm_scale * q_scale * kv_scale", sm_scale * q_scale * kv_scale, "from 2^-100 to 2^100")


@op("mla_decode", mutates=("out", "lse", "workspace"), archs=ARCHS)
class Call(NamedTuple):
    """A call of `mla_decode`."""

    q_nope: Tensor
    q_pe: Tensor
    kv_cache: Tensor
    seq_lens: Tensor
    page_table: Tensor
    out: Tensor
    lse: Tensor
    workspace: Tensor | None
    sm_scale: float
    q_scale: float
    kv_scale: float
    num_kv_splits: int
    backend: str

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.kv_cache.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that a row of the page table can name."""
        return self.page_table.shape[1] * self.page_size

    @property
    def logit_scale(self) -> float:
        """What dot products of stored queries and entries are multiplied by."""
        return self.sm_scale * self.q_scale * self.kv_scale

    def check(self) -> None:
        """Check types, shapes, devices and numbers."""
        q, cache = self.q_nope, self.kv_cache
        for name, x, allowed in (
            ("q_nope", q, "[B, H, 512]"),
            ("q_pe", self.q_pe, "[B, H, 64]"),
            ("kv_cache", cache, "[P, page, 576]"),
        ):
            _check_rank(name, x, allowed)
        if q.dtype not in CACHE_DTYPES:
            raise ArgumentError("q_nope.dtype", q.dtype, "bfloat16, float16 or float8_e4m3fn")
        if cache.dtype not in CACHE_DTYPES[q.dtype]:
            allowed = " or ".join(str(one) for one in CACHE_DTYPES[q.dtype]) + f" with queries of {q.dtype}"
            raise ArgumentError("kv_cache.dtype", cache.dtype, allowed)
        (batch, heads, _), i32 = q.shape, torch.int32
        if batch > MOST_REQUESTS:
            raise ArgumentError("q_nope.shape", tuple(q.shape), f"[B, H, 512], B at most {MOST_REQUESTS}")
        out_dtype = q.dtype if q.dtype != E4M3 else self.out.dtype if self.out.dtype in (BF16, FP16) else BF16
        launching.check(
            {
                "q_nope": (q, q.dtype, (None, None, LATENT)),
                "q_pe": (self.q_pe, q.dtype, (batch, heads, ROPE)),
                "kv_cache": (cache, cache.dtype, (None, None, ENTRY)),
                "seq_lens": (self.seq_lens, i32, (batch,)),
                "page_table": (self.page_table, i32, (batch, None)),
                "out": (self.out, out_dtype, (batch, heads, LATENT)),
                "lse": (self.lse, torch.float32, (batch, heads)),
                "workspace": (self.workspace, torch.uint8, (None,)),
            }
        )
        if not 1 <= heads <= MOST_HEADS:
            raise ArgumentError("q_nope.shape", tuple(q.shape), f"[B, H, {LATENT}], H 1 to {MOST_HEADS}")
        self._check_pages()
        self._check_numbers()

    def _check_pages(self) -> None:
        """Check the page size, and that the page table has whole tiles."""
        if self.page_size not in PAGES:
            raise ArgumentError("kv_cache.shape", tuple(self.kv_cache.shape), f"[P, page, {ENTRY}], page in {PAGES}")
        width, pack = self.page_table.shape[1], pack_factor(self.page_size)
        if width == 0 or width % pack:
            allowed = f"[B, N], N at least 1 and a multiple of {pack} (pages of 128 tokens, see `pad_page_table`)"
            raise ArgumentError("page_table.shape", tuple(self.page_table.shape), allowed)
        if self.capacity > MOST_TOKENS:
            allowed = f"[B, N], N * page at most {MOST_TOKENS}"
            raise ArgumentError("page_table.shape", tuple(self.page_table.shape), allowed)

    def _check_numbers(self) -> None:
        """Check scales, splits, and the workspace where the splits are given."""
        _check_scales(self.sm_scale, self.q_scale, self.kv_scale)
        for name, value, x in (("q_scale", self.q_scale, self.q_nope), ("kv_scale", self.kv_scale, self.kv_cache)):
            if value != 1.0 and x.dtype != E4M3:
                raise ArgumentError(name, value, "1: only FP8 has a scale")
        check_num_kv_splits(self.num_kv_splits)
        if self.num_kv_splits > 1:
            self._check_workspace(self.num_kv_splits)

    def _check_workspace(self, num_kv_splits: int) -> None:
        needed = workspace_bytes(len(self.q_nope), num_kv_splits, self.q_nope.shape[1])
        if self.workspace is not None and self.workspace.numel() < needed:
            allowed = f"at least [{needed}] for {num_kv_splits} splits"
            raise ArgumentError("workspace.shape", tuple(self.workspace.shape), allowed)

    def check_memory(self) -> None:
        """Check strides and addresses.

        Rows of queries, entries and out are copied 16 bytes at a time.

        Raises:
            ArgumentError: rows that are not contiguous, or do not start on 16 bytes.
        """
        wide = {"q_nope": self.q_nope, "q_pe": self.q_pe, "kv_cache": self.kv_cache, "out": self.out}
        others = {
            "seq_lens": self.seq_lens,
            "page_table": self.page_table,
            "lse": self.lse,
            "workspace": self.workspace,
        }
        for name, x in {**wide, **others}.items():
            if x is None or x.numel() == 0:
                continue
            if x.shape[-1] > 1 and x.stride(-1) != 1:
                raise ArgumentError(f"{name}.stride()", x.stride(), "stride 1 in the last dimension")
            steps = (s for s, extent in zip(x.stride()[:-1], x.shape, strict=False) if extent > 1)
            apart = any(step * x.element_size() % 16 for step in steps)
            if (name in wide and apart) or (name in (*wide, "workspace") and x.data_ptr() % 16):
                raise ArgumentError(f"{name}.stride()", x.stride(), "rows that start on 16 bytes")

    def check_values(self) -> None:
        """Check that the page table names pages as far as lengths reach."""
        pages, width = len(self.kv_cache), self.page_table.shape[1]
        reached = torch.arange(width) * self.page_size < self.seq_lens[:, None]
        wrong = self.page_table[reached & ((self.page_table < 0) | (self.page_table >= pages))]
        if wrong.numel():
            raise ArgumentError("page_table", wrong.tolist()[:8], f"0..{pages - 1} as far as lengths reach")

    def run(self, backend: str) -> None:
        """Launch the kernels, or ask the oracle."""
        self.check_memory()
        if len(self.q_nope) == 0:
            return
        if len(self.kv_cache) == 0:
            self.out.zero_()
            self.lse.fill_(-math.inf)
        elif backend == "reference":
            self._reference()
        else:
            kernels = hopper if launching.arch(backend, ARCHS) in hopper.ARCHS else blackwell
            kernels.launch(backend, self)

    def splits_on(self, sm_count: int) -> int:
        """Choose the splits of this call on a GPU of so many SMs.

        The workspace must hold them.
        """
        batch, heads, _ = self.q_nope.shape
        splits = num_kv_splits_by_clusters(self.capacity, batch, sm_count, self.num_kv_splits, heads)
        self._check_workspace(splits)
        return splits

    def partial(self, num_kv_splits: int) -> MlaOutput:
        """Place out and lse of all splits in the workspace.

        They are fp32, [splits, B, H, 512] and [splits, B, H].
        """
        batch, heads, _ = self.q_nope.shape
        space = self.workspace
        if space is None:
            size = workspace_bytes(batch, num_kv_splits, heads)
            space = plans.scratch(size, dtype=torch.uint8, like=self.q_nope)
        rows = num_kv_splits * batch * heads
        space = space[: 4 * rows * (LATENT + 1)].view(torch.float32)
        out, lse = space[: rows * LATENT], space[rows * LATENT :]
        return MlaOutput(out.view(num_kv_splits, batch, heads, LATENT), lse.view(num_kv_splits, batch, heads))

    def sm_count(self, backend: str) -> int:
        """Count the SMs of the GPU that a launch is for; in the emulator those of a B200."""
        return launching.sm_count(self.q_nope.device) if backend == "native" else SM_COUNT

    def _reference(self) -> None:
        """Ask the oracle."""
        self.splits_on(SM_COUNT)  # checks: all back ends take the same
        cache, numbers = (self.kv_cache, self.seq_lens, self.page_table), (self.sm_scale, self.q_scale, self.kv_scale)
        found = backends.oracle("mla_decode").mla_decode(self.q_nope, self.q_pe, *cache, *numbers)
        self.out.copy_(found.out)
        self.lse.copy_(found.lse)
