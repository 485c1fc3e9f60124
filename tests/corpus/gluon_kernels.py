"""Kernels in Gluon, for cases_gluon: Triton's language of layouts, barriers and tensor memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import blackwell as sm100
from triton.experimental.gluon.language.nvidia import hopper as sm90
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

__all__ = ["clc_rows", "describe", "matmul_sm90", "matmul_sm100", "matmul_two_ctas"]


def describe(tensor, block, **options):
    """Make a tensor map of row-major tiles, swizzled as its width allows."""
    names = {"bfloat16": gl.bfloat16, "float16": gl.float16, "float32": gl.float32, "float8_e4m3fn": gl.float8e4nv}
    kind = names[str(tensor.dtype).removeprefix("torch.")]
    layout = gl.NVMMASharedLayout.get_default_for(block, kind, **options)
    return TensorDescriptor.from_tensor(tensor, block, layout)


@gluon.jit
def _load(a, b, row, column, i, ring_a, ring_b, full, STAGES: gl.constexpr):
    """Begin the copies of tile i along K."""
    slot = i % STAGES
    bar = full.index(slot)
    mbarrier.expect(bar, a.nbytes_per_cta + b.nbytes_per_cta)
    tma.async_load(a, [row, i * a.block_shape[1]], bar, ring_a.index(slot))
    tma.async_load(b, [column, i * b.block_shape[1]], bar, ring_b.index(slot))


@gluon.jit
def matmul_sm90(a, b, c, STAGES: gl.constexpr):
    """c = a b^T: TMA into a ring, wgmma in flight while the next tile is loaded, TMA store."""
    M: gl.constexpr = c.block_shape[0]
    N: gl.constexpr = c.block_shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, N, 16])
    row, column = gl.program_id(0) * M, gl.program_id(1) * N
    ring_a = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_shape, a.layout)
    ring_b = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_shape, b.layout)
    full = mbarrier.allocate_mbarrier(batch=STAGES)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    tiles = gl.cdiv(a.shape[1], a.block_shape[1])
    for i in gl.static_range(STAGES - 1):
        _load(a, b, row, column, i, ring_a, ring_b, full, STAGES)
    acc = gl.zeros((M, N), gl.float32, layout)
    for i in range(tiles):
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        right = ring_b.index(i % STAGES).permute((1, 0))
        acc = sm90.warpgroup_mma(ring_a.index(i % STAGES), right, acc, is_async=True)
        acc = sm90.warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if i + STAGES - 1 < tiles:
            _load(a, b, row, column, i + STAGES - 1, ring_a, ring_b, full, STAGES)
    out = gl.allocate_shared_memory(c.dtype, c.block_shape, c.layout)
    out.store(acc.to(c.dtype))
    sm90.fence_async_shared()
    tma.async_store(c, [row, column], out)
    tma.store_wait(pendings=0)


@gluon.jit
def _loader(a, b, row, column, tiles, ring_a, ring_b, full, free, STAGES: gl.constexpr):
    """One warp: load a tile as soon as its slot is free."""
    for i in range(tiles):
        mbarrier.wait(free.index(i % STAGES), i // STAGES & 1 ^ 1)
        _load(a, b, row, column, i, ring_a, ring_b, full, STAGES)


@gluon.jit
def _multiplier(tiles, ring_a, ring_b, full, free, acc, done, STAGES: gl.constexpr):
    """One warp: issue the MMAs of a tile, whose completion frees its slot."""
    for i in range(tiles):
        mbarrier.wait(full.index(i % STAGES), i // STAGES & 1)
        right = ring_b.index(i % STAGES).permute((1, 0))
        sm100.tcgen05_mma(ring_a.index(i % STAGES), right, acc, use_acc=i > 0, mbarriers=[free.index(i % STAGES)])
    sm100.tcgen05_commit(done)


@gluon.jit
def _epilogue(c, row, column, acc, done):
    """The other warps: accumulators from tensor memory to global memory."""
    mbarrier.wait(done, 0)
    out = gl.allocate_shared_memory(c.dtype, c.block_shape, c.layout)
    out.store(acc.load().to(c.dtype))
    sm90.fence_async_shared()
    tma.async_store(c, [row, column], out)
    tma.store_wait(pendings=0)


@gluon.jit
def matmul_sm100(a, b, c, STAGES: gl.constexpr):
    """c = a b^T by specialized warps: one loads, one issues tcgen05.mma, four store."""
    M: gl.constexpr = c.block_shape[0]
    N: gl.constexpr = c.block_shape[1]
    row, column = gl.program_id(0) * M, gl.program_id(1) * N
    ring_a = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_shape, a.layout)
    ring_b = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_shape, b.layout)
    full, free = mbarrier.allocate_mbarrier(batch=STAGES), mbarrier.allocate_mbarrier(batch=STAGES)
    done = mbarrier.allocate_mbarrier()
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    mbarrier.init(done, count=1)
    acc = sm100.allocate_tensor_memory(gl.float32, [M, N], sm100.TensorMemoryLayout([M, N], col_stride=1))
    tiles = gl.cdiv(a.shape[1], a.block_shape[1])
    gl.warp_specialize(
        [
            (_epilogue, (c, row, column, acc, done)),
            (_loader, (a, b, row, column, tiles, ring_a, ring_b, full, free, STAGES)),
            (_multiplier, (tiles, ring_a, ring_b, full, free, acc, done, STAGES)),
        ],
        [1, 1],
        [24, 24],
    )


@gluon.jit
def matmul_two_ctas(a, b, c):
    """c = a b^T by pairs of CTAs: each loads half of A and of B, one tcgen05.mma of cta_group::2 uses both halves."""
    M: gl.constexpr = c.block_shape[0]
    N: gl.constexpr = c.block_shape[1]
    row, column = gl.program_id(0) * M, gl.program_id(1) * N
    left = gl.allocate_shared_memory(a.dtype, a.block_shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, b.block_shape, b.layout)
    layout: gl.constexpr = sm100.TensorMemoryLayout([M // 2, N], col_stride=1, cga_layout=[(1, 0)], two_ctas=True)
    acc = sm100.allocate_tensor_memory(gl.float32, [M, N], layout)
    full, done = mbarrier.allocate_mbarrier(two_ctas=True), mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.init(done, count=1)
    for i in range(gl.cdiv(a.shape[1], a.block_shape[1])):
        mbarrier.expect(full, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [row, i * a.block_shape[1]], full, left)
        tma.async_load(b, [column, i * a.block_shape[1]], full, right)
        mbarrier.wait(full, i & 1)
        sm100.tcgen05_mma(left, right.permute((1, 0)), acc, use_acc=i > 0, mbarriers=[done], multicast=True)
        mbarrier.wait(done, i & 1)
    mbarrier.invalidate(full)
    mbarrier.invalidate(done)
    out = gl.allocate_shared_memory(c.dtype, c.block_shape, c.layout)
    out.store(acc.load().to(c.dtype))
    sm90.fence_async_shared()
    tma.async_store(c, [row, column], out)
    tma.store_wait(pendings=0)


@gluon.jit
def clc_rows(x, y, columns, BLOCK: gl.constexpr):
    """y = x + row: a program goes on with rows that it cancels (clusterlaunchcontrol)."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    reply = gl.allocate_shared_memory(gl.int64, [2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    came = mbarrier.allocate_mbarrier()
    mbarrier.init(came, count=1)
    i = gl.arange(0, BLOCK, layout=layout)
    row, more, phase = gl.program_id(0), True, 0
    while more:
        mbarrier.expect(came, 16)
        sm100.clc.try_cancel(reply, came)
        at = row * columns + i
        gl.store(y + at, gl.load(x + at, mask=i < columns) + row, mask=i < columns)
        mbarrier.wait(came, phase)
        answer = sm100.clc.load_result(reply)
        more, row, phase = answer.is_canceled(), answer.program_id(0), phase ^ 1
