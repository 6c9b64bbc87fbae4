"""Score what a policy would have done against labels of what happened.

A label is an interval of steps of one run with a fault of some kind. It is found when a message of
sufficient severity lies between LEAD rows before its first step and SLACK rows after its last. Each
message counts for one label: the one that contains it, else the nearest. A message outside of all
these intervals is false. Only alarms that people would be told of count: not a rule that flaps, nor
one that joins an open incident and is no news.

A recording is an open loop: it does not respond to actions. After a false action, further ones
within the policy's probation are not counted. After a false stop nothing of the run is scored:
labels behind it are missed.
"""

from __future__ import annotations

import csv
import difflib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..core.model.decisions import SEVERITIES
from ..errors import InputError


class Alarm(Struct):
    """An incident: `change` is opened, raised, joined (by a further rule) or grew.

    Attributes:
        row: frames of the run processed so far.
        notified: whether people would have got a message of it; one event gives one at most.
    """

    step: int
    severity: str
    rule: str
    incident: str
    change: str = msgspec.field(name="what")
    reason: str
    row: int
    notified: bool = False


class ScoredAction(Struct):
    """A runbook that the policy would have run."""

    step: int
    severity: str
    rule: str
    incident: str
    runbook: str
    touches_job: bool
    destructive: bool
    stops: bool  # it ends the run
    row: int


@dataclass(slots=True)
class BacktestOutcome:
    """The outcome of one policy on one run.

    Attributes:
        rows: frames processed. spacing: the usual number of steps between two of them.
        budgets: class -> [most used at once, allowed, intents refused].
        inactive: rules whose metrics the run never had. no_heartbeat: rules on the clock, in a
            recording without heartbeats.
        unjudged: rule -> why it could not fire: its rows are too few, or too far apart.
        pieces: first and last step, and number of frames, of each piece.
        fired: rule -> how often it fired.
    """

    run: str
    policy: str
    rows: int = 0
    spacing: float = 1.0
    probation: int = 0
    pieces: list[tuple[int, int, int]] = field(default_factory=list)
    alarms: list[Alarm] = field(default_factory=list)
    actions: list[ScoredAction] = field(default_factory=list)
    firings: dict[str, int] = field(default_factory=dict)
    budgets: dict[str, list[int]] = field(default_factory=dict)
    inactive: list[str] = field(default_factory=list)
    no_heartbeat: list[str] = field(default_factory=list)
    unjudged: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


LEAD = 5  # logged rows before a label begins; the gradient norm of BLOOM-176B led by 4 steps
SLACK = 20  # logged rows after it ends; project default
LEVEL = 0.95  # of the interval
FAILURES = (*SEVERITIES, "action", "missed")  # what a caller may want to fail on

# Kind of label -> the least severity that counts as found. SEV2 for all others.
WANTED: Mapping[str, str] = {"divergence": "SEV1", "nan": "SEV1"}
# Kinds of labels that mark healthy behaviour: an alarm there is false.
HEALTHY = ("benign_hard_data", "probable_restart_first_iteration", "log_gap")
HEALTHY_PREFIX = "slow_iteration"

SCORE_CAVEAT = (
    "Open loop: a recording does not respond to actions. What follows the first would-be action of"
    " an incident might not have happened."
)


@dataclass(frozen=True, slots=True)
class Label:
    """A labelled interval of steps of one run."""

    run: str
    start: int
    end: int
    kind: str

    @property
    def expected_kind(self) -> str:
        """The least severity that counts as found."""
        return WANTED.get(self.kind, "SEV2")

    @property
    def marks_fault(self) -> bool:
        """Whether it marks a fault, not healthy behaviour that looks like one."""
        return self.kind not in HEALTHY and not self.kind.startswith(HEALTHY_PREFIX)


def read_labels(path: Path) -> list[Label]:
    """Read a CSV with the columns run, step_start, step_end, kind.

    Raises:
        InputError: it cannot be read, or lacks a column or a cell, or a step is no whole number.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file)
            lacking = {"run", "step_start", "step_end", "kind"} - set(table.fieldnames or ())
            if lacking:
                raise InputError(
                    f"{path}:1: labels need the columns {', '.join(sorted(lacking))}",
                    hint=f"separated by commas; it has: {', '.join(table.fieldnames or ['none'])}",
                )
            return [_label(row, f"{path}:{table.line_num}") for row in table]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: is no CSV: {error}") from error


def _label(row: Mapping[str, str | None], location: str) -> Label:
    def step(column: str) -> int:
        cell = row[column]
        if not cell:
            raise InputError(f"{location}: {column} is missing")
        try:
            number = float(cell)
            if number == int(number):
                return int(number)
        except (ValueError, OverflowError):  # a word; what is not finite
            pass
        raise InputError(f"{location}: {column} {cell!r} is not a whole number")

    start, end = step("step_start"), step("step_end")
    if start > end:
        raise InputError(f"{location}: ends before it starts: step_start {start}, step_end {end}")
    for column in ("run", "kind"):
        if not row[column]:
            raise InputError(f"{location}: {column} is missing")
    return Label(row["run"] or "", start, end, row["kind"] or "")


def unknown_runs(labels: Iterable[Label], runs: Collection[str]) -> list[str]:
    """Return the runs that labels name but `runs` lacks, with the nearest known name."""
    wrong = dict.fromkeys(label.run for label in labels if label.run not in runs)
    near = {run: difflib.get_close_matches(run, runs, n=1) for run in wrong}
    return [
        f"{run!r} (did you mean {near[run][0]!r}?)" if near[run] else repr(run) for run in wrong
    ]


class Missed(Struct, frozen=True):
    """A label without an alarm as severe as it asks for; `best`: the most severe one."""

    run: str
    kind: str
    step: int
    best: str | None


class Detection(Struct, frozen=True):
    """A label, and the step and the rule of the alarm for it."""

    run: str
    kind: str
    step: int
    alarm_step: int = msgspec.field(name="at")
    rule: str


class FalseAlarm(Struct, frozen=True):
    """A message outside of labels."""

    run: str
    step: int
    severity: str
    rule: str


class ScoreCounts(Struct):
    """Of one policy over some runs.

    Attributes:
        kinds: kind -> [found, labelled].
        rows: judged rows, the base of the rate of false actions.
        false_pages: messages of SEV0 or SEV1 outside of labels. false_notices: of SEV2.
        destructive: would-be actions that cannot be undone, anywhere.
        false: messages outside of labels.
    """

    policy: str
    kinds: dict[str, list[int]] = {}
    rows: int = 0
    runs: int = 0
    false_actions: int = 0
    false_pages: int = 0
    false_notices: int = 0
    actions: int = 0
    destructive: int = 0
    refused: int = 0
    missed: list[Missed] = []
    detections: list[Detection] = msgspec.field(name="found", default_factory=list)
    false: list[FalseAlarm] = []


class Delay(Struct, frozen=True):
    """The delays from the start of a label to its detection, in steps; None of no detection."""

    median: float | None
    p90: float | None


class ActionRate(Struct, frozen=True):
    """The false actions per 10 000 rows, and the interval of the rate; None of no rows."""

    per_10k: float | None
    low: float | None
    high: float | None


class ScoreLine(ScoreCounts, kw_only=True):
    """A score as its JSON has it."""

    delay: Delay
    false_action_rate: ActionRate


class Score(ScoreCounts):
    """The score while it is counted.

    Attributes:
        delays: steps from the start of a label to the alarm that found it; negative is a lead.
    """

    delays: list[int] = []

    def rate(self, count: int) -> tuple[float, float, float]:
        """Return `count` per 10 000 rows and its exact 95 % interval."""
        low, high = poisson_interval(count)
        share = 10_000 / self.rows if self.rows else math.nan
        return count * share, low * share, high * share

    def line(self) -> ScoreLine:
        """Return the score with its rates."""
        rates = [None if rate != rate else round(rate, 4) for rate in self.rate(self.false_actions)]
        return ScoreLine(
            **{name: getattr(self, name) for name in ScoreCounts.__struct_fields__},
            delay=Delay(quantile(self.delays, 0.5), quantile(self.delays, 0.9)),
            false_action_rate=ActionRate(*rates),
        )


def score_alarms(
    policy: str, outcomes: Iterable[BacktestOutcome], labels: Sequence[Label]
) -> Score:
    """Score the outcomes of one policy."""
    by_run: dict[str, list[Label]] = {}
    for label in labels:
        if label.marks_fault:
            by_run.setdefault(label.run, []).append(label)
    total = Score(policy)
    for outcome in outcomes:
        _score(total, outcome, by_run.get(outcome.run, []))
    return total


def list_failures(total: Score, conditions: Iterable[str]) -> dict[str, str]:
    """Return which of the wanted FAILURES have happened, each with a sentence."""
    failed: dict[str, str] = {}
    for condition in conditions:
        if condition == "action":
            number, text = total.false_actions, "actions on the job"
        elif condition == "missed":
            number, text = len(total.missed), "labels are missed"
        else:
            enough = SEVERITIES[: SEVERITIES.index(condition) + 1]
            false = [alarm for alarm in total.false if alarm.severity in enough]
            number, text = len(false), "messages"
            if false:
                text += f", the first by {false[0].rule} at step {false[0].step} of {false[0].run}"
        if number:
            failed[condition] = f"{number} {text}"
    return failed


def _score(total: Score, outcome: BacktestOutcome, labels: Sequence[Label]) -> None:
    total.runs += 1
    inside = [label for label in labels if _covered(outcome, label)]
    lead, slack = LEAD * outcome.spacing, SLACK * outcome.spacing
    owners = {id(event): _owner(event.step, inside, lead, slack) for event in outcome.alarms}
    owners |= {id(event): _owner(event.step, inside, lead, slack) for event in outcome.actions}
    wrong = [act for act in outcome.actions if act.touches_job and owners[id(act)] is None]
    end = min((act.row for act in wrong if act.stops), default=outcome.rows)
    _count(total, outcome, end)
    owned: dict[Label, list[Alarm]] = {label: [] for label in inside}
    for alarm in outcome.alarms:
        owner = owners[id(alarm)]
        if alarm.row > end:
            break
        if owner is not None:
            if alarm.notified:
                owned[owner].append(alarm)
        elif alarm.notified:
            page = alarm.severity != "SEV2"
            total.false_pages += page
            total.false_notices += not page
            alarm_line = FalseAlarm(outcome.run, alarm.step, alarm.severity, alarm.rule)
            total.false.append(alarm_line)
    for label, alarms in owned.items():
        _find(total, label, alarms)
    total.rows += end
    clear = 0
    for act in wrong:
        if clear <= act.row <= end:
            total.false_actions += 1
            clear = act.row + outcome.probation


def _count(total: Score, outcome: BacktestOutcome, end: int) -> None:
    acts = [act for act in outcome.actions if act.row <= end]
    total.actions += sum(act.touches_job for act in acts)
    total.destructive += sum(act.destructive for act in acts)
    total.refused += sum(refused for _, _, refused in outcome.budgets.values())


def _find(total: Score, label: Label, alarms: Sequence[Alarm]) -> None:
    enough = SEVERITIES.index(label.expected_kind)
    earliest = next((a for a in alarms if SEVERITIES.index(a.severity) <= enough), None)
    entry = total.kinds.setdefault(label.kind, [0, 0])
    entry[0] += earliest is not None
    entry[1] += 1
    if earliest is None:
        best = min((a.severity for a in alarms), default=None)
        total.missed.append(Missed(label.run, label.kind, label.start, best))
    else:
        total.delays.append(earliest.step - label.start)
        detection = Detection(label.run, label.kind, label.start, earliest.step, earliest.rule)
        total.detections.append(detection)


def _covered(outcome: BacktestOutcome, label: Label) -> bool:
    """Whether the recording holds any of the label's steps."""
    return any(start <= label.end and label.start <= end for start, end, _ in outcome.pieces)


def _owner(step: int, labels: Sequence[Label], lead: float, slack: float) -> Label | None:
    near = [label for label in labels if label.start - lead <= step <= label.end + slack]
    return min(near, key=lambda label: max(label.start - step, step - label.end, 0), default=None)


# ── numbers ───────────────────────────────────────────────────────────────────────────────────────


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of them do not exceed, None of nothing."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def poisson_interval(count: int) -> tuple[float, float]:
    """Return the two-sided interval of a Poisson mean from one count of it.

    Source: Byar's approximation (Breslow and Day, 1987, section 2.3); at most 0.6 % or
    0.015 off the exact bounds.
    """
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2.0)
    above = count + 1
    high = above * (1.0 - 1.0 / (9.0 * above) + z / (3.0 * math.sqrt(above))) ** 3
    if count == 0:
        return 0.0, high
    return count * (1.0 - 1.0 / (9.0 * count) - z / (3.0 * math.sqrt(count))) ** 3, high


MOST = 40  # lines of a list in the text report; JSON has all
OutcomesByRun = Sequence[Sequence[BacktestOutcome]]  # per run, one outcome per policy


class OutcomeLine(Struct, kw_only=True):
    """The outcome of one policy on one run as its JSON has it.

    Attributes:
        incidents: those that rules joined, too. score: where there are labels.
        rivals: the outcomes of further policies, by policy.
    """

    run: str
    policy: str
    incidents: Sequence[Alarm]
    actions: Sequence[ScoredAction]
    rows: int
    steps: Sequence[tuple[int, int]]
    firings: Mapping[str, int] = msgspec.field(name="fired")
    budgets: Mapping[str, Sequence[int]]
    inactive: Sequence[str]
    no_heartbeat: Sequence[str]
    unjudged: Mapping[str, str]
    notes: Sequence[str]
    score: ScoreLine | UnsetType = UNSET
    rivals: Mapping[str, OutcomeLine] | UnsetType = msgspec.field(name="against", default=UNSET)
    only_here: Sequence[Alarm] | UnsetType = UNSET
    not_here: Sequence[Alarm] | UnsetType = UNSET


def format_outcomes(
    results: OutcomesByRun, labels: Sequence[Label] | None
) -> Iterator[OutcomeLine]:
    """Yield one line per run.

    The outcomes of further policies have the alarms that only one of the two raised.
    """
    for primary, *rivals in results:
        line = outcome_line(primary, labels)
        if rivals:
            line.rivals = {rival.policy: _rival_line(rival, primary, labels) for rival in rivals}
        yield line


def _rival_line(
    rival: BacktestOutcome, primary: BacktestOutcome, labels: Sequence[Label] | None
) -> OutcomeLine:
    line = outcome_line(rival, labels)
    line.only_here, line.not_here = (
        unmatched_alarms(rival, primary),
        unmatched_alarms(primary, rival),
    )
    return line


def outcome_line(outcome: BacktestOutcome, labels: Sequence[Label] | None = None) -> OutcomeLine:
    """Return an outcome, with labels with its score."""
    return OutcomeLine(
        run=outcome.run,
        policy=outcome.policy,
        incidents=outcome.alarms,
        actions=outcome.actions,
        rows=outcome.rows,
        steps=[(start, end) for start, end, _ in outcome.pieces],
        firings=outcome.firings,
        budgets=outcome.budgets,
        inactive=outcome.inactive,
        no_heartbeat=outcome.no_heartbeat,
        unjudged=outcome.unjudged,
        notes=outcome.notes,
        score=UNSET if labels is None else score_alarms(outcome.policy, [outcome], labels).line(),
    )


def score_policies(results: OutcomesByRun, labels: Sequence[Label] | None) -> list[Score]:
    """Return the score of each policy over all runs."""
    columns = [list(outcomes) for outcomes in zip(*results, strict=True)]
    return [score_alarms(outcomes[0].policy, outcomes, labels or ()) for outcomes in columns]


def unmatched_alarms(outcome: BacktestOutcome, right: BacktestOutcome) -> list[Alarm]:
    """Return the incidents of `left` with none as severe within SLACK rows in `right`."""
    near = SLACK * outcome.spacing
    return [
        alarm
        for alarm in outcome.alarms
        if alarm.change in ("opened", "raised")
        and not any(
            abs(rival.step - alarm.step) <= near
            and SEVERITIES.index(rival.severity) <= SEVERITIES.index(alarm.severity)
            for rival in right.alarms
        )
    ]


# ── text ──────────────────────────────────────────────────────────────────────────────────────────


def score_lines(results: OutcomesByRun, labels: Sequence[Label] | None) -> Iterator[str]:
    """Yield the lines of a report."""
    totals = score_policies(results, labels)
    rows = sum(outcomes[0].rows for outcomes in results)
    runs = f"{len(results)} run" + ("s" if len(results) != 1 else "")
    yield f"{totals[0].policy} on {runs}, {rows} rows, in shadow"
    yield from _limited(line for outcomes in results for line in _incident_lines(outcomes[0]))
    quiet = sum(not outcomes[0].alarms for outcomes in results)
    yield f"  {quiet} without an incident"
    notes = dict.fromkeys(note for outcomes in results for note in outcomes[0].notes)
    yield from _limited(f"  note: {note}" for note in notes)
    clock = dict.fromkeys(rule for outcomes in results for rule in outcomes[0].no_heartbeat)
    if clock:
        yield f"  not evaluated, a recording has no heartbeats: {', '.join(clock)}"
    never = set.intersection(*(set(outcomes[0].inactive) for outcomes in results))
    if never:
        yield f"  not evaluated, no recording has their metrics: {', '.join(sorted(never))}"
        yield "    if the column has another name: --alias COLUMN=METRIC"
    yield from _unjudged([outcomes[0] for outcomes in results])
    yield ""
    yield from format_score_table(totals, labelled=labels is not None)
    yield ""
    used = _budget_usage([outcomes[0] for outcomes in results])
    yield f"  highest budget use in one run: {used or 'none'}"
    if labels is not None:
        yield from _limited(
            f"  missed: {m.run} {m.kind} at {m.step} (best: {m.best or 'no alarm'})"
            for m in totals[0].missed
        )
    for i, rival in enumerate(totals[1:], 1):
        yield ""
        differences = [
            f"  {outcome.run} {alarm.step} {alarm.severity} {alarm.rule}: {outcome.policy} only"
            for outcomes in results
            for outcome, right in itertools.permutations((outcomes[0], outcomes[i]))
            for alarm in unmatched_alarms(outcome, right)
        ]
        pair = f"{totals[0].policy} and {rival.policy}"
        yield f"{pair} differ:" if differences else f"{pair} raise the same alarms"
        yield from _limited(iter(differences))
    yield ""
    yield SCORE_CAVEAT


def _unjudged(outcomes: Sequence[BacktestOutcome]) -> Iterator[str]:
    """Yield the rules that no run could judge though it has their metrics, by the reason."""
    rules: dict[str, list[str]] = {}
    for rule, reason in {
        r: reason for outcome in outcomes for r, reason in outcome.unjudged.items()
    }.items():
        if all(rule in outcome.unjudged or rule in outcome.inactive for outcome in outcomes):
            rules.setdefault(reason, []).append(rule)
    if rules:
        yield "  not judged, rows are too few or too far apart:"
        yield from _limited(f"    {', '.join(names)}: {reason}" for reason, names in rules.items())


def _budget_usage(outcomes: Sequence[BacktestOutcome]) -> str:
    maxima: dict[str, tuple[int, int]] = {}
    for outcome in outcomes:
        for kind, (used, allowed, _) in outcome.budgets.items():
            maxima[kind] = max(maxima.get(kind, (0, allowed)), (used, allowed))
    return ", ".join(f"{kind} {used}/{allowed}" for kind, (used, allowed) in sorted(maxima.items()))


def _incident_lines(outcome: BacktestOutcome) -> Iterator[str]:
    would: dict[str, list[str]] = {}
    for act in outcome.actions:
        would.setdefault(act.incident, []).append(act.runbook)
    raised: dict[str, list[Alarm]] = {}
    for alarm in outcome.alarms:
        if alarm.change in ("opened", "raised"):
            raised.setdefault(alarm.incident, []).append(alarm)
    for incident, alarms in raised.items():
        steps = ", ".join(f"{a.severity} {a.rule} at {a.step}" for a in alarms)
        runs = f"; would have run {', '.join(would[incident])}" if incident in would else ""
        yield f"  {outcome.run} {incident}: {steps}{runs}"


def _limited(texts: Iterator[str]) -> Iterator[str]:
    hidden = 0
    for number, text in enumerate(texts):
        if number < MOST:
            yield text
        else:
            hidden += 1
    if hidden:
        yield f"  … {hidden} more: --json prints all"


def format_score_table(totals: Sequence[Score], *, labelled: bool) -> list[str]:
    """Return a padded Markdown table with a row per policy.

    Without labels no alarm is known to be false: the columns count all of them.
    """
    kinds = list(dict.fromkeys(kind for total in totals for kind in total.kinds))
    false = "false " if labelled else ""
    head = ["policy", *kinds]
    if labelled:
        head.append("delay median / p90")
    head += [f"{false}actions per 10k [95 %]", f"{false}SEV0/1", f"{false}SEV2", "destructive"]
    head.append("over budget")
    rows = [head, ["---"] * len(head)]
    rows += [_row(total, kinds, labelled) for total in totals]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    rows[1] = ["-" * width for width in widths]
    return [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]


def _row(total: Score, kinds: Sequence[str], labelled: bool) -> list[str]:
    cells = [total.policy]
    cells += [
        "/".join(map(str, total.kinds[kind])) if kind in total.kinds else "–" for kind in kinds
    ]
    if labelled:
        middle, late = quantile(total.delays, 0.5), quantile(total.delays, 0.9)
        cells.append("–" if middle is None else f"{middle:g} / {late:g}")
    per, low, high = total.rate(total.false_actions)
    rate = f"{per:.2f} [{low:.2f}, {high:.2f}]" if total.rows else "–"
    cells.append(f"{total.false_actions}: {rate}")
    return [
        *cells,
        *map(str, (total.false_pages, total.false_notices, total.destructive, total.refused)),
    ]
