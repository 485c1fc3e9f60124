"""What is done for optional packages without having them: hooks on imports, patches, refusals of other versions."""

import importlib
import importlib.util
import sys

import pytest

from dsv4lib.emulator.driver.on_import import before_import, when_imported


def test_hooks_act_on_an_import_not_on_a_search(tmp_path, monkeypatch):
    (tmp_path / "dsv4_hooked.py").write_text("import dsv4_calls\ndsv4_calls.made.append('run')")
    (tmp_path / "dsv4_calls.py").write_text("made = []")
    monkeypatch.syspath_prepend(str(tmp_path))
    calls = importlib.import_module("dsv4_calls").made
    before = {"dsv4_hooked": lambda: calls.append("before"), "dsv4_absent": lambda: calls.append("never")}
    with when_imported({"dsv4_hooked": lambda module: calls.append("after")}), before_import(before):
        assert importlib.util.find_spec("dsv4_hooked") and importlib.util.find_spec("dsv4_absent") is None
        assert calls == []
        importlib.import_module("dsv4_hooked")
    assert calls == ["before", "run", "after"]
    for name in ("dsv4_hooked", "dsv4_calls"):
        monkeypatch.delitem(sys.modules, name)
