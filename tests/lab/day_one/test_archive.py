"""Archives: nothing private in them, and hostile ones are refused before they do harm."""

from __future__ import annotations

import getpass
import gzip
import io
import json
import os
import socket
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from dsv4lib.lab.day_one import archive, forms, runner, worker
from dsv4lib.lab.day_one.archive import ArchiveError
from dsv4lib.lab.day_one.probe import Emulated, digest
from dsv4lib.lab.day_one.reading import DAMAGED, SAME, compare

PROBE = next(probe for probe in forms.probes() if probe.name == "shift.lane32")
MANIFEST = {"arch": "sm_100a", "gpu": "NVIDIA B200", "probes": [PROBE.name], "fake": None}
COMMANDS = {"time.mhc": "c"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of one probe and one command."""
    made = runner.Runner(tmp_path / "results").folder
    out = Emulated(PROBE).out
    (made / "probes" / f"{PROBE.name}.npz").write_bytes(worker.packed(PROBE, out))
    worker.write(made / "probes", worker.result(PROBE, worker.RAN, out=digest(out)))
    command = made / "commands" / "time.mhc"
    command.mkdir()
    (command / "result.json").write_text(json.dumps({"status": "ran", "detail": "", "code": "c"}))
    (command / "rows.csv").write_text("op,shape\n")
    (command / "private.txt").write_text("never sent")
    return made


def packed(tmp_path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    """An archive of these members; a TarInfo is added as it is."""
    path = tmp_path / "made.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            if isinstance(data, tarfile.TarInfo):
                tar.addfile(data, io.BytesIO(bytes(data.size)) if data.isreg() else None)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def test_what_is_packed_is_read(folder: Path, tmp_path: Path) -> None:
    archive.pack(folder, MANIFEST, tmp_path / "a.tar.gz", COMMANDS)
    found = archive.read(tmp_path / "a.tar.gz")
    assert found.manifest["gpu"] == "NVIDIA B200"
    assert set(found.commands["time.mhc"]) == {"result.json", "rows.csv"}
    assert [one.verdict for one in compare(found)] == [SAME]


def test_only_commands_of_this_code_are_packed(folder: Path, tmp_path: Path) -> None:
    for commands, packed_ones in (({"time.mhc": "other"}, set()), ({}, set()), (COMMANDS, {"time.mhc"})):
        archive.pack(folder, MANIFEST, tmp_path / "a.tar.gz", commands)
        assert set(archive.read(tmp_path / "a.tar.gz").commands) == packed_ones


def test_an_archive_names_no_host_user_path_or_time(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    archive.pack(folder, MANIFEST, path, COMMANDS)
    first = path.read_bytes()
    archive.pack(folder, MANIFEST, path, COMMANDS)
    assert path.read_bytes() == first
    with tarfile.open(path) as tar:
        assert {(m.uid, m.gid, m.uname, m.gname, m.mtime) for m in tar} == {(0, 0, "", "", 0)}
    plain = gzip.decompress(first)
    for private in (str(tmp_path), str(Path.home()) + "/", socket.gethostname()):
        assert private.encode() not in plain
    assert f"/home/{getpass.getuser()}".encode() not in plain and b"never sent" not in plain


def link(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("probes/a.json")
    info.type, info.linkname = kind, "/etc/passwd"
    return info


def large() -> tarfile.TarInfo:
    info = tarfile.TarInfo("probes/a.json")
    info.size = archive.MEMBER_BYTES + 1
    return info


MANIFEST_BYTES = json.dumps({**MANIFEST, "format": archive.FORMAT}).encode()
HOSTILE = {
    "traversal": ({"../../evil.json": b"{}"}, "does not belong"),
    "absolute": ({"/tmp/evil.json": b"{}"}, "does not belong"),
    "inside": ({"probes/../manifest.json": b"{}"}, "does not belong"),
    "other": ({"probes/a.py": b"import os"}, "does not belong"),
    "symlink": ({"probes/a.json": link(tarfile.SYMTYPE)}, "does not belong"),
    "hard link": ({"probes/a.json": link(tarfile.LNKTYPE)}, "does not belong"),
    "device": ({"probes/a.json": link(tarfile.CHRTYPE)}, "does not belong"),
    "large": ({"manifest.json": MANIFEST_BYTES, "probes/a.json": large()}, "too many"),
    "no manifest": ({}, "manifest.json is missing"),
    "no JSON": ({"manifest.json": b"{"}, "no JSON"),
    "deep JSON": ({"manifest.json": b"[" * 100000}, "no JSON"),
    "no object": ({"manifest.json": b"[1]"}, "no JSON object"),
    "format": ({"manifest.json": b'{"format": 99}'}, "format 99"),
    "no result": ({"manifest.json": MANIFEST_BYTES, "probes/a.json": b'{"name": "a"}'}, "no result"),
    "other name": (
        {"manifest.json": MANIFEST_BYTES, "probes/a.json": json.dumps(worker.result(PROBE, "ran")).encode()},
        "no result",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused(what: str, tmp_path: Path) -> None:
    members, message = HOSTILE[what]
    path = packed(tmp_path, members)
    with pytest.raises(ArchiveError, match=message):
        archive.read(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made.tar.gz"]


def test_a_member_twice_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for _ in range(2):
            info = tarfile.TarInfo("manifest.json")
            info.size = len(MANIFEST_BYTES)
            tar.addfile(info, io.BytesIO(MANIFEST_BYTES))
    with pytest.raises(ArchiveError, match="twice"):
        archive.read(tmp_path / "a.tar.gz")


def test_a_bomb_is_refused_by_what_it_unpacks_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_UNPACKED", 1 << 20)
    path = packed(tmp_path, {f"probes/a{i}.json": bytes(1 << 19) for i in range(4)})
    assert path.stat().st_size < 1 << 14
    with pytest.raises(ArchiveError, match="too many|unpacked"):
        archive.read(path)


@pytest.mark.parametrize("data", [b"", b"no gzip", gzip.compress(b"no tar" * 300)], ids=["empty", "text", "gzip"])
def test_what_is_no_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ArchiveError):
        archive.read(tmp_path / "a")


def test_a_cut_archive_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    archive.pack(folder, MANIFEST, path, COMMANDS)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ArchiveError, match="whole|early"):
        archive.read(path)


def test_links_fifos_and_large_files_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").write_bytes(b"x" * 100)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(archive, "MOST_BYTES", 50)
    for name in ("link", "fifo", "real", "missing"):
        with pytest.raises(ArchiveError):
            archive.read(tmp_path / name)


def npz(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def claims(nbytes: int) -> bytes:
    """An .npz whose array says that it is larger than what follows."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (nbytes,)})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed_:
        packed_.writestr("changed.npy", header.getvalue() + b"123")
    return buffer.getvalue()


OUTPUTS = {
    "object": npz(changed=np.array([{}], object)),
    "type": npz(changed=np.zeros(PROBE.out_bytes // 4, np.uint32)),
    "size": npz(changed=np.zeros(PROBE.out_bytes - 1, np.uint8)),
    "shape": npz(changed=np.zeros((2, PROBE.out_bytes // 2), np.uint8)),
    "name": npz(other=np.zeros(PROBE.out_bytes, np.uint8)),
    "two": npz(changed=np.zeros(PROBE.out_bytes, np.uint8), more=np.zeros(1)),
    "bomb": npz(changed=np.zeros(1 << 24, np.uint8)),
    "claims": claims(1 << 40),
    "garbage": b"PK\x03\x04 no zip",
    "another output": npz(changed=np.ones(PROBE.out_bytes, np.uint8)),
    "missing": None,
}


@pytest.mark.parametrize("what", OUTPUTS)
def test_a_damaged_output_is_said_and_ends_nothing(what: str, folder: Path, tmp_path: Path) -> None:
    place = folder / "probes" / f"{PROBE.name}.npz"
    if OUTPUTS[what] is None:
        place.unlink()
    else:
        place.write_bytes(OUTPUTS[what])
    archive.pack(folder, MANIFEST, tmp_path / "a.tar.gz", COMMANDS)
    (found,) = compare(archive.read(tmp_path / "a.tar.gz"))
    assert found.verdict == DAMAGED and PROBE.name in found.detail
