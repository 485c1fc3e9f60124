"""Pack results into one file, and read one with suspicion.

A ``.tar.gz`` with ``manifest.json``, ``probes/NAME.json``, ``probes/NAME.npz`` and ``commands/STEP/FILE``. It names no
host, user or path. It is read in memory, member by member: regular files of known names and sizes only, arrays of
bytes only, and nothing is unpacked to disk.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsv4lib.errors import DSV4Error
from dsv4lib.lab.day_one import runner
from dsv4lib.lab.run.files import read_own, write_atomic

FORMAT = 1
MOST_BYTES = 256 << 20  # of the file
MOST_UNPACKED = 512 << 20
MOST_MEMBERS = 4000
MEMBER_BYTES = 16 << 20
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,119}"
MEMBERS = re.compile(rf"manifest\.json|probes/{NAME}\.(?:json|npz)|commands/{NAME}/{NAME}\.(?:json|csv)")
COMMAND_FILES = ("result.json", "records.json", "rows.csv", "runs.csv", "counters.csv")


class ArchiveError(DSV4Error, ValueError):
    """A file that is no archive of a day one, or one that should not be read."""


@dataclass(frozen=True)
class Archive:
    """What came back.

    Attributes:
        manifest: of the machine and the plan.
        results: of probes, by name. outputs: .npz files of probes, by name.
        commands: files of commands, by step and name.
    """

    manifest: Mapping[str, Any]
    results: Mapping[str, Mapping[str, Any]]
    outputs: Mapping[str, bytes]
    commands: Mapping[str, Mapping[str, bytes]]

    def changed(self, name: str, nbytes: int) -> np.ndarray:
        """Output of a probe as it was kept, uint8 of ``nbytes``: XOR with what it was before.

        Raises:
            ArchiveError: it is missing, damaged, or of another size or type.
        """
        if name not in self.outputs:
            raise ArchiveError(f"archive: {name} ran, but its output is missing")
        return _array(name, self.outputs[name], nbytes)


def _array(name: str, data: bytes, nbytes: int) -> np.ndarray:
    """The only array of an .npz; its header is judged before anything is allocated."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            (member,) = packed.infolist()
            if member.filename != "changed.npy" or member.file_size > nbytes + 1024:
                raise ArchiveError(f"archive: {name}.npz holds {member.filename} of {member.file_size} bytes")
            raw = io.BytesIO(packed.read(member))
        version = np.lib.format.read_magic(raw)
        if version != (1, 0):
            raise ArchiveError(f"archive: {name}.npz has an array of version {version}, not 1.0")
        shape, _, dtype = np.lib.format.read_array_header_1_0(raw)
    except ArchiveError:
        raise
    except (ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, KeyError) as error:
        raise ArchiveError(f"archive: {name}.npz is damaged: {error}") from error
    rest = raw.read()
    if dtype != np.uint8 or shape != (nbytes,) or len(rest) != nbytes:
        raise ArchiveError(f"archive: {name}.npz holds {dtype}{list(shape)}, not uint8[{nbytes}]")
    return np.frombuffer(rest, np.uint8)


def pack(folder: Path, manifest: Mapping[str, Any], path: Path, commands: Mapping[str, str] | None = None) -> int:
    """Write the archive of a folder of results.

    Args:
        folder: of a `runner.Runner`. manifest: its ``probes`` are packed. path: of the archive.
        commands: codes by step; what has a result of another code is not packed.

    Returns:
        Bytes of the archive.
    """
    members = {"manifest.json": json.dumps({**manifest, "format": FORMAT}, indent=1).encode()}
    for one in sorted((folder / runner.OUTPUTS).iterdir()):
        if one.suffix in (".json", ".npz") and one.stem in manifest["probes"]:
            members[f"probes/{one.name}"] = one.read_bytes()
    for step in map((folder / runner.FILES).joinpath, sorted(commands or {})):
        if runner.command_code(step) != commands[step.name]:
            continue
        for name in COMMAND_FILES:
            if (step / name).is_file():
                members[f"commands/{step.name}/{name}"] = (step / name).read_bytes()
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, filename="") as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for name, data in members.items():
            info = tarfile.TarInfo(name)  # no owner, no time
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    write_atomic(path, buffer.getvalue())
    return buffer.getbuffer().nbytes


def read(path: Path) -> Archive:
    """Read an archive.

    Raises:
        ArchiveError: it is no such archive, too large, another user's, or holds anything that does not belong there.
    """
    try:
        data = read_own(path, MOST_BYTES)
    except OSError as error:
        raise ArchiveError(f"archive {path.name}: {error.strerror}") from error
    members = _members(data)
    if "manifest.json" not in members:
        raise ArchiveError("archive: manifest.json is missing")
    manifest = parsed("manifest.json", members.pop("manifest.json"))
    if manifest.get("format") != FORMAT:
        raise ArchiveError(f"archive: format {manifest.get('format')!r}, this version reads {FORMAT}")
    results, outputs, commands = {}, {}, {}
    for name, content in members.items():
        room, _, rest = name.partition("/")
        if room == "commands":
            step, _, file = rest.partition("/")
            commands.setdefault(step, {})[file] = content
        elif rest.endswith(".npz"):
            outputs[rest.removesuffix(".npz")] = content
        else:
            results[rest.removesuffix(".json")] = _result(rest, parsed(name, content))
    return Archive(manifest, results, outputs, commands)


def _result(name: str, found: Mapping[str, Any]) -> Mapping[str, Any]:
    texts = ("name", "form", "status", "detail", "code", "out")
    if any(not isinstance(found.get(key), str) for key in texts) or f"{found['name']}.json" != name:
        raise ArchiveError(f"archive: probes/{name} is no result of a probe")
    return found


def parsed(name: str, data: bytes) -> Mapping[str, Any]:
    """Read a JSON object.

    Raises:
        ArchiveError: it is none.
    """
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ArchiveError(f"archive: {name} is no JSON") from error
    if not isinstance(found, dict):
        raise ArchiveError(f"archive: {name} is no JSON object")
    return found


def _members(data: bytes) -> dict[str, bytes]:
    """Contents by name, of regular files of known names and bounded sizes."""
    found: dict[str, bytes] = {}
    total = 0
    try:
        with (
            gzip.GzipFile(fileobj=io.BytesIO(data)) as squeezed,
            tarfile.open(fileobj=_Limited(squeezed, MOST_UNPACKED), mode="r|") as tar,
        ):
            for member in tar:
                if not member.isreg() or not MEMBERS.fullmatch(member.name):
                    raise ArchiveError(f"archive: {member.name[:80]!r} does not belong into one")
                total += member.size
                if member.name in found or len(found) >= MOST_MEMBERS:
                    raise ArchiveError(f"archive: {member.name!r} twice, or more than {MOST_MEMBERS} members")
                if member.size > MEMBER_BYTES or total > MOST_UNPACKED:
                    raise ArchiveError(f"archive: {member.name} has {member.size} bytes, {total} so far: too many")
                found[member.name] = tar.extractfile(member).read()
                if len(found[member.name]) != member.size:
                    raise ArchiveError(f"archive: {member.name} ends early")
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, ArchiveError):
            raise
        raise ArchiveError(f"archive: not a whole .tar.gz file: {error}") from error
    return found


class _Limited(io.RawIOBase):
    """A stream that refuses to give more than a number of bytes, whatever was squeezed into it."""

    def __init__(self, inner: Any, most: int):
        self.inner, self.left = inner, most

    def read(self, size: int = -1) -> bytes:
        """Read; more than the limit is an error."""
        data = self.inner.read(min(size, self.left + 1) if size >= 0 else self.left + 1)
        self.left -= len(data)
        if self.left < 0:
            raise ArchiveError(f"archive: more than {MOST_UNPACKED} bytes unpacked")
        return data
