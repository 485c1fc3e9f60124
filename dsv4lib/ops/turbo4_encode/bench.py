"""Rows of `turbo4_encode`: keys and values of new tokens into the pages of one cache, in place.

given: x bf16 [T, H, D], keys then values of the KV heads; pages uint8 [P, H, bytes], as before; indices int32 [T], in
any order, none twice. Output: ``pages`` afterwards.

Bytes: x once, D / 2 + 2 a vector, indices.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lib.bench.ops import inputs, providers
from dsv4lib.bench.ops.case import Call, Given, Provider, Row
from dsv4lib.formats import hadamard, turbo4
from dsv4lib.ops.turbo4_encode.op import turbo4_encode
from dsv4lib.reference.turbo4_encode import append

PAGE = 64
SEED = 1
CLOSE = 1e-3  # part of the bytes: another order of sums rounds some norms and values next to a boundary differently
COPY_GOAL = 0.7  # of a prefill
SHAPES = {"GQA 8 d128": (16, 128), "latent d512": (1, 512)}  # heads of keys and values, dims


def rows() -> list[Row]:
    """Decode and prefill of a model with 8 KV heads, and of one latent vector a token."""
    return [_row(shape, tokens) for shape in SHAPES for tokens in (*inputs.DECODE, inputs.PREFILL)]


def _row(shape: str, tokens: int) -> Row:
    heads, dim = SHAPES[shape]
    count = -(-2 * tokens // PAGE)  # pages, of twice as many entries as are stored

    def given(generator: torch.Generator) -> Given:
        device = generator.device
        return {
            "x": inputs.normals(generator, tokens, heads, dim),
            "pages": torch.zeros(count, heads, turbo4.layout(dim).page_bytes(PAGE), dtype=torch.uint8, device=device),
            "indices": torch.randperm(count * PAGE, generator=generator, device=device)[:tokens].int(),
        }

    return Row(
        "turbo4_encode",
        f"{shape} T {tokens}",
        bytes=tokens * (heads * (2 * dim + turbo4.record_bytes(dim)) + 4),
        flops=0,
        given=given,
        check=_check,
        providers=(Provider("ours", _ours), Provider("torch.compile", _compiled)),
        copy_goal=COPY_GOAL if tokens == inputs.PREFILL else None,
    )


def _check(given: Given, outputs: Mapping[str, Tensor]) -> None:
    pages = torch.zeros_like(given["pages"])
    append(pages, PAGE, given["indices"], given["x"], SEED)
    inputs.same_bytes(outputs, {"pages": pages}, CLOSE)


def _ours(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    pages = given["pages"].clone()
    return lambda: turbo4_encode(given["x"], pages, PAGE, given["indices"], seed=SEED), {"pages": pages}


def _put(x: Tensor, pages: Tensor, indices: Tensor, matrix: Tensor, bounds: Tensor) -> None:
    """Write in place with torch: a matrix product, a search, two scattered stores."""
    dim = x.shape[2]
    y = x.float() @ matrix
    norms = y.square().sum(-1).sqrt().half()
    codes = torch.bucketize(y / norms.float()[..., None], bounds, right=True).to(torch.uint8)
    page, slot = indices // PAGE, indices % PAGE
    data = pages[..., : PAGE * dim // 2].unflatten(2, (PAGE, dim // 2))
    data[page, :, slot] = codes[..., 0::2] | codes[..., 1::2] << 4
    of_norms = pages.view(torch.float16)[..., PAGE * dim // 4 : PAGE * dim // 4 + PAGE]
    of_norms[page, :, slot] = norms


def _tables(x: Tensor) -> tuple[Tensor, Tensor]:
    """Signs and rotation as one matrix [D, D], and boundaries, fp32."""
    dim = x.shape[2]
    matrix = turbo4.signs(dim, SEED)[:, None] * hadamard.matrix(dim)
    return matrix.float().to(x.device), turbo4.boundaries(dim).float().to(x.device)


def _plain(x: Tensor, pages: Tensor, indices: Tensor) -> dict[str, Tensor]:
    after = pages.clone()
    _put(x, after, indices, *_tables(x))
    return {"pages": after}


def _compiled(given: Given) -> tuple[Call, Mapping[str, Tensor]]:
    pages, tables = given["pages"].clone(), _tables(given["x"])

    def put(x: Tensor, indices: Tensor) -> dict[str, Tensor]:
        _put(x, pages, indices, *tables)
        return {}

    call, _ = providers.compiled(put, "x", "indices").bind(given)
    return call, {"pages": pages}
