"""Peers of the bench of ops, without their packages: what is said then, and what the adapters compute themselves."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import dsv4lib.ops
from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent

OPS = Path(dsv4lib.ops.__file__).parent
MODULES = [
    f"dsv4lib.ops.{path.parent.name}.{path.stem}" for path in OPS.glob("*/peers*.py") if path.stem != "peers_torch"
]
PROVIDERS = [
    pytest.param(provider, id=f"{name.split('.')[2]}: {provider.name}")
    for name in MODULES
    for provider in importlib.import_module(name).providers()
]
WIDE = 32  # characters of a name that the table shows


@pytest.mark.parametrize("provider", PROVIDERS)
def test_absent_without_its_package(provider, monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda package: False)
    with pytest.raises(Absent, match="package [a-z-]+ is not installed"):
        provider.bind({})


@pytest.mark.parametrize("name", MODULES)
def test_names_are_unique_and_fit(name):
    names = [provider.name for provider in importlib.import_module(name).providers()]
    assert names
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= WIDE


def test_a_second_package_is_asked_for_too(monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda package: package == "vllm")
    with pytest.raises(Absent, match="package tilelang is not installed"):
        peers.load("vllm.some.module", "tilelang")


def test_a_vllm_without_the_library(monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(importlib.import_module("sys").modules, "vllm", raising=False)
    with pytest.raises(Absent, match="this vllm has no _none"):
        peers.vllm_operators("_none", "_C")


def test_outputs_are_converted_when_read():
    made, read = [], []

    def run():
        made.append(torch.full((2,), float(len(made))))
        return made[-1]

    def double(x):
        read.append(x)
        return 2 * x

    call, outputs = peers.bound(run, y=double)
    call()
    call()
    assert not read
    assert list(outputs) == ["y"]
    assert outputs["y"].tolist() == [2.0, 2.0]  # of the last call
    assert read == [made[-1]]


def test_exponent_bytes():
    assert peers.exponent_bytes(torch.tensor([1.0, 2.0**-9, 2.0**5])).tolist() == [127, 118, 132]


@pytest.mark.parametrize(("rate", "overlap"), [(4, True), (128, False)])
@pytest.mark.parametrize("starts", [(0,), (3, 131, 4097, 258)])
def test_state_in_pages(rate, overlap, starts):
    """By the table, every row that a window can need is there: those of the ring, and the new ones once stored."""
    from dsv4lib.ops.compressor.peers import STATE_PAGE, paged_state

    block, rows, width = STATE_PAGE[rate], rate * (1 + overlap), 6
    counts = torch.tensor([2 * rate + 3] if len(starts) == 1 else [1, 2, 5, 1])
    first = torch.tensor(starts)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts.tolist(), strict=True)])
    owner = torch.arange(len(starts)).repeat_interleave(counts)
    generator = torch.Generator().manual_seed(rate)
    state = torch.randn(len(starts), rows, width, generator=generator)
    new = torch.randn(len(positions), width, generator=generator)
    given = {
        "state": state,
        "starts": first.int(),
        "offsets": torch.cat((torch.zeros(1), counts.cumsum(0))).int(),
        "positions": positions,
        "token_request": owner.int(),
    }
    cache, table, slots = paged_state(given, block)
    assert len(set(slots.tolist())) == len(slots)
    cache.view(-1, width)[slots] = new
    for request, start in enumerate(starts):
        last = start + int(counts[request])
        for p in range(max(0, start - rows), last):
            found = cache[table[request, p // block], p % block]
            mine = (owner == request) & (positions == p)
            assert torch.equal(found, state[request, p % rows] if p < start else new[mine][0]), (request, p)
