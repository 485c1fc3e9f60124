"""Count what a kernel does from the trace of an emulated launch. Each is a quantity that a machine has a rate for.

Everything is per CTA, that is per SM where one CTA fills an SM. Two launches of different length are subtracted: the
difference is the steady state of a tile, the rest is what a CTA does once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

WARP = 32
ROW_BYTES = 32  # K of an MMA
WGMMA_WARPS = 4  # a wgmma is traced as the 16 rows of each of its warps

_WIDTH = re.compile(r"(?:\.v(\d))?\.[busf](\d+)$")
_PIPES = (  # name of a quantity and the opcodes that count towards it
    ("exp", re.compile(r"(ex2|lg2|rcp|rsqrt|sqrt|tanh|sin|cos)\.")),
    ("convert", re.compile(r"cvt\.\w+\.(satfinite\.)?(bf16x2|f16x2|f16|bf16|e4m3x2|e5m2x2|f32\.(f16|bf16))")),
    ("half_rate", re.compile(r"(max|min)\.|(setp|selp|slct)\.")),
    ("full_rate", re.compile(r"(add|sub|mul|fma|mad|neg|abs|and|or|xor|not|shl|shr|lop3|prmt)\.")),
)
_MOVES = re.compile(r"(mov|cvta|cvt\.[us]64\.[us]32|ld\.param)\b")


@dataclass(frozen=True, order=True)
class Form:
    """One kind of MMA instruction.

    Attributes:
        kind: "f16", "f8f6f4", ... of tcgen05, or "wgmma".
        m, n, k: shape of the instruction (of the pair for ``group`` 2).
        group: CTAs that execute it together; ws: weight-stationary; a: where A is: "tmem", "smem" or "registers".
    """

    kind: str
    m: int
    n: int
    k: int
    group: int = 1
    ws: bool = False
    a: str = "smem"

    def __str__(self) -> str:
        more = ".ws" * self.ws + " pair" * (self.group == 2)
        return f"{self.kind}{more} {self.m}x{self.n}x{self.k} A in {self.a}"

    @property
    def flops(self) -> int:
        """Count the FLOPs of one CTA's part."""
        return 2 * self.m * self.n * self.k // self.group

    def operand_bytes(self) -> float:
        """Return the shared memory that one CTA reads for one instruction. It is its own rows of A, and its part of B.

        K of an instruction is 32 bytes of a row, whatever its elements (of E2M1 under E4M3, a byte each).
        Source: rates of SemiAnalysisAI/microbench-blackwell: the slow shapes take exactly this over 128 B a clock.
        """
        a = self.m // self.group if self.a == "smem" else 0
        return (a + self.n // self.group) * ROW_BYTES


@dataclass(frozen=True)
class Work:
    """Quantities of one CTA.

    Attributes:
        mma: how many of each form; role: the same by role ("qk", "pv", ...) where the counter knows roles.
        copies: TMA loads, each counted (lanes that issue together do so one after the other); of one warp.
        load_bytes: global -> shared memory by TMA or cp.async, as it arrives; l2_bytes: as it is read: a multicast is
            read once; plain_load_bytes, store_bytes: global memory touched by
            loads and stores of threads, as if all lanes took part; tma_store_bytes.
        smem_mma_bytes: shared memory read by the tensor core, scales included; smem_thread_bytes: by loads and stores
            of threads.
        tmem_load_bytes, tmem_store_bytes: between tensor memory and registers.
        instructions: PTX warp-instructions without moves, which ptxas removes; exp, convert, half_rate, full_rate:
            those of the pipe with this name; syncs: waits that a warp cannot fill (barriers, mbarriers, TMEM loads).
    """

    mma: Counter[Form] = field(default_factory=Counter)
    copies: float = 0
    load_bytes: float = 0
    l2_bytes: float = 0
    plain_load_bytes: float = 0
    store_bytes: float = 0
    tma_store_bytes: float = 0
    smem_mma_bytes: float = 0
    smem_thread_bytes: float = 0
    tmem_load_bytes: float = 0
    tmem_store_bytes: float = 0
    instructions: float = 0
    exp: float = 0
    convert: float = 0
    half_rate: float = 0
    full_rate: float = 0
    syncs: float = 0

    def _join(self, other: Work, join: Callable[[float, float], float]) -> Work:
        forms = {form: join(self.mma[form], other.mma[form]) for form in self.mma | other.mma}
        rest = {name: join(getattr(self, name), getattr(other, name)) for name in NUMBERS}
        return Work(Counter({form: n for form, n in forms.items() if n}), **rest)

    def __add__(self, other: Work) -> Work:
        return self._join(other, lambda a, b: a + b)

    def __sub__(self, other: Work) -> Work:
        return self._join(other, lambda a, b: a - b)

    def __mul__(self, factor: float) -> Work:
        return self._join(Work(), lambda a, _: a * factor)

    @property
    def flops(self) -> float:
        """Count the FLOPs of its MMAs."""
        return sum(form.flops * n for form, n in self.mma.items())


NUMBERS = tuple(f.name for f in fields(Work) if f.name != "mma")


def forms(trace: Any) -> list[Form]:
    """Return the form of each row of ``trace.mmas``."""
    opcodes = dict(zip(trace.lines.tolist(), trace.opcodes.tolist(), strict=True))
    in_tensor = set(trace.tmem["op"][trace.tmem["what"] == "A"].tolist())
    what = trace.smem["what"]
    in_shared = set(trace.smem["op"][(what == "mma A") | (what == "wgmma A")].tolist())
    out = []
    for row in trace.mmas:
        opcode, op = opcodes.get(int(row["line"]), ""), int(row["op"])
        a = "tmem" if op in in_tensor else "smem" if op in in_shared else "registers"
        wgmma = str(row["kind"]).startswith("wgmma")
        m = int(row["m"]) * (WGMMA_WARPS if wgmma else 1)
        group = 2 if "cta_group::2" in opcode else 1
        kind = "wgmma" if wgmma else str(row["kind"])
        out.append(Form(kind, m, int(row["n"]), int(row["k"]), group, ".ws" in opcode, a))
    return out


def count_lines(trace: Any, chosen: Callable[[str], bool]) -> Work:
    """Return the instructions, as `count` sorts them, of Python lines. Those ``file:line`` that are ``chosen``."""
    numbers: Counter[str] = Counter()
    for source, opcode, n in zip(trace.sources, trace.opcodes, trace.executed.tolist(), strict=True):
        if chosen(source):
            _tally(numbers, str(opcode), n / trace.stats["ctas"])
    return Work(**numbers)


def count(trace: Any, chosen: np.ndarray | None = None) -> Work:
    """Count the work of a CTA of a traced launch, on average over those that ran.

    Args:
        trace: an `emulator.trace.trace.Trace`.
        chosen: bool, one a row of ``trace.mmas``: count these MMAs and nothing else, to separate the roles.
    """
    ctas = trace.stats["ctas"]
    mma: Counter[Form] = Counter()
    for i, form in enumerate(forms(trace)):
        if chosen is None or chosen[i]:
            mma[form] += form.group / (WGMMA_WARPS if form.kind == "wgmma" else 1) / ctas
    operands = sum(form.operand_bytes() * n for form, n in mma.items())
    if chosen is not None:
        return Work(mma, smem_mma_bytes=operands)
    numbers: Counter[str] = Counter(smem_mma_bytes=operands)
    for opcode, n in trace.counts().items():
        _tally(numbers, opcode, n / ctas)
    stats = trace.stats
    numbers["smem_mma_bytes"] += stats["tcgen05_cp_bytes"] / ctas
    numbers["copies"] = stats["tma_loads"] / ctas
    numbers["load_bytes"] = (stats["tma_load_bytes"] + stats["cp_async_bytes"] + stats["bulk_load_bytes"]) / ctas
    again = stats["tma_load_bytes"] - stats["tma_read_bytes"]  # of a multicast: what arrived and was not read again
    numbers["l2_bytes"] = numbers["load_bytes"] - again / ctas
    numbers["tma_store_bytes"] = (stats["tma_store_bytes"] + stats["bulk_store_bytes"]) / ctas
    numbers["tmem_load_bytes"] = stats["tcgen05_ld_bytes"] / ctas
    numbers["tmem_store_bytes"] = stats["tcgen05_st_bytes"] / ctas
    return Work(mma, **numbers)


def _tally(numbers: Counter[str], opcode: str, n: float) -> None:
    """Add ``n`` warp-instructions of one opcode."""
    if _MOVES.match(opcode):
        return
    numbers["instructions"] += n
    for name, pattern in _PIPES:
        if pattern.match(opcode):
            numbers[name] += n
            break
    if opcode.startswith(("bar.sync", "barrier.", "mbarrier.try_wait", "mbarrier.test_wait", "tcgen05.wait")):
        numbers["syncs"] += n
    width = _WIDTH.search(opcode)
    if width is None:
        return
    moved = n * WARP * int(width[1] or 1) * int(width[2]) // 8
    if opcode.startswith(("ld.shared", "st.shared", "stmatrix", "ldmatrix")):
        numbers["smem_thread_bytes"] += moved
    elif opcode.startswith("ld.global"):
        numbers["plain_load_bytes"] += moved
    elif opcode.startswith("st.global"):
        numbers["store_bytes"] += moved
