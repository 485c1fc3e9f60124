"""Read a folder of safetensors files as one set of named tensors, each on demand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsv4lib.loader.safetensors import MAX_HEADER, CheckpointError, Cut, Entry, opened, read_header, read_json

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


class Checkpoint:
    """Tensors of a folder by name.

    With an index every file that it names is opened, and each tensor must be where the index says; without one, every
    ``*.safetensors`` of the folder. No other file than these, the index and ``config.json`` is ever read. Files may be
    symbolic links to regular files, as download caches make them; the index names files of this folder only.

    Attributes:
        folder: of the files.
        config: contents of ``config.json``, {} if there is none.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(self.folder.name, "no folder", "a folder with safetensors files")
        self.config: dict[str, Any] = self._json(CONFIG) if os.path.lexists(self.folder / CONFIG) else {}
        self._entries: dict[str, Entry] = {}
        index = self._weight_map() if os.path.lexists(self.folder / INDEX) else None
        files = (
            sorted(set(index.values())) if index is not None else [p.name for p in self.folder.glob("*.safetensors")]
        )
        if not files:
            raise CheckpointError(self.folder.name, "no safetensors file", "at least one; pickles are never read")
        for file in sorted(files):
            for name, entry in read_header(self.folder / file).items():
                if name in self._entries:
                    raise CheckpointError(f"{file}, {name}", "a tensor of another file", "each name once")
                self._entries[name] = entry
        for name, file in (index or {}).items():
            if name not in self._entries or self._entries[name].file.name != file:
                raise CheckpointError(f"{INDEX}, {name}", file, "the file that holds the tensor")

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def entry(self, name: str) -> Entry:
        """Find the where a tensor lies; CheckpointError if there is none of this name."""
        if name not in self._entries:
            near = [n for n in self._entries if n.rsplit(".", 1)[0] == name.rsplit(".", 1)[0]]
            raise CheckpointError(
                name, "missing", "a tensor of the checkpoint" + (f"; there are {near}" if near else "")
            )
        return self._entries[name]

    def get(
        self, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], cut: Cut | None = None
    ) -> torch.Tensor:
        """Read a tensor, if it has an expected dtype and shape.

        The dtype is one of ``dtypes``, the shape ``shape``. With ``cut`` only that part of it is read.
        """
        entry = self.entry(name)
        if entry.dtype not in dtypes:
            raise CheckpointError(f"{name}.dtype", entry.dtype, "one of " + ", ".join(map(str, dtypes)))
        if entry.shape != tuple(shape):
            raise CheckpointError(f"{name}.shape", entry.shape, f"{tuple(shape)}")
        return entry.read() if cut is None else entry.read_cut(cut)

    def _json(self, file: str) -> dict[str, Any]:
        with opened(self.folder / file) as stream:
            raw = stream.read(MAX_HEADER + 1)
        if len(raw) > MAX_HEADER:
            raise CheckpointError(file, f"more than {MAX_HEADER} bytes", f"at most {MAX_HEADER}")
        return read_json(raw.strip(), file, floats=True)

    def _weight_map(self) -> dict[str, str]:
        found = self._json(INDEX).get("weight_map")
        if not isinstance(found, dict):
            raise CheckpointError(INDEX, type(found).__name__, "a weight_map from names to files")
        for name, file in found.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{INDEX}, {name}", file, "the name of a safetensors file in this folder")
        return found
