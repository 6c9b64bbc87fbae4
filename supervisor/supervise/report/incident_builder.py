"""The report of an incident, from the records of its audit log.

The audit log is the truth, the journal has the series: the same records and frames give the same
report, while the incident is open, when it closes, and years later.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from msgspec.structs import replace

from ..core import notices, reasons
from ..core.advice import STOP_JOB
from ..core.frames import FORWARD, STATISTICS, BrokenForward, Row, find_broken_forward
from ..core.model import decisions, formats
from ..core.model.failure import EXIT, FAILURE_NOTICE, Failure
from ..core.model.interfaces import render_steps
from ..core.model.payload import RateArgs
from ..core.model.policy import Policy, Rule
from ..core.model.verdicts import SlowStep, SpikeClass, Verdict, slow_duration
from ..core.rank_monitor import first_breach
from ..core.rule_scope import INPUTS, MACHINE
from ..core.standstill import name_ranks
from ..store.recorder import INCOMPLETE
from . import incident_facts as facts
from . import incident_sentences as sentences
from .incident_facts import LOSSES, Tape, Tapes, find_moves, loss_metric_of, sparkline
from .incident_report import (
    MEANINGS,
    VERSION,
    Action,
    ActionEffect,
    Approval,
    Candidate,
    Cause,
    Closing,
    Condition,
    Cost,
    Evidence,
    FiredRule,
    IncidentReport,
    IncidentSummary,
    Loss,
    Move,
    NextStep,
    Observation,
    Onset,
    Proof,
    Replay,
    Response,
    RunOrigin,
    Scope,
    Series,
    Status,
)
from .records import (
    DONE,
    DOUBT,
    IncidentIndex,
    Record,
    RunStart,
    action_outcomes,
    is_closing,
    launch_failures,
    notices_of_kind,
)

D = TypeVar("D", bound=decisions.Decision)
Policies = Mapping[str, Policy]

MAX_FAILURES = 8
WAITING = "dataloader_stall_frac"
MAX_TITLE = 90  # characters
UPDATE = "update_norm"
VANISHED = 1e-3  # of a learning rate before, by which the updates became 0; project default
SOON = 5  # steps until a rule about what began at the onset fires; project default


def build_incident_report(
    records: Sequence[Record],
    incident: str,
    run: RunOrigin,
    policies: Policies,
    tapes: Tapes | None = None,
    index: IncidentIndex | None = None,
) -> IncidentReport:
    """Return the report of one incident.

    Args:
        records: of the run, oldest first; those before the incident name its cause.
        policies: those of the run that can be read, by digest.
        tapes: the frames around it; None where they cannot be read.
        index: of the records, where there is one.
    """
    index = IncidentIndex(records) if index is None else index
    case = _Case(records, index, incident, run, policies, tapes)
    opened, status, actions = case.opened, case.status, case.actions
    cause, trigger = case.cause()
    loss = loss_metric_of(case.series)
    directory = shlex.quote(run.directory)
    return IncidentReport(
        schema=VERSION,
        id=incident,
        severity=_severity(case.incident),
        title=case.title(trigger),
        status=status,
        status_meaning=MEANINGS[status],
        final=case.closed is not None,
        run=replace(run, policy_digest=case.digest, mode=case.mode),
        opened=facts.moment_of_record(case.opening),
        breach_step=case.breach,
        closed=case.closing(),
        updated=facts.moment_of_record(case.incident[-1]),
        rules=case.rules,
        scope=case.scope(),
        observation=case.observation(),
        cause=cause,
        response=Response(text=case.response(), acted=case.acted),
        cost=case.cost(),
        proof=case.proof(),
        next=case.next_step(),
        loss=Loss(metric=loss, spark=_spark(case.series, loss)),
        series=case.series,
        conditions=case.conditions,
        diagnosis=case.diagnosis,
        actions=actions,
        approval=case.approval,
        verification=case.verification,
        suppressed=case.suppressed,
        failures=list(map(case.with_command, case.failures[:MAX_FAILURES])),
        messages=case.messages,
        timeline=facts.build_timeline(case.incident, case.opening),
        evidence=Evidence(
            directory=f"{run.directory}/incidents/{incident}",
            bundles=facts.evidence_bundles(actions),
        ),
        replay=_replay(opened, directory),
    )


def _replay(opened: decisions.IncidentOpened, directory: str) -> Replay:
    why_not = f"supervise why-not {directory} --rule {opened.rule} --step {opened.step}"
    return Replay(f"supervise replay {directory}", why_not if opened.rule else "")


class _Case:
    """All facts of an incident that its sentences are made from."""

    def __init__(
        self,
        records: Sequence[Record],
        index: IncidentIndex,
        incident: str,
        run: RunOrigin,
        policies: Policies,
        tapes: Tapes | None,
    ) -> None:
        self.records = records
        self.incident = index.records_of(incident)
        self.opening, self.opened = _opening(self.incident)
        self.closed = _newest(self.incident, decisions.IncidentClosed)
        self.held = _newest(self.incident, decisions.IncidentHeld)
        self.end = "" if self.closed is None else notices.describe_end(self.closed)
        self.mode, self.digest, self.rule_of = _policy_at(
            index.history, self.opening.seq, run.mode, policies
        )
        self.policy = policies.get(self.digest)
        self.status = facts.status_of(self.incident)
        self.breach = self.opened.breach_step
        self.tape = None if tapes is None else tapes.select(_rank(self.incident))
        metrics = facts.metrics_in_breach(self.incident)
        self.series = None if self.tape is None else self.tape.series(metrics)
        self.rules = facts.fired_rules(self.incident, self.rule_of)
        self.conditions = facts.measured_conditions(self.incident, self.series, self.breach)
        signals = [] if self.series is None else list(self.series.signals)
        self.moves = find_moves(self.tape, signals, self.breach, self.opened.highest_rate or 0.0)
        self.is_of_machine = facts.is_about_machine(self.conditions, self.policy, self.opened.rule)
        own = [move for move in self.moves if self.is_of_machine == (move.metric in MACHINE)]
        self.onset = facts.find_onset(own, self.breach, self.opened.slow_step)
        self.conditions = facts.fill_values_and_baselines(self.conditions, self.tape, self.moves)
        self.wrong_inputs = _wrong_inputs(self.rules, self.conditions, self.onset)
        self.actions = facts.intended_actions(self.incident)
        self.verification = facts.verification_checks(self.incident)
        self.approval = facts.newest_approval(self.incident)
        self.suppressed = facts.suppressed_actions(self.incident)
        self.messages = facts.sent_messages(records, self.incident)
        self.message_texts = [
            r.decision.message for r in self.incident if isinstance(r.decision, decisions.Notified)
        ]
        self.skipped = facts.skipped_steps(records, self.breach, self.incident, self.tape)
        self.failures = _failures(index.history, self.incident)
        self.failure = self.failures[0] if self.failures else None
        self.diagnosis = _diagnosis(self.incident)
        effects = (a.effect for a in self.actions if self.opened.rule)  # a job that ended has none
        self.standstill = next((e for e in effects if e.standstill), ActionEffect())
        self.acted = True if self.skipped else _acted(self.incident)
        self.slowness = slowness_of(self.opened.slow_step, self.tape)
        self.run = run

    def title(self, trigger: str) -> str:
        """Return what it is, in words; `trigger`: what came first."""
        ranks = self.standstill.standstill_ranks
        return _title(self.incident, self.rule_of, trigger, self.failure, ranks)

    def closing(self) -> Closing | None:
        record = next((r for r in reversed(self.incident) if is_closing(r)), None)
        if record is None:
            return None
        return Closing(record.seq, record.step, record.attempt, record.wall, self.end)

    def scope(self) -> Scope:
        """Return the rank, the shards and the module that it is about."""
        rank = _rank(self.incident) if self.failure is None else self.failure.rank
        if len(self.standstill.standstill_ranks) == 1:
            (rank,) = self.standstill.standstill_ranks
        shards = [shard.name for action in self.actions for shard in action.order.add]
        suspected = _newest(self.incident[::-1], decisions.ShardsSuspected)
        shards += () if suspected is None else suspected.suspects
        readings = facts.fired_readings(self.incident)
        modules = (
            name for _, _, numbers in readings if (name := formats.reading_text(numbers, "where"))
        )
        return Scope(rank=rank, shards=list(dict.fromkeys(shards)), module=next(modules, None))

    def observation(self) -> Observation:
        text = sentences.describe_observation(
            self.opened, self.moves, self.conditions, self.failure, self.skipped
        )
        if any(c.is_breach and c.signal in ("step", "heartbeat") for c in self.conditions):
            text = "; ".join(filter(None, [text, self._unmeasured_steps()]))
        return Observation(text=text, moves=self.moves, band=self.opened.band, onset=self.onset)

    def cause(self) -> tuple[Cause, str]:
        """Return the cause, and what comes into the title behind "after"."""
        opened, onset, of_machine = self.opened, self.onset, self.is_of_machine
        tape = None if of_machine else self.tape
        changed, unchanged = facts.group_by_area(
            tape, self.conditions, self.breach, opened.highest_rate or 0.0
        )
        moves = [] if of_machine else [m for m in self.moves if m.metric not in MACHINE]
        moves = [move for move in moves if not self._is_skip(move)]
        candidates = sentences.cause_candidates(
            opened,
            moves,
            changed,
            onset,
            drill=facts.find_drill(
                self.records, self.opening, self.breach, onset, of_machine=of_machine
            ),
            failure=self.failure,
            standstill=self.standstill.standstill,
            diagnosis=self.diagnosis,
            operator=f"{opened.requested_by} ordered {opened.verb}" if opened.requested_by else "",
            inputs=self.wrong_inputs,
        )
        if not candidates and (rate := self._vanished_rate()) is not None:
            candidates = [rate]
        if (broken := self._broken_forward()) is not None:
            candidates.insert(1 if candidates and candidates[0].kind == "drill" else 0, broken)
        cause = sentences.describe_cause(opened, moves, candidates, unchanged, self.diagnosis)
        return cause, sentences.title_trigger(self.diagnosis, candidates)

    def _vanished_rate(self) -> Candidate | None:
        """Return a learning rate by which no weight changes any more, None for no such."""
        conditions = [c for c in self.conditions if c.is_breach]
        if not any(c.metric == UPDATE and c.value == 0.0 for c in conditions):
            return None
        ratios = [
            (c.measured, c.value)
            for c in conditions
            if c.metric == facts.RATE and c.measure == "ratio" and isinstance(c.measured, float)
        ]
        ratio, value = min(ratios, key=lambda pair: pair[0], default=(1.0, None))
        if ratio > VANISHED:
            return None
        rate = sentences.format_significant(value)
        text = (
            f"the learning rate fell to {rate}, {ratio:.2g} of what it was: no weight changes by it"
        )
        return Candidate("schedule", text, None, None)

    def _broken_forward(self) -> Candidate | None:
        """Return what broke running statistics, None where they are whole, or not they alone."""
        is_worse = any(rule.severity == "SEV0" for rule in self.rules)
        if is_worse or not any(c.is_breach and c.metric == STATISTICS for c in self.conditions):
            return None
        forward = _find_forward(self.incident, self.tape, self.skipped)
        if forward is None:
            return None
        text = f"{reasons.describe_forward(forward)} was NaN or Inf, which running statistics keep"
        text += ", though its update was skipped" if forward.skipped else ""
        step = forward.counted if forward.step is None else forward.step
        return Candidate("statistics", text, step, None)

    def response(self) -> str:
        return sentences.describe_response(
            self.actions,
            status=self.status,
            mode=self.mode,
            skipped=self.skipped,
            approval=self.approval,
            rate_left=self._rate_left(),
            suppressed=self.suppressed,
            refusals=facts.refused_runbooks(self.incident),
            cause=sentences.data_change(self.diagnosis),
            wrong_inputs=self.wrong_inputs,
            unprotected=_is_unprotected(self.records, self.incident[-1].seq),
            newest=self.incident[-1].step,
            hold="" if self.held is None else self.held.cause,
            opened_by_rule=bool(self.opened.rule),
        )

    def cost(self) -> Cost:
        by_it = self.status in (Status.DOWN, Status.STOPPED)
        intent = _newest(self.incident, decisions.ActionPlanned)
        budgets = {} if intent is None else intent.budget
        counted = _budgets_of(self.actions, self.policy)
        return sentences.describe_cost(
            self.actions,
            status=self.status,
            skipped=len(self.skipped),
            budgets=dict(budgets),
            spent={name: str(text) for name, text in budgets.items() if name in counted},
            ended_at=self.incident[-1].step if by_it else None,
            acted=self.acted,
            unaided=sentences.estimate_unaided_cost(
                self.status,
                self.skipped,
                self.moves,
                self.actions,
                self.failure,
                of_statistics=self._broken_forward() is not None,
            ),
            lost_s=0.0 if self.slowness is None else self.slowness.lost_s,
            standing=self._standing_cost(),
        )

    def _unmeasured_steps(self) -> str:
        """Return how many steps were made meanwhile without a frame, "" for none."""
        count = 0 if self.diagnosis is None else self.diagnosis.unseen
        were = "step was" if count == 1 else "steps were"
        return f"{count} {were} made meanwhile but not measured" if count else ""

    def _standing_cost(self) -> str:
        """Return what a job that nothing was done to has lost all the same, "" if nothing known."""
        onset = self.onset.step
        if self.tape is not None and self.tape.nonfinite_span is not None:
            start, newest = self.tape.nonfinite_span
            start = max(start, onset) if self.acted else onset
            steps = max(newest, self.incident[-1].step) - start + 1
            is_kept = self.diagnosis is not None and self.diagnosis.kind == SpikeClass.CONTAINED
            was = "made no update" if is_kept else "trained on NaN or Inf"
            return f"{steps} step{'s' * (steps > 1)} {was} from step {start} on"
        if self.acted:
            return ""
        is_left = self.status in (Status.OPEN, Status.HELD, Status.JOB_ENDED, Status.UNRECOVERED)
        if (broken := self._broken_forward()) is not None and is_left:
            return f"each evaluation from step {broken.step} on is NaN or Inf"
        for condition in self.conditions:
            value = formats.finite_number(condition.value)
            if not condition.is_breach or value is None:
                continue
            if condition.signal in ("step", "heartbeat", "process"):
                missing = self._unmeasured_steps()
                return f"no step lost; {missing or f'about {value:.0f} s without a step'}"
            if condition.metric == WAITING:
                share = f"{value:.0f} % of the time waiting"
                return f"no step lost; {share} from step {onset} on"
        return ""

    def proof(self) -> Proof:
        return sentences.describe_proof(
            status=self.status,
            end="" if self.closed is None else notices.describe_finding(self.closed) or self.end,
            hold="" if self.held is None else self.held.cause,
            verification=self.verification,
            diagnosis=self.diagnosis,
            actions=self.actions,
            loss_left=self._loss_left(),
            skipped=self.skipped,
            good=facts.good_steps(self.incident, self.policy),
            slowness="" if self.slowness is None else self.slowness.text,
            height=self._height_clause(),
        )

    def next_step(self) -> NextStep:
        steps = sentences.next_step(self.status, self.message_texts, self.failure, self.approval)
        if self.records[-1].kind == "run_end" and steps[0].command == STOP_JOB.command:
            steps = steps[1:]
        filled = [step.filled(*self._names()) for step in steps]
        return NextStep(render_steps(filled), filled)

    def with_command(self, failure: Failure) -> Failure:
        """Return a failure with a command that can be pasted."""
        steps = (step.filled(*self._names()) for step in failure.remedy)
        return dataclasses.replace(failure, command="".join(step.command for step in steps))

    def _names(self) -> tuple[str, str]:
        """Return what RUN and COMMAND stand for."""
        return self.run.directory, shlex.join(self.run.command) or "COMMAND"

    def _is_skip(self, move: Move) -> bool:
        """Return whether a signal moved as a safeguard skipped the update."""
        is_update = move.metric.startswith("update_")
        return is_update and move.peak == 0.0 and move.peak_step in self.skipped

    def _rate_left(self) -> str:
        """Return what the learning rate would be after what is asked for, "" for as before."""
        rate = next((move for move in self.moves if move.metric == facts.RATE), None)
        newest = [] if self.tape is None else self.tape.newest(facts.RATE)
        return describe_rate_left(self.approval, rate, newest[-1][1]) if newest else ""

    def _height_clause(self) -> str:
        """Return how high the newest losses are, for a sentence; "" where no frame shows it."""
        loss = loss_metric_of(self.series)
        points = [] if self.tape is None or not loss else self.tape.newest(loss)
        before = next((move.level for move in self.moves if move.metric in LOSSES), None)
        if not points or before is None:
            return ""
        is_broken = self.tape is not None and self.tape.nonfinite_span is not None
        level = sentences.format_significant(before)
        if is_broken:
            return f": NaN at the end, {level} before"
        now = sentences.format_significant(median([value for _, value in points]))
        return f": {now} at the end ({step_range(points)}), {level} before"

    def _loss_left(self) -> bool:
        """Return whether the loss was out of its band, as far as that is known."""
        if any(c.is_breach and c.metric in LOSSES for c in self.conditions):
            return True
        losses = [move for move in self.moves if move.metric in LOSSES]
        if losses:
            return any(not move.peak <= move.level for move in losses)
        band = self.opened.band
        peak = None if self.diagnosis is None else self.diagnosis.questions.rejoined.peak
        return band is None or not isinstance(peak, float) or peak > band.limit


def summarize_incident(index: IncidentIndex, incident: str, policies: Policies) -> IncidentSummary:
    """Return the summary of an incident for a list of several."""
    own_records = index.records_of(incident)
    opening, _ = _opening(own_records)
    _, _, rule_of = _policy_at(index.history, opening.seq, "", policies)
    reported, spike = _failures(index.history, own_records), _diagnosis(own_records)
    trigger = "" if reported or spike is None else sentences.CAUSES.get(spike.kind, "")
    return IncidentSummary(
        id=incident,
        severity=_severity(own_records),
        title=_title(own_records, rule_of, trigger, reported[0] if reported else None),
        status=facts.status_of(own_records),
        steps=(opening.step, own_records[-1].step),
        wall=opening.wall,
    )


MUCH_ABOVE = 1.5  # times the learning rate of before a jump, to be said; project default


def describe_rate_left(approval: Approval | None, rate: Move | None, newest: float) -> str:
    """Return how far above its level before a jump a scaled learning rate would be, "" for near.

    Args:
        rate: the jump. newest: the learning rate now.
    """
    if approval is None or rate is None or rate.level <= 0.0:
        return ""
    orders = [step.args.read(RateArgs) for step in approval.plan if step.verb == "lr_scale"]
    left = newest * math.prod(order.value for order in orders)
    if not orders or left < MUCH_ABOVE * rate.level:
        return ""
    return (
        f"the learning rate would still be {sentences.format_significant(left)}, "
        f"×{left / rate.level:.2g} of that before step {rate.first_step}"
    )


@dataclass(frozen=True)
class Slowness:
    """How slow the steps are by now, and what that has cost; `lost_s`: seconds."""

    text: str
    lost_s: float


def step_range(points: Sequence[tuple[int, float]]) -> str:
    """Return "steps 870 to 885"; a relaunch goes back."""
    first, last = min(points)[0], max(points)[0]
    return f"step {last}" if first == last else f"steps {first} to {last}"


RESTORED = 1.2  # times the time of a step before, to be as before; project default


def slowness_of(slow: SlowStep | None, tape: Tape | None) -> Slowness | None:
    """Return how slow the steps of an incident about speed are, None where no frame shows it."""
    if slow is None or tape is None or not (newest := tape.newest("step_time")):
        return None
    now = median([value for _, value in newest])
    middle = math.sqrt(slow.before_s * slow.now_s)
    times = [(step, value) for step, value in tape.points("step_time") if step >= slow.since]
    late = [(step, value) for step, value in times if value > middle]
    text = f"{slow_duration(now)} per step at the end ({step_range(newest)})"
    if now > middle or not late:
        text = f"still slow: {text}, {slow_duration(slow.before_s)} before"
    else:
        rows = [n for n in range(2, len(times)) if all(v > middle for _, v in times[n - 2 : n + 1])]
        until = f" until about step {times[rows[-1]][0]}" if rows else ""
        is_slower = now > RESTORED * slow.before_s
        since = "less slow since" if is_slower else "and not any more"
        text = f"slow{until}, {since}: {text}"
        text += f", {slow_duration(slow.before_s)} before" if is_slower else ""
    steps = times[-1][0] - slow.since + 1 if times else 0
    lost = sum(value - slow.before_s for _, value in late)
    return Slowness(text, steps * lost / max(1, len(times)))


# ── its parts ─────────────────────────────────────────────────────────────────────────────────────


def _newest(incident: Iterable[Record], kind: type[D]) -> D | None:
    """Return the newest decision of a class."""
    matching = [r.decision for r in incident if isinstance(r.decision, kind)]
    return matching[-1] if matching else None


def _opening(incident: Iterable[Record]) -> tuple[Record, decisions.IncidentOpened]:
    return next(
        (record, record.decision)
        for record in incident
        if isinstance(record.decision, decisions.IncidentOpened)
    )


def _policy_at(
    records: Sequence[Record], until: int, mode: str, policies: Policies
) -> tuple[str, str, facts.RuleOf]:
    """Return the mode and the digest in force at a record, and who knows its rules."""
    digest = ""
    for record in records:
        if record.seq > until:
            break
        if record.kind == "run_start":
            start = record.data.read(RunStart)
            mode, digest = start.mode or mode, start.policy_digest
        elif isinstance(record.decision, decisions.PolicyReloaded):
            mode, digest = record.decision.mode, record.decision.after
    policy = policies.get(digest)
    rules: dict[str, Rule] = {} if policy is None else {rule.id: rule for rule in policy.rules}
    return mode, digest, rules.get


def _is_unprotected(records: Sequence[Record], until: int) -> bool:
    """Whether the record of the run had ended before its record `until`, and nobody took over."""
    ended = False
    for record in records:
        if record.seq > until:
            break
        ended |= record.data.get("what") == INCOMPLETE
        ended &= not isinstance(record.decision, decisions.RunAdopted)
    return ended


def _failures(records: Sequence[Record], incident: Sequence[Record]) -> list[Failure]:
    """Return how processes ended, where that is what the incident is about, or what ended it."""
    opening, opened = _opening(incident)
    closing = next((r for r in reversed(incident) if is_closing(r)), None)
    closed = _newest(incident, decisions.IncidentClosed)
    by_end = closed is not None and closed.outcome == decisions.JOB_ENDED
    crash = not opened.rule or any(notices_of_kind(incident, FAILURE_NOTICE))
    if not (crash or by_end) or opened.requested_by:
        return []
    until = incident[-1].seq if closing is None else closing.seq
    if not opened.rule:  # another start may follow, and fail in its own way
        until = opening.seq
    return launch_failures([record for record in records if record.seq <= until])


def _acted(incident: Sequence[Record]) -> bool | None:
    """Return whether the job was changed, None where that is in doubt."""
    endings = action_outcomes(incident)
    return True if DONE in endings else None if DOUBT in endings else False


def _budgets_of(actions: Iterable[Action], policy: Policy | None) -> set[str]:
    """Return the budgets that the actions on the job counted in, but for `all`."""
    forms = {} if policy is None else policy.verbs
    on_job = [action for action in actions if action.touches_job]
    budgets = {str(getattr(forms.get(a.verb), "budget", None) or a.verb) for a in on_job}
    return budgets | {action.runbook for action in on_job}


def _severity(incident: Sequence[Record]) -> Any:
    changes = (r.decision for r in incident if r.kind == "incident" and r.decision is not None)
    return min(decision.severity for decision in changes if decision.severity)


def _find_forward(
    incident: Sequence[Record], tape: Tape | None, skipped: Sequence[int]
) -> BrokenForward | None:
    """Return what broke running statistics when a rule first told of them, None without one.

    skipped: steps whose update a safeguard skipped.
    """
    rules = (record for record in incident if isinstance(record.decision, decisions.RuleFired))
    fired = next((r for r in rules if STATISTICS in facts.metrics_in_breach([r])), None)
    if fired is None:
        return None
    counted, rows = fired.step, list[tuple[int, Row]]()
    if tape is not None:
        for step, (count,) in tape.newest_rows(fired.attempt, (STATISTICS,)):
            if step > fired.step or count is None:
                continue
            if count == 0.0:
                break
            counted = step
        rows = list(tape.newest_rows(fired.attempt, FORWARD))
    rows = [(step, (*row[:-1], 1.0 if step in skipped else row[-1])) for step, row in rows]
    return find_broken_forward(rows, counted)


def _diagnosis(incident: Sequence[Record]) -> Verdict | None:
    """Return the newest class of the spike."""
    classified = decisions.IncidentClassified | decisions.IncidentHeld | decisions.IncidentClosed
    made = (r.decision for r in reversed(incident) if isinstance(r.decision, classified))
    return next((decision.spike for decision in made if decision.spike), None)


def _rank(incident: Sequence[Record]) -> int | None:
    """Return the rank on which the first rule fired."""
    ranks = (r.decision.rank for r in incident if isinstance(r.decision, decisions.RuleFired))
    return next(ranks, None)


def _spark(series: Series | None, loss: str) -> str:
    return "" if series is None or not loss else sparkline(series.signals[loss], series.attempts)


# ── its title ─────────────────────────────────────────────────────────────────────────────────────


def _title(
    incident: Sequence[Record],
    rule_of: facts.RuleOf,
    trigger: str = "",
    failure: Failure | None = None,
    standstill_ranks: Sequence[int] = (),
) -> str:
    """Return what an incident is, in words.

    The words are those of a rule about the loss, which people care for first, of the rule that
    opened or raised it, else of the class of the failure.

    Args:
        trigger: what came first, if another thing than the rule is about.
        standstill_ranks: those that hold the job up.
    """
    chief = next(
        record.decision
        for record in reversed(incident)
        if isinstance(record.decision, decisions.IncidentOpened | decisions.IncidentRaised)
    )
    if not chief.rule:
        return _clip(_title_without_rule(chief, failure))
    blind = (r.decision for r in incident if isinstance(r.decision, decisions.RuleBlind))
    if any(decision.rule == chief.rule for decision in blind):
        return _clip(f"Rule {chief.rule} cannot be evaluated")
    rule = rule_of(chief.rule)
    title = (rule.title if rule else "") or _title_of_readings(incident, chief.rule)
    if standstill_ranks:
        return _clip(f"{title}: {name_ranks(standstill_ranks)}")
    title = _title_of_loss(incident, rule_of, str(chief.severity)) or title
    judged = (n for alarm, _, n in facts.fired_readings(incident) if alarm.rule == chief.rule)
    of_rate = any(str(n.get("metric", "")).startswith(facts.RATE) for n in judged)
    return _clip(f"{title} after {trigger}" if trigger and not of_rate else title)


def _title_of_loss(incident: Sequence[Record], rule_of: facts.RuleOf, severity: str) -> str:
    """Return the title of the first rule about the loss that is as severe as that."""
    for record in incident:
        decision = record.decision
        if isinstance(decision, decisions.RuleFired) and str(decision.severity) <= severity:
            rule = rule_of(str(decision.rule))
            judged_metrics = {reading.get("metric") for reading in decision.numbers.values()}
            if rule is not None and judged_metrics & {*LOSSES}:
                return rule.title
    return ""


def _title_without_rule(
    chief: decisions.IncidentOpened | decisions.IncidentRaised, failure: Failure | None
) -> str:
    if isinstance(chief, decisions.IncidentOpened) and chief.requested_by:
        return f"Order of {chief.requested_by}: {chief.verb}"
    if failure is None:
        error = chief.failure if isinstance(chief, decisions.IncidentOpened) else ""
        return f"Crash: {notices.describe_crash(chief.headline, error)}"
    if not failure.title:
        return f"Crash: {failure.summary}"
    name = "" if failure.kind == EXIT else failure.type
    rank = f" on rank {failure.rank}" if failure.rank is not None and failure.world_size > 1 else ""
    return f"Crash: {failure.title}{f' ({name})' if name else ''}{rank}"


def _title_of_readings(incident: Sequence[Record], rule: str) -> str:
    """Return the breaches behind a rule without a title: "Loss out of its limit"."""
    for alarm, _, numbers in facts.fired_readings(incident):
        if alarm.rule != rule:
            continue
        for name in formats.reading_names(numbers, "nonfinite"):
            return f"{_capitalized(str(name))} is NaN or Inf"
        if numbers.get("code") == "BREACH" and numbers.get("metric"):
            return f"{_capitalized(str(numbers['metric']))} out of its limit"
        if numbers.get("code") == "BREACH" and numbers.get("signal"):
            return f"No {numbers['signal']}"
    return f"Rule {rule} fired"


def _capitalized(metric: str) -> str:
    name = formats.readable_metric(metric)
    return name[:1].upper() + name[1:]


def _clip(title: str) -> str:
    title = " ".join(title.split())
    return title if len(title) <= MAX_TITLE else f"{title[: MAX_TITLE - 1]}…"


def _wrong_inputs(rules: Sequence[FiredRule], conditions: Sequence[Condition], onset: Onset) -> str:
    """Return what was wrong with the batches by the gravest rule about them, "" for nothing.

    What came behind the onset is no cause of it; of a sum it is not known when it began.
    """
    by_rule: dict[str, list[Condition]] = {}
    for condition in conditions:
        by_rule.setdefault(condition.rule, []).append(condition)
    about_inputs = [
        rule
        for rule in rules
        if rule.rule in by_rule
        and {c.metric for c in by_rule[rule.rule]} <= INPUTS
        and (
            first_breach(rule.numbers, rule.step) <= onset.latest + SOON
            or any(c.is_breach and c.measure == "sum" for c in by_rule[rule.rule])
        )
    ]
    if not about_inputs:
        return ""
    rule = min(about_inputs, key=lambda rule: (rule.severity, rule.step))
    breach = next((sentences.describe_condition(c) for c in by_rule[rule.rule] if c.is_breach), "")
    title = rule.title[:1].lower() + rule.title[1:] or f"rule {rule.rule}"
    first = onset.step if onset.step <= rule.step <= onset.step + SOON else rule.step
    return f"{title}, first at step {first}{f': {breach}' if breach else ''}"
