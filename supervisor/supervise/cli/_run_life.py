"""Life and end of the supervisor and the job of a run."""

from __future__ import annotations

import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.model.events import Exited, Launched
from ..errors import StoreError, understood
from ..store import journal
from ..store.files import locked
from ..store.run_directory import RunDir
from ..store.run_records import RunOutcome

# States of a list of runs, those that need attention first.
UNSUPERVISED, RUNNING, LOST, CRASHED, STOPPED, FINISHED, UNKNOWN = STATES = (
    *("unsupervised", "running", "lost", "crashed", "stopped", "finished", "unknown"),
)
ASKED = (75, 78, 128 + signal.SIGINT, 128 + signal.SIGTERM)  # policy, operator, a signal


def state_of(run: RunDir, found: RunOutcome, host: str) -> tuple[str, int | None]:
    """Return one of STATES and the exit code, without reading the journal.

    Args:
        host: the machine that the run was started on; a process on another one cannot be seen.
    """
    if locked(run.audit_path):
        return RUNNING, None
    if found.end is not None:
        code = int(found.end["data"]["exit_code"])
        if code == 0:
            return FINISHED, code
        return (STOPPED if code in ASKED else CRASHED), code
    if host != socket.gethostname():
        return UNKNOWN, None
    _, runs = _process(run, None)
    return (UNSUPERVISED if runs else LOST), None


def life(run: RunDir, found: RunOutcome) -> dict[str, Any]:
    """Return `supervisor`: running or gone, and `job`: running, ended, lost or unknown.

    A live supervisor holds the lock of the audit log. Without one, the journal has the last state
    of the job, and the audit log whether the run ended with it: a supervisor that died before may
    have been about to relaunch the job.
    """
    if locked(run.audit_path):
        return {"supervisor": "running", "job": "running", "exit_code": None}
    end = found.end
    launched, returncode = _last_seen(run)
    pid, runs = _process(run, launched)
    code = returncode if returncode is None or returncode >= 0 else 128 - returncode
    if end is not None and (code is None or found.incomplete is not None):
        code, returncode = int(end["data"]["exit_code"]), None
    again = end is None and found.relaunching
    if code is not None and not (end is None and runs):
        job = "ended"
    elif pid is not None:
        job, code = "running" if runs else "lost", None
    else:
        job = "unknown"
    name = None
    if returncode is not None and returncode < 0:
        name = signal_name(-returncode)
    return {
        "supervisor": "gone",
        "job": job,
        "job_pid": pid,
        "exit_code": code,
        "signal": name,
        "over": end is not None,
        "relaunching": again,
    }


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


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
    from ..runtime.launcher import LAUNCHED, last_launch
    from ..runtime.process_tree import start_ticks

    with suppress(StoreError), understood(LAUNCHED, ""):
        made = last_launch(run)
        if made is not None and (launched is None or made["attempt"] >= launched.attempt):
            return int(made["pid"]), start_ticks(made["pid"]) == made["start_ticks"]
    pid = None if launched is None else launched.pid
    return pid, pid is not None and Path(f"/proc/{pid}").exists()
