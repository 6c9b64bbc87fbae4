"""`supervise reference`: the curve of runs that went well, as a detector for a policy."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import InputError, UsageError
from ._number import Number

KINDS = ("band", "collapse")


@click.command(name="reference")
@click.argument(
    "runs",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    metavar="RUN_OR_FILE...",
)
@click.option("--metric", required=True, metavar="M", help="Id of the metric, as in a policy.")
@click.option("--kind", type=click.Choice(KINDS), default="band", show_default=True)
@click.option("--every", type=click.IntRange(1), metavar="N", help="Steps between two knots.")
@click.option(
    "--smooth",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="Samples the detector will take the mean of; 20 for band, 100 for collapse.",
)
@click.option("--log", is_flag=True, help="Compare logs: for what varies by factors. Band only.")
@click.option(
    "--total-steps",
    type=click.IntRange(2),
    metavar="N",
    help="Steps of the whole training; the longest run when left out. Collapse only.",
)
@click.option(
    "--align",
    nargs=2,
    type=Number(),
    metavar="A B",
    help="Fractions of training that give the scale; 0.25 0.5 when left out. Collapse only.",
)
def command(
    runs: tuple[Path, ...],
    metric: str,
    kind: str,
    every: int | None,
    smooth: int | None,
    log: bool,
    total_steps: int | None,
    align: tuple[float, float] | None,
) -> None:
    """Print a detector whose curve is that of recorded runs, to be pasted into a policy.

    `band` is held against the level at each step, `collapse` against the loss divided by its final
    value at each fraction of training. Several runs of the same recipe widen the spread by how much
    they differ. Reads run directories (rank 0, without the steps that a rollback took back) and the
    files that a back-test reads.

    \b
    Examples:
      supervise reference runs/20260105-101112-7f3a9c --metric train_loss_raw
      supervise reference a.csv b.csv --metric train_loss_raw --kind collapse --total-steps 20000
    """
    # Here, not above: detectors and readers are not needed by the other commands.
    from . import _reference as reference

    wrong = {
        "--log": log and kind != "band",
        "--total-steps": total_steps is not None and kind != "collapse",
        "--align": align is not None and kind != "collapse",
    }
    for option, misplaced in wrong.items():
        if misplaced:
            other = "collapse" if kind == "band" else "band"
            raise UsageError(f"{option} is not for {kind}", hint=f"add --kind {other}")
    first, last = align or (0.25, 0.5)
    if not 0.0 <= first < last < 1.0:
        raise UsageError(f"--align {first:g} {last:g}: two fractions below 1, ascending")
    read = [series for path in runs for series in reference.read(path, metric)]
    at = reference.grid(read, every)
    if kind == "band":
        smooth = smooth or 20
        knots = reference.band(read, at, smooth, log)
        keys = {"smooth": str(smooth), **({"transform": "log"} if log else {})}
    else:
        smooth = smooth or 100
        total = total_steps or max(series.steps[-1] for series in read) + 1
        knots = reference.collapse(read, at, smooth, total, (first, last))
        keys = {"total_steps": str(total), "smooth": str(smooth), "align": f"[{first}, {last}]"}
    _refuse(kind, metric, keys, knots)
    names = ", ".join(series.name for series in read)
    click.echo(f"# {metric} of {len(read)} run{'s' * (len(read) > 1)}: {names}")
    if len(read) == 1:
        click.echo("# One run cannot tell how much runs differ: give several, or widen `width`.")
    click.echo(f"{metric.replace('.', '_')}_{kind}:\n  kind: {kind}\n  metric: {metric}")
    for key, value in keys.items():
        click.echo(f"  {key}: {value}")
    click.echo("  knots:")
    for step, level, spread in knots:
        at_step = f"{step:.0f}" if kind == "band" else f"{step!r}"
        click.echo(f"    - [{at_step}, {level!r}, {spread!r}]")


def _refuse(kind: str, metric: str, keys: dict[str, str], knots: list[tuple[float, ...]]) -> None:
    """Let the detector itself say whether it can work with these knots."""
    from ..detectors.band import Band
    from ..detectors.collapse import Collapse

    made = tuple((knot[0], knot[1], knot[2]) for knot in knots)
    detector: Band | Collapse
    if kind == "band":
        transform = "log" if "transform" in keys else "none"
        detector = Band(metric, made, transform=transform, smooth=int(keys["smooth"]))  # type: ignore[arg-type]
    else:
        first, last = keys["align"].strip("[]").split(", ")
        detector = Collapse(
            metric, made, int(keys["total_steps"]), align=(float(first), float(last))
        )
    for key, flaw in detector.check():
        hint = "use a larger --every" if "512" in flaw else "give longer runs, or --total-steps"
        raise InputError(f"no {kind} from these runs: {key} {flaw}", hint=hint)
