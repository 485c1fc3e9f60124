"""Serve notebooks. `card` says where a notebook's numbers come from, `verdict` hands them to the runner.

The notebook only reports metrics. Under `./dsv4 run` the runner judges them by the stage's gates; opened by hand, the
same gates are applied for display, so a reader who changes something sees the verdict change.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsv4lib import backends, env
from dsv4lib.errors import ArgumentError, BackendUnavailable
from dsv4lib.lab import stage as contract
from dsv4lib.lab.notebook import glossary, slices
from dsv4lib.lab.notebook.turns import NOT_YET, RIGHT
from dsv4lib.lab.report.scrub import scrub
from dsv4lib.lab.run.files import write_atomic
from dsv4lib.lab.verdicts import LOOKS, GateResult, Verdict, judge, overall

STATE_LOOK = {"passed": Verdict.PASSED, "failed": Verdict.GATE_FAILED, "skipped": Verdict.SKIPPED}
CELL = "padding:3px 12px;border-bottom:1px solid #d5dae0;text-align:left;vertical-align:top"


def card(stage: str, *, backend: str = "auto", seed: int = 0, **facts: Any) -> None:
    """Display where this notebook's numbers come from. Back end, architecture, versions, fingerprint, seed.

    A row links the glossary's words that its prose uses.

    Args:
        stage: name of the stage.
        backend: what the reader chose: auto, native, emulator or reference.
        seed: of every random input.
        facts: more lines for the card, such as ``tile_n=128``.

    Raises:
        UnknownStage: no such stage.
        ArgumentError: unknown back end.
    """
    spec = contract.load(stage)
    lines = {"stage": f"{spec.name} · {spec.title}", "back end": _backend_line(spec, backend)}
    if spec.kernel:
        lines["architecture"] = _runs(spec, backend)
    lines["seed"] = str(seed)
    lines |= {name: str(value) for name, value in facts.items()}
    shown = {name: found for name, found in env.versions().items() if found != "missing"}
    lines["versions"] = ", ".join(f"{name} {found}" for name, found in shown.items())
    lines["source"] = env.source_fingerprint()
    rows = "".join(
        f'<tr><th style="{CELL};white-space:nowrap;color:#5c6670">{html.escape(k)}</th>'
        f'<td style="{CELL}">{html.escape(v)}</td></tr>'
        for k, v in lines.items()
    )
    words = glossary.used(spec.notebook_path) if spec.notebook_path.is_file() else {}
    if words:
        linked = (
            f'<a href="{glossary.LINK}" title="{html.escape(means)}">{html.escape(w)}</a>' for w, means in words.items()
        )
        rows += f'<tr><th style="{CELL};color:#5c6670">glossary</th><td style="{CELL}">{", ".join(linked)}</td></tr>'
        lines["glossary"] = ", ".join(words)
    width = max(map(len, lines))
    text = "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())
    _display(f'<table style="border-collapse:collapse;border-left:4px solid #0072B2">{rows}</table>', text)


def verdict(stage: str, metrics: Mapping[str, Any], skipped: Mapping[str, str] | None = None) -> None:
    """Report this notebook's metrics: the last cell of every notebook.

    Args:
        stage: name of the stage.
        metrics: name -> number (Python, numpy or torch scalar); a bool counts as 0 or 1. NaN and infinities are kept
            and never pass a gate.
        skipped: check -> why it did not run here. A gated metric listed here skips the whole stage.

    Raises:
        UnknownStage: no such stage.
        ArgumentError: a value is no number, a reason is empty, or a gate's metric is neither reported nor skipped.
    """
    spec = contract.load(stage)
    numbers = {str(name): _number(str(name), value) for name, value in metrics.items()}
    root = contract.workspace()
    reasons = {str(name): scrub(str(reason), root).strip() for name, reason in (skipped or {}).items()}
    for name, reason in reasons.items():
        if not reason:
            raise ArgumentError("skipped", name, "a skipped check needs a reason")
        if name in numbers:
            raise ArgumentError("skipped", name, "a check is either measured or skipped, not both")
    only = os.environ.get(slices.ONLY)  # a run of some of the cells
    gates = [gate for gate in spec.gates if not only or gate.metric in only.split(",")]
    missing = [gate.metric for gate in gates if gate.metric not in numbers and gate.metric not in reasons]
    if missing:
        needed = ", ".join(sorted({gate.metric for gate in gates}))
        raise ArgumentError(
            "metrics", sorted(numbers), f"stage {stage} gates on {needed}; missing: {', '.join(missing)}"
        )
    results = judge(gates, numbers, reasons)
    _show_table(results, numbers, reasons)
    folder = os.environ.get("DSV4_RUN_DIR")
    if folder:
        payload = {"stage": spec.name, "metrics": {k: encode(v) for k, v in numbers.items()}, "skipped": reasons}
        write_atomic(Path(folder) / "verdict.json", json.dumps(payload, indent=1, allow_nan=False).encode())


def answer(label: str, right: Any, hint: str = "") -> None:
    """Print whether a reader's answer to an exercise is right.

    Args:
        label: of the question, such as "1".
        right: whether it is. hint: what helps if it is not.
    """
    print(f"{label}: {RIGHT}" if right else f"{label}: {NOT_YET}{': ' if hint else ''}{hint}")


def encode(value: float) -> float | str:
    """Return ``value`` for strict JSON, which has no NaN or infinity. Those become "nan", "inf", "-inf"."""
    return value if math.isfinite(value) else repr(float(value))


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ArgumentError(f"metrics[{name!r}]", value, "a number")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ArgumentError(f"metrics[{name!r}]", value, "a single number") from None


def target(stage: str, backend: str) -> str:
    """Return the back end that a stage's kernels run on: what the runner chose, by hand what ``backend`` means here.

    A run's set may allow fewer architectures than the stage has; by hand a GPU of any of them will do.

    Raises:
        UnknownStage: no such stage. ArgumentError: unknown back end. BackendUnavailable: it cannot run here.
    """
    return _resolved(contract.load(stage), backend)


def _resolved(spec: contract.Stage, chosen: str) -> str:
    return os.environ.get("DSV4_BACKEND") or backends.resolve(chosen, spec.archs, spec.kernel)


def _backend_line(spec: contract.Stage, chosen: str) -> str:
    try:
        resolved = _resolved(spec, chosen)
    except BackendUnavailable as error:
        return f"none: {error}"
    line = resolved if chosen == resolved else f"{resolved} (chosen: {chosen})"
    if spec.kernel and resolved == "reference":
        line += "; a kernel is not verified by the reference, so this stage's verdict will be: skipped"
    return line


def _runs(spec: contract.Stage, chosen: str) -> str:
    """The architecture whose code runs here."""
    try:
        resolved = _resolved(spec, chosen)
    except BackendUnavailable:
        return spec.arch
    return spec.arch if resolved == "reference" else backends.runs(resolved, spec.archs)


def _show_table(results: list[GateResult], metrics: Mapping[str, float], skipped: Mapping[str, str]) -> None:
    gated = {result.metric for result in results}
    rows = [
        (
            STATE_LOOK[r.state],
            r.state,
            r.metric,
            "" if r.value is None else f"{r.value:.6g}",
            f"{r.op} {r.bound:g}",
            r.reason,
        )
        for r in results
    ]
    rows += [
        (Verdict.SKIPPED, "skipped", name, "", "", reason) for name, reason in skipped.items() if name not in gated
    ]
    rows += [(None, "measured", name, f"{value:.6g}", "", "") for name, value in metrics.items() if name not in gated]
    kind, sentence = overall(results)
    look = LOOKS[kind]
    head = "".join(f'<th style="{CELL}">{name}</th>' for name in ("verdict", "metric", "value", "bound", "reason"))
    body = "".join(
        f'<tr><td style="{CELL};white-space:nowrap;{_colours(mark)}">{html.escape(word)}</td>'
        + "".join(f'<td style="{CELL};white-space:nowrap">{html.escape(text)}</td>' for text in rest[:3])
        + f'<td style="{CELL}">{html.escape(rest[3])}</td>'
        + "</tr>"
        for mark, word, *rest in rows
    )
    badge = f'<b style="{_colours(kind)};padding:3px 10px">{look.label}</b>'
    title = f'<p style="margin:4px 0">{badge} {html.escape(sentence)}</p>'
    text = "\n".join(f"{row[1]:<9} {row[2]} {row[3]} {row[4]} {row[5]}".rstrip() for row in rows)
    _display(
        f'{title}<table style="border-collapse:collapse"><tr>{head}</tr>{body}</table>',
        f"{look.label}: {sentence}\n{text}",
    )


def _colours(mark: Verdict | None) -> str:
    return f"color:{LOOKS[mark].ink};background:{LOOKS[mark].paper}" if mark else "color:#5c6670"


def _display(page: str, text: str) -> None:
    from IPython.core.getipython import get_ipython
    from IPython.display import display

    if get_ipython() is None:
        print(text)
    else:
        display({"text/html": page, "text/plain": text}, raw=True)
