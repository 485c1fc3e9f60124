"""Replay plans in one C function. Match the arguments, write their pointers into a launch's words, launch.

A record holds what a plan's calls have in common. A call costs one Python call of its op, and for each tensor what
torch's guards take. These steps follow each other; the next record is tried where one of the first three fails, and
the call goes through Python where step 4 does:

1. every field is a tensor, a group or a value as recorded, and tensors have the recorded extents;
2. the grad mode is the recorded one, and torch's guards accept the tensors in the state that torch is in;
3. torch's current stream and device are the recorded ones;
4. addresses are aligned as recorded, tensors lie to each other as recorded, outputs overlap nothing;
5. scratch memory is allocated, pointers are written, kernels are launched without the GIL;
6. torch learns which tensors have changed.

`replay_ir` emits the function and LLVM compiles it, once a process, when the first record is made. All that the machine
code calls is in a table, so it is bytes without relocations. It reads objects of CPython and torch where `layout` has
found what it needs, and gets addresses of tensors from torch's C interface. Where any of that is missing there are no
records: calls find their plans in Python, some microseconds slower.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dsv4lib.ops.common import replay_ir
from dsv4lib.ops.common.replay_ir import ALIGN, MOST_TENSORS, Field, Kind, Layout, Table

MOST = 16  # records of an op; the one that was used longest ago goes
PLAIN = (Tensor, Parameter)
Warm = Callable[[tuple], Any]  # what `Records.warm` is: None, False, True or a CUDA error, see `replay_ir`


class Record:
    """What the C function knows of a plan: words, and whatever they point to.

    Args:
        fields: of a call. guard: takes its tensors and says whether they fit.
        stream, device: (function of torch's or None, the int it must answer, the device that it gets).
        scratch: makes the tuple of ``count`` scratch tensors, or None.
        aliases, pairs, writes, calls: rows of words, see `replay_ir`. written: places of the tensors that change.
        keep: whatever these words point to.

    Raises:
        ValueError: the C function has no place for such a call.
    """

    def __init__(
        self,
        fields: Sequence[Any],
        guard: Any,
        stream: tuple[Any, int],
        device: tuple[Any, int],
        scratch: tuple[Any, int],
        aliases: Sequence[Sequence[int]],
        pairs: Sequence[Sequence[int]],
        writes: Sequence[Sequence[int]],
        calls: Sequence[Sequence[int]],
        written: Sequence[int],
        keep: Any,
    ):
        slots, tensors, self._keep = _slots(fields)
        if len(tensors) + scratch[1] > MOST_TENSORS:
            raise ValueError(f"more than {MOST_TENSORS} tensors")
        self.words = (ctypes.c_uint64 * len(Field))()
        self._keep.append(keep)
        for place, value in (
            (Field.FIELDS, len(fields)),
            (Field.TENSORS, len(tensors)),
            (Field.GUARD, self._of(guard)),
            (Field.STREAM, self._of(stream[1])),
            (Field.STREAM_OF, self._of(stream[0])),
            (Field.DEVICE, self._of(device[1])),
            (Field.CURRENT, self._of(device[0])),
            (Field.OWNER, id(self)),
            (Field.SCRATCH, self._of(scratch[0])),
            (Field.SCRATCH_COUNT, scratch[1]),
            (Field.GRAD, id(torch.is_grad_enabled())),
        ):
            self.words[place] = value
        for place, rows in (
            (Field.SLOTS, slots),
            (Field.ALIASES, aliases),
            (Field.PAIRS, pairs),
            (Field.WRITES, writes),
            (Field.CALLS, calls),
            (Field.WRITTEN, [[one] for one in written]),
        ):
            self.words[place], self.words[place + 1] = self._rows(rows), len(rows)
        self.words[Field.ALIGNED] = self._rows([[x.data_ptr() & ALIGN] for x in tensors])

    def _of(self, value: Any) -> int:
        """Address of an object, which is kept; 0 of None."""
        self._keep.append(value)
        return 0 if value is None else id(value)

    def _rows(self, rows: Iterable[Sequence[int]]) -> int:
        """Address of words that are kept."""
        flat = [word & (1 << 64) - 1 for row in rows for word in row]
        made = (ctypes.c_uint64 * max(1, len(flat)))(*flat)
        self._keep.append(made)
        return ctypes.addressof(made)


def _slots(fields: Sequence[Any]) -> tuple[list[list[int]], list[Tensor], list[Any]]:
    """Slots of a call's fields, its tensors in order, and what must be kept."""
    slots: list[list[int]] = []
    tensors: list[Tensor] = []
    keep: list[Any] = [*(x for x in fields if not isinstance(x, (Tensor, tuple)))]

    def add(place: int, item: int, value: Any) -> None:
        if isinstance(value, Tensor):
            if type(value) not in PLAIN:
                raise ValueError("a subclass of a tensor")
            sizes = (ctypes.c_uint64 * (1 + value.dim()))(value.dim(), *value.shape)
            keep.append(sizes)
            tensors.append(value)
            slots.append([place, item, Kind.TENSOR, id(type(value)), ctypes.addressof(sizes)])
        else:
            keep.append(value)
            slots.append([place, item, Kind.VALUE, id(value), 0])

    for place, value in enumerate(fields):
        if isinstance(value, tuple) and any(isinstance(one, (Tensor, tuple)) for one in value):
            keep.append(type(value))
            slots.append([place, -1, Kind.GROUP, id(type(value)), len(value)])
            for item, one in enumerate(value):
                add(place, item, one)
        else:
            add(place, -1, value)
    if any(isinstance(one, tuple) and any(isinstance(x, Tensor) for x in one) for one in keep):
        raise ValueError("a group in a group")
    return slots, tensors, keep


class Records:
    """The records of an op.

    Attributes:
        warm: the C function over them, called with the tuple of a call's fields; None where there is none.
    """

    def __init__(self) -> None:
        self._state = (ctypes.c_uint64 * (2 + MOST))()
        self._held: dict[int, Record] = {}  # by the address of its words
        self.warm: Warm | None = None

    def ready(self) -> bool:
        """Whether calls can be replayed here."""
        code = function() if self.warm is None else None
        if code is not None:
            self._state[0] = code.table
            self.warm = code.over(ctypes.addressof(self._state))
        return self.warm is not None

    def add(self, record: Record) -> None:
        """Put a record in front."""
        held = [self._state[2 + i] for i in range(self._state[1])]
        address = ctypes.addressof(record.words)
        self._held[address] = record
        kept = [address, *held][:MOST]
        self._state[2 : 2 + len(kept)] = kept
        self._state[1] = len(kept)
        for gone in held[MOST - 1 :]:
            del self._held[gone]

    def clear(self) -> None:
        """Forget them."""
        self._state[1] = 0
        self._held.clear()


class Function:
    """The machine code in memory that may be run, and its table.

    Attributes:
        table: address of the table.
    """

    def __init__(self, code: bytes):
        self._memory, self._address = runnable(code)
        self._words, self._methods = _table(), []
        self.table = ctypes.addressof(self._words)

    def over(self, state: int) -> Warm:
        """A Python function of one argument over records at an address."""
        method = _Method(b"replay", self._address, _METH_O, None)
        given = struct.pack("@Q", state)
        self._methods.append((method, given))  # Python keeps neither
        make = ctypes.pythonapi.PyCFunction_NewEx
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
        return make(ctypes.addressof(method), given, None)


def runnable(code: bytes) -> tuple[mmap.mmap, int]:
    """Memory that holds code and may be run but not written any more, and its address.

    Raises:
        OSError: the system refuses.
    """
    memory = mmap.mmap(-1, len(code), prot=mmap.PROT_READ | mmap.PROT_WRITE)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    size = ctypes.c_size_t(-(-len(code) // mmap.PAGESIZE) * mmap.PAGESIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect")
    return memory, address


_METH_O = 8


class _Method(ctypes.Structure):
    """PyMethodDef."""

    _fields_ = [("name", ctypes.c_char_p), ("code", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


def _table() -> Any:
    """Addresses of all that the code calls; objects among them live as long as the process."""
    python, shim = ctypes.pythonapi, ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    functions = {
        Table.COMPARE: python.PyObject_RichCompareBool,
        Table.CALL: python.PyObject_Vectorcall,
        Table.INCREF: python.Py_IncRef,
        Table.DECREF: python.Py_DecRef,
        Table.SAVE: python.PyEval_SaveThread,
        Table.RESTORE: python.PyEval_RestoreThread,
        Table.INT: python.PyLong_FromLong,
        Table.TUPLE: python.PyTuple_New,
        Table.CLEAR: python.PyErr_Clear,
        Table.RANK: shim.aoti_torch_get_dim,
        Table.SIZES: shim.aoti_torch_get_sizes,
        Table.POINTER: shim.aoti_torch_get_data_ptr,
    }
    objects = {
        Table.TRUE: True,
        Table.FALSE: False,
        Table.NONE: None,
        Table.INFERENCE: torch.is_inference_mode_enabled,
        Table.CHANGED: torch._C._increment_version,
        Table.GRAD: torch.is_grad_enabled,
    }
    words = (ctypes.c_uint64 * len(Table))()
    for place, one in functions.items():
        words[place] = ctypes.cast(one, ctypes.c_void_p).value
    for place, one in objects.items():
        words[place] = id(one)
    return words


@functools.cache
def function() -> Function | None:
    """The C function of this process; None where it cannot be had."""
    found = layout()
    if found is None:
        return None
    try:
        return Function(machine_code(found))
    except (AttributeError, ImportError, OSError):  # no such symbol, no LLVM, no memory that may be run
        return None


def layout() -> Layout | None:
    """Find what the code reads of objects; None: they are not as it needs them."""
    pair, text, x, y = (object(), object()), b"abc", torch.zeros(2, 3), Parameter(torch.zeros(3))
    kind, size, items = object.__basicsize__ - 8, tuple.__basicsize__ - 8, tuple.__basicsize__
    payload = bytes.__basicsize__ - 1
    at = ctypes.c_uint64.from_address
    fits = all(at(id(one) + kind).value == id(type(one)) for one in (pair, text, x, y, 1, None, "a"))
    fits = fits and [at(id(pair) + size).value, at(id(text) + size).value] == [2, 3]
    fits = fits and [at(id(pair) + items + 8 * i).value for i in range(2)] == [*map(id, pair)]
    if not fits or ctypes.string_at(id(text) + payload, 3) != text:
        return None
    for tensor in range(object.__basicsize__, Tensor.__basicsize__, 8):
        if all(at(id(one) + tensor).value == one._cdata for one in (x, y)):
            return Layout(kind, size, items, payload, tensor)
    return None


BUILT: dict[Layout, bytes] = {}  # code that was built elsewhere, for a machine without LLVM


def machine_code(found: Layout) -> bytes:
    """The function's code for this kind of processor.

    Raises:
        ImportError: there is no LLVM, or it made what cannot be moved.
    """
    return BUILT.get(found) or compiled(replay_ir.module(found))


def compiled(text: str) -> bytes:
    """Compile LLVM IR of one function that needs nothing else.

    Raises as `machine_code` does.
    """
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(opt=2, reloc="pic", codemodel="small")
    made = llvm.parse_assembly(text)
    made.triple = llvm.get_default_triple()
    return text_of(target.emit_object(made))


def text_of(data: bytes) -> bytes:
    """The code of an ELF object that needs nothing else.

    Raises:
        ImportError: it has relocations or data of its own.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ImportError("not a little-endian ELF object of 64 bits")
    (table,), (entry, count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<3H", data, 58)
    sections = [struct.unpack_from("<2I4Q", data, table + i * entry) for i in range(count)]
    start = sections[names][4]
    found = {data[start + one[0] : data.index(b"\0", start + one[0])]: one for one in sections}
    lacking = [name for name in found if name in (b".rela.text", b".rodata", b".data", b".bss") and found[name][5]]
    if lacking or b".text" not in found:
        raise ImportError(f"code with {lacking}")
    _, _, _, _, offset, size = found[b".text"]
    return data[offset : offset + size]
