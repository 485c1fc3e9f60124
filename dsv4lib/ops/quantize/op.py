"""Quantise rows to a block format, entries into pages, as `dsv4lib.formats` does.

    quantize(x, "nvfp4")                           dynamic: the global scale is amax / 2688 of x, found on the device
    quantize(x, "nvfp4", global_scale=s)           calibrated
    quantize(x, "mxfp8", rows=rows, swizzled=True)                      tokens permuted by expert, scales for the MMA
    quantize(gate_up, "nvfp4", deinterleave=True, global_scale=s)       gate and up apart
    quantize_kv_entries(kv, pages, page_size, indices)                  584-byte entries
    quantize_indexer_keys(keys, pages, page_size, indices)              68-byte FP4 keys, rotated

They call `torch.ops.dsv4.quantize`, `.quantize_kv_entries` and `.quantize_indexer_keys`, which write in place. On a GPU
the host reads no value of a tensor and waits for nothing. So a CUDA graph can capture them after one call has compiled
their kernels. One launch each; a derived global scale takes two.

Values are checked on the CPU, where reading costs no wait. On a GPU a row or index out of range counts as -1. A global
scale that is not positive and finite makes every block NaN.

Source: `dsv4lib.ops.quantize`; the oracle is `dsv4lib.reference.quantize`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import nvfp4, scale_swizzle
from dsv4lib.ops.common import compile_cache, launching, plans
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.quantize import arguments
from dsv4lib.ops.quantize.amax import Amax
from dsv4lib.ops.quantize.codes import PIECE
from dsv4lib.ops.quantize.config import RECIPES, ROW_RECIPES, has_fp4_conversion
from dsv4lib.ops.quantize.entries import Entries, IndexerKeys, KvEntries
from dsv4lib.ops.quantize.kernel import Quantize

FULL = 4 * 132 * 8192  # bytes of x from which on few bytes a thread are no longer the best
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class Quantized(NamedTuple):
    """A quantised matrix.

    With ``deinterleave`` codes and scales have a first dimension of 2, gate and up.

    Attributes:
        codes: uint8 [R, K/2] (E2M1, low nibble first) or [R, K] (E4M3).
        scales: uint8 [R, K/block], or [bytes of `formats.scale_swizzle`] where swizzled (of fp8 those of [R, K/32]).
        global_scale: fp32 scalar of nvfp4, else None.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor | None


@typed
def quantize(
    x: Tensor,
    recipe: str,
    *,
    global_scale: Tensor | None = None,
    rows: Tensor | None = None,
    deinterleave: bool = False,
    swizzled: bool = False,
    out: Quantized | tuple[Tensor, Tensor, Tensor | None] | None = None,
    workspace: Tensor | None = None,
    backend: str = "auto",
) -> Quantized:
    """Quantise the rows of a matrix.

    Args:
        x: bf16 or fp32 [T, K]; with ``deinterleave`` [T, 2 K], 8 columns of gate, 8 of up, and so on. K is a multiple
            of the block; rows start on 16 bytes.
        recipe: "nvfp4" (block 16), "mxfp4" (32), "mxfp8" (32) or "fp8" (128).
        global_scale: of nvfp4, fp32, one element, on x's device; None derives it from all of x.
        rows: int32 [R]: row r of the result is row ``rows[r]`` of x; negative: zero codes and scales. None: all of x.
        deinterleave: gate and up apart, each with its own blocks.
        swizzled: scales in 128x4 blocks with zero padding, as `linear` and `moe_gemm` read them; those of fp8 as 1x32
            ones, each four times, for mode "mxfp8". Else row-major.
        out: written in place; None: a new one. Its ``global_scale`` is written where derived, else ignored.
        workspace: int32, at least `workspace_size` elements, where the global scale is derived; None: a new one.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Raises:
        ArgumentError: an argument that is missing or of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
        EmulatorError: the emulator stopped the kernel.
    """
    if x.dim() != 2:
        raise ArgumentError("x", tuple(x.shape), "a tensor [T, K]")
    if recipe not in ROW_RECIPES:
        raise ArgumentError("recipe", recipe, "one of " + ", ".join(ROW_RECIPES))
    if rows is not None and rows.dim() != 1:
        raise ArgumentError("rows", tuple(rows.shape), "a tensor [R]")
    derived = None
    if recipe == "nvfp4" and global_scale is None:
        given = None if out is None else out[2]
        derived = torch.empty((), dtype=torch.float32, device=x.device) if given is None else given
    if out is None:
        count = len(x) if rows is None else len(rows)
        shapes = output_shapes(recipe, count, x.shape[1], deinterleave, swizzled)
        codes, scales = (torch.empty(s, dtype=torch.uint8, device=x.device) for s in shapes)
    else:
        codes, scales, _ = out
    Call.op(x, rows, global_scale, (codes, scales, derived), workspace, recipe, deinterleave, swizzled, backend)
    return Quantized(codes, scales, global_scale if derived is None else derived)


def output_shapes(
    recipe: str, rows: int, columns: int, deinterleave: bool = False, swizzled: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of codes and scales for so many rows of a matrix with so many columns."""
    form, lead = RECIPES[recipe], (2,) if deinterleave else ()
    columns //= len(lead) + 1
    blocks = columns // form.block
    scales = (scale_swizzle.swizzled_bytes(rows, blocks * form.repeats),) if swizzled else (rows, blocks)
    return (*lead, rows, columns * form.bits // 8), (*lead, *scales)


def workspace_size(tokens: int, columns: int) -> int:
    """Return the int32 elements that deriving the global scale needs.

    For [tokens, columns].
    """
    return Amax.ctas(tokens * columns // PIECE)


def bytes_at_once(elements: int, element_size: int, deinterleave: bool = False) -> int:
    """Choose the bytes that a thread of `Quantize` takes.

    On an H200, cold, rows of 4096:

    rows, recipe     16 bytes    32         64
    8                1.6 us                 2.0 to 2.9
    4096, FP8        15.9 us     15.5       16.7
    """
    least = PIECE * element_size * (1 + deinterleave)
    return least if elements * element_size < FULL else max(32, least)


@op("quantize", mutates=("out", "workspace"))
class Call(NamedTuple):
    """A call of `quantize`; ``out`` has a global scale where one is derived."""

    x: Tensor
    rows: Tensor | None
    global_scale: Tensor | None
    out: Quantized
    workspace: Tensor | None
    recipe: str
    deinterleave: bool
    swizzled: bool
    backend: str

    @property
    def count(self) -> int:
        """Count the rows of the result."""
        return len(self.x) if self.rows is None else len(self.rows)

    def check(self) -> None:
        """Check types, shapes and devices."""
        x, fp32, i32, u8 = self.x, torch.float32, torch.int32, torch.uint8
        if self.recipe not in ROW_RECIPES:
            raise ArgumentError("recipe", self.recipe, "one of " + ", ".join(ROW_RECIPES))
        _check_input("x", x, 2)
        unit = RECIPES[self.recipe].block * (1 + self.deinterleave)
        if x.shape[1] % unit:
            allowed = f"[T, K], K a multiple of {unit} for {self.recipe}" + self.deinterleave * ", gate and up"
            raise ArgumentError("x.shape", tuple(x.shape), allowed)
        codes, scales = output_shapes(self.recipe, self.count, x.shape[1], self.deinterleave, self.swizzled)
        _check("rows", self.rows, i32, (None,), x)
        if self.rows is not None and not self.rows.is_contiguous():
            raise ArgumentError("rows.stride()", self.rows.stride(), "contiguous")
        _check("out.codes", self.out.codes, u8, codes, x)
        _check("out.scales", self.out.scales, u8, scales, x)
        for name, target in (("out.codes", self.out.codes), ("out.scales", self.out.scales)):
            if not target.is_contiguous():
                raise ArgumentError(f"{name}.stride()", target.stride(), "contiguous")
        stored = PIECE * RECIPES[self.recipe].bits // 8  # bytes at once
        if self.out.codes.numel() and self.out.codes.storage_offset() % stored:
            raise ArgumentError(
                "out.codes", f"{self.out.codes.storage_offset()} bytes into its memory", f"on {stored} bytes"
            )
        for name, scale in (("global_scale", self.global_scale), ("out.global_scale", self.out.global_scale)):
            if scale is not None and self.recipe != "nvfp4":
                raise ArgumentError(name, "given", f"None for {self.recipe}: it has no global scale")
            if scale is not None and (scale.dtype != fp32 or scale.numel() != 1 or scale.device != x.device):
                found = f"{scale.dtype}{list(scale.shape)} on {scale.device}"
                raise ArgumentError(name, found, f"one fp32 element on {x.device}")
        if self.recipe == "nvfp4" and (self.global_scale is None) == (self.out.global_scale is None):
            raise ArgumentError(
                "global_scale", self.global_scale, "for nvfp4 a given scale, or a place for a derived one"
            )
        _check("workspace", self.workspace, i32, (None,), x)
        needed = workspace_size(*x.shape)
        if self.workspace is not None and len(self.workspace) < needed:
            raise ArgumentError("workspace.shape", tuple(self.workspace.shape), f"at least [{needed}]")

    def check_values(self) -> None:
        """Check row numbers and the given scale."""
        if self.rows is not None and bool((self.rows >= len(self.x)).any()):
            wrong = self.rows[self.rows >= len(self.x)].tolist()[:8]
            raise ArgumentError("rows", wrong, f"negative, or a row of x, below {len(self.x)}")
        if self.global_scale is not None and not 0 < float(self.global_scale) < float("inf"):
            raise ArgumentError("global_scale", float(self.global_scale), "positive and finite")

    def run(self, backend: str) -> None:
        """Launch the kernels, or ask the oracle."""
        _reference(self) if backend == "reference" else _launch(backend, self)


def _check_input(name: str, x: Tensor, dims: int, columns: int | None = None) -> None:
    if x.dim() != dims or x.dtype not in DTYPES or (columns is not None and x.shape[-1] != columns):
        wanted = "bf16 or fp32, " + ("[T, K]" if columns is None else f"[T, {columns}]")
        raise ArgumentError(name, f"{x.dtype}{list(x.shape)}", wanted)
    _check_rows(name, x, 16)


def _check_rows(name: str, x: Tensor, align: int) -> None:
    """Check what vectors need of a matrix that has elements, fake or not."""
    if not x.numel():
        return
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ArgumentError(f"{name}.stride()", x.stride(), "stride 1 in the last dimension")
    if len(x) > 1 and x.stride(0) == 0:
        raise ArgumentError(f"{name}.stride()", x.stride(), "no stride 0: an expanded tensor must be copied")
    if (x.storage_offset() | x.stride(0) * (len(x) > 1)) * x.element_size() % align:
        raise ArgumentError(f"{name}.stride()", x.stride(), f"rows that start on {align} bytes")


def _check(name: str, x: Tensor | None, dtype: torch.dtype, shape: tuple[int | None, ...], like: Tensor) -> None:
    """Check a tensor, if there is one, beside ``like``; None is any extent."""
    if x is None:
        return
    same = x.dim() == len(shape) and all(want in (None, have) for have, want in zip(x.shape, shape, strict=True))
    if x.dtype != dtype or not same:
        raise ArgumentError(name, f"{x.dtype}{list(x.shape)}", f"{dtype}{list(shape)}".replace("None", "any"))
    if x.device != like.device:
        raise ArgumentError(f"{name}.device", str(x.device), f"that of the input, {like.device}")


def _code(name: str, kernel_type: type, settings: dict[str, Any]) -> tuple[Any, Any]:
    arch = launching.arch(name)
    if kernel_type in (Quantize, IndexerKeys):
        settings = {**settings, "fp4_conversion": has_fp4_conversion(arch)}
    return compile_cache.default().get(kernel_type, settings, arguments.fake_args, arch)


# ------------------------------------------------------------------- rows


def _launch(name: str, call: Call) -> None:
    """Launch once, or twice where the global scale is derived."""
    x, out, stream = call.x, call.out, launching.stream(name, call.x)
    derived = out.global_scale is not None
    if x.numel() == 0:  # nothing to look at: the oracle's answer for no numbers
        out.codes.zero_()
        out.scales.zero_()
        if derived:
            out.global_scale.fill_(nvfp4.MIN_GLOBAL_SCALE)
        return
    if derived:
        room, needed = call.workspace, workspace_size(*x.shape)
        room = plans.scratch(needed, dtype=torch.int32, like=x) if room is None else room[:needed]
        call = call._replace(workspace=room)
        kernel, code = _code(name, Amax, {"dtype": DTYPES[x.dtype]})
        launching.enqueue(name, code, arguments.amax_args(kernel, call, stream))
    if call.count == 0:
        if not derived:
            return
        rows = torch.full((1,), -1, dtype=torch.int32, device=x.device)  # a row of padding, for its global scale
        shapes = output_shapes(call.recipe, 1, x.shape[1], call.deinterleave, call.swizzled)
        codes, scales = (torch.empty(s, dtype=torch.uint8, device=x.device) for s in shapes)
        call = call._replace(rows=rows, out=out._replace(codes=codes, scales=scales))
    settings = {"recipe": call.recipe, "dtype": DTYPES[x.dtype], "gather": call.rows is not None}
    settings |= {"deinterleave": call.deinterleave, "swizzled": call.swizzled}
    settings["bytes_at_once"] = bytes_at_once(call.count * x.shape[1], x.element_size(), call.deinterleave)
    settings["scale"] = "derived" if derived else None if call.global_scale is None else "given"
    kernel, code = _code(name, Quantize, settings)
    launching.enqueue(name, code, arguments.launch_args(kernel, call, stream))


def _reference(call: Call) -> None:
    options = {"rows": call.rows, "deinterleave": call.deinterleave, "swizzled": call.swizzled}
    oracle = backends.oracle("quantize").quantize
    codes, scales, scale = oracle(call.x, call.recipe, global_scale=call.global_scale, **options)
    call.out.codes.copy_(codes.view(call.out.codes.shape))
    call.out.scales.copy_(scales.view(call.out.scales.shape))
    if call.out.global_scale is not None:
        call.out.global_scale.copy_(scale.view(call.out.global_scale.shape))


# ---------------------------------------------------------------- entries


@typed
def quantize_kv_entries(kv: Tensor, pages: Tensor, page_size: int, indices: Tensor, backend: str = "auto") -> None:
    """Store entries in a paged pool, in place.

    An entry is 448 E4M3, 64 bf16 and 7 UE8M0, see `formats.kv_entry`.

    Args:
        kv: bf16 or fp32 [T, 512], RoPE applied; rows start on 16 bytes.
        pages: uint8 [P, `kv_entry.LAYOUT.page_bytes(page_size)`], pages on 16 bytes, any distance apart.
        page_size: entries of a page.
        indices: int32 [T], page * page_size + slot, none twice; a negative one drops the entry.
        backend: as in `quantize`.

    Raises:
        ArgumentError, BackendUnavailable, EmulatorError: as in `quantize`.
    """
    KvCall.op(kv, (pages, page_size, indices), backend)


@typed
def quantize_indexer_keys(
    keys: Tensor, pages: Tensor, page_size: int, indices: Tensor, rotate: bool = True, backend: str = "auto"
) -> None:
    """Store indexer keys in a paged pool, in place.

    A key is 128 E2M1 and 4 UE8M0, "fp4" of `formats.indexer_key`.

    Args:
        keys: bf16 or fp32 [T, 128], RoPE applied; rows start on 16 bytes.
        pages: uint8 [P, `indexer_key.FP4_LAYOUT.page_bytes(page_size)`], pages on 4 bytes, any distance apart.
        page_size, indices, backend: as in `quantize_kv_entries`.
        rotate: apply the Hadamard rotation first; False: keys come rotated.

    Raises:
        ArgumentError, BackendUnavailable, EmulatorError: as in `quantize`.
    """
    KeysCall.op(keys, (pages, page_size, indices), rotate, backend)


class Slots(NamedTuple):
    """Slots of a paged pool.

    Attributes:
        pages: uint8 [P, bytes]. page_size: entries of a page.
        indices: int32 [T], page * page_size + slot; negative: none.
    """

    pages: Tensor
    page_size: int
    indices: Tensor

    def check(self, kernel: type[Entries], x: Tensor) -> None:
        """Check types, shapes and devices, as this kernel wants them of entries ``x``.

        Raises:
            ArgumentError: see `quantize_kv_entries`.
        """
        _check_input(kernel.given, x, 2, kernel.dim)
        _check("indices", self.indices, torch.int32, (len(x),), x)
        _check("pages", self.pages, torch.uint8, (None, None), x)
        needed = kernel.layout.page_bytes(self.page_size)
        if self.pages.shape[1] != needed:
            allowed = f"[P, {needed}] for page_size={self.page_size}"
            raise ArgumentError("pages.shape", tuple(self.pages.shape), allowed)
        _check_rows("pages", self.pages, arguments.page_align(kernel.layout))

    def check_values(self) -> None:
        """Check indices, where reading them costs no wait.

        Raises:
            ArgumentError: an index out of range or given twice.
        """
        entries, kept = len(self.pages) * self.page_size, self.indices[self.indices >= 0]
        if bool((kept >= entries).any()):
            raise ArgumentError("indices", kept[kept >= entries].tolist()[:8], f"negative (drop) or 0..{entries - 1}")
        if len(kept.unique()) != len(kept):
            raise ArgumentError("indices", kept.tolist()[:8], "each index at most once")


SLOTS = {f"slots.{name}": name for name in Slots._fields}  # what errors call them


@op("quantize_kv_entries", mutates=("slots.pages",), names=SLOTS)
class KvCall(NamedTuple):
    """A call of `quantize_kv_entries`."""

    kv: Tensor
    slots: Slots
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        self.slots.check(KvEntries, self.kv)

    def check_values(self) -> None:
        """Check indices."""
        self.slots.check_values()

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        _append(backend, KvEntries, "kv_entries", self.kv, self.slots)


@op("quantize_indexer_keys", mutates=("slots.pages",), names=SLOTS)
class KeysCall(NamedTuple):
    """A call of `quantize_indexer_keys`."""

    keys: Tensor
    slots: Slots
    rotate: bool
    backend: str

    def check(self) -> None:
        """Check types, shapes and devices."""
        self.slots.check(IndexerKeys, self.keys)

    def check_values(self) -> None:
        """Check indices."""
        self.slots.check_values()

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        _append(backend, IndexerKeys, "indexer_keys", self.keys, self.slots, rotate=self.rotate)


def _append(backend: str, kernel_type: type[Entries], oracle: str, x: Tensor, slots: Slots, **settings: Any) -> None:
    pages, page_size, indices = slots
    if len(x) == 0 or len(pages) == 0:
        return
    if backend == "reference":
        kept = indices.clamp_min(-1)
        getattr(backends.oracle("quantize"), oracle)(pages, page_size, kept, x, *settings.values())
        return
    kernel, code = _code(backend, kernel_type, {"dtype": DTYPES[x.dtype], **settings})
    launching.enqueue(backend, code, arguments.entry_args(kernel, x, slots, launching.stream(backend, x)))
