"""`supervise adopt`: take the place of a supervisor that died."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..app.launcher import Launcher, first_environment, last_launch, redactor
from ..app.loop import App
from ..app.run_recovery import RecoveredRun
from ..app.settings import Settings
from ..catalog import load_policy
from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..errors import StoreError, UsageError
from ..inputs.segment import recorded_end
from ..job import shared_memory
from ..job.adopted_process import AdoptedProcess
from ..job.signals import Forwarder
from ..notifiers import build
from ..outputs.outbox import Outbox
from ..report import receipt
from ..store import audit
from ..store.policies import Reloader, aim
from ..store.recorder import Recorder
from ..store.run_directory import RunDir
from ._records import Record, Tell, record, teller
from ._watching import logged, watch


@click.command(name="adopt")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors.")
def command(run: Path, quiet: bool) -> int:
    """Go on watching a run whose supervisor died; the job notices nothing.

    What the job published meanwhile is read and judged, as far as its ring still holds it. An
    action that was under way has its effect once. Messages that were not delivered are sent. Holds,
    budgets and open incidents stay. From then on it is as `supervise run`: signals are passed on,
    and the exit code is the job's; 255 when the job ended and nobody can tell how. A job that is
    started again gets the command and the environment of its first start, which RUN/command.json
    and RUN/environ.json keep.

    \b
    Examples:
      supervise adopt runs/20260105-101112-7f3a9c
      nohup supervise adopt --quiet "$(ls -d runs/* | tail -n 1)" &
    """
    return adopt(run, teller(quiet=quiet))


def adopt(path: Path, tell: Tell, record: Record = record) -> int:
    """Watch the run in the directory `path` to its end; return the exit code to pass on."""
    tell = logged(tell)
    run = RunDir.open(path.absolute())
    described = run.read_json("run.json")
    if described["host"] != socket.gethostname():
        raise UsageError(f"{path} runs on {described['host']}", hint="take it over there")
    recorder = record(run, tell)
    try:
        ended = over(run)
        if ended is not None:
            hint = "`supervise status RUN` shows its end"
            raise UsageError(f"{run.path} is over: {ended}", hint=hint)
        past = RecoveredRun.read(run, load_policy)
        process, launcher, clean = _job(run, described, past.started)
        app, outbox, forwarder = _supervisor(run, described, past, launcher, clean, recorder, tell)
    except BaseException:
        recorder.close()
        raise
    forwarder.install()
    forwarder.attach(process)
    tell(receipt.opening(run, past.policy, described["tier"], described["tier_reason"]))
    return watch(app, process, outbox, forwarder, tell)


def over(run: RunDir) -> str | None:
    """Return how a run ended whose last record is written, else None."""
    if not run.audit_path.exists():
        return None
    last = deque(audit.read(run.audit_path), maxlen=1)
    return str(last[0]["reason"]) if last and last[0]["kind"] == "run_end" else None


def _job(
    run: RunDir, described: Mapping[str, Any], policy: Policy
) -> tuple[AdoptedProcess, Launcher, Redactor]:
    """Return the job as a process, what can start it again, and what knows its secrets."""
    made = last_launch(run)
    if made is None:
        raise StoreError(
            f"the job of {run.path} was not started, as far as anybody wrote down",
            hint="look whether it runs; if it does not, start the run again",
        )
    directory = Path(run.read_json("probe.json")["shm"])
    shared_memory.own(directory)
    adopt = partial(AdoptedProcess, run_id=run.id, recorded=partial(recorded_end, directory))
    process = adopt(made["pid"], made["start_ticks"])
    environ = first_environment(run)
    os.chdir(described["cwd"])
    argv = run.command()
    launcher = Launcher(argv, environ, run, directory, described["drills"], adopt=adopt)
    clean = redactor(argv, environ, policy, os.environ)
    return process, launcher, clean


def _supervisor(
    run: RunDir,
    described: Mapping[str, Any],
    past: RecoveredRun,
    launcher: Launcher,
    clean: Redactor,
    recorder: Recorder,
    tell: Tell,
) -> tuple[App, Outbox, Forwarder]:
    named, mode = past.reload
    again = aim({"policy": named, "mode": mode}, *described["reload"])
    reloader = Reloader(run, past.started, load_policy, *again)
    settings = Settings(
        described["argv"],
        past.started,
        reloader,
        run,
        Path(run.read_json("probe.json")["shm"]),
        described["tier"],
        described["tier_reason"],
        tell,
        past=past,
        redactor=clean,
    )
    forwarder = Forwarder()
    app = App(settings, launcher, forwarder, recorder)
    senders, unset = build({"console": {}, **past.started.notify}, os.environ)
    for warning in unset:
        tell(f"supervise: warning: {warning}")
    return app, Outbox(senders, app.desk.delivered), forwarder
