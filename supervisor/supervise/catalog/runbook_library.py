"""Runbooks: found by name, checked as a whole, turned into an ordered list of actions.

A name is looked up in the policy, then in `runbooks/` beside it and beside its bases, then among
the shipped ones.
`hold` is no runbook: it stops acting until a person decides. As the last step of a runbook it means
the same, with the evidence that the steps before it took.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..core.model.policy import HOLD, Runbook
from . import discover, shipped, yaml_document
from .diagnostics import Place, Problems, did_you_mean
from .schema import BAD, read_section
from .sections import RunbookFile, WrittenRunbook
from .yaml_document import ListNode, MapNode, Node, Scalar

RUNBOOKS = "runbooks"

Ways = Mapping[str, tuple[Place, str]]  # runbook -> where it is named, what leads to it


@dataclass(frozen=True, slots=True)
class Opened:
    """A runbook as it was written: its form, and its nodes for messages."""

    name: str
    form: WrittenRunbook
    node: MapNode

    def place(self, step: int) -> Node:
        """Return the node of a step."""
        steps = self.node.get("steps")
        if isinstance(steps, ListNode) and step < len(steps.items):
            return steps.items[step]
        return self.node.place("verify")

    def follow(self) -> list[tuple[str, str]]:
        """Return `(key, runbook)` of each runbook that may follow it."""
        form = self.form
        instead = [("if_refused", form.if_refused)] if form.if_refused else []
        return [("if_it_fails", form.if_it_fails), *instead]

    def resolved(self) -> Runbook:
        """Return it as the engine takes it."""
        form = self.form
        return Runbook(
            name=self.name,
            steps=form.steps,
            verbs=verbs_of(form),
            meaning=form.meaning,
            impact=form.impact,
            if_it_fails=form.if_it_fails,
            if_refused=form.if_refused or "",
            diagnose=form.diagnose,
            handles=form.handles,
            evidence=form.evidence,
            containment=form.containment,
            probe_replay=form.probe_replay,
            over_when=form.over_when,
            localize=form.localize.lists(),
        )


class RunbookCatalog:
    """All runbooks that a policy can name."""

    def __init__(
        self, inline: Mapping[str, Node], folders: Collection[Path], problems: Problems
    ) -> None:
        self.inline = inline
        self.folders = folders
        self.problems = problems
        self.opened: dict[str, Opened | None] = {}  # None: it exists, and its problems are noted
        if HOLD in inline:
            problems.add(inline[HOLD], "'hold' is reserved: it waits for a person")

    def names(self) -> list[str]:
        """Return every name that `open` would find, and `hold`."""
        own = [path.stem for each in self.folders for path in (each / RUNBOOKS).glob("*.yaml")]
        return sorted({*self.inline, *own, *shipped.names(RUNBOOKS), HOLD})

    def open(self, name: str, named_at: Place, what: str) -> None:
        """Read a runbook and those it falls back to; an unknown name is noted at `named_at`."""
        if name == HOLD or name in self.opened:
            return
        if name in self.inline:
            opened = self._inline(name, self.inline[name])
        else:
            path = self._find(name)
            if path is None:
                hint = did_you_mean(name, self.names())
                self.problems.add(named_at, f"{what}: no runbook {name!r}", hint)
                return
            opened = self._file(name, path)
        self.opened[name] = opened
        if opened is not None:
            for key, after in opened.follow():
                self.open(after, opened.node.place(key), f"runbook {name}.{key}")

    def resolved(self) -> dict[str, Opened]:
        """Return the runbooks that could be read, by name."""
        return {name: opened for name, opened in self.opened.items() if opened is not None}

    def holds(self, name: str) -> bool:
        """Return whether this runbook, opened before, ends in a hold, as `hold` itself does."""
        opened = self.opened.get(name)
        return name == HOLD or (opened is not None and HOLD in verbs_of(opened.form))

    def reach(self, names: Iterable[str]) -> set[str]:
        """Return these runbooks and all that they fall back to."""
        found: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            opened = self.opened.get(name)
            if name not in found and opened is not None:
                found.add(name)
                todo += [after for _, after in opened.follow()]
        return found

    def ways(self, named: Iterable[tuple[str, Place, str]]) -> Ways:
        """Return how each runbook is reached, from `(name, place, what runs it)` on."""
        found: dict[str, tuple[Place, str]] = {}
        todo = [(name, place, f"{user} runs {name}") for name, place, user in named]
        while todo:
            name, place, way = todo.pop(0)
            opened = self.opened.get(name)
            if name not in found and opened is not None:
                found[name] = place, way
                todo += [(n, place, f"{way}, {key}: {n}") for key, n in opened.follow()]
        return found

    def _find(self, name: str) -> Path | None:
        own = (folder / RUNBOOKS / f"{name}.yaml" for folder in self.folders)
        return next(filter(shipped.is_file, own), None) or shipped.find(RUNBOOKS, name)

    def _inline(self, name: str, node: Node) -> Opened | None:
        if isinstance(node, ListNode):  # the short form: nothing but steps
            key = Scalar(node.source, node.line, node.col, "steps", True)
            node = MapNode(node.source, node.line, node.col, {"steps": (key, node)})
        before = self.problems.count
        what = f"runbook {name}"
        form: WrittenRunbook = read_section(WrittenRunbook, node, self.problems, what, lenient=True)
        if form is BAD or not isinstance(node, MapNode):
            return None
        if self.problems.count > before:
            self._broken(name, form, node)
            return None
        return self._checked(name, form, node)

    def _file(self, name: str, path: Path) -> Opened | None:
        root = yaml_document.read(path, shipped.label(path), self.problems)
        return None if root is None else self.file(name, root)

    def file(self, name: str, root: MapNode) -> Opened | None:
        """Read the runbook that a file of this name (without `.yaml`) holds."""
        before = self.problems.count
        form: RunbookFile = read_section(RunbookFile, root, self.problems, "", lenient=True)
        broken = self.problems.count > before
        if form.runbook not in (name, None):
            self.problems.add(
                root.place("runbook"),
                f"runbook {form.runbook!r} is in a file named {name}.yaml",
            )
        if broken:
            self._broken(name, form, root)
            return None
        body = {name: getattr(form, name) for name in WrittenRunbook.__struct_fields__}
        return self._checked(name, WrittenRunbook(**body), root)

    def _broken(self, name: str, form: WrittenRunbook | RunbookFile, node: MapNode) -> None:
        """Open the runbooks that follow one with mistakes."""
        self.opened[name] = None  # it may lead back to itself
        for key, after in (("if_it_fails", form.if_it_fails), ("if_refused", form.if_refused)):
            if after is not None:
                self.open(after, node.place(key), f"runbook {name}.{key}")

    def _checked(self, name: str, form: WrittenRunbook, node: MapNode) -> Opened:
        if form.verify is not None:
            if "verify" in verbs_of(form):
                self.problems.add(node.place("verify"), f"runbook {name} verifies twice")
            form = msgspec.structs.replace(form, steps=(*form.steps, form.verify), verify=None)
        opened = Opened(name, form, node)
        for place, message, hint in flaws(opened):
            self.problems.add(place, f"runbook {name}: {message}", hint)
        return opened


def verbs_of(form: WrittenRunbook) -> tuple[str, ...]:
    """Return the YAML name of each step."""
    return tuple(discover.name_of(step) for step in form.steps)


def flaws(opened: Opened) -> Iterable[tuple[Node, str, str | None]]:
    """Yield `(place, message, hint)` of what makes a runbook dangerous or useless."""
    steps = opened.form.steps
    verbs = verbs_of(opened.form)
    if not steps:
        yield opened.node, "has no steps", None
        return
    for i, step in enumerate(steps):
        before, after = verbs[:i], verbs[i + 1 :]
        if step.destructive and "snapshot" not in before:
            yield opened.place(i), f"{verbs[i]} without evidence", "put snapshot before it"
        if verbs[i] == "pause" and not {"resume", "stop"}.intersection(after):
            yield opened.place(i), "pause without resume", "put resume behind it"
        if verbs[i] == "resume" and "pause" not in before:
            yield opened.place(i), "resume without pause", None
        if verbs[i] == "verify" and after:
            yield opened.place(i), "verify is the last step of a runbook", None
        if verbs[i] == "stop" and set(after) - {"notify"}:
            yield opened.place(i + 1), "nothing can be done after stop", None
        if verbs[i] == HOLD and after:
            yield opened.place(i), "hold is the last step of a runbook", None
    if HOLD in verbs and opened.form.if_it_fails != HOLD:
        at = opened.node.place("if_it_fails")
        yield at, "it holds, whatever fails before that", "leave if_it_fails out"
    if verbs[-1] != "verify" and "stop" not in verbs and any(step.touches_job for step in steps):
        hint = "end with verify, which checks the effect"
        yield opened.place(len(steps) - 1), "touches the job and does not verify", hint
