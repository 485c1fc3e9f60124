"""Predict attention on a B200: `dsv4 bench fmha`. How fast it would be, shape by shape, beside the physical floor.

What the kernel does is counted, every time, on its compiled code in the emulator (`counted`); how long that takes is
modelled (static_model.py) with the rates of data/bench/rates.csv. Floors: FLOPs over 2.25 PFLOP/s or bytes over 8 TB/s,
with 584 bytes a key in decode and the traffic of Q and O in prefill. Every prediction carries the range of the model's
error on Hopper launches of its regime (calibration.py).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common.splits import SHARES, Splits
from dsv4lib.ops.fmha.config import CHUNK_BYTES, TILE_N, count_tiles
from dsv4lib.ops.fmha.load import GROUPS
from dsv4lib.ops.fmha.op import choose_splits, cluster_of
from dsv4lib.predict import calibration, static_model, table
from dsv4lib.predict.rates import TABLE, Gpu, gpu
from dsv4lib.predict.static_model import Kernel, Time
from dsv4lib.predict.work import Work, count, count_lines

RESULTS = TABLE.with_name("fmha.csv")
PEAK, BANDWIDTH = 2.25e15, 8e12  # of the floors
DIM, WINDOW, CSA_RATE, HCA_RATE = 512, 128, 4, 128
KEY_BYTES, ENTRY_BYTES = 2 * DIM, 584  # of a key in the bf16 pool, and in the model's own format
MODELS = {"Flash": (64, 512), "Pro": (128, 1024)}  # heads, selected entries
KINDS = ("CSA", "HCA", "SWA")
CONTEXTS, BATCHES, PROMPTS = (4096, 32768, 131072, 1048576), (1, 8, 32, 128), (4096, 8192, 32768)
SAMPLES = 64  # token positions that stand for a prompt
BUILT = "as built"


@dataclass(frozen=True)
class Shape:
    """A call. ``batch`` requests with ``context`` tokens each (decode), or one prompt of ``context`` tokens (prefill).

    Raises:
        ArgumentError: an unknown model, kind or phase.
    """

    model: str
    kind: str
    phase: str
    batch: int
    context: int

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ArgumentError("model", self.model, ", ".join(MODELS))
        if self.kind not in KINDS:
            raise ArgumentError("kind", self.kind, ", ".join(KINDS))
        if self.phase not in ("decode", "prefill"):
            raise ArgumentError("phase", self.phase, "decode or prefill")

    @property
    def heads(self) -> int:
        """Return the heads, H."""
        return MODELS[self.model][0]

    @property
    def tokens(self) -> int:
        """Return query tokens."""
        return self.batch * (self.context if self.phase == "prefill" else 1)

    def keys(self, seen: int) -> tuple[int, int]:
        """Return (entries, window keys) of a token that sees ``seen`` tokens, with itself."""
        entries = {"CSA": min(MODELS[self.model][1], seen // CSA_RATE), "HCA": seen // HCA_RATE, "SWA": 0}[self.kind]
        return entries, min(WINDOW, seen)

    def positions(self) -> list[int]:
        """Return the tokens seen, of the queries.

        In decode one number stands for all, of a prompt there is a sample.
        """
        if self.phase == "decode":
            return [self.context]
        return [(2 * i + 1) * self.context // (2 * SAMPLES) for i in range(SAMPLES)]

    @property
    def flops(self) -> float:
        """Count the FLOPs of both products, over all heads and keys."""
        per_token = [sum(self.keys(seen)) for seen in self.positions()]
        return 4.0 * DIM * self.heads * self.tokens * sum(per_token) / len(per_token)

    @property
    def nbytes(self) -> float:
        """Count the bytes that must cross HBM. Q and O, and in decode every request's keys in the model's format."""
        nbytes = self.tokens * self.heads * 2 * KEY_BYTES
        if self.phase == "decode":
            nbytes += self.batch * sum(self.keys(self.context)) * ENTRY_BYTES
        return nbytes

    @property
    def intensity(self) -> float:
        """Return FLOPs a byte."""
        return self.flops / self.nbytes

    @property
    def floor_us(self) -> float:
        """Return the physical floor (performance.md section 2)."""
        return 1e6 * max(self.flops / PEAK, self.nbytes / BANDWIDTH)

    @property
    def target_us(self) -> tuple[float, str]:
        """Return (largest modelled time that meets the target, the target in words)."""
        if self.phase == "prefill":
            return self.floor_us / 0.7, ">= 70 % of the floor"
        if self.batch == 128 or (self.kind == "HCA" and self.context == 1048576):
            return self.floor_us / 0.6, ">= 60 % of the floor"
        return 1.5 * (self.floor_us + 3), "<= 1.5 x (floor + 3 us)"


@dataclass(frozen=True)
class Counted:
    """What a configuration of the kernel does.

    Attributes:
        tile, once: work of a CTA per KV tile, and besides; qk, pv: the MMAs of a tile; bring: work of warps that bring
            keys, where TMA does not; send: of the load warps, in a tile and in a transition (copies:
            of the busiest); transition: work between two tokens, None: a CTA has one; stages: KV tiles in shared
            memory; parts: that a tile is loaded and freed in, a stage each; q_stages: that Q takes; rows: heads of a
            CTA; cluster: CTAs of a cluster; tokens: that share tiles; key_bytes: of an entry in the pool; blocks,
            q_ahead, stored: see `static_model.attention`; window: what the same kernel does with tiles of the window,
            None: as with those of entries.
    """

    tile: Work
    once: Work
    qk: Work
    pv: Work
    stages: int
    bring: Work = Work()
    send: tuple[Work, Work] = (Work(), Work())
    transition: Work | None = None
    parts: int = 1
    q_stages: int = 1
    rows: int = 64
    cluster: int = 1
    tokens: int = 1
    key_bytes: int = KEY_BYTES
    blocks: int = 1
    q_ahead: bool = False
    stored: tuple[Work, Work] | None = None
    window: Counted | None = None

    def mixed(self, share: float) -> Counted:
        """Return the same with the mean of its tiles. ``share`` of them are of the window."""
        w = self.window
        if w is None or share == 0:
            return self
        names = "tile", "qk", "pv", "bring"
        mean = {name: getattr(self, name) * (1 - share) + getattr(w, name) * share for name in names}
        return replace(self, **mean, send=(self.send[0] * (1 - share) + w.send[0] * share, self.send[1]))


def counted(short: int = 256, long: int = 768, of_window: bool = False, **options: Any) -> Counted:
    """Count a configuration of `ops.fmha.sm100.Fmha` in the emulator.

    Args:
        short, long: keys of the two launches that are subtracted, whole tiles; options: of the kernel. With groups: of
            as many tokens of 64 heads as fit.
        of_window: these keys are the window's, not entries.
    """
    from dsv4lib.dsl.compile import compile_for
    from dsv4lib.ops.fmha import arguments
    from dsv4lib.ops.fmha.sm100 import Fmha

    kernel = Fmha(**{"entries": "index", "window": of_window, "sink": True, "inverse_rope": True, **options})
    code = compile_for(kernel, arguments.fake_args(kernel), "sm_100a")
    works, roles, stored, sent = [], [], [], []
    for keys in (short, long):
        trace = _traced(kernel, code, keys, long, of_window=of_window)
        works.append(count(trace))
        stored.append(_stored(trace, kernel))
        sent.append(count_lines(trace, _of_load_warps))
        scores = trace.mmas["column"] >= kernel.q_column  # O lies in the columns below
        roles.append([count(trace, scores), count(trace, ~scores)])
    tiles = (long - short) / TILE_N
    tile = (works[1] - works[0]) * (1 / tiles)
    qk, pv = ((roles[1][i] - roles[0][i]) * (1 / tiles) for i in range(2))
    two = _traced(kernel, code, short, long, 2, of_window)
    transition = count(two) - works[0] - tile * (short / TILE_N)
    once = works[0] - tile * (short / TILE_N)
    sending = (sent[1] - sent[0]) * (1 / tiles)
    send = sending, count_lines(two, _of_load_warps) - sent[0] - sending * (short / TILE_N)
    waits = kernel.tile_stages, kernel.q_stages  # for stages: lines of the library, which all roles share
    send = tuple(replace(s, syncs=s.syncs + kernel.load_warps * n) for s, n in zip(send, waits, strict=True))
    stages = kernel.kv_stages // kernel.tile_stages
    ring = {"parts": kernel.tile_stages, "q_stages": kernel.q_stages, "q_ahead": kernel.q_ahead}
    ring |= {"blocks": kernel.o_blocks, "send": send}
    if kernel.epilogue_warps:
        scale = short / (long - short)  # the softmax warps share lines with them, in every tile
        each = zip(_stored(two, kernel), *stored, strict=True)
        ring["stored"] = tuple(both - one - (more - one) * scale for both, one, more in each)
    # of the warps that send copies: gathers of groups of rows, or the boxes of a stage
    gathers, boxes = (-(-n // kernel.load_warps) / n for n in (GROUPS, kernel.stage_bytes // CHUNK_BYTES))
    of_q, of_tile = (gathers if kernel.groups else boxes), (boxes if of_window or kernel.box_entries else gathers)
    tile, once, transition = (
        replace(work, copies=work.copies * busiest)
        for work, busiest in ((tile, of_tile), (once, of_q), (transition, of_q))
    )
    return Counted(
        tile, once, qk, pv, stages, transition=transition, cluster=kernel.cluster, tokens=_shared(kernel), **ring
    )


def _stored(trace: Any, kernel: Any) -> tuple[Work, Work]:
    """(until a block of O is handed back, after that): what the lines of the epilogue do."""
    from dsv4lib.ops.fmha import epilogue

    def lines(function: Any) -> range:
        source, first = inspect.getsourcelines(function)
        return range(first, first + len(source))

    stores, own = lines(epilogue.Epilogue.store_lines), (lines(epilogue.Epilogue), lines(epilogue.multiply))

    def deferred(source: str) -> bool:
        file, _, line = source.rpartition(":")
        return kernel.lines_at_once > 1 and file.endswith("fmha/epilogue.py") and int(line) in stores

    def before(source: str) -> bool:
        file, _, line = source.rpartition(":")
        if file.endswith("fmha/epilogue.py"):
            return not deferred(source) and any(int(line) in part for part in own)
        return file.endswith(("common/rope.py", "common/tmem.py"))

    return count_lines(trace, before), count_lines(trace, deferred)


def _of_load_warps(source: str) -> bool:
    """Whether a Python line is the load warps'."""
    return source.rpartition(":")[0].endswith(("fmha/load.py", "common/gather.py"))


def fp8(c: Counted, **options: Any) -> Counted:
    """The same kernel on 584-byte entries, counted. What it does more than ``c`` is the dequantising warps' work."""
    quantised = counted(**options, fp8_entries=True)
    bring = (quantised.tile - quantised.send[0]) - (c.tile - c.send[0])
    return replace(quantised, bring=bring, key_bytes=ENTRY_BYTES)


def _shared(kernel: Any) -> int:
    """Tokens of 64 heads that share the tiles of a kernel."""
    return kernel.cluster if kernel.groups else 1


def _traced(kernel: Any, code: Any, keys: int, of: int, items: int = 1, of_window: bool = False) -> Any:
    """The trace of one CTA (or pair): ``items``, each over the first ``keys`` of ``of`` entries, all of them there, or
    of as many window keys without entries.

    First ones of the same list: how often O is rescaled depends on the numbers, which must not differ.
    """
    from dsv4lib.emulator.driver.device import make
    from dsv4lib.emulator.driver.host import launch
    from dsv4lib.ops.fmha import arguments, inputs

    shared = _shared(kernel)
    tokens = items * shared
    numbers = ([0], [of]) if of_window else ([of], [1])
    case = inputs.case(64 * kernel.cluster // shared, *numbers)
    by_token = "q", "index", "first", "count", "window_first", "window_count", "cos", "sin"
    case = replace(case, **{name: getattr(case, name).repeat_interleave(tokens, 0) for name in by_token})
    (case.window_count if of_window else case.count).fill_(keys)
    o, lse = case.outputs(1 if kernel.partial else None)
    if kernel.fp8_entries:
        case = inputs.paged(case, 64)
    pool = case.pool_pages if kernel.fp8_entries else case.pool
    entries = pool, case.index.clamp_min(0), None, case.count
    if kernel.entries == "range":
        entries = pool, None, case.first.clamp_max(0), case.count
    groups = replace(case, chunks=(shared,) * items).groups(kernel.cluster) if kernel.groups else None
    rope = (case.cos, case.sin) if kernel.inverse_rope else None
    sink = case.sink if kernel.sink else None
    device = make("sm_100a", checks="off", trace=True)
    window = (case.span, None, case.window_first, case.window_count) if kernel.window else None
    given = case.q, entries, window, sink, rope, o, lse, case.scale
    launch(code, *arguments.launch_args(kernel, *given, sms=kernel.cluster, groups=groups), gpu=device)
    return device.trace


def model_of(c: Counted, card: Gpu, active: int) -> Kernel:
    """Return the kernel for the static model when ``active`` SMs work."""
    roles = c.tile, c.once, c.qk, c.pv
    options = {"cluster": c.cluster, "active": active, "transition": c.transition, "parts": c.parts}
    options |= {"bring": c.bring, "send": c.send}
    options |= {"q_stages": c.q_stages, "blocks": c.blocks, "q_ahead": c.q_ahead, "stored": c.stored}
    return static_model.attention("fmha", *roles, c.stages, card, **options)


@dataclass(frozen=True)
class Row:
    """One line of the table: a shape, its modelled time, and what stands beside it.

    ``splits``, ``dims``: of the keys and of the dimensions of O; ``share``: of the keys in the last split, 0: all
    are equal. ``modelled_us`` of decode is from the end of the kernel before (a dependent launch); ``alone_us`` is the
    same launch with nothing before it. Prefill is modelled alone.
    """

    model: str
    kind: str
    phase: str
    batch: int
    context: int
    pool: str
    keys: int
    variant: str
    splits: int
    dims: int
    share: float
    ctas: int
    modelled_us: float
    alone_us: float
    error_low: float
    error_high: float
    bound: str
    resource: str
    floor_us: float
    fraction: float
    target: str
    met: str
    tflops: float
    best_splits: int
    best_dims: int
    best_us: float
    published: str


# Published numbers of SM100 kernels (performance.md section 1 a): their authors', for the shapes they state.
_FLASHMLA_PREFILL, _FLASHMLA_DECODE = 1450e12, 350e12
_CAKE = {"SWA": 6.9, "CSA": 12.4, "HCA": 13.6}  # us, FlashInfer PR 4573, 64 heads, 5 queries, bf16; batch not stated


def published(shape: Shape) -> str:
    """Return what others have published next to a shape, "" where nothing is near."""
    if shape.phase == "prefill" and shape.model == "Pro" and shape.kind == "CSA":
        return f"{1e6 * shape.flops / _FLASHMLA_PREFILL:.0f} us at FlashMLA's 1450 TFLOP/s (576/512, top-k 2048)"
    if shape.phase == "decode" and shape.batch == 128 and shape.kind == "CSA":
        return f"{1e6 * shape.flops / _FLASHMLA_DECODE:.0f} us at FlashMLA's 350 TFLOP/s (fp8 entries)"
    if shape.phase == "decode" and shape.model == "Flash" and shape.batch == 8:
        return f"FlashInfer {_CAKE[shape.kind]} us (5 queries, batch not stated)"
    return ""


def predict(
    shape: Shape,
    single: Counted,
    parts: Counted,
    card: Gpu,
    errors: dict[str, tuple[float, float]],
    variant: str = BUILT,
    half: tuple[Counted, Counted] | None = None,
) -> Row:
    """Predict the row of a shape. It has the splits that the op chooses, or the best number of splits.

    Args:
        single, parts: the kernel that normalises, and the one that writes parts for `combine`.
        card, errors: the GPU; (smallest, largest) error of the calibration, by regime.
        variant: name of the configuration.
        half: both with half of the dimensions; None: there are none.
    """
    items = -(-shape.tokens // single.tokens)
    groups = _ctas(shape, single, items)
    most = max(count_tiles(*shape.keys(seen)) for seen in shape.positions())
    sms, kernels = int(card["sms"]), {1: (single, parts)} | ({} if half is None else {2: half})
    choices = [Splits(1, 1)]
    if shape.phase == "decode":
        choices = [Splits(s, dims) for dims in kernels for s in _split_choices(most, groups * dims, sms)]

    def time(one: Splits, alone: bool = False) -> Time:
        return timed(shape, *kernels[one.dims], card, groups * one.dims, one.keys, alone, one.tail)

    times = {one: time(one) for one in choices}
    chosen = None
    if variant == BUILT:
        most = shape.keys(max(shape.positions()))
        given = shape.tokens, shape.heads, *most, sms
        chosen = choose_splits(*given, fp8=single.key_bytes != KEY_BYTES, by_range=shape.kind != "CSA")
        if half is None:
            chosen = chosen._replace(dims=1)
        times[chosen] = time(chosen)
    best = min(times, key=lambda one: times[one].us)
    chosen = chosen or best
    pool = "bf16" if single.key_bytes == KEY_BYTES else "fp8"
    whole = chosen.keys - (chosen.tail != (0, 0))
    ctas = groups * chosen.dims * whole + _ctas(shape, single, chosen.tail[0])
    return _row(shape, pool, variant, chosen, times[chosen], time(chosen, True), ctas, errors, (best, times[best].us))


def timed(
    shape: Shape,
    single: Counted,
    parts: Counted,
    card: Gpu,
    groups: int,
    splits: int,
    alone: bool = False,
    tail: tuple[int, int] = (0, 0),
) -> Time:
    """Predict the time of a shape with ``splits`` splits.

    Args:
        groups: tokens x CTAs of a token, of one part of the keys.
        alone: a launch with nothing before it; else decode stands in a chain of kernels and is launched dependent on
            the one before, and only prefill is alone.
        tail: how the last part of the keys differs, as `choose_splits` says it; of decode.
    """
    c = single if splits == 1 else parts
    sms = int(card["sms"])
    # the union of the windows of tokens that share tiles has a key more for each further token
    unions = [(entries, window + c.tokens - 1) for entries, window in map(shape.keys, shape.positions())]
    whole, beside, ctas = [count_tiles(*union) for union in unions], None, groups * splits
    lengths = [-(-tiles // splits) for tiles in whole]
    if tail != (0, 0):
        last = whole[0] * tail[1] // SHARES
        beside = last, -(-shape.tokens // tail[0])
        lengths, ctas = [-(-(whole[0] - last) // (splits - 1))], groups * (splits - 1) + _ctas(shape, c, tail[0])
    hbm = shape.tokens * shape.heads * 2 * KEY_BYTES + _pool_bytes(shape, c.key_bytes)
    combine = 0.0
    if splits > 1:
        combine = card.microseconds(static_model.combine_clocks(card, *combine_work(splits, shape.tokens, shape.heads)))
    tiles = lengths[0] if len(lengths) == 1 else lengths
    dependent = shape.phase == "decode" and not alone

    def of_part(share: float) -> Time:
        model = model_of(c.mixed(share), card, min(ctas, sms))
        return static_model.modelled(model, card, ctas, tiles, hbm, combine, dependent=dependent, beside=beside)

    # Tiles of the window: all stand at the end of the keys, so splits have different shares of them.
    ends = [n - -(-entries // TILE_N) for n, (entries, _) in zip(whole, unions, strict=True)]
    shares = {sum(ends) / sum(whole)}
    if splits > 1:
        last = lengths[0] if tail == (0, 0) else whole[0] - lengths[0] * (splits - 1)
        shares = {max(0, lengths[0] - (whole[0] - ends[0])) / lengths[0], min(1, ends[0] / max(1, last))}
    return max(map(of_part, shares), key=lambda time: time.us)


def _ctas(shape: Shape, c: Counted, items: int) -> int:
    """CTAs of so many tokens (or groups)."""
    return items * -(-shape.heads * c.tokens // (c.rows * c.cluster)) * c.cluster


def combine_work(splits: int, tokens: int, heads: int) -> tuple[int, int]:
    """Count (splits, bytes) of `ops.fmha.combine`."""
    return splits, tokens * heads * DIM * (4 * splits + 2)


def _row(
    shape: Shape,
    pool: str,
    variant: str,
    chosen: Splits,
    time: Time,
    alone: Time,
    ctas: int,
    errors: dict[str, tuple[float, float]],
    best: tuple[Splits, float],
) -> Row:
    regime = "memory" if time.bound == "HBM" else "attention" if time.tiles > time.exposed else "short attention"
    limit, words = shape.target_us
    return Row(
        **asdict(shape),
        pool=pool,
        keys=sum(shape.keys(shape.context)),
        variant=variant,
        splits=chosen.keys,
        dims=chosen.dims,
        share=chosen.tail[1] / SHARES,
        ctas=ctas,
        modelled_us=time.us,
        alone_us=alone.us,
        error_low=errors[regime][0],
        error_high=errors[regime][1],
        bound=time.bound,
        resource=time.resource,
        floor_us=shape.floor_us,
        fraction=shape.floor_us / time.us,
        target=words,
        met="yes" if time.us <= limit else "no",
        tflops=shape.flops / time.us / 1e6,
        best_splits=best[0].keys,
        best_dims=best[0].dims,
        best_us=best[1],
        published=published(shape),
    )


def _pool_bytes(shape: Shape, key_bytes: int) -> float:
    """Bytes of keys that cross HBM once: every request's own in decode, the prompt's entries and span in prefill."""
    entries, window = shape.keys(shape.context)
    if shape.phase == "decode":
        return shape.batch * (entries * key_bytes + window * KEY_BYTES)
    rate = {"CSA": CSA_RATE, "HCA": HCA_RATE, "SWA": 0}[shape.kind]
    return shape.batch * (shape.context // rate if rate else 0) * key_bytes + shape.tokens * key_bytes


def _split_choices(tiles: int, groups: int, sms: int) -> Iterable[int]:
    """Numbers of splits worth trying: each that shortens the longest split, up to about one wave."""
    shares = {-(-tiles // s): s for s in range(min(tiles, max(1, 2 * sms // groups)), 0, -1)}
    return sorted(shares.values())


def shapes() -> list[Shape]:
    """List every line of the table."""
    out = []
    for model in MODELS:
        for kind in KINDS:
            for context in CONTEXTS if kind != "SWA" else CONTEXTS[:1]:
                out += [Shape(model, kind, "decode", batch, context) for batch in BATCHES]
            out += [Shape(model, kind, "prefill", 1, prompt) for prompt in PROMPTS]
    return out


def run(card: Gpu | None = None) -> list[Row]:
    """Count the kernel and predict every shape."""
    card = card or gpu("B200")
    checked = calibration.check()
    errors = {regime: calibration.error(regime, checked) for regime in calibration.REGIMES}
    ends = {"sink": False, "inverse_rope": False, "partial": True}
    clusters = {model: cluster_of(heads) for model, (heads, _) in MODELS.items()}
    # (normalising, of parts) by (CTAs of a cluster, parts of the dimensions): entries by index, by range, in pages
    index, ranges, pages = {}, {}, {}
    for key in itertools.product(set(clusters.values()), (1, 2)):
        options = dict(zip(("cluster", "dim_splits"), key, strict=True))
        variants = options, {**options, **ends}
        by_index = [counted(**one) for one in variants]
        ranges[key] = tuple(counted(**one, entries="range") for one in variants)
        index[key] = tuple(replace(c, window=r) for c, r in zip(by_index, ranges[key], strict=True))
        window = fp8(ranges[key][0], of_window=True, **options)
        pages[key] = tuple(replace(fp8(c, **one), window=window) for c, one in zip(by_index, variants, strict=True))
    shared = counted(cluster=2, entries="range", groups=True)  # two tokens of 64 heads

    def line(shape: Shape, fp8_entries: bool) -> Row:
        if shape.phase == "prefill" and shape.kind != "CSA" and shape.heads <= 64:
            return predict(shape, shared, shared, card, errors)
        kernels = pages if fp8_entries else index if shape.kind == "CSA" else ranges
        whole, half = (kernels[clusters[shape.model], n] for n in (1, 2))
        return predict(shape, *whole, card, errors, half=half if shape.phase == "decode" else None)

    rows = [line(shape, False) for shape in shapes()]
    return rows + [line(shape, True) for shape in shapes() if shape.phase == "decode" and shape.kind != "SWA"]


def points(rows: list[Row]) -> dict[str, dict[str, list[tuple[float, float, str]]]]:
    """Return points for a roofline.

    model -> series -> (FLOP a byte of HBM by the floor's count, modelled TFLOP/s, label).

    Series: decode by batch, prefill; other variants by name. Labels only where they stay apart.
    """
    out: dict[str, dict[str, list[tuple[float, float, str]]]] = {model: {} for model in MODELS}
    for row in rows:
        shape = Shape(row.model, row.kind, row.phase, row.batch, row.context)
        if row.pool != "bf16":
            continue
        name = f"decode B{row.batch}" if row.phase == "decode" else "prefill"
        long = f" {row.context >> 10}K" if row.kind == "HCA" or row.phase == "prefill" else ""
        apart = row.variant == BUILT and row.context in (4096, 1048576)
        apart = apart and (row.kind == "CSA" if row.phase == "prefill" else row.batch == 128)
        series = out[row.model].setdefault(name if row.variant == BUILT else row.variant, [])
        point = (shape.intensity, row.tflops, f"{row.kind}{long}" if apart else "")
        if point not in series:
            series.append(point)
    return out


def record(rows: list[Row], path: Path = RESULTS) -> None:
    """Write the table."""
    table.record(rows, path)


def recorded(path: Path = RESULTS) -> list[Row]:
    """Read the table as it was written."""
    return table.recorded(Row, path)
