"""References between sections: escalation levels, runbooks, placeholders, phases, metrics.

They are read from the nodes, so that a mistake next to a name does not hide the name. Rules,
detectors, packs and actions are looked up where they are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from collections.abc import Mapping as AbstractMapping

from supervise_probe import wire

from ...core.model import state_machine
from ...core.model.interfaces import Detector
from ...core.model.policy import HOLD
from ..document.diagnostics import Problems, did_you_mean
from ..document.nodes import Mapping, Node, Scalar, Sequence, inside
from ..forms.file_forms import PolicyFile
from ..forms.job_form import PLACEHOLDERS
from ..forms.runbook_form import RUNBOOK
from .pack import Entry
from .runbook_library import RunbookCatalog, verbs_of

# `{word}` alone: `${word}`, `{{word}}` and braces around anything else are the job's own.
_PLACEHOLDER = re.compile(r"(?<![{$])\{([A-Za-z_][A-Za-z0-9_]*)\}(?!\})")


def levels(root: Mapping) -> list[tuple[str, Node]]:
    """Return the names in `escalate.ladder` that can be names of runbooks, and their nodes."""
    listed = _get(root, "escalate", "ladder")
    items = listed.items if isinstance(listed, Sequence) else []
    return [(name, item) for item in items if (name := _runbook(item))]


def on_crash(root: Mapping) -> tuple[str, Node] | None:
    """Return what `job.on_crash` names, if that can be the name of a runbook."""
    node = _get(root, "job", "on_crash")
    name = _runbook(node)
    return (name, node) if name and node is not None else None


def ladder(root: Mapping, library: RunbookCatalog, problems: Problems) -> None:
    """Escalation levels exist, none twice; `hold` is the last one."""
    found = levels(root)
    seen: set[str] = set()
    for level, at in found:
        library.open(level, at, "ladder")
        if level in seen:
            problems.add(at, f"{level!r} is in the ladder twice")
        seen.add(level)
        if library.holds(level) and at is not found[-1][1]:
            which = "" if level == HOLD else f", which {level} ends in"
            problems.add(at, f"no level can follow hold{which}", "make it the last level")


def crash(root: Mapping, library: RunbookCatalog, problems: Problems) -> None:
    """The runbook for a crash exists and can be executed."""
    named = on_crash(root)
    if named is None:
        return
    name, at = named
    library.open(name, at, "job.on_crash")
    if library.holds(name):
        problems.add(at, "a job that has ended cannot be held", "leave on_crash out")
    opened = library.opened.get(name)
    configured = _get(root, "job", "relaunch") is not None
    if opened is None or configured or opened.form.if_refused:
        return
    if "relaunch" in verbs_of(opened.form):
        message = f"{name} starts the job again, but the policy does not say how"
        problems.add(at, message, "add relaunch: {args: [...]} to job")


def relaunch(root: Mapping, problems: Problems) -> None:
    """The placeholders in `job.relaunch` are known."""
    known = [f"{{{name}}}" for name in PLACEHOLDERS]
    for what, node in _templates(root):
        for match in _PLACEHOLDER.finditer(node.text):
            if match[1] not in PLACEHOLDERS:
                message = f"job.relaunch.{what}: no placeholder {match[0]!r}"
                hint = did_you_mean(match[0], known)
                problems.add(inside(node, match.start()), message, hint)


def _templates(root: Mapping) -> Iterator[tuple[str, Scalar]]:
    args, env = _get(root, "job", "relaunch", "args"), _get(root, "job", "relaunch", "env")
    for i, node in enumerate(args.items if isinstance(args, Sequence) else ()):
        if isinstance(node, Scalar):
            yield f"args[{i}]", node
    for name, (_, node) in (env.pairs if isinstance(env, Mapping) else {}).items():
        if isinstance(node, Scalar):
            yield f"env.{name}", node


def phases(
    detectors: AbstractMapping[str, Detector],
    entries: AbstractMapping[str, Entry],
    problems: Problems,
) -> None:
    """The phases in the `grace` of a detector are phases of the probe."""
    for name, detector in detectors.items():
        for phase in getattr(detector, "grace", ()):
            if phase not in wire.PHASES:
                grace = entries[name].node
                place = _get(grace, "grace") if isinstance(grace, Mapping) else None
                at = place.pairs[phase][0] if isinstance(place, Mapping) else grace
                problems.add(at, f"{name}: no phase {phase!r}", did_you_mean(phase, wire.PHASES))


def table(root: Mapping, form: PolicyFile, problems: Problems) -> None:
    """A policy's own transition table is valid, and handles the start of another training."""
    section = root.get("machine")
    if form.machine is None or not isinstance(section, Mapping):
        return
    flaws = state_machine.flaws(form.machine)
    for state, event, sentence in flaws:
        row = section.get(state)
        at: Node = section.pairs[state][0] if state in section.pairs else section
        hint = None
        if isinstance(row, Mapping) and event in row.pairs:
            key, value = row.pairs[event]
            target = isinstance(value, Scalar) and event in state_machine.EVENTS
            at = value if target else key
            wrong = form.machine[state][event] if target else event
            hint = did_you_mean(wrong, state_machine.STATES if target else state_machine.EVENTS)
        problems.add(at, f"machine: {sentence}", hint)
    living = [state for state in state_machine.STATES if state != state_machine.HALTED]
    if not flaws and not any(
        state_machine.move(form.machine, state, "session_started") for state in living
    ):
        hint = (
            "another training in the same launch would start in the state of the last one; "
            "add any: {session_started: warming}"
        )
        problems.warn(
            root.pairs["machine"][0],
            "machine: no state has a transition for 'session_started'",
            hint,
        )


def _get(root: Mapping, *keys: str) -> Node | None:
    """Return the node below these keys; None where there is none, or `null`."""
    here: Node | None = root
    for key in keys:
        here = here.get(key) if isinstance(here, Mapping) else None
    return None if isinstance(here, Scalar) and here.value is None else here


def _runbook(node: Node | None) -> str:
    """Return the text of a node if that can be the name of a runbook, else ""."""
    value = node.value if isinstance(node, Scalar) else None
    return value if isinstance(value, str) and re.fullmatch(RUNBOOK, value) else ""
