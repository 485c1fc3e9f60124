"""A small model with the real dimensions of a head: transformers' with random weights, and its released format."""

from dataclasses import replace

import pytest
import torch

from dsv4lib.config import TINY, YarnConfig, schedule
from dsv4lib.loader.checkpoint import Checkpoint
from dsv4lib.loader.convert import save
from dsv4lib.loader.whole import Listed
from dsv4lib.reference import transformers_parity

# Every size differs from the others where the architecture allows it; K of wq_b is a multiple of 128, of wo_b is not.
SMALL = replace(
    TINY,
    n_layers=3,
    compress_ratios=schedule(3, (0,), 4, 128),
    hidden=256,
    n_heads=6,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=128,
    o_groups=2,
    o_lora_rank=48,
    window=128,
    csa_rate=4,
    hca_rate=128,
    index_heads=64,
    index_dim=128,
    index_topk=24,
    n_experts=5,
    experts_per_token=2,
    expert_width=128,
    vocab=328,
    n_hash_layers=1,
    max_positions=2048,
    yarn=YarnConfig(),
)


@pytest.fixture(scope="session")
def peer():
    """transformers' model, fp32: sublayers as large as the streams, so that every write-back counts."""
    model = transformers_parity.build_model(SMALL, torch.Generator().manual_seed(1))
    return transformers_parity.Peer("small", 1, SMALL, model, torch.zeros(1, 1, dtype=torch.int64))


@pytest.fixture(scope="session")
def listed(tmp_path_factory, peer):
    """Its weights in DeepSeek's format: SWA with a hash table, CSA, HCA; and a draft block of ours."""
    folder = tmp_path_factory.mktemp("whole") / "mxfp4"
    save(transformers_parity.reference_of(peer).state_dict(), SMALL, folder, "mxfp4")
    return Listed.of(Checkpoint(folder))
