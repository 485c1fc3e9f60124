"""Attend to selected entries, window keys and a sink: the torch op `dsv4::fmha`.

    s_j = scale * (q . kv_j)                       j over {entries} u {window}
    o   = sum_j e^{s_j} kv_j / (sum_j e^{s_j} + e^{sink})
    lse = ln sum_j e^{s_j}                         without the sink; -inf, and o = 0, where a token has no keys

`fmha` takes the arguments in the model's terms; the op writes o and lse in place. On a GPU the host reads no value of a
tensor, waits for nothing, and allocates by shapes alone. So a CUDA graph can capture it, after one call (or `warm_up`)
has compiled and loaded its kernels. `torch.compile` passes it whole.

Padded rows: a token with counts 0 or negative, or with a negative request in a `Ring`, has no keys. Nothing of
its lists, of a pool or of its q reaches a number: o is 0 and lse is -inf. A padded group has 0 tokens or fewer.

A Hopper has another kernel, of 584-byte entries alone (`sm90.launch`). On Blackwell:

One kernel launch, `Fmha`. Where few tokens leave SMs idle, two CTAs share the dimensions of O, and the keys are split.
`Combine` adds the splits up in a fixed order (`ops.common.splits`). Above 64 heads, and for ``groups``, two CTAs share
tiles.

A token's bits depend on its own keys and on the splits, never on its neighbours or its place. With ``splits`` given
they do not depend on the batch; by default its size (not what is in it) chooses them. Only ``groups`` lets tokens
share tiles, which moves tile borders.

Source: DSV4 paper eq. 27; the oracle is `dsv4lib.reference.fmha`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry
from dsv4lib.ops.common import compile_cache, launching, plans
from dsv4lib.ops.common import splits as split_choice
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.splits import Splits
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.fmha import arguments
from dsv4lib.ops.fmha.combine import AT_ONCE, Combine, loads_at_once
from dsv4lib.ops.fmha.config import HEAD_DIMS, TILE_M, TILE_N, count_tiles
from dsv4lib.ops.fmha.sm90 import launch as hopper
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.ops.fmha.sources import Fp8Pages as Fp8Pages  # for callers, as the others
from dsv4lib.ops.fmha.sources import Gathered, Keys, Ring, Rows, Selected, entries_of, window_of
from dsv4lib.ops.fmha.work import KeyRows

ARCHS = ("sm_100a", "sm_103a", *hopper.ARCHS)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
ROPE_PAIRS = arguments.ROPE_PAIRS
MAX_SPLITS = 1024
SCALES = 2.0**-100, 2.0**100  # a scale that is 0 in fp32, or negative, would make a masked score NaN


@typed
def fmha(
    q: Tensor,
    entries: Selected | Rows | Gathered | None = None,
    window: Ring | Rows | Selected | None = None,
    *,
    sink: Tensor | None = None,
    scale: float | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    groups: Tensor | None = None,
    normalise: bool = True,
    o: Tensor | None = None,
    lse: Tensor | None = None,
    splits: int | None = None,
    workspace: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attend to {entries} u {window} with the sink in the denominator.

    Args:
        q: [T, H, D] bf16 or fp16, H any number, D one of `HEAD_DIMS`.
        entries: compressed entries, or None (a SWA layer).
        window: window keys, or None. `Selected`: in pages anywhere (not with ``groups``).
        sink: fp32 [H], a logit a head that is not scaled; None is -inf.
        scale: of the dot products, 2^-100 to 2^100; default D^-0.5.
        rope: (cos, sin) fp32 [T, 32]: the last 64 dimensions of o are rotated back by them. None: not rotated.
        groups: int32 [G, 2] from `ops.fmha.window.token_groups`: adjacent tokens that read nearly the same keys
            share tiles (prefill; not with `Selected`), 128 // H of them with ``cluster`` 2, 64 // H with 1, which the
            op takes too. None: a token is on its own.
        normalise: False: these keys are a split of a union, without sink and rotation: o is fp32
            sum_j e^{s_j - m} kv_j, and lse is fp32 [T, H, 2], m and sum_j e^{s_j - m}; m is -inf where a token has no
            keys.
        o: [T, H, D] of q's type, written in place; None: a new one.
        lse: fp32 [T, H], written in place; None: a new one.
        splits: of the keys, 1 to `MAX_SPLITS`; None: `choose_splits`.
        workspace: fp32, at least `workspace_size` elements, for splits; None: from torch's allocator.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        (o, lse).

    Raises:
        ArgumentError: an argument that is missing or of the wrong type, shape, stride, device or (on the CPU) value.
        BackendUnavailable: the back end cannot run here.
        EmulatorError: the emulator stopped the kernel.
    """
    if q.dim() != 3:
        raise ArgumentError("q", tuple(q.shape), "a tensor [T, H, D]")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ArgumentError("splits", splits, f"1 to {MAX_SPLITS}, or None")
    keys, index = entries_of(entries, q)
    if o is None:
        o = torch.empty(q.shape, dtype=q.dtype if normalise else torch.float32, device=q.device)
    if lse is None:
        lse = torch.empty((*q.shape[:2], *(() if normalise else (2,))), dtype=torch.float32, device=q.device)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    _check_scale(scale)  # before the schema, which has no room for all ints
    outputs, numbers = (o, lse, workspace), (scale, normalise, 0 if splits is None else splits)
    Call.op(q, keys, index, *window_of(window, q), groups, sink, rope, *outputs, *numbers, backend)
    return o, lse


def _check_scale(scale: float) -> None:
    if not SCALES[0] <= scale <= SCALES[1]:
        raise ArgumentError("scale", scale, "a number from 2^-100 to 2^100")


_choose = functools.lru_cache(1 << 12)(split_choice.choose)  # every call asks; very long lists take milliseconds


def choose_splits(
    tokens: int,
    heads: int,
    most: int,
    window_most: int,
    sm_count: int = split_choice.SM_COUNT,
    groups: int | None = None,
    fp8: bool = False,
    head_dim: int = 512,
    splits: int | None = None,
    by_range: bool = False,
) -> Splits:
    """Choose splits of the keys and of the dimensions of O for a call of this shape.

    The second never changes a bit.

    Args:
        tokens, heads: T, H. most, window_most: entries and window keys of the longest list. sm_count: of the GPU.
        groups: of tokens that share tiles; None: a token is on its own. fp8: the entries are 584-byte ones.
        head_dim: D; only 512 dimensions are split, and not those of groups.
        splits: of the keys, where they are given. by_range: entries are consecutive rows, not an index list.
    """
    ctas = cluster_of(heads, head_dim, groups=groups is not None)
    head_blocks = -(-heads // (TILE_M * ctas))
    units = (tokens if groups is None else groups) * head_blocks
    tiles = count_tiles(most, window_most)
    kind = "fp8" if fp8 else "range" if by_range else "index"
    tile = split_choice.mean_tile(kind, ctas, tiles, tiles - -(-most // TILE_N))
    halves = head_dim == 512 and groups is None
    # A last split of another length only where a token is one unit: `work.KeySplits.last` counts tokens.
    one_unit = groups is None and head_blocks == 1
    key_bytes = (kv_entry.LAYOUT.entry_bytes if fp8 else 2 * head_dim) if one_unit else None
    return _choose(units, tiles, sm_count // ctas, ctas, tile, halves, splits, key_bytes)


def cluster_of(heads: int, head_dim: int = 512, groups: bool = False) -> int:
    """Count the CTAs that share tiles.

    2 above 64 heads and for ``groups``, where the kernel can.

    A pair reads a key once for its 128 rows and has 2.5 times the room for keys; data/bench/fmha_design.md.
    """
    return 2 if (heads > TILE_M or groups) and head_dim > 64 else 1


def workspace_size(tokens: int, heads: int, head_dim: int, splits: int) -> int:
    """Count the fp32 elements of the workspace of a call with ``splits``; 0 for one."""
    return splits * tokens * heads * (head_dim + 1) if splits > 1 else 0


def warm_up(
    wanted: Iterable[dict[str, Any]], heads: int = 64, head_dim: int = 512, dtype: str = "bf16"
) -> dict[str, float]:
    """Compile (or read from disk) and load what calls will need.

    Args:
        wanted: options of each kind of layer: entries "none", "index" or "range"; window, sink, inverse_rope,
            fp8_entries, fp8_window, groups: bool.
        heads: H.

    Returns:
        seconds by kernel.
    """
    needed, arch = [], launching.arch("auto", ARCHS)
    for options in wanted:
        if arch in hopper.ARCHS:
            needed += hopper.needed(options)
            continue
        settings = {"head_dim": head_dim, "dtype": dtype, "sink": True, "inverse_rope": False, **options}
        settings["cluster"] = cluster_of(heads, settings["head_dim"], bool(settings.get("groups")))
        ends = {name: settings[name] for name in ("head_dim", "dtype", "sink", "inverse_rope")}
        partial = {**settings, "sink": False, "inverse_rope": False, "partial": True}
        shared = (1, 2) if head_dim == 512 and not settings.get("groups") else (1,)
        kernels = [(Fmha, {**one, "dim_splits": n}) for one in (settings, partial) for n in shared]
        kernels += [(Combine, {**ends, "at_once": n}) for n in AT_ONCE]
        needed += [(*pair, arguments.fake_args) for pair in kernels]
    return compile_cache.default().warm_up(needed, arch)


# ------------------------------------------------------------------ arguments


@op(
    "fmha",
    mutates=("o", "lse", "workspace"),
    names={"index": "entries.index", "window_index": "window.index"},
    archs=ARCHS,
)
class Call(NamedTuple):
    """A call of `fmha`; splits 0: the op chooses."""

    q: Tensor
    entries: Keys | None
    index: Tensor | None
    window: Keys | None
    window_index: Tensor | None
    groups: Tensor | None
    sink: Tensor | None
    rope: tuple[Tensor, Tensor] | None
    o: Tensor
    lse: Tensor
    workspace: Tensor | None
    scale: float
    normalise: bool
    splits: int
    backend: str

    @property
    def sources(self) -> dict[str, Keys]:
        """Keys by what errors call them."""
        return {name: keys for name, keys in (("entries", self.entries), ("window", self.window)) if keys is not None}

    def check(self) -> None:
        """Check types, shapes and devices."""
        q, i32, fp32 = self.q, torch.int32, torch.float32
        if q.dim() != 3 or q.dtype not in DTYPES or q.shape[2] not in HEAD_DIMS:
            dims = ", ".join(map(str, HEAD_DIMS))
            raise ArgumentError("q", f"{q.dtype}{list(q.shape)}", f"[T, H, D] bf16 or fp16 with D one of {dims}")
        (t, h, d), out = q.shape, (q.dtype, ()) if self.normalise else (fp32, (2,))
        wanted = {}
        for name, keys in self.sources.items():
            pool = (torch.uint8, (None, None)) if keys.page else (q.dtype, (None, d))
            wanted |= {f"{name}.pool": (keys.pool, *pool), f"{name}.first": (keys.first, i32, (t,))}
            wanted[f"{name}.count"] = keys.count, i32, (t,)
        cos, sin = self.rope or (None, None)
        wanted |= {
            "entries.index": (self.index, i32, (t, None)),
            "window.index": (self.window_index, i32, (t, None)),
            "groups": (self.groups, i32, (None, 2)),
            "sink": (self.sink, fp32, (h,)),
            "rope": (cos, fp32, (t, ROPE_PAIRS)),
            "rope[1]": (sin, fp32, (t, ROPE_PAIRS)),
            "o": (self.o, out[0], (t, h, d)),
            "lse": (self.lse, fp32, (t, h, *out[1])),
            "workspace": (self.workspace, fp32, (None,)),
        }
        for name, (x, dtype, shape) in wanted.items():
            if x is None:
                continue
            if x.dtype != dtype or x.dim() != len(shape):
                raise ArgumentError(name, f"{x.dtype}{list(x.shape)}", f"{dtype}{list(shape)}".replace("None", "any"))
            if any(want is not None and have != want for have, want in zip(x.shape, shape, strict=True)):
                raise ArgumentError(f"{name}.shape", tuple(x.shape), str(shape).replace("None", "any"))
            if x.device != q.device:
                raise ArgumentError(f"{name}.device", str(x.device), f"that of q, {q.device}")
        self._check_options()
        self._check_strides(wanted)

    def _check_strides(self, wanted: dict[str, tuple]) -> None:
        """Check what the kernels need of the strides, and of the sizes of FP8 pages."""
        for name, (x, *_) in {"q": (self.q,), **wanted}.items():
            if x is None or x.numel() == 0:
                continue
            if x.shape[-1] > 1 and x.stride(-1) != 1:
                raise ArgumentError(f"{name}.stride()", x.stride(), "stride 1 in the last dimension")
            if any(step == 0 and extent > 1 for step, extent in zip(x.stride(), x.shape, strict=True)):
                raise ArgumentError(f"{name}.stride()", x.stride(), "no stride 0: an expanded tensor must be copied")
        for name, (x, *_, page, _) in self.sources.items():
            if page == 0:
                continue
            needed = page * kv_entry.LAYOUT.entry_bytes
            if x.shape[1] < needed or len(x) * page >= 1 << 31 or not 0 <= x.stride(0) < 1 << 32:
                allowed = f"{needed} bytes or more for {page} entries, less than 2^32 apart, fewer than 2^31 entries"
                raise ArgumentError(f"{name}.pool.pages", (tuple(x.shape), x.stride()), allowed)

    def check_memory(self) -> None:
        """Check that rows that are copied 16 bytes at a time start on 16 bytes.

        Raises:
            ArgumentError: they do not.
        """
        rows = {"q": self.q, **{f"{name}.pool": keys.pool for name, keys in self.sources.items()}, "o": self.o}
        for name, x in {**rows, "workspace": self.workspace}.items():
            if x is None or x.numel() == 0:
                continue
            steps = (s for s, extent in zip(x.stride()[:-1], x.shape, strict=False) if extent > 1)
            if x.data_ptr() % 16 or any(step * x.element_size() % 16 for step in steps):
                raise ArgumentError(f"{name}.stride()", x.stride(), "rows that start on 16 bytes")

    def _check_options(self) -> None:
        t, h, d = self.q.shape
        if not 0 <= self.splits <= MAX_SPLITS:
            raise ArgumentError("splits", self.splits, f"1 to {MAX_SPLITS}, or 0: the op chooses")
        _check_scale(self.scale)
        if not self.normalise:
            for name, value in (("sink", self.sink), ("rope", self.rope)):
                if value is not None:
                    raise ArgumentError(name, "given", "None unless normalised: it belongs to the union of splits")
            if self.splits > 1:
                raise ArgumentError("splits", self.splits, "1 unless normalised: they would have to be combined")
        if self.groups is not None:
            if self.index is not None or self.window_index is not None:
                raise ArgumentError("groups", "given", "None with Selected: tokens of a group read the same keys")
            if h > TILE_M * self.cluster or (t > 0 and len(self.groups) == 0):
                allowed = f"None above {TILE_M * self.cluster} heads, else at least one group"
                raise ArgumentError("groups.shape", tuple(self.groups.shape), allowed)
        if self.workspace is not None and self.workspace.numel() < workspace_size(t, h, d, self.splits):
            needed = workspace_size(t, h, d, self.splits)
            allowed = f"at least [{needed}] for {self.splits} splits"
            raise ArgumentError("workspace.shape", tuple(self.workspace.shape), allowed)

    def check_values(self) -> None:
        """Check row numbers, counts and groups."""
        for kind, keys in self.sources.items():
            size, (_, start, length, _, limit) = keys.rows, keys
            if bool((length > limit).any()):
                raise ArgumentError(f"{kind}.count", length[length > limit].tolist(), f"{limit} or fewer")
            if start is not None and bool(((start < 0) | (start.long() + length > size))[length > 0].any()):
                raise ArgumentError(f"{kind}.first", start.tolist(), f"rows that are among the pool's {size}")
        for name, index, least in (("entries", self.index, None), ("window", self.window_index, 0)):
            if index is None:
                continue
            keys = self.sources[name]
            seen = index[torch.arange(index.shape[1]) < keys.count[:, None]]
            wrong = seen[(seen >= keys.rows) | (seen < (-1 << 31 if least is None else least))]
            if len(wrong):
                allowed = f"a row of the pool, below {keys.rows}" + ", or negative" * (least is None)
                raise ArgumentError(f"{name}.index", wrong.tolist()[:8], allowed)
        if self.groups is not None:
            first, tokens = self.groups[self.groups[:, 1] > 0].long().unbind(1)  # the others are padding
            room = TILE_M * self.cluster // self.q.shape[1]
            whole = torch.equal(first, tokens.cumsum(0) - tokens) and int(tokens.sum()) == len(self.q)
            if not whole or bool((tokens > room).any()):
                allowed = f"all {len(self.q)} tokens in order, 1 to {room} a group"
                raise ArgumentError("groups", self.groups.tolist(), allowed)

    @property
    def cluster(self) -> int:
        """CTAs that share tiles."""
        return cluster_of(self.q.shape[1], self.q.shape[2], self.groups is not None)

    def run(self, backend: str) -> None:
        """Launch the kernels, or ask the oracle."""
        self.check_memory()
        if self.q.numel() == 0:
            return
        call = self
        if call.entries is not None and 0 in (call.entries.most, call.entries.rows):
            call = call._replace(entries=None, index=None)
        if call.window is not None and 0 in (call.window.most, call.window.rows):
            call = call._replace(window=None, window_index=None)
        if not call.sources:
            self.o.zero_()
            self.lse.fill_(-float("inf"))
            if not self.normalise:
                self.lse[..., 1].zero_()
        else:
            _reference(call) if backend == "reference" else _launch(backend, call)


def _launch(name: str, call: Call) -> None:
    """Launch once, or the splits and their combination."""
    if launching.arch(name, ARCHS) in hopper.ARCHS:
        hopper.launch(name, call, _partial)
        return None
    q, o, lse, splits = call.q, call.o, call.lse, call.splits
    stream = launching.stream(name, q)
    source, window = call.entries, call.window
    kind = "none" if source is None else "range" if call.index is None else "index"
    ends = {"head_dim": q.shape[2], "dtype": DTYPES[q.dtype], "sink": call.sink is not None}
    ends["inverse_rope"] = call.rope is not None
    keys = {
        "entries": kind,
        "window": window is not None,
        "window_index": call.window_index is not None,
        "fp8_entries": source is not None and source.page > 0,
        "fp8_window": window is not None and window.page > 0,
        "cluster": call.cluster,
        "groups": call.groups is not None,
    }
    pools = {name: (one.pool, one.page) if one.page else one.pool for name, one in call.sources.items()}
    entries = None if source is None else KeyRows(pools["entries"], call.index, source.first, source.count)
    most = tuple(0 if one is None else one.most for one in (source, window))
    span = None if window is None else KeyRows(pools["window"], call.window_index, window.first, window.count)
    sms = launching.sm_count(q.device) if name == "native" else split_choice.SM_COUNT
    if not call.normalise:
        splits = 1
    groups = None if call.groups is None else call.groups.shape[0]
    given = *q.shape[:2], *most, sms, groups, keys["fp8_entries"]
    splits, keys["dim_splits"], tail = choose_splits(*given, q.shape[2], splits or None, kind == "range")

    def attend(settings: dict[str, Any], sink: Any, rope: Any, o: Tensor, lse: Tensor) -> None:
        kernel, code = _code(name, Fmha, {**ends, **keys, **settings})
        given = q, entries, span, sink, rope, o, lse, call.scale, splits
        rest = {"stream": stream, "groups": call.groups, "sms": sms, "tail": tail}
        launching.enqueue(name, code, arguments.launch_args(kernel, *given, **rest))

    if not call.normalise:
        return attend({"partial": True, "raw": True}, None, None, o[None], lse[None])
    if splits == 1:
        return attend({}, call.sink, call.rope, o, lse)
    partial = _partial(call, splits)
    attend({"sink": False, "inverse_rope": False, "partial": True}, None, None, *partial)
    kernel, code = _code(name, Combine, {**ends, "at_once": loads_at_once(splits, o.shape[0] * o.shape[1])})
    launching.enqueue(name, code, arguments.combine_args(kernel, *partial, call.sink, call.rope, o, lse, stream=stream))
    return None


def _partial(call: Call, splits: int) -> tuple[Tensor, Tensor]:
    """Lay o [splits, T, H, D] and lse [splits, T, H] out in the workspace."""
    (tokens, heads, depth), room = call.q.shape, splits * call.q.numel()
    needed, space = workspace_size(tokens, heads, depth, splits), call.workspace
    if space is None:
        space = plans.scratch(needed, dtype=torch.float32, like=call.q)
    if space.numel() < needed:
        raise ArgumentError("workspace.shape", tuple(space.shape), f"at least [{needed}] for {splits} splits")
    return space[:room].view(splits, tokens, heads, depth), space[room:needed].view(splits, tokens, heads)


def _code(name: str, kernel_type: type, settings: dict[str, Any]) -> tuple[Any, Any]:
    return compile_cache.default().get(kernel_type, settings, arguments.fake_args, launching.arch(name, ARCHS))


def _reference(call: Call) -> None:
    """Ask the oracle in fp64, over lists of the rows of both pools that a list names, one after the other."""
    pools, lists, rows = [], [], 0
    for name, (table, first, count, page, _) in call.sources.items():
        index = call.index if name == "entries" else call.window_index
        longest = max(int(count.max()), 0) if index is None else index.shape[1]
        place = torch.arange(longest, device=table.device)
        numbers = first[:, None] + place if index is None else index
        seen = (place < count[:, None]) & (numbers >= 0)
        named = numbers[seen].unique().long()
        table = kv_entry.gather(table, page, named)[0] if page else table[named]
        lists.append(torch.where(seen, torch.searchsorted(named, numbers.long()) + rows, -1))
        pools.append(torch.nan_to_num(table.double()))
        rows += len(table)
    pools.append(pools[0].new_zeros(1, call.q.shape[2]))  # where no list names a row, there is still one to index
    keys, index = torch.cat(pools)[None], torch.cat(lists, 1).long()[None]
    sink = None if call.sink is None else call.sink.double()
    (o,), (lse,) = backends.oracle("fmha").sparse(call.q.double()[None], keys, index, sink, call.scale)
    if call.rope is not None:
        cos, sin = (x.double()[:, None] for x in call.rope)
        tail = 2 * ROPE_PAIRS
        o = torch.cat((o[..., :-tail], backends.oracle("rope").rotate(o[..., -tail:], cos, -sin)), -1)
    call.o.copy_(o.masked_fill(lse[..., None] == -float("inf"), 0.0))  # padded rows may hold anything
    call.lse.copy_(lse if call.normalise else torch.stack((lse, lse.isfinite()), -1))  # m = lse: the sum is 1
