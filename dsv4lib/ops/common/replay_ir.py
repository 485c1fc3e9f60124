"""Emit the C function of `replay` with llvmlite. It is ``PyObject* (PyObject* state, PyObject* fields)``.

Everything is a 64-bit word: addresses, counts, handles. Tables say what is where:

    state    [table, count, record, ...]; the record that fitted last is swapped to the front
    table    `Table`: addresses of C functions, and of Python objects
    record   `Field`
    slot     [place of the field, place in its group or -1, `Kind`, what is expected, its size]
             a group: its type and length; a tensor: its type and the address of [rank, extents]; a value: the object
    alias    [i, j, distance]                   pair    [i, bytes to the end of i, j, bytes to the end of j]
    write    [address of a word, i, distance]   call    [C function, its argument, address of the 32-bit error]

where i and j are places among the tensors, scratch memory after them. Returns None: done; False: no record fits;
True: one fits and needs a closer look; an int: the CUDA error of a launch; NULL: a Python error.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

MOST_TENSORS = 48  # of a call, scratch memory among them
ALIGN = 127  # mask of the bits of an address that belong to a record
_EQ = 2  # Py_EQ


class Table(IntEnum):
    """Words of the table."""

    COMPARE = 0  # PyObject_RichCompareBool
    CALL = 1  # PyObject_Vectorcall
    INCREF = 2
    DECREF = 3
    SAVE = 4  # PyEval_SaveThread
    RESTORE = 5
    INT = 6  # PyLong_FromLong
    TUPLE = 7  # PyTuple_New
    CLEAR = 8  # PyErr_Clear
    RANK = 9  # aoti_torch_get_dim
    SIZES = 10  # aoti_torch_get_sizes
    POINTER = 11  # aoti_torch_get_data_ptr
    TRUE = 12
    FALSE = 13
    NONE = 14
    INFERENCE = 15  # torch.is_inference_mode_enabled
    CHANGED = 16  # torch._C._increment_version
    GRAD = 17  # torch.is_grad_enabled


class Field(IntEnum):
    """Words of a record; 0 stands for an object that there is not."""

    FIELDS = 0  # of the call
    SLOTS = 1
    SLOT_COUNT = 2
    TENSORS = 3  # given, without scratch memory
    GUARD = 4  # the object that takes the tensors and says True or False
    STREAM = 5  # int, expected of STREAM_OF(DEVICE)
    STREAM_OF = 6
    DEVICE = 7  # int, expected of CURRENT()
    CURRENT = 8
    OWNER = 9  # keeps the record alive
    SCRATCH = 10  # gives a tuple of SCRATCH_COUNT tensors
    SCRATCH_COUNT = 11
    ALIGNED = 12  # low bits of each address
    ALIASES = 13
    ALIAS_COUNT = 14
    PAIRS = 15
    PAIR_COUNT = 16
    WRITES = 17
    WRITE_COUNT = 18
    CALLS = 19
    CALL_COUNT = 20
    WRITTEN = 21  # places of the tensors that change
    WRITTEN_COUNT = 22
    BUSY = 23  # 1 while a thread launches
    GRAD = 24  # True or False, expected of torch.is_grad_enabled(): guards do not see it


class Kind(IntEnum):
    """What a slot expects."""

    GROUP = 0
    TENSOR = 1
    VALUE = 2


class Layout(NamedTuple):
    """Byte offsets in objects of CPython and torch.

    Attributes:
        kind: of an object's type. size: of the length of bytes or of a tuple. items: of a tuple's first item.
        payload: of the first byte of bytes. tensor: of torch's handle in a tensor.
    """

    kind: int
    size: int
    items: int
    payload: int
    tensor: int


def module(layout: Layout) -> str:
    """LLVM IR of the function, named ``replay``."""
    return str(_Emitter(layout).module)


class _Emitter:
    """Writes the function step by step; `self.at` is the builder."""

    def __init__(self, layout: Layout):
        from llvmlite import ir  # a process that makes no record needs no LLVM

        self.ir, self.layout, self.module = ir, layout, ir.Module()
        self.word_type = ir.IntType(64)
        kind = ir.FunctionType(self.word_type, [self.word_type] * 2)
        self.function = ir.Function(self.module, kind, "replay")
        self.at = ir.IRBuilder(self.function.append_basic_block("entry"))
        given, fields = self.function.args
        self.state = self.load(given, layout.payload)
        self.table, self.count = self.load(self.state), self.load(self.state, 8)
        self.fields, self.objects, self.pointers = fields, self.room(MOST_TENSORS), self.room(MOST_TENSORS)
        self.out = self.room(1)
        self.repeat(self.count, self.attempt)
        self.leave(self.object(Table.FALSE))

    # ------------------------------------------------------------- words

    def number(self, value: int) -> Any:
        """A constant."""
        return self.ir.Constant(self.word_type, int(value))

    def room(self, words: int) -> Any:
        """Address of memory on the stack."""
        return self.at.ptrtoint(self.at.alloca(self.word_type, words), self.word_type)

    def load(self, address: Any, offset: int = 0, bits: int = 64) -> Any:
        """The word at an address."""
        kind = self.ir.IntType(bits).as_pointer()
        return self.at.load(self.at.inttoptr(self.at.add(address, self.number(offset)), kind))

    def store(self, value: Any, address: Any, offset: int = 0) -> None:
        """Write a word."""
        where = self.at.add(address, self.number(offset))
        self.at.store(value, self.at.inttoptr(where, self.word_type.as_pointer()))

    def element(self, base: Any, index: Any, words: int = 1) -> Any:
        """Address of an element of ``words`` words."""
        return self.at.add(base, self.at.mul(index, self.number(8 * words)))

    def field(self, field: Field) -> Any:
        """A word of the record."""
        return self.load(self.record, 8 * field)

    def object(self, name: Table) -> Any:
        """A word of the table."""
        return self.load(self.table, 8 * name)

    def call(self, function: Any, *arguments: Any, bits: int = 64) -> Any:
        """Call a C function, of the table or at an address."""
        address = self.object(function) if isinstance(function, Table) else function
        kind = self.ir.FunctionType(self.ir.IntType(bits), [self.word_type] * len(arguments))
        return self.at.call(self.at.inttoptr(address, kind.as_pointer()), arguments)

    def python(self, callee: Any, arguments: Any = None, count: Any = None) -> Any:
        """Call a Python object with ``count`` arguments at an address."""
        none = self.number(0)
        return self.call(Table.CALL, callee, arguments or none, count or none, none)

    # -------------------------------------------------------------- flow

    def repeat(self, count: Any, body: Callable[[Any], None]) -> None:
        """Do ``body`` of 0 to ``count`` - 1."""
        before, head = self.at.block, self.function.append_basic_block()
        inside, after = self.function.append_basic_block(), self.function.append_basic_block()
        self.at.branch(head)
        self.at.position_at_end(head)
        index = self.at.phi(self.word_type)
        index.add_incoming(self.number(0), before)
        self.at.cbranch(self.at.icmp_unsigned("<", index, count), inside, after)
        self.at.position_at_end(inside)
        body(index)
        index.add_incoming(self.at.add(index, self.number(1)), self.at.block)
        self.at.branch(head)
        self.at.position_at_end(after)

    def need(self, condition: Any, otherwise: Any) -> None:
        """Go on if it holds, else to another block."""
        following = self.function.append_basic_block()
        self.at.cbranch(condition, following, otherwise)
        self.at.position_at_end(following)

    def same(self, a: Any, b: Any) -> Any:
        """Whether two words are equal."""
        return self.at.icmp_unsigned("==", a, b)

    def leave(self, found: Any) -> None:
        """Return an object of the table."""
        self.call(Table.INCREF, found)
        self.at.ret(found)

    def block(self, fill: Callable[[], None]) -> Any:
        """A block apart that ends by itself."""
        made, before = self.function.append_basic_block(), self.at.block
        self.at.position_at_end(made)
        fill()
        self.at.position_at_end(before)
        return made

    def optional(self, condition: Any, body: Callable[[], None]) -> None:
        """Do ``body`` where it holds."""
        inside, after = self.function.append_basic_block(), self.function.append_basic_block()
        self.at.cbranch(condition, inside, after)
        self.at.position_at_end(inside)
        body()
        self.at.branch(after)
        self.at.position_at_end(after)

    # ------------------------------------------------------------- steps

    def attempt(self, index: Any) -> None:
        """Try one record; fall through where it does not fit."""
        place = self.element(self.at.add(self.state, self.number(16)), index)
        self.record = self.load(place)
        self.other = self.function.append_basic_block("other")  # the next record
        self.closer = self.block(lambda: self.leave(self.object(Table.TRUE)))
        self.match()
        self.accept()
        first = self.load(self.state, 16)
        self.store(self.record, self.state, 16)
        self.store(first, place)
        self.addresses()
        self.launch()
        self.at.position_at_end(self.other)

    def match(self) -> None:
        """Compare fields with slots; collect the tensors."""
        self.need(self.same(self.load(self.fields, self.layout.size), self.field(Field.FIELDS)), self.other)
        self.store(self.number(0), self.out)  # counts tensors
        self.repeat(self.field(Field.SLOT_COUNT), self.slot)

    def slot(self, index: Any) -> None:
        """Compare one field, or one member of a group whose own slot came before."""
        slot = self.element(self.field(Field.SLOTS), index, 5)
        item, kind, expected, size = (self.load(slot, 8 * i) for i in range(1, 5))
        whole = self.load(self.element(self.fields, self.load(slot)), self.layout.items)
        member = self.same(item, self.number(-1))
        holder = self.at.select(member, self.fields, whole)
        value = self.load(self.element(holder, self.at.select(member, self.load(slot), item)), self.layout.items)
        own = self.load(value, self.layout.kind)
        group, tensor, done = (self.function.append_basic_block() for _ in range(3))
        after_group, scalar = (self.function.append_basic_block() for _ in range(2))
        self.at.cbranch(self.same(kind, self.number(Kind.GROUP)), group, after_group)
        self.at.position_at_end(after_group)
        self.at.cbranch(self.same(kind, self.number(Kind.TENSOR)), tensor, scalar)

        self.at.position_at_end(group)
        self.need(self.same(own, expected), self.other)
        self.need(self.same(self.load(value, self.layout.size), size), self.other)
        self.at.branch(done)

        self.at.position_at_end(tensor)
        self.need(self.same(own, expected), self.other)
        self.sizes(value, size)
        count = self.load(self.out)
        self.store(value, self.element(self.objects, count))
        self.store(self.at.add(count, self.number(1)), self.out)
        self.at.branch(done)

        self.at.position_at_end(scalar)
        unlike = self.function.append_basic_block()
        self.at.cbranch(self.same(value, expected), done, unlike)
        self.at.position_at_end(unlike)
        self.need(self.same(own, self.load(expected, self.layout.kind)), self.other)
        answer = self.call(Table.COMPARE, value, expected, self.number(_EQ), bits=32)
        refused = self.block(lambda: (self.call(Table.CLEAR), self.at.branch(self.other)))
        self.need(self.at.icmp_signed(">=", answer, self.ir.Constant(answer.type, 0)), refused)
        self.need(self.at.icmp_signed(">", answer, self.ir.Constant(answer.type, 0)), self.other)
        self.at.branch(done)
        self.at.position_at_end(done)

    def sizes(self, tensor: Any, expected: Any) -> None:
        """Compare rank and extents: cheaper than guards, which look again."""
        handle, room = self.at.add(tensor, self.number(self.layout.tensor)), self.pointers  # which are not used yet
        for what in (Table.RANK, Table.SIZES):
            error = self.call(what, handle, self.at.add(room, self.number(8 * (what == Table.SIZES))), bits=32)
            self.need(self.at.icmp_unsigned("==", error, self.ir.Constant(error.type, 0)), self.other)
        rank, have = self.load(room), self.load(room, 8)
        self.need(self.same(rank, self.load(expected)), self.other)
        self.repeat(
            rank,
            lambda i: self.need(
                self.same(self.load(self.element(have, i)), self.load(self.element(expected, i), 8)), self.other
            ),
        )

    def accept(self) -> None:
        """Ask for the grad mode and torch's guards; compare stream and device."""
        refused = self.block(lambda: (self.call(Table.CLEAR), self.at.branch(self.other)))
        self.truth(self.python(self.object(Table.GRAD)), self.field(Field.GRAD), refused)
        answer = self.python(self.field(Field.GUARD), self.objects, self.field(Field.TENSORS))
        self.truth(answer, self.object(Table.TRUE), refused)
        for callee, wanted, count in (
            (Field.STREAM_OF, Field.STREAM, 1),
            (Field.CURRENT, Field.DEVICE, 0),
        ):
            self.optional(
                self.at.icmp_unsigned("!=", self.field(callee), self.number(0)),
                lambda callee=callee, wanted=wanted, count=count: self.equal_answer(callee, wanted, count, refused),
            )

    def truth(self, answer: Any, wanted: Any, refused: Any) -> None:
        """Go on if the answer is the wanted one of True and False."""
        self.need(self.at.icmp_unsigned("!=", answer, self.number(0)), refused)
        self.call(Table.DECREF, answer)  # others hold it, too
        self.need(self.same(answer, wanted), self.other)

    def equal_answer(self, callee: Field, wanted: Field, count: int, refused: Any) -> None:
        """Call with the device, or with nothing; the answer must be as recorded."""
        device = self.at.add(self.record, self.number(8 * Field.DEVICE))
        answer = self.python(self.field(callee), device, self.number(count))
        self.need(self.at.icmp_unsigned("!=", answer, self.number(0)), refused)
        equal = self.call(Table.COMPARE, answer, self.field(wanted), self.number(_EQ), bits=32)
        self.call(Table.DECREF, answer)
        self.need(self.at.icmp_signed("==", equal, self.ir.Constant(equal.type, 1)), refused)

    def addresses(self) -> None:
        """Get the addresses of the tensors and look at how they lie."""

        def pointer(i: Any) -> None:
            where = self.element(self.pointers, i)
            self.pointer_of(self.load(self.element(self.objects, i)), where)
            low = self.at.and_(self.load(where), self.number(ALIGN))
            self.need(self.same(low, self.load(self.element(self.field(Field.ALIGNED), i))), self.closer)

        def alias(i: Any) -> None:
            one = self.element(self.field(Field.ALIASES), i, 3)
            apart = self.at.sub(self.address(self.load(one, 8)), self.address(self.load(one)))
            self.need(self.same(apart, self.load(one, 16)), self.closer)

        def pair(i: Any) -> None:
            one = self.element(self.field(Field.PAIRS), i, 4)
            a, to_end, b, of_end = (self.load(one, 8 * k) for k in range(4))
            a, b = self.address(a), self.address(b)
            ahead = self.at.icmp_unsigned(">=", a, self.at.add(b, of_end))
            self.need(self.at.or_(ahead, self.at.icmp_unsigned(">=", b, self.at.add(a, to_end))), self.closer)

        self.repeat(self.field(Field.TENSORS), pointer)
        self.repeat(self.field(Field.ALIAS_COUNT), alias)
        self.repeat(self.field(Field.PAIR_COUNT), pair)
        self.need(self.same(self.field(Field.BUSY), self.number(0)), self.closer)

    def address(self, place: Any) -> Any:
        """Of a tensor."""
        return self.load(self.element(self.pointers, place))

    def pointer_of(self, tensor: Any, where: Any) -> None:
        """Store a tensor's address."""
        error = self.call(Table.POINTER, self.at.add(tensor, self.number(self.layout.tensor)), where, bits=32)
        self.need(self.at.icmp_unsigned("==", error, self.ir.Constant(error.type, 0)), self.closer)

    def launch(self) -> None:
        """Write the words and launch; from here on the record must not go."""
        owner = self.field(Field.OWNER)
        self.call(Table.INCREF, owner)
        self.store(self.number(1), self.record, 8 * Field.BUSY)
        self.store(self.number(0), self.out)
        self.optional(self.at.icmp_unsigned("!=", self.field(Field.SCRATCH), self.number(0)), self.scratch)
        memory = self.load(self.out)

        def write(i: Any) -> None:
            one = self.element(self.field(Field.WRITES), i, 3)
            self.store(self.at.add(self.address(self.load(one, 8)), self.load(one, 16)), self.load(one))

        self.repeat(self.field(Field.WRITE_COUNT), write)
        thread = self.call(Table.SAVE)
        self.store(self.number(0), self.out)

        def run(i: Any) -> None:
            one = self.element(self.field(Field.CALLS), i, 3)

            def go() -> None:
                self.call(self.load(one), self.load(one, 8))
                error = self.at.zext(self.load(self.load(one, 16), bits=32), self.word_type)
                self.store(error, self.out)

            self.optional(self.same(self.load(self.out), self.number(0)), go)

        self.repeat(self.field(Field.CALL_COUNT), run)
        self.call(Table.RESTORE, thread)
        self.store(self.number(0), self.record, 8 * Field.BUSY)
        self.optional(self.at.icmp_unsigned("!=", memory, self.number(0)), lambda: self.call(Table.DECREF, memory))
        error = self.load(self.out)
        failed = self.block(lambda: (self.call(Table.DECREF, owner), self.at.ret(self.call(Table.INT, error))))
        self.need(self.same(error, self.number(0)), failed)
        self.changed(owner)

    def scratch(self) -> None:
        """Allocate; the tuple goes to `out`."""
        memory = self.python(self.field(Field.SCRATCH))

        def fail() -> None:
            self.store(self.number(0), self.record, 8 * Field.BUSY)
            self.call(Table.DECREF, self.field(Field.OWNER))
            self.at.ret(self.number(0))

        self.need(self.at.icmp_unsigned("!=", memory, self.number(0)), self.block(fail))
        self.store(memory, self.out)

        def pointer(i: Any) -> None:
            tensor = self.load(self.element(memory, i), self.layout.items)
            where = self.element(self.pointers, self.at.add(self.field(Field.TENSORS), i))
            self.call(Table.POINTER, self.at.add(tensor, self.number(self.layout.tensor)), where, bits=32)

        self.repeat(self.field(Field.SCRATCH_COUNT), pointer)

    def changed(self, owner: Any) -> None:
        """Tell autograd what has changed, unless it sleeps; return None."""
        inference = self.python(self.object(Table.INFERENCE))
        self.optional(
            self.at.icmp_unsigned("!=", inference, self.number(0)), lambda: self.call(Table.DECREF, inference)
        )
        self.optional(self.same(inference, self.object(Table.FALSE)), lambda: self.versions(owner))
        self.call(Table.DECREF, owner)
        self.leave(self.object(Table.NONE))

    def versions(self, owner: Any) -> None:
        """`torch._C._increment_version` of what was written."""
        fail = self.block(lambda: (self.call(Table.DECREF, owner), self.at.ret(self.number(0))))
        group = self.call(Table.TUPLE, self.field(Field.WRITTEN_COUNT))
        self.need(self.at.icmp_unsigned("!=", group, self.number(0)), fail)

        def put(i: Any) -> None:
            place = self.load(self.element(self.field(Field.WRITTEN), i))
            one = self.load(self.element(self.objects, place))
            self.call(Table.INCREF, one)
            self.store(one, self.element(group, i), self.layout.items)

        self.repeat(self.field(Field.WRITTEN_COUNT), put)
        self.store(group, self.out)
        answer = self.python(self.object(Table.CHANGED), self.out, self.number(1))
        self.call(Table.DECREF, group)
        self.need(self.at.icmp_unsigned("!=", answer, self.number(0)), fail)
        self.call(Table.DECREF, answer)
