"""Compare RMSNorm in the CuTe DSL and in CUDA C++. Results, instructions by kind, widths of accesses, PTX."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from dsv4lib import emulator, nvrtc
from dsv4lib.dsl.compile import Compiled
from dsv4lib.errors import BackendUnavailable
from dsv4lib.ops.common import compile_cache
from dsv4lib.ops.common import cpp as cpp_cache
from dsv4lib.ops.compressor import arguments as compressor_arguments
from dsv4lib.ops.compressor import cpp as compressor_cpp
from dsv4lib.ops.compressor.kernel import Compressor
from dsv4lib.ops.fmha import arguments as fmha_arguments
from dsv4lib.ops.fmha import cpp as fmha_cpp
from dsv4lib.ops.fmha.ladder import Ladder
from dsv4lib.ops.rmsnorm import arguments, cpp
from dsv4lib.ops.rmsnorm.kernel import RmsNorm
from dsv4lib.ops.rmsnorm.op import Norm, rmsnorm
from dsv4lib.ops.router import arguments as router_arguments
from dsv4lib.ops.router import cpp as router_cpp
from dsv4lib.ops.router.kernel import Router
from dsv4lib.ops.topk import arguments as topk_arguments
from dsv4lib.ops.topk import cpp as topk_cpp
from dsv4lib.ops.topk.kernel import TopK
from dsv4lib.ops.topk.plan import plan
from dsv4lib.viz import ptx
from dsv4lib.viz.table import show_table

ARCH, EPS = "sm_100a", 1e-6
FAULTS = {"cpp_warps_forgotten": "warps_forgotten"}  # of a page -> of the kernel
DSL, CPP = "CuTe DSL", "CUDA C++"
ROW_LOAD, LENGTH = r"ld\.global\.v4\.b32", 16  # where the excerpt begins, and how many instructions it has


class Compared(NamedTuple):
    """Two kernels, by language, and what they made of the same rows.

    Attributes:
        code: what the compilers said. differ: elements that have other bits. hazards: of both launches.
    """

    code: dict[str, Compiled]
    differ: int
    hazards: int


def run(d: int, tokens: int, seed: int, fault: str = "none") -> Compared:
    """Norm the same rows by both kernels in the emulator."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(tokens, d, generator=generator) * torch.logspace(-3, 3, tokens)[:, None]).bfloat16()
    weight, y = 1 + 0.3 * torch.randn(d, generator=generator), torch.full_like(x, float("nan"))
    edits = [cpp.FAULTS[FAULTS[fault]]] if fault in FAULTS else []
    with emulator.device(ARCH, checks="race", shims=False) as gpu:
        want = rmsnorm(x, weight, EPS, backend="emulator")
        cpp.run(Norm(x, weight, y, EPS, "emulator"), *edits)
    like, of_dsl = compile_cache.default().get(RmsNorm, {"d": d}, arguments.fake_args, ARCH)
    code = {DSL: of_dsl, CPP: cpp_cache.compiled(cpp.kernel(like, *edits), ARCH)}
    differ = int((y.view(torch.int16) != want.view(torch.int16)).sum())
    return Compared(code, differ, len(gpu.hazards))


def attempt(d: int, tokens: int, seed: int, fault: str = "none") -> tuple[Compared | None, str]:
    """Do `run` where NVRTC is; returns (what it found, ""), or (None, why CUDA C++ cannot be compiled here)."""
    try:
        nvrtc.library()
    except BackendUnavailable as missing:
        return None, str(missing)
    return run(d, tokens, seed, fault), ""


def rows(compared: Compared) -> list[tuple[str, int, int]]:
    """List what differs and what does not: a row a fact, a column a language."""
    texts = [one.ptx for one in compared.code.values()]
    facts = [("registers a thread", *(one.registers for one in compared.code.values()))]
    facts += [("instructions", *(sum(1 for _ in ptx.instructions(text)) for text in texts))]
    counts = [Counter({row.family.name: row.count for row in ptx.instruction_table(text)}) for text in texts]
    for name in dict.fromkeys(name for one in counts for name in one):
        facts.append((name, *(one[name] for one in counts)))
    widths = [ptx.global_widths(text) for text in texts]
    for size in sorted(widths[0] | widths[1]):
        facts.append((f"global accesses of {size} bytes", *(one[size] for one in widths)))
    waits = [before_the_wait(text) for text in texts]
    return [*facts, ("of these, ahead of griddepcontrol.wait", *waits)]


def before_the_wait(text: str) -> int:
    """Count global accesses ahead of the wait for the kernel before."""
    opcodes = [one.opcode for one in ptx.instructions(text)]
    ahead = opcodes[: opcodes.index("griddepcontrol.wait")]
    return sum(ptx.family_of(opcode).name == "global memory" for opcode in ahead)


def show_counts(compared: Compared) -> None:
    """Display `rows`."""
    show_table(("", *compared.code), rows(compared))


def show_ptx(compared: Compared) -> None:
    """Display how both go on from the load of the row: converting, squaring, adding up."""
    ptx.show_beside({name: ptx.passage(one.ptx, ROW_LOAD, LENGTH) for name, one in compared.code.items()})


def others() -> list[tuple[str, int, int, int, int]]:
    """Compile the other kernels that both languages have. Instructions and registers of the DSL's and of the C++."""
    scores, heads = 1024, 128
    twins = {
        f"topk, 512 of {scores} scores": (TopK, plan(1, scores, 512), topk_arguments, topk_cpp.kernel(scores)),
        "router, 6 of 256, from logits": (Router, {}, router_arguments, router_cpp.kernel(256, 6)),
        "compressor, a step of CSA": (
            Compressor,
            {"single": True},
            compressor_arguments,
            compressor_cpp.kernel(Compressor(single=True)),
        ),
        f"a tile of scores, {heads} dims": (
            Ladder,
            {"stage": "a", "head_dim": heads},
            fmha_arguments,
            fmha_cpp.kernel(heads, torch.bfloat16),
        ),
    }
    found = []
    for name, (kind, settings, makes, kernel) in twins.items():
        _, dsl = compile_cache.default().get(kind, settings, makes.fake_args, ARCH)
        both = dsl, cpp_cache.compiled(kernel, ARCH)
        counts = [sum(1 for _ in ptx.instructions(one.ptx)) for one in both]
        found.append((name, *counts, *(one.registers for one in both)))
    return found


def show_others() -> None:
    """Display `others`."""
    show_table(("", *(f"{what}, {name}" for what in ("instructions", "registers") for name in (DSL, CPP))), others())
