"""The last step of loading: from forms to the frozen policy and its text.

`document` is the policy with all defaults; `yaml_writer` turns it into bytes. Loading these bytes
gives the same document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...core.model.decisions import ACTING_MODES
from ...core.model.interfaces import Detector
from ...core.model.policy import Approval, Budget, Inhibit, Ladder, Planned, Policy, Rule
from ..document import yaml_writer
from ..document.nodes import Node
from ..forms.file_forms import VERSION, BudgetForm, InhibitForm, PolicyFile, RuleForm
from ..forms.part_types import write_detector
from ..inventory import discover, metrics
from ..schema.dataclass_types import keys_of, written
from .pack import Entry, Parts
from .runbook_library import Opened

# Sections that are built from packs and other files, or that name these.
_ASSEMBLED: tuple[str, ...] = ("version", "policy", "mode", "extends", "remove", "use")
_ASSEMBLED += ("cites",)  # what is known of a policy changes nothing that it does
_ASSEMBLED += ("override", "baseline", "detectors", "rules", "inhibit", "runbooks")


class BuiltRule(NamedTuple):
    """A rule that was built, and what it was built from."""

    rule: Rule
    form: RuleForm
    entry: Entry


@dataclass(frozen=True, slots=True)
class Draft:
    """A policy without mistakes."""

    name: str
    mode: str
    form: PolicyFile
    detectors: Mapping[str, Detector]
    rules: tuple[BuiltRule, ...]
    inhibit: tuple[Inhibit, ...]
    runbooks: Mapping[str, Opened]
    root: Node  # the file
    parts: Parts  # where every part of it was written


def document(draft: Draft) -> dict[str, Any]:
    """Return the whole policy as plain data, in the form of a policy file."""
    keys = keys_of(PolicyFile)
    rest = {
        name: keys[name].type.write(value)
        for name in keys
        if name not in _ASSEMBLED and (value := getattr(draft.form, name)) is not None
    }
    return {
        "version": VERSION,
        "policy": draft.name,
        "mode": draft.mode,
        **rest,
        "detectors": {n: write_detector(d) for n, d in draft.detectors.items()},
        "rules": [
            {
                name: value
                for name, value in (
                    written(made.form) | {"id": made.rule.id, "when": made.rule.text}
                ).items()
                if (name, value) != ("title", "")  # the digest of a policy without titles stays
            }
            for made in draft.rules
        ],
        "inhibit": [
            written(InhibitForm(rule.mute, rule.by_rule, rule.by_state)) for rule in draft.inhibit
        ],
        "runbooks": {name: written(opened.form) for name, opened in draft.runbooks.items()},
    }


def policy(draft: Draft) -> Policy:
    """Return the policy as the engine takes it."""
    form = draft.form
    text = yaml_writer.dump(document(draft))
    acts = draft.mode in ACTING_MODES  # weaker modes never roll back
    return Policy(
        name=draft.name,
        digest=yaml_writer.digest(text),
        mode=draft.mode,
        detectors=draft.detectors,
        rules=tuple(made.rule for made in draft.rules),
        runbooks={name: opened.resolved() for name, opened in draft.runbooks.items()},
        inhibit=draft.inhibit,
        planned=tuple(Planned(p.from_, p.to, p.what, p.expect) for p in form.planned),
        budgets={name: _budget(budget) for name, budget in form.budgets.items()},
        approvals={
            name: Approval(terms.timeout, terms.on_timeout, terms.unless or "")
            for name, terms in form.approvals.items()
        },
        ladder=Ladder(form.escalate.ladder, form.escalate.reset_after),
        probation_steps=form.probation,
        warmup_steps=form.warmup,
        blind_after_steps=form.blind_after.steps,
        blind_after_s=form.blind_after.time,
        hold_reminder_s=form.hold_reminder,
        repeat_s=form.repeat,
        give_up=form.give_up,
        journal_bytes=None if form.journal is None else form.journal.max_gb * 1e9,
        machine=form.machine,
        savepoints=written(form.savepoints) if acts and form.savepoints is not None else {},
        sampling=_given(form),
        sparsest=_sparsest(draft.detectors),
        # A safeguard asks for no approval, so it needs the mode that asks for none.
        safeguards=written(form.safeguards) if draft.mode == "enforce" else {},
        notify={"console": {}, **form.notify},
        job=asdict(form.job),
        cites=tuple(str(draft.parts.folders[0] / name) for name in form.cites),
        verbs=discover.actions(),
        resolved=text,
    )


def _given(form: PolicyFile) -> dict[str, int]:
    """Return the intervals that the policy sets; the probe has defaults for the others."""
    given = {} if form.sampling is None else written(form.sampling)
    return {name: steps for name, steps in given.items() if steps is not None}


def _sparsest(detectors: Mapping[str, Detector]) -> dict[str, int]:
    """Return the metrics that the probe may take less often than each step, with the most steps."""
    read = {metric for detector in detectors.values() for metric in detector.metrics}
    specs = {metric: metrics.spec_of(metric) for metric in sorted(read)}
    return {metric: spec.sparsest for metric, spec in specs.items() if spec and spec.sparsest}


def _budget(form: BudgetForm) -> Budget:
    steps = form.per if isinstance(form.per, int) else None
    seconds = form.per if isinstance(form.per, float) else None
    return Budget(form.max, steps, seconds)
