"""Every policy that judged a run: the first one in `policy.yaml`, later ones by their digest.

    policies/<first 12 digits of the digest>.yaml

A policy is on the disk before an event names it, so that replay always finds it. Loading is handed
in: what YAML means is not known here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from ..core import engine
from ..core.handlers.policy_reload import differences
from ..core.model.decisions import ACTING_MODES, MODES
from ..core.model.events import Notice, OperatorCommand, Reloaded
from ..core.model.policy import Policy
from ..core.state.run_state import State
from ..errors import StoreError, SuperviseError, UsageError
from . import files
from .run_directory import RunDir

_log = logging.getLogger(__name__)
DIRECTORY = "policies"
NO_MEANS = "mode {} needs a restart: the probe was started without the means to act"
NO_SAVEPOINTS = "the probe was started without savepoints; the reloaded policy's need a restart"
TOLD_PROBLEMS = 3  # of a policy that is refused


class Load(Protocol):
    """As `catalog.load_policy`."""

    def __call__(self, name_or_path: str | Path, *, mode: str | None = None) -> Policy: ...


def path_of(run: RunDir, digest: str) -> Path:
    """Return where the run keeps the policy of that digest, if it was not the first."""
    name = "".join(c if c.isalnum() else "_" for c in digest.rpartition(":")[2][:12])
    return run.path / DIRECTORY / f"{name}.yaml"


def keep(run: RunDir, policy: Policy) -> Path:
    """Write a policy's text, through a power cut too. Raises StoreError."""
    path = path_of(run, policy.digest)
    try:
        files.make_directory(path.parent)
        files.replace(path, policy.resolved.encode(), durable=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error
    return path


def finder(run: RunDir, load: Load) -> Callable[[str], Policy]:
    """Return a function from a digest to the policy that the run keeps under it.

    It raises StoreError when it is missing, and whatever `load` raises.
    """
    known: dict[str, Policy] = {}

    def find(digest: str) -> Policy:
        if digest not in known:
            path = path_of(run, digest)
            if not path.is_file():
                raise StoreError(
                    f"{path} is missing: the run was reloaded with the policy {digest[:19]}",
                    hint="restore it from a copy of the run directory",
                )
            known[digest] = load(path)
        return known[digest]

    return find


def aim(args: Mapping[str, Any], source: str, mode: str | None) -> tuple[str, str | None]:
    """Return the file, and what stands in for its mode, of a reload with these args.

    A mode was given for the file of then: another file decides by itself.

    Args:
        source, mode: those of the reload before, else of the start.
    """
    if args.get("policy"):
        return str(args["policy"]), args.get("mode")
    return source, args.get("mode") or mode


@dataclass
class Reloader:
    """Loads another policy for a run that goes on; all or nothing.

    Attributes:
        started: the policy that the job was started with; the probe knows no other.
        source: the file, or the name, that a reload reads when it is given none.
        mode: stands in for that file's mode, as `--mode` does; None: the file decides.
    """

    run: RunDir
    started: Policy
    load: Load
    source: str = ""
    mode: str | None = None
    missing: list[str] = field(default_factory=list, init=False)  # what was already told

    def reload(
        self, told: OperatorCommand, policy: Policy, state: State
    ) -> tuple[Policy, list[Reloaded | Notice]]:
        """Return the policy in force from now on, and the events that say so.

        Args:
            told: its args may name a `policy` and a `mode`.
            policy, state: in force; neither is changed.
        """
        source, mode = aim(told.args, self.source, self.mode)
        event = Reloaded(told.at_ns, told.operator, "", source, "", policy.digest)
        try:
            _refuse_while_relaunching(state)
            new = self._load(source, mode)
            event = replace(
                event,
                digest=new.digest,
                name=new.name,
                mode=new.mode,
                changes=differences(policy, new, self.started),
            )
            engine.step(new, state.copy(), event)  # what does not bear it is refused as well
            keep(self.run, new)
        except SuperviseError as error:
            return policy, [replace(event, refused=_sentence(error))]
        except Exception as error:  # a bug here must not end the watching
            _log.exception("a reload failed with an internal error")
            text = f"internal error: {type(error).__name__}: {error}"
            return policy, [replace(event, refused=text)]
        self.source, self.mode = source, mode
        return new, [event, *self._unable(new, told.at_ns)]

    def _load(self, source: str, mode: Any) -> Policy:
        if mode is not None and mode not in MODES:
            raise UsageError(f"no mode {mode!r}", hint=f"modes are {', '.join(MODES)}")
        new = self.load(source, mode=mode)
        if new.mode in ACTING_MODES and MODES.index(new.mode) > MODES.index(self.started.mode):
            raise UsageError(NO_MEANS.format(new.mode), hint="or reload it with --mode shadow")
        return new

    def _unable(self, new: Policy, at_ns: int) -> list[Notice]:
        """Say once, before any action relies on it, that there is nothing to go back to."""
        if not new.savepoints or self.started.savepoints or NO_SAVEPOINTS in self.missing:
            return []
        self.missing.append(NO_SAVEPOINTS)
        return [Notice(at_ns, "rollback-unavailable", NO_SAVEPOINTS)]


def _refuse_while_relaunching(state: State) -> None:
    """How the job is started again must be as it was when that was decided. Raises UsageError."""
    run = state.run()
    if run is not None and run.intent.awaits("relaunch"):
        raise UsageError("the job is just being started again", hint="reload it once it runs")


def _sentence(error: SuperviseError) -> str:
    """Return the error as one line: the first problems of a policy, or the cause and the hint."""
    problems: tuple[object, ...] = getattr(error, "problems", ())
    if problems:
        more = len(problems) - TOLD_PROBLEMS
        text = "; ".join(str(problem) for problem in problems[:TOLD_PROBLEMS])
        return f"{text}; and {more} more" if more > 0 else text
    return f"{error} ({error.hint})" if error.hint else str(error)
