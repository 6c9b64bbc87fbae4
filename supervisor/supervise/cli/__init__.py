"""The command line: related commands share a module, which is imported when it is used.

`supervise [OPTIONS] -- COMMAND` is short for `supervise run [OPTIONS] -- COMMAND`. Errors are
printed here and nowhere else: one line with the cause, one with the next thing to try.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import click

from .. import __version__, system
from ..core.model.formats import printable
from ..errors import SuperviseError, UsageError
from . import _streams
from ._params import ARGV, PROGRAM, RESUMING, missing_dashes

OPERATOR_COMMANDS = (
    *(
        "approve",
        "deny",
        "ack",
        "silence",
        "plan",
        "release",
        "pause",
        "resume",
        "savepoint",
        "save",
    ),
    *("rollback", "lr", "skip", "quarantine", "stop"),
)
SECTIONS = {
    "Start": ("init", "run", "adopt", "doctor", "demo"),
    "Inspect a run": (
        *("runs", "status", "web", "events", "why", "why-not", "triage", "checkpoints"),
        "checkpoint",
        *("export", "audit", "record", "replay", "outbox", "gc"),
    ),
    "Operate a run": (*OPERATOR_COMMANDS, "reload"),
    "Training data": ("data",),
    "Policies and metrics": (
        "policy",
        "notify",
        "runbook",
        "drill",
        "backtest",
        "canary",
        "metrics",
    ),
    "Your shell": ("completion",),
}
ENDED_BY_HAND = ("events", "web")  # by Ctrl-C
COMMANDS = tuple(name for names in SECTIONS.values() for name in names)
# The module of a command that shares one with others; any other has a module of its own name.
MODULES = {
    **dict.fromkeys(("audit", "events", "replay"), "events"),
    **dict.fromkeys(("runs", "gc", "checkpoints", "checkpoint"), "runs"),
    **dict.fromkeys(("notify", "outbox"), "notify"),
    **dict.fromkeys(("why", "why-not", "triage"), "why"),
    **dict.fromkeys(("record", "export"), "record"),
    **dict.fromkeys(("init", "doctor"), "doctor"),
    **dict.fromkeys(("metrics", "runbook", "completion"), "reference"),
    "policy": "policy_commands",
    "reload": "operate",
    "demo": "drill",
}


class _UnwritableError(Exception):
    """Standard output cannot be written; click would end with 1 for a closed pipe."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def _mark_output_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # a file, not a stream
            raise
        raise _UnwritableError(error) from error


class Commands(click.Group):
    """Imports a command when it is used, so that a job does not wait for all of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        attribute = f"{name.replace('-', '_')}_command"
        if name in OPERATOR_COMMANDS:
            command: click.Command = import_module(f"{__name__}.operate").commands[name]
        else:
            module = import_module(f"{__name__}.{MODULES.get(name, name)}")
            command = getattr(module, attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by what they are for."""
        width = formatter.width - max(map(len, COMMANDS)) - 6
        for title, names in SECTIONS.items():
            commands = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name, cmd.get_short_help_str(width)) for name, cmd in commands if cmd]
                )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete a first option as one of `run`, which may be left out."""
        completions: list[Any] = super().shell_complete(ctx, incomplete)
        run = self.get_command(ctx, "run")
        if incomplete.startswith("-") and run is not None:
            completions += run.shell_complete(ctx, incomplete)
        return completions

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the command line; help and version are printed here."""
        extra.setdefault("color", False if os.environ.get("NO_COLOR") else None)
        with _mark_output_errors():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            with _mark_output_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            if ctx.invoked_subcommand not in ENDED_BY_HAND:
                argv = ctx.meta.get(RESUMING, ctx.meta[ARGV])
                text = f"supervise: interrupted; next: {shlex.join([PROGRAM, *argv])}"
                click.echo(f"\n{printable(text)}", err=True)
            raise click.Abort from None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Pass leading options to `run`; never start what is not a command of ours."""
        ctx.meta[ARGV] = list(args)
        leading = args[0] if args else ""
        if leading.startswith("-") and leading not in ("--help", "-h", "--version"):
            args = ["run", *args]
        elif args and leading not in (*COMMANDS, "--help", "-h", "--version"):
            near = difflib.get_close_matches(leading, COMMANDS, n=1, cutoff=0.7)
            if near:
                suggestion = shlex.join([PROGRAM, near[0], *args[1:]])
                raise UsageError(f"no command {leading!r}", hint=f"did you mean: {suggestion}")
            raise missing_dashes(args[args.index("--") + 1 :] if "--" in args[:-1] else args)
        return super().parse_args(ctx, args)


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`supervise --policy P -- CMD` is short for `supervise run --policy P -- CMD`. "
    "`supervise COMMAND --help` shows examples and exit codes.",
)
@click.version_option(__version__, prog_name=PROGRAM)
def group() -> None:
    """Watch a training run, act on it by a policy, and keep an audit log.

    \b
    Examples:
      supervise --policy nano -- python train.py
      supervise --policy large -- torchrun --nproc-per-node 8 train.py
    """


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its documented code."""
    _streams.replace_standard_streams()
    try:
        code = invoke(argv)
    except Exception:
        traceback.print_exc()
        code = SuperviseError.exit_code  # 1 is a verdict of many commands
    _streams.exit_process(code)


def invoke(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        code = group.main(args=argv, prog_name=PROGRAM, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SuperviseError as error:
        _print_error(error)
        return error.exit_code
    except click.Abort:
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return UsageError.exit_code
    except click.ClickException as error:
        _print_error(_of_click(error))
        return UsageError.exit_code
    except _UnwritableError as error:
        return _streams.report_unwritable_stdout(error.reason)


def _of_click(error: click.ClickException) -> UsageError:
    """Return a mistake that click found in the style of all others."""
    text = error.format_message()
    context = getattr(error, "ctx", None)
    hint = None if context is None else f"{context.command_path} --help"
    return UsageError(text[:1].lower() + text[1:], hint=hint)


def _print_error(error: SuperviseError) -> None:
    render = getattr(error, "render", None)
    text = f"supervise: {error if render is None else render()}"
    if render is None and error.hint:
        text += f"\n    {'' if error.hint.startswith('did you') else 'try: '}{error.hint}"
    text = text.encode("utf-8", "backslashreplace").decode()  # it may quote what is no Unicode
    width = 0 if render is not None else system.terminal_columns(sys.stderr)
    for line in printable(text, keep="\n").split("\n"):
        click.echo("\n".join(system.wrap(line, width)), err=True)
