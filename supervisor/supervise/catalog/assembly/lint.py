"""Checks across the sections of a policy whose keys are all valid."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Mapping as AbstractMapping

from ...core.model.interfaces import Detector
from ...notifiers import HEARTBEAT
from ...notifiers.heartbeat import EVERY_S, Heartbeat
from ..document.diagnostics import Place, Problems, did_you_mean, near_miss
from ..document.nodes import Mapping, Scalar, Sequence, first_text, texts
from ..forms.file_forms import PolicyFile
from ..inventory import discover, metrics
from .expression import NAME
from .pack import Entry, Parts
from .rules import Written
from .runbook_library import Opened, RunbookCatalog, Ways

ALL = "all"
SHORT_S = 600.0  # for a person to wake up, read and decide; project default


def budgets(
    root: Mapping, form: PolicyFile, opened: Iterable[Opened], ways: Ways, problems: Problems
) -> None:
    """Every action that is counted needs a budget of its class, and one for all together.

    Without `job.relaunch` a relaunch is always refused and needs no budget. `ways`: what leads to
    each runbook.
    """
    classes = [action.budget for action in discover.actions().values()]
    known = [ALL, *sorted({name for name in classes if name is not None})]
    section = root.get("budgets")
    pairs = section.pairs if isinstance(section, Mapping) else {}
    given = {*pairs, *(near_miss(name, known) for name in pairs if name not in known)}
    for name, (at, _) in pairs.items():
        if name not in known:
            problems.add(at, f"no class of actions {name!r}", did_you_mean(name, known))
    missing: dict[str, tuple[str, str]] = {}
    for runbook in opened:
        for step in runbook.form.steps:
            if discover.name_of(step) == "relaunch" and form.job.relaunch is None:
                continue
            for name in (step.budget_class, ALL) if step.budget_class is not None else ():
                if name not in given:
                    missing.setdefault(name, (discover.name_of(step), runbook.name))
    for name, (verb, user) in missing.items():
        hint = f"add {name}: {{max: 2, per: 5000}} to budgets"
        place, way = _way(user, "budgets", root, ways)
        problems.add(place, f"no budget {name!r}, which {verb} in {user} needs{way}", hint)


def _way(runbook: str, section: str, root: Mapping, ways: Ways) -> tuple[Place, str]:
    """Return the place of a section that a runbook needs, and what leads to the runbook.

    Where a pack uses the runbook it is the pack's name under `use`; without the section it is the
    line in this file that uses the runbook.
    """
    at, way = ways.get(runbook, (root, ""))
    used = _use_of(at, root)
    if used is not None:
        return used, f"; {way}" if way else ""
    here = section not in root.pairs and at.source is root.source
    place = root.place(section)
    if place.source is not root.source:  # nothing is wrong with the base
        place = root.place("extends")
    return at if here else place, f"; {way}" if way else ""


def _use_of(at: Place, root: Mapping) -> Place | None:
    """Return where this file uses the pack that a place is in, None where it does not."""
    section = root.get("use")
    pack = at.source.label.rpartition("/")[2].removesuffix(".yaml")
    for item in section.items if isinstance(section, Sequence) else ():
        if not isinstance(item, Scalar) or item.source is not root.source:
            continue
        if item.text == pack and at.source is not root.source:
            return item
    return None


def instead(library: RunbookCatalog, problems: Problems) -> None:
    """`if_refused` must not lead back to the same runbook."""
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


def approvals(root: Mapping, library: RunbookCatalog, parts: Parts, problems: Problems) -> None:
    """Approvals name verbs that touch the job, runbooks, or `all`."""
    section = root.get("approvals")
    pairs = section.pairs if isinstance(section, Mapping) else {}
    verbs = [verb for verb, action in discover.actions().items() if action.touches_job]
    known = [ALL, *verbs, *library.opened]
    for name, (at, _) in pairs.items():
        if name not in known and not (parts.incomplete and name in library.names()):
            problems.add(
                at,
                f"approvals: no action and no runbook {name!r} that touches the job",
                did_you_mean(name, known),
            )


def short_approvals(root: Mapping, form: PolicyFile, problems: Problems) -> None:
    """Warn of a request that is decided before somebody who is asleep can have read it."""
    section = root.get("approvals")
    for name, terms in form.approvals.items():
        keys = section.get(name) if isinstance(section, Mapping) else None
        if terms.timeout >= SHORT_S or not isinstance(keys, Mapping):
            continue
        why = f"approvals.{name}: {terms.timeout:g} s to answer is less than {SHORT_S / 60:g} min"
        problems.warn(keys.place("timeout"), why, "timeout: 15m")


def savepoints(root: Mapping, opened: Iterable[Opened], ways: Ways, problems: Problems) -> None:
    """A rollback in process needs savepoints."""
    given = root.get("savepoints")
    if given is not None and not (isinstance(given, Scalar) and given.value is None):
        return
    for runbook in opened:
        if any(discover.name_of(step) == "rollback" for step in runbook.form.steps):
            hint = "add savepoints: {every: 25, keep: 4}"
            at, way = _way(runbook.name, "savepoints", root, ways)
            problems.add(at, f"{runbook.name} rolls back, but no savepoints are kept{way}", hint)


def unused(root: Mapping, form: PolicyFile, used: Container[str], problems: Problems) -> None:
    """Warn of runbooks in the policy that nothing runs.

    In a file with mistakes a runbook that is named anywhere else counts as used.
    """
    named = set(texts(root.without("runbooks"))) if problems.count else set()
    for name, node in form.runbooks.items():
        if name not in used and name not in named and node.source is root.source:
            problems.warn(node, f"runbook {name!r} is never used")


def unread(
    root: Mapping,
    parts: Parts,
    detectors: AbstractMapping[str, Detector],
    written: Iterable[Written],
    problems: Problems,
) -> None:
    """Warn of detectors in this file that no rule and no other detector reads.

    In a part with a mistake each word counts as the name of a detector.
    """
    if any((root.source.label, key) in parts.unreadable for key in ("detectors", "rules")):
        return
    read: set[str] = set()
    rules = {id(rule.entry): rule for rule in written}
    for entry in (*parts.rules, *parts.detectors.values()):
        rule, detector = rules.get(id(entry)), detectors.get(entry.name)
        if rule is not None and rule.when is not None:
            read.update(rule.when.names)
        elif rule is None and detector is not None and entry is parts.detectors.get(entry.name):
            read.update(detector.detectors)
        else:
            names = [name for text in texts(entry.node) for name in NAME.findall(text)]
            read.update(entry.scope.get(name, name) for name in names)
    for name, entry in parts.detectors.items():
        if name not in read and entry.node.source is root.source:
            problems.warn(entry.node, f"no rule reads the detector {name!r}")


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
                hint = metrics.meant(metric) or "the job must report it itself"
                problems.warn(place, f"{name}: no collector measures {metric!r}", hint)


def heartbeat(root: Mapping, form: PolicyFile, problems: Problems) -> None:
    """Warn of a heartbeat so fast that it is refused, or so slow that it is of little use."""
    if HEARTBEAT not in form.notify:
        return
    why = Heartbeat(**form.notify[HEARTBEAT]).warning()
    section = root.get("notify")
    keys = section.get(HEARTBEAT) if isinstance(section, Mapping) else None
    if why is not None:
        place = keys.place("every") if isinstance(keys, Mapping) else root.place("notify")
        problems.warn(place, f"notify.heartbeat: {why}", f"every: {EVERY_S:g}s")


def idle(parts: Parts, root: Mapping, problems: Problems) -> None:
    """Warn of a policy without rules."""
    if not parts.rules and not parts.incomplete and not parts.unreadable:
        problems.warn(root, "this policy has no rules", "use: [nonfinite, loss_spike]")
