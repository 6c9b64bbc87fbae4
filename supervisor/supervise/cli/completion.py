"""`supervise completion`: the script that lets a shell complete our command line."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ._params import PROGRAM

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_SUPERVISE_COMPLETE"


@click.command(name="completion")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print a script that completes commands, options and runs in your shell.

    What follows `--` is the job's command and is not completed.

    \b
    Examples:
      supervise completion bash > ~/.local/share/bash-completion/completions/supervise
      supervise completion zsh > "${fpath[1]}/_supervise"
      supervise completion fish > ~/.config/fish/completions/supervise.fish

    Exit codes: 0; 64 no such shell.
    """
    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(ctx.find_root().command, {}, PROGRAM, VARIABLE).source())
