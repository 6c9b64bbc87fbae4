"""`supervise reload`: replace the policy of a live run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from ..catalog.shipped import is_file
from ..core.model.decisions import MODES
from ..errors import InputError, StoreError
from ._output import printable
from ._runs import live_run_argument
from ._send_command import TIMEOUT_S, Record, poll, post


@click.command(name="reload")
@live_run_argument
@click.option("-p", "--policy", metavar="P", help="Policy file or shipped name. Default: the same.")
@click.option("--mode", type=click.Choice(MODES), help="Overrides the policy's mode.")
@click.option("--by", default=None, metavar="NAME", help="Operator's name. Default: your login.")
def command(run: Path, policy: str | None, mode: str | None, by: str | None) -> None:
    """Replace the policy of a live run.

    The new policy applies completely or not at all. Reads the run's policy file again, or another
    one. Unchanged detectors and rules keep their state; changed ones start fresh. Budgets,
    cooldowns, an open incident and a runbook in progress continue. An invalid policy is refused and
    the old one stays in force. A --mode also applies to later reloads, until one of them names a
    policy: then the mode of that file counts.

    Savepoints, safeguards, drills and notification channels are fixed when the job starts. So
    a run started below `enforce` (or `approve`) cannot be reloaded into it.

    \b
    Examples:
      supervise reload runs/20260105-101112-7f3a9c
      supervise reload --policy stricter.yaml --by anna runs/20260105-101112-7f3a9c

    Exit codes: 0 reloaded; 64 no supervisor, or no answer within 15 s; 65 refused.
    """
    if policy is not None and is_file(Path(policy)):
        policy = str(Path(policy).absolute())  # the supervisor may run in another directory
    found, key = post(run, "reload", by, {"policy": policy, "mode": mode})
    answers: list[Record] = []

    def answered(records: Iterator[Record]) -> bool:
        received = False
        for record in records:
            data = record.get("data") or {}
            received |= data.get("what") == "operator" and data["args"].get("key") == key
            if received and record["kind"] == "policy_load":
                answers.append(record)
        return bool(answers)

    poll(found, 0, answered)
    if not answers:
        raise StoreError(
            f"the supervisor of {run} has not answered within {TIMEOUT_S:.0f} s",
            hint=f"supervise audit show {run}",
        )
    answer = answers[0]
    text = printable(str(answer["reason"]))
    if answer["data"]["what"] == "refused":
        raise InputError(text, hint="fix the policy and reload again; the old one stays in force")
    click.echo(f"record {answer['seq']}, step {answer['step']}: {text}", err=True)
