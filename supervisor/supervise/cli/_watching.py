"""Shared part of `run` and `adopt` once the job runs. Imported only then: the job comes first."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .. import __version__
from ..catalog import load_policy
from ..checkpoints.registry import BAD, VERIFIED, Entry, Register
from ..core.model.decisions import plain_json
from ..core.model.payload import DrillOrder, Payload
from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..errors import SuperviseError
from ..notifiers import build_routes, build_senders, heartbeat_sender
from ..notifiers.heartbeat import DeadManPing
from ..notifiers.outbox import Outbox
from ..report import receipt
from ..report.openmetrics import RunMetrics
from ..runtime import environment
from ..runtime.foreground import Foreground
from ..runtime.launcher import Launcher
from ..runtime.logs import NAME, SupervisorLog
from ..runtime.loop import App
from ..runtime.process import Process
from ..runtime.settings import Settings
from ..runtime.signals import SignalForwarder
from ..runtime.status_writer import add_broken_channels_to_status, run_vitals
from ..store import run_directory
from ..store.policies import Reloader
from ..store.recorder import Recorder
from ..store.run_directory import Endpoint, RunDir
from ._output import PrintLine, channels_of
from ._params import Options
from ._streams import exit_process

ReloadFrom = tuple[str, str | None, Mapping[str, Mapping[str, str]]]
HEARTBEAT_S = 2.0  # for the last ping; the loop has ended, and its messages still wait
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """How a job was started.

    Attributes:
        argv: as it was given.
        reload_from: file and mode of a reload that names none; channels that it adds to any.
        faults: the drills.
    """

    argv: Sequence[str]
    reload_from: ReloadFrom
    run: RunDir
    segments: Path
    tier: str
    tier_reason: str | None
    faults: Sequence[DrillOrder]
    redactor: Redactor
    options: Options


def watch_started(
    started: Started,
    policy: Policy,
    launcher: Launcher,
    recorder: Recorder,
    process: Process,
    forwarder: SignalForwarder,
    print_line: PrintLine,
) -> int:
    """Watch a job that has just started; return the exit code to pass on."""
    run, print_line = started.run, log_lines(print_line)
    source, mode, notify = started.reload_from
    senders, unset = build_senders(
        channels_of(policy.notify, quiet=started.options.quiet), os.environ
    )
    for warning in (*unset, *_nested_restarts(started.argv, policy)):
        print_line(f"supervise: warning: {warning}")
    cites = [*started.options.cites, *_citations(policy, print_line)]
    launch = started.options.launch
    facts: Mapping[str, Any] = {
        "previous": None if started.options.previous is None else str(started.options.previous),
        "drills": plain_json(started.faults),
        "channels": [sender.name for sender in senders],
        **({"cites": cites} if cites else {}),
        **({} if launch is None else {"resumed_from": {"path": launch.path, "step": launch.step}}),
    }
    settings = Settings(
        started.redactor.command(started.argv),
        policy,
        Reloader(run, policy, partial(load_policy, notify=notify), source, mode),
        run,
        started.segments,
        started.tier,
        started.tier_reason,
        print_line,
        facts,
        watch_policy=started.options.watch_policy,
        redactor=started.redactor,
        outputs=[run.output_path] if started.options.logs else [],
        previous=started.options.previous,
        metrics=run_metrics(run, started.options.metrics),
    )
    app = App(settings, launcher, forwarder, recorder)
    outbox = Outbox(senders, app.processor.on_result, routes=build_routes(policy.notify))
    print_line(receipt.opening_line(run, policy, started.tier, started.tier_reason))
    return watch_job(app, process, outbox, forwarder, print_line)


def _citations(policy: Policy, print_line: PrintLine) -> Iterator[Payload]:
    """Yield what the record cites of the trials that a policy names; a job never waits for one."""
    if policy.cites:
        from ..trials.trial_runs import cite_trial

        for path in policy.cites:
            try:
                yield cite_trial(Path(path))
            except (SuperviseError, OSError, KeyError) as error:
                print_line(f"supervise: warning: cites: {error}")


def watch_job(
    app: App, process: Process, outbox: Outbox, forwarder: SignalForwarder, print_line: PrintLine
) -> int:
    """Watch the job to its end and print the receipt; return the exit code to pass on."""
    run, directory = app.settings.run, app.settings.shm
    lines: list[str] = []
    heartbeat = app.settings.heartbeat = _heartbeat(app, print_line)
    metrics = app.settings.metrics

    def read_receipt() -> None:
        newest = Register(run.path).newest()
        policy = app.processor.policy
        resumes = policy.job.relaunch is not None
        lines[:] = [
            *receipt.closing_receipt(run, {policy.digest: policy}),
            *_doubts(run, newest),
            *receipt.next_command_lines(run, has_checkpoint=newest is not None, resumes=resumes),
        ]

    def run_and_close() -> int:
        code = app.run(process, outbox)
        lines[:] = [f"supervise: exit code {code}"]
        steps: tuple[Callable[[], None], ...] = (
            lambda: None if heartbeat is None else heartbeat.end(code, HEARTBEAT_S),
            lambda: app.close(outbox, code),
            lambda: add_broken_channels_to_status(run, outbox.check_channels()),
            lambda: environment.remove_environment(directory),
            read_receipt,
        )
        for step in steps:
            try:
                step()
            except SuperviseError as error:
                print_line(f"supervise: {error}")
            except Exception as error:
                _log.exception("the end of the run was not recorded in full")
                print_line(f"supervise: {type(error).__name__}: {error}")
        for line in lines:
            print_line(line)
        return code

    # The handlers stay: a signal now must not cost the last record or the exit code.
    atexit.register(forwarder.ignore)
    log = SupervisorLog(run.path / NAME, run.id, app.open_incident, app.settings.redactor)
    log.start()
    if heartbeat is not None:
        heartbeat.start(begins=app.settings.past is None)
    if metrics is not None:
        metrics.start(print_line)
    index = threading.Thread(target=run_directory.add_run, args=(run, os.environ), daemon=True)
    with suppress(RuntimeError):  # at the limit of threads
        index.start()  # a home directory may hang
    code, is_over = Foreground(app, process, outbox, forwarder).run_in_thread(run_and_close)
    if not is_over:
        exit_process(code)  # a thread hangs: do not wait for it
    if metrics is not None:
        metrics.close()
    log.stop()
    return code


def _doubts(run: RunDir, newest: Entry | None) -> list[str]:
    """Return the line about a newest checkpoint that is damaged, or that nobody has verified."""
    if newest is None or newest.state == VERIFIED:
        return []
    if newest.state == BAD:
        damage = "; ".join(newest.problems[:3])
        return [
            f"  SEV1 newest checkpoint is damaged: {newest.label} in {newest.path}: {damage}; "
            f"supervise checkpoints {receipt.run_operand(run)}"
        ]
    return [
        f"  newest checkpoint not verified: {newest.label} in {newest.path}; "
        f"supervise checkpoints --verify {receipt.run_operand(run)}"
    ]


def run_metrics(run: RunDir, endpoint: Endpoint | None) -> RunMetrics | None:
    """Return what serves the numbers of a run, None where no port was asked for."""
    if endpoint is None:
        return None
    from ..catalog import metrics

    units = {name: spec.unit for name, spec in metrics.all_metrics().items() if "." not in name}
    info = {"run": run.id, "version": __version__}
    return RunMetrics(endpoint.port, endpoint.host, info, units, per_rank=endpoint.per_rank)


def _heartbeat(app: App, print_line: PrintLine) -> DeadManPing | None:
    """Return the pings that the policy asks for, None without any."""
    sender, unset = heartbeat_sender(app.settings.policy.notify, os.environ)
    for warning in unset:
        print_line(f"supervise: warning: {warning}")
    if sender is None:
        return None
    run_id = app.settings.run.id
    return DeadManPing(sender, lambda: run_vitals(app.processor, run_id), print_line)


def log_lines(print_line: PrintLine) -> PrintLine:
    """Return a function that also logs each line, even under --quiet."""

    def print_and_log(line: str) -> None:
        _log.info(line)
        print_line(line)

    return print_and_log


def _nested_restarts(argv: Sequence[str], policy: Policy) -> list[str]:
    """Return a warning if the launcher restarts ranks by itself."""
    inner = environment.inner_restarts(argv)
    if not inner or policy.job.relaunch is None:
        return []
    return [
        f"torchrun restarts the ranks {inner} times by itself for each start by the policy, and "
        "the policy does not count these restarts; use --max-restarts=0 and the budget `restart`"
    ]
