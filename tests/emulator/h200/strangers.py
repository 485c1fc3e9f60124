"""Whole Hopper kernels that others wrote: which, and how they are run under a recorder, unmodified.

`python strangers.py NAME FOLDER` runs one and saves its launches as FOLDER/NAME.0.npz, NAME.1.npz, ... A case is either
one of tests/corpus (a function of a package) or an example script of the CUTLASS checkout that the environment variable
CUTLASS_CHECKOUT names. Each runs in a process of its own: packages read the architecture when they are imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE.parent.parent / "corpus"
sys.path[:0] = [str(HERE), str(CORPUS)]
ARCH = "sm_90a"
CHECKOUT = "CUTLASS_CHECKOUT"

# Script below examples/python/CuTeDSL/cute/hopper/kernel of a CUTLASS checkout, and its arguments.
EXAMPLES = {
    "cutlass_gemm_f16": ("dense_gemm/dense_gemm.py", "--mnkl 256,256,128,1"),
    "cutlass_gemm_f16_cluster": ("dense_gemm/dense_gemm.py", "--mnkl 200,264,72,2 --cluster_shape_mn 2,1"),
    "cutlass_gemm_persistent": ("dense_gemm/dense_gemm_persistent.py", "--mnkl 256,256,128,1"),
    "cutlass_gemm_fp8_2xacc": ("dense_gemm/dense_gemm_fp8_2xacc.py", "--mnkl 256,256,256,1"),
    "cutlass_fmha": ("attention/fmha.py", "--q_shape 1,128,1,128 --k_shape 1,256,1,128"),
    "cutlass_cta_norm": ("cta_norm/cta_norm.py", "--M 64 --N 1024"),
}
# Name here -> name in tests/corpus; run on SM90 whatever the case says.
PACKAGES = {
    "quack_gemm": "quack_gemm_sm90",
    "quack_gemm_ragged": "quack_gemm_ragged_sm90",
    "quack_rmsnorm": "quack_rmsnorm",
    "quack_rmsnorm_cluster": "quack_rmsnorm_cluster",
    "quack_softmax": "quack_softmax",
    "quack_topk": "quack_topk",
    "quack_cross_entropy": "quack_cross_entropy",
    "fa4": "fa4_sm90",
    "fa4_causal": "fa4_causal_sm90",
}
NAMES = (*EXAMPLES, *PACKAGES)


def missing(name: str) -> str | None:
    """Why a case cannot run here, None if it can."""
    if name in EXAMPLES:
        folder = os.environ.get(CHECKOUT)
        if not folder:
            return f"{CHECKOUT} names no CUTLASS checkout"
        script = example(name)
        return None if script.exists() else f"{script} does not exist"
    package = "flash_attn" if name.startswith("fa4") else "quack"
    for module in ("cutlass", "tvm_ffi", "triton", package):
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed (requirements-corpus.lock)"
    return None


def example(name: str) -> Path:
    """The script of an example."""
    return Path(os.environ[CHECKOUT], "examples/python/CuTeDSL/cute/hopper/kernel", EXAMPLES[name][0])


def run_example(name: str) -> None:
    """Run a script; its own comparison decides whether it ends well."""
    from dsv4lib import emulator

    script = example(name)
    sys.argv = [str(script), *EXAMPLES[name][1].split()]
    sys.path[0] = str(script.parent)
    sys.path += [str(folder) for folder in script.parents if (folder / "helpers").is_dir() or folder.name == "cute"]
    with emulator.device(ARCH, default_device="cpu"):
        runpy.run_path(str(script), run_name="__main__")


def run_package(name: str) -> None:
    """Run a case of tests/corpus and its checks."""
    import run_case

    case = next(case for case in run_case.all_cases() if case.name == PACKAGES[name])
    row = run_case.run(dataclasses.replace(case, arch=ARCH))
    if row["failures"]:
        raise AssertionError("; ".join(row["failures"]))


def main() -> None:
    """Command line."""
    name, folder = sys.argv[1], Path(sys.argv[2])
    import run_case

    os.environ.update(run_case.SWITCHES, CUTE_DSL_ARCH=ARCH)
    import launches
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)  # of scripts that do not seed
    # Memory that a program leaves uninitialised gets a fixed content, so that digests of inputs mean something.
    torch.use_deterministic_algorithms(True, warn_only=True)
    with launches.recording() as records:
        (run_example if name in EXAMPLES else run_package)(name)
    for i, record in enumerate(records):
        launches.save(record, folder / f"{name}.{i}.npz")


if __name__ == "__main__":
    main()
