"""Checks across the sections of a policy whose keys are all valid."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping

from supervise_probe import wire

from ..core import rank_monitor
from ..core.model import state_machine
from ..core.model.interfaces import Detector
from ..core.model.policy import HOLD, PLACEHOLDERS, Policy
from ..core.model.values import RUNBOOK
from ..notifiers import HEARTBEAT
from ..notifiers.heartbeat import EVERY_S, Heartbeat
from . import discover, metrics
from .diagnostics import Place, Problems, did_you_mean, near_miss
from .pack import Entry, Parts
from .rules import NAME, Written
from .runbook_library import OpenedRunbook, RunbookCatalog, Ways, verbs_of
from .sections import PolicyFile
from .yaml_document import (
    ListNode,
    MapNode,
    Node,
    Scalar,
    first_text,
    mapping_entries,
    position_inside,
    scalar_texts,
)

ALL = "all"
SHORT_S = 600.0  # for a person to wake up, read and decide; project default


def check_budgets(
    root: MapNode, form: PolicyFile, opened: Iterable[OpenedRunbook], ways: Ways, problems: Problems
) -> None:
    """Every action that is counted needs a budget of its class, and one for all together.

    Without `job.relaunch` a relaunch is always refused and needs no budget. `ways`: what leads to
    each runbook.
    """
    section = root.get("budgets")
    pairs = section.pairs if isinstance(section, MapNode) else {}
    counted = discover.action_classes().values() if pairs else ()
    budget_classes = [ALL, *sorted({action.budget for action in counted if action.budget})]
    unknown = [name for name in pairs if name not in budget_classes]
    configured = {*pairs, *(near_miss(name, budget_classes) for name in unknown)}
    for name, (key, _) in pairs.items():
        if name not in budget_classes:
            problems.add(key, f"no class of actions {name!r}", did_you_mean(name, budget_classes))
    missing: dict[str, tuple[str, str]] = {}
    for runbook in opened:
        for step in runbook.form.steps:
            if discover.yaml_name_of(step) == "relaunch" and form.job.relaunch is None:
                continue
            for name in (step.budget_class, ALL) if step.budget_class is not None else ():
                if name not in configured:
                    missing.setdefault(name, (discover.yaml_name_of(step), runbook.name))
    for name, (verb, user) in missing.items():
        hint = f"add {name}: {{max: 2, per: 5000}} to budgets"
        location, way = _way(user, "budgets", root, ways)
        problems.add(location, f"no budget {name!r}, which {verb} in {user} needs{way}", hint)


def _way(runbook: str, section: str, root: MapNode, ways: Ways) -> tuple[Place, str]:
    """Return the place of a section that a runbook needs, and what leads to the runbook.

    Where a pack uses the runbook it is the pack's name under `use`; without the section it is the
    line in this file that uses the runbook.
    """
    use, way = ways.get(runbook, (root, ""))
    used = _use_of(use, root)
    if used is not None:
        return used, f"; {way}" if way else ""
    here = section not in root.pairs and use.source is root.source
    location = root.locate(section)
    if location.source is not root.source:  # nothing is wrong with the base
        location = root.locate("extends")
    return use if here else location, f"; {way}" if way else ""


def _use_of(use: Place, root: MapNode) -> Place | None:
    """Return where this file uses the pack that a place is in, None where it does not."""
    section = root.get("use")
    pack = use.source.label.rpartition("/")[2].removesuffix(".yaml")
    for item in section.items if isinstance(section, ListNode) else ():
        if not isinstance(item, Scalar) or item.source is not root.source:
            continue
        if item.text == pack and use.source is not root.source:
            return item
    return None


def check_substitutes(library: RunbookCatalog, problems: Problems) -> None:
    """`if_refused` must not lead back to the same runbook."""
    books = library.resolved()
    for name, opened in books.items():
        path, following = [name], opened.form.if_refused
        while following in books and following not in path:
            path.append(following)
            following = books[following].form.if_refused
        if following == name:
            location = opened.node.locate("if_refused")
            chain = " -> ".join((*path, name))
            problems.add(location, f"runbook {name}: if_refused leads back to it: {chain}")


def check_approvals(
    root: MapNode, library: RunbookCatalog, parts: Parts, problems: Problems
) -> None:
    """Approvals name verbs that touch the job, runbooks, or `all`."""
    section = root.get("approvals")
    pairs = section.pairs if isinstance(section, MapNode) else {}
    if not pairs:
        return
    verbs = [verb for verb, action in discover.action_classes().items() if action.touches_job]
    names = [ALL, *verbs, *library.opened]
    for name, (key, _) in pairs.items():
        if name not in names and not (parts.incomplete and name in library.names()):
            problems.add(
                key,
                f"approvals: no action and no runbook {name!r} that touches the job",
                did_you_mean(name, names),
            )


def check_approval_times(root: MapNode, form: PolicyFile, problems: Problems) -> None:
    """Warn of a request that is decided before somebody who is asleep can have read it."""
    section = root.get("approvals")
    for name, terms in form.approvals.items():
        keys = section.get(name) if isinstance(section, MapNode) else None
        if terms.timeout_s >= SHORT_S or not isinstance(keys, MapNode):
            continue
        message = (
            f"approvals.{name}: {terms.timeout_s:g} s to answer is less than {SHORT_S / 60:g} min"
        )
        problems.warn(keys.locate("timeout"), message, "timeout: 15m")


def check_savepoints(
    root: MapNode, opened: Iterable[OpenedRunbook], ways: Ways, problems: Problems
) -> None:
    """A rollback in process needs savepoints."""
    section = root.get("savepoints")
    if section is not None and not (isinstance(section, Scalar) and section.value is None):
        return
    for runbook in opened:
        if any(discover.yaml_name_of(step) == "rollback" for step in runbook.form.steps):
            hint = "add savepoints: {every: 25, keep: 4}"
            location, way = _way(runbook.name, "savepoints", root, ways)
            problems.add(
                location, f"{runbook.name} rolls back, but no savepoints are kept{way}", hint
            )


def check_unused(root: MapNode, form: PolicyFile, used: Container[str], problems: Problems) -> None:
    """Warn of runbooks in the policy that nothing runs.

    In a file with mistakes a runbook that is named anywhere else counts as used.
    """
    named = set(scalar_texts(root.without("runbooks"))) if problems.count else set()
    for name, node in mapping_entries(root, "runbooks").items() if form.runbooks else ():
        if name not in used and name not in named and node.source is root.source:
            problems.warn(node, f"runbook {name!r} is never used")


def check_unread(
    root: MapNode,
    parts: Parts,
    detectors: Mapping[str, Detector],
    drafts: Iterable[Written],
    problems: Problems,
) -> None:
    """Warn of detectors in this file that no rule and no other detector reads.

    In a part with a mistake each word counts as the name of a detector.
    """
    if any((root.source.label, key) in parts.unreadable for key in ("detectors", "rules")):
        return
    read: set[str] = set()
    rules = {id(rule.entry): rule for rule in drafts}
    for entry in (*parts.rules, *parts.detectors.values()):
        rule, detector = rules.get(id(entry)), detectors.get(entry.name)
        if rule is not None and rule.condition is not None:
            read.update(rule.condition.names)
        elif rule is None and detector is not None and entry is parts.detectors.get(entry.name):
            read.update(detector.detectors)
        else:
            names = [name for text in scalar_texts(entry.node) for name in NAME.findall(text)]
            read.update(entry.scope.get(name, name) for name in names)
    for name, entry in parts.detectors.items():
        if name not in read and entry.node.source is root.source:
            problems.warn(entry.node, f"no rule reads the detector {name!r}")


def warn_unmeasured(
    detectors: Mapping[str, Detector], detector_entries: Mapping[str, Entry], problems: Problems
) -> None:
    """Warn of metrics that no collector measures; a job may report its own."""
    for name, detector in detectors.items():
        for metric in detector.metrics:
            if metrics.measured_metrics() and not metrics.is_known(metric):
                location: Place = first_text(detector_entries[name].node, metric)
                hint = metrics.suggest_metric(metric) or "the job must report it itself"
                problems.warn(location, f"{name}: no collector measures {metric!r}", hint)


def check_rules_can_fire(
    policy: Policy, entries: Mapping[str, Entry], root: MapNode, problems: Problems
) -> None:
    """Every rule can fire by what this policy lets measure; what a job may report counts.

    Args:
        entries: where the rules were written.
    """
    for rule in policy.rules:
        lacks: dict[str, list[str]] = {}
        inputs = rank_monitor.missing_metrics(policy, rule, lambda _: False)
        for metric in inputs:
            if reason := metrics.explain_unmeasured(metric, policy):
                lacks.setdefault(reason, []).append(metric)
        measured = set(inputs).difference(*lacks.values())
        if rank_monitor.can_fire(policy, rule, measured.__contains__):
            continue
        named = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in lacks.items())
        node = entries[rule.id].node
        location = _use_of(node, root) or node
        message = f"rule {rule.id} can never fire: nothing in this policy measures what it reads"
        problems.add(location, message, f"{named}; or remove: [{rule.id}]")


def warn_heartbeat_interval(root: MapNode, form: PolicyFile, problems: Problems) -> None:
    """Warn of a heartbeat so fast that it is refused, or so slow that it is of little use."""
    if HEARTBEAT not in form.notify:
        return
    settings = form.notify[HEARTBEAT]
    warning = settings.warning() if isinstance(settings, Heartbeat) else None
    section = root.get("notify")
    keys = section.get(HEARTBEAT) if isinstance(section, MapNode) else None
    if warning is not None:
        location = keys.locate("every") if isinstance(keys, MapNode) else root.locate("notify")
        problems.warn(location, f"notify.heartbeat: {warning}", f"every: {EVERY_S:g}s")


def check_rules_exist(parts: Parts, root: MapNode, problems: Problems) -> None:
    """Warn of a policy without rules."""
    if not parts.rules and not parts.incomplete and not parts.unreadable:
        problems.warn(root, "this policy has no rules", "use: [nonfinite, loss_spike]")


# `{word}` alone: `${word}`, `{{word}}` and braces around anything else are the job's own.
_PLACEHOLDER = re.compile(r"(?<![{$])\{([A-Za-z_][A-Za-z0-9_]*)\}(?!\})")


def find_ladder_names(root: MapNode) -> list[tuple[str, Node]]:
    """Return the names in `escalate.ladder` that can be names of runbooks, and their nodes."""
    listed = _get(root, "escalate", "ladder")
    items = listed.items if isinstance(listed, ListNode) else []
    return [(name, item) for item in items if (name := _runbook(item))]


def find_crash_runbook(root: MapNode) -> tuple[str, Node] | None:
    """Return what `job.on_crash` names, if that can be the name of a runbook."""
    node = _get(root, "job", "on_crash")
    name = _runbook(node)
    return (name, node) if name and node is not None else None


def check_ladder(root: MapNode, library: RunbookCatalog, problems: Problems) -> None:
    """Escalation levels exist, none twice; `hold` is the last one."""
    rungs = find_ladder_names(root)
    earlier_levels: set[str] = set()
    for level, node in rungs:
        library.load_with_fallbacks(level, node, "ladder")
        if level in earlier_levels:
            problems.add(node, f"{level!r} is in the ladder twice")
        earlier_levels.add(level)
        if library.ends_in_hold(level) and node is not rungs[-1][1]:
            which = "" if level == HOLD else f", which {level} ends in"
            problems.add(node, f"no level can follow hold{which}", "make it the last level")


def check_crash(root: MapNode, library: RunbookCatalog, problems: Problems) -> None:
    """The runbook for a crash exists and can be executed."""
    named = find_crash_runbook(root)
    if named is None:
        return
    name, node = named
    library.load_with_fallbacks(name, node, "job.on_crash")
    if library.ends_in_hold(name):
        problems.add(node, "a job that has ended cannot be held", "leave on_crash out")
    opened = library.opened.get(name)
    configured = _get(root, "job", "relaunch") is not None
    if opened is None or configured or opened.form.if_refused:
        return
    if "relaunch" in verbs_of(opened.form):
        message = f"{name} starts the job again, but the policy does not say how"
        problems.add(node, message, "add relaunch: {args: [...]} to job")


def check_relaunch(root: MapNode, problems: Problems) -> None:
    """The placeholders in `job.relaunch` are known."""
    placeholders = [f"{{{name}}}" for name in PLACEHOLDERS]
    for option, node in _templates(root):
        for match in _PLACEHOLDER.finditer(node.text):
            if match[1] not in PLACEHOLDERS:
                message = f"job.relaunch.{option}: no placeholder {match[0]!r}"
                hint = did_you_mean(match[0], placeholders)
                problems.add(position_inside(node, match.start()), message, hint)


def _templates(root: MapNode) -> Iterator[tuple[str, Scalar]]:
    args, env = _get(root, "job", "relaunch", "args"), _get(root, "job", "relaunch", "env")
    for i, node in enumerate(args.items if isinstance(args, ListNode) else ()):
        if isinstance(node, Scalar):
            yield f"args[{i}]", node
    for name, (_, node) in (env.pairs if isinstance(env, MapNode) else {}).items():
        if isinstance(node, Scalar):
            yield f"env.{name}", node


def check_phases(
    detectors: Mapping[str, Detector], entries: Mapping[str, Entry], problems: Problems
) -> None:
    """The phases in the `grace` of a detector are phases of the probe."""
    for name, detector in detectors.items():
        for phase in getattr(detector, "grace", ()):
            if phase not in wire.PHASES:
                grace = entries[name].node
                section = _get(grace, "grace") if isinstance(grace, MapNode) else None
                location = section.pairs[phase][0] if isinstance(section, MapNode) else grace
                problems.add(
                    location, f"{name}: no phase {phase!r}", did_you_mean(phase, wire.PHASES)
                )


def check_transitions(root: MapNode, form: PolicyFile, problems: Problems) -> None:
    """A policy's own transition table is valid, and handles the start of another training."""
    section = root.get("machine")
    if form.machine is None or not isinstance(section, MapNode):
        return
    flaws = state_machine.find_flaws(form.machine)
    for state, event, sentence in flaws:
        row = section.get(state)
        location: Node = section.pairs[state][0] if state in section.pairs else section
        hint = None
        if isinstance(row, MapNode) and event in row.pairs:
            key, value = row.pairs[event]
            target = isinstance(value, Scalar) and event in state_machine.EVENTS
            location = value if target else key
            wrong = form.machine[state][event] if target else event
            hint = did_you_mean(wrong, state_machine.STATES if target else state_machine.EVENTS)
        problems.add(location, f"machine: {sentence}", hint)
    living = [state for state in state_machine.STATES if state != state_machine.HALTED]
    if not flaws and not any(
        state_machine.next_state(form.machine, state, "session_started") for state in living
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


def _get(root: MapNode, *keys: str) -> Node | None:
    """Return the node below these keys; None where there is none, or `null`."""
    here: Node | None = root
    for key in keys:
        here = here.get(key) if isinstance(here, MapNode) else None
    return None if isinstance(here, Scalar) and here.value is None else here


def _runbook(node: Node | None) -> str:
    """Return the text of a node if that can be the name of a runbook, else ""."""
    value = node.value if isinstance(node, Scalar) else None
    return value if isinstance(value, str) and re.fullmatch(RUNBOOK, value) else ""
