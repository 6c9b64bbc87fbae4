"""`supervise reload`: another policy for a run that goes on."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..catalog.inventory.shipped import is_file
from ..core.model.decisions import MODES
from ..errors import InputError, StoreError
from ..inputs import clock, control_inbox
from ..store import audit
from ..store.lock import locked
from ..store.run_directory import RunDir
from .audit import printable

PATIENCE_S = 15.0  # for the supervisor to read a policy between two rounds of its loop
PAUSE_S = 0.3


@click.command(name="reload")
@click.argument("run", type=click.Path(path_type=Path), metavar="RUN")
@click.option("-p", "--policy", metavar="P", help="Another file or shipped name; else the same.")
@click.option("--mode", type=click.Choice(MODES), help="Takes the place of the policy's mode.")
@click.option("--by", default=None, metavar="NAME", help="Who says so; your login by default.")
def command(run: Path, policy: str | None, mode: str | None, by: str | None) -> None:
    """Let a run go on under a changed policy, all of it or nothing.

    Reads the policy file of the run again, or another one. Detectors and rules that are the same
    keep their memory, others start anew. Budgets, cooldowns, an open incident and a runbook in
    progress survive. A policy with a mistake is refused, and the old one stays. A --mode holds in
    later reloads too, until one names a policy: that is taken with the mode of its file.

    What the job was told at its start stays as it was until it is started again: savepoints,
    safeguards, drills, channels of messages. So a run that was started below `enforce`, or
    below `approve`, cannot be reloaded into it. Exit status: 0 reloaded, 65 refused.

    \b
    Examples:
      supervise reload runs/20260105-101112-7f3a9c
      supervise reload --policy stricter.yaml --by anna runs/20260105-101112-7f3a9c
    """
    found = RunDir.open(run)
    if not locked(found.audit_path):
        raise StoreError(f"{run} has no supervisor any more", hint=f"supervise status {run}")
    if policy is not None and is_file(Path(policy)):
        policy = str(Path(policy).absolute())  # the supervisor may have another directory
    at_ns = clock.monotonic_ns()
    key = f"{at_ns}-{os.getpid()}"
    args = {"policy": policy, "mode": mode, "key": key}
    try:
        control_inbox.post(found.path, "reload", by or getpass.getuser(), args, at_ns=at_ns)
    except OSError as error:
        raise StoreError(f"cannot write in {run}: {error.strerror}") from error
    answer = _answer(found, key)
    if answer is None:
        raise StoreError(
            f"the supervisor of {run} has not answered within {PATIENCE_S:.0f} s",
            hint=f"supervise audit show {run}",
        )
    text = printable(str(answer["reason"]))
    if answer["data"]["what"] == "refused":
        raise InputError(text, hint="the policy of before stays in force")
    click.echo(f"record {answer['seq']}, step {answer['step']}: {text}", err=True)


def _answer(run: RunDir, key: str) -> Mapping[str, Any] | None:
    """Return the record of what became of the word `key`, None when none came in time."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        time.sleep(PAUSE_S)
        heard = False
        for record in audit.read(run.audit_path):
            data = record.get("data") or {}
            heard |= data.get("what") == "operator" and data["args"].get("key") == key
            if heard and record["kind"] == "policy_load":
                return record
        if not locked(run.audit_path):
            break
    return None
