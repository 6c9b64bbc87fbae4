"""Report of the gate: its class, and its forms for people and for the programs of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal
from xml.etree import ElementTree

from msgspec import Struct, field

from ..core.model.formats import printable
from ..report.pages import Figure, figure_over_steps, render_template
from .gate_statistics import Effect
from .judgement import Check, Judgement, Look, Pair, Status, Verdict

POINTS = 200  # of a plotted series; each is the mean of the steps around it
Row = tuple[str, str, str, str, str]  # name, status, baseline, candidate, text
SUITE = "supervise canary"
ELEMENTS = {  # a pipeline fails on failures and on errors, and shows what was skipped
    **dict.fromkeys(("fail", "void"), "failure"),
    "inconclusive": "error",
    **dict.fromkeys(("not measured", "ignored"), "skipped"),
}
LEVELS = {"PASS": "notice", "FAIL": "error", "VOID": "error", "INCONCLUSIVE": "warning"}
TONES = {"PASS": "good", "FAIL": "bad", "VOID": "bad", "INCONCLUSIVE": "busy"}


class Steps(Struct, frozen=True):
    """The steps that count; `end` is excluded."""

    start: int = field(name="first")
    end: int


class LossResult(Struct, frozen=True):
    """The status of the loss alone, and a sentence about it."""

    status: Status
    text: str


class PairSeries(Struct, frozen=True):
    """The losses of a pair and their difference, thinned: `(step, mean)`."""

    baseline: Sequence[tuple[int, float]]
    candidate: Sequence[tuple[int, float]]
    difference: Sequence[tuple[int, float]]


class PairResult(Struct, frozen=True):
    """One pair; the mean of its differences is None without a common step."""

    baseline: str
    candidate: str
    mean: float | None
    paired: bool
    compared: float
    missing: float
    series: PairSeries

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """Names, difference and batches, as text."""
        mean = "" if self.mean is None else f"{self.mean:+.4g}"
        batches = "the same" if self.paired else "not shown to be the same"
        return self.baseline, self.candidate, mean, batches


class GateReport(Struct, frozen=True, kw_only=True):
    """A judgement with the runs that it is about; numbers may be infinite or NaN.

    Attributes:
        notes: sentences about how the runs were made.
        effect: of the look that decided, else of the newest one.
        calibration: mean differences of the A/A pairs.
    """

    schema: Literal["supervise/canary/v1"] = "supervise/canary/v1"
    verdict: Verdict
    reasons: Sequence[str]
    notes: Sequence[str]
    metric: str
    margin: float
    alpha: float
    steps: Steps
    loss: LossResult
    effect: Effect | None
    looks: Sequence[Look]
    pairs: Sequence[PairResult]
    calibration: Sequence[float]
    checks: Sequence[Check]


def gate_report(
    judgement: Judgement, pairs: Sequence[Pair], notes: Sequence[str] = ()
) -> GateReport:
    """Return the report of a judgement.

    Args:
        pairs: the runs that were judged.
        notes: sentences about how they were made.
    """
    plan, start, end = judgement.plan, judgement.start, judgement.end
    status, text = judgement.loss
    return GateReport(
        verdict=judgement.verdict,
        reasons=list(judgement.reasons),
        notes=list(notes),
        metric=plan.metric,
        margin=plan.margin,
        alpha=plan.alpha,
        steps=Steps(start, end),
        loss=LossResult(status, text),
        effect=judgement.effect,
        looks=judgement.looks,
        pairs=[
            PairResult(
                baseline=baseline.name,
                candidate=candidate.name,
                mean=fmean(pair.values) if pair.values else None,
                paired=pair.paired,
                compared=pair.compared,
                missing=pair.missing,
                series=PairSeries(
                    thin_points(baseline.series(plan.metric, start, end)),
                    thin_points(candidate.series(plan.metric, start, end)),
                    thin_points(dict(zip(pair.steps, pair.values, strict=True))),
                ),
            )
            for (baseline, candidate), pair in zip(pairs, judgement.pairs, strict=True)
        ],
        calibration=list(judgement.noise),
        checks=judgement.checks,
    )


def thin_points(series: dict[int, float]) -> list[tuple[int, float]]:
    """Return at most `POINTS` points `(step, mean)`."""
    points = list(series.items())
    size = max(1, -(-len(points) // POINTS))
    groups = [points[n : n + size] for n in range(0, len(points), size)]
    return [(group[-1][0], fmean(value for _, value in group)) for group in groups]


def check_rows(report: GateReport) -> Iterator[Row]:
    """Yield the loss, then each check, with the number of its pair where there are several."""
    loss = report.loss
    yield "loss", loss.status, "", "", loss.text
    several = len(report.pairs) > 1
    for check in report.checks:
        name = f"{check.name} ({check.pair + 1})" if several else check.name
        yield name, check.status, check.baseline, check.candidate, check.text


def effect_text(report: GateReport) -> str:
    """Return effect size and interval as one sentence."""
    effect = report.effect
    if effect is None:
        return "no effect: there is nothing to compare yet"
    text = f"{report.metric} {effect.mean:+.4g}"
    if effect.basis == "insufficient":
        return f"{text}, no interval: too few blocks"
    level = f"{1.0 - 2.0 * effect.level:.1%}"
    low, high = effect.low, effect.high
    basis = effect.basis
    if basis == "blocks":
        basis = f"blocks of {effect.length} steps"
    basis = f"from {basis}, {effect.freedom} degrees of freedom"
    return f"{text}, {level} interval [{low:+.4g}, {high:+.4g}] ({basis})"


def render_junit(report: GateReport) -> bytes:
    """Return JUnit XML: one test case for the loss, and one for each guard and invariant."""
    cases = [(name, status, text) for name, status, _, _, text in check_rows(report)]
    about = {"verdict": report.verdict, "effect": effect_text(report)}
    return junit_document(SUITE, cases, ELEMENTS, about)


def junit_document(
    suite: str,
    cases: Sequence[tuple[str, str, str]],
    elements: Mapping[str, str],
    about: Mapping[str, str],
) -> bytes:
    """Return JUnit XML of test cases, each with a name, a status and a text.

    Args:
        elements: status -> the element of a case that did not pass. about: the properties.
    """
    kinds = [elements.get(status, "") for _, status, _ in cases]
    counts = {
        "tests": str(len(cases)),
        "failures": str(kinds.count("failure")),
        "errors": str(kinds.count("error")),
        "skipped": str(kinds.count("skipped")),
    }
    root = ElementTree.Element("testsuites", counts)
    node = ElementTree.SubElement(root, "testsuite", {"name": suite, "time": "0", **counts})
    properties = ElementTree.SubElement(node, "properties")
    for name, value in about.items():
        ElementTree.SubElement(properties, "property", {"name": name, "value": printable(value)})
    for (name, status, text), kind in zip(cases, kinds, strict=True):
        attributes = {"classname": suite.replace(" ", "."), "name": printable(name), "time": "0"}
        case = ElementTree.SubElement(node, "testcase", attributes)
        if kind:
            detail = {"message": printable(text)}
            detail |= {} if kind == "skipped" else {"type": status}
            ElementTree.SubElement(case, kind, detail)
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def github_annotation(report: GateReport) -> str:
    """Return a workflow command of GitHub Actions that shows the verdict on the run's page."""
    text = "\n".join([effect_text(report), *report.reasons])
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return f"::{LEVELS[report.verdict]} title={SUITE} {report.verdict}::{escaped}"


def render_summary(report: GateReport) -> str:
    """Return Markdown for the summary of a job."""
    lines = [
        f"### {SUITE}: {report.verdict}",
        "",
        f"{escaped(effect_text(report))}. Margin {report.margin:g}.",
        "",
        *markdown_table(("pair", "baseline", "candidate", "difference", "batches"), _pairs(report)),
        "",
        *markdown_table(("check", "result", "baseline", "candidate", ""), check_rows(report)),
        *(line for note in report.notes for line in ("", escaped(note))),
    ]
    return "\n".join([*lines, ""])


def _pairs(report: GateReport) -> Iterator[Row]:
    for number, pair in enumerate(report.pairs, 1):
        yield str(number), *pair.cells


def markdown_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in body:
        yield f"| {' | '.join(map(escaped, row))} |"


def escaped(text: str) -> str:
    """Return text for Markdown: names of runs and files are not ours."""
    clean = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{c}" if c in "\\|`*[]#" else c for c in clean)


def gate_page(report: GateReport) -> str:
    """Return the page: verdict, effect, both losses, their difference with margin, all checks."""
    return render_template(
        "gate",
        report=report,
        suite=SUITE,
        tone=TONES[report.verdict],
        effect=effect_text(report),
        figures=[plot for plot in _figures(report) if plot is not None],
        rows=list(check_rows(report)),
    )


def _figures(report: GateReport) -> Iterator[Figure | None]:
    effect = report.effect
    band = None if effect is None else (effect.low, effect.high)
    for number, pair in enumerate(report.pairs, 1):
        series = pair.series
        names = f"{pair.baseline} and {pair.candidate}"
        losses = [("line baseline", series.baseline), ("line", series.candidate)]
        yield figure_over_steps(f"Pair {number}: {names}", losses)
        yield figure_over_steps(
            f"Pair {number}: candidate minus baseline",
            [("line", series.difference)],
            limits=[("limit", 0.0), ("margin", report.margin)],
            band=band,
        )
