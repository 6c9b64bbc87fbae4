"""Inhibitions: rules that are muted while another fires, or in certain states of the run.

Refused: muting a SEV0, a rule that mutes itself, cycles.
"""

from __future__ import annotations

from collections.abc import Mapping as AbstractMapping
from graphlib import CycleError, TopologicalSorter

from ...core.model.policy import Inhibit
from ..document.diagnostics import Problems, did_you_mean
from ..document.nodes import Mapping, Node, first_text
from ..forms.file_forms import InhibitForm
from ..schema.dataclass_types import read_form
from ..schema.field_types import BAD
from .pack import Parts


def inhibitions(
    parts: Parts, severities: AbstractMapping[str, str | None], problems: Problems
) -> list[Inhibit]:
    """Build all inhibitions.

    Args:
        severities: of the rules, by name; None where it could not be read.
    """
    names = {entry.name for entry in parts.rules}  # also those with mistakes
    made: list[Inhibit] = []
    edges: dict[str, dict[str, Node]] = {}
    for entry in parts.inhibit:
        before = problems.count
        form: InhibitForm = read_form(InhibitForm, entry.node, problems, "inhibit", lenient=True)
        if form is BAD:
            continue
        whole, muted = problems.count == before, form.mute or ()
        assert isinstance(entry.node, Mapping)
        if whole and (form.by_rule is None) == (not form.by_state):
            problems.add(entry.node, "inhibit needs one of 'by_rule' and 'by_state'")
        if whole and not muted:
            problems.add(entry.node, "inhibit mutes nothing")
        by = entry.scope.get(form.by_rule, form.by_rule) if form.by_rule else None
        mute = tuple(entry.scope.get(name, name) for name in muted)
        for name, written in [(by, form.by_rule), *zip(mute, muted, strict=True)]:
            if name is None or name in names or parts.may_exist(name, "rules", entry.node):
                continue
            place = first_text(entry.node, written or "")
            problems.add(place, f"inhibit: unknown rule {written!r}", did_you_mean(name, names))
        for name, written in zip(mute, muted, strict=True):
            place = first_text(entry.node.place("mute"), written)
            if severities.get(name) == "SEV0":
                problems.add(place, f"{name} is SEV0, which cannot be muted")
            if name == by:
                problems.add(place, f"{name} would mute itself")
            elif by is not None:
                edges.setdefault(by, {})[name] = place
        made.append(Inhibit(mute, by, form.by_state))
    graph = {name: list(targets) for name, targets in edges.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        place = edges[cycle[1]][cycle[0]]
        problems.add(place, f"rules mute each other: {' -> '.join(reversed(cycle))}")
    return made
