"""Commands that are given a job's command line: it stands behind `--`, or nothing is started.

A word that is no subcommand may be a slip, and what it names a program that does harm. So nothing
is taken for a job that is not marked as one.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

import click

from ..errors import UsageError

PROGRAM = "supervise"


class JobCommand(click.Command):
    """A click command whose last argument is the job's command line."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse a job's command line that does not stand behind `--`."""
        given, _, _ = self.make_parser(ctx).parse_args(list(args))
        job = given["argv"] if isinstance(given.get("argv"), tuple) else ()
        own = args[: len(args) - len(job)]
        if job and own[-1:] != ["--"] and set(own).isdisjoint(ctx.help_option_names):
            raise refusal(job, [*ctx.command_path.split()[1:], *own])
        return super().parse_args(ctx, args)


def refusal(job: Sequence[str], before: Sequence[str] = ()) -> UsageError:
    """Return the error for the job's words that do not stand behind `--`.

    Args:
        before: our own words before them.
    """
    script = job[0].endswith(".py") and not os.access(job[0], os.X_OK)
    meant = [PROGRAM, *before, "--", *(["python"] if script else []), *job]
    if before[:1] == ["run"]:
        meant.remove("run")
    return UsageError(
        f"{job[0]!r} is no option and no command of supervise; a job stands behind `--`",
        hint=f"did you mean: {shlex.join(meant)}",
    )
