"""The probe: what runs inside the training job.

A job that is not supervised can import this package and call it; nothing happens then. Under
`supervise`, this name leads to the probe that is already in the process.

    import supervise_probe

    supervise_probe.report(val_loss=val_loss)  # joins the next step's frame
    supervise_probe.shard("web-00017.tar", 4096)  # where the next batch comes from
    if supervise_probe.is_quarantined("web-00017.tar"):  # the run must not train on it again
        continue
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_quarantined", "report", "shard"]

_probe: Any = None


def report(**values: Any) -> None:
    """Let numbers join the frame of the step under way; without a supervisor, do nothing.

    Args:
        values: name -> a number or a one-element tensor; None is as good as not reported. What is
            neither is left out, as is a name with blanks, and said so once. Names that the probe
            measures itself are left as measured, but for `tokens_per_update`, which the job may
            know better. A frame has room for 64 names in all, whichever come first.
    """
    if _probe is not None:
        _probe.report(values)


def shard(name: Any, offset: Any = None) -> None:
    """Say which shard the next batch comes from; without a supervisor, do nothing.

    To be called by the thread that trains, once for each micro-batch or each shard in it: all calls
    between two steps belong to the second. A DataLoader's dataset may call it too, if it has no
    workers; those of a worker have no effect. A job need not call it where its batches are dicts
    with one of the keys `__shard__`, `shard`, `shard_id`, `__url__` (and for the offset `offset`,
    `index`, `__key__`), or its dataset has an attribute `current_shard` or `shard_name` (and
    `current_offset`, `shard_offset`) and is read without workers.

    Args:
        name: of the shard, such as its path; a URL is kept without its query. At most 200
            characters, of a longer one the last.
        offset: where in the shard the batch begins: a whole number in whatever unit, or a key.
    """
    if _probe is not None:
        _probe.shard(name, offset)


def is_quarantined(name: Any) -> bool:
    """Return whether a shard is in quarantine, so that a dataset leaves it out; else False.

    To be asked before a shard is opened, in any thread, and in a worker of a DataLoader too. A
    dataset that leaves out what is listed must have something left: whether all is in quarantine,
    only it can see.

    Args:
        name: of the shard, written as `shard`, the batch or the dataset gives it.
    """
    return _probe is not None and bool(_probe.is_quarantined(name))


def install_probe(torch: Any, path: str) -> None:
    """Watch this process as the file `path` (probe.json) says. Called when torch is imported.

    Raises:
        OSError, ValueError: the file is no good.
        AttributeError: this torch has no place to watch.
    """
    global _probe
    if _probe is None:
        from .context import read_config
        from .probe import Probe

        probe = Probe(torch, read_config(path))
        probe.install()
        _probe = probe


def listen(library: Any) -> None:
    """Hear what a training library knows. Called when this module of it is imported."""
    if _probe is not None:
        _probe.listen(library)


def record_exit_error(marks: str, status: Any, frames: Any) -> None:
    """Record the error that ends this process. Called at its exit, if there is one.

    Args:
        marks: directory of the record. status, frames: what `sys.exit` was given, and where.
    """
    from .runtime import failure

    failure.record_end(status, frames, marks=marks)
