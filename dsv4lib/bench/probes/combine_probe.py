"""Time the combine of KV splits on a GPU. Alone, and after a kernel that writes the splits.

    chain    combine | combine | ...                              us a combine, caches warm
    after    (writer, combine) | ...  less  writer | ...          us that a combine adds, dependent launches
    cold     flush L2 | writer, combine  less  flush L2 | writer  first start to last end

The writer occupies every SM that it runs on (227 KiB of shared memory), as attention does. It waits, writes partial
outputs and LSEs, and triggers its dependents at its start.

    python -m dsv4lib.bench.probes.combine_probe --record combine_times.csv        (on the GPU)

data/bench/combine_times.csv is the record of an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from dsv4lib.bench.ops.timing import Call, GpuClock
from dsv4lib.bench.probes import common as probes
from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.ops.fmha import arguments
from dsv4lib.ops.fmha.combine import AT_ONCE, Combine

DIM, THREADS, ROWS = 512, 128, 64
SMEM = 227 * 1024
SPIN = 4000  # clocks
ENDS = {"inverse_rope": True}
CASES = (
    *((n, 8, 64) for n in (2, 4, 5, 8, 16)),
    *((n, 1, 64) for n in (2, 5, 8, 16, 32, 44)),
    *((n, 1, 128) for n in (2, 8, 32, 44)),
    *((n, tokens, 64) for tokens in (2, 4) for n in (8, 16, 32)),
    *((8, 4, 128), (16, 4, 128), (2, 64, 64), (4, 32, 64), (2, 32, 128)),
)


class Writer:
    """Write partial outputs [S, T, H, 512] of value 1 + s and LSEs [S, T, H] of s / 8. A CTA a split and 64 heads."""

    def __repr__(self) -> str:
        return "Writer()"

    def fake_args(self) -> tuple:
        """Return what it is compiled with."""
        fakes = Fakes()
        return fakes(Float32, "sthd", 16), fakes(Float32, "sth"), Int32(0), cuda.CUstream(0)

    @cute.jit
    def __call__(self, mParts: cute.Tensor, mLses: cute.Tensor, spin: Int32, stream: cuda.CUstream):
        """Launch it; ``spin``: clocks it waits before it writes."""

        @cute.struct
        class Storage:
            room: cute.struct.MemRange[cutlass.Uint8, SMEM]

        self.storage = Storage
        splits, tokens, heads, _ = mParts.shape
        self.kernel(mParts, mLses, spin).launch(
            grid=(splits, tokens, heads // ROWS), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mParts: cute.Tensor, mLses: cute.Tensor, spin: Int32):
        """Wait, write."""
        memory.SmemAllocator().allocate(self.storage)
        part, token, block = cute.arch.block_idx()
        tidx, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        start = cute.arch.clock64()
        now = cute.arch.clock64()
        while now < start + spin:
            now = cute.arch.clock64()
        for row in cutlass.range(ROWS, unroll=4):
            own = mParts[part, token, block * ROWS + row, None]
            cute.local_tile(own, (4,), (tidx,)).fill(Float32(part + 1))
        if tidx < ROWS:
            mLses[part, token, block * ROWS + tidx] = Float32(part) * 0.125


@dataclass(frozen=True)
class CombineTimes:
    """Times of the combine of ``splits`` splits, us; see the module. at_once: splits that it loads at once.

    writer_us, cold_writer_us: of the writer, already taken off.
    """

    splits: int
    tokens: int
    heads: int
    at_once: int
    chain_us: float
    after_us: float
    cold_us: float
    writer_us: float
    cold_writer_us: float


class Bench:
    """Tensors of a case on the current GPU."""

    def __init__(self, splits: int, tokens: int, heads: int, spin: int = SPIN):
        import torch

        self.splits, self.spin = splits, spin
        self.parts = torch.empty(splits, tokens, heads, DIM, device="cuda")
        self.lses = torch.empty(splits, tokens, heads, device="cuda")
        self.o = torch.empty(tokens, heads, DIM, device="cuda", dtype=torch.bfloat16)
        self.lse = torch.empty(tokens, heads, device="cuda")
        self.sink = torch.zeros(heads, device="cuda")
        self.rope = torch.ones(tokens, 32, device="cuda"), torch.zeros(tokens, 32, device="cuda")

    def writer(self, code: Any) -> Call:
        """Return a call of the writer."""

        def call() -> None:
            parts = wrap("parts", self.parts, Float32, (None,) * 4, 16)
            code.function(parts, wrap("lses", self.lses, Float32, (None,) * 3), Int32(self.spin), probes.stream())

        return call

    def combine(self, at_once: int, code: Any) -> Call:
        """Return a call of the combine that loads ``at_once`` splits at once."""
        kernel = Combine(**ENDS, at_once=at_once)

        def call() -> None:
            given = self.parts, self.lses, self.sink, self.rope, self.o, self.lse
            code.function(*arguments.combine_args(kernel, *given)[:-1], probes.stream())

        return call

    def check(self) -> None:
        """Compare with the combine of what the writer wrote, computed in fp64.

        Raises:
            RuntimeError: it did not.
        """
        import torch

        torch.cuda.synchronize()
        s = torch.arange(self.splits, dtype=torch.float64)
        weights = torch.exp(s / 8)
        want = float((weights * (s + 1)).sum() / (weights.sum() + 1))
        o = float((self.o.double() / want - 1).abs().max())
        lse = float((self.lse.double() - weights.sum().log().item()).abs().max())
        if not (o < 2**-7 and lse < 1e-4):
            raise RuntimeError(f"combine of {self.splits} splits: O is off by {o}, LSE by {lse}")
        self.o.zero_()
        self.lse.zero_()


def in_turn(*calls: Call) -> Call:
    """Return one call that makes them all."""

    def call() -> None:
        for one in calls:
            one()

    return call


def compiled(arch: str = "sm_90a", processes: int = 1) -> tuple[Any, dict[int, Any]]:
    """Return (the writer, `Combine` by splits at once), with a sink and inverse RoPE.

    From the cache of compiled kernels.
    """
    wanted = [(Writer, {}, Writer.fake_args, arch)]
    wanted += [(Combine, {**ENDS, "at_once": n}, arguments.fake_args, arch) for n in AT_ONCE]
    writer, *combines = probes.get_all(wanted, processes)
    return writer, dict(zip(AT_ONCE, combines, strict=True))


def run(processes: int) -> list[CombineTimes]:
    """Measure all cases on the GPU here, each variant checked before it is timed."""
    writer, combines = compiled(processes=processes)
    clock, rows = GpuClock(), []
    for splits, tokens, heads in CASES:
        bench = Bench(splits, tokens, heads)
        write = bench.writer(writer)
        write()
        alone = {n: bench.combine(n, code) for n, code in combines.items()}
        for combine in alone.values():
            combine()
            bench.check()
        after = [in_turn(write, combine) for combine in alone.values()]
        warm_writer, *warm = clock.warm([write, *alone.values(), *after])
        cold_writer, *cold = clock.cold([write, *after])
        bench.check()
        for i, n in enumerate(combines):
            more = warm[len(combines) + i] - warm_writer, cold[i].median - cold_writer.median
            rows.append(CombineTimes(splits, tokens, heads, n, warm[i], *more, warm_writer, cold_writer.median))
            print(probes.line(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    from dsv4lib.bench.probes import combine_probe  # what another process compiles must not be of __main__

    probes.main(__doc__, combine_probe.CombineTimes, combine_probe.run)
