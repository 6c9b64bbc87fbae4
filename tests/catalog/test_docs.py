"""The READMEs say what the code does."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import cogapp
import pytest

from supervise.catalog import schema_files, shipped_names
from supervise.cli import group as supervise_group

ROOT = Path(__file__).parents[2]
READMES = ("policies/README.md", "runbooks/README.md", "probes/README.md")
DOCUMENTS = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "supervisor/README.md"),
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    *READMES,
]
FENCES = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", READMES)
def test_the_tables_of_a_readme_are_current(name):
    cog = cogapp.Cog()
    cog.options.prologue = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'docs')!r}); import tables as docs"
    )
    text = (ROOT / name).read_text("utf-8")

    assert cog.process_string(text, name) == text


@pytest.mark.parametrize(
    ("path", "text"), [*schema_files()], ids=lambda value: Path(value).name[:30]
)
def test_the_committed_schema_is_current(path, text):
    assert path.read_text("utf-8") == text


def test_every_part_of_the_language_is_in_a_table():
    text = "".join((ROOT / name).read_text("utf-8") for name in READMES)
    forms = {path.name.partition(".")[0]: json.loads(text) for path, text in schema_files()}
    keys = {
        key for name in ("policy", "pack", "runbook", "test") for key in forms[name]["properties"]
    }
    assert {key for key in keys if f"`{key}`" not in text} == set()
    for kind in ("policies", "policies/packs", "runbooks"):
        for name in shipped_names(kind):
            assert f"`{name}`" in text


FAULTS = {  # of the README's table: the names in that of the measurement
    "learning rate x30": "rate x30",
    "NaN in a gradient": "NaN in a gradient",
    "one flipped bit in a weight": "bit of a weight",
    "Adam's second moments / 10000": "second moments / 10000",
    "shuffled labels": "shuffled labels",
    "crash (at a checkpoint)": "crash",
    "damaged checkpoint, crash": "bad checkpoint, then a crash",
}


def table_of(name: str) -> list[dict[str, str]]:
    """Return the rows of the only table of a document, by the names of its columns."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:2] == "| "]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:] if "--" not in row[0]]


def test_the_lost_steps_of_the_readme_are_those_that_were_measured():
    """ "All" is the 450 steps after the checkpoint before the fault."""
    measured = {row["fault"]: row for row in table_of("benchmarks/recovery.md")}
    shown = {row.pop("fault"): row for row in table_of("README.md")}
    several = shown["Adam's second moments / 10000"]
    several["`supervise`"] = several["`supervise`"].removesuffix(", 3 runs")
    names = {"unwatched": "nobody", "torchrun alone": "torchrun", "`supervise`": "lost"}

    assert shown == {
        fault: {
            title: "all" if (steps := measured[case][name].split()[0]) == "450" else steps
            for title, name in names.items()
        }
        for fault, case in FAULTS.items()
    }


def test_the_example_of_the_policy_reference_loads(load):
    """What a newcomer copies first works; the same for the runbook, inside a policy."""
    text = (ROOT / "policies/README.md").read_text("utf-8")
    example = text.partition("```yaml\n")[2].partition("```")[0]
    runbook = (ROOT / "runbooks/README.md").read_text("utf-8")
    steps = runbook.partition("```yaml\n")[2].partition("```")[0]

    files = {"runbooks/my-rollback.yaml": steps}
    acting = example.replace("sev: SEV2, for: 100", "sev: SEV1, run: my-rollback")
    policy, user = load(example, files), load(acting, files)

    assert policy.mode == "shadow"
    assert user.runbooks["my-rollback"].verbs[-1] == "verify"


def unknown_words(line: str) -> list[str]:
    """Return the command, or the long options, of a line behind `supervise` that do not exist."""
    words = [*shlex.split(line.rstrip("\\"), comments=True), "--"]
    words = words[: words.index("--")]
    if not words or words[0].startswith("-"):
        words.insert(0, "run")
    command: click.Command = supervise_group
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        if found is None:  # of a subgroup it may be an argument: `record RUN`
            return words[:1] if command is supervise_group and words[0].islower() else []
        command = found
        words.pop(0)
    options = {name for parameter in command.params for name in parameter.opts}
    return [w for w in words if re.match("--[a-z]", w) and w.partition("=")[0] not in options]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_shows_commands_and_options_that_exist(name):
    text = (ROOT / name).read_text("utf-8")
    shown = re.findall(r"^supervise (.*)$", "".join(FENCES.findall(text)), re.MULTILINE)
    shown += re.findall(r"`supervise ([^`]*)`", FENCES.sub("", text))

    assert {line: words for line in shown if (words := unknown_words(line))} == {}
