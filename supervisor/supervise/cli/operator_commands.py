"""What a person may say to a running supervisor: one command a word, each with its own help.

Every word is on record with the name of who said it. RUN may be left out while exactly one run
under ./runs has a supervisor. Exit status: 0 done, or accepted and under way; 1 refused, or failed;
64 wrong usage, or no run with a supervisor; 75 no answer within 15 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ._number import Number
from ._send_command import REFUSED, missing, speak, split

STATUS = (
    "Exit status: 0 done or under way, 1 refused or failed, 64 wrong usage or no run with a "
    "supervisor, 75 no answer within 15 s."
)
RATE = Number(0.0, 1.0, min_open=True)
UPDATES = 3  # skipped by one word at most, as many as the action allows
commands: dict[str, click.Command] = {}


def _word(
    metavar: str = "[RUN]",
    *options: Callable[[Any], Any],
    cls: type[click.Command] = click.Command,
) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a command of a function, with `--by` and a list of arguments that may begin with RUN."""

    def made(function: Callable[..., Any]) -> click.Command:
        by = click.option("--by", metavar="NAME", help="Who says so; your login by default.")
        given = click.argument("given", nargs=-1, metavar=metavar)
        for decorate in (given, by, *reversed(options)):
            function = decorate(function)
        command = click.command(name=function.__name__, epilog=STATUS, cls=cls)(function)
        commands[function.__name__] = command
        return command

    return made


@_word()
def pause(given: tuple[str, ...], by: str | None) -> int:
    """Hold the job at its next step boundary; `supervise resume` lets it go on.

    The pause ends by itself after a day, or 60 s after the supervisor died.

    \b
    Examples:
      supervise pause runs/20260105-101112-7f3a9c
      supervise pause --by anna
    """
    run, _ = split(given, 0, 0)
    return speak(run, "pause", by, {})


@_word()
def resume(given: tuple[str, ...], by: str | None) -> int:
    """Let a paused job go on. While an action is under way, it waits for its end.

    \b
    Examples:
      supervise resume runs/20260105-101112-7f3a9c
    """
    run, _ = split(given, 0, 0)
    return speak(run, "resume", by, {})


@_word("[RUN] ID", click.option("--sha", metavar="HEX", help="What you were shown begins so."))
def approve(given: tuple[str, ...], by: str | None, sha: str | None) -> int:
    """Let the runbook run that request ID asks for.

    The yes holds for the verbs and arguments that were told and the policy of then. When any of
    them is another one by now, the request is void and a new one is made.

    \b
    Examples:
      supervise approve ask-1
      supervise approve --sha 3f9a runs/20260105-101112-7f3a9c ask-1
    """
    run, (name,) = split(given, 1, 1)
    return speak(run, "approve", by, {"id": name} | ({"sha": sha} if sha else {}))


@_word("[RUN] ID")
def deny(given: tuple[str, ...], by: str | None) -> int:
    """Do not let it run. The incident is held until `supervise release`.

    \b
    Examples:
      supervise deny --by anna runs/20260105-101112-7f3a9c ask-1
    """
    run, (name,) = split(given, 1, 1)
    return speak(run, "deny", by, {"id": name})


@_word("[RUN]", click.option("--incident", metavar="ID", help="The open one by default."))
def ack(given: tuple[str, ...], by: str | None, incident: str | None) -> int:
    """Say that you look after the open incident: its reminders stop.

    \b
    Examples:
      supervise ack runs/20260105-101112-7f3a9c
    """
    run, _ = split(given, 0, 0)
    return speak(run, "ack", by, {"incident": incident} if incident else {})


@_word(
    "[RUN] RULE",
    click.option(
        "--for",
        "steps",
        type=click.IntRange(min=0),
        default=1000,
        show_default=True,
        metavar="STEPS",
        help="For how long; 0 ends it.",
    ),
)
def silence(given: tuple[str, ...], by: str | None, steps: int) -> int:
    """Let a rule neither act nor tell for a while; what it sees stays on record.

    A rule of SEV0 is never silenced.

    \b
    Examples:
      supervise silence loss_spike.spike --for 500
      supervise silence loss_spike.spike --for 0
    """
    run, (rule,) = split(given, 1, 1)
    return speak(run, "silence", by, {"rule": rule, "for": steps})


class _Rate(click.Command):
    """A number below 0 looks like an option; it is told of as the number that it is."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name[1:2] not in tuple(".0123456789"):
                raise
            _rate(next(each for each in given if each.startswith(error.option_name)))
            raise


def _rate(value: str) -> float:
    try:
        return RATE.convert(value, None, None)
    except click.BadParameter as error:
        error.param_hint = "VALUE"
        raise


@_word(
    "[RUN] VALUE",
    click.option(
        "--rewarm",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        metavar="STEPS",
        help="Back at 1.0 after so many steps; 0 stays.",
    ),
    cls=_Rate,
)
def lr(given: tuple[str, ...], by: str | None, rewarm: int) -> int:
    """Multiply the learning rate that the job asks for by VALUE; 1.0 takes it back.

    VALUE is above 0 and at most 1.

    \b
    Examples:
      supervise lr 0.5 --rewarm 200
      supervise lr --by anna runs/20260105-101112-7f3a9c 1.0
    """
    run, (value,) = split(given, 1, 1)
    return speak(run, "lr", by, {"value": _rate(value), "rewarm": rewarm})


@_word(
    "[RUN]",
    click.option(
        "--before",
        type=click.IntRange(min=1),
        metavar="STEP",
        help="To a savepoint from before this step; the newest one by default.",
    ),
)
def rollback(given: tuple[str, ...], by: str | None, before: int | None) -> int:
    """Take evidence, then restore a savepoint inside the job's process.

    Needs savepoints, which a run has that was started with `mode: enforce` or `approve`.

    \b
    Examples:
      supervise rollback runs/20260105-101112-7f3a9c
      supervise rollback --before 1200
    """
    run, _ = split(given, 0, 0)
    return speak(run, "rollback", by, {} if before is None else {"before": before})


@_word()
def savepoint(given: tuple[str, ...], by: str | None) -> int:
    """Keep the model's state in memory at the next step boundary, to be able to come back to it.

    \b
    Examples:
      supervise savepoint runs/20260105-101112-7f3a9c
    """
    run, _ = split(given, 0, 0)
    return speak(run, "savepoint", by, {})


@_word(
    "[RUN]",
    click.option(
        "--steps",
        type=click.IntRange(1, UPDATES),
        default=1,
        show_default=True,
        help=f"How many updates; at most {UPDATES} in any 128 steps.",
    ),
)
def skip(given: tuple[str, ...], by: str | None, steps: int) -> int:
    """Let the next updates pass without applying them.

    \b
    Examples:
      supervise skip --steps 3 runs/20260105-101112-7f3a9c
    """
    run, _ = split(given, 0, 0)
    return speak(run, "skip", by, {"steps": steps})


@_word("[RUN] SHARD...")
def quarantine(given: tuple[str, ...], by: str | None) -> int:
    """Let the job not train on these shards again; `supervise release --shard` lifts it.

    SHARD is a name as the job tells it, or asks `supervise_probe.is_quarantined` for it. The answer
    says so when this run has not named it so far.

    \b
    Examples:
      supervise quarantine data/00017.tar data/00018.tar
    """
    run, shards = split(given, 1, None)
    return speak(run, "quarantine", by, {"shards": shards})


@_word("[RUN]", click.option("--shard", multiple=True, metavar="NAME", help="Out of quarantine."))
def release(given: tuple[str, ...], by: str | None, shard: tuple[str, ...]) -> int:
    """End a hold: the supervisor may act again, beginning with a new warm-up.

    The incident is closed with your name in the audit log. A rule that is still in breach fires
    again. With --shard nothing but the quarantine of these shards ends.

    \b
    Examples:
      supervise release runs/20260105-101112-7f3a9c
      supervise release --shard data/00017.tar
    """
    run, _ = split(given, 0, 0)
    why = missing(run, shard)
    if why:
        click.echo(why, err=True)
        return REFUSED
    return speak(run, "release", by, {"shard": list(shard)} if shard else {})


@_word("[RUN]", click.option("--requeue", is_flag=True, help="Exit 75: running it again is safe."))
def stop(given: tuple[str, ...], by: str | None, requeue: bool) -> int:
    """End the job: interrupt at a step boundary, then TERM, then KILL.

    The supervisor then exits 78, or 75 with --requeue. While an action is under way, it waits for
    its end.

    \b
    Examples:
      supervise stop runs/20260105-101112-7f3a9c
    """
    run, _ = split(given, 0, 0)
    return speak(run, "stop", by, {"requeue": True} if requeue else {})
