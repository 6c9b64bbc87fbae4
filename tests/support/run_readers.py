"""All commands that read a run, asked of one run directory."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click

from supervise import cli
from supervise.catalog import load_policy
from supervise.core.model import Frame
from supervise.store import RunDir, read_audit, read_journal

BY_LINE = ("events", "audit_show")  # with --json: one document a line
OF_RUN = (
    *("status", "events", "events --all", "why", "triage", "checkpoints", "audit verify"),
    *("audit show", "replay", "record write --out {home}/record"),
    "record verify --run {run} {home}/record/record.json",
)


def read_everywhere(run: Path, home: Path, **failing: int) -> None:
    """Assert that each command can read a run, also as JSON.

    An exception that no command expects leaves `invoke`.

    Args:
        home: for what they write. failing: exit code of a command other than 0, as in its help, by
            its words with `_` between them; all its forms may have it.
    """
    for argv in _command_lines(run, home):
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = cli.invoke(argv)
        name, documented = _describe(argv)
        text, said = output.getvalue(), errors.getvalue()
        assert code in (0, failing.get(name, 0)), (argv, code, said)
        assert code == 0 or code in documented, (argv, code)
        assert "Traceback" not in said, argv
        if "--json" in argv and text:
            for document in text.splitlines() if name in BY_LINE else [text]:
                json.loads(document)
    assert 'id="frozen"' in (home / "page.html").read_text()


def _command_lines(run: Path, home: Path) -> Iterator[list[str]]:
    """Yield the command lines, also those of each incident of the run, and of a rule."""
    for text in OF_RUN:
        words = [word.format(run=run, home=home) for word in text.split()]
        at_end = [] if "record.json" in text else [str(run)]
        yield [*words, *at_end]
        yield [*words, "--json", *at_end]
    for text in ("outbox list", "runs --runs {runs}", "gc --dry-run --older-than 0s {runs}"):
        words = [word.format(runs=run.parent) for word in text.split()]
        yield words
        yield [*words, "--json"]
    records = [*read_audit(RunDir.open(run).audit_path)]
    kinds = {record["kind"] for record in records}
    for name in dict.fromkeys(filter(None, (record.get("incident") for record in records))):
        yield ["why", "--full", str(run), name]
        yield ["why", "--json", str(run), name]
    yield ["why", "--write", str(home / "why"), str(run)]
    if "run_end" in kinds:  # else it waits for one
        yield ["events", "--follow", str(run)]
    yield ["export", "--csv", str(run)]
    for form in ("json", "markdown", "html"):
        yield ["record", "write", "--format", form, str(run)]
    for question in _questions(run):
        yield ["why-not", *question, str(run)]
        yield ["why-not", "--json", *question, str(run)]
    yield ["web", "--export", str(home / "page.html"), str(run)]


def _questions(run: Path) -> Iterator[list[str]]:
    """Yield options of `why-not`: of the policy's last rule, at the newest step of each rank."""
    directory = RunDir.open(run)
    rules = load_policy(directory.policy_path).rules
    newest: dict[int, int] = {}
    for _, frame in read_journal(directory.journal_path, only=(Frame,)):
        newest[frame.rank] = frame.step
    for rank, step in newest.items():
        yield ["--rule", rules[-1].id, "--step", str(step), "--rank", str(rank)]


def _describe(argv: list[str]) -> tuple[str, set[int]]:
    """Return the name of a command, as `audit_verify`, and the exit codes that its help names."""
    command: click.Command = cli.group
    words = []
    for word in argv:
        if not isinstance(command, click.Group):
            break
        child = command.get_command(click.Context(command), word)
        assert child is not None, argv
        command = child
        words.append(word)
    _, _, codes = (command.help or "").partition("Exit codes:")
    numbers = [re.match(r"\s*(\d+)", part) for part in codes.split(";")]
    return "_".join(words), {int(number[1]) for number in numbers if number}
