"""`run --resume-run`: which run the same command line resumes, and whether it may.

When the run in `<directory>` has ended, the next one is in `<directory>.2`, then `.3`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..app.launcher import UNFIT, last_launch
from ..core.model.decisions import plain
from ..core.model.policy import Policy
from ..errors import LaunchError, UsageError
from ..store.files import locked, read_json
from ..store.policies import path_of
from ..store.run_directory import RunDir, is_run
from ._output import PrintLine
from .adopt import adopt, how_run_ended

LOOK_S = 150.0  # longer than all parts of a look together may take


def resume(
    directory: Path,
    argv: Sequence[str],
    policy: Policy,
    drills: Sequence[Any],
    print_line: PrintLine,
    *,
    quiet: bool = False,
) -> tuple[Path, int | None]:
    """Take over the run in `directory`; return where the next run is started if there is none.

    The second value is the exit code of the run that was taken over, None without one.
    """
    path, run = resume_target(directory, policy, print_line)
    if run is None:
        return path, None
    refuse_different(run, argv, policy, drills, Path.cwd())
    print_line(f"supervise: resuming {run.path}, whose supervisor died")
    return path, adopt(run.path, print_line, quiet=quiet)


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


def _refuse_unfit(path: Path, policy: Policy, print_line: PrintLine) -> None:
    """Look at this host again if the run in `path` could not be started on it once more."""
    try:
        memo = read_json(path / UNFIT)
        if memo["host"] != socket.gethostname():
            return
        from ..actions.stop import HUMAN
        from ..catalog.assembly.failure_catalog import classes
        from ..core.analysis import host_health
        from ..health.gate import HealthGate, of_memo

        start, machine = of_memo(memo)
    except (OSError, LookupError, TypeError, ValueError):  # it ended otherwise
        return
    own = policy.job.get("failures") or ()
    gate = HealthGate(
        lambda: policy.job.get("health"), os.environ, lambda: machine, lambda: classes(own)
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
