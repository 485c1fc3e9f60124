"""Time `layer_chain`. The twelve ops around attention and the experts of a Flash layer run one after the other.

What an eager decode step pays on the host: its ``host us`` is the row's point, and a graph's node the GPU's share. It
has no time with a cold L2: where a profiler watches, ops go through torch's dispatcher and derive their launches anew,
0.2 to 0.9 ms an op, so kernels wait for the host and the span from the first to the last is the host's. Every op keeps
the inputs of its own row, so the chain is twelve launches without a data flow between them; it is right if every op's
own check says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

import torch

from dsv4lib.bench.ops import modules
from dsv4lib.bench.ops.case import Call, Given, Provider, Row

TOKENS = 8
# In the order of a layer: op, shape of its row, and the public provider of the peers' chain.
CHAIN = (
    ("mhc", "Flash T 8", "vLLM post + pre + norm"),
    ("rmsnorm", "Flash T 8", "vLLM CUDA"),
    ("quantize", "fp8 Flash T 8", "vLLM CUDA"),
    ("qnorm_rope_kv", "Flash T 8", "vLLM CUDA"),
    ("kv_append", "decode T 8", "torch.compile"),
    ("compressor", "Flash and Pro, CSA decode T 8", "vLLM Triton"),
    ("indexer_q", "fp8 T 8", "vLLM CuTe DSL"),
    ("topk", "Flash k 512 L 8192 T 8", "vLLM persistent"),
    ("inv_rope_quant", "Flash T 8", "vLLM Triton"),
    ("router", "Flash T 8", "cuBLAS + vLLM Triton"),
    ("moe_dispatch", "Flash T 8", "torch.compile (sort)"),
    ("moe_combine", "Flash T 8", "torch.compile"),
)
OURS, PUBLIC = "ours", "public kernels"
NO_COLD = "the profiler slows the host that queues twelve ops, and the GPU waits for it"


def rows() -> list[Row]:
    """Return one row; its bytes are the sum of the twelve rows."""
    links = [_row(op, shape) for op, shape, _ in CHAIN]

    def given(generator: torch.Generator) -> Given:
        return {f"{row.op}/{key}": value for row in links for key, value in row.given(generator).items()}

    def check(given: Given, outputs: Mapping[str, torch.Tensor]) -> None:
        for row in links:
            row.check(_part(given, row.op), _part(outputs, row.op))

    def chain(names: Mapping[str, str], given: Given) -> tuple[Call, Mapping[str, torch.Tensor]]:
        bound = {}
        for row in links:
            provider = next(provider for provider in row.providers if provider.name == names[row.op])
            bound[row.op] = provider.bind(_part(given, row.op))
        calls = [call for call, _ in bound.values()]

        def call() -> None:
            for one in calls:
                one()

        return call, _Joined({op: outputs for op, (_, outputs) in bound.items()})

    ours, public = dict.fromkeys((op for op, *_ in CHAIN), OURS), {op: provider for op, _, provider in CHAIN}
    providers = (Provider(OURS, lambda given: chain(ours, given)), Provider(PUBLIC, lambda given: chain(public, given)))
    shape = f"Flash T {TOKENS}, {len(CHAIN)} ops"
    size = sum(row.bytes for row in links)
    return [Row("layer_chain", shape, size, 0, given, check, providers, no_cold=NO_COLD)]


def _row(op: str, shape: str) -> Row:
    module = importlib.import_module(modules.known()[op])
    return next(row for row in module.rows() if row.shape == shape)


def _part(whole: Mapping, op: str) -> dict:
    """What belongs to one op."""
    return {key.partition("/")[2]: whole[key] for key in whole if key.startswith(f"{op}/")}


class _Joined(Mapping[str, torch.Tensor]):
    """Outputs of all ops as "op/name"; looked up when they are read, since a provider may convert them then."""

    def __init__(self, outputs: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._outputs = outputs

    def __getitem__(self, name: str) -> torch.Tensor:
        op, _, key = name.partition("/")
        return self._outputs[op][key]

    def __iter__(self) -> Iterator[str]:
        return (f"{op}/{key}" for op, outputs in self._outputs.items() for key in outputs)

    def __len__(self) -> int:
        return sum(map(len, self._outputs.values()))
