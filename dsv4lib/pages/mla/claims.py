"""Recompute the points in which a public text on SGLang's CUTLASS MLA back end errs; each value comes from code."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.dsl.budget import SMEM_LIMIT, TMEM_COLUMNS
from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import implementations
from dsv4lib.errors import ArgumentError
from dsv4lib.layers.mla import MLAConfig, MLAPool
from dsv4lib.layers.mla.flags import ServerSettings, parse
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.mla_decode import inputs
from dsv4lib.ops.mla_decode.config import Config
from dsv4lib.ops.mla_decode.op import CACHE_DTYPES, ENTRY, LATENT, ROPE, mla_decode
from dsv4lib.ops.mla_decode.sm90 import arguments
from dsv4lib.ops.mla_decode.sm90.kernel import MlaDecode
from dsv4lib.ops.mla_decode.splits import (
    CLUSTER,
    MOST_SPLITS,
    PAGES,
    TILE,
    check_num_kv_splits,
    mla_workspace_size,
    num_kv_splits_by_sms,
)
from dsv4lib.ops.mla_page_table.op import mla_page_table
from dsv4lib.pages.mla import run_case
from dsv4lib.pages.mla.arithmetic import GPUS, HEADS, ROLES, roles_of, token_bytes, work
from dsv4lib.pages.mla.page_table import text_example
from dsv4lib.pages.mla.serving import serve
from dsv4lib.viz.table import show_table

B200 = GPUS["B200"]
TMEM_LANES, COLUMN_BYTES = 128, 4


class Value(NamedTuple):
    """What code finds. shown: the numbers. right: whether they say that the text errs."""

    shown: str
    right: bool


class Claim(NamedTuple):
    """A point. text: what the text says. truth: what is right. value: recomputes it."""

    text: str
    truth: str
    value: Callable[[], Value]


CLAIMS: list[Claim] = []


def claim(text: str, truth: str) -> Callable[[Callable[[], Value]], Callable[[], Value]]:
    """Add a point to `CLAIMS`, in order."""

    def add(value: Callable[[], Value]) -> Callable[[], Value]:
        CLAIMS.append(Claim(text, truth, value))
        return value

    return add


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the `ArgumentError` that a call raises; "" if it does not."""
    try:
        call()
    except ArgumentError as error:
        return str(error)
    return ""


@claim("SM100 is Hopper: H100", "Hopper is SM90; SM100 is Blackwell's B200")
def architecture() -> Value:
    """Compare compute capabilities."""
    hopper, blackwell = backends.CAPABILITY["sm_90a"], backends.CAPABILITY["sm_100a"]
    sms = f"{GPUS['H100'].sms} and {B200.sms} SMs"
    return Value(f"capability {hopper[0]}.{hopper[1]} and {blackwell[0]}.{blackwell[1]}, {sms}", hopper != blackwell)


@claim("576 bytes a token, 111 times less", "576 elements: 1,152 bytes; 71 times less than 128 heads")
def compression() -> Value:
    """Divide bytes of a token."""
    size, own = token_bytes(), MLAConfig().token_bytes
    whole, less = size["keys and values of 128 heads"], size["the same without RoPE's dims"]
    shown = f"{own:,} B; {whole:,} / {own:,} = {whole / own:.1f}; {less:,} / {own:,} = {less / own:.1f}"
    return Value(shown, own == 1152 and round(whole / own) == 71)


@claim("a rotated key a head; W_UK is in the kernel", "one for all heads; W_UK and W_UV are absorbed outside")
def absorbed() -> Value:
    """Compare attention of heads with attention to latents."""
    error = run_case.absorption(8, 50, 0).error
    dims = f"K {LATENT} + {ROPE} = {ENTRY}, V {LATENT}"
    return Value(f"{dims}; outputs differ by {error:.0e}", error < 1e-12)


@claim("sum of outputs over exp(max LSE)", "each output times exp(lse_i - ln sum exp lse)")
def reduction() -> Value:
    """Combine two halves by both formulas."""
    one = run_case.requests(70, 4, 16, 0)
    whole = run_case.attend(one, "reference")
    errors = [run_case.combined(one, whole, "reference", name) for name in ("none", "TextsReduction")]
    return Value(f"error {errors[0]:.4f}; by the text's {errors[1]:.2f}", errors[0] < 0.01 < 0.1 < errors[1])


@claim("a split has tokens / splits tokens", "whole tiles of 128: ceil(tiles / splits)")
def tiles() -> Value:
    """Split 300 tokens in two."""
    count = -(-300 // TILE)
    each = -(-count // 2) * TILE
    return Value(f"300 tokens, 2 splits: {each} + {300 - each}, not 150 + 150", (each, 300 - each) == (256, 44))


@claim("5 or 6 warps", "the role word has 6 or 8; a block has 256 threads either way")
def warps() -> Value:
    """Count roles of both words."""
    counts = [sum(role != 0 for role in roles_of(word)) for word in (0x00213333, 0x42213333)]
    return Value(f"{counts[0]} with TMA, {counts[1]} with cp.async; {8 * 32} threads", counts == [6, 8])


@claim("roles are read from the left: warp 0 first", "warp 0 is the lowest nibble")
def order() -> Value:
    """Decode the word."""
    names = [ROLES[role] for role in roles_of(0x00213333)]
    shown = f"warps 0-3 {names[0]}, 4 {names[4]}, 5 {names[5]}, 6-7 {names[6]}"
    return Value(shown, names == ["compute"] * 4 + ["MMA", "load", "none", "none"])


@claim("12 steps of Q, 128 heads in a CTA", "9 steps of 64 dims; two CTAs share 128 heads")
def query_steps() -> Value:
    """Divide dims and heads."""
    steps = LATENT // 64 + ROPE // 64
    return Value(f"{LATENT} / 64 + {ROPE} / 64 = {steps}; {HEADS // CLUSTER} heads a CTA", steps == 9)


@claim("TmemAllocator gives 2 x 128 KB shared memory", "Tensor Memory: 512 columns of 128 lanes; SMEM is 228 KB")
def tensor_memory() -> Value:
    """Multiply its extents, and add up what the kernel takes of it."""
    rows = {row.resource: row.used for row in Config(cluster=2).budget()}
    size, used = TMEM_COLUMNS * TMEM_LANES * COLUMN_BYTES, rows["TMEM: O"] + rows["TMEM: S"]
    shown = f"{size // 1024} KB TMEM an SM, {used} of {TMEM_COLUMNS} columns used; SMEM {SMEM_LIMIT // 1024} KB a CTA"
    return Value(shown, size == 256 * 1024 and used == 384)


@claim("__syncthreads and 16 x 16 WMMA", "mbarriers, named barriers; MMA of a warpgroup or of two CTAs")
def barriers() -> Value:
    """Count instructions of the compiled Hopper kernel."""
    ptx = hopper_ptx()
    counts = {name: ptx.count(name) for name in ("mbarrier.", "wgmma.mma_async", "wmma.")}
    shown = ", ".join(f"{count} {name.rstrip('.')}" for name, count in counts.items())
    return Value(
        f"our SM90 kernel: {shown}", counts["wmma."] == 0 < min(counts["mbarrier."], counts["wgmma.mma_async"])
    )


@claim("padded heads cost nothing, 128 KB", "their rows are computed; 64 of them are 72 KB of Q a request")
def padding() -> Value:
    """Count rows and bytes of 64 heads."""
    size = 64 * ENTRY * 2
    return Value(f"{HEADS} / 64 = {HEADS // 64} times the MMA work; {size:,} B", size == 73728)


@claim("FP8 is supported and future; small pages are not, and are packed", "both exist in C++; Python refused FP8")
def types() -> Value:
    """List what this op takes."""
    pages = ", ".join(map(str, PAGES))
    pairs = sum(len(kinds) for kinds in CACHE_DTYPES.values())
    return Value(f"here {pairs} pairs of types, pages of {pages}", torch.float8_e4m3fn in CACHE_DTYPES and 16 in PAGES)


@claim("more than one split hangs; set more than one", "reported for B 8 with 8 splits; more than one is what hung")
def hang() -> Value:
    """Take the reported shape: here an item is a CTA or a pair, and waits for no other item."""
    items, size = 8 * 8, mla_workspace_size(8192, 8, 148, 8)
    refused = error_of(lambda: check_num_kv_splits(MOST_SPLITS + 1))
    return Value(f"B 8, 8 splits: {items} items in one grid, {size:,} B; above {MOST_SPLITS} refused", bool(refused))


@claim("automatic splits by default; 5 to 10 MB", "the back end passes 1: no splits, no workspace")
def default_splits() -> Value:
    """Ask the workspace's size."""
    off, on = (mla_workspace_size(8192, 4, 132, n) for n in (1, 4))
    return Value(f"1 split: {off} B; 4 splits of 4 requests: {on:,} B", (off, on) == (0, 4 * 4 * 128 * 513 * 4))


@claim("grid.x is 1, so 1 x 8 x 4 = 32 blocks", "grid.x is 2, a cluster of two CTAs an item")
def grid() -> Value:
    """Multiply."""
    return Value(f"{CLUSTER} x 8 x 4 = {CLUSTER * 8 * 4} CTAs", CLUSTER * 8 * 4 == 64)


@claim("8,000 tokens get 8 splits", "it depends on the batch")
def splits_of_8000() -> Value:
    """Ask CUTLASS's heuristic at 132 SMs."""
    found = {batch: num_kv_splits_by_sms(8000, batch, 132) for batch in (1, 4, 8, 16)}
    shown = ", ".join(f"B {batch}: {splits}" for batch, splits in found.items())
    return Value(shown, list(found.values()) == [63, 32, 16, 8])


@claim("slots 14 to 313 are in pages 0, 1, 2", "token 0 would be read from slot 0: pages must be filled in order")
def alignment() -> Value:
    """Check the example."""
    misaligned = torch.zeros(1, 2).int()
    mla_page_table(*text_example(), 128, misaligned=misaligned, backend="reference")
    count = int(misaligned[0, 0])
    return Value(f"{count} of 300 tokens are elsewhere", count == 300)


@claim("chunks of 4 KB", "4,096 tokens")
def chunks() -> Value:
    """Convert."""
    return Value(f"{4096 // 128} pages of 128 tokens, {4096 * 4 // 1024} KB of the map", 4096 // 128 == 32)


@claim("the index kernel is inside the graph, and outside", "it refreshes the buffers before a replay")
def refreshed() -> Value:
    """Replay with and without a refresh."""
    found = [serve("reference", 2, 16, 0, name).differences for name in ("none", "StaleTable")]
    return Value(f"{found[0]} elements differ with it, {found[1]:,} without", found[0] == 0 < found[1])


@claim("buffers are filled with 1 to avoid a division by zero", "nothing divides by it; any page that exists will do")
def fill() -> Value:
    """Attend with a length of 0."""
    one = inputs.case([0, 5], 2, 16, seed=0)
    out, lse = mla_decode(*one, backend="reference")
    zero = not out[0].any() and bool((lse[0] == -torch.inf).all())
    return Value(f"length 0: output {float(out[0].abs().max()):g}, LSE {float(lse[0, 0])}", zero)


@claim("561 / 7.21 = 77.8 TFLOPS", "the work is 146 GFLOP: 20 TFLOPS; 85 GB/s is right")
def rate() -> Value:
    """Count B 32, 16K tokens, 7.21 ms."""
    one = work(32, 16384)
    tflops, gbs = one.flops / 7.21e-3 / 1e12, one.bytes / 7.21e-3 / 1e9
    return Value(
        f"{one.flops / 1e9:.0f} GFLOP, {tflops:.1f} TFLOPS, {gbs:.0f} GB/s", 20 < tflops < 20.5 and 84 < gbs < 86
    )


@claim("B 32: 520, 1,830, 7,210, 28,920 us", "that is 90 times a B200's floor")
def floors() -> Value:
    """Compute floors of the four lengths."""
    claimed = {1024: 520, 4096: 1830, 16384: 7210, 65536: 28920}
    found = [work(32, tokens).floor_us(B200) for tokens in claimed]
    ratios = [us / floor for us, floor in zip(claimed.values(), found, strict=True)]
    shown = ", ".join(f"{x:.3g}" for x in found)
    return Value(f"floors {shown} us; {min(ratios):.0f} to {max(ratios):.0f} times", min(ratios) > 80)


@claim("58.6 to 27.1 us a token", "nanoseconds")
def time_per_token() -> Value:
    """Divide 1,830 us by the tokens that were read."""
    nanoseconds = 1830e3 / (32 * 4096)
    return Value(f"1,830 us / (32 x 4,096) = {nanoseconds:.1f} ns", nanoseconds < 100)


@claim("compute 500 us, memory 90 us; and latency-bound", "on a B200 both floors are nearly equal")
def balance() -> Value:
    """Compute both floors at 4K."""
    one = work(32, 4096)
    memory, compute = one.memory_us(B200), one.compute_us(B200)
    return Value(f"memory {memory:.1f} us, compute {compute:.1f} us", 1 < memory / compute < 1.5)


@claim("71.6 M tokens/s, from a script that prints M", "the script's value is tokens/s already")
def throughput() -> Value:
    """Divide."""
    value = 32 * 4096 / 1.83e-3
    return Value(f"it would print {value:,.0f} M", 7e7 < value < 7.2e7)


@claim("--enable-cutlass-mla, --cutlass-num-kv-splits", "--attention-backend cutlass_mla")
def flags() -> Value:
    """Parse them."""
    refused = [
        error_of(lambda name=name: parse([name])) for name in ("--enable-cutlass-mla", "--cutlass-num-kv-splits")
    ]
    return Value("refused; " + " ".join(ServerSettings().arguments()[:4]), all(refused))


@claim("the cache is written as [B x heads, 576]", "one row a token")
def rows() -> Value:
    """Store a row a head."""
    config = MLAConfig(num_heads=4, page_size=16)
    pool, loc = MLAPool(config, 2), torch.tensor([3, 4])
    said = error_of(lambda: pool.set_kv_buffer(config.layer(0), loc, torch.zeros(2 * 4, ENTRY)))
    return Value(said.partition("allowed: ")[2], "one row a token" in said)


@claim("__global_barrier ends the hang", "CUDA has no such function, PTX no such barrier")
def grid_barrier() -> Value:
    """Look for a barrier of a grid among the instructions that the emulator knows."""
    implementations.load()
    found = [pattern for pattern in (one.pattern for one in isa.entries()) if pattern.startswith(("bar", "mbarrier"))]
    wide = [pattern for pattern in found if "grid" in pattern or ".gpu" in pattern]
    return Value(f"{len(wide)} of {len(found)} barrier instructions span a grid", bool(found) and not wide)


def hopper_ptx() -> str:
    """PTX of the Hopper kernel, from the compile cache."""
    settings = {"dtype": "bf16", "page": 64, "partial": False}
    return compile_cache.default().get(MlaDecode, settings, arguments.fake_args, "sm_90a")[1].ptx


def recomputed() -> list[tuple[int, Claim, Value]]:
    """Recompute every point."""
    return [(number, one, one.value()) for number, one in enumerate(CLAIMS, 1)]


def table() -> int:
    """Show all points; returns how many code does not confirm."""
    found = recomputed()
    rows_ = [(number, one.text, one.truth, value.shown) for number, one, value in found]
    show_table(("", "the text says", "right is", "recomputed"), rows_)
    return sum(not value.right for _, _, value in found)
