"""silu in fp32, with and without fast math, against fp64: in ulps, at both ends, NaN."""

from functools import lru_cache

import cutlass.cute as cute
import torch
from cutlass import Float32

from dsv4lib.dsl.compile import compile_for
from dsv4lib.dsl.silu import silu
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.ops.moe_gemm.epilogue import swiglu

THREADS = 256


class Both:
    """A thread a number: its silu without fast math, then with it, as the epilogue of the expert GEMM has it."""

    def __repr__(self) -> str:
        return "Both()"

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor):
        self.kernel(mX, mOut).launch(grid=(cute.ceil_div(mX.shape[0], THREADS), 1, 1), block=(THREADS, 1, 1))

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        i = cute.arch.block_idx()[0] * THREADS + thread
        if i < mX.shape[0]:
            mOut[i, 0] = silu(mX[i])
            mOut[i, 1] = swiglu(mX[i], Float32(1.0), Float32(float("inf")))


@lru_cache
def compiled():
    n = cute.sym_int32(symbol="N")
    fake = cute.runtime.make_fake_tensor
    return compile_for(Both(), (fake(Float32, (n,), (1,)), fake(Float32, (n, 2), (2, 1))), "sm_100a")


def both(x):
    out = torch.zeros(len(x), 2)
    wrapped = cute.runtime.from_dlpack(x).mark_layout_dynamic(leading_dim=0)
    launch(compiled(), wrapped, cute.runtime.from_dlpack(out).mark_compact_shape_dynamic(mode=0), gpu=make("sm_100a"))
    return out.unbind(1)


def relative(found, x):
    """Errors as multiples of 2^-24 of the exact value; at an exact 0, of the smallest normal number."""
    assert bool(found.isfinite().all()), x[~found.isfinite()].tolist()
    exact = x.double() / (1 + (-x.double()).exp())
    unit = torch.where(exact == 0, torch.finfo(torch.float32).tiny, exact.abs())
    return (found.double() - exact).abs() / unit * 2**24


def test_without_fast_math_the_error_does_not_grow_with_the_argument():
    generator = torch.Generator().manual_seed(0)
    x = torch.empty(20_000).uniform_(-80, 10, generator=generator)
    slow, fast = (relative(found, x) for found in both(x))
    assert float(slow.max()) < 8 < 40 < float(fast.max())
    assert float(slow.square().mean().sqrt()) < float(fast.square().mean().sqrt()) / 5
    assert "div.rn.f32" in compiled().ptx


def test_ends():
    """From where exp(-x) leaves fp32, at 0 of both signs, at numbers without a fraction, past any of use, NaN."""
    x = torch.tensor([-88.7, -88.0, -87.5, 0.0, -0.0, 1e-30, 88.0, 150.5, 4.1e10, 7e9, 1e30, 3.4e38, -1e-40])
    slow, _ = both(x)
    assert float(relative(slow, x).max()) < 8 and torch.equal(slow[3:5].signbit(), torch.tensor([False, True]))
    past, _ = both(torch.tensor([-89.5, -1000.0, -1e30, -3.4e38]))
    assert not past.any()
    assert both(torch.tensor([float("inf")] * 2))[0].tolist() == [float("inf")] * 2
    whole = torch.arange(-60.0, 10.0)
    assert float(relative(both(whole)[0], whole).max()) < 8
    assert bool(both(torch.tensor([float("nan")] * 2))[0].isnan().all())
