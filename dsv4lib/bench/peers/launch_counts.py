"""Count what a traced launch executed and moved. It is sorted so that kernels can be set side by side.

Counts are of PTX warp-instructions. They are not SASS: ptxas removes most moves, merges and reorders the rest and makes
a loop over the lanes of a TMA instruction; so moves are a class of their own, and TMA loads are counted by lane. Two
launches of different length are subtracted to see what a loop costs (`difference`).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

WARP = 32
SECTOR = 32  # bytes

_FLOATS = r"(f16|bf16|f32|f64)(x2)?$"
# The first pattern that an opcode matches from its beginning names its class.
_CLASSES = (
    ("exp2", r"ex2\."),
    ("convert", r"cvt\."),
    ("maximum", rf"(max|min)\..*{_FLOATS}"),
    ("mma", r"tcgen05\.(mma|commit)"),
    ("tmem", r"tcgen05\.(ld|st|cp|wait)\b"),
    ("barrier", r"mbarrier|bar\.|barrier|fence|membar|elect|tcgen05\.fence|cp\.async\.(mbarrier|commit|wait)"),
    ("copy", r"(cp\.async|prefetch)|(ld|st)\..*global"),
    ("shared", r"(ld|st)\..*shared|(ld|st)matrix|st\.async"),
    ("float", rf"(fma|mul|add|sub|neg|abs|rcp|lg2)\..*{_FLOATS}"),
    ("select", r"setp|selp|vote|redux"),
    ("move", r"mov|cvta|shfl|prmt|ld\.param"),
    ("branch", r"bra|ret|exit"),
)
CLASSES = (*(name for name, _ in _CLASSES), "integer")  # what is left: addresses, masks, loop counters
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _CLASSES)
_VECTOR, _TYPE = re.compile(r"\.v(\d)"), re.compile(r"\.[a-z]+?(8|16|32|64|128)(x2)?$")


def class_of(opcode: str) -> str:
    """Return one of `CLASSES`.

    >>> class_of("ex2.approx.ftz.f32"), class_of("add.s32"), class_of("add.rm.f32x2")
    ('exp2', 'integer', 'float')
    """
    return next((name for name, pattern in _PATTERNS if pattern.match(opcode)), "integer")


def thread_bytes(opcode: str) -> int:
    """Return the bytes a thread moves with a load or store.

    >>> thread_bytes("ld.shared.v4.f32"), thread_bytes("st.shared.b16")
    (16, 2)
    """
    vector, width = _VECTOR.search(opcode), _TYPE.search(opcode)
    return int(vector[1] if vector else 1) * (int(width[1]) // 8 * (2 if width[2] else 1) if width else 0)


def shapes(trace: Any) -> Counter[str]:
    """Return MMAs by shape and form. ``.ws`` weight-stationary, ``ts`` A in tensor memory, ``ss`` in shared memory."""
    opcodes = dict(zip(trace.lines.tolist(), trace.opcodes.tolist(), strict=True))
    from_tensor = set(trace.tmem["op"][trace.tmem["what"] == "A"].tolist())
    found: Counter[str] = Counter()
    for row in trace.mmas:
        opcode = opcodes.get(int(row["line"]), "")
        form = (".ws " if ".ws" in opcode else "") + ("ts" if int(row["op"]) in from_tensor else "ss")
        found[f"{row['m']}x{row['n']}x{row['k']} {form}{' pair' if 'cta_group::2' in opcode else ''}"] += 1
    return found


def count(trace: Any) -> Counter[str]:
    """Return the everything that is counted of a launch, by name.

    Names: ``instructions``; ``class NAME`` (`CLASSES`); ``mma`` and ``mma SHAPE``; ``tma loads`` (one a lane: SASS
    issues them one after the other, however many lanes a PTX instruction has); bytes: ``tma``, ``cp.async`` and
    ``bulk`` (arrived in shared memory), ``stored`` (by TMA and bulk stores), ``smem to tmem`` (tcgen05.cp), ``plain``
    (32-byte sectors of global memory that threads touched; 0 unless the device has ``checks="counters"``), ``smem
    copies in``, ``smem operands`` (read by the tensor cores: A and B of every MMA), ``smem threads`` (loads and stores
    of threads as if all lanes took part), ``tmem ld``, ``tmem st``; ``flops``.
    """
    stats, out = trace.stats, Counter()
    opcodes, executed = trace.opcodes, trace.executed
    out["instructions"] = int(trace.time)
    by_opcode: Counter[str] = Counter()
    for opcode, n in zip(opcodes.tolist(), executed.tolist(), strict=True):
        by_opcode[opcode] += n
    for opcode, n in by_opcode.items():
        kind = class_of(opcode)
        out[f"class {kind}"] += n
        if kind == "shared":
            out["smem threads"] += n * WARP * thread_bytes(opcode)
    out["mma"] = stats["mma"]
    out.update({f"mma {shape}": n for shape, n in shapes(trace).items()})
    out["tma"], out["cp.async"], out["bulk"] = (
        stats[name] for name in ("tma_read_bytes", "cp_async_bytes", "bulk_load_bytes")
    )
    out["tma loads"] = stats["tma_loads"]
    out["stored"] = stats["tma_store_bytes"] + stats["bulk_store_bytes"]
    out["smem to tmem"] = stats["tcgen05_cp_bytes"]
    out["plain"] = SECTOR * stats["global_sectors"]
    sizes = 16 * np.array([len(chunks) for chunks in trace.chunks], np.int64)
    kinds = trace.smem["what"]
    out["smem operands"] = int(sizes[np.char.startswith(kinds.astype(str), "mma")].sum())
    out["smem copies in"] = int(sizes[np.isin(kinds, ("tma", "cp.async", "bulk load"))].sum())
    out["tmem ld"], out["tmem st"] = stats["tcgen05_ld_bytes"], stats["tcgen05_st_bytes"]
    out["flops"] = stats["mma_flops"]
    return out


def by_line(trace: Any) -> Counter[str]:
    """Return the warp-instructions by Python line, ``file.py:line``. "" where there is none."""
    out: Counter[str] = Counter()
    for source, n in zip(trace.sources, trace.executed.tolist(), strict=True):
        out[source.replace("\\", "/").rpartition("/")[2]] += n
    return out


def difference(longer: Counter[str], shorter: Counter[str]) -> dict[str, int]:
    """Return what the longer launch did more, without zeros."""
    return {name: longer[name] - shorter[name] for name in longer | shorter if longer[name] != shorter[name]}
