"""`supervise drills`: the faults that `--drill` can inject."""

from __future__ import annotations

from typing import Any

import click

from ._output import document, print_table

HEADER = ("drill", "moves", "what it does")


@click.command(name="drills")
@click.argument("name", required=False, metavar="[NAME]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(name: str | None, as_json: bool) -> None:
    """List the faults that `--drill FAULT@STEP` injects, or explain one.

    A drill breaks your own job on purpose, at one step, to see what the policy does about it. A
    parameter goes before the step; `rank=K` strikes one rank only.

    \b
    Examples:
      supervise drills
      supervise drills lr_spike
      supervise --policy nano --drill lr_spike:factor=10,steps=5@150 -- python train.py

    Exit codes: 0; 64 no such fault.
    """
    from ..catalog.document.diagnostics import did_you_mean
    from ..catalog.inventory import drills
    from ..errors import UsageError

    found = {each["drill"]: each for each in drills.describe()}
    if name is not None and name not in found:
        raise UsageError(f"no fault {name!r}", hint=did_you_mean(name, found))
    if as_json:
        click.echo(document(list(found.values()) if name is None else found[name]))
    elif name is None:
        rows = [(each["drill"], each["moves"] or "-", each["does"]) for each in found.values()]
        print_table(rows, HEADER)
    else:
        print_table(_lines(found[name]))


def _lines(one: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("drill", one["drill"]), ("does", one["does"]), ("moves", one["moves"] or "-")]
    for name, about in one["parameters"].items():
        lines.append((name, f"{about['meaning']} (default {about['default']})"))
    given = ",".join(f"{name}={about['default']}" for name, about in one["parameters"].items())
    spelled = f"{one['drill']}:{given}@150" if given else f"{one['drill']}@150"
    return [*lines, ("use", f"supervise --policy nano --drill {spelled} -- COMMAND")]
