"""A policy file -> `core.rule.Policy`: packs merged, names bound, defaults filled in, linted.

Everything that is wrong is found in one go and raised together. The result does not refer to any
file: `Policy.resolved` is the whole of it as YAML, and loads to the same digest.
"""

from __future__ import annotations

from pathlib import Path

from ..core.rule import HOLD, Policy
from ..core.values import MODES
from ..errors import InputError, UsageError
from . import freeze, inhibit, lint, load, pack, rules, shipped
from .forms import VERSION, PolicyFile
from .freeze import Draft, Made
from .kinds import BAD
from .nodes import Mapping, Scalar, Sequence
from .pack import Parts
from .problems import Problem, Problems, did_you_mean
from .record import build
from .runbook import Library


def locate(name_or_path: str | Path) -> Path:
    """Return the file of a policy: a path, else the name of a shipped one.

    Raises:
        InputError: there is none.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    name = path.name.removesuffix(".yaml")
    if path.parent in (Path(), Path("policies")) and (found := shipped.find("policies", name)):
        return found  # also beside a directory of that name
    if path.is_dir():
        raise InputError(f"{path}: is a directory", hint="give a policy file or a name")
    if path.parent not in (Path(), Path("policies")):
        raise InputError(f"no policy {str(name_or_path)!r}", hint="there is no such file")
    names = shipped.names("policies")
    raise InputError(f"no policy {str(name_or_path)!r}", hint=did_you_mean(name, names))


def load_policy(
    name_or_path: str | Path,
    *,
    mode: str | None = None,
    warnings: list[Problem] | None = None,
) -> Policy:
    """Load a policy.

    Args:
        name_or_path: a file, or the name of a shipped policy: `nano`, `nano.yaml`, or
            `policies/nano.yaml` outside a checkout.
        mode: takes the place of the file's own mode.
        warnings: what is odd but allowed is appended here.

    Raises:
        PolicyErrors: every mistake in the policy, its packs and its runbooks.
        InputError: there is no such file, or it cannot be read.
        UsageError: there is no such mode.
    """
    return freeze.policy(compose(name_or_path, mode=mode, warnings=warnings))


def compose(
    name_or_path: str | Path,
    *,
    mode: str | None = None,
    warnings: list[Problem] | None = None,
) -> Draft:
    """Do as `load_policy`, and return the draft, which still knows where everything was written."""
    if mode is not None and mode not in MODES:
        raise UsageError(f"no mode {mode!r}", hint=did_you_mean(mode, MODES))
    path = locate(name_or_path)
    problems = Problems()
    root = load.read(path, shipped.label(path), problems)
    draft = from_root(root, path, mode, problems)
    if warnings is not None:
        warnings += problems.warnings
    return draft


def from_root(root: Mapping | None, path: Path, mode: str | None, problems: Problems) -> Draft:
    """Compose the policy that `root` holds; packs and runbooks are looked for beside `path`."""
    if root is not None:
        _check_sort(root, problems)
    problems.stop()
    assert root is not None
    return _draft(root, path, mode, problems)


def _check_sort(root: Mapping, problems: Problems) -> None:
    """Refuse what is no policy, and what a newer program wrote: half of it would be lost on us."""
    for key, hint in (("pack", "use: [{}] in a policy"), ("runbook", "run: {} in a rule")):
        node = root.get(key)
        if isinstance(node, Scalar):
            problems.add(node, f"this is a {key}, not a policy", hint.format(node.text))
    if "tests" in root.pairs:
        at, hint = root.pairs["tests"][0], "supervise policy test FILE"
        problems.add(at, "these are scenarios for a policy, not a policy", hint)
    check_version(root, problems)


def check_version(root: Mapping, problems: Problems) -> None:
    """Refuse a file that a newer program wrote."""
    node = root.get("version")
    text = node.text if isinstance(node, Scalar) else ""
    name, _, number = VERSION.rpartition("/v")
    if text.startswith(f"{name}/v") and text.removeprefix(f"{name}/v").isdecimal():
        wanted = text.removeprefix(f"{name}/v")
        if len(wanted) > 6 or int(wanted) > int(number):
            problems.add(
                root.place("version"), f"{text} is newer than this program, which knows {VERSION}",
                "upgrade supervise-train",
            )  # fmt: skip


def _draft(root: Mapping, path: Path, mode: str | None, problems: Problems) -> Draft:
    """Put the policy together; raises when anything is wrong with it."""
    form: PolicyFile = build(PolicyFile, root, problems, "", lenient=True)
    if form is BAD:
        problems.stop()
    parts = _parts(root, form, path, problems)
    return assemble(root, form, parts, path, mode, problems)


def assemble(
    root: Mapping, form: PolicyFile, parts: Parts, path: Path, mode: str | None, problems: Problems
) -> Draft:
    """Bind the parts of a policy to each other; raises when anything is wrong with it."""
    detectors, broken = rules.detectors(parts, form.baseline, problems)
    made = rules.rules(parts, detectors, broken, problems)
    inhibitions = inhibit.inhibitions(parts, [m.rule for m in made], problems)
    library = Library(form.runbooks, path.parent, problems)
    read = _open_runbooks(made, library, problems)
    lint.ladder(root, form, library, problems)
    lint.crash(root, form, library, problems)
    used = set(library.opened)
    for name, node in form.runbooks.items():
        library.open(name, node, "runbooks")
    acted = {*(m.form.run or "" for m in made), *form.escalate.ladder, form.job.on_crash or ""}
    acts = library.reach(acted)
    only_read = library.reach(read) - acts
    # Observing runs nothing, so nothing needs to be held back or to be gone back to.
    runnable = [
        opened
        for name, opened in library.resolved().items()
        if name not in only_read and (mode or form.mode) != "observe"
    ]
    lint.budgets(root, form, runnable, problems)
    lint.savepoints(root, form, runnable, problems)
    lint.table(root, form, problems)
    lint.instead(library, problems)
    lint.approvals(root, form, library, problems)
    problems.stop()
    lint.unused(form, used, problems)
    lint.unmeasured(detectors, parts.detectors, problems)
    lint.idle(made, root, problems)
    return Draft(
        name=form.policy or path.stem,
        mode=mode or form.mode,
        form=form,
        detectors=detectors,
        rules=tuple(made),
        inhibit=tuple(inhibitions),
        runbooks=library.resolved(),
        root=root,
        parts=parts,
    )


def _open_runbooks(made: list[Made], library: Library, problems: Problems) -> set[str]:
    """Open what the rules run and what people are sent to; return the latter's names."""
    read = set()
    for rule, form, entry in made:
        assert isinstance(entry.node, Mapping)
        for key, name in (("run", form.run), ("see", form.see)):
            if name is None:
                continue
            place = entry.overridden.get(key) or entry.node.place(key)
            if key == "see":
                read.add(name)
                if name == HOLD:
                    problems.add(place, f"rule {rule.id}: there is nothing to read about hold")
            library.open(name, place, f"rule {rule.id}")
    return read


def _parts(root: Mapping, form: PolicyFile, path: Path, problems: Problems) -> Parts:
    """Collect detectors, rules and inhibitions of the packs and of the policy itself."""
    parts = Parts()
    section = root.get("use")
    names = section.items if isinstance(section, Sequence) and form.use else []
    before = problems.count
    pack.use(names, path.parent, parts, problems)
    if problems.count > before or (problems.count and section is not None and not form.use):
        problems.stop()  # what a broken pack lacks would look like mistakes in the policy
    parts.add(root, form, {}, problems)
    pack.override(root, form, parts, problems)
    return parts
