"""Apply linear layers on Hopper to few tokens. FP8 or bf16 weights as DSV4 releases them, read once, tokens as N.

    y[g, t, n] = sum_b (sum_{k in block b} w[g, n, k] x[g, t, k]) w_scales[g, n / 128, b] x_scales[g, t, b]      FP8
    y[g, t, n] = sum_k w[g, n, k] x[g, t, k]                                                                     bf16

Blocks are 128 of K. For few tokens the time is that of reading the weights. A and B are swapped: 64 rows of weights are
M of a wgmma, tokens are N. Weights keep their rows: no pass at load time, no tensor map; `cp.async` swizzles them on
the way. DSV4's shapes have few tiles or many, so CTAs of a cluster can share K (`config.plan`).

Tile picture (FP8, 8 tokens, one consumer warpgroup, 256 of K a stage; `budget` has the numbers of any configuration)

    one stage = 64 rows x 256 K                       SMEM                              registers of a warpgroup
    weights   64 x 256 B  --cp.async, 4 warps-->  +----------------------------+
    tokens     8 x 256 B  --cp.async, 4 warps-->  | W        12 x 16,384 B     | --desc--> wgmma m64n8k32, 4 for 128 K
    scales     8 x 2 + 2  --ld, st.shared------>  | X        12 x 2,048 B      | --desc-->  |
                                                  | factors  12 x 64 B         | --lds--->  fp32: sum += MMAs x factor
                                                  | sums of a cluster's CTAs   | <-------> (split > 1)
                                                  | 26 mbarriers               |
                                                  +----------------------------+

Roles (3 or 4 warpgroups)

    0 (and 1)     consumers   64 rows each: MMAs, sums; at the end of a tile the cluster's exchange and stores (`sums`)
    the next      weights     copies them (`load`); never waits for another kernel
    the last      tokens      waits for the kernels before, copies tokens, makes factors

Pipeline   cp.async and stores -> consumers    2 to 12 stages

    full     128 lanes' cp.async of weights, 128 of tokens, 4 warps' factors; consumers then fence the proxies
    empty    an arrival a consumer warp, after its MMAs

The tensor core adds E4M3 products with 13 bits below the largest, so sums leave it every 128 bytes of K. A factor is
the product of two scales in fp32. bf16 is the same with rows of twice the bytes, k16 instead of k32 and no factors.

What limits it is in data/bench/linear.md: HBM and a fixed time at one token, with 128 tokens what an SM takes from L2.

Source: DSV4's released code; PTX ISA, "wgmma", "cp.async", "st.async"; the swap and the promotion as in DeepGEMM's
and FlashInfer's documentation.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, memory

from dsv4lib.dsl.budget import SMEM_ALIGN
from dsv4lib.ops.linear.sm90.config import CONSUMER_REGISTERS, LOAD_REGISTERS, LOADERS
from dsv4lib.ops.linear.sm90.load import Sources, Stages
from dsv4lib.ops.linear.sm90.sums import Exchange, Sums


class HopperLinear(Sums):
    """Linear layers side by side. Options as `Config`, a role of the module docstring a base class."""

    # ------------------------------------------------------------------ host

    @cute.jit
    def __call__(self, sources: Sources, mOut: cute.Tensor, grid: Int32, stream: cuda.CUstream):
        """Host side: the launch.

        Args:
            sources: tokens, weights and their scales.
            mOut: [G, T, N] bf16 or fp32.
            grid: CTAs to launch, a multiple of ``split``.
            stream: where the launch is queued.
        """

        @cute.struct
        class Storage:
            w: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.w_bytes], SMEM_ALIGN]
            x: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.x_bytes], SMEM_ALIGN]
            factors: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.factor_bytes], 16]
            slots: cute.struct.Align[cute.struct.MemRange[Float32, self.slots], 16]
            full: cute.struct.MemRange[cutlass.Int64, self.stages]
            empty: cute.struct.MemRange[cutlass.Int64, self.stages]
            gates: cute.struct.MemRange[cutlass.Int64, 2]

        self.storage = Storage
        cluster = {"cluster": (self.split, 1, 1)} if self.split > 1 else {}
        self.kernel(sources, mOut).launch(
            grid=(grid, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,
            **cluster,
        )

    # ---------------------------------------------------------------- device

    @cute.kernel
    def kernel(self, sources: Sources, mOut: cute.Tensor):
        """Set-up shared by all warps, then one role each."""
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        storage = memory.SmemAllocator().allocate(self.storage)
        full, empty, gates = storage.full.data_ptr(), storage.empty.data_ptr(), storage.gates.data_ptr()
        if tidx < self.stages:
            cute.arch.mbarrier_init(full + tidx, 2 * LOADERS + (LOADERS // 32 if self.scaled else 0))
            cute.arch.mbarrier_init(empty + tidx, self.consumers // 32)
            if cutlass.const_expr(self.split > 1):
                if tidx == 0:
                    cute.arch.mbarrier_init(gates, 1)
                    cute.arch.mbarrier_init(gates + 1, self.consumers // 32 - self.finishing())
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.split > 1):
            cute.arch.cluster_arrive_relaxed()
        cute.arch.barrier(barrier_id=0, number_of_threads=self.threads)
        stages = Stages(
            storage.w.data_ptr().toint(),
            storage.x.data_ptr().toint(),
            storage.factors.data_ptr().toint(),
            full,
            empty,
        )
        if warp >= self.w_warp:
            if cutlass.const_expr(self.moves_registers):
                cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp < self.x_warp:
                self.load_weights(sources, stages)
            else:
                self.load_tokens(sources, stages)
            if cutlass.const_expr(self.split > 1):
                cute.arch.cluster_wait()
        else:
            if cutlass.const_expr(self.moves_registers):
                cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            slots = None
            if cutlass.const_expr(self.split > 1):
                slots = storage.slots.get_tensor(
                    cute.make_layout((4, 32, self.own_warps, self.tile_n // 8, self.split))
                )
            self.consume(sources, stages, Exchange(slots, gates, gates + 1), mOut)
