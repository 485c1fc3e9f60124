"""A run has no network: refused to every library, and red even where a library swallows the refusal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4lib import env
from dsv4lib.lab.run import network, runner
from dsv4lib.lab.stage import Stage
from dsv4lib.lab.verdicts import Verdict

TRIES = """import socket, sys
from dsv4lib.lab.run import network
network.close_if_asked()
def tried(name, call):
    try:
        call()
    except network.NetworkClosed as error:
        print(name, "refused")
    except OSError:
        print(name, "tried")
    else:
        print(name, "done")
tcp, udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
six = socket.socket(socket.AF_INET6)
unix = socket.socket(socket.AF_UNIX)
for one in (tcp, six, unix):
    one.settimeout(0.05)
tried("connect", lambda: tcp.connect(("192.0.2.1", 9)))
tried("connect_ex", lambda: tcp.connect_ex(("192.0.2.1", 9)))
tried("connect6", lambda: six.connect(("2001:db8::1", 9)))
tried("sendto", lambda: udp.sendto(b"x", ("192.0.2.1", 9)))
tried("sendmsg", lambda: udp.sendmsg([b"x"], [], 0, ("192.0.2.1", 9)))
tried("getaddrinfo", lambda: socket.getaddrinfo("host.invalid", 80))
tried("gethostbyname", lambda: socket.gethostbyname("host.invalid"))
tried("create_connection", lambda: socket.create_connection(("192.0.2.1", 9), 0.05))
tried("loopback", lambda: tcp.connect(("127.0.0.1", 9)))
tried("localhost", lambda: socket.getaddrinfo("localhost", 80))
tried("unix", lambda: unix.connect("/nowhere/at/all"))
tried("abstract", lambda: unix.connect("\\0no-such-name"))
tried("self", lambda: socket.getaddrinfo(socket.gethostname(), 80))"""


def answers(tmp_path: Path, **environment: str) -> dict[str, str]:
    variables = {**os.environ, "PYTHONPATH": str(env.root()), "DSV4_RUN_DIR": str(tmp_path), **environment}
    done = subprocess.run([sys.executable, "-c", TRIES], env=variables, capture_output=True, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())  # type: ignore[misc]


def test_everything_but_this_machine_is_refused_and_noted(tmp_path: Path) -> None:
    said = answers(tmp_path, **{network.CLOSED: "off"})
    here = ("loopback", "localhost", "unix", "abstract", "self")
    assert {name for name, how in said.items() if how == "refused"} == set(said) - set(here)
    noted = network.refused(tmp_path)
    assert len(noted) == len(said) - len(here) and "connect ('192.0.2.1', 9)" in noted
    assert network.refused(tmp_path / "nowhere") == []


def test_a_notebook_that_is_opened_by_hand_has_its_network(tmp_path: Path) -> None:
    assert "refused" not in answers(tmp_path, **{network.CLOSED: ""}).values()


@pytest.mark.parametrize("swallowed", [True, False])
def test_a_run_that_reaches_for_it_is_red(make: Callable[..., Stage], swallowed: bool) -> None:
    call = "socket.create_connection(('192.0.2.1', 443), 1)"
    body = f"import socket\ntry:\n    {call}\nexcept OSError:\n    pass" if swallowed else f"import socket\n{call}"
    record = runner.run_stage(make(body=body))[0]
    assert record.verdict is Verdict.ERROR
    assert ("reached for the network" if swallowed else "NetworkClosed: ") in record.reason, record.reason
