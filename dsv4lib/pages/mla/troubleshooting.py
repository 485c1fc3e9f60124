"""Trigger each error of a list of symptoms, and show what is said beside its cause and its remedy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from dsv4lib import backends
from dsv4lib.errors import DSV4Error
from dsv4lib.layers.mla import ForwardBatch, ForwardMode, MLABackend, MLAConfig, MLAPool
from dsv4lib.layers.mla.flags import parse
from dsv4lib.ops.mla_decode import inputs
from dsv4lib.ops.mla_decode.op import mla_decode
from dsv4lib.ops.mla_page_table.op import mla_page_table
from dsv4lib.pages.mla.page_table import slots_of, text_example
from dsv4lib.viz.table import show_table


class Symptom(NamedTuple):
    """A line of the list. cause, remedy: in words. trigger: raises what is said. said: words that it must say."""

    symptom: str
    cause: str
    remedy: str
    trigger: Callable[[], object]
    said: str


def _decode(**changes: object) -> object:
    one = inputs.case([20, 40], 4, 64)
    return mla_decode(**one._asdict() | {"backend": "reference"} | changes)


def _other_gpu() -> object:
    with backends.emulating("sm_90a"):
        return backends.resolve("emulator", "sm_103a")


def _server(check: bool = False) -> tuple[MLABackend, ForwardBatch]:
    config = MLAConfig(num_heads=4, page_size=16, max_context_len=256)
    slots = slots_of([20, 40], 16, 64, 0)
    slots[0, :20] = torch.arange(14, 34)
    server = MLABackend(config, MLAPool(config, 8), slots, "reference", check=check)
    ids, lengths = torch.tensor([0, 1]), torch.tensor([20, 40])
    return server, ForwardBatch(ForwardMode.DECODE, 2, ids, lengths, slots[[0, 1], [19, 39]])


def _stale() -> object:
    server, batch = _server()
    return server.init_forward_metadata_replay_cuda_graph(2, batch.req_pool_indices, batch.seq_lens)


def _wrong_slots(check: bool = True) -> object:
    server, batch = _server(check=check)
    return server.init_forward_metadata(batch)


def _tree() -> object:
    server, batch = _server()
    given = batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc
    return server.init_forward_metadata(ForwardBatch(ForwardMode.TARGET_VERIFY, 2, *given, spec_info="a tree"))


def _other_rows() -> object:
    server, batch = _server()
    server.init_forward_metadata(batch)
    return server.forward_decode(torch.zeros(3, 4 * 576), None, None, server.config.layer(0), batch)


SYMPTOMS = (
    Symptom(
        "no kernel for this GPU", "kernels are for SM90 and SM100", "another back end", _other_gpu, "cannot run here"
    ),
    Symptom(
        "block_num is wrong",
        "a page table that is not whole tiles of 128 tokens",
        "pad_page_table",
        lambda: _decode(page_table=torch.zeros(2, 3).int()),
        "pad_page_table",
    ),
    Symptom(
        "a page outside of the cache",
        "lengths that pass what the table was made for",
        "tables and lengths of one step",
        lambda: _decode(page_table=torch.full((2, 2), -1).int()),
        "as far as lengths reach",
    ),
    Symptom(
        "output has another shape",
        "values have 512 dims until W_UV",
        "out [B, H, 512]",
        lambda: _decode(out=torch.zeros(2, 4, 128).bfloat16()),
        "512",
    ),
    Symptom(
        "wrong text after a while, no error",
        "tokens of a page not in order",
        "check=True names the token",
        _wrong_slots,
        "slot % 16 == 0",
    ),
    Symptom(
        "the same, at once",
        "slots that do not begin a page",
        "an allocator of pages",
        lambda: mla_page_table(*text_example(), 128, check=True, backend="reference"),
        "300 such tokens",
    ),
    Symptom(
        "it hangs with many splits",
        "reported upstream for B 8 with 8 splits, cause not found",
        "1 to 256 here, where no CTA waits for one of another item",
        lambda: _decode(num_kv_splits=1000),
        "1 to 256",
    ),
    Symptom(
        "memory is overwritten",
        "a workspace for fewer splits",
        "mla_workspace_size of the same call",
        lambda: _decode(num_kv_splits=4, workspace=torch.zeros(64).byte()),
        "for 4 splits",
    ),
    Symptom(
        "fp32 queries are refused",
        "the kernel takes bf16, fp16, FP8",
        "the back end casts",
        lambda: _decode(q_nope=torch.zeros(2, 4, 512)),
        "bfloat16, float16",
    ),
    Symptom(
        "garbage in replayed steps",
        "buffers that nothing made or refreshed",
        "init_cuda_graph_state, then replay's refresh",
        _stale,
        "init_cuda_graph_state",
    ),
    Symptom("other rows than requests", "metadata of another step", "init_forward_metadata", _other_rows, "2 rows"),
    Symptom("drafts in a tree", "no row knows the tree", "a delegate", _tree, "no tree of drafts"),
    Symptom(
        "the server does not know a flag",
        "the text made it up",
        "--attention-backend cutlass_mla",
        lambda: parse(["--enable-cutlass-mla"]),
        "no such flag",
    ),
    Symptom(
        "v_head_dim is 128",
        "the model's, before absorption",
        "512",
        lambda: MLAConfig(v_head_dim=128),
        "absorbed attention",
    ),
)


def triggered(fault: str = "none") -> list[tuple[Symptom, str]]:
    """Trigger every error; returns what each said, "" where nothing was raised.

    ``fault``: "NoCheck" serves requests whose slots are wrong without the check that names them.
    """
    found = []
    for one in SYMPTOMS:
        message = ""
        trigger = partial(_wrong_slots, False) if fault == "NoCheck" and one.trigger is _wrong_slots else one.trigger
        try:
            trigger()
        except DSV4Error as error:
            message = str(error)
        found.append((one, message))
    return found


def table(fault: str = "none") -> int:
    """Show symptoms, causes and what is said; returns how many errors are not raised, or say something else."""
    found = triggered(fault)
    rows = [(one.symptom, one.cause, one.remedy, message) for one, message in found]
    show_table(("symptom", "cause", "remedy", "what is said"), rows)
    return sum(one.said not in message for one, message in found)
