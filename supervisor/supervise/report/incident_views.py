"""Views of an incident report: terminal, Markdown, HTML page, figures."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.model.formats import RECORDS, inline, printable, readable_metric
from ..core.model.verdicts import Verdict
from .incident_facts import LOSSES, attempt_starts
from .incident_report import (
    Action,
    Condition,
    FiredRule,
    IncidentReport,
    IncidentSummary,
    Moment,
    SentMessage,
    Series,
    Status,
    Suppression,
    TimelineEntry,
)
from .incident_sentences import format_significant
from .pages import LOG, Figure, Line, Mark, Scale, render_template
from .records import time_of_day

DOCUMENT, SUMMARY, PAGE = "incident.json", "summary.md", "incident.html"
WIDE = 100  # columns of the first line
SPECIAL = re.compile(r"([\\`*_\[\]<>|#])")  # characters of Markdown
GOOD = frozenset((Status.RECOVERED, Status.CLEARED, Status.WITHDRAWN, Status.RELEASED))
BUSY = frozenset((Status.OPEN, Status.ACTING, Status.WATCHING, Status.WAITING))


def render_files(report: IncidentReport) -> dict[str, str]:
    """Return file name -> content: the report and its views."""
    text = report.encode(indent=1)
    files = {DOCUMENT: f"{text}\n", SUMMARY: render_markdown(report), PAGE: render_page(report)}
    return {
        name: content.encode("utf-8", "backslashreplace").decode()
        for name, content in files.items()
    }


# ── terminal ──────────────────────────────────────────────────────────────────────────────────────


def render_card(report: IncidentReport) -> Iterator[str]:
    """Yield the card: a title line, one line per sentence, the loss, and what is next."""
    head = f"{report.id}  {report.severity}  {report.title}"
    yield f"{head:<{WIDE - len(report.status) - 2}}  {report.status}"
    for name, text in report.sentences:
        yield f"{name:7}{text}"
    if report.loss.spark:
        yield f"{'Loss':7}{report.loss.spark}{report.loss.legend}"
    is_down = report.status in (Status.DOWN, Status.STOPPED)  # what is next is done on its host
    host = f"; host: {report.run.host}" if is_down and report.run.host else ""
    yield f"{'Next':7}{report.next.text}{host}; evidence: {_evidence(report)}"
    if not report.final:
        yield f"{'State':7}{report.status_meaning}; {report.run.phase}"


def _evidence(report: IncidentReport) -> str:
    """Return where the evidence is, or that there is none."""
    if report.evidence.bundles:
        return f"{report.evidence.directory}/"
    return "none"


def incident_rows(summaries: Sequence[IncidentSummary]) -> Iterator[str]:
    """Yield one line per incident of a run."""
    for row in summaries:
        yield (
            f"{row.id:8} {row.severity}  step {row.steps[0]}..{row.steps[1]}  "
            f"{time_of_day(row.wall)}  {row.status}: {row.title}"
        )


def render_full(report: IncidentReport) -> Iterator[str]:
    """Yield the card, then headings with the numbers behind it."""
    yield from render_card(report)
    for heading, part in (
        ("conditions (value | limit | past)", _conditions(report.conditions)),
        ("rules that fired", _rules(report)),
        ("suppressed", _suppressed(report.suppressed)),
        ("actions", _actions(report)),
        ("diagnosis", _diagnosis(report.diagnosis)),
        ("messages", _messages(report.messages)),
        ("timeline", _timeline(report.timeline)),
        ("replay", report.replay.commands),
    ):
        lines = list(part)
        if lines:
            yield ""
            yield heading
            yield from (f"  {line}" for line in lines)


def _conditions(conditions: Sequence[Condition]) -> Iterator[str]:
    for condition in conditions:
        yield f"{condition.code:7} {condition.detector}: {condition.text}"
        if condition.measured is not None or condition.nonfinite:
            value, limit, past = _cells(condition)
            yield f"        {value} | limit {limit} | before: {past}"


def _cells(condition: Condition) -> tuple[str, str, str]:
    """Return value, limit and past of a condition, each in a few words."""
    measure = "" if condition.measure == "value" else f"{condition.measure} "
    value = f"{measure}{_value_text(condition.measured)}"
    if condition.nonfinite:
        value = f"{', '.join(condition.nonfinite)} NaN or Inf"
    limit = "none" if condition.limit is None else _value_text(condition.limit)
    past = condition.past
    if past is None:
        return value, limit, "unknown"
    nearest = f"nearest {_value_text(past.measured)} at step {past.step}"
    return value, limit, f"{nearest}, of {past.frames} frames"


def _value_text(value: Any) -> str:
    if isinstance(value, float) and math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "absent" if value is None else format_significant(value)


def _rules(report: IncidentReport) -> Iterator[str]:
    for rule in report.rules:
        runs = f", runs {rule.runbook}" if rule.runbook else ""
        yield f"{rule.rule} ({rule.severity}{runs}), {_time_text(rule)}, rank {rule.rank}"
        location = f"   in {rule.location}" if rule.location else ""
        yield f"  when {rule.when}{location}"


def _suppressed(suppressed: Sequence[Suppression]) -> Iterator[str]:
    for suppression in suppressed:
        yield f"{suppression.text} [{suppression.suppressed_by}], {_time_text(suppression)}"
        for step in suppression.plan:
            refused = f"refused: {step.refused}" if step.refused else ""
            yield f"  {step.verb} {refused or inline(step.args or {})}".rstrip()


def _actions(report: IncidentReport) -> Iterator[str]:
    for action in report.actions:
        yield _command(action)
        yield f"  {outcome_text(action)} [{action.runbook}]"
    for check in report.verification:
        yield f"{check.kind or 'verify'}: {check.text}, {_time_text(check)}"
    if report.cost.budgets:
        yield f"budgets after the last action: {inline(report.cost.budgets, ' ')}"


def _command(action: Action) -> str:
    """Return the verb of an action and its arguments."""
    undo = "undo: " if action.is_undo else ""
    return f"{undo}{action.verb} {inline(action.args)}".rstrip()


def outcome_text(action: Action) -> str:
    """Return what became of an action, with what was observed."""
    if action.ok is None:
        in_doubt = action.outcome_record is not None
        return f"in doubt: {action.outcome}" if in_doubt else "intended; no outcome on record"
    result = {key: value for key, value in action.result.items() if key != "ack_step"}
    ack = action.effect.ack_step
    step = f" at the end of step {ack}" if ack is not None else ""
    duration = f" after {action.took_s:.1f} s" if action.took_s is not None else ""
    outcome = "done" if action.ok else f"FAILED: {action.outcome}"
    records = f" (record {action.record} -> {action.outcome_record})"
    observed = inline(result, counted=True)
    return f"{outcome}{step}{duration}{records}" + (f"; observed {observed}" if observed else "")


QUESTIONS = {  # as `supervise why`, the file and the page ask them; the page has its own copy
    "rejoined": "the loss came back",
    "eval_shifted": "evaluations are above their trend",
    "norms_stayed": "the newest norms are normal",
    "else_happened": "something else happened that moves a loss",
}


def _diagnosis(diagnosis: Verdict | None) -> Iterator[str]:
    if diagnosis is None:
        return
    is_unseen = diagnosis.questions.rejoined.frames == 0
    yield "not classified: no loss was seen since" if is_unseen else diagnosis.kind
    for n, name in enumerate(diagnosis.questions.__struct_fields__, 1):
        answer = getattr(diagnosis.questions, name)
        yield f"{n} {QUESTIONS[name]}: {answer.answer}: {answer.text}"


def _messages(messages: Sequence[SentMessage]) -> Iterator[str]:
    for message in messages:
        time = time_of_day(message.wall)
        yield f"{time} {message.severity} {message.title} (record {message.record})"
        for delivery in message.delivered:
            tries = f" after {delivery.tries} attempts" if (delivery.tries or 1) > 1 else ""
            outcome = "delivered" if delivery.ok else "NOT delivered"
            yield f"  {outcome}{tries}: {delivery.text}"
        if not message.delivered:
            yield "  no delivery on record"


def _timeline(timeline: Sequence[TimelineEntry]) -> Iterator[str]:
    for entry in timeline:
        attempt = f" (attempt {entry.attempt})" if entry.attempt else ""
        kind, _, detail = entry.kind.partition(" ")
        kind = f"{RECORDS.get(kind, kind)} {detail}".rstrip()
        yield (
            f"{time_of_day(entry.wall)} {entry.since_s:+9.3f} s  step {entry.step}{attempt}  "
            f"{kind}: {entry.text}"
        )


def _time_text(moment: Moment | FiredRule) -> str:
    """Return step, attempt, time of day and audit record."""
    attempt = f" of attempt {moment.attempt}" if moment.attempt else ""
    return f"step {moment.step}{attempt} {time_of_day(moment.wall)} (record {moment.record})"


# ── Markdown: for a pull request, an issue, a chat, or a plain pager ──────────────────────────────


def render_markdown(report: IncidentReport) -> str:
    """Return the summary."""
    return "\n".join(_markdown(report)) + "\n"


def _markdown(report: IncidentReport) -> Iterator[str]:
    run, opened = report.run, report.opened
    yield f"# {report.severity} {_plain(report.title)}: {report.status}"
    yield ""
    yield (
        f"{report.id} of run {_plain(run.id)}, step {opened.step}, "
        f"{opened.wall or 'at an unknown time'}"
        + (f", host {_plain(run.host)}" if run.host else "")
    )
    yield ""
    for name, text in (*report.sentences, ("Next", report.next.text)):
        yield f"- **{name}** {_plain(text)}"
    if report.loss.spark:
        yield f"- **Loss** `{report.loss.spark}`"
    yield f"- **Evidence** {_plain(_evidence(report))}"
    yield from _table(
        "Conditions",
        ("Reading", "Detector", "Value", "Limit", "Before"),
        [(c.code, c.detector, *_cells(c)) for c in report.conditions],
    )
    yield from _table(
        "Actions",
        ("Step", "Action", "Outcome"),
        [(str(action.step), action.verb, outcome_text(action)) for action in report.actions],
    )
    for failure in report.failures[:1]:
        yield from ("", "## Error", "", _plain(failure.text))
        if failure.traceback:
            quoted = [f"    {line}" for line in failure.traceback.rstrip().splitlines()]
            yield from ("", *map(printable, quoted))
    yield from ("", "## Look closer", "")
    yield from (f"    {command}" for command in report.replay.commands)


def _table(heading: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", f"## {heading}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    for row in rows:
        yield f"| {' | '.join(_plain(cell) for cell in row)} |"


def _plain(value: str) -> str:
    """Return text of a job in one line, so that it can neither mark up nor link."""
    return SPECIAL.sub(r"\\\1", printable(" ".join(value.split())))


# ── page ──────────────────────────────────────────────────────────────────────────────────────────


def render_page(report: IncidentReport) -> str:
    """Return the report as one HTML file."""
    band = report.observation.band
    plots = signal_figures(report, None if band is None else band.limit)
    undone = any(line.kind == "line left" for plot in plots for line in plot.lines)
    notes = {
        "dashed: undone by a rollback or restart": undone,
        "dotted: below it the loss counts as recovered": any(plot.limits for plot in plots),
    }
    run = report.run
    return render_template(
        "incident",
        report=report,
        questions=QUESTIONS,
        tone="good" if report.status in GOOD else "busy" if report.status in BUSY else "bad",
        subtitle=_subtitle(report),
        sentences=[*report.sentences, ("Next", report.next.text)],
        figures=plots,
        figure_note="; ".join(note for note, present in notes.items() if present),
        actions=[(str(a.step), _command(a), outcome_text(a)) for a in report.actions],
        conditions=[(c.code, c.detector, *_cells(c)) for c in report.conditions],
        commands=[
            f"supervise why --full {shlex.quote(run.directory)} {shlex.quote(report.id)}",
            *report.replay.commands,
        ],
        job=shlex.join(run.command) if run.command else "",
        foot=" · ".join(
            (
                "final" if report.final else f"not final: as of step {report.updated.step}",
                f"policy {run.policy or 'unknown'} ({run.mode})",
                report.schema,
            )
        ),
    )


def _subtitle(report: IncidentReport) -> str:
    run, opened, closed = report.run, report.opened, report.closed
    until = "" if closed is None else f" to {closed.step}"
    parts = (
        f"{report.id} of run {run.id}",
        f"step {opened.step}{until}",
        f"{str(opened.wall or '')[:10]} {time_of_day(opened.wall)[:8]} UTC",
        f"host {run.host}" if run.host else "",
        "" if report.scope.rank is None else f"rank {report.scope.rank}",
    )
    return " · ".join(filter(None, parts))


def signal_figures(report: IncidentReport, limit: float | None = None) -> list[Figure]:
    """Return one figure per signal with a finite value, the loss first.

    x is the order of the frames, as steps repeat after a rollback; the opening and every rollback
    are marked.

    Args:
        limit: below which the loss counts as recovered.
    """
    series = report.series
    if series is None or len(series.steps) < 2:
        return []
    undone = _undone(series, report.actions)
    plots = (_figure(n, series, undone, limit if n in LOSSES else None) for n in series.signals)
    return [plot for plot in plots if plot is not None]


def _figure(
    name: str, series: Series, undone: Sequence[bool], limit: float | None
) -> Figure | None:
    values = series.signals[name]
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    scale = Scale(low, high, low > 0.0 and high > LOG * low)
    count = len(values) - 1
    steps = series.steps
    extent = (
        format_significant(low)
        if format_significant(low) == format_significant(high)
        else f"{format_significant(low)} to {format_significant(high)}"
    )
    return Figure(
        title=f"{readable_metric(name)}{', log scale' if scale.is_log else ''}",
        description=(
            f"{readable_metric(name)} over steps {steps[0]} to {steps[-1]}: "
            f"from {format_significant(low)} to {format_significant(high)}"
        ),
        extent=extent,
        first_step=steps[0],
        last_step=steps[-1],
        lines=list(_lines(values, series, undone, scale, count)),
        name=name,
        marks=list(_marks(series, count, labels=name in LOSSES)),
        limits=[]
        if limit is None or not low <= limit <= high
        else [Mark("limit", scale.percent_of(limit))],
        breaks=[
            _x(n, count) for n, v in enumerate(values) if v is not None and not math.isfinite(v)
        ],
        tall=name in LOSSES,
    )


def _x(index: int, count: int) -> float:
    return 100.0 * index / count


def _marks(series: Series, count: int, *, labels: bool) -> Iterator[Mark]:
    """Yield the marks of the opening and of each way back."""
    index = min(max(series.opened_at - 1, 0), count)
    opened = f"opened, step {series.steps[index]}"
    yield Mark("opened", _x(index, count), opened if labels else "")
    for n in attempt_starts(series):
        label = f"⟲ goes on from step {series.steps[n]}"
        yield Mark("back", _x(n, count), label if labels else "")


def _lines(
    values: Sequence[float | None], series: Series, undone: Sequence[bool], scale: Scale, count: int
) -> Iterator[Line]:
    """Yield a line per attempt, and one for what was undone of it.

    It is broken where a value is not finite; an absent one is bridged.
    """
    points, current, was_undone = list[str](), None, False
    for n, (value, attempt) in enumerate(zip(values, series.attempts, strict=True)):
        broken = value is not None and not math.isfinite(value)
        if attempt != current or broken or undone[n] != was_undone:
            yield from _line(points, undone=was_undone)
            points = points[-1:] if attempt == current and not broken else []
            current, was_undone = attempt, undone[n]
        if value is not None and not broken:
            points.append(f"{_x(n, count):.2f},{scale.percent_of(value):.2f}")
    yield from _line(points, undone=was_undone)


def _undone(series: Series, actions: Sequence[Action]) -> list[bool]:
    """Return of each point whether a later attempt made its step again, or a rollback undid it."""
    undone, least = [], math.inf
    ends = {*attempt_starts(series)}
    gone = [
        (a.attempt, a.effect.step, a.effect.from_step)
        for a in actions
        if a.effect.step is not None and a.effect.from_step is not None
    ]
    for n in range(len(series.steps) - 1, -1, -1):
        step, attempt = series.steps[n], series.attempts[n]
        undone.append(
            step >= least
            or any(attempt <= until and to < step <= since for until, to, since in gone)
        )
        if n in ends:
            least = min(least, step)
    return undone[::-1]


def _line(points: Sequence[str], *, undone: bool) -> Iterator[Line]:
    """Yield a line, of one point too."""
    if points:
        ends = points if len(points) > 1 else [points[0], points[0]]
        yield Line("line left" if undone else "line", " ".join(ends))
