"""`supervise adopt`: take over a run whose supervisor died."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from ..catalog import load_policy
from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..errors import StoreError, UsageError
from ..notifiers import build, routes
from ..outputs.outbox import Outbox
from ..report import receipt
from ..runtime import environment
from ..runtime.launcher import Launcher, first_environment, last_launch, redactor
from ..runtime.loop import App
from ..runtime.process import AdoptedProcess
from ..runtime.segment_reader import recorded_end
from ..runtime.settings import RecoveredRun, Settings
from ..runtime.signals import Forwarder
from ..store import audit
from ..store.policies import Reloader, aim
from ..store.recorder import Recorder
from ..store.run_directory import RunDir
from ._output import (
    OpenRecords,
    PrintLine,
    channels_of,
    keep_output,
    line_printer,
    open_records,
)
from ._runs import adoptable_argument
from ._streams import share_terminal
from ._watching import log_lines, run_metrics, watch


@click.command(name="adopt")
@adoptable_argument
@click.option("-q", "--quiet", is_flag=True, help="Print only errors, and messages of SEV0.")
def command(run: Path, quiet: bool) -> int:
    """Take over a run whose supervisor died. The job keeps running.

    Frames that the job published meanwhile are judged, as far as its ring buffer still holds them.
    An action in progress takes effect once; undelivered messages are sent; holds, budgets and open
    incidents continue. From then on it behaves as `supervise run` does, signals included. A
    relaunch uses the command and environment of the first start, which are kept beside the run
    until it ends. Refused for a run that another user may have written.

    \b
    Examples:
      supervise adopt runs/20260105-101112-7f3a9c
      nohup supervise adopt --quiet "$(ls -d runs/* | tail -n 1)" &

    Exit codes: those of `supervise run`; 255 if the job ended and its exit status is unknown.
    """
    return adopt(run, line_printer(quiet=quiet), quiet=quiet)


def adopt(
    path: Path,
    print_line: PrintLine,
    open_records: OpenRecords = open_records,
    *,
    quiet: bool = False,
) -> int:
    """Watch the run in the directory `path` to its end; return the exit code to pass on."""
    print_line = log_lines(print_line)
    run = RunDir.own(path)
    described = run.read_json("run.json")
    if described["host"] != socket.gethostname():
        raise UsageError(
            f"{path} runs on {described['host']}",
            hint=f"run `supervise adopt` on {described['host']}",
        )
    recorder = open_records(run, print_line)
    try:
        ended = how_run_ended(run)
        if ended is not None:
            raise UsageError(f"{run.path} has ended: {ended}", hint=f"supervise status {run.path}")
        past = RecoveredRun.read(run, load_policy)
        process, launcher, clean = _job(run, described, past.started, print_line)
        app, outbox, forwarder = _supervisor(
            run, described, past, launcher, clean, recorder, print_line, quiet=quiet
        )
    except BaseException:
        recorder.close()
        raise
    forwarder.install()
    forwarder.attach(process)
    share_terminal()
    print_line(receipt.opening(run, past.policy, described["tier"], described["tier_reason"]))
    return watch(app, process, outbox, forwarder, print_line)


def how_run_ended(run: RunDir) -> str | None:
    """Return the reason of the last record if the run has ended, else None."""
    if not run.audit_path.exists():
        return None
    last = deque(audit.read(run.audit_path), maxlen=1)
    return str(last[0]["reason"]) if last and last[0]["kind"] == "run_end" else None


def _job(
    run: RunDir, described: Mapping[str, Any], policy: Policy, print_line: PrintLine
) -> tuple[AdoptedProcess, Launcher, Redactor]:
    """Return the job's process, its launcher, and the redactor of its secrets."""
    made = last_launch(run)
    if made is None:
        raise StoreError(
            f"no launch is on record for the job of {run.path}",
            hint="check whether it runs (ps); if it does not, start the run again",
        )
    directory = environment.of(Path(run.read_json("probe.json")["shm"]).parent, run.id)
    environment.own(directory)
    adopt = partial(AdoptedProcess, run_id=run.id, recorded=partial(recorded_end, directory))
    process = adopt(made["pid"], made["start_ticks"])
    environ = first_environment(run)
    os.chdir(described["cwd"])
    argv = run.command()
    output = keep_output(run, print_line, adopted=True) if described.get("logs") else None
    launcher = Launcher(
        argv, environ, run, directory, described["drills"], adopt=adopt, output=output
    )
    clean = redactor(argv, environ, policy, os.environ)
    return process, launcher, clean


def _supervisor(
    run: RunDir,
    described: Mapping[str, Any],
    past: RecoveredRun,
    launcher: Launcher,
    clean: Redactor,
    recorder: Recorder,
    print_line: PrintLine,
    *,
    quiet: bool,
) -> tuple[App, Outbox, Forwarder]:
    senders, unset = build(channels_of(past.started.notify, quiet=quiet), os.environ)
    for warning in unset:
        print_line(f"supervise: warning: {warning}")
    named, mode = past.reload
    again = aim({"policy": named, "mode": mode}, *described["reload"])
    load = partial(load_policy, notify=described.get("notify"))
    reloader = Reloader(run, past.started, load, *again)
    settings = Settings(
        described["argv"],
        past.started,
        reloader,
        run,
        launcher.directory,
        described["tier"],
        described["tier_reason"],
        print_line,
        past=past,
        metrics=run_metrics(run, described.get("metrics")),
        watch_policy=bool(described.get("watch_policy")),
        outputs=[run.output_path] if described.get("logs") else [],
        redactor=clean,
        facts={"channels": [sender.name for sender in senders]},
    )
    forwarder = Forwarder()
    app = App(settings, launcher, forwarder, recorder)
    return (
        app,
        Outbox(senders, app.processor.on_result, routes=routes(past.started.notify)),
        forwarder,
    )
