"""A judgement for the programs of a pipeline: JUnit XML, workflow commands, a Markdown summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

Document = Mapping[str, Any]
Row = tuple[str, str, str, str, str]  # name, status, baseline, candidate, text

SUITE = "supervise canary"
ELEMENTS = {  # a pipeline fails on failures and on errors, and shows what was skipped
    **dict.fromkeys(("fail", "void"), "failure"),
    "inconclusive": "error",
    **dict.fromkeys(("not measured", "ignored"), "skipped"),
}
LEVELS = {"PASS": "notice", "FAIL": "error", "VOID": "error", "INCONCLUSIVE": "warning"}


def rows(document: Document) -> Iterator[Row]:
    """Yield the loss, then each check, with the number of its pair where there are several."""
    loss = document["loss"]
    yield "loss", loss["status"], "", "", loss["text"]
    several = len(document["pairs"]) > 1
    for check in document["checks"]:
        name = f"{check['name']} ({check['pair'] + 1})" if several else check["name"]
        yield name, check["status"], check["baseline"], check["candidate"], check["text"]


def effect_text(document: Document) -> str:
    """Return effect size and interval as one sentence."""
    effect = document["effect"]
    if effect is None:
        return "no effect: there is nothing to compare yet"
    text = f"{document['metric']} {effect['mean']:+.4g}"
    if effect["basis"] == "insufficient":
        return f"{text}, no interval: too few blocks"
    sure = f"{1.0 - 2.0 * effect['level']:.1%}"
    low, high = effect["low"], effect["high"]
    basis = effect["basis"]
    if basis == "blocks":
        basis = f"blocks of {effect['length']} steps"
    basis = f"from {basis}, {effect['freedom']} degrees of freedom"
    return f"{text}, {sure} interval [{low:+.4g}, {high:+.4g}] ({basis})"


def junit(document: Document) -> bytes:
    """Return JUnit XML: one test case for the loss, and one for each guard and invariant."""
    found = list(rows(document))
    kinds = [ELEMENTS.get(status, "") for _, status, *_ in found]
    counts = {
        "tests": str(len(found)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": SUITE, "time": "0", **counts})
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("verdict", document["verdict"]), ("effect", effect_text(document))):
        ElementTree.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    for (name, status, _, _, text), kind in zip(found, kinds, strict=True):
        about = {"classname": SUITE.replace(" ", "."), "name": _clean(name), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", about)
        if kind:
            given = {"message": _clean(text)} | ({} if kind == "skipped" else {"type": status})
            ElementTree.SubElement(case, kind, given)
    ElementTree.indent(root)
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def annotation(document: Document) -> str:
    """Return a workflow command of GitHub Actions that shows the verdict on the run's page."""
    text = "\n".join([effect_text(document), *document["reasons"]])
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{LEVELS[document['verdict']]} title={SUITE} {document['verdict']}::{escaped}"


def summary(document: Document) -> str:
    """Return Markdown for the summary of a job."""
    lines = [
        f"### {SUITE}: {document['verdict']}",
        "",
        f"{_cell(effect_text(document))}. Margin {document['margin']:g}.",
        "",
        *_table(("pair", "baseline", "candidate", "difference", "batches"), _pairs(document)),
        "",
        *_table(("check", "result", "baseline", "candidate", ""), rows(document)),
        *(line for note in document["notes"] for line in ("", _cell(note))),
    ]
    return "\n".join([*lines, ""])


def _pairs(document: Document) -> Iterator[Row]:
    for number, pair in enumerate(document["pairs"], 1):
        mean = "" if pair["mean"] is None else f"{pair['mean']:+.4g}"
        batches = "the same" if pair["paired"] else "not shown to be the same"
        yield str(number), pair["baseline"], pair["candidate"], mean, batches


def _table(head: Sequence[str], body: Iterator[Row]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in body:
        yield f"| {' | '.join(map(_cell, row))} |"


def _cell(text: str) -> str:
    """Return text for a cell of Markdown: names of runs and files are not ours."""
    clean = _clean(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\|`*_[]#" else c for c in clean)


def _clean(text: str) -> str:
    """Return text without control characters, which XML cannot hold."""
    return "".join(c if c.isprintable() else " " for c in text)
