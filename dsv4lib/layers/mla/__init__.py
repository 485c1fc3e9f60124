"""Serve multi-head latent attention (MLA) from a paged cache, in the life cycle of a serving engine's back end.

| module      | holds                                                                                                |
|-------------|------------------------------------------------------------------------------------------------------|
| `config`    | sizes of the attention, its scale, its layers                                                        |
| `flags`     | the server's flags, and those that do not exist                                                      |
| `pool`      | the cache: a row of 576 a token, written by slot                                                     |
| `metadata`  | page table, lengths and workspace of a step, taken from a pool                                       |
| `batch`     | a step as the engine describes it, and which attention serves it                                     |
| `backend`   | the life cycle: metadata, capture, replay, `forward_decode`                                          |
| `extend`    | prefill and drafts, a row of decode a token                                                          |
| `graphs`    | CUDA graphs by batch size, with their memory                                                         |
"""

from dsv4lib.layers.mla.backend import MLABackend
from dsv4lib.layers.mla.batch import ForwardBatch, ForwardMode
from dsv4lib.layers.mla.config import MLAConfig
from dsv4lib.layers.mla.graphs import CudaGraphPool
from dsv4lib.layers.mla.metadata import MLADecodeMetadata
from dsv4lib.layers.mla.pool import MLAPool

__all__ = ["CudaGraphPool", "ForwardBatch", "ForwardMode", "MLABackend", "MLAConfig", "MLADecodeMetadata", "MLAPool"]
