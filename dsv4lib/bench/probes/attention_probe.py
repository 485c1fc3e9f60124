"""Time attention on a Hopper by kernel, producer warps and splits of the keys. Rows are steps of Flash's layers.

    decode     `DecodeFmha`, split and combined where splits are more than 1
    prefill    `PrefillFmha`, a CTA a token, unsplit

Of every variant the first 8 tokens of a row are compared with fp64 before it is timed. cold: from the first kernel's
start to the last one's end, L2 flushed; warm: a node of a CUDA graph. Forms are named by kernel, warps and early.

    python -m dsv4lib.bench.probes.attention_probe --record attention_times.csv        (on the GPU)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsv4lib.bench.ops.case import Given
from dsv4lib.bench.ops.timing import Call, GpuClock
from dsv4lib.bench.probes import common as probes
from dsv4lib.config import FLASH, LayerKind
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import kv_entry
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.fmha import arguments as both
from dsv4lib.ops.fmha import bench
from dsv4lib.ops.fmha.combine import Combine, loads_at_once
from dsv4lib.ops.fmha.sm90 import arguments
from dsv4lib.ops.fmha.sm90.kernel import DecodeFmha
from dsv4lib.ops.fmha.sm90.launch import parts
from dsv4lib.ops.fmha.sm90.prefill.kernel import PrefillFmha
from dsv4lib.ops.fmha.work import KeyRows
from dsv4lib.predict import table

ARCH = "sm_90a"
SMS = 132
CHUNK = 4096  # tokens of a prefill
SPLITS = {  # that are timed, by layer and tokens
    (LayerKind.CSA, 128): (1,),
    (LayerKind.CSA, 32): (1, 2, 3, 4),
    (LayerKind.CSA, 8): (3, 5, 10),
    (LayerKind.CSA, 1): (5, 10),
    (LayerKind.HCA, 128): (1,),
    (LayerKind.HCA, 32): (1, 2, 3),
    (LayerKind.HCA, 8): (2, 3, 6),
    (LayerKind.HCA, 1): (3, 6),
    (LayerKind.SWA, 128): (1,),
    (LayerKind.SWA, 32): (1, 2),
    (LayerKind.SWA, 8): (1, 2),
    (LayerKind.SWA, 1): (1, 2),
    (LayerKind.CSA, CHUNK): (1,),
}
# Producer warps; loads early.
FORMS: dict[type, tuple[tuple[int, int], ...]] = {DecodeFmha: ((4, 0), (8, 0), (8, 1)), PrefillFmha: ((4, 0), (8, 1))}
COMPARED = 8  # tokens of a row


@dataclass(frozen=True)
class AttentionTimes:
    """Times of a variant, us."""

    layer: str
    tokens: int
    kernel: str
    warps: int
    early: int
    splits: int
    warm_us: float
    cold_us: float


def variants(layer: LayerKind, tokens: int) -> Iterator[tuple[type, int, int, int]]:
    """Yield (kernel, producer warps, early, splits) of what is timed."""
    for splits in SPLITS[layer, tokens]:
        if tokens < CHUNK:
            yield from ((DecodeFmha, *form, splits) for form in FORMS[DecodeFmha])
        if splits not in (10, 6):
            yield from ((PrefillFmha, *form, splits) for form in FORMS[PrefillFmha])


def compile_all(processes: int) -> None:
    """Compile every variant into the cache, so many at once."""
    wanted = []
    for (layer, tokens), _ in SPLITS.items():
        for kind, warps, early, splits in variants(layer, tokens):
            settings = {**settings_of(layer is not LayerKind.SWA, splits), "producer_warps": warps, **early_of(early)}
            one = kind, settings, arguments.fake_args, ARCH
            if one not in wanted:
                wanted.append(one)
    probes.get_all(wanted, processes)


def early_of(early: int) -> dict[str, bool]:
    """Return options of a kernel that asks so early."""
    return {"early": bool(early)}


def settings_of(entries: bool, splits: int) -> dict[str, Any]:
    """Return options of a kernel of so many splits, with or without entries."""
    whole = {
        "entries": "index" if entries else "none",
        "window": True,
        "window_index": True,
        "sink": True,
        "inverse_rope": False,
    }
    return whole if splits == 1 else parts(whole)[0]


def caller(given: Given, kind: type, warps: int, early: int, splits: int, o: torch.Tensor) -> Call:
    """Return a call of one variant."""
    tokens, heads, dim = given["q"].shape
    settings = settings_of(given["index"] is not None, splits)
    get = compile_cache.default().get
    options = {**settings, "producer_warps": warps, **early_of(early)}
    kernel, code = get(kind, options, arguments.fake_args, ARCH)
    pool = given["pages"], bench.PAGE
    entries = None if given["index"] is None else KeyRows(pool, given["index"], None, given["count"])
    keys = entries, KeyRows(pool, given["window"], None, given["window_count"])
    scale, lse = dim**-0.5, torch.empty(tokens, heads, device=o.device)
    if splits == 1:

        def whole() -> None:
            stream = launching.stream("native", o)
            args = arguments.launch_args(
                kernel, given["q"], *keys, given["sink"], None, o, lse, scale, 1, stream, ctas=min(tokens, SMS)
            )
            launching.enqueue("native", code, args)

        return whole
    partial = (
        torch.empty(splits, tokens, heads, dim, device=o.device),
        torch.empty(splits, tokens, heads, device=o.device),
    )
    at_once = loads_at_once(splits, tokens * heads)
    combine, combine_code = get(Combine, {**parts(settings)[1], "sink": True, "at_once": at_once}, both.fake_args, ARCH)

    def split() -> None:
        stream = launching.stream("native", o)
        args = arguments.launch_args(
            kernel, given["q"], *keys, None, None, *partial, scale, splits, stream, ctas=min(tokens, SMS)
        )
        launching.enqueue("native", code, args)
        launching.enqueue(
            "native", combine_code, both.combine_args(combine, *partial, given["sink"], None, o, lse, stream=stream)
        )

    return split


def given_of(layer: LayerKind, tokens: int) -> Given:
    """Make the tensors of a row."""
    shape, generator = bench.shape(FLASH, layer), torch.Generator("cuda").manual_seed(0)
    if tokens == CHUNK:
        return bench.prefill_of(shape, tokens, bench.CONTEXT // FLASH.rate(layer), generator)
    return bench.given_of(shape, tokens, generator)


def checked(given: Given, variant: tuple[type, int, int, int]) -> Call:
    """Return a call of a variant whose first tokens agree with fp64."""
    tokens = len(given["q"])
    o = torch.full((tokens, FLASH.n_heads, kv_entry.HEAD_DIM), float("nan"), device="cuda").bfloat16()
    call = caller(given, *variant, o)
    call()
    torch.cuda.synchronize()
    bench.check({**given, "q": given["q"][:COMPARED]}, {"o": o})
    return call


def name_of(variant: tuple[type, int, int, int]) -> str:
    """Return kernel, warps and early of a variant."""
    kind, warps, early, _ = variant
    return f"{'decode' if kind is DecodeFmha else 'prefill'}-{warps}-{early}"


def names() -> list[str]:
    """List all forms."""
    return [name_of((kind, *form, 1)) for kind, forms in FORMS.items() for form in forms]


def known(option: str, forms: str) -> list[str]:
    """Return the forms of a text with commas; all where it is empty.

    Raises:
        ArgumentError: there is no such form.
    """
    chosen = forms.split(",") if forms else names()
    for one in chosen:
        if one not in names():
            raise ArgumentError(option, one, "one of " + ", ".join(names()))
    return chosen


def check(form: str) -> None:
    """Check one form in all rows."""
    for layer, tokens in SPLITS:
        given = given_of(layer, tokens)
        for variant in variants(layer, tokens):
            if name_of(variant) == form:
                print("checking", layer, tokens, form, "splits", variant[-1], flush=True)
                checked(given, variant)
    print(form, "is right", flush=True)


def run(processes: int, forms: list[str]) -> list[AttentionTimes]:
    """Measure the variants of some forms on the GPU here, each checked before it is timed."""
    compile_all(processes)
    clock, rows = GpuClock(), []
    for layer, tokens in SPLITS:
        given = given_of(layer, tokens)
        wanted = [one for one in variants(layer, tokens) if name_of(one) in forms]
        calls = [checked(given, one) for one in wanted]
        warm, cold = clock.warm(calls), clock.cold(calls)
        for (kind, warps, early, splits), each_warm, each_cold in zip(wanted, warm, cold, strict=True):
            name = "decode" if kind is DecodeFmha else "prefill"
            rows.append(AttentionTimes(str(layer), tokens, name, warps, early, splits, each_warm, each_cold.median))
            print(probes.line(rows[-1]), flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line.

    Raises:
        ArgumentError: an unknown form, or no place for the table.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", help="a form to check, without times")
    parser.add_argument("--compile", type=int, default=0, help="compile all, in so many processes, and end")
    parser.add_argument("--forms", default="", help="to time, with commas; none: all")
    parser.add_argument("--record", type=Path, help="where the table goes")
    given = parser.parse_args(arguments)
    if given.compile:
        compile_all(given.compile)
    elif given.check is not None:
        if given.check not in names():
            raise ArgumentError("--check", given.check, "one of " + ", ".join(names()))
        check(given.check)
    else:
        forms = known("--forms", given.forms)
        if given.record is None:
            raise ArgumentError("--record", None, "a path: where the table goes")
        print(probes.heads(AttentionTimes))
        table.record(run(1, forms), given.record)


if __name__ == "__main__":
    main()
