"""`run --resume-run`: which run the same command line resumes, and whether it may.

When the run in `<directory>` has ended, the next one is in `<directory>.2`, then `.3`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..app.launcher import last_launch
from ..core.model.decisions import plain
from ..core.model.policy import Policy
from ..errors import UsageError
from ..store.files import locked
from ..store.policies import path_of
from ..store.run_directory import RunDir, is_run
from .adopt import how_run_ended


def resume_target(directory: Path) -> tuple[Path, RunDir | None]:
    """Return the run directory, and the run in it to resume; None: start a run there."""
    path, number = directory, 1
    following = directory
    while is_run(following):
        path, number = following, number + 1
        following = directory.with_name(f"{directory.name}.{number}")
    if not is_run(path):
        return path, None
    run = RunDir.open(path)
    # `adopt` refuses a locked log, with the process that holds it.
    ended = not locked(run.audit_path) and (how_run_ended(run) or last_launch(run) is None)
    return (following, None) if ended else (path, run)


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
