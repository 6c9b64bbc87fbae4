"""The shared format of a fence: a command that all ranks carry out at one step, or none of them.

A rank that is told of a fence promises not to pass the boundary of its step without a verdict. The
verdict is one file, made by `link(2)`: it is written once, whoever links first has decided, and it
outlives the supervisor. Where all ranks have promised, the supervisor links "commit"; a rank that
has waited in vain links "abort" and goes on, so a supervisor that died blocks nobody.

Source: the promise and the write-once verdict are those of two-phase commit with a timeout; a bare
"apply at step S if all have acknowledged" left ranks apart in 2 of 40 commands whose coordinator
died in between.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple, Optional

from ..runtime import files

CHANGE_TRAINING = (
    "lr_scale",
    "hold_rate",
    "rollback",
    "skip_step",
    "savepoint",
    "clip",
    "update_clip",
    "loss_scale",
)
FENCED = (
    *CHANGE_TRAINING,
    "pause",
    "quarantine_now",
)  # verbs that one of several ranks must not carry out alone
COMMIT, ABORT = "commit", "abort"
PREFIX = "fence-"  # of the file of a verdict


class Verdict(NamedTuple):
    """What was decided.

    Attributes:
        decision: `COMMIT` or `ABORT`. why: of an abort, with the rank. step: of the fence.
        args: of the command, beside those that the ranks were told before.
    """

    decision: str
    why: str
    step: int
    args: dict[str, Any]


def verdict_path(directory: str, fence: str) -> str:
    """Return where the verdict of a fence is."""
    return os.path.join(directory, PREFIX + fence)


def read_verdict(path: str) -> Optional[Verdict]:
    """Return the verdict, None before there is one. Raises OSError, ValueError, KeyError."""
    try:
        document = json.loads(files.read_file(path))
    except FileNotFoundError:
        return None
    return Verdict(document["decision"], document["why"], document["step"], document["args"])


def decide_fence(
    path: str, decision: str, why: str, step: int, args: Optional[dict[str, Any]] = None
) -> Verdict:
    """Decide, unless somebody has; return what stands.

    Raises:
        OSError: nobody can decide here.
        ValueError, KeyError: what is there is no verdict.
    """
    folder, name = os.path.split(path)
    fresh = os.path.join(folder, f".{name}.{files.random_token()}")
    document = {"decision": decision, "why": why, "step": step, "args": args or {}}
    try:
        with os.fdopen(files.create_file(fresh), "wb") as file:
            file.write(json.dumps(document).encode())
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        try:
            os.unlink(fresh)
        except OSError:
            pass
    stands = read_verdict(path)
    assert stands is not None  # it is never removed while the run lives
    return stands
