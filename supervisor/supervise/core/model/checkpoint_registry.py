"""State of the job's checkpoints, and those to which a rollback may go.

The guard (`checkpoints`) finds and verifies; here is only what a decision needs. A
checkpoint is good when it was verified and saved before the trouble: one that was saved at or after
the first breach of an incident, or in an attempt that did not help, is suspect for good. One of an
attempt that has not yet shown that it helps is on trial until its incident ends. Suspect is also
what a launch saves that began anew instead of going on from its checkpoint, until a person takes
that launch as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf

from .payload import CheckpointState

WRONG_START = "saved by a launch that did not go on from its checkpoint"
FULL, WEIGHTS_ONLY, UNKNOWN = "full", "weights only", "unknown"
NEVER = (inf, inf)
PARTIAL = (".partial", ".tmp", ".temp", ".incomplete", ".part", ".writing")
KEPT = 64  # newest ones that decisions look at; far more than any guard pins


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint of the job.

    Attributes:
        id: the guard's name for it, `ckpt-7`; unique in the run; "" before it has one.
        step: 0-based, the last optimizer step that is in it; -1 where nobody knows.
        ok: verified. False: it was found to be bad, or is gone.
        suspect: why it must not be gone back to although it verifies, else "".
        bytes: of all its files, 0 where nobody told.
        trial: the incident that must recover before it may be gone back to, else "".
        resumable: what the verifier found in it: `FULL`, `WEIGHTS_ONLY`, or `UNKNOWN`.
        damage: what is wrong with its files, "" for nothing.
        save: of those whose step nobody knows, the number of the first one of the same save.
    """

    id: str
    step: int
    attempt: int
    path: str
    ok: bool
    suspect: str = ""
    bytes: int = 0
    trial: str = ""
    resumable: str = UNKNOWN
    damage: str = ""
    save: int = 0

    @property
    def age(self) -> tuple[int, ...]:
        """What orders them, see `order_by_age`."""
        number = checkpoint_number(self.id)
        return order_by_age(self.attempt, self.step, self.save, number, bool(self.damage))


class Checkpoints:
    """All checkpoints of the run, folded from the guard's notices, and saves without a verdict."""

    __slots__ = ("_known", "_saves", "_wrong_starts")

    def __init__(self) -> None:
        self._known: dict[str, Checkpoint] = {}
        self._saves: list[Checkpoint] = []
        # Of each: first attempt, first of the next launch, attempt and step when a person took it.
        self._wrong_starts: list[tuple[int, float, tuple[float, float]]] = []

    def add_noticed(self, state: CheckpointState, suspect: str = "", trial: str = "") -> Checkpoint:
        """Take a notice of kind `checkpoint`.

        Args:
            suspect, trial: of a checkpoint that is new to us, see `Checkpoint`.
        """
        previous = self._known.get(state.id)
        checkpoint = Checkpoint(
            state.id,
            state.step,
            state.attempt,
            state.path,
            state.ok,
            previous.suspect if previous is not None else suspect,
            state.bytes or 0,
            previous.trial if previous is not None else trial,
            state.resumable,
            state.damage,
            state.save,
        )
        if previous is None and self._is_wrong_start(checkpoint):
            checkpoint = replace(checkpoint, suspect=suspect or WRONG_START, trial="")
        self._known[checkpoint.id] = checkpoint
        while len(self._known) > KEPT:
            del self._known[next(iter(self._known))]
        return checkpoint

    def record_save(
        self, path: str, attempt: int, step: int, suspect: str = "", trial: str = ""
    ) -> None:
        """The job reported a save; whether it is good is not known yet."""
        self._saves = [save for save in self._saves if save.path != path]  # was written over
        if not suspect:
            save = Checkpoint("", step, attempt, path, ok=False, trial=trial)
            self._saves = [*self._saves[1 - KEPT :], save]

    def drop_saves(self, attempt: int, step: int) -> None:
        """What was saved then will never have a verdict."""
        then = attempt, step
        self._saves = [save for save in self._saves if (save.attempt, save.step) != then]

    def unverified(self, before_step: float) -> Checkpoint | None:
        """Return the newest reported save from before a step that has no verdict yet.

        Of one that is renamed behind its report the path is not known.
        """
        judged = {(c.attempt, c.step) for c in self._known.values()}
        saves = (s for s in self._saves if 0 <= s.step < before_step and not s.trial)
        saves = (s for s in saves if not is_temporary(s.path))
        return max(
            (s for s in saves if (s.attempt, s.step) not in judged and not self._is_wrong_start(s)),
            key=lambda save: (save.step, save.attempt),
            default=None,
        )

    def _is_wrong_start(self, saved: Checkpoint) -> bool:
        at = saved.attempt, saved.step
        return any(f <= at[0] < end and at <= upto for f, end, upto in self._wrong_starts)

    def mark_suspect(self, attempt: int, from_step: int, reason: str) -> list[str]:
        """Make every checkpoint of `attempt` that was saved at or after `from_step` suspect."""

        def is_hit(saved: Checkpoint) -> bool:
            return saved.attempt == attempt and not 0 <= saved.step < from_step

        self._saves = [save for save in self._saves if not is_hit(save)]
        hit = [name for name, c in self._known.items() if is_hit(c) and not c.suspect]
        for name in hit:
            self._known[name] = replace(self._known[name], suspect=reason, trial="")
        return hit

    def suspect_saves_since(self, launch: int) -> None:
        """The newest launch, of this attempt, did not go on from its checkpoint."""
        self._wrong_starts.append((launch, inf, NEVER))
        for name, checkpoint in self._known.items():
            if checkpoint.attempt >= launch and not checkpoint.suspect:
                self._known[name] = replace(checkpoint, suspect=WRONG_START, trial="")

    @property
    def wrong_checkpoint(self) -> bool:
        """Whether the newest launch did not go on from its checkpoint, and nobody accepted that."""
        return any(end == inf and upto == NEVER for _, end, upto in self._wrong_starts)

    def limit_wrong_starts(self, attempt: int) -> None:
        """Another launch began."""
        self._wrong_starts = [
            (first_attempt, min(end, attempt), upto)
            for first_attempt, end, upto in self._wrong_starts
        ]

    def accept_launch(self, attempt: int, step: int) -> None:
        """A person takes the newest launch as it is: what it saves from here on is good again."""
        self._wrong_starts = [
            (
                first_attempt,
                end,
                min(upto, (max(first_attempt, attempt), step)) if end == inf else upto,
            )
            for first_attempt, end, upto in self._wrong_starts
        ]

    def settle_trials(self, incident: str, recovered_attempt: int | None) -> None:
        """An incident ended: of what was on trial for it, only the attempt that recovered is good.

        Args:
            recovered_attempt: that attempt; None: it did not recover.
        """
        for name, checkpoint in self._known.items():
            if checkpoint.trial == incident:
                reason = (
                    ""
                    if checkpoint.attempt == recovered_attempt
                    else f"saved before {incident} had recovered"
                )
                self._known[name] = replace(checkpoint, suspect=reason, trial="")
        self._saves = [
            replace(save, trial="") if save.trial == incident else save
            for save in self._saves
            if save.trial != incident or save.attempt == recovered_attempt
        ]

    def good(self) -> tuple[Checkpoint, ...]:
        """Return those that may be gone back to, oldest step first."""
        sound = (c for c in self._known.values() if c.ok and not c.suspect and not c.trial)
        return tuple(sorted((c for c in sound if c.step >= 0), key=lambda c: (c.step, c.attempt)))

    def newest(self) -> Checkpoint | None:
        """Return the one of the newest save, see `order_by_age`; None if none was verified."""
        return max(self._known.values(), key=lambda checkpoint: checkpoint.age, default=None)

    def suspects(self) -> frozenset[str]:
        """Return the ids of those that must not be gone back to although they may verify."""
        return frozenset(name for name, checkpoint in self._known.items() if checkpoint.suspect)

    def on_trial(self) -> frozenset[str]:
        """Return the ids of those that may still turn out to be good, or suspect."""
        return frozenset(name for name, checkpoint in self._known.items() if checkpoint.trial)


def checkpoint_number(name: str) -> int:
    """Return the number in the id of a checkpoint: the guard counts them as it finds them."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0


def order_by_age(attempt: int, step: int, save: int, number: int, damaged: bool) -> tuple[int, ...]:
    """Return the key that orders checkpoints by their saves; of one save the damaged one is last.

    Verdicts may come in another order: the newest is verified first.
    """
    return attempt, step, 0 if step >= 0 else save or number, damaged, number


def is_partial(name: str) -> bool:
    """Return whether this file name marks an incomplete file."""
    return name.endswith(PARTIAL) or name.startswith(("tmp-", ".tmp"))


def is_temporary(path: str) -> bool:
    """Return whether a saved file, or its directory, is to be renamed."""
    return any(is_partial(name) for name in path.rstrip("/").split("/")[-2:])


def choose_checkpoint(good: Iterable[Checkpoint], step: float) -> Checkpoint | None:
    """Return the newest good checkpoint whose step is below `step`, or None.

    One with weights only is returned if there is no other.
    """
    return max(
        (c for c in good if c.step < step),
        key=lambda c: (c.resumable != WEIGHTS_ONLY, c.step, c.attempt),
        default=None,
    )
