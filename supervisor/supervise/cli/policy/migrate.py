"""`supervise policy migrate`: rewrite a policy that uses former names."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

DIFFERENT = 1


@click.command(name="migrate")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--write", is_flag=True, help="Change the file.")
@click.pass_context
def command(ctx: click.Context, file: Path, write: bool) -> None:
    """Rewrite a policy with today's names of rules, detectors, packs, metrics and keys.

    Prints the change as a diff, what it means for the policy, and what no longer acts by itself;
    then checks the result. Comments and layout stay as they are.

    \b
    Examples:
      supervise policy migrate my.yaml
      supervise policy migrate my.yaml --write && supervise policy test my.yaml

    Exit codes: 0 nothing to change, or changed; 1 --write would change it; 65 what is left of it is
    invalid.
    """
    from ...catalog.assembly import policy_loader
    from ...catalog.document import migration, yaml_reader
    from ...catalog.document.diagnostics import Problems, Source

    problems = Problems()
    root = yaml_reader.read(file, str(file), problems)
    if root is None:
        problems.stop()
    assert root is not None
    old = root.source.text
    found = migration.migrate(old)
    migrated = f"{file} (migrated)"
    before, after = old.splitlines(keepends=True), found.text.splitlines(keepends=True)
    click.echo("".join(difflib.unified_diff(before, after, str(file), migrated)), nl=False)
    for title, notes in (("", found.notes), ("no longer acts: ", found.lost)):
        for line, what in notes:
            click.echo(f"{file}:{line}: {title}{what}")
    if write and found.text != old:
        with file.open("w", encoding="utf-8", newline="") as out:
            out.write(found.text)
        click.echo(f"written: {file}")
    elif found.text == old:
        click.echo("nothing to rename")
    problems = Problems()
    label = migrated if found.text != old and not write else str(file)
    root = yaml_reader.parse(Source(label, found.text), problems)
    policy_loader.from_root(root, file, None, problems)
    if found.text != old and not write:
        ctx.exit(DIFFERENT)
