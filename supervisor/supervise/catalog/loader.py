"""A policy file -> `core.model.policy.Policy`: packs merged, names bound, defaults filled, linted.

Everything that is wrong is found in one go and raised together. The result does not refer to any
file: `Policy.resolved` is the whole of it as YAML, and loads to the same digest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..core.model.decisions import ACTING_MODES, MODES
from ..core.model.failure import FailureClass
from ..core.model.interfaces import Detector
from ..core.model.policy import (
    HOLD,
    ChannelKey,
    Inhibit,
    Policy,
    ProbeSettings,
    Safeguards,
    Sampling,
)
from ..errors import UsageError
from ..notifiers import Settings
from . import discover, lint, metrics, pack, rules, shipped, yaml_document
from .diagnostics import Place, Problem, Problems, did_you_mean, near_miss
from .pack import Parts
from .rules import BuiltRule, Written
from .runbook_library import OpenedRunbook, RunbookCatalog
from .schema import keys_of, plain_section, read_section, written_value
from .sections import VERSION, VERSION_NUMBER, FailuresFile, PolicyFile, write_detector
from .yaml_document import ListNode, MapNode, Node, Scalar, mapping_entries

# Sections that are built from packs and other files, or that name these.
_ASSEMBLED: tuple[str, ...] = ("version", "policy", "mode", "extends", "remove", "use")
_ASSEMBLED += ("cites",)  # what is known of a policy changes nothing that it does
_ASSEMBLED += ("override", "baseline", "detectors", "rules", "inhibit", "runbooks")


@dataclass(frozen=True, slots=True)
class Draft:
    """A policy without mistakes."""

    name: str
    mode: str
    form: PolicyFile
    detectors: Mapping[str, Detector]
    rules: tuple[BuiltRule, ...]
    inhibit: tuple[Inhibit, ...]
    runbooks: Mapping[str, OpenedRunbook]
    root: Node  # the file
    parts: Parts  # where every part of it was written


def policy_document(draft: Draft) -> dict[str, Any]:
    """Return the whole policy as plain data, in the form of a policy file."""
    keys = keys_of(PolicyFile)
    sections = {
        name: written_value(value, keys[name].hint)
        for name in keys
        if name not in _ASSEMBLED and (value := getattr(draft.form, name)) is not None
    }
    return {
        "version": VERSION,
        "policy": draft.name,
        "mode": draft.mode,
        **sections,
        "detectors": {n: write_detector(d) for n, d in draft.detectors.items()},
        "rules": [
            {
                name: value
                for name, value in (
                    plain_section(built.form) | {"id": built.rule.id, "when": built.rule.text}
                ).items()
                if (name, value) != ("title", "")  # the digest of a policy without titles stays
            }
            for built in draft.rules
        ],
        "inhibit": [
            plain_section(Inhibit(rule.mute, rule.by_rule, rule.by_state)) for rule in draft.inhibit
        ],
        "runbooks": {name: plain_section(opened.form) for name, opened in draft.runbooks.items()},
    }


def build_policy(draft: Draft) -> Policy:
    """Return the policy as the engine takes it."""
    form = draft.form
    text = yaml_document.dump_yaml(policy_document(draft))
    acts = draft.mode in ACTING_MODES  # weaker modes never roll back
    return Policy(
        name=draft.name,
        digest=yaml_document.policy_digest(text),
        mode=draft.mode,
        detectors=draft.detectors,
        rules=tuple(built.rule for built in draft.rules),
        runbooks={name: opened.to_runbook() for name, opened in draft.runbooks.items()},
        inhibit=draft.inhibit,
        planned=form.planned,
        budgets=form.budgets,
        approvals=form.approvals,
        ladder=form.escalate,
        probation_steps=form.probation,
        warmup_steps=form.warmup,
        blind_after_steps=form.blind_after.steps,
        blind_after_s=form.blind_after.time,
        hold_reminder_s=form.hold_reminder,
        repeat_s=form.repeat,
        give_up=form.give_up,
        journal_bytes=None if form.journal is None else form.journal.max_gb * 1e9,
        machine=form.machine,
        savepoints=form.savepoints if acts else None,
        probe=form.probe or ProbeSettings(),
        sampling=form.sampling or Sampling(),
        mechanisms=form.mechanisms,
        sparsest=_sparsest(draft.detectors),
        # A safeguard asks for no approval, so it needs the mode that asks for none.
        safeguards=form.safeguards if draft.mode == "enforce" else Safeguards(),
        notify={"console": {}} | {name: _set_keys(keys) for name, keys in form.notify.items()},
        job=form.job,
        cites=tuple(str(draft.parts.folders[0] / name) for name in form.cites),
        verbs=discover.action_classes(),
        resolved=text,
    )


def _set_keys(settings: Settings) -> dict[str, ChannelKey]:
    """Return the keys of a notifier that were set."""
    return {key: value for key, value in vars(settings).items() if value not in (None, ())}


def _sparsest(detectors: Mapping[str, Detector]) -> dict[str, int]:
    """Return the metrics that the probe may take less often than each step, with the most steps."""
    read = {metric for detector in detectors.values() for metric in detector.metrics}
    specs = {metric: metrics.spec_of(metric) for metric in sorted(read)}
    return {metric: spec.sparsest for metric, spec in specs.items() if spec and spec.sparsest}


FOLDER, NAME = "policies/failures", "classes"


def failure_classes(classes: Iterable[FailureClass] = ()) -> tuple[FailureClass, ...]:
    """Return the classes in the order in which they are tried.

    Args:
        classes: `job.failures` of the policy.
    """
    return (*classes, *_shipped_failure_classes())


@cache
def _shipped_failure_classes() -> tuple[FailureClass, ...]:
    path = shipped.find_shipped(FOLDER, NAME)
    assert path is not None, "classes.yaml is part of this distribution"
    problems = Problems()
    root = yaml_document.read_mapping(path, shipped.display_path(path), problems)
    assert root is not None
    form: FailuresFile = read_section(FailuresFile, root, problems, "")
    problems.raise_if_any()
    return form.failures


def _check_failures(root: MapNode, form: PolicyFile, problems: Problems) -> None:
    """Every pattern of `job.failures` is a regular expression."""
    for failure in form.job.failures:
        for pattern in (*failure.match, *failure.logs):
            try:
                re.compile(pattern)
            except re.error as error:
                label = f"job.failures: {failure.id}: {pattern!r} is no regular expression"
                problems.add(root.locate("job"), f"{label}: {error}")


Channels = Mapping[str, Mapping[str, str]]


def load_policy(
    name_or_path: str | Path,
    *,
    mode: str | None = None,
    notify: Channels | None = None,
    warnings: list[Problem] | None = None,
) -> Policy:
    """Load a policy.

    Args:
        name_or_path: a file, or the name of a shipped policy: `nano`, `nano.yaml`, or
            `policies/nano.yaml` outside a checkout.
        mode: takes the place of the file's own mode.
        notify: channels that are added to the file's own, as under its key `notify`.
        warnings: what is odd but allowed is appended here.

    Raises:
        PolicyErrors: every mistake in the policy, its packs and its runbooks.
        InputError: there is no such file, or it cannot be read.
        UsageError: there is no such mode.
    """
    return build_policy(compose_policy(name_or_path, mode=mode, notify=notify, warnings=warnings))


def compose_policy(
    name_or_path: str | Path,
    *,
    mode: str | None = None,
    notify: Channels | None = None,
    warnings: list[Problem] | None = None,
) -> Draft:
    """Load as `load_policy` does, and return the draft, which knows where each part was written."""
    if mode is not None and mode not in MODES:
        raise UsageError(f"no mode {mode!r}", hint=did_you_mean(mode, MODES))
    path = shipped.locate_policy(name_or_path)
    problems = Problems()
    root = yaml_document.read_mapping(path, shipped.display_path(path), problems)
    try:
        return compose_from_root(root, path, mode, problems, notify)
    finally:
        if warnings is not None:
            warnings += problems.warnings


def compose_from_root(
    root: MapNode | None,
    path: Path,
    mode: str | None,
    problems: Problems,
    notify: Channels | None = None,
) -> Draft:
    """Compose the policy that `root` holds, which is in the file `path`; see `load_policy`."""
    if root is None:
        problems.raise_if_any()
    assert root is not None
    count = problems.count
    files = pack.base_chain(root, path, problems)
    for file_root, _ in files:
        _check_sort(file_root, problems)
    if problems.count > count:
        problems.raise_if_any()
    root, removed = pack.merge_policy_chain([file_root for file_root, _ in files], problems)
    if notify:
        root = pack.add_channels(root, notify, problems)
    form: PolicyFile = read_section(PolicyFile, root, problems, "", lenient=True)
    parts = Parts(folders=tuple(dict.fromkeys(file.parent for _, file in files)))
    _fill(parts, root, form, problems)
    pack.remove_rules(root, parts, removed, problems)
    return bind_policy(root, form, parts, path, mode, problems)


def _check_sort(root: MapNode, problems: Problems) -> None:
    """Refuse files of another sort, and files for a newer program."""
    for key, hint in (("pack", "use: [{}] in a policy"), ("runbook", "run: {} in a rule")):
        node = root.get(key)
        if isinstance(node, Scalar):
            problems.add(node, f"this is a {key}, not a policy", hint.format(node.text))
    if "tests" in root.pairs:
        hint = "supervise policy test FILE"
        problems.add(root.pairs["tests"][0], "this is a file of scenarios, not a policy", hint)
    check_version_not_newer(root, problems)


def check_version_not_newer(root: MapNode, problems: Problems) -> None:
    """Refuse a file for a newer program."""
    node = root.get("version")
    text = node.text if isinstance(node, Scalar) else ""
    required = re.fullmatch(r"supervise/v([0-9]+)", text)
    if required and (len(required[1]) > 6 or int(required[1]) > VERSION_NUMBER):
        problems.add(
            root.locate("version"),
            f"{text} is newer than this program, which knows {VERSION}",
            "upgrade supervise-train",
        )


def bind_policy(
    root: MapNode, form: PolicyFile, parts: Parts, path: Path, mode: str | None, problems: Problems
) -> Draft:
    """Bind the parts of a policy to each other; raises when anything is wrong with it.

    A part with a mistake is left out, and so are mistakes that only follow from that.
    """
    detectors, broken = rules.build_detectors(parts, form.baseline, problems)
    drafts = rules.read_rules(parts, detectors, broken, problems)
    inhibited = rules.build_inhibitions(parts, drafts, problems)
    inline = mapping_entries(root, "runbooks") if form.runbooks else {}
    library = RunbookCatalog(inline, parts.folders, problems)
    named = _open_runbooks(drafts, library, problems)
    lint.check_ladder(root, library, problems)
    lint.check_crash(root, library, problems)
    lint.check_relaunch(root, problems)
    _check_failures(root, form, problems)
    used = set(library.opened)
    for name, node in inline.items():
        library.load_with_fallbacks(name, node, "runbooks")
    crash = lint.find_crash_runbook(root)
    if crash is not None:
        named.append((crash[0], root.locate("job"), "job.on_crash"))
    named += [
        (level, root.locate("escalate"), "the ladder") for level, _ in lint.find_ladder_names(root)
    ]
    ways = library.reference_paths(named)
    only_read = library.reachable_names(rule.form.see or "" for rule in drafts) - {*ways}
    # Mode observe runs nothing, so it needs neither budgets nor savepoints.
    acting = (mode or _mode(root, form)) != "observe"
    books = library.resolved().items()
    runnable = [opened for name, opened in books if acting and name not in only_read]
    lint.check_budgets(root, form, runnable, ways, problems)
    lint.check_savepoints(root, runnable, ways, problems)
    lint.check_transitions(root, form, problems)
    lint.check_phases(detectors, parts.detectors, problems)
    lint.check_substitutes(library, problems)
    lint.check_approvals(root, library, parts, problems)
    lint.check_unused(root, form, used, problems)
    lint.check_unread(root, parts, detectors, drafts, problems)
    lint.warn_unmeasured(detectors, parts.detectors, problems)
    lint.check_approval_times(root, form, problems)
    lint.warn_heartbeat_interval(root, form, problems)
    lint.check_rules_exist(parts, root, problems)
    problems.raise_if_any()
    return Draft(
        name=form.policy or path.stem,
        mode=mode or form.mode,
        form=form,
        detectors=detectors,
        rules=tuple(rules.bind_rules(drafts, detectors, form.objective)),
        inhibit=tuple(inhibited),
        runbooks=library.resolved(),
        root=root,
        parts=parts,
    )


def _mode(root: MapNode, form: PolicyFile) -> str:
    """Return the mode; for a misspelt one, what was meant, else the weakest."""
    node = root.get("mode")
    text = node.text if isinstance(node, Scalar) else "observe"
    return form.mode if node is None or text in MODES else near_miss(text, MODES) or "observe"


def _open_runbooks(
    drafts: list[Written], library: RunbookCatalog, problems: Problems
) -> list[tuple[str, Place, str]]:
    """Open the runbooks of all rules; return those that run, with their place and rule."""
    named = []
    for form, entry, *_ in drafts:
        assert isinstance(entry.node, MapNode)
        label = f"rule {entry.name}".rstrip()
        for key, name in (("run", form.run), ("see", form.see)):
            if name is None:
                continue
            location = entry.overridden.get(key) or entry.node.locate(key)
            if key == "run":
                named.append((name, location, label))
            elif name == HOLD:
                problems.add(location, f"{label}: there is nothing to read about hold")
            library.load_with_fallbacks(name, location, label)
    return named


def _fill(parts: Parts, root: MapNode, form: PolicyFile, problems: Problems) -> None:
    """Collect detectors, rules and inhibitions of the packs and of the policy itself."""
    section = root.get("use")
    parts.incomplete = section is not None and not isinstance(section, ListNode)
    names = section.items if isinstance(section, ListNode) else []
    pack.add_packs(names, parts, problems)
    parts.add(root, form, {}, problems)
    pack.apply_overrides(root, form, parts, problems)


# People are neither told nor asked. The job is one launch: a recipe starts the real run again.
LEFT_OUT = ("notify", "approvals")
LEFT_OUT_OF_JOB = ("relaunch", "on_crash", "preempt")


@dataclass(frozen=True, slots=True)
class Isolated:
    """A policy for trials.

    Attributes:
        policy: the whole one.
        text: YAML of what is left; each rule has the digest that it has in `policy`.
        left_out: keys that were given and are not in `text`, as "job.relaunch".
    """

    policy: Policy
    text: str
    left_out: tuple[str, ...]


def load_isolated_policy(name_or_path: str) -> Isolated:
    """Load a policy, and leave out what would reach people or start a job again.

    Raises:
        PolicyErrors, InputError: as `load_policy`.
    """
    draft = compose_policy(name_or_path)
    resolved = policy_document(draft)
    console = resolved.get("notify", {}).keys() <= {"console"}
    left_out = [name for name in LEFT_OUT if resolved.pop(name, None)]
    if console and "notify" in left_out:
        left_out.remove("notify")
    left_out += [f"job.{name}" for name in LEFT_OUT_OF_JOB if resolved["job"].pop(name, None)]
    return Isolated(build_policy(draft), yaml_document.dump_yaml(resolved), tuple(left_out))
