"""Compiled code: shared, cached on disk, robust against damaged files; and the table of what is tested."""

from __future__ import annotations

import hashlib
import json
import os
import random

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
from dsv4lib.folders import CacheError

WANTED = [("add.s32", "32 32 i"), ("add.u32", "32 32 32"), ("mul.wide.s32", "64 32 32"), ("ex2.approx.f32", "32 32")]


def variants() -> set[str]:
    """Every variant that a test of this folder runs."""
    tables = (test_int, test_logic, test_pack, test_compare, test_float, test_cvt, test_cvt_packed)
    out = {case.opcode for module in tables for case in module.CASES}
    out |= {*test_int.CARRIES, *test_pack.HINTS, *test_pack.POLICIES, *test_special.OPCODES, *test_warp.OPCODES}
    return out | {f"isspacep.{space}" for space in test_pack.SPACE_OF}


def test_every_pattern_is_tested():
    """A registered native pattern without a tested variant would be a claim without proof."""
    modules = {f"dsv4lib.emulator.native.{name}" for name in FAMILIES}
    ours = [e for e in isa.entries() if e.kind == "native" and e.implementation.__module__ in modules]
    covered = {isa.lookup(opcode)[0].pattern for opcode in variants()}
    assert len(ours) > 150
    assert [e.pattern for e in ours if e.pattern not in covered] == []


def test_patterns_do_not_overlap():
    """``find`` raises where two patterns match; every tested variant goes through it."""
    for opcode in variants():
        assert isa.find(opcode) is not None


@pytest.mark.parametrize(
    "opcode", ["add.rn.s32", "add.f32.f32", "cvt.f16.f32", "max.relu.f32", "shl.s32", "setp.lo.s32"]
)
def test_wrong_variants_are_refused(opcode):
    with pytest.raises(isa.UnsupportedInstruction, match="is not implemented"):
        library.emit(opcode, "32 32 32")


def test_a_second_process_compiles_nothing(tmp_path):
    """A fresh library on the same folder finds everything on disk; a new variant alone is compiled."""
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


def file_of(names, code, digest=None, magic=library.MAGIC):
    """A cache file that says this of itself."""
    header = {"sha256": library.checksum(names, code) if digest is None else digest, "names": names}
    return magic + json.dumps(header).encode() + b"\n" + code


DAMAGES = {
    "cut": lambda names, code: file_of(names, code)[:-100],
    "flip": lambda names, code: file_of(names, code)[:-40] + bytes([code[-40] ^ 1]) + code[-39:],
    "foreign": lambda names, code: b"text\n",
    "empty": lambda names, code: b"",
    "another version": lambda names, code: file_of(names, code, magic=b"dsv4 native 0\n"),
    "no object": lambda names, code: library.MAGIC + b"[1, 2]\n" + code,
    "no names": lambda names, code: library.MAGIC + b'{"sha256": ""}\n' + code,
    "a number for names": lambda names, code: library.MAGIC + b'{"sha256": "", "names": 5}\n' + code,
    "numbers for names": lambda names, code: library.MAGIC + b'{"sha256": "", "names": [5, {}]}\n' + code,
    "no digest": lambda names, code: file_of(names, code, digest=7),
    "names of other code": lambda names, code: file_of(names, code, digest=hashlib.sha256(code).hexdigest()),
    "one name changed": lambda names, code: file_of(names, code).replace(names[0].encode(), b"dsv4_" + b"0" * 32),
    "deep": lambda names, code: library.MAGIC + b"[" * 100_000 + b"\n" + code,
    "not text": lambda names, code: library.MAGIC + b"\xff\xfe\n" + code,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_compiled_again_and_replaced(tmp_path, damage):
    Library(tmp_path).handlers(WANTED)
    (path,) = tmp_path.glob("*.code")
    whole = path.read_bytes()
    names, code = library.read_file(path, use=True)
    path.write_bytes(DAMAGES[damage](names, code))
    again = Library(tmp_path)
    found = again.handlers(WANTED)
    assert again.compiled == 3 and all(handler.address for handler in found.values())
    assert path.read_bytes() == whole, "replaced"
    third = Library(tmp_path)
    third.handlers(WANTED)
    assert third.compiled == 0


def test_a_header_that_lies_about_what_it_has_is_removed(tmp_path):
    """A file under another name that claims symbols would be looked up first at each start."""
    Library(tmp_path).handlers(WANTED)
    (path,) = tmp_path.glob("*.code")
    names, code = library.read_file(path, use=True)
    (tmp_path / "zzz.code").write_bytes(file_of(names, code[:-1] + b"x", digest=library.checksum(names, code)))
    Library(tmp_path).handlers(WANTED)
    assert not (tmp_path / "zzz.code").exists()
    third = Library(tmp_path)
    third.handlers(WANTED)
    assert third.compiled == 0


def test_any_byte_changed_is_found(tmp_path):
    """2,000 mutations of a file: its own content, or nothing."""
    path, rng = tmp_path / "a.code", random.Random(7)
    names, code = [f"dsv4_{i:032x}" for i in range(3)], bytes(range(64))
    whole = file_of(names, code)
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.choice(
                [b"", bytes([rng.randrange(256)]), b'"', b"{}", b"[", b"null"]
            )
        path.write_bytes(data)
        assert library.read_file(path, use=True) in (([], b""), (names, code)), bytes(data)
        assert all(isinstance(name, str) for name in library.read_file(path, use=False)[0])


@pytest.mark.parametrize("kind", ["folder", "pipe", "link", "another user's"])
def test_what_is_no_file_of_this_user_is_ignored(tmp_path, kind, monkeypatch):
    path = tmp_path / "a.code"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)  # opening one for reading would wait for a writer
    else:
        (tmp_path / "real").write_bytes(file_of(["dsv4_1"], b"code"))
        path.symlink_to(tmp_path / "real")
        if kind == "another user's":
            path = tmp_path / "real"
            assert library.read_file(path, use=True) == (["dsv4_1"], b"code")
            monkeypatch.setattr(library.os, "getuid", lambda: 12345)
    assert library.read_file(path, use=True) == ([], b"")


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


def test_folder_must_be_private_each_time(tmp_path, monkeypatch):
    monkeypatch.setenv("DSV4_CACHE", str(tmp_path))
    folder = library.cache_folder()
    made = Library()
    made.handlers(WANTED[:1])
    assert folder == tmp_path / "native" and folder.stat().st_mode & 0o777 == 0o700
    for open_to_others in (folder, tmp_path):
        os.chmod(open_to_others, 0o770)
        for one in (Library(), made):
            with pytest.raises(CacheError, match="others may write"):
                one.handlers(WANTED)
        os.chmod(open_to_others, 0o700)
    made.handlers(WANTED)


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
