"""Turn a compiled kernel into plain bytes and back, never Python objects. A cache on disk keeps them.

    line 1      magic, format version
    32 bytes    SHA-256 of all that follows
    4 bytes     length of the header, little endian
    header      JSON: name, arch, time, resources, symbol of the host function, length of each of the three parts
    parts       PTX (UTF-8), cubin (ELF), host code (MLIR bytecode in the LLVM dialect, after the DSL's whole pipeline)

The host code holds the launch and the cubin; `from_bytes` gives it back to the DSL, which turns it into machine
code where a GPU is to run it, and the emulator binds it to its own runtime. The digest finds damage. It is no
protection: these bytes decide what runs, so read them only from a folder of one's own.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
from typing import Any

from dsv4lib.dsl.compile import Compiled
from dsv4lib.errors import ArgumentError

MAGIC = b"DSV4 kernel 1\n"
_FACTS = ("name", "arch", "seconds", "registers", "local_bytes", "threads", "smem_bytes")


def to_bytes(compiled: Compiled) -> bytes:
    """Write all of ``compiled`` but its arguments, which `from_bytes` is given again."""
    function, host = compiled.function, io.BytesIO()
    function.ir_module.operation.write_bytecode(host)
    parts = [compiled.ptx.encode(), compiled.cubin, host.getvalue()]
    header = {name: getattr(compiled, name) for name in _FACTS}
    header |= {"function": function.function_name, "sizes": [len(part) for part in parts]}
    text = json.dumps(header, sort_keys=True).encode()
    body = b"".join((len(text).to_bytes(4, "little"), text, *parts))
    return MAGIC + hashlib.sha256(body).digest() + body


def from_bytes(data: bytes, kernel: Any, args: tuple[Any, ...], runs_here: bool) -> Compiled:
    """Read what `to_bytes` wrote.

    Args:
        data: the bytes.
        kernel: an object equal to the one that was compiled.
        args: its fake arguments, made anew.
        runs_here: make machine code of the host part, for a GPU of this machine; the emulator needs none.

    Raises:
        ArgumentError: ``data`` is damaged or of another format.
    """
    start = len(MAGIC) + 32
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(data[start:]).digest() != data[len(MAGIC) : start]:
        raise ArgumentError("data", data[: len(MAGIC)], "complete and unchanged bytes of `to_bytes`")
    size = int.from_bytes(data[start : start + 4], "little")
    start += 4 + size
    header = json.loads(data[start - size : start])
    parts = []
    for length in header["sizes"]:
        parts.append(data[start : start + length])
        start += length
    ptx, cubin, host = parts
    function = _function(host, header["function"], kernel, args, (ptx.decode(), cubin), runs_here)
    return Compiled(
        ptx=ptx.decode(),
        cubin=cubin,
        arguments=args,
        function=function,
        **{name: header[name] for name in _FACTS},
    )


def _function(
    host: bytes, name: str, kernel: Any, args: tuple[Any, ...], artifacts: tuple[str, bytes], runs_here: bool
) -> Any:
    """Make the DSL's compiled function of host code in bytecode; ``artifacts``: PTX and cubin."""
    from cutlass._mlir import ir
    from cutlass.base_dsl.jit_executor import JitFunctionArtifacts
    from cutlass.cutlass_dsl import CuTeDSL
    from cutlass.cutlass_dsl.cuda_jit_executor import CudaDialectJitCompiledFunction

    with ir.Context():
        module = ir.Module.parse(host)
    engine = entry = None
    if runs_here:
        dsl = CuTeDSL._get_dsl()
        engine = dsl.compiler_provider.jit(module, shared_libs=dsl.get_shared_libs())
        entry = dsl._lookup_jit_entry(engine, name)
    return CudaDialectJitCompiledFunction(
        module,
        engine,
        entry,
        inspect.signature(kernel.__call__, eval_str=True),
        name,
        None,
        False,
        JitFunctionArtifacts(PTX=artifacts[0], CUBIN=artifacts[1], SASS=None, MLIR=None),
        dynamic_args=args,
        dynamic_kwargs={},
    )
