"""Select experts of tokens whose logits arrive as partial sums from other CTAs.

Cross-CTA reduction with the flag in the data (`dsl.exchange`): a CTA a token receives partial sums of its logits, adds
them up, a thread an expert, and resets their slots for the next launch; its first warp selects.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from dsv4lib.dsl import exchange
from dsv4lib.errors import ConfigError
from dsv4lib.ops.router.kernel import Router
from dsv4lib.ops.router.selection import LANES, NAN, QUAD, affinity, soonest, sort_key

SPLITS = 4, 8, 16  # of a logit
GROUPS = 4  # lanes that add up a token's partial sums


class Picks(NamedTuple):
    """What selects, the logits as partial sums, and where the picks go.

    Attributes:
        chosen: bias [E] fp32, or a `Table`.
        slots: [splits, T, E to a multiple of 4] fp32, zeros before and after.
        experts: [T, k] int32. weights: [T, k] fp32.
        factor: the sum of a token's weights.
    """

    chosen: Any
    slots: cute.Tensor
    experts: cute.Tensor
    weights: cute.Tensor
    factor: Float32


class Picker(Router):
    """Select experts of logits that arrive as partial sums.

    See the module docstring.

    Args:
        experts, k, hashed: as in `Router`.
        splits: of d, partial sums of a logit: 4, 8 or 16.
        patient: load one slot until it is not empty, then all; for many tokens, whose loads keep L2 busy.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(
        self,
        experts: int = 256,
        k: int = 6,
        hashed: bool = False,
        splits: int = 16,
        patient: bool = True,
    ):
        super().__init__(experts, k, hashed)
        if splits not in SPLITS:
            raise ConfigError("splits", splits, ", ".join(map(str, SPLITS)))
        self.splits, self.patient = splits, patient
        self.padded = padded(experts)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, {self.splits} splits{', patient' * self.patient})"

    @cute.jit
    def pick(self, picks: Picks, storage: Any, token: Int32):
        """Select the experts of one token once its partial sums have arrived.

        A thread has an expert, then one warp selects.
        """
        tidx, _, _ = cute.arch.thread_idx()
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rounds = -(-LANES * QUAD * self.quads // self.threads)
        sKeys = storage.keys.get_tensor(cute.make_layout(LANES * QUAD * self.quads))
        sA = storage.affinities.get_tensor(cute.make_layout(LANES * QUAD * self.quads))
        rBias = cute.make_rmem_tensor(rounds, Float32)
        rBias.fill(0.0)
        expert, poison = Int32(0), Float32(0.0)
        if cutlass.const_expr(self.hashed):
            expert = self.of_table(picks.chosen, token)
        else:
            for i in cutlass.range_constexpr(rounds):
                if tidx + i * self.threads < self.experts:
                    rBias[i] = picks.chosen[tidx + i * self.threads]
        for i in cutlass.range_constexpr(rounds):
            number = tidx + i * self.threads
            if number < LANES * QUAD * self.quads:
                a = affinity(self.logit(picks.slots[None, token, None], number))
                sA[number] = a
                if cutlass.const_expr(not self.hashed):
                    sKeys[number] = cutlass.select_(number < self.experts, sort_key(a + rBias[i]), Uint32(0))
        cute.arch.barrier()
        if warp == 0:
            if cutlass.const_expr(not self.hashed):
                rKey = cute.make_rmem_tensor((QUAD, self.quads), Uint32)
                bad = Int32(0)
                for q in cutlass.range_constexpr(self.quads):
                    cute.autovec_copy(cute.local_tile(sKeys, (QUAD,), (lane * self.quads + q,)), rKey[None, q])
                    for j in cutlass.range_constexpr(QUAD):
                        bad = cutlass.select_(rKey[j, q] == NAN, Int32(1), bad)
                poison = self.poison(bad != 0)
                expert = soonest(rKey, sKeys, self.k)
            a = Float32(0.0)
            if (lane < self.k) & (expert >= 0):
                a = sA[expert]
            self.write(expert, a, poison, picks.experts[token, None], picks.weights[token, None], picks.factor)

    @cute.jit
    def logit(self, mSlots: cute.Tensor, number: Int32) -> Float32:
        """Sum the slots of expert ``number``'s logit once they are there, reset them.

        Four lanes have the same four experts (``number`` is the lane's modulo 32), each a quarter of the splits.
        """
        group, column = number % GROUPS, number // QUAD * QUAD
        each = self.splits // GROUPS
        there = column < self.padded
        if cutlass.const_expr(self.patient):
            begin = number // LANES * LANES
            exchange.wait(self.slot_of(mSlots, Int32(self.splits - 1), begin), begin < self.padded)
        rPart = cute.make_rmem_tensor((QUAD, each), Float32)
        first, stride = self.slot_of(mSlots, group * each, column), Int64(mSlots.stride[0]) * 4
        exchange.receive(first, stride, there, rPart)
        exchange.reset(first, stride, there, each)
        mine = Float32(0.0)
        for i in cutlass.range_constexpr(QUAD):
            total = added([rPart[i, p] for p in range(each)])
            total += cute.arch.shuffle_sync_bfly(total, 1)
            total += cute.arch.shuffle_sync_bfly(total, 2)
            mine = cutlass.select_(group == i, total, mine)
        return mine

    def slot_of(self, mSlots: cute.Tensor, share: Int32, column: Int32) -> Int64:
        """Return the address of the slots of four experts."""
        return cute.domain_offset((column,), mSlots[share, None]).iterator.toint()


def added(values: list) -> Float32:
    """Add them: neighbours, then neighbours of these."""
    while len(values) > 1:
        values = [values[i] + values[i + 1] for i in range(0, len(values), 2)]
    return values[0]


def padded(experts: int) -> int:
    """Experts of a slot's row, to whole 16 bytes."""
    return -(-experts // QUAD) * QUAD
