"""Compress projected rows to packed entries: the torch op `dsv4::compressor`.

    batch = Batch(plan(offsets, starts, places), slots)                  once a step, for all layers
    compressor(kv, gate, Weights(ape, norm, cos, sin), batch, Ring(k, z), Pages(pages, 64, "kv"))       CSA
    compressor(kv, gate, weights, batch, Running(parts), Pages(pages, 2, "kv"))                          HCA
    compressor(kv, gate, weights, batch, Ring(k, z), Pages(keys, 64, "fp4"))                             indexer keys

One launch serves prefill, decode and any mixture of chunks. The host reads nothing, so a CUDA graph can capture it
after one call of its size has compiled it. Twice as many columns as the norm has elements mean overlap (CSA).

**State.** `Ring` keeps rows, 2 x rate (CSA) or rate of them. `Running` keeps of HCA's open
window the softmax alone, 6 KiB a request instead of 512. A step moves 16 KiB, and a step that closes a window no more;
there a ring reads 512 KiB.

To go back some tokens (speculative decoding), `Running` needs a copy of it from before; a ring goes back as far as its
rows were not overwritten. Neither needs to be cleared for a new request.

**Rounding.** Pooling is fp32. A quantised entry ("kv", "fp8", "fp4") is rounded to bf16 where the released code stores
it: after pooling, after the norm, after RoPE and after the Hadamard rotation, then quantised. A dense one ("bf16",
"fp32") is rounded once, at the end.

The oracle is `dsv4lib.reference.compressor` (`compress_packed`, `compress_running`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import hadamard, indexer_key, kv_entry
from dsv4lib.ops.common import launching
from dsv4lib.ops.common.requests import check_values, used_of
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.compressor import arguments
from dsv4lib.ops.compressor.config import DIMS, LAYOUTS, ROPE
from dsv4lib.ops.compressor.kernel import Compressor
from dsv4lib.ops.compressor.stream import StreamedCompressor
from dsv4lib.ops.quantize.config import has_fp4_conversion

MANY = 25  # requests of a decode step from which on two CTAs share one, not four
DENSE = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Weights(NamedTuple):
    """Parameters: ape fp32 ``[rate, width]``, norm fp32 ``[dim]``.

    cos and sin are fp32 ``[P, 32]`` by position.
    """

    ape: Tensor
    norm: Tensor
    cos: Tensor
    sin: Tensor


class Batch(NamedTuple):
    """Requests of a batch, and where their entries go.

    Attributes:
        requests: int32 ``[B, 4]``, see `ops.common.requests.plan`.
        slots: int32 ``[T]``, page * page_size + slot of the entry that a token closes; negative: it is not stored.
        single: every request has one row or none (a decode step).
    """

    requests: Tensor
    slots: Tensor
    single: bool = False


class Ring(NamedTuple):
    """State of rows: k, z fp32 ``[S, rows, width]``, z with bias.

    Rows are 2 x rate with overlap, else rate, or more of them, a power of two; position p is at p mod rows. Of a call's
    rows the newest 2 x rate, or rate, are stored. A step of 1 + K rows can go back K if rows hold K - 1 more.
    The numbers may come as their bytes, uint8 ``[S, rows, 4 width]``.
    """

    k: Tensor
    z: Tensor


class Running(NamedTuple):
    """State of softmax: parts fp32 ``[S, 3, dim]`` of the open window.

    They are the maximum of the gates, the sum of exponentials and the weighted sum; or their bytes, as of `Ring`.
    """

    parts: Tensor


class Pages(NamedTuple):
    """Where entries go.

    Attributes:
        data: uint8 ``[P, page bytes]`` of form "kv" (584 bytes an entry), "fp8" (132) or "fp4" (68).
            Or rows ``[N, dim]`` of form "bf16" or "fp32", of which page_size says nothing.
        page_size: entries of a page.
    """

    data: Tensor
    page_size: int
    form: str = "kv"


@typed
def compressor(
    kv: Tensor,
    gate: Tensor,
    weights: Weights,
    batch: Batch,
    state: Ring | Running,
    out: Pages,
    *,
    eps: float = 1e-6,
    rotate: bool | None = None,
    backend: str = "auto",
) -> None:
    """Compress the rows of a batch into ``out``, and update the state.

    Args:
        kv, gate: fp32 ``[T, width]``, rows on 16 bytes (columns of one matrix will do); the gate without bias.
        weights, batch, state, out: see there.
        eps: added to the mean of squares.
        rotate: apply the Hadamard rotation after RoPE; None: to entries of 128 dims (the indexer's).
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
    """
    if weights.norm.dim() != 1:
        raise ArgumentError("weights.norm.shape", tuple(weights.norm.shape), "[dim]")
    rotate = weights.norm.shape[0] == indexer_key.DIM if rotate is None else rotate
    launching.check_eps(eps=eps)
    Call.op(kv, gate, weights, batch, state, out, eps, rotate, backend)


def cut(rate: int, overlap: bool, running: bool, single: bool, requests: int = 1) -> dict[str, int]:
    """Cut an entry's work: a CTA, or for many rows a cluster of 8 (`config.Sizes`).

    A decode step with a `Ring` and no overlap is `streamed`.
    """
    pooled = 1 if running and single else rate * (1 + overlap)
    if pooled <= 8:
        return {"slices": 1, "split": 1}
    return streamed(rate, requests) if single else {"slices": 8, "split": pooled // 8}


def streamed(rate: int, requests: int) -> dict[str, int]:
    """Cut a decode step through shared memory: few requests get more CTAs each."""
    slices, stages, teams = (2, 3, 1) if requests >= MANY else (4, 4, 2)
    groups = rate // 8 // slices  # of a CTA
    teams = min(teams, groups)
    return {"slices": slices, "split": rate // 8, "stages": min(stages, groups), "teams": teams}


@op(
    "compressor",
    mutates=("state", "out"),
    one_pool=("state", "out"),
    names={"batch.requests": "requests", "batch.slots": "slots"},
)
class Call(NamedTuple):
    """A call of `compressor`."""

    kv: Tensor
    gate: Tensor
    weights: Weights
    batch: Batch
    state: Ring | Running
    out: Pages
    eps: float
    rotate: bool
    backend: str

    @property
    def overlap(self) -> bool:
        """Entries pool two windows."""
        return self.kv.shape[1] == 2 * self.weights.norm.shape[0]

    def settings(self) -> dict[str, Any]:
        """Make options of the kernel."""
        rate, running = self.weights.ape.shape[0], isinstance(self.state, Running)
        options = {"rate": rate, "overlap": self.overlap, "dim": self.weights.norm.shape[0], "form": self.out.form}
        options |= {"rotate": self.rotate, "single": self.batch.single, "running": running}
        if not running and self.state.k.shape[1] > rate * (1 + self.overlap):
            options["rows"] = self.state.k.shape[1]
        return options | cut(rate, self.overlap, running, self.batch.single, len(self.batch.requests))

    def check(self) -> None:
        """Check types, shapes and devices."""
        if self.state[0].dtype == torch.uint8:
            return self._in_fp32().check()
        fp32, i32 = torch.float32, torch.int32
        shapes = {"kv": (self.kv, "[T, width]"), "weights.ape": (self.weights.ape, "[rate, width]")}
        shapes |= {"weights.norm": (self.weights.norm, "[dim]"), "weights.cos": (self.weights.cos, f"[P, {ROPE // 2}]")}
        for name, (x, shape) in shapes.items():
            if x.dim() != shape.count(",") + 1:
                raise ArgumentError(f"{name}.shape", tuple(x.shape), shape)
        if self.out.form not in LAYOUTS:
            raise ArgumentError("out.form", self.out.form, "one of " + ", ".join(LAYOUTS))
        tokens, width, dim, rate = *self.kv.shape, self.weights.norm.shape[0], self.weights.ape.shape[0]
        if dim not in DIMS.get(self.out.form, (128, 512)):
            raise ArgumentError(
                "weights.norm.shape", (dim,), f"{DIMS.get(self.out.form, (128, 512))} for entries of {self.out.form}"
            )
        if self.rotate and dim != indexer_key.DIM:
            raise ArgumentError("rotate", True, f"False for {dim} dims")
        running = isinstance(self.state, Running)
        if width not in ((dim,) if running else (dim, 2 * dim)):
            allowed = f"[T, {dim}] with a Running, else also [T, {2 * dim}] (overlap)"
            raise ArgumentError("kv.shape", tuple(self.kv.shape), allowed)
        if rate not in ((4,) if self.overlap else (32, 64, 128)) or (not self.overlap and dim != kv_entry.HEAD_DIM):
            allowed = "rate 4 with overlap, else 32, 64 or 128 and 512 dims"
            raise ArgumentError("weights.ape.shape", tuple(self.weights.ape.shape), allowed)
        least, given = rate * (1 + self.overlap), self.state[0].shape[1] if self.state[0].dim() == 3 else 0
        fits = given >= least and not given & (given - 1)
        ring = (None, 3 if running else given if fits else least, width)
        shapes = ring, tuple(self.state[0].shape)  # all of a state are alike
        names = (f"state.{name}" for name in self.state._fields)
        state = {name: (x, fp32, like) for name, x, like in zip(names, self.state, shapes, strict=False)}
        launching.check(
            {
                "kv": (self.kv, fp32, (tokens, width)),
                "gate": (self.gate, fp32, (tokens, width)),
                "weights.ape": (self.weights.ape, fp32, (rate, width)),
                "weights.norm": (self.weights.norm, fp32, (dim,)),
                "weights.cos": (self.weights.cos, fp32, (None, ROPE // 2)),
                "weights.sin": (self.weights.sin, fp32, (len(self.weights.cos), ROPE // 2)),
                "requests": (self.batch.requests, i32, (tokens if self.batch.single else None, 4)),
                "slots": (self.batch.slots, i32, (tokens,)),
                **state,
                "out.data": (self.out.data, DENSE.get(self.out.form, torch.uint8), (None, None)),
            }
        )
        layout = LAYOUTS[self.out.form]
        needed = dim if layout is None else layout.page_bytes(self.out.page_size)
        if self.out.data.shape[1] != needed:
            raise ArgumentError("out.data.shape", tuple(self.out.data.shape), f"[any, {needed}]")
        if self.out.data.numel() and self.out.data.stride(1) != 1:
            raise ArgumentError("out.data.stride()", self.out.data.stride(), "stride 1 in the last dimension")

    def check_values(self) -> None:
        """Check requests and slots."""
        check_values(self.batch.requests, len(self.kv), len(self.state[0]))
        used = used_of(self.batch.requests)
        entries = len(self.out.data) * (1 if LAYOUTS[self.out.form] is None else self.out.page_size)
        kept = self.batch.slots[self.batch.slots >= 0]
        if bool((used[:, 1] + used[:, 2] > len(self.weights.cos)).any()):
            raise ArgumentError("requests[:, 2]", used[:, 2].tolist()[:8], f"positions below {len(self.weights.cos)}")
        if self.batch.single and bool((self.batch.requests[:, 1] > 1).any()):
            raise ArgumentError("batch.single", True, "False: a request has more than a row")
        if bool((kept >= entries).any()) or len(kept.unique()) != len(kept):
            raise ArgumentError("slots", kept.tolist()[:8], f"negative or 0..{entries - 1}, each at most once")

    def _in_fp32(self) -> Call:
        """View a state that comes as bytes as its numbers."""
        views = []
        for name, x in zip(self.state._fields, self.state, strict=True):
            if x.dtype != torch.uint8:
                raise ArgumentError(f"state.{name}.dtype", x.dtype, "torch.uint8, as of the state's other tensor")
            apart = any(stride % 4 for stride in (*x.stride()[:-1], x.storage_offset()))
            if x.dim() != 3 or x.shape[2] % 4 or x.stride(2) != 1 or apart:
                raise ArgumentError(f"state.{name}", (tuple(x.shape), x.stride()), "bytes of fp32 [S, rows, width]")
            views.append(x.view(torch.float32))
        return self._replace(state=type(self.state)(*views))

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        if self.state[0].dtype == torch.uint8:
            return self._in_fp32().run(backend)
        state, out = self.state, self.out
        if len(state) == 2 and len(state.k) and state.k.data_ptr() == state.z.data_ptr():
            raise ArgumentError("state.z", "the memory of state.k", "memory of its own")
        if 0 in (len(self.kv), len(self.batch.requests), len(out.data)):
            return None
        if backend == "reference":
            return _reference(self)
        settings = self.settings() | {"fp4_conversion": has_fp4_conversion(launching.arch(backend))}
        kernel = StreamedCompressor if settings.get("stages") else Compressor
        launching.launch(backend, kernel, settings, arguments.fake_args, arguments.launch_args, self)
        return None


def _reference(call: Call) -> None:
    """Ask the oracle in fp64, of the states that the step uses alone: a pool has many more."""
    oracle = backends.oracle("compressor")
    state, out = call.state, call.out
    wide = (x.double() for x in (call.kv, call.gate, *call.weights))
    requests, slots = used_of(call.batch.requests), call.batch.slots
    places, requests[:, 3] = requests[:, 3].clone(), torch.arange(len(requests), device=requests.device)
    batch = oracle.Packed(*wide, requests, slots)
    dtype = None if out.form in DENSE else torch.bfloat16
    if isinstance(state, Running):
        entries, slots, parts = oracle.compress_running(batch, state.parts[places].double(), call.eps, dtype)
        state.parts[places] = parts.float()
    else:
        given = oracle.State(state.k[places].double(), state.z[places].double())
        entries, slots, new = oracle.compress_packed(batch, given, call.eps, dtype)
        state.k[places], state.z[places] = new.k.float(), new.z.float()
    entries = oracle.rounded(hadamard.transform(entries), dtype) if call.rotate else entries
    if out.form in DENSE:
        out.data[slots.long()] = entries.to(out.data.dtype)
    elif out.form == "kv":
        kv_entry.append(out.data, out.page_size, slots, entries)
    else:
        indexer_key.append(out.data, out.page_size, slots, entries, out.form)
