"""Write a checkpoint folder tensor by tensor, all of it or nothing.

Everything is written into a hidden folder beside the destination, flushed to the disk, and renamed at the end. A run
that is killed leaves only that hidden folder; one that fails removes it. Headers are known before the data, so no
tensor is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from dsv4lib.errors import ArgumentError
from dsv4lib.loader.checkpoint import CONFIG, INDEX
from dsv4lib.loader.names import Spec
from dsv4lib.loader.safetensors import DTYPES

SHARD_BYTES = 5 * 10**9
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGN = 8  # bytes, of a file's data


def plan(listing: Mapping[str, Spec], shard_bytes: int) -> list[dict[str, Spec]]:
    """Split tensors, in their order, into shards of at most ``shard_bytes``. A larger tensor has one of its own."""
    shards: list[dict[str, Spec]] = []
    size = 0
    for name, spec in listing.items():
        if not shards or size + spec.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.nbytes
    return shards


def header(shard: Mapping[str, Spec]) -> bytes:
    """Make the length and JSON header of one file.

    Padded with spaces to a multiple of 8 bytes.
    """
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, spec in shard.items():
        offsets = [at, at + spec.nbytes]
        fields[name] = {"dtype": _NAMES[spec.dtypes[0]], "shape": list(spec.shape), "data_offsets": offsets}
        at += spec.nbytes
    raw = json.dumps(fields, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGN)
    return struct.pack("<Q", len(raw)) + raw


class Writer:
    """A context in which all tensors of ``listing`` are written, in its order.

    Args:
        folder: to make; it must not exist, its parent must.
        listing: names, first dtypes and shapes of all tensors.
        config: contents of config.json.
        shard_bytes: data of a file, at most.

    Raises:
        ArgumentError: the folder exists or has no parent, a tensor comes out of order or is not as listed, or some are
            not written when the context ends.
    """

    def __init__(
        self, folder: Path, listing: Mapping[str, Spec], config: Mapping[str, Any], shard_bytes: int = SHARD_BYTES
    ):
        self.folder = Path(folder)
        if os.path.lexists(self.folder):
            raise ArgumentError("folder", str(self.folder), "a name that is not taken: nothing is overwritten")
        if not self.folder.parent.is_dir():
            raise ArgumentError("folder", str(self.folder), "a name in a folder that exists")
        self.config = dict(config)
        self.shards = plan(listing, shard_bytes)
        self.order = [(number, name) for number, shard in enumerate(self.shards) for name in shard]
        self.next = 0
        self.stream: BinaryIO | None = None

    def _file(self, number: int) -> str:
        if len(self.shards) == 1:
            return "model.safetensors"
        return f"model-{number + 1:05}-of-{len(self.shards):05}.safetensors"

    def __enter__(self) -> Writer:
        self.temporary = Path(
            tempfile.mkdtemp(prefix=f".{self.folder.name}.", suffix=".partial", dir=self.folder.parent)
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._close()
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self.temporary, ignore_errors=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write the next tensor of the listing."""
        if self.next == len(self.order) or self.order[self.next][1] != name:
            wanted = self.order[self.next][1] if self.next < len(self.order) else "nothing more"
            raise ArgumentError("name", name, f"{wanted}: tensors are written in the order of the listing")
        number = self.order[self.next][0]
        spec = self.shards[number][name]
        if tensor.dtype != spec.dtypes[0] or tuple(tensor.shape) != spec.shape:
            raise ArgumentError(name, f"{tensor.dtype} {tuple(tensor.shape)}", f"{spec.dtypes[0]} {spec.shape}")
        if self.next == 0 or self.order[self.next - 1][0] != number:
            self._close()
            self.stream = open(self.temporary / self._file(number), "xb")
            self.stream.write(header(self.shards[number]))
        self.stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.next += 1

    def copy(self, file: Path) -> None:
        """Copy a small file (a tokenizer) beside the tensors."""
        shutil.copyfile(file, self.temporary / file.name)

    def _close(self) -> None:
        if self.stream is not None:
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
            self.stream = None

    def _finish(self) -> None:
        if self.next < len(self.order):
            raise ArgumentError("tensors", f"{self.next} written", f"all {len(self.order)} of the listing")
        total = sum(spec.nbytes for shard in self.shards for spec in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": {n: self._file(k) for k, n in self.order}}
        for name, contents in ((INDEX, index), (CONFIG, self.config)):
            with open(self.temporary / name, "x") as stream:
                json.dump(contents, stream, indent=2)
                stream.flush()
                os.fsync(stream.fileno())
        os.chmod(self.temporary, 0o777 & ~_umask())
        if os.path.lexists(self.folder):  # rename would replace an empty folder that another process made meanwhile
            raise ArgumentError("folder", str(self.folder), "a name that is not taken: nothing is overwritten")
        os.rename(self.temporary, self.folder)


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found
