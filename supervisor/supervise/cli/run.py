"""`supervise run`: start a command and watch it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from .. import system
from ..catalog.shipped import locate_policy
from ..core.model.decisions import MODES
from ..core.model.payload import DrillOrder, Payload
from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..errors import SuperviseError, UsageError, named_error
from ..runtime import environment
from ..runtime.launcher import Launch, Launcher, make_redactor
from ..runtime.process import Process, exit_code, replace_process
from ..runtime.process_tree import Terminal
from ..runtime.signals import SignalForwarder
from ..store.recorder import Recorder
from ..store.run_directory import Endpoint, RunDescription, RunDir
from ._output import OpenRecords, PrintLine, channels_of, keep_output, line_printer, open_records
from ._params import JobCommand, Options
from ._streams import share_terminal

DEFAULT_POLICY, DEFAULT_MODE = "nano", "observe"
HOST = "127.0.0.1"  # nobody outside of this machine reads the metrics by default
CRASHED = "internal error; the job continues without supervision"
Channels = Mapping[str, Mapping[str, str]]
ReloadFrom = tuple[str, str | None, Channels]  # see `_watching.Started`
_log = logging.getLogger(__name__)


def _citations(
    ctx: click.Context, param: click.Parameter, paths: Sequence[Path]
) -> tuple[Payload, ...]:
    if not paths:
        return ()
    from ..trials.trial_runs import cite_trial

    return tuple(cite_trial(path) for path in paths)


@click.command(name="run", cls=JobCommand, context_settings={"allow_interspersed_args": False})
@click.option(
    "-p",
    "--policy",
    metavar="P",
    help="Policy file, or shipped name (all but `observe` may act). Default: nano, mode observe.",
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    metavar="D",
    help="Run directory. Default: runs/<time>-<id>.",
)
@click.option("--mode", type=click.Choice(MODES), help="Overrides the policy's mode.")
@click.option(
    "--drill",
    multiple=True,
    metavar="FAULT@STEP",
    help="Damage the job at STEP by FAULT, in any mode, to test the policy.",
)
@click.option(
    "--notify",
    multiple=True,
    metavar="KIND:VARIABLE",
    help="Add a channel: slack or webhook, and the name of the variable that holds its URL.",
)
@click.option(
    "--cite",
    "cites",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    callback=_citations,
    metavar="TRIAL",
    help="Canary trial or drill suite to cite in this run's report (`supervise record`).",
)
@click.option("--logs", is_flag=True, help="Keep what the job prints in RUN/output/output.log.")
@click.option(
    "--resume-run",
    is_flag=True,
    help="Adopt the run in --run-dir, or continue from its checkpoint if it has ended.",
)
@click.option(
    "--fresh",
    is_flag=True,
    help="With --resume-run, if the run has ended: start COMMAND unchanged.",
)
@click.option("--watch-policy", is_flag=True, help="Reload the policy file when it is edited.")
@click.option(
    "--metrics-port",
    "port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Serve http://127.0.0.1:N/metrics for Prometheus; 0: a free port.",
)
@click.option(
    "--metrics-host",
    "host",
    default=HOST,
    show_default=True,
    metavar="H",
    help="Address to serve the metrics on.",
)
@click.option(
    "--metrics-per-rank", "per_rank", is_flag=True, help="Serve the job's metrics of each rank."
)
@click.option("-q", "--quiet", is_flag=True, help="Print only errors, and messages of SEV0.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def run_command(
    policy: str | None,
    run_dir: Path | None,
    mode: str | None,
    drill: tuple[str, ...],
    notify: tuple[str, ...],
    cites: tuple[Payload, ...],
    logs: bool,
    resume_run: bool,
    fresh: bool,
    watch_policy: bool,
    port: int | None,
    host: str,
    per_rank: bool,
    quiet: bool,
    argv: tuple[str, ...],
) -> int:
    """Start COMMAND and watch it under a policy.

    The policy decides when to notify people and when to act on the job. Shipped policies: `nano`
    (one process), `medium` (one process, hours to days), `large` (several ranks), `moe` (mixture of
    experts, several ranks), `observe` (never acts). With neither --policy nor --mode the run is
    observed under `nano` and never changed. Arguments, terminal and signals reach the job.

    With --watch-policy the policy and the files it uses are reloaded when they are edited and pass
    `supervise policy check`. The limits on a change of mode are those of `supervise reload`.

    --notify slack:SLACK_URL adds a channel: the environment variable SLACK_URL holds the URL of an
    incoming webhook. Only `slack` and `webhook` can be added here; a policy can have others, too.

    With --run-dir D --resume-run the same command can be repeated, as a service manager does. A run
    in D whose supervisor died is adopted. If D's run has ended, a new run starts in D.2 (D.3, ...):
    with --fresh, or if the job saved nothing, COMMAND unchanged; else by `job.relaunch` from the
    newest verified checkpoint. If none is verified, or `job.relaunch` is missing: exit 64.

    \b
    Examples:
      export SLACK_URL=https://hooks.slack.com/services/...
      supervise --policy nano --notify slack:SLACK_URL -- python train.py
      supervise -p large -- torchrun --nproc-per-node 8 train.py
      supervise -p nano --drill lr_spike@150 -- python train.py
      supervise -p supervise.yaml --run-dir D --resume-run -- python train.py

    Exit codes: the job's own (128+n after signal n); 64 wrong usage; 65 invalid policy; 75 stopped,
    safe to requeue; 78 stopped, a person is needed; 126, 127 COMMAND cannot be started.
    """
    _check(argv, run_dir, resume_run=resume_run, fresh=fresh)
    mode, name = mode or (None if policy else DEFAULT_MODE), policy or DEFAULT_POLICY
    channels = _channels(notify)
    print_line = line_printer(quiet=quiet)
    chosen = _choose(name, mode, channels, print_line)
    faults = _faults(drill)
    reload_from = str(locate_policy(name).absolute()), mode, channels
    options = Options(watch_policy, logs, _endpoint(port, host, per_rank), quiet=quiet, cites=cites)
    if resume_run and run_dir is not None:
        launch_args = run_dir, argv, chosen, faults, print_line
        run_dir, code, options = _resume(*launch_args, options, fresh=fresh)
        if code is not None:
            return code
    return start_and_watch(argv, chosen, reload_from, run_dir, faults, print_line, options=options)


def _endpoint(port: int | None, host: str, per_rank: bool) -> Endpoint | None:
    return None if port is None else Endpoint(port, host, per_rank)


def _check(argv: Sequence[str], run_dir: Path | None, *, resume_run: bool, fresh: bool) -> None:
    """Raise UsageError if an option or the command is missing; where none can watch, become it."""
    if not argv:
        raise UsageError("no command given", hint="supervise --policy nano -- python train.py")
    if fresh and not resume_run:
        raise UsageError("--fresh needs --resume-run", hint="add --resume-run --run-dir D")
    if resume_run and run_dir is None:
        raise UsageError("--resume-run needs the directory of the run", hint="add --run-dir D")
    if not resume_run:  # which may have to fill in a checkpoint
        _run_unwatched_if_short(argv)


def _run_unwatched_if_short(argv: Sequence[str]) -> None:
    """Become the command where the limits of this process leave no room to watch it."""
    if (reason := environment.explain_ulimit_shortage()) is not None:
        print_line = line_printer(quiet=False)
        print_line(f"supervise: not watched: {reason}; the job runs as it does without supervise")
        sys.stderr.flush()
        replace_process(argv, os.environ)


def _resume(
    directory: Path,
    argv: Sequence[str],
    policy: Policy,
    faults: Sequence[DrillOrder],
    print_line: PrintLine,
    options: Options,
    *,
    fresh: bool,
) -> tuple[Path, int | None, Options]:
    """Return where the next run starts, the exit code of an adopted one, and the options with the
    run before and the launch from its checkpoint."""
    from .adopt import adopt_or_plan_next_run, preceding_run

    first, quiet = directory.absolute(), options.quiet
    path, code, launch = adopt_or_plan_next_run(
        first, argv, policy, faults, print_line, quiet=quiet, fresh=fresh
    )
    return path, code, replace(options, previous=preceding_run(first, path), launch=launch)


def _choose(name: str, mode: str | None, notify: Channels, print_line: PrintLine) -> Policy:
    """Return the policy; print its warnings."""
    from ..catalog import Problem, load_policy

    problems: list[Problem] = []
    policy = load_policy(name, mode=mode, notify=notify, warnings=problems)
    for problem in problems:
        print_line(f"supervise: warning: {problem}")
    return policy


def _channels(notify: Sequence[str]) -> Channels:
    if not notify:
        return {}
    from ..notifiers import channels_from_options

    return channels_from_options(notify, os.environ)


def _faults(drill: Sequence[str]) -> list[Any]:
    if not drill:
        return []
    from ..catalog import discover

    return [discover.parse_drill(text) for text in drill]


def _description(
    tier: str,
    reason: str | None,
    faults: Sequence[DrillOrder],
    reload_from: ReloadFrom,
    options: Options,
) -> RunDescription:
    """Return what run.json keeps of a start, for a supervisor that takes over."""
    return RunDescription(
        tier=tier,
        tier_reason=reason,
        drills=faults,
        reload=reload_from[:2],
        notify=reload_from[2],
        watch_policy=options.watch_policy,
        logs=options.logs,
        metrics=options.metrics,
    )


def start_and_watch(
    argv: Sequence[str],
    policy: Policy,
    reload_from: ReloadFrom,
    run_dir: Path | None,
    faults: Sequence[DrillOrder],
    print_line: PrintLine,
    open_records: OpenRecords = open_records,
    *,
    options: Options = Options(),  # noqa: B008 - it is frozen
) -> int:
    """Start the job and watch it; return the exit code. A failed start leaves nothing behind."""
    environ = dict(os.environ)
    tier, reason = environment.forecast_tier(argv, environ)
    clean = make_redactor(argv, environ, policy)
    run = RunDir.create(
        run_dir,
        argv=argv,
        policy=policy,
        wall=system.wall_time(),
        redactor=clean,
        start=_description(tier, reason, faults, reload_from, options),
    )
    root = environment.shared_memory_base(environ)
    directory = environment.segment_directory(root, run.id)
    forwarder = SignalForwarder()
    try:
        environment.sweep_environments(root)
        try:
            environment.make_environment(root, run.id)
        except OSError as error:
            tier, reason = "T0", f"no directory in {root}: {error.strerror}"
        terminal = Terminal.find()
        output = keep_output(run, print_line) if options.logs else None
        launcher = Launcher(argv, environ, run, directory, faults, terminal=terminal, output=output)
        recorder = open_records(run, print_line)
        forwarder.install()
        process = launcher.start(policy, options.launch or Launch())
    except SuperviseError:
        environment.remove_environment(directory)
        run.discard()
        raise

    def watch() -> int:
        # What the launch does not need is imported only now, so that the job starts sooner.
        from ._watching import Started, watch_started

        started = Started(argv, reload_from, run, directory, tier, reason, faults, clean, options)
        return watch_started(started, policy, launcher, recorder, process, forwarder, print_line)

    share_terminal()

    def report(error: Exception, trace: str) -> None:
        print_line(f"supervise: {CRASHED}")
        print_line(trace)
        _log_crash(run, clean)
        _end_protection(run, policy, clean, recorder, error, quiet=options.quiet)

    return _fail_open(watch, process, forwarder, report)


def _fail_open(
    watch: Callable[[], int],
    process: Process,
    forwarder: SignalForwarder,
    report: Callable[[Exception, str], None],
) -> int:
    """Return the exit code: from here on the job's result counts, whatever happens to us.

    Args:
        report: called with an error of ours and its traceback.
    """
    try:
        process.tree  # noqa: B018 - signal handlers use it, and must not import
        forwarder.attach(process)
        return watch()
    except Exception as error:
        with contextlib.suppress(Exception):  # memory may be short, of which the job has enough
            import traceback

            report(error, traceback.format_exc())
        return _wait(process, forwarder)


def _log_crash(run: RunDir, clean: Redactor) -> None:
    """Add the error under way to the log of the run: `--quiet` hides it at the terminal."""
    with contextlib.suppress(Exception):  # what is broken may be what this needs
        from ..runtime.logs import NAME, SupervisorLog

        log = SupervisorLog(run.path / NAME, run.id, lambda: None, clean)
        log.start()
        _log.exception(CRASHED)
        log.stop()


def _end_protection(
    run: RunDir,
    policy: Policy,
    clean: Redactor,
    recorder: Recorder,
    error: Exception,
    *,
    quiet: bool,
) -> None:
    """Tell every channel that the watching has ended before it began, and put it on record."""
    lost_to = f"an error of supervise: {clean.text(named_error(error))}"
    recorder.note("note", -1, f"not watched any more: {lost_to}", {"what": "unprotected"})
    with contextlib.suppress(Exception):
        from ..runtime.status import end_protection

        end_protection(run, lost_to)
    with contextlib.suppress(Exception):
        from ..core.job_lifecycle import supervision_ended_message
        from ..core.model.decisions import ACTING_MODES
        from ..notifiers import build_senders
        from ..notifiers.outbox import Outbox, message_of

        outbox = Outbox(
            build_senders(channels_of(policy.notify, quiet=quiet), os.environ)[0],
            lambda result: None,
        )
        draft = supervision_ended_message(lost_to, acts=policy.mode in ACTING_MODES)
        decision, where = draft.decision(draft.kind, -1, 0), str(run.path.absolute())
        message = clean.message(message_of(decision, run.id, recorder.head, where))
        outbox.post(message, key=f"{run.id}:unprotected")
        outbox.close()


def _wait(process: Process, forwarder: SignalForwarder) -> int:
    """Forward signals until the job ends; return the exit code to pass on."""
    while process.wait(0.0) is None:
        with contextlib.suppress(Exception):
            process.poll()
            forwarder.wakeup.wait(0.5, process)
    return exit_code(process.returncode or 0)
