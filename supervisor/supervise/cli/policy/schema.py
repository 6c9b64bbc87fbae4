"""`supervise policy schema`: for editors, and for other tools."""

from __future__ import annotations

import click

FILES = {
    "policy": "policies/policy.schema.json",
    "pack": "policies/pack.schema.json",
    "runbook": "runbooks/runbook.schema.json",
    "test": "policies/test.schema.json",
}


@click.command(name="schema")
@click.argument("sort", type=click.Choice(list(FILES)), default="policy")
def command(sort: str) -> None:
    """Print the JSON Schema (draft-07) of a policy, pack, runbook or test file.

    An editor with a YAML language server completes and checks a file whose first line is
    `# yaml-language-server: $schema=policy.schema.json`. Exit status: 0, or 64 for no such sort.

    \b
    Examples:
      supervise policy schema > policy.schema.json
      supervise policy schema test > test.schema.json
    """
    from ...catalog.export import json_schema

    click.echo(json_schema.text(FILES[sort]), nl=False)
