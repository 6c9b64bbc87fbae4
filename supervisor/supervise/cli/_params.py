"""Parameter types of the commands: finite numbers, and a job's command line after `--`."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import UsageError

if TYPE_CHECKING:
    from ..core.model.payload import Payload
    from ..runtime.launcher import Launch
    from ..store.run_directory import Endpoint

PROGRAM = "supervise"
ARGV = "supervise.argv"  # key of `click.Context.meta`: the command line, to show it again
RESUMING = "supervise.resuming"  # another key: the one that goes on after an interrupt
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Options:
    """Options of `supervise run` that the watching needs.

    Attributes:
        watch_policy: reload the policy file when it is edited.
        logs: keep what the job prints.
        metrics: where the numbers of the run are served; None: nowhere.
        previous: directory of the run that this one follows, None: it follows none.
        quiet: only errors, and messages of SEV0, are printed.
        cites: what the record cites of trials, see `trial_runs.cite_trial`.
        launch: the first one, from a checkpoint of the run before; None: it begins at step 0.
    """

    watch_policy: bool = False
    logs: bool = False
    metrics: Endpoint | None = None
    previous: Path | None = None
    quiet: bool = False
    cites: tuple[Payload, ...] = ()
    launch: Launch | None = None


class Number(click.FloatRange):
    """A finite number, within bounds if there are any.

    click's own types accept nan and inf, and a range accepts nan.
    """

    def describe(self) -> str:
        """Return "a number at least 0 and at most 100"."""
        bounds = []
        if self.min is not None:
            bounds.append(f"{'above' if self.min_open else 'at least'} {self.min:g}")
        if self.max is not None:
            bounds.append(f"{'below' if self.max_open else 'at most'} {self.max:g}")
        return f"a number {' and '.join(bounds)}" if bounds else "a finite number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number. Raises click.BadParameter."""
        try:
            number: float = super().convert(value, param, ctx)
        except click.BadParameter:
            number = math.nan
        if not math.isfinite(number):
            self.fail(f"{value!r} is not {self.describe()}.", param, ctx)
        return number


def parse_duration(text: str) -> float:
    """Return a time with its unit, `90m` or `30d`, in seconds. Raises click.BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a time with a unit, such as 12h or 30d.")
    return float(match[1]) * UNITS_S[match[2]]


class JobCommand(click.Command):
    """A command whose last argument is the job's command line, after `--`.

    Without `--` nothing is started: a mistyped subcommand could be the name of a program that does
    harm.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Refuse a job's command line that does not follow `--`."""
        parsed, _, _ = self.make_parser(ctx).parse_args(list(args))
        job = parsed["argv"] if isinstance(parsed.get("argv"), tuple) else ()
        options = args[: len(args) - len(job)]
        if job and options[-1:] != ["--"] and set(options).isdisjoint(ctx.help_option_names):
            raise missing_dashes(job, [*ctx.command_path.split()[1:], *options])
        return super().parse_args(ctx, args)


def missing_dashes(job: Sequence[str], prefix: Sequence[str] = ()) -> UsageError:
    """Return the error for a job's command line without `--`; `before`: our own arguments."""
    script = job[0].endswith(".py") and not os.access(job[0], os.X_OK)
    command = [PROGRAM, *prefix, "--", *(["python"] if script else []), *job]
    if prefix[:1] == ["run"]:
        command.remove("run")
    return UsageError(
        f"{job[0]!r} is neither a command nor an option of supervise; put the job after `--`",
        hint=f"did you mean: {shlex.join(command)}",
    )
