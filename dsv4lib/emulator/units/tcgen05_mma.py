"""Issue tcgen05.mma and tcgen05.mma.ws: operands and their checks. The work is in tcgen05_core.py.

Collector qualifiers only permit reuse of an operand that must not change meanwhile, so they have no effect here.
Not implemented, hence refused: sparse A (``.sp``) with block scaling or ``.ws``, ``.ashift``.

Source: PTX ISA, "tcgen05.mma" and "tcgen05.mma.ws"; K = 96 of sm_103a: CUTLASS, atoms and layouts of SM103.
"""

from __future__ import annotations

import numpy as np

from dsv4lib.emulator import isa
from dsv4lib.emulator.errors import EmulatorError
from dsv4lib.emulator.isa import Form
from dsv4lib.emulator.machine.warp import Warp
from dsv4lib.emulator.ptx.ir import Imm, Instr, Memory, Operand, Vector
from dsv4lib.emulator.units.descriptor import (
    K_OF_SM103,
    SmemDescriptor,
    instruction_descriptor,
    smem_descriptor,
    zero_column_mask,
)
from dsv4lib.emulator.units.tcgen05_core import Mma
from dsv4lib.emulator.units.tcgen05_issue import (
    each_lane,
    group_ctas,
    group_of,
    issue,
    lane_value,
    tensor_unit,
    tmem_address,
)
from dsv4lib.emulator.units.tcgen05_sparse import sparse_descriptor

_COLLECT_A = "[.collector::a::<collector:fill|use|lastuse|discard>]"
_COLLECT_B = "[.collector::<buffer:b0|b1|b2|b3>::<collector:fill|use|lastuse|discard>]"
_GROUP = "<group:cta_group::1|cta_group::2>"

# Scale factors per MMA by qualifier; block32 depends on the kind.
_VECTOR = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4}
_BLOCK32 = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 2}
_DATA_IDS = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,), 3: (0, 1, 2, 3), 6: (0, 2)}
# K = 96: their scale factors may go on in the next columns.
_VECTOR_96 = {"block32": 3, "block16": 6}


def _matrix(warp: Warp, operand: Operand, lane: int) -> SmemDescriptor | int:
    """A descriptor, or the tensor-memory address of ``[a-tmem]``."""
    if isinstance(operand, Memory):
        return tmem_address(warp, operand, lane)
    return smem_descriptor(lane_value(warp, operand, np.uint64, lane))


def _issue(warp: Warp, instr: Instr, form: Form, op: Mma) -> None:
    op.queued = issue(warp, instr, tensor_unit(warp, len(op.ctas)), op, op.run)


@isa.service(
    f"tcgen05.mma.{_GROUP}.kind::<kind:f16|tf32|f8f6f4|i8>{_COLLECT_A}",
    f"tcgen05.mma.<sp:sp>.{_GROUP}.kind::<kind:f16|tf32|f8f6f4|i8>{_COLLECT_A}",
    note="no .ashift; sparse A not with M = 128 of a CTA pair; exact sums rounded to float32; D and A in tensor "
    "memory as in the compiler's fragments; by the PTX ISA alone: negation, saturation, scale-input-d, disabled lanes",
)
def mma(warp: Warp, instr: Instr, form: Form) -> None:
    """Issue tcgen05.mma.

    ``tcgen05.mma [d], a, b-desc{, [metadata]}, idesc, {disable-output-lane}, enable-input-d{, scale-input-d}``.
    """
    d, a, b, *rest = instr.operands
    metadata = rest.pop(0) if form.has("sp") else None
    idesc = rest.pop(0)
    group, kind = group_of(form), form.get("kind")
    mask = rest.pop(0) if isinstance(rest[0], Vector) else None
    enable, scale = rest[0], rest[1] if len(rest) > 1 else None
    if mask is not None and len(mask.items) != 4 * group:
        raise EmulatorError(f"disable-output-lane has {len(mask.items)} elements, cta_group::{group} takes {4 * group}")
    ctas = group_ctas(warp, group)
    for lane in each_lane(warp):
        bits, selector = lane_value(warp, idesc, np.uint32, lane), 0
        if metadata is None:
            shape = instruction_descriptor(kind, bits, group)
        else:
            shape, selector = sparse_descriptor(kind, bits, group)
        op = Mma(
            warp=warp,
            instr=instr,
            shape=shape,
            ctas=ctas,
            a=_matrix(warp, a, lane),
            b=smem_descriptor(lane_value(warp, b, np.uint64, lane)),
            d=tmem_address(warp, d, lane),
            accumulate=warp.test(enable, lane),
            scale_d=_scale_d(kind, scale),
            disabled=None if mask is None else _disabled(warp, mask, lane),
            metadata=-1 if metadata is None else tmem_address(warp, metadata, lane),
            selector=selector,
        )
        _issue(warp, instr, form, op)


def _scale_d(kind: str, operand: Operand | None) -> int:
    if operand is None:
        return 0
    if not isinstance(operand, Imm) or not 0 <= operand.bits <= 15:
        raise EmulatorError("scale-input-d must be an immediate from 0 to 15")
    if kind not in ("f16", "tf32"):
        raise EmulatorError(f"kind::{kind} has no scale-input-d")
    return operand.bits


def _disabled(warp: Warp, mask: Vector, lane: int) -> np.ndarray | None:
    """bool[CTAs, 128]: lanes that are not written; None if all are."""
    words = [warp.lane_value(item, 4, lane) for item in mask.items]
    if not any(words):
        return None
    return np.unpackbits(np.array(words, np.uint32).view(np.uint8), bitorder="little").astype(bool).reshape(-1, 128)


@isa.service(
    f"tcgen05.mma.{_GROUP}.kind::<kind:mxf8f6f4>.block_scale[.<vector:scale_vec::1X|block32>]{_COLLECT_A}",
    f"tcgen05.mma.{_GROUP}.kind::<kind:mxf4>.block_scale[.<vector:scale_vec::2X|block32>]{_COLLECT_A}",
    f"tcgen05.mma.{_GROUP}.kind::<kind:mxf4nvf4>.block_scale"
    f".<vector:scale_vec::2X|scale_vec::4X|block16|block32>{_COLLECT_A}",
    note="dense; K = 32 (mxf8f6f4) or 64, on sm_103a also 96; scale factors as in the compiler's fragments (with "
    "M = 128 of a CTA pair, B's are split between the halves of the lanes); by the PTX ISA alone: ue8m0 with block16",
)
def mma_block_scale(warp: Warp, instr: Instr, form: Form) -> None:
    """Issue a block-scaled tcgen05.mma.

    ``tcgen05.mma...block_scale [d], a, b-desc, idesc, [scale-a], [scale-b], enable-input-d``.
    """
    d, a, b, idesc, sfa, sfb, enable = instr.operands
    group, kind = group_of(form), form.get("kind")
    ctas = group_ctas(warp, group)
    for lane in each_lane(warp):
        shape = instruction_descriptor(kind, lane_value(warp, idesc, np.uint32, lane), group)
        vectors = _vectors(warp, kind, form.get("vector"), shape.k)
        for name, data_id in (("A", shape.sfa_id), ("B", shape.sfb_id)):
            if data_id not in _DATA_IDS[vectors]:
                raise EmulatorError(f"scale factor {name} data id {data_id} with {vectors} scale factors per row")
        if shape.scale == "ue4m3" and shape.k // vectors != 16:
            raise EmulatorError("ue4m3 scale factors need .block16 (.scale_vec::4X)")
        op = Mma(
            warp=warp,
            instr=instr,
            shape=shape,
            ctas=ctas,
            a=_matrix(warp, a, lane),
            b=smem_descriptor(lane_value(warp, b, np.uint64, lane)),
            d=tmem_address(warp, d, lane),
            accumulate=warp.test(enable, lane),
            block=shape.k // vectors,
            sfa=tmem_address(warp, sfa, lane),
            sfb=tmem_address(warp, sfb, lane),
        )
        _issue(warp, instr, form, op)


def _vectors(warp: Warp, kind: str, qualifier: str, k: int) -> int:
    """Scale factors per row and MMA.

    Raises:
        EmulatorError: K = 96 on another target, or with a qualifier that it does not have.
    """
    if k == K_OF_SM103:
        if not str(warp.cta.machine.arch).startswith("sm_103"):
            raise EmulatorError(f"tcgen05.mma with K = 96 needs sm_103a, this is {warp.cta.machine.arch}")
        if qualifier not in _VECTOR_96:
            raise EmulatorError(f"tcgen05.mma with K = 96 needs .block16 or .block32, not {qualifier or 'none'}")
        return _VECTOR_96[qualifier]
    return _BLOCK32[kind] if qualifier in ("", "block32") else _VECTOR[qualifier]


@isa.service(
    f"tcgen05.mma.ws.<group:cta_group::1>.kind::<kind:f16|tf32|f8f6f4|i8>{_COLLECT_B}",
    note="dense; zero-column mask with shift; D as in CUTLASS C++; by the PTX ISA alone: the mask, A in tensor memory",
)
def mma_ws(warp: Warp, instr: Instr, form: Form) -> None:
    """Issue a weight-stationary tcgen05.mma.

    ``tcgen05.mma.ws [d], a, b-desc, idesc, enable-input-d{, zero-column-mask-desc}``.
    """
    d, a, b, idesc, enable, *rest = instr.operands
    kind = form.get("kind")
    for lane in each_lane(warp):
        shape = instruction_descriptor(kind, lane_value(warp, idesc, np.uint32, lane), 1, True)
        zero = None
        if rest:
            bits = lane_value(warp, rest[0], np.uint64, lane)
            mask, shift = zero_column_mask(bits, shape.m, shape.n, shape.max_shift)
            zero = (mask, shift) if shift or mask.any() else None
        op = Mma(
            warp=warp,
            instr=instr,
            shape=shape,
            ctas=[warp.cta],
            a=_matrix(warp, a, lane),
            b=smem_descriptor(lane_value(warp, b, np.uint64, lane)),
            d=tmem_address(warp, d, lane),
            accumulate=warp.test(enable, lane),
            ws=True,
            zero_columns=zero,
        )
        _issue(warp, instr, form, op)
