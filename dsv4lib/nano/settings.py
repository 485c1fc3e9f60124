"""Hold the dimensions of nano and of a training run. The released ones, and small ones for any CPU.

The nano model has the layers of Flash's beginning (SWA, SWA, CSA, HCA) and its MTP block, with the sizes of the KV
vector, the window, the rates and the indexer that the kernels are written for. Small are the residual streams, the
ranks, the number of heads and the experts. Seven experts, not eight, keep the checkpoint below 10,000,000 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsv4lib.config import ModelConfig, YarnConfig
from dsv4lib.errors import ArgumentError

BOS = 256
"""Token before every window; ids below it are bytes."""

NANO = ModelConfig(
    n_layers=4,
    hidden=256,
    vocab=320,
    n_heads=8,
    head_dim=512,
    rope_dim=64,
    q_lora_rank=64,
    o_groups=1,
    o_lora_rank=64,
    window=128,
    csa_rate=4,
    hca_rate=128,
    index_heads=64,
    index_dim=128,
    index_topk=64,
    n_experts=7,
    experts_per_token=2,
    n_shared_experts=1,
    expert_width=128,
    routed_scaling=1.5,
    n_hash_layers=1,
    swiglu_limit=10.0,
    hc_mult=4,
    sinkhorn_iters=20,
    hc_eps=1e-6,
    rms_eps=1e-6,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    yarn=YarnConfig(),
    max_positions=65536,
    compress_ratios=(0, 0, 4, 128, 0),
)
"""The model that is shipped."""

SMALL = replace(
    NANO,
    hidden=64,
    n_heads=2,
    head_dim=64,
    rope_dim=16,
    q_lora_rank=32,
    o_lora_rank=32,
    window=32,
    hca_rate=32,
    index_heads=8,
    index_dim=32,
    index_topk=16,
    n_experts=4,
    expert_width=32,
    compress_ratios=(0, 0, 4, 32, 0),
    sinkhorn_iters=4,
)
"""The same kinds of layers, small enough to train on a CPU for a minute: for smoke runs and tests."""


@dataclass(frozen=True)
class Run:
    """Settings of one training run.

    Attributes:
        seconds: budget of the loop, compilation included; schedules follow the time spent. 0: ``steps`` counts instead.
        steps: number of steps if ``seconds`` is 0; the same seed, machine and steps repeat a run.
        batch, length: windows of a step, and tokens of a window.
        far: windows of a batch that come from `far`.
        seed: of weights, batches and synthetic text.
        muon_rate, muon_decay, adam_rate: learning rates and weight decay.
        warmup: steps of linear warm-up.
        dense_until, decay_from, round_from: parts of the run (0 to 1). CSA attends to all entries before the first;
            rates fall linearly to 0 after the second; weights are rounded to the shipped formats after the third.
        mtp_weight, index_weight: of the losses.
        bias_step: change of a router bias in a step.
        compiled: use torch.compile.
        log_every: steps of a row in the loss curve.
        evaluations: of the held-out text during the run.
        eval_windows: held-out windows of such an evaluation.
        final_windows: held-out windows of the one at the end; 0: all.
    """

    seconds: float = 440.0
    steps: int = 0
    batch: int = 16
    length: int = 2048
    far: int = 2
    seed: int = 0
    muon_rate: float = 0.02
    muon_decay: float = 0.02
    adam_rate: float = 3e-3
    warmup: int = 100
    dense_until: float = 0.4
    decay_from: float = 0.5
    round_from: float = 0.75
    mtp_weight: float = 0.3
    index_weight: float = 1.0
    bias_step: float = 1e-3
    compiled: bool = True
    log_every: int = 50
    evaluations: int = 6
    eval_windows: int = 37
    final_windows: int = 0

    def __post_init__(self) -> None:
        if (self.seconds > 0) == (self.steps > 0):
            raise ArgumentError("seconds, steps", (self.seconds, self.steps), "one of them above 0, the other 0")
        if not 0 <= self.far <= self.batch:
            raise ArgumentError("far", self.far, f"0 to batch={self.batch}")
        for name in ("batch", "length", "warmup", "log_every", "evaluations", "eval_windows"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "an integer >= 1")
        for name in ("dense_until", "decay_from", "round_from"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(name, getattr(self, name), "0 to 1")


SMOKE = Run(
    seconds=70.0,
    batch=4,
    length=256,
    far=0,
    warmup=10,
    compiled=False,
    log_every=20,
    evaluations=2,
    eval_windows=4,
    final_windows=16,
)
"""A run of `SMALL` that ends within two minutes on two CPU cores; it proves the code, not the recipe."""
