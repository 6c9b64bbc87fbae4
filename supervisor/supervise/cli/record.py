"""`supervise record`: the stability record of a run, for whoever audits it later."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import Struct, convert

from .. import __version__
from ..errors import (
    InputError,
    StoreError,
    SuperviseError,
    TamperError,
    UsageError,
    reading_recorded_data,
)
from ..report import stability_record
from ..report.stability_builder import build_stability_record
from ..report.stability_monitors import BenchmarkResults, Fault, Knowledge, Signal
from ..report.stability_record import MAX_FIELDS, StabilityRecord
from ..store import audit, files, journal, run_records
from ..store.run_directory import RunDir
from ._output import echo, echo_json, echo_source, show_events_read
from ._runs import run_argument
from .why import INSPECT, readable_policies

if TYPE_CHECKING:
    from ..core.model.policy import Policy, Rule

FOLDER, NAME = "record", "record.json"
FORMS: dict[str, tuple[str, Callable[[StabilityRecord], bytes]]] = {
    "json": (NAME, StabilityRecord.encode),
    "markdown": (
        "record.md",
        lambda record: stability_record.render_record_markdown(record).encode(),
    ),
    "html": ("record.html", lambda record: stability_record.render_record_page(record).encode()),
}
SIGNATURE = ".sig"
SHIPPED = ("nano", "medium", "large", "moe", "canary", "observe")
GOOD, CHANGED, MISSING, UNCHECKED = (
    run_records.GOOD,
    run_records.CHANGED,
    run_records.MISSING,
    run_records.UNCHECKED,
)
DIFFERENT = 1


class RecordGroup(click.Group):
    """`supervise record RUN` is short for `supervise record write RUN`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert `write` where no subcommand is named."""
        if args and args[0] not in (*self.commands, "--help", "-h"):
            args = ["write", *args]
        return super().parse_args(ctx, args)


@click.group(name="record", cls=RecordGroup, no_args_is_help=True)
def record_command() -> None:
    """Write a report of a run for an auditor; verify or compare it.

    The stability record lists what the run consisted of; the signals and rules that watched it,
    with thresholds, sources and lead times; its incidents, interventions and gaps, and what they
    cost. What is not known is named, with the reason.

    \b
    Examples:
      supervise record runs/20260105-101112-7f3a9c
      supervise record runs/20260105-101112-7f3a9c --key key.pem
      supervise record verify runs/20260105-101112-7f3a9c --key public.pem
      supervise record diff runs/a runs/b
    """


@record_command.command()
@run_argument
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Directory. Default: RUN/record."
)
@click.option("--key", type=click.Path(path_type=Path), help="Sign with this Ed25519 private key.")
@click.option(
    "--format", "form", type=click.Choice(tuple(FORMS)), help="Print this form, and write nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print the list of files as JSON.")
def write(run: Path, out: Path | None, key: Path | None, form: str | None, as_json: bool) -> None:
    """Write the record as JSON, Markdown and HTML.

    With --key it also writes record.json.sig, a detached signature of record.json. This makes a key
    and its public part: `openssl genpkey -algorithm ed25519 -out key.pem`, `openssl pkey -in
    key.pem -pubout -out public.pem`.

    \b
    Examples:
      supervise record runs/20260105-101112-7f3a9c --key key.pem
      supervise record runs/20260105-101112-7f3a9c --format json | jq .cost
    """
    directory = RunDir.open(run)
    record = build_record(directory)
    if form is not None:
        echo_source(*FORMS[form][1](record).decode().rstrip().split("\n"))
        return
    raw = record.encode()
    signed = None if key is None else audit.sign_bytes(raw, key)
    target = directory.path / FOLDER if out is None else out
    try:
        files.make_directory(target)
        for name, render in FORMS.values():
            files.replace_file(target / name, render(record), durable=True)
        if signed is None:
            (target / f"{NAME}{SIGNATURE}").unlink(missing_ok=True)
        else:
            files.replace_file(target / f"{NAME}{SIGNATURE}", signed, durable=True)
    except OSError as error:
        raise StoreError(
            f"cannot write the record to {target}: {error.strerror}", hint="use --out DIR"
        ) from error
    names, audited = [name for name, _ in FORMS.values()], record.audit
    if as_json:
        made = {"directory": str(target), "files": names, "signed": signed is not None}
        echo_json({**made, "records": audited.records, "head": audited.head})
        return
    echo(f"{target}: {', '.join(names)}{', signed' if signed else ''}")
    echo(f"head: {audited.records} {audited.head}")


@record_command.command()
@click.argument("target", type=click.Path(path_type=Path), metavar="FILE|RUN")
@click.option("--run", type=click.Path(path_type=Path), help="The run, if FILE is a copy.")
@click.option("--key", type=click.Path(path_type=Path), help="Public key that must have signed it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def verify(
    ctx: click.Context, target: Path, run: Path | None, key: Path | None, as_json: bool
) -> None:
    """Verify a record, and name what was changed.

    With --key the signature is checked. If RUN or --run is given, or FILE lies in its run, the
    run's policies, evidence and journal are compared with their digests, and its audit log with the
    head in the record. Each field of the record is compared with the run, too.

    \b
    Examples:
      supervise record verify runs/20260105-101112-7f3a9c
      supervise record verify record.json --run runs/main --key public.pem

    Exit codes: 0 good; 1 changed or missing; 64 no record or no run.
    """
    path = target / FOLDER / NAME if target.is_dir() else target
    home = run or (path.parent.parent if path.parent.name == FOLDER else None)
    parts = list(_verified(path, None if home is None else RunDir.open(home), key))
    if as_json:
        rows = [{name: getattr(part, name) for name in part.__slots__} for part in parts]
        echo_json({"record": str(path), "parts": rows})
    else:
        for part in parts:
            echo(f"{part.part}: {part.status}: {part.text}")
    ctx.exit(int(any(part.status in (CHANGED, MISSING) for part in parts)))


@record_command.command()
@click.argument("before", type=click.Path(path_type=Path), metavar="A")
@click.argument("after", type=click.Path(path_type=Path), metavar="B")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def diff(before: Path, after: Path, as_json: bool) -> int:
    """Compare two records, or the records of two runs, field by field.

    \b
    Examples:
      supervise record diff runs/a runs/b
      supervise record diff old/record.json new/record.json --json

    Exit codes: 0 the same; 1 different; 64 no record or no run.
    """
    differences = stability_record.record_differences(_read(before), _read(after))
    if as_json:
        echo_json([{"field": p, "before": a, "after": b} for p, a, b in differences])
    for path, old, new in [] if as_json else differences:
        echo(f"{path}: {stability_record.text_of(old)} → {stability_record.text_of(new)}")
    return DIFFERENT if differences else 0


def build_record(run: RunDir) -> StabilityRecord:
    """Return the record of a run. Raises StoreError."""
    with reading_recorded_data(f"the records in {run.audit_path}", INSPECT):
        return build_stability_record(
            run,
            readable_policies(run),
            installed_knowledge(),
            lambda events: show_events_read(events, run.journal_path),
        )


def _read(target: Path) -> StabilityRecord:
    """Return the record in a file, or that of a run."""
    if target.is_dir():
        return build_record(RunDir.open(target))
    try:
        return stability_record.decode_record(
            files.read_file(target, foreign=True, limit=files.MAX_JSON)
        )
    except OSError as error:
        raise InputError(f"cannot read {target}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{target} is no record: {error}") from error


def _verified(path: Path, run: RunDir | None, key: Path | None) -> Iterator[run_records.Part]:
    """Yield what is good, changed or unchecked of a record and of its run."""
    Part = run_records.Part  # noqa: N806 - it is a class
    try:
        raw = files.read_file(path, foreign=True, limit=files.MAX_JSON)
    except OSError as error:
        hint = f"write it with: supervise record {path.parent.parent}"
        raise StoreError(f"cannot read the record {path}: {error.strerror}", hint=hint) from error
    yield _signed(path, raw, key)
    recorded, reason = _parsed(raw)
    if recorded is None:
        yield Part("record", CHANGED, reason)
        return
    if run is None:
        yield Part("record", UNCHECKED, "it has the published form; give its run with --run")
        return
    for name, render in list(FORMS.values())[1:]:
        copy = path.with_name(name)
        if copy.is_file() and copy.read_bytes() != render(recorded):
            yield Part("record", CHANGED, f"{name} is not what record.json says")
    head = (recorded.audit.records, recorded.audit.head)
    log = audit.verify_audit(run.audit_path, run.id, head if head[0] else None)
    yield Part("audit", GOOD if log.exit_code == 0 else CHANGED, log.message)
    digests = run_records.Digests()
    try:
        for record in audit.read_audit(run.audit_path):
            digests.add_record(record)
    except TamperError as error:
        yield Part("record", UNCHECKED, f"the run cannot be read: {error}")
        return
    parts = list(run_records.check_files(run, digests))
    yield from parts
    named, all_compared = stability_record.changed_fields(recorded, build_record(run))
    if any(part.status in (CHANGED, MISSING) for part in parts):
        named = [name for name in named if not name.startswith("audit.parts")]
    if named:
        ellipsis = f" and {len(named) - MAX_FIELDS} more" * (len(named) > MAX_FIELDS)
        text = f"fields that differ from the run: {', '.join(named[:MAX_FIELDS])}{ellipsis}"
        yield Part("record", CHANGED, text)
        return
    caveat = (
        ""
        if all_compared
        else "; what another version explains of signals and rules is not checked"
    )
    yield Part("record", GOOD, f"its fields are those of the run{caveat}")


def _parsed(raw: bytes) -> tuple[StabilityRecord | None, str]:
    """Return a record in the published form, else None and why it is not."""
    try:
        return stability_record.decode_record(raw), ""
    except ValueError as error:
        return None, f"it has not the published form: {str(error)[:200]}"


def _signed(path: Path, raw: bytes, key: Path | None) -> run_records.Part:
    detached = path.with_name(f"{path.name}{SIGNATURE}")
    if key is None:
        note = "there is one; give the public key with --key" if detached.exists() else "none"
        return run_records.Part("signature", UNCHECKED, note)
    if not detached.is_file():
        return run_records.Part("signature", MISSING, f"{detached.name} is missing")
    if not audit.is_signed(raw, detached.read_bytes(), key):
        return run_records.Part(
            "signature", CHANGED, f"{path.name} was changed after it was signed, or by another key"
        )
    return run_records.Part("signature", GOOD, f"{path.name} is signed with {key.name}")


# ── what this installation knows ──────────────────────────────────────────────────────────────────


def installed_knowledge() -> Knowledge:
    """Return what this installation knows about signals, faults, rules and packs."""
    from supervise_probe import faults

    from ..catalog import discover, shipped
    from ..runtime.identity import formulas_digest

    digest = formulas_digest()
    return Knowledge(
        version=__version__,
        formulas_sha256=digest,
        signal=lambda metric: _signal(metric, digest),
        faults={
            name: Fault(
                fault.MEANING, fault.MOVES, {key: value for key, (value, _) in fault.PARAMS.items()}
            )
            for name, fault in faults.fault_classes().items()
        },
        benchmark_results=BenchmarkResults.decode(
            (shipped.shipped_folder("policies") / "shown.json").read_text()
        ),
        blind_to={
            kind: f"{kind}: {text}"
            for kind, form in discover.detector_classes().items()
            if (text := _section(form, "Blind to"))
        },
        source=_source,
        alarms=_alarms,
    )


def _section(form: type, name: str) -> str:
    """Return a section of a docstring as one line."""
    match = re.search(rf"^{name}: (.+?)(?=^\S|\Z)", inspect.getdoc(form) or "", re.M | re.S)
    return " ".join(match[1].split()) if match else ""


def _signal(metric: str, digest: str) -> Signal | None:
    from supervise_probe import collectors

    from ..catalog import metrics

    spec = metrics.spec_of(metric)
    if spec is None:
        return None
    module = "measured by the supervisor, or reported by the job"
    for name, collector in collectors.collector_classes().items():
        if any(metric.id == spec.id for metric in collector.METRICS):
            about = " ".join((collector.__doc__ or "").partition("\n")[0].split())
            module = f"{name}: {about}"
    version = f"supervise {__version__}, formulas sha256 {digest[:16]}"
    return Signal(module, spec.meaning, spec.unit, spec.source, version)


@cache
def _shipped(name: str) -> Policy:
    from ..catalog import load_policy

    return load_policy(name)


def _source(policy: Policy, rule: Rule) -> str:
    """Return where the thresholds of a rule come from: a shipped policy, or this one."""
    pack, _, local = rule.id.partition(".")
    digest = policy.digest_of(rule)
    texts = _pack(pack) if local else None
    if texts is None:
        return "set by the policy of this run (policy.yaml)"
    shipped_first = [name for name in SHIPPED if name == policy.name]
    for name in dict.fromkeys((*shipped_first, *SHIPPED)):
        shipped_policy = _shipped(name)
        shipped_rule = next((r for r in shipped_policy.rules if r.id == rule.id), None)
        if shipped_rule is not None and shipped_policy.digest_of(shipped_rule) == digest:
            source = "; ".join(texts.source)
            return f"shipped policy {name}, unchanged" + (f" ({source})" if source else "")
    return "set by the policy of this run (policy.yaml)"


def _alarms(pack: str) -> Sequence[str]:
    texts = _pack(pack)
    return [] if texts is None else texts.false_alarms


class _PackTexts(Struct, frozen=True):
    source: Sequence[str] = ()
    false_alarms: Sequence[str] = ()


@cache
def _pack(name: str) -> _PackTexts | None:
    """Return the texts of a shipped pack, None if there is none."""
    import yaml

    from ..catalog import shipped
    from ..catalog.pack import PACKS

    try:
        path = shipped.find_shipped(PACKS, name)
        return None if path is None else convert(yaml.safe_load(path.read_text()), _PackTexts)
    except (OSError, SuperviseError):
        return None


CSV, PARQUET = "csv", "parquet"


@click.command(name="export")
@run_argument
@click.option("--csv", "kind", flag_value=CSV, help="Write CSV.")
@click.option("--parquet", "kind", flag_value=PARQUET, help="Write Parquet; needs pyarrow.")
@click.option("--metrics", metavar="A,B", help="Export only these metrics, in this order.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write to FILE instead of standard output; its suffix can give the format.",
)
def export_command(run: Path, kind: str | None, metrics: str | None, output: Path | None) -> None:
    """Export the metrics of a run.

    One row per step and rank: step,rank,attempt,wall,METRICS; `wall` is the time of day in UTC. A
    missing value is empty, NaN is nan. Steps undone by a rollback are included, with a lower
    attempt number. A live run can be exported too. Frames that journal.max_gb has removed are
    missing; a message says so.

    \b
    Examples:
      supervise export --csv -o run.csv
      supervise export 7f3a9c -o run.parquet
      supervise export --csv --metrics train_loss_raw,learning_rate

    Exit codes: 0 written; 64 no such run or metric; 65 no pyarrow; 74 standard output cannot be
    written.
    """
    suffix = "" if output is None else output.suffix.removeprefix(".").lower()
    kind = kind or (suffix if suffix in (CSV, PARQUET) else None)
    if kind is None:
        raise UsageError("no export format given", hint="add --csv, or --parquet -o FILE")
    if kind == PARQUET and output is None:
        raise UsageError("Parquet is no text for a terminal or a pipe", hint="add -o run.parquet")
    directory = RunDir.open(run)
    columns = _columns(run_records.metric_ids(directory), metrics)
    for start, end in journal.first_events_of_thinned(directory.journal_path):
        text = f"events {start} to {end - 1}: frames were removed (journal.max_gb)"
        echo(f"supervise: warning: {text}", err=True)
    if output is None:
        run_records.export_csv(directory, sys.stdout, columns)
        return
    try:
        if kind == CSV:
            with files.replacing_file(
                output, "w", shared=True, encoding="utf-8", newline=""
            ) as text_file:
                rows = run_records.export_csv(directory, text_file, columns)
        else:
            with files.replacing_file(output, shared=True) as binary_file:
                rows = run_records.export_parquet(directory, binary_file, columns)
    except OSError as error:
        raise StoreError(f"cannot write {output}: {error.strerror}") from error
    echo(f"wrote {rows} rows to {output}", err=True)


def _columns(available: Sequence[str], selection: str | None) -> list[str]:
    """Return the metrics to export. Raises UsageError for one that the run has not."""
    if selection is None:
        return list(available)
    columns = [name.strip() for name in selection.split(",") if name.strip()]
    for name in columns:
        if name in available:
            continue
        if not available:
            hint = "the probe announced none; see: supervise status RUN"
            raise UsageError(f"no metric {name!r}: this run has none", hint=hint)
        from ..catalog.metrics import suggest_metric  # only now: it imports the collectors

        near = suggest_metric(name, available)
        hint = f"{near} " if near else ""
        raise UsageError(
            f"no metric {name!r} in this run", hint=f"{hint}it has: {', '.join(available)}"
        )
    return columns
