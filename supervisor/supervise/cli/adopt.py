"""`supervise adopt`: take over a run whose supervisor died."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from ..catalog import load_policy
from ..checkpoints import registry
from ..checkpoints.service import CheckpointService
from ..checkpoints.tracker import RunPosition
from ..core import job_recipes
from ..core.model.decisions import plain_json
from ..core.model.payload import DrillOrder
from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..errors import LaunchError, StoreError, UsageError
from ..notifiers import build_routes, build_senders
from ..notifiers.outbox import Outbox
from ..report import receipt
from ..runtime import environment
from ..runtime.launcher import (
    UNFIT,
    Launch,
    Launcher,
    first_environment,
    last_launch,
    make_redactor,
)
from ..runtime.loop import App
from ..runtime.process import AdoptedProcess
from ..runtime.segment_reader import recorded_returncode
from ..runtime.settings import RecoveredRun, Settings
from ..runtime.signals import SignalForwarder
from ..store import audit
from ..store.files import is_locked, read_json
from ..store.policies import Reloader, reload_target, reloaded_policy_path
from ..store.recorder import Recorder
from ..store.run_directory import RUNS, RunDescription, RunDir, is_run
from ..store.run_records import RunOutcome, skim_run
from ._output import OpenRecords, PrintLine, channels_of, keep_output, line_printer, open_records
from ._runs import adoptable_argument
from ._streams import share_terminal
from ._watching import log_lines, run_metrics, watch_job


@click.command(name="adopt")
@adoptable_argument
@click.option("-q", "--quiet", is_flag=True, help="Print only errors, and messages of SEV0.")
def adopt_command(run: Path, quiet: bool) -> int:
    """Take over a run whose supervisor died; a live job runs on.

    Steps that the job made meanwhile are judged, as far as its ring buffer still holds them. An
    action in progress takes effect only once; undelivered messages are sent; holds, budgets and
    open incidents continue. From then on `supervise adopt` behaves as `supervise run` does, signals
    included. A relaunch uses the command and environment of the first start, which are kept beside
    the run until it ends. Adopting is refused if another user could have
    written to the run.

    \b
    Examples:
      supervise adopt runs/20260105-101112-7f3a9c
      nohup supervise adopt --quiet "$(ls -d runs/* | tail -n 1)" &

    Exit codes: those of `supervise run`; 255 if the job ended and its exit status is unknown.
    """
    return adopt_run(run, line_printer(quiet=quiet), quiet=quiet)


def adopt_run(
    path: Path,
    print_line: PrintLine,
    open_records: OpenRecords = open_records,
    *,
    quiet: bool = False,
) -> int:
    """Watch the run in the directory `path` to its end; return the exit code to pass on."""
    print_line = log_lines(print_line)
    run = RunDir.open_own(path)
    described = run.describe()
    if described.host != socket.gethostname():
        raise UsageError(
            f"{path} runs on {described.host}", hint=f"run `supervise adopt` on {described.host}"
        )
    recorder = open_records(run, print_line)
    try:
        ended = how_run_ended(run)
        if ended is not None:
            # The last record may have reached a slow disk behind its supervisor's end.
            if (run.path / "probe.json").exists():
                environment.remove_environment(_segments(run))
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
    print_line(receipt.opening_line(run, past.policy, described.tier, described.tier_reason))
    return watch_job(app, process, outbox, forwarder, print_line)


def how_run_ended(run: RunDir) -> str | None:
    """Return the reason of the last record if the run has ended, else None."""
    if not run.audit_path.exists():
        return None
    newest = deque(audit.read_audit(run.audit_path), maxlen=1)
    return str(newest[0]["reason"]) if newest and newest[0]["kind"] == "run_end" else None


def _segments(run: RunDir) -> Path:
    """Return the directory in shared memory of a run of ours."""
    return environment.segment_directory(Path(run.read_json("probe.json")["shm"]).parent, run.id)


def _job(
    run: RunDir, described: RunDescription, policy: Policy, print_line: PrintLine
) -> tuple[AdoptedProcess, Launcher, Redactor]:
    """Return the job's process, its launcher, and the redactor of its secrets."""
    launch = last_launch(run)
    if launch is None:
        raise StoreError(
            f"no launch is on record for the job of {run.path}",
            hint="check whether it runs (ps); if it does not, start the run again",
        )
    directory = _segments(run)
    if other := environment.find_other_wire(directory):
        raise StoreError(
            f"nobody can take {run.path} over with this version of supervise: {other}",
            hint="the job trains on, and is not touched; adopt it with the installation that "
            f"started it, supervise {described.supervise}",
        )
    environment.lock_run_directory(directory)
    adopt = partial(AdoptedProcess, run_id=run.id, recorded=partial(recorded_returncode, directory))
    process = adopt(launch["pid"], launch["start_ticks"])
    environ = first_environment(run)
    os.chdir(described.cwd)
    argv = run.command()
    output = keep_output(run, print_line, adopted=True) if described.logs else None
    launcher = Launcher(argv, environ, run, directory, described.drills, adopt=adopt, output=output)
    clean = make_redactor(argv, environ, policy, os.environ)
    return process, launcher, clean


def _supervisor(
    run: RunDir,
    described: RunDescription,
    past: RecoveredRun,
    launcher: Launcher,
    clean: Redactor,
    recorder: Recorder,
    print_line: PrintLine,
    *,
    quiet: bool,
) -> tuple[App, Outbox, SignalForwarder]:
    senders, unset = build_senders(channels_of(past.started.notify, quiet=quiet), os.environ)
    for warning in unset:
        print_line(f"supervise: warning: {warning}")
    named, mode = past.reload
    again = reload_target({"policy": named, "mode": mode}, *described.reload)
    load = partial(load_policy, notify=described.notify)
    reloader = Reloader(run, past.started, load, *again)
    settings = Settings(
        described.argv,
        past.started,
        reloader,
        run,
        launcher.directory,
        described.tier,
        described.tier_reason,
        print_line,
        past=past,
        metrics=run_metrics(run, described.metrics),
        watch_policy=described.watch_policy,
        outputs=[run.output_path] if described.logs else [],
        redactor=clean,
        facts={"channels": [sender.name for sender in senders]},
    )
    forwarder = SignalForwarder()
    app = App(settings, launcher, forwarder, recorder)
    return (
        app,
        Outbox(senders, app.processor.on_result, routes=build_routes(past.started.notify)),
        forwarder,
    )


LOOK_S = 150.0  # longer than all parts of a look together may take
VERIFY_S = 600.0  # for all checkpoints that the run before left unverified; project default
POLL_S = 0.05


class TakeOver(NamedTuple):
    """What became of the run in a directory.

    Attributes:
        path: where the next run is started, if none was adopted.
        adopted_exit_code: of the run that was adopted, None without one.
        next_launch: the next run's from the newest verified checkpoint; None: it begins at step 0.
    """

    path: Path
    adopted_exit_code: int | None = None
    next_launch: Launch | None = None


def adopt_or_plan_next_run(
    directory: Path,
    argv: Sequence[str],
    policy: Policy,
    drills: Sequence[DrillOrder],
    print_line: PrintLine,
    *,
    quiet: bool = False,
    fresh: bool = False,
) -> TakeOver:
    """Adopt the run in `directory`, until its end; plan the next run where there is none."""
    path, run = resume_target(directory, policy, print_line)
    if run is None:
        previous = None if fresh else preceding_run(directory, path)
        while previous is not None:
            launch = _from_checkpoint(RunDir.open_own(previous), argv, policy, print_line)
            if launch is not None:
                return TakeOver(path, next_launch=launch)
            previous = preceding_run(directory, previous)
        return TakeOver(path)
    refuse_different(run, argv, policy, drills, Path.cwd())
    print_line(f"supervise: resuming {run.path}, whose supervisor died")
    return TakeOver(path, adopt_run(run.path, print_line, quiet=quiet))


def resume_target(
    directory: Path, policy: Policy, print_line: PrintLine
) -> tuple[Path, RunDir | None]:
    """Return the run directory, and the run in it to resume; None: start a run there.

    Raises:
        LaunchError: the last run ended because this host was not fit, and it still is not.
    """
    path, number = directory, 1
    following = directory
    while is_run(following):
        path, number = following, number + 1
        following = directory.with_name(f"{directory.name}.{number}")
    if not is_run(path):
        return path, None
    run = RunDir.open_own(path)
    # `adopt` refuses a locked log, with the process that holds it.
    ended = not is_locked(run.audit_path) and (how_run_ended(run) or last_launch(run) is None)
    if not ended:
        return path, run
    _refuse_unfit(path, policy, print_line)
    return following, None


def preceding_run(directory: Path, path: Path) -> Path | None:
    """Return the run that the one in `path` follows; None for the first one, in `directory`."""
    if path == directory:
        return None
    number = int(path.name.removeprefix(f"{directory.name}.")) - 1
    return directory if number == 1 else directory.with_name(f"{directory.name}.{number}")


def _from_checkpoint(
    run: RunDir, argv: Sequence[str], policy: Policy, print_line: PrintLine
) -> Launch | None:
    """Return the launch from the newest good checkpoint of a run, None if it saved none.

    Newer ones, which did not verify or which an incident made suspect, are moved aside, as before
    a relaunch.

    Raises:
        UsageError: it is not known how the job resumes, or none of its checkpoints is good.
    """
    form, recipe = policy.job.checkpoints, policy.job.relaunch
    guard = CheckpointService(form, run.path, Path.cwd(), RunPosition, runs=RUNS)
    try:
        guard.verify_now(VERIFY_S)
        while guard.is_verifying_now:
            time.sleep(POLL_S)
        entries = [
            e for e in registry.read_registry(run.path).checkpoints if e.state in registry.JUDGED
        ]
        entries = [e for e in entries if e.present or e.pinned]
        if not entries:
            return None
        outcome = skim_run(run.audit_path)
        entry = registry.find_good_checkpoint(entries, outcome)
        if recipe is None or entry is None:
            raise _unable(run, entries, argv, outcome)
        name = entry.id
        guard.prepare_restore(name)
        back = guard.restore(name)
    finally:
        guard.close()
    added = job_recipes.describe_relaunch(recipe, back.path, entry.step)
    aside = f"; set aside: {', '.join(back.moved)}" if back.moved else ""
    print_line(
        f"supervise: going on from {name} of step {entry.step} in {back.path}, with {added}{aside}"
    )
    return Launch(
        step=entry.step, path=back.path, probe_batch=back.probe_batch, counters=back.counters
    )


def _unable(
    run: RunDir, entries: Sequence[registry.Entry], argv: Sequence[str], outcome: RunOutcome
) -> UsageError:
    """Return the refusal to start a job at step 0 beside its checkpoints, and what to type."""
    summary = f"{run.path} has saved checkpoints, the newest of step {entries[-1].step}"
    fresh = "; to start the command as it is: the same with --fresh"
    if registry.find_good_checkpoint(entries, outcome) is not None:
        return UsageError(
            f"{summary}, and the policy does not say how the job resumes from one (job.relaunch)",
            hint=f"supervise init -- {shlex.join(argv)}{fresh}",
        )
    verified = next((e for e in reversed(entries) if e.state == registry.VERIFIED), None)
    if verified is not None:
        reason = registry.describe_suspicion(verified, outcome)
        return UsageError(
            f"{summary}, and none is good: {verified.label} is verified, {reason}",
            hint=f"supervise checkpoints {run.path}{fresh}",
        )
    return UsageError(
        f"{summary}, and none is verified", hint=f"supervise checkpoints --verify {run.path}{fresh}"
    )


def _refuse_unfit(path: Path, policy: Policy, print_line: PrintLine) -> None:
    """Look at this host again if the run in `path` could not be started on it once more."""
    try:
        document = read_json(path / UNFIT)
        from ..actions.job_control import HUMAN
        from ..catalog.loader import failure_classes
        from ..core import host_health
        from ..runtime.host import HealthGate, UnfitHost

        memo = msgspec.convert(document, UnfitHost)
    except (OSError, ValueError):  # it ended otherwise
        return
    if memo.host != socket.gethostname():
        return
    failure_settings = policy.job.failures
    gate = HealthGate(
        lambda: policy.job.health,
        os.environ,
        lambda: memo,
        lambda: failure_classes(failure_settings),
    )
    print_line(f"supervise: {path} ended because this host was not fit; it is looked at again")
    reason = host_health.explain_unfit(gate.check_host(memo.start, LOOK_S, alive=False))
    if reason:
        raise LaunchError(
            f"this host is still not fit to start the job on: {reason}",
            exit_code=HUMAN,
            hint="repair or free what is named, start it on another host, or turn the look off "
            "with `job: {health: none}` in the policy",
        )


def refuse_different(
    run: RunDir, argv: Sequence[str], policy: Policy, drills: Sequence[DrillOrder], directory: Path
) -> None:
    """Raise UsageError, with what differs, unless the run was started with all of these."""
    was = run.describe()
    is_known = (
        policy.digest == was.policy_digest or reloaded_policy_path(run, policy.digest).is_file()
    )
    pairs = {
        "command": (was.argv, list(argv)),
        "working directory": (was.cwd, str(directory)),
        "drills": (plain_json(was.drills), plain_json(drills)),
    }
    if not is_known:
        pairs["policy"] = (was.policy, policy.name)
        pairs["mode"] = (was.mode, policy.mode)
    differences = [f"{name} {old}, not {new}" for name, (old, new) in pairs.items() if old != new]
    if not is_known and not differences:
        differences = [f"a different text of policy {policy.name}"]
    if differences:
        raise UsageError(
            f"{run.path} is not over, and was started with {'; '.join(differences)}",
            hint=f"`supervise adopt {run.path}` resumes it as it was started; then "
            "`supervise reload` takes a changed policy",
        )
