"""`supervise status`: the state of a run, from its directory."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import tee
from pathlib import Path
from typing import Any

import click
import msgspec

from ..checkpoints.registry import Entry, read_registry
from ..core.model.decisions import plain_json
from ..core.model.events import Announced, Exited, Frame, Launched
from ..core.model.failure import exit_code_text
from ..core.model.formats import RECORDS
from ..core.model.payload import Payload
from ..core.model.policy import read_usage
from ..core.model.state_machine import HALTED
from ..errors import StoreError, reading_recorded_data
from ..notifiers.heartbeat import Health
from ..report.incident_facts import sparkline
from ..report.receipt import run_operand
from ..runtime import late_messages
from ..runtime.status import (
    DERIVED,
    Ending,
    Incidents,
    Life,
    OpenIncident,
    RankStatus,
    Request,
    Status,
    UndeliveredMessages,
    format_capabilities,
    judge_ending,
    judge_status,
    read_last_status,
)
from ..store import audit, journal
from ..store.run_directory import RunDir
from ..store.run_records import IncidentOutcome, RunOutcome, read_outcome
from ._output import echo_json, format_number, format_rate, format_span, print_table, seconds_since
from ._runs import run_argument, run_life

AT_THE_END = (Announced, Exited, Frame, Launched)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """State of a run.

    Attributes:
        newest: the last that its supervisor wrote, up to the end of the journal once that is gone.
        ending: None of a run with a supervisor. gravest: at most three incidents.
        record: why the record is incomplete, "" where it is not.
        undelivered: messages of the end of the run. operand: the run in commands.
    """

    run: str
    newest: Status | None
    life: Life
    ending: Ending | None
    verdict: str
    gravest: Sequence[IncidentOutcome]
    record: str = ""
    undelivered: int = 0
    operand: str = "RUN"

    @property
    def is_supervised(self) -> bool:
        """Whether a supervisor watches it."""
        return self.life.supervisor == "running"

    def document(self) -> Payload:
        """Return it as JSON; what is not there is left out."""
        life = msgspec.structs.asdict(self.life)
        known = ("supervisor", "job", "exit_code") if self.is_supervised else tuple(life)
        newest = {} if self.newest is None else dict(self.newest.document())
        if self.ending is not None:
            newest.pop("can", None)
            newest["ending"] = msgspec.to_builtins(self.ending)
        return Payload(
            {
                "run": self.run,
                **newest,
                **{name: life[name] for name in known},
                **({"record": self.record} if self.record else {}),
                "verdict": self.verdict,
                "gravest": plain_json(self.gravest),
                **({"undelivered": self.undelivered} if self.undelivered else {}),
            }
        )


def read_status(
    run: RunDir, *, outcome: RunOutcome | None = None, brief: bool = False
) -> RunStatus:
    """Return the state of a run.

    Args:
        outcome: what the records say, of a view that has read them; else every record of the audit
            log is read, up to its first damage.
        brief: of one of many runs: the journal is read of those alone whose supervisor died here.

    Raises:
        StoreError: a file cannot be read, or understood.
    """
    newest, ending, register = Status.read(run), None, list[Entry]()
    with reading_recorded_data(
        f"the records in {run.audit_path}", "supervise audit show RUN prints them"
    ):
        if outcome is None:
            outcome = read_outcome(_until_damage(run))
        # A lock is of one machine: of a run on another one the supervisor may live.
        is_brief = brief and (
            outcome.end is not None or run.describe().host != socket.gethostname()
        )
        segments, again = tee(
            iter(()) if is_brief else journal.read_segments_back(run.journal_path, AT_THE_END)
        )
        alive = run_life(run, outcome, segments)
    path = run_operand(run)
    if alive.supervisor == "running":
        old_s = seconds_since(newest.updated_wall, datetime.now(UTC)) if newest else None
        verdict = judge_status(newest, old_s).replace(" RUN", f" {path}")
    else:
        newest = newest if alive.over or is_brief else read_last_status(run, again)
        with suppress(StoreError):  # `checkpoints` reports it
            register = read_registry(run.path).checkpoints
        ending = judge_ending(alive, newest, outcome, register, path)
        verdict = ending.text
    return RunStatus(
        run.id,
        newest,
        alive,
        ending,
        verdict,
        outcome.gravest[:3],
        outcome.incomplete,
        len(late_messages.undelivered_messages(run.path)),
        path,
    )


def _until_damage(run: RunDir) -> Any:
    try:
        yield from audit.read_audit(run.audit_path)
    except StoreError:  # `audit verify` reports it
        return


BUSY = 20.0  # percent; project default
NAMED = 3  # rules that wait for something, by name; more are counted


@click.command(name="status")
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def status_command(run: Path, as_json: bool) -> None:
    """Show the state of a run.

    Prints first what needs a person; then loss, speed and time left, which actions are possible,
    the budgets left, and the state of rules and probes. Reads only the run directory, so it works
    from any terminal, and after the run. Without RUN it shows the newest run under ./runs;
    `supervise runs` lists all.

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
        echo_json(state.document())
        return
    with reading_recorded_data(f"the status in {directory.path / 'state.json'}", DERIVED):
        lines = status_lines(state)
    print_table(lines)


def status_lines(state: RunStatus) -> list[tuple[str, str]]:
    """Return the rows of the table: what needs a person first, details last."""
    newest, run = state.newest, state.operand
    lines = [("run", state.run), ("job", _job(state.life, run)), ("verdict", state.verdict)]
    lines += [("incident", _incident(incident)) for incident in current_incidents(state)]
    requests = () if newest is None else newest.approvals
    lines += [("waiting", _request(request, run)) for request in requests]
    if state.record:
        lines.append(("record", state.record))
    if newest is None:
        return [*lines, ("state", "unknown: no status was written")]
    ordered = state.ending is not None and state.ending.stopped_by  # its error is of the order
    if (cause := newest.ended_by) and not ordered:
        lines.append(("ended by", cause.text + (f" ({cause.means})" if cause.means else "")))
    if newest.trouble:
        lines.append(("trouble", newest.trouble))
    if newest.waits_for:
        lines.append(("waiting", f"relaunch waits for {newest.waits_for}"))
    failed = (newest.failed_views or {}).items()
    lines += [("not shown", f"{view}: {error}") for view, error in failed]
    lines += training_progress(newest, state.life, with_curve=True)
    lines += _protection(state, newest)
    if newest.rules:
        lines.append(("rules", _rules(newest.rules)))
    lines += [("sampling", text) for text in _thinned(newest)]
    lines += [(f"rank {rank}", _probe(probe, state.life)) for rank, probe in newest.ranks.items()]
    if last := newest.last_decision:
        lines.append(("last", f"{RECORDS.get(last.kind, last.kind)}: {last.reason}"))
    if updated := newest.updated_wall:
        lines.append(("updated", f"{updated}{_age(updated)}"))
    return lines


def state_text(state: str) -> str:
    """Return a state of the engine for people."""
    return "over" if state == HALTED else state


def training_progress(
    status: Status, life: Life, *, with_curve: bool = False
) -> list[tuple[str, str]]:
    """Return step, loss, speed and the time left, as far as they are known."""
    training = status.training
    of_total = f" of {training.planned_steps}" if training.planned_steps else ""
    lines = [("step", f"{status.step}{of_total}, attempt {status.attempt}")]
    if training.loss is not None:
        of_rank = f", rank {training.loss_rank}" if training.loss_rank else ""
        text = f"{format_number(plain_json(training.loss))} ({training.loss_metric}{of_rank})"
        losses = training.curve.loss
        if with_curve and len(losses) > 1:
            text += f"  {sparkline(losses, [0] * len(losses))}"
        lines.append(("loss", text))
    speed, runs = training.steps_per_s, life.job == "running"
    if speed and runs:
        tokens = training.tokens_per_s
        per_rank = " a rank" if status.world_size > 1 and training.tokens_of == "rank" else ""
        text = f", {format_rate(tokens, 'token')}{per_rank}" if tokens else ""
        lines.append(("speed", format_rate(speed, "step") + text))
    if training.eta_s is not None and runs:
        lines.append(("time left", f"{format_span(training.eta_s)} (by {training.planned_by})"))
    return lines


def _protection(state: RunStatus, newest: Status) -> list[tuple[str, str]]:
    """Return what can be done to the run, what is left of it, and who is notified."""
    probe = ", no probe" if newest.tier == "T0" else ""
    then = "" if state.ending is None or state.life.over else ", when its supervisor died"
    lines = [("state", f"{state_text(newest.state)}{then} (mode {newest.mode}{probe})")]
    if ending := state.ending:
        good = ending.checkpoint
        text = "none is good" if good is None else f"{good.id} of step {good.step} in {good.path}"
        lines.append(("checkpoint", "; ".join(filter(None, (text, ending.suspect)))))
    elif newest.can:
        lines.append(("protection", format_capabilities(newest.can)))
    if newest.budgets:
        lines.append(("budgets", ", ".join(budgets_left(newest.budgets))))
    broken = newest.channels or {}
    lines += [("channel", _channel(name, channel)) for name, channel in broken.items()]
    if count := state.undelivered:
        messages = "1 message" if count == 1 else f"{count} messages"
        text = f"{messages} of the end of the run not delivered: "
        text += f"supervise outbox flush {state.operand}"
        lines.append(("channels", text))
    if fine := [name for name in newest.messages_to if name not in broken]:
        parts = [f"no trouble with {', '.join(fine)}"]
        for name, backlog in newest.messages_waiting.items():
            held_text = f", {backlog.held} held for a digest" if backlog.held else ""
            parts.append(f"{name}: {backlog.waiting} waiting{held_text}")
        lines.append(("channels", "; ".join(parts)))
    if state.is_supervised and newest.heartbeat:
        lines.append(("heartbeat", _heartbeat(newest.heartbeat)))
    if state.is_supervised and newest.cpu_wait >= BUSY:
        text = f"others have its CPUs for {newest.cpu_wait:.0f} % of the job's time"
        lines.append(("machine", text))
    lines.append(("incidents", _count(newest.incidents)))
    if silenced := newest.silenced:
        text = ", ".join(f"{rule} by {name}" for rule, name in silenced.items())
        lines.append(("silenced", text))
    return lines


def budgets_left(budgets: Mapping[str, str]) -> list[str]:
    """Return `rollback 1 of 2 left` for `{"rollback": "1/2"}`, which counts what is spent."""
    usages = ((name, *read_usage(text)) for name, text in budgets.items())
    return [f"{name} {max(0, limit - spent)} of {limit} left" for name, spent, limit in usages]


def current_incidents(state: RunStatus) -> list[OpenIncident]:
    """Return the open incident, with all that is known of it, or another that needs a person."""
    if state.newest is not None and state.newest.incidents.open is not None:
        return [state.newest.incidents.open]
    return [
        OpenIncident(
            id=incident.id,
            severity=str(incident.severity),
            phase=incident.phase,
            headline=incident.headline,
        )
        for incident in state.gravest
        if incident.phase == "held"
    ][:1]


def _job(life: Life, run: str) -> str:
    if life.supervisor == "running":
        return "running, supervised"
    if life.job == "ended":
        end = exit_code_text(life.exit_code, is_signal=bool(life.signal))
        if life.over:
            return end
        moment = "during a relaunch" if life.relaunching else "before the run ended"
        return f"{end}; the supervisor died {moment}: `supervise adopt {run}` continues"
    if life.job == "running":
        return (
            f"running (pid {life.job_pid}), not supervised: its supervisor died; "
            f"`supervise adopt {run}` takes over"
        )
    if life.job == "lost":
        return f"ended, exit status unknown; `supervise adopt {run}` tries to recover it"
    return "never started; the supervisor died"


def _rules(rules: Mapping[str, str]) -> str:
    """Group the rules by state, the noteworthy ones first and by name."""
    groups: dict[str, list[str]] = {}
    for rule, code in sorted(rules.items(), key=lambda pair: pair[1] == "OK"):
        groups.setdefault(code, []).append(rule)
    return "; ".join(f"{code}: {_named(code, names)}" for code, names in groups.items())


def _named(code: str, names: Sequence[str]) -> str:
    quiet = code == "OK" or (code in ("UNKNOWN", "inactive") and len(names) > NAMED)
    return str(len(names)) if quiet else ", ".join(names)


def _incident(incident: OpenIncident) -> str:
    runbook = f" (runbook {incident.runbook})" if incident.runbook else ""
    acked = f", acknowledged by {incident.acked}" if incident.acked else ""
    return f"{incident.text}{runbook}{acked}"


def _count(counts: Incidents) -> str:
    if not counts.opened:
        return "none"
    return f"{counts.opened}, {'none' if counts.open is None else 'one'} open"


def _request(request: Request, run: str) -> str:
    verbs = ", ".join(step.verb for step in request.steps)
    return (
        f"{request.id}: {request.runbook} ({verbs}) waits for "
        f"`supervise approve {run} {request.id}`;"
        f" {format_span(request.left_s)} left, then {request.on_timeout}"
    )


def _channel(name: str, channel: UndeliveredMessages) -> str:
    count = channel.undelivered
    messages = f"{count} message{'' if count == 1 else 's'} not delivered"
    return f"{name}: {messages} since {channel.since_wall}, last error: {channel.error}"


def _heartbeat(pings: Health) -> str:
    """Return when the monitor outside last accepted a ping, and why none is sent."""
    accepted = pings.accepted_s
    newest = "none accepted yet" if accepted is None else f"last accepted {accepted:.0f} s before"
    text = f"every {pings.every_s:g} s, {newest}"
    reason = pings.withheld or (pings.error and f"last try: {pings.error}")
    return f"{text}; {'withheld: ' if pings.withheld else ''}{reason}" if reason else text


def _thinned(newest: Status) -> list[str]:
    """Return what the probe measures less often for its cost, and what that costs in protection."""
    longest: dict[str, int] = {}
    for rank in newest.rank_states().values():
        longest |= {name: max(n, longest.get(name, 0)) for name, n in rank.thinned.items()}
    if not longest:
        return []
    words = {
        "updates": "update norm",
        "batch_sanity": "token statistics",
        "moments": "watch of the optimizer's moments",
    }
    texts = [f"{words.get(name, name)} every {n} steps" for name, n in longest.items()]
    return [f"{', '.join(texts)}, for their cost: what only they show is seen that much later"]


def _probe(probe: Payload, life: Life) -> str:
    """Return the state of a rank's probe, and its collectors that are off."""
    keys = ["phase", "pid", "steps", "quarantine"]
    if life.job == "running":  # else its memory is gone
        keys[1:1], keys[4:4] = ["silent_s"], ["rollback", "paused", "savepoints"]
    text = _inline(
        plain_json({key: probe[key] for key in keys if probe.get(key) not in (None, [], False)})
    )
    rank = probe.read(RankStatus)
    if rank.overhead is not None:
        text += f", the probe takes {100 * rank.overhead:.1f} % of a step"
    off = [f"{name} {state}" for name, state in rank.collectors.items() if state != "on"]
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
    return "" if seconds is None else f" ({format_span(max(0.0, seconds))} ago)"
