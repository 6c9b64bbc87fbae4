"""What `run` and `adopt` share once the job runs. Imported only then: the job comes first."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..app.foreground import Foreground
from ..app.launcher import Launcher
from ..app.loop import App
from ..app.run_status import closed
from ..app.settings import Settings
from ..app.supervisor_log import NAME, SupervisorLog
from ..catalog import load_policy
from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..errors import StoreError, SuperviseError
from ..job import environment, shared_memory
from ..job.process import Process
from ..job.signals import Forwarder
from ..notifiers import build
from ..outputs.outbox import Outbox
from ..report import receipt
from ..store.policies import Reloader
from ..store.recorder import Recorder
from ..store.run_directory import RunDir
from ._records import Tell
from ._streams import leave

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """How a job was started.

    Attributes:
        argv: as it was given.
        again: file and mode of a reload that names none.
        faults: what is injected on purpose.
    """

    argv: Sequence[str]
    again: tuple[str, str | None]
    run: RunDir
    segments: Path
    tier: str
    tier_reason: str | None
    faults: Sequence[Any]
    redactor: Redactor


def watch_started(
    started: Started,
    launched: Policy,
    launcher: Launcher,
    recorder: Recorder,
    process: Process,
    forwarder: Forwarder,
    tell: Tell,
) -> int:
    """Watch a job that was started a moment ago; return the exit code to pass on.

    Args:
        launched: the policy, or what `_policy_cache` kept of it.
    """
    run, tell = started.run, logged(tell)
    policy = launched if launched.detectors else _whole(launched, started)
    senders, unset = build({"console": {}, **policy.notify}, os.environ)
    for warning in (*unset, *_twice(started.argv, policy)):
        tell(f"supervise: warning: {warning}")
    facts: Mapping[str, Any] = {
        "drills": list(started.faults),
        "channels": [sender.name for sender in senders],
    }
    settings = Settings(
        started.redactor.command(started.argv),
        policy,
        Reloader(run, policy, load_policy, *started.again),
        run,
        started.segments,
        started.tier,
        started.tier_reason,
        tell,
        facts,
        redactor=started.redactor,
    )
    app = App(settings, launcher, forwarder, recorder)
    outbox = Outbox(senders, app.desk.delivered)
    tell(receipt.opening(run, policy, started.tier, started.tier_reason))
    return watch(app, process, outbox, forwarder, tell)


def _whole(kept: Policy, started: Started) -> Policy:
    """Return the policy that the job was launched with, all of it.

    From its own file, which messages name, unless that has changed since; then from the copy in
    the run directory.

    Raises:
        StoreError: neither is that policy: the cache was wrong.
    """
    for path, mode in (started.again, (str(started.run.policy_path), None)):
        try:
            policy = load_policy(path, mode=mode)
        except SuperviseError:
            continue
        if policy.digest == kept.digest:
            return policy
    raise StoreError(f"policy {kept.name} cannot be loaded again as it was launched")


def watch(app: App, process: Process, outbox: Outbox, forwarder: Forwarder, tell: Tell) -> int:
    """Watch the job to its end, and say what came of it; return the exit code to pass on."""
    run, directory = app.settings.run, app.settings.shm
    lines: list[str] = []

    def look_back() -> None:
        lines[:] = receipt.closing(run)

    def work() -> int:
        code = app.run(process, outbox)
        lines[:] = [f"supervise: exit code {code}"]
        steps: tuple[Callable[[], None], ...] = (
            lambda: app.close(outbox, code),
            lambda: closed(run, outbox.check_channels()),
            lambda: shared_memory.remove(directory),
            look_back,
        )
        for step in steps:
            try:
                step()
            except SuperviseError as error:
                tell(f"supervise: {error}")
            except Exception as error:
                _log.exception("the end of the run was not recorded in full")
                tell(f"supervise: {type(error).__name__}: {error}")
        for line in lines:
            tell(line)
        return code

    # The handlers stay: a signal that comes now must not cost the last record or the exit code.
    atexit.register(forwarder.ignore)
    log = SupervisorLog(run.path / NAME, run.id, app.open_incident, app.settings.redactor)
    log.start()
    code, done = Foreground(app, process, outbox, forwarder).attend(work)
    if not done:
        leave(code)  # a thread hangs: nobody may wait for it
    log.stop()
    return code


def logged(tell: Tell) -> Tell:
    """Return what shows a line and logs it, also where nothing is shown."""

    def both(line: str) -> None:
        _log.info(line)
        tell(line)

    return both


def _twice(argv: Sequence[str], policy: Policy) -> list[str]:
    """Warn of restarts that multiply with ours."""
    inner = environment.inner_restarts(argv)
    if not inner or not policy.job.get("relaunch"):
        return []
    return [
        f"torchrun restarts the ranks {inner} times by itself, for each start by the policy, and "
        "counts them as no attempt of their own; give it --max-restarts=0 and budget `restart`"
    ]
