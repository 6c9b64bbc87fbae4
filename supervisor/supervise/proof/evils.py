"""What a scenario does to the run, or to its supervisor (`inject` in the form)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..catalog.scenario import InjectForm
from ..core.model.events import Exited, Noticed, Told

if TYPE_CHECKING:
    from .scenario import Player

SECOND = 1_000_000_000  # ns
FOREVER = 1 << 60


def inflict(player: Player, evil: InjectForm) -> None:
    """Do it, before the frame that comes."""
    until = FOREVER if evil.for_ is None else player.slot + evil.for_
    if evil.gap is not None:
        player.lost = evil.gap
    for name in evil.nan or ():
        player.nan[name] = player.slot + (evil.for_ or 1)
    if evil.clock_jump is not None:
        player.now += round(evil.clock_jump * SECOND)
    if evil.phase is not None:
        player.phase, player.phase_until = evil.phase, until
    if evil.fail_action is not None:
        player.failing[evil.fail_action, False] = evil.count
    if evil.lose_action is not None:
        player.failing[evil.lose_action, True] = evil.count
    if evil.crash_after is not None:
        player.crash = evil.crash_after
    if evil.silent_rank is not None:
        player.silent[evil.silent_rank] = until
    if evil.step is not None:
        player.job.next_step = evil.step
    if evil.checkpoint is not None:
        _checkpoint(player, evil.checkpoint)
    if evil.probe_restart:
        player.pid += 1000
        player.announce()
    if evil.told is not None:
        player.send(Told(player.now, "operator", evil.told, evil.args or {}))
    if evil.notice is not None:
        player.send(Noticed(player.now, evil.notice, f"{evil.notice}, on purpose"))
    if evil.exit is not None:
        player.job.returncode = evil.exit
        player.send(Exited(player.now, evil.exit))


def _checkpoint(player: Player, step: int) -> None:
    """The guard verified a checkpoint of this step."""
    name = f"ckpt-{step}"
    data = {"id": name, "step": step, "attempt": player.job.attempt, "path": name, "ok": True}
    player.send(Noticed(player.now, "checkpoint", f"{name} was verified", data=data))
