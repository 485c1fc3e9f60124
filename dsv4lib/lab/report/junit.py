"""Write `junit.xml` beside a report. CI systems read it: one suite, one test case a job.

A wrong number (a gate, an assertion, a fault that stayed green) is a `failure`; what ended otherwise (a crash, a
timeout, a full disk) an `error`. `skipped` is what verified nothing, was not started, or is red in a way that
`tests/flaky.toml` excuses; each says so. A check that is missing since the last baseline, and a kernel that had to run
natively, are failures of test cases of their own.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from dsv4lib.lab.records import Record
from dsv4lib.lab.report.scrub import scrub
from dsv4lib.lab.report.summary import Told
from dsv4lib.lab.run.files import write_atomic
from dsv4lib.lab.verdicts import LOOKS, Verdict

FILE = "junit.xml"
FAILURES = (Verdict.GATE_FAILED, Verdict.ASSERTION, Verdict.STAYED_GREEN)
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # characters that XML 1.0 lacks


def write(told: Told, folder: Path, root: Path) -> Path:
    """Write the file to ``folder`` and return its path. Private paths and names are taken out of every text."""
    tree = build(told, functools.partial(scrub, root=root))
    ElementTree.indent(tree)
    text = ElementTree.tostring(tree, encoding="utf-8", xml_declaration=True)
    write_atomic(folder / FILE, text)
    return folder / FILE


def build(told: Told, clean: Callable[[str], str] = str) -> ElementTree.Element:
    """Return the element `testsuites`. ``clean`` passes every text."""

    def tidy(text: object) -> str:
        return NOT_XML.sub("?", clean(str(text)))

    plan = told.manifest
    name = " ".join(filter(None, ("dsv4", plan.set, plan.shard)))
    suite = ElementTree.Element("testsuite", {"name": tidy(name)})
    facts = {
        "run": plan.run_id, "commit": plan.commit or "unknown", "dirty": plan.dirty, "fingerprint": plan.fingerprint,
        "label": plan.label, "exit_code": told.exit_code, **{f"machine.{k}": v for k, v in plan.machine.items()},
    }  # fmt: skip
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in facts.items():
        ElementTree.SubElement(properties, "property", {"name": tidy(key), "value": tidy(value)})
    for record in told.records:
        _case(suite, record, told, tidy)
    for job in told.not_started:
        _add(suite, "dsv4.not_started", job, "skipped", "not started", tidy)
    for key in told.missing:
        _add(suite, "dsv4.missing", key, "failure", f"missing since the last {plan.set}", tidy)
    for job in told.not_native:
        _add(suite, "dsv4.require", job, "failure", "its kernel had to run on a GPU and did not", tidy)
    counts = {kind: str(len(suite.findall(f"testcase/{kind}"))) for kind in ("failure", "error", "skipped")}
    totals = {
        "tests": str(len(suite.findall("testcase"))), "failures": counts["failure"], "errors": counts["error"],
        "skipped": counts["skipped"], "time": f"{sum(record.seconds for record in told.records):.3f}",
    }  # fmt: skip
    suite.attrib |= totals
    if told.records:
        suite.set("timestamp", min(r.started for r in told.records).strftime("%Y-%m-%dT%H:%M:%S"))
    suites = ElementTree.Element("testsuites", {"name": "dsv4", **totals})
    suites.append(suite)
    return suites


def _case(suite: ElementTree.Element, record: Record, told: Told, tidy: Callable[[object], str]) -> None:
    attributes = {"classname": tidy(f"dsv4.{record.stage}"), "name": tidy(record.job), "time": f"{record.seconds:.3f}"}
    case = ElementTree.SubElement(suite, "testcase", attributes)
    label, message = LOOKS[record.verdict].label, f"{LOOKS[record.verdict].label}: {record.reason}"
    if record.verdict is Verdict.PASSED:
        return
    kind = "failure" if record.verdict in FAILURES else "error"
    if record.verdict is Verdict.SKIPPED:
        kind = "skipped"
    elif record.job in told.known:
        entry = told.known[record.job]
        kind, message = "skipped", f"known to be flaky until {entry.expires}, issue {entry.issue}: {message}"
    attributes = {"message": tidy(message)} | ({} if kind == "skipped" else {"type": tidy(label)})
    child = ElementTree.SubElement(case, kind, attributes)
    gates = [f"{g.metric} = {g.value} ({g.op} {g.bound:g}): {g.state}" for g in record.gates]
    child.text = tidy("\n".join(gates)) or None


def _add(
    suite: ElementTree.Element, classname: str, name: str, kind: str, message: str, tidy: Callable[[object], str]
) -> None:
    case = ElementTree.SubElement(suite, "testcase", {"classname": classname, "name": tidy(name), "time": "0"})
    ElementTree.SubElement(case, kind, {"message": tidy(message)})
