"""Check a launch: kinds of hazards, their record, and the race detector.

``checks=`` of a device:

| value | what is checked |
| --- | --- |
| "off" | nothing is reported; accesses that are impossible still stop the launch |
| "default" | allocation, bounds, initialisation, pending copies, mbarrier and transaction counts, proxy fences |
| "race" | also data races in shared, tensor and global memory and phases that can mix, by vector clocks (race.py) |
| "sanitize" | "race", registers by the code, and lanes of one warp: what `dsv4 sanitize` has by default |
| "race,counters" | also counters of bank conflicts and global sectors |
| "race,pedantic" | "race", and what the PTX ISA requires and shipped kernels leave out (pedantic.py) |
| "all" | all of these |

Groups and single kinds can be added and taken away: ``checks="race,-tmem_lane_quarter"`` (selection.py).
``fatal=`` names kinds that stop the launch at once; "error" stands for every kind of that severity, "all" for all.
Which kind answers which demand, with its twin test and its confidence: clauses.py, printed to data/emulator/checks.md.
"""

from dsv4lib.emulator.checks.kinds import KINDS, Kind
from dsv4lib.emulator.checks.report import Hazard, errors, table

__all__ = ["KINDS", "Hazard", "Kind", "errors", "table"]
