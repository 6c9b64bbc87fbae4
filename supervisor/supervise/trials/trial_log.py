"""The audit log of a trial: its plan, its runs, each look, and what came of it.

It is a log as that of a run: hash-chained, so that a verdict can be cited by the number of its
records and their head, and `supervise audit verify FILE` shows a change.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field

from .. import system
from ..core.model.decisions import plain
from ..core.model.payload import Payload
from ..errors import StoreError
from ..store import audit
from ..store.audit import Audit

VERDICT, RESULT = "canary_verdict", "suite_result"
CANARY, SUITE = "canary", "suite"  # what a trial is for; its records are called so
LOG = "audit.log"
CITED = {  # what a citation takes of a result
    VERDICT: ("verdict", "effect", "margin", "runs"),
    RESULT: ("document", "sha256", "policy", "healthy", "faults", "monitors"),
}


class TrialPolicy(Struct, frozen=True):
    """The policy of a trial; `without`: its parts that could reach others and were left out."""

    name: str
    digest: str
    without: Sequence[str]


class CanaryPlan(Struct, frozen=True):
    """`canary_plan`: what is to be compared, and how."""

    steps: int
    seeds: int
    policy: TrialPolicy
    margin: float
    alpha: float
    warmup: int


class CanaryLook(Struct, frozen=True):
    """`canary_look`: the verdict so far, and the mean of the differences."""

    verdict: str
    mean: float | None


class RunCitation(Struct, frozen=True):
    """What names a run in a result: its id, and the head of its audit log."""

    run: str
    records: int
    head: str


class SuiteRun(RunCitation, frozen=True, kw_only=True):
    """`suite_run`: a run with a fault or without one; outside: files that it wrote elsewhere."""

    exit_code: int
    seconds: float
    outside: Sequence[str]


class CanaryArm(SuiteRun, frozen=True, kw_only=True):
    """`canary_arm`: a run of one program."""

    steps: int
    cpu_s: float | None


class SuitePlan(Struct, frozen=True, kw_only=True):
    """`suite_plan`: what must be the same where a suite goes on."""

    supervise: str
    command: Sequence[str]
    cwd: str
    policy: str
    faults: Sequence[str]
    seeds: int
    healthy: int
    steps: int
    fault_step: int = field(name="at")
    metric: str
    acts: bool


class MonitorResult(Struct, frozen=True):
    """What a rule with this digest has shown; see `drill_findings.Monitor`."""

    digest: str
    delays: Mapping[str, Sequence[int]]
    leads: Mapping[str, Sequence[int]]
    false_alarms: int


class SuiteResult(Struct, frozen=True):
    """`suite_result`; faults: how many runs of each were judged."""

    document: str
    sha256: str
    policy: TrialPolicy
    healthy: int
    faults: Mapping[str, int]
    monitors: Mapping[str, MonitorResult]


class TrialLog:
    """The writer; get one from `opened`."""

    def __init__(self, log: Audit, trial: str) -> None:
        self.trial = trial
        self._log = log

    def note(self, kind: str, reason: str, data: Struct | Payload) -> None:
        """Add a record, which is on disk before this returns. Raises StoreError."""
        now = system.monotonic_ns(), system.wall()
        self._log.append(
            kind,
            actor="trial",
            at_ns=now[0],
            wall=now[1],
            step=-1,
            body={"reason": reason, "data": plain(data)},
            sync=True,
        )


@contextmanager
def opened(path: Path, sort: str = CANARY) -> Iterator[TrialLog]:
    """Yield the log at a path, a new one or one that further trials are added to.

    Raises:
        StoreError: it cannot be written, or is the log of a run; TamperError: it was changed.
    """
    wall = system.wall()
    trial = f"{sort}-{wall[:19].replace('-', '').replace(':', '').replace('T', '-')}"
    trial += f"-{secrets.token_hex(3)}"
    if path.exists() and (first_record := next(iter(audit.read(path)), None)) is not None:
        if not str(first_record["kind"]).startswith((f"{CANARY}_", f"{SUITE}_")):
            raise StoreError(f"{path} is the log of a run", hint="name another file")
        trial = str(first_record["run"])
    log = Audit.open(path, trial, at_ns=system.monotonic_ns(), wall=wall)
    try:
        yield TrialLog(log, trial)
    finally:
        log.close()


def citation(path: Path) -> Payload:
    """Return what a record may cite of the newest trial in a log, or in the directory of one.

    Raises:
        StoreError: the log cannot be read, or has no result, or the document beside it was
            changed; TamperError: the log was changed.
    """
    log = path / LOG if path.is_dir() else path
    newest = None
    for record in audit.read(log):
        if record["kind"] in (VERDICT, RESULT):
            newest = record
    if newest is None:
        hint = "name the audit.log of a drill suite or a canary trial"
        raise StoreError(f"{log} has no result of a trial", hint=hint)
    report = audit.verify(log)
    data = newest["data"]
    lacking = [name for name in CITED[newest["kind"]] if name not in data]
    if lacking:
        raise StoreError(f"{log} is of another version: its result has no {lacking[0]}")
    document = log.parent / str(data.get("document", ""))
    if document.is_file() and hashlib.sha256(document.read_bytes()).hexdigest() != data["sha256"]:
        raise StoreError(f"{document} is not the one that {log} names")
    return Payload(
        {
            "file": str(log.absolute()),
            "trial": str(newest["run"]),
            "record": newest["seq"],
            "made": str(newest["wall"]),
            "result": str(newest["reason"]),
            **{name: data[name] for name in CITED[newest["kind"]]},
            "records": report.records,
            "head": report.head,
        }
    )
