"""Run an MoE layer over all ranks' experts, one launch a device.

    h = silu(min(g, c)) * clip(u, -c, c) * topk_weights[t, s]      g, u: L1 of expert topk_idx[t, s]
    out[t] = sum_s bf16(L2 of that expert, of h in MXFP8 or NVFP4)

Every rank calls `mega_moe` with its own tokens, as many as it has, 0 among them; a rank that does not call leaves the
others waiting. Inputs are copied to the rank's symmetric buffer, unless they are its views; then
`torch.ops.dsv4.mega_moe` launches. On a GPU no value is read by the host: calls can be captured in a CUDA graph.

Source: DeepGEMM's mega MoE for the idea; the oracle is `dsv4lib.reference.mega_moe`, the kernel
`dsv4lib.ops.mega_moe.kernel`. No machine with such GPUs has run it: it is verified in the emulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.formats import scale_swizzle
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.splits import SM_COUNT
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.mega_moe import arguments
from dsv4lib.ops.mega_moe.buffer import SymmetricBuffer, Workspace
from dsv4lib.ops.mega_moe.kernel import TILES, WEIGHTED, MegaMoe
from dsv4lib.ops.mega_moe.layout import ROW_BLOCK, WORD, Layout
from dsv4lib.ops.moe_gemm.op import largest
from dsv4lib.ops.moe_gemm.operands import Operand, Pair, numbers

ARCHS = ("sm_100a", "sm_103a")


@typed
def mega_moe(
    x: Tensor,
    x_scale: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    l1: Operand | Pair,
    l2: Operand | Pair,
    buffer: SymmetricBuffer,
    *,
    l1_alphas: Tensor | None = None,
    l2_alphas: Tensor | None = None,
    l2_act_scales: Tensor | None = None,
    weighted: str = "l1",
    clamp: float = 10.0,
    fast_math: bool = True,
    expected: int | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Send this rank's tokens through the experts of all ranks.

    ``buffer.layout.mode`` says the formats: "w4a8", MXFP4 weights and MXFP8 tokens, or "nvfp4", both NVFP4.

    Args:
        x: codes of this rank's tokens, T at most buffer.layout.max_tokens: E4M3, uint8 [T, H], or E2M1, [T, H / 2].
        x_scale: their scales, row after row: UE8M0, uint8 [T, H / 32], or E4M3, [T, H / 16].
        topk_idx: int64 or int32 [T, k], experts 0 .. E - 1 of all ranks, each once a token; any other number (-1) is
            no expert. On a GPU this is not checked: an expert has room for max_tokens rows of a rank. A call with more
            writes NaN to all of this rank's tokens, and ``buffer.lost`` counts them.
        topk_weights: fp32 [T, k].
        l1: E2M1 of this rank's experts, [E / W, 2 I, H / 2], 8 rows of gate and up each alternating, and their scales
            [E / W, bytes], swizzled (`formats.scale_swizzle`): UE8M0 per 32, or E4M3 per 16.
        l2: [E / W, H, I / 2] and their scales.
        l1_alphas: of "nvfp4", fp32 [E / W, 2], factors of gate and of up: the global scale of the weights times that of
            x, which is one for all ranks.
        l2_alphas: of "nvfp4", fp32 [E / W], likewise of down: the global scale of the weights times l2_act_scales.
        l2_act_scales: of "nvfp4", fp32 [E / W], calibrated global scales of h.
        weighted: "l1": routing weights multiply h before it is quantised, as DSV4's released code has it; "l2": they
            multiply the result, so that the range of h does not depend on them.
        buffer: this rank's memory. A call adds to ``buffer.received`` what each of the rank's experts got.
        clamp: of the SwiGLU. fast_math: silu by exp2 and a reciprocal that are approximations; False: by `dsl.silu`,
            whose error does not grow with the gate. All else is the same.
        expected: tokens of an expert on average, from all ranks; it chooses the tile. None: as if all ranks had T.
        out: bf16 [T, H], written; None: new.
        backend: "auto", "native", "emulator" or "reference" (of one rank).

    Returns:
        out.

    Raises:
        ArgumentError: an argument of a wrong type, shape or value; "reference" with several ranks.
        BackendUnavailable: see `backends.resolve`.
        LaunchFailed: the GPU cannot hold all CTAs at once, which wait for each other (a cooperative launch).
    """
    one = buffer.layout
    tokens = buffer.stage(x, x_scale, topk_idx, topk_weights)
    if out is None:
        out = torch.empty(tokens, one.hidden, dtype=torch.bfloat16, device=x.device)
    if expected is None:
        expected = -(-one.world * tokens * one.topk // one.experts)
    elif not 0 <= expected < 2**31:
        raise ArgumentError("expected", expected, "a number of tokens, 0 or more, below 2^31")
    sizes = one.world, one.experts, one.max_tokens, one.topk, one.hidden, one.intermediate, one.mode
    memory = buffer.storage, buffer.peers, buffer.state, buffer.workspace
    weights = Operand(*l1), Operand(*l2), l1_alphas, l2_alphas, l2_act_scales
    Call.op(*memory, *weights, out, *sizes, weighted, buffer.rank, tokens, clamp, fast_math, expected, backend)
    return out


@op("mega_moe", mutates=("storage", "state", "workspace", "out"), names={"formats": "mode"}, archs=ARCHS)
@dataclass(kw_only=True)
class Call:
    """A call of `mega_moe`: tokens are in ``storage``."""

    storage: Tensor
    peers: Tensor
    state: Tensor
    workspace: Workspace
    l1: Operand
    l2: Operand
    l1_alphas: Tensor | None
    l2_alphas: Tensor | None
    l2_act_scales: Tensor | None
    out: Tensor
    world: int
    experts: int
    max_tokens: int
    topk: int
    hidden: int
    intermediate: int
    formats: str  # `mode`: torch.compile has an argument of that name
    weighted: str
    rank: int
    tokens: int
    clamp: float
    fast_math: bool
    expected: int
    backend: str

    @property
    def layout(self) -> Layout:
        """Return the layout of the group's memory."""
        sizes = self.world, self.experts, self.max_tokens, self.topk, self.hidden, self.intermediate, self.formats
        return Layout(*sizes)

    def check(self) -> None:
        """Check types, shapes and devices."""
        one, u8, i32 = self.layout, torch.uint8, torch.int32
        shapes = one.workspace()
        kinds = {"sources": i32, "row_weights": torch.float32}
        if not 0 <= self.tokens <= one.max_tokens:
            raise ArgumentError("tokens", self.tokens, f"0 to {one.max_tokens}")
        if not 0 <= self.rank < one.world:
            raise ArgumentError("rank", self.rank, f"0 to {one.world - 1}")
        if not self.clamp > 0:
            raise ArgumentError("clamp", self.clamp, "a positive number")
        if self.weighted not in WEIGHTED:
            raise ArgumentError("weighted", self.weighted, "one of " + ", ".join(WEIGHTED))
        self.check_factors()
        weights = {
            "l1": (self.l1, 2 * one.intermediate, one.hidden),
            "l2": (self.l2, one.hidden, one.intermediate),
        }
        for name, (given, features, k) in weights.items():
            scales = -(-features // ROW_BLOCK) * (one.scales(k) // WORD) * WORD * ROW_BLOCK
            launching.check(
                {
                    f"{name}.codes": (given.codes, u8, (one.local, features, k // 2)),
                    f"{name}.scales": (given.scales, u8, (one.local, scales)),
                    "storage": (self.storage, u8, (one.bytes,)),
                }
            )
        launching.check(
            {
                "storage": (self.storage, u8, (one.bytes,)),
                "peers": (self.peers, torch.int64, (one.world,)),
                "state": (self.state, i32, (one.state_words,)),
                "out": (self.out, torch.bfloat16, (self.tokens, one.hidden)),
                **{
                    f"workspace.{name}": (x, kinds.get(name, u8), shapes[name])
                    for name, x in self.workspace._asdict().items()
                },
            }
        )

    def factors(self) -> dict[str, Tensor | None]:
        """Return what multiplies sums and scales h, by name."""
        return {name: getattr(self, name) for name in ("l1_alphas", "l2_alphas", "l2_act_scales")}

    def check_factors(self) -> None:
        """Check that factors of NVFP4 are given, and no others."""
        one = self.layout
        for name, x in self.factors().items():
            if (x is not None) != (one.mode == "nvfp4"):
                raise ArgumentError(name, None if x is None else "given", f'a tensor with "nvfp4", here {one.mode!r}')
            if x is not None:
                shape = (one.local, 2) if name == "l1_alphas" else (one.local,)
                launching.check({name: (x, torch.float32, shape)})

    def check_values(self) -> None:
        """Check that no expert gets more routes of this rank than it has room for, and factors."""
        for name, x in self.factors().items():
            if x is not None and not bool((x.isfinite() & (x > 0)).all()):
                raise ArgumentError(name, x.tolist(), "positive and finite")
        chosen = self.mine().topk_idx[: self.tokens]
        chosen = chosen[(chosen >= 0) & (chosen < self.experts)]
        most = int(chosen.bincount(minlength=1).max())
        if most > self.max_tokens:
            raise ArgumentError("topk_idx", f"{most} routes to an expert", f"at most max_tokens, {self.max_tokens}")

    def mine(self) -> SymmetricBuffer:
        """View this rank's memory."""
        return SymmetricBuffer(self.layout, self.rank, self.storage, self.peers, self.state, self.workspace)

    def settings(self) -> dict[str, Any]:
        """Make options of the kernel."""
        tile_n = next((n for n in TILES if n >= largest(self.expected)), TILES[-1])
        names = "world", "experts", "max_tokens", "topk", "hidden", "intermediate"
        sizes = {name: getattr(self, name) for name in names}
        options = {"mode": self.formats, "weighted": self.weighted, "fast_math": self.fast_math}
        return {**sizes, "tile_n": tile_n, **options}

    def run(self, backend: str) -> None:
        """Launch the kernel, or ask the oracle."""
        if not self.tokens:  # the launch takes no tensor of no rows; of no token none is written
            self.out = self.mine().combine[0, :1]
        settings = self.settings()
        if backend == "reference":
            if self.world > 1:
                allowed = "emulator or native with several ranks; `reference.mega_moe` takes all ranks' tokens"
                raise ArgumentError("backend", backend, allowed)
            arguments.launch_args(MegaMoe(**settings), self, 1)  # checks: what one back end takes all take
            _reference(self)
            return
        grid = EMULATED_CTAS if backend == "emulator" else min(launching.sm_count(self.out.device), SM_COUNT)
        given = arguments.launch_args(MegaMoe(**settings), self, grid, launching.stream(backend, self.out))
        arch = launching.arch(backend, ARCHS)
        _, code = compile_cache.default().get(MegaMoe, settings, arguments.fake_args, arch)
        launching.enqueue(backend, code, given)


EMULATED_CTAS = 4  # of a launch in the emulator: enough for tiles, rows and tokens to be shared out


def _reference(call: Call) -> None:
    """Ask the oracle in fp64, whose h has its global scale: `l2_alphas` without it is of the weights alone."""
    oracle = backends.oracle("mega_moe")
    mine, n, mode = call.mine(), call.tokens, call.formats
    x = numbers(mine.x[:n], scale_swizzle.swizzle(mine.x_scales[:n]), mode, False)
    w13 = numbers(*call.l1, mode, True).unflatten(1, (-1, 2, 8))
    w1, w3 = (w13[:, :, i].flatten(1, 2) for i in (0, 1))
    w2 = numbers(*call.l2, mode, True)
    if mode == "nvfp4":
        gate, up = call.l1_alphas.double().unbind(1)
        down = call.l2_alphas.double() / call.l2_act_scales.double()
        w1, w3, w2 = (w * a[:, None, None] for w, a in ((w1, gate), (w3, up), (w2, down)))
    rounded = oracle.Rounding(call.l2_act_scales, call.weighted)
    chosen = mine.topk_idx[:n]
    chosen = chosen[(chosen >= 0) & (chosen < call.experts)]
    mine.received.add_(chosen.bincount(minlength=call.experts).int())
    routes = [(x, mine.topk_idx[:n], mine.topk_weights[:n].double())]
    call.out[:n] = oracle.mega_moe(routes, w1, w2, w3, call.clamp, rounded)[0].to(call.out.dtype)
