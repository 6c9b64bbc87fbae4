"""Settings of a run, and its state folded from its records, for a supervisor that takes over.

The journal is the truth. The audit log must agree with it, but may lack its end: decisions of the
last events that a killed supervisor judged and had no time to write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core import engine
from ..core.model.decisions import ActionOrder, ActionPlanned, Decision, decision_record
from ..core.model.events import (
    Announced,
    Event,
    Exited,
    Finished,
    Frame,
    Launched,
    Notice,
    OperatorCommand,
    Reloaded,
)
from ..core.model.payload import EndArgs, Outcome
from ..core.model.policy import Policy
from ..core.model.redaction import Redactor
from ..core.run_state import State
from ..core.withdrawal import ENDED
from ..errors import StoreError, reading_recorded_data
from ..notifiers.heartbeat import DeadManPing
from ..report.openmetrics import RunMetrics
from ..store import audit, journal, policies
from ..store.policies import Load, Reloader
from ..store.run_directory import RunDir
from .identity import IdentityCollector
from .segments import ReadCursor

WINDOW_FRAMES = 512  # newest frames that go into an evidence bundle


class RecoveredRun:
    """A run up to its last recorded event; get one from `read`.

    Attributes:
        policy, state: in force then; `started` is the policy that the job was started with.
        last: the newest decision.
        unwritten: (event number, at_ns, decision) of those that the audit log lacks.
        announced: per rank, its newest announcement since the launch.
        window: the newest frames, each with its names. taken: how far the segments were read.
        launched: the newest launch, None when none was written down.
        exited: whether the job's end is in the journal.
        blind: whether it was told that no probe reports.
        checkpoints: id -> whether the newest word on it calls it good.
        saves: path -> the newest notice of a save that nothing was said of since.
        received: keys of the words of operators that were taken.
        reload: file ("": none) and mode that reloads have named; `asked` is one without an answer.
        paused_until_ns: how long the pause in force may be renewed, None without one.
        relaunch: the newest relaunch that was intended, None without one.
        exit_code: what the supervisor was to exit with, since a policy stopped the job; else None.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = self.started = policy
        self.state: State = engine.initial_state(policy)
        self.last: Decision | None = None
        self.unwritten: list[tuple[int, int, Decision]] = []
        self.announced: dict[int, Announced] = {}
        self.window: deque[tuple[Sequence[str], Frame]] = deque(maxlen=WINDOW_FRAMES)
        self.taken = ReadCursor()
        self.launched: Launched | None = None
        self.exited = False
        self.blind = False
        self.checkpoints: dict[str, bool] = {}
        self.saves: dict[str, Notice] = {}
        self.received: set[str] = set()
        self.reload: tuple[str, str | None] = ("", None)
        self.paused_until_ns: int | None = None
        self.relaunch: ActionOrder | None = None
        self.exit_code: int | None = None
        self._asked: dict[str, ActionOrder] = {}  # by id, of all intents
        self.asked: OperatorCommand | None = None

    @property
    def names(self) -> dict[int, tuple[str, ...]]:
        """Per rank, its newest table of metric names."""
        return {rank: announced.names for rank, announced in self.announced.items()}

    @classmethod
    def read(cls, run: RunDir, load: Load) -> RecoveredRun:
        """Fold the records of `run`.

        Raises:
            StoreError: they are damaged, or the audit log says something else than the journal.
        """
        past = cls(load(run.policy_path))
        log = [record for record in audit.read_audit(run.audit_path) if record["actor"] == "engine"]
        events, find = (
            journal.read_journal(run.journal_path),
            policies.make_policy_finder(run, load),
        )
        record_count = end = 0
        for number, event, policy, state, decisions in engine.fold_events(
            past.policy, events, None, find
        ):
            past.policy, past.state = policy, state
            subject = f"event {number} ({type(event).__name__}) of the journal of {run.path}"
            with reading_recorded_data(
                subject, "the journal was changed, or another version wrote it"
            ):
                past._see(event)
                for decision in decisions:
                    past._decided(decision)
                    if record_count == len(log):
                        past.unwritten.append((number, event.at_ns, decision))
                        continue
                    if not engine.matches_record(
                        log[record_count], number, decision_record(decision)
                    ):
                        raise _mismatch_error(run, log[record_count])
                    record_count += 1
            end = number + 1
        if record_count < len(log):
            raise _mismatch_error(run, log[record_count], end)
        return past

    def _see(self, event: Event) -> None:
        self.taken.advance_past(event)
        if isinstance(event, Frame):
            self.window.append((self.names.get(event.rank, ()), event))
        elif isinstance(event, Announced):
            self.announced[event.rank] = event
        elif isinstance(event, Launched):
            self.launched, self.exited, self.blind = event, False, False
            self.paused_until_ns = None
            self.announced.clear()
        elif isinstance(event, Exited):
            self.exited = True
        elif isinstance(event, Finished):
            self._finished(event)
        elif isinstance(event, Notice):
            self._noticed(event)
        elif isinstance(event, OperatorCommand):
            self.received |= {str(event.args["key"])} if "key" in event.args else set()
            self.asked = event if event.command == "reload" else self.asked
        elif isinstance(event, Reloaded) and self.asked is not None:
            policy, mode = self.reload
            if event.refused is None:
                args = self.asked.args
                self.reload = policies.reload_target(args, policy, mode)
            self.asked = None

    def _noticed(self, event: Notice) -> None:
        path = str(event.data.get("path"))
        if event.kind == "no-probe":
            self.blind = True
        elif event.kind == ENDED:
            self.paused_until_ns = None
        elif event.kind == "checkpoint-saved":
            self.saves[path] = event
        elif event.kind == "checkpoint":
            self.saves.pop(path, None)
            self.checkpoints[str(event.data["id"])] = bool(event.data["ok"])

    def _decided(self, decision: Decision) -> None:
        self.last = decision
        if isinstance(decision, ActionPlanned):
            action = decision.action
            self._asked[action.id] = action
            self.relaunch = action if action.verb == "relaunch" else self.relaunch

    def _finished(self, event: Finished) -> None:
        action = self._asked.get(event.action_id)
        verb = "" if action is None else action.verb
        if action is not None and verb == "pause" and event.ok:
            lease_s = action.args.parse(EndArgs).lease_s or 0.0
            self.paused_until_ns = event.at_ns + int(lease_s * 1e9)
        elif verb == "resume":
            self.paused_until_ns = None
        elif verb == "stop" and event.ok:
            self.exit_code = event.result.read(Outcome).exit_code


def _mismatch_error(run: RunDir, record: dict[str, Any], end: int | None = None) -> StoreError:
    """Say that the two do not agree; `end`: number of events of a journal that all agreed with."""
    if engine.is_unwritten(record) or (end is not None and int(record["event"]) >= end):
        return StoreError(
            f"the journal of {run.path} is incomplete, so nobody can take the run over: audit "
            f"record {record['seq']} is of an event that it lacks",
            hint="the job is not touched; `supervise replay RUN` says from which event on",
        )
    return StoreError(
        f"the audit log of {run.path} does not follow from its journal from record "
        f"{record['seq']} on, so nobody can take the run over",
        hint="`supervise replay RUN` shows the difference; another version may have written it",
    )


@dataclass
class Settings:
    """What a run is started with.

    Attributes:
        argv: the command as it may be shown; the launcher has the one that is run.
        reloader: loads another policy when an operator asks for it.
        tier, tier_reason: the forecast of `runtime.environment.forecast_tier`.
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
        self.identity = IdentityCollector(self.argv, Path.cwd(), self.policy.job.manifest)
