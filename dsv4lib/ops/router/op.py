"""Route tokens to experts, as DeepSeek-V4 does: a torch op.

    a = sqrt(softplus(x W^T)); experts = top-k of a + bias, or tid2eid[token id]; weights = a / sum(a) * factor

`router` takes x and the gate's weight, or their logits, and calls `torch.ops.dsv4.router`, which writes experts and
weights in place. One launch: `FusedRouter` (decode; one for each 128 tokens) or, from logits (prefill, after a GEMM),
`Router`. The op reads no value of a tensor on the GPU, waits for nothing, and can be captured in a CUDA graph after one
call has compiled its kernel.

With x, the kernel's CTAs exchange sums in memory that must be 0 before and is 0 after a launch. Without a `Workspace`
the op keeps that memory for each stream; a capture that comes first records a memset instead. Two launches that may run
at the same time, captured in two graphs from one stream for example, need workspaces of their own.

Source: DSV4 paper, MoE section; the oracle is `dsv4lib.reference.router`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching, plans
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.router import arguments
from dsv4lib.ops.router.fused import SHARES, UNIT, FusedRouter
from dsv4lib.ops.router.kernel import MAX_EXPERTS, MAX_K, Router
from dsv4lib.ops.router.picks import padded

TOGETHER = 128  # tokens of a launch with x


class Hashed(NamedTuple):
    """Experts by a table: token t goes to ``table[tokens[t]]``.

    Attributes:
        table: int64 [V, k], numbers of experts.
        tokens: int64 [T], token ids. One outside 0 .. V - 1 is a padded row's: its experts are -1, its weights 0, and
            its x may be NaN.
    """

    table: Tensor
    tokens: Tensor


class Workspace(NamedTuple):
    """Memory of a call with x.

    Attributes:
        slots: fp32 [16 min(T, 128) E] or more, E to a multiple of 4; zeros before and after a call.
    """

    slots: Tensor


@typed
def workspace(tokens: int, experts: int, device: str | torch.device) -> Workspace:
    """Memory for calls of up to ``tokens`` tokens, one after the other."""
    return Workspace(torch.zeros(_words(tokens, experts), dtype=torch.float32, device=device))


def _words(tokens: int, experts: int) -> int:
    return max(SHARES) * min(tokens, TOGETHER) * padded(experts)


@typed
def router(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    k: int = 6,
    factor: float = 1.0,
    bias: Tensor | None = None,
    hashed: Hashed | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    space: Workspace | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Choose experts and weights of each token.

    Experts are the best first (by score), or as the table has them.

    Args:
        x: bf16 [T, d], d a multiple of 64; without ``weight``: logits fp32 [T, E].
        weight: bf16 [E, d] or None.
        k: experts a token, 1 to 16.
        factor: the sum of a token's weights.
        bias: fp32 [E], added for the selection only; needed unless ``hashed``.
        hashed: experts come from a table.
        out: (experts, weights) to write into; None: new tensors.
        space: memory of the kernel, see `workspace`; None: the op's own.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        (experts int32 [T, k], weights fp32 [T, k]). NaN among the scores of a token: its weights are NaN, its experts
        any; on the CPU such input is refused.

    Raises:
        ArgumentError: an argument that is missing or of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    if x.dim() != 2:
        raise ArgumentError("x.shape", tuple(x.shape), "[T, d], or logits [T, E]")
    if not 1 <= k <= MAX_K:
        raise ArgumentError("k", k, f"1 to {MAX_K}")
    if out is None:
        experts = torch.empty(x.shape[0], k, dtype=torch.int32, device=x.device)
        out = experts, torch.empty(x.shape[0], k, dtype=torch.float32, device=x.device)
    if tuple(out[0].shape) != (x.shape[0], k):
        raise ArgumentError("out[0].shape", tuple(out[0].shape), f"[{x.shape[0]}, {k}]")
    Call.op(x, weight, bias, hashed, out, space, factor, backend)
    return out


def shares_of(d: int) -> int:
    """Choose splits of d. They are the same for every number of tokens: bits depend on it."""
    return 8 if d <= 4096 else 16


def tile_of(tokens: int, experts: int, d: int) -> dict[str, int | bool]:
    """Choose the settings of `FusedRouter`: the best of sweeps on an H200."""
    shares = shares_of(d)
    narrow = shares == 8
    units = min(8, -(-d // (shares * UNIT)))
    whole = d == shares * units * UNIT
    settings = {
        "shares": shares,
        "units": units,
        "whole": whole,
        "staged": tokens > (16 if narrow else 8),
        "early": False,
    }
    settings |= {"patient": tokens > 8 and (narrow or tokens <= 64), "few": tokens <= 8}
    settings["deep"] = 2 if whole and (tokens <= 8 or (not narrow and tokens <= 32)) else 1
    if tokens <= 16:
        return {**settings, "m": 1, "n": 1, "across": max(1, min(8, experts * shares // (1024 * settings["deep"])))}
    if tokens <= 32:
        return {
            **settings,
            "m": 2,
            "n": 1,
            "across": max(1, min(8, experts // (128 if narrow else 64 * settings["deep"]))),
        }
    n = 2 if narrow or tokens <= 64 else 4
    return {**settings, "m": 4, "n": n, "across": max(1, experts // 128), "early": n == 4}


@op("router", mutates=("out", "space"))
class Call(NamedTuple):
    """A call of `router`."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    hashed: Hashed | None
    out: tuple[Tensor, Tensor]
    space: Workspace | None
    factor: float
    backend: str

    @property
    def size(self) -> int:
        """E."""
        return self.x.shape[1] if self.weight is None else self.weight.shape[0]

    @property
    def routed(self) -> Tensor:
        """Mark the tokens that have an id of a table, bool [T].

        The others are padded rows.
        """
        table, tokens = self.hashed
        return (tokens >= 0) & (tokens < len(table))

    def check(self) -> None:
        """Check types, shapes and devices."""
        if self.weight is not None and self.weight.dim() != 2:
            raise ArgumentError("weight.shape", tuple(self.weight.shape), "[E, d]")
        fp32, bf16, i32, i64 = torch.float32, torch.bfloat16, torch.int32, torch.int64
        if self.x.dim() != 2 or self.out[0].dim() != 2:
            raise ArgumentError("x.shape", tuple(self.x.shape), "[T, d], or logits [T, E]; experts [T, k]")
        (t, d), k = self.x.shape, self.out[0].shape[1]
        table, tokens = self.hashed or (None, None)
        slots = None if self.space is None else self.space.slots
        launching.check(
            {
                "x": (self.x, fp32 if self.weight is None else bf16, (t, d)),
                "weight": (self.weight, bf16, (None, d)),
                "bias": (self.bias, fp32, (self.size,)),
                "hashed.table": (table, i64, (None, k)),
                "hashed.tokens": (tokens, i64, (t,)),
                "out[0]": (self.out[0], i32, (t, k)),
                "out[1]": (self.out[1], fp32, (t, k)),
                "space.slots": (slots, fp32, (None,)),
            }
        )
        if not 1 <= self.size <= MAX_EXPERTS:
            raise ArgumentError("x" if self.weight is None else "weight", self.size, f"1 to {MAX_EXPERTS} experts")
        if not 1 <= k <= min(MAX_K, self.size):
            raise ArgumentError("k", k, f"1 to {min(MAX_K, self.size)}")
        if (self.bias is None) == (self.hashed is None):
            raise ArgumentError("bias", None if self.bias is None else "given", "either a bias or hashed")
        if self.weight is not None and d % UNIT:
            raise ArgumentError("x.shape", (t, d), f"[T, d] with d a multiple of {UNIT}")
        if self.weight is not None and slots is not None and slots.shape[0] < _words(t, self.size):
            raise ArgumentError("space.slots.shape", tuple(slots.shape), f"at least [{_words(t, self.size)}]")

    def check_values(self) -> None:
        """Check for NaN, and for experts that do not exist."""
        x = self.x if self.hashed is None else self.x[self.routed]
        for name, numbers in (("x", x), ("weight", self.weight)):
            if numbers is not None and not bool(numbers.isfinite().all()):
                raise ArgumentError(name, "a tensor with NaN or Inf", "finite numbers")
        if self.bias is not None and bool(self.bias.isnan().any()):
            raise ArgumentError("bias", "a tensor with NaN", "numbers")
        table = None if self.hashed is None else self.hashed.table
        if table is not None and bool(((table < 0) | (table >= self.size)).any()):
            raise ArgumentError("hashed.table", f"{int(table.min())} to {int(table.max())}", f"0 to {self.size - 1}")

    def run(self, backend: str) -> None:
        """Launch the kernels, or ask the oracle."""
        if not math.isfinite(self.factor):
            raise ArgumentError("factor", self.factor, "a finite number")
        if self.x.shape[0] == 0:
            return
        if backend == "reference":
            kernel_type, settings, args, call = next(_launches(self))
            args(kernel_type(**settings), call)  # checks: what one back end takes all take
            return _reference(self)
        for kernel_type, settings, args, call in _launches(self):
            launching.launch(backend, kernel_type, settings, arguments.fake_args, args, call)


_SLOTS: dict[tuple[int, int], Tensor] = {}  # zeros, by device and stream


def _launches(call: Call) -> Iterator[tuple[type, dict[str, Any], Callable[..., tuple], Call]]:
    """List the launches: kernel, its options, what makes its arguments, of which call."""
    settings = {"experts": call.size, "k": call.out[0].shape[1], "hashed": call.bias is None}
    if call.weight is None:
        yield Router, settings, arguments.launch_args, call
        return
    slots, (tokens, d), (experts, weights) = _slots_of(call), call.x.shape, call.out
    for rows in (slice(first, min(first + TOGETHER, tokens)) for first in range(0, tokens, TOGETHER)):
        count, hashed = rows.stop - rows.start, call.hashed
        if hashed is not None:
            hashed = hashed._replace(tokens=hashed.tokens[rows])
        tile = tile_of(count, call.size, d)
        shape = tile["shares"] // tile["deep"], count, padded(call.size)
        space, out = Workspace(slots[: math.prod(shape)].view(shape)), (experts[rows], weights[rows])
        part = call._replace(x=call.x[rows], hashed=hashed, out=out, space=space)
        yield FusedRouter, {**settings, **tile}, arguments.fused_args, part


def _slots_of(call: Call) -> Tensor:
    """Return zeroed slots: the caller's, or the op's own."""
    if call.space is not None:
        return call.space.slots
    place = call.x.device.index, launching.stream("native", call.x) if call.x.device.type == "cuda" else 0
    slots = _SLOTS.get(place)
    if slots is None:
        slots = torch.zeros(_words(TOGETHER, MAX_EXPERTS), dtype=torch.float32, device=call.x.device)
        # On the CPU a launch may be taken back half-way; a capture records the memset.
        if call.x.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            _SLOTS[place] = slots
    return plans.constant(slots)


def _reference(call: Call) -> None:
    """Ask the oracle in fp64."""
    (chosen, given), oracle = call.out, backends.oracle("router")
    logits = call.x.double() if call.weight is None else call.x.double() @ call.weight.double().T
    # Without the threshold of torch's softplus, beyond which it is x: fp64 sees the difference.
    a = torch.nn.functional.softplus(logits, threshold=1e9).sqrt()
    if call.hashed is None:
        experts = oracle.select_by_score(a, call.bias.double(), chosen.shape[1])
        chosen.copy_(experts)
        given.copy_(oracle.expert_weights(a, experts, call.factor))
        return
    routed = call.routed
    chosen.fill_(-1)
    given.zero_()
    if bool(routed.any()):
        experts = oracle.select_by_hash(call.hashed.tokens[routed], call.hashed.table)
        chosen[routed] = experts.int()
        given[routed] = oracle.expert_weights(a[routed], experts, call.factor).float()
