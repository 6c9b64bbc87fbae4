"""Classification of a failure: its meaning for the run, and the use of another start.

The classes come from `policies/failures/classes.yaml`, and before them those of the policy
(`job.failures`). The first class that matches counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..model.failure import ALWAYS, LOG, Failure

SEARCHED_CHARS = 4000  # of a message; a pattern must not meet megabytes


@dataclass(frozen=True)
class FailureClass:
    """One class of failures.

    Attributes:
        id: its name, kebab-case. title: what happened, a few words. then: what people can do.
        relaunch: `always` (infrastructure: the next start may pass), `once` (the same size would
            fail again), `never` (a mistake: every start would end the same way).
        match: regular expressions; one that is found in "type: message" is enough.
        kinds: the only kinds of failures that it may be; empty: any.
        types, signals, codes: names of exceptions, names of signals, and exit codes that are of
            this class by themselves.
        logs: regular expressions for lines of log files, which hold more than errors.
        secondary: it follows from the end of another process.
    """

    id: str
    title: str
    match: Sequence[str] = ()
    kinds: Sequence[str] = ()
    types: Sequence[str] = ()
    signals: Sequence[str] = ()
    logs: Sequence[str] = ()
    codes: Sequence[int] = ()
    relaunch: str = ALWAYS
    then: str = ""
    secondary: bool = False

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """All of `match` in one."""
        return re.compile("|".join(f"(?:{each})" for each in self.match)) if self.match else None

    def matches(self, failure: Failure) -> bool:
        """Return whether a failure is of this class."""
        if failure.kind == LOG:
            return any(re.search(text, failure.message) for text in self.logs)
        if self.kinds and failure.kind not in self.kinds:
            return False
        if failure.type in self.types or failure.type in self.signals:
            return True
        if failure.returncode is not None and failure.returncode in self.codes:
            return True
        text = f"{failure.type}: {failure.message[:SEARCHED_CHARS]}"
        return self.pattern is not None and self.pattern.search(text) is not None


def classify(failure: Failure, classes: Iterable[FailureClass]) -> Failure:
    """Return the failure with what its class says; as it is where none matches."""
    found = next((each for each in classes if each.matches(failure)), None)
    if found is None:
        return failure
    return replace(
        failure,
        cls=found.id,
        title=found.title,
        then=found.then,
        relaunch=found.relaunch,
        secondary=failure.secondary or found.secondary,
    )
