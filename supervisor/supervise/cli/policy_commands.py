"""`supervise policy`: check, show, test and compare policies, packs and runbooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from msgspec import UNSET, Struct, UnsetType

from ..errors import InputError, SuperviseError, UsageError
from ._output import echo, echo_json, echo_source, show_parts_done
from ._params import Number

if TYPE_CHECKING:
    from ..catalog.diagnostics import Problem
    from ..catalog.docs import ProblemFields
    from ..catalog.loader import Draft
    from ..catalog.scenario_subject import Subject
    from ..core.model.policy import Policy, Rule
    from ..lab.scenario_runner import Coverage, Outcome

COMMANDS = ("check", "show", "schema", "test", "diff")


class PolicyCommands(click.Group):
    """Suggests a command for a mistyped name, and lists the commands in the order of their use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from ..catalog.diagnostics import did_you_mean
            from ..errors import UsageError

            raise UsageError(f"no command 'policy {args[0]}'", hint=did_you_mean(args[0], COMMANDS))
        return super().resolve_command(ctx, args)


@click.command(name="policy", cls=PolicyCommands)
def policy_command() -> None:
    """Check, show, test and compare policies.

    A policy uses packs, which are sets of rules, and runbooks, which are sequences of actions.

    \b
    Examples:
      supervise policy check my.yaml
      supervise policy test nano --coverage
      supervise policy diff nano my.yaml
    """


INVALID = 65
NAMED = 3  # rules in a note
SHOWN = 8  # metrics in a note


@policy_command.command(name="check")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "github"]),
    default="text",
    help="github: workflow commands.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.pass_context
def policy_check_command(
    ctx: click.Context, files: tuple[str, ...], form: str, as_json: bool, strict: bool
) -> None:
    """Report all errors and warnings of policy files.

    FILE is a policy, pack, runbook or test file: a path, the name of a shipped policy or pack, or -
    for standard input. The keys of a file determine its type. Files that it refers to (packs,
    runbooks, its policy) are checked too. A note says if no file in this directory matches the
    pattern of the job's checkpoints.

    \b
    Examples:
      supervise policy check my.yaml packs/*.yaml runbooks/*.yaml
      supervise policy check --format github --strict policies/*.yaml

    Exit codes: 0 good, warnings allowed; 65 errors, or warnings with --strict.
    """
    from ..catalog import docs
    from ..catalog.scenario_subject import STDIN, check_file, merge_problems

    text = ""
    if STDIN in files:
        text = sys.stdin.buffer.read().decode("utf-8", "replace")
    checks = [check_file(name, text) for name in dict.fromkeys(files)]
    errors, warnings = merge_problems(checks)
    failed = bool(errors or (strict and warnings))
    if as_json:
        report = {
            "ok": not failed,
            "files": [{"file": check.file, "sort": check.sort} for check in checks],
            "errors": [docs.problem_fields(problem) for problem in errors],
            "warnings": [docs.problem_fields(problem) for problem in warnings],
        }
        echo_json(msgspec.to_builtins(report), indent=2)
    elif form == "github":
        for level, problems in (("error", errors), ("warning", warnings)):
            for problem in problems:
                echo(docs.github_annotation(problem, level))
    else:
        _text(errors, warnings, len(checks))
        for check in checks if not errors else ():
            for note in _notes(check.file) if check.sort == "policy" else ():
                echo(f"{check.file}: note: {note}")
    if failed:
        ctx.exit(INVALID)


def _notes(file: str) -> Iterator[str]:
    """Yield what is to be known of a policy where it is now: its checkpoints, what it cites."""
    from ..catalog import load_policy
    from ..catalog.scenario_subject import STDIN
    from ..checkpoints import discovery

    if file == STDIN:
        return
    policy = load_policy(file)
    patterns = policy.job.checkpoints.glob
    if reason := discovery.explain_unusable(patterns, Path.cwd()) if patterns else "":
        yield f"job.checkpoints.glob finds nothing here to resume from; {reason}"
    for path in policy.cites:
        yield from _cited(policy, path)
    if unjudged := _unjudged(policy):
        names = ", ".join(unjudged[:SHOWN])
        more = f" and {len(unjudged) - SHOWN} more" * (len(unjudged) > SHOWN)
        yield (
            f"measured and judged by no rule: {names}{more}; "
            f"the packs that judge one: supervise metrics show {unjudged[0]}"
        )


def _unjudged(policy: Policy) -> list[str]:
    """Return the metrics that a run under a policy has and no rule reads, but for context."""
    from ..catalog import ABSENCE_REASONS, metrics
    from ._job_check import SUPERVISOR_METRICS

    detectors = [policy.detectors[d] for rule in policy.rules for d in policy.detectors_of(rule)]
    read = {metric for detector in detectors for metric in detector.metrics}
    reported = metrics.ALSO_OF_CHECKPOINTS if policy.job.evaluate is None else ()
    measured = [*metrics.measured_metrics(), *SUPERVISOR_METRICS]
    return [
        metric
        for metric in measured
        if metric not in {*read, *reported}
        and metric not in ABSENCE_REASONS
        and not metric.endswith(".<i>")  # says where, of what the whole tells
        and not metrics.explain_unmeasured(metric, policy)
    ]


def _cited(policy: Policy, path: str) -> Iterator[str]:
    """Yield why a trial that a policy cites does not show what it does today."""
    from ..report.stability_monitors import CitedSuite
    from ..trials.trial_runs import cite_trial

    try:
        monitors = cite_trial(Path(path)).parse(CitedSuite).monitors
    except (SuperviseError, OSError) as error:
        yield f"cites: {error}"
        return
    changed = [
        rule.id
        for rule in policy.rules
        if rule.id in monitors and monitors[rule.id]["digest"] != policy.digest_of(rule)
    ]
    new = [rule.id for rule in policy.rules if monitors and rule.id not in monitors]
    for names, remark in ((changed, "changed since"), (new, "are not in it")):
        if names:
            ellipsis = f" and {len(names) - NAMED} more" * (len(names) > NAMED)
            yield f"cites {path}: rules that {remark}: {', '.join(names[:NAMED])}{ellipsis}"


def _text(errors: list[Problem], warnings: list[Problem], files: int) -> None:
    for problem in errors:
        echo(*problem.render().split("\n"))
    for problem in warnings:
        echo(*problem.render().replace(": ", ": warning: ", 1).split("\n"))
    counts = [
        f"{len(problems)} {noun}{'' if len(problems) == 1 else 's'}"
        for problems, noun in ((errors, "error"), (warnings, "warning"))
        if problems
    ]
    summary = f"{files} file{'' if files == 1 else 's'}"
    echo(f"{summary}: {', '.join(counts) or 'good'}")


Document = dict[str, Any]  # a policy as its YAML file has it


@policy_command.command(name="show")
@click.argument("policy", metavar="P")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option(
    "--rule", "rule_id", metavar="R", help="Show only this rule and the detectors it reads."
)
def policy_show_command(policy: str, as_json: bool, rule_id: str | None) -> None:
    """Show a policy with packs and defaults merged.

    P is a path, or the name of a shipped policy. The output is itself a policy with the same
    digest, even if P extends another one.

    \b
    Examples:
      supervise policy show nano > whole.yaml
      supervise policy show nano --rule loss_spike.coupled
      supervise policy show my.yaml --json | jq '.rules[].id'

    Exit codes: 0; 64 no such rule; 65 the policy is invalid.
    """
    from ..catalog import loader, yaml_document
    from ..catalog.diagnostics import did_you_mean

    draft = loader.compose_policy(policy)
    document = loader.policy_document(draft)
    rules = {built.rule.id: built.rule for built in draft.rules}
    if rule_id is not None and rule_id not in rules:
        hint = did_you_mean(rule_id, rules)
        raise UsageError(f"policy {draft.name} has no rule {rule_id!r}", hint=hint)
    if rule_id is not None:
        document = _only(rules[rule_id], document, draft)
    if as_json:
        echo_json(document, indent=2)
    elif rule_id is None:
        resolved = loader.build_policy(draft)
        echo(f"# {resolved.digest}")
        echo_source(*resolved.resolved.splitlines())
    else:
        echo_source(*yaml_document.dump_yaml(document).splitlines())


def _only(rule: Rule, document: Document, draft: Draft) -> Document:
    """Keep the parts of a policy that concern one rule."""
    from ..core.model.policy import detectors_behind

    names = detectors_behind(draft.detectors, rule.uses)
    written = next(entry for entry in document["rules"] if entry["id"] == rule.id)
    books = document["runbooks"]
    shown = {
        "detectors": {n: body for n, body in document["detectors"].items() if n in names},
        "rules": [written],
        "inhibit": [i for i in document["inhibit"] if rule.id in (*i["mute"], i.get("by_rule"))],
        "runbooks": {n: books[n] for n in draft.runbooks if n == written.get("run")},
    }
    return {key: value for key, value in shown.items() if value}


FILES = {
    "policy": "policies/policy.schema.json",
    "pack": "policies/pack.schema.json",
    "runbook": "runbooks/runbook.schema.json",
    "test": "policies/test.schema.json",
    "incident": "policies/incident.schema.json",
}


@policy_command.command(name="schema")
@click.argument("sort", type=click.Choice(list(FILES)), default="policy")
def policy_schema_command(sort: str) -> None:
    """Print the JSON Schema (draft-07) of a file type.

    An editor with a YAML language server completes and checks a file whose first line is
    `# yaml-language-server: $schema=policy.schema.json`.

    \b
    Examples:
      supervise policy schema > policy.schema.json
      supervise policy schema test > test.schema.json
    """
    from ..catalog import docs

    echo_source(*docs.schema_file_text(FILES[sort]).splitlines())


FAILED = 1


@policy_command.command(name="test")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--coverage", is_flag=True, help="Also report what no scenario covers.")
@click.option(
    "--min",
    "least",
    type=Number(0, 100),
    metavar="PERCENT",
    help="With --coverage: fail below this.",
)
@click.option("--strict", is_flag=True, help="Treat warnings as failures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def policy_test_command(
    ctx: click.Context,
    files: tuple[str, ...],
    coverage: bool,
    least: float | None,
    strict: bool,
    as_json: bool,
) -> None:
    """Run scenarios and check the decisions of a policy.

    A scenario feeds series of metrics to the policy. FILE is a test file, a pack (its own
    scenarios), or a policy (the packs that it uses, and tests/<name>.yaml beside it). Shipped
    policies and packs go by name.

    \b
    Examples:
      supervise policy test policies/tests/nano.yaml
      supervise policy test nano --coverage --min 80
      supervise policy test packs/mine.yaml --strict

    Exit codes: 0 good; 1 a scenario failed, coverage below --min, or warnings with --strict; 65
    invalid file or no scenarios.
    """
    from ..lab import scenario_runner
    from ..lab.scenario_runner import Coverage

    if least is not None and not coverage:
        raise UsageError("--min needs a coverage report", hint="add --coverage")
    shown, warnings = Coverage(), list["Problem"]()
    paths = _paths(files, shown)
    outcomes: dict[str, list[Outcome]] = {}
    for subject in show_parts_done(_loaded(paths, warnings), "files of scenarios"):
        outcomes[subject.label] = scenario_runner.run_suite(subject)
        shown.add(subject, [outcome.result for outcome in outcomes[subject.label]])
    failed = any(outcome.failures for outcome_list in outcomes.values() for outcome in outcome_list)
    low = coverage and least is not None and shown.percent() < least
    ok = not (failed or low or (strict and warnings))
    if as_json:
        report = _report(ok, outcomes, shown if coverage else None, warnings)
        echo_json(msgspec.to_builtins(report), indent=2)
    else:
        _print_scenarios(outcomes, warnings)
        if coverage:
            _print_coverage(shown, least)
    if not ok:
        ctx.exit(FAILED)


def _paths(files: tuple[str, ...], coverage: Coverage) -> list[Path]:
    """Return the packs and test files of the arguments, each once.

    The coverage counts everything that a policy defines, tested or not.

    Raises:
        InputError, PolicyErrors: a file is invalid, or cannot hold scenarios.
    """
    from ..catalog import load_policy, scenario_subject
    from ..catalog.diagnostics import Problems

    paths: dict[Path, None] = {}  # in order
    for name in files:
        path = scenario_subject.locate_file(name)
        problems = Problems()
        root = scenario_subject.read_subject(path, problems)
        problems.raise_if_any()
        assert root is not None
        sort = scenario_subject.file_kind(root)
        if sort == "runbook":
            raise InputError(
                f"{path}: a runbook has no scenarios", hint="test a policy that uses it"
            )
        if sort != "policy":
            paths[path.resolve()] = None
            continue
        coverage.require(load_policy(path))
        several = scenario_subject.list_policy_files(path)
        if not several:
            hint = f"write {path.parent / scenario_subject.TESTS / path.name}"
            raise InputError(f"{path}: no packs and no tests, so there are no scenarios", hint=hint)
        paths.update((file.resolve(), None) for file in several)
    return list(paths)


def _loaded(paths: list[Path], warnings: list[Problem]) -> list[Subject]:
    """Read all files, so that errors are found before any work.

    Raises:
        InputError, PolicyErrors: a file is invalid, or there is no scenario in any.
    """
    from ..lab.scenario_runner import load_suite

    subjects = [load_suite(path, warnings) for path in paths]
    if not any(subject.scenarios for subject in subjects):
        labels = ", ".join(subject.label for subject in subjects)
        raise InputError(f"{labels}: no scenarios", hint="see policies/README.md")
    return subjects


def _print_scenarios(outcomes: dict[str, list[Outcome]], warnings: list[Problem]) -> None:
    for warning in warnings:
        echo(*warning.render().replace(": ", ": warning: ", 1).split("\n"))
    total = failures = 0
    for name, outcome_list in outcomes.items():
        bad = [outcome for outcome in outcome_list if outcome.failures]
        total, failures = total + len(outcome_list), failures + len(bad)
        echo(f"{name}: {len(outcome_list) - len(bad)} of {len(outcome_list)} scenarios pass")
        for outcome in bad:
            echo(f"  FAILED {outcome.form.name}")
            for location, message in outcome.failures:
                echo(f"    {location}: {message}")
    if len(outcomes) > 1:
        echo(f"all: {total - failures} of {total} scenarios pass")


def _print_coverage(coverage: Coverage, least: float | None) -> None:
    parts = ", ".join(f"{name} {a}/{b}" for name, (a, b) in coverage.parts().items())
    required = "" if least is None else f" (required: {least:g} %)"
    echo(f"coverage: {coverage.percent():.0f} %{required}: {parts}")
    for sentence in coverage.missing():
        echo(f"  {sentence}")


class FailureRow(Struct, frozen=True):
    """A failed expectation of a scenario, and its position."""

    location: str = msgspec.field(name="where")
    message: str


class ScenarioRow(Struct, frozen=True):
    """The outcome of a scenario."""

    name: str
    location: str = msgspec.field(name="where")
    ok: bool
    frames: int
    failures: Sequence[FailureRow]


class FileRow(Struct, frozen=True):
    """The outcomes of the scenarios of a file."""

    file: str
    scenarios: Sequence[ScenarioRow]


class CoverageCount(Struct, frozen=True):
    """The number of parts that a scenario covers, of all of a category."""

    covered: int = msgspec.field(name="shown")
    total: int = msgspec.field(name="of")


class CoverageReport(Struct, frozen=True):
    """The coverage of a policy by its scenarios; `missing` holds a sentence per gap."""

    percent: float
    parts: Mapping[str, CoverageCount]
    missing: Sequence[str]


class TestReport(Struct, frozen=True):
    """The document that `policy test --json` prints."""

    ok: bool
    files: Sequence[FileRow]
    warnings: Sequence[ProblemFields]
    coverage: CoverageReport | UnsetType = UNSET


def _report(
    ok: bool, outcomes: dict[str, list[Outcome]], coverage: Coverage | None, warnings: list[Problem]
) -> TestReport:
    from ..catalog import docs

    return TestReport(
        ok,
        [FileRow(name, list(map(_scenario, group))) for name, group in outcomes.items()],
        [docs.problem_fields(problem) for problem in warnings],
        UNSET if coverage is None else _coverage_report(coverage),
    )


def _scenario(outcome: Outcome) -> ScenarioRow:
    failures = [FailureRow(location, message) for location, message in outcome.failures]
    frames = len(outcome.result.states)
    return ScenarioRow(outcome.form.name, outcome.location, not failures, frames, failures)


def _coverage_report(coverage: Coverage) -> CoverageReport:
    parts = {name: CoverageCount(*counts) for name, counts in coverage.parts().items()}
    return CoverageReport(coverage.percent(), parts, list(coverage.missing()))


DIFFERENT = 1


@policy_command.command(name="diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def policy_diff_command(ctx: click.Context, a: str, b: str, as_json: bool) -> None:
    """Compare what two policies do, whichever file or pack defines it.

    A and B are paths or names of shipped policies. Differences are grouped by effect (acts where it
    did not, threshold loosened, ...), the most serious first, with old and new values.

    \b
    Examples:
      supervise policy diff nano my.yaml
      supervise policy diff runs/20260105-101112-7f3a9c/policy.yaml nano --json

    Exit codes: 0 the same; 1 different; 65 a policy is invalid.
    """
    from ..catalog import loader, yaml_document
    from ..catalog.loader import compose_policy
    from ..lab import policy_diff

    drafts = [compose_policy(name) for name in (a, b)]
    changes = policy_diff.compare_policies(*(loader.policy_document(draft) for draft in drafts))
    if as_json:
        report = {
            "same": not changes,
            "a": {"policy": drafts[0].name, "digest": loader.build_policy(drafts[0]).digest},
            "b": {"policy": drafts[1].name, "digest": loader.build_policy(drafts[1]).digest},
            "changes": msgspec.to_builtins(changes),
        }
        echo_json(report, indent=2)
    else:
        for effect, group in groupby(changes, key=lambda change: change.effect):
            echo(f"{effect}:")
            for change in group:
                label = f"{change.part} {change.key}".rstrip()
                if change.key == "" and change.old is None:
                    echo(f"  + {label}: {yaml_document.inline_yaml(change.new)}")
                elif change.key == "" and change.new is None:
                    echo(f"  - {label}: {yaml_document.inline_yaml(change.old)}")
                else:
                    old, new = (
                        yaml_document.inline_yaml(change.old),
                        yaml_document.inline_yaml(change.new),
                    )
                    echo(f"  ~ {label}: {old} -> {new}")
        if not changes:
            echo("the same")
    if changes:
        ctx.exit(DIFFERENT)
