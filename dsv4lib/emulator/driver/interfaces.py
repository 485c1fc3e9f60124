"""Declare what symbols and streams know of a device and a group of devices.

Neither is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol


class DeviceView(Protocol):
    """One emulated GPU: `device.Device`.

    Attributes:
        index, count: its number and how many there are. group: the devices it belongs to, None if it is alone.
        arch: its architecture. settings: how it runs kernels. ctas: CTAs to which launches are restricted, or None.
        memory: registration of tensors. gmem: global memory. trace: of the latest launch.
    """

    index: int
    count: int
    group: GroupView | None
    arch: Any
    settings: Any
    ctas: Any
    memory: Any
    gmem: Any
    trace: Any

    def launch(self, *given: Any, **options: Any) -> Any:
        """Run a kernel."""

    def tick(self) -> float:
        """Get the emulated time."""

    def ran(self, *given: Any, **options: Any) -> Any:
        """Keep the result of a launch."""


class GroupView(Protocol):
    """Several devices: `devices.Devices`."""

    def __iter__(self) -> Iterator[DeviceView]:
        """Go through the devices by number."""

    def __getitem__(self, index: int) -> DeviceView:
        """Get a device by number."""
