"""Savepoints on disk for another process of the same script, and going on from one.

For jobs that cannot resume by themselves: the job is started again as ever, its first step is
thrown away, and at the end of it the probe puts everything to where the savepoint left it. What
would not be exact is refused with the reason, and then the job goes on from its own start, which is
for the supervisor to judge: the notice `resume-refused` tells it.
"""

from __future__ import annotations

import hashlib
import os
import sys
from time import monotonic
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from .learning_rate import Ramp
from .saves import about, inode_of

if TYPE_CHECKING:
    from .probe import Probe
    from .rollbacks import Rollbacks

PREFIX, SUFFIX, NEW, HASH = "savepoint-", ".pt", ".new", ".sha256"
CHUNK = 1 << 20  # bytes hashed at a time


class Handover:
    """What one rank leaves to the next process, and takes over from the one before.

    Attributes:
        waiting: this process has not taken over yet.
        why_not: why no savepoint is written, "" while they are.
    """

    def __init__(self, probe: Probe, rollbacks: Rollbacks) -> None:
        self._probe = probe
        self._rollbacks = rollbacks
        self._written: List[Tuple[int, str, float]] = []
        self._failed: List[str] = []
        self._document: Optional[Dict[str, Any]] = None
        self.why_not = ""
        self._wanted: Dict[str, Any] = (probe.config.savepoints or {}).get("portable") or {}
        self._next = 0
        resume = probe.config.resume or {}
        self.waiting = resume.get("how") == "savepoint"
        self._path = str(resume.get("path"))
        probe.publisher.discarding = self.waiting

    # ── for the next process ──────────────────────────────────────────────────────────────────

    def took(self, savepoints: Any) -> None:
        """A savepoint was just taken: write it for another process, if it is time."""
        probe, wanted = self._probe, self._wanted
        step = probe.boundary.number - 1
        if not wanted or self.why_not or step < self._next:
            return
        from .savepoints import CannotRestore

        try:
            saved, document = savepoints.document()
        except CannotRestore as problem:
            self.why_not = str(problem)
            said = f"no savepoint is written for another process: {problem}"
            probe.notice("portable-unavailable", said)
            return
        self._next = (step // int(wanted["every"]) + 1) * int(wanted["every"])
        document["round"] = probe.boundary.round
        path = os.path.join(wanted["directory"], f"{PREFIX}{step:09d}{SUFFIX}")
        self._rollbacks.background.do(self._write, saved, document, path)

    def _write(self, saved: Any, document: Dict[str, Any], path: str) -> None:
        began = monotonic()
        try:
            saved.copies.wait()
            write(self._probe.torch.save, document, path)
            keep_newest(os.path.dirname(path), int(self._wanted["keep"]))
            self._written.append((saved.step, path, monotonic() - began))
        except Exception as error:
            self._failed.append(f"the savepoint of step {saved.step} could not be written: {error}")
        finally:
            saved.pinned = False

    def report(self) -> None:
        """Tell what was written, and what could not be."""
        probe = self._probe
        while self._written:
            step, path, seconds = self._written.pop(0)
            data = {"path": path, "step": step, "inode": inode_of(path, path)}
            data.update(about(probe, seconds, "savepoint"))
            probe.notice(
                "checkpoint-saved", f"the savepoint of step {step} was written", data, step + 1
            )
        while self._failed:
            probe.notice("note", self._failed.pop(0))

    # ── from the process before ───────────────────────────────────────────────────────────────

    def ends(self, members: List[int]) -> bool:
        """Whether these optimizers make up the step that is to be thrown away."""
        if not self.waiting:
            return False
        if self._document is None:
            try:
                self._document = read(self._probe.torch.load, self._path)
                self._document["round"] += 0
            except Exception as error:
                self._refuse(f"{self._path} cannot be read: {error}", made=0)
                return False
        return len(members) >= int(self._document["round"])

    @property
    def wants_a_word(self) -> bool:
        """Whether there is something to do at this boundary."""
        return self.waiting or bool(self._written) or bool(self._failed)

    def speak(self) -> None:
        """Do it."""
        if self.waiting:
            self._take_over()
        self.report()

    def _take_over(self) -> None:
        """Go on behind the step of the savepoint; the step just made never was."""
        from .savepoints import CannotRestore, Savepoints

        probe = self._probe
        assert self._document is not None
        savepoints = Savepoints(probe.torch, probe.registry, 1, sys.maxsize)
        try:
            if probe.world_size > 1:
                raise CannotRestore(f"one of {probe.world_size} ranks cannot go back alone")
            result, (state, returned) = savepoints.begin_from(self._document)
        except CannotRestore as problem:
            self._refuse(str(problem), made=1)
            return
        self._end()
        for collector in probe.collectors.values():
            collector.rewind(state)
        self._rollbacks.went_to(result["step"], probe.config.attempt, returned)
        rewarm = probe.config.rewarm
        if rewarm:
            probe.rate.warming = Ramp(float(rewarm["start"]), int(rewarm["steps"]))
        lost = result["not_restored"]
        said = f"; not restored: {', '.join(lost)}" if lost else ""
        probe.notice("resumed", f"training goes on behind step {result['step']}{said}", result)

    def _refuse(self, reason: str, made: int) -> None:
        """Tell that the job begins anew; `made` steps are behind it."""
        self._end()
        self._probe.boundary.number = made
        self._rollbacks.tape.expect_nothing()
        self._probe.notice(
            "resume-refused",
            f"the job begins anew, the savepoint cannot be gone on from: {reason}",
            {"path": self._path, "reason": reason},
        )

    def _end(self) -> None:
        self.waiting, self._document = False, None
        self._probe.publisher.discarding = False


def write(save: Callable[..., Any], document: Dict[str, Any], path: str) -> None:
    """Write a file that is whole or not there, and its hash beside it.

    Raises:
        OSError, RuntimeError: the disk does not take it; what was there before is still there.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        save(document, path + NEW)
        found = _hash(path + NEW)
        with open(path + HASH + NEW, "w", encoding="ascii") as file:
            file.write(f"{found}  {os.path.basename(path)}\n")
        for name in (path + HASH, path):
            descriptor = os.open(name + NEW, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(name + NEW, name)
    except BaseException:
        for name in (path + HASH + NEW, path + NEW):
            if os.path.exists(name):
                os.unlink(name)
        raise


def keep_newest(directory: str, keep: int) -> None:
    """Remove all savepoints of a directory but the `keep` of the highest steps; half ones too."""
    names = [name for name in os.listdir(directory) if name.startswith(PREFIX)]
    whole = sorted(name for name in names if name.endswith(SUFFIX))
    stay = {kept + end for kept in whole[-max(1, keep) :] for end in ("", HASH)}
    for name in names:
        if name not in stay:
            os.unlink(os.path.join(directory, name))


def read(load: Callable[..., Any], path: str) -> Dict[str, Any]:
    """Return the document in a file.

    Raises:
        OSError, ValueError: it cannot be read, or is not what was written.
    """
    if os.path.exists(path + HASH):
        with open(path + HASH, encoding="ascii") as file:
            told = file.read().split()
        if not told or told[0] != _hash(path):
            raise ValueError("its hash is another than the one beside it")
    document = load(path, map_location="cpu", weights_only=True)
    if not isinstance(document, dict) or "what" not in document:
        raise ValueError("it is no savepoint")
    return document


def _hash(path: str) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while True:
            piece = file.read(CHUNK)
            if not piece:
                return found.hexdigest()
            found.update(piece)
