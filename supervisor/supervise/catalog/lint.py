"""What a policy must not be, though every key in it is right: checks across its sections."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sized
from collections.abc import Mapping as AbstractMapping

from ..core import machine
from ..core.rule import HOLD
from ..core.shapes import Detector
from . import discover, metrics
from .forms import PolicyFile
from .nodes import Mapping, Node, Sequence, first_text
from .pack import Entry
from .problems import Place, Problems, did_you_mean
from .runbook import Library, Opened

ALL = "all"


def budgets(root: Mapping, form: PolicyFile, opened: Iterable[Opened], problems: Problems) -> None:
    """Every action that is counted needs a budget of its class, and one for all together.

    A relaunch is always refused in a policy that does not say how, so it needs none there.
    """
    classes = [action.budget for action in discover.actions().values()]
    known = [ALL, *sorted({name for name in classes if name is not None})]
    section = root.get("budgets")
    pairs = section.pairs if isinstance(section, Mapping) else {}
    for name, (at, _) in pairs.items():
        if name not in known:
            problems.add(at, f"no class of actions {name!r}", did_you_mean(name, known))
    missing: dict[str, str] = {}
    for runbook in opened:
        for step in runbook.form.steps:
            if discover.name_of(step) == "relaunch" and form.job.relaunch is None:
                continue
            for name in (step.budget, ALL) if step.budget is not None else ():
                if name not in pairs:
                    missing.setdefault(name, f"{discover.name_of(step)} in {runbook.name}")
    for name, user in missing.items():
        hint = f"add {name}: {{max: 2, per: 5000}} to budgets"
        problems.add(root.place("budgets"), f"no budget {name!r}, which {user} needs", hint)


def ladder(root: Mapping, form: PolicyFile, library: Library, problems: Problems) -> None:
    """Rungs exist, none twice; `hold` is the last one."""
    section = root.get("escalate")
    listed = section.get("ladder") if isinstance(section, Mapping) else None
    rungs = form.escalate.ladder
    for i, rung in enumerate(rungs):
        assert isinstance(listed, Sequence)
        at = listed.items[i]
        library.open(rung, at, "ladder")
        if rung in rungs[:i]:
            problems.add(at, f"the rung {rung!r} stands in the ladder twice")
        if rung == HOLD and i + 1 < len(rungs):
            problems.add(at, "nothing comes after hold", "make it the last rung")


def crash(root: Mapping, form: PolicyFile, library: Library, problems: Problems) -> None:
    """What is run when the job ends by itself exists."""
    if form.job.on_crash is None:
        return
    section = root.get("job")
    at = section.place("on_crash") if isinstance(section, Mapping) else root
    if form.job.on_crash == HOLD:
        problems.add(at, "a job that has ended cannot be held", "leave on_crash out")
    else:
        library.open(form.job.on_crash, at, "job.on_crash")


def instead(library: Library, problems: Problems) -> None:
    """What is tried instead of a refused runbook does not lead back to it."""
    books = library.resolved()
    for name, opened in books.items():
        seen, at = [name], opened.form.if_refused
        while at in books and at not in seen:
            seen.append(at)
            at = books[at].form.if_refused
        if at == name:
            place = opened.node.place("if_refused")
            chain = " -> ".join((*seen, name))
            problems.add(place, f"runbook {name}: if_refused leads back to it: {chain}")


def approvals(root: Mapping, form: PolicyFile, library: Library, problems: Problems) -> None:
    """Requests are for verbs that touch the job, for runbooks, or for all of them."""
    section = root.get("approvals")
    pairs = section.pairs if isinstance(section, Mapping) else {}
    verbs = [verb for verb, action in discover.actions().items() if action.touches_job]
    known = [ALL, *verbs, *library.resolved()]
    for name, (at, _) in pairs.items():
        if name not in known:
            problems.add(at, f"approvals: no action and no runbook {name!r} that touches the job",
                         did_you_mean(name, known))  # fmt: skip


def savepoints(
    root: Mapping, form: PolicyFile, opened: Iterable[Opened], problems: Problems
) -> None:
    """A rollback in process needs savepoints to go back to."""
    if form.savepoints is not None:
        return
    for runbook in opened:
        if any(discover.name_of(step) == "rollback" for step in runbook.form.steps):
            hint = "add savepoints: {every: 25, keep: 4}"
            problems.add(root, f"{runbook.name} rolls back, but no savepoints are kept", hint)


def table(root: Mapping, form: PolicyFile, problems: Problems) -> None:
    """A policy's own table of moves must work."""
    section = root.get("machine")
    if form.machine is not None and isinstance(section, Mapping):
        for state, event, sentence in machine.flaws(form.machine):
            row = section.get(state)
            at: Node = section.pairs[state][0] if state in section.pairs else section
            if isinstance(row, Mapping) and event in row.pairs:
                at = row.pairs[event][0]
            problems.add(at, f"machine: {sentence}")


def unused(form: PolicyFile, used: Container[str], problems: Problems) -> None:
    """Warn of runbooks in the policy that nothing runs."""
    for name, node in form.runbooks.items():
        if name not in used:
            problems.warn(node, f"runbook {name!r} is never used")


def unmeasured(
    detectors: AbstractMapping[str, Detector],
    entries: AbstractMapping[str, Entry],
    problems: Problems,
) -> None:
    """Warn of metrics that no collector measures; a job may report its own."""
    for name, detector in detectors.items():
        for metric in detector.metrics:
            if metrics.known() and not metrics.is_known(metric):
                place: Place = first_text(entries[name].node, metric)
                hint = did_you_mean(metric, metrics.near(metric), alike=0.8)
                known = hint if hint and "did you" in hint else "the job must report it itself"
                problems.warn(place, f"{name}: no collector measures {metric!r}", known)


def idle(rules: Sized, root: Mapping, problems: Problems) -> None:
    """Warn of a policy that can see nothing."""
    if not len(rules):
        problems.warn(root, "this policy has no rules", "use: [nonfinite, loss_spike]")
