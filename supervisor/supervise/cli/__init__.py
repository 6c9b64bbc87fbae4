"""The command line: one command per file; what people say to a run is in operator_commands.py.

`supervise [OPTIONS] -- COMMAND` is short for `supervise run [OPTIONS] -- COMMAND`. Errors are
printed here and nowhere else: one line with the cause, one with the next thing to try.
"""

from __future__ import annotations

import difflib
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import click

from .. import __version__
from ..errors import SuperviseError, UsageError
from . import _streams
from ._job import PROGRAM, refusal

WORDS = (
    *("pause", "resume", "approve", "deny", "ack", "silence", "lr", "rollback", "savepoint"),
    *("skip", "quarantine", "release", "stop"),
)
COMMANDS = (
    "run",
    "adopt",
    "status",
    "checkpoints",
    "why",
    "why-not",
    "reload",
    "outbox",
    *WORDS,
    "audit",
    "replay",
    "policy",
    "backtest",
    "export",
    "doctor",
    "metrics",
    "demo",
)


class _UnwritableError(Exception):
    """Standard output cannot be written; click would end with 1 for a closed pipe."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def _printing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # it is about a file
            raise
        raise _UnwritableError(error) from error


class Commands(click.Group):
    """Loads a command when it is asked for, so that a job is not kept waiting for all of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        if name in WORDS:
            word: click.Command = import_module(f"{__name__}.operator_commands").commands[name]
            return word
        module = name.replace("-", "_")
        command: click.Command = import_module(f"{__name__}.{module}").command
        return command

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Begin, with the help and the version that were asked for."""
        with _printing():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _printing():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take options for those of `run`; a word that is no command of ours is never started."""
        first = args[0] if args else ""
        if first.startswith("-") and first not in ("--help", "-h", "--version"):
            args = ["run", *args]
        elif args and first not in (*COMMANDS, "--help", "-h", "--version"):
            near = difflib.get_close_matches(first, COMMANDS, n=1, cutoff=0.7)
            if near:
                meant = shlex.join([PROGRAM, near[0], *args[1:]])
                raise UsageError(f"no command {first!r}", hint=f"did you mean: {meant}")
            raise refusal(args[args.index("--") + 1 :] if "--" in args[:-1] else args)
        return super().parse_args(ctx, args)


@click.command(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`supervise --policy P -- CMD` is short for `supervise run --policy P -- CMD`.",
)
@click.version_option(__version__, prog_name=PROGRAM)
def group() -> None:
    """Keep a training run alive, stable and accountable.

    \b
    Examples:
      supervise --policy nano -- python train.py
      supervise -- torchrun --nproc-per-node 8 train.py
    """


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its documented code."""
    _streams.take_over()
    try:
        code = invoke(argv)
    except Exception:
        traceback.print_exc()
        code = 1
    _streams.leave(code)


def invoke(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    try:
        code = group.main(args=argv, prog_name=PROGRAM, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SuperviseError as error:
        _explain(error)
        return error.exit_code
    except click.Abort:
        return 130
    except click.ClickException as error:
        error.show()
        return UsageError.exit_code
    except _UnwritableError as error:
        return _streams.unwritable(error.reason)


def _explain(error: SuperviseError) -> None:
    render = getattr(error, "render", None)
    if render is not None:
        _say(f"supervise: {render()}")
        return
    _say(f"supervise: {error}")
    if error.hint:
        _say(f"    {'' if error.hint.startswith('did you') else 'try: '}{error.hint}")


def _say(text: str) -> None:
    """Print a line to stderr, also one that quotes what is no Unicode."""
    click.echo(text.encode("utf-8", "backslashreplace").decode(), err=True)
