"""`supervise policy`: check, show, test and compare policies. One command per file."""

from __future__ import annotations

from importlib import import_module

import click

COMMANDS = ("check", "show", "schema", "test", "diff")


class PolicyCommands(click.Group):
    """Imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"{__name__}.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest a command for a mistyped name."""
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from ...catalog.diagnostics import did_you_mean
            from ...errors import UsageError

            raise UsageError(f"no command 'policy {args[0]}'", hint=did_you_mean(args[0], COMMANDS))
        return super().resolve_command(ctx, args)


@click.command(name="policy", cls=PolicyCommands)
def command() -> None:
    """Check, show, test and compare policies, packs and runbooks.

    \b
    Examples:
      supervise policy check my.yaml
      supervise policy test nano --coverage
      supervise policy diff nano my.yaml
    """
