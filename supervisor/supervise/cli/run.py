"""`supervise run`: start a command and watch it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..app.launcher import Launch, Launcher, redactor
from ..catalog.inventory.shipped import locate
from ..core.model.decisions import MODES
from ..core.model.policy import Policy
from ..errors import SuperviseError, UsageError
from ..inputs import clock
from ..job import environment, shared_memory
from ..job.process import Process, exit_code
from ..job.signals import Forwarder
from ..job.terminal import Terminal
from ..store.run_directory import RunDir
from . import _policy_cache
from ._job import JobCommand
from ._records import Record, Tell, record, teller

DEFAULT_POLICY, DEFAULT_MODE = "nano", "observe"


@click.command(
    name="run",
    cls=JobCommand,
    context_settings={"allow_interspersed_args": False},
)
@click.option("-p", "--policy", metavar="P", help="A policy file, or the name of a shipped one.")
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="D", help="Keep the run here.")
@click.option("--mode", type=click.Choice(MODES), help="Takes the place of the policy's mode.")
@click.option("--drill", multiple=True, metavar="FAULT@STEP", help="Inject a fault on purpose.")
@click.option("--resume-run", is_flag=True, help="Go on with the run in --run-dir, if it goes on.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    policy: str | None,
    run_dir: Path | None,
    mode: str | None,
    drill: tuple[str, ...],
    resume_run: bool,
    quiet: bool,
    argv: tuple[str, ...],
) -> int:
    """Start COMMAND, watch it by a policy, and act on it when the policy says so.

    The command's arguments, terminal, signals and exit code are passed through unchanged. Without
    --policy the run is observed under `nano` and never touched.

    With --resume-run the same command line may be given again, as a service manager does: a run in
    --run-dir whose supervisor died is taken over, as by `supervise adopt`. When that run is over, a
    new one is started in D.2, D.3 and so on.

    \b
    Examples:
      supervise --policy nano -- python train.py --lr 1e-3
      supervise --policy nano --mode shadow --drill lr_spike@150 -- python train.py
      supervise --policy nano --run-dir runs/main --resume-run -- python train.py
    """
    if not argv:
        raise UsageError("no command given", hint="supervise --policy nano -- python train.py")
    if resume_run and run_dir is None:
        raise UsageError(
            "--resume-run goes on with a run whose directory is known", hint="add --run-dir D"
        )
    mode = mode or (None if policy else DEFAULT_MODE)
    name = policy or DEFAULT_POLICY
    warnings: list[str] = []
    chosen = _policy_cache.launch_policy(name, mode, lambda said: _load(name, mode, said), warnings)
    faults = _faults(drill)
    tell = teller(quiet=quiet)
    for problem in warnings:
        tell(f"supervise: warning: {problem}")
    again = str(locate(name).absolute()), mode
    if resume_run and run_dir is not None:
        from ._resuming import place, refuse_another
        from .adopt import adopt

        run_dir, run = place(run_dir.absolute())
        if run is not None:
            refuse_another(run, argv, chosen, faults, Path.cwd())
            tell(f"supervise: goes on with {run.path}, whose supervisor died")
            return adopt(run.path, tell)
    return supervise(argv, chosen, again, run_dir, faults, tell)


def _load(name: str, mode: str | None, warnings: list[str]) -> Policy:
    from ..catalog import Problem, load_policy

    found: list[Problem] = []
    policy = load_policy(name, mode=mode, warnings=found)
    warnings += map(str, found)
    return policy


def _faults(drill: Sequence[str]) -> list[Any]:
    if not drill:
        return []
    from ..catalog.inventory import drills

    return [drills.parse(text) for text in drill]


def supervise(
    argv: Sequence[str],
    policy: Policy,
    again: tuple[str, str | None],  # file and mode of a reload that names none
    run_dir: Path | None,
    faults: Sequence[Any],
    tell: Tell,
    record: Record = record,
) -> int:
    """Start the job and watch it; return the exit code. A start that fails leaves nothing behind.

    Args:
        policy: all of it, or what `_policy_cache` keeps for a launch.
    """
    environ = dict(os.environ)
    tier, reason = environment.tier(argv, environ)
    clean = redactor(argv, environ, policy)
    run = RunDir.create(
        run_dir,
        argv=argv,
        policy=policy,
        wall=clock.wall(),
        redactor=clean,
        info={"tier": tier, "tier_reason": reason, "drills": faults, "reload": again},
    )
    root = shared_memory.base(environ)
    directory = shared_memory.of(root, run.id)
    forwarder = Forwarder()
    try:
        shared_memory.sweep(root)
        try:
            shared_memory.make(root, run.id)
        except OSError as error:
            tier, reason = "T0", f"no directory in {root}: {error.strerror}"
        terminal = Terminal.find()
        launcher = Launcher(argv, environ, run, directory, faults, terminal=terminal)
        recorder = record(run, tell)
        forwarder.install()
        process = launcher.start(policy, Launch())
    except SuperviseError:
        shared_memory.remove(directory)
        run.discard()
        raise
    # From here on the job's result is what counts, whatever becomes of us. What is imported only
    # now would have kept the job waiting.
    try:
        process.tree  # noqa: B018 - the handlers of signals use it, and may not import
        forwarder.attach(process)
        from ._watching import Started, watch_started

        started = Started(argv, again, run, directory, tier, reason, faults, clean)
        return watch_started(started, policy, launcher, recorder, process, forwarder, tell)
    except Exception:
        import traceback

        tell("supervise: internal error; the job continues without supervision")
        tell(traceback.format_exc())
        return _wait(process, forwarder)


def _wait(process: Process, forwarder: Forwarder) -> int:
    """Pass signals on until the job has ended; return the exit code to pass on."""
    while process.poll() is None:
        forwarder.wakeup.wait(0.5, process)
    return exit_code(process.returncode or 0)
