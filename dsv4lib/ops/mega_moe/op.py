"""Run an MoE layer over all ranks' experts, one launch a device.

    h = silu(min(g, c)) * clip(u, -c, c) * topk_weights[t, s]      g, u: L1 of expert topk_idx[t, s]
    out[t] = sum_s bf16(L2 of that expert, of h in MXFP8)

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
from dsv4lib.ops.common import compile_cache, launching
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.splits import SM_COUNT
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.mega_moe import arguments
from dsv4lib.ops.mega_moe.buffer import SymmetricBuffer, Workspace
from dsv4lib.ops.mega_moe.kernel import TILES, MegaMoe
from dsv4lib.ops.mega_moe.layout import GROUP, STEP, Layout
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
    clamp: float = 10.0,
    expected: int | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Send this rank's tokens through the experts of all ranks.

    Args:
        x: uint8 [T, H], E4M3 codes of this rank's tokens, T at most buffer.layout.max_tokens.
        x_scale: uint8 [T, H / 32], their UE8M0 scales, row after row.
        topk_idx: int64 or int32 [T, k], experts 0 .. E - 1 of all ranks, each once a token; any other number (-1) is
            no expert. On a GPU this is not checked: an expert has room for max_tokens rows of a rank. A call with more
            writes NaN to all of this rank's tokens, and ``buffer.lost`` counts them.
        topk_weights: fp32 [T, k].
        l1: MXFP4 of this rank's experts, [E / W, 2 I, H / 2], 8 rows of gate and up each alternating, and their scales
            [E / W, bytes], swizzled (`formats.scale_swizzle`).
        l2: [E / W, H, I / 2] and their scales.
        buffer: this rank's memory. A call adds to ``buffer.received`` what each of the rank's experts got.
        clamp: of the SwiGLU.
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
    sizes = one.world, one.experts, one.max_tokens, one.topk, one.hidden, one.intermediate
    memory = buffer.storage, buffer.peers, buffer.state, buffer.workspace
    Call.op(*memory, Operand(*l1), Operand(*l2), out, *sizes, buffer.rank, tokens, clamp, expected, backend)
    return out


@op("mega_moe", mutates=("storage", "state", "workspace", "out"), archs=ARCHS)
@dataclass(kw_only=True)
class Call:
    """A call of `mega_moe`: tokens are in ``storage``."""

    storage: Tensor
    peers: Tensor
    state: Tensor
    workspace: Workspace
    l1: Operand
    l2: Operand
    out: Tensor
    world: int
    experts: int
    max_tokens: int
    topk: int
    hidden: int
    intermediate: int
    rank: int
    tokens: int
    clamp: float
    expected: int
    backend: str

    @property
    def layout(self) -> Layout:
        """Return the layout of the group's memory."""
        sizes = self.world, self.experts, self.max_tokens, self.topk, self.hidden, self.intermediate
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
        weights = {
            "l1": (self.l1, 2 * one.intermediate, one.hidden),
            "l2": (self.l2, one.hidden, one.intermediate),
        }
        for name, (given, features, k) in weights.items():
            scales = -(-features // 128) * (k // STEP) * 512
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

    def check_values(self) -> None:
        """Check that no expert gets more routes of this rank than it has room for."""
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
        return {**{name: getattr(self, name) for name in names}, "tile_n": tile_n}

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
    """Ask the oracle in fp64."""
    from dsv4lib.formats import e4m3, ue8m0

    mine, n = call.mine(), call.tokens
    scales = ue8m0.decode(mine.x_scales[:n], torch.float64).repeat_interleave(GROUP, -1)
    x = e4m3.decode(mine.x[:n], torch.float64) * scales
    w13 = numbers(*call.l1, "w4a8", True).unflatten(1, (-1, 2, 8))
    w1, w3 = (w13[:, :, i].flatten(1, 2) for i in (0, 1))
    w2 = numbers(*call.l2, "w4a8", True)
    chosen = mine.topk_idx[:n]
    chosen = chosen[(chosen >= 0) & (chosen < call.experts)]
    mine.received.add_(chosen.bincount(minlength=call.experts).int())
    routes = [(x, mine.topk_idx[:n], mine.topk_weights[:n].double())]
    call.out[:n] = backends.oracle("mega_moe").mega_moe(routes, w1, w2, w3, call.clamp)[0].to(call.out.dtype)
