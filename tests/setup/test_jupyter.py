"""`dsv4 lab` never opens JupyterLab to the network or without a token."""

import pytest

from dsv4lib.errors import ArgumentError
from dsv4lib.lab import jupyter


def test_local_address_and_fresh_token():
    first, second = jupyter.command(), jupyter.command()
    assert "--ServerApp.ip=127.0.0.1" in first
    tokens = [next(a for a in c if "token=" in a).split("=")[1] for c in (first, second)]
    assert len(tokens[0]) == 32 and tokens[0] != tokens[1]


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"notebook": "no.ipynb"}, "00_start_here"), ({"port": 80}, "1024"), ({"token": ""}, "8 characters")],
)
def test_bad_arguments_are_named(changes, says):
    with pytest.raises(ArgumentError, match=says):
        jupyter.command(**changes)


@pytest.mark.parametrize(("user", "flag"), [(0, True), (1000, False)])
def test_root_in_a_container_may_start_it(monkeypatch, user, flag):
    monkeypatch.setattr(jupyter.os, "geteuid", lambda: user)
    assert ("--allow-root" in jupyter.command()) is flag
