"""`supervise status`: the state of a run, from its directory."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from ..core.model.events import Exited, Launched
from ..errors import StoreError, understood
from ..inputs import clock
from ..outputs.capabilities import line
from ..store import audit, journal
from ..store.files import locked
from ..store.recorder import incomplete
from ..store.run_directory import RunDir
from ._output import document, print_table

DERIVED = "the file is only a cache of the records; use `supervise why RUN`"


@click.command(name="status")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, as_json: bool) -> None:
    """Show the state of a run.

    Job, step, rules, incidents, budgets and probes. Reads only the run directory, so it works from
    any terminal, and after the run.

    \b
    Examples:
      supervise status runs/20260105-101112-7f3a9c
      supervise status --json runs/20260105-101112-7f3a9c | jq .state

    Exit codes: 0; 64 no such run.
    """
    found = RunDir.open(run)
    state = found.read_json("state.json") if (found.path / "state.json").exists() else {}
    what, log = f"the status in {found.path / 'state.json'}", found.audit_path
    if not isinstance(state, dict):
        raise StoreError(f"{what} is not a JSON object", hint=DERIVED)
    with understood(f"the records in {log}", "supervise audit show RUN prints them"):
        ends = _read_ends(found)
        state = {"run": found.id, **state, **_life(found, ends)}
    if ends.incomplete:
        state["record"] = str(ends.incomplete.get("reason"))
    if as_json:
        click.echo(document(state))
        return
    with understood(what, DERIVED):
        lines = _lines(state)
    print_table(lines)


@dataclass(slots=True)
class _Ends:
    """What the audit log says about the end of the run and of its last action.

    Attributes:
        end: the last record, if the run ended with it.
        relaunching: the newest action on the job is a relaunch without an outcome.
        incomplete: see `recorder.incomplete`.
    """

    end: Mapping[str, Any] | None = None
    relaunching: bool = False
    incomplete: Mapping[str, Any] | None = None


def _read_ends(run: RunDir) -> _Ends:
    """Read the audit log up to its first damage, which `audit verify` reports."""
    ends = _Ends()

    def records() -> Iterator[Mapping[str, Any]]:
        with suppress(StoreError):
            for r in audit.read(run.audit_path):
                ends.end = r if r["kind"] == "run_end" else None
                if r["kind"] in ("commit", "abort", "in_doubt") and "action" in _data(r):
                    ends.relaunching = False
                elif r["kind"] == "intent":
                    ends.relaunching = bool(r["data"]["action"]["verb"] == "relaunch")
                yield r

    ends.incomplete = incomplete(records())
    return ends


def _data(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return record.get("data") or {}


def _life(run: RunDir, ends: _Ends) -> dict[str, Any]:
    """Return `supervisor`: running or gone, and `job`: running, ended, lost or unknown.

    A live supervisor holds the lock of the audit log. Without one, the journal has the last state
    of the job, and the audit log whether the run ended with it: a supervisor that died before may
    have been about to relaunch the job.
    """
    if locked(run.audit_path):
        return {"supervisor": "running", "job": "running", "exit_code": None}
    end = ends.end
    launched, returncode = _last_seen(run)
    pid, runs = _process(run, launched)
    code = returncode if returncode is None or returncode >= 0 else 128 - returncode
    if end is not None and (code is None or ends.incomplete is not None):
        code, returncode = int(end["data"]["exit_code"]), None
    again = end is None and ends.relaunching
    if code is not None and not (end is None and runs):
        job = "ended"
    elif pid is not None:
        job, code = "running" if runs else "lost", None
    else:
        job = "unknown"
    name = None
    if returncode is not None and returncode < 0:
        name = _signal(-returncode)
    return {
        "supervisor": "gone",
        "job": job,
        "job_pid": pid,
        "exit_code": code,
        "signal": name,
        "over": end is not None,
        "relaunching": again,
    }


def _last_seen(run: RunDir) -> tuple[Launched | None, int | None]:
    """Return the newest launch in the journal, and its return code if it ended."""
    launched, returncode = None, None
    with suppress(StoreError):  # `replay` and `export` report a damaged journal
        for _, event in journal.read(run.journal_path, only=(Launched, Exited)):
            if isinstance(event, Launched):
                launched, returncode = event, None
            elif isinstance(event, Exited):
                returncode = event.returncode
    return launched, returncode


def _process(run: RunDir, launched: Launched | None) -> tuple[int | None, bool]:
    """Return the pid of the newest launch, which the journal may lack, and whether it runs."""
    # Here, not above: not needed while the supervisor lives.
    from ..app.launcher import LAUNCHED
    from ..job.proc_stat import start_ticks

    with suppress(StoreError), understood(LAUNCHED, ""):
        made = run.read_json(LAUNCHED)
        if launched is None or made["attempt"] >= launched.attempt:
            return int(made["pid"]), start_ticks(made["pid"]) == made["start_ticks"]
    pid = None if launched is None else launched.pid
    return pid, pid is not None and Path(f"/proc/{pid}").exists()


def _lines(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    lines = [("run", str(state["run"])), ("job", _job(state))]
    if record := state.get("record"):
        lines.append(("record", record))
    if "state" not in state:
        return [*lines, ("state", "unknown: no status was written")]
    how = f"mode {state.get('mode', '?')}, tier {state.get('tier', '?')}"
    lines.append(("state", f"{state['state']} ({how})"))
    lines.append(("step", f"{state.get('step', '?')}, attempt {state.get('attempt', 0)}"))
    if cause := state.get("ended_by"):
        means = f" ({cause['means']})" if cause.get("means") else ""
        lines.append(("ended by", f"{cause['text']}{means}"))
    if can := state.get("can"):
        lines.append(("can do", line(can)))
    if trouble := state.get("trouble"):
        lines.append(("trouble", str(trouble)))
    broken = state.get("channels") or {}
    lines += [("channel", _channel(name, how)) for name, how in broken.items()]
    if state["supervisor"] == "running" and (heartbeat := state.get("heartbeat")):
        lines.append(("heartbeat", _heartbeat(heartbeat)))
    lines.append(("incidents", _incidents(state.get("incidents") or {})))
    lines += [("waiting", _request(one)) for one in state.get("approvals") or ()]
    if awaited := state.get("waits_for"):
        lines.append(("waiting", f"relaunch waits for {awaited}"))
    if silenced := state.get("silenced"):
        lines.append(
            ("silenced", ", ".join(f"{rule} by {name}" for rule, name in silenced.items()))
        )
    if budgets := state.get("budgets"):
        lines.append(("budgets", _inline(budgets)))
    if rules := state.get("rules"):
        lines.append(("rules", _rules(rules)))
    for rank, probe in (state.get("ranks") or {}).items():
        lines.append((f"rank {rank}", _probe(probe)))
    if last := state.get("last_decision"):
        lines.append(("last", f"{last['kind']}: {last['reason']}"))
    if updated := state.get("updated_wall"):
        lines.append(("updated", f"{updated}{_age(str(updated))}"))
    return lines


def _job(state: Mapping[str, Any]) -> str:
    if state["supervisor"] == "running":
        return "running, supervised"
    if state["job"] == "ended":
        how = f"ended with exit code {state['exit_code']}"
        how += f" ({state['signal']})" if state["signal"] else ""
        if state["over"]:
            return how
        when = "during a relaunch" if state["relaunching"] else "before the run ended"
        return f"{how}; the supervisor died {when}: `supervise adopt RUN` continues"
    if state["job"] == "running":
        return (
            f"running (pid {state['job_pid']}), not supervised: its supervisor died; "
            "`supervise adopt RUN` takes over"
        )
    if state["job"] == "lost":
        return "ended, exit status unknown; `supervise adopt RUN` tries to recover it"
    return "never started; the supervisor died"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


def _rules(rules: Mapping[str, Any]) -> str:
    """Group the rules by state, the noteworthy ones first and by name."""
    groups: dict[str, list[str]] = {}
    for rule, how in sorted(rules.items(), key=lambda pair: pair[1] == "OK"):
        groups.setdefault(str(how), []).append(rule)
    return "; ".join(
        f"{how}: {len(names) if how == 'OK' else ', '.join(names)}" for how, names in groups.items()
    )


def _incidents(found: Mapping[str, Any]) -> str:
    count, now = found.get("opened", 0), found.get("open")
    if not now:
        return f"{count}, none open" if count else "none"
    text = f"{count}; open: {now.get('id')} {now.get('severity')} {now.get('phase')}"
    runbook = f" (runbook {now['runbook']})" if now.get("runbook") else ""
    acked = f", acknowledged by {now['acked']}" if now.get("acked") else ""
    return f"{text}: {now.get('headline')}{runbook}{acked}"


def _request(one: Mapping[str, Any]) -> str:
    verbs = ", ".join(str(step["verb"]) for step in one["steps"])
    return (
        f"{one['id']}: {one['runbook']} ({verbs}) waits for `supervise approve RUN {one['id']}`; "
        f"{one['left_s']} s left, then {one['on_timeout']}"
    )


def _channel(name: str, how: Mapping[str, Any]) -> str:
    count = how["undelivered"]
    messages = f"{count} message{'' if count == 1 else 's'} not delivered"
    return f"{name}: {messages} since {how['since_wall']}, last error: {how['error']}"


def _heartbeat(how: Mapping[str, Any]) -> str:
    """Return when the monitor outside last accepted a ping, and why none is sent."""
    accepted = how["accepted_s"]
    last = "none accepted yet" if accepted is None else f"last accepted {accepted:.0f} s before"
    text = f"every {how['every_s']:g} s, {last}"
    why = how["withheld"] or (how["error"] and f"last try: {how['error']}")
    return f"{text}; {'withheld: ' if how['withheld'] else ''}{why}" if why else text


def _probe(probe: Mapping[str, Any]) -> str:
    """Return the state of a rank's probe, and its collectors that are off."""
    keys = ("phase", "silent_s", "pid", "steps", "rollback", "paused", "savepoints", "quarantine")
    text = _inline({key: probe[key] for key in keys if probe.get(key) not in (None, [], False)})
    collectors = probe.get("collectors") or {}
    off = [f"{name} {how}" for name, how in collectors.items() if how != "on"]
    return "; ".join([text, *off])


def _inline(value: Any) -> str:
    """Return JSON-ready data on one line, without brackets."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_inline(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_inline(item) for item in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _age(updated: str) -> str:
    try:
        now = datetime.fromisoformat(clock.wall())
        seconds = (now - datetime.fromisoformat(updated)).total_seconds()
    except (ValueError, TypeError):
        return ""
    return f" ({seconds:.0f} s ago)"
