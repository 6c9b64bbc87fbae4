"""Resumption of a run by the same command line, `run --resume-run`.

When the run in `<directory>` has ended, the next one is in `<directory>.2`, then `.3`. It goes on
from the newest verified checkpoint, by `job.relaunch`: a job that begins at step 0 again writes
over the checkpoints of the steps that it has made.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints import registry
from ..checkpoints.service import CheckpointService
from ..checkpoints.tracker import RunPosition
from ..core.model import recipes
from ..core.model.checkpoint_registry import WEIGHTS_ONLY
from ..core.model.decisions import plain
from ..core.model.policy import Policy
from ..errors import LaunchError, UsageError
from ..runtime.launcher import UNFIT, Launch, last_launch
from ..store.files import locked, read_json
from ..store.policies import path_of
from ..store.run_directory import RUNS, RunDir, is_run
from ._output import PrintLine
from .adopt import adopt, how_run_ended

LOOK_S = 150.0  # longer than all parts of a look together may take
VERIFY_S = 600.0  # for all checkpoints that the run before left unverified; project default
POLL_S = 0.05


def resume(
    directory: Path,
    argv: Sequence[str],
    policy: Policy,
    drills: Sequence[Any],
    print_line: PrintLine,
    *,
    quiet: bool = False,
    fresh: bool = False,
) -> tuple[Path, int | None, Launch | None]:
    """Take over the run in `directory`; return where the next run is started if there is none.

    The second value is the exit code of the run that was taken over, None without one; the third
    the launch of the next run from the newest verified checkpoint, None where it begins at step 0.
    """
    path, run = resume_target(directory, policy, print_line)
    if run is None:
        before = None if fresh else run_before(directory, path)
        while before is not None:
            launch = _from_checkpoint(RunDir.own(before), argv, policy, print_line)
            if launch is not None:
                return path, None, launch
            before = run_before(directory, before)
        return path, None, None
    refuse_different(run, argv, policy, drills, Path.cwd())
    print_line(f"supervise: resuming {run.path}, whose supervisor died")
    return path, adopt(run.path, print_line, quiet=quiet), None


def resume_target(
    directory: Path, policy: Policy, print_line: PrintLine
) -> tuple[Path, RunDir | None]:
    """Return the run directory, and the run in it to resume; None: start a run there.

    Raises:
        LaunchError: the last run ended because this host was not fit, and it still is not.
    """
    path, number = directory, 1
    following = directory
    while is_run(following):
        path, number = following, number + 1
        following = directory.with_name(f"{directory.name}.{number}")
    if not is_run(path):
        return path, None
    run = RunDir.own(path)
    # `adopt` refuses a locked log, with the process that holds it.
    ended = not locked(run.audit_path) and (how_run_ended(run) or last_launch(run) is None)
    if not ended:
        return path, run
    _refuse_unfit(path, policy, print_line)
    return following, None


def run_before(directory: Path, path: Path) -> Path | None:
    """Return the run that the one in `path` follows; None for the first one, in `directory`."""
    if path == directory:
        return None
    number = int(path.name.removeprefix(f"{directory.name}.")) - 1
    return directory if number == 1 else directory.with_name(f"{directory.name}.{number}")


def _from_checkpoint(
    run: RunDir, argv: Sequence[str], policy: Policy, print_line: PrintLine
) -> Launch | None:
    """Return the launch from the newest verified checkpoint of a run, None if it saved none.

    Checkpoints that are newer and did not verify are moved aside, as before a relaunch.

    Raises:
        UsageError: it is not known how the job resumes, or none of its checkpoints is verified.
    """
    form, how = policy.job["checkpoints"], policy.job.get("relaunch")
    guard = CheckpointService(form, run.path, Path.cwd(), RunPosition, runs=RUNS)
    try:
        guard.verify_now(VERIFY_S)
        while guard.is_verifying_now:
            time.sleep(POLL_S)
        saved = [e for e in registry.read(run.path)["checkpoints"] if e["state"] in registry.JUDGED]
        saved = [e for e in saved if e["present"] or e["pinned"]]
        if not saved:
            return None
        good = [entry for entry in saved if entry["state"] == registry.VERIFIED]
        if how is None or not good:
            raise _unable(run, saved[-1], argv, verified=bool(good))
        whole = [entry for entry in good if entry["resumable"] != WEIGHTS_ONLY]
        name = str((whole or good)[-1]["id"])
        guard.prepare(name)
        back, entry = guard.restore(name), (whole or good)[-1]
    finally:
        guard.close()
    added = recipes.command(how, str(back["path"]), int(entry["step"]))
    aside = f"; set aside: {', '.join(back['moved'])}" if back["moved"] else ""
    print_line(
        f"supervise: going on from {name} of step {entry['step']} in {back['path']}, with "
        f"{added}{aside}"
    )
    return Launch(
        step=int(entry["step"]),
        path=str(back["path"]),
        probe_batch=back.get("probe_batch"),
        counters=back.get("counters"),
    )


def _unable(
    run: RunDir, newest: Mapping[str, Any], argv: Sequence[str], *, verified: bool
) -> UsageError:
    """Return the refusal to start a job at step 0 beside its checkpoints, and what to type."""
    where = f"{run.path} has saved checkpoints, the newest of step {newest['step']}"
    fresh = "; to start the command as it is: the same with --fresh"
    if verified:
        return UsageError(
            f"{where}, and the policy does not say how the job resumes from one (job.relaunch)",
            hint=f"supervise init -- {shlex.join(argv)}{fresh}",
        )
    return UsageError(
        f"{where}, and none is verified", hint=f"supervise checkpoints --verify {run.path}{fresh}"
    )


def _refuse_unfit(path: Path, policy: Policy, print_line: PrintLine) -> None:
    """Look at this host again if the run in `path` could not be started on it once more."""
    try:
        memo = read_json(path / UNFIT)
        if memo["host"] != socket.gethostname():
            return
        from ..actions.stop import HUMAN
        from ..catalog.loader import failure_classes
        from ..core.analysis import host_health
        from ..runtime.host import HealthGate, of_memo

        start, machine = of_memo(memo)
    except (OSError, LookupError, TypeError, ValueError):  # it ended otherwise
        return
    own = policy.job.get("failures") or ()
    gate = HealthGate(
        lambda: policy.job.get("health"), os.environ, lambda: machine, lambda: failure_classes(own)
    )
    print_line(f"supervise: {path} ended because this host was not fit; it is looked at again")
    why = host_health.refusal(gate.look(start, LOOK_S, alive=False))
    if why:
        raise LaunchError(
            f"this host is still not fit to start the job on: {why}",
            exit_code=HUMAN,
            hint="repair or free what is named, start it on another host, or turn the look off "
            "with `job: {health: none}` in the policy",
        )


def refuse_different(
    run: RunDir, argv: Sequence[str], policy: Policy, drills: Sequence[Any], directory: Path
) -> None:
    """Raise UsageError, with what differs, unless the run was started with all of these."""
    was: Mapping[str, Any] = run.read_json("run.json")
    known = policy.digest == was["policy_digest"] or path_of(run, policy.digest).is_file()
    pairs = {
        "command": (was["argv"], list(argv)),
        "working directory": (was["cwd"], str(directory)),
        "drills": (was["drills"], plain(list(drills))),
    }
    if not known:
        pairs["policy"] = (was["policy"], policy.name)
        pairs["mode"] = (was["mode"], policy.mode)
    other = [f"{name} {old}, not {new}" for name, (old, new) in pairs.items() if old != new]
    if not known and not other:
        other = [f"a different text of policy {policy.name}"]
    if other:
        raise UsageError(
            f"{run.path} is not over, and was started with {'; '.join(other)}",
            hint=f"`supervise adopt {run.path}` resumes it as it was started; then "
            "`supervise reload` takes a changed policy",
        )
