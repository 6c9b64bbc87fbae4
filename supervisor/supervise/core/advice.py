"""Advice for people: the next command, by the cause, the kind of model, and what was tried.

In commands RUN stands for the run directory. A table has one line per case, and its first line that
fits is the advice: attention is named only where it was measured and moved, and a rollback only
where one would still help."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from . import action_planning, diagnosis, rule_scope, withdrawal
from .incident import Incident
from .model.action import Refused
from .model.decisions import Advice, Lead
from .model.policy import Policy
from .model.verdicts import SpikeClass, Verdict
from .rank_monitor import RankMonitor
from .run_state import ApprovalRequest, State
from .spike_classifier import NORM_RATIO, OWN_RATE, is_loss_rejoined
from .trends import median

SAMPLES = 3  # of a metric before the onset, to say that it moved; project default


class Fact(StrEnum):
    """What is known of a trouble beside its class."""

    DRILL = "a drill was injected just before"
    RATE = "the learning rate jumped just before"
    INPUT = "a batch was unlike the others, or a rule about what the model is given fired"
    ATTENTION = "attention was measured, and moved"
    ROUTING = "the routing to experts was measured, and moved"
    NO_OBJECTIVE = "the loss never descended, as in reinforcement learning"
    RECURRING = "it comes again and again"
    BACK = "the loss is back in its band"
    UNDONE = "the weights of before were restored"
    HELD = "the learning rate was held lower"
    EXHAUSTED = "all that may be tried was tried"
    ENDED = "the job has ended"


class Line(NamedTuple):
    """One case. The text is for `str.format`: `back`, `onset`, `rate`, `skipped`, `recurring`."""

    kind: SpikeClass
    facts: frozenset[Fact]
    text: str
    lead: Lead | None = None


def _line(kind: SpikeClass, text: str, *facts: Fact, lead: Lead | None = None) -> Line:
    return Line(kind, frozenset(facts), text, lead)


_OF, _F = SpikeClass, Fact
GO_BACK = "to go back: {back}"
# Their first line that fits counts; {rate} is such as "learning rate 1e-3 to 3e-2 (step 150)".
LINES: Sequence[Line] = (
    _line(_OF.NO_EXCURSION, "", lead=Lead.NOTHING),
    _line(_OF.RECOVERABLE, "", _F.DRILL, lead=Lead.NOTHING),
    _line(
        _OF.RECOVERABLE,
        "if the data was not meant to change, look at the batch of step {onset}",
        _F.INPUT,
        lead=Lead.NOTHING,
    ),
    _line(_OF.RECOVERABLE, "the learning rate was held: set its schedule right", _F.HELD),
    _line(_OF.RECOVERABLE, "", lead=Lead.NOTHING),
    _line(_OF.EXPECTED, "it was planned", lead=Lead.NOTHING),
    # NaN or Inf reached the weights, or may have.
    _line(_OF.NUMERIC, "a drill did it, on purpose", _F.DRILL, _F.BACK, lead=Lead.NOTHING),
    _line(_OF.NUMERIC, "{rate}: set the schedule right, it will jump again", _F.RATE, _F.BACK),
    _line(_OF.NUMERIC, f"{{rate}}: set the schedule right, it will jump again; {GO_BACK}", _F.RATE),
    _line(_OF.NUMERIC, "look at the batch of step {onset}: it may come again", _F.INPUT, _F.BACK),
    _line(_OF.NUMERIC, f"look at the batch of step {{onset}}; {GO_BACK}", _F.INPUT),
    _line(_OF.NUMERIC, "find what was not finite first, in step {onset}", _F.UNDONE, _F.BACK),
    _line(_OF.NUMERIC, f"the weights may be damaged; {GO_BACK}"),
    _line(_OF.CONTAINED, "find what was not finite first, in step {onset}", _F.UNDONE),
    _line(
        _OF.CONTAINED,
        "no rollback needed: {skipped} changed no weight; look at the batch of step {onset}",
        _F.INPUT,
    ),
    _line(
        _OF.CONTAINED,
        "no rollback needed: {skipped} changed no weight; find the first value that was not finite",
    ),
    # The job changed something itself.
    _line(
        _OF.SCHEDULE,
        "compare the schedule with the one meant: it will jump again",
        _F.BACK,
    ),
    _line(_OF.SCHEDULE, "compare the schedule with the one meant: it jumps again", _F.UNDONE),
    _line(_OF.SCHEDULE, f"compare the schedule with the one meant; {GO_BACK}"),
    _line(_OF.CUT, "compare the tokens per update with what was meant", _F.BACK),
    _line(_OF.CUT, f"compare the tokens per update with what was meant; {GO_BACK}"),
    _line(_OF.DATA, "look at the batch of step {onset}: it may come again", _F.BACK),
    _line(
        _OF.DATA,
        f"replay the batches from step {{onset}} on a copy, remove what reproduces it; {GO_BACK}",
    ),
    # The loss stays above where it was.
    _line(_OF.PLATEAU, "{rate}: set it right, then go back: {back}", _F.RATE),
    _line(
        _OF.PLATEAU,
        "the rollback did not help: go back 100 steps or more before step {onset}: supervise "
        "checkpoints RUN",
        _F.UNDONE,
    ),
    _line(
        _OF.PLATEAU,
        "go back 100 steps or more before step {onset}, and skip 200 to 500 batches: supervise "
        "checkpoints RUN",
    ),
    _line(_OF.STRUCTURAL, f"a drill did it, on purpose; {GO_BACK}", _F.DRILL),
    _line(_OF.STRUCTURAL, "{rate}: set it right: it jumps again", _F.RATE, _F.UNDONE),
    _line(_OF.STRUCTURAL, "{rate}: set it right, then go back: {back}", _F.RATE),
    _line(_OF.STRUCTURAL, "mend what the model is given, from step {onset}", _F.INPUT, _F.UNDONE),
    _line(
        _OF.STRUCTURAL,
        "mend what the model is given, from step {onset}; {back}",
        _F.INPUT,
    ),
    _line(
        _OF.STRUCTURAL,
        "the rollback did not help: check what the model is given from step {onset}, attention "
        "(QK-norm, logits), and what was changed last",
        _F.ATTENTION,
        _F.UNDONE,
    ),
    _line(
        _OF.STRUCTURAL,
        "no optimizer-level knob will fix it: check attention (QK-norm, logits); go back to before "
        "its first sign: supervise checkpoints RUN",
        _F.ATTENTION,
    ),
    _line(
        _OF.STRUCTURAL,
        f"check the routing (rate of the router, capacity, balance coefficient); {GO_BACK}",
        _F.ROUTING,
    ),
    _line(
        _OF.STRUCTURAL,
        "a lower learning rate did not help: check precision, kernels and what was changed last; "
        "go back to before step {onset}: supervise checkpoints RUN",
        _F.HELD,
    ),
    _line(
        _OF.STRUCTURAL,
        "nothing that was tried helped: check precision, kernels and what was changed last; go "
        "back to before step {onset}: supervise checkpoints RUN",
        _F.EXHAUSTED,
    ),
    _line(_OF.STRUCTURAL, "check precision, kernels and batch size; start again: {back}", _F.ENDED),
    _line(_OF.STRUCTURAL, "lower the learning rate: supervise lr RUN 0.5; then go back: {back}"),
    # The loss is back, and something is not.
    _line(_OF.SUSPECT, "a drill did it, on purpose", _F.DRILL, lead=Lead.NOTHING),
    _line(_OF.SUSPECT, "{recurring}; {rate}: set the schedule right", _F.RATE),
    _line(_OF.SUSPECT, "{recurring}; look at the batch of step {onset}", _F.INPUT),
    _line(
        _OF.SUSPECT,
        "{recurring}; watch attention logits, and try QK-norm on a short run",
        _F.ATTENTION,
    ),
    _line(_OF.SUSPECT, "{recurring}; compare the batches of these steps", _F.RECURRING),
    _line(_OF.SUSPECT, "{recurring}; try a lower learning rate on a short run", _F.ENDED),
    _line(
        _OF.SUSPECT,
        "{recurring}; a lower rate: supervise lr RUN 0.5",
    ),
    _line(
        _OF.ARTEFACT,
        "the weights are fine; check how the loss is logged (denominator, smoothing, accumulation) "
        "and the order of the data",
    ),
    _line(_OF.UNDECIDED, "a drill did it, on purpose", _F.DRILL, _F.BACK, lead=Lead.NOTHING),
    _line(_OF.UNDECIDED, "{rate}: compare it with what was meant", _F.RATE),
    _line(_OF.UNDECIDED, "look at the batch of step {onset}", _F.INPUT),
    _line(
        _OF.UNDECIDED,
        "judge it by its reward: its loss is no objective",
        _F.NO_OBJECTIVE,
    ),
    _line(_OF.UNDECIDED, "compare the weights from before and after on a fixed batch"),
)


def choose_advice(kind: SpikeClass, facts: Collection[Fact], words: Mapping[str, str]) -> Advice:
    """Return the advice of the first line that fits."""
    line = next(line for line in LINES if line.kind == kind and line.facts <= {*facts})
    return Advice(line.lead, line.text.format_map(words))


def advise_after_verdict(
    policy: Policy, state: State, incident: Incident, verdict: Verdict
) -> Advice:
    """Return what a person should do after a verdict, with a command to paste."""
    events = verdict.questions.else_happened.events
    rates = [event for event in events if event.kind in (OWN_RATE, "rate")]
    skipped = verdict.skipped
    words = {
        "back": rollback_or_restart_command(policy, state, incident),
        "onset": str(min((incident.breach_step, *skipped[:1]))),
        "rate": f"{rates[0].text} (step {rates[0].step})" if rates else "",
        "recurring": verdict.recurring or "the norms stayed up",
        "skipped": f"step {skipped[0]}" if skipped else "",
    }
    if skipped and skipped[0] != skipped[-1]:
        words["skipped"] = f"what was wrong in steps {skipped[0]} to {skipped[-1]}"
    advice = choose_advice(verdict.kind, {*_facts(policy, state, incident, verdict)}, words)
    if "supervise " in advice.rest or (advice.lead is not None and not advice.rest):
        return advice
    numbers = "" if advice.lead else f"; the numbers: supervise why RUN {incident.id}"
    return Advice(advice.lead, f"{advice.rest}{numbers}")


def _facts(policy: Policy, state: State, incident: Incident, verdict: Verdict) -> Iterator[Fact]:
    case, questions = incident.case, verdict.questions
    kinds = {event.kind for event in questions.else_happened.events}
    monitor = state.monitors.get(case.rank)
    for fact, holds in (
        (Fact.DRILL, "drill" in kinds),
        (Fact.RATE, bool(kinds & {OWN_RATE, "rate"})),
        (Fact.INPUT, "data" in kinds or bool(rule_scope.input_rules(policy, incident))),
        (Fact.ATTENTION, _has_moved(policy, incident, monitor, ("attn_", "max_attn_"))),
        (Fact.ROUTING, _has_moved(policy, incident, monitor, ("moe_", "router_"))),
        (Fact.NO_OBJECTIVE, monitor is not None and not monitor.is_objective),
        (Fact.RECURRING, bool(verdict.recurring)),
        (Fact.BACK, is_loss_rejoined(verdict)),
        (Fact.UNDONE, case.rolled_back),
        (Fact.HELD, bool(incident.recovery.rate_limits)),
        (Fact.EXHAUSTED, case.exhausted),
        (Fact.ENDED, state.job.returncode is not None),
    ):
        if holds:
            yield fact


def _has_moved(
    policy: Policy, incident: Incident, monitor: RankMonitor | None, prefixes: tuple[str, ...]
) -> bool:
    """Return whether a rule of the incident reads such a metric, or one moved since the onset."""
    for rule in policy.rules:
        if rule.id in incident.rules and any(
            metric.startswith(prefixes) for metric in rule_scope.rule_metrics(policy, rule)
        ):
            return True
    if monitor is None:
        return False
    for metric in monitor.history.names:
        if not metric.startswith(prefixes):
            continue
        before = diagnosis.values_before(monitor, metric, incident.breach_step)
        since = [v for step, v in monitor.history.series(metric) if step >= incident.breach_step]
        if len(before) < SAMPLES or not since:
            continue
        low, high = sorted((abs(median(before)), abs(median(since))))
        if high > NORM_RATIO * low:
            return True
    return False


# ── commands ──────────────────────────────────────────────────────────────────────────────────────


def rollback_command(policy: Policy, state: State, incident: Incident) -> str:
    """Return the command that goes back to before an incident, "" where it would be refused."""
    form = policy.verbs.get("rollback")
    stuck = state.job.returncode is not None or withdrawal.is_stalled(policy, state)
    if form is None or stuck:
        return ""
    before_step = incident.breach_step
    try:
        ordered = form(**action_planning.OPERATOR_ROLLBACK)
        ordered.plan(action_planning.basic_context(state, incident, before_step, "operator"))
    except Refused:
        return ""
    return f"supervise rollback RUN --before {before_step}"


def rollback_or_restart_command(policy: Policy, state: State, incident: Incident) -> str:
    """Return the command that goes back, or which checkpoint to start from where none does."""
    start = f"start from a checkpoint from before step {incident.breach_step}: supervise "
    return rollback_command(policy, state, incident) or f"{start}checkpoints RUN"


def manual_choices(policy: Policy, state: State, incident: Incident) -> str:
    """Return the choices of a person while no action runs by itself."""
    if state.job.returncode is not None:
        return "start it again by hand; good checkpoints: supervise checkpoints RUN"
    ways = [rollback_command(policy, state, incident), "supervise stop RUN"]
    if state.job.paused:
        ways.insert(0, "supervise resume RUN")
    return "choose: " + " or ".join(filter(None, ways))


def choices_in_hold(policy: Policy, state: State, incident: Incident) -> str:
    """Return the choices of a person in a hold; a rollback does not end it."""
    ways = manual_choices(policy, state, incident)
    return f"{ways}; then: supervise release RUN (automatic actions on again)"


def advice_after_stop(incident: Incident) -> str:
    """Return what follows when a rule has stopped the job; what stood still may do so again."""
    then = "start it again from a good checkpoint: supervise checkpoints RUN"
    if incident.trigger.still:
        then = f"mend what it waited for, or it may stop there again; then {then}"
    return f"{then}; evidence: supervise why RUN {incident.id}"


def machine_checks(policy: Policy, state: State, incident: Incident) -> str:
    """Return what to check of an incident about the machine that lasts, "" for any other."""
    against_weights = rule_scope.against_weights(policy, incident)
    return "" if against_weights else lasting_checks(policy, state, incident)


def lasting_checks(policy: Policy, state: State, incident: Incident) -> str:
    """Return what to check of what still fires, by the runbook of its gravest rule."""
    firing = {*state.firing(policy)} & {*incident.rules}
    rules = [rule for rule in policy.rules if rule.id in firing and rule.see]
    return show_runbook_command(min(rules, key=lambda rule: rule.severity).see) if rules else ""


def show_runbook_command(name: str) -> str:
    """Return the command that prints a runbook, as a clause; "" for none."""
    if not name:
        return ""
    return f"what to check: supervise policy show RUN/policy.yaml --runbook {name}"


def is_request_unneeded(incident: Incident, verdict: Verdict) -> bool:
    """Return whether the loss that a request is about went astray, and came back by itself."""
    astray = verdict.questions.rejoined.excursion or incident.case.excursion.nonfinite is not None
    return astray and is_loss_rejoined(verdict)


def advice_on_request(incident: Incident, pending: ApprovalRequest, verdict: Verdict | None) -> str:
    """Return how to answer a request: one that the loss no longer needs is not urged."""
    if verdict is None or not is_request_unneeded(incident, verdict):
        return f"{pending.id} still waits: supervise approve RUN {pending.id}"
    return (
        f"the loss is back without {pending.runbook}, so denying {pending.id} loses nothing: "
        f"supervise deny RUN {pending.id}; then: supervise release RUN (automatic actions on again)"
    )


def wrong_after_restart(state: State, incident: Incident) -> str:
    """Return what a restart has left wrong, with what to do; "" for nothing."""
    parts = []
    if state.checkpoints.wrong_checkpoint:
        parts.append(
            "the job does not train on from its checkpoint: check how it resumes; good ones: "
            "supervise checkpoints RUN"
        )
    overlap, recovery = state.repeated.overlap, incident.recovery
    if overlap is not None and recovery.restored_step is not None and not recovery.loop_kept:
        parts += [difference.remedy for difference in overlap.differences if difference.matters]
    return "; ".join(parts)


def unresolved_at_end(state: State, incident: Incident) -> str:
    """Return what is still wrong, or in force, when an incident ends; "" for nothing."""
    limits, monitor = incident.recovery.rate_limits, state.monitors.get(incident.case.rank)
    rate, ended = "", state.job.returncode is not None
    if limits and not ended and monitor is not None and monitor.value("lr_hold") is not None:
        rate = (
            f"the learning rate stays at {limits[-1]:.3g} at most until the job asks for no more; "
            "to let it go: supervise lr RUN 1.0"
        )
    return "; ".join(filter(None, (wrong_after_restart(state, incident), rate)))


def advice_at_end(
    policy: Policy, state: State, incident: Incident, verdict: Verdict | None
) -> Advice:
    """Return the advice of an incident that ends; what is still open comes first."""
    then = Advice(Lead.NOTHING, "")
    if verdict is not None:
        checks = machine_checks(policy, state, incident)
        then = (
            Advice(None, checks)
            if checks
            else advise_after_verdict(policy, state, incident, verdict)
        )
    if then.lead == Lead.NOTHING and (checks := lasting_checks(policy, state, incident)):
        then = Advice(None, checks)
    rest = unresolved_at_end(state, incident)
    if not rest:
        return then
    return Advice(None, "; ".join(filter(None, (rest, then.rest))))
