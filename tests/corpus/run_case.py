"""Run cases in this process and print what was seen, a line of JSON for each: `python run_case.py NAME...`.

The name "-" stands for those that standard input gives, a line each; they need `--arch`.

Packages read the architecture when they are imported and keep compiled kernels by arguments alone, so cases for
different architectures need different processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
import traceback
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

SCHEDULES: dict[str, dict[str, Any]] = {
    "round_robin": {"schedule": "round_robin"},
    "oldest_first": {"schedule": "oldest_first"},
    "newest_first": {"schedule": "newest_first"},
    "adversarial": {"schedule": "adversarial"},
    **{f"random {seed}": {"schedule": "random", "seed": seed} for seed in range(3)},
}


def all_cases() -> list[Any]:
    """Every case of every package."""
    import cases_cudnn
    import cases_cudnn_more
    import cases_flash_attn
    import cases_flash_attn_more
    import cases_flashinfer
    import cases_flashinfer_mega
    import cases_gluon
    import cases_quack
    import cases_quack_more
    import cases_simt
    import cases_triton
    import cases_triton_packages

    packages = (
        cases_quack,
        cases_quack_more,
        cases_flash_attn,
        cases_flash_attn_more,
        cases_flashinfer,
        cases_flashinfer_mega,
        cases_cudnn,
        cases_cudnn_more,
        cases_triton,
        cases_triton_packages,
        cases_simt,
        cases_gluon,
    )
    return [case for package in packages for case in package.CASES]


def run(case: Any, **device: Any) -> dict[str, Any]:
    """Run a case.

    Args:
        device: further arguments of `emulator.device`.

    Returns:
        a row: name, arch, failures (list of texts), max_err, max_ref and rel_l2 (largest over the case's checks),
        bits (a hash of everything that was checked), instructions and seconds (sums over its launches), launches,
        hazards and lints (count by kind), texts (of up to three hazards or lints of a kind), total_seconds (with
        compiling).
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
        found = gpu.hazards
    counts: dict[str, dict[str, int]] = {"error": {}, "lint": {}}
    texts: dict[str, list[str]] = {}
    for hazard in found:
        kinds = counts[hazard.severity]
        kinds[hazard.kind] = kinds.get(hazard.kind, 0) + hazard.count
        texts.setdefault(hazard.kind, []).append(str(hazard))
    return {
        "name": case.name,
        "arch": case.arch,
        "failures": failures if results else [*failures, "the package launched nothing"],
        **{key: max(one[key] for one in seen) for key in ("max_err", "max_ref", "rel_l2")},
        "bits": digest(checks),
        "instructions": sum(r.instructions for r in results),
        "seconds": round(sum(r.seconds for r in results), 3),
        "launches": len(results),
        "hazards": counts["error"],
        "lints": counts["lint"],
        "texts": [text for kind in texts.values() for text in kind[:3]],
        "total_seconds": round(time.perf_counter() - start, 1),
    }


def digest(checks: list[Any]) -> str:
    """A hash of the bits of every checked array."""
    import torch

    seen = hashlib.sha256()
    for check in checks:
        seen.update(check.got.reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:16]


def run_all(case: Any, chosen: bool = False) -> dict[str, Any]:
    """`run` with the default checks, then with the race detector under every schedule of `SCHEDULES`.

    Args:
        chosen: under those of the case alone, if it names some.

    Returns:
        the row of the first run, and: race_hazards and race_lints (largest count by kind over the schedules), differ
        (schedules whose bits are others than the first run's), wrong (schedules under which a check fails or the launch
        is stopped), unstable (as `Case.unstable`).
    """
    from dsv4lib.emulator.errors import EmulatorError

    row = run(case)
    row.update(race_hazards={}, race_lints={}, differ=[], wrong=[])
    for name in case.schedules if chosen and case.schedules else SCHEDULES:
        try:
            seen = run(case, checks="race", **SCHEDULES[name])
        except EmulatorError as error:
            seen = {"bits": "", "failures": [str(error)], "hazards": {}, "lints": {}, "texts": [f"{name}: {error}"]}
        for group in ("hazards", "lints"):
            for kind, count in seen[group].items():
                row[f"race_{group}"][kind] = max(count, row[f"race_{group}"].get(kind, 0))
        if seen["bits"] != row["bits"]:
            row["differ"].append(name)
        if seen["failures"]:
            row["wrong"].append(name)
        row["texts"] += [text for text in seen["texts"] if text not in row["texts"]]
    row["unstable"] = "wrong" if row["wrong"] else "bits" if row["differ"] else ""
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--schedule", help="in place of the case's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checks", default="default")
    parser.add_argument("--arch", help="of the cases; default: that of the first name")
    parser.add_argument("--all", action="store_true", help="with the race detector and under every schedule too")
    parser.add_argument("--chosen", action="store_true", help="with --all: under the schedules that a case names alone")
    options = parser.parse_args()
    known = {case.name: case for case in all_cases()}
    if unknown := set(options.names) - {*known, "-"}:
        sys.exit(f"no case {', '.join(sorted(unknown))}; there are " + ", ".join(known))
    arch = options.arch or known[options.names[0]].arch
    if any(known[name].arch != arch for name in options.names if name != "-"):
        sys.exit("cases of one process must have one architecture")
    os.environ.update(SWITCHES, CUTE_DSL_ARCH=arch)
    import torch

    torch.set_num_threads(1)
    given = (line.strip() for line in sys.stdin)
    for name in given if options.names == ["-"] else options.names:
        case = known[name]
        try:
            if options.all:
                row = run_all(case, options.chosen)
            else:
                settings = {"seed": options.seed, "checks": options.checks}
                row = run(case, schedule=options.schedule or case.schedule, **settings)
        except Exception as error:
            text = re.sub(r"\S+/(?=[^/\s]+\.py:)", "", " ".join(f"{type(error).__name__}: {error}".split()))
            row = {"name": case.name, "result": "stopped", "note": text[:400], "failures": [traceback.format_exc()]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
