"""Report of a drill suite: its class, the rows of its tables, its page and its Markdown."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

from msgspec import Struct, field

from ..core.model.decisions import json_document, plain_json
from ..report.pages import Figure, figure_over_steps, render_template
from .drill_findings import Drill, Finding, Healthy, Monitor, Runs
from .gate_report import escaped, markdown_table, thin_points
from .trial_runs import TrialPolicy

FAULT_HEADER = (
    *("fault", "best monitor", "alarm", "page", "loss leaves", "lead"),
    *("harm", "lost", "with actions", "actions"),
)
MONITORS = ("monitor", "sev", "leads the loss", "with or behind it", "loss stays", "false alarms")
READING = (
    "best monitor: has an alarm in the most runs, then the earliest. alarm, page: steps from "
    "the fault to its first alarm, and to the first page (SEV0, SEV1) of any monitor. loss "
    "leaves: steps until the training loss left the band around the healthy run of its seed. "
    "lead: of the best monitor before that. harm: runs that ended early, not finite, or worse "
    "by more than 1.5 % and two spreads of the loss. lost: nats x steps against the healthy "
    "run, without actions and with them; steps again: made again after a rollback. A range is "
    "over the seeds, one number is their median."
)
LINES = ("healthy", "unattended", "acting")
MARKS = ("injected", "alarm", "departed")
MATRIX = (
    "steps from the fault to the alarm, the median; green: ahead of the loss, amber: with or "
    "behind it, blue: the loss stays in its band; red: how many false alarms in healthy runs"
)
KEY = (
    "of the first seed that was judged. Gray: healthy; red: without actions; green: with actions. "
    "Vertical lines: the fault, amber the first alarm, dotted red the loss leaves its band"
)


class Span(Struct, frozen=True):
    """Values over runs; `ahead`: how many are above 0."""

    runs: int
    ahead: int
    median: float
    least: float
    largest: float


class FaultMonitor(Struct, frozen=True):
    """A monitor with an alarm for a fault: steps until then, and steps before the loss."""

    rule: str
    severity: str
    delay: Span
    lead: Span | None


class FaultResult(Struct, frozen=True, kw_only=True):
    """One fault over its seeds.

    Attributes:
        excluded: why nothing is judged, "" where it is.
        runs: those that were judged; of these `detected` have an alarm, `paged` one of SEV0 or
            SEV1, `harmed` are harmed without actions, and in `acted` the policy acted.
        monitors: those with an alarm in most runs first, then the earliest.
    """

    fault: str
    kind: str
    excluded: str
    runs: int
    detected: int
    paged: int
    harmed: int
    acted: int
    page: Span | None
    departed: Span | None
    lost: Span | None
    lost_acting: Span | None
    repeated: Span | None
    monitors: Sequence[FaultMonitor]
    seeds: Sequence[Finding]


class FaultPlot(Struct, frozen=True, kw_only=True):
    """The losses of one seed of a fault, and the steps that are marked in its plot."""

    seed: int
    injected: int
    departed: int | None
    alarm: int | None
    ends: Sequence[str]
    series: Mapping[str, Sequence[tuple[int, float]]]


class SuiteReport(Struct, frozen=True, kw_only=True):
    """A drill suite; numbers may be infinite or NaN.

    Attributes:
        means: fault -> what it does.
        steps: of a whole run. at: step of the faults.
        acts: whether the policy may act.
        rules: rule -> its digest.
        plots: fault -> one of its seeds.
    """

    schema: Literal["supervise/drill-suite/v1"] = "supervise/drill-suite/v1"
    suite: str
    command: Sequence[str]
    policy: TrialPolicy
    means: Mapping[str, str]
    metric: str
    steps: int
    fault_step: int = field(name="at")
    seeds: Sequence[int]
    acts: bool
    notes: Sequence[str]
    rules: Mapping[str, str]
    healthy: Sequence[Healthy]
    faults: Sequence[FaultResult]
    monitors: Sequence[Monitor]
    plots: Mapping[str, FaultPlot]

    def encode(self) -> str:
        """Return it as JSON, with its summary."""
        return json_document({**plain_json(self), "summary": summarize_suite(self)})


def fault_plot(runs: Runs, finding: Finding, metric: str) -> FaultPlot | None:
    """Return the series of a fault for a plot, None where nothing was judged."""
    if finding.injected is None:
        return None
    arms = {"healthy": runs.control, "unattended": runs.unattended, "acting": runs.acting}
    alarm = finding.detections[0] if finding.detections else None
    return FaultPlot(
        seed=finding.seed,
        injected=finding.injected,
        departed=None if finding.departed is None else finding.injected + finding.departed,
        alarm=None if alarm is None else finding.injected + alarm.delay,
        ends=[text for text in (finding.end, finding.end_acting) if text],
        series={
            name: thin_points(arm.arm.series(metric, 0, arm.arm.end))
            for name, arm in arms.items()
            if arm is not None
        },
    )


def fault_result(drill: Drill, findings: Sequence[Finding]) -> FaultResult:
    """Return what the seeds of a fault have shown; `findings` may be about other faults, too."""
    seeds = [finding for finding in findings if finding.fault == drill.text]
    judged_findings = [finding for finding in seeds if not finding.excluded]
    pages = [finding.page for finding in judged_findings if finding.page is not None]
    return FaultResult(
        fault=drill.text,
        kind=drill.name,
        excluded=""
        if judged_findings
        else next((finding.excluded for finding in seeds), "not tried"),
        runs=len(judged_findings),
        detected=sum(bool(finding.detections) for finding in judged_findings),
        paged=len(pages),
        harmed=sum(finding.harmed for finding in judged_findings),
        acted=sum(bool(finding.acts) for finding in judged_findings),
        page=_span(page.delay for page in pages),
        departed=_span(finding.departed for finding in judged_findings),
        lost=_span(finding.lost for finding in judged_findings),
        lost_acting=_span(finding.lost_acting for finding in judged_findings),
        repeated=_span(finding.repeated for finding in judged_findings if finding.acts),
        monitors=_monitors(judged_findings),
        seeds=seeds,
    )


def _span(values: Iterable[float | None]) -> Span | None:
    """Return the span of values without None; None where there is no other."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    ahead = sum(value > 0 for value in ordered)
    return Span(len(ordered), ahead, median(ordered), ordered[0], ordered[-1])


def _monitors(judged_findings: Sequence[Finding]) -> list[FaultMonitor]:
    delays: dict[str, list[int]] = {}
    leads: dict[str, list[int]] = {}
    severity: dict[str, str] = {}
    for finding in judged_findings:
        for alarm in finding.detections:
            delays.setdefault(alarm.rule, []).append(alarm.delay)
            severity[alarm.rule] = min(severity.get(alarm.rule, alarm.severity), alarm.severity)
            if finding.departed is not None:
                leads.setdefault(alarm.rule, []).append(finding.departed - alarm.delay)
    ranked = sorted(delays, key=lambda r: (-len(delays[r]), median(delays[r]), severity[r], r))
    return [
        FaultMonitor(rule, severity[rule], span, _span(leads.get(rule, ())))
        for rule in ranked
        if (span := _span(delays[rule])) is not None
    ]


def fault_rows(report: SuiteReport) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each fault, under `FAULTS`."""
    for fault in report.faults:
        if fault.excluded:
            yield fault.fault, f"not judged: {fault.excluded}", *([""] * (len(FAULT_HEADER) - 2))
            continue
        best = fault.monitors[0] if fault.monitors else None
        yield (
            fault.fault,
            "none" if best is None else f"{best.severity} {best.rule}",
            "" if best is None else _steps(best.delay, fault.runs),
            _steps(fault.page, fault.runs) or "none",
            _steps(fault.departed, fault.runs) or "never",
            "" if best is None else _lead(best.lead, fault.runs),
            f"{fault.harmed} of {fault.runs}",
            _lost(fault),
            _lost(fault, acting=True) if fault.acted else "",
            actions_text(fault),
        )


def _steps(span: Span | None, runs: int) -> str:
    if span is None:
        return ""
    share = "" if span.runs == runs else f" ({span.runs} of {runs})"
    steps = f"{span.least:g}"
    return f"{steps if span.least == span.largest else f'{steps}-{span.largest:g}'}{share}"


def _lead(span: Span | None, runs: int) -> str:
    """Return the median lead, and in how many runs there is one where that is not all."""
    if span is None:
        return ""
    if span.median <= 0:
        return f"{-span.median:g} behind" if span.median else "with it"
    share = f" ({span.ahead} of {runs} runs)" if span.ahead < runs else ""
    return f"{span.median:g} ahead{share}"


def _lost(fault: FaultResult, *, acting: bool = False) -> str:
    """Return nats x steps, the median; of a run that ended early, how it ended."""
    span = fault.lost_acting if acting else fault.lost
    ends = [e for seed in fault.seeds if (e := seed.end_acting if acting else seed.end)]
    if span is None:
        return ends[0] if ends else ""
    repeated = fault.repeated if acting else None
    again = f", {repeated.median:g} steps again" if repeated and repeated.median else ""
    return f"{format_nats(span)}{again}{f' ({len(ends)} ended early)' if ends else ''}"


def format_nats(span: Span) -> str:
    """Return a median of nats x steps."""
    if math.isinf(span.median):
        return "not finite"
    return f"{span.median:.3g}{' (a run is not finite)' if math.isinf(span.largest) else ''}"


def actions_text(fault: FaultResult) -> str:
    """Return what the policy did about a fault, in the order of the first run with actions."""
    for seed in fault.seeds:
        if seed.acts:
            verbs = ", ".join(dict.fromkeys(verb for verb, _ in seed.acts))
            share = f" ({fault.acted} of {fault.runs} runs)" if fault.acted < fault.runs else ""
            return f"{verbs}{share}"
    return "none"


def monitor_rows(report: SuiteReport) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each monitor, under `MONITORS`."""
    runs = {fault.fault: fault.runs for fault in report.faults}
    for monitor in report.monitors:
        ahead, behind, alone = [], [], []
        for fault, delays in monitor.delays.items():
            leads = monitor.leads.get(fault)
            few = f", {len(delays)} of {runs[fault]}" if len(delays) < runs[fault] else ""
            if not leads:
                alone.append(f"{fault} (after {median(delays):g}{few})")
            elif (lead := median(leads)) > 0:
                ahead.append(f"{fault} ({lead:g} ahead{few})")
            else:
                behind.append(f"{fault} ({f'{-lead:g} behind' if lead else 'with it'}{few})")
        yield (
            monitor.rule,
            monitor.severity,
            ", ".join(ahead),
            ", ".join(behind),
            ", ".join(alone),
            str(monitor.false_alarms or "none"),
        )


def describe_undetected(report: SuiteReport) -> list[str]:
    """Return a sentence for each fault without an alarm in some run, the harmful ones first."""
    rows = []
    for fault in report.faults:
        silent = [s for s in fault.seeds if not s.excluded and not s.detections]
        if not silent:
            continue
        runs = fault.runs
        extent = "no alarm" if len(silent) == runs else f"no alarm in {len(silent)} of {runs} runs"
        harmed = [seed for seed in silent if seed.harmed]
        if harmed:
            ends = [seed.end for seed in harmed if seed.end]
            loss = f"the run {ends[0]}" if ends else f"{_lost(fault)} nats x steps lost"
            text = f"harm, {loss}"
        elif any(seed.lower for seed in silent):
            text = "the loss ends lower, so it does not measure what this fault does"
        elif all(seed.departed is None for seed in silent):
            text = "the loss stays in its band"
        else:
            text = "the loss leaves its band, and ends no worse"
        rows.append((not harmed, f"{fault.fault}: {extent}; {text}"))
    return [text for _, text in sorted(rows, key=lambda pair: pair[0])]


def describe_limits(report: SuiteReport) -> list[str]:
    """Return a sentence for each thing that makes the suite say less than it seems to."""
    texts = list(report.notes)
    finals: dict[float, int] = {}
    for run in report.healthy:
        if run.acts:
            verbs = ", ".join(dict.fromkeys(verb for verb, _ in run.acts))
            texts.append(f"the healthy run of seed {run.seed} was acted on: {verbs}")
        if (other_seed := finals.setdefault(run.final, run.seed)) != run.seed:
            texts.append(
                f"seeds {other_seed} and {run.seed} end with the same loss: {{seed}} is lost"
            )
    for fault in report.faults:
        for seed in fault.seeds:
            if seed.excluded and not fault.excluded:
                text = f"{fault.fault}, seed {seed.seed}: not judged: {seed.excluded}"
                texts.append(text)
        for metric in dict.fromkeys(m for seed in fault.seeds for m, _ in seed.moved):
            text = f"moves {metric}, which this fault leaves alone: another one may be at work"
            texts.append(f"{fault.fault} {text}")
    for monitor in report.monitors:
        if monitor.misattributed:
            text = f"{monitor.rule} has alarms during {', '.join(monitor.misattributed)}"
            texts.append(f"{text}, which change nothing that it measures: not counted above")
    if any(seed.not_repeatable for fault in report.faults for seed in fault.seeds):
        text = "two runs of one seed differ before the fault: the job does not repeat itself, and "
        texts.append(f"{text}what was lost is rough")
    return texts


def summarize_suite(report: SuiteReport) -> str:
    """Return the suite in one sentence."""
    judged_faults = [fault for fault in report.faults if not fault.excluded]
    harmful = [fault for fault in judged_faults if fault.harmed]
    paged = sum(fault.paged == fault.runs for fault in harmful)
    ahead = sum(
        any(m.lead is not None and m.lead.median > 0 for m in fault.monitors)
        for fault in judged_faults
    )
    missed = sum(fault.detected < fault.runs for fault in judged_faults)
    alarms = sum(len(run.alarms) for run in report.healthy)
    runs, steps = len(report.healthy), sum(run.steps for run in report.healthy)
    return (
        f"{len(judged_faults)} faults. Harmful: {len(harmful)}, {paged} of them paged in every "
        f"run. With a monitor ahead of the loss: {ahead}. With a run without an alarm: {missed}. "
        f"False alarms: {alarms} in {runs} healthy runs of {steps} steps in all"
    )


class Cell(NamedTuple):
    """One cell of the matrix; `kind` is its class, `share` the runs that it is of."""

    text: str = ""
    kind: str = ""
    share: str = ""


class Row(NamedTuple):
    """One monitor of the matrix; the first cell is of the healthy runs."""

    rule: str
    cells: list[Cell]


def suite_page(report: SuiteReport) -> str:
    """Return the page: faults, undetected ones, monitors, their matrix, and a plot per fault."""
    policy = report.policy
    faults = [fault.fault for fault in report.faults if not fault.excluded]
    return render_template(
        "suite",
        report=report,
        summary=summarize_suite(report),
        subtitle=(
            f"policy {policy.name} ({policy.digest[:12]}) · {report.steps} steps, the "
            f"fault at {report.fault_step} · seeds {', '.join(map(str, report.seeds))}"
        ),
        reading=READING,
        fault_head=list(FAULT_HEADER),
        faults=list(fault_rows(report)),
        meanings=[f"{fault}: {text}" for fault, text in report.means.items()],
        undetected=list(describe_undetected(report)),
        monitor_head=list(MONITORS),
        monitors=list(monitor_rows(report)),
        matrix_note=MATRIX,
        matrix_head=["", "healthy", *faults],
        matrix=list(_matrix(report, faults)),
        figure_note=KEY,
        figures=list(_figures(report)),
        limits=list(describe_limits(report)),
    )


def _matrix(report: SuiteReport, faults: list[str]) -> Iterator[Row]:
    runs = {fault.fault: fault.runs for fault in report.faults}
    for monitor in report.monitors:
        count = monitor.false_alarms
        healthy = Cell(str(count), "false") if count else Cell()
        yield Row(monitor.rule, [healthy, *(_cell(monitor, f, runs[f]) for f in faults)])


def _cell(monitor: Monitor, fault: str, runs: int) -> Cell:
    delays = monitor.delays.get(fault)
    if not delays:
        return Cell()
    leads = monitor.leads.get(fault)
    kind = "alone" if not leads else "ahead" if median(leads) > 0 else "behind"
    share = "" if len(delays) == runs else f"({len(delays)} of {runs})"
    return Cell(f"{median(delays):g}", kind, share)


def _figures(report: SuiteReport) -> Iterator[Figure]:
    for fault, plot in report.plots.items():
        ends = "".join(f"; a run {text}" for text in plot.ends)
        figure = figure_over_steps(
            f"{fault}, seed {plot.seed}{ends}",
            [(f"line {name}", plot.series.get(name, ())) for name in LINES],
            marks=[(mark, step) for mark in MARKS if (step := getattr(plot, mark)) is not None],
            log=True,
        )
        if figure is not None:
            yield figure


def render_suite(report: SuiteReport) -> str:
    """Return a summary, the tables, undetected faults, and the limits of the suite."""
    lines = [
        *_wrapped(f"{summarize_suite(report)}."),
        "",
        *markdown_table(FAULT_HEADER, fault_rows(report)),
        "",
        *_wrapped(READING),
        "",
        *markdown_table(MONITORS, monitor_rows(report)),
        "",
        *_listed(
            "Undetected faults", describe_undetected(report), "None of those that were tried."
        ),
        *_listed("Limits of this suite", describe_limits(report), ""),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 100, break_on_hyphens=False)


def _listed(title: str, texts: Sequence[str], none: str) -> Iterator[str]:
    if texts or none:
        yield from (f"{title}:", "")
        yield from [f"- {escaped(text)}" for text in texts] or [none]
        yield ""
