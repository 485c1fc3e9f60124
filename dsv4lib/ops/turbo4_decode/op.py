"""Attend to a paged turbo4 cache, as a torch op.

`turbo4_decode` calls `torch.ops.dsv4.turbo4_decode`, which writes in place: one launch, or two where tokens are split;
no value of a tensor is read by the host. The oracle is `dsv4lib.reference.turbo4_decode`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import compile_cache, launching, plans
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.turbo4_decode import arguments
from dsv4lib.ops.turbo4_decode.config import BLOCK, MOST_GROUP, ROWS, SLICE, TABLES, TILE, WARPS
from dsv4lib.ops.turbo4_decode.kernel import Turbo4Decode
from dsv4lib.ops.turbo4_decode.output import Turbo4Combine
from dsv4lib.ops.turbo4_encode.kernel import HEAD_DIMS
from dsv4lib.ops.turbo4_encode.op import DTYPES, MAX_SEED, check_pages

SM_COUNT = 132  # where there is no GPU
CTAS_AN_SM = 2  # that run at once
MOST_SPLITS = 128
MOST_ROWS = 65535  # requests and heads: of a grid's z and y
MOST_TOKENS = (1 << 31) - (1 << 13)  # that 32 bits count, and tiles and splits past the last
NEAR = 1.05  # of the best time
MANY_TOKENS = 1 << 16  # of all requests: from here a table in shared memory is faster with heads of 128
COMBINE, EACH = 2.0, 1 / 16  # steps that a second launch takes: not measured


class Attention(NamedTuple):
    """Output of an attention.

    Attributes:
        o: [B, H, D], the dtype of q. lse: fp32 [B, H], natural logarithm of the sum of exponentials.
    """

    o: Tensor
    lse: Tensor


@typed
def turbo4_decode(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_size: int,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    seed: int = 0,
    splits: int = 0,
    lookup: str = "auto",
    out: Attention | None = None,
    backend: str = "auto",
) -> Attention:
    """Attend with one query token a request to keys and values of 4 bits.

    Args:
        q: bf16 or fp16 [B, H, D], B and H at most 65535, D 64, 128, 256 or 512, not rotated, rows on D / 16
            bytes, 16 at most.
        k_pages, v_pages: uint8 [P, H / group, bytes] as `turbo4_encode` writes them, group 1 to 128; may be the same
            memory (a latent that is K and V), or heads of one cache.
        page_size: entries of a page, a multiple of 8.
        block_table: int32 [B, W], pages of a request; read as far as its length. W * page_size at most 2^31 - 8192.
        lengths: int32 [B], entries of a request; 0 or less: O is 0 and the LSE -inf, nothing else is read; more than
            W * page_size: that many.
        scale: of logits; None: D^-0.5.
        seed: of the signs, as in `turbo4_encode`.
        splits: of the tokens, combined by a second launch; 0: chosen from the shapes.
        lookup: where centroids are looked up, "registers", "shared" or "auto" (`choose_table`); same results.
        out: to write into; None: new tensors.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    if q.dim() != 3:
        raise ArgumentError("q.shape", tuple(q.shape), "[B, H, D]")
    if out is None:
        out = Attention(torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    Call.op(q, k_pages, v_pages, page_size, block_table, lengths, scale, seed, splits, lookup, out, backend)
    return out


def step_of(dim: int) -> int:
    """Tokens of a CTA at a time: a tile for each warp, or each group of warps that share dims."""
    return TILE * WARPS * min(dim, SLICE) // dim


def choose_splits(units: int, steps: int, slots: int) -> int:
    """Choose how many CTAs share the tokens of a request, by the time that this takes in steps of a CTA.

        time(s) = ceil(units s / slots) ceil(steps / s) + [s > 1] (COMBINE + EACH s)

    It is the smallest s within a factor `NEAR` of the best.

    Args:
        units: CTAs without splitting. steps: of a CTA, each a tile a warp, of the longest request of the block table.
        slots: CTAs that run at once.
    """

    def time(splits: int) -> float:
        combine = COMBINE + EACH * splits if splits > 1 else 0.0
        return -(-units * splits // slots) * -(-steps // splits) + combine

    choices = range(1, max(1, min(steps, MOST_SPLITS)) + 1)
    best = min(map(time, choices))
    return next(one for one in choices if time(one) <= NEAR * best)


def choose_table(head_dim: int, tokens: int) -> str:
    """Choose where centroids are looked up. Source: times on an H200 (`data/bench/turbo4.md`).

    Args:
        tokens: that the block tables of all requests have room for.
    """
    return "shared" if head_dim == 128 and tokens >= MANY_TOKENS else "registers"


@op("turbo4_decode", mutates=("out",))
class Call(NamedTuple):
    """A call of `turbo4_decode`."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_size: int
    block_table: Tensor
    lengths: Tensor
    scale: float
    seed: int
    splits: int
    lookup: str
    out: Attention
    backend: str

    def check(self) -> None:
        """Check types, shapes, devices and numbers."""
        q = self.q
        if q.dtype not in DTYPES:
            raise ArgumentError("q.dtype", q.dtype, "bfloat16 or float16")
        if q.dim() != 3 or q.shape[2] not in HEAD_DIMS or not q.shape[1]:
            allowed = f"[B, H, D], H at least 1 and D one of {', '.join(map(str, HEAD_DIMS))}"
            raise ArgumentError("q.shape", tuple(q.shape), allowed)
        batch, heads, dim = q.shape
        if max(batch, heads) > MOST_ROWS:
            raise ArgumentError("q.shape", tuple(q.shape), f"[B, H, D], B and H at most {MOST_ROWS}")
        i32 = torch.int32
        launching.check(
            {
                "q": (q, q.dtype, (batch, heads, dim)),
                "k_pages": (self.k_pages, torch.uint8, (None, None, None)),
                "v_pages": (self.v_pages, torch.uint8, (None, self.k_pages.shape[1:2].numel(), None)),
                "block_table": (self.block_table, i32, (batch, None)),
                "lengths": (self.lengths, i32, (batch,)),
                "out.o": (self.out.o, q.dtype, (batch, heads, dim)),
                "out.lse": (self.out.lse, torch.float32, (batch, heads)),
            }
        )
        kv_heads = self.k_pages.shape[1]
        if not kv_heads or heads % kv_heads or heads // kv_heads > MOST_GROUP:
            allowed = f"heads that divide the {heads} of q, groups of at most {MOST_GROUP}"
            raise ArgumentError("k_pages.shape", tuple(self.k_pages.shape), allowed)
        if self.page_size % BLOCK:
            raise ArgumentError("page_size", self.page_size, f"a multiple of {BLOCK}")
        for name, pages in (("k_pages", self.k_pages), ("v_pages", self.v_pages)):
            check_pages(name, pages, self.page_size, kv_heads, dim)
        if self.block_table.shape[1] * self.page_size > MOST_TOKENS:
            allowed = f"[B, W], W * page_size at most {MOST_TOKENS}"
            raise ArgumentError("block_table.shape", tuple(self.block_table.shape), allowed)
        self._check_numbers()

    def _check_numbers(self) -> None:
        """Check scale, seed, splits and lookup."""
        if not math.isfinite(self.scale):
            raise ArgumentError("scale", self.scale, "a finite number")
        if not 0 <= self.seed < MAX_SEED:
            raise ArgumentError("seed", self.seed, "0 to 2^31 - 1")
        if not 0 <= self.splits <= MOST_SPLITS:
            raise ArgumentError("splits", self.splits, f"0 to {MOST_SPLITS}")
        if self.lookup not in ("auto", *TABLES):
            raise ArgumentError("lookup", self.lookup, ", ".join(("auto", *TABLES)))

    def check_values(self) -> None:
        """Check that tables name pages as far as lengths reach."""
        pages, width = min(len(self.k_pages), len(self.v_pages)), self.block_table.shape[1]
        reached = torch.arange(width) * self.page_size < self.lengths.clamp(max=width * self.page_size)[:, None]
        wrong = self.block_table[reached & ((self.block_table < 0) | (self.block_table >= pages))]
        if wrong.numel():
            raise ArgumentError("block_table", wrong.tolist()[:8], f"0..{pages - 1} as far as lengths reach")

    def run(self, backend: str) -> None:
        """Launch the kernels, or ask the oracle."""
        q, (o, lse) = self.q, self.out
        if len(q) == 0:
            return
        capacity = self.block_table.shape[1] * self.page_size
        if capacity == 0 or 0 in (len(self.k_pages), len(self.v_pages)):
            o.zero_()
            lse.fill_(-math.inf)
            return
        kv_heads = self.k_pages.shape[1]
        group = q.shape[1] // kv_heads
        ends = {"dtype": DTYPES[q.dtype], "head_dim": q.shape[2]}
        settings = {**ends, "group": group, "page_size": self.page_size}
        if backend == "reference":
            arguments.launch_args(Turbo4Decode(**settings), self, o, lse, 1)  # checks: all back ends take the same
            self._reference(capacity)
            return
        sms = launching.sm_count(q.device) if backend == "native" else SM_COUNT
        units = len(q) * kv_heads * -(-group // ROWS)
        splits = self.splits or choose_splits(units, -(-capacity // step_of(q.shape[2])), CTAS_AN_SM * sms)
        wanted = self.out if splits == 1 else self._partial(splits)
        table = choose_table(q.shape[2], len(q) * capacity) if self.lookup == "auto" else self.lookup
        settings |= {"split": splits > 1, "table": table}
        self._launch(backend, Turbo4Decode, settings, *wanted, splits)
        if splits > 1:
            kernel, code = _code(backend, Turbo4Combine, ends, arguments.fake_combine_args)
            given = kernel, wanted, o, lse, self.seed, launching.stream(backend, q)
            launching.enqueue(backend, code, arguments.combine_args(*given))

    def _launch(self, backend: str, kernel_type: type, settings: dict[str, Any], o: Any, lse: Any, splits: int) -> None:
        kernel, code = _code(backend, kernel_type, settings, arguments.fake_args)
        stream = launching.stream(backend, self.q)
        launching.enqueue(backend, code, arguments.launch_args(kernel, self, o, lse, splits, stream))

    def _partial(self, splits: int) -> Attention:
        """Lay o [splits, B, H, D] and lse [splits, B, H] out in memory of the plan."""
        (batch, heads, dim), room = self.q.shape, splits * self.q.numel()
        space = plans.scratch(room + splits * batch * heads, dtype=torch.float32, like=self.q)
        return Attention(space[:room].view(splits, batch, heads, dim), space[room:].view(splits, batch, heads))

    def _reference(self, capacity: int) -> None:
        """Ask the oracle."""
        given = self.q, self.k_pages, self.v_pages, self.block_table, self.lengths.clamp(max=capacity)
        found = backends.oracle("turbo4_decode").turbo4_decode(*given, self.page_size, self.scale, self.seed)
        for out, one in zip(self.out, found, strict=True):
            out.copy_(one)


def _code(backend: str, kernel_type: type, settings: dict[str, Any], fake_args: Any) -> tuple[Any, Any]:
    return compile_cache.default().get(kernel_type, settings, fake_args, launching.arch(backend))
