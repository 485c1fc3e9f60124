"""Look up the embedding's rows and start the residual streams: `dsv4::embedding`.

    streams[t, i] = rows[t] = weight[tokens[t]]        i < copies; zeros where the id is negative

One launch that writes in place. On a GPU the host reads no value of a tensor, and an id past the end gives zeros, too.
A draft block takes rows alone: ``embedding(tokens, weight, copies=0, keep=True)``; an engine that zeroes the row at
position 0 there gives a negative id. The oracle is `dsv4lib.reference.embedding`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.embedding import arguments
from dsv4lib.ops.embedding.kernel import COLUMNS, MAX_COPIES, Embedding

IDS = torch.int64, torch.int32


class Embedded(NamedTuple):
    """What the op writes: streams bf16 [T, copies, d], rows bf16 [T, d]. None: not wanted."""

    streams: Tensor | None
    rows: Tensor | None = None


@typed
def embedding(
    tokens: Tensor,
    weight: Tensor,
    *,
    copies: int = 4,
    keep: bool = False,
    out: Embedded | None = None,
    backend: str = "auto",
) -> Embedded:
    """Look up rows and copy them into the streams.

    Args:
        tokens: int64 or int32 [T], side by side: ids below V; negative: zeros.
        weight: bf16 [V, d], d a multiple of 8, rows on 16 bytes.
        copies: streams of a token, 0 to 8; 0: rows alone. Ignored with ``out``.
        keep: rows by themselves are wanted, too; True without ``copies``. Ignored with ``out``.
        out: to write into; None: new tensors.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        out.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    if out is None:
        if not 0 <= copies <= MAX_COPIES:
            raise ArgumentError("copies", copies, f"0 to {MAX_COPIES}")
        if tokens.dim() != 1 or weight.dim() != 2:
            raise ArgumentError("tokens, weight", (tuple(tokens.shape), tuple(weight.shape)), "[T] and [V, d]")
        count, d = len(tokens), weight.shape[1]
        streams = weight.new_empty(count, copies, d) if copies else None
        out = Embedded(streams, weight.new_empty(count, d) if keep else None)
    Call.op(tokens, weight, out, backend)
    return out


@op("embedding", mutates=("out",))
class Call(NamedTuple):
    """A call of `embedding`."""

    tokens: Tensor
    weight: Tensor
    out: Embedded
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        tokens, weight, (streams, rows) = self.tokens, self.weight, self.out
        if tokens.dtype not in IDS:
            raise ArgumentError("tokens.dtype", tokens.dtype, "torch.int64 or torch.int32")
        if weight.dim() != 2 or not weight.shape[1] or weight.shape[1] % COLUMNS:
            raise ArgumentError("weight.shape", tuple(weight.shape), f"[V, d] with d a multiple of {COLUMNS}")
        if streams is None and rows is None:
            raise ArgumentError("out", None, "streams, rows or both")
        if streams is not None and (streams.dim() != 3 or not 1 <= streams.shape[1] <= MAX_COPIES):
            raise ArgumentError("out.streams.shape", tuple(streams.shape), f"[T, 1 to {MAX_COPIES}, d]")
        count, bf16, d = len(tokens), torch.bfloat16, weight.shape[1]
        launching.check(
            {
                "tokens": (tokens, tokens.dtype, (None,)),
                "weight": (weight, bf16, (None, d)),
                "out.streams": (streams, bf16, (count, None, d)),
                "out.rows": (rows, bf16, (count, d)),
            }
        )

    def check_values(self) -> None:
        """Check ids."""
        past = self.tokens[self.tokens >= len(self.weight)]
        if len(past):
            raise ArgumentError("tokens", past.tolist()[:8], f"ids below {len(self.weight)}, or negative")

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        tokens, weight, (streams, rows), _ = self
        if not len(tokens):
            return
        if backend == "reference":
            oracle, inside = backends.oracle("embedding"), (tokens >= 0) & (tokens < len(weight))
            found = torch.where(inside[:, None], oracle.embedding(torch.where(inside, tokens, 0), weight), 0.0)
            if rows is not None:
                rows.copy_(found)
            if streams is not None:
                streams.copy_(oracle.init_streams(found, streams.shape[1]))
            return
        settings = {"copies": 0 if streams is None else streams.shape[1], "keep": rows is not None}
        settings["wide"] = tokens.dtype == torch.int64
        launching.launch(backend, Embedding, settings, arguments.fake_args, arguments.launch_args, self)
