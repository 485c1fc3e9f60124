"""Write what a run found: text for readers, JSON for programs, SARIF 2.1.0 for code hosts and editors.

Source: OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0", chapter 3.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from dsv4lib.emulator.gpu.names import shortened
from dsv4lib.emulator.sanitize.findings import Finding, Site, clean
from dsv4lib.emulator.sanitize.replay import Trial, sentences

FORMATS = ("text", "json", "sarif")
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "lint": "note"}
_STYLES = {"error": "bold red", "lint": "yellow", "fix": "green", "source": "bold", "good": "green"}
_SHOWN = 4  # PTX lines of a finding that the text lists


@dataclass
class Report:
    """What there is to say about one target.

    Attributes:
        target: as it was given. findings: grouped. exit_code: of the command.
        ptx: path of the PTX for places without line info, "" if there is none.
        launches, tensors, wrong: of a description: what ran, summaries, what is not as expected (plain data).
        arch, checks: what it ran with.
        refusal: why the target could not be run, "" if it could.
        replay: runs under other schedules, the first run among them; [] if none was wished for.
        options: of the command line beside schedule and seed, for the line that repeats a run.
    """

    target: str
    findings: list[Finding]
    exit_code: int
    arch: str = ""
    checks: str = ""
    ptx: str = ""
    launches: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    wrong: dict[str, dict[str, Any]] = field(default_factory=dict)
    refusal: str = ""
    replay: list[Trial] = field(default_factory=list)
    options: str = ""

    @property
    def errors(self) -> int:
        """Count the findings that are no lints."""
        return sum(one.severity == "error" for one in self.findings)

    def write(self, form: str, output: Path | None, command: str) -> None:
        """Write the report to ``output``, else text to standard error and other formats to standard output."""
        if form == "text":
            if output is None:
                self.print(sys.stderr, command)
            else:
                with output.open("w") as out:
                    self.print(out, command)
            return
        text = json.dumps(_finite(self.as_json() if form == "json" else self.as_sarif()), indent=1, allow_nan=False)
        if output is None:
            print(text)
        else:
            output.write_text(text + "\n")

    def as_json(self) -> dict[str, Any]:
        """Return plain data: findings and what ran."""
        facts = {"target": self.target, "arch": self.arch, "checks": self.checks, "exit_code": self.exit_code}
        found = {"refusal": self.refusal, "findings": [one.as_dict() for one in self.findings]}
        ran = {"launches": self.launches, "tensors": self.tensors, "wrong": self.wrong}
        again = {"replay": [one.as_dict() for one in self.replay]} if self.replay else {}
        return {"format": 1, **facts, **found, **ran, **again}

    # --- text -------------------------------------------------------------------------------------------------------

    def print(self, out: IO[str], command: str) -> None:
        """Print the report for readers; in colour on a terminal only."""
        from rich.console import Console
        from rich.text import Text

        console = Console(file=out, highlight=False, soft_wrap=True, no_color=None if out.isatty() else True)

        def line(*parts: str, style: str = "") -> None:
            console.print(Text("".join(parts), style=_STYLES.get(style, "")))

        if self.refusal:
            line(f"{command}: {clean(self.refusal)}", style="error")
        for one in self.launches:
            line(
                f"{command}: {clean(shortened(one['kernel']))}, grid {_shape(one['grid'])}, block "
                f"{_shape(one['block'])}: {one['instructions']:,} warp-instructions"
            )
        for one in self.findings:
            for style, text in _paragraph(one):
                line(text, style=style)
        for name, facts in self.tensors.items():
            line(f"{command}: {_tensor(name, facts)}")
        for name, facts in self.wrong.items():
            line(
                f"{command}: {name} is not as expected in {facts['wrong']:,} elements, first at {facts['index']}: "
                f"{facts['got']} instead of {facts['want']}, largest error {facts['largest']:.3g}",
                style="error",
            )
        for style, text in sentences(self.replay, command, self.target, self.options) if self.replay else ():
            line(text, style=style)
        lints = len(self.findings) - self.errors
        if self.findings or self.launches:
            verdict = f"{_count(self.errors, 'error')}, {_count(lints, 'lint')}"
            verdict += f", {_count(len(self.wrong), 'tensor')} not as expected" if self.wrong else ""
            line(f"{command}: {verdict}", style="error" if self.errors or self.wrong else "good")

    # --- SARIF ------------------------------------------------------------------------------------------------------

    def as_sarif(self) -> dict[str, Any]:
        """Return a SARIF log with one run."""
        kinds = list(dict.fromkeys(one.kind for one in self.findings))
        first = {kind: next(one for one in self.findings if one.kind == kind) for kind in kinds}
        rules = [
            {
                "id": kind,
                "name": "".join(part.capitalize() for part in kind.split("_")),
                "shortDescription": {"text": first[kind].meaning or kind},
                "help": {"text": first[kind].fix or "see the message"},
                "defaultConfiguration": {"level": _LEVELS[first[kind].severity]},
            }
            for kind in kinds
        ]
        invocation: dict[str, Any] = {"executionSuccessful": not self.refusal, "exitCode": self.exit_code}
        invocation["arguments"] = [self.target]
        if self.refusal:
            invocation["toolExecutionNotifications"] = [{"level": "error", "message": {"text": self.refusal}}]
        driver = {"name": "dsv4-sanitize", "rules": rules, "informationUri": "https://docs.nvidia.com/cuda/ptx"}
        results = [self._result(one, kinds.index(one.kind)) for one in self.findings]
        results += [self._unexpected(name, facts) for name, facts in self.wrong.items()]
        run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
        return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{**run, "columnKind": "unicodeCodePoints"}]}

    def _result(self, one: Finding, rule: int) -> dict[str, Any]:
        text = f"{one.message}\nFix: {one.fix}" if one.fix else one.message
        where = [self._location(one.place, one, "")] if one.place else [{"logicalLocations": [_logical(one)]}]
        mark = f"{one.kind}:{one.kernel}:{one.place.text or one.place.ptx if one.place else ''}"
        out: dict[str, Any] = {
            "ruleId": one.kind,
            "ruleIndex": rule,
            "level": _LEVELS[one.severity],
            "message": {"text": text},
            "locations": where,
            "occurrenceCount": max(one.count, 1),
            "partialFingerprints": {"causeHash/v1": hashlib.sha256(mark.encode()).hexdigest()[:16]},
        }
        if one.against:
            out["relatedLocations"] = [self._location(one.against, one, "the access that it conflicts with")]
        return out

    def _location(self, place: Site, one: Finding, message: str) -> dict[str, Any]:
        file, line = (place.file, place.line) if place.file else (self.ptx, place.ptx_line)
        out: dict[str, Any] = {"logicalLocations": [_logical(one)]}
        text = f"{message}: {place.threads}" if message and place.threads else message or place.threads
        if text:
            out["message"] = {"text": text}
        if file:
            snippet = place.text if place.file else place.ptx
            region = {"startLine": max(line, 1), **({"snippet": {"text": snippet}} if snippet else {})}
            out["physicalLocation"] = {"artifactLocation": {"uri": _uri(file)}, "region": region}
        return out

    def _unexpected(self, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        text = f"{name}{facts['index']} is {facts['got']}, expected {facts['want']}; {facts['wrong']} elements differ"
        place = {"physicalLocation": {"artifactLocation": {"uri": _uri(self.target)}, "region": {"startLine": 1}}}
        return {"ruleId": "unexpected_value", "level": "error", "message": {"text": text}, "locations": [place]}


def _finite(value: Any) -> Any:
    """Numbers that JSON has: NaN and infinities become texts."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _logical(one: Finding) -> dict[str, Any]:
    return {"name": one.title or "host", "fullyQualifiedName": one.kernel or "host", "kind": "function"}


def _uri(file: str) -> str:
    """A path as a URI: absolute with its scheme, relative as it is."""
    return Path(file).as_uri() if file.startswith("/") else quote(file)


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _paragraph(one: Finding) -> list[tuple[str, str]]:
    """A finding as lines, each with its style."""
    times = f"  ({one.count:,} times)" if one.count > 1 else ""
    out = [(one.severity, f"{one.severity.upper()} {one.kind}: {one.meaning or one.message}{times}")]
    verbs = one.verbs if all(one.verbs) else ("", "")
    for label, place in ((verbs[0] or "at", one.place), (verbs[1] or "against", one.against)):
        if place is None:
            continue
        out.append(("source", f"  {label:8}{place.where}" + (f"   {place.text}" if place.text else "")))
        out.append(("", " " * 10 + ", ".join(filter(None, (place.threads, f"PTX line {place.ptx_line}: {place.ptx}")))))
    if one.title:
        out.append(("", f"  kernel  {one.title}"))
    if one.meaning:
        out += [("", ("  seen    " if i == 0 else " " * 10) + text) for i, text in enumerate(one.message.splitlines())]
    if one.fix:
        out.append(("fix", f"  fix     {one.fix}"))
    more = [pair for pair in one.instructions[1:] if any(pair)]
    if more:
        listed = "; ".join(" and ".join(str(line) for line in pair if line) for pair in more[:_SHOWN])
        out.append(("", f"  also    PTX lines {listed}{f'; {len(more) - _SHOWN} more' if len(more) > _SHOWN else ''}"))
    return out


def _tensor(name: str, facts: Mapping[str, Any]) -> str:
    first = ", ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in facts["first"])
    numbers = [f"{key} {facts[key]:.6g}" for key in ("min", "max", "mean") if facts[key] is not None]
    numbers += [f"{facts['nan']:,} NaN"] if facts["nan"] else []
    state = "" if facts["changed"] else " unchanged"
    return clean(f"{name} {facts['dtype']} {_shape(facts['shape'])}{state}: {', '.join(numbers)}; first {first}")


def plain(values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return dataclasses as plain data."""
    from dataclasses import asdict

    return [asdict(value) for value in values]
