"""Checks of a launch: kinds of hazards, their record, and the race detector.

``checks=`` of a device:

| value | what is checked |
| --- | --- |
| "off" | nothing is reported; accesses that are impossible still stop the launch |
| "default" | allocation, bounds, initialisation, pending copies, mbarrier and transaction counts, proxy fences |
| "race" | also data races in shared and tensor memory, by vector clocks (race.py) |
| "all" | also counters of bank conflicts and global sectors |

``fatal=`` names kinds that stop the launch at once; "error" stands for every kind of that severity, "all" for all.
"""

from dsv4lib.emulator.hazards.kinds import KINDS, Kind
from dsv4lib.emulator.hazards.report import Hazard, errors, table

__all__ = ["KINDS", "Hazard", "Kind", "errors", "table"]
