"""Call an op again without what its first call worked out. One plan a signature, pointers written into it.

A custom op is registered with torch and serves torch.compile, fake tensors, modes and subclasses through torch's
dispatcher. A plain eager call goes past it (`Op.__call__`):

    1st call of a signature    checks, then the op's body
    2nd                        the same, recorded: which kernels it launches, and where each of their words comes from
    3rd                        the pointers are written into the recorded words, and the kernels are launched
    4th and later              the same in one C function, see `replay`

The signature is all that a body may look at on a GPU: dtype, shape, strides, device and alignment of every tensor, and
every other argument as it is; the stream belongs to it, because memory that an op keeps does. A body that does more
than launch kernels over views of its arguments, `scratch` and `constant` memory is never replayed. Only calls on a GPU
have plans: on the CPU bodies look at values.

Refused here, for every op, by name: inputs that require grad, and outputs that overlap other arguments, see `Overlaps`.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import native, replay
from dsv4lib.ops.common.overlap import Overlaps
from dsv4lib.ops.common.replay_ir import ALIGN

MOST = 4096  # plans of an op; more signatures start over

_functions, _dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_transforms, _profiled = torch._C._functorch.peek_interpreter_stack, torch.autograd._profiler_enabled
_compiling, _grad, _inference = torch.compiler.is_compiling, torch.is_grad_enabled, torch.is_inference_mode_enabled
_changed = torch._C._increment_version
_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # a build for CPUs has none
_device = getattr(torch._C, "_cuda_getDevice", None)
_OPS: list[Op] = []


class Op:
    """Call a custom op directly where nothing watches, else through torch.

    What the registered op has, this has, too.

    Args:
        registered: torch's op. body: what it does on a device. types: what it does to fake tensors.
        names: what errors call the arguments of its schema.
        written: places of its outputs. in_place: places of (output, input) that may be the same memory.
        one_pool: places of pages that may be of one pool.
        flatten: makes arguments of the schema of those of a call; None: they are the same.
    """

    def __init__(
        self,
        registered: Any,
        body: Callable[..., None],
        types: Callable[..., None],
        names: Sequence[str],
        written: Sequence[int],
        in_place: Iterable[tuple[int, int]],
        flatten: Callable[[tuple], list] | None = None,
        one_pool: Iterable[Iterable[int]] = (),
    ):
        self.registered, self.body, self.names, self.written = registered, body, names, written
        self._types, self._flatten = types, flatten
        self._namespace, self._name = registered._namespace, registered._name
        self.overlaps = Overlaps(names, written, in_place, one_pool)
        self.plans: dict[tuple, Plan | _NoPlan | None] = {}  # by signature; None: seen once
        self._records = replay.Records()  # of plans that were used last
        _OPS.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.registered, name)

    def __call__(self, *fields: Any) -> None:
        """Check, choose the back end, launch; the fields of the op's record, in order.

        Raises:
            ArgumentError: an argument of the wrong type, shape, stride, device, alignment or memory.
        """
        watched = _compiling() or _functions() or _profiled()
        found: Any = False
        if not watched and self._records.warm is not None:
            found = self._records.warm(fields)
            if found is None:
                return None
            if type(found) is int:
                raise native.failure(found)
        args: Sequence[Any] = fields if self._flatten is None else self._flatten(fields)
        if watched:
            return self._through_torch(args)
        return self._by_signature(args, None if found else fields)

    def _by_signature(self, args: Sequence[Any], fields: tuple | None) -> None:
        """A call whose plan, if there is one, is found by all that its body may look at.

        Args:
            fields: of the call, whose plan gets a record; None: it has one.
        """
        if _dispatches() or _transforms() is not None or type(args[0]) not in replay.PLAIN:
            return self._through_torch(args)
        key: list[Any] = []
        pointers = []
        grad = _grad()
        for x in args:
            kind = type(x)
            if kind in replay.PLAIN:
                if grad and x.requires_grad:
                    self._refuse_grad(args)
                pointer = x.data_ptr()
                pointers.append(pointer)
                layout = x.is_contiguous() or x.stride()
                key += x.dtype, x.shape, layout, x.get_device(), pointer & ALIGN
            elif isinstance(x, Tensor):  # a subclass; a fake one without a mode
                return self._through_torch(args)
            else:
                key.append(x)
        key.append(stream_of(args[0]))
        plan = self.plans.get(signature := tuple(key))
        if plan is None:
            self._first(signature, args)
        elif not plan.run(args, pointers):
            self.plans[signature] = None  # the next call makes another
            self._records.clear()
            self._whole(args)
        elif fields is not None and isinstance(plan, Plan):
            plan.record(self._records, fields, args)
        if not _inference():
            _changed([args[i] for i in self.written if args[i] is not None])
        return None

    def _through_torch(self, args: Sequence[Any]) -> None:
        if _grad():
            self._refuse_grad(args)
        getattr(getattr(torch.ops, self._namespace), self._name)(*args)

    def _refuse_grad(self, args: Sequence[Any]) -> None:
        refuse_grad(self.names, args)

    def check(self, args: Sequence[Any]) -> None:
        """What holds for every op, where there is memory.

        Raises:
            ArgumentError: a tensor that is not strided, or outputs that overlap.
        """
        refuse_views(self.names, args)
        try:
            self.overlaps.check(args)
        except ArgumentError:
            self._types(*args)  # what is of the wrong type or shape is said first
            raise

    def checked(self, *fields: Any) -> None:
        """Check a call of a kernel outside the op as one of the op; the fields of its record. Nothing is launched.

        Raises:
            ArgumentError: as a call of the op does.
        """
        args: Sequence[Any] = fields if self._flatten is None else self._flatten(fields)
        if _grad():
            self._refuse_grad(args)
        self.check(args)
        self._types(*args)

    def forget(self) -> None:
        """Drop all plans."""
        self.plans.clear()
        self._records.clear()

    def _whole(self, args: Sequence[Any]) -> None:
        self.check(args)
        self.body(*args)

    def _first(self, signature: tuple, args: Sequence[Any]) -> None:
        """A call without a plan; the second of its signature makes one."""
        if args[0].is_meta:
            return self._through_torch(args)
        if not plannable(args[0]):
            return self._whole(args)
        if signature not in self.plans:
            if len(self.plans) >= MOST:
                self.forget()
            self._whole(args)
            self.plans[signature] = None
            return None
        self.check(args)
        with _recorded(args) as found:
            self.body(*args)
        self.plans[signature] = _NoPlan(self) if found.other else Plan(self, args, found)
        return None


def refuse_grad(names: Sequence[str], args: Sequence[Any]) -> None:
    """Refuse tensors whose gradient is wanted.

    Raises:
        ArgumentError: one is such a tensor.
    """
    for name, x in zip(names, args, strict=True):
        if isinstance(x, Tensor) and x.requires_grad:
            allowed = "False: there is no backward pass; call under torch.no_grad(), or detach it"
            raise ArgumentError(f"{name}.requires_grad", True, allowed)


def refuse_views(names: Sequence[str], args: Sequence[Any]) -> None:
    """Refuse tensors whose memory is not what they say.

    Raises:
        ArgumentError: one is not strided, or negates.
    """
    for name, x in zip(names, args, strict=True):
        if isinstance(x, Tensor) and x.layout is not torch.strided:
            raise ArgumentError(f"{name}.layout", x.layout, "torch.strided")
        if isinstance(x, Tensor) and x.is_neg():
            raise ArgumentError(name, "a view that negates", "memory that is what it says: resolve_neg()")


def stream_of(x: Tensor) -> int:
    """Handle of torch's current stream on the device of ``x``; 0 on the CPU."""
    device = x.get_device()
    of = asked_of(device)
    return 0 if of is None else of(device)


def asked_of(device: int) -> Callable[[int], int] | None:
    """What gives the handle of torch's current stream on a device. None: there are no streams."""
    return _stream if device >= 0 else None


def plannable(x: Tensor) -> bool:
    """Whether calls over such tensors may be replayed."""
    return x.is_cuda


def forget() -> None:
    """Drop the plans of all ops."""
    for op in _OPS:
        op.forget()


# --------------------------------------------------------------- recording


@dataclass
class Recording:
    """What a body does.

    Attributes:
        launches: (compiled function, values) in order. scratch, constants: memory, see there.
        other: the first torch op that is no view; empty: the launches are all that the body did.
    """

    args: Sequence[Any]
    launches: list[tuple[Any, list[Any]]] = field(default_factory=list)
    scratch: list[Tensor] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    other: str = ""


_state = threading.local()


def current() -> Recording | None:
    """The recording of this thread."""
    return getattr(_state, "recording", None)


def note(function: Any, values: list[Any]) -> None:
    """Say that a kernel is launched."""
    recording = current()
    if recording is not None:
        recording.launches.append((function, values))


class _Watch(TorchDispatchMode):
    """Notes torch ops that do anything but view memory."""

    def __init__(self, recording: Recording):
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        schema = func._schema
        views = bool(schema.returns) and all(one.alias_info and not one.alias_info.is_write for one in schema.returns)
        if not views and func is not torch.ops.aten._unsafe_view.default:
            self.recording.other = self.recording.other or str(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def _recorded(args: Sequence[Any]) -> Iterator[Recording]:
    _state.recording = found = Recording(args)
    try:
        with _Watch(found):
            yield found
    finally:
        _state.recording = None


def scratch(*shape: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Allocate memory for as long as a call's kernels run.

    Anew for every call; not initialised.
    """
    recording = current()
    if recording is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    before, recording.other = recording.other, "scratch"  # keeps what it says: the allocation is known
    made = torch.empty(shape, dtype=dtype, device=like.device)
    recording.other = before
    recording.scratch.append(made)
    return made


def constant(x: Tensor) -> Tensor:
    """Keep memory of an op for calls on the current stream.

    It must not move as long as plans are kept.
    """
    recording = current()
    if recording is not None:
        recording.constants.append(x)
    return x


# ------------------------------------------------------------------- plans


def guards(tensors: Sequence[Tensor]) -> Any:
    """Make one C++ check that other tensors are alike, or None.

    Alike are types, devices, layouts and no gradient.

    torch.compile asks it whether compiled code may be used again. It is private to torch, so it is tried out.
    """
    made = _guards_of()
    return None if made is None else made(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


@functools.cache
def _guards_of() -> Any:
    """torch's class, if it is there and does what is wanted of it."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        x = torch.empty(2, 3, device="cpu")
        made = TensorGuards(x, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        others = x.int(), x[:1], x.view(3, 2), x.t().contiguous().t(), x.clone().requires_grad_(), None, x[0]
        with torch.enable_grad():
            if made.check(x.clone()) and not any(made.check(one) for one in others):
                return TensorGuards
    except Exception:  # another torch: signatures are compared in Python, some microseconds a call slower
        return None
    return None


class _NoPlan:
    """In place of a plan, for a signature whose body does more than launch."""

    def __init__(self, op: Op):
        self.op = op

    def run(self, args: Sequence[Any], pointers: list[int]) -> bool:
        """The whole way."""
        self.op.check(args)
        self.op.body(*args)
        return True


class Plan:
    """The launches of a call, ready but for the pointers.

    Keeps kernels and the op's own memory alive, but no argument.
    """

    def __init__(self, op: Op, args: Sequence[Any], found: Recording):
        tensors = [x for x in args if isinstance(x, Tensor)]
        place = places_of(args)
        ends = {i: _extent(args[i])[1] for i in place}
        self._pairs = [(place[i], ends[i], place[j], ends[j]) for i, j in op.overlaps.pairs(args)]
        self._op = op
        self._scratch = [(x.shape, x.dtype, x.device) for x in found.scratch]
        self.written = [i for i in op.written if args[i] is not None]
        self._align = [x.data_ptr() & ALIGN for x in tensors]
        self._many = torch.cuda.is_available() and torch.cuda.device_count() > 1
        self._keep: list[Any] = list(found.constants)
        self._lock = threading.RLock()
        self._at: list[int] = []
        self.device = tensors[0].get_device()
        sources = [_extent(x) for x in (*tensors, *found.scratch)]
        fixed = [_extent(x) for x in found.constants]
        self._aliases: list[tuple[int, int, int]] = []  # (i, j, bytes from i's start to j's) that this plan rests on
        self._writes: list[tuple[int, int, int]] = []  # (word, source, bytes after its start)
        self._block = native.Block([words for _, words in found.launches])
        for word, address, nbytes in self._block.pointers:
            at = [i for i, (start, size) in enumerate(sources) if start <= address and address + nbytes <= start + size]
            if not at:
                if not any(start <= address < start + size for start, size in fixed):
                    raise ArgumentError("plan", hex(address), "memory of arguments, `scratch` or `constant`")
                continue
            first = at[0]
            self._writes.append((word, first, address - sources[first][0]))
            self._aliases += [(first, other, sources[other][0] - sources[first][0]) for other in at[1:]]
        self._calls = []
        for (function, _), (address, result) in zip(found.launches, self._block.calls, strict=True):
            self._calls.append((native.entry(function), address, result))
            self._keep.append(function)

    def record(self, records: replay.Records, fields: tuple, args: Sequence[Any]) -> None:
        """Have calls such as this one replayed, where they can be."""
        tensors = [x for x in args if isinstance(x, Tensor)]
        codes = [code for call, _, _ in self._calls if (code := native.address_of(call)) is not None]
        if (
            len(codes) < len(self._calls)
            or any(max(i, j) >= len(tensors) for i, j, _ in self._aliases)
            or not records.ready()
        ):
            return
        made = guards(tensors)
        if made is None or not made.check(*tensors):  # one tensor twice among the arguments
            return
        block, place = self._block.copy(), places_of(args)
        start, of = ctypes.addressof(block.words), asked_of(self.device)
        with suppress(ValueError):  # found by signature, then
            records.add(
                replay.Record(
                    fields,
                    made.check,
                    stream=(of, 0 if of is None else of(self.device)),
                    device=(_device if self._many else None, self.device),
                    scratch=(self._memory if self._scratch else None, len(self._scratch)),
                    aliases=self._aliases,
                    pairs=self._pairs,
                    writes=[(start + native.WORD * word, i, apart) for word, i, apart in self._writes],
                    calls=[
                        (code, given, ctypes.addressof(result))
                        for code, (given, result) in zip(codes, block.calls, strict=True)
                    ],
                    written=[place[i] for i in self.written],
                    keep=(self, block),
                )
            )

    def _memory(self) -> tuple[Tensor, ...]:
        """Scratch memory of a call."""
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in self._scratch)

    def run(self, args: Sequence[Any], pointers: list[int]) -> bool:
        """Launch over these arguments, at ``pointers``. False: they lie otherwise to each other, nothing was done.

        Raises:
            ArgumentError: outputs overlap. LaunchFailed: the CUDA runtime refuses.
        """
        memory = self._memory()
        pointers += [x.data_ptr() for x in memory]
        with self._lock:
            if pointers != self._at:
                if any(address & ALIGN != align for address, align in zip(pointers, self._align)):  # noqa: B905
                    return False
                for i, j, apart in self._aliases:
                    if pointers[j] - pointers[i] != apart:
                        return False
                for i, to_end, j, of_end in self._pairs:
                    if pointers[i] < pointers[j] + of_end and pointers[j] < pointers[i] + to_end:
                        self._op.check(args)
                        break
                words = self._block.words
                for word, source, offset in self._writes:
                    words[word] = pointers[source] + offset
                self._at = pointers
            if self._many and self.device != _device():
                with torch.cuda.device(self.device):
                    self._launch()
            else:
                self._launch()
        return True

    def _launch(self) -> None:
        for call, address, result in self._calls:
            call(address)
            if result.value:
                raise native.failure(result.value)


def places_of(args: Sequence[Any]) -> dict[int, int]:
    """Places of tensors among the tensors, by those among the arguments."""
    return {i: n for n, i in enumerate(i for i, x in enumerate(args) if isinstance(x, Tensor))}


def _extent(x: Tensor) -> tuple[int, int]:
    """(first byte, bytes) that a tensor spans."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else -1
    return x.data_ptr(), (last + 1) * x.element_size()
