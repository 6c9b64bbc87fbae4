"""Commands of operators: each is answered in a sentence, on record with who said it.

An order runs as a runbook of one verb through the same intents as any other. It asks nobody for
approval, may exceed a budget (it counts, and the override is on record), and works in every mode: a
mode limits what the policy does by itself. While an action is under way orders are refused, but for
`stop` and `resume`, which wait for its end; a runbook that is only being verified gives way."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from . import (
    action_planning,
    approvals,
    closing,
    diagnosis,
    notices,
    opening,
    reasons,
    run_notices,
    runbook_runner,
)
from .incident import Incident, RunbookStart, format_arguments
from .model import state_machine
from .model.action import Action, Refused
from .model.decisions import (
    RELEASED,
    CommandAnswered,
    LaunchAccepted,
    ReloadRequested,
    RunbookPreempted,
)
from .model.events import OperatorCommand
from .model.payload import Payload
from .model.policy import Planned, Policy, Runbook
from .notices import Cause
from .run_state import ApprovalLog, ApprovalRequest, LossContext, MessageDraft, State, StepContext
from .shard_attribution import ShardAttribution

PATIENT = frozenset({"stop", "resume"})  # neither may be lost
KEY_TEXT = 200  # characters of a name that a person gives
LARGEST = 2**53  # up to here whole numbers are floats, too
TOLD_WHOLE = 90  # characters of a shard's name; the job tells a longer one cut short
LONGEST_S = 86400.0  # a person's pause; as long as `pause` allows
NAMED = 3  # shards that nobody has seen, in an answer
TYPO = 2  # characters that a near miss may differ in


Keys: TypeAlias = dict[str, float | bool | tuple[str, ...]]  # of an action, as in YAML


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Answer:
    """What is said to a word, and what happens then.

    Attributes:
        action: id of the action that follows; its outcome is on record under it.
    """

    text: Cause | str
    ok: bool = True
    action: str | None = None
    then: Callable[[], None] = _nothing


def describe_action_under_way(incident: Incident) -> str:
    """Return what is being performed, or taken back, right now; "" when nothing is."""
    run = incident.run
    if run is None or not run.is_busy():
        return ""
    return run.intent.action_id or run.runbook.name


def _queued(incident: Incident, event: OperatorCommand, under_way: str) -> Answer:
    commands = incident.deferred.commands
    return Answer(f"queued until {under_way} has finished", then=lambda: commands.append(event))


def perform_order(ctx: StepContext, event: OperatorCommand) -> Answer:
    """Answer a word that acts. Raises `Refused` when it cannot be carried out."""
    state, incident = ctx.state, ctx.state.incident
    verb, keys = VERBS[event.command](event)
    if verb == "rollback":
        keys |= action_planning.OPERATOR_ROLLBACK
    action = _build_action(ctx.policy, verb, keys)
    under_way = describe_action_under_way(incident) if incident is not None else ""
    if under_way and incident is not None:
        if verb not in PATIENT:
            raise Refused(f"{under_way} is in progress; repeat the command when it has finished")
        return _queued(incident, event, under_way)
    if state.job.returncode is not None:
        raise Refused("the job has ended")
    if verb == "resume" and not state.job.paused:
        raise Refused("the job is not paused")
    remark = _unseen(state.context.attribution, event) if verb == "quarantine" else ""
    snapshots = [_build_action(ctx.policy, "snapshot", {})] if verb == "rollback" else []
    book = Runbook(verb, (*snapshots, action), (*["snapshot"] * len(snapshots), verb))
    is_rollback = verb == "rollback"
    before_step = parse_count(event, "before", state.step + 1) if is_rollback else None
    about = incident or Incident("", state.step, state.step + 1, "SEV2", [])
    reason = action_planning.explain_infeasible(state, about, book, before_step, event.operator)
    if reason:
        raise Refused(reason)
    name = incident.id if incident is not None else f"inc-{state.history.opened + 1}"
    number = incident.escalation.runs + 1 if incident is not None else 1
    return Answer(
        f"{name}: {verb} sent to the job{remark}",
        action=f"{name}/{number}/{len(snapshots)}-{verb}",
        then=lambda: _run(ctx, event, book, before_step),
    )


def _run(ctx: StepContext, event: OperatorCommand, book: Runbook, before_step: int | None) -> None:
    state, incident = ctx.state, ctx.state.incident
    if incident is None:
        monitor = next(iter(state.monitors.values()), None)
        text = runbook_runner.operator_request_text(book, event.operator)
        incident = opening.open_incident(
            ctx, monitor, "SEV2", text, breach=state.step + 1, order=(event.operator, book.name)
        )
    elif incident.run is not None:
        text = f"{incident.run.runbook.name} preempted by {event.operator}"
        ctx.record(RunbookPreempted(reason=text))
    runbook_runner.start_requested_runbook(ctx, incident, book, event.operator, before_step)


def _build_action(policy: Policy, verb: str, keys: Keys) -> Action:
    form = policy.verbs.get(verb)
    if form is None:
        raise Refused(f"there is no action {verb!r} here")
    try:
        action = form(**keys)
    except TypeError as error:
        raise Refused(f"{verb}: {error}") from error
    for key, sentence in action.find_errors():
        raise Refused(f"{verb}: {'the factor' if key == 'set' else key} {sentence}")
    return action


# ── shards ────────────────────────────────────────────────────────────────────────────────────────


def _unseen(attribution: ShardAttribution, event: OperatorCommand) -> str:
    """Say which of the shards have not been seen in this run, "" where all have, or nobody knows.

    Raises:
        Refused: the job knows no shards, so that none could be left out.
    """
    shard_names = attribution.names
    if not shard_names and not attribution.shards:
        raise Refused(
            "quarantine: the job does not report which shards its data is from, so none can be "
            "left out; if its loader workers call is_quarantined, write quarantine.json into the "
            "run directory by hand (probes/README.md)"
        )
    names = [name for name in _names(event, "shards") if len(name) <= TOLD_WHOLE]
    strange = [name for name in names if name not in shard_names] if shard_names else []
    if not strange:
        return ""
    strange_text = ""
    for name in strange[:NAMED]:
        near = next((shard for shard in sorted(shard_names) if _near(name, shard)), None)
        strange_text += f", {name}" + (f" (did you mean {near}?)" if near else "")
    more_text = f" and {len(strange) - NAMED} more" if len(strange) > NAMED else ""
    return f"; not among the {len(shard_names)} shards seen so far: {strange_text[2:]}{more_text}"


def _near(name: str, other_name: str) -> bool:
    """Whether only the directory is missing, or a few letters differ; numbers are no typos."""
    short, long = sorted((name, other_name), key=len)
    if long.endswith(f"/{short}"):
        return True
    head = next((index for index, letter in enumerate(short) if letter != long[index]), len(short))
    left_part, right = short[head:], long[head:]
    common_tail = next(
        (n for n in range(len(left_part)) if left_part[-1 - n] != right[-1 - n]), len(left_part)
    )
    left_part, right = left_part[: len(left_part) - common_tail], right[: len(right) - common_tail]
    return len(right) <= TYPO and not (left_part + right).isdecimal()


# ── the arguments of words, which anybody may have written ────────────────────────────────────────


def parse_count(event: OperatorCommand, key: str, default: int | None = None) -> int:
    """Return a whole number from 0 up. Raises `Refused` when it is none, or missing."""
    value = event.args.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise Refused(f"{event.command} needs `{key}`, a whole number, not {value!r:.60}")
    return value


def _number(event: OperatorCommand, key: str) -> float:
    value = event.args.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise Refused(f"{event.command} needs `{key}`, a number, not {value!r:.60}")
    return float(value)


def _names(event: OperatorCommand, key: str) -> tuple[str, ...]:
    value = event.args.get(key)
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise Refused(f"{event.command} needs `{key}`, at least one name")
    texts = tuple(name for name in names if isinstance(name, str) and 0 < len(name) <= KEY_TEXT)
    if len(texts) < len(names):
        raise Refused(f"{event.command}: a name in `{key}` is empty, too long, or no text")
    return texts


def _lr(event: OperatorCommand) -> tuple[str, Keys]:
    rewarm = parse_count(event, "rewarm", 0)
    return "lr_scale", {"set": _number(event, "value"), "rewarm": rewarm}


def _rollback(event: OperatorCommand) -> tuple[str, Keys]:
    has_rewarm = event.args.get("rewarm") is not None
    return "rollback", {"rewarm": parse_count(event, "rewarm")} if has_rewarm else {}


def _quarantine(event: OperatorCommand) -> tuple[str, Keys]:
    return "quarantine", {"shards": _names(event, "shards"), "max_fraction": 0.5}


VERBS: Mapping[str, Callable[[OperatorCommand], tuple[str, Keys]]] = {
    "pause": lambda event: ("pause", {"lease": LONGEST_S}),
    "resume": lambda event: ("resume", {}),
    "savepoint": lambda event: ("savepoint", {}),
    "save": lambda event: ("checkpoint", {}),
    "skip": lambda event: ("skip_step", {"count": parse_count(event, "steps", 1)}),
    "stop": lambda event: ("stop", {"requeue": event.args.get("requeue") is True}),
    "lr": _lr,
    "rollback": _rollback,
    "quarantine": _quarantine,
    "release": lambda event: ("unquarantine", {"shards": _names(event, "shard")}),
}


def approve_request(ctx: StepContext, event: OperatorCommand) -> Answer:
    """Let what was asked for run, when it is still what was asked for.

    `event.args`: `id` of the request, and perhaps `sha`, which must be the one that was told.
    """
    pending, incident = _request(ctx.state, event)
    if pending is None or incident is None:
        return _late(ctx.state.approvals, event, "approved")
    if pending.granted:
        return Answer(notices.ApprovalAgain(request=pending.id, operator=pending.granted))
    stale = approvals.explain_stale_request(ctx.policy, ctx.state, incident, pending)
    if stale is not None:
        text = notices.RequestStale(request=pending.id, cause=stale)
        return Answer(text, ok=False, then=lambda: restart_requested_runbook(ctx, stale))

    def then() -> None:
        pending.granted = event.operator
        runbook_runner.start_waiting_runbook(ctx)

    answer = notices.ApprovalAnswer(request=pending.id, runbook=pending.runbook)
    return Answer(answer, then=then)


def deny_request(ctx: StepContext, event: OperatorCommand) -> Answer:
    """Do not let it run; the incident is held, as a person has taken it over."""
    pending, incident = _request(ctx.state, event)
    if pending is None or incident is None:
        return _late(ctx.state.approvals, event, "denied")
    if pending.granted:
        raise Refused(notices.DenialLate(request=pending.id, operator=pending.granted))
    text = notices.DenialAnswer(request=pending.id, runbook=pending.runbook)
    return Answer(text, then=lambda: _denied(ctx, incident, event.operator))


def expire_request(ctx: StepContext) -> None:
    """Decide a request that no answer in time as the policy says."""
    state, incident, pending = ctx.state, ctx.state.incident, ctx.state.approvals.pending
    if pending is None or incident is None or pending.granted:
        return
    if state.at_ns < pending.deadline_ns:
        return
    if pending.on_timeout == approvals.ALLOW:
        pending.granted = "timeout: no answer in time"
        runbook_runner.start_waiting_runbook(ctx)
    else:
        _denied(ctx, incident)


def restart_requested_runbook(ctx: StepContext, reason: Cause) -> None:
    """The request that waits is void; what its runbook wants by now is begun, or asked, anew."""
    incident, pending = ctx.state.incident, approvals.settle_request(ctx, "expired", reason)
    if incident is None or pending is None or pending.runbook not in ctx.policy.runbooks:
        return
    incident.deferred.retry = RunbookStart(
        pending.runbook, pending.level, pending.reason, pending.escalated
    )
    runbook_runner.start_waiting_runbook(
        ctx
    )  # at once, or when the evidence of the first request is taken


def _request(
    state: State, event: OperatorCommand
) -> tuple[ApprovalRequest | None, Incident | None]:
    """Return the request that is meant, and its incident; None when it does not wait."""
    pending = state.approvals.pending
    if pending is None or event.args.get("id") != pending.id:
        return None, None
    sha = str(event.args.get("sha") or "")
    if sha and not pending.sha.removeprefix("sha256:").startswith(sha.removeprefix("sha256:")):
        raise Refused(notices.RequestDiffers(request=pending.id, sha=pending.sha))
    return pending, state.incident


def _late(requests: ApprovalLog, event: OperatorCommand, outcome: str) -> Answer:
    settled = approvals.explain_settled_request(requests, str(event.args.get("id")), outcome)
    return Answer(settled.text, ok=settled.is_harmless)


def _denied(ctx: StepContext, incident: Incident, operator: str = "") -> None:
    """An operator denies the request, or nobody has answered it in time."""
    incident.denied_by = operator
    pending = approvals.settle_request(ctx, "denied", reasons.Answered(operator=operator), operator)
    if pending is not None:
        denied = reasons.RequestDenied(
            runbook=pending.runbook, request=pending.id, operator=operator
        )
        closing.hold_incident(ctx, incident, denied)


SILENT_STEPS = 1000  # of `silence` without a number; project default


def on_command(ctx: StepContext, event: OperatorCommand) -> None:
    """Answer a word, then do what it says."""
    if event.command == "reload":  # its answer is the policy that follows
        text = f"{event.operator}: {event.command}"
        ctx.record(ReloadRequested(reason=text, args=event.args))
        return
    try:
        answer = _answer(ctx, event)
    except Refused as no:
        answer = Answer(str(no), ok=False)
    key, text = event.args.get("key"), str(answer.text)
    args_text = format_arguments(
        Payload({name: arg for name, arg in event.args.items() if name != "key"})
    )
    ctx.record(
        CommandAnswered(
            reason=f"{event.operator}: {event.command} {args_text}".rstrip() + f": {text}",
            args=event.args,
            command=event.command,
            command_id=key if isinstance(key, str) else None,
            answer=text,
            ok=answer.ok,
            action=answer.action,
        )
    )
    answer.then()


def run_deferred_commands(ctx: StepContext) -> None:
    """Do what operators said while an action was under way, when it is over."""
    incident = ctx.state.incident
    if incident is None or not incident.deferred.commands or describe_action_under_way(incident):
        return
    deferred = incident.deferred
    commands, deferred.commands = deferred.commands, []
    for event in commands:
        on_command(ctx, event)


# Arguments of each command: one that it does not have may be a mistyped one that it has.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "skip": ("steps",),
    "stop": ("requeue",),
    "lr": ("value", "rewarm"),
    "rollback": ("before", "rewarm"),
    "quarantine": ("shards",),
    "release": ("shard",),
    "plan": ("from", "to", "what", "expect"),
    "ack": ("incident",),
    "silence": ("rule", "for"),
    **dict.fromkeys(("approve", "deny"), ("id", "sha")),
}


def _answer(ctx: StepContext, event: OperatorCommand) -> Answer:
    arguments = ARGUMENTS.get(event.command, ())
    unknown = next((name for name in event.args if name not in ("key", "via", *arguments)), None)
    if unknown is not None and event.command in (*VERBS, *PLAIN):
        named = f"it has {', '.join(arguments)}" if arguments else "it has none"
        raise Refused(f"{event.command} has no argument {unknown!r:.60}; {named}")
    if event.command == "release" and event.args.get("shard") is None:
        return _release(ctx, event)
    if event.command in VERBS:
        return perform_order(ctx, event)
    if event.command in PLAIN:
        return PLAIN[event.command](ctx, event)
    raise Refused(f"unknown command {event.command!r}")


def _release(ctx: StepContext, event: OperatorCommand) -> Answer:
    """End a hold, or take a launch as it is that did not go on from its checkpoint."""
    state, release_text = ctx.state, f"released by {event.operator}"
    incident, is_held = state.incident, state.machine == state_machine.HOLDING
    if not is_held and not state.checkpoints.wrong_checkpoint:
        raise Refused(f"nothing to release: automatic actions are on (state: {state.machine})")

    def take_as_it_is() -> None:
        state.checkpoints.accept_launch(state.attempt, state.step)
        text = f"{release_text}: checkpoints saved from now on are good again"
        ctx.record(LaunchAccepted(reason=text))

    if not is_held:
        return Answer(
            "checkpoints that this launch saves from now on are good again", then=take_as_it_is
        )

    if incident is not None and (under_way := describe_action_under_way(incident)):
        return _queued(incident, event, under_way)

    def then() -> None:
        if incident is not None:
            closing.close_incident(ctx, incident, RELEASED, released_by=event.operator)
        state.checkpoints.accept_launch(state.attempt, state.step)
        for monitor in state.monitors.values():
            monitor.release()
        ctx.move("released", release_text)

    firing = ", ".join(state.firing(ctx.policy)) or "none"
    text = f"automatic actions are on again; rules in breach, which fire again: {firing}"
    return Answer(text, then=then)


def _ack(ctx: StepContext, event: OperatorCommand) -> Answer:
    incident = ctx.state.incident
    if incident is None:
        raise Refused("no incident is open")
    name = event.args.get("incident") or incident.id
    if name != incident.id:
        raise Refused(f"{name} is not open; {incident.id} is")

    def then() -> None:
        operator = incident.acknowledged_by = event.operator
        notice = notices.Acknowledged(
            severity=incident.severity, incident=incident.id, operator=operator
        )
        draft = MessageDraft.of(notice, incident)
        draft.acknowledged_by = operator
        ctx.messages.add(draft, replace=False)

    return Answer(run_notices.AckAnswer(incident=incident.id), then=then)


def _silence(ctx: StepContext, event: OperatorCommand) -> Answer:
    state, name = ctx.state, str(event.args.get("rule"))
    rule = next((rule for rule in ctx.policy.rules if rule.id == name), None)
    if rule is None:
        pack = name.partition(".")[0] + "."
        near = [rule.id for rule in ctx.policy.rules if rule.id.startswith(pack)]
        hint = f"; there is {', '.join(near)}" if near else ""
        raise Refused(f"there is no rule {name!r}{hint}")
    if "SEV0" in (rule.severity, *rule.phases.values()):
        raise Refused(f"{name} is SEV0 and cannot be silenced")
    steps = parse_count(event, "for", SILENT_STEPS)

    def then() -> None:
        state.rules.silenced.pop(name, None)
        if steps:
            state.rules.silenced[name] = (state.frame_count + steps, event.operator)

    if not steps:
        return Answer(run_notices.SilenceOver(rule=name), then=then)
    return Answer(run_notices.SilenceAnswer(rule=name, steps=steps), then=then)


PLANS = 16  # that are known at a time and not over; project default


def _plan(ctx: StepContext, event: OperatorCommand) -> Answer:
    """Take a change that people know of: what it does to the loss opens no incident.

    It replaces those of the same words that it overlaps; up to step 0 it takes back all of them.
    """
    context, expect = ctx.state.context, str(event.args.get("expect") or "either")
    first, last = parse_count(event, "from", ctx.state.step + 1), parse_count(event, "to")
    what = event.args.get("what")
    if not isinstance(what, str) or not 0 < len(what) <= KEY_TEXT:
        raise Refused("plan: a name in `what` is empty, too long, or no text")
    same = [known for known in context.planned if known.what == what]
    if last:
        same = [known for known in same if known.from_step <= last and first <= known.to_step]
    others = tuple(known for known in context.planned if known not in same)
    if not last:
        if others == context.planned:
            raise Refused(f"plan: no change {what!r} was announced")
        return Answer(f"{what} is no longer planned", then=lambda: _set_plans(context, others))
    plan = Planned(first, last, what, cast(Literal["up", "down", "either"], expect))
    if plan.to_step <= ctx.state.step:
        raise Refused(f"plan: step {plan.to_step} is over; the run is at step {ctx.state.step}")
    for key, sentence in plan.find_errors():
        raise Refused(f"plan: {key} {sentence}")
    if plan.expect not in ("up", "down", "either"):
        raise Refused(f"plan: expect must be up, down or either, not {expect!r:.60}")
    if len(others) >= PLANS:
        now = ctx.state.step
        others = tuple(known for known in others if known.to_step + diagnosis.BEFORE >= now)
    if len(others) >= PLANS:
        raise Refused(
            f"plan: {PLANS} changes are planned, and no more can be; take one back first, by its "
            f"words: supervise plan add RUN --to 0 --what {shlex.quote(others[0].what)}"
        )
    steps = ", ".join(f"{known.from_step} to {known.to_step}" for known in same)
    replaced = f" (replaces steps {steps})" if same else ""
    return Answer(
        f"steps {first} to {plan.to_step} are planned{replaced}: what {what} does to the loss "
        "opens no incident; SEV0 still does; to take it back: supervise plan add RUN --to 0 --what "
        f"{shlex.quote(what)}",
        then=lambda: _set_plans(context, (*others, plan)),
    )


def _set_plans(context: LossContext, planned: tuple[Planned, ...]) -> None:
    context.planned = planned


PLAIN = {
    "plan": _plan,
    "ack": _ack,
    "silence": _silence,
    "approve": approve_request,
    "deny": deny_request,
}
