"""Try an attention kernel. Compile, run in the emulator, compare with fp64, collect all that speaks for or against it.

For notebooks, exercises and tests. A kernel that stops with an error is a result, not an exception: the error is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4lib import backends, check
from dsv4lib.dsl.compile import Compiled
from dsv4lib.emulator.driver.binary import parsed
from dsv4lib.emulator.driver.device import make
from dsv4lib.emulator.driver.host import launch
from dsv4lib.emulator.errors import EmulatorError, Place
from dsv4lib.emulator.ptx.dependent import WAIT, ahead_of_wait
from dsv4lib.emulator.trace import round_trips
from dsv4lib.ops.fmha import arguments
from dsv4lib.ops.fmha.combine import Combine
from dsv4lib.ops.fmha.inputs import TYPES, Case, guards_written
from dsv4lib.ops.fmha.sm100 import Fmha
from dsv4lib.pages.common.run_gemm import cached, loads_of, never_loaded, reported, where, where_of
from dsv4lib.reference import fmha as reference
from dsv4lib.reference import rope

# Of max(1, |lse|, size of a row's scores): fp32 sums of products, exponents and logarithms of the GPU's
# approximations
LSE_TOLERANCE = 5e-7


@dataclass
class Outcome:
    """What one run says.

    Attributes:
        kernel: the kernel object; compiled: what the compiler said about it.
        factor: O (stage A: S) against fp64, beside PyTorch in the same type; None if the kernel stopped.
        lse_error: largest error of the log-sum-exp in units of max(1, |lse|, scale |q|), inf where an infinity is in
            the wrong place; None without. scale |q| is the size of a row's scores (`Ladder`: not counted): with one
            or two keys the LSE may be near 0 by cancellation, the rounding errors of its terms are not.
        hazards: what the checks reported; error: what stopped it.
        trace, result: of the last launch.
        output, lse: what the kernel wrote; truth: O in fp64.
        inputs: (q, keys, ...), the tensors it read.
        never: boxes of each operand that no CTA loaded; unread: bytes that TMA loaded and no product read; only with a
            trace.
        guards_written: values written past the last head of a token.
    """

    kernel: Any
    compiled: Compiled
    factor: check.FactorResult | None
    lse_error: float | None
    hazards: list[Any]
    error: EmulatorError | None
    trace: Any
    result: Any
    output: torch.Tensor
    lse: torch.Tensor | None
    truth: torch.Tensor
    inputs: tuple
    never: dict[str, int] = field(default_factory=dict)
    unread: int = 0
    guards_written: int = 0

    @property
    def right(self) -> bool:
        """Tell whether the numbers are as they should be, whatever the checks say."""
        return self.error is None and self.factor.passed and (self.lse_error is None or self.lse_error <= LSE_TOLERANCE)

    @property
    def clean(self) -> bool:
        """Tell whether it is right, without hazard.

        Every box is loaded and read, nothing is written past the last head.
        """
        found = self.hazards or any(self.never.values()) or self.unread or self.guards_written or self.early()
        return self.right and not found

    @property
    def rel_l2(self) -> float:
        """Return the relative L2 error of the output against fp64. Inf if the kernel stopped or wrote NaN."""
        if self.error is not None:
            return float("inf")
        error = float((self.output.double() - self.truth).norm() / self.truth.norm())
        return error if error == error else float("inf")

    @property
    def error_over_torch(self) -> float:
        """RMS error over that of PyTorch in the same type. Inf if the kernel stopped or NaN/Inf are out of place."""
        if self.error is not None or self.factor.nonfinite_mismatches:
            return float("inf")
        return self.factor.rms_error / self.factor.peer_rms_error

    def early(self) -> list[str]:
        """Python lines that touch global memory ahead of the wait for the kernel before. None of a kernel without it.

        A launch by itself shows none of them. None of an op, which keeps its code to itself.
        """
        if self.compiled is None:
            return []
        (kernel,) = parsed(self.compiled.ptx).kernels.values()
        if all(instr.opcode != WAIT for instr in kernel.instructions):
            return []
        found = []
        for instr in ahead_of_wait(kernel):
            line = instr.location.outermost()
            found.append(where(Place(kernel.name, instr.line, instr.text, f"{line.file}:{line.line}")))
        return found

    def findings(self) -> list[tuple[str, str, str]]:
        """Return (kind, Python line or "", what) of everything that was found. The most specific comes first."""
        out = reported(self.hazards)
        for line in self.early():
            out.append(("ahead of the wait", line, "global memory that the kernel before may not be done with"))
        if self.error is not None:
            out.append((type(self.error).__name__, where(self.error.place), str(self.error).splitlines()[0]))
        if self.trace is not None:
            for move in round_trips.moved(self.trace):
                places = (where_of(self.trace, line) for line in (move.store_line, move.load_line))
                out.append(("element moved", " against ".join(places), str(move)))
        for number, (name, boxes) in enumerate(self.never.items()):
            if boxes:
                out.append(
                    ("boxes never loaded", loads_of(self.trace, self.inputs[number]), f"{boxes} boxes of {name}")
                )
        if self.unread:
            places = "; ".join(loads_of(self.trace, operand) for operand in self.inputs[:2])
            out.append(("bytes never read", places, f"{self.unread:,} bytes were loaded and no product read them"))
        if self.guards_written:
            out.append(("pad rows leaked", "", f"{self.guards_written} values past the last head"))
        if self.error is None and not self.factor.passed:
            out.append(("wrong numbers", "", f"rel L2 {self.rel_l2:.2g}; {self.factor}"))
        if self.lse_error is not None and self.lse_error > LSE_TOLERANCE:
            out.append(("wrong numbers", "", f"log-sum-exp is off by {self.lse_error:.2g}"))
        return out


def bits(x: torch.Tensor) -> bytes:
    """Return the bits of a tensor, to compare runs."""
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def compiled(kernel_type: type, settings: tuple) -> tuple[Any, Compiled]:
    """A kernel object and its code for sm_100a from the compile cache. Its ``seconds`` are those of the compilation."""
    return cached(kernel_type, settings, arguments.fake_args)


@dataclass
class Native:
    """What a run on a GPU reports beside its numbers: nothing."""

    hazards: tuple = ()
    launches: tuple = ()
    trace: None = None


def _run(code: Compiled, args: tuple, backend: str, **device: Any) -> tuple[Any, EmulatorError | None]:
    if backend == "native":
        backends.launch("native", code.function, *args)
        return Native(), None
    gpu = make("sm_100a", **{"checks": "race", **device})
    try:
        launch(code, *args, gpu=gpu)
    except EmulatorError as caught:
        return gpu, caught
    return gpu, None


def judge(
    made: tuple,
    gpu: Any,
    error: Any,
    output: tuple,
    peer: torch.Tensor,
    truth: tuple,
    inputs: tuple,
    unit: torch.Tensor | float = 1.0,
) -> Outcome:
    """Judge a run. ``output`` and ``truth`` are (o, lse), ``unit`` the size of a row's scores."""
    (kernel, code), (out, lse) = made, (None if x is None else x.cpu() for x in output)
    factor = lse_error = None
    if error is None:
        factor = check.within_factor(out, peer.to(out.dtype), truth[0])
        lse_error = None if lse is None else _lse_error(lse, truth[1], unit)
    result = gpu.launches[-1].result if gpu.launches else None
    return Outcome(kernel, code, factor, lse_error, gpu.hazards, error, gpu.trace, result, out, lse, truth[0], inputs)


def score_size(case: Case) -> torch.Tensor:
    """Return scale |q| [T, H]. It is the standard deviation of a row's scores over keys of unit variance."""
    return case.scale * case.q.double().norm(dim=-1)


def _lse_error(lse: torch.Tensor, truth: torch.Tensor, unit: torch.Tensor | float) -> float:
    finite = truth.isfinite()
    if not torch.equal(lse[~finite].double(), truth[~finite]) or not bool(lse[finite].isfinite().all()):
        return float("inf")
    errors = (lse.double() - truth).abs() / torch.maximum(truth.abs(), torch.as_tensor(unit)).clamp_min(1)
    return float(errors[finite].max()) if bool(finite.any()) else 0.0


def run_ladder(
    kernel_type: type,
    settings: tuple,
    rows: int,
    keys: int,
    seed: int = 0,
    spread: float = 5.0,
    backend: str = "emulator",
    **device: Any,
) -> Outcome:
    """Run a `Ladder` (or a variant) on random q [rows, D] and kv [keys, D].

    Args:
        kernel_type: the class; settings: its arguments (stage, head_dim, dtype).
        rows, keys: M and N.
        seed: of the operands.
        spread: rows of q are scaled by 2^-spread .. 2^spread, small beside large: none can stand in for another.
        backend: "emulator" or "native"; device: options of `emulator.device` (schedule, checks, trace, ...).
    """
    made = kernel, code = compiled(kernel_type, settings)
    generator = torch.Generator().manual_seed(seed)
    dtype, depth = TYPES[kernel.dtype], kernel.head_dim
    scales = torch.logspace(-spread, spread, rows, base=2.0)[torch.arange(rows) * 37 % rows, None]
    q = (torch.randn(rows, depth, generator=generator) * scales).to(dtype)
    kv = torch.randn(keys, depth, generator=generator).to(dtype)
    scale = depth**-0.5
    out = torch.full((rows, keys), float("nan"))
    lse = torch.full((rows,), float("nan")) if kernel.stage == "c" else None
    if kernel.stage != "a":
        out = torch.full((rows, depth), float("nan"), dtype=dtype)
    place = backends.device(backend)
    there = [None if x is None else x.to(place) for x in (q, kv, out, lse)]
    gpu, error = _run(code, arguments.ladder_args(kernel, *there, scale), backend, **device)
    out, lse = there[2:]

    def torch_says(as_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        a, b = q.to(as_type), kv.to(as_type)
        s = scale * (a @ b.T)
        if kernel.stage == "a":
            return s, None
        weights = s if kernel.stage == "b" else s.softmax(-1)
        return weights @ b, s.logsumexp(-1) if kernel.stage == "c" else None

    # Scores stay in fp32, so their peer is fp32 too.
    peer = torch_says(torch.float32 if kernel.stage == "a" else dtype)[0]
    outcome = judge(made, gpu, error, (out, lse), peer, torch_says(torch.float64), (q, kv))
    if gpu.trace is not None and error is None:
        never = never_loaded(gpu.trace, {"q": q, "kv": kv})
        outcome.never = {name: never.get(name, 0) for name in ("q", "kv")}
        outcome.unread = gpu.trace.unread_bytes()
    return outcome


def oracle(
    case: Case, entries: str, window: bool, sink: bool, inverse_rope: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o [T, H, D], lse [T, H]) of a case in ``dtype``.

    fp64 is the truth, the case's own what PyTorch makes of it.
    """
    rows, index = case.keys(entries, window)
    sinks = case.sink.to(dtype) if sink else None
    rows = torch.nan_to_num(rows.to(dtype))[None]
    o, lse = (x[0] for x in reference.sparse(case.q.to(dtype)[None], rows, index[None], sinks, case.scale))
    if inverse_rope:
        cos, sin = case.cos.to(dtype)[:, None], case.sin.to(dtype)[:, None]
        o = torch.cat((o[..., :-64], rope.rotate(o[..., -64:], cos, -sin)), -1)
    return o, lse


def run_fmha(
    kernel_type: type,
    settings: tuple,
    case: Case,
    backend: str = "emulator",
    judge_by: Case | None = None,
    sms: int | None = None,
    **device: Any,
) -> Outcome:
    """Run an `Fmha` (or a variant) on a case. Its own options say which parts of the case it uses.

    Args:
        kernel_type: the class; settings: its arguments in order.
        case: from `ops.fmha.inputs.case`.
        backend: "emulator" or "native"; device: options of `emulator.device`.
        judge_by: the case whose oracle is the truth, where ``case`` carries a fault of the caller's.
        sms: CTAs at once, as `arguments.launch_args` takes it: fewer than tokens, and a CTA takes several.
    """
    made = kernel, code = compiled(kernel_type, settings)
    there = case.to(backends.device(backend))
    o, lse = there.outputs()
    groups = there.groups(kernel.cluster) if kernel.groups else None
    given = there.q, *_parts(kernel, there), o, lse, case.scale
    args = arguments.launch_args(kernel, *given, groups=groups, sms=sms)
    gpu, error = _run(code, args, backend, **device)
    options = kernel.entries, kernel.window, kernel.sink, kernel.inverse_rope
    case = judge_by or case
    peer, _ = oracle(case, *options, dtype=case.q.dtype)
    outcome = judge(made, gpu, error, (o, lse), peer, oracle(case, *options), (case,), score_size(case))
    outcome.guards_written = guards_written(o, lse)
    return outcome


def parts(
    case: Case,
    entries: str,
    window: bool,
    splits: int = 1,
    sharing: tuple = (),
    sms: int | None = None,
    tail: tuple[int, int] = (0, 0),
    **device: Any,
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """Return (o [splits, T, H, D] fp32, lse [splits, T, H], hazards).

    They are parts of the keys, without sink and rotation.

    ``sharing``: further settings of `Fmha` (cluster, groups, raw); raw: lse is [splits, T, H, 2]. ``sms``, ``tail``:
    see `arguments.launch_args`.

    Raises:
        EmulatorError: what stopped the kernel.
    """
    _, gpu, error, o, lse = _run_parts(case, entries, window, (splits, tail), sharing, sms, **device)
    if error is not None:
        raise error
    return o, lse, gpu.hazards


def _run_parts(
    case: Case, entries: str, window: bool, split: tuple, sharing: tuple, sms: int | None, **device: Any
) -> tuple:
    splits, tail = split
    dtype = {v: k for k, v in TYPES.items()}[case.q.dtype]
    fp8 = case.pool_pages is not None and entries != "none", case.span_pages is not None and window
    made = kernel, code = compiled(Fmha, (case.q.shape[2], dtype, entries, window, False, False, True, *fp8, *sharing))
    o, lse = case.outputs(splits, kernel.raw)
    groups = case.groups(kernel.cluster) if kernel.groups else None
    given = case.q, *_parts(kernel, case), o, lse, case.scale, splits
    args = arguments.launch_args(kernel, *given, groups=groups, sms=sms, tail=tail)
    return made, *_run(code, args, "emulator", **device), o, lse


def run_split(
    case: Case,
    entries: str,
    window: bool,
    splits: int,
    combine_type: type = Combine,
    sharing: tuple = (),
    sms: int | None = None,
    tail: tuple[int, int] = (0, 0),
    **device: Any,
) -> Outcome:
    """Run the splits of an attention and combine them with ``combine_type``. With sink and inverse RoPE.

    A case that has pages is read from them. ``sharing``: further settings of `Fmha` (cluster, groups). ``sms``,
    ``tail``: see `arguments.launch_args`.
    """
    made, gpu, error, parts, lses = _run_parts(case, entries, window, (splits, tail), sharing, sms, **device)
    o, lse = case.outputs()
    if error is None:
        hazards = gpu.hazards
        combine, combine_code = compiled(combine_type, (case.q.shape[2], made[0].dtype, True, True))
        given = arguments.combine_args(combine, parts, lses, case.sink, (case.cos, case.sin), o, lse)
        gpu, error = _run(combine_code, given, "emulator", **device)
        gpu.launches[0].result.hazards[:0] = hazards
    peer, _ = oracle(case, entries, window, True, True, dtype=case.q.dtype)
    truth = oracle(case, entries, window, True, True)
    return judge(made, gpu, error, (o, lse), peer, truth, (case,), score_size(case))


def _parts(kernel: Any, case: Case) -> tuple:
    """(entries, window, sink, rope) that a kernel with these options takes."""
    entries = window = None
    if kernel.entries != "none":
        index = case.index if kernel.entries == "index" else None
        first = case.first if kernel.entries == "range" else None
        entries = case.pool_pages if kernel.fp8_entries else case.pool, index, first, case.count
    if kernel.window:
        pool = case.span_pages if kernel.fp8_window else case.span
        window = pool, None, case.window_first, case.window_count
    sink = case.sink if kernel.sink else None
    return entries, window, sink, (case.cos, case.sin) if kernel.inverse_rope else None
