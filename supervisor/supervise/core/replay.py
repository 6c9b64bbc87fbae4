"""Replay: fold the recorded events through the engine and compare with the recorded decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ..errors import MISSHAPEN, StoreError
from . import engine
from .model.decisions import Decision, record
from .model.events import Event, Reloaded
from .model.payload import Json
from .model.policy import Policy
from .run_state import State

Loader = Callable[[str], Policy]  # from a digest; raises when the policy is not there

FIELDS = ("kind", "step", "attempt", "reason", "incident", "rule", "severity", "data")


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where replay and record part.

    Attributes:
        seq: number of the audit record, None when the record has nothing there.
        event: number of the journal event that was being judged.
        recorded, replayed: the two decisions, None where one side has none.
        lacking: they part because the journal is incomplete: `event` is the first that it lacks.
    """

    seq: int | None
    event: int
    recorded: Mapping[str, Json] | None
    replayed: Mapping[str, Json] | None
    lacking: bool = False


def fold(
    policy: Policy,
    events: Iterable[tuple[int, Event]],
    state: State | None = None,
    policies: Loader | None = None,
) -> Iterator[tuple[int, Event, Policy, State, list[Decision]]]:
    """Yield `(number, event, policy, state, decisions)` after each event.

    The state is the engine's own and changes with the next event.

    Args:
        policies: finds the policy that a `Reloaded` names; None: there is none.

    Raises:
        StoreError: an event of the journal makes no sense.
    """
    state = engine.start(policy) if state is None else state
    for number, event in events:
        if isinstance(event, Reloaded) and event.refused is None and policies is not None:
            policy = policies(event.digest)
        try:
            state, decisions_made = engine.step(policy, state, event)
        except (*MISSHAPEN, AssertionError) as error:
            event_text = f"event {number} ({type(event).__name__})"
            raise StoreError(
                f"{event_text} of the journal cannot be judged: {type(error).__name__}: {error}",
                hint="the journal was changed, or another version wrote it",
            ) from error
        yield number, event, policy, state, decisions_made


def decisions(
    policy: Policy,
    events: Iterable[tuple[int, Event]],
    state: State | None = None,
    policies: Loader | None = None,
) -> Iterator[tuple[int, dict[str, Json]]]:
    """Yield `(event number, decision record)` for every decision that the events lead to."""
    for number, _, _, _, decisions_made in fold(policy, events, state, policies):
        for decision in decisions_made:
            yield number, record(decision)


def is_recorded(was: Mapping[str, Json], number: int, replayed: Mapping[str, Json]) -> bool:
    """Whether the audit record `was` holds the decision `replayed` of event `number`."""
    return _number(was, "event") == number and all(was.get(f) == replayed[f] for f in FIELDS)


def compare(
    policy: Policy,
    events: Iterable[tuple[int, Event]],
    recorded: Iterable[Mapping[str, Json]],
    policies: Loader | None = None,
) -> tuple[int, list[Difference]]:
    """Fold `events` and compare with the audit records whose actor is the engine.

    A journal may end with events whose decisions never reached the log (a killed supervisor), so
    surplus decisions of the last judged event onward are no difference. One that ends before the
    log does (it could not be written, or its end was lost) is `lacking`.

    Returns:
        `(decisions compared, differences)`; after the first difference nothing more is compared.
    """
    log = [r for r in recorded if r.get("actor") == "engine"]
    last_event = max((_number(r, "event") for r in log), default=-1)
    count, end = 0, 0
    for number, _, _, _, decisions_made in fold(policy, events, None, policies):
        end = number + 1
        for replayed in map(record, decisions_made):
            if count == len(log):
                if number >= last_event:
                    return count, []
                return count, [Difference(None, number, None, replayed)]
            was = log[count]
            if not is_recorded(was, number, replayed):
                if unwritten(was):
                    continue  # nor was this decision: both could not be written any more
                return count, [Difference(_number(was, "seq"), number, was, replayed)]
            count += 1
    if count < len(log):
        was = log[count]
        lacking = unwritten(was) or _number(was, "event") >= end
        first_event = end if lacking else _number(was, "event")
        return count, [Difference(_number(was, "seq"), first_event, was, None, lacking)]
    return count, []


def _number(record: Mapping[str, Json], name: str) -> int:
    number = record[name]
    if not isinstance(number, int):
        raise TypeError(f"{name} of an audit record is {number!r:.40}")
    return number


def unwritten(was: Mapping[str, Json]) -> bool:
    """Return whether an audit record is of an event that the journal could not be given."""
    return _number(was, "event") < 0
