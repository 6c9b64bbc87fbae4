"""Words of operators: every one is answered in a sentence, on record with who said it.

Here are the ones that change what is known, and the table of all. Those that act on the job are in
operator_actions.py, the answers to requests in approval_answers.py.
"""

from __future__ import annotations

from ..incidents import closing
from ..model import state_machine
from ..model.action import Refused
from ..model.decisions import RELEASED, CommandAnswered, LaunchAccepted, ReloadRequested
from ..model.events import OperatorCommand
from ..model.interfaces import UPDATED
from ..model.payload import CommandArgs, Payload
from ..state.incident import brief
from ..state.message_draft import MessageDraft
from ..state.run_state import StepContext
from . import approval_answers, operator_actions
from .operator_actions import Answer

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
    args = event.args.parse(CommandArgs)
    said = brief(Payload({name: arg for name, arg in event.args.items() if name != "key"}))
    ctx.record(
        CommandAnswered(
            reason=f"{event.operator}: {event.command} {said}".rstrip() + f": {answer.text}",
            args=event.args,
            command=event.command,
            command_id=args.key,
            answer=answer.text,
            ok=answer.ok,
            action=answer.action,
        )
    )
    answer.then()


def run_deferred(ctx: StepContext) -> None:
    """Do what operators said while an action was under way, when it is over."""
    incident = ctx.state.incident
    if incident is None or not incident.deferred.commands or operator_actions.busy(incident):
        return
    deferred = incident.deferred
    wanted, deferred.commands = deferred.commands, []
    for event in wanted:
        on_command(ctx, event)


def _answer(ctx: StepContext, event: OperatorCommand) -> Answer:
    if event.command == "release" and event.args.parse(CommandArgs).shard is None:
        return _release(ctx, event)
    if event.command in operator_actions.VERBS:
        return operator_actions.order(ctx, event)
    if event.command in PLAIN:
        return PLAIN[event.command](ctx, event)
    raise Refused(f"unknown command {event.command!r}")


def _release(ctx: StepContext, event: OperatorCommand) -> Answer:
    """End a hold, or take a launch as it is that did not go on from its checkpoint."""
    state, by = ctx.state, f"released by {event.operator}"
    held = state.machine == state_machine.HOLDING
    if not held and not state.checkpoints.wrong_checkpoint:
        raise Refused(f"nothing to release: automatic actions are on (state: {state.machine})")

    def take_as_it_is() -> None:
        state.checkpoints.accept(state.attempt, state.step)
        text = f"{by}: checkpoints saved from now on are good again"
        ctx.record(LaunchAccepted(reason=text))

    if not held:
        return Answer(
            "checkpoints that this launch saves from now on are good again", then=take_as_it_is
        )

    def then() -> None:
        if state.incident is not None:
            closing.close(ctx, state.incident, by, RELEASED)
        state.checkpoints.accept(state.attempt, state.step)
        for monitor in state.monitors.values():
            monitor.release()
        ctx.move("released", by)

    firing = ", ".join(state.firing(ctx.policy)) or "none"
    text = f"automatic actions are on again; rules in breach, which fire again: {firing}"
    return Answer(text, then=then)


def _ack(ctx: StepContext, event: OperatorCommand) -> Answer:
    incident = ctx.state.incident
    if incident is None:
        raise Refused("no incident is open")
    name = event.args.parse(CommandArgs).incident or incident.id
    if name != incident.id:
        raise Refused(f"{name} is not open; {incident.id} is")

    def then() -> None:
        operator = incident.acknowledged_by = event.operator
        title = f"{incident.id}: acknowledged by {operator}"
        draft = MessageDraft(incident, UPDATED, incident.severity, title, "reminders stopped")
        draft.acknowledged_by = operator
        ctx.messages.add(draft, replace=False)

    return Answer(f"{incident.id} acknowledged; reminders stopped", then=then)


def _silence(ctx: StepContext, event: OperatorCommand) -> Answer:
    state, args = ctx.state, event.args.parse(CommandArgs)
    name = str(args.rule)
    rule = next((rule for rule in ctx.policy.rules if rule.id == name), None)
    if rule is None:
        pack = name.partition(".")[0] + "."
        near = [rule.id for rule in ctx.policy.rules if rule.id.startswith(pack)]
        hint = f"; there is {', '.join(near)}" if near else ""
        raise Refused(f"there is no rule {name!r}{hint}")
    if "SEV0" in (rule.severity, *rule.phases.values()):
        raise Refused(f"{name} is SEV0 and cannot be silenced")
    steps = operator_actions.count(event, "for", args.period, SILENT_STEPS)

    def then() -> None:
        state.rules.silenced.pop(name, None)
        if steps:
            state.rules.silenced[name] = (state.frame_count + steps, event.operator)

    if not steps:
        return Answer(f"silence on {name} removed", then=then)
    return Answer(
        f"{name} silenced for {steps} steps: no action, no notification; it is still recorded",
        then=then,
    )


PLAIN = {
    "ack": _ack,
    "silence": _silence,
    "approve": approval_answers.approve,
    "deny": approval_answers.deny,
}
