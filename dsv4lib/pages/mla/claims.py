"""Check the points in which a public text on SGLang's CUTLASS MLA back end errs.

A check runs code of the project, or compares a formula with a count that does not know it (`evidence`), at several
sizes. What rests on CUTLASS's or SGLang's sources, or is arithmetic on the text's own numbers, is said, not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from dsv4lib.dsl.budget import SMEM_LIMIT
from dsv4lib.emulator import isa
from dsv4lib.emulator.isa import implementations
from dsv4lib.emulator.units.tmem import Tmem
from dsv4lib.errors import ArgumentError
from dsv4lib.layers.mla import MLAConfig, MLAPool
from dsv4lib.layers.mla.flags import ServerSettings, parse
from dsv4lib.ops.mla_decode import inputs
from dsv4lib.ops.mla_decode.config import Config
from dsv4lib.ops.mla_decode.op import CACHE_DTYPES, ENTRY, LATENT, ROPE, SM_SCALE, mla_decode
from dsv4lib.ops.mla_decode.splits import (
    MOST_SPLITS,
    PAGES,
    check_num_kv_splits,
    mla_workspace_size,
    num_kv_splits_by_sms,
)
from dsv4lib.ops.mla_page_table.op import mla_page_table
from dsv4lib.pages.mla import run_case
from dsv4lib.pages.mla.arithmetic import GPUS, HEADS, ROLES, roles_of, token_bytes, work
from dsv4lib.pages.mla.evidence import counted, emulated, heads_bytes, ptx_of
from dsv4lib.pages.mla.page_table import text_example
from dsv4lib.pages.mla.serving import serve
from dsv4lib.reference import mla_decode as oracle
from dsv4lib.viz.table import show_table

B200 = GPUS["B200"]
SHORT = 300, 130, 513, 64  # tokens of requests that are emulated
FAULTS = ("AlignedExample",)  # of this list: a check of an example that is right


class Value(NamedTuple):
    """What code finds. shown: the numbers. right: whether they say that the text errs; None: said, not checked."""

    shown: str
    right: bool | None


class Claim(NamedTuple):
    """A point. text: what the text says. truth: what is right. value: checks it."""

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
    """Look which MMAs the two compiled kernels have."""
    found = {arch: [name for name in ("wgmma", "tcgen05") if name in ptx_of(arch)] for arch in ("sm_90a", "sm_100a")}
    shown = "; ".join(f"{arch}: {', '.join(names)}" for arch, names in found.items())
    return Value(shown, found == {"sm_90a": ["wgmma"], "sm_100a": ["tcgen05"]})


@claim("576 bytes a token, 111 times less", "576 elements: 1,152 bytes; 71 times less than 128 heads")
def compression() -> Value:
    """Measure caches of several page sizes, and keys and values of 16 to 128 heads."""
    config, right = MLAConfig(), True
    for page in (16, 128):
        cache = MLAPool(MLAConfig(page_size=page), 3).get_key_buffer(0)
        right = right and cache.nbytes == 3 * page * config.token_bytes
    for heads in (16, 100, HEADS):
        size = heads_bytes(heads, config.qk_nope_head_dim, config.qk_rope_head_dim)
        right = right and size == token_bytes(heads)["keys and values of 128 heads"]
    own = config.token_bytes
    shown = f"{own:,} B; {size:,} / {own:,} = {size / own:.1f}"
    return Value(shown, right and own == 2 * 576 and 70 < size / own < 72)


@claim("a rotated key a head; W_UK is in the kernel", "one for all heads; W_UK and W_UV are absorbed outside")
def absorbed() -> Value:
    """Compare attention of heads with attention to latents."""
    error = max(run_case.absorption(heads, tokens, heads).error for heads, tokens in ((8, 50), (3, 7), (1, 130)))
    dims = f"K {LATENT} + {ROPE} = {ENTRY}, V {LATENT}"
    return Value(f"{dims}; outputs differ by {error:.0e}", error < 1e-12)


@claim("sum of outputs over exp(max LSE)", "each output times exp(lse_i - ln sum exp lse)")
def reduction() -> Value:
    """Combine two halves by both formulas."""
    ours, texts = [], []
    for length, page in ((70, 16), (300, 64)):
        one = run_case.requests(length, 4, page, length)
        whole = run_case.attend(one, "reference")
        ours.append(run_case.combined(one, whole, "reference"))
        texts.append(run_case.combined(one, whole, "reference", "TextsReduction"))
    return Value(f"error {max(ours):.4f}; by the text's {min(texts):.2f}", max(ours) < 0.01 < 0.1 < min(texts))


@claim("a split has tokens / splits tokens", "whole tiles of 128: ceil(tiles / splits)")
def tiles() -> Value:
    """Emulate two splits; their LSEs say which tokens each took."""
    found = emulated(SHORT, HEADS, 2).tokens
    shown = f"300 tokens, 2 splits: {found[0][0]} + {found[0][1]}, not 150 + 150"
    return Value(shown, found == ((256, 44), (128, 2), (384, 129), (64, 0)))


@claim("5 or 6 warps", "the role word has 6 or 8; a block has 256 threads either way")
def warps() -> Value:
    """Count roles of both words, which are CUTLASS's."""
    counts = [sum(role != 0 for role in roles_of(word)) for word in (0x00213333, 0x42213333)]
    return Value(f"{counts[0]} with TMA, {counts[1]} with cp.async; {8 * 32} threads", None)


@claim("roles are read from the left: warp 0 first", "warp 0 is the lowest nibble")
def order() -> Value:
    """Decode the word, which is CUTLASS's."""
    names = [ROLES[role] for role in roles_of(0x00213333)]
    return Value(f"warps 0-3 {names[0]}, 4 {names[4]}, 5 {names[5]}, 6-7 {names[6]}", None)


@claim("12 steps of Q, 128 heads in a CTA", "9 steps of 64 dims; two CTAs share 128 heads")
def query_steps() -> Value:
    """Emulate our kernel and count its products with keys, and the CTAs of an item."""
    found = {heads: emulated((70,), heads) for heads in (64, 65, HEADS)}
    steps = {one.query_steps for one in found.values()}
    ctas = ", ".join(f"{heads} heads: {one.ctas}" for heads, one in found.items())
    right = steps == {9} and [one.ctas for one in found.values()] == [1, 2, 2]
    return Value(f"our kernel: {max(steps):g} steps of 64 dims; CTAs of {ctas}", right)


@claim("TmemAllocator gives 2 x 128 KB shared memory", "Tensor Memory: 512 columns of 128 lanes; SMEM is 228 KB")
def tensor_memory() -> Value:
    """Measure the emulator's tensor memory, and add up what the kernel takes of it."""
    memory = Tmem().data
    rows = {row.resource: row.used for row in Config(cluster=2).budget()}
    size, columns, used = memory.nbytes, memory.shape[1], rows["TMEM: O"] + rows["TMEM: S"]
    shown = f"{size // 1024} KB TMEM an SM, {used} of {columns} columns used; SMEM {SMEM_LIMIT // 1024} KB a CTA"
    return Value(shown, size == 256 * 1024 > SMEM_LIMIT and used == 384 <= columns)


@claim("__syncthreads and 16 x 16 WMMA", "mbarriers, named barriers; MMA of a warpgroup or of two CTAs")
def barriers() -> Value:
    """Count instructions of the compiled Hopper kernel."""
    ptx = ptx_of("sm_90a")
    counts = {name: ptx.count(name) for name in ("mbarrier.", "wgmma.mma_async", "wmma.")}
    shown = ", ".join(f"{count} {name.rstrip('.')}" for name, count in counts.items())
    return Value(
        f"our SM90 kernel: {shown}", counts["wmma."] == 0 < min(counts["mbarrier."], counts["wgmma.mma_async"])
    )


@claim("padded heads cost nothing, 128 KB", "their rows are computed; 64 of them are 72 KB of Q a request")
def padding() -> Value:
    """Emulate our kernel with few heads and with all rows of its tile; measure queries of 64 heads."""
    few, whole = (emulated((20,), heads).flops for heads in (16, 64))
    pair = emulated((70,), 65).flops, emulated((70,), HEADS).flops
    one = inputs.case([20], 64)
    size = one.q_nope.nbytes + one.q_pe.nbytes
    shown = f"our kernel: {few:,} operations of 16 heads, {whole:,} of 64; queries of 64 heads {size:,} B"
    return Value(shown, few == whole and pair[0] == pair[1] and size == 72 * 1024)


@claim("FP8 is supported and future; small pages are not, and are packed", "both exist in C++; Python refused FP8")
def types() -> Value:
    """Attend with every pair of types, in every page size, and compare with fp64 of the same numbers."""
    pairs = [(q, kv) for q, kinds in CACHE_DTYPES.items() for kv in kinds]
    errors = []
    for i, (q, kv) in enumerate(pairs * len(PAGES)):
        one = inputs.case([40, 3], 2, PAGES[i % len(PAGES)], dtype=q, kv_dtype=kv, seed=i)
        want = oracle.mla_decode(*one, SM_SCALE).out
        errors.append(float((mla_decode(*one, backend="reference").out.double() - want).norm() / want.norm()))
    pages = ", ".join(map(str, PAGES))
    shown = f"here {len(pairs)} pairs of types, pages of {pages}: {max(errors):.1e} off"
    return Value(shown, torch.float8_e4m3fn in {kv for _, kv in pairs} and 16 in PAGES and max(errors) < 2**-8)


@claim("more than one split hangs; set more than one", "reported for B 8 with 8 splits; more than one is what hung")
def hang() -> Value:
    """Emulate the reported batch and splits: here no item waits for another."""
    found = emulated((257, 64, 20, 130, 1, 70, 300, 33), 16, 8)
    refused = error_of(lambda: check_num_kv_splits(MOST_SPLITS + 1))
    shown = f"B 8, 8 splits: {found.ctas} items end, {found.error:.1e} off; above {MOST_SPLITS} refused"
    return Value(shown, found.ctas == 64 and found.error < 2**-8 and bool(refused))


@claim("automatic splits by default; 5 to 10 MB", "the back end passes 1: no splits, no workspace")
def default_splits() -> Value:
    """Ask the workspace's size, and measure O and LSE in fp32."""
    right = True
    for splits, batch in ((3, 2), (8, 8), (4, 4)):
        tensors = (torch.empty(splits, batch, HEADS, *last, device="meta") for last in ((LATENT,), ()))
        on = mla_workspace_size(8192, batch, 132, splits)
        right = right and on == sum(x.nbytes for x in tensors) and mla_workspace_size(8192, batch, 132, 1) == 0
    return Value(f"1 split: 0 B; 4 splits of 4 requests: {on:,} B", right)


@claim("grid.x is 1, so 1 x 8 x 4 = 32 blocks", "grid.x is 2, a cluster of two CTAs an item")
def grid() -> Value:
    """Count CTAs of emulated launches of 128 heads."""
    found = {(4, 2): emulated(SHORT, HEADS, 2).ctas, (1, 1): emulated((70,), HEADS).ctas}
    shown = ", ".join(f"2 x {batch} x {splits} = {ctas}" for (batch, splits), ctas in found.items())
    return Value(f"CTAs of our kernel: {shown}", all(n == 2 * b * splits for (b, splits), n in found.items()))


@claim("8,000 tokens get 8 splits", "it depends on the batch")
def splits_of_8000() -> Value:
    """Ask CUTLASS's heuristic at 132 SMs."""
    found = {batch: num_kv_splits_by_sms(8000, batch, 132) for batch in (1, 4, 8, 16)}
    shown = ", ".join(f"B {batch}: {splits}" for batch, splits in found.items())
    return Value(shown, len(set(found.values())) == len(found))


@claim("slots 14 to 313 are in pages 0, 1, 2", "token 0 would be read from slot 0: pages must be filled in order")
def alignment(aligned: bool = False) -> Value:
    """Check the example; ``aligned``: with its first token at the first slot of a page."""
    misaligned, (slots, *rest) = torch.zeros(1, 2).int(), text_example()
    given = slots - slots[0, 0] if aligned else slots
    mla_page_table(given, *rest, 128, misaligned=misaligned, backend="reference")
    count = int(misaligned[0, 0])
    return Value(f"{count} of 300 tokens are elsewhere", count == 300)


@claim("chunks of 4 KB", "4,096 tokens")
def chunks() -> Value:
    """Convert; the chunk is one of SGLang's kernel."""
    return Value(f"{4096 // 128} pages of 128 tokens, {4096 * 4 // 1024} KB of the map", None)


@claim("the index kernel is inside the graph, and outside", "it refreshes the buffers before a replay")
def refreshed() -> Value:
    """Replay with and without a refresh."""
    found = [
        sum(serve("reference", 2, page, page, name).differences for page in (16, 64)) for name in ("none", "StaleTable")
    ]
    return Value(f"{found[0]} elements differ with it, {found[1]:,} without", found[0] == 0 < found[1])


@claim("buffers are filled with 1 to avoid a division by zero", "nothing divides by it; any page that exists will do")
def fill() -> Value:
    """Attend with a length of 0."""
    one = inputs.case([0, 5, -1], 2, 16, seed=0)
    out, lse = mla_decode(*one, backend="reference")
    zero = not out[::2].any() and bool((lse[::2] == -torch.inf).all()) and bool(out[1].any())
    return Value(f"length 0: output {float(out[0].abs().max()):g}, LSE {float(lse[0, 0])}", zero)


@claim("561 / 7.21 = 77.8 TFLOPS", "the work is 146 GFLOP: 20 TFLOPS; 85 GB/s is right")
def rate() -> Value:
    """Let torch count B 32, 16K tokens, and smaller shapes beside `work`; 7.21 ms."""
    one, shapes = counted(32, 16384, HEADS), ((32, 16384, HEADS), (3, 700, 16), (1, 1, 100))
    tflops, gbs = one.flops / 7.21e-3 / 1e12, one.bytes / 7.21e-3 / 1e9
    same = all(counted(*shape) == work(*shape) for shape in shapes)
    shown = f"{one.flops / 1e9:.0f} GFLOP, {tflops:.1f} TFLOPS, {gbs:.0f} GB/s"
    return Value(shown, same and 20 < tflops < 20.5 and 84 < gbs < 86)


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
    """Divide the text's 1,830 us by the tokens that were read."""
    return Value(f"1,830 us / (32 x 4,096) = {1830e3 / (32 * 4096):.1f} ns", None)


@claim("compute 500 us, memory 90 us; and latency-bound", "on a B200 both floors are nearly equal")
def balance() -> Value:
    """Compute both floors at 4K."""
    one, torchs = work(32, 4096), counted(32, 4096, HEADS)
    memory, compute = one.memory_us(B200), one.compute_us(B200)
    return Value(f"memory {memory:.1f} us, compute {compute:.1f} us", one == torchs and 1 < memory / compute < 1.5)


@claim("71.6 M tokens/s, from a script that prints M", "the script's value is tokens/s already")
def throughput() -> Value:
    """Divide the text's own numbers."""
    return Value(f"it would print {32 * 4096 / 1.83e-3:,.0f} M", None)


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


VERDICTS = {True: "yes", False: "NO", None: "said, not checked"}


def checked(fault: str = "none") -> list[tuple[int, Claim, Value]]:
    """Check every point; ``fault``: one of `FAULTS`, or any other word."""
    aligned = fault == "AlignedExample"
    return [
        (number, one, alignment(aligned) if one.value is alignment else one.value())
        for number, one in enumerate(CLAIMS, 1)
    ]


def table(fault: str = "none") -> int:
    """Show all points; returns how many a check does not confirm. Those that have none do not count."""
    found = checked(fault)
    rows_ = [(number, one.text, one.truth, value.shown, VERDICTS[value.right]) for number, one, value in found]
    show_table(("", "the text says", "right is", "found", "confirmed"), rows_)
    said = sum(value.right is None for _, _, value in found)
    print(f"{len(found) - said} of {len(found)} points are checked, {said} said alone")
    return sum(value.right is False for _, _, value in found)
