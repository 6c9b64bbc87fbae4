"""`supervise policy schema`: JSON Schemas for editors and other tools."""

from __future__ import annotations

import click

FILES = {
    "policy": "policies/policy.schema.json",
    "pack": "policies/pack.schema.json",
    "runbook": "runbooks/runbook.schema.json",
    "test": "policies/test.schema.json",
    "incident": "policies/incident.schema.json",
}


@click.command(name="schema")
@click.argument("sort", type=click.Choice(list(FILES)), default="policy")
def command(sort: str) -> None:
    """Print the JSON Schema (draft-07) of a file type.

    An editor with a YAML language server completes and checks a file whose first line is
    `# yaml-language-server: $schema=policy.schema.json`.

    \b
    Examples:
      supervise policy schema > policy.schema.json
      supervise policy schema test > test.schema.json
    """
    from ...catalog import docs

    click.echo(docs.text(FILES[sort]), nl=False)
