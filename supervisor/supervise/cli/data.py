"""`supervise data`: training data before the run, its gate, and faults that prove the gate."""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..core.model.decisions import BREACH, UNKNOWN
from ..errors import InputError, StoreError, UsageError
from ..store import files
from ._output import echo, echo_json, print_table, progress_line, reserve_stdout
from ._params import ARGV, PROGRAM

if TYPE_CHECKING:
    from ..core.model.policy import Policy, Rule
    from ..core.rank_monitor import RankMonitor
    from ..data.build_check import BuildCheck, Request
    from ..data.corpus import Fields
    from ..data.manifest import Manifest
    from ..data.manifest_page import Finding

PACK = "data_build"
SUITE = "supervise data check"
SEVERITIES = ("SEV0", "SEV1", "SEV2")
ELEMENTS = {"fail": "failure", "not judged": "skipped"}
MEMBERS = 5  # of a family of metrics, on the terminal
FAILED = 1
OUTPUTS = ("manifest", "report", "index", "junit")  # options
FILE = click.Path(path_type=Path, dir_okay=False)
ANY = click.Path(path_type=Path)


Command = TypeVar("Command", bound=Callable[..., Any])


def read_options(command: Command) -> Command:
    """Add the options that say how data is read, of one meaning in all commands."""
    for option in (
        click.option(
            "--dtype",
            type=click.Choice(("uint16", "uint32", "int32")),
            help="Type in flat token files.",
        ),
        click.option("--pad", type=click.IntRange(0), metavar="ID", help="Token of padding."),
        click.option(
            "--eos", type=click.IntRange(0), metavar="ID", help="Token that ends a document."
        ),
        click.option(
            "--source-field", default="", metavar="NAME", help="Field that names the source."
        ),
        click.option("--text-field", default="", metavar="NAME", help="Field that holds the text."),
    ):
        command = option(command)
    return command


@click.group(name="data", no_args_is_help=True)
def data_command() -> None:
    """Check training data before a run.

    Needs the extra: pip install 'supervise-train[data]'.

    \b
    Examples:
      supervise data check data/ --val val/ --manifest data.json
      supervise data check data/ --baseline data.json --report data.html
      supervise data drill dup:rate=0.3 data/ /tmp/faulty
    """


@data_command.command()
@click.argument("paths", nargs=-1, required=True, type=ANY, metavar="PATH...")
@click.option(
    "--val", multiple=True, type=ANY, help="Held-out data to search for in PATH; repeatable."
)
@click.option("--baseline", type=FILE, metavar="FILE", help="Manifest of the build before.")
@click.option("--manifest", type=FILE, metavar="FILE", help="Write the manifest there.")
@click.option("--report", type=FILE, metavar="FILE", help="Write one HTML file.")
@click.option(
    "--index",
    type=FILE,
    metavar="FILE",
    help="Index flat token files, or with --tokenizer texts, whose tokens go to FILE.tokens; for "
    "job: {evaluate: {index: FILE}}; 0.62 bytes a token.",
)
@click.option("--junit", type=FILE, metavar="FILE", help="Write JUnit XML.")
@click.option(
    "--level",
    type=click.Choice(("cheap", "full")),
    help="cheap: no search for near duplicates or shared passages. Default: full up to 50 GiB.",
)
@click.option("--tokenizer", default="", metavar="FILE", help="A tokenizer.json.")
@click.option("--toxicity", default="", metavar="MODULE:FUNCTION", help="Scores a list of texts.")
@click.option(
    "--rejects",
    multiple=True,
    metavar="FILE|NAME=DIR",
    help="Report of the filters, or the documents that they dropped; repeatable.",
)
@click.option(
    "--prompts", type=ANY, metavar="FILE", help="Look for these prompts of a safety evaluation."
)
@read_options
@click.option(
    "--policy", metavar="P", help="Policy whose rules judge. Default: those of the pack data_build."
)
@click.option(
    "--fail-on",
    type=click.Choice(SEVERITIES),
    default="SEV2",
    show_default=True,
    help="Least grave severity that fails the gate.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of processes.",
)
@click.option("--part", metavar="I/N", help="Measure this part of the pieces only; needs --work.")
@click.option("--work", type=ANY, metavar="DIR", help="Directory for results of pieces.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("-q", "--quiet", is_flag=True, help="Print findings only.")
@click.pass_context
def check(ctx: click.Context, /, paths: tuple[Path, ...], **options: Any) -> None:
    """Measure training data and judge it, as a gate of its build.

    Reads JSON lines (also .gz, .zst, .xz, .bz2), Parquet, Arrow, flat token files (nanoGPT, llm.c),
    Megatron's .bin and .idx, MDS, litdata, WebDataset archives and text. The data is read once, in
    pieces: 256 MiB of JSON lines, else a file. Memory grows with the number of duplicates, and of
    documents in a piece. With --manifest or --work, a check that was stopped and is repeated goes
    on with the next piece. A source is a field's value, else the first folder that is no shard
    (shard_12, or one of ten numbers or more from 000 on), else the file's name without numbers.

    The rules of --policy judge; most of them compare with --baseline, the manifest of the build
    before. What cannot be measured is listed with the reason, and not judged. A training run
    records the manifest if its policy has job: {manifest: [data.json]}.

    On many machines: run --part I/N on each, with --work in a folder that they share, then once
    without --part.

    \b
    Examples:
      supervise data check data/ --val val/ --manifest data.json
      supervise data check data/ --baseline data.json --report data.html
      supervise data check /data --work /w --part $SLURM_ARRAY_TASK_ID/100

    Exit codes: 0 the gate passed; 1 it failed; 64 wrong usage, or a folder cannot be written;
    65 nothing can be read, the scorer fails, a process was killed, or a package is missing; 130
    interrupted.
    """
    from ..data import build_check
    from ..data.manifest import encode_manifest, judge_numbers, read_manifest

    policy = _policy(options["policy"])
    _rules_of(policy)
    base = None if options["baseline"] is None else read_manifest(options["baseline"])
    request = _request(paths, options)
    rejects = build_check.read_filter_stages(options["rejects"], request.fields)
    prompts = options["prompts"] and build_check.read_prompts(options["prompts"])
    with _interrupted_by_term(), _folder(options, request) as (folder, is_own):
        checking = build_check.BuildCheck(request, folder)
        _check_outputs(options, checking)
        with progress_line("data") as report:
            left = checking.run(report)
        if request.part is not None:
            _print_part(ctx, left, len(checking.pieces))
            return
        with progress_line("copies", is_counted=False):
            manifest = checking.manifest()
        _require_documents(manifest)
        manifest.rejects = build_check.add_totals(rejects, manifest.counts.documents)
        manifest.prompts = prompts
        judge_numbers(manifest, base)
        findings = judge_manifest(policy, manifest, options["fail_on"])
        _write(options["manifest"], encode_manifest(manifest))
        _write_index(options["index"], checking, options["tokenizer"])
        _write_reports(manifest, findings, base, options)
        if is_own:
            checking.remove_results()
    with reserve_stdout(options[name] for name in OUTPUTS):
        _print(manifest, findings, base, options)
    if any(finding.gate for finding in findings):
        ctx.exit(FAILED)


@data_command.command()
@click.argument("fault", metavar="KIND[:rate=R]")
@click.argument("paths", nargs=-1, required=True, type=ANY, metavar="PATH... OUT")
@click.option("--val", multiple=True, type=ANY, help="Held-out data, for KIND leak.")
@click.option(
    "--rejects",
    multiple=True,
    metavar="FILE|NAME=DIR",
    help="The --rejects of the baseline's check, for KIND filter.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="The same seed plants the same fault.",
)
@read_options
def drill(*, fault: str, paths: tuple[Path, ...], **options: Any) -> None:
    """Write a copy of training data with a known fault.

    KIND is mix, language, filter, binary, truncate, dup, leak, repeat, pii, toxic or drop. The copy
    is JSON lines, and is read by the same options as the original. To test the gate, check the copy
    with the manifest of the original as --baseline: it must report the fault.

    \b
    Examples:
      supervise data drill dup:rate=0.3 data/ /tmp/faulty
      supervise data check /tmp/faulty --baseline data.json

    Exit codes: 0 written; 64 wrong usage, or the copy cannot be written; 65 the data cannot be
    read; 130 interrupted: nothing is left.
    """
    from ..data import planted_faults

    if len(paths) < 2:
        raise UsageError("no folder for the copy", hint="supervise data drill KIND PATH OUT")
    name, rate = planted_faults.parse_fault(fault)
    *sources, out = paths
    with _interrupted_by_term():
        before, after = planted_faults.plant_fault(
            name,
            rate,
            sources,
            out,
            val=options["val"],
            rejects=options["rejects"],
            fields=_fields(options),
            seed=options["seed"],
        )
    about = planted_faults.FAULTS[name]
    echo(f"{out}: {after} documents of {before}; {name} at {rate:g} {about.meaning}")
    echo(f"expected: rule {PACK}.{about.rule}")
    argv = ["supervise", "data", "check", str(out), "--baseline", "MANIFEST"]
    if name == "leak":
        argv += [part for path in options["val"] for part in ("--val", str(path))]
    if name == "toxic":
        argv += ["--toxicity", "MODULE:FUNCTION"]
    if name == "filter":
        argv += ["--rejects", str(planted_faults.rejects_path(out))]
    argv += [
        part
        for option in ("text_field", "source_field", "eos", "pad", "dtype")
        if options[option] not in ("", None)
        for part in (f"--{option.replace('_', '-')}", str(options[option]))
    ]
    echo(f"next: {shlex.join(argv)}")


# ── judging ───────────────────────────────────────────────────────────────────────────────────────


def _policy(name: str | None) -> Policy:
    """Return the policy that judges: one that is named, else that of the pack alone."""
    if name is not None:
        from ..catalog import load_policy

        return load_policy(name, mode="observe")
    from ..catalog import scenario_subject
    from ..catalog.diagnostics import Problems

    problems = Problems()
    path = scenario_subject.locate_file(PACK)
    root = scenario_subject.read_subject(path, problems)
    assert root is not None  # it is shipped
    return scenario_subject.subject_of_pack(root, path, problems).policy


def _rules_of(policy: Policy) -> list[Rule]:
    """Return the rules that read metrics of data. Raises UsageError on none."""
    from ..catalog.metrics import BUILD

    rules = [
        rule
        for rule in policy.rules
        if any(metric.partition(".")[0] in BUILD for metric in _metrics_of(policy, rule))
    ]
    if not rules:
        raise UsageError("no rule of this policy is about data", hint=f"use: [{PACK}]")
    return rules


def judge_manifest(policy: Policy, manifest: Manifest, fail_on: str) -> list[Finding]:
    """Return how the rules that read metrics of data judge a manifest."""
    from ..core.model.events import LateFrame
    from ..core.rank_monitor import RankMonitor

    monitor = RankMonitor(policy)
    monitor.feed_late(LateFrame(0, "build", 0, 0, manifest.metrics), 0)
    codes = {rule.id: rule.when(monitor.codes) for rule in _rules_of(policy)}
    muted = {
        other
        for inhibit in policy.inhibit
        if codes.get(inhibit.by_rule or "") == BREACH
        for other in inhibit.mute
    }
    limit = SEVERITIES.index(fail_on)
    return [
        _finding(rule, codes[rule.id], limit, policy, monitor, manifest)
        for rule in policy.rules
        if rule.id in codes and rule.id not in muted
    ]


def _finding(
    rule: Rule, code: int, limit: int, policy: Policy, monitor: RankMonitor, manifest: Manifest
) -> Finding:
    from ..data.manifest_page import FAIL, PASS, UNJUDGED, Finding

    numbers = []
    for name, reading in monitor.numbers(rule).items():
        metric = policy.detectors[name].metrics[0]
        if metric in manifest.metrics and (code != BREACH or reading["code"] == "BREACH"):
            bound = _bound(policy.detectors[name])
            numbers.append(f"{metric} {manifest.metrics[metric]:.4g}{bound}")
    text = ", ".join(dict.fromkeys(numbers))
    status = FAIL if code == BREACH else PASS
    if code == UNKNOWN:
        missing = [manifest.unknown.get(metric, "") for metric in _metrics_of(policy, rule)]
        reasons = "; ".join(dict.fromkeys(filter(None, missing)))
        status = PASS if numbers else UNJUDGED  # one of several ways to fire is known
        text = f"{text}; more is not judged: {reasons}" if numbers else reasons
    is_gate = code == BREACH and rule.severity in SEVERITIES[: limit + 1]
    return Finding(rule.id, rule.title, rule.severity, status, text, is_gate)


def _metrics_of(policy: Policy, rule: Rule) -> list[str]:
    return [
        metric for name in policy.detectors_of(rule) for metric in policy.detectors[name].metrics
    ]


def _bound(detector: Any) -> str:
    name, limit = getattr(detector, "bound", ("", 0.0))
    signs = {"gt": "at most", "gte": "below", "lt": "at least", "lte": "above"}
    return f" ({signs[name]} {limit:g})" if name in signs else ""


# ── options and outputs ───────────────────────────────────────────────────────────────────────────


def _request(paths: tuple[Path, ...], options: Mapping[str, Any]) -> Request:
    from ..data.build_check import Request

    part = None
    if options["part"] is not None:
        number, slash, count = options["part"].partition("/")
        if not (slash and number.isdecimal() and count.isdecimal() and int(count)):
            raise UsageError(f"--part {options['part']}", hint="--part 3/100")
        if options["work"] is None:
            raise UsageError("--part needs a folder for its results", hint="add --work DIR")
        part = int(number), int(count)
        if part[0] > part[1]:
            raise UsageError(f"--part {options['part']}: there is none", hint="0/100 to 100/100")
    return Request(
        paths=paths,
        val=options["val"],
        fields=_fields(options),
        level=options["level"] or "",
        tokenizer=options["tokenizer"],
        scorer=options["toxicity"],
        jobs=options["jobs"],
        part=part,
    )


def _fields(options: Mapping[str, Any]) -> Fields:
    from ..data.corpus import Fields

    return Fields(
        options["text_field"],
        options["source_field"],
        options["eos"],
        options["pad"],
        options["dtype"] or "",
    )


@contextmanager
def _interrupted_by_term() -> Iterator[None]:
    """Let SIGTERM, as of a batch system, end a pass as Ctrl-C does: nothing unfinished is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _folder(options: Mapping[str, Any], request: Request) -> Iterator[tuple[Path, bool]]:
    """Yield where results of pieces are kept, and whether they are removed at the end."""
    if options["work"] is not None:
        yield options["work"], False
    elif options["manifest"] is not None and not files.is_stream(options["manifest"]):
        target = options["manifest"]
        yield target.with_name(f"{target.name}.parts"), True
    else:
        with tempfile.TemporaryDirectory(prefix="supervise-data-") as folder:
            yield Path(folder), True


def _print_part(ctx: click.Context, left: int, pieces: int) -> None:
    text = f"{left} of {pieces} pieces are left" if left else "all is measured"
    echo(f"part {ctx.params['part']}: {text}", *([] if left else [_next_sum(ctx)]))


def _next_sum(ctx: click.Context) -> str:
    argv = list(ctx.find_root().meta[ARGV])
    for number, argument in enumerate(argv):
        if argument == "--part":
            del argv[number : number + 2]
            break
        if argument.startswith("--part="):
            del argv[number]
            break
    if ctx.params["manifest"] is None:
        argv += ["--manifest", "data.json"]
    return f"next: {shlex.join([PROGRAM, *argv])}"


def _require_documents(manifest: Manifest) -> None:
    """Raise InputError where there are none."""
    if not manifest.counts.documents:
        reason = next(iter(manifest.counts.reasons), "the files are empty")
        hint = "JSON lines, a document each; --text-field NAME, where the text is in another field"
        raise InputError(f"no document could be read: {reason}", hint=hint)


def _check_outputs(options: Mapping[str, Any], checking: BuildCheck) -> None:
    """Refuse what could not be written when all is read. Raises StoreError, InputError."""
    from ..data.duplicates import needs_tokenizer

    for name in OUTPUTS:
        if (path := options[name]) is None:
            continue
        try:
            files.require_writable(path)
        except OSError as error:
            hint = f"--{name} in a folder that you can write"
            raise StoreError(f"cannot write {path}: {error.strerror}", hint=hint) from error
    if options["index"] is not None:
        if files.is_stream(options["index"]):
            raise UsageError(f"{options['index']} is no file", hint="--index FILE")
        needs_tokenizer(checking.training, options["tokenizer"])


def _write(path: Path | None, data: bytes) -> None:
    if path is None:
        return
    try:
        with files.replacing_file(path, shared=True) as file:
            file.write(data)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def _write_index(path: Path | None, checking: BuildCheck, tokenizer: str) -> None:
    from ..data.duplicates import write_index

    if path is not None:
        write_index(path, checking.training, checking.settings.fields, tokenizer)


def _write_reports(
    manifest: Manifest,
    findings: Sequence[Finding],
    base: Manifest | None,
    options: Mapping[str, Any],
) -> None:
    if options["report"] is not None:
        from ..catalog import metrics
        from ..data.manifest_page import render_page

        units = {name: spec.unit for name, spec in metrics.all_metrics().items()}
        _write(options["report"], render_page(manifest, findings, base, units).encode())
    if options["junit"] is not None:
        from ..trials.gate_report import junit_document

        cases = [(f.rule, f.status, f"{f.title}: {f.text}") for f in findings]
        about = {"verdict": _verdict(findings)}
        _write(options["junit"], junit_document(SUITE, cases, ELEMENTS, about))


def _verdict(findings: Sequence[Finding]) -> str:
    return "FAIL" if any(finding.gate for finding in findings) else "PASS"


def _print(
    manifest: Manifest,
    findings: Sequence[Finding],
    base: Manifest | None,
    options: Mapping[str, Any],
) -> None:
    from ..data.manifest_page import FAIL, UNJUDGED, describe_ignored, describe_size

    if options["as_json"]:
        echo_json(
            {
                "verdict": _verdict(findings),
                "findings": findings,
                "metrics": manifest.metrics,
                "unknown": manifest.unknown,
            }
        )
        return
    failed = [finding for finding in findings if finding.status == FAIL]
    if not options["quiet"] or failed:
        echo(f"{_verdict(findings)}: {describe_size(manifest)}")
    for finding in failed:
        echo(f"  {finding.sev} {finding.rule}: {finding.title}: {finding.text}")
    if options["quiet"]:
        return
    for line in describe_ignored(manifest):
        echo(f"  {line}")
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.status == UNJUDGED:
            reasons.setdefault(finding.text, []).append(finding.rule.partition(".")[2])
    for reason, rules in reasons.items():
        echo(f"  not judged ({', '.join(rules)}): {reason}")
    echo("")
    before = {} if base is None else base.metrics
    rows = [
        (name, f"{value:.4g}", f"{before[name]:.4g}" if name in before else "")
        for name, value in _shown(manifest.metrics)
    ]
    print_table(rows, ("metric", "value", "baseline"))
    if failed and options["report"] is None:
        echo("", "next: the same with --report data.html shows the documents behind it")
    elif not failed and (path := options["manifest"]) is not None and not files.is_stream(path):
        name = os.fspath(path)
        echo("", f"next: record it with each run: job: {{manifest: [{name}]}} in the policy")


def _shown(metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the metrics, of each family the largest members."""
    families: dict[str, list[tuple[str, float]]] = {}
    for name, value in metrics.items():
        families.setdefault(name.partition(".")[0], []).append((name, value))
    for members in families.values():
        largest = sorted(members, key=lambda member: -member[1])[:MEMBERS]
        yield from (member for member in members if member in largest)
