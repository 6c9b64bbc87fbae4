"""All policies of a run: the first in `policy.yaml`, reloaded ones by their digest.

    policies/<first 12 digits of the digest>.yaml

A policy is on disk before an event names it, so that replay always finds it. The loader is an
argument.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..core import engine
from ..core.model.decisions import ACTING_MODES, MODES
from ..core.model.events import Notice, OperatorCommand, Reloaded
from ..core.model.policy import Policy
from ..core.policy_reload import policy_differences
from ..core.run_state import State
from ..errors import StoreError, SuperviseError, UsageError
from . import files
from .run_directory import RunDir

_log = logging.getLogger(__name__)
DIRECTORY = "policies"
CANNOT_ACT = "mode {} needs a restart: the probe was started without support for actions"
NO_SAVEPOINTS = "the probe was started without savepoints: the reloaded policy needs a restart"
MAX_PROBLEMS = 3  # listed for a refused policy


class Load(Protocol):
    """As `catalog.load_policy`."""

    def __call__(self, name_or_path: str | Path, *, mode: str | None = None) -> Policy: ...


def reloaded_policy_path(run: RunDir, digest: str) -> Path:
    """Return the path of a reloaded policy with that digest."""
    name = "".join(c if c.isalnum() else "_" for c in digest.rpartition(":")[2][:12])
    return run.path / DIRECTORY / f"{name}.yaml"


def store_policy(run: RunDir, policy: Policy) -> Path:
    """Write a policy's text durably. Raises StoreError."""
    path = reloaded_policy_path(run, policy.digest)
    try:
        files.make_directory(path.parent)
        files.replace_file(path, policy.resolved.encode(), durable=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    return path


def make_policy_finder(run: RunDir, load: Load) -> Callable[[str], Policy]:
    """Return a function from a digest to that policy of the run.

    It raises StoreError if the file is missing, and whatever `load` raises.
    """
    policies: dict[str, Policy] = {}

    def find(digest: str) -> Policy:
        if digest not in policies:
            path = reloaded_policy_path(run, digest)
            if not path.is_file():
                raise StoreError(
                    f"{path} is missing: the run was reloaded with the policy {digest[:19]}",
                    hint="restore it from a copy of the run directory",
                )
            policies[digest] = load(path)
        return policies[digest]

    return find


def reload_target(args: Mapping[str, Any], source: str, mode: str | None) -> tuple[str, str | None]:
    """Return file and mode override of a reload with these args.

    A mode override applies to the file that it was given for, not to another one.

    Args:
        source, mode: of the previous reload, else of the start.
    """
    if args.get("policy"):
        return str(args["policy"]), args.get("mode")
    return source, args.get("mode") or mode


@dataclass
class Reloader:
    """Replaces the policy of a running job completely or not at all.

    Attributes:
        started: the policy at the start of the job; the probe was configured with it.
        source: default file or name of a reload.
        mode: overrides that file's mode, as `--mode` does; None: no override.
    """

    run: RunDir
    started: Policy
    load: Load
    source: str = ""
    mode: str | None = None
    missing: list[str] = field(default_factory=list, init=False)  # already reported

    def reload(
        self, command: OperatorCommand, policy: Policy, state: State
    ) -> tuple[Policy, list[Reloaded | Notice]]:
        """Return the policy in force from now on, and the events of the change.

        Args:
            command: its args may name a `policy` and a `mode`.
            policy, state: in force; neither is changed.
        """
        source, mode = reload_target(command.args, self.source, self.mode)
        event = Reloaded(command.at_ns, command.operator, "", source, "", policy.digest)
        try:
            if (run := state.run()) is not None and run.intent.awaits_outcome("relaunch"):
                # It must use the policy that decided it.
                hint = "repeat the reload once it runs"
                raise UsageError("the job is being relaunched", hint=hint)
            new = self._load(source, mode)
            event = replace(
                event,
                digest=new.digest,
                name=new.name,
                mode=new.mode,
                changes=policy_differences(policy, new, self.started),
            )
            engine.step(
                new, copy.deepcopy(state), event
            )  # fails if the state does not fit the policy
            store_policy(self.run, new)
        except SuperviseError as error:
            return policy, [replace(event, refused=_sentence(error))]
        except Exception as error:  # a bug here must not end the supervision
            _log.exception("a reload failed with an internal error")
            text = f"internal error: {type(error).__name__}: {error}"
            return policy, [replace(event, refused=text)]
        self.source, self.mode = source, mode
        return new, [event, *self._unavailable(new, command.at_ns)]

    def _load(self, source: str, mode: Any) -> Policy:
        if mode is not None and mode not in MODES:
            raise UsageError(f"unknown mode {mode!r}", hint=f"modes are {', '.join(MODES)}")
        new = self.load(source, mode=mode)
        if new.mode in ACTING_MODES and MODES.index(new.mode) > MODES.index(self.started.mode):
            raise UsageError(CANNOT_ACT.format(new.mode), hint="or reload it with --mode shadow")
        return new

    def _unavailable(self, new: Policy, at_ns: int) -> list[Notice]:
        """Report once, before an action relies on it, that rollbacks are not possible."""
        if not new.savepoints or self.started.savepoints or NO_SAVEPOINTS in self.missing:
            return []
        self.missing.append(NO_SAVEPOINTS)
        return [Notice(at_ns, "rollback-unavailable", NO_SAVEPOINTS)]


def _sentence(error: SuperviseError) -> str:
    """Return the error as one line: the first problems of a policy, or cause and hint."""
    problems: tuple[object, ...] = getattr(error, "problems", ())
    if problems:
        more_count = len(problems) - MAX_PROBLEMS
        text = "; ".join(str(problem) for problem in problems[:MAX_PROBLEMS])
        return f"{text}; and {more_count} more" if more_count > 0 else text
    return f"{error} ({error.hint})" if error.hint else str(error)
