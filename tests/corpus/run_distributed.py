"""Run a script written for torchrun on emulated devices, one rank a device, unmodified.

    python -m tests.corpus.run_distributed 2 path/to/distributed_gemm.py --its args

All ranks are threads of one process, of which one runs at a time: a rank gives way where it waits for the others, in a
collective. What such scripts import is served here: torch.distributed (collectives over the tensors themselves),
torch's symmetric memory, NVSHMEM's Python package, and the few calls of cuda.core around them. Kernels run together as
soon as their results are read (emulator.devices). Exit code: 0, or 1 with the first traceback. The schedule is
that of DSV4_SCHEDULE.

Seen with CUTLASS 7107b05 (examples/python/CuTeDSL/cute/blackwell/kernel/distributed) on 2 devices: nine of the ten
scripts pass unmodified; distributed_all_gather_gemm copies memory inside a CUDA graph, which is refused. Under the
adversarial schedule distributed_gemm_all_reduce gives wrong sums, rightly: before it raises a tile's flag it waits for
its TMA stores with cp.async.bulk.wait_group.read (PipelineTmaStore.producer_tail), which promises that shared memory
has been read, not that the data has arrived. With wait_group in its place it passes.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import math
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsv4lib import emulator
from dsv4lib.emulator.checks import errors
from dsv4lib.emulator.driver.patching import Patches, patches
from dsv4lib.emulator.driver.symbols import RUNTIME


class Stopped(Exception):
    """Another rank has failed."""


class World:
    """The ranks, and what they share."""

    def __init__(self, gpus: emulator.Devices):
        self.gpus, self.size = gpus, len(gpus)
        self.turn = threading.Condition()
        self.failed: list[str] = []
        self.buffers: list[Any] = []  # symmetric buffers, in the order in which every rank asks for them
        self.by_start: dict[int, tuple[Any, int]] = {}
        self._local = threading.local()
        self._given: dict[int, Any] = {}
        self._round, self._answers = 0, []
        self._runs = self._syncing = self._done = 0

    @property
    def rank(self) -> int:
        """Of the running thread."""
        return self._local.rank

    def run(self, rank: int, body: Callable[[], None]) -> None:
        """The life of a rank."""
        with self.turn:
            self._local.rank, self._local.taken = rank, 0
            try:
                self._take_over()
                body()
            except Stopped:
                pass
            except SystemExit as stop:
                if stop.code not in (None, 0):
                    self.failed.append(f"rank {rank} exits with {stop.code}")
            except BaseException:
                self.failed.append(f"rank {rank}: {traceback.format_exc()}")
            self._done += 1
            self.turn.notify_all()

    def _take_over(self) -> None:
        if self.failed:
            raise Stopped
        RUNTIME.select(self.rank)
        os.environ.update({"RANK": str(self.rank), "LOCAL_RANK": str(self.rank), "WORLD_SIZE": str(self.size)})

    def exchange(self, value: Any = None) -> list[Any]:
        """Exchange values: all of them, by rank, once every rank has come."""
        stream, number = RUNTIME.stream, self._round
        self._given[self.rank] = value
        if len(self._given) == self.size:
            self._answers = [self._given[rank] for rank in range(self.size)]
            self._given = {}
            self._round += 1
        self.turn.notify_all()
        while self._round == number and not self.failed:
            self.turn.wait()
        answers = self._answers
        self._take_over()
        RUNTIME.stream = stream
        return answers

    def synchronize(self) -> None:
        """Let the queued kernels run, when the other ranks have launched theirs: when they wait, too, or are done."""
        stream, number = RUNTIME.stream, self._runs
        self._syncing += 1
        self.turn.notify_all()
        while self._runs == number and not self.failed:
            if self._syncing + len(self._given) + self._done == self.size:
                self.gpus.queues.run()
                self._runs += 1
                self._syncing = 0
                self.turn.notify_all()
                break
            self.turn.wait()
        self._take_over()
        RUNTIME.stream = stream

    def symmetric(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """This rank's part of the next symmetric buffer."""
        number = self._local.taken
        self._local.taken += 1
        if number == len(self.buffers):
            self.buffers.append(self.gpus.symmetric(shape, dtype, f"symmetric {number}"))
        buffer = self.buffers[number]
        assert (buffer.shape, buffer.dtype) == (shape, dtype), "ranks disagree about a symmetric buffer"
        tensor = buffer.tensor(self.rank)
        self.by_start[tensor.data_ptr()] = buffer, self.rank
        return tensor

    def buffer(self, tensor: torch.Tensor) -> Any:
        """The symmetric buffer that a tensor is a part of."""
        return self.by_start[tensor.untyped_storage().data_ptr()][0]


class Handle:
    """What torch's ``rendezvous`` returns."""

    def __init__(self, world: World, tensor: torch.Tensor):
        self.barrier = lambda *a, **k: world.exchange() and None
        self._buffer = world.buffer(tensor)
        self.rank, self.world_size = world.rank, world.size
        self.buffer_ptrs = [self._buffer.tensor(i).data_ptr() for i in range(world.size)]
        self.multicast_ptr = self._buffer.multicast.ctypes.data

    def get_buffer(self, rank: int, shape: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """The part of another rank."""
        flat = self._buffer.tensor(rank).view(-1).view(dtype)
        return flat[storage_offset : storage_offset + math.prod(shape)].view(tuple(shape))


def _distributed(world: World, patch: Patches) -> None:
    def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors, read when every rank has launched what comes before the collective."""
        world.exchange()
        return world.exchange(tensor.cpu())

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **_options: Any) -> None:
        combine = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum}
        total, *parts = parts_of(tensor)
        for part in parts:
            total = combine[op](total, part)
        tensor.copy_(total)

    def all_gather(out: list[torch.Tensor], tensor: torch.Tensor, **_options: Any) -> None:
        for target, part in zip(out, parts_of(tensor), strict=True):
            target.copy_(part)

    def all_gather_object(out: list[Any], value: Any, **_options: Any) -> None:
        out[:] = world.exchange(value)

    def broadcast(tensor: torch.Tensor, src: int = 0, **_options: Any) -> None:
        tensor.copy_(parts_of(tensor)[src])

    served = {
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "init_process_group": lambda *a, **k: world.exchange() and None,
        "destroy_process_group": lambda *a, **k: None,
        "get_rank": lambda *a: world.rank,
        "get_world_size": lambda *a: world.size,
        "barrier": lambda *a, **k: world.exchange() and None,
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "all_gather_object": all_gather_object,
        "broadcast": broadcast,
        "group": types.SimpleNamespace(WORLD=types.SimpleNamespace(group_name="0", rank=lambda: world.rank)),
    }
    for name, value in served.items():
        patch.set(dist, name, value)
    patch.set(torch.cuda, "can_device_access_peer", lambda *a: True)
    patch.set(torch.ops.symm_mem, "multimem_all_reduce_", lambda tensor, op, group: all_reduce(tensor))
    yes = types.SimpleNamespace(has_multicast_support=lambda *a: True)
    patch.set(torch._C._distributed_c10d, "_SymmetricMemory", yes)


def _symmetric_memory(world: World, patch: Patches) -> None:
    import torch.distributed._symmetric_memory as symm_mem

    def empty(*shape: Any, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        return world.symmetric(tuple(map(int, sizes)), dtype)

    def rendezvous(tensor: torch.Tensor, group: Any = None, **_options: Any) -> Handle:
        world.exchange()
        return Handle(world, tensor)

    def as_tensor(pointer: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        raw = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(int(pointer))
        tensor = torch.frombuffer(raw, dtype=torch.uint8)
        owner = world.by_start.get(int(pointer))  # a multicast range has none
        RUNTIME.place(tensor, world.rank if owner is None else owner[1])
        return tensor.view(dtype).view(tuple(shape))

    import cutlass.torch

    patch.set(symm_mem, "empty", empty)
    patch.set(symm_mem, "rendezvous", rendezvous)
    patch.set(cutlass.torch, "as_tensor", as_tensor)


@contextmanager
def _modules(world: World, patch: Patches) -> Iterator[None]:
    """nvshmem.core, cuda.core and the loader of NVIDIA's libraries."""
    import cuda.pathfinder
    import numpy as np

    def peer(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        world.exchange()
        return world.buffer(tensor).tensor(rank)

    core = types.ModuleType("nvshmem.core")
    core.tensor = lambda shape, dtype: world.symmetric((shape,) if isinstance(shape, int) else tuple(shape), dtype)
    core.get_peer_tensor = peer
    core.get_multicast_tensor = lambda team, tensor: world.buffer(tensor).multicast_tensor()
    core.free_tensor = lambda tensor: None
    core.get_unique_id = lambda empty=False: types.SimpleNamespace(_data=np.zeros(128, np.uint8))
    core.init = core.finalize = lambda *a, **k: world.exchange() and None
    core.Teams = types.SimpleNamespace(TEAM_NODE=0)
    package = types.ModuleType("nvshmem")
    package.core = core
    cuda_core = types.ModuleType("cuda.core")
    cuda_core.Device = lambda index: types.SimpleNamespace(
        set_current=lambda: RUNTIME.select(index), create_stream=torch.cuda.Stream
    )
    patch.set(cuda.pathfinder, "load_nvidia_dynamic_lib", lambda name: None)
    added = {"nvshmem": package, "nvshmem.core": core, "cuda.core": cuda_core}
    before = {name: sys.modules.get(name) for name in added}
    for name, module in added.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def run(count: int, script: Path, args: list[str], **settings: Any) -> tuple[list[str], emulator.Devices]:
    """Run ``script`` on ``count`` devices; returns what failed, and the devices with their launches and hazards."""
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    code = compile(script.read_text(), str(script), "exec", dont_inherit=True)
    with emulator.devices(count, default_device="cpu", **settings) as gpus, patches() as patch:
        world = World(gpus)
        patch.set(gpus, "synchronize", world.synchronize)
        _distributed(world, patch)
        _symmetric_memory(world, patch)
        modes = torch.overrides._get_current_function_mode_stack()

        def body() -> None:
            with modes[-1]:
                exec(code, {"__name__": "__main__", "__file__": str(script)})
                RUNTIME.synchronize()

        with _modules(world, patch):
            ranks = [threading.Thread(target=world.run, args=(rank, body)) for rank in range(count)]
            for thread in ranks:
                thread.start()
            for thread in ranks:
                thread.join()
        RUNTIME.select(0)
        gpus.queues.discard()
        patch.undo()
    return world.failed, gpus


def main() -> int:
    """The command line."""
    count, script, *args = sys.argv[1:]
    failed, gpus = run(int(count), Path(script), args, schedule=os.environ.get("DSV4_SCHEDULE", "round_robin"))
    for gpu in gpus:
        instructions = sum(launch.result.instructions for launch in gpu.launches)
        print(f"device {gpu.index}: {len(gpu.launches)} launches, {instructions:,} warp-instructions")
    for hazard in errors(gpus.hazards):
        print(hazard)
    print("\n".join(failed[:1]), file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
