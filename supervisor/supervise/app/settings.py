"""Settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..outputs.dead_man_ping import DeadManPing
from ..outputs.prometheus.openmetrics import RunMetrics
from ..outputs.run_identity import IdentityCollector
from ..store.policies import Reloader
from ..store.run_directory import RunDir
from .run_recovery import RecoveredRun


@dataclass
class Settings:
    """What a run is started with.

    Attributes:
        argv: the command as it may be shown; the launcher has the one that is run.
        reloader: loads another policy when an operator asks for it.
        tier, tier_reason: the forecast of `job.environment.tier`.
        facts: what goes into the audit log's `run_start` beside the command and the policy.
        print_line: shows a line to the person at the terminal.
        redactor: takes the job's secrets out of all that is recorded or told.
        watch_policy: reload the policy file when it is edited.
        heartbeat: pings a monitor outside, None where the policy names none.
        metrics: serves the numbers of the run, None where no port was asked for.
        outputs: files that keep what the job writes.
        previous: directory of the run before, which this one continues; None: it is the first.
        identity: collects what each launch consists of.
        past: what the run has come to, when a supervisor before this one died; None: it begins.
    """

    argv: Sequence[str]
    policy: Policy
    reloader: Reloader
    run: RunDir
    shm: Path
    tier: str
    tier_reason: str | None
    print_line: Callable[[str], None]
    facts: Mapping[str, Any] = field(default_factory=dict)
    past: RecoveredRun | None = None
    watch_policy: bool = False
    redactor: Redactor = field(default_factory=Redactor)
    heartbeat: DeadManPing | None = None
    metrics: RunMetrics | None = None
    outputs: Sequence[Path] = ()
    previous: Path | None = None
    identity: IdentityCollector = field(init=False)

    def __post_init__(self) -> None:
        manifest = self.policy.job.get("manifest", ())
        self.identity = IdentityCollector(self.argv, Path.cwd(), manifest)
