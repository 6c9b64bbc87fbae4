"""The probe: what runs inside the training job.

A job that is not supervised can import this package and call it; nothing happens then. Under
`supervise`, this name leads to the probe that is already in the process.

    import supervise_probe

    supervise_probe.report(val_loss=val_loss)  # joins the next step's frame
"""

from __future__ import annotations

from typing import Any

__all__ = ["report"]

_probe: Any = None


def report(**values: Any) -> None:
    """Let numbers join the frame of the step under way; without a supervisor, do nothing.

    Args:
        values: name -> a number or a one-element tensor. Names that the probe measures itself are
            left as measured, but for `tokens_per_update`, which the job may know better. A frame
            has room for 64 names in all, whichever come first.
    """
    if _probe is not None:
        from .reporting import take

        _probe.guard.run(_probe.reporting, take, _probe, values)


def arm(torch: Any, path: str) -> None:
    """Watch this process as the file `path` (probe.json) says. Called when torch is imported.

    Raises:
        OSError, ValueError: the file is no good.
        AttributeError: this torch has no place to watch.
    """
    global _probe
    if _probe is None:
        from .config import load
        from .probe import Probe

        probe = Probe(torch, load(path))
        probe.install()
        _probe = probe
