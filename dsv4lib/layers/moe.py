"""The MoE layer: router, dispatch, experts in one of the precision modes, combine.

    experts, weights = router(x)                    top-k of sqrt(softplus(gate x)) + bias, or by a table of tokens
    rows             = tokens by expert, each expert's rows from a multiple of 128, on a Hopper of 8
    h                = silu(min(g, limit)) * clip(u, -limit, limit) [* weight]      first GEMM, quantised as it leaves
    y                = sum over a token's experts of [weight *] W2 h  + shared expert

Six launches, three more for the shared expert, two where its input comes quantised; nothing waits for the device.
Routed and shared experts have a precision each. The routing weight goes into ``h`` as in the released code, except
where the routed experts are in mode ``nvfp4``: there it would take range from the calibrated scale of the second
quantisation, and is applied in the sum.

Calibrated scales of NVFP4 activations. ``x`` is quantised once for all experts, with the largest ``input_scale`` of
their first projections, as serving engines do: nothing that one expert's calibration has room for saturates. ``h`` is
quantised expert by expert, each with its own scale. The epilogues multiply by just these scales, once.

On a Hopper routed experts are MXFP4, tiled for its kernel, and the shared one is FP8 as it is stored; its SwiGLU is no
part of a GEMM there (`experts.Fp8Expert`). Its launches are a branch of a graph that is captured, beside router and
routed experts: it reads memory while the router and the sort wait for latencies.

Where ranks divide the routed experts (`layers.exchange`), tokens go to the ranks of their experts and rows come back.
Ranks that have the same tokens (of `Groups.tensor`) route a part of them each, then put the rows together. They divide
the width of the shared expert, whose addends are summed; or each has all of it, for its part of the tokens.

Source: DSV4's released code; the modes are those of `layers.experts`. `dsv4lib.loader.moe.moe_layer` makes the layer
from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.layers.communicator import SINGLE, Groups
from dsv4lib.layers.dense import HOPPER, target
from dsv4lib.layers.exchange import Routes
from dsv4lib.layers.experts import FP8_BLOCK, FP8_RECIPES, Experts, ExpertStack, Fp8Expert, check, in_range, keeps_types
from dsv4lib.ops.common.graph_capture import Beside
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.moe_combine.op import moe_combine
from dsv4lib.ops.moe_dispatch.op import moe_dispatch
from dsv4lib.ops.moe_gemm.op import Operand
from dsv4lib.ops.router.op import Hashed, router


class Moe(torch.nn.Module):
    """Routed and shared experts. All tensors are buffers: ``.to``, ``state_dict`` and ``load_state_dict`` see them.

    Args:
        gate: bf16 [E, d]. bias: fp32 [E], for the selection; None in a layer whose ``table`` selects.
        experts: of the router. shared: a single one, or None.
        precision: key of `FORMS` (on a Hopper of `HOPPER_FORMS`), of the routed experts.
        shared_precision: of the shared one, on a Hopper "fp8_block"; None: the same, on a Hopper that.
        table: int64 [V, k], experts of each token id (the first layers); their weights still come from the gate.
        k, factor, limit: experts a token, the sum of their weights, the clamp of the SwiGLU.
        backend: of every op. arch: whose operands they are; None: that of the back end.
        groups: ranks that divide the layer; ``experts`` are those of this rank. divided: so is ``shared``, by width.

    Raises:
        ArgumentError: a mode that the architecture does not have; operands of another type or shape than their mode
            has; input scales missing or not positive and finite; planes of different shapes; not one of bias and table;
            tensors on several devices; numbers out of range. On another device than the CPU the last look costs a wait.
    """

    @typed
    def __init__(
        self,
        gate: Tensor,
        bias: Tensor | None,
        experts: Experts,
        precision: str,
        *,
        shared: Experts | None = None,
        shared_precision: str | None = None,
        table: Tensor | None = None,
        k: int = 6,
        factor: float = 1.0,
        limit: float = 10.0,
        backend: str = "auto",
        arch: str | None = None,
        groups: Groups = SINGLE,
        divided: bool = False,
    ) -> None:
        super().__init__()
        if (bias is None) == (table is None):
            raise ArgumentError("bias", None if bias is None else "given", "either a bias or a table")
        if backend not in backends.NAMES:
            raise ArgumentError("backend", backend, "one of " + ", ".join(backends.NAMES))
        if gate.dtype != torch.bfloat16 or gate.dim() != 2 or 0 in gate.shape:
            raise ArgumentError("gate", f"{gate.dtype}{list(gate.shape)}", "torch.bfloat16[E, d]")
        count, hidden = gate.shape
        if not 1 <= k <= count:
            raise ArgumentError("k", k, f"1 to {count}, the number of experts")
        for name, value in (("factor", factor), ("limit", limit)):
            if not 0 < value < float("inf"):
                raise ArgumentError(name, value, "a finite number above 0")
        for name, x, dtype, shape in (
            ("bias", bias, torch.float32, (count,)),
            ("table", table, torch.int64, (None, k)),
        ):
            check(name, x, dtype, shape, gate)
        in_range("gate", gate, gate.isfinite(), "finite numbers")
        if bias is not None:
            in_range("bias", bias, ~bias.isnan(), "numbers")
        if table is not None:
            in_range("table", table, (table >= 0) & (table < count), f"0 to {count - 1}")
        self.k, self.factor, self.limit, self.backend = k, factor, limit, backend
        self.groups, self.shared_out = groups, "fp32" if divided else "bf16"
        self.register_buffer("gate", gate.detach())
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("table", table)
        arch = target(arch, backend)
        self.experts = ExpertStack("experts", experts, precision, hidden, arch)
        if self.experts.count != len(groups.experts.own(count)):
            wanted = f"{len(groups.experts.own(count))}, the rows of gate that are this rank's"
            raise ArgumentError("experts", f"{self.experts.count} experts", wanted)
        self.shared = None
        if shared is not None:
            own = FP8_BLOCK if arch == HOPPER else precision
            mode = own if shared_precision is None else shared_precision
            self.shared = _shared(shared, mode, hidden, backend, arch, self.shared_out)
            if self.shared.count != 1:
                raise ArgumentError("shared", f"{self.shared.count} experts", "1")
        elif shared_precision is not None:
            raise ArgumentError("shared_precision", shared_precision, "None without a shared expert")
        self.beside = self.shared is not None and arch == HOPPER
        for name, x in self.named_buffers():
            if x.device != gate.device:
                raise ArgumentError(f"{name}.device", str(x.device), f"that of gate, {gate.device}")

    @property
    def recipe(self) -> str | None:
        """FP8 recipe in which the shared expert reads the layer's input. None: it reads another format."""
        return self.shared.recipe if self.shared is not None and self.shared.recipe in FP8_RECIPES else None

    @property
    def swizzled(self) -> bool:
        """Tell whether scales of that input are an image of `formats.scale_swizzle`. Else they are row-major."""
        return self.recipe == "mxfp8"

    @typed
    def forward(self, x: Tensor, tokens: Tensor | None = None, fp8: Operand | None = None) -> Tensor:
        """Apply the layer.

        Args:
            x: bf16 [T, d]. tokens: their ids, int64 [T], where a table selects.
            fp8: x quantised by `recipe`, for the shared expert; None: it is quantised here.

        Returns:
            bf16 [T, d].
        """
        if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] != self.gate.shape[1]:
            raise ArgumentError("x", f"{x.dtype}{list(x.shape)}", f"torch.bfloat16[T, {self.gate.shape[1]}]")
        if (tokens is None) != (self.table is None):
            raise ArgumentError("tokens", None if tokens is None else "given", "given where a table selects")
        if fp8 is not None and self.recipe is None:
            raise ArgumentError("fp8", "given", "None: no shared expert reads FP8")
        own, count, tensor = x, len(x), self.groups.tensor
        if tensor.size > 1:
            mine = slice(tensor.own(count).start, tensor.own(count).stop)
            own, tokens = x[mine], None if tokens is None else tokens[mine]
        hashed = None if tokens is None else Hashed(self.table, tokens)
        settings = {"k": self.k, "factor": self.factor, "bias": self.bias, "hashed": hashed, "backend": self.backend}
        branch = Beside(x.device, self.beside and tensor.size == 1)
        with branch:
            shared = self.shared_rows(x, own, fp8) if branch.apart else None
        experts, weights = router(own, self.gate, **settings)
        y, row_of = self.routed(own, experts, weights)
        late = weights if self.experts.recipe == "nvfp4" else None
        branch.join()
        if not branch.apart:
            shared = self.shared_rows(x, own, fp8)
        return tensor.rows(moe_combine(y, row_of, late, shared, backend=self.backend), count)

    def shared_rows(self, x: Tensor, own: Tensor, fp8: Operand | None) -> Tensor | None:
        """Run the shared expert, of tokens ``own`` of x: bf16 [T, d]. None: there is none."""
        if self.shared is None:
            return None
        common, tensor = {"limit": self.limit, "out": self.shared_out, "backend": self.backend}, self.groups.tensor
        if tensor.size > 1 and self.shared_out != "fp32":
            return self.shared(own, **common) if len(own) else own
        shared = tensor.sum(self.shared(x, quantised=fp8, **common)).bfloat16()
        if tensor.size == 1:
            return shared
        mine = tensor.own(len(x))
        return shared[mine.start : mine.stop]

    def routed(self, x: Tensor, experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Run the routed experts of tokens bf16 [T, d]: (rows bf16 [R, d], row of each route int32 [T, k]).

        A tile is chosen for the routes to this rank's experts. One rank alone counts padded ones among them, as it
        would have to wait for the device to know them; ranks that divide the experts have told each other.
        """
        group, arriving = self.groups.experts, len(x) * self.k
        routes = Routes(experts, len(self.gate), group) if group.size > 1 else None
        if routes is not None:
            x, experts, weights = routes.send(x, weights)
            arriving = sum(routes.arriving)
        y, row_of = x, experts  # without tokens
        if len(x):
            settings = {"count": self.experts.count, "align": self.experts.align, "backend": self.backend}
            found = moe_dispatch(experts, weights, **settings)
            early = None if self.experts.recipe == "nvfp4" else found.row_weight
            common = {"count": arriving, "limit": self.limit, "backend": self.backend}
            y = self.experts(x, found.rows, (found.offsets[:-1], found.counts), early, **common)
            row_of = found.row_of
        return (y, row_of) if routes is None else (routes.back(y, row_of), routes.row_of)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        return super()._apply(keeps_types(fn), recurse)


def _shared(
    experts: Experts, precision: str, hidden: int, backend: str, arch: str, out: str
) -> ExpertStack | Fp8Expert:
    """Make the shared expert.

    Raises:
        ArgumentError: a mode that the architecture does not have.
    """
    if arch != HOPPER:
        return ExpertStack("shared", experts, precision, hidden, arch)
    if precision != FP8_BLOCK:
        raise ArgumentError("shared_precision", precision, f"{FP8_BLOCK} on {arch}")
    return Fp8Expert("shared", experts, hidden, backend, out)
