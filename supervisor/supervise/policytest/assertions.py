"""Judge what was expected of a scenario against what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..catalog.document.nodes import Mapping, Node
from ..catalog.document.nodes import Sequence as Listed
from ..catalog.forms.scenario_form import ExpectForm, Names, ScenarioForm
from ..core.model.decisions import SEVERITIES
from ..core.model.state_machine import STATES
from .scenario_result import ScenarioResult

SHOWN = 8  # frames that a sentence lists


@dataclass(frozen=True, slots=True)
class Failure:
    """One expectation that did not come true. `index` is its number, -1 for the whole scenario."""

    index: int
    message: str


def judge(form: ScenarioForm, played: ScenarioResult, names: Names) -> list[Failure]:
    """Return what did not come true; empty is good."""
    found = [Failure(-1, f"after a restart: {message}") for message in played.parted]
    for index, expect in enumerate(form.expect):
        message = _late(expect, played) or _failed(expect, played, names)
        if message is not None:
            found.append(Failure(index, message))
    return found


def place(node: Node, failure: Failure) -> Node:
    """Return the node of the expectation in the scenario's node."""
    held = node.get("expect") if isinstance(node, Mapping) else None
    if isinstance(held, Listed) and 0 <= failure.index < len(held.items):
        return held.items[failure.index]
    return node


def _late(expect: ExpectForm, played: ScenarioResult) -> str | None:
    frame = expect.at if expect.between is None else expect.between[0]
    if frame is not None and frame > played.last:
        return f"the scenario is over at frame {played.last}"
    return None


def _failed(expect: ExpectForm, played: ScenarioResult, names: Names) -> str | None:
    first, last = expect.window(played.last)
    subject = expect.subject()
    if subject == "never":
        return _never(expect, played, names, first, last)
    if subject == "rule":
        return _rule(expect, played, names, first, last)
    if subject == "state":
        return _state(expect, played, first, last)
    if subject == "actions":
        return _actions(expect, played, first, last)
    if subject == "budget":
        used = played.spent[last]
        wrong = {n: used.get(n, 0) for n, c in (expect.budget or {}).items() if used.get(n, 0) != c}
        return ", ".join(f"budget {n}: {c} used" for n, c in wrong.items()) or None
    if subject == "severity":
        at = [frame for frame, severity in played.incidents() if severity == expect.severity]
        return _times(expect, at, first, last, f"an incident of {expect.severity}")
    if subject == "message":
        at = played.messages(expect.message or "")
        return _times(expect, at, first, last, f"a message with {expect.message!r}")
    at = played.suppressed(expect.suppressed or "")
    return _times(expect, at, first, last, f"suppression by {expect.suppressed}")


def _times(expect: ExpectForm, at: Sequence[int], first: int, last: int, what: str) -> str | None:
    """Compare how often something came in the window with what is wanted."""
    came = [frame for frame in at if first <= frame <= last]
    if expect.count is not None:
        said = f"{what} {len(came)} times, not {expect.count}: {_listed(came)}"
        return None if len(came) == expect.count else said
    what = what.removeprefix("an ").removeprefix("a ")
    return None if came else f"no {what} {_window(expect)}: {_listed(at)}"


def _listed(frames: Sequence[int]) -> str:
    if not frames:
        return "it never came"
    more = ", ..." if len(frames) > SHOWN else ""
    return "it came at " + ", ".join(str(frame) for frame in frames[:SHOWN]) + more


def _rule(
    expect: ExpectForm, played: ScenarioResult, names: Names, first: int, last: int
) -> str | None:
    rule = names.rule(expect.rule or "") or ""
    how = expect.is_ or "firing"
    if how == "muted":
        return _times(expect, played.suppressed("inhibit:", rule), first, last, f"muting of {rule}")
    if how in ("on", "quiet"):
        wanted = how == "on"
        on = played.on(rule)
        wrong = [frame for frame in range(first, min(last, played.last) + 1) if on[frame] != wanted]
        word = "does not fire" if wanted else "fires"
        return f"{rule} {word} at {wrong[0]}" if wrong else None
    at = played.changes(rule, "fired" if how == "firing" else "cleared")
    what = f"{rule} {'began to fire' if how == 'firing' else 'cleared'}"
    if expect.count is not None:
        return _times(expect, at, first, last, what)
    # The first time counts: earlier is a false alarm, later is too late.
    if first in at if expect.at is not None else at and first <= at[0] <= last:
        return None
    said = f"{what} at {', '.join(map(str, at[:SHOWN]))}" if at else f"it never did: {what}"
    return f"{said}; wanted {_window(expect)}"


def _window(expect: ExpectForm) -> str:
    if expect.at is not None:
        return f"at {expect.at}"
    if expect.between is not None:
        return f"between {expect.between[0]} and {expect.between[1]}"
    if expect.end:
        return "at the end"
    return "once" if expect.by is None else f"by {expect.by}"


def _state(expect: ExpectForm, played: ScenarioResult, first: int, last: int) -> str | None:
    seen = played.states[first : last + 1]
    if expect.state in seen:
        return None
    return f"the state is {' then '.join(dict.fromkeys(seen)) or 'none yet'}, not {expect.state}"


def _actions(expect: ExpectForm, played: ScenarioResult, first: int, last: int) -> str | None:
    verbs = [verb for at, verb in played.intents() if first <= at <= last]
    wanted = list(expect.actions or ())
    said = f"actions were {', '.join(verbs) or 'none'}"
    if not wanted:
        return said if verbs else None
    if expect.count is not None:
        wrong = [v for v in dict.fromkeys(wanted) if verbs.count(v) != expect.count]
        if wrong:
            return f"{said}; {wrong[0]} {verbs.count(wrong[0])} times, not {expect.count}"
        if expect.count == 0:
            return None
    rest = iter(verbs)
    if all(verb in rest for verb in wanted):
        return None
    return f"{said}; wanted {', '.join(wanted)}, in this order"


def _never(
    expect: ExpectForm, played: ScenarioResult, names: Names, first: int, last: int
) -> str | None:
    for word in expect.never or ():
        rule = names.rule(word)
        if rule is not None:
            at = played.changes(rule, "fired")
        elif word in SEVERITIES:
            at = [frame for frame, severity in played.incidents() if severity == word]
        elif word in STATES:
            at = [frame for frame, state in enumerate(played.states) if state == word]
        else:
            at = [frame for frame, verb in played.intents() if verb == word]
        came = [frame for frame in at if first <= frame <= last]
        if came:
            return f"{rule or word} must never come: {_listed(came)}"
    return None
