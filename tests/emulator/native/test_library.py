"""Compiled code: shared, cached on disk, robust against damaged files; and the table of what is tested."""

from __future__ import annotations

import os

import pytest
import test_compare
import test_cvt
import test_cvt_packed
import test_float
import test_int
import test_logic
import test_pack
import test_special
import test_warp

from dsv4lib.emulator import isa
from dsv4lib.emulator.native import irtools, library
from dsv4lib.emulator.native.library import FAMILIES, Library
from dsv4lib.emulator.ptx.ir import Imm, Memory, Pair, Reg, Sink, Special, Vector
from dsv4lib.errors import BackendUnavailable

WANTED = [("add.s32", "32 32 i"), ("add.u32", "32 32 32"), ("mul.wide.s32", "64 32 32"), ("ex2.approx.f32", "32 32")]


def spellings() -> set[str]:
    """Every spelling that a test of this folder runs."""
    tables = (test_int, test_logic, test_pack, test_compare, test_float, test_cvt, test_cvt_packed)
    out = {case.opcode for module in tables for case in module.CASES}
    out |= {*test_int.CARRIES, *test_pack.HINTS, *test_pack.POLICIES, *test_special.OPCODES, *test_warp.OPCODES}
    return out | {f"isspacep.{space}" for space in test_pack.SPACE_OF}


def test_every_pattern_is_tested():
    """A registered native pattern without a tested spelling would be a claim without proof."""
    modules = {f"dsv4lib.emulator.native.{name}" for name in FAMILIES}
    ours = [e for e in isa.entries() if e.kind == "native" and e.implementation.__module__ in modules]
    covered = {isa.lookup(opcode)[0].pattern for opcode in spellings()}
    assert len(ours) > 150
    assert [e.pattern for e in ours if e.pattern not in covered] == []


def test_patterns_do_not_overlap():
    """``find`` raises where two patterns match; every tested spelling goes through it."""
    for opcode in spellings():
        assert isa.find(opcode) is not None


@pytest.mark.parametrize(
    "opcode", ["add.rn.s32", "add.f32.f32", "cvt.f16.f32", "max.relu.f32", "shl.s32", "setp.lo.s32"]
)
def test_wrong_spellings_are_refused(opcode):
    with pytest.raises(isa.UnsupportedInstruction, match="is not implemented"):
        library.emit(opcode, "32 32 32")


def test_a_second_process_compiles_nothing(tmp_path):
    """A fresh library on the same folder finds everything on disk; a new spelling alone is compiled."""
    first = Library(tmp_path)
    done = first.handlers(WANTED)
    assert first.compiled == 3  # add.s32 and add.u32 are one function
    assert done[WANTED[0]].widths == (32, 32, 32) and done[WANTED[0]].stores == {0}
    second = Library(tmp_path)
    second.handlers(WANTED)
    assert second.compiled == 0
    second.handlers([*WANTED, ("brev.b32", "32 32")])
    assert second.compiled == 1
    assert len(list(tmp_path.glob("*.code"))) == 2
    assert not list(tmp_path.glob("*.draft"))
    assert all(f.stat().st_mode & 0o077 == 0 for f in tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "empty"])
def test_damaged_files_are_compiled_again(tmp_path, damage):
    Library(tmp_path).handlers(WANTED)
    (path,) = tmp_path.glob("*.code")
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[-40] ^= 0xFF
    path.write_bytes({"cut": data[: len(data) // 2], "flip": data, "foreign": b"text\n", "empty": b""}[damage])
    again = Library(tmp_path)
    again.handlers(WANTED)
    assert again.compiled == 3
    third = Library(tmp_path)
    third.handlers(WANTED)
    assert third.compiled == 0


def test_old_files_are_pruned(tmp_path, monkeypatch):
    """Only the files used last stay; pruned code is compiled again by the next process."""
    monkeypatch.setattr(library, "KEEP", 2)
    first = Library(tmp_path)
    for opcode in ("add.s32", "sub.s32", "mul.lo.s32", "min.s32"):
        first.handlers([(opcode, "32 32 32")])
    assert len(list(tmp_path.glob("*.code"))) == 2
    second = Library(tmp_path)
    second.handlers([("min.s32", "32 32 32"), ("mul.lo.s32", "32 32 32")])
    assert second.compiled == 0
    second.handlers([("add.s32", "32 32 32")])
    assert second.compiled == 1


def test_folder_must_be_private(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path))
    folder = library.cache_folder()
    assert folder == tmp_path / "native" and folder.stat().st_mode & 0o777 == 0o700
    os.chmod(folder, 0o755)
    with pytest.raises(BackendUnavailable, match="mode 0700"):
        library.cache_folder()


def test_without_a_cache_nothing_stays_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSV4_CACHE", "off")
    folder = library.cache_folder()
    assert folder == library.cache_folder() and folder.stat().st_mode & 0o777 == 0o700
    assert not any(tmp_path.iterdir())


def test_symbols_depend_on_code_and_host(monkeypatch):
    name = library.unit_name("text")
    assert name != library.unit_name("other")
    monkeypatch.setattr(library, "host_key", lambda: "another processor")
    assert name != library.unit_name("text")


def test_shapes():
    bits = {0: 32, 1: 64, 2: 1, 3: 16}.__getitem__
    operands = (
        Pair(Reg(0), Reg(2)),
        Vector((Reg(3), Sink())),
        Memory(Reg(1), 8),
        Imm(5),
        Special("tid.x"),
        Reg(2, negated=True),
        Sink(),
    )
    shape = irtools.shape_of(operands, lambda r: bits(r.index))
    assert shape == "32|1 {16,_} [64] i i !1 _"
    assert irtools.leaves_of(shape) == [["32", "1"], ["16", "_"], ["64"], ["i"], ["i"], ["!1"], ["_"]]
