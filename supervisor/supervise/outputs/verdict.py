"""Summary of a run in one line: matters that need a person come first.

`supervise status`, `watch` and their JSON take it from here, so that they agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..core.model import state_machine

STALE_S = 15.0  # without a new status, written once a second; project default
SLOW_S, SLOW_STEPS = 30.0, 8  # without a step: as `heartbeat_missing`
_PHASES = {
    state_machine.LAUNCHING: "starting: no step yet",
    state_machine.WARMING: "warming up: the baselines are not complete yet",
    state_machine.HALTED: "ended",
}


def verdict(state: Mapping[str, Any], age_s: float | None = None) -> str:
    """Return `healthy`, or what is wrong or under way, the gravest first.

    Args:
        state: what `supervise status --json` prints.
        age_s: of the status itself, None where it is unknown.
    """
    return next(_reasons(state, age_s))


def _reasons(state: Mapping[str, Any], age_s: float | None) -> Iterator[str]:
    yield from _job(state)
    if "state" not in state:
        yield "unknown: no status was written yet"
        return
    if age_s is not None and age_s > STALE_S:
        yield f"unknown: the supervisor has written no status for {_time(age_s)}"
    if trouble := state.get("trouble"):
        yield f"no action is possible: {trouble}"
    elif space := state.get("space"):
        left, needed = (f"{space[key] / 1e6:.1f} MB" for key in ("reserve_bytes", "need_bytes"))
        yield f"the disk is full: free {needed} on {space['mount']}; {left} in reserve"
    incident = (state.get("incidents") or {}).get("open") or {}
    about = f"{incident.get('id')} {incident.get('severity')}" if incident else "no incident"
    for one in state.get("approvals") or ():
        yield f"waits for a person: supervise approve RUN {one['id']} ({one['runbook']}, {about})"
    machine = state["state"]
    if machine == state_machine.HOLDING:
        yield f"automatic actions are off, a person is needed: supervise release RUN ({about})"
    if awaited := state.get("waits_for"):
        yield f"a relaunch waits for {awaited}"
    if machine == state_machine.ACTING:
        yield f"acting: {incident.get('runbook') or 'a runbook'} runs ({about})"
    if any(rank.get("paused") for rank in (state.get("ranks") or {}).values()):
        yield f"paused: supervise resume RUN ({about})"
    if incident and machine == state_machine.PROBATION:
        yield f"recovered so far, on probation ({about})"
    if incident:
        yield f"incident open: {about}: {incident.get('headline')}"
    yield from _watching(state)
    yield _PHASES.get(machine, "healthy")


def _job(state: Mapping[str, Any]) -> Iterator[str]:
    if state.get("supervisor") == "running":
        return
    job, over, code = state.get("job"), state.get("over"), state.get("exit_code")
    if job == "running":
        yield "not supervised: its supervisor died; supervise adopt RUN"
    elif over and code == 0:
        yield "finished"
    elif over:
        cause = state.get("ended_by") or {}
        yield f"ended with exit code {code}{': ' + cause['text'] if cause else ''}"
    elif job is not None:
        yield "its supervisor died, and the job has ended; supervise adopt RUN"


def _watching(state: Mapping[str, Any]) -> Iterator[str]:
    """What is not an incident, and keeps a run from being known to be healthy."""
    training = state.get("training") or {}
    last_s, speed = training.get("last_step_s"), training.get("steps_per_s")
    if last_s is not None and speed and last_s > max(SLOW_S, SLOW_STEPS / speed):
        yield f"no step for {_time(last_s)}"
    blind = [rule for rule, how in (state.get("rules") or {}).items() if how == "blind"]
    if blind:
        yield f"partly blind: {', '.join(blind[:3])}"
    if state.get("tier") == "T0":
        yield "no probe: only exit and signals are watched"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60.0:.0f} min"
