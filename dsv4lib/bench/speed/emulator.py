"""Run `dsv4 bench emulator`. How fast kernels run in the emulator on this machine, and where the time goes.

Seconds here say how long this machine works on a kernel, never how fast a kernel is on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dsv4lib import backends
from dsv4lib.bench.speed import examples
from dsv4lib.bench.speed.rows import Row
from dsv4lib.emulator.machine import program
from dsv4lib.emulator.machine.machine import GlobalMemory, Machine
from dsv4lib.emulator.machine.request import LaunchRequest, LaunchResult
from dsv4lib.emulator.ptx import parse

_HOW = "CPU time, best of 3"
ALU_FLOOR = 1e6  # warp-instructions a second and core
PREPARATION_FLOOR = 1.5 / 4200  # seconds a PTX instruction, first run of a kernel in a fresh process

# Eight warps, 16 dependent and independent integer and float operations a turn.
_ALU_TURNS, _ALU_WARPS = 4000, 8
_ALU_BODY = "\n".join(
    f"fma.rn.f32 %f{i}, %f{i}, %f{(i + 1) % 8}, %f{(i + 3) % 8};\nadd.s32 %r{i}, %r{i}, %r{(i + 1) % 8};"
    for i in range(8)
)
_ALU = f""".version 9.0
.target sm_100a
.address_size 64
.entry alu(.param .u64 out) {{
.reg .pred %p<2>; .reg .b32 %r<16>; .reg .f32 %f<8>; .reg .b64 %rd<2>;
{"".join(f"mov.u32 %r{i}, %tid.x; cvt.rn.f32.u32 %f{i}, %r{i};" for i in range(8))}
mov.u32 %r9, 0;
LOOP:
{_ALU_BODY}
add.u32 %r9, %r9, 1;
setp.lt.u32 %p1, %r9, {_ALU_TURNS};
@%p1 bra LOOP;
ld.param.u64 %rd1, [out];
st.global.u32 [%rd1], %r0;
ret;
}}"""


def best(run: Callable[[], LaunchResult], repeats: int = 3) -> tuple[float, LaunchResult]:
    """Return CPU seconds of the quickest of several runs, and its result. Other processes disturb it least."""
    runs = []
    for _ in range(repeats):
        began = time.process_time()
        result = run()
        runs.append((time.process_time() - began, result))
    return min(runs, key=lambda timed: timed[0])


def alu() -> Row:
    """Measure the warp-instructions a second of code that only computes."""
    module = parse.parse(_ALU)
    lowered = program.lower(module.kernels["alu"], module)
    out = np.zeros(64, np.uint32)

    def run() -> LaunchResult:
        memory = GlobalMemory()
        memory.register_array(out, "out")
        params = int(out.ctypes.data).to_bytes(8, "little")
        request = LaunchRequest("alu", module, (1, 1, 1), (32 * _ALU_WARPS, 1, 1), params=params)
        return Machine(lowered, request, memory).run()

    seconds, result = best(run)
    detail = f"{result.instructions} warp-instructions of {_ALU_WARPS} warps in {seconds * 1e3:.1f} ms; {_HOW}"
    return Row("ALU-bound code", result.instructions / seconds, "warp-instructions/s", ALU_FLOOR, True, detail)


# Run in a fresh process: parse and lower a real kernel with an empty or a filled code cache.
_PREPARE = """
import sys, time
text = open(sys.argv[1]).read()
from dsv4lib.emulator.isa import implementations
from dsv4lib.emulator.machine import program
from dsv4lib.emulator.ptx import parse
began = time.process_time()
implementations.load()
module = parse.parse(text)
kernel = next(iter(module.kernels.values()))
program.lower(kernel, module)
print(time.process_time() - began, len(kernel.instructions))
"""


def preparation(ptx: str, folder: str) -> list[Row]:
    """Measure seconds from PTX text to a kernel that can run. Without and with cached native code.

    Args:
        ptx: a module with one kernel.
        folder: an empty scratch folder.
    """
    path = os.path.join(folder, "kernel.ptx")
    with open(path, "w") as file:
        file.write(ptx)
    variables = {**os.environ, "DSV4_CACHE": os.path.join(folder, "cache")}
    rows = []
    for state in ("no cached code", "cached code"):
        command = [sys.executable, "-c", _PREPARE, path]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True, timeout=300)
        seconds, count = float(done.stdout.split()[0]), int(done.stdout.split()[1])
        floor = PREPARATION_FLOOR * 4200 if state == "cached code" else None
        detail = f"gemm_tile, {count} PTX instructions; CPU time"
        rows.append(Row(f"preparation, {state}", seconds, "s", floor, detail=detail))
    return rows


def gemm(k: int = 4096) -> tuple[list[Row], str]:
    """Measure our SM100 GEMM tile, 128 x 128 x ``k`` in bf16; return its PTX too."""
    from dsv4lib.dsl.compile import compile_for
    from dsv4lib.ops.gemm_tile import inputs, sm100

    kernel = sm100.GemmTile()
    done = compile_for(kernel, kernel.fake_args(), "sm_100a")
    a, b, c = inputs.operands(128, 128, k, "bf16", "fp32")
    arguments = kernel.launch_args(a, b, c)
    began = time.perf_counter()
    backends.launch("emulator", done, *arguments)
    first = time.perf_counter() - began
    seconds, result = best(lambda: backends.launch("emulator", done, *arguments).launches[-1].result)
    counts = ", ".join(f"{name} {result.stats[name]}" for name in ("mma", "tma_loads") if result.stats[name])
    detail = f"{result.instructions} warp-instructions, {counts}; {_HOW}"
    rows = [
        Row(f"gemm_tile 128x128x{k} bf16, first launch", first, "s", detail="binding and lowering included"),
        Row(f"gemm_tile 128x128x{k} bf16", seconds, "s", detail=detail),
    ]
    return rows, done.ptx


def run(folder: str, cutlass: Path | None = None) -> list[Row]:
    """Measure every row. ``folder`` is scratch, ``cutlass`` a CUTLASS checkout for those that run NVIDIA's examples."""
    rows, ptx = gemm()
    return [alu(), *preparation(ptx, folder), *rows, *examples.measure(cutlass, folder)]
