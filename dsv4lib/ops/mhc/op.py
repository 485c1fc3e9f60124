"""Write a sublayer's output to the residual streams and read the next one's input.

The boundary between two sublayers, as torch ops.

    mhc_pre       streams -> y, post, comb                               before the first sublayer
    mhc_post_pre  streams, its output f, post, comb -> the same, and streams     between two sublayers
    mhc_head      streams (and f, post, comb) -> y                       before the output head, or a draft block's

y is normalised: what the sublayer (or the head) multiplies with. A sublayer's linear layers in FP8 read it as codes and
scales, `Fp8`: the bits of `quantize` of y, beside y in bf16 (routers and compressors read that) or instead of it.

    fp8 = new_fp8(streams)
    y, post, comb = mhc_pre(streams, site, fp8=fp8, keep=False)      y is None
    q = linear(Operand(fp8.codes, fp8.scales), w, mode="mxfp8")

Everything is one launch of `torch.ops.dsv4.mhc_site`,
which writes into outputs in place, reads nothing on the host and can be captured in a CUDA graph after one call has
compiled its kernel. One case takes a second launch: many tokens of Pro in recipe "fp8", whose blocks of 128 columns
cross the borders of that kernel's CTAs. The oracles are `dsv4lib.reference.mhc` and `.quantize`.

Two kernels share the work out, and add in different orders: by default the number of tokens chooses the faster one,
and a token's bits depend on it. With ``batch_invariant`` all numbers of tokens have `FEW_TOKENS`, and a token has the
bits that it has alone; what that costs is in data/bench/mhc.md.

With many tokens the kernel's CTAs exchange sums in a workspace that must be 0 before and is 0 after a launch, and wait
for each other: all must be resident. Without a ``space`` the op keeps that memory for each stream; a capture that comes
first records a memset instead. Two launches that may run at the same time, captured in two graphs from one stream for
example, need one each (`workspace`).

Source: DSV4 paper, mHC section.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4lib import backends
from dsv4lib.errors import ArgumentError
from dsv4lib.ops.common import launching, plans
from dsv4lib.ops.common.schema import op
from dsv4lib.ops.common.typed import typed
from dsv4lib.ops.mhc import arguments
from dsv4lib.ops.mhc.config import FP8_RECIPES, MAX_WARPS, ROWS_N, UNIT, N
from dsv4lib.ops.mhc.few_tokens import MhcFewTokens
from dsv4lib.ops.mhc.many_tokens import MhcManyTokens
from dsv4lib.ops.mhc.variants import SM_COUNT, Variant, cluster_of, tile_of, variant_of
from dsv4lib.ops.quantize import op as quantize_op
from dsv4lib.ops.quantize.config import RECIPES
from dsv4lib.ops.quantize.op import output_shapes

GPC = 18  # SMs that a cluster cannot cross the border of; an H200 holds 7 clusters of 16
FEW, FEW_ROWS = 4, 8  # decode: clusters that fetch fn side by side, each up to 8 tokens; measured on an H200
ITERS, MAX_ITERS = 20, 1000
SPACE = 1 << 20  # floats of a workspace, for 204 CTAs
_SPACES: dict[tuple[int, int], Tensor] = {}  # zeros, by device and stream


class Site(NamedTuple):
    """Parameters of a site.

    Attributes:
        fn: fp32 [24, 4 d], rows of pre, post, comb (head: [4, 4 d]). scale: fp32 [3] (head: [1]).
        base: fp32 [24] (head: [4]). weight: fp32 [d], of the norm.
    """

    fn: Tensor
    scale: Tensor
    base: Tensor
    weight: Tensor


class Eps(NamedTuple):
    """hc: of pre and Sinkhorn. rms: of both norms."""

    hc: float = 1e-6
    rms: float = 1e-6


class Fp8(NamedTuple):
    """Memory for y as FP8, see `new_fp8`.

    Attributes:
        codes: uint8 [T, d], E4M3. scales: UE8M0, uint8 [T, d/block], or the bytes of the 128x4 image.
        recipe: "fp8" (1x128), or "mxfp8" (1x32).
        swizzled: scales are an image of `formats.scale_swizzle`, as `linear` reads them (fp8 with mode "mxfp8"); else
            row-major.
    """

    codes: Tensor
    scales: Tensor
    recipe: str = "fp8"
    swizzled: bool = True


class Outputs(NamedTuple):
    """What a call writes: streams bf16 [T, 4, d], y bf16 [T, d], post fp32 [T, 4], comb fp32 [T, 4, 4]."""

    streams: Tensor | None
    y: Tensor | None
    post: Tensor | None = None
    comb: Tensor | None = None


NORMAL = Eps()


def new_fp8(streams: Tensor, recipe: str = "fp8", swizzled: bool = True) -> Fp8:
    """Allocate FP8 of y for streams [T, 4, d].

    Raises:
        ArgumentError: another shape, or an unknown recipe.
    """
    if streams.dim() != 3:
        raise ArgumentError("streams.shape", tuple(streams.shape), f"[T, {N}, d]")
    if recipe not in FP8_RECIPES:
        raise ArgumentError("recipe", recipe, "one of " + ", ".join(FP8_RECIPES))
    shapes = output_shapes(recipe, streams.shape[0], streams.shape[2], swizzled=swizzled)
    codes, scales = (torch.empty(shape, dtype=torch.uint8, device=streams.device) for shape in shapes)
    return Fp8(codes, scales, recipe, swizzled)


@typed
def mhc_pre(
    streams: Tensor,
    site: Site,
    *,
    iters: int = ITERS,
    eps: Eps = NORMAL,
    fp8: Fp8 | None = None,
    keep: bool = True,
    out: tuple[Tensor | None, Tensor, Tensor] | None = None,
    space: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Make the input of a sublayer, and the coefficients of the write-back after it.

    Args:
        streams: bf16 [T, 4, d], a token's streams side by side, d a multiple of 128.
        site: parameters.
        iters: Sinkhorn row/column pairs, 1 to 1000.
        eps: see `Eps`.
        fp8: memory for y as FP8; None: it is not wanted.
        keep: y in bf16 is wanted; may be False with ``fp8``. Ignored with ``out``.
        out: (y or None, post, comb) to write into; None: new tensors.
        space: memory of the kernel, see `workspace`; None: the op's own.
        batch_invariant: the bits of a token do not depend on how many there are; slower for many tokens.
        backend: "native", "emulator", "reference", or "auto": native, else emulator.

    Returns:
        (y bf16 [T, d] or None, post fp32 [T, 4], comb fp32 [T, 4, 4]).

    Raises:
        ArgumentError: an argument of the wrong type, shape, stride or device.
        BackendUnavailable: the back end cannot run here.
    """
    out = _empty(streams, keep)[1:] if out is None else out
    Call.op(streams, None, None, None, site, (None, *out), fp8, space, iters, eps, batch_invariant, backend)
    return out


@typed
def mhc_post_pre(
    streams: Tensor,
    f: Tensor,
    post: Tensor,
    comb: Tensor,
    site: Site,
    *,
    iters: int = ITERS,
    eps: Eps = NORMAL,
    fp8: Fp8 | None = None,
    keep: bool = True,
    out: tuple[Tensor, Tensor | None, Tensor, Tensor] | None = None,
    space: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Write a sublayer's output back, then `mhc_pre` of the next site.

    Args:
        f: bf16 [T, d], the sublayer's output.
        post: fp32 [T, 4], of the site before the sublayer. comb: fp32 [T, 4, 4], of the same.
        out: (streams, y or None, post, comb), other memory than the inputs; None: new tensors.
        streams, site, iters, eps, fp8, keep, space, batch_invariant, backend: as in `mhc_pre`, which also says what is
            raised.

    Returns:
        (streams bf16 [T, 4, d], y, post, comb).
    """
    out = _empty(streams, keep) if out is None else out
    Call.op(streams, f, post, comb, site, out, fp8, space, iters, eps, batch_invariant, backend)
    return out


@typed
def mhc_head(
    streams: Tensor,
    site: Site,
    *,
    f: Tensor | None = None,
    post: Tensor | None = None,
    comb: Tensor | None = None,
    eps: Eps = NORMAL,
    out: tuple[Tensor | None, Tensor] | None = None,
    space: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Collapse the streams and normalise, after a write-back where f is given.

    Args:
        site: fn [4, 4 d], scale [1], base [4], weight [d].
        f, post, comb: as in `mhc_post_pre`, all or none.
        out: (streams or None, y): streams after the write-back are stored only where there is memory for them (a
            draft block needs them); None: only y, a new tensor.
        streams, eps, space, batch_invariant, backend: as in `mhc_pre`, which also says what is raised.

    Returns:
        y bf16 [T, d].
    """
    out = (None, _empty(streams)[1]) if out is None else out
    Call.op(streams, f, post, comb, site, (*out, None, None), None, space, ITERS, eps, batch_invariant, backend)
    return out[1]


def workspace(device: str | torch.device) -> Tensor:
    """Memory for calls one after the other; 0 before and after each."""
    return torch.zeros(SPACE, dtype=torch.float32, device=device)


class Plan(NamedTuple):
    """How a call is shared out.

    Attributes:
        cluster: CTAs that share a token. rows: tokens that a cluster takes at once. clusters: of the
            launch. variant: of the kernel.
    """

    cluster: int
    rows: int
    clusters: int
    variant: Variant = Variant.FEW_TOKENS


def plan(tokens: int, d: int, sm_count: int = SM_COUNT, variant: Variant | None = None) -> Plan:
    """Choose the largest clusters with the fewest rounds of tiles.

    All tiles are alike; ``variant``: None: `variant_of`.
    """
    variant = variant_of(tokens, d) if variant is None else variant
    cluster = cluster_of(d, variant)
    most = max(1, sm_count // cluster if variant is Variant.MANY_TOKENS else sm_count // GPC * (GPC // cluster))
    few = most if tokens > FEW * FEW_ROWS else min(FEW, most)
    rounds = -(-tokens // (few * tile_of(variant, d)))
    rows = -(-tokens // (few * rounds))
    return Plan(cluster, rows, min(most, -(-tokens // rows)), variant)


def _empty(streams: Tensor, keep: bool = True) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Outputs (streams, y or None, post, comb)."""
    if streams.dim() != 3:
        raise ArgumentError("streams.shape", tuple(streams.shape), f"[T, {N}, d]")
    t, _, d = streams.shape
    fp32 = {"dtype": torch.float32, "device": streams.device}
    y = streams.new_empty(t, d) if keep else None
    return torch.empty_like(streams), y, torch.empty(t, N, **fp32), torch.empty(t, N, N, **fp32)


_NAMES = {f"out.{name}": f"out: {name}" for name in Outputs._fields}
_ALIASES = {f"site.{name}": name for name in Site._fields} | {"eps.hc": "hc_eps", "eps.rms": "rms_eps"}
_ALIASES |= {"out.streams": "new", "out.y": "y", "out.post": "post_new", "out.comb": "comb_new"}


@op("mhc_site", mutates=("out", "fp8", "space"), names=_NAMES, aliases=_ALIASES)
class Call(NamedTuple):
    """A call of the site between two sublayers."""

    streams: Tensor
    f: Tensor | None
    post: Tensor | None
    comb: Tensor | None
    site: Site
    out: Outputs
    fp8: Fp8 | None
    space: Tensor | None
    iters: int
    eps: Eps
    batch_invariant: bool
    backend: str

    @property
    def head(self) -> bool:
        """Whether there are no coefficients of a next write-back."""
        return self.out.post is None and self.out.comb is None

    def check(self) -> None:
        """Check types, shapes and devices."""
        site, out = self.site, self.out
        shape, least = tuple(self.streams.shape), UNIT * 4
        if self.streams.dim() != 3 or shape[1] != N or shape[2] == 0 or shape[2] % least:
            raise ArgumentError("streams.shape", shape, f"[T, {N}, d] with d a multiple of {least}")
        t, _, d = shape
        cluster = cluster_of(d)
        if d > UNIT * cluster * MAX_WARPS:
            raise ArgumentError(
                "streams.shape", shape, f"d at most {UNIT * cluster * MAX_WARPS}, {cluster} CTAs a token"
            )
        given = [x is not None for x in (self.f, self.post, self.comb)]
        if any(given) != all(given):
            raise ArgumentError("f, post, comb", given, "all three or none")
        if out.streams is None and given[0] and not self.head:
            raise ArgumentError("out[0]", None, "a tensor: the next site needs the streams")
        if out.streams is not None and not given[0]:
            raise ArgumentError("out[0]", "given", "None without f: the streams do not change")
        if (out.post is None) != (out.comb is None):
            raise ArgumentError("out", "one of post and comb", "both or none")
        if not 1 <= self.iters <= MAX_ITERS:
            raise ArgumentError("iters", self.iters, f"1 to {MAX_ITERS}")
        launching.check_eps(**{"eps.hc": self.eps.hc, "eps.rms": self.eps.rms})
        if out.y is None and self.fp8 is None:
            raise ArgumentError("out: y", None, "a tensor, unless y is wanted as FP8")
        fp32, bf16, values = torch.float32, torch.bfloat16, N if self.head else N * (2 + N)
        launching.check(
            {
                "streams": (self.streams, bf16, shape),
                "f": (self.f, bf16, (t, d)),
                "post": (self.post, fp32, (t, N)),
                "comb": (self.comb, fp32, (t, N, N)),
                "site.fn": (site.fn, fp32, (values, N * d)),
                "site.scale": (site.scale, fp32, (1 if self.head else 3,)),
                "site.base": (site.base, fp32, (values,)),
                "site.weight": (site.weight, fp32, (d,)),
                "out: streams": (out.streams, bf16, shape),
                "out: y": (out.y, bf16, (t, d)),
                "out: post": (out.post, fp32, (t, N)),
                "out: comb": (out.comb, fp32, (t, N, N)),
                **self._wanted_fp8(t, d),
                "space": (self.space, fp32, (SPACE,)),
            }
        )

    def _wanted_fp8(self, tokens: int, d: int) -> dict[str, tuple]:
        """List codes and scales for `launching.check`."""
        if self.fp8 is None:
            return {}
        codes, scales, recipe, swizzled = self.fp8
        if recipe not in FP8_RECIPES or self.head:
            raise ArgumentError("fp8.recipe", recipe, "one of " + ", ".join(FP8_RECIPES) + ", of a sublayer's input")
        shapes = output_shapes(recipe, tokens, d, swizzled=swizzled)
        given = {"fp8.codes": codes, "fp8.scales": scales}
        return {name: (x, torch.uint8, shape) for (name, x), shape in zip(given.items(), shapes, strict=True)}

    def run(self, backend: str, variant: Variant | None = None) -> None:
        """Launch the kernel, or ask the oracle; ``variant``: None: that of its number of tokens, or of all."""
        if self.streams.shape[0] == 0:
            return
        if backend == "reference":
            return _reference(self)
        sm_count = launching.sm_count(self.streams.device) if backend == "native" else SM_COUNT
        if variant is None:
            variant = Variant.FEW_TOKENS if self.batch_invariant else variant_of(*self.streams.shape[::2])
        launch(self, backend, plan(self.streams.shape[0], self.streams.shape[2], sm_count, variant))


def run(call: Call, variant: Variant) -> None:
    """Choose the back end and queue a checked call in this variant."""
    call.run(launching.resolve(call.backend, "streams", call.streams), variant)


def launch(call: Call, name: str, chosen: Plan) -> None:
    """Queue a call, shared out as ``chosen`` says."""
    if call.fp8 is not None and not writes_fp8(call.streams.shape[2], call.fp8.recipe, chosen):
        t, _, d = call.streams.shape
        y = plans.scratch(t, d, dtype=torch.bfloat16, like=call.streams) if call.out.y is None else call.out.y
        launch(call._replace(out=call.out._replace(y=y), fp8=None), name, chosen)
        codes, scales, recipe, swizzled = call.fp8
        quantised = quantize_op.Quantized(codes, scales, None)
        quantize_op.Call(y, None, None, quantised, None, recipe, False, swizzled, name).run(name)
        return
    settings = {
        "d": call.streams.shape[2],
        "cluster": chosen.cluster,
        "post": call.f is not None,
        "head": call.head,
        "keep": not call.head or call.out.streams is not None,
        "iters": call.iters,
    }
    if call.fp8 is not None:
        settings |= {"recipe": call.fp8.recipe, "keep_y": call.out.y is not None, "swizzled": call.fp8.swizzled}
    if chosen.variant is Variant.FEW_TOKENS:
        once = chosen.rows * chosen.clusters >= call.streams.shape[0]
        settings |= {"groups": -(-chosen.rows // ROWS_N), "once": once}
    kernel = {Variant.FEW_TOKENS: MhcFewTokens, Variant.MANY_TOKENS: MhcManyTokens}[chosen.variant]
    if chosen.variant is Variant.MANY_TOKENS:
        call = call._replace(space=_space(call))
    given = call, chosen.rows, chosen.clusters
    launching.launch(name, kernel, settings, arguments.fake_args, arguments.launch_args, *given)


def writes_fp8(d: int, recipe: str, chosen: Plan) -> bool:
    """Tell whether the kernel writes FP8 itself. Many tokens need whole blocks in each CTA."""
    return chosen.variant is Variant.FEW_TOKENS or d // chosen.cluster % RECIPES[recipe].block == 0


def _space(call: Call) -> Tensor:
    """The workspace of a call: the caller's, or the op's own."""
    if call.space is not None:
        return call.space
    device = call.streams.device
    place = device.index, launching.stream("native", call.streams) if device.type == "cuda" else 0
    space = _SPACES.get(place)
    if space is None:
        space = workspace(device)
        # On the CPU a launch may be taken back half-way; a capture records the memset.
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            _SPACES[place] = space
    return plans.constant(space)


def _reference(call: Call) -> None:
    """The oracle in fp64, with the model's roundings to bf16 of streams and x."""
    oracle, norm = backends.oracle("mhc"), backends.oracle("rmsnorm")
    z = call.streams.double()
    fn, scale, base, weight = (x.double() for x in call.site)
    if call.f is not None:
        z = oracle.post(call.f.double(), z, call.post.double(), call.comb.double()).bfloat16().double()
        if call.out.streams is not None:
            call.out.streams.copy_(z)
    eps = {"hc_eps": call.eps.hc, "rms_eps": call.eps.rms}
    if call.head:
        x = oracle.head_collapse(z, fn, scale, base, **eps)
    else:
        pre, post, comb = oracle.coefficients(z, fn, scale, base, iters=call.iters, **eps)
        call.out.post.copy_(post)
        call.out.comb.copy_(comb)
        x = oracle.pre(z, pre)
    y = norm.rmsnorm(x.bfloat16().double(), weight, call.eps.rms).bfloat16()
    if call.out.y is not None:
        call.out.y.copy_(y)
    if call.fp8 is not None:
        codes, scales, _ = backends.oracle("quantize").quantize(y, call.fp8.recipe, swizzled=call.fp8.swizzled)
        call.fp8.codes.copy_(codes[0])
        call.fp8.scales.copy_(scales[0])
