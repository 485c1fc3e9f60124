"""Make providers that several ops have. Our op with its outputs allocated, and torch.compile of a few lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch._dynamo

from dsv4lib import nvrtc
from dsv4lib.bench.ops import peers
from dsv4lib.bench.ops.case import Absent, Call, Given, Provider
from dsv4lib.errors import BackendUnavailable

Outputs = Mapping[str, torch.Tensor]
IN_CPP = "ours, CUDA C++"


def in_place(name: str, outputs: Callable[[Given], Outputs], write: Callable[[Given, Outputs], None]) -> Provider:
    """Return a provider that writes into outputs that are allocated once."""

    def bind(given: Given) -> tuple[Call, Outputs]:
        out = outputs(given)
        return lambda: write(given, out), out

    return Provider(name, bind)


def in_cpp(bind: Callable[[Given], tuple[Call, Outputs]]) -> Provider:
    """Return an op's kernel in CUDA C++, absent without NVRTC or the DSL, which its host side imports."""

    def checked(given: Given) -> tuple[Call, Outputs]:
        peers.need("cutlass")
        try:
            nvrtc.library()
        except BackendUnavailable as error:
            raise Absent(str(error)) from None
        return bind(given)

    return Provider(IN_CPP, checked)


def functional(name: str, compute: Callable[[Given], Outputs]) -> Provider:
    """Return a provider whose every call returns new outputs. They are of torch's memory pool: no work of the GPU."""

    def bind(given: Given) -> tuple[Call, Outputs]:
        out: dict[str, torch.Tensor] = {}
        return lambda: out.update(compute(given)), out

    return Provider(name, bind)


def compiled(compute: Callable[..., Outputs], *names: str, name: str = "torch.compile") -> Provider:
    """Return what torch.compile makes of ``compute(*(given[n] for n in names))``.

    It is for the shapes of the row alone.
    """

    def bind(given: Given) -> tuple[Call, Outputs]:
        # A code object gets 8 shapes by default, then silently runs uncompiled: refuse that.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        fast, out = torch.compile(compute, dynamic=False, fullgraph=True), {}
        return lambda: out.update(fast(*(given[n] for n in names))), out

    return Provider(name, bind)
