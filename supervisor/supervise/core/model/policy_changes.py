"""Differences between two policies, as a reload records them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class PartChanges(Struct, frozen=True, omit_defaults=True):
    """Names of one part of a policy."""

    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    changed: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


NO_CHANGES = PartChanges()


class PolicyChanges(Struct, frozen=True, omit_defaults=True):
    """All differences between two policies.

    Attributes:
        mode: before and after, () where it is the same. settings: names of other keys.
        restart: keys that the job was told at its start, and hears of at the next one only.
    """

    detectors: PartChanges = NO_CHANGES
    rules: PartChanges = NO_CHANGES
    runbooks: PartChanges = NO_CHANGES
    budgets: PartChanges = NO_CHANGES
    mode: Sequence[str] = ()
    settings: Sequence[str] = ()
    restart: Sequence[str] = ()

    def __bool__(self) -> bool:
        return self != PolicyChanges()
