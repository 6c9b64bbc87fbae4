"""`supervise run`: start a command and watch it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..app import App, Settings
from ..app.launcher import Launch, Launcher, redactor
from ..catalog import load_policy, locate
from ..catalog.document.diagnostics import Problem
from ..catalog.inventory import drills
from ..core.model.decisions import MODES
from ..core.model.policy import Policy
from ..errors import SuperviseError, UsageError
from ..inputs import clock
from ..job import environment, shared_memory
from ..job.signals import Forwarder
from ..job.terminal import Terminal
from ..notifiers import build
from ..outputs.outbox import Outbox
from ..report import receipt
from ..store.policies import Reloader
from ..store.run_directory import RunDir
from ._job import JobCommand
from ._resuming import place, refuse_another
from ._watching import Record, Tell, record, teller, watch
from .adopt import adopt

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
    warnings: list[Problem] = []
    mode = mode or (None if policy else DEFAULT_MODE)
    chosen = load_policy(policy or DEFAULT_POLICY, mode=mode, warnings=warnings)
    told = [drills.parse(text) for text in drill]
    tell = teller(quiet=quiet)
    for problem in warnings:
        tell(f"supervise: warning: {problem}")
    again = str(locate(policy or DEFAULT_POLICY).absolute()), mode
    if resume_run and run_dir is not None:
        run_dir, run = place(run_dir.absolute())
        if run is not None:
            refuse_another(run, argv, chosen, told, Path.cwd())
            tell(f"supervise: goes on with {run.path}, whose supervisor died")
            return adopt(run.path, tell)
    return supervise(argv, chosen, again, run_dir, told, tell)


def supervise(
    argv: Sequence[str],
    policy: Policy,
    again: tuple[str, str | None],  # file and mode of a reload that names none
    run_dir: Path | None,
    told: Sequence[Any],
    tell: Tell,
    record: Record = record,
) -> int:
    """Start the job and watch it; return the exit code. Nothing half-done is left behind."""
    environ = dict(os.environ)
    tier, reason = environment.tier(argv, environ)
    clean = redactor(argv, environ, policy)
    run = RunDir.create(
        run_dir,
        argv=argv,
        policy=policy,
        wall=clock.wall(),
        redactor=clean,
        info={"tier": tier, "tier_reason": reason, "drills": told, "reload": again},
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
        launcher = Launcher(argv, environ, run, directory, told, terminal=terminal)
        senders, unset = build({"console": {}, **policy.notify}, environ)
        for warning in (*unset, *_twice(argv, policy)):
            tell(f"supervise: warning: {warning}")
        reloader = Reloader(run, policy, load_policy, *again)
        facts = {"drills": list(told), "channels": [sender.name for sender in senders]}
        command = clean.command(argv)
        settings = Settings(
            command, policy, reloader, run, directory, tier, reason, tell, facts, redactor=clean
        )
        app = App(settings, launcher, forwarder, record(run, tell))
        outbox = Outbox(senders, app.desk.delivered)
        opening = receipt.opening(run, policy, tier, reason)
        forwarder.install()
        process = launcher.start(policy, Launch())
    except SuperviseError:
        shared_memory.remove(directory)
        run.discard()
        raise
    # From here on the job's result is what counts, whatever becomes of us.
    forwarder.attach(process)
    tell(opening)
    return watch(app, process, outbox, forwarder, tell)


def _twice(argv: Sequence[str], policy: Policy) -> list[str]:
    """Warn of restarts that multiply with ours."""
    inner = environment.inner_restarts(argv)
    if not inner or not policy.job.get("relaunch"):
        return []
    return [
        f"torchrun restarts the ranks {inner} times by itself, for each start by the policy, and "
        "counts them as no attempt of their own; give it --max-restarts=0 and budget `restart`"
    ]
