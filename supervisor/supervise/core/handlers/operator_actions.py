"""Words that act: which action each one means, and what must hold before it is carried out.

An order runs as a runbook of one verb through the same intents as any other. It asks nobody for
approval, may exceed a budget (it counts, and the override is on record), and works in every mode: a
mode limits what the policy does by itself. While an action is under way orders are refused, but for
`stop` and `resume`, which wait for its end; a runbook that is only being verified gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from ..analysis.shard_attribution import ShardAttribution
from ..incidents import action_planning, opening
from ..model.action import Action, Refused
from ..model.decisions import RunbookPreempted
from ..model.events import OperatorCommand
from ..model.payload import CommandArgs, Json
from ..model.policy import Policy, Runbook
from ..runbooks import runner
from ..state.incident import Incident
from ..state.run_state import StepContext

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

    text: str
    ok: bool = True
    action: str | None = None
    then: Callable[[], None] = _nothing


def busy(incident: Incident) -> str:
    """Return what is being performed, or taken back, right now; "" when nothing is."""
    run = incident.run
    if run is None or not run.is_busy():
        return ""
    return run.intent.action_id or run.runbook.name


def order(ctx: StepContext, event: OperatorCommand) -> Answer:
    """Answer a word that acts. Raises `Refused` when it cannot be carried out."""
    state, incident = ctx.state, ctx.state.incident
    verb, keys = VERBS[event.command](event, event.args.parse(CommandArgs))
    if verb == "rollback":
        keys |= action_planning.OPERATOR_ROLLBACK
    action = _made(ctx.policy, verb, keys)
    under_way = busy(incident) if incident is not None else ""
    if under_way and incident is not None:
        if verb not in PATIENT:
            raise Refused(f"{under_way} is in progress; repeat the command when it has finished")
        wanted = incident.deferred.commands
        return Answer(f"queued until {under_way} has finished", then=lambda: wanted.append(event))
    if state.job.returncode is not None:
        raise Refused("the job has ended")
    if verb == "resume" and not state.job.paused:
        raise Refused("the job is not paused")
    remark = _unseen(state.context.attribution, event) if verb == "quarantine" else ""
    first = [_made(ctx.policy, "snapshot", {})] if verb == "rollback" else []
    book = Runbook(verb, (*first, action), (*["snapshot"] * len(first), verb))
    asked = event.args.parse(CommandArgs).before
    before = count(event, "before", asked, state.step + 1) if verb == "rollback" else None
    about = incident or Incident("", state.step, state.step + 1, "SEV2", [])
    why = action_planning.refusal(state, about, book, before, event.operator)
    if why:
        raise Refused(why)
    name = incident.id if incident is not None else f"inc-{state.history.opened + 1}"
    number = incident.escalation.runs + 1 if incident is not None else 1
    return Answer(
        f"{name}: {verb} sent to the job{remark}",
        action=f"{name}/{number}/{len(first)}-{verb}",
        then=lambda: _run(ctx, event, book, before),
    )


def _run(ctx: StepContext, event: OperatorCommand, book: Runbook, before: int | None) -> None:
    state, incident = ctx.state, ctx.state.incident
    if incident is None:
        monitor = next(iter(state.monitors.values()), None)
        text = f"{book.name} requested by {event.operator}"
        incident = opening.open_incident(
            ctx, monitor, "SEV2", text, breach=state.step + 1, order=(event.operator, book.name)
        )
    elif incident.run is not None:
        text = f"{incident.run.runbook.name} preempted by {event.operator}"
        ctx.record(RunbookPreempted(reason=text))
    runner.start_requested(ctx, incident, book, event.operator, before)


def _made(policy: Policy, verb: str, keys: Keys) -> Action:
    form = policy.verbs.get(verb)
    if form is None:
        raise Refused(f"there is no action {verb!r} here")
    try:
        action = form(**keys)
    except TypeError as error:
        raise Refused(f"{verb}: {error}") from error
    for key, sentence in action.check():
        raise Refused(f"{verb}: {'the factor' if key == 'set' else key} {sentence}")
    return action


# ── shards ────────────────────────────────────────────────────────────────────────────────────────


def _unseen(attribution: ShardAttribution, event: OperatorCommand) -> str:
    """Say which of the shards have not been seen in this run, "" where all have, or nobody knows.

    Raises:
        Refused: the job knows no shards, so that none could be left out.
    """
    known = attribution.names
    if not known and not attribution.shards:
        raise Refused(
            "quarantine: the job does not report which shards its data is from, so none can be "
            "left out; if its loader workers call is_quarantined, write quarantine.json into the "
            "run directory by hand (probes/README.md)"
        )
    shards = event.args.parse(CommandArgs).shards
    names = [name for name in _names(event, "shards", shards) if len(name) <= TOLD_WHOLE]
    strange = [name for name in names if name not in known] if known else []
    if not strange:
        return ""
    told = ""
    for name in strange[:NAMED]:
        near = next((each for each in sorted(known) if _near(name, each)), None)
        told += f", {name}" + (f" (did you mean {near}?)" if near else "")
    more = f" and {len(strange) - NAMED} more" if len(strange) > NAMED else ""
    return f"; not among the {len(known)} shards seen so far: {told[2:]}{more}"


def _near(name: str, other: str) -> bool:
    """Whether only the directory is missing, or a few letters differ; numbers are no typos."""
    short, long = sorted((name, other), key=len)
    if long.endswith(f"/{short}"):
        return True
    head = next((at for at, letter in enumerate(short) if letter != long[at]), len(short))
    left, right = short[head:], long[head:]
    same = next((n for n in range(len(left)) if left[-1 - n] != right[-1 - n]), len(left))
    left, right = left[: len(left) - same], right[: len(right) - same]
    return len(right) <= TYPO and not (left + right).isdecimal()


# ── the arguments of words, which anybody may have written ────────────────────────────────────────


def count(event: OperatorCommand, key: str, value: Json, default: int | None = None) -> int:
    """Return a whole number from 0 up. Raises `Refused` when it is none, or missing."""
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise Refused(f"{event.command} needs `{key}`, a whole number, not {value!r:.60}")
    return value


def _number(event: OperatorCommand, key: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise Refused(f"{event.command} needs `{key}`, a number, not {value!r:.60}")
    return float(value)


def _names(event: OperatorCommand, key: str, value: Json) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise Refused(f"{event.command} needs `{key}`, at least one name")
    texts = tuple(name for name in names if isinstance(name, str) and 0 < len(name) <= KEY_TEXT)
    if len(texts) < len(names):
        raise Refused(f"{event.command}: a name in `{key}` is empty, too long, or no text")
    return texts


def _lr(event: OperatorCommand, args: CommandArgs) -> tuple[str, Keys]:
    scale = _number(event, "value", args.value)
    return "lr_scale", {"set": scale, "rewarm": count(event, "rewarm", args.rewarm, 0)}


def _rollback(event: OperatorCommand, args: CommandArgs) -> tuple[str, Keys]:
    if args.rewarm is None:
        return "rollback", {}
    return "rollback", {"rewarm": count(event, "rewarm", args.rewarm)}


def _quarantine(event: OperatorCommand, args: CommandArgs) -> tuple[str, Keys]:
    return "quarantine", {"shards": _names(event, "shards", args.shards), "max_fraction": 0.5}


VERBS: Mapping[str, Callable[[OperatorCommand, CommandArgs], tuple[str, Keys]]] = {
    "pause": lambda event, args: ("pause", {"lease": LONGEST_S}),
    "resume": lambda event, args: ("resume", {}),
    "savepoint": lambda event, args: ("savepoint", {}),
    "skip": lambda event, args: ("skip_step", {"count": count(event, "steps", args.steps, 1)}),
    "stop": lambda event, args: ("stop", {"requeue": args.requeue is True}),
    "lr": _lr,
    "rollback": _rollback,
    "quarantine": _quarantine,
    "release": lambda event, args: ("unquarantine", {"shards": _names(event, "shard", args.shard)}),
}
