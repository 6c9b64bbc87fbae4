"""The facts of a run for the page, from what `status` and `why` read, and kept up to date.

Nothing is computed here that another view has: states, verdicts, lines and reports come from their
own modules. A view reads what was appended to the audit log since, and a status that has changed.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice, takewhile
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import Struct

from ..catalog.metrics import spec_of
from ..checkpoints import registry
from ..cli import _runs, runs
from ..cli._output import seconds_since
from ..cli.status import RunStatus, current_incidents, read_status, status_lines
from ..cli.why import readable_policies, run_phase
from ..core.model import decisions, formats, state_machine
from ..core.model.decisions import plain_json
from ..core.model.interfaces import Step
from ..core.notices import describe_end, describe_finding
from ..errors import MISSHAPEN, StoreError, reading_recorded_data
from ..report.incident_builder import build_incident_report, summarize_incident
from ..report.incident_facts import Tapes, intended_actions
from ..report.incident_files import describe_run, read_all_tapes
from ..report.incident_report import IncidentReport, RunOrigin
from ..report.incident_report import Status as IncidentStatus
from ..report.incident_sentences import action_texts
from ..report.receipt import run_operand, run_path
from ..report.records import HINT, IncidentIndex, Record, find_action_outcome
from ..store import audit, run_directory
from ..store.files import is_locked, make_directory, read_json, replace_file
from ..store.run_directory import RunDir
from ..store.run_records import IncidentOutcome, RunOutcome, skim_run

if TYPE_CHECKING:
    from ..core.model.policy import Policy
    from ..runtime.status import Ending, Status

SHAPE: Mapping[str, Any] = {  # of records, which nobody has verified here
    **dict.fromkeys(("seq", "step", "attempt", "mono_ns", "event"), int),
    **dict.fromkeys(("kind", "reason"), str),
    "wall": str | None,
}
UNSEEN_S = 5.0  # between two looks at a job that may have no supervisor
ENDED_S = 86400.0  # a run that ended badly needs somebody for so long
TITLED_BYTES = 4 << 20  # of a log that is read in full for the list
SHOWN = 100  # newest decisions
MAX_TAGS, MAX_TAG, MAX_NOTE = 10, 40, 2000
BOARDS = {
    "icu": (
        *("train_loss_raw", "train_loss_ema", "train_loss", "val_loss", "grad_global_norm"),
        *("update_to_weight", "update_norm", "learning_rate", "tokens_per_sec", "loss_scale"),
        *("overflow_rate", "max_attn_logit", "attn_entropy", "tokens_seen"),
    ),
    "efficiency": (
        *("tokens_per_sec", "step_time", "mfu", "dataloader_stall_frac", "comm_time_frac"),
        *("straggler_ratio", "forward_time", "backward_time", "optimizer_time", "other_time"),
        *("host_mem_used", "gpu_util", "probe_overhead_frac"),
    ),
    "data": (
        *("batch_token_entropy", "batch_unique_ratio", "batch_top1_share", "batch_token_shift"),
        *("batch_new_share", "shuffle_block_skew", "batch_source_shift", "batch_pad_fraction"),
        *("batch_seq_len_p50", "batch_copies", "tokens_per_update", "epoch"),
    ),
    "quality": (
        *("val_loss", "slice_val_loss", "train_val_gap", "fixed_probe_loss", "output_kl_to_prev"),
        *("logit_entropy_probe", "topk_mass_probe", "microbench_score"),
        *("checkpoint_ok", "checkpoint_time"),
    ),
}
CHECKPOINT = (
    *("name", "path", "step", "attempt", "state", "pinned", "present", "saved", "problems"),
    "values",
)
LOSS = "loss per token"
TRAINING = ("planned_steps", "loss_metric", "steps_per_s", "tokens_per_s", "tokens_of")
LOGARITHMIC = ("grad_global_norm", "update_norm", "learning_rate", "loss_scale")
NO_CURVE = ("_rate", "_count", "_seen", "_ok", "_rank", "_hash", "_mismatch", "_errors")
NO_MARK = ("checkpoint", "capabilities", "measurement")  # notices with a place of their own
EVENTS: tuple[tuple[type[decisions.Decision], str], ...] = (
    (decisions.PolicyReloaded, "policy"),
    (decisions.PolicyRefused, "policy"),
    (decisions.CommandAnswered, "operator"),
    (decisions.JobLaunched, "launch"),
    (decisions.RunAdopted, "launch"),
    (decisions.ProgramReplaced, "launch"),
    (decisions.Rebaselined, "baseline"),
    (decisions.FramesMissing, "gap"),
)
CHIEF = (
    *(decisions.IncidentRaised, decisions.IncidentHeld, decisions.ApprovalRequested),
    *(decisions.ApprovalSettled, decisions.RunbookRefused, decisions.RunbookWithdrawn),
    *(decisions.VerificationPassed, decisions.VerificationFailed, decisions.StepDiffers),
    *(decisions.CommandAnswered, decisions.PolicyReloaded, decisions.PolicyRefused),
    *(decisions.JobLaunched, decisions.RunAdopted, decisions.ProgramReplaced),
)
MAX_POLICIES = 100
_policies: dict[str, Policy] = {}  # by digest: runs share them, and to read one takes long


class Need(Struct, frozen=True, kw_only=True):
    """Something about a run that needs a person, with the command.

    Attributes:
        title: of the incident it is about. steps: what to do; where there are none, `command`.
        left_s: until it is late. request: `id` and `sha` of a request for approval.
    """

    run: str
    kind: str
    text: str
    command: str
    severity: str | None = None
    incident: str | None = None
    title: str = ""
    steps: Sequence[Step] = ()
    left_s: float | None = None
    request: Mapping[str, str] | None = None


class Undone(Struct, frozen=True, kw_only=True):
    """Steps of an attempt that do not count, both inclusive."""

    attempt: int
    first: int
    last: int


class Restored(Struct, frozen=True):
    """What a rollback observed: from which step to which, and the attempt that goes on."""

    from_step: int
    step: int
    attempt: int


class About(NamedTuple):
    """An incident: its name, what to do, its status; whether only the end of the job ended it."""

    title: str
    steps: Sequence[Step]
    status: str
    is_unsettled: bool


# Something beside the curves, as the browser gets it: `t` (seconds since the run was created),
# `step` and `attempt` of its record, and what its maker below says.
Mark = dict[str, Any]


class RunView:
    """One run; `update` reads what is new, and every other method answers from memory.

    Args:
        brief: only for its row in the list: its records are skimmed, and not kept.
        shared: the policy of another run will do, whose rules are in a file of that.

    Attributes:
        version: it grows with each change. t0: Unix time of the run's creation.
        undone: what rollbacks undid; what a relaunch repeats, only the frames show.
        problem: what cannot be read, "" where all can.
    """

    def __init__(self, path: Path, *, brief: bool = False, shared: bool = False) -> None:
        self._brief, self._is_shared, self._rollbacks = brief, shared, list[int]()
        self.run = RunDir.open(path)
        self.name = path.name
        self._identity = _stamp(path / "run.json")
        self.described = describe_run(self.run)
        self.t0 = _unix(self.described.created) or 0.0
        self.records: list[Record] = []
        self.undone: list[Undone] = []
        self.state: RunStatus | None = None
        self.problem, self.version = "", 0
        self._outcome = RunOutcome()
        self._tail = _runs.LogTail(self.run.audit_path)
        self._stamps: tuple[object, ...] = ()
        self._policies: dict[str, Policy] = {}
        self._policy_files: tuple[object, ...] = ()
        self._digest = self.described.policy_digest  # of the policy in force
        self._rules: tuple[str, list[dict[str, Any]]] = ("", [])
        self._lock = threading.Lock()  # of what follows: one thread reads on, others ask
        self._document: tuple[int, dict[str, Any]] = (0, {})
        self._index = IncidentIndex()
        self._phases: list[Mark] = []
        self._actions: dict[str, Mark] = {}
        self._events: list[Mark] = []
        self._incidents: dict[str, Mark] = {}
        self._changed: set[str] = set()  # incidents whose marks are of before
        self._texts: dict[int, str] = {}  # what records of incidents say on their cards
        self._listed = -UNSEEN_S, ""
        self._about: tuple[object, About] = (None, About("", (), "", False))

    def update(self) -> bool:
        """Read what is new; return whether anything is. What cannot be read is the `problem`."""
        path = self.run.path
        stamps = (
            *(_stamp(path / name) for name in ("state.json", "audit.log", registry.NAME)),
            self._listed_state(),
            read_note(self.run.id),
        )
        if stamps == self._stamps:
            return False
        self.problem = ""
        try:
            if self._brief:
                self._outcome = skim_run(self.run.audit_path)
                self._rollbacks = list(_skim_rollbacks(self.run.audit_path))
            else:
                fresh = self._tail.read()
                with self._lock:
                    for raw in fresh:
                        self._take(raw)
            self.state = read_status(self.run, outcome=self._outcome, brief=self._brief)
        except StoreError as error:
            self.problem = str(error)
        self._stamps = stamps  # of before it was read: what came since is read at the next look
        self.version += 1  # last: a document of this version has all of it
        return True

    def _listed_state(self) -> str:
        """Return the state in the list: a job without a supervisor ends without a file's change."""
        is_supervised = is_locked(self.run.audit_path)
        if is_supervised or time.monotonic() - self._listed[0] > UNSEEN_S:
            state, _ = _runs.run_state(self.run, self._outcome, self.described.host)
            self._listed = time.monotonic(), state
        return self._listed[1]

    def _take(self, raw: Mapping[str, Any]) -> None:
        try:
            record = Record.decode(raw)
            if not all(isinstance(getattr(record, name), form) for name, form in SHAPE.items()):
                raise TypeError(record.seq)
            self._outcome.add_record(raw)
        except MISSHAPEN as error:  # of another version: the others count
            self.problem = f"a record cannot be understood: {type(error).__name__}"
            return
        self.records.append(record)
        self._index.add_record(record)
        if record.incident:
            self._changed.add(record.incident)
        try:
            self._mark(record)
        except MISSHAPEN as error:  # what it carries has another shape: it is shown without a mark
            self.problem = f"a record cannot be understood: {type(error).__name__}"

    def _mark(self, record: Record) -> None:
        """Take what a record says beside the curves."""
        made, moment = record.decision, self._moment(record)
        kind = next((name for form, name in EVENTS if isinstance(made, form)), None)
        match made:
            case None:
                kind = {"run_start": "launch", "run_end": "end"}.get(record.kind)
            case decisions.NoticeTaken() if not made.what.startswith(NO_MARK):
                kind = made.what
            case decisions.PolicyReloaded():
                self._digest = made.after
            case decisions.StateChanged() if made.after:
                self._phases.append({**moment, "name": made.after})
            case decisions.ActionPlanned():
                order = made.action
                text = formats.describe_action(order.verb, order.args)
                mark = {**moment, "verb": order.verb, "text": text, "outcome": None}
                about = {"incident": record.incident, "restored": None, "record": record.seq}
                self._actions[order.id] = mark | about
        if kind is not None:
            self._events.append({**moment, "kind": kind, "text": record.reason})
        ending, restored = find_action_outcome(made), _restored(made)
        if ending is not None and ending[0] in self._actions:
            self._actions[ending[0]] |= {
                "record": record.seq,
                "outcome": ending[1],
                "end_t": moment["t"],
                "restored": restored,
            }
        if restored is not None and restored.step < restored.from_step:
            span = {"first": restored.step + 1, "last": restored.from_step}
            self.undone.append(Undone(attempt=restored.attempt - 1, **span))

    @property
    def newest(self) -> Status | None:
        """The status that its supervisor wrote last."""
        return None if self.state is None else self.state.newest

    def policies(self) -> dict[str, Policy]:
        """Return the policies of the run that can be read, by digest."""
        stamps = (_stamp(self.run.policy_path), _stamp(self.run.path / "policies"))
        if stamps != self._policy_files:
            known = _policies.get(self.described.policy_digest) if self._is_shared else None
            if stamps[1] is None and known is not None:
                self._policies = {known.digest: known}
            else:
                self._policies = readable_policies(self.run)
                if len(_policies) > MAX_POLICIES:
                    _policies.clear()
                _policies.update(self._policies)
            self._policy_files = stamps
        return self._policies

    # ── documents ──

    def _facts(self) -> tuple[str, dict[str, Any]]:
        """Return the state in the list, and what the list and the page of a run have both."""
        row = runs.summarize_run(self.run.path, self._outcome, self.state)
        training = None if self.newest is None else self.newest.training
        return row.state, {
            **msgspec.to_builtins(row),
            "host": self.described.host,
            "verdict": "" if self.state is None else self.state.verdict,
            "eta_s": training and training.eta_s if row.state == _runs.RUNNING else None,
            **{name: getattr(training, name, None) for name in TRAINING},
            **read_note(self.run.id),
        }

    def summary(self) -> dict[str, Any]:
        """Return the row of the list."""
        _, content = self._facts()
        if (worst := self._outcome.worst) is not None:
            title, _, status, is_unsettled = self._about_incident(worst)
            content["gravest"] |= {"title": title, "status": status, "unsettled": is_unsettled}
        newest = self.newest
        live = newest is not None and self.state is not None and self.state.ending is None
        plain: dict[str, Any] = plain_json(
            {
                **content,
                "protection": dict(newest.can) if newest and live else {},  # an ended run has none
                "curve": msgspec.to_builtins(newest.training.curve) if newest else {},
                "rollbacks": self._rollbacks,
            }
        )
        return plain

    def _about_incident(self, incident: IncidentOutcome) -> About:
        """Return what the list says of an incident; of a long log what its outcome says."""
        newest = self.newest
        state = (newest.state, len(newest.approvals)) if newest else None
        key = incident.id, incident.severity, incident.phase, state
        if self._about[0] != key:
            whole, size = self, (_stamp(self.run.audit_path) or (0, 0))[1]
            about = About(incident.headline, (), incident.phase, incident.unsettled)
            if self._brief and size < TITLED_BYTES:
                whole = RunView(self.run.path, shared=True)
                whole.update()
            with suppress(StoreError, KeyError):
                report = whole.report(incident.id)
                is_settled = report.final or report.status == IncidentStatus.HELD
                steps = report.next.steps if is_settled else ()
                about = About(report.title, steps, report.status.lower(), incident.unsettled)
            self._about = key, about
        return self._about[1]

    def is_there(self) -> bool:
        """Whether its directory still holds this run."""
        return _stamp(self.run.path / "run.json") == self._identity

    def document(self) -> dict[str, Any]:
        """Return all of the page of a run but curves; a key is sent again when it changes."""
        version = self.version
        with self._lock:
            if self._document[0] != version:
                self._document = version, self._make_document()
            return self._document[1]

    def _make_document(self) -> dict[str, Any]:
        described, newest = self.described, self.newest
        listed, content = self._facts()
        self._update_incidents()
        # What the card says of an action: "" where another action has it with its own.
        actions = [
            {**mark, "sentence": self._texts.get(mark["record"], "")}
            for mark in self._actions.values()
        ]
        fields: dict[str, Any] = {
            **content,
            "problem": content["problem"] or self.problem or None,
            **{name: getattr(described, name) for name in ("argv", "cwd", "policy_digest")},
            "id": self.run.id,
            "path": str(self.run.path),
            "drills": described.drills,
            "t0": self.t0,
            "phase": None if newest is None else newest.state,
            "attempt": newest.attempt if newest else 0,
            "facts": [] if self.state is None else _status_facts(self.state),
            "needs": self.needs(listed),
            "rule_states": dict(newest.rules) if newest else {},
            "silenced": dict(newest.silenced) if newest else {},
            "muted": dict(newest.muted) if newest else {},
            "rules": self.rules(),
            "ranks": _ranks(newest),
            "checkpoints": self.checkpoints(),
            "decisions": self._decisions(),
            "phases": self._phases,
            "incidents": list(self._incidents.values()),
            "actions": actions,
            "events": self._events,
        }
        plain: dict[str, Any] = plain_json(fields)
        return plain

    def needs(self, listed: str) -> list[Need]:
        """Return what needs a person, gravest first; `listed`: the state in the list of runs."""
        return [] if self.state is None else list(self._needs(self.state, listed))

    def _needs(self, state: RunStatus, listed: str) -> Iterator[Need]:
        newest, path = state.newest, run_operand(self.run)
        incident, worst = next(iter(current_incidents(state)), None), self._outcome.worst
        about: dict[str, Any] = {}
        steps: Sequence[Step] = ()
        if incident is not None:
            about = {"severity": incident.severity, "incident": incident.id}
            if worst is not None and worst.id == incident.id:
                named = self._about_incident(worst)
                about["title"], steps = named.title, named.steps

        def need(kind: str, text: str, command: str, **extra: Any) -> Need:
            return Need(run=self.name, kind=kind, text=text, command=command, **extra)

        if newest is not None and state.is_supervised:
            if newest.protection_off:
                text = f"the protection is off: {newest.protection_off}"
                yield need("protection_off", text, f"supervise checkpoints {path}")
            yield from self._requests(newest, path, about)
            if newest.state == state_machine.HOLDING:
                text = "automatic actions are off" + (f": {incident.headline}" if incident else "")
                yield need("held", text, f"supervise release {path}", steps=steps, **about)
            if any(rank.paused for rank in newest.rank_states().values()):
                yield need("paused", "the job is paused", f"supervise resume {path}", **about)
            elif (
                incident is not None
                and newest.state != state_machine.HOLDING
                and incident.id not in {request.incident for request in newest.approvals}
            ):
                command = f"supervise why {path} {quote(incident.id)}"
                yield need("incident", incident.headline, command, **about)
            for name, channel in (newest.channels or {}).items():
                text = f"{channel.undelivered} messages to {name} not delivered: {channel.error}"
                yield need("undelivered", text, f"supervise notify test {path}")
        elif (ending := state.ending) is not None and self._needs_somebody(ending, listed):
            extra: dict[str, Any] = {}
            if worst is not None:
                named = self._about_incident(worst)
                extra = {"severity": worst.severity, "incident": worst.id}
                extra |= {"title": named.title, "steps": named.steps}
            text = ", ".join(fact.text for fact in ending.facts if fact.kind != _runs.FINISHED)
            yield need(ending.kind, text, ending.command or f"supervise why {path}", **extra)
        if state.undelivered:
            text = f"{state.undelivered} messages of the end of the run were not delivered"
            yield need("undelivered", text, f"supervise outbox flush {path}")
        if state.record:
            yield need("record", state.record, f"supervise audit verify {path}")

    def _requests(self, newest: Status, path: str, about: Mapping[str, Any]) -> Iterator[Need]:
        """Yield the requests that wait, with the commands that answer them."""
        age_s = seconds_since(newest.updated_wall, _now()) or 0.0
        settled = {outcome.unanswered for outcome in self._outcome.incidents.values()}
        # The status is older than the log: a request may have been replaced since.
        for request in (r for r in newest.approvals if r.id not in settled):
            plan = "; ".join(formats.describe_action(s.verb, s.args) for s in request.steps)
            proof, name = formats.short_digest(request.args_sha256), quote(request.id)
            then = "may" if request.on_timeout == "allow" else "may not"
            approve = f"supervise approve --sha {proof} {path} {name}"
            deny = f"supervise deny {path} {name}"
            yield Need(
                run=self.name,
                kind="approval",
                text=f"may {request.runbook} run ({plan})? Without an answer it {then}",
                command=approve,
                **{**about, "incident": request.incident},
                steps=[Step("to approve", approve), Step("to deny", deny)],
                request={"id": request.id, "sha": request.args_sha256},
                left_s=max(0.0, request.left_s - age_s),
            )

    def _needs_somebody(self, ending: Ending, listed: str) -> bool:
        end = self._outcome.end
        if end is None:
            return listed in (_runs.UNSUPERVISED, _runs.LOST)
        age_s = seconds_since(end.wall, _now())
        stopped = listed == _runs.STOPPED and bool(self._outcome.incidents)
        return age_s is not None and age_s < ENDED_S and bool(ending.command or stopped)

    def rules(self) -> list[dict[str, Any]]:
        """Return the rules of the policy in force."""
        policy = self.policies().get(self._digest)
        if policy is None:
            return []
        if self._rules[0] != policy.digest:
            self._rules = policy.digest, _rules_of(policy)
        return self._rules[1]

    def checkpoints(self) -> list[dict[str, Any]]:
        """Return the rows of the job's checkpoints, oldest first."""
        with suppress(StoreError, *MISSHAPEN):
            entries = registry.read_registry(self.run.path).checkpoints
            return [
                {
                    **{name: getattr(entry, name) for name in CHECKPOINT},
                    "suspect": registry.describe_suspicion(entry, self._outcome),
                }
                for entry in entries
            ]
        return []

    def decisions(self, since: int) -> list[dict[str, Any]]:
        """Return all records after one, the newest first."""
        with self._lock:
            self._update_incidents()
            rows: list[dict[str, Any]] = plain_json(self._decisions(since))
            return rows

    def _decisions(self, since: int | None = None) -> list[Mark]:
        """Return all records after `since`, else as many as are shown, the newest first."""
        newest, last = reversed(self.records), -1 if since is None else since
        rows = islice(newest, SHOWN if since is None else None)
        return [self._decision(record) for record in takewhile(lambda r: r.seq > last, rows)]

    def _decision(self, record: Record) -> Mark:
        made = record.decision
        text = f"supervise returned {record.reason}" if record.kind == "run_end" else record.reason
        is_chief = isinstance(made, CHIEF) or record.kind in ("run_start", "run_end")
        return {
            **self._moment(record),
            "record": record.seq,
            "wall": record.wall,
            "kind": formats.RECORDS.get(record.kind, record.kind),
            "severity": None if made is None else made.severity,
            "incident": record.incident,
            "text": self._texts.get(record.seq, text),
            "is_chief": is_chief or record.seq in self._texts,  # people look for it first
        }

    def _moment(self, record: Record) -> dict[str, Any]:
        wall = _unix(record.wall)
        t = 0.0 if wall is None else round(wall - self.t0, 3)
        return {"t": t, "step": record.step, "attempt": record.attempt}

    def incident_ids(self) -> list[str]:
        """Return the ids of all incidents, oldest first."""
        return list(self._outcome.incidents)

    def _update_incidents(self) -> None:
        changed, self._changed = self._changed, set()
        for name in (name for name in self._outcome.incidents if name in changed):
            own = self._index.records_of_incident(name)
            for record in own:
                self._texts.pop(record.seq, None)
            try:
                self._incidents[name] = self._incident(name, own)
                self._texts |= _texts_of(self._incidents[name], own)
            except (StopIteration, *MISSHAPEN) as error:  # the other incidents are shown
                self.problem = f"{name} cannot be understood: {type(error).__name__}"

    def _incident(self, name: str, own: Sequence[Record]) -> Mark:
        opened = next(r for r in own if isinstance(r.decision, decisions.IncidentOpened))
        closed = next((r for r in own if isinstance(r.decision, decisions.IncidentClosed)), None)
        outcome = self._outcome.incidents[name]
        summary = summarize_incident(self._index, name, self.policies())
        rules = [r.decision.rule for r in own if r.kind in ("incident", "rule") and r.decision]
        slow = getattr(opened.decision, "slow_step", None)
        return {
            **self._moment(opened),
            "id": name,
            "severity": summary.severity,
            "state": summary.status,
            "title": summary.title,
            "phase": outcome.phase,
            "unsettled": outcome.unsettled,  # the word that `supervise status` has for it
            "rules": list(dict.fromkeys(rule for rule in rules if rule)),
            "raised": [
                {**self._moment(r), "severity": r.decision.severity}
                for r in own
                if isinstance(r.decision, decisions.IncidentRaised)
            ],
            "slow_since": slow.since if slow is not None and slow.where else None,
            "end": None if closed is None else self._moment(closed),
            "end_text": getattr(closed.decision, "cause", "") if closed else "",
        }

    def report(self, incident: str) -> IncidentReport:
        """Return the report of an incident, as `why` has it. Raises KeyError, StoreError."""
        if incident not in self._outcome.incidents:
            raise KeyError(incident)
        own = [record for record in self.records if record.incident == incident]
        with reading_recorded_data(f"the records in {self.run.audit_path}", HINT):
            return self._report(self._origin(), *dict(read_all_tapes(self.run, own)).popitem())

    def reports(self) -> dict[str, IncidentReport]:
        """Return the reports of all incidents that can be understood, oldest first."""
        origin, made = self._origin(), dict[str, IncidentReport]()
        for name, tapes in read_all_tapes(self.run, self.records):
            with suppress(*MISSHAPEN):
                made[name] = self._report(origin, name, tapes)
        return {name: made[name] for name in self.incident_ids() if name in made}

    def _origin(self) -> RunOrigin:
        phase = run_phase(self.run, self.records)
        return RunOrigin.from_description(self.described, run_path(self.run), phase)

    def _report(self, origin: RunOrigin, name: str, tapes: Tapes | None) -> IncidentReport:
        policies = self.policies()
        return build_incident_report(self.records, name, origin, policies, tapes, self._index)


def _texts_of(mark: Mark, own: Sequence[Record]) -> dict[int, str]:
    """Return what the records of an incident and of its actions say, by number."""
    texts: dict[int, str] = {}
    for record in own:
        made = record.decision
        if isinstance(made, decisions.ApprovalRequested):
            plan = ", ".join(step.verb for step in made.args)
            texts[record.seq] = f"{made.id}: approve {made.runbook} ({plan})?"
        elif isinstance(made, decisions.IncidentOpened):
            texts[record.seq] = f"{mark['id']} opened: {mark['title']}"
        elif isinstance(made, decisions.IncidentClosed):
            end = "unresolved at the end" if mark["unsettled"] else mark["state"].lower()
            shown = describe_finding(made) or describe_end(made)
            texts[record.seq] = f"{mark['id']} {end}: {shown}"
    actions = intended_actions(own)
    last = {action.record: action.outcome_record for action in actions}
    done = action_texts(actions, newest=math.inf, has_new_batches=False)
    return texts | {last[number] or number: text for number, text in done}


def _restored(made: decisions.Decision | None) -> Restored | None:
    """Return from which step to which an action took the weights back, None if it did not."""
    with suppress(ValueError):
        return made.result.parse(Restored) if isinstance(made, decisions.ActionFinished) else None
    return None


def _rules_of(policy: Policy) -> list[dict[str, Any]]:
    return [
        {
            "id": rule.id,
            "title": rule.title,
            "severity": rule.severity,
            "runbook": rule.runbook,
            "when": rule.text,
            "where": rule.location,
            "metrics": list(
                dict.fromkeys(
                    metric
                    for name in policy.detectors_of(rule)
                    for metric in policy.detectors[name].metrics
                )
            ),
        }
        for rule in policy.rules
    ]


def _skim_rollbacks(path: Path) -> Iterator[int]:
    """Yield the steps at which rollbacks took effect, from a log that is not read in full."""
    for line, _ in audit.log_lines(path):
        if b'"kind":"commit"' in line and b'"from_step":' in line:
            with suppress(*MISSHAPEN):
                restored = _restored(Record.decode(json.loads(line[65:])).decision)
                if restored is not None:
                    yield restored.from_step


def _status_facts(state: RunStatus) -> list[tuple[str, str]]:
    """Return the lines of `status` but those that the page shows elsewhere, or that only age."""
    shown = ("run", "verdict", "updated", "waiting", "incident")
    lines = status_lines(state)
    return [line for line in lines if line[0] not in shown and not line[0].startswith("rank ")]


def _ranks(newest: Status | None) -> list[dict[str, Any]]:
    """Return the ranks, those that are most behind first."""
    rows = []
    for number, rank in () if newest is None else newest.rank_states().items():
        off = [name for name, state in rank.collectors.items() if state != "on"]
        notes = ["paused"] if rank.paused else []
        notes += [f"{len(off)} collectors off: {', '.join(off[:3])}"] if off else []
        rows.append(
            {
                "rank": int(number),
                "lag": 0 if newest is None else newest.training.lag.get(number, 0),
                "phase": rank.phase,
                "silent_s": rank.silent_s,
                "overhead": rank.overhead,
                "notes": notes,
            }
        )
    return sorted(rows, key=lambda row: (-row["lag"], -row["silent_s"], row["rank"]))


def metrics_by_board(metrics: Sequence[str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the metrics of each board that a run has, with those of parts, and those it lacks."""
    present: dict[str, list[str]] = {}
    missing: dict[str, list[str]] = {}
    for board, names in BOARDS.items():
        present[board], missing[board] = [], []
        for name in names:
            parts = [metric for metric in metrics if metric.split(".")[0] == name]
            present[board] += parts
            missing[board] += [] if parts else [name]
    return present, missing


def describe_metrics(metrics: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return name, unit and meaning of metrics, and how they are drawn."""
    described = {}
    for metric in metrics:
        spec = spec_of(metric)
        base = metric.split(".")[0]
        is_own = metric == "train_loss_raw" and "train_loss" in metrics  # it may be a sum
        unit = spec.unit if spec else "1"
        described[metric] = {
            "name": LOSS if metric == "train_loss" else formats.readable_metric(metric),
            "unit": "as the job computes it" if is_own else unit,
            "means": spec.meaning if spec else "",
            "log": base in LOGARITHMIC,
            "smooth": not base.endswith(NO_CURVE) and (spec is None or spec.every == 1),
        }
    return described


# ── tags and notes: beside the runs, whose directories stay as they are ──


def read_note(run_id: str) -> dict[str, Any]:
    """Return tags and note of a run."""
    with suppress(OSError, *MISSHAPEN):
        content = read_json(_note_path(run_id))
        return {"tags": [str(tag) for tag in content["tags"]], "note": str(content["note"])}
    return {"tags": [], "note": ""}


def write_note(run_id: str, tags: Sequence[str], note: str) -> dict[str, Any]:
    """Write tags and note of a run, and return them. Raises OSError."""
    content = {"tags": [tag[:MAX_TAG] for tag in tags[:MAX_TAGS]], "note": note[:MAX_NOTE]}
    path = _note_path(run_id)
    make_directory(path.parent)
    replace_file(path, decisions.json_document(content).encode(), durable=False)
    return content


def _note_path(run_id: str) -> Path:
    return run_directory.state_directory(os.environ) / "notes" / f"{run_id}.json"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _unix(wall: str | None) -> float | None:
    with suppress(ValueError, TypeError, OverflowError):
        return datetime.fromisoformat(str(wall)).astimezone(UTC).timestamp()
    return None


def _now() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)
