"""`supervise status`: the state of a run, from its directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from ..core.model.decisions import plain
from ..errors import StoreError, understood
from ..report.receipt import run_path
from ..runtime import late_messages
from ..runtime.status import DERIVED, Life, Status, line, read_curve, verdict
from ..store import audit
from ..store.run_directory import RunDir
from ..store.run_records import read_outcome, skim
from ._output import echo_json, number, print_table, rate, seconds_since, span, spark
from ._runs import life, run_argument


def read_status(run: RunDir, *, verified: bool = True) -> dict[str, Any]:
    """Return the content of `supervise status --json`.

    Args:
        verified: read every record of the audit log, up to its first damage; else skim it, as a
            view does that is drawn again and again.

    Raises:
        StoreError: a file cannot be read, or understood.
    """
    status = Status.read(run)
    newest = {} if status is None else plain(status.document())
    with understood(f"the records in {run.audit_path}", "supervise audit show RUN prints them"):
        outcome = read_outcome(_until_damage(run)) if verified else skim(run.audit_path)
        alive = life(run, outcome)
    state = {"run": run.id, **newest, **alive}
    if outcome.incomplete:
        state["record"] = str(outcome.incomplete.get("reason"))
    live = state["supervisor"] == "running"
    old_s = seconds_since(state.get("updated_wall"), datetime.now(UTC)) if live else None
    text = verdict(msgspec.convert(alive, Life), status, old_s)
    state["verdict"] = text.replace(" RUN", f" {run_path(run)}")
    state["gravest"] = outcome.gravest[:3]
    if undelivered := late_messages.waiting(run.path):
        state["undelivered"] = len(undelivered)
    return state


def _until_damage(run: RunDir) -> Any:
    try:
        yield from audit.read(run.audit_path)
    except StoreError:  # `audit verify` reports it
        return


CURVE = 40  # columns
BUSY = 20.0  # percent; project default
NAMED = 3  # rules that wait for something, by name; more are counted


@click.command(name="status")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status_command(run: Path, as_json: bool) -> None:
    """Show the state of a run.

    First what needs a person, then loss, speed and time left, what can be done to the run and what
    is left of its budgets, rules and probes. Reads only the run directory, so it works from any
    terminal, and after the run. Without RUN it shows the newest one under ./runs; `supervise runs`
    lists them.

    \b
    Examples:
      supervise status
      supervise status 7f3a9c
      supervise status --json runs/20260105-101112-7f3a9c | jq .verdict

    Exit codes: 0; 64 no such run, or several of that name.
    """
    directory = RunDir.open(run)
    state = read_status(directory)
    if as_json:
        echo_json(state)
        return
    with understood(f"the status in {directory.path / 'state.json'}", DERIVED):
        lines = _lines(state)
    print_table(lines)


def _lines(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table: what needs a person first, details last."""
    lines = [("run", str(state["run"])), ("job", _job(state)), ("verdict", state["verdict"])]
    lines += [("incident", _incident(incident)) for incident in incidents(state)]
    lines += [("waiting", _request(request)) for request in state.get("approvals") or ()]
    if record := state.get("record"):
        lines.append(("record", record))
    if "state" not in state:
        return [*lines, ("state", "unknown: no status was written")]
    if cause := state.get("ended_by"):
        means = f" ({cause['means']})" if cause.get("means") else ""
        lines.append(("ended by", f"{cause['text']}{means}"))
    if trouble := state.get("trouble"):
        lines.append(("trouble", str(trouble)))
    if awaited := state.get("waits_for"):
        lines.append(("waiting", f"relaunch waits for {awaited}"))
    lines += progress(state, with_curve=True)
    lines += _protection(state)
    if rules := state.get("rules"):
        lines.append(("rules", _rules(rules)))
    for rank, probe in (state.get("ranks") or {}).items():
        lines.append((f"rank {rank}", _probe(probe)))
    if newest := state.get("last_decision"):
        lines.append(("last", f"{newest['kind']}: {newest['reason']}"))
    if updated := state.get("updated_wall"):
        lines.append(("updated", f"{updated}{_age(str(updated))}"))
    return lines


def progress(state: Mapping[str, Any], *, with_curve: bool = False) -> list[tuple[str, str]]:
    """Return step, loss, speed and the time left, as far as they are known."""
    training: Mapping[str, Any] = state.get("training") or {}
    total = training.get("planned_steps")
    of_total = f" of {total}" if total else ""
    lines = [("step", f"{state.get('step', '?')}{of_total}, attempt {state.get('attempt', 0)}")]
    if training.get("loss") is not None:
        of_rank = f", rank {training['loss_rank']}" if training["loss_rank"] else ""
        text = f"{number(training['loss'])} ({training['loss_metric']}{of_rank})"
        if with_curve and len(curve := spark(read_curve(training)[1], CURVE)) > 1:
            text += f"  {curve}"
        lines.append(("loss", text))
    speed, runs = training.get("steps_per_s"), state.get("job") == "running"
    if speed and runs:
        tokens = training.get("tokens_per_s")
        several = state.get("world_size", 1) > 1
        per_rank = " a rank" if several and training.get("tokens_of") == "rank" else ""
        text = f", {rate(tokens, 'token')}{per_rank}" if tokens else ""
        lines.append(("speed", rate(speed, "step") + text))
    if training.get("eta_s") is not None and runs:
        lines.append(("time left", f"{span(training['eta_s'])} (by {training['planned_by']})"))
    return lines


def _protection(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what can be done to the run, what is left of it, and who is notified."""
    summary = f"mode {state.get('mode', '?')}, tier {state.get('tier', '?')}"
    lines = [("state", f"{state['state']} ({summary})")]
    if can := state.get("can"):
        lines.append(("protection", line(can)))
    if budgets := state.get("budgets"):
        lines.append(("budgets", ", ".join(budgets_left(budgets))))
    broken = state.get("channels") or {}
    lines += [("channel", _channel(name, channel)) for name, channel in broken.items()]
    if undelivered := state.get("undelivered"):
        messages = "1 message" if undelivered == 1 else f"{undelivered} messages"
        text = f"{messages} of the end of the run not delivered: supervise outbox flush RUN"
        lines.append(("channels", text))
    if fine := [name for name in state.get("messages_to") or () if name not in broken]:
        parts = [f"no trouble with {', '.join(fine)}"]
        for name, n in (state.get("messages_waiting") or {}).items():
            held_text = f", {n['held']} held for a digest" if n["held"] else ""
            parts.append(f"{name}: {n['waiting']} waiting{held_text}")
        lines.append(("channels", "; ".join(parts)))
    if state["supervisor"] == "running" and (heartbeat := state.get("heartbeat")):
        lines.append(("heartbeat", _heartbeat(heartbeat)))
    if state["supervisor"] == "running" and (wait := state.get("cpu_wait", 0.0)) >= BUSY:
        lines.append(("machine", f"others have its CPUs for {wait:.0f} % of the job's time"))
    lines.append(("incidents", _count(state.get("incidents") or {})))
    if silenced := state.get("silenced"):
        lines.append(
            ("silenced", ", ".join(f"{rule} by {name}" for rule, name in silenced.items()))
        )
    return lines


def budgets_left(budgets: Mapping[str, str]) -> list[str]:
    """Return `rollback 1 of 2 left` for `{"rollback": "1/2"}`, which counts what is spent."""
    lines = []
    for name, text in budgets.items():
        spent, _, maximum = str(text).partition("/")
        remaining = max(0, int(maximum) - int(spent))
        lines.append(f"{name} {remaining} of {maximum} left")
    return lines


def incidents(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the open incident, with all that is known of it, and others that need a person."""
    now = (state.get("incidents") or {}).get("open")
    held_incidents = [
        incident for incident in state.get("gravest") or () if incident["phase"] == "held"
    ]
    return [now] if now else held_incidents[:1]


def _job(state: Mapping[str, Any]) -> str:
    if state["supervisor"] == "running":
        return "running, supervised"
    if state["job"] == "ended":
        summary = f"ended with exit code {state['exit_code']}"
        summary += f" ({state['signal']})" if state["signal"] else ""
        if state["over"]:
            return summary
        moment = "during a relaunch" if state["relaunching"] else "before the run ended"
        return f"{summary}; the supervisor died {moment}: `supervise adopt RUN` continues"
    if state["job"] == "running":
        return (
            f"running (pid {state['job_pid']}), not supervised: its supervisor died; "
            "`supervise adopt RUN` takes over"
        )
    if state["job"] == "lost":
        return "ended, exit status unknown; `supervise adopt RUN` tries to recover it"
    return "never started; the supervisor died"


def _rules(rules: Mapping[str, Any]) -> str:
    """Group the rules by state, the noteworthy ones first and by name."""
    groups: dict[str, list[str]] = {}
    for rule, code in sorted(rules.items(), key=lambda pair: pair[1] == "OK"):
        groups.setdefault(str(code), []).append(rule)
    return "; ".join(f"{code}: {_named(code, names)}" for code, names in groups.items())


def _named(code: str, names: Sequence[str]) -> str:
    quiet = code == "OK" or (code in ("UNKNOWN", "inactive") and len(names) > NAMED)
    return str(len(names)) if quiet else ", ".join(names)


def _incident(incident: Mapping[str, Any]) -> str:
    runbook = f" (runbook {incident['runbook']})" if incident.get("runbook") else ""
    acked = f", acknowledged by {incident['acked']}" if incident.get("acked") else ""
    head = f"{incident.get('id')} {incident.get('severity')} {incident.get('phase')}"
    return f"{head}: {incident.get('headline')}{runbook}{acked}"


def _count(counts: Mapping[str, Any]) -> str:
    count, now = counts.get("opened", 0), counts.get("open")
    if not count:
        return "none"
    return f"{count}, none open" if not now else f"{count}, one open"


def _request(request: Mapping[str, Any]) -> str:
    verbs = ", ".join(str(step["verb"]) for step in request["steps"])
    return (
        f"{request['id']}: {request['runbook']} ({verbs}) waits for "
        f"`supervise approve RUN {request['id']}`; "
        f"{request['left_s']} s left, then {request['on_timeout']}"
    )


def _channel(name: str, channel: Mapping[str, Any]) -> str:
    count = channel["undelivered"]
    messages = f"{count} message{'' if count == 1 else 's'} not delivered"
    return f"{name}: {messages} since {channel['since_wall']}, last error: {channel['error']}"


def _heartbeat(heartbeat: Mapping[str, Any]) -> str:
    """Return when the monitor outside last accepted a ping, and why none is sent."""
    accepted = heartbeat["accepted_s"]
    newest = "none accepted yet" if accepted is None else f"last accepted {accepted:.0f} s before"
    text = f"every {heartbeat['every_s']:g} s, {newest}"
    reason = heartbeat["withheld"] or (heartbeat["error"] and f"last try: {heartbeat['error']}")
    return f"{text}; {'withheld: ' if heartbeat['withheld'] else ''}{reason}" if reason else text


def _probe(probe: Mapping[str, Any]) -> str:
    """Return the state of a rank's probe, and its collectors that are off."""
    keys = ("phase", "silent_s", "pid", "steps", "rollback", "paused", "savepoints", "quarantine")
    text = _inline({key: probe[key] for key in keys if probe.get(key) not in (None, [], False)})
    if probe.get("overhead") is not None:
        text += f", the probe takes {100 * probe['overhead']:.1f} % of a step"
    collectors = probe.get("collectors") or {}
    off = [f"{name} {state}" for name, state in collectors.items() if state != "on"]
    return "; ".join([text, *off])


def _inline(value: Any) -> str:
    """Return JSON-ready data on one line, without brackets."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_inline(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _age(updated: str) -> str:
    seconds = seconds_since(updated, datetime.now(UTC))
    return "" if seconds is None else f" ({seconds:.0f} s ago)"
