"""Map a server's settings to SGLang's flags, and refuse flags that SGLang does not have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4lib.errors import ArgumentError, ConfigError
from dsv4lib.layers.mla.config import MLAConfig

REAL = {  # field: flag of SGLang's server
    "attention_backend": "--attention-backend",
    "page_size": "--page-size",
    "tp_size": "--tensor-parallel-size",
    "cuda_graph_max_bs": "--cuda-graph-max-bs",
    "chunked_prefill_size": "--chunked-prefill-size",
}
MADE_UP = {  # flags that a public text names, and what to write
    "--enable-cutlass-mla": "--attention-backend cutlass_mla",
    "--cutlass-num-kv-splits": "no flag: SGLang passes num_kv_splits=1; here MLAConfig.num_kv_splits",
}


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server whose decode attention is CUTLASS MLA's.

    Attributes:
        attention_backend, page_size: that SGLang wants for it. tp_size: ranks.
        cuda_graph_max_bs: largest batch of a captured step. chunked_prefill_size: tokens of a chunk.

    Raises:
        ConfigError: a value that the server refuses.
    """

    attention_backend: str = "cutlass_mla"
    page_size: int = 128
    tp_size: int = 1
    cuda_graph_max_bs: int = 64
    chunked_prefill_size: int = 4096

    def __post_init__(self) -> None:
        if self.attention_backend != "cutlass_mla":
            raise ConfigError("attention_backend", self.attention_backend, "cutlass_mla")
        if self.page_size != 128:
            raise ConfigError("page_size", self.page_size, "128 with cutlass_mla in SGLang (smaller pages: MLAConfig)")
        for name in ("tp_size", "cuda_graph_max_bs", "chunked_prefill_size"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), "at least 1")

    def arguments(self) -> list[str]:
        """Write the flags of `sglang.launch_server`."""
        return [word for name, flag in REAL.items() for word in (flag, str(getattr(self, name)))]

    def config(self, heads: int = 128, **others: object) -> MLAConfig:
        """Make the attention of a rank."""
        return MLAConfig.of_rank(heads, self.tp_size, page_size=self.page_size, **others)


def parse(arguments: Sequence[str]) -> ServerSettings:
    """Read flags of SGLang's server, each with its value; those of other parts of the server are left out.

    Raises:
        ArgumentError: a flag that does not exist, which the message replaces; a flag without its value.
    """
    fields, found, words = {flag: name for name, flag in REAL.items()}, {}, list(arguments)
    while words:
        flag, _, value = words.pop(0).partition("=")
        if flag in MADE_UP:
            raise ArgumentError("arguments", flag, f"SGLang has no such flag; {MADE_UP[flag]}")
        if flag not in fields:
            continue
        if not value and not words:
            raise ArgumentError("arguments", flag, "a value after it")
        value, default = value or words.pop(0), getattr(ServerSettings, fields[flag])
        if isinstance(default, int) and not value.isdecimal():
            raise ArgumentError(flag, value, "a number")
        found[fields[flag]] = type(default)(value)
    return ServerSettings(**found)
