"""`supervise drill`: the faults that `--drill` can inject, and a suite of them on a job."""

from __future__ import annotations

from typing import Any

import click

from . import _drill_suite
from ._output import document, print_table

HEADER = ("drill", "moves", "what it does")


@click.group(name="drill", no_args_is_help=True)
def command() -> None:
    """Try faults on a job: list them, or run a suite of them.

    One fault at a time is `supervise --policy P --drill FAULT@STEP -- COMMAND`.
    """


command.add_command(_drill_suite.command)


@command.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def list_(as_json: bool) -> None:
    """List the faults that `--drill FAULT@STEP` injects.

    A drill breaks your own job on purpose, at one step, to see what the policy does about it. A
    parameter goes before the step; `rank=K` strikes one rank only.

    \b
    Examples:
      supervise drill list
      supervise --policy nano --drill lr_spike:factor=10,steps=5@150 -- python train.py

    Exit codes: 0.
    """
    from ..catalog import discover

    found = discover.drill_facts()
    if as_json:
        click.echo(document(found))
    else:
        print_table([(one["drill"], one["moves"] or "-", one["does"]) for one in found], HEADER)


@command.command()
@click.argument("name", metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(name: str, as_json: bool) -> None:
    """Explain a fault and its parameters.

    \b
    Examples:
      supervise drill show lr_spike

    Exit codes: 0; 64 no such fault.
    """
    from ..catalog import discover
    from ..catalog.diagnostics import did_you_mean
    from ..errors import UsageError

    found = {each["drill"]: each for each in discover.drill_facts()}
    if name not in found:
        raise UsageError(f"no fault {name!r}", hint=did_you_mean(name, found))
    if as_json:
        click.echo(document(found[name]))
    else:
        print_table(_lines(found[name]))


def _lines(one: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("drill", one["drill"]), ("does", one["does"]), ("moves", one["moves"] or "-")]
    for name, about in one["parameters"].items():
        lines.append((name, f"{about['meaning']} (default {about['default']})"))
    given = ",".join(f"{name}={about['default']}" for name, about in one["parameters"].items())
    spelled = f"{one['drill']}:{given}@150" if given else f"{one['drill']}@150"
    return [*lines, ("use", f"supervise --policy nano --drill {spelled} -- COMMAND")]
