"""What only a training library knows: epoch, evaluation, checkpoints, how long the run will be.

An adapter stands beside functions that the library calls anyway, and tells the collector `library`
what passes by. One file per library; none is read before the job imports the library. Everything
that the probe measures itself comes from torch, with or without an adapter.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any, Callable, Tuple

from ..checkpoints import save_hooks
from ..runtime.guard import describe
from ..runtime.warning_stacklevel import uncounted

if TYPE_CHECKING:
    from ..probe import Probe

Listener = Callable[..., None]


def listen(probe: Probe, library: Any) -> None:
    """Hear what this module, which has just been imported, will do. Says so if it cannot."""
    from . import fsdp, lightning, pipelining, transformers

    adapters = {
        "transformers": transformers.listen,
        "lightning": lightning.listen,
        "pytorch_lightning": lightning.listen,
        "safetensors": save_hooks.listen,
        "torch.distributed.checkpoint.state_dict_saver": save_hooks.listen,
        "torch.distributed.fsdp.fully_sharded_data_parallel": fsdp.listen,
        "torch.distributed.pipelining.stage": pipelining.listen,
    }
    name = library.__name__
    try:
        adapters[name if name in adapters else name.partition(".")[0]](probe, library)
    except Exception as error:  # a version that is made differently: nothing was replaced
        probe.guard.switch_off(probe.guard.part("library"), f"{name}: {describe(error)}")


def beside(
    probe: Probe, original: Callable[..., Any], heard: Listener, name: str = "library"
) -> Callable[..., Any]:
    """Return a function that calls `heard` with the same arguments, and then `original`.

    Args:
        name: of the part of the probe whose numbers are wrong if `heard` fails.
    """
    part = probe.guard.part(name)

    def hear(args: Any, kwargs: Any) -> None:
        heard(*args, **kwargs)

    @functools.wraps(original)
    @uncounted
    def call(*args: Any, **kwargs: Any) -> Any:
        if not probe.off_duty():
            probe.guard.run(part, hear, args, kwargs)
        return original(*args, **kwargs)

    return call


def around_save(
    probe: Probe,
    original: Callable[..., Any],
    what: Callable[..., Tuple[str, int]],
) -> Callable[..., Any]:
    """Return a function that saves a checkpoint in the phase of that name, and tells of it.

    Args:
        what: given the same arguments once it is saved, returns its path and the library's count of
            steps; an empty path where another rank speaks of it.
    """

    def saved(seconds: float, args: Any, kwargs: Any) -> None:
        probe.collectors["library"].saved(seconds)
        path, step = what(*args, **kwargs)
        if path:
            path = os.path.abspath(path)
            told = {"path": path, "step": step, **save_hooks.about(probe, seconds, "its library")}
            probe.notice("checkpoint-saved", f"step {step} was saved in {path}", told)

    return save_hooks.in_phase(probe, original, probe.guard.part("library"), saved)
