"""Status of an incident in one word, and its title."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...core.model.failure import EXIT, Failure
from ..records import Record, is_of, order_of
from .facts import RuleOf
from .metric_names import named
from .series import LOSSES

OPEN, ACTING, WATCHING, WAITING, HELD = "OPEN", "ACTING", "WATCHING", "APPROVAL PENDING", "HELD"
RECOVERED, CLEARED, NOT_RECOVERED, DONE = "RECOVERED", "CLEARED", "NOT RECOVERED", "DONE"
WITHDRAWN, RELEASED, STOPPED = "WITHDRAWN", "RELEASED", "STOPPED"
JOB_ENDED, SESSION_ENDED, SUPERSEDED = "JOB ENDED", "SESSION ENDED", "SUPERSEDED"
MEANINGS = {
    OPEN: "it goes on; no action is under way",
    ACTING: "an action is under way, or its effect is being verified",
    WATCHING: "the actions helped so far; a relapse is watched for",
    WAITING: "a person is asked whether the actions may run",
    HELD: "automatic actions are off; a person is needed",
    RECOVERED: "verified: the actions helped and it did not come back",
    CLEARED: "its rules are not in breach any more; nothing was done about it, or nothing verified",
    DONE: "an operator's order was carried out, and no rule fired in the time after it",
    NOT_RECOVERED: "its rules took the new level for their baseline; the old one did not come back",
    WITHDRAWN: "its reason was over before an action came to change the job",
    RELEASED: "a person ended the hold",
    STOPPED: "the job was stopped because of it",
    JOB_ENDED: "the job ended before it was over",
    SESSION_ENDED: "the training that it was about ended",
    SUPERSEDED: "an incident of the training began; what this one was about may go on beside it",
}
LONG = 90  # characters of a title


def state_of(mine: Sequence[Record]) -> str:
    """Return how an incident stands, from its records: one of `MEANINGS`."""
    state, acted, stopped, withdrawn = OPEN, False, False, False
    verified = False
    verbs: dict[str, tuple[str, bool]] = {}
    for r in mine:
        data, what = r["data"], r["data"].get("what")
        if r["kind"] == "intent":
            action = data["action"]
            verbs[action["id"]] = action["verb"], action["touches_job"]
            state = state if state in (HELD, WAITING) else ACTING
        elif r["kind"] == "commit" and data.get("action", {}).get("id") in verbs:
            verb, touches = verbs[data["action"]["id"]]
            acted, stopped = acted or touches, stopped or verb == "stop"
        elif r["kind"] == "verify" and what == "passed":
            verified, state = True, WATCHING
        elif r["kind"] == "approval_requested":
            state = WAITING
        elif state == {"approval": WAITING, "state": ACTING}.get(r["kind"]):
            over = r["kind"] == "approval" or data.get("after") == "suspect"
            state = OPEN if over else state
        elif r["kind"] == "abort" and what == "withdrawn":
            withdrawn, state = True, OPEN
        elif r["kind"] == "incident" and what == "held":
            state = HELD
        elif r["kind"] == "incident" and what == "closed":
            if data.get("superseded_by"):
                return SUPERSEDED
            how = _closed(r["reason"].removeprefix("closed: "))
            if stopped and how == JOB_ENDED:
                return STOPPED
            if how == RECOVERED and not verified:
                return DONE
            return WITHDRAWN if withdrawn and not acted and how == CLEARED else how
    return state


def _closed(why: str) -> str:
    if why.startswith("recovered: "):
        return RECOVERED
    if why.startswith("over: not recovered"):
        return NOT_RECOVERED
    if why.startswith("over: its rules cleared"):
        return CLEARED
    if why.startswith("over: "):
        return SESSION_ENDED
    return RELEASED if why.startswith("released") else JOB_ENDED


def title_of(
    mine: Sequence[Record],
    rule_of: RuleOf,
    *,
    after: str = "",
    failure: Failure | None = None,
    standstill: str = "",
    moved: Sequence[str] = (),
) -> str:
    """Return what an incident is, in words.

    The words are those of the rule that opened or raised it, else of the class of the failure.

    Args:
        after: what came first, if another thing than the rule is about.
        standstill: which rank holds the job up, and where.
        moved: metrics that left their level: a loss that did is what people care for first.
    """
    chief = next(r for r in reversed(mine) if is_of(r, "incident", "opened") or _raises(r))
    if not chief["rule"]:
        return _without_rule(chief, failure)
    rule = rule_of(chief["rule"])
    title = (rule.title if rule else "") or _of_readings(mine, chief["rule"])
    if any(r["kind"] == "blind" and r["rule"] == chief["rule"] for r in mine):
        return _clip(f"Rule {chief['rule']} cannot be evaluated")
    if found := re.match(r"ranks? \d+(, \d+)*", standstill):
        return _clip(f"{title}: {found[0]}")
    title = _of_loss(mine, rule_of, chief) or title if {*moved} & {*LOSSES} else title
    more = after and "rate" not in title.lower()
    return _clip(f"{title} after {after}" if more else title)


def _of_loss(mine: Sequence[Record], rule_of: RuleOf, chief: Record) -> str:
    """Return the title of the first rule about the loss that is as severe as the chief one."""
    for r in mine:
        if not is_of(r, "rule", "fired") or r["severity"] > chief["severity"]:
            continue
        rule = rule_of(r["rule"])
        if rule is not None and rule.title.startswith("Loss"):
            return rule.title
    return ""


def _raises(r: Record) -> bool:
    return is_of(r, "incident", "raised")


def _without_rule(chief: Record, failure: Failure | None) -> str:
    if order := order_of(chief):
        return _clip(f"Order of {order[0]}: {order[1]}")
    return _clip(f"Crash: {_error(failure) if failure is not None else headline(chief)}")


def _error(failure: Failure) -> str:
    """Return an error as a title: its class in words, else what it says, and where."""
    name = "" if failure.kind == EXIT else failure.type
    rank = f" on rank {failure.rank}" if failure.rank is not None and failure.world_size > 1 else ""
    if failure.title:
        return f"{failure.title}{f' ({name})' if name else ''}{rank}"
    return failure.text


def _of_readings(mine: Sequence[Record], rule: str) -> str:
    """Return the breaches behind a rule without a title: "Loss out of its limit"."""
    for r in mine:
        if not (is_of(r, "rule", "fired") and r["rule"] == rule):
            continue
        for numbers in (r["data"].get("numbers") or {}).values():
            for name in numbers.get("nonfinite", ()):
                return f"{_named(name)} is NaN or Inf"
            if numbers.get("code") == "BREACH" and numbers.get("metric"):
                return f"{_named(numbers['metric'])} out of its limit"
            if numbers.get("code") == "BREACH" and numbers.get("signal"):
                return f"No {numbers['signal']}"
    return f"Rule {rule} fired"


def _named(metric: str) -> str:
    text = named(metric)
    return text[:1].upper() + text[1:]


def headline(r: Record) -> str:
    """Return "rule: its numbers" of the record that opened an incident, or raised it."""
    reason = str(r.get("reason", ""))
    for prefix in (f"{r.get('severity')} ", f"raised to {r.get('severity')} by "):
        reason = reason.removeprefix(prefix)
    return reason


def _clip(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONG else f"{text[: LONG - 1]}…"
