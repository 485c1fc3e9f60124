"""Run one tcgen05.mma, from its operands to its accumulator. It is pure work on SMEM and TMEM, no scheduling.

Arithmetic: the exact sum of one MMA's products is rounded once to float32 (tensor_sums.py) and then added to the
accumulator in float32. So an element depends on its row of A, its column of B, their scale factors and its accumulator,
and on nothing else: neither on M, N and what else is multiplied, nor on the schedule. Hardware sums in another order,
with another intermediate width, which the PTX ISA leaves open ("at least single precision"): results agree within
rounding of the sum, not bit for bit. Sums of integers that float32 holds exactly are exact.

Source: PTX ISA, "TensorCore 5th Generation Matrix Multiply and accumulate Operations".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dsv4lib.emulator.checks.shadow import columns_of
from dsv4lib.emulator.errors import EmulatorError, Place
from dsv4lib.emulator.units import shared, tcgen05_sparse
from dsv4lib.emulator.units.descriptor import ELEMENT_BITS, K_OF_SM103, InstrDescriptor, SmemDescriptor
from dsv4lib.emulator.units.numeric import SCALES, accumulate_int32, decode, decode_half, encode_half
from dsv4lib.emulator.units.operand import Operand, k_major, mn_major
from dsv4lib.emulator.units.sparse import expand
from dsv4lib.emulator.units.tcgen05_layout import Region, by_row, columns_used, lanes_allowed, regions
from dsv4lib.emulator.units.tensor_sums import Span, exact, rounded_sums, span
from dsv4lib.emulator.units.tmem import COLUMNS, LANES, QUARTER, Tmem, check_span, tmem_of

if TYPE_CHECKING:
    from dsv4lib.emulator.machine.async_units import AsyncOp
    from dsv4lib.emulator.machine.cta import Cta
    from dsv4lib.emulator.machine.warp import Warp
    from dsv4lib.emulator.ptx.ir import Instr

_LANE_NUMBERS = np.broadcast_to(np.arange(LANES)[:, None], (LANES, COLUMNS))
A_WORDS = 8  # tensor-memory columns of a row of A: 32 bytes in every kind

# Bytes of each 16 that hold elements of 4 and 6 bits in the kinds with 8-bit elements; the rest may be anything.
_USED = {"e2m1": 8, "e2m3": 12, "e3m2": 12}


@dataclass
class Mma:
    """Everything a tcgen05.mma has captured at issue.

    Attributes:
        warp, instr: the issuer.
        shape: the instruction descriptor.
        ctas: the CTA, or both of the pair, even rank first.
        a: descriptor, or tensor-memory address; b: descriptor.
        d: tensor-memory address.
        accumulate: add the old D; scale_d: it is multiplied by 2^-scale_d.
        ws: weight-stationary form.
        disabled: bool[CTAs, 128], lanes of D that are not written; None = all are.
        zero_columns: mask and shift of B's columns (.ws).
        block: elements of K that share a scale factor; sfa, sfb: tensor-memory addresses.
        metadata: tensor-memory address of where the elements of a sparse A stand, -1 = A is dense; selector: of them.
        queued: its operation in the tensor pipe.
    """

    warp: Warp
    instr: Instr
    shape: InstrDescriptor
    ctas: list[Cta]
    a: SmemDescriptor | int
    b: SmemDescriptor
    d: int
    accumulate: bool
    scale_d: int = 0
    ws: bool = False
    disabled: np.ndarray | None = None
    zero_columns: tuple[np.ndarray, int] | None = None
    block: int = 0
    sfa: int = 0
    sfb: int = 0
    metadata: int = -1
    selector: int = 0
    queued: AsyncOp | None = None
    regions: tuple[Region, ...] = field(init=False)

    def __post_init__(self) -> None:
        s = self.shape
        self.regions = regions(s.m, s.n, len(self.ctas), self.ws)
        allowed = lanes_allowed(s.m, len(self.ctas), self.ws)
        for name, address in (("D", self.d), ("A", self.a)):
            if isinstance(address, int) and address >> 16 not in allowed:
                raise EmulatorError(
                    f"tcgen05.mma M={s.m}: {name} at lane {address >> 16} of tensor memory, "
                    f"must be {' or '.join(map(str, allowed))}"
                )
        if isinstance(self.a, int) and allowed != (0,) and self.a >> 16 != self.d >> 16:
            raise EmulatorError("tcgen05.mma M=64: A and D must have the same lane alignment")
        if isinstance(self.a, int) and s.k == K_OF_SM103:
            raise EmulatorError("tcgen05.mma: A in tensor memory with K = 96 is not supported")
        crossing = [x for x in (self.a, self.b) if isinstance(x, SmemDescriptor) and x.further >= 0]
        if crossing and s.k != K_OF_SM103:
            raise EmulatorError("tcgen05.mma: an absolute leading address is for K = 96 only")
        if isinstance(self.a, int) and s.mn_major_a:
            raise EmulatorError("tcgen05.mma: A in tensor memory cannot be transposed")

    def __str__(self) -> str:
        s = self.shape
        return f"mma {s.kind} {s.m}x{s.n}x{s.k} -> tmem column {self.d & 0xFFFF}"

    def report(self, kind: str, message: str, **facts: object) -> None:
        """Report a hazard of this instruction."""
        self.ctas[0].machine.report(kind, f"tcgen05.mma {message}", self.place, **facts)

    @property
    def place(self) -> Place | None:
        """Where it was issued."""
        return self.warp.place(self.instr) if self.queued is None else self.queued.place

    @property
    def width(self) -> int:
        """Columns of D."""
        return columns_used(self.shape.n, self.regions)

    def run(self) -> None:
        """Multiply and accumulate."""
        s = self.shape
        product = self._product()
        column, lane, width = self.d & 0xFFFF, self.d >> 16, self.width
        for cta in self.ctas:
            if not self.reads(cta, column, width, "D"):
                return
        with np.errstate(over="ignore", invalid="ignore"):
            for region in self.regions:
                self._store(region, region.part(product), column, width, lane)
        machine = self.ctas[0].machine
        machine.stats["mma"] += 1
        machine.stats["mma_flops"] += 2 * s.m * s.n * s.k
        if machine.trace is not None:
            machine.trace.mma(self)

    # --- operands ---------------------------------------------------------------------------------------------------

    def _product(self) -> np.ndarray:
        """float32 (M, N)."""
        s, pair = self.shape, len(self.ctas)
        b = self._b()
        a = [self._a(cta) for cta in self.ctas]
        spans = span(a, s.a), span([b], s.b)
        left, right, proved = a, [b], exact(*spans, s.k)
        if s.scale:
            left, right, factors = self._scaled(a, b)
            # One power of two for a whole row shifts its sums.
            proved = proved and self.block == s.k and s.scale == "ue8m0"
            spans = spans[0] * factors[0], spans[1] * factors[1]
        groups = len(self.regions) // pair
        if groups > 1 and isinstance(self.a, int):
            pairs = zip(left, right * pair, strict=False)
            return np.concatenate([_grouped_sums(x, y, groups, spans, proved) for x, y in pairs])
        if len(right) == 1:
            return rounded_sums(np.concatenate(left) if pair > 1 else left[0], right[0], *spans, proved)
        return np.concatenate([rounded_sums(x, y, *spans, proved) for x, y in zip(left, right, strict=True)])

    def _scaled(
        self, a: list[np.ndarray], b: np.ndarray
    ) -> tuple[list[np.ndarray], list[np.ndarray], tuple[Span, Span]]:
        """Scale the operands: each CTA's A; B once, or once a CTA if their copies of its factors differ.

        Returns:
            (float64 A, float64 B, spans of the factors of both).
        """
        s, pair = self.shape, len(self.ctas)
        rows, groups = s.m // pair, len(self.regions) // pair
        codes_a = [self._scales(cta, self.sfa, rows, s.sfa_id, "A") for cta in self.ctas]
        codes_b = [self._scales(cta, self.sfb, s.n, s.sfb_id, "B", groups) for cta in self.ctas]
        if all((codes == codes_b[0]).all() for codes in codes_b[1:]):
            del codes_b[1:]
        factors_a, factors_b = ([SCALES[s.scale].take(x) for x in codes] for codes in (codes_a, codes_b))
        # The rows of A are there once per group of lanes if A is in tensor memory.
        left = [self._times(x, np.tile(f, (len(x) // rows, 1))) for x, f in zip(a, factors_a, strict=True)]
        return left, [self._times(b, f) for f in factors_b], (span(factors_a, s.scale), span(factors_b, s.scale))

    def _times(self, values: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """float64 (rows, K): values times their block's scale factor."""
        blocks = values.reshape(len(values), -1, self.block).astype(np.float64)
        blocks *= factors[:, :, None]
        return blocks.reshape(values.shape)

    def _a(self, cta: Cta) -> np.ndarray:
        """float32 (rows, K) of one CTA; all 128 lanes where every group of lanes has its own A."""
        s, sparse = self.shape, self.metadata >= 0
        if isinstance(self.a, int):
            values = decode(self._a_in_tmem(cta), s.a)
        else:
            rows, k = s.m // len(self.ctas), s.k // 2 if sparse else s.k
            values = self._matrix(cta, self.a, (rows, k), s.a, s.mn_major_a, "A")
        if sparse:
            values = expand(values, tcgen05_sparse.codes_of(self, cta), s.a, True)
        return -values if s.negate_a else values

    def _a_in_tmem(self, cta: Cta) -> np.ndarray:
        """uint8 (rows, 32)."""
        tmem, column = tmem_of(cta), self.a & 0xFFFF
        if not self.reads(cta, column, A_WORDS, "A"):
            raise EmulatorError(f"tcgen05.mma reads A from columns {column} to {column + A_WORDS - 1}", self.place)
        if self.regions[0].split:
            region, lane = self.regions[0], self.a >> 16
            key = region.key(lane, column, A_WORDS)
            data, init = (region.view(x, lane, column, A_WORDS) for x in (tmem.data, tmem.init))
        else:
            key = 0, LANES, column, A_WORDS
            data, init = (x[:, column : column + A_WORDS] for x in (tmem.data, tmem.init))
        if not tmem.written(key, init):
            self.report("uninitialised_tmem", f"reads uninitialised tensor memory for A (column {column})")
        if cta.machine.race is not None and cta.machine.race.full:
            split = self.regions[0].split
            cells = region.cells(lane, column, A_WORDS) if split else columns_of(column, A_WORDS)
            cta.machine.race.tensor(cta, cells, False)
        if cta.machine.trace is not None:
            lanes = np.unique(self.regions[0].view(_LANE_NUMBERS, self.a >> 16, column, 1))
            lanes = lanes if self.regions[0].split else np.arange(LANES)
            cta.machine.trace.tmem_access("A", cta, self.warp, self.instr, lanes, (column, column + A_WORDS))
        return np.ascontiguousarray(data).reshape(-1, A_WORDS).view(np.uint8)

    def _b(self) -> np.ndarray:
        """float32 (N, K)."""
        s, pair = self.shape, len(self.ctas)
        rows, shift = s.n // pair, 0
        if self.zero_columns is not None:
            mask, shift = self.zero_columns
        # A shifted B is read further; in whole 16-byte chunks if they run along N.
        more = -(-shift // 16) * 16 if s.mn_major_b else shift
        parts = [self._matrix(cta, self.b, (rows + more, s.k), s.b, s.mn_major_b, "B") for cta in self.ctas]
        values = np.concatenate(parts) if pair > 1 else parts[0]
        if self.zero_columns is not None:
            values = np.where(mask[:, None], np.float32(0), values[shift : shift + s.n])
        return -values if s.negate_b else values

    def _matrix(
        self, cta: Cta, descriptor: SmemDescriptor, size: tuple[int, int], fmt: str, transposed: bool, what: str
    ) -> np.ndarray:
        """float32 (rows, K), of ``size``, of a matrix in shared memory."""
        s, used, (rows, k) = self.shape, 16, size
        if transposed:
            operand = mn_major(cta.smem, descriptor, rows, k, ELEMENT_BITS[s.kind] // 8)
        else:
            used = _USED.get(fmt, 16)
            if used < 16:
                fmt += "_padded"
            operand = k_major(cta.smem, descriptor, rows, k * ELEMENT_BITS[s.kind] // 8)
        self._check(cta, operand, what, used)
        values = decode(operand.read(), fmt)
        return values.T if transposed else values

    def _check(self, cta: Cta, operand: Operand, what: str, used: int = 16) -> None:
        if cta.machine.trace is not None:
            cta.machine.trace.smem_operand(cta, self.warp, self.instr, f"mma {what}", operand)
        if cta.machine.race is not None and cta.machine.race.full:
            cta.machine.race.shared_chunks(cta, operand.first + operand.chunks, False)
        if not operand.initialised(used):
            low, high = operand.span()
            self.report(
                "uninitialised_smem", f"reads uninitialised shared memory of {cta} for {what}, {low:#x}-{high:#x}"
            )
        if found := operand.unfenced():
            kind, how, writers = found
            owner = shared.writer_of(cta, operand.first + operand.chunks)
            self.report(kind, f"reads shared memory of {cta} for {what} that {how}", warps=writers, owner=owner)

    def _scales(self, cta: Cta, address: int, rows: int, data_id: int, what: str, groups: int = 1) -> np.ndarray:
        """uint8 (rows, blocks) of scale factors in tensor memory.

        ``groups``: of lanes that hold different rows. In layout B each half of the lanes multiplies its own half of N
        and finds the factors of that half, and no others, in its two quarters.
        """
        s, tmem = self.shape, tmem_of(cta)
        # Bits 30 and 31 carry the data id in kernels that take it from the address.
        lane, column = address >> 16 & 0x3FFF, address & 0xFFFF
        if lane:
            raise EmulatorError(
                f"tcgen05.mma: scale factors {what} at lane {lane} of tensor memory, must be 0", self.place
            )
        part = rows // groups
        step, blocks = -(-part // QUARTER), s.k // self.block
        used = -(-(data_id + blocks) // 4)  # words of a row; more than one with K = 96
        count = step * used
        if not self.reads(cta, column, count, f"scale factors {what}"):
            raise EmulatorError(f"tcgen05.mma reads scale factors {what} from column {column}", self.place)
        if cta.machine.race is not None and cta.machine.race.full:
            cta.machine.race.tensor(cta, columns_of(column, count), False)
        starts = range(column, column + count, step)
        words = np.stack([by_row(tmem.data[:, c : c + step], part) for c in starts], -1)
        codes = words.view(np.uint8).reshape(groups, -1, part, 4 * used)[..., data_id : data_id + blocks]
        init = tmem.init[:, column : column + count]
        written = tmem.written((0, LANES, column, count), init)
        if not written and not all(by_row(tmem.init[:, c : c + step], part).all() for c in starts):
            self.report("uninitialised_tmem", f"reads uninitialised scale factors {what} (column {column})")
        elif (codes != codes[:, :1]).any():
            among = "the four lane quarters" if groups == 1 else "two lane quarters with the same columns of D"
            self.report("scale_factors_not_replicated", f"scale factors {what} differ between {among}")
        return codes[:, 0].reshape(rows, blocks)

    # --- accumulator ------------------------------------------------------------------------------------------------

    def reads(self, cta: Cta, column: int, count: int, what: str) -> bool:
        """Are the columns allocated? False, after a report, if they do not exist."""
        if tmem_of(cta).fault(column, count) is None:
            return True
        return check_span(cta, column, count, f"tcgen05.mma {what}", self.place) and column + count <= COLUMNS

    def _store(self, region: Region, part: np.ndarray, column: int, width: int, lane: int) -> None:
        """Accumulate one block."""
        s = self.shape
        tmem: Tmem = tmem_of(self.ctas[region.cta])
        init, key = region.view(tmem.init, lane, column, width), region.key(lane, column, width)
        live = self._live(region, lane)
        race = self.warp.cta.machine.race
        if race is not None and race.full and live is None:
            cta, where = self.ctas[region.cta], region.cells(lane, column, width)
            race.product(cta, where, column, width, self.accumulate)
            race.tensor(cta, where, True, repeats=True)
        if self.accumulate and not (tmem.written(key, init) if live is None else init[live].all()):
            self.report("uninitialised_tmem", f"accumulates onto uninitialised tensor memory (column {column})")
        cells = region.view(tmem.floats if s.d == "f32" else tmem.data, lane, column, width)
        if s.d == "f32":
            if not self.accumulate:
                values = part
            elif self.scale_d:
                values = part + cells * np.float32(2.0**-self.scale_d)
            elif live is None:
                np.add(cells, part, out=cells)
                values = None
            else:
                values = part + cells
        elif s.d == "f16":
            old = decode_half(cells) * np.float32(2.0**-self.scale_d) if self.accumulate else np.float32(0)
            values = encode_half(part + old).astype(np.uint32)
        else:
            values = accumulate_int32(part, cells.view(np.int32) if self.accumulate else None, s.saturate).view(
                np.uint32
            )
        if live is None:
            if values is not None:
                cells[...] = values
            tmem.write(key, init)
        else:
            cells[live] = values[live]
            init[live] = True

    def _live(self, region: Region, lane: int) -> np.ndarray | None:
        """Lanes of the block that are written, None = all."""
        if self.disabled is None:
            return None
        off = np.broadcast_to(self.disabled[region.cta][:, None], (LANES, COLUMNS))
        return ~region.view(off, lane, 0, 1)[..., 0]


def _grouped_sums(a: np.ndarray, b: np.ndarray, groups: int, spans: tuple[Span, Span], proved: bool) -> np.ndarray:
    """Layouts B, E, G with A in tensor memory: each group of lanes has its own A and its own part of N."""
    rows, columns = len(a) // groups, len(b) // groups
    parts = [
        rounded_sums(a[g * rows : (g + 1) * rows], b[g * columns : (g + 1) * columns], *spans, proved)
        for g in range(groups)
    ]
    return np.concatenate(parts, 1)
