"""`supervise status`: how a run is, from its directory alone."""

from __future__ import annotations

import shutil
import signal
import textwrap
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
from ..store import audit, journal
from ..store.lock import locked
from ..store.recorder import incomplete
from ..store.run_directory import RunDir
from .audit import document, printable

DERIVED = "it is derived from the records, which `supervise why RUN` tells"


@click.command(name="status")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, as_json: bool) -> None:
    """Show how a run is: state, step, rules, incidents, budgets, probes.

    Reads the run directory only, so it works from any terminal, and after the run.

    \b
    Examples:
      supervise status runs/20260105-101112-7f3a9c
      supervise status --json runs/20260105-101112-7f3a9c | jq .state
    """
    found = RunDir.open(run)
    state = found.read_json("state.json") if (found.path / "state.json").exists() else {}
    what, log = f"the status in {found.path / 'state.json'}", found.audit_path
    if not isinstance(state, dict):
        raise StoreError(f"{what} is no object", hint=DERIVED)
    with understood(f"the records in {log}", "supervise audit show RUN prints what they hold"):
        seen = _glance(found)
        state = {"run": found.id, **state, **_life(found, seen)}
    if seen.lacking:
        state["record"] = str(seen.lacking.get("reason"))
    if as_json:
        click.echo(document(state))
        return
    width = max(shutil.get_terminal_size().columns, 40)
    with understood(what, DERIVED):
        lines = _lines(state)
    for head, text in lines:
        click.echo(
            textwrap.fill(
                printable(text),
                width,
                initial_indent=f"{head:11}",
                subsequent_indent=" " * 11,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )


@dataclass(slots=True)
class _Glance:
    """What the audit log says of the run's life: of a long one, only that is kept.

    Attributes:
        end: the last record, if the run ended with it.
        relaunching: the newest action on the job is a relaunch that nothing was heard of.
        lacking: see `recorder.incomplete`.
    """

    end: Mapping[str, Any] | None = None
    relaunching: bool = False
    lacking: Mapping[str, Any] | None = None


def _glance(run: RunDir) -> _Glance:
    """Read the audit log; damage is for `audit verify` to tell, what is known stays known."""
    seen = _Glance()

    def records() -> Iterator[Mapping[str, Any]]:
        with suppress(StoreError):
            for r in audit.read(run.audit_path):
                seen.end = r if r["kind"] == "run_end" else None
                if r["kind"] in ("commit", "abort", "in_doubt") and "action" in _data(r):
                    seen.relaunching = False
                elif r["kind"] == "intent":
                    seen.relaunching = bool(r["data"]["action"]["verb"] == "relaunch")
                yield r

    seen.lacking = incomplete(records())
    return seen


def _data(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return record.get("data") or {}


def _life(run: RunDir, seen: _Glance) -> dict[str, Any]:
    """Tell who is still there: `supervisor` running or gone, `job` running, ended, lost, unknown.

    A living supervisor holds the lock of the audit log. When there is none, the journal tells how
    the job was last seen, and the audit log whether that was the end of the run: a supervisor that
    died before it may have been about to start the job again.
    """
    if locked(run.audit_path):
        return {"supervisor": "running", "job": "running", "exit_code": None}
    end = seen.end
    launched, returncode = _last_seen(run)
    pid, runs = _process(run, launched)
    code = returncode if returncode is None or returncode >= 0 else 128 - returncode
    if end is not None and (code is None or seen.lacking is not None):
        code, returncode = int(end["data"]["exit_code"]), None
    again = end is None and seen.relaunching
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
    """Return the newest launch in the journal, and the returncode of its end if that is there."""
    launched, returncode = None, None
    with suppress(StoreError):  # a damaged journal is replay's and export's to tell
        for _, event in journal.read(run.journal_path, only=(Launched, Exited)):
            if isinstance(event, Launched):
                launched, returncode = event, None
            elif isinstance(event, Exited):
                returncode = event.returncode
    return launched, returncode


def _process(run: RunDir, launched: Launched | None) -> tuple[int | None, bool]:
    """Return the pid of the newest launch and whether it runs; the journal may lack that one."""
    # Here, not above: a living supervisor is told without them.
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
        return [*lines, ("state", "nothing is known: the first status was never written")]
    how = f"mode {state.get('mode', '?')}, tier {state.get('tier', '?')}"
    lines.append(("state", f"{state['state']} ({how})"))
    lines.append(("step", f"{state.get('step', '?')}, attempt {state.get('attempt', 0)}"))
    if trouble := state.get("trouble"):
        lines.append(("trouble", str(trouble)))
    broken = state.get("channels") or {}
    lines += [("channel", _channel(name, how)) for name, how in broken.items()]
    lines.append(("incidents", _incidents(state.get("incidents") or {})))
    lines += [("waiting", _request(one)) for one in state.get("approvals") or ()]
    if awaited := state.get("waits_for"):
        lines.append(("waiting", f"the relaunch, for {awaited}"))
    if silenced := state.get("silenced"):
        lines.append(("silenced", ", ".join(f"{rule} by {who}" for rule, who in silenced.items())))
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
        while_ = "while it was starting it again" if state["relaunching"] else "before it was over"
        return f"{how}, but its supervisor died {while_}: `supervise adopt RUN` goes on from there"
    if state["job"] == "running":
        unwatched = "but its supervisor is gone: not watched until `supervise adopt RUN`"
        return f"still running (pid {state['job_pid']}), {unwatched}"
    if state["job"] == "lost":
        unseen = "nobody saw how it ended; `supervise adopt RUN` asks what it left"
        return f"gone, and so is its supervisor: {unseen}"
    return "never started; the supervisor is gone"


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
    acked = f", looked after by {now['acked']}" if now.get("acked") else ""
    return f"{text}: {now.get('headline')}{runbook}{acked}"


def _request(one: Mapping[str, Any]) -> str:
    verbs = ", ".join(str(step["verb"]) for step in one["steps"])
    return (
        f"{one['id']}: may {one['runbook']} run ({verbs})? supervise approve RUN {one['id']}; "
        f"{one['left_s']} s left, then {one['on_timeout']}"
    )


def _channel(name: str, how: Mapping[str, Any]) -> str:
    count = how["undelivered"]
    messages = f"{count} message{'' if count == 1 else 's'} not delivered"
    return f"{name}: {messages} since {how['since_wall']}, last error: {how['error']}"


def _probe(probe: Mapping[str, Any]) -> str:
    """Say how a rank's probe is; of its collectors only those that are off."""
    keys = ("phase", "silent_s", "pid", "steps", "rollback", "paused", "savepoints", "quarantine")
    text = _inline({key: probe[key] for key in keys if probe.get(key) not in (None, [], False)})
    collectors = probe.get("collectors") or {}
    off = [f"{name} {how}" for name, how in collectors.items() if how != "on"]
    return "; ".join([text, *off])


def _inline(value: Any) -> str:
    """Return JSON-ready data as words on one line."""
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
