"""Send a command to a running supervisor and wait for its answer in the audit log."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import system
from ..errors import StoreError, UsageError
from ..runtime import watches
from ..runtime.status import Status
from ..store import audit
from ..store.files import is_locked
from ..store.quarantine_list import Quarantine
from ..store.run_directory import RUNS, RunDir
from ._output import echo
from ._runs import find_exact_run, find_run, only_live, runs_in

TIMEOUT_S = 15.0  # one round of the supervisor's loop, and one step boundary of the job
POLL_S = 0.3
REFUSED, NO_ANSWER = 1, 75
OUTCOMES = {"commit": "done", "abort": "failed", "in_doubt": "in doubt"}  # kind of record
Record = Mapping[str, Any]


def split_run(words: Sequence[str], least: int, limit: int | None) -> tuple[Path, list[str]]:
    """Return the run and the other arguments.

    A first argument that is a run is taken as that; without one it is the only live run under
    ./runs. A path beside run directories that is not one is an error, never another argument.

    Raises:
        UsageError: too few or too many arguments, or not exactly one live run.
        StoreError: the path is not a run directory.
    """
    operands, run = list(words), None
    if (
        operands
        and (found := find_exact_run(operands[0]) or _named_like_runs(operands[0])) is not None
    ):
        run = found
        operands.pop(0)
    if run is None and limit is not None and len(operands) > limit:
        run = find_run(operands.pop(0))
    if len(operands) < least or (limit is not None and len(operands) > limit):
        raise UsageError(
            f"too {'few' if len(operands) < least else 'many'} arguments",
            hint="add --help for examples",
        )
    return run or only_live(), operands


def _named_like_runs(name: str) -> Path | None:
    """Return the run that the beginning of a path means; None for a path where no runs are.

    Raises:
        StoreError, UsageError: runs are there, and none or several are called so.
    """
    path = Path(name)
    if "/" not in name or path.is_file():
        return None
    return find_run(name) if path.parent == RUNS or runs_in(path.parent) else None


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a command.

    Attributes:
        outcome: done, in progress, refused, failed, in doubt, or no answer.
        code: the exit code: 0 done, or accepted and in progress; 1 refused or failed; 75 no answer.
        records: of the audit log: the answer, then the outcome of its action.
        text: what is to be said where there is no record.
    """

    run: Path
    command: str
    outcome: str
    code: int
    records: tuple[Record, ...] = ()
    text: str = ""

    @property
    def lines(self) -> list[str]:
        """What to print."""
        return [
            f"record {record['seq']}, step {record['step']}: {record['reason']}"
            for record in self.records
        ] or [self.text]

    def print(self) -> None:
        """Print it on stderr, as all that is not data."""
        echo(*self.lines, err=True)

    def facts(self) -> dict[str, Any]:
        """Return it for a program."""
        return {
            "run": str(self.run),
            "command": self.command,
            "outcome": self.outcome,
            "exit_code": self.code,
            "records": [
                {"seq": record["seq"], "step": record["step"], "text": record["reason"]}
                for record in self.records
            ],
            "text": self.text,
        }


class RefusedError(Exception):
    """The command would be refused, and is not sent."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.text)
        self.answer = answer


def refuse_unknown(run: Path, shards: Sequence[str]) -> None:
    """Raise RefusedError if one of the shards to release is not in the quarantine of a run."""
    if not shards:
        return
    held = sorted(Quarantine(RunDir.open(run).quarantine_path).read().names())
    absent = ", ".join(name for name in shards if name not in held)
    if absent:
        contents = ", ".join(held) or "nothing"
        text = f"nothing to release: {absent} is not in quarantine, which holds {contents}"
        raise RefusedError(Answer(run, "release", "refused", REFUSED, text=text))


def post_command(
    run: Path, command: str, by: str | None, args: Mapping[str, Any]
) -> tuple[RunDir, str]:
    """Post a command; return the run and the key that the answering record names.

    Raises:
        StoreError: the run has no supervisor, or its directory cannot be written.
    """
    directory = RunDir.open(run)
    if not is_locked(directory.audit_path):
        raise StoreError(f"{run} has no supervisor", hint=f"supervise status {run}")
    status = None
    with suppress(StoreError):  # only a view
        status = Status.read(directory)
    if status is not None and status.protection_off:
        text = f"the protection of {run} is off: {status.protection_off}"
        raise StoreError(text, hint=f"supervise checkpoints {run}")
    at_ns = system.monotonic_ns()
    key = f"{at_ns}-{os.getpid()}"
    operator = by or getpass.getuser()
    try:
        watches.post_command(directory.path, command, operator, {**args, "key": key}, at_ns=at_ns)
    except OSError as error:
        raise StoreError(f"cannot write in {run}: {error.strerror}") from error
    return directory, key


def poll_records(run: RunDir, skip: int, is_complete: Callable[[Iterator[Record]], bool]) -> None:
    """Give `done` the records after the first `skip`, until it returns True or the time is up."""
    until = time.monotonic() + TIMEOUT_S
    alive = True
    while alive and time.monotonic() < until:
        alive = is_locked(
            run.audit_path
        )  # before the records: the last one may be written meanwhile
        if is_complete(
            record for n, record in enumerate(audit.read_audit(run.audit_path)) if n >= skip
        ):
            return
        time.sleep(POLL_S)


def send_and_wait(run: Path, command: str, by: str | None, args: Mapping[str, Any]) -> Answer:
    """Send a command, wait for its answer and the outcome of its action, and return both."""
    skip = sum(1 for _ in audit.read_audit(RunDir.open(run).audit_path))
    directory, key = post_command(run, command, by, args)
    answers: list[Record] = []  # the answer, then the outcome

    def answered(records: Iterator[Record]) -> bool:
        answers.clear()
        for record in records:
            data = record.get("data") or {}
            if data.get("command_id") == key:
                answers.append(record)
            elif answers and _is_outcome(record, answers[0]["data"]["action"]):
                answers.append(record)
                return True
        return bool(answers) and not (answers[0]["data"]["ok"] and answers[0]["data"]["action"])

    poll_records(directory, skip, answered)
    if not answers:
        text = f"no answer within {TIMEOUT_S:.0f} s; try: supervise audit show {run}"
        return Answer(run, command, "no answer", NO_ANSWER, text=text)
    outcome = _outcome(answers)
    code = REFUSED if outcome in ("refused", "failed", "in doubt") else 0
    return Answer(run, command, outcome, code, tuple(answers[:2]))


def _outcome(answers: Sequence[Record]) -> str:
    answer = answers[0]["data"]
    if not answer["ok"]:
        return "refused"
    if len(answers) < 2:
        return "in progress" if answer["action"] else "done"
    return OUTCOMES[answers[1]["kind"]]


def _is_outcome(record: Record, action: str | None) -> bool:
    named = (record.get("data") or {}).get("action")
    return record["kind"] in OUTCOMES and isinstance(named, Mapping) and named["id"] == action
