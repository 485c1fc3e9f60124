"""Run one case in this process and print what was seen as one line of JSON: `python run_case.py NAME`.

Packages read the architecture when they are imported and keep compiled kernels by arguments alone, so a case for
another architecture needs a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

# Read by the packages at import: their caches of object files must not meet the emulator's.
SWITCHES = {
    "CUTE_DSL_DISABLE_FILE_CACHING": "1",
    "CUTE_DSL_LINEINFO": "1",
    "QUACK_CACHE_ENABLED": "0",
    "FLASHINFER_CUTE_DSL_DISABLE_CACHE": "1",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
    "TORCHDYNAMO_DISABLE": "1",
}


def all_cases() -> list[Any]:
    """Every case of every package."""
    import cases_cudnn
    import cases_flash_attn
    import cases_flashinfer
    import cases_quack

    packages = (cases_quack, cases_flash_attn, cases_flashinfer, cases_cudnn)
    return [case for package in packages for case in package.CASES]


def run(case: Any, **device: Any) -> dict[str, Any]:
    """Run a case.

    Args:
        device: further arguments of `emulator.device`.

    Returns:
        a row: name, arch, failures (list of texts), max_err, max_ref and rel_l2 (largest over the case's checks),
        instructions and seconds (sums over its launches), launches, hazards (count by kind), errors (texts of hazards
        that the case does not name), total_seconds (with compiling).
    """
    import torch

    from dsv4lib import emulator

    torch.manual_seed(0)
    start = time.perf_counter()
    with emulator.device(case.arch, **{"sm_count": case.sm_count, "schedule": case.schedule, **device}) as gpu:
        checks = case.run()
        seen = [check.measure() for check in checks]
        failures = [text for check in checks if (text := check.failure())]
        results = [launch.result for launch in gpu.launches]
        hazards: dict[str, int] = {}
        for hazard in gpu.hazards:
            hazards[hazard.kind] = hazards.get(hazard.kind, 0) + hazard.count
        errors = [str(h) for h in gpu.hazards if h.severity == "error" and h.kind not in case.errors]
    return {
        "name": case.name,
        "arch": case.arch,
        "failures": failures if results else [*failures, "the package launched nothing"],
        **{key: max(one[key] for one in seen) for key in ("max_err", "max_ref", "rel_l2")},
        "instructions": sum(r.instructions for r in results),
        "seconds": round(sum(r.seconds for r in results), 3),
        "launches": len(results),
        "hazards": hazards,
        "errors": errors,
        "total_seconds": round(time.perf_counter() - start, 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--schedule", help="in place of the case's own")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    case = next((c for c in all_cases() if c.name == options.name), None)
    if case is None:
        sys.exit(f"no case {options.name!r}; there are " + ", ".join(c.name for c in all_cases()))
    os.environ.update(SWITCHES, CUTE_DSL_ARCH=case.arch)
    import torch

    torch.set_num_threads(1)
    print(json.dumps(run(case, schedule=options.schedule or case.schedule, seed=options.seed)))


if __name__ == "__main__":
    main()
