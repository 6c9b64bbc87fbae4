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
class OpenedRunbook:
    """A runbook as it was written: its form, and its nodes for messages."""

    name: str
    form: WrittenRunbook
    node: MapNode

    def step_node(self, step: int) -> Node:
        """Return the node of a step."""
        steps = self.node.get("steps")
        if isinstance(steps, ListNode) and step < len(steps.items):
            return steps.items[step]
        return self.node.locate("verify")

    def follow(self) -> list[tuple[str, str]]:
        """Return `(key, runbook)` of each runbook that may follow it."""
        form = self.form
        instead = [("if_refused", form.if_refused)] if form.if_refused else []
        return [("if_it_fails", form.if_it_fails), *instead]

    def to_runbook(self) -> Runbook:
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
        self.opened: dict[
            str, OpenedRunbook | None
        ] = {}  # None: it exists, and its problems are noted
        if HOLD in inline:
            problems.add(inline[HOLD], "'hold' is reserved: it waits for a person")

    def names(self) -> list[str]:
        """Return every name that `load_with_fallbacks` would find, and `hold`."""
        stems = [
            path.stem for folder in self.folders for path in (folder / RUNBOOKS).glob("*.yaml")
        ]
        return sorted({*self.inline, *stems, *shipped.shipped_names(RUNBOOKS), HOLD})

    def load_with_fallbacks(self, name: str, named_at: Place, user: str) -> None:
        """Read a runbook and those it falls back to; an unknown name is noted at `named_at`."""
        if name == HOLD or name in self.opened:
            return
        if name in self.inline:
            opened = self._inline(name, self.inline[name])
        else:
            path = self._find(name)
            if path is None:
                hint = did_you_mean(name, self.names())
                self.problems.add(named_at, f"{user}: no runbook {name!r}", hint)
                return
            opened = self._file(name, path)
        self.opened[name] = opened
        if opened is not None:
            for key, following in opened.follow():
                self.load_with_fallbacks(
                    following, opened.node.locate(key), f"runbook {name}.{key}"
                )

    def resolved(self) -> dict[str, OpenedRunbook]:
        """Return the runbooks that could be read, by name."""
        return {name: opened for name, opened in self.opened.items() if opened is not None}

    def ends_in_hold(self, name: str) -> bool:
        """Return whether this runbook, opened before, ends in a hold, as `hold` itself does."""
        opened = self.opened.get(name)
        return name == HOLD or (opened is not None and HOLD in verbs_of(opened.form))

    def reachable_names(self, names: Iterable[str]) -> set[str]:
        """Return these runbooks and all that they fall back to."""
        reached: set[str] = set()
        todo = list(names)
        while todo:
            name = todo.pop()
            opened = self.opened.get(name)
            if name not in reached and opened is not None:
                reached.add(name)
                todo += [following for _, following in opened.follow()]
        return reached

    def reference_paths(self, named: Iterable[tuple[str, Place, str]]) -> Ways:
        """Return how each runbook is reached, from `(name, place, what runs it)` on."""
        ways: dict[str, tuple[Place, str]] = {}
        todo = [(name, location, f"{user} runs {name}") for name, location, user in named]
        while todo:
            name, location, way = todo.pop(0)
            opened = self.opened.get(name)
            if name not in ways and opened is not None:
                ways[name] = location, way
                todo += [(n, location, f"{way}, {key}: {n}") for key, n in opened.follow()]
        return ways

    def _find(self, name: str) -> Path | None:
        paths = (folder / RUNBOOKS / f"{name}.yaml" for folder in self.folders)
        return next(filter(shipped.is_file, paths), None) or shipped.find_shipped(RUNBOOKS, name)

    def _inline(self, name: str, node: Node) -> OpenedRunbook | None:
        if isinstance(node, ListNode):  # the short form: nothing but steps
            key = Scalar(node.source, node.line, node.col, "steps", True)
            node = MapNode(node.source, node.line, node.col, {"steps": (key, node)})
        count = self.problems.count
        label = f"runbook {name}"
        form: WrittenRunbook = read_section(
            WrittenRunbook, node, self.problems, label, lenient=True
        )
        if form is BAD or not isinstance(node, MapNode):
            return None
        if self.problems.count > count:
            self._broken(name, form, node)
            return None
        return self._checked(name, form, node)

    def _file(self, name: str, path: Path) -> OpenedRunbook | None:
        root = yaml_document.read_mapping(path, shipped.display_path(path), self.problems)
        return None if root is None else self.parse_file(name, root)

    def parse_file(self, name: str, root: MapNode) -> OpenedRunbook | None:
        """Read the runbook that a file of this name (without `.yaml`) holds."""
        count = self.problems.count
        form: RunbookFile = read_section(RunbookFile, root, self.problems, "", lenient=True)
        broken = self.problems.count > count
        if form.runbook not in (name, None):
            self.problems.add(
                root.locate("runbook"), f"runbook {form.runbook!r} is in a file named {name}.yaml"
            )
        if broken:
            self._broken(name, form, root)
            return None
        body = {name: getattr(form, name) for name in WrittenRunbook.__struct_fields__}
        return self._checked(name, WrittenRunbook(**body), root)

    def _broken(self, name: str, form: WrittenRunbook, node: MapNode) -> None:
        """Open the runbooks that follow one with mistakes."""
        self.opened[name] = None  # it may lead back to itself
        for key, following in (("if_it_fails", form.if_it_fails), ("if_refused", form.if_refused)):
            if following is not None:
                self.load_with_fallbacks(following, node.locate(key), f"runbook {name}.{key}")

    def _checked(self, name: str, form: WrittenRunbook, node: MapNode) -> OpenedRunbook:
        if form.verify is not None:
            if "verify" in verbs_of(form):
                self.problems.add(node.locate("verify"), f"runbook {name} verifies twice")
            form = msgspec.structs.replace(form, steps=(*form.steps, form.verify), verify=None)
        opened = OpenedRunbook(name, form, node)
        for step_node, message, hint in find_runbook_flaws(opened):
            self.problems.add(step_node, f"runbook {name}: {message}", hint)
        return opened


def verbs_of(form: WrittenRunbook) -> tuple[str, ...]:
    """Return the YAML name of each step."""
    return tuple(discover.yaml_name_of(step) for step in form.steps)


def find_runbook_flaws(opened: OpenedRunbook) -> Iterable[tuple[Node, str, str | None]]:
    """Yield `(place, message, hint)` of what makes a runbook dangerous or useless."""
    steps = opened.form.steps
    verbs = verbs_of(opened.form)
    if not steps:
        yield opened.node, "has no steps", None
        return
    for i, step in enumerate(steps):
        earlier, later = verbs[:i], verbs[i + 1 :]
        if step.destructive and "snapshot" not in earlier:
            yield opened.step_node(i), f"{verbs[i]} without evidence", "put snapshot before it"
        if verbs[i] == "pause" and not {"resume", "stop"}.intersection(later):
            yield opened.step_node(i), "pause without resume", "put resume behind it"
        if verbs[i] == "resume" and "pause" not in earlier:
            yield opened.step_node(i), "resume without pause", None
        if verbs[i] == "verify" and later:
            yield opened.step_node(i), "verify is the last step of a runbook", None
        if verbs[i] == "stop" and set(later) - {"notify"}:
            yield opened.step_node(i + 1), "nothing can be done after stop", None
        if verbs[i] == HOLD and later:
            yield opened.step_node(i), "hold is the last step of a runbook", None
    if HOLD in verbs and opened.form.if_it_fails != HOLD:
        node = opened.node.locate("if_it_fails")
        yield node, "it holds, whatever fails before that", "leave if_it_fails out"
    if verbs[-1] != "verify" and "stop" not in verbs and any(step.touches_job for step in steps):
        hint = "end with verify, which checks the effect"
        yield opened.step_node(len(steps) - 1), "touches the job and does not verify", hint
