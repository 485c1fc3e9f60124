"""Time calls on the host with kernels of a pack. The GPU machine has no CuTe DSL.

    python -m dsv4lib.bench.ops.host_pack DIR [--only mhc,topk] [--shapes "T 1,T 8"]

DIR is an unpacked archive of `export`. The ops themselves are called: public function, checks, plan, replay. Only what
compiled host code would do is replaced: `THUNK`, one C function that calls cuLaunchKernelEx with the pack's
parameters, in which the plan has written the addresses of this call. Kernels run, over the inputs of their rows.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dsv4lib.bench.ops import standins
from dsv4lib.errors import DSV4Error

GOAL_US = 15
OFFSETS = (16, 24)  # of torch's handle in a tensor, by its version
THUNK = """
define void @launch(ptr %addresses) {
  %words = load ptr, ptr %addresses
  %f = load ptr, ptr %words
  %config.at = getelementptr i64, ptr %words, i64 1
  %config = load ptr, ptr %config.at
  %kernel.at = getelementptr i64, ptr %words, i64 2
  %kernel = load ptr, ptr %kernel.at
  %size = getelementptr i64, ptr %words, i64 3
  %error.at = getelementptr i64, ptr %words, i64 4
  %error = load ptr, ptr %error.at
  %params = getelementptr i64, ptr %words, i64 5
  %extra = alloca [5 x i64]
  %e1 = getelementptr i64, ptr %extra, i64 1
  %e2 = getelementptr i64, ptr %extra, i64 2
  %e3 = getelementptr i64, ptr %extra, i64 3
  %e4 = getelementptr i64, ptr %extra, i64 4
  store i64 1, ptr %extra
  store ptr %params, ptr %e1
  store i64 2, ptr %e2
  store ptr %size, ptr %e3
  store i64 0, ptr %e4
  %code = call i32 %f(ptr %config, ptr %kernel, ptr null, ptr %extra)
  %before = load i32, ptr %error
  %both = or i32 %before, %code
  store i32 %both, ptr %error
  ret void
}
"""
"""Of the addresses of a launch's words: cuLaunchKernelEx, its configuration, the kernel, bytes of parameters, address
of the errors that it has answered, parameters."""


def code() -> dict[str, Any]:
    """Return machine code that a pack takes along, in hex.

    `THUNK`, and the replay of calls by the layout that it reads.
    """
    from dsv4lib.ops.common import replay, replay_ir

    here = replay.layout()
    built = {} if here is None else {at: here._replace(tensor=at) for at in OFFSETS}
    replays = {str(at): replay.compiled(replay_ir.module(found)).hex() for at, found in built.items()}
    return {"thunk": replay.compiled(THUNK).hex(), "replay": replays}


class Function:
    """In place of a compiled function: `native.entry` finds the thunk."""

    def __init__(self, address: int):
        self.capi_func = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def to(self, device: Any) -> Function:
        """There is nothing to load."""
        return self


class Launches:
    """The launches of the row that is called, in place of those of the DSL.

    Args:
        pack: `replay.Pack`. driver: `replay.Driver`, or a test's own. device: of the inputs.

    Attributes:
        error: of launches so far, 0 if there was none.
    """

    def __init__(self, pack: Any, driver: Any, device: str = "cuda"):
        from dsv4lib.ops.common import replay

        self.pack, self.driver, self.device = pack, driver, device
        self._memory, address = replay.runnable(bytes.fromhex(pack.index["host"]["thunk"]))
        self.function = Function(address)
        self.error = ctypes.c_int32(0)
        self._queue: list[list[Any]] = []  # of the row
        self._constants: list[Any] = []
        self._next = 0
        found = replay.layout()
        built = pack.index["host"]["replay"]
        if found is not None and str(found.tensor) in built:
            replay.BUILT[found] = bytes.fromhex(built[str(found.tensor)])

    @property
    def names(self) -> set[str]:
        """Rows that the pack has."""
        return set(self.pack.index["rows"])

    def bound(self, row: Any) -> Any:
        """Our provider's call of a row, whose launches are the pack's from now on.

        Raises:
            Absent: the pack does not have the row.
        """
        from dsv4lib.bench.ops import harness
        from dsv4lib.bench.ops.case import Absent, tensors

        name = f"{row.op} {row.shape}"
        entry = self.pack.index["rows"].get(name)
        if entry is None:
            raise Absent(self.pack.index["refused"].get(name, "not in the pack"))
        given = harness.inputs(row, self.device)
        self._queue = []  # what is called to allocate outputs launches nothing
        call, outputs = row.providers[0].bind(given)
        known = tensors(given)
        memory = {f"given {key}": x for key, x in known.items()}
        for key, one in entry["memory"].items():
            output = outputs.get(key.removeprefix("out ")) if key.startswith("out ") else None
            made = self.pack._made(one, known, next(iter(known.values())).device) if output is None else _whole(output)
            memory[key] = made
        constants = [x for key, x in memory.items() if key.startswith("memory ")]
        queue = [self._values(fields, memory) for fields in entry["launches"]]

        def kept() -> None:
            self._queue, self._constants, self._next = queue, constants, 0
            call()

        kept.keep = given, outputs, memory  # lives as long as the call
        return kept

    def _values(self, fields: Mapping[str, Any], memory: Mapping[str, Any]) -> list[Any]:
        """The words of a launch: bytes, or a tensor and a distance."""
        from dsv4lib.bench.ops.replay import Launch

        launch = Launch(**{**fields, "params": bytes.fromhex(fields["params"])})
        cubin = (self.pack.folder / launch.cubin).read_bytes()
        config, function, keep = self.driver.described(launch, cubin)
        params = launch.params + bytes(-len(launch.params) % 8)
        head = self.driver.launch_address, ctypes.addressof(config), function.value, len(launch.params)
        head = *head, ctypes.addressof(self.error)
        words: list[Any] = [word.to_bytes(8, "little") for word in head]
        words += [params[i : i + 8] for i in range(0, len(params), 8)]
        for offset, name, start in launch.pointers:
            words[len(head) + offset // 8] = _word_class()(memory[name], start)
        words.append(_Kept(b"", (config, keep)))
        return words

    def launch(self, *ignored: Any, **also: Any) -> None:
        """The next launch of the row."""
        from dsv4lib.ops.common import native, plans

        if not self._queue:
            return
        values = self._queue[self._next]
        self._next += 1
        for one in self._constants:
            plans.constant(one)
        plans.note(self.function, values)
        native.launch(self.function, values)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Ops launch from here."""
        from dsv4lib import backends
        from dsv4lib.ops.common import compile_cache, launching, native

        leaf_bytes, nothing = native.leaf_bytes, lambda *args, **kwargs: ()
        arch = self.pack.index["arch"]
        changes = [
            (launching, "launch", self.launch),
            (launching, "enqueue", self.launch),
            (launching, "arch", lambda name, archs=(): arch),
            (launching, "stream", lambda name, x: 0),
            (launching, "on_host", lambda x: False),
            (launching, "sm_count", lambda device: self.pack.index["sms"]),
            (backends, "resolve", lambda name, arch="", kernel=True: "native"),
            (backends, "device", lambda name: self.device),
            (compile_cache.CompileCache, "get", lambda *args, **kwargs: (None, None)),
            (native, "leaf_bytes", lambda value: value if isinstance(value, bytes) else leaf_bytes(value)),
        ]
        for name, module in list(sys.modules.items()):
            if name.startswith("dsv4lib.ops.") and name.endswith(".arguments"):
                changes += [(module, key, nothing) for key in vars(module) if key.endswith("_args")]
        with ExitStack() as stack:
            for module, name, value in changes:
                stack.enter_context(patch.object(module, name, value))
            yield


class _Kept(bytes):
    """No bytes of a launch; it keeps an object alive as long as they."""

    def __new__(cls, content: bytes, kept: Any) -> _Kept:
        made = super().__new__(cls, content)
        made.kept = kept
        return made


def _word_class() -> type:
    """`DeviceTensor` of one word: an address in a tensor's memory."""
    from dsv4lib.dsl.tensors import DeviceTensor

    class Word(DeviceTensor):
        __slots__ = ()

        def __init__(self, source: Any, start: int):
            super().__init__(source, None)
            self.data_ptr += start

        nbytes = 1

        def packed(self) -> bytes:
            return self.data_ptr.to_bytes(8, "little")

    return Word


def _whole(x: Any) -> Any:
    """The memory that a tensor is in, as bytes."""
    import torch

    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    standins.inert()
    import torch

    from dsv4lib.bench.ops import harness, host, replay

    parser = argparse.ArgumentParser(prog="python -m dsv4lib.bench.ops.host_pack", description=__doc__.splitlines()[0])
    parser.add_argument("pack", type=Path, help="the folder of a pack")
    parser.add_argument("--only", default="", help="ops, with commas between them")
    parser.add_argument("--shapes", default="T 1,T 8", help="ends of the shapes of rows, with commas between them")
    given = parser.parse_args(arguments)
    rows, broken = harness.chosen(harness.parts(given.only), "")
    launches = Launches(replay.Pack(given.pack), replay.Driver())
    for name, reason in broken.items():
        print(f"{name}: cannot be imported: {reason}")
    with torch.no_grad(), launches.installed():
        for end in harness.parts(given.shapes):
            print(f"{end}, {torch.cuda.get_device_name()}")
            for name, found in times([row for row in rows if row.shape.endswith(end)], launches):
                print(f"{name:56} {found if isinstance(found, str) else f'{found:8.1f} us'}", flush=True)
        by_name = {(row.op, row.shape): row for row in rows}
        packed = [by_name[one] for one in host.LAYER if one in by_name and f"{one[0]} {one[1]}" in launches.names]
        calls = [launches.bound(row) for row in packed]

        def layer() -> None:
            for call in calls:
                call()

        if calls:
            print(f"layer, {len(calls)} ops of a chain of {len(host.LAYER)}: {host.host_us(layer):.1f} us")
    return 0


def times(rows: Sequence[Any], launches: Launches) -> Iterator[tuple[str, float | str]]:
    """Return (row, microseconds or why there are none). Then their median, and the rows within `GOAL_US`."""
    from dsv4lib.bench.ops import host, timing

    found = []
    for row in rows:
        try:
            us = host.host_us(launches.bound(row))
            if launches.error.value:
                raise DSV4Error(f"cuLaunchKernelEx: error {launches.error.value}")
            found.append(us)
            yield f"{row.op} {row.shape}", us
        except Exception as error:  # of the row's own
            yield f"{row.op} {row.shape}", timing.first_line(error)
    if found:
        within = sum(one <= GOAL_US for one in found)
        yield f"median of {len(found)} rows, {within} within {GOAL_US} us", statistics.median(found)


if __name__ == "__main__":
    sys.exit(main())
