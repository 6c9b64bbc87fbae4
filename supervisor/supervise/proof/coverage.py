"""What scenarios prove, and what nobody has tried: rules, moves of the machine, budgets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..catalog.subject import Subject
from ..core import machine
from .played import Played

PEOPLE = ("ask", "given_up")  # moves that wait for a person, or come of an order


@dataclass(slots=True)
class Coverage:
    """Counts over any number of files.

    Attributes:
        rules: id -> [scenarios in which it fires, scenarios in which it could and does not].
        where: id -> file:line:col. moves: pair of state and event -> scenarios.
        budgets: class -> scenarios in which it held an action back.
    """

    rules: dict[str, list[int]] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    moves: dict[tuple[str, str], int] = field(default_factory=dict)
    budgets: dict[str, int] = field(default_factory=dict)

    def add(self, subject: Subject, played: Iterable[Played]) -> None:
        """Count what the scenarios of a file came to; a pack alone has no moves and no budgets."""
        policy, stories = subject.policy, list(played)
        whole = not subject.names.scope
        for rule in policy.rules:
            counts = self.rules.setdefault(rule.id, [0, 0])
            self.where[rule.id] = rule.where
            for story in stories:
                fired = bool(story.changes(rule.id, "fired"))
                counts[0] += fired
                counts[1] += not fired and rule.id in story.active
        if not whole:
            return
        for pair in pairs(policy.machine or machine.DEFAULT):
            seen = sum(pair in story.visited for story in stories)
            self.moves[pair] = self.moves.get(pair, 0) + seen
        for name in policy.budgets:
            hit = sum(bool(story.suppressed(f"budget:{name}")) for story in stories)
            self.budgets[name] = self.budgets.get(name, 0) + hit

    def missing(self) -> Iterator[str]:
        """Say what no scenario shows, a sentence each."""
        for rule, (fired, quiet) in self.rules.items():
            if not fired:
                yield f"{self.where[rule]}: {rule} never fires"
            if not quiet:
                yield f"{self.where[rule]}: {rule} has its metrics nowhere without firing"
        for (state, event), seen in self.moves.items():
            if not seen:
                yield f"machine: {event!r} never comes in {state}"
        for name, hit in self.budgets.items():
            if not hit:
                yield f"budget {name} is never used up"

    def parts(self) -> dict[str, tuple[int, int]]:
        """Return, for each sort of thing, how many of how many are shown."""
        fired = sum(bool(counts[0]) for counts in self.rules.values())
        quiet = sum(bool(counts[1]) for counts in self.rules.values())
        found = {
            "rules fire": (fired, len(self.rules)),
            "rules stay quiet": (quiet, len(self.rules)),
            "moves": (sum(map(bool, self.moves.values())), len(self.moves)),
            "budgets": (sum(map(bool, self.budgets.values())), len(self.budgets)),
        }
        return {name: counts for name, counts in found.items() if counts[1]}

    def percent(self) -> float:
        """Return the share of everything that is shown, 0 to 100."""
        shown = sum(part[0] for part in self.parts().values())
        total = sum(part[1] for part in self.parts().values())
        return 100.0 * shown / total if total else 100.0


def pairs(table: machine.Table) -> list[tuple[str, str]]:
    """Return every pair of state and event that has a move, and needs no person to be made.

    A run that has ended makes none.
    """
    return [
        (state, event)
        for state in machine.STATES
        for event in machine.EVENTS
        if event not in PEOPLE
        and state != machine.HALTED
        and machine.move(table, state, event) is not None
    ]
