"""Advice for people: the next command, by the cause, the kind of model, and what was tried.

In commands RUN stands for the run directory. A table has one line per case, and its first line that
fits is the advice: attention is named only where it was measured and moved, and a rollback only
where one would still help."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from . import action_planning, diagnosis, reasons, rule_scope, withdrawal
from .incident import QUIET_STEPS, STANDING_VERBS, Incident, RunbookExecution, verb_of
from .job_recipes import CHECKPOINT, STEP, fill_recipe
from .model.action import Refused
from .model.checkpoint_registry import WEIGHTS_ONLY, choose_checkpoint
from .model.decisions import ACTING_MODES
from .model.formats import format_age
from .model.interfaces import Advice, AdviceSteps, Lead, Step, introduce, sentences
from .model.payload import RollbackArgs
from .model.policy import HOLD, PAGE, STOP_SEV0, Policy, Rule, Runbook, next_level
from .model.verdicts import NO, PARTS, SpikeClass, Verdict
from .notices import WITHOUT_ANSWER
from .rank_monitor import RankMonitor
from .run_notices import RateDiffers, UpdateDiffers
from .run_state import ApprovalRequest, State
from .spike_classifier import OWN_RATE, is_loss_rejoined, wiring_faults
from .trends import TOKENS

CHECKPOINT_OK = "checkpoint_ok"


class Fact(StrEnum):
    """What is known of a trouble beside its class."""

    DRILL = "a drill was injected just before"
    RATE = "the learning rate jumped just before"
    INPUT = "a batch was unlike the others, or a rule about what the model is given fired"
    PASSED = "what the model is given is as before again"
    ATTENTION = "attention was measured, and moved"
    ROUTING = "the routing to experts was measured, and moved"
    WIRING = "a fault of the job's wiring is on record"
    NO_DESCENT = "the loss never descended in this run"
    REWARD = "the job reports a reward, as in reinforcement learning"
    RECURRING = "it comes again and again"
    BACK = "the loss is back in its normal range"
    SOUND = "the weights were tested, and are good"
    STATISTICS = "running statistics of normalization layers are not finite"
    RESTORED = "they alone were not, until the weights of before were restored"
    UNDONE = "the weights of before were restored"
    HELD = "the learning rate was capped"
    CAME_BACK = "NaN or Inf came again after the weights of before were restored"
    RATE_STOPPED = "a jump of the learning rate was stopped by a hold"
    NO_UPDATES = "the newest losses are NaN or Inf, and their updates were skipped"
    EXHAUSTED = "all that may be tried was tried"
    ENDED = "the job has ended"


class Way(NamedTuple):
    """Steps that only the state of the run tells, behind a text, if that is not empty.

    Attributes:
        name: `back` to before it, `start` again, or `stop`: none, where the job has ended.
    """

    name: str
    intro: str = ""
    joint: str = ": "


class Line(NamedTuple):
    """One case; `kind` None: any. Texts are for `str.format`: `onset`, `rate`, ..."""

    kind: SpikeClass | None
    facts: frozenset[Fact]
    steps: tuple[str | Step | Way, ...]
    lead: Lead | None = None


def _line(
    kind: SpikeClass | None, *parts: str | Step | Way | Fact, lead: Lead | None = None
) -> Line:
    """Return the line of these steps, in order, and of these facts."""
    facts = frozenset(part for part in parts if isinstance(part, Fact))
    return Line(kind, facts, tuple(part for part in parts if not isinstance(part, Fact)), lead)


_OF, _F = SpikeClass, Fact
GO_BACK, THEN_GO_BACK = Way("back", "to go back"), Way("back", "then go back")
STOP, START, THEN_START = Way("stop"), Way("start"), Way("start", "then", " ")
DRILLED = "a drill did it, on purpose"
COMPARE = "compare the learning-rate schedule with the one meant"
SET_RIGHT = "set the learning-rate schedule right, or it jumps again: {rate}"
WHY_JUMP = "find why the learning rate {jump}: its schedule, or code that sets it"
COME_AGAIN = "look at the batch of step {onset}: it may come again"
LOOK_AT_BATCH = "look at the batch of step {onset}"
COMPARE_TOKENS = "compare the tokens per update with what was meant"
GIVEN = "look at what the model is given from step {onset} on"
NOT_MEANT = "if that was not meant"
OTHER_LOSS = (
    "the weights are good: find what changed at step {onset}, the data or how the loss is computed",
    "if it was meant: nothing to do",
)
CHECK = "check precision, kernels and what was changed last"
EARLIER = "go back 100 steps or more before step {onset}"
NO_ROLLBACK = "no rollback is needed: {skipped} changed no weight"
LOOK = "look at the batches from step {onset} on, and for memory errors of the device"
MEMORY_ERRORS = "nvidia-smi -q -d ECC"
IN_WEIGHTS = Step(f"going back ended it, so {{causes}}, unknown which: {LOOK}", MEMORY_ERRORS)
FIND_VALUE = "find the NaN or Inf in {forward}: running statistics keep it"
NO_UPDATES = (
    "no update is made any more: each one since step {onset} was skipped, and the weights are good",
    STOP,
    "compute in float32 what makes the loss NaN or Inf",
    THEN_START,
)
LOWER_RATE, RELEASE = "supervise lr RUN 0.5", "supervise release RUN"
STATUS = "supervise status RUN"
LIST_CHECKPOINTS = "supervise checkpoints RUN"
TO_BEFORE = Step("go back to before step {onset}", LIST_CHECKPOINTS)
JOB_WIRING = "supervise runbook job-wiring --policy RUN/policy.yaml"
REWIRE = Step("mend how the job is put together: {wiring}", JOB_WIRING)
# Of these the loss or the weights may stay as they are.
LASTING = (_OF.NUMERIC, _OF.SCHEDULE, _OF.CUT, _OF.DATA, _OF.PLATEAU, _OF.STRUCTURAL, _OF.UNDECIDED)
# Their first line that fits counts; {rate} is such as "learning rate 1e-3 to 3e-2 (step 150)".
LINES: Sequence[Line] = (
    _line(
        None,
        "running statistics are not finite since step {onset}: each evaluation is NaN, and so is "
        "what was saved since",
        GO_BACK,
        _F.STATISTICS,
    ),
    _line(None, DRILLED, _F.DRILL, _F.BACK, lead=Lead.NOTHING),
    *(_line(kind, DRILLED, GO_BACK, _F.DRILL) for kind in LASTING),
    _line(None, DRILLED, _F.DRILL, lead=Lead.NOTHING),
    _line(None, FIND_VALUE, _F.RESTORED),
    _line(_OF.NO_EXCURSION, WHY_JUMP, _F.RATE_STOPPED),
    _line(_OF.NO_EXCURSION, REWIRE, _F.WIRING),
    _line(_OF.NO_EXCURSION, lead=Lead.NOTHING),
    _line(_OF.RECOVERABLE, COME_AGAIN, _F.INPUT, _F.PASSED),
    _line(
        _OF.RECOVERABLE,
        "ask whether the data was meant to change at step {onset}, and look at that batch",
        "if it was meant: nothing to do",
        "if not: {end}use no checkpoint saved since step {onset}",
        START,
        _F.INPUT,
    ),
    _line(_OF.RECOVERABLE, WHY_JUMP, _F.RATE_STOPPED),
    _line(_OF.RECOVERABLE, "the learning rate was capped: set its schedule right", _F.HELD),
    _line(_OF.RECOVERABLE, REWIRE, _F.WIRING),
    _line(_OF.RECOVERABLE, lead=Lead.NOTHING),
    _line(_OF.EXPECTED, "it was planned", lead=Lead.NOTHING),
    # NaN or Inf reached the weights, or may have.
    _line(_OF.NUMERIC, SET_RIGHT, _F.RATE, _F.BACK),
    _line(_OF.NUMERIC, SET_RIGHT, GO_BACK, _F.RATE),
    _line(_OF.NUMERIC, COME_AGAIN, _F.INPUT, _F.BACK),
    _line(_OF.NUMERIC, LOOK_AT_BATCH, GO_BACK, _F.INPUT),
    _line(
        _OF.NUMERIC,
        Step(f"it came again after the rollback, and ended without one: {LOOK}", MEMORY_ERRORS),
        _F.CAME_BACK,
        _F.BACK,
    ),
    _line(_OF.NUMERIC, IN_WEIGHTS, _F.UNDONE, _F.BACK),
    _line(_OF.NUMERIC, "the weights may be damaged", GO_BACK),
    _line(_OF.CONTAINED, WHY_JUMP, _F.RATE_STOPPED),
    _line(_OF.CONTAINED, *NO_UPDATES, _F.NO_UPDATES),
    _line(_OF.CONTAINED, IN_WEIGHTS, _F.UNDONE),
    _line(_OF.CONTAINED, "look at the data of step {onset}", NO_ROLLBACK, _F.INPUT),
    _line(_OF.CONTAINED, "find the first value that was not finite, in step {onset}", NO_ROLLBACK),
    # The job changed something itself.
    _line(_OF.SCHEDULE, f"{COMPARE}: {{rate}}", _F.BACK),
    _line(_OF.SCHEDULE, f"{COMPARE}, it jumps again: {{rate}}", _F.UNDONE),
    _line(_OF.SCHEDULE, f"{COMPARE}: {{rate}}", GO_BACK),
    _line(_OF.CUT, COMPARE_TOKENS, _F.BACK),
    _line(_OF.CUT, COMPARE_TOKENS, GO_BACK),
    _line(_OF.DATA, COME_AGAIN, _F.BACK),
    _line(_OF.DATA, *OTHER_LOSS, _F.SOUND),
    _line(
        _OF.DATA,
        "replay the batches from step {onset} on a copy, remove what reproduces it",
        GO_BACK,
    ),
    # The loss stays above where it was.
    _line(_OF.PLATEAU, "{rate}: set it right", THEN_GO_BACK, _F.RATE),
    _line(_OF.PLATEAU, REWIRE, THEN_START, _F.WIRING),
    _line(_OF.PLATEAU, Step(f"the rollback did not help: {EARLIER}", LIST_CHECKPOINTS), _F.UNDONE),
    _line(_OF.PLATEAU, Step(f"{EARLIER}, and skip 200 to 500 batches", LIST_CHECKPOINTS)),
    _line(_OF.STRUCTURAL, "{rate}: set it right: it jumps again", _F.RATE, _F.UNDONE),
    _line(_OF.STRUCTURAL, "{rate}: set it right", THEN_GO_BACK, _F.RATE),
    _line(_OF.STRUCTURAL, "it came again, and the loss is back now", GIVEN, _F.EXHAUSTED, _F.BACK),
    _line(_OF.STRUCTURAL, GIVEN, f"{NOT_MEANT}: mend it", THEN_START, _F.INPUT, _F.ENDED),
    _line(_OF.STRUCTURAL, GIVEN, Way("stop", NOT_MEANT), "mend it", THEN_START, _F.INPUT),
    _line(_OF.STRUCTURAL, REWIRE, THEN_START, _F.WIRING),
    _line(
        _OF.STRUCTURAL,
        "the rollback did not help: check what the model is given from step {onset}, attention "
        "(QK-norm, logits), and what was changed last",
        _F.ATTENTION,
        _F.UNDONE,
    ),
    _line(
        _OF.STRUCTURAL,
        "no optimizer-level knob will fix it: check attention (QK-norm, logits)",
        Step("go back to before its first sign", LIST_CHECKPOINTS),
        _F.ATTENTION,
    ),
    _line(
        _OF.STRUCTURAL,
        "check the routing (rate of the router, capacity, balance coefficient)",
        GO_BACK,
        _F.ROUTING,
    ),
    _line(_OF.STRUCTURAL, f"a lower learning rate did not help: {CHECK}", TO_BEFORE, _F.HELD),
    _line(_OF.STRUCTURAL, f"nothing that was tried helped: {CHECK}", TO_BEFORE, _F.EXHAUSTED),
    _line(_OF.STRUCTURAL, "check precision, kernels and batch size", THEN_START, _F.ENDED),
    _line(_OF.STRUCTURAL, Step("lower the learning rate", LOWER_RATE), THEN_GO_BACK),
    # The loss is back, and something is not.
    _line(_OF.SUSPECT, "{recurring}", "{rate}: set the schedule right", _F.RATE),
    _line(_OF.SUSPECT, "{recurring}", LOOK_AT_BATCH, _F.INPUT),
    _line(_OF.SUSPECT, "{recurring}", REWIRE, _F.WIRING),
    _line(
        _OF.SUSPECT,
        "{recurring}",
        "watch attention logits, and try QK-norm on a short run",
        _F.ATTENTION,
    ),
    _line(_OF.SUSPECT, "{recurring}", "compare the batches of these steps", _F.RECURRING),
    _line(_OF.SUSPECT, "{recurring}", "try a lower learning rate on a short run", _F.ENDED),
    _line(_OF.SUSPECT, "{recurring}", Step("a lower rate", LOWER_RATE)),
    _line(
        _OF.ARTEFACT,
        "the weights are fine",
        "check how the loss is logged (denominator, smoothing, accumulation) and the order of the "
        "data",
    ),
    _line(_OF.UNDECIDED, "{rate}: compare it with what was meant", _F.RATE),
    _line(_OF.UNDECIDED, *OTHER_LOSS, _F.SOUND),
    _line(_OF.UNDECIDED, LOOK_AT_BATCH, _F.INPUT),
    _line(
        _OF.UNDECIDED, "judge it by its reward: its loss is no objective", _F.NO_DESCENT, _F.REWARD
    ),
    _line(_OF.UNDECIDED, REWIRE, THEN_START, _F.WIRING),
    _line(
        _OF.UNDECIDED,
        "the loss has not fallen in this run: where it is no objective, as in reinforcement "
        "learning, judge the run by its return; else check the learning rate, and that the labels "
        "belong to the inputs",
        Step("check how the job is put together", JOB_WIRING),
        _F.NO_DESCENT,
    ),
    _line(_OF.UNDECIDED, "compare the weights from before and after on a fixed batch"),
)


def choose_advice(
    kind: SpikeClass,
    facts: Collection[Fact],
    words: Mapping[str, str],
    ways: Mapping[str, AdviceSteps],
) -> Advice:
    """Return the advice of the first line that fits; `ways`: the steps of each name of a `Way`."""
    line = next(line for line in LINES if line.kind in (None, kind) and line.facts <= {*facts})
    return Advice(line.lead, _filled(line.steps, words, ways))


def _filled(
    templates: Sequence[str | Step | Way], words: Mapping[str, str], ways: Mapping[str, AdviceSteps]
) -> AdviceSteps:
    steps: AdviceSteps = ()
    for part in templates:
        if isinstance(part, Way):
            steps += introduce(part.intro, ways[part.name], part.joint)
        else:
            text, command = (part, "") if isinstance(part, str) else (part.text, part.command)
            steps += (Step(text.format_map(words), command),)
    return steps


def advise_after_verdict(
    policy: Policy, state: State, incident: Incident, verdict: Verdict
) -> Advice:
    """Return what a person should do after a verdict, with a command to paste."""
    events = verdict.questions.else_happened.events
    rates = [event for event in events if event.kind in (OWN_RATE, "rate")]
    skipped = diagnosis.first_and_last_skip(state, incident, verdict.skipped)
    has_ended = state.job.has_ended
    words = {
        "onset": str(skipped[0] if skipped else incident.onset_step),
        "forward": reasons.describe_forward(incident.forward),
        "end": "" if has_ended else "end the run if it still trains, ",
        "rate": f"{rates[0].text} (step {rates[0].step})" if rates else "",
        "jump": _rate_jump(incident),
        "causes": _causes_ended_by_rollback(incident),
        "recurring": verdict.recurring or "the norms stayed up",
        "wiring": "; ".join(f"{e.text}, {e.rule}" for e in wiring_faults(verdict)),
        "skipped": f"step {skipped[0]}" if skipped else "",
    }
    if skipped and skipped[0] != skipped[-1]:
        words["skipped"] = f"what was wrong in steps {skipped[0]} to {skipped[-1]}"
    facts = {*_facts(policy, state, incident, verdict)}
    advice = choose_advice(verdict.kind, facts, words, _ways(policy, state, incident))
    if advice.lead is not None:
        return advice
    quiet = Lead.BEFORE_NEXT if Fact.ENDED in facts else Lead.LATER
    is_over = Fact.BACK in facts or (
        verdict.kind in (SpikeClass.CONTAINED, SpikeClass.NO_EXCURSION)
        and Fact.NO_UPDATES not in facts
    )
    is_over = is_over and Fact.STATISTICS not in facts
    leads_on = any(step.command not in ("", MEMORY_ERRORS) for step in advice.steps)
    numbers = () if leads_on else (Step("numbers", f"supervise why RUN {incident.id}"),)
    return Advice(quiet if is_over else None, advice.steps, numbers)


def _causes_ended_by_rollback(incident: Incident) -> str:
    start = incident.recovery.rewarm_start
    if start >= 1.0:
        return "the weights were damaged or the batches bad"
    cut = f"the learning rate too high (it was cut to {100.0 * start:.0f} % too)"
    return f"the weights were damaged, the batches bad, or {cut}"


def _ways(policy: Policy, state: State, incident: Incident) -> dict[str, AdviceSteps]:
    """Return the steps of each name of a `Way`."""
    start = advise_restart(policy, state, incident.untrusted_from)
    stop = () if state.job.has_ended else (STOP_JOB,)
    back = rollback_command(policy, state, incident) or start
    return {"back": back, "start": start, "stop": stop}


def _facts(policy: Policy, state: State, incident: Incident, verdict: Verdict) -> Iterator[Fact]:
    case, questions = incident.case, verdict.questions
    kinds = {event.kind for event in questions.else_happened.events}
    rates = kinds & {OWN_RATE, "rate"}
    restored = rule_scope.are_running_stats_restored(policy, state, incident)
    monitor = state.monitors.get(case.rank)
    changed = action_planning.input_change_since_onset(state, incident) is not None
    rules = rule_scope.input_rules(policy, incident)
    check, of_tokens = incident.deferred.weights_check, {*TOKENS}
    is_of_others = check is not None and check.other_data
    # A batch that is larger for good becomes usual; only of tokens it is known what they are since.
    passed = all(rule_scope.rule_metrics(policy, rule) <= of_tokens for rule in rules)
    passed = passed and not changed and not rule_scope.is_fed_wrongly(policy, state, incident)
    passed, is_other = passed and not is_of_others, changed or bool(rules) or is_of_others
    for fact, holds in (
        (Fact.DRILL, "drill" in kinds),
        (Fact.RATE, bool(rates)),
        (Fact.INPUT, "data" in kinds or is_other),
        (Fact.PASSED, passed),
        (
            Fact.ATTENTION,
            diagnosis.incident_involves_metrics(policy, incident, monitor, ("attn_", "max_attn_")),
        ),
        (
            Fact.ROUTING,
            diagnosis.incident_involves_metrics(policy, incident, monitor, ("moe_", "router_")),
        ),
        (Fact.WIRING, bool(wiring_faults(verdict))),
        (Fact.NO_DESCENT, monitor is not None and not monitor.has_descended),
        (Fact.REWARD, monitor is not None and diagnosis.has_reward(monitor.names)),
        (Fact.RECURRING, bool(verdict.recurring)),
        (Fact.BACK, is_loss_rejoined(verdict)),
        (Fact.SOUND, action_planning.are_weights_sound(state, incident)),
        (Fact.STATISTICS, rule_scope.are_running_stats_broken(policy, state, incident)),
        (Fact.RESTORED, restored and not rates and questions.rejoined.answer != NO),
        (Fact.UNDONE, case.rolled_back),
        (Fact.CAME_BACK, case.excursion.came_back),
        (Fact.HELD, bool(incident.recovery.rate_limits)),
        (Fact.RATE_STOPPED, is_rate_held(incident) and bool(_rate_jump(incident))),
        (Fact.NO_UPDATES, case.excursion.bad_losses > 1 and bool(verdict.skipped)),
        (Fact.EXHAUSTED, case.exhausted),
        (Fact.ENDED, state.job.has_ended),
    ):
        if holds:
            yield fact


def is_rate_held(incident: Incident) -> bool:
    """Return whether an action of the incident holds the learning rate, or held it."""
    return any(verb_of(undo) in STANDING_VERBS for _, undo in incident.recovery.undos)


def _rate_jump(incident: Incident) -> str:
    """Return how the learning rate jumped at the onset, "" where it did not."""
    jump = incident.case.jump
    if jump is None:
        return ""
    return f"went from {jump.before:.3g} to {jump.after:.3g} at step {jump.step}"


# ── commands ──────────────────────────────────────────────────────────────────────────────────────


def rollback_command(policy: Policy, state: State, incident: Incident) -> AdviceSteps:
    """Return the command that goes back to before an incident, () where it would be refused.

    As far as a runbook would: a state right before the alarm may hold the cause.
    """
    form = policy.verbs.get("rollback")
    stuck = state.job.has_ended or withdrawal.is_stalled(policy, state)
    if form is None or stuck or incident.recovery.out_of_reach:
        return ()
    steps = action_planning.steps_before_breach(policy, state, incident)
    ordered = form() if steps is None else form(at_least=steps)
    context = action_planning.basic_context(state, incident, incident.untrusted_from, "operator")
    try:
        before_step = ordered.plan(context).parse(RollbackArgs).before_step
    except Refused:
        return ()
    back = (Step(command=f"supervise rollback RUN --before {before_step}"),)
    if (failure := incident.recovery.rollback_failure) is None:
        return back
    return (Step(f"see first how the job is, as {failure}", STATUS), *introduce("then", back))


STOP_JOB = Step(command="supervise stop RUN")


def advise_restart(policy: Policy, state: State, before_step: float = math.inf) -> AdviceSteps:
    """Return how to start the job again, with the newest good checkpoint from before a step."""
    command = ["supervise --policy RUN/policy.yaml -- COMMAND"]
    good = choose_checkpoint(state.checkpoints.good(), before_step)
    checkpoint = good or state.checkpoints.unverified(before_step)
    is_bounded = before_step < math.inf
    which = f" from before step {before_step}" if is_bounded else ""
    # A paste of the command as it is must not begin at step 0.
    listed = Step(f"list the checkpoints, as no good one{which} is known", LIST_CHECKPOINTS)
    if checkpoint is None:
        command.append("'<OPTION TO LOAD IT>'")
        pick = f"one saved before step {before_step}" if is_bounded else "the newest"
        how = f"your job's own option to load {pick}, or without it from step 0"
        start = Step(f"then start it again with {how}", " ".join(command))
        return (listed, start)
    args = () if policy.job.relaunch is None else policy.job.relaunch.args
    command += [shlex.quote(fill_recipe(arg, checkpoint.path, checkpoint.step)) for arg in args]
    state_of = "verified, weights only" if checkpoint.resumable == WEIGHTS_ONLY else "verified"
    repeated = max(0, state.step - checkpoint.step)
    again = f"{repeated} step{' is' if repeated == 1 else 's are'} made again"
    unverified = state.checkpoints.unverified(before_step)
    if unverified is not None and unverified.step > checkpoint.step:
        again += f"; {unverified.path} of step {unverified.step} is newer, but not verified"
    last = state.checkpoints.newest()
    has_newer = last is not None and last.step > checkpoint.step
    if last is not None and has_newer and last.damage:
        again += f"; {last.id} of step {last.step} is newer, but damaged: {last.damage}"
    name = f"{checkpoint.id} of step {checkpoint.step} ({checkpoint.path}, {state_of}; {again})"
    if good is None:
        name = f"{checkpoint.path} of step {checkpoint.step} (saved, not verified; {again})"
    move = how = ""
    if not args:
        how = "; replace the last argument by your job's own option"
        command.append(shlex.quote(f"<OPTION TO LOAD {checkpoint.path}>"))
    elif not any(name_of in arg for arg in args for name_of in (CHECKPOINT, STEP)):
        how = f"; {' '.join(args)} lets the job choose, so see that it takes this one"
        if has_newer or is_bounded:
            move = f"move checkpoints newer than {checkpoint.id or checkpoint.path} away, as "
            move, how = f"{move}{' '.join(args)} may take one of them", ""
    before = (*(() if good else (listed,)), *sentences(move))
    then = "then " if before else ""
    return (*before, Step(f"{then}start it again from {name}{how}", " ".join(command)))


NONE: AdviceSteps = ()


def advise_manual_choices(
    policy: Policy, state: State, incident: Incident, *, is_held: bool = False
) -> AdviceSteps:
    """Return what a person should do while no action runs by itself, and what else would do.

    Args:
        is_held: it needs a release, behind the rollback: after a stop nothing takes one.
    """
    before_step = incident.untrusted_from
    start = advise_restart(policy, state, before_step)
    if state.job.has_ended:
        return start
    then_start = introduce("then", start, " ")
    stay = (Step("to go on as it is, with automatic actions", RELEASE),) if is_held else ()
    if state.checkpoints.wrong_checkpoint:  # its savepoints are of weights that nobody wants
        mend = Step("mend how the job loads its checkpoint")
        return (STOP_JOB, mend, *then_start, *introduce("or", stay))
    back, repair, look = _way_back(policy, state, incident), NONE, NONE
    if rule_scope.is_fed_wrongly(policy, state, incident):
        repair = sentences("mend what the model is given")
        back = () if incident.is_rolled_back else back  # the batches are as they were
    elif incident.is_rolled_back:
        good = choose_checkpoint(state.checkpoints.good(), before_step)
        look = () if good else sentences(_look_after_rollback(incident))
    if is_held and back:
        back, stay = (*back, Step("then, for automatic actions again", RELEASE)), ()
    stop = (STOP_JOB, *repair, *then_start)
    is_tried = incident.is_rolled_back and not incident.steps_held
    ways = [stop, back, stay] if repair or is_tried else [back, stop, stay]
    monitor = state.monitors.get(incident.case.rank)
    # Each further step is wasted: looking comes last.
    is_lost = monitor is not None and diagnosis.is_newest_nonfinite(monitor)
    if not is_lost:
        ways.insert(0, look)
    if state.job.paused:
        ways.insert(0, (Step(command="supervise resume RUN"),))
    recommended, *others = filter(None, ways)
    alternatives = (step for way in others for step in introduce("or", way))
    last = introduce("and", look, " ") if is_lost else ()
    return (*introduce("recommended", recommended), *alternatives, *last)


def _way_back(policy: Policy, state: State, incident: Incident) -> AdviceSteps:
    """Return how to roll back, with what came of the one before."""
    recovery, command = incident.recovery, rollback_command(policy, state, incident)
    is_new = not incident.is_rolled_back or recovery.restored_step is None
    if is_new or recovery.rollback_failure is not None:
        return command
    held = incident.steps_held
    result = f"held for {held} steps" if held else "were tried already"
    tried = f"the weights of step {recovery.restored_step} {result}"
    return introduce(f"go back again ({tried})", command)


def _look_after_rollback(incident: Incident) -> str:
    onset, relapse = incident.onset_step, incident.recovery.relapse_step
    if held := incident.steps_held:
        batches = f"batches of steps {onset} and {relapse}"
        batches = f"batch of step {onset}" if onset == relapse else batches
        return f"look at the {batches}, as going back held for {held} steps"
    look = f"look at what the model is given from step {onset} on, and at what was changed last"
    return f"{look}, as a rollback did not end this"


def advise_relaunch_only(policy: Policy) -> Advice:
    """Return what is left where nothing inside the job can be changed any more."""
    if policy.job.relaunch is None:
        init = Step("for a relaunch: job.relaunch, which supervise init shows")
        return Advice(None, (init, Step("then", "supervise reload RUN")))
    return Advice(None, (Step("a relaunch is left"), Step("to see from where", LIST_CHECKPOINTS)))


def advise_choices_in_hold(policy: Policy, state: State, incident: Incident) -> AdviceSteps:
    """Return what a person should do in a hold; a rollback does not end it."""
    return advise_manual_choices(policy, state, incident, is_held=True)


def advise_after_withdrawal(policy: Policy, state: State, incident: Incident) -> Advice:
    """Return what is left to do where an action was not carried out."""
    onset = incident.onset_step
    is_nonfinite = incident.case.excursion.bad_losses > 1  # still, behind what was skipped
    each = is_nonfinite and action_planning.is_each_skipped(incident)
    if incident.severity == "SEV0" and each:
        onset = diagnosis.first_and_last_skip(state, incident, incident.case.excursion.skipped)[0]
        ways = _ways(policy, state, incident) | {"start": advise_restart(policy, state, onset)}
        return Advice(None, _filled(NO_UPDATES, {"onset": str(onset)}, ways))
    change = action_planning.input_change_since_onset(state, incident)
    if not withdrawal.is_loss_out_of_band(state, incident):
        status = withdrawal.describe_job_status(policy, state)
        if change is None or rule_scope.input_rules(policy, incident):
            return Advice(Lead.NOTHING, sentences(status))
        ask = f"ask whether the data was meant to change at step {onset}"  # nobody was told of it
        return Advice(Lead.LATER, sentences(ask, status))
    old = incident.deferred.weights_check
    again = "" if old is None else _decided_again(old.retry_frame, state)
    if again and rule_scope.is_fed_wrongly(policy, state, incident):
        return Advice(Lead.FOLLOWS, sentences("no rollback yet", again))
    if rule_scope.is_fed_wrongly(policy, state, incident):
        stop = Step("the loss is still too high", STOP_JOB.command)
        mend = Step(f"mend what the model is given from step {onset} on")
        start = introduce("then", advise_restart(policy, state, onset), " ")
        return Advice(None, (stop, mend, *start))
    newest = withdrawal.newest_losses(state, incident)
    first, last = newest[0][0], newest[-1][0]
    text = f"most losses of steps {first} to {last} are above their normal range"
    if first == last:
        text = f"the loss of step {last} is above its normal range"
    meant = f"ask tomorrow whether the data was meant to change at step {onset}"
    return Advice(Lead.FOLLOWS, sentences(text, again, "" if change is None else meant))


def _decided_again(frame: int, state: State) -> str:
    """Return how far off a frame is; the weights are tested first, which takes some steps."""
    steps = frame - state.frame_count
    off = f"in {steps} step{'s' if steps > 1 else ''} at the earliest"
    return f"decided again {'soon' if steps < 1 else off}"


def advise_after_stop(policy: Policy, state: State, incident: Incident) -> AdviceSteps:
    """Return what follows when a rule has stopped the job; what stood still may do so again."""
    if incident.trigger.still:
        mend = Step("mend what it waited for, or it may stop there again")
        return (mend, *introduce("then", advise_restart(policy, state), " "))
    return advise_restart(policy, state, incident.untrusted_from)


def advise_rerun_after_end(policy: Policy, state: State, incident: Incident | None) -> AdviceSteps:
    """Return how to start the job again; what was saved in a trouble of the training holds it."""
    if incident is None or incident.severity == "SEV2" or incident.is_order:
        return advise_restart(policy, state)
    is_crash = incident.breach_step == incident.recovery.crashed
    return advise_restart(policy, state, math.inf if is_crash else incident.onset_step)


def advise_after_crash(
    policy: Policy, state: State, incident: Incident | None, remedy: AdviceSteps, restart_text: str
) -> AdviceSteps:
    """Return what follows when the job has ended by itself.

    Args:
        remedy: of what ended it.
        restart_text: what the start was given that ended before its first step, "" for none.
    """
    checks = () if remedy else sentences("read the end of the job's output")
    if restart_text:
        read = "read the end of the restart's output, as its error is not on record"
        checks = sentences("" if state.job.cause else read, f"check {restart_text} in the policy")
    start = introduce("then", advise_rerun_after_end(policy, state, incident), " ")
    return (Step("the job is down"), *checks, *remedy, *start)


# ── what a runbook does ───────────────────────────────────────────────────────────────────────────

EFFECTS = {  # of verbs that change the job
    "rollback": "the weights of an earlier step are restored",
    "relaunch": "the job is started again from a checkpoint",
    "hold_rate": "the learning rate is capped where it was before",
    "lr_scale": "the learning rate is lowered",
    "clip": "gradients are clipped",
    "update_clip": "updates are clipped",
    "skip_step": "the next updates are skipped",
    "quarantine": "the suspect shards are left out",
    "stop": "the job is stopped",
}


def describe_runbook(state: State, incident: Incident, book: Runbook) -> str:
    """Return what a runbook does to the job, in words."""
    context = action_planning.basic_context(state, incident)
    pairs = zip(book.verbs, book.steps, strict=True)
    due = [verb for verb, step in pairs if verb in EFFECTS and step.is_due(context)]
    return ", then ".join(EFFECTS[verb] for verb in dict.fromkeys(due))


def describe_runbook_progress(run: RunbookExecution | None) -> AdviceSteps:
    """Return what the runbook under way is at, () for none."""
    if run is None:
        return ()
    name, verbs = run.runbook.name, run.runbook.verbs[run.index : run.index + 1]
    if not run.runbook.verbs:
        return sentences("what was tried is taken back")
    if verbs == (action_planning.VERB,):
        return sentences(f"the weights are tested, before {name}")
    verified = f"the effect of {name} is verified"
    return sentences(verified if verbs == ("verify",) else f"{name} runs")


def advise_checks_of_firing_rules(policy: Policy, state: State, incident: Incident) -> AdviceSteps:
    """Return what to check of what still fires, by the runbook of its gravest rule."""
    firing, newest = state.firing(policy), state.checkpoints.newest()
    damaged = newest is not None and bool(newest.damage)  # for as long as no good one follows
    rules = [
        rule
        for rule in policy.rules
        if rule.id in incident.rules and rule.see
        if rule.id in firing or (damaged and CHECKPOINT_OK in rule_scope.rule_metrics(policy, rule))
    ]
    if not rules:
        return ()
    return advise_closer_look(policy, state, min(rules, key=lambda rule: rule.severity))


def advise_closer_look(policy: Policy, state: State, rule: Rule) -> AdviceSteps:
    """Return what to look at behind a rule: its runbook, or the checkpoint that is damaged."""
    newest, good = state.checkpoints.newest(), state.checkpoints.good()
    is_of_it = CHECKPOINT_OK in rule_scope.rule_metrics(policy, rule)
    if not is_of_it or newest is None or not newest.damage:
        return show_runbook(rule.see)
    last = "no checkpoint of this run is good"
    if good:
        last = f"the newest good one is {good[-1].id} of step {good[-1].step}"
    return (Step(f"{newest.path}: {newest.damage}"), Step(last, LIST_CHECKPOINTS))


def show_runbook(name: str) -> AdviceSteps:
    """Return the command that prints a runbook; () for none."""
    if not name:
        return ()
    return (Step("to look closer", f"supervise runbook {name} --policy RUN/policy.yaml"),)


def is_request_unneeded(incident: Incident, verdict: Verdict) -> bool:
    """Return whether the loss that a request is about went astray, and came back by itself."""
    astray = verdict.questions.rejoined.excursion or incident.case.excursion.nonfinite is not None
    return astray and is_loss_rejoined(verdict)


def advise_on_request(
    state: State, incident: Incident, pending: ApprovalRequest, verdict: Verdict | None
) -> Advice:
    """Return how to answer a request: one that the loss no longer needs is not urged."""
    if verdict is None or not is_request_unneeded(incident, verdict):
        left = format_age((pending.deadline_ns - state.at_ns) / 1e9)
        approve = Step(f"to approve {pending.runbook}", f"supervise approve RUN {pending.id}")
        deny = Step("to deny it", f"supervise deny RUN {pending.id}")
        until = f"without an answer within {left}, {WITHOUT_ANSWER[pending.on_timeout]}"
        return Advice(None, (approve, deny, Step(until)))
    back = f"the loss is back without {pending.runbook}, so denying {pending.id} loses nothing"
    deny = Step(back, f"supervise deny RUN {pending.id}")
    return Advice(None, (deny, Step("then, for automatic actions again", RELEASE)))


def advise_after_faulty_restart(state: State, incident: Incident) -> AdviceSteps:
    """Return what a restart has left wrong, with what to do; () for nothing."""
    parts: list[Step] = []
    if state.checkpoints.wrong_checkpoint:
        parts += [
            Step("the job does not train on from its checkpoint: check how it resumes"),
            Step("good ones", LIST_CHECKPOINTS),
        ]
    overlap, recovery = state.repeated.overlap, incident.recovery
    if overlap is not None and recovery.restored_step is not None and not recovery.loop_kept:
        parts += sentences(*(d.REMEDY for d in overlap.differences if d.MATTERS))
    return tuple(parts)


def advise_remedy_with_restart(
    policy: Policy, state: State, incident: Incident, remedy: AdviceSteps
) -> AdviceSteps:
    """Return how to go on where a restart has left something wrong."""
    before_step, overlap = incident.untrusted_from, state.repeated.overlap
    differences = () if overlap is None else overlap.differences
    chosen = choose_checkpoint(state.checkpoints.good(), before_step)
    lost = {type(difference) for difference in differences if difference.MATTERS} == {UpdateDiffers}
    if lost and chosen is not None and chosen.resumable == WEIGHTS_ONLY:
        onward = "" if state.job.has_ended else "let it train on, as "
        again = f"{onward}another start from {chosen.id} (weights only) has new moments again"
        return (Step(again), *introduce("before the next start", remedy))
    stop, by_hand = STOP_JOB, ""
    for rate in (each for each in differences if isinstance(each, RateDiffers)):
        stop = Step(f"stop it now, unless it is meant ({rate.shift})", STOP_JOB.command)
        checkpoint = choose_checkpoint(state.checkpoints.good(), before_step)
        at = "its step" if checkpoint is None else f"step {checkpoint.step + 1}"
        by_hand = f"set the schedule to {at} by hand where the checkpoint holds no state of it"
    first = () if state.job.has_ended else (stop,)
    start = introduce("then", advise_restart(policy, state, before_step), " ")
    return (*first, *remedy, *sentences(by_hand), *start)


def describe_pending_stop(policy: Policy) -> AdviceSteps:
    """Return what becomes of a job that nothing can help any more, as the policy has it."""
    if policy.give_up == PAGE:
        return ()
    unless = "its rules of SEV0 are clear" if policy.give_up == STOP_SEV0 else "it recovers"
    stopped = f"the job is stopped unless {unless} within {QUIET_STEPS} steps"
    return sentences(f"{stopped} (give_up: {policy.give_up})")


def advise_on_separate_rule(incident: Incident, see: str) -> Advice:
    """Return the advice on a rule that is apart from the open incident; `see`: its runbook."""
    return Advice(None, (Step(f"beside {incident.id}"), *show_runbook(see)))


def automatic_action_lead(policy: Policy, rule: Rule) -> Lead:
    """Return whether any rule about the same acts by itself."""
    about = rule_scope.rule_family(policy, rule)
    about = rule_scope.TRAINING if about == rule_scope.DATA else about
    rules = [other for other in policy.rules if other.runbook is not None]
    rules = [other for other in rules if rule_scope.rule_family(policy, other) == about]
    if any(policy.mode_of(other) in ACTING_MODES for other in rules):
        return Lead.FOLLOWS
    return Lead.ONLY_WATCHED if rules else Lead.NO_ACTION


SLOWER = 1.05  # times; less can wait. Project default


def advise_without_action(policy: Policy, monitor: RankMonitor, rule: Rule) -> AdviceSteps:
    """Return how long a rule can wait for which the policy has no action, or what would help."""
    if (times := diagnosis.waiting_slowdown_factor(policy, monitor, rule)) > SLOWER:
        slower = f"the run is about {times:.2g} times slower while it waits"
        return sentences(slower, "use more workers or prefetch at the next restart")
    when = diagnosis.describe_time_to_full_memory(policy, monitor, rule)
    return sentences(when or "it can wait until tomorrow")


NEXT_SESSION = sentences("the next session is monitored from scratch")
AFTER_KILL = (
    Step(
        "to see on its host whether the kernel's memory killer ended it",
        "dmesg -T | grep -i 'killed process'",
    ),
    Step("then lower memory use; if it did not, look in the logs of scheduler and container"),
)


SAME_RATE = 0.05  # of a learning rate: as before; project default


def advise_free_rate(
    incident: Incident, purpose: str = "give the job its own learning rate back"
) -> Step:
    """Return how to let the learning rate go, once what moved it is over."""
    is_drill = any(event.kind == "drill" for event in incident.case.context)
    once = "the drill is over" if is_drill else "its schedule is mended"
    text = f"once {once}, to {purpose} (1.0 is a factor, not a rate)"
    return Step(text, "supervise lr RUN 1.0")


def advise_on_held_rate(state: State, incident: Incident) -> tuple[AdviceSteps, AdviceSteps]:
    """Return how the learning rate is, and how to let it go; () where it was never held."""
    monitor, recovery = state.monitors.get(incident.case.rank), incident.recovery
    if monitor is None or state.job.has_ended or not is_rate_held(incident):
        return (), ()
    if monitor.value("lr_hold") is None:
        held, rate = monitor.history.series("lr_hold"), monitor.value("learning_rate")
        if "lr_hold" not in monitor.names:  # nor is it known to have ended
            lift = advise_free_rate(incident, "lift a cap of the learning rate that may still hold")
            return (*sentences(_describe_rate(incident, rate)), lift), ()
        now = "" if rate is None else f" (now {rate:.3g})"
        until = "the cap of the learning rate ended" + (f" at step {held[-1][0]}" if held else "")
        return sentences(f"{until}: the job's schedule is in force{now}"), ()
    jump = incident.case.jump
    limit = recovery.rate_limits[-1] if recovery.rate_limits else jump.before if jump else None
    height = "where it was before" if limit is None else f"at {limit:.3g}"
    capped = f"the learning rate is capped {height} until the job asks for no more"
    return sentences(capped), (advise_free_rate(incident),)


def _describe_rate(incident: Incident, rate: float | None) -> str:
    if rate is None:
        return ""
    jump = incident.case.jump
    is_same = jump is not None and math.isclose(rate, jump.before, rel_tol=SAME_RATE)
    return f"learning rate {rate:.3g}{', as before' if is_same else ''}"


def advise_in_case_of_relapse(policy: Policy, state: State, incident: Incident) -> Advice:
    """Return what follows if the trouble comes back."""
    level, levels = incident.escalation.level, policy.ladder.levels
    book = policy.runbooks.get(levels[level]) if 0 <= level < len(levels) else None
    name, _ = next_level(policy.ladder, level)
    then = f"{name} runs"
    if name == HOLD:
        then = "no further try, as the policy has none left for this incident; a person is needed"
    if book and incident.case.rate and action_planning.is_affordable(policy, state, incident, book):
        then = f"{book.name} runs once more, at a lower learning rate; if that is no help, {then}"
    then = f"if it comes back within {policy.probation_steps} steps: {then}"
    crashes = state.job.restarts.crashes
    if crashes and incident.breach_step == incident.recovery.crashed:  # no rule judges it
        step = crashes[-1]
        then = f"if it ends at step {step} again: no further restart, as that is no progress"
        then = then if state.step <= step else ""
    if wrong := advise_after_faulty_restart(state, incident):
        remedy = advise_remedy_with_restart(policy, state, incident, wrong)
        return Advice(None, (*remedy, *sentences(then)))
    rate, live = advise_on_held_rate(state, incident)
    return Advice(Lead.NOTHING, (*rate, *sentences(then)), live)


def advise_at_end(
    policy: Policy, state: State, incident: Incident, verdict: Verdict | None
) -> Advice:
    """Return the advice of an incident that ends; what is still wrong comes first."""
    ended, then = state.job.has_ended, Advice(Lead.NOTHING)
    quiet = Lead.BEFORE_NEXT if ended else Lead.LATER
    if verdict is not None:
        against_weights = rule_scope.may_speak_against_weights(policy, incident)
        checks = () if against_weights else advise_checks_of_firing_rules(policy, state, incident)
        then = (
            Advice(quiet, checks)
            if checks
            else advise_after_verdict(policy, state, incident, verdict)
        )
    if then.lead == Lead.NOTHING and (
        checks := advise_checks_of_firing_rules(policy, state, incident)
    ):
        then = Advice(quiet, checks)
    if then.lead == Lead.NOTHING and incident.slow is not None:
        where = f" ({PARTS[incident.slow.part]})" if incident.slow.part else ""
        text = f"find what made the steps slow from step {incident.slow.since} on{where}"
        then = Advice(quiet, sentences(text))
    monitor = state.monitors.get(incident.case.rank)
    is_bad = (
        verdict is not None
        and verdict.kind != SpikeClass.CONTAINED
        and (monitor is None or monitor.is_objective)  # else a higher loss is not worse
        and not is_loss_rejoined(verdict)
    )
    is_bad = is_bad and not action_planning.are_weights_sound(state, incident)
    if ended and then.lead is None and is_bad:
        use = f"use no checkpoint that was saved since step {incident.onset_step}: move them away"
        then = Advice(None, (Step(use), *then.steps), then.live)
    if wrong := advise_after_faulty_restart(state, incident):
        return Advice(None, advise_remedy_with_restart(policy, state, incident, wrong))
    rate, live = advise_on_held_rate(state, incident)
    return Advice(then.lead, then.steps + rate, live or then.live)
