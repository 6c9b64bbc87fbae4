"""`supervise run`: start a command and watch it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import psutil

from ..app import App, Settings
from ..catalog import drills, load_policy, locate
from ..catalog.problems import Problem
from ..core.rule import Policy
from ..core.values import MODES
from ..errors import SuperviseError, UsageError
from ..inputs import clock
from ..job import environment, shm
from ..job.process import Process
from ..job.signals import Forwarder
from ..job.terminal import Terminal
from ..notifiers import build
from ..outputs.outbox import Outbox
from ..report import receipt
from ..store.audit import Audit
from ..store.journal import Journal
from ..store.policies import Reloader
from ..store.recorder import Recorder
from ..store.rundir import RunDir

DEFAULT_POLICY, DEFAULT_MODE = "nano", "observe"
SAVEPOINT_SHARE = 8  # savepoints may take an eighth of the host's memory; project default
SLOTS, CAPACITY = 8192, 128  # frames of rulings.md; 9 MB of shared memory per rank


@click.command(
    name="run",
    context_settings={"allow_interspersed_args": False},
)
@click.option("-p", "--policy", metavar="P", help="A policy file, or the name of a shipped one.")
@click.option("--run-dir", type=click.Path(path_type=Path), metavar="D", help="Keep the run here.")
@click.option("--mode", type=click.Choice(MODES), help="Takes the place of the policy's mode.")
@click.option("--drill", multiple=True, metavar="FAULT@STEP", help="Inject a fault on purpose.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing on stderr but errors.")
@click.argument("argv", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    policy: str | None,
    run_dir: Path | None,
    mode: str | None,
    drill: tuple[str, ...],
    quiet: bool,
    argv: tuple[str, ...],
) -> int:
    """Start COMMAND, watch it by a policy, and act on it when the policy says so.

    The command's arguments, terminal, signals and exit code are passed through unchanged. Without
    --policy the run is observed under `nano` and never touched.

    \b
    Examples:
      supervise --policy nano -- python train.py --lr 1e-3
      supervise --policy nano --mode shadow --drill lr_spike@150 -- python train.py
    """
    if not argv:
        raise UsageError("no command given", hint="supervise --policy nano -- python train.py")
    warnings: list[Problem] = []
    mode = mode or (None if policy else DEFAULT_MODE)
    chosen = load_policy(policy or DEFAULT_POLICY, mode=mode, warnings=warnings)
    told = [drills.parse(text) for text in drill]

    def tell(line: str) -> None:
        try:
            if not quiet:
                click.echo(line, err=True)
        except (OSError, ValueError):  # nobody reads stderr any more; the run goes on
            pass

    for problem in warnings:
        tell(f"supervise: warning: {problem}")
    again = str(locate(policy or DEFAULT_POLICY).absolute()), mode
    return supervise(argv, chosen, again, run_dir, told, tell)


def supervise(
    argv: Sequence[str],
    policy: Policy,
    again: tuple[str, str | None],  # file and mode of a reload that names none
    run_dir: Path | None,
    told: Sequence[Any],
    tell: Callable[[str], None],
) -> int:
    """Start the job and watch it; return the exit code. Nothing half-done is left behind."""
    environ = dict(os.environ)
    tier, reason = environment.tier(argv, environ)
    run = RunDir.create(
        run_dir, argv=argv, policy=policy, wall=clock.wall(), info={"tier": tier, "drills": told}
    )
    root = shm.base(environ)
    directory = root / f"supervise-{os.getuid()}-{run.id}"
    forwarder = Forwarder()
    try:
        shm.sweep(root)
        try:
            shm.make(root, run.id)
        except OSError as error:
            tier, reason = "T0", f"no directory in {root}: {error.strerror}"
        run.write_json("probe.json", probe_config(run, directory, policy, told))
        senders, unset = build({"console": {}, **policy.notify}, environ)
        for warning in unset:
            tell(f"supervise: warning: {warning}")
        reloader = Reloader(run, policy, load_policy, *again)
        app = App(
            Settings(
                argv, policy, reloader, run, directory, tier, reason, tell, {"drills": list(told)}
            ),
            _recorder(run, tell),
        )
        outbox = Outbox(senders, app.delivered)
        forwarder.install()
        process = Process.start(
            argv,
            environment.child_environment(environ, run.probe_config_path),
            terminal=Terminal.find(),
        )
    except SuperviseError:
        shm.remove(directory)
        run.discard()
        raise
    # From here on the job's result is what counts, whatever becomes of us.
    forwarder.attach(process)
    tell(receipt.opening(run, policy, tier, reason))
    code = app.run(process, outbox)
    forwarder.restore()
    try:
        app.close(outbox, code)
        shm.remove(directory)
        for line in receipt.closing(run):
            tell(line)
    except Exception as error:
        tell(f"supervise: {type(error).__name__}: {error}")
    return code


def _recorder(run: RunDir, tell: Callable[[str], None]) -> Recorder:
    audit = Audit.open(run.audit_path, run.id, at_ns=clock.monotonic_ns(), wall=clock.wall())
    journal = Journal.open(run.journal_path)
    return Recorder(journal, audit, lambda: (clock.monotonic_ns(), clock.wall()), tell)


def probe_config(
    run: RunDir, directory: Path, policy: Policy, told: Sequence[Any]
) -> dict[str, Any]:
    """Return what the probe is told. Below `enforce` it gets no means to change the job."""
    may_act = policy.mode == "enforce"
    memory = psutil.virtual_memory().total
    return {
        "run": run.id,
        "package": str(environment.inject_dir().parent),
        "shm": str(directory),
        "marks": str(run.marks_path),
        "slots": shm.slots(directory, SLOTS),
        "capacity": CAPACITY,
        "savepoints": {"max_bytes": memory // SAVEPOINT_SHARE, **policy.savepoints}
        if may_act and policy.savepoints
        else None,
        "standing_orders": dict(policy.standing_orders) if may_act else {},
        "sampling": dict(policy.sampling),
        "peak_flops": policy.job.get("peak_flops"),
        "drills": list(told),
        "lease_s": 900,
    }
