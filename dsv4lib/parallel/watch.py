"""End all ranks when one dies, fails or stands still, with one line that names it.

A thread of each rank holds a connection to rank 0, the hub, which is closed by the system when a process dies, however
it dies. Over it ranks tell which call to a group they have reached. Where some members of a group have reached a call
and nothing has moved for ``timeout`` seconds, the hub names those that have not. Calls at the end (`PATIENT`) wait for
ranks that still work on requests of their own.

    rank r -> hub      at GROUP FIRST PAST COUNT WHAT     it has reached so many calls; is in WHAT, or in none ("-")
    rank r -> hub      left                               it is done
    both ways          failed RANK TEXT                   that rank has ended all
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from dsv4lib.errors import DSV4Error
from dsv4lib.parallel.place import Place, listening

TICK = 0.2  # seconds between looks
LINGER = 1.0  # seconds that the hub waits for the others to have read why they end
ADMISSION = 5.0  # seconds that a connection may take to say which rank it is
VERDICT = 5.0  # seconds after a broken call in which the watch finds who is gone
EXIT_CODE = 23
LEAVING, RESULTS = PATIENT = "leaving", "results"  # calls that wait for ranks which still work, as long as they live


class RankEnded(DSV4Error, RuntimeError):
    """A rank that ended all others.

    Attributes:
        rank: which, or None where it was not found. exit_code: of the commands.
    """

    exit_code = EXIT_CODE

    def __init__(self, rank: int | None, text: str):
        self.rank = rank
        super().__init__(text)


@dataclass
class Calls:
    """Calls to a group that a rank has reached. ``what``: the one that it is in; "-": none. since: of the last news."""

    first: int
    past: int
    count: int = 0
    what: str = "-"
    since: float = field(default_factory=time.monotonic)


class Watch:
    """The watch of one rank.

    Args:
        place: of the process. store: where the hub's port is found. timeout: seconds that a call may wait.
    """

    def __init__(self, place: Place, store: dist.Store, timeout: float) -> None:
        self.place, self.timeout, self.rank = place, timeout, place.rank
        self.calls: dict[str, Calls] = {}
        self.told: dict[str, tuple[int, str]] = {}
        self.of: dict[int, dict[str, Calls]] = {self.rank: self.calls}
        self.peers: dict[socket.socket, int] = {}
        self.texts: dict[socket.socket, bytes] = {}
        self.left: set[int] = set()
        self.lock, self.saying, self.stopped = threading.Lock(), threading.Lock(), threading.Event()
        if self.rank == 0:
            door = listening(place.address)
            store.set("watch", str(door.getsockname()[1]))
            door.settimeout(timeout)
            try:
                while len(self.peers) < place.world - 1:
                    self._admit(door.accept()[0])
            except TimeoutError:
                missing = sorted(set(range(1, place.world)) - set(self.peers.values()))
                text = f"rank {missing[0]} did not join within {timeout:g} s"
                raise RankEnded(missing[0], text) from None
            finally:
                door.close()
        else:
            hub = socket.create_connection((place.host, int(store.get("watch"))), timeout)
            hub.sendall(b"%d\n" % self.rank)
            self.peers[hub] = 0
        for peer in self.peers:
            peer.settimeout(LINGER)
            self.texts[peer] = b""

    def _admit(self, peer: socket.socket) -> None:
        """Let a rank in by the number that it sends first; close what sends anything else, or nothing for a while."""
        said = b""
        peer.settimeout(min(self.timeout, ADMISSION))
        with contextlib.suppress(OSError):
            while not said.endswith(b"\n") and len(said) < 16:
                byte = peer.recv(1)  # nothing after the line is taken
                if not byte:
                    break
                said += byte
        number = int(said) if said.strip().isdigit() else 0
        if said.endswith(b"\n") and 0 < number < self.place.world and number not in self.peers.values():
            self.peers[peer] = number
        else:
            peer.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch inside. What is raised there ends all ranks; the others print nothing but the hub's line."""
        thread = threading.Thread(target=self._run, name="watch", daemon=True)
        thread.start()
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            known = isinstance(error, DSV4Error)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            self.left.add(self.rank)  # it ends by itself: not by what the hub says of it
            self._say(f"failed {self.rank} {' '.join(text.split())}")
            if known and self.rank:
                sys.exit(getattr(error, "exit_code", 2))
            raise
        finally:
            self.stopped.set()
            thread.join(LINGER)
            self._linger()

    @contextmanager
    def call(self, group: str, what: str, ranks: range | None = None) -> Iterator[None]:
        """Reach a call to a group. One that breaks because a rank is gone waits here for the watch to say which.

        Args:
            group: its name, by its first rank. what: of the call. ranks: of the group; None: all.
        """
        ranks = range(self.place.world) if ranks is None else ranks
        with self.lock:
            calls = self.calls.setdefault(f"{group}-{ranks.start}", Calls(ranks.start, ranks.stop))
            calls.count, calls.what, calls.since = calls.count + 1, what, time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:
            time.sleep(VERDICT)
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankEnded(None, f"the ranks lost each other in call {calls.count} ({what}): {first}") from error
        finally:
            with self.lock:
                calls.what = "-"

    def leave(self) -> None:
        """Say that this rank is done: its end is none for the others."""
        self.tell()
        self.left.add(self.rank)
        self._say("left")

    # The thread

    def _run(self) -> None:
        try:
            self._look()
        except Exception as error:  # without a watch a rank could wait for ever
            self._end(self.rank, f"rank {self.rank}: its watch broke: {type(error).__name__}: {error}")

    def _look(self) -> None:
        lifeline = [] if self.place.lifeline is None else [self.place.lifeline]
        while not self.stopped.is_set():
            ready, _, _ = select.select([*self.peers, *lifeline], [], [], TICK)
            for one in ready:
                if one in lifeline:
                    os._exit(EXIT_CODE)  # the launcher is gone, and with it the reader of a line
                self._read(one)
            self.tell()
            if self.rank == 0:
                self._judge()

    def _read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            rank = self.peers.pop(peer)
            peer.close()
            if rank not in self.left and self.rank not in self.left:
                self._end(rank, f"rank {rank} ended without a word")
            return
        *lines, self.texts[peer] = (self.texts[peer] + data).split(b"\n")
        for line in lines:
            self._hear(self.peers[peer], line.decode())

    def _hear(self, rank: int, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "left":
            self.left.add(rank)
        elif word == "failed":
            number, _, text = rest.partition(" ")
            if int(number) == self.rank and self.rank in self.left:
                return
            self._end(int(number), f"rank {number}: {text}")
        else:
            group, first, past, count, what = rest.split()
            given = Calls(int(first), int(past), int(count), what)
            self.of.setdefault(rank, {})[group] = given

    def tell(self) -> None:
        """Tell the hub how far this rank is; every tick does."""
        if self.rank == 0:
            return
        with self.lock:
            news = {g: c for g, c in self.calls.items() if self.told.get(g) != (c.count, c.what)}
            lines = [f"at {g} {c.first} {c.past} {c.count} {c.what}" for g, c in news.items()]
            self.told |= {g: (c.count, c.what) for g, c in news.items()}
        if lines:
            self._say("\n".join(lines))

    def _judge(self) -> None:
        """Find a group in which some wait for others, and nothing has moved for too long."""
        now = time.monotonic()
        with self.lock:
            groups = {name: calls for of in self.of.values() for name, calls in of.items()}
            for name, some in groups.items():
                members = range(some.first, some.past)
                of = {r: self.of.get(r, {}).get(name) or Calls(some.first, some.past, since=0.0) for r in members}
                most = max(calls.count for calls in of.values())
                late = [r for r in members if of[r].count < most and r not in self.left]
                if not late or now - max(calls.since for calls in of.values()) < self.timeout:
                    continue
                waiting = next(calls.what for calls in of.values() if calls.count == most)
                if waiting in PATIENT:
                    continue
                idle = [r for r in late if all(c.what == "-" for c in self.of.get(r, {}).values())] or late
                who = f"rank {idle[0]}" if len(idle) == 1 else "ranks " + ", ".join(map(str, idle))
                what = f" ({waiting})" if waiting != "-" else ""
                group = f"the {name.partition('-')[0]} group"
                text = f"{who} did not reach call {most}{what} of {group} within {self.timeout:g} s"
                break
            else:
                return
        self._end(idle[0], text)

    def _end(self, rank: int, text: str) -> None:
        """End this process because of a rank; the hub, or where it is gone rank 1, says so."""
        if self.rank == 0 or (rank == 0 and self.rank == 1 and text.endswith("without a word")):
            with contextlib.suppress(OSError):
                os.write(2, f"dsv4: {text}; all ranks end\n".encode())
        if self.rank == 0:
            rest = text.removeprefix(f"rank {rank}: ")
            self._say(f"failed {rank} {rest}")
            self._linger()
        elif rank == self.rank:
            self._say(f"failed {rank} {text.removeprefix(f'rank {rank}: ')}")
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(EXIT_CODE)

    def _say(self, line: str) -> None:
        for peer in list(self.peers):
            with contextlib.suppress(OSError), self.saying:
                peer.sendall(line.encode() + b"\n")

    def _linger(self) -> None:
        """Close connections so that what was said is still read: a socket with unread bytes would be reset."""
        end = time.monotonic() + LINGER
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
        waiting = list(self.peers)
        while waiting and time.monotonic() < end:
            for peer in select.select(waiting, [], [], max(0.0, end - time.monotonic()))[0]:
                with contextlib.suppress(OSError):
                    if peer.recv(1 << 16):
                        continue
                waiting.remove(peer)
        for peer in self.peers:
            peer.close()
