"""`supervise policy diff`: compare the behaviour of two policies."""

from __future__ import annotations

import json
from itertools import groupby

import click

DIFFERENT = 1


@click.command(name="diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(ctx: click.Context, a: str, b: str, as_json: bool) -> None:
    """Compare what two policies do, whichever file or pack defines it.

    A and B are paths or names of shipped policies. Differences are grouped by effect (acts where it
    did not, threshold loosened, ...), the most serious first, with old and new values.

    \b
    Examples:
      supervise policy diff nano my.yaml
      supervise policy diff runs/20260105-101112-7f3a9c/policy.yaml nano --json

    Exit codes: 0 the same; 1 different; 65 a policy is invalid.
    """
    from ...catalog import loader, yaml_document
    from ...catalog.loader import compose
    from ...explain import policy_diff

    drafts = [compose(name) for name in (a, b)]
    changes = policy_diff.compare(*(loader.document(draft) for draft in drafts))
    if as_json:
        report = {
            "same": not changes,
            "a": {"policy": drafts[0].name, "digest": loader.policy(drafts[0]).digest},
            "b": {"policy": drafts[1].name, "digest": loader.policy(drafts[1]).digest},
            "changes": [change.plain() for change in changes],
        }
        click.echo(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        for effect, group in groupby(changes, key=lambda change: change.effect):
            click.echo(f"{effect}:")
            for change in group:
                what = f"{change.part} {change.key}".rstrip()
                if change.key == "" and change.old is None:
                    click.echo(f"  + {what}: {yaml_document.inline(change.new)}")
                elif change.key == "" and change.new is None:
                    click.echo(f"  - {what}: {yaml_document.inline(change.old)}")
                else:
                    old, new = yaml_document.inline(change.old), yaml_document.inline(change.new)
                    click.echo(f"  ~ {what}: {old} -> {new}")
        if not changes:
            click.echo("the same")
    if changes:
        ctx.exit(DIFFERENT)
