"""A policy file -> `core.model.policy.Policy`: packs merged, names bound, defaults filled, linted.

Everything that is wrong is found in one go and raised together. The result does not refer to any
file: `Policy.resolved` is the whole of it as YAML, and loads to the same digest.
"""

from __future__ import annotations

from collections.abc import Mapping as AbstractMapping
from pathlib import Path

from ...core.model.decisions import MODES
from ...core.model.policy import HOLD, Policy
from ...errors import UsageError
from ..document import yaml_reader
from ..document.diagnostics import Place, Problem, Problems, did_you_mean, near_miss
from ..document.nodes import Mapping, Scalar, Sequence
from ..forms.file_forms import VERSION, PolicyFile
from ..inventory import shipped
from ..schema.dataclass_types import read_form
from . import extension, failure_catalog, freeze, lint, pack, references, rules
from .freeze import Draft
from .pack import Parts
from .rules import Written
from .runbook_library import RunbookCatalog

Channels = AbstractMapping[str, AbstractMapping[str, str]]


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
    return freeze.policy(compose(name_or_path, mode=mode, notify=notify, warnings=warnings))


def compose(
    name_or_path: str | Path,
    *,
    mode: str | None = None,
    notify: Channels | None = None,
    warnings: list[Problem] | None = None,
) -> Draft:
    """Load as `load_policy` does, and return the draft, which knows where each part was written."""
    if mode is not None and mode not in MODES:
        raise UsageError(f"no mode {mode!r}", hint=did_you_mean(mode, MODES))
    path = shipped.locate(name_or_path)
    problems = Problems()
    root = yaml_reader.read(path, shipped.label(path), problems)
    try:
        return from_root(root, path, mode, problems, notify)
    finally:
        if warnings is not None:
            warnings += problems.warnings


def from_root(
    root: Mapping | None,
    path: Path,
    mode: str | None,
    problems: Problems,
    notify: Channels | None = None,
) -> Draft:
    """Compose the policy that `root` holds, which is in the file `path`; see `load_policy`."""
    if root is None:
        problems.stop()
    assert root is not None
    before = problems.count
    files = extension.chain(root, path, problems)
    for each, _ in files:
        _check_sort(each, problems)
    if problems.count > before:
        problems.stop()
    root, removed = extension.fold([each for each, _ in files], problems)
    if notify:
        root = extension.with_channels(root, notify, problems)
    form: PolicyFile = read_form(PolicyFile, root, problems, "", lenient=True)
    parts = Parts(folders=tuple(dict.fromkeys(file.parent for _, file in files)))
    _fill(parts, root, form, problems)
    extension.remove(root, parts, removed, problems)
    return assemble(root, form, parts, path, mode, problems)


def _check_sort(root: Mapping, problems: Problems) -> None:
    """Refuse files of another sort, and files for a newer program."""
    for key, hint in (("pack", "use: [{}] in a policy"), ("runbook", "run: {} in a rule")):
        node = root.get(key)
        if isinstance(node, Scalar):
            problems.add(node, f"this is a {key}, not a policy", hint.format(node.text))
    if "tests" in root.pairs:
        at, hint = root.pairs["tests"][0], "supervise policy test FILE"
        problems.add(at, "this is a file of scenarios, not a policy", hint)
    check_version(root, problems)


def check_version(root: Mapping, problems: Problems) -> None:
    """Refuse a file for a newer program."""
    node = root.get("version")
    text = node.text if isinstance(node, Scalar) else ""
    name, _, number = VERSION.rpartition("/v")
    if text.startswith(f"{name}/v") and text.removeprefix(f"{name}/v").isdecimal():
        required = text.removeprefix(f"{name}/v")
        if len(required) > 6 or int(required) > int(number):
            problems.add(
                root.place("version"),
                f"{text} is newer than this program, which knows {VERSION}",
                "upgrade supervise-train",
            )


def assemble(
    root: Mapping, form: PolicyFile, parts: Parts, path: Path, mode: str | None, problems: Problems
) -> Draft:
    """Bind the parts of a policy to each other; raises when anything is wrong with it.

    A part with a mistake is left out, and so are mistakes that only follow from that.
    """
    detectors, broken = rules.detectors(parts, form.baseline, problems)
    written = rules.read(parts, detectors, broken, problems)
    inhibited = rules.inhibitions(parts, written, problems)
    library = RunbookCatalog(form.runbooks, parts.folders, problems)
    named = _open_runbooks(written, library, problems)
    references.ladder(root, library, problems)
    references.crash(root, library, problems)
    references.relaunch(root, problems)
    failure_catalog.check(root, form, problems)
    used = set(library.opened)
    for name, node in form.runbooks.items():
        library.open(name, node, "runbooks")
    crash = references.on_crash(root)
    if crash is not None:
        named.append((crash[0], root.place("job"), "job.on_crash"))
    named += [(level, root.place("escalate"), "the ladder") for level, _ in references.levels(root)]
    ways = library.ways(named)
    only_read = library.reach(rule.form.see or "" for rule in written) - {*ways}
    # Mode observe runs nothing, so it needs neither budgets nor savepoints.
    acting = (mode or _mode(root, form)) != "observe"
    books = library.resolved().items()
    runnable = [opened for name, opened in books if acting and name not in only_read]
    lint.budgets(root, form, runnable, ways, problems)
    lint.savepoints(root, runnable, ways, problems)
    references.table(root, form, problems)
    references.phases(detectors, parts.detectors, problems)
    lint.instead(library, problems)
    lint.approvals(root, library, parts, problems)
    lint.unused(root, form, used, problems)
    lint.unread(root, parts, detectors, written, problems)
    lint.unmeasured(detectors, parts.detectors, problems)
    lint.short_approvals(root, form, problems)
    lint.heartbeat(root, form, problems)
    lint.idle(parts, root, problems)
    problems.stop()
    return Draft(
        name=form.policy or path.stem,
        mode=mode or form.mode,
        form=form,
        detectors=detectors,
        rules=tuple(rules.bind(written, detectors, form.objective)),
        inhibit=tuple(inhibited),
        runbooks=library.resolved(),
        root=root,
        parts=parts,
    )


def _mode(root: Mapping, form: PolicyFile) -> str:
    """Return the mode; for a misspelt one, what was meant, else the weakest."""
    node = root.get("mode")
    text = node.text if isinstance(node, Scalar) else "observe"
    return form.mode if node is None or text in MODES else near_miss(text, MODES) or "observe"


def _open_runbooks(
    written: list[Written], library: RunbookCatalog, problems: Problems
) -> list[tuple[str, Place, str]]:
    """Open the runbooks of all rules; return those that run, with their place and rule."""
    named = []
    for form, entry, *_ in written:
        assert isinstance(entry.node, Mapping)
        what = f"rule {entry.name}".rstrip()
        for key, name in (("run", form.run), ("see", form.see)):
            if name is None:
                continue
            place = entry.overridden.get(key) or entry.node.place(key)
            if key == "run":
                named.append((name, place, what))
            elif name == HOLD:
                problems.add(place, f"{what}: there is nothing to read about hold")
            library.open(name, place, what)
    return named


def _fill(parts: Parts, root: Mapping, form: PolicyFile, problems: Problems) -> None:
    """Collect detectors, rules and inhibitions of the packs and of the policy itself."""
    section = root.get("use")
    parts.incomplete = section is not None and not isinstance(section, Sequence)
    names = section.items if isinstance(section, Sequence) else []
    pack.use(names, parts, problems)
    parts.add(root, form, {}, problems)
    pack.override(root, form, parts, problems)
