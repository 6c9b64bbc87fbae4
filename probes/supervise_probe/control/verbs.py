"""Who carries out the verbs that `commands.py` does not; one line each.

They begin when the process becomes a rank. An order that was to be used by then, and was not, is
told here too, and one that is still in force from the launch before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..checkpoints.on_demand import OnDemand
from ..savepoints.controller import Rollbacks

if TYPE_CHECKING:
    from ..probe import Probe


def start(probe: Probe) -> None:
    """Make them, and let the commands know them."""
    probe.rollbacks = probe.commands.also(Rollbacks(probe))
    probe.commands.also(probe.collectors["quarantine"])
    probe.on_demand = probe.commands.also(OnDemand(probe))
    probe.commands.also(probe.sampling)
    probe.tools.obey(probe.commands)
    probe.collectors["library"].resume.opened()
    if probe.rate.held.now != 1.0:
        scale = probe.rate.held.now
        probe.notice("note", f"the learning rate is still multiplied by {scale:g}, as asked before")
