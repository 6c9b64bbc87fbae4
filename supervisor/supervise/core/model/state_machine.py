"""The life of a run, as one table.

Rule 1: every legal move is an entry here; a pair without an entry is a no-op that is audited.
Rule 2: this file knows no metric, no action and no clock.

A row `any` holds for every state that has no entry of its own for the event. A policy may bring its
own table; `flaws` says what is wrong with it. The picture in supervisor/README.md is drawn from
DEFAULT by `diagram`, and a test compares.
"""

from __future__ import annotations

from collections.abc import Mapping

Table = Mapping[str, Mapping[str, str]]

LAUNCHING, WARMING, NOMINAL, SUSPECT = "launching", "warming", "nominal", "suspect"
ACTING, PROBATION, HOLDING, HALTED = "acting", "probation", "holding", "halted"
UNEASY = (SUSPECT, ACTING, PROBATION)  # the probes sample more densely
STATES = (LAUNCHING, WARMING, NOMINAL, SUSPECT, ACTING, PROBATION, HOLDING, HALTED)

EVENTS: Mapping[str, str] = {
    "first_frame": "the first frame of any rank arrived",
    "ready": "the baselines have enough samples",
    "notice": "a rule fired that does not act",
    "clear": "no rule fires any more",
    "ask": "a runbook waits until a person allows it",
    "run": "a runbook starts, or the next level of the ladder does",
    "verified": "the runbook's effect was seen",
    "given_up": "nothing is tried any more: it could not be done, or gave way to what only tells",
    "passed": "probation ended without a relapse",
    "hold": "acting stopped; a person is needed",
    "released": "an operator released the hold",
    "session_started": "another training began in the job",
    "exited": "the job ended, and is not started again",
}

DEFAULT_TRANSITIONS: Table = {
    "any": {
        "ask": SUSPECT,
        "run": ACTING,
        "hold": HOLDING,
        "session_started": WARMING,
        "exited": HALTED,
    },
    LAUNCHING: {"first_frame": WARMING, "ask": LAUNCHING, "session_started": LAUNCHING},
    WARMING: {"ready": NOMINAL, "ask": WARMING},
    NOMINAL: {"notice": SUSPECT},
    SUSPECT: {"clear": NOMINAL},
    ACTING: {"verified": PROBATION, "given_up": SUSPECT},
    PROBATION: {"passed": NOMINAL},
    HOLDING: {"released": WARMING, "run": HOLDING, "ask": HOLDING},
    HALTED: {"ask": HALTED, "run": HALTED, "hold": HALTED, "session_started": HALTED},
}


def next_state(table: Table, state: str, event: str) -> str | None:
    """Return the state after `event`, or None when the table has no such move."""
    target = table.get(state, {}).get(event)
    return target if target is not None else table.get("any", {}).get(event)


def find_flaws(table: Table) -> list[tuple[str, str, str]]:
    """Return `(state, event, sentence)` for everything that is wrong with a table.

    Checked: unknown states and events, unreachable states, states from which `halted` cannot be
    reached. `event` is "" where the whole row is meant.
    """
    flaws_found: list[tuple[str, str, str]] = []
    for state, row in table.items():
        if state != "any" and state not in STATES:
            flaws_found.append(
                (state, "", f"unknown state {state!r}; states are {', '.join(STATES)}")
            )
        for event, target in row.items():
            if event not in EVENTS:
                flaws_found.append((state, event, f"unknown event {event!r}"))
            if target not in STATES:
                flaws_found.append((state, event, f"unknown target {target!r}"))
    if flaws_found:
        return flaws_found
    used = set(STATES)
    edges = {s: {t for e in EVENTS if (t := next_state(table, s, e)) is not None} for s in used}
    reached, todo = {LAUNCHING}, [LAUNCHING]
    while todo:
        for target in sorted(edges[todo.pop()] - reached):
            reached.add(target)
            todo.append(target)
    flaws_found += [(s, "", f"{s!r} can never be reached") for s in STATES if s not in reached]
    ending = {HALTED}
    while grown := {s for s in used - ending if edges[s] & ending}:
        ending |= grown
    flaws_found += [(s, "", f"{s!r} can never reach 'halted'") for s in STATES if s not in ending]
    return flaws_found
