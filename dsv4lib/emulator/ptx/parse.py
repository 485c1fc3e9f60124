"""Parse PTX text to `ptx.ir`: modules, kernels and their instructions.

Written against the PTX ISA's grammar for what compilers emit today: CuTeDSL, its inline assembly, nvcc and Triton. A
directive is either understood, or listed here as one that cannot change results, or refused.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Callable

from dsv4lib.emulator.ptx.functions import DEEPER, NOWHERE, bind, functions, pointed, sizes, too_deep
from dsv4lib.emulator.ptx.ir import Function, Imm, Instr, Kernel, Location, Memory, Module, Operand, Reg, Symbol, Vector
from dsv4lib.emulator.ptx.lexer import Source, read, split, syntax_error
from dsv4lib.emulator.ptx.operands import Names, OperandError, Scope
from dsv4lib.emulator.ptx.variables import parameters, variables
from dsv4lib.emulator.ptx.wmma import expand

_SOMETHING = re.compile(r"\S")
_HEADER = re.compile(r"\s*\.(?:(version)\s+(\d+\.\d+)|(target)\s+([^\n]+)|(address_size)\s+(\d+))")
_SKIPPED = re.compile(r'\s*(?:\.section\s+[^\s{]+\s*\{[^{}]*\}|\.pragma\s+"[^"]*"\s*;)')
_LINKAGE = re.compile(r"\s*((?:\.(?:visible|extern|weak|common)\s+)*)\.(entry|func|global|const|shared|texref|alias)\b")
_ENTRY = re.compile(r"\s*([%$_A-Za-z][\w$]*)\s*(?:\(([^()]*)\))?([^{;]*)([{;])")
_STATEMENT = re.compile(r"\s*(?:([{};])|([%$_A-Za-z][\w$]*)\s*:(?!:)|([^;{}\s][^;]*);)")
_INSTRUCTION = re.compile(r"(?:@\s*(!?)\s*([%$_A-Za-z][\w$]*)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_PERFORMANCE = re.compile(r"\.(\w+)(?:\s+([\d,\s]+?|\"[^\"]*\"))?(?=\s*(?:\.|$))")

# Kernel directives that only steer code generation; .explicitcluster requires a launch that names its cluster shape,
# which cannot be distinguished from one of single CTAs.
_HINTS = frozenset(("minnctapersm", "maxnctapersm", "maxnreg", "noreturn", "explicitcluster", "pragma"))
# Tables of indirect calls, which the lowering refuses where they are used.
_CALL_TABLES = (".calltargets", ".callprototype")
# These name code: their operands are labels or functions, not variables.
_BRANCHES = frozenset(("bra", "brx", "call"))
MAX_INSTRUCTIONS = 1 << 20  # of a kernel and all that it calls


def parse(ptx: str) -> Module:
    """Parse a PTX file.

    Raises:
        dsv4lib.emulator.errors.PtxSyntaxError: the text is not PTX as understood here; the message names the line.
    """
    source = read(ptx.rstrip("\0"))  # NVRTC counts the zero that ends its text
    module = Module("", "", {}, functions=functions(source))
    position = 0
    while _SOMETHING.search(source.text, position):
        position = _top_level(source, position, module)
    if not module.version or not module.target:
        raise source.error("no .version or no .target", 0)
    return module


def _top_level(source: Source, position: int, module: Module) -> int:
    """Parse one directive of module scope; return the offset after it."""
    text = source.text
    if match := _HEADER.match(text, position):
        if match[1]:
            module.version = match[2]
        elif match[3]:
            module.target = match[4].split(",")[0].strip()
        elif match[6] != "64":
            raise source.error("only 64-bit PTX is supported", match.start(5), match.group())
        return match.end()
    if match := _SKIPPED.match(text, position):
        return match.end()
    match = _LINKAGE.match(text, position)
    if match is None:
        start = len(text) - len(text[position:].lstrip())
        raise source.error("unknown directive", start, text[start : start + 200].partition("\n")[0])
    if match[2] == "entry":
        return _entry(source, match.end(), module)
    if match[2] == "func":
        return _skip_function(source, match.end())
    end = _end(source, match.end(2))
    try:
        module.variables += variables(text[match.end(1) : end], ".extern" in match[1])
    except OperandError as error:
        raise source.error(str(error), match.start(2), text[match.start(2) : end]) from None
    return end + 1


def _end(source: Source, position: int) -> int:
    end = source.text.find(";", position)
    if end < 0:
        raise source.error("no ; ends this", position, source.text[position : position + 80])
    return end


def _skip_function(source: Source, position: int) -> int:
    """A device function or its prototype; bodies are read where they are called (functions.py)."""
    stop = re.compile("[{;]").search(source.text, position)
    if stop is None:
        raise source.error("unfinished .func", position)
    if stop.group() == ";":
        return stop.end()
    depth = 0
    for brace in re.compile("[{}]").finditer(source.text, stop.start()):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.end()
    raise source.error("a .func without closing brace", position)


def _entry(source: Source, position: int, module: Module) -> int:
    match = _ENTRY.match(source.text, position)
    if match is None:
        raise source.error("entry without name, parameters and body", position, source.text[position : position + 80])
    if match[4] == ";":  # a prototype
        return match.end()
    if match[1] in module.kernels:
        raise source.error(f"entry {match[1]} is defined twice", match.start(1))
    kernel = Kernel(match[1])
    module.kernels[kernel.name] = kernel
    try:
        kernel.params = parameters(match[2] or "")
        _directives(kernel, match[3])
        addresses = {name: function.address for name, function in module.functions.items()}
        body = _Body(source, kernel, Names({v.name: v.name for v in module.variables}, addresses), module)
    except OperandError as error:
        raise source.error(str(error), match.start(1), kernel=kernel.name) from None
    return body.parse(match.end())


def _directives(kernel: Kernel, text: str) -> None:
    """What stands between the parameters and the body: ``.reqntid 192, 1, 1`` and its like."""
    left = _PERFORMANCE.sub("", text).strip()
    if left:
        raise OperandError(f"entry directive {left!r}")
    for name, argument in _PERFORMANCE.findall(text):
        if name in _HINTS:
            continue
        items = argument.split(",") if argument.strip() else []
        if not all(re.fullmatch(r"\s*\d{1,10}\s*", item) for item in items):
            raise OperandError(f"entry directive .{name} {argument}"[:120])
        numbers = [int(item) for item in items]
        triple = (*numbers, 1, 1)[:3]
        if name == "reqntid" and 1 <= len(numbers) <= 3:
            kernel.reqntid = triple
        elif name == "maxntid" and 1 <= len(numbers) <= 3:
            kernel.maxntid = triple
        elif name == "reqnctapercluster" and 1 <= len(numbers) <= 3:
            kernel.cluster = triple
        elif name == "maxclusterrank" and len(numbers) == 1:
            kernel.max_cluster = numbers[0]
        else:
            raise OperandError(f"entry directive .{name} {argument}".rstrip())


class _Body:
    """The statements of one kernel, with those of the functions that it calls."""

    def __init__(self, source: Source, kernel: Kernel, names: Names, module: Module):
        self.source, self.kernel, self.names, self.module = source, kernel, names, module
        self.functions = module.functions
        self.calls: list[tuple[Function, str]] = []  # that are being inlined, and the label after each
        for param in kernel.params:
            names.declare_symbol(param.name)
        self.branches: list[tuple[int, Scope]] = []  # instructions whose label is resolved at the end
        self.tables: list[tuple[str, int, str, Scope]] = []  # lists of labels: name, offset, text and scope
        self.last_label = ("", -1)  # and the instruction that it stands before
        self.next_location = 0
        self.location: Location | None = None

    def parse(self, position: int) -> int:
        """Parse up to the closing brace; return the offset after it."""
        self._skip_locations(position)
        end = self._block(position)
        self._finish()
        return end

    def _skip_locations(self, position: int) -> None:
        """Make the first ``.loc`` after ``position`` the next one."""
        self.next_location = bisect.bisect_left(self.source.locations, position, key=lambda known: known[0])

    def _block(self, position: int) -> int:
        """Parse up to the brace that closes the current scope; return the offset after it."""
        text, outer = self.source.text, self.names.scope
        while True:
            match = _STATEMENT.match(text, position)
            if match is None:
                rest = text[position:].lstrip()
                offset = len(text) - len(rest)
                raise self.source.error("no ; or } before the end of the file", offset, rest[:80], self.kernel.name)
            position = match.end()
            punctuation, label, statement = match.groups()
            if statement is not None:
                self._statement(statement, match.start(3))
            elif label is not None:
                self._guarded(self._label, label, match.start(2))
            elif punctuation == "{":
                self.names.push()
            elif punctuation == "}":
                if self.names.scope is outer:
                    return position
                self.names.pop()

    def _guarded(self, action: Callable[[str, int], None], text: str, offset: int) -> None:
        """Run ``action``; an operand that cannot be read becomes a syntax error with its line."""
        try:
            action(text, offset)
        except OperandError as error:
            raise self.source.error(str(error), offset, text, self.kernel.name) from None

    def _label(self, name: str, offset: int) -> None:
        unique = self.names.declare_label(name)
        self.kernel.labels[unique] = len(self.kernel.instructions)
        self.last_label = unique, len(self.kernel.instructions)

    def _statement(self, statement: str, offset: int) -> None:
        if statement[0] != ".":
            self._guarded(self._instruction, statement, offset)
        elif statement.startswith(".reg"):
            self._guarded(self._registers, statement, offset)
        elif statement.startswith(".branchtargets"):
            self._guarded(self._table, statement, offset)
        elif not statement.startswith((".pragma", *_CALL_TABLES)):
            self._guarded(self._variables, statement, offset)

    def _table(self, statement: str, offset: int) -> None:
        name, index = self.last_label
        if index != len(self.kernel.instructions) or any(name == known for known, *_ in self.tables):
            raise OperandError(".branchtargets without a label of its own")
        self.tables.append((name, offset, statement.removeprefix(".branchtargets"), self.names.scope))

    def _registers(self, statement: str, offset: int) -> None:
        self.names.declare_registers(statement[4:])

    def _variables(self, statement: str, offset: int) -> None:
        extern = statement.startswith(".extern")
        for variable in variables(statement.removeprefix(".extern"), extern):
            name = self.names.declare_symbol(variable.name)
            self.kernel.variables.append(dataclasses.replace(variable, name=name))

    def _instruction(self, statement: str, offset: int) -> None:
        match = _INSTRUCTION.fullmatch(statement)
        if match is None:
            raise OperandError("not an instruction")
        negated, predicate, opcode, rest = match.groups()
        guard = None
        if predicate is not None:
            guard = self.names.lookup(predicate)
            if not isinstance(guard, Reg) or self.names.registers[guard.index].bits != 1:
                raise OperandError(f"guard {predicate!r} is not a predicate")
            if negated:
                guard = Reg(guard.index, True)
        if opcode.startswith("wmma."):
            self._expanded(opcode, rest, f"@{'!' * bool(negated)}{predicate} " if predicate else "", offset)
            return
        index = len(self.kernel.instructions)
        operands: tuple[Operand, ...] = ()
        if opcode.partition(".")[0] in _BRANCHES:
            operands = self._code_operands(rest, opcode)
            self.branches.append((index, self.names.scope))
        elif rest:
            operands = self.names.operands(rest, opcode)
        self._advance(offset)
        text = " ".join(statement.split())
        line = self.source.line(offset)
        if opcode.partition(".")[0] == "ret" and self.calls:
            opcode, operands = "bra", (Symbol(self.calls[-1][1]),)
        if opcode.partition(".")[0] == "call":
            called = [o.name for o in operands if isinstance(o, Symbol) and o.name in self.functions]
            if called:
                self.branches.pop()
                self._inline(self.functions[called[0]], operands, guard, (line, text))
                return
            passed = [item for o in operands if isinstance(o, Vector) for item in o.items]
            if any(isinstance(o, Reg) for o in operands) and all(isinstance(item, Symbol) for item in passed):
                self.branches.pop()
                self._indirect(operands, guard, (line, text))
                return
        self.kernel.instructions.append(Instr(index, opcode, operands, guard, line, text, self.location))

    def _expanded(self, opcode: str, rest: str, guard: str, offset: int) -> None:
        """An instruction that is an abbreviation (wmma.py)."""
        items, base = split(rest) or [], ()
        for address in (item for item in items if item[:1] == "["):
            memory = self.names.operand(address, opcode)
            assert isinstance(memory, Memory)
            narrow = isinstance(memory.base, Reg) and self.names.registers[memory.base.index].bits == 32
            name = re.split(r"[+\s]", address[1:-1].strip())[0]
            first = f"{'cvt.u64.u32' if narrow else 'mov.b64'} %wmma_p, {name}"
            base = first, f"add.s64 %wmma_p, %wmma_p, {memory.offset}"
        statements = expand(opcode, items, base)
        self.names.push()
        for statement in statements:
            self._statement(statement if statement.startswith(".reg") else guard + statement, offset)
        self.names.pop()

    def _inline(
        self, function: Function, operands: tuple[Operand, ...], guard: Reg | None, where: tuple[int, str]
    ) -> None:
        """The body of a function in place of its call.

        Raises:
            OperandError: arguments that do not fit, or calls that unfold without end.
        """
        if too_deep(self.source, function, [active for active, _ in self.calls]):
            self._emit("call", (Symbol(DEEPER),), where, guard)
            return
        if len(self.kernel.instructions) > MAX_INSTRUCTIONS:
            raise OperandError(f"call of {function.name}: more than {MAX_INSTRUCTIONS} instructions with its callers")
        known = bind(function, operands)
        self.names.push()
        self.names.scope.symbols.update(known)
        self.names.push()  # of the body: the parameters are outside
        end = f"{function.name}@{self.names.scope.number}"
        if guard is not None:
            self._emit("bra", (Symbol(end),), where, Reg(guard.index, not guard.negated))
        self.calls.append((function, end))
        caller = self.next_location, self.location
        self._skip_locations(function.body)
        self._block(function.body)
        self.next_location, self.location = caller
        self.calls.pop()
        self.names.pop()
        self.names.pop()
        self.kernel.labels[end] = len(self.kernel.instructions)

    def _indirect(self, operands: tuple[Operand, ...], guard: Reg | None, where: tuple[int, str]) -> None:
        """Inline a call of an address: a comparison and the body for each function that it may mean."""
        (address,) = (o for o in operands if isinstance(o, Reg))
        self.names.push()
        number = self.names.scope.number
        end = f"call@{number}"
        if guard is not None:
            self._emit("bra", (Symbol(end),), where, Reg(guard.index, not guard.negated))
        self.names.declare_registers(".pred %other")
        other = self.names.operand("%other", "setp")
        assert isinstance(other, Reg)
        for function in self._candidates(operands):
            following = f"{function.name}@{number} is not called"
            self._emit("setp.ne.u64", (other, address, Imm(function.address)), where)
            self._emit("bra", (Symbol(following),), where, other)
            self._inline(function, operands, None, where)
            self._emit("bra", (Symbol(end),), where)
            self.kernel.labels[following] = len(self.kernel.instructions)
        self._emit("call", (Symbol(NOWHERE), address), where)
        self.kernel.labels[end] = len(self.kernel.instructions)
        self.names.pop()

    def _candidates(self, operands: tuple[Operand, ...]) -> list[Function]:
        """What an indirect call with these operands may call; not what is being called already: that is recursion."""
        passed = [item.name for o in operands if isinstance(o, Vector) for item in o.items if isinstance(item, Symbol)]
        size = {v.name: v.size for v in self.kernel.variables}
        wanted = [size.get(name) for name in passed]
        active = [function for function, _ in self.calls]
        return [f for f in pointed(self.source, self.module) if sizes(f) == wanted and f not in active]

    def _emit(
        self, opcode: str, operands: tuple[Operand, ...], where: tuple[int, str], guard: Reg | None = None
    ) -> None:
        index = len(self.kernel.instructions)
        self.kernel.instructions.append(Instr(index, opcode, operands, guard, *where, self.location))

    def _advance(self, offset: int) -> None:
        """Move to the last ``.loc`` before ``offset``."""
        locations, i = self.source.locations, self.next_location
        while i < len(locations) and locations[i][0] < offset:
            self.location = locations[i][1]
            i += 1
        self.next_location = i

    def _code_operands(self, text: str, opcode: str) -> tuple[Operand, ...]:
        """Operands of branches and calls: a name that is not a register or variable is code."""
        out: list[Operand] = []
        for item in split(text) or [""]:
            if item[:1] == "(":
                out.append(self.names.operand(item, opcode))
                continue
            found = self.names.lookup(item) if re.fullmatch(r"[%$_A-Za-z][\w$]*", item) else None
            if found is None and not re.fullmatch(r"[%$_A-Za-z][\w$]*", item):
                raise OperandError(f"branch target {item!r}")
            out.append(found or Symbol(item))
        return tuple(out)

    def _finish(self) -> None:
        """Resolve the labels of branches, which may follow them."""
        kernel = self.kernel
        kernel.registers = self.names.registers
        for name, offset, text, scope in self.tables:
            found = [_label(scope, label) for label in split(text)]
            if not found or None in found:
                raise self.source.error(".branchtargets with an unknown label", offset, text.strip(), kernel.name)
            kernel.tables[name] = tuple(label for label in found if label is not None)
        for index, scope in self.branches:
            instr = kernel.instructions[index]
            if instr.opcode.startswith("call"):
                continue  # the lowering refuses those that are not supported
            *before, target = instr.operands or (None,)
            unique = _label(scope, target.name) if isinstance(target, Symbol) else None
            table = instr.opcode.startswith("brx")
            if unique is None or len(before) != table or (table and unique not in kernel.tables):
                raise syntax_error("branch to an unknown label", instr.line, instr.text, kernel.name)
            kernel.instructions[index] = dataclasses.replace(instr, operands=(*before, Symbol(unique)))


def _label(scope: Scope | None, name: str) -> str | None:
    while scope is not None:
        if name in scope.labels:
            return scope.labels[name]
        scope = scope.parent
    return None
