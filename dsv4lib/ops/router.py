"""The router of DeepSeek-V4 as a torch op: which experts a token goes to, with what weights.

    a = sqrt(softplus(x W^T)); experts = top-k of a + bias, or tid2eid[token id]; weights = a / sum(a) * factor

`router` takes x and the gate's weight, or their logits, and calls `torch.ops.dsv4.router`, which writes experts and
weights in place. One launch: `FusedRouter` (decode) or, from logits (prefill, behind a GEMM), `Router`. The op reads
no value of a tensor on the GPU, waits for nothing, and can be captured in a CUDA graph after one call has compiled
its kernel.

With x, the kernel counts its CTAs in memory that must be 0 before and is 0 after a launch. Without a `Workspace` the
op keeps that memory for each stream; a capture that comes first records a memset instead. Two launches that may run
at the same time, captured in two graphs from one stream for example, need workspaces of their own.

Source: DSV4 paper, MoE section; the oracle is `dsv4lib.reference.router`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.kernels.router import arguments
from dsv4lib.kernels.router.fused import QUARTERS, ROWS_M, UNIT, FusedRouter
from dsv4lib.kernels.router.simt import MAX_EXPERTS, MAX_K, Router
from dsv4lib.ops import launching

KEPT = 4096  # counters that are kept for a stream
TOGETHER = 8  # tokens up to which the gate's last CTA selects, too


class Hashed(NamedTuple):
    """Experts by a table: token t goes to ``table[tokens[t]]``.

    Attributes:
        table: int64 [V, k], numbers of experts.
        tokens: int64 [T], token ids.
    """

    table: Tensor
    tokens: Tensor


class Workspace(NamedTuple):
    """Memory of a call with x.

    Attributes:
        parts: fp32 [4 T E] or more. counters: int32 [T / 16] or more, zeros before and after a call.
    """

    parts: Tensor
    counters: Tensor


def workspace(tokens: int, experts: int, device: str | torch.device) -> Workspace:
    """Memory for calls of up to ``tokens`` tokens, one after the other."""
    parts = torch.empty(QUARTERS * tokens * experts, dtype=torch.float32, device=device)
    return Workspace(parts, torch.zeros(-(-tokens // ROWS_M), dtype=torch.int32, device=device))


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
    """Experts and weights of each token, the best first (by score) or as the table has them.

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
    if not isinstance(x, Tensor) or x.dim() != 2:
        raise ArgumentError("x", getattr(x, "shape", type(x).__name__), "a tensor [T, d], or logits [T, E]")
    if out is None:
        experts = torch.empty(x.shape[0], k, dtype=torch.int32, device=x.device)
        out = experts, torch.empty(x.shape[0], k, dtype=torch.float32, device=x.device)
    if tuple(out[0].shape) != (x.shape[0], k):
        raise ArgumentError("out[0].shape", tuple(out[0].shape), f"[{x.shape[0]}, {k}]")
    launching.need({"weight": weight, "bias": bias}, optional=True)
    table, tokens = (None, None) if hashed is None else hashed
    parts, counters = (None, None) if space is None else space
    torch.ops.dsv4.router(x, weight, bias, table, tokens, *out, parts, counters, factor, backend)
    return out


def tile_of(tokens: int, experts: int) -> tuple[int, int]:
    """(m, n) of `FusedRouter` for a call of this size: the best of a sweep on an H200, 256 and 384 experts."""
    if tokens <= 16 or (tokens <= 32 and experts <= 256):
        return 1, 2
    return (2, 2) if tokens <= 32 else (2, 4)


class Call(NamedTuple):
    """The op's arguments, in the order of its schema."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    tid2eid: Tensor | None
    tokens: Tensor | None
    experts: Tensor
    weights: Tensor
    parts: Tensor | None
    counters: Tensor | None
    factor: float
    backend: str

    @property
    def size(self) -> int:
        """E."""
        return self.x.shape[1] if self.weight is None else self.weight.shape[0]

    def check(self) -> None:
        """Types, shapes and devices.

        Raises:
            ArgumentError: see `router`.
        """
        fp32, bf16, i32, i64 = torch.float32, torch.bfloat16, torch.int32, torch.int64
        if self.x.dim() != 2 or self.experts.dim() != 2:
            raise ArgumentError("x.shape", tuple(self.x.shape), "[T, d], or logits [T, E]; experts [T, k]")
        (t, d), k = self.x.shape, self.experts.shape[1]
        launching.check(
            {
                "x": (self.x, fp32 if self.weight is None else bf16, (t, d)),
                "weight": (self.weight, bf16, (None, d)),
                "bias": (self.bias, fp32, (self.size,)),
                "hashed.table": (self.tid2eid, i64, (None, k)),
                "hashed.tokens": (self.tokens, i64, (t,)),
                "out[0]": (self.experts, i32, (t, k)),
                "out[1]": (self.weights, fp32, (t, k)),
                "space.parts": (self.parts, fp32, (None,)),
                "space.counters": (self.counters, i32, (None,)),
            }
        )
        if not 1 <= self.size <= MAX_EXPERTS:
            raise ArgumentError("x" if self.weight is None else "weight", self.size, f"1 to {MAX_EXPERTS} experts")
        if not 1 <= k <= min(MAX_K, self.size):
            raise ArgumentError("k", k, f"1 to {min(MAX_K, self.size)}")
        if (self.bias is None) == (self.tid2eid is None) or (self.tid2eid is None) != (self.tokens is None):
            raise ArgumentError("bias", None if self.bias is None else "given", "either a bias or hashed")
        if self.weight is not None and d % UNIT:
            raise ArgumentError("x.shape", (t, d), f"[T, d] with d a multiple of {UNIT}")
        for name, x, least in (
            ("space.parts", self.parts, QUARTERS * t * self.size),
            ("space.counters", self.counters, -(-t // ROWS_M)),
        ):
            if x is not None and x.shape[0] < least:
                raise ArgumentError(f"{name}.shape", tuple(x.shape), f"at least [{least}]")

    def check_values(self) -> None:
        """Numbers, where looking at them costs no wait.

        Raises:
            ArgumentError: NaN, or experts or token ids that do not exist.
        """
        for name, x in (("x", self.x), ("weight", self.weight)):
            if x is not None and not bool(x.isfinite().all()):
                raise ArgumentError(name, "a tensor with NaN or Inf", "finite numbers")
        if self.bias is not None and bool(self.bias.isnan().any()):
            raise ArgumentError("bias", "a tensor with NaN", "numbers")
        for name, x, end in (
            ("hashed.table", self.tid2eid, self.size),
            ("hashed.tokens", self.tokens, 0 if self.tid2eid is None else len(self.tid2eid)),
        ):
            if x is not None and bool(((x < 0) | (x >= end)).any()):
                raise ArgumentError(name, f"{int(x.min())} to {int(x.max())}", f"0 to {end - 1}")


SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? tid2eid, Tensor? tokens, Tensor(a!) experts, Tensor(b!) weights, "
    "Tensor(c!)? parts, Tensor(d!)? counters, float factor, str backend) -> ()"
)
_COUNTERS: dict[tuple[int, int], Tensor] = {}  # by device and stream


def _run(*given: Any) -> None:
    """What `torch.ops.dsv4.router` does: check, choose the back end, launch."""
    call = Call(*given)
    call.check()
    if not math.isfinite(call.factor):
        raise ArgumentError("factor", call.factor, "a finite number")
    name = launching.resolve(call.backend, "x", call.x)
    if call.x.device.type == "cpu":
        call.check_values()
    if call.x.shape[0] == 0:
        return
    if name == "reference":
        return _reference(call)
    settings = {"experts": call.size, "k": call.experts.shape[1], "hashed": call.bias is None}
    chosen = call.bias if call.tid2eid is None else (call.tid2eid, call.tokens)
    ends = call.experts, call.weights, call.factor
    if call.weight is None:
        given = call.x[None], chosen, *ends
        return launching.launch(name, Router, settings, arguments.fake_args, arguments.launch_args, *given)
    (m, n), apart = tile_of(call.x.shape[0], call.size), call.x.shape[0] > TOGETHER
    parts, counters = _space(call)
    gate = {**settings, "m": m, "n": n, "apart": apart}
    given = call.x, call.weight, chosen, parts, counters, *ends
    launching.launch(name, FusedRouter, gate, arguments.fake_args, arguments.fused_args, *given)
    if apart:
        settings["parts"] = QUARTERS
        launching.launch(name, Router, settings, arguments.fake_args, arguments.launch_args, parts, chosen, *ends)
    return None


def _fake(*given: Any) -> None:
    Call(*given).check()


_router = torch.library.custom_op(
    "dsv4::router", _run, mutates_args=("experts", "weights", "parts", "counters"), schema=SCHEMA
)
_router.register_fake(_fake)


def _space(call: Call) -> tuple[Tensor, Tensor]:
    """(parts [4, T, E], counters): the caller's, or the op's own."""
    tokens, parts, counters = call.x.shape[0], call.parts, call.counters
    tiles = -(-tokens // ROWS_M)
    if parts is None:
        parts = torch.empty(QUARTERS * tokens * call.size, dtype=torch.float32, device=call.x.device)
    if counters is None and call.x.device.type == "cuda" and tiles <= KEPT:
        place = call.x.device.index, torch.cuda.current_stream(call.x.device).cuda_stream
        counters = _COUNTERS.get(place)
        if counters is None and not torch.cuda.is_current_stream_capturing():
            counters = _COUNTERS[place] = torch.zeros(KEPT, dtype=torch.int32, device=call.x.device)
    if counters is None:  # on the CPU, for very many tokens, or in a capture, which records the memset
        counters = torch.zeros(tiles, dtype=torch.int32, device=call.x.device)
    return parts[: QUARTERS * tokens * call.size].view(QUARTERS, tokens, call.size), counters


def _reference(call: Call) -> None:
    """The oracle in fp64."""
    oracle = backends.oracle("router")
    logits = call.x.double() if call.weight is None else call.x.double() @ call.weight.double().T
    # Without the threshold of torch's softplus, beyond which it is x: fp64 sees the difference.
    a = torch.nn.functional.softplus(logits, threshold=1e9).sqrt()
    if call.tid2eid is None:
        experts = oracle.select_by_score(a, call.bias.double(), call.experts.shape[1])
    else:
        experts = oracle.select_by_hash(call.tokens, call.tid2eid)
    call.experts.copy_(experts)
    call.weights.copy_(oracle.expert_weights(a, experts, call.factor))
