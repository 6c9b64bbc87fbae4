"""Commands of an operator to a running supervisor: sent, answered, audited under a name."""

from __future__ import annotations

import getpass
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from .. import system
from ..catalog.shipped import is_file
from ..core.model.decisions import (
    MODES,
    CommandAnswered,
    PolicyRefused,
    PolicyReloaded,
    ReloadRequested,
)
from ..core.model.formats import printable
from ..errors import InputError, StoreError, UsageError
from ..report.records import DOUBT, FAILED, Record, find_action_outcome
from ..runtime import watches
from ..runtime.status import Status
from ..store import audit
from ..store.files import is_locked
from ..store.quarantine_list import Quarantine
from ..store.run_directory import RUNS, RunDir
from ._output import echo, echo_json
from ._params import Number
from ._runs import find_exact_run, find_run, live_run_argument, only_live_run, runs_in

TIMEOUT_S = 15.0  # one round of the supervisor's loop, and one step boundary of the job
POLL_S = 0.3
REFUSED, NO_ANSWER = "refused", "no answer"
CODES = {NO_ANSWER: 75, REFUSED: 1, FAILED: 1, DOUBT: 1}  # of outcomes that are none to go on from


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
    return run or only_live_run(), operands


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
        records: of the audit log: the answer, then the outcome of its action.
        text: what is to be said where there is no record.
    """

    run: Path
    command: str
    outcome: str
    records: tuple[Record, ...] = ()
    text: str = ""

    @property
    def code(self) -> int:
        """The exit code: 0 done, or accepted and in progress; 1 refused or failed; 75 no answer."""
        return CODES.get(self.outcome, 0)

    @property
    def lines(self) -> list[str]:
        """What to print."""
        return [
            f"record {record.seq}, step {record.step}: {record.reason}".replace(
                " RUN ", f" {self.run} "
            )
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
                {"seq": record.seq, "step": record.step, "text": record.reason}
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
        raise RefusedError(Answer(run, "release", REFUSED, text=text))


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
    alive, delay_s = True, POLL_S / 16  # most answers are there at once, and each look reads a log
    while alive and time.monotonic() < until:
        # Before the records: the last one may be written meanwhile.
        alive = is_locked(run.audit_path)
        rows = itertools.islice(audit.read_audit(run.audit_path), skip, None)
        if is_complete(map(Record.decode, rows)):
            return
        time.sleep(delay_s)
        delay_s = min(2.0 * delay_s, POLL_S)


def send_and_wait(run: Path, command: str, by: str | None, args: Mapping[str, Any]) -> Answer:
    """Send a command, wait for its answer and the outcome of its action, and return both."""
    skip = sum(1 for _ in audit.read_audit(RunDir.open(run).audit_path))
    directory, key = post_command(run, command, by, args)
    answers: list[Record] = []  # the answer, then the outcome
    outcome = NO_ANSWER

    def answered(records: Iterator[Record]) -> bool:
        nonlocal outcome
        answers.clear()
        action: str | None = None
        for record in records:
            decision, ending = record.decision, find_action_outcome(record.decision)
            if isinstance(decision, CommandAnswered) and decision.command_id == key:
                answers.append(record)
                action = decision.action
                outcome = "in progress" if action else "done"
                outcome = outcome if decision.ok else REFUSED
            elif ending is not None and ending[0] == action:
                answers.append(record)
                outcome = ending[1]
                return True
        return bool(answers) and outcome != "in progress"

    poll_records(directory, skip, answered)
    text = f"no answer within {TIMEOUT_S:.0f} s; try: supervise audit show {run}"
    return Answer(run, command, outcome, tuple(answers[:2]), "" if answers else text)


EXIT_CODES = (
    "Exit codes: 0 done, or accepted and in progress; 1 refused or failed; 64 wrong usage, or no "
    "run with a supervisor; 75 no answer within 15 s."
)
COUNT = click.IntRange(min=0)
RATE = Number(0.0, 1.0, min_open=True)
MAX_SKIPPED = 3  # updates per command, as many as the action allows
Order = tuple[Path, Mapping[str, Any]]  # the run, and the command's arguments
commands: dict[str, click.Command] = {}


def _command(
    metavar: str = "[RUN]", *options: Callable[[Any], Any], cls: type[click.Command] = click.Command
) -> Callable[[Callable[..., Order]], click.Command]:
    """Make a command of a function that says what to send to which run.

    The command has `--by`, `--json` and arguments that may begin with RUN.
    """

    def make(function: Callable[..., Order]) -> click.Command:
        name = function.__name__

        @wraps(function)
        def command(by: str | None, as_json: bool, **operands: Any) -> int:
            try:
                run, args = function(**operands)
                answer = send_and_wait(run, name, by, args)
            except RefusedError as error:
                answer = error.answer
            echo_json(answer.facts()) if as_json else answer.print()
            return answer.code

        operator = click.option(
            "--by", metavar="NAME", help="Operator's name. Default: your login."
        )
        as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
        arguments = click.argument("operands", nargs=-1, metavar=metavar)
        for decorate in (arguments, as_json, operator, *reversed(options)):
            command = decorate(command)
        commands[name] = click.command(name=name, epilog=EXIT_CODES, cls=cls)(command)
        return commands[name]

    return make


@_command()
def pause(operands: tuple[str, ...]) -> Order:
    """Pause the job at its next step boundary.

    `supervise resume` ends the pause. Otherwise the job goes on after one day, or 60 s after the
    supervisor dies.

    \b
    Examples:
      supervise pause runs/20260105-101112-7f3a9c
      supervise pause --by anna
    """
    run, _ = split_run(operands, 0, 0)
    return run, {}


@_command()
def resume(operands: tuple[str, ...]) -> Order:
    """Continue a paused job. If an action is in progress, the job resumes after it.

    \b
    Examples:
      supervise resume runs/20260105-101112-7f3a9c
    """
    run, _ = split_run(operands, 0, 0)
    return run, {}


@_command(
    "[RUN] ID",
    click.option(
        "--sha", metavar="HEX", help="Refuse unless the digest of the request begins with this."
    ),
)
def approve(operands: tuple[str, ...], sha: str | None) -> Order:
    """Approve request ID: its actions are carried out.

    The approval covers the actions and arguments of the request, under the policy of the request.
    If any of these has changed, the request expires and a new one is created.

    \b
    Examples:
      supervise approve ask-1
      supervise approve --sha 3f9a runs/20260105-101112-7f3a9c ask-1
    """
    run, (name,) = split_run(operands, 1, 1)
    return run, {"id": name} | ({"sha": sha} if sha else {})


@_command("[RUN] ID")
def deny(operands: tuple[str, ...]) -> Order:
    """Deny request ID.

    Its actions are not carried out, and the policy does not act until `supervise release`.

    \b
    Examples:
      supervise deny --by anna runs/20260105-101112-7f3a9c ask-1
    """
    run, (name,) = split_run(operands, 1, 1)
    return run, {"id": name}


@_command("[RUN]", click.option("--incident", metavar="ID", help="Default: the open incident."))
def ack(operands: tuple[str, ...], incident: str | None) -> Order:
    """Acknowledge the open incident: its reminders stop.

    \b
    Examples:
      supervise ack runs/20260105-101112-7f3a9c
    """
    run, _ = split_run(operands, 0, 0)
    return run, {"incident": incident} if incident else {}


@_command(
    "[RUN] RULE",
    click.option(
        "--for",
        "steps",
        type=click.IntRange(min=0),
        default=1000,
        show_default=True,
        metavar="STEPS",
        help="Duration; 0 removes the silence.",
    ),
)
def silence(operands: tuple[str, ...], steps: int) -> Order:
    """Silence a rule: it neither acts nor notifies. Its breaches stay on record.

    A SEV0 rule cannot be silenced.

    \b
    Examples:
      supervise silence loss_spike.spike --for 500
      supervise silence loss_spike.spike --for 0
    """
    run, (rule,) = split_run(operands, 1, 1)
    return run, {"rule": rule, "for": steps}


@_command(
    "[RUN]",
    click.option(
        "--to", "last", type=COUNT, required=True, metavar="STEP", help="Last step; 0 withdraws it."
    ),
    click.option("--what", required=True, metavar="TEXT", help="What changes, in words."),
    click.option(
        "--from", "first", type=COUNT, metavar="STEP", help="First step. Default: the next one."
    ),
    click.option(
        "--expect",
        type=click.Choice(["up", "down", "either"]),
        default="either",
        show_default=True,
        help="Where the loss will go; the other way is still a breach.",
    ),
)
def plan(operands: tuple[str, ...], last: int, what: str, first: int | None, expect: str) -> Order:
    """Announce a change: what it does to the loss opens no incident.

    SEV0 rules, and rules on metrics that such a change cannot move, fire as ever. A new plan
    replaces overlapping plans with the same --what; --to 0 withdraws all plans with that --what.

    \b
    Examples:
      supervise plan add --from 20000 --to 20500 --what "new data mix" --expect up
      supervise plan add --to 0 --what "new data mix"
    """
    run, _ = split_run(operands, 0, 0)
    return run, {"to": last, "what": what, "expect": expect} | (
        {} if first is None else {"from": first}
    )


commands["plan"] = click.Group(
    "plan", {"add": plan}, help="Announce a change of data or rate: it opens no incident."
)


class _Rate(click.Command):
    """Reports a number below 0 as a number out of range, not as an unknown option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        operands = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name[1:2] not in tuple(".0123456789"):
                raise
            _rate(next(each for each in operands if each.startswith(error.option_name)))
            raise


def _rate(value: str) -> float:
    try:
        return RATE.convert(value, None, None)
    except click.BadParameter as error:
        error.param_hint = "VALUE"
        raise


@_command(
    "[RUN] VALUE",
    click.option(
        "--rewarm",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="STEPS",
        help="Rise back to 1.0 over this many steps; 0 keeps VALUE.",
    ),
    cls=_Rate,
)
def lr(operands: tuple[str, ...], rewarm: int) -> Order:
    """Scale the job's own learning rate by VALUE.

    VALUE is above 0 and at most 1, and replaces an earlier one; 1.0 ends the scaling, and lifts a
    cap that `supervise` put on the rate. Rollbacks and relaunches keep the factor.

    \b
    Examples:
      supervise lr 0.5 --rewarm 200
      supervise lr --by anna runs/20260105-101112-7f3a9c 1.0
    """
    run, (value,) = split_run(operands, 1, 1)
    return run, {"value": _rate(value), "rewarm": rewarm}


@_command(
    "[RUN]",
    click.option(
        "--before",
        type=click.IntRange(min=1),
        metavar="STEP",
        help="Use a savepoint from before this step. Default: before the open incident.",
    ),
)
def rollback(operands: tuple[str, ...], before: int | None) -> Order:
    """Restore a savepoint inside the job's process.

    Evidence is collected first. Only a run that was started in mode enforce or approve has
    savepoints.

    \b
    Examples:
      supervise rollback runs/20260105-101112-7f3a9c
      supervise rollback --before 1200
    """
    run, _ = split_run(operands, 0, 0)
    return run, {} if before is None else {"before": before}


@_command()
def savepoint(operands: tuple[str, ...]) -> Order:
    """Take a savepoint, a copy for a later rollback.

    It is taken at the next step boundary and kept in memory.

    \b
    Examples:
      supervise savepoint runs/20260105-101112-7f3a9c
    """
    run, _ = split_run(operands, 0, 0)
    return run, {}


@_command()
def save(operands: tuple[str, ...]) -> Order:
    """Write a checkpoint in the job's own format.

    It is written at the end of the current step, to a separate file, and then verified. Useful if
    the job's newest checkpoint is damaged. Refused until the job has saved a checkpoint itself.

    \b
    Examples:
      supervise save runs/20260105-101112-7f3a9c
    """
    run, _ = split_run(operands, 0, 0)
    return run, {}


@_command(
    "[RUN]",
    click.option(
        "--steps",
        type=click.IntRange(1, MAX_SKIPPED),
        default=1,
        show_default=True,
        help=f"Number of updates; at most {MAX_SKIPPED} in any 128 steps.",
    ),
)
def skip(operands: tuple[str, ...], steps: int) -> Order:
    """Skip the next optimizer updates.

    \b
    Examples:
      supervise skip --steps 3 runs/20260105-101112-7f3a9c
    """
    run, _ = split_run(operands, 0, 0)
    return run, {"steps": steps}


@_command("[RUN] SHARD...")
def quarantine(operands: tuple[str, ...]) -> Order:
    """Exclude data shards from training.

    SHARD is a name as the job reports it, or as the job passes it to
    `supervise_probe.is_quarantined`. The answer says if this run has not reported the name so far.
    `supervise release --shard NAME` includes a shard again.

    \b
    Examples:
      supervise quarantine data/00017.tar data/00018.tar
    """
    run, shards = split_run(operands, 1, None)
    return run, {"shards": shards}


@_command(
    "[RUN]",
    click.option(
        "--shard",
        multiple=True,
        metavar="NAME",
        help="End only the quarantine of this shard, not the hold.",
    ),
)
def release(operands: tuple[str, ...], shard: tuple[str, ...]) -> Order:
    """End a hold: the policy may act again.

    The incident closes. Rules with a baseline learn it again; a fixed limit that is still
    exceeded fires again.

    \b
    Examples:
      supervise release runs/20260105-101112-7f3a9c
      supervise release --shard data/00017.tar
    """
    run, _ = split_run(operands, 0, 0)
    refuse_unknown(run, shard)
    return run, {"shard": list(shard)} if shard else {}


@_command(
    "[RUN]",
    click.option("--requeue", is_flag=True, help="Let the run exit with 75: safe to run again."),
)
def stop(operands: tuple[str, ...], requeue: bool) -> Order:
    """End the job.

    It is interrupted at a step boundary. If it still runs after 30 s, it gets SIGTERM, and after
    another 30 s SIGKILL. `supervise run` exits with 78, or with 75 after --requeue. An action in
    progress is completed first.

    \b
    Examples:
      supervise stop runs/20260105-101112-7f3a9c
    """
    run, _ = split_run(operands, 0, 0)
    return run, {"requeue": True} if requeue else {}


@click.command(name="reload")
@live_run_argument
@click.option(
    "-p", "--policy", metavar="P", help="Policy file or shipped name. Default: the one in use."
)
@click.option("--mode", type=click.Choice(MODES), help="Overrides the policy's mode.")
@click.option("--by", default=None, metavar="NAME", help="Operator's name. Default: your login.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def reload_command(
    run: Path, policy: str | None, mode: str | None, by: str | None, as_json: bool
) -> None:
    """Replace the policy of a live run.

    Reads the run's policy file again, or another one. An invalid policy is refused, and the old one
    stays in force. A valid one replaces the old one at once, except for what is fixed when the job
    starts: savepoints, reactions in the job (`safeguards`), `probe`, `sampling`, `mechanisms` and
    notification channels.

    Unchanged detectors and rules keep their state; changed ones start fresh. Budgets, cooldowns, an
    open incident and a runbook in progress continue.

    A --mode also applies to later reloads, until one of them names a policy: then the mode of that
    file counts. A reload cannot raise the mode to `approve` or `enforce` if the run was started in
    `observe` or `shadow`, nor to `enforce` if it was started in `approve`.

    \b
    Examples:
      supervise reload runs/20260105-101112-7f3a9c
      supervise reload --policy stricter.yaml --by anna 7f3a9c

    Exit codes: 0 reloaded; 64 no supervisor, or no answer within 15 s; 65 refused.
    """
    if policy is not None and is_file(Path(policy)):
        policy = str(Path(policy).absolute())  # the supervisor may run in another directory
    directory, key = post_command(run, "reload", by, {"policy": policy, "mode": mode})
    answers: list[Record] = []

    def answered(records: Iterator[Record]) -> bool:
        received = False
        for record in records:
            decision = record.decision
            if isinstance(decision, ReloadRequested | CommandAnswered):
                received |= decision.args.get("key") == key
            if received and isinstance(decision, PolicyRefused | PolicyReloaded):
                answers.append(record)
        return bool(answers)

    poll_records(directory, 0, answered)
    if not answers:
        raise StoreError(
            f"the supervisor of {run} has not answered within {TIMEOUT_S:.0f} s",
            hint=f"supervise audit show {run}",
        )
    answer = answers[0]
    text = printable(answer.reason)
    if isinstance(answer.decision, PolicyRefused):
        raise InputError(text, hint="fix the policy and reload again; the old one stays in force")
    if as_json:
        echo_json({"run": str(run), "record": answer.seq, "step": answer.step, "text": text})
        return
    echo(f"record {answer.seq}, step {answer.step}: {text}", err=True)
