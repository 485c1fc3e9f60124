"""`dsv4 lab` never opens JupyterLab to the network, without a token, or with one that others can read."""

import os
import secrets
import socket
import subprocess
import sys

import pytest

from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.lab.commands import jupyter


def test_local_address_and_fresh_token(monkeypatch):
    monkeypatch.delenv(jupyter.TOKEN, raising=False)
    assert "--ServerApp.ip=127.0.0.1" in jupyter.command()
    first, second = jupyter.token(), jupyter.token()
    assert len(first) == 32 and first != second
    monkeypatch.setenv(jupyter.TOKEN, "chosen by hand")
    assert jupyter.token() == "chosen by hand"


def started(monkeypatch, capsys, terminal):
    """(arguments, environment, output) of what replaces the process."""
    seen = {}

    def execv(path, arguments):
        seen.update(arguments=[path, *arguments], environment=dict(os.environ))

    monkeypatch.setattr(jupyter.os, "execv", execv)
    monkeypatch.setattr(jupyter.sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv(jupyter.TOKEN, secrets.token_hex(16))
    jupyter.main(port=18888, browser=False)
    return seen["arguments"], seen["environment"], capsys.readouterr().out


def test_the_token_is_in_no_argument_and_on_the_terminal_once(monkeypatch, capsys):
    arguments, environment, said = started(monkeypatch, capsys, terminal=True)
    token = environment[jupyter.TOKEN]
    assert not any(token in word or "token" in word for word in arguments)
    port = next(word for word in arguments if word.startswith("--ServerApp.port=")).partition("=")[2]
    assert f"http://127.0.0.1:{port}/lab/tree/{jupyter.FIRST_NOTEBOOK}?token={token}" in said
    assert said.count(token) == 1 and "--ServerApp.port_retries=0" in arguments


def test_no_log_gets_the_token(monkeypatch, capsys):
    _, environment, said = started(monkeypatch, capsys, terminal=False)
    assert environment[jupyter.TOKEN] not in said and "server list" in said and "http://127.0.0.1:" in said


def test_the_server_takes_its_token_from_the_environment():
    """jupyter_server's own reading of the variable; what stands on the terminal then logs in."""
    code = "from jupyter_server.auth.identity import IdentityProvider as I; i = I(); print(i.token, i.token_generated)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, jupyter.TOKEN: "of-the-environment"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["of-the-environment", "False"], done.stderr


def test_a_port_in_use_is_not_announced():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert jupyter.free_port(port) > port


@pytest.mark.parametrize(("changes", "says"), [({"notebook": "no.ipynb"}, "00_start_here"), ({"port": 80}, "1024")])
def test_bad_arguments_are_named(changes, says):
    with pytest.raises(ArgumentError, match=says):
        jupyter.command(**changes)


@pytest.mark.parametrize("empty", ["", "short"])
def test_no_token_is_no_option(monkeypatch, empty):
    monkeypatch.setenv(jupyter.TOKEN, empty)
    with pytest.raises(DSV4Error, match="8 characters"):
        jupyter.token()


@pytest.mark.parametrize(("user", "flag"), [(0, True), (1000, False)])
def test_root_in_a_container_may_start_it(monkeypatch, user, flag):
    monkeypatch.setattr(jupyter.os, "geteuid", lambda: user)
    assert ("--allow-root" in jupyter.command()) is flag
