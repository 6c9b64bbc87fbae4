"""What the project does today, as text: golden files that a change of structure must not change.

    python -m tests.golden.frozen            write the golden files
    git diff tests/golden                    and read what changed

`decisions/`: every decision of every scenario, a file per pack or test file. A line is the frame,
the kind, the incident, the severity, the rule, the reason, and a digest of the rest. `recordings`:
a digest per recorded run of its back-test with `nano`. `run`: journal and audit log of
one run, and what the reading commands say of it. `incidents/`: cards, summaries and documents of
incidents of many kinds. `messages`: what people receive. `notices`: the text of each kind of them.
`mistakes`: what is said of wrong policies. `help`: every command. `exit-codes`: every error.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import click
from click.testing import CliRunner

from supervise import cli, errors
from supervise.cli import group
from supervise.core.model import Decision
from supervise.core.model import decision_record as record
from supervise.lab import load_suite, run_suite
from supervise.report import IncidentReport, render_card, render_full, render_markdown
from supervise.store import read_audit, read_journal

from ..fuzz.recorded import sample
from . import stories
from .channels import channels
from .messages import messages
from .mistakes import mistakes
from .notices import notices

HERE = Path(__file__).parent
INCIDENTS = ("spike", "rate", "held", "approval", "hang", "oom", "loader", "withdrawn", "operator")
ROOT = HERE.parents[1]
DATA = Path(os.environ.get("SUPERVISE_DATA", ROOT / "../shared/data"))


def digest(value: Any) -> str:
    """Return eight letters of the sha256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def line(decision: Decision) -> str:
    """Return a decision as one line."""
    found = record(decision)
    shown = [found[name] or "-" for name in ("kind", "incident", "severity", "rule")]
    return " ".join([*map(str, shown), found["reason"], digest([found["attempt"], found["data"]])])


FILES = [
    path
    for folder in ("packs", "tests")
    for path in sorted((ROOT / "policies" / folder).glob("*.yaml"))
]


def name_of(path: Path) -> str:
    """Return the golden file of a pack or test file."""
    return f"decisions/{path.parent.name}-{path.stem}.txt"


def decisions(path: Path) -> tuple[str, list[str]]:
    """Return the text of a file's scenarios, and their failures."""
    text, failures = [], []
    for outcome in run_suite(load_suite(path, [])):
        text.append(f"== {outcome.form.name}")
        text += [f"{frame} {line(decision)}" for frame, decision in outcome.result.log]
        failures += [f"{outcome.form.name}: {message}" for _, message in outcome.failures]
    return "\n".join(text) + "\n", failures


# Public logs in which nothing happens: three of 20,000 rows each, and repetitions of others.
# `benchmarks/proving/public.py` scores them, too.
UNEVENTFUL = re.compile(
    "ScaleUp1B|llmc__main|QuantizedFP4|Optimizers|dd7304a6|dca62101|ValueEmbed__(?!19bb65fb)"
)


@cache
def backtest(folder: Path, policy: str = "nano") -> dict[str, dict[str, Any]]:
    """Return what `supervise backtest --json` prints of each run below a folder, by its name.

    All but the `UNEVENTFUL` ones.
    """
    files = [path for path in sorted(folder.rglob("*.*")) if path.is_file()]
    logs = [str(p) for p in files if p.name != "incidents.csv" and p.suffix != ".md"]
    logs = [path for path in logs if not UNEVENTFUL.search(path)]
    result = CliRunner().invoke(group, ["backtest", "--policy", policy, "--json", *logs])
    assert result.exit_code == 0, result.output
    runs = [json.loads(line) for line in result.stdout.splitlines()]
    return {run["run"]: run for run in runs}


def recorded() -> Iterator[str]:
    """Yield a line per recorded run: its name, its rows, a digest of its back-test."""
    for folder in ("faults", "logs"):
        for name, run in backtest(DATA / folder).items():
            yield f"{name} {run['rows']} {digest(run)}"


MASKS = (
    (r"\b[0-9a-f]{64}\b", "DIGEST"),
    (r"\b\d{8}-\d{6}-[0-9a-f]{6}\b", "RUN"),
    (r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "BOOT"),
    (r'(?<="host": ")[^"]+|(?<=; host: )[^;]+', "HOST"),
    (r"\((\d+ [a-z]+ ?)+ago\)", "(AGE)"),
)
READING = (
    *(("status",), ("why",), ("why", "--json"), ("replay",), ("audit", "verify")),
    *(("audit", "show"), ("checkpoints",), ("export", "--csv")),
    *(("export",), ("why-not", "--rule", "spike", "--step", "15"), ("why", "--no-such-option")),
)
# What goes wrong before a run is read; `PATH` stands for the run.
MISTAKES = (
    *(("status",), ("status", "nix"), ("runs", "--runs", "nowhere")),
    *(("pause",), ("adopt",), ("events", "--since", "yesterday", "PATH"), ("completion", "tcsh")),
    *(("runbook", "loss-spke"), ("drill", "show", "lr_spyke"), ("export", "-o", "run.xls", "PATH")),
    ("export", "--csv", "--metrics", "loss", "PATH"),
)


def run() -> str:
    """Return the journal and the audit log of a run, and what is read of it, masked."""
    wide = mock.patch.dict(os.environ, COLUMNS="80")  # `status` cuts its lines to the terminal
    with wide, tempfile.TemporaryDirectory() as home:
        made = sample(Path(home))
        text = ["== journal"]
        text += [str(entry) for entry in read_journal(made.journal_path)]
        text += ["== audit", *(json.dumps(each) for each in read_audit(made.audit_path))]
        for argv in READING:
            text += _printed(argv, [*argv, str(made.path)])
        empty = Path(home) / "empty"
        empty.mkdir()
        with contextlib.chdir(empty):
            for argv in MISTAKES:
                text += _printed(argv, [arg.replace("PATH", str(made.path)) for arg in argv])
        whole = "\n".join(text).replace(home, "HOME")
    for pattern, name in MASKS:
        whole = re.sub(pattern, name, whole)
    return whole


def _printed(shown: Sequence[str], argv: Sequence[str]) -> list[str]:
    """Return what a command line prints, under a heading."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = cli.invoke([*argv])
    return [f"== {' '.join(shown)}: exit code {code}", output.getvalue()]


def commands(group: click.Group = cli.group, *path: str) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command."""
    yield path
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield (*path, name)


def helps() -> str:
    """Return what `--help` of every command prints, in a fresh process.

    click keeps the help option of a command as it was first asked for, perhaps without the group.
    """
    argv = [sys.executable, "-m", "tests.golden.frozen", "help"]
    return subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout


def _helps() -> str:
    """Return it from this process, 80 columns wide."""
    text = []
    for words in commands():
        argv = [*words, "--help"]
        shown = CliRunner(env={"COLUMNS": "80"}).invoke(
            cli.group, argv, prog_name="supervise", terminal_width=80
        )
        text += [f"== {' '.join(words)}", shown.output]
    return "\n".join(text)


def views_of_incident(report: IncidentReport) -> dict[str, str]:
    """Return file suffix -> content: what `why` prints, the summary, and the document.

    The points of the series are a digest; that of the policy is masked, as any policy changes it.
    """
    document = json.loads(report.encode())
    document["run"]["policy_digest"] = "sha256:DIGEST"
    series = document["series"]
    short = {key: digest(series[key]) for key in ("steps", "attempts", "signals")}
    kept = document | {"series": series | short}
    card, full = (list(view(report)) for view in (render_card, render_full))
    return {
        ".txt": "\n".join([*card, "", "== --full", *full]) + "\n",
        ".md": render_markdown(report),
        ".json.txt": "".join(f"{key}: {json.dumps(value)}\n" for key, value in kept.items()),
    }


def exit_codes() -> str:
    """Return the exit code of each class of errors that has one of its own."""
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass)]
    ours = [c for c in classes if issubclass(c, errors.SuperviseError)]
    return "".join(f"{c.__name__} {c.exit_code}\n" for c in ours)


def write() -> None:
    """Write the golden files; those of recordings stay where there are none to read."""
    for old in (HERE / "decisions").glob("*.txt"):
        old.unlink()
    for path in FILES:
        (HERE / name_of(path)).write_text(decisions(path)[0])
    for name in INCIDENTS:
        for suffix, content in views_of_incident(stories.report(name)).items():
            (HERE / "incidents" / f"{name}{suffix}").write_text(content)
    (HERE / "run.txt").write_text(run())
    (HERE / "messages.txt").write_text(messages())
    (HERE / "mistakes.txt").write_text(mistakes())
    (HERE / "notices.txt").write_text(notices())
    (HERE / "channels.txt").write_text(channels())
    (HERE / "help.txt").write_text(helps())
    (HERE / "exit-codes.txt").write_text(exit_codes())
    if (DATA / "logs").is_dir():
        (HERE / "recordings.txt").write_text("".join(f"{line}\n" for line in recorded()))


if __name__ == "__main__":
    if sys.argv[1:] == ["help"]:
        sys.stdout.write(_helps())
    else:
        write()
