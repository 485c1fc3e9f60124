"""Say which of several processes this one is, and where they meet: what torchrun, or `launch`, puts in its environment.

Sockets are bound to the address where rank 0 is reached and to no other: on one machine 127.0.0.1.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

import torch.distributed as dist

from dsv4lib.errors import ArgumentError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # "True": the launcher has the store
LIFELINE = "DSV4_LIFELINE"  # a pipe that ends with the launcher


class Place(NamedTuple):
    """A process among others.

    Attributes:
        rank: of ``world`` processes. local: of those on this machine, of which there are ``beside``.
        host, port: of the store where they meet.
        agent: the launcher has the store; else rank 0 makes it.
        lifeline: file descriptor of a pipe that ends with the launcher, or None.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    beside: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    agent: bool = False
    lifeline: int | None = None

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Place | None:
        """Read the environment; None: this process was not started as one of several.

        Raises:
            ArgumentError: variables that are missing or no numbers.
        """
        if "RANK" not in environment:
            return None
        found = {name: environment.get(name, "") for name in VARIABLES}
        for name, value in found.items():
            if not (value.isascii() and value.isdecimal() if name != "MASTER_ADDR" else value):
                raise ArgumentError(
                    name, value, "an address" if name == "MASTER_ADDR" else "a number, as torchrun sets"
                )
        rank, world, local, beside, host, port = found.values()
        if not int(rank) < int(world):
            raise ArgumentError("RANK", rank, f"below WORLD_SIZE={world}")
        if not 0 < int(port) < 1 << 16:
            raise ArgumentError("MASTER_PORT", port, "1 to 65535, where the ranks meet")
        lifeline = environment.get(LIFELINE)
        agent = environment.get(AGENT) == "True"
        return cls(
            int(rank), int(world), int(local), int(beside), host, int(port), agent, int(lifeline) if lifeline else None
        )

    @property
    def address(self) -> str:
        """Return the IPv4 address of the host."""
        return socket.gethostbyname(self.host)

    @property
    def loopback(self) -> bool:
        """Tell whether all processes are on this machine."""
        return self.address.startswith("127.")

    def store(self, timeout: float) -> dist.TCPStore:
        """Connect to the store; rank 0 makes it where the launcher has none."""
        makes = self.rank == 0 and not self.agent
        limit = datetime.timedelta(seconds=timeout)
        return served(self, limit) if makes else dist.TCPStore(self.host, self.port, None, False, limit)


def listening(address: str, port: int = 0) -> socket.socket:
    """Listen at one address; port 0: any."""
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.bind((address, port))
    found.listen(1024)
    return found


def served(place: Place, limit: datetime.timedelta) -> dist.TCPStore:
    """Make a store that listens at the address of ``place`` alone; torch's own would at every one."""
    door = listening(place.address, place.port)
    port = door.getsockname()[1]
    given = {"wait_for_workers": False, "master_listen_fd": door.detach()}
    return dist.TCPStore(place.address, port, None, True, limit, **given)
