"""Emulate torch's devices. CUDA tensors are CPU tensors that say they are on ``cuda:0``.

For code written for a GPU. A function mode answers for the calling thread: it takes the device argument out of every
call, copies where a transfer between host and device would, and knows for every storage on which side it would be. A
storage is on the *host* if it was made there (``device="cpu"``, ``.cpu()``, by default in scripts) or computed from
such storages alone; everything else, also what was made before the context, counts as device memory. Device tensors are
aligned as cudaMalloc aligns them, because kernels rely on it.

`torch.cuda` is replaced function by function (`cuda_api`). On a single device a launch is finished when it returns, so
streams and events have nothing to do. In a group (devices.py) launches are queued, and an operation that looks at a
device's tensors first lets them run. Times count work (`emulated_time`) and say nothing of performance.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from dsv4lib.emulator.driver import cuda_api, torch_compile, triton_driver
from dsv4lib.emulator.driver.on_import import when_imported
from dsv4lib.emulator.driver.patching import patches
from dsv4lib.emulator.driver.scaled_mm import scaled_mm
from dsv4lib.emulator.driver.symbols import RUNTIME
from dsv4lib.emulator.errors import LaunchError

ALIGNMENT = 256
HOST = -1  # the side of host memory; other sides are device numbers
# What a graph may contain: asking about tensors, viewing and allocating them. Anything else is work to be replayed.
_CAPTURABLE = frozenset(
    "__get__ __dlpack__ __dlpack_device__ __len__ data_ptr stride size dim numel element_size storage_offset "
    "is_contiguous is_neg untyped_storage view view_as as_strided reshape flatten expand permute transpose unsqueeze "
    "squeeze select narrow unbind detach __getitem__ empty empty_like empty_strided get_device record_stream".split()
)
_DEVICE, _IS_CUDA, _IS_CPU = torch.Tensor.device, torch.Tensor.is_cuda, torch.Tensor.is_cpu


def is_cuda(device: Any) -> bool:
    """Tell whether a device argument means a CUDA device."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool) or str(device).startswith("cuda")


def side_of(device: Any) -> int | None:
    """Find the side that a device argument means; None for others, such as meta.

    Raises:
        LaunchError: a CUDA device that does not exist.
    """
    if not is_cuda(device):
        return HOST if torch.device(device).type == "cpu" else None
    index = device if isinstance(device, int) else torch.device(device).index
    return RUNTIME.device().index if index is None else RUNTIME.sibling(index).index


class Sides:
    """On which side the memory of a tensor is: of the host, or of a device by number."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, tensor: torch.Tensor, side: int) -> None:
        """Note where ``tensor`` is. Of a single device nothing is noted: that is where unknown tensors are."""
        storage = tensor.untyped_storage()
        if side == HOST or RUNTIME.device().group is not None:
            if storage.nbytes():
                self._known[storage.data_ptr()] = StorageWeakRef(storage), side
        else:
            self._known.pop(storage.data_ptr(), None)

    def find(self, tensor: torch.Tensor) -> int | None:
        """Find the side, if known. An address is reused after its storage is freed, hence the weak reference."""
        if tensor.is_meta or tensor.layout != torch.strided or _is_fake(tensor):
            return None
        start = tensor.untyped_storage().data_ptr()
        reference, side = self._known.get(start, (None, None))
        if reference is not None and reference.expired():
            del self._known[start]
            return None
        return side

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """Find the device, if known."""
        side = self.find(tensor)
        return None if side == HOST else side


class CudaMode(TorchFunctionMode):
    """Rewrites devices in every torch call of this thread."""

    def __init__(self, default: str) -> None:
        super().__init__()
        self.sides = Sides()
        self.default = default
        self.bodies: set[str] = set()  # custom ops whose bodies run under the mode: what they call is seen

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run ``func`` on the CPU and keep the books."""
        if torch.compiler.is_dynamo_compiling():  # Dynamo traces this function, too: its tensors are fake
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        property_of = getattr(func, "__self__", None)
        if property_of in (_DEVICE, _IS_CUDA, _IS_CPU):
            device = self._device(args[0])
            return device if property_of is _DEVICE else device.type == ("cuda" if property_of is _IS_CUDA else "cpu")
        if RUNTIME.captured is not None and func.__name__ not in _CAPTURABLE and not self._seen_inside(func):
            raise LaunchError(f"torch.{func.__name__} while a CUDA graph is captured: only kernel launches can be")
        if RUNTIME.devices and RUNTIME.device().group is not None and func.__name__ not in _CAPTURABLE:
            self._settle((args, kwargs))
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, *args, **kwargs)
        inputs = list(_tensors((args, kwargs)))
        wanted = self._take_device(kwargs)
        kwargs.pop("pin_memory", None)
        return self._place(func(*args, **kwargs), inputs, wanted)

    def _seen_inside(self, func: Any) -> bool:
        """Whether ``func`` is a custom op of which every call of torch is seen here anyway."""
        return getattr(func, "_qualified_op_name", None) in self.bodies

    def _settle(self, arguments: Any) -> None:
        """Let launches run that are queued on the devices of the tensors among ``arguments``."""
        queued = RUNTIME.device().group.queues.pending
        if queued() and any(side != HOST and queued(side) for side in map(self.sides.find, _tensors(arguments))):
            RUNTIME.synchronize()

    def _take_device(self, kwargs: dict[str, Any]) -> int | None:
        """Remove the device argument; returns the side where the result is wanted."""
        device = kwargs.get("device")
        if device is None or _fakes():
            return None
        side = side_of(device)
        if side is not None and side != HOST:
            kwargs["device"] = "cpu"
        return side

    def _device(self, tensor: torch.Tensor) -> torch.device:
        """What ``tensor.device`` says."""
        if self._real(tensor):
            return _DEVICE.__get__(tensor)
        return torch.device("cuda", self.side(tensor))

    def side(self, tensor: torch.Tensor) -> int:
        """Find where a tensor is; unknown device memory counts as the first device's."""
        return HOST if self._real(tensor) else self.sides.device_of(tensor) or 0

    def _real(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor keeps its own device: host memory, meta tensors, fake tensors of the CPU."""
        if _is_fake(tensor):
            return True
        return _DEVICE.__get__(tensor).type != "cpu" or self.sides.find(tensor) == HOST

    def _place(self, out: Any, inputs: list[torch.Tensor], wanted: int | None) -> Any:
        """Note where fresh results are, and align those on the device."""
        if isinstance(out, tuple | list) and not isinstance(out, torch.Size):
            placed = [self._place(item, inputs, wanted) for item in out]
            same = all(a is b for a, b in zip(placed, out, strict=True))
            return out if same else type(out)(placed)  # also torch.return_types
        if not isinstance(out, torch.Tensor):
            return out
        if _is_fake(out):
            return out
        if out.layout != torch.strided or _DEVICE.__get__(out).type != "cpu":
            return out
        start = out.untyped_storage().data_ptr()
        if any(
            t.layout == torch.strided and not _is_fake(t) and t.untyped_storage().data_ptr() == start for t in inputs
        ):
            return out
        if wanted is None:
            sides = [self.side(t) for t in inputs] or [side_of(self.default)]
            wanted = max(sides)
        return self._on(out, wanted)

    def _on(self, fresh: torch.Tensor, side: int) -> torch.Tensor:
        """A fresh tensor on a side."""
        fresh = fresh if side == HOST else aligned(fresh)
        self.sides.add(fresh, side)
        return fresh

    def move(self, tensor: torch.Tensor, target: int, out: torch.Tensor) -> torch.Tensor:
        """Put ``out`` on the side ``target``, copied if that differs.

        ``out`` is ``tensor`` or converted from it.
        """
        fresh = out.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        if not fresh and self.side(tensor) == target:
            return out
        return self._on(out if fresh else out.clone(), target)


def _fakes() -> bool:
    """Whether tensors made now are fake: they name devices as they like."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def _is_fake(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Move ``tensor`` to aligned memory if its storage is fresh and badly aligned. Views stay."""
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes == 0 or storage.data_ptr() % ALIGNMENT == 0 or tensor._is_view() or tensor.grad_fn is not None:
        return tensor
    if type(tensor) is not torch.Tensor or tensor.storage_offset() != 0:
        return tensor
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    moved = torch.from_numpy(raw[start : start + nbytes])  # its storage is exactly this slice: bounds stay sharp
    moved.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
    out = torch.empty(0, dtype=tensor.dtype)
    out.set_(moved.untyped_storage(), 0, tensor.shape, tensor.stride())
    return out.requires_grad_(tensor.requires_grad)


def _to(mode: CudaMode, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``Tensor.to`` in all its forms."""
    target = None
    device = kwargs.pop("device", None)
    rest = []
    for arg in args:
        if isinstance(arg, torch.device | str) or (isinstance(arg, int) and not isinstance(arg, bool) and not rest):
            device = arg
        else:
            if isinstance(arg, torch.Tensor):
                target = mode.side(arg)
            rest.append(arg)
    if device is not None and (target := side_of(device)) is None:
        return torch.Tensor.to(tensor, device, *rest, **kwargs)
    if device is not None:  # what follows a device may be None, as Module.to has it
        kwargs, rest = dict(zip(("dtype", "non_blocking", "copy"), rest, strict=False)) | kwargs, []
    out = torch.Tensor.to(tensor, *rest, **kwargs) if rest or kwargs else tensor
    if _is_fake(tensor):
        return out
    return mode.move(tensor, mode.side(tensor) if target is None else target, out)


def _cuda(mode: CudaMode, tensor: torch.Tensor, device: Any = "cuda", *args: Any, **kwargs: Any) -> torch.Tensor:
    return mode.move(tensor, side_of("cuda" if device is None else device), tensor)


def _cpu(mode: CudaMode, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return mode.move(tensor, HOST, tensor)


def _data_ptr(mode: CudaMode, tensor: torch.Tensor) -> int:
    """The address of a tensor may end up in a kernel by any way: from here on its storage is device memory."""
    RUNTIME.track(tensor)
    return torch.Tensor.data_ptr(tensor)


def _itself(mode: CudaMode, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _get_device(mode: CudaMode, tensor: torch.Tensor) -> int:
    return mode.side(tensor)


def _from_data(mode: CudaMode, data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """``torch.tensor``, which reads its data on the host, also where it makes a fake tensor of a CUDA device.

    A copy of a tensor is where the tensor is, if no device is named.
    """
    fakes = _fakes() and is_cuda(device)
    wanted = mode._take_device(named := {"device": device})
    kwargs.pop("pin_memory", None)
    made = torch.tensor(data, device="cpu" if fakes else named["device"], **kwargs)
    if fakes:
        return torch.empty(made.shape, dtype=made.dtype, device=device, requires_grad=made.requires_grad)
    return mode._place(made, [data] if isinstance(data, torch.Tensor) else [], wanted)


_SPECIAL: dict[Any, Callable[..., Any]] = {
    torch.tensor: _from_data,
    torch.Tensor.to: _to,
    torch.Tensor.cuda: _cuda,
    torch.Tensor.cpu: _cpu,
    torch.Tensor.data_ptr: _data_ptr,
    torch.Tensor.pin_memory: _itself,
    torch.Tensor.get_device: _get_device,
}


class Generator(torch.Generator):
    """A random generator; those of CUDA devices are CPU generators that say otherwise."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        """Make it on the CPU, whatever device is named."""
        made = super().__new__(cls, "cpu" if is_cuda(device) else device)
        made.declared = torch.device("cuda", side_of(device)) if is_cuda(device) else None
        return made

    @property
    def device(self) -> torch.device:
        """Return the device it was made for."""
        return super().device if self.declared is None else self.declared


@contextmanager
def patched(default: str) -> Iterator[None]:
    """Let torch report a CUDA device. Nested contexts share the outermost one's mode.

    ``default``: where tensors are made that name no device, "cuda" or "cpu".
    """
    if torch.Generator is Generator:
        yield
        return
    mode = CudaMode(default)
    with patches() as patch:
        for owner, name, value in cuda_api.replacements():
            patch.set(owner, name, value)
        patch.set(torch, "Generator", Generator)
        patch.set(RUNTIME, "side_of", mode.sides.device_of)
        patch.set(RUNTIME, "place", mode.sides.add)
        # Not through the mode: torch checks the type of the stream before it calls the mode.
        patch.set(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.set(
            torch, "set_default_device", lambda device: setattr(mode, "default", "cuda" if is_cuda(device) else "cpu")
        )
        patch.around(torch, "_scaled_mm", scaled_mm)
        patch.set(torch.library, "custom_op", _custom_op(torch.library.custom_op, mode))
        patch.around(torch.autograd, "_engine_run_backward", functools.partial(_backward, mode))
        patch.set(torch, "compile", torch_compile.told(torch.compile))
        try:
            compiler = {
                torch_compile.COMPILER: functools.partial(torch_compile.lead, patch, mode),
            }
            with triton_driver.patched(), when_imported(compiler), mode:
                yield
        finally:
            rules = sys.modules.get("torch._dynamo.trace_rules")
            if rules is not None:  # loaded inside, dynamo took our functions for torch's own
                rules.get_torch_obj_rule_map.cache_clear()


def _backward(mode: CudaMode, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run backward passes under the mode, which torch leaves while it calls ``Tensor.backward``."""
    with mode:
        return original(*args, **kwargs)


def _custom_op(original: Callable[..., Any], mode: CudaMode) -> Callable[..., Any]:
    """``torch.library.custom_op`` whose bodies run under the mode (torch leaves it while a custom op runs)."""

    @functools.wraps(original)
    def custom_op(name: str, fn: Any = None, /, *, device_types: Any = None, **kwargs: Any) -> Any:
        if fn is None:
            return lambda body: custom_op(name, body, device_types=device_types, **kwargs)

        @functools.wraps(fn)
        def body(*args: Any, **body_kwargs: Any) -> Any:
            if not RUNTIME.devices:
                return fn(*args, **body_kwargs)
            with mode:
                return fn(*args, **body_kwargs)

        mode.bodies.add(name)
        return original(name, body, **kwargs)  # device_types="cuda" would hide the op from CPU tensors

    return custom_op
