"""Flag-in-data exchange between CTAs in the emulator: values, zeros, resets, schedules, injected faults."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Float32, Int64

from dsv4lib.dsl import exchange
from dsv4lib.dsl.compile import compile_for
from dsv4lib.dsl.tensors import Fakes, wrap
from dsv4lib.emulator import launch
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.errors import Deadlock

LANES, FOURS = 24, 2  # lanes that have slots, of 32; fours of a lane
COUNT = 4 * LANES * FOURS


class Mail:
    """CTA 0 sends x, CTA 1 receives it into y; consumers come first in the grid, so they have to wait."""

    @cute.jit
    def __call__(self, mX: cute.Tensor, mSlots: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
        """Launch two CTAs of a warp."""
        self.kernel(mX, mSlots, mY).launch(grid=(2, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mSlots: cute.Tensor, mY: cute.Tensor):
        """Lane l has fours l and l + 24."""
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        first, stride = mSlots.iterator.toint() + Int64(16 * lane), 16 * LANES
        if block == 0:
            exchange.wait(first, lane < LANES)
            rFours = cute.make_rmem_tensor((4, FOURS), Float32)
            exchange.receive(first, stride, lane < LANES, rFours)
            exchange.reset(first, stride, lane < LANES, FOURS)
            if lane < LANES:
                for k in cutlass.range_constexpr(FOURS):
                    for v in cutlass.range_constexpr(4):
                        mY[4 * (lane + LANES * k) + v] = rFours[v, k]
        elif lane < LANES:
            for k in cutlass.range_constexpr(FOURS):
                x = [mX[4 * (lane + LANES * k) + v] for v in range(4)]
                exchange.send(first, x[:2], offset=stride * k)
                exchange.send(first, x[2:], offset=stride * k + 8)


def run(**device):
    """(x, y, slots, hazards) of a launch of the kernel as it is now; x has zeros of both signs, inf, denormals."""
    fake = Fakes()
    code = compile_for(Mail(), (*(fake(Float32, name, 16) for name in "XSY"), cuda.CUstream(0)), "sm_90a")
    x = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
    x[::7], x[3::11], x[5], x[6] = 0.0, -0.0, float("inf"), 1e-45
    slots, y = torch.zeros(COUNT), torch.full((COUNT,), float("nan"))
    gpu = make("sm_90a", **{"checks": "race", **device})
    tensors = [wrap(name, t, Float32, (COUNT,), 16) for name, t in (("x", x), ("slots", slots), ("y", y))]
    launch(code, *tensors, cuda.CUstream(0), gpu=gpu)
    return x, y, slots, gpu.hazards


@pytest.mark.parametrize("schedule", ["oldest_first", "newest_first", "adversarial"])
def test_values_arrive_and_slots_are_empty_again(schedule):
    x, y, slots, hazards = run(schedule=schedule)
    assert torch.equal(x, y) and not slots.view(torch.int32).any() and not hazards


def test_a_zero_that_is_not_marked_is_waited_for(monkeypatch):
    """Injected: 0.0 is sent with the bits of an empty slot."""
    monkeypatch.setattr(exchange, "nonzero", lambda value: value)
    with pytest.raises(Deadlock):
        run(checks="default")


def test_slots_that_are_not_reset_are_seen(monkeypatch):
    """Injected: the next launch would take this one's values for its own."""
    monkeypatch.setattr(exchange, "reset", lambda *given: None)
    x, y, slots, _ = run()
    assert torch.equal(x, y) and bool(slots.view(torch.int32).all())
